"""What a request to the server may say, and how its answer is put: the subset of the OpenAI API.

    order = Order(parse_json(body), is_chat, server)    every field read and checked
    choice = Choice(order, request, index, server)      a sequence of the answer
    choice.advance(), choice.part(...), choice.whole()

server.py does the rest: connections, threads, HTTP. openapi.json describes the same from outside.
"""
import json
import re
from collections import deque
from dataclasses import fields

import chat
from errors import ModelError, RequestError
from sampling import Sampling

DEPTH_LIMIT = 64  # of nested arrays and objects
MOST_CHOICES = 64  # sequences of one request
MOST_TOP_LOGPROBS, MOST_TOOLS = 20, 128

encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def error_object(error):
    """(HTTP status, body in the OpenAI shape) of a LeoneError."""
    is_model = isinstance(error, ModelError)
    status = getattr(error, "status", 400 if is_model else 500)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": None,
                              "code": "model_error" if is_model else kind, **vars(error)}}


# ---- JSON ------------------------------------------------------------------------------------


def parse_json(data):
    """The JSON object in `data`. RequestError unless it is plain: finite, shallow, UTF-8."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
        if depth(value) > DEPTH_LIMIT:
            raise ValueError(f"it is nested deeper than {DEPTH_LIMIT} levels")
        encode(value).encode()  # fails for NaN, for 1e999 and for lone surrogates
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not plain JSON: {chat.one_line(error)}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def unique(pairs):
    if len(value := dict(pairs)) < len(pairs):
        raise ValueError("an object has a name twice")
    return value


def depth(value):
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


# ---- what a request may say ------------------------------------------------------------------

KINDS = {bool: "true or false", int: "an integer", str: "text", list: "a list", dict: "an object"}

# What would change the answer and is not there, with the value that asks for nothing: refused,
# where a pretence would be worse.
REFUSED = {
    "response_format": {"type": "text"}, "functions": [], "function_call": "none", "audio": None,
    "modalities": ["text"], "web_search_options": None, "echo": False, "suffix": "", "best_of": 1,
    "grammar": "", "guided_json": None, "structured_outputs": None}
TEMPLATE_NAMES = {"messages", "tools", "template", "known", "self", "add_generation_prompt",
                  "bos_token", "eos_token"}  # not for chat_template_kwargs


def unsupported(param, message):
    return RequestError(message, code="unsupported_value", param=param)


class Order:
    """What a client asks for. Of its fields null is the same as absent, and unknown ones are
    ignored. Values of Sampling and lengths are left to the engine to check."""

    def __init__(self, body, is_chat, server):
        for name, harmless in REFUSED.items():
            if body.get(name) not in (None, harmless):
                raise unsupported(name, f"{name} is not supported here; leave it out")
        self.body, self.is_chat, get = body, is_chat, self.get
        get("model", str)  # any: there is only one
        self.session, self.salt = get("session", str), get("cache_salt", str, "")
        self.speculation = body.get("speculation")
        self.receipt = get("receipt", bool, False)
        if self.receipt and not server.receipt_key:
            raise unsupported("receipt", "this server signs none; start it with --receipt-key FILE")
        room = server.engine.queue_limit + server.engine.max_sessions
        most = 1 if self.session or self.receipt else min(MOST_CHOICES, room)
        self.n = get("n", int, 1)
        if not 1 <= self.n <= most:
            raise RequestError(f"n must be 1 to {most} here; with a session or a receipt it is 1, "
                               f"otherwise up to {MOST_CHOICES} and what --queue and --sessions "
                               "hold together", param="n")
        self.max_tokens = get("max_completion_tokens", int, get("max_tokens", int))
        self.ignore_eos = get("ignore_eos", bool, False)
        self.stream = get("stream", bool, False)
        self.include_usage = get("stream_options", dict, {}).get("include_usage") is True
        if is_chat:
            self.logprobs = get("logprobs", bool, False)
            self.top_logprobs = get("top_logprobs", int, 0, MOST_TOP_LOGPROBS)
            if self.top_logprobs and not self.logprobs:
                raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        else:
            top = get("logprobs", int, None, MOST_TOP_LOGPROBS)
            self.logprobs, self.top_logprobs = top is not None, top or 0
        self.sampling = self.read_sampling()
        self.tools, self.one_call, self.in_reasoning = None, False, False
        self.style = server.style if is_chat else chat.style_of(None)
        self.prompt = (self.read_chat if is_chat else self.read_prompt)(server)  # token ids

    def get(self, name, kind, default=None, most=None):
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
            raise RequestError(f"{name} must be {KINDS[kind]}", param=name)
        if most is not None and not 0 <= value <= most:
            raise RequestError(f"{name} must be 0 to {most}", param=name)
        return value

    def read_sampling(self):
        given = {field.name: self.body[field.name] for field in fields(Sampling)
                 if self.body.get(field.name) is not None}
        if isinstance(stop := given.get("stop"), str):
            given["stop"] = (stop,)
        if isinstance(bias := given.get("logit_bias"), dict):  # names in JSON are never integers
            given["logit_bias"] = {int(id) if re.fullmatch("[0-9]{1,10}", id) else id: value
                                   for id, value in bias.items()}
        return Sampling(**given).seeded()  # one seed for all choices

    def read_prompt(self, server):
        prompt, special = self.body.get("prompt"), self.get("special", bool, False)
        if isinstance(prompt, str):
            check_size([prompt], "prompt", server)
            return server.engine.tokenize(prompt, special)
        if isinstance(prompt, list) and bool in map(type, prompt):  # to Python, True is 1
            raise RequestError("the prompt must be text or token ids", param="prompt")
        return prompt

    def read_chat(self, server):
        self.tools, names = self.read_tools(), self.get("chat_template_kwargs", dict, {})
        self.one_call = not self.get("parallel_tool_calls", bool, True)
        if TEMPLATE_NAMES & names.keys():
            raise RequestError(f"chat_template_kwargs cannot set {', '.join(TEMPLATE_NAMES)}",
                               param="chat_template_kwargs")
        if effort := self.get("reasoning_effort", str):
            names = {"reasoning_effort": effort, **names}
        messages = chat.prepare_messages(self.body.get("messages"), self.style)
        check_size([message["content"] or "" for message in messages], "messages", server)
        ids = server.engine.chat_tokens(
            messages, tools=self.tools, known=server.engine.sessions.answers(self.session), **names)
        end = server.engine.tokenizer.decode(ids[-64:], special=True)
        self.in_reasoning = chat.starts_in_reasoning(end)
        return ids

    def read_tools(self):
        """The tools as given, None where the model is not to call any."""
        tools, choice = self.get("tools", list, []), self.body.get("tool_choice")
        if len(tools) > MOST_TOOLS:
            raise RequestError(f"at most {MOST_TOOLS} tools are allowed", param="tools")
        for tool in tools:
            name = chat.field(tool, "function", "name")
            if (chat.field(tool, "type") != "function" or not isinstance(name, str)
                    or not re.fullmatch(chat.NAME, name)):
                raise RequestError('a tool is {"type": "function", "function": {"name": NAME, '
                                   '"parameters": JSON SCHEMA}}', param="tools")
        if choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", 'a call cannot be enforced; say "auto" or "none"')
        if tools and not self.style.tools:
            raise unsupported("tools", "the template of this model knows no tools; leave them out")
        return tools if tools and choice != "none" else None


def check_size(texts, param, server):
    """RequestError for texts that fit into no context, before time is spent on their tokens."""
    size = sum(len(text.encode()) for text in texts)
    if size > server.most_text:
        raise RequestError(f"{size} bytes of text exceed the context of {server.engine.cfg.n_ctx} "
                           "tokens; shorten them", code="context_length_exceeded", param=param)


# ---- how an answer is put --------------------------------------------------------------------


class Choice:
    """One sequence of an answer: its request's events in the words of the API."""

    def __init__(self, order, request, index, server):
        self.order, self.request, self.index = order, request, index
        self.engine, self.shown = server.engine, server.shown
        self.parser = chat.Parser(order.style, order.tools, order.in_reasoning)
        self.deltas, self.entries = [], []  # all that was taken so far: text, logprobs
        self.finish = None  # the API's finish_reason, once all is taken
        self.unsure = deque()  # (place, entry) of tokens whose text may yet turn out to be a stop
        self.taken = self.sampled_bytes = self.sure_bytes = 0

    def advance(self):
        """What is new: a pair (deltas, logprob entries) for each token."""
        request, parser, news = self.request, self.parser, []
        finish = request.finish_reason  # read first: if it is set, all events are there
        for _ in range(len(request.events)):
            event = request.events.popleft()
            entries = self.sure_entries(event) if self.order.logprobs else []
            news.append((self.allowed(parser.feed(event.text)), entries))
            self.taken += 1
        if finish and not self.finish:
            # After a stop string the tokens that spell it are left out, as their text is.
            left = [entry for _, entry in self.unsure] if finish == "length" else []
            news.append((self.allowed(parser.finish()), left))
            called = parser.has_tool_calls and finish == "stop"
            self.finish = "tool_calls" if called or self.has_second_call else finish
        for deltas, entries in news:
            self.deltas += deltas
            self.entries += entries
        return news

    @property
    def has_second_call(self):
        """Where only one call may be made, the next one ends the answer."""
        return self.order.one_call and len(self.parser.ids) > 1

    def allowed(self, deltas):
        if self.has_second_call:
            self.request.cancel()
            return [delta for delta in deltas if len(delta) == 2 or delta[1] == 0]
        return deltas

    def sure_entries(self, event):
        """Logprob entries of the tokens whose text has begun to come out with this event."""
        top = self.request.top[self.taken] if self.order.top_logprobs else []
        self.unsure.append((self.sampled_bytes, {
            **self.entry(event.token, event.logprob),
            "top_logprobs": [self.entry(*pair) for pair in top]}))
        self.sampled_bytes += len(self.bytes_of(event.token, event.token in self.shown))
        self.sure_bytes += len(event.text.encode())
        entries = []
        while self.unsure and self.unsure[0][0] < self.sure_bytes:
            entries.append(self.unsure.popleft()[1])
        return entries

    def bytes_of(self, token, special=True):
        """Bytes of a token; none for an id that only pads the table of the model."""
        unknown = token >= self.engine.cfg.n_tokens
        return b"" if unknown else self.engine.tokenizer.token_bytes(token, special)

    def entry(self, token, logprob):
        data = self.bytes_of(token)  # it may cut a character
        return {"token": data.decode(errors="backslashreplace"), "logprob": max(logprob, -9999.0),
                "bytes": list(data)}

    def part(self, deltas, entries, finish=None):
        """A choice of a chunk: what these deltas add."""
        if self.order.is_chat:
            said = {"delta": self.message(deltas)}
            logprobs = {"content": entries} if entries else None
        else:
            said = {"text": text_of(deltas)}
            logprobs = legacy_logprobs(entries) if entries else None
        return {"index": self.index, **said, "logprobs": logprobs, "finish_reason": finish}

    def whole(self):
        """A choice of an answer that is not streamed."""
        whole = self.part(self.deltas, self.entries, self.finish)
        if self.order.is_chat:
            message = whole.pop("delta")
            for call in message.get("tool_calls", []):
                del call["index"]
            content = None if "tool_calls" in message else ""
            whole["message"] = {"role": "assistant", "content": content, "refusal": None, **message}
        return whole

    def message(self, deltas):
        """The message, or the part of one, that these deltas amount to."""
        said = {"content": text_of(deltas), "reasoning_content": text_of(deltas, "reasoning")}
        message, calls = {name: text for name, text in said.items() if text}, {}
        for kind, index, text in (delta for delta in deltas if len(delta) == 3):
            call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
            if kind == "tool_call":
                call.update(id=self.parser.ids[index], type="function")
                call["function"]["name"] = text
            else:
                call["function"]["arguments"] += text
        return {**message, "tool_calls": list(calls.values())} if calls else message


def legacy_logprobs(entries):
    """Entries in the form of /v1/completions."""
    return {"tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                             for entry in entries]}


def text_of(deltas, kind="content"):
    return "".join(delta[1] for delta in deltas if delta[0] == kind)
