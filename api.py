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
from errors import ModelError, RequestError, require
from receipts import unique
from sampling import Sampling

MOST_CHOICES = 64  # sequences of one request
MOST_TOP_LOGPROBS, MOST_TOOLS = 20, 128

encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def error_object(error):
    """(HTTP status, body in the OpenAI shape) of a LeoneError."""
    is_model = isinstance(error, ModelError)
    status = getattr(error, "status", 400 if is_model else 500)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": None,
                              "code": "model_error" if is_model else kind, "status": status,
                              **vars(error)}}


# ---- JSON ------------------------------------------------------------------------------------


def parse_json(data):
    """The JSON object in `data`. RequestError unless it is plain: finite, shallow, UTF-8."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
        if depth(value) > chat.DEPTH_LIMIT:
            raise ValueError(f"it is nested deeper than {chat.DEPTH_LIMIT} levels")
        encode(value).encode()  # fails for NaN, for 1e999 and for lone surrogates
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not plain JSON: {chat.one_line(error)}") from None
    require(isinstance(value, dict), "the body must be a JSON object")
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


def supported(condition, problem, param):
    require(condition, problem, code="unsupported_value", param=param)


class Order:
    """What a client asks for. Of its fields null is the same as absent, and unknown ones are
    ignored. Values of Sampling and lengths are left to the engine to check."""

    def __init__(self, body, is_chat, server):
        for name, harmless in REFUSED.items():
            supported(body.get(name) in (None, harmless),
                      f"{name} is not supported here; leave it out", name)
        self.body, self.is_chat, get = body, is_chat, self.get
        get("model", str)  # any: there is only one
        self.session, self.salt = get("session", str), get("cache_salt", str, "")
        self.speculation = body.get("speculation")
        self.receipt = get("receipt", bool, False)
        supported(server.receipt_key or not self.receipt,
                  "this server signs none; start it with --receipt-key FILE", "receipt")
        room = server.engine.queue_limit + server.engine.max_sessions
        most = 1 if self.session or self.receipt else min(MOST_CHOICES, room)
        self.n = get("n", int, 1)
        require(1 <= self.n <= most, f"n must be 1 to {most} here; with a session or a receipt it "
                f"is 1, otherwise up to {MOST_CHOICES} and what --queue and --sessions hold "
                "together", param="n")
        self.max_tokens = get("max_completion_tokens", int, get("max_tokens", int))
        self.ignore_eos = get("ignore_eos", bool, False)
        self.stream = get("stream", bool, False)
        get("stream_options", dict)
        self.include_usage = get("stream_options.include_usage", bool, False)
        get("stream_options.include_obfuscation", bool)  # pads events against listeners; not here
        if is_chat:
            self.logprobs = get("logprobs", bool, False)
            self.top_logprobs = get("top_logprobs", int, 0, MOST_TOP_LOGPROBS)
            require(self.logprobs or not self.top_logprobs, "top_logprobs needs logprobs: true",
                    param="top_logprobs")
        else:
            top = get("logprobs", int, None, MOST_TOP_LOGPROBS)
            self.logprobs, self.top_logprobs = top is not None, top or 0
        self.sampling = self.read_sampling()
        self.tools, self.one_call, self.in_reasoning = None, False, False
        self.style = chat.style_of(server.template if is_chat else None)
        self.prompt = (self.read_chat if is_chat else self.read_prompt)(server)  # token ids

    def get(self, name, kind, default=None, most=None):
        value = of_kind(kind, chat.field(self.body, *name.split(".")), name)
        if value is None:
            return default
        require(most is None or 0 <= value <= most, f"{name} must be 0 to {most}", param=name)
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
        has_bools = isinstance(prompt, list) and bool in map(type, prompt)  # to Python, True is 1
        require(not has_bools, "the prompt must be text or token ids", param="prompt")
        return prompt

    def read_chat(self, server):
        self.tools, names = self.read_tools(), self.get("chat_template_kwargs", dict, {})
        self.one_call = not self.get("parallel_tool_calls", bool, True)
        require(TEMPLATE_NAMES.isdisjoint(names),
                f"chat_template_kwargs cannot set {', '.join(TEMPLATE_NAMES)}",
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
        require(len(tools) <= MOST_TOOLS, f"at most {MOST_TOOLS} tools are allowed", param="tools")
        for index, tool in enumerate(tools):
            named = chat.is_name(chat.field(tool, "function", "name"))
            require(named and tool.get("type") == "function",
                    'a tool is {"type": "function", "function": {"name": NAME, '
                    '"parameters": JSON SCHEMA}}', param="tools")
            for name, kind in (("description", str), ("parameters", dict), ("strict", bool)):
                of_kind(kind, tool["function"].get(name), f"tools[{index}].function.{name}")
        supported(choice in (None, "auto", "none"),
                  'a call cannot be enforced; say "auto" or "none"', "tool_choice")
        supported(self.style.tools or not tools,
                  "the template of this model knows no tools; leave them out", "tools")
        return tools if tools and choice != "none" else None


def of_kind(kind, value, name):
    """`value`, if it is None or of this kind. RequestError."""
    require(value is None or type(value) is kind, f"{name} must be {KINDS[kind]}", param=name)
    return value


def check_size(texts, param, server):
    """RequestError for texts that fit into no context, before time is spent on their tokens."""
    size = sum(len(text.encode()) for text in texts)
    require(size <= server.most_text,
            f"{size} bytes of text exceed the context of {server.engine.longest} tokens; shorten "
            "them", code="context_length_exceeded", param=param)


# ---- how an answer is put --------------------------------------------------------------------


class Choice:
    """One sequence of an answer: its request's events in the words of the API."""

    def __init__(self, order, request, index, server):
        self.order, self.request, self.index = order, request, index
        self.engine, self.shown = server.engine, server.shown
        self.parser = chat.Parser(order.style, order.tools, order.in_reasoning, order.one_call)
        self.deltas, self.entries = [], []  # all that was taken so far: text, logprobs
        self.finish = None  # the API's finish_reason, once all is taken
        self.unsure = deque()  # (place, entry) of tokens whose text may yet turn out to be a stop
        self.sampled_bytes = self.sure_bytes = 0
        self.top = iter(request.top)  # of the tokens to come; empty where none was asked for

    def advance(self):
        """What is new: a pair (deltas, logprob entries) for each token."""
        request, parser, news = self.request, self.parser, []
        finish = request.finish_reason  # read first: if it is set, all events are there
        for _ in range(len(request.events)):
            event = request.events.popleft()
            entries = self.sure_entries(event) if self.order.logprobs else []
            news.append((parser.feed(event.text), entries))
        if over := parser.over:
            request.cancel()
        if finish and not self.finish:
            # After a stop string the tokens that spell it are left out, as their text is.
            left = [entry for _, entry in self.unsure] if finish == "length" else []
            news.append((parser.finish(), left))
            called = parser.ids and (over or finish == "stop")
            self.finish = "tool_calls" if called else finish
        for deltas, entries in news:
            self.deltas += deltas
            self.entries += entries
        return news

    def sure_entries(self, event):
        """Logprob entries of the tokens whose text has begun to come out with this event."""
        self.unsure.append((self.sampled_bytes, {
            **self.entry(event.token, event.logprob),
            **({"drafted": True} if event.drafted else {}),
            "top_logprobs": [self.entry(*pair) for pair in next(self.top, [])]}))
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
        is_chat = self.order.is_chat
        said = {"delta": self.message(deltas)} if is_chat else {"text": text_of(deltas)}
        logprobs = {"content": entries} if is_chat else legacy_logprobs(entries)
        return {"index": self.index, **said, "logprobs": logprobs if entries else None,
                "finish_reason": finish}

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
