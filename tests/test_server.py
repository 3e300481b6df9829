"""The server over real HTTP: the official client, raw sockets, many of them, and bad ones."""
import dataclasses
import gc
import http.client
import itertools
import json
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest

import cli
import leone
import receipts
import server as serving
import tools
from errors import DeviceError, Overloaded, RequestError
from models import engine as open_model, greedy, quantised, smol, smol_json
from serving import (InstantEngine, call, chat, events_of, eventually, open_stream, read_all, send,
                     serve)
from tokenizer import Tokenizer

ROOT = Path(serving.__file__).resolve().parent
LONG = bool(os.environ.get("LEONE_TEST_LONG"))
ENDLESS = lambda prompt: itertools.repeat("x")
HI = [{"role": "user", "content": "Hi"}]


def client_of(server, **options):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120,
                         **{"max_retries": 0, **options})


@pytest.fixture(scope="module")
def tiny():
    with serve(lambda: open_model(quantised("llama3"), "cpu", context=64 * 512, max_rows=64)) as s:
        yield s


@pytest.fixture(scope="module")
def instant():
    with serve(InstantEngine()) as server:
        yield server


@pytest.fixture(scope="module")
def small_smol():
    path = smol()
    with serve(lambda: open_model(path, "cpu", context=1024, max_rows=4)) as server:
        yield server


@pytest.fixture(params=["tiny", "small_smol"])
def real(request):
    return request.getfixturevalue(request.param)


def streamed(client, **fields):
    """Chunks of a streamed chat, and the text of each choice."""
    chunks = list(client.chat.completions.create(model="m", stream=True, **fields))
    texts = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return chunks, texts


# ---- what clients get ------------------------------------------------------------------------


def test_the_official_client_chats(real):
    client = client_of(real)
    fields = dict(messages=HI, max_tokens=4, temperature=0)
    whole = client.chat.completions.create(model="m", **fields)
    chunks, texts = streamed(client, stream_options={"include_usage": True}, **fields)
    choice, usage = whole.choices[0], whole.usage
    assert texts == {0: choice.message.content} and choice.message.role == "assistant"
    assert whole.id.startswith("chatcmpl-") and whole.model == "model"
    assert abs(whole.created - time.time()) < 300
    assert choice.finish_reason == chunks[-2].choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    assert usage.completion_tokens == 4 or choice.finish_reason == "stop"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    last = chunks[-1]
    assert not last.choices and last.usage.completion_tokens == usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_default_model_answers(small_smol):
    case = next(case for case in smol_json("greedy.json")["cases"] if case["chat"])
    status, body = chat(small_smol, case["prompt"], temperature=0, max_tokens=4)
    ids = small_smol.engine.tokenizer.decode(case["tokens"][:4])
    assert status == 200 and body["choices"][0]["message"]["content"] == ids
    assert body["usage"]["prompt_tokens"] == len(case["prompt_tokens"])


def test_seed_and_n(tiny):
    client = client_of(tiny)

    def texts(**fields):
        answer = client.chat.completions.create(model="m", messages=HI, max_tokens=6, **fields)
        assert [choice.index for choice in answer.choices] == list(range(fields.get("n", 1)))
        assert answer.usage.completion_tokens <= 6 * fields.get("n", 1)
        return [choice.message.content for choice in answer.choices]

    four = texts(n=4, seed=7)
    assert texts(n=4, seed=7) == four and texts(n=2, seed=7) == four[:2]
    assert texts(seed=7) == four[:1] and texts(seed=8) != four[:1]
    assert len(set(four)) == 4
    assert texts() != texts()  # without a seed every answer is another
    _, by_choice = streamed(client, messages=HI, max_tokens=6, n=4, seed=7)
    assert [by_choice[i] for i in range(4)] == four


def test_characters_are_never_cut(tiny):
    """Tokens of single bytes: the stream is the text, in whole characters."""
    client = client_of(tiny)
    for seed in range(4 if LONG else 1):
        fields = dict(messages=HI, max_tokens=24, seed=seed, temperature=3, logprobs=True)
        whole = client.chat.completions.create(model="m", **fields).choices[0]
        chunks, texts = streamed(client, **fields)
        data = b"".join(bytes(entry.bytes) for entry in whole.logprobs.content)
        # The first token of an answer may lose the space that the tokenizer put there.
        assert texts[0] == whole.message.content == data.decode(errors="replace")
        entries = [entry for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
                   for entry in chunk.choices[0].logprobs.content]
        assert entries == whole.logprobs.content


def test_logprobs(tiny):
    choice = client_of(tiny).chat.completions.create(
        model="m", messages=HI, max_tokens=3, temperature=0, logprobs=True,
        top_logprobs=5).choices[0]
    data = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert data.decode(errors="replace") == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 5 and entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_completions(tiny):
    client, engine = client_of(tiny), tiny.engine
    ids = engine.tokenize("Once upon")
    answer = client.completions.create(model="m", prompt="Once upon", max_tokens=5, temperature=0,
                                       logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len(ids)
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) > 0
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    as_ids = client.completions.create(model="m", prompt=ids, max_tokens=5, temperature=0)
    assert as_ids.choices[0].text == answer.choices[0].text
    several = client.completions.create(model="m", prompt=ids, max_tokens=5, temperature=0, n=2)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == several.choices[1].text == answer.choices[0].text
    assert several.usage.prompt_tokens == len(ids) and several.usage.completion_tokens == 10
    stream = client.completions.create(model="m", prompt=ids, max_tokens=5, temperature=0, n=2,
                                       stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert set(texts.values()) == {answer.choices[0].text}


def test_control_tokens_in_a_prompt_are_plain_unless_special(tiny):
    special = tiny.engine.tokenize("<|eot_id|>", special=True)
    assert special != tiny.engine.tokenize("<|eot_id|>")
    for flag, count in (False, len(tiny.engine.tokenize("<|eot_id|>"))), (True, len(special)):
        _, _, body = call(tiny, "POST", "/v1/completions", {
            "prompt": "<|eot_id|>", "special": flag, "max_tokens": 1})
        assert body["usage"]["prompt_tokens"] == count


def test_stop_strings_never_leak():
    """Neither the start of a stop nor its tokens come out, in whatever form the answer is asked."""
    with serve(InstantEngine("the brown fox")) as server:
        client = client_of(server)
        for stop, text in ((["own fox"], "the br"), ("n f", "the brow"),
                           (["x", "zz"], "the brown fo")):
            fields = dict(messages=HI, stop=stop, logprobs=True)
            choice = client.chat.completions.create(model="m", **fields).choices[0]
            assert choice.message.content == text and choice.finish_reason == "stop"
            assert "".join(entry.token for entry in choice.logprobs.content) == text
            chunks, texts = streamed(client, **fields)
            assert texts == {0: text}
            for chunk in chunks:  # each entry comes with the text that it stands for
                delta = chunk.choices[0].delta.content or ""
                logprobs = chunk.choices[0].logprobs
                assert "".join(entry.token for entry in logprobs.content if logprobs) == delta \
                    if logprobs else not delta
        whole = client.chat.completions.create(model="m", messages=HI, stop=["quick"])
        assert whole.choices[0].message.content == "the brown fox"


def test_text_of_all_languages(instant):
    text = "щёчки, 日本, 😀\u200d🔥, \u2028, \x7f, \"\\"
    with serve(InstantEngine(text)) as server:
        _, texts = streamed(client_of(server), messages=HI)
        assert texts == {0: text}
        sock = open_stream(server)
        assert "щ".encode() in read_all(sock)  # as it is, not escaped
        sock.close()


def test_stop_on_a_model(tiny):
    client = client_of(tiny)
    fields = dict(messages=HI, max_tokens=20, temperature=0)
    text = client.chat.completions.create(model="m", **fields).choices[0].message.content
    stop = text[5:8]
    _, texts = streamed(client, stop=[stop], **fields)
    assert texts == {0: text[:text.index(stop)]}


# ---- tools and reasoning: an engine that says what it is told to ------------------------------

HERMES = "<tool_call> <think> </think>"
CALL = ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '</tool_call>')
CALL_TWO = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}
    for name in ("get_weather", "now")]


def called(message):
    return [(call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or []]


@pytest.mark.parametrize("size", [1, 7, 1000])  # characters of a token
def test_tool_calls(size):
    text = "Let me look." + CALL + CALL_TWO
    pieces = [text[i:i + size] for i in range(0, len(text), size)]
    expected = [("get_weather", {"city": "Paris", "days": 2}), ("now", {})]
    with serve(InstantEngine(pieces_of=lambda prompt: pieces, template=HERMES)) as server:
        client = client_of(server)
        fields = dict(messages=HI, tools=TOOLS)
        choice = client.chat.completions.create(model="m", **fields).choices[0]
        assert choice.finish_reason == "tool_calls" and called(choice.message) == expected
        assert choice.message.content == "Let me look."
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2 and all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in ids)

        chunks, texts = streamed(client, **fields)
        calls = {}
        for delta in (call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []):
            if delta.index not in calls:
                assert delta.id and delta.type == "function"
                calls[delta.index] = [delta.function.name, ""]
            else:
                assert not delta.id and not delta.function.name  # said once
            calls[delta.index][1] += delta.function.arguments or ""
        assert [(name, json.loads(text)) for name, text in calls.values()] == expected
        assert texts[0] == "Let me look."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        if size == 1:  # arguments come as they are made
            assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 5
        # What comes back is understood.
        again = [*HI, choice.message.model_dump(exclude_none=True),
                 *({"role": "tool", "tool_call_id": id, "content": "rain"} for id in ids)]
        assert client.chat.completions.create(model="m", messages=again, tools=TOOLS).choices

        one = client.chat.completions.create(model="m", parallel_tool_calls=False, **fields)
        assert called(one.choices[0].message) == expected[:1]
        assert one.choices[0].finish_reason == "tool_calls"
        none = client.chat.completions.create(model="m", tool_choice="none", **fields).choices[0]
        assert none.message.tool_calls is None and none.message.content == text
        assert none.finish_reason == "stop"


def test_long_arguments_stream():
    text = '<tool_call>{"name": "now", "arguments": {"text": "' + "y" * 10000 + '"}}</tool_call>'
    with serve(InstantEngine(text, template=HERMES)) as server:
        chunks, _ = streamed(client_of(server), messages=HI, tools=TOOLS)
        assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 500


def test_reasoning():
    with serve(InstantEngine("<think>Well, hm.</think>\n\n42", template=HERMES)) as server:
        client = client_of(server)
        answer = client.chat.completions.create(model="m", messages=HI)
        message = answer.choices[0].message
        assert message.content == "42" and message.reasoning_content.strip() == "Well, hm."
        chunks, texts = streamed(client, messages=HI)
        reasoning = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
                            for chunk in chunks)
        assert texts[0] == "42" and reasoning.strip() == "Well, hm."
    with serve(InstantEngine("hm</think>42", template=HERMES)) as server:
        _, body = chat(server, chat_template_kwargs={"opening": "<think>\n"})
        message = body["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("42", "hm")


# ---- errors ----------------------------------------------------------------------------------


def test_error_classes_of_the_official_client(instant):
    client = client_of(instant)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HI, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HI, max_tokens=1 << 30)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "not_found"
    assert client.models.list().data[0].id == "model"


def test_conflict_of_a_session(tiny):
    stream = client_of(tiny).chat.completions.create(
        model="m", messages=HI, max_tokens=400, stream=True, extra_body={
            "session": "busy", "ignore_eos": True})
    with pytest.raises(openai.ConflictError) as caught:
        client_of(tiny).chat.completions.create(model="m", messages=HI, max_tokens=5,
                                                extra_body={"session": "busy"})
    assert caught.value.code == "session_busy"
    stream.close()
    assert eventually(lambda: not tiny.engine.busy)
    assert call(tiny, "DELETE", "/v1/sessions/busy")[0] == 200


class Crowded(InstantEngine):
    """An engine that is full for the first requests."""
    refusals = 0

    def submit(self, *args, **options):
        if self.refusals:
            self.refusals -= 1
            raise Overloaded("the queue is full", 7, 3, 150, code="kv_capacity")
        return super().submit(*args, **options)


def test_overload_is_typed_and_retried():
    engine = Crowded()
    with serve(engine) as server:
        engine.refusals = 1
        status, headers, body = call(server, "POST", "/v1/chat/completions", {"messages": HI})
        assert status == 429
        assert headers["retry-after-ms"] == "150" and headers["Retry-After"] == "1"
        error = body["error"]
        assert error["code"] == "kv_capacity" and error["retry_after_ms"] == 150
        assert error["needed_pages"] == 7 and error["free_pages"] == 3
        engine.refusals, began = 2, time.monotonic()
        answer = client_of(server, max_retries=2).chat.completions.create(model="m", messages=HI)
        assert answer.choices[0].message.content == "hello" and not engine.refusals
        assert 0.25 < time.monotonic() - began < 5  # two waits of 150 ms, no exponential back-off
        engine.refusals = 1
        with pytest.raises(openai.RateLimitError) as caught:
            client_of(server).chat.completions.create(model="m", messages=HI)
        assert caught.value.code == "kv_capacity"


def test_what_a_template_refuses_is_400(tiny, monkeypatch):
    for template, code in (
            ("{{ raise_exception('roles must alternate') }}", "invalid_request"),
            ("{{ messages[0].content.nothing.at.all }}", "invalid_request"),
            ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
             "template_limit"), ("{% broken", "model_error"), (None, "model_error")):
        monkeypatch.setitem(tiny.engine.gguf.metadata, "tokenizer.chat_template", template)
        status, body = chat(tiny)
        assert status == 400 and body["error"]["code"] == code, body
        assert "roles must alternate" in body["error"]["message"] or "raise" not in str(template)


def test_n_is_submitted_as_a_whole():
    engine = InstantEngine(queue=3)
    engine.before_step = lambda: time.sleep(0.05)
    with serve(engine) as server:
        assert chat(server, n=8)[0] == 429
        assert eventually(lambda: not engine.busy)
        assert chat(server, n=3)[0] == 200


def test_n_that_never_fits_is_400():
    """What is full now is worth another try; this is not."""
    with serve(InstantEngine(queue=3, rows=2)) as server:
        assert chat(server, n=5)[0] == 429  # this engine takes all into the queue
        status, body = chat(server, n=6)
        assert status == 400 and body["error"]["param"] == "n", body


def test_texts_that_fit_into_no_context_cost_no_time(tiny, monkeypatch):
    """Tokenising megabytes takes seconds, so it must not be tried."""
    monkeypatch.setattr(tiny.engine.tokenizer, "encode_parts", None)
    text = " " * (tiny.engine.cfg.n_ctx * max(map(len, tiny.engine.tokenizer.tokens)) + 1)
    half = {"role": "user", "content": text[len(text) // 2:]}
    for path, name, value in (("completions", "prompt", text),
                              ("chat/completions", "messages", [half, half])):
        status, _, body = call(tiny, "POST", f"/v1/{path}", {name: value, "max_tokens": 1})
        error = body["error"]
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", name)


def test_ids_that_only_pad_the_table_of_the_model():
    """A bias may bring them about, and a prompt may end in one: they have no text."""
    with open_model(quantised("llama3"), "cpu") as e:
        last = e.cfg.n_vocab - 1
        metadata = dict(e.gguf.metadata)
        for name in "tokens", "token_type", "scores":
            if (key := f"tokenizer.ggml.{name}") in metadata:
                metadata[key] = list(metadata[key])[:last]
        e.tokenizer = Tokenizer(metadata)
        e.cfg = dataclasses.replace(e.cfg, n_tokens=last)
        with serve(e) as server:
            status, body = chat(server, max_tokens=2, temperature=0, logprobs=True, top_logprobs=5,
                                logit_bias={str(last): 100})
            assert status == 200, body
            entries = body["choices"][0]["logprobs"]["content"]
            assert [(entry["token"], entry["bytes"]) for entry in entries] == [("", [])] * 2
            status, _, body = call(server, "POST", "/v1/completions", {
                "prompt": [last], "max_tokens": 2, "logprobs": 3, "logit_bias": {str(last): 100}})
            assert status == 200, body


REFUSED = [
    ("response_format", {"type": "json_object"}), ("response_format", {"type": "json_schema"}),
    ("functions", [{}]), ("function_call", "auto"), ("audio", {}), ("modalities", ["audio"]),
    ("echo", True), ("suffix", "x"), ("best_of", 4), ("grammar", "root ::= x"), ("guided_json", {}),
    ("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tools", TOOLS), ("receipt", True), ("web_search_options", {})]
BAD = [
    ("model", 5), ("stream", "yes"), ("stream", 1), ("n", 0), ("n", 65), ("n", 10**6), ("n", True),
    ("n", 1.5), ("n", "2"), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "many"),
    ("max_completion_tokens", 0), ("temperature", "hot"), ("temperature", True),
    ("temperature", 101), ("top_p", 2), ("top_p", -0.1), ("top_k", -2), ("top_k", 1.5),
    ("min_p", 7), ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
    ("seed", 2**64), ("seed", 1.5), ("seed", "x"), ("stop", ""), ("stop", ["a"] * 17),
    ("stop", ["a" * 2000]), ("stop", [5]), ("stop", {}), ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 101}), ("logit_bias", {"-5": 1}), ("logit_bias", {str(2**31): 1}),
    ("logit_bias", {"5": "x"}), ("logit_bias", [1]), ("logit_bias", "x"), ("logprobs", 5),
    ("top_logprobs", 3), ("tools", {}), ("tools", [5]), ("tools", [{"type": "function"}]),
    ("tools", [{"type": "web_search"}]), ("tools", TOOLS[:1] * 129), ("tool_choice", 5),
    ("stream_options", 5), ("stream_options", {"include_usage": "yes"}),
    ("stream_options", {"include_usage": 1}), ("stream_options", {"include_obfuscation": 0}),
    ("tools", [{"type": "function", "function": {"name": "f", "description": 5}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": 1}}]),
    ("messages", [{"role": "assistant", "refusal": 5}]),
    *(("messages", [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{}"}, **call}]}])
      for call in ({"id": 0}, {"id": {"a": "b"}}, {"type": "custom"}, {"type": {}})),
    ("speculation", "yes"), ("speculation", 1.5), ("speculation", 9),
    ("session", 5), ("session", "../x"), ("cache_salt", 5),
    ("chat_template_kwargs", []), ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"self": 1}), ("chat_template_kwargs", {"template": 1}),
    ("reasoning_effort", 5), ("ignore_eos", 1), ("parallel_tool_calls", "no"), ("receipt", "yes"),
    ("messages", []), ("messages", None), ("messages", "hi"), ("messages", [5]),
    ("messages", [{"role": "robot", "content": "x"}]), ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages", [{"role": ["user"], "content": "x"}]),
    ("messages", [{"role": "tool", "content": {}}])]


@pytest.mark.parametrize("name, value", REFUSED + BAD, ids=lambda value: str(value)[:30])
def test_bad_fields_are_400(tiny, name, value):
    status, _, body = call(tiny, "POST", "/v1/chat/completions",
                           {"messages": HI, "max_tokens": 1, name: value})
    assert status == 400, body
    error = body["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert re.match(r"\w*", error["param"])[0] in (name, name.replace("completion_", "")), error
    assert error["status"] == 400
    assert error["code"] == ("unsupported_value" if (name, value) in REFUSED
                             or name == "tool_choice" else "invalid_request")


@pytest.mark.parametrize("value", [
    None, [], [""], {}, 5, True, [True], [5, False], [1.5], [-1], [512], [[1]], ["x"], [10**30],
    "x" * 100_000], ids=lambda value: str(value)[:20])
def test_bad_prompts_are_400(tiny, value):
    status, _, body = call(tiny, "POST", "/v1/completions", {"prompt": value, "max_tokens": 1})
    assert status == 400 and body["error"]["message"]


def test_harmless_and_unknown_fields_are_ignored(instant):
    status, body = chat(
        instant, response_format={"type": "text"}, functions=None, modalities=["text"], echo=False,
        user="me", metadata={"a": "b"}, store=False, service_tier="auto", prediction=None,
        whatever=[1, {"x": None}], temperature=None, stop=None, tools=None, tool_choice="auto",
        n=None, max_tokens=None, stream_options=None, prompt_cache_key="k", verbosity="low",
        model="gpt-4o")
    assert status == 200 and body["choices"][0]["message"]["content"] == "hello"


def test_roles_and_parts(instant):
    messages = [{"role": "developer", "content": "be nice"},
                {"role": "user", "content": [{"type": "text", "text": "a"},
                                             {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [{
                    "id": "123456789", "type": "function",
                    "function": {"name": "now", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "123456789", "content": "noon"}]
    assert chat(instant, messages=messages)[0] == 200


JSON = b'{"messages": [{"role": "user", "content": "x"}], %s}'
BAD_BODIES = [
    b"", b"x", b"[]", b'"text"', b"null", b"5", b"{", b"\xff\xfe{}", b'{"a": \xff}',
    JSON % b'"n": NaN',
    JSON % b'"temperature": Infinity', JSON % b'"temperature": -Infinity',
    JSON % b'"temperature": 1e999', JSON % b'"seed": ' + b"9" * 5000 + b"}",
    JSON % (b'"seed": ' + b"9" * 5000), JSON % (b'"user": ' + b"9" * 5000),
    JSON % b'"n": 1, "n": 2',
    JSON % b'"user": "\\ud800"', JSON % b'"\\udfff": 1', JSON % b'"stop": ["\\ud83d"]',
    JSON % (b'"tools": ' + b"[" * 3000 + b"]" * 3000), JSON % (b'"x": ' + b"[" * 65 + b"]" * 65),
    JSON % (b'"x": ' + b'{"a":' * 100 + b"1" + b"}" * 100), b"[" * 100_000, b'{"a":' * 100_000,
    JSON % b'"a": 01', JSON % b'"a": \x00', JSON % b'"a": "\n"', JSON % b"'a': 1", b"{} {}"]


@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_bad_json_is_400(instant, body):
    status, _, answer = call(instant, "POST", "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["code"] == "invalid_request"
    assert len(answer["error"]["message"]) < 400


def test_plain_json_passes(instant):
    for extra in (b'"x": ' + b"[" * 60 + b"]" * 60, b'"user": "\\ud83d\\ude00"', b'"seed": 5',
                  b'"temperature": 0.' + b"9" * 5000):
        assert call(instant, "POST", "/v1/chat/completions", JSON % extra)[0] == 200


# ---- HTTP ------------------------------------------------------------------------------------


def raw(server, data, seconds=10):
    """Everything that the server answers to these bytes until it closes or is silent."""
    with socket.create_connection(server.server_address[:2], timeout=seconds) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR) if data.endswith(b"!close") else None
        answer = b""
        try:
            while more := sock.recv(1 << 16):
                answer += more
        except (TimeoutError, ConnectionError):
            pass
        return answer


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
BAD_HEADS = [
    (b"GARBAGE\r\n\r\n", 400), (b"GET\r\n\r\n", 400), (b"GET / HTTP/1.1 x\r\n\r\n", 400),
    (b"GET /health HTTP/x\r\n\r\n", 400), (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
    (GET + b"Host: localhost\r\n\r\n", 400), (GET + b"no colon here\r\n\r\n", 400),
    (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
    (GET + b"X: " + b"y" * 70_000 + b"\r\n\r\n", 431),
    (GET + b"".join(b"X%d: y\r\n" % i for i in range(200)) + b"\r\n", 431),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
    (POST + b"Content-Length: x\r\n\r\n", 400), (POST + b"Content-Length: -1\r\n\r\n", 400),
    (POST + b"Content-Length: +2\r\n\r\n{}", 400),
    (POST + "Content-Length: ²\r\n\r\n{}".encode(), 400),
    (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x", 400),
    (POST + b"Content-Length: 99999999\r\n\r\n", 413),
    (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
    (POST + b"\r\n", 400), (b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
    (b"GET /%ff%00/../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404)]


@pytest.mark.parametrize("data, status", BAD_HEADS, ids=range(len(BAD_HEADS)))
def test_bad_heads(instant, data, status):
    answer = raw(instant, data, seconds=3)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    error = json.loads(answer.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1")[0])["error"]
    assert error["message"]
    codes = {414: "path_too_long", 431: "headers_too_large", 501: "method_unknown",
             505: "http_version"}
    assert error["code"] == codes.get(status, error["code"])
    assert status < 500 or error["type"] == "server_error"
    assert call(instant, "GET", "/health")[0] == 200


def test_methods_and_paths(instant):
    for method, path, status in (
            ("GET", "/nope", 404), ("POST", "/v1/models", 405),
            ("GET", "/v1/chat/completions", 405),
            ("PUT", "/v1/sessions", 405), ("GET", "/v1/", 404), ("OPTIONS", "/v1/models", 405),
            ("GET", "/v1/models?x=1", 200), ("GET", "//v1/models", 200),
            ("DELETE", "/health", 405)):
        got, headers, body = call(instant, method, path)
        assert got == status, (method, path, body)
        assert status != 405 or headers["Allow"] in ("GET", "POST")
    status, headers, body = call(instant, "HEAD", "/v1/models")
    assert status == 200 and int(headers["Content-Length"]) > 50 and not body


def test_the_absolute_form_of_a_path(instant):
    """As proxies write it. The Host header decides as ever who may ask."""
    head = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for path in b"http://localhost/health", b"HTTP://127.0.0.1:80/health?x", b"http://localhost":
        assert raw(instant, b"GET " + path + head).startswith(b"HTTP/1.1 200 "), path
    data = b"GET http://localhost/health" + head.replace(b"localhost", b"evil.example")
    assert raw(instant, data).startswith(b"HTTP/1.1 403 ")
    answer = raw(instant, b"GET http://localhost/nope" + head)
    assert b" 404 " in answer and b"SERVING.md" in answer


def test_the_log_has_no_rate_of_one_token(instant, monkeypatch, capsys):
    monkeypatch.setattr(instant, "quiet", False)
    gaps = "leone_inter_token_seconds_count"
    before = samples(instant).get(gaps, 0)
    assert chat(instant, max_tokens=1)[0] == 200
    assert samples(instant).get(gaps, 0) == before
    line = capsys.readouterr().err.splitlines()[0]
    assert "tokens 1 length" in line and "tok/s" not in line
    assert chat(instant, max_tokens=2)[0] == 200
    assert "tok/s" in capsys.readouterr().err and samples(instant)[gaps] == before + 1


def test_connections_are_kept_and_pipelined(instant):
    connection = http.client.HTTPConnection(*instant.server_address[:2], timeout=20)
    for path, status in ("/health", 200), ("/nope", 404), ("/v1/models", 200):
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        assert response.status == status and not response.will_close
    connection.close()
    body = json.dumps({"messages": HI, "stream": True}).encode()
    one = POST.replace(b"Connection: close\r\n", b"") + b"Content-Length: %d\r\n\r\n" % len(body)
    answer = raw(instant, one + body + one + body + GET + b"\r\n")
    assert answer.count(b"HTTP/1.1 200") == 3 and answer.count(b"data: [DONE]") == 2


def test_http_1_0_gets_a_stream_without_chunks(instant):
    body = json.dumps({"messages": HI, "stream": True}).encode()
    answer = raw(instant, b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body), body))
    head, _, data = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head and data.startswith(b"data: {")
    assert data.endswith(b"data: [DONE]\n\n")


def test_expect_100_continue(instant):
    body = json.dumps({"messages": HI}).encode()
    head = b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    assert raw(instant, POST + head % len(body) + body).startswith(b"HTTP/1.1 100 Continue\r\n\r\n"
                                                                   b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 413 " in raw(instant, POST + head % (1 << 30))


def test_a_body_that_is_too_large_is_told_so(instant, monkeypatch):
    monkeypatch.setattr(serving, "BODY_LIMIT", 1000)
    status, _, body = call(instant, "POST", "/v1/chat/completions", b" " * 3_000_000)
    assert status == 413 and body["error"]["code"] == "body_too_large"


def test_slow_heads_and_bodies_end(monkeypatch):
    monkeypatch.setattr(serving, "READ_S", 0.5)
    with serve(InstantEngine()) as server:
        for data in b"GET /hea", POST + b"Content-Length: 100\r\n\r\n{", b"":
            began = time.monotonic()
            with socket.create_connection(server.server_address[:2], timeout=20) as sock:
                sock.sendall(data)
                assert sock.recv(100) == b""
            assert time.monotonic() - began < 10
        # One byte now and then does not prolong it.
        with socket.create_connection(server.server_address[:2], timeout=0.3) as sock:
            with pytest.raises(OSError):
                for _ in range(50):
                    sock.sendall(b"x")
                    try:
                        if sock.recv(1) == b"":
                            raise ConnectionError
                    except TimeoutError:
                        pass


def test_connections_are_limited(monkeypatch):
    monkeypatch.setattr(serving, "MOST_CONNECTIONS", 4)
    with serve(InstantEngine()) as server:
        idle = [socket.create_connection(server.server_address[:2]) for _ in range(4)]
        assert eventually(lambda: len(server.deadlines) == 4)
        for _ in range(20):
            status, headers, body = call(server, "POST", "/v1/chat/completions", {"messages": HI})
            assert status == 429 and body["error"]["code"] == "too_many_connections"
            assert headers["retry-after-ms"] == "1000"
        idle += [socket.create_connection(server.server_address[:2]) for _ in range(20)]
        idle[-1].settimeout(20)
        assert idle[-1].recv(1) == b""  # there are too many to tell them
        assert len(server.deadlines) == 8
        for sock in idle:
            sock.close()
        assert eventually(lambda: not server.deadlines)
        assert chat(server)[0] == 200


@pytest.mark.parametrize("host, status", [
    ("localhost", 200), ("LOCALHOST:8080", 200), ("127.0.0.1:1", 200), ("[::1]:80", 200),
    ("app.localhost", 200), (socket.gethostname(), 200), ("evil.com", 403), ("evil.com:8080", 403),
    ("localhost.evil.com", 403), ("evillocalhost", 403), ("127.0.0.1.evil.com", 403), ("", 403),
    ("local\u00a0host", 403)])
def test_host_names_of_others_are_refused(instant, host, status):
    got, _, body = call(instant, "GET", "/v1/models", headers={"Host": host.encode("latin-1")})
    assert got == status and (status == 200 or body["error"]["code"] == "host_not_allowed")


def test_pages_of_others_are_refused(instant):
    host = "localhost:8080"
    for origin, status in ("http://localhost:8080", 200), ("http://evil.com", 403), ("null", 403):
        got, headers, _ = call(instant, "POST", "/v1/chat/completions", {"messages": HI},
                               {"Origin": origin, "Host": host})
        assert got == status and "Access-Control-Allow-Origin" not in headers
    with serve(InstantEngine(), cors="https://mine.org") as server:
        for origin, status in ("https://mine.org", 200), ("http://evil.com", 403):
            got, headers, _ = call(server, "OPTIONS", "/v1/chat/completions", headers={
                "Origin": origin, "Access-Control-Request-Method": "POST"})
            assert got == status and headers["Access-Control-Allow-Origin"] == "https://mine.org"
            assert status == 403 or "POST" in headers["Access-Control-Allow-Methods"]
            got, headers, _ = call(server, "GET", "/v1/models", headers={"Origin": origin})
            assert got == status


def test_api_key(tmp_path):
    (tmp_path / "key").write_text("s3cret\n")
    args = ["-m", "model", "--api-key", f"@{tmp_path / 'key'}"]
    assert serving.build_parser().parse_args(args).api_key == "s3cret"
    with serve(InstantEngine(), api_key="s3cret-ü") as server:
        for key, status in ("s3cret-ü", 200), ("wrong", 401), ("", 401):
            got, _, body = call(server, "GET", "/v1/models",
                                headers={"Authorization": f"Bearer {key}".encode()})
            assert got == status and (status == 200 or body["error"]["code"] == "invalid_api_key")
        assert call(server, "POST", "/v1/chat/completions", {"messages": HI})[0] == 401
        assert call(server, "GET", "/metrics")[0] == 401
        assert call(server, "GET", "/health")[0] == 200
        with pytest.raises(openai.AuthenticationError):
            client_of(server).models.list()


def test_the_page_is_locked_down(instant):
    status, headers, body = call(instant, "GET", "/")
    assert status == 200 and "<html" in body.lower()
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


# ---- clients that go away, clients that lag ---------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels(stream):
    engine = InstantEngine(pieces_of=ENDLESS, step_seconds=0.01)
    with serve(engine) as server:
        sock = open_stream(server, stream=stream)
        assert eventually(lambda: engine.active and len(engine.active[0].tokens) > 3)
        request = engine.active[0]
        sock.close()
        assert eventually(lambda: request.finish_reason == "cancelled", seconds=2)
        assert not engine.busy


def test_a_client_that_goes_away_leaves_the_queue():
    engine = InstantEngine(rows=1, pieces_of=ENDLESS, step_seconds=0.01)
    with serve(engine) as server:
        first = open_stream(server)
        assert eventually(lambda: engine.active)
        second = open_stream(server, stream=False)
        assert eventually(lambda: engine.waiting)
        request = engine.waiting[0]
        second.close()
        assert eventually(lambda: request.cancelled, seconds=2)
        first.close()


def test_a_client_that_lags_gets_several_tokens_at_once():
    count = 10_000
    engine = InstantEngine(pieces_of=lambda prompt: ["abcdefghij"[i % 10] for i in range(count)])
    with serve(engine) as server:
        sock = open_stream(server, receive_buffer=4096)
        lagging = lambda: any(answer.buffer for answer in server.writer.answers.values())
        assert eventually(lagging)
        assert eventually(lambda: not engine.busy)
        data = read_all(sock)
        parts = [event["choices"][0]["delta"].get("content", "") for event in events_of(data)]
        assert "".join(parts) == "abcdefghij" * (count // 10)
        assert max(map(len, parts)) > 100 and parts.count("a") > 20
        sock.close()


def test_a_client_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(serving, "SEND_S", 0.5)
    engine = InstantEngine(pieces_of=lambda prompt: itertools.repeat("x" * 1000), step_seconds=1e-3)
    with serve(engine) as server:
        sock = open_stream(server, receive_buffer=4096)
        assert eventually(lambda: engine.active)
        request = engine.active[0]
        assert eventually(lambda: request.finish_reason == "cancelled")
        count = 'leone_http_requests_total{route="/v1/chat/completions",status="499"}'
        assert eventually(lambda: samples(server).get(count) == 1)
        sock.close()
        assert chat(server, max_tokens=3)[0] == 200


def test_silence_is_filled_with_comments(monkeypatch):
    monkeypatch.setattr(serving, "KEEPALIVE_S", 0.3)
    engine, gate = InstantEngine(), threading.Event()
    engine.before_step = lambda: gate.wait(20)
    with serve(engine) as server:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(streamed(client_of(server),
                                                                         messages=HI)))
        sock = open_stream(server)
        thread.start()
        data = b""
        while b": keepalive\n\n" not in data:
            data += sock.recv(1000)
        gate.set()
        thread.join(20)
        assert answers[0][1] == {0: "hello"}  # the official client skips them
        sock.close()


# ---- failures --------------------------------------------------------------------------------


def test_an_engine_that_fails_tells_everybody():
    engine = InstantEngine(pieces_of=ENDLESS, step_seconds=0.01)
    with serve(engine) as server:
        results = []

        def ask(stream):
            try:
                answer = client_of(server).chat.completions.create(model="m", messages=HI,
                                                                   stream=stream)
                results.append(list(answer) if stream else answer)
            except openai.APIError as error:
                results.append(error)

        threads = [threading.Thread(target=ask, args=[stream]) for stream in (True, False)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: len(engine.active) == 2)

        def broken():
            raise DeviceError("cuStreamSynchronize says 719: the launch failed")

        engine.before_step = broken
        for thread in threads:
            thread.join(20)
        assert len(results) == 2 and all("the launch failed" in str(error) for error in results)
        assert {type(error) for error in results} == {openai.APIError, openai.InternalServerError}
        status, _, body = call(server, "GET", "/health")
        assert status == 503 and body["error"]["code"] == "engine_failed"
        status, _, body = call(server, "POST", "/v1/chat/completions", {"messages": HI})
        assert status == 503 and body["error"]["code"] == "engine_failed"
        assert call(server, "GET", "/v1/sessions")[0] == 503


def test_a_bug_of_ours_is_a_500_without_a_traceback(capsys):
    engine = InstantEngine()
    engine.chat_tokens = lambda *args, **names: 1 / 0
    with serve(engine) as server:
        status, body = chat(server)
        assert status == 500 and body["error"]["type"] == "server_error"
        assert "ZeroDivision" not in json.dumps(body)
        log = capsys.readouterr().err
        assert "internal error at test_server.py" in log and "Traceback" not in log
        assert call(server, "GET", "/health")[0] == 200


def test_health_while_loading_stuck_and_draining(monkeypatch):
    monkeypatch.setattr(serving, "STUCK_S", 0.2)
    engine, loaded, step = InstantEngine(), threading.Event(), threading.Event()
    server = serving.Server(lambda: loaded.wait(20) and engine, quiet=True).start()
    try:
        status, headers, body = call(server, "POST", "/v1/chat/completions", {"messages": HI})
        assert status == 503 and body["error"]["code"] == "loading" and headers["Retry-After"]
        assert call(server, "GET", "/health")[2]["error"]["code"] == "loading"
        assert call(server, "GET", "/metrics")[0] == 200
        loaded.set()
        assert server.loaded.wait(20)
        assert call(server, "GET", "/health")[::2] == (200, {"status": "ok", "model": "model"})
        engine.before_step = lambda: step.wait(20)
        sock = open_stream(server)
        assert eventually(lambda: call(server, "GET", "/health")[0] == 503)
        assert call(server, "GET", "/health")[2]["error"]["code"] == "stuck"
        assert call(server, "GET", "/v1/models")[0] == 200
        closing = threading.Thread(target=server.close)
        closing.start()
        assert eventually(lambda: server.draining)
        status, headers, body = call(server, "POST", "/v1/chat/completions", {"messages": HI})
        assert status == 503 and body["error"]["code"] == "draining"
        step.set()
        data = read_all(sock)
        assert b"hello" == b"".join(event["choices"][0]["delta"].get("content", "").encode()
                                    for event in events_of(data))
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        closing.join(20)
        assert not closing.is_alive() and engine.closed
    finally:
        step.set()
        loaded.set()


def test_a_model_that_cannot_be_loaded():
    def refuse():
        raise RequestError("no such model")
    with serve(refuse) as server:
        assert call(server, "GET", "/health")[0] == 503
        assert chat(server)[0] == 503


# ---- metrics, sessions, receipts --------------------------------------------------------------


def samples(server):
    """{name with labels: value} of /metrics, whose form is checked."""
    status, headers, text = call(server, "GET", "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    values, types = {}, {}
    for line in text.splitlines():
        if match := re.fullmatch(r"# TYPE (leone_[a-z0-9_]+) (counter|gauge|summary)", line):
            assert match[1] not in types
            types[match[1]] = match[2]
        else:
            name, value = re.fullmatch(r"(\S+) (\S+)", line).groups()
            base = re.sub(r"(_sum|_count)?(\{.*\})?$", "", name)
            base = base if base in types else name.partition("{")[0]
            assert (types[base] == "counter") == base.endswith("_total")
            assert re.fullmatch(r'leone_[a-z0-9_]+(\{(\w+="[^"\\]*",?)+\})?', name)
            values[name] = float(value)
    return values


def test_metrics(tiny):
    before = samples(tiny)
    assert chat(tiny, max_tokens=5, ignore_eos=True)[0] == 200
    assert chat(tiny, n=0)[0] == 400
    after = samples(tiny)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    route = 'leone_http_requests_total{route="/v1/chat/completions",status='
    assert grown[route + '"200"}'] == 1 and grown[route + '"400"}'] == 1
    assert grown["leone_generated_tokens_total"] == 5 and grown["leone_steps_total"] >= 5
    assert grown["leone_prompt_tokens_total"] > 5
    assert grown["leone_time_to_first_token_seconds_count"] == 1
    assert grown["leone_inter_token_seconds_count"] == 1
    assert 0 < grown["leone_inter_token_seconds_sum"] < 10
    assert after['leone_memory_bytes{kind="kv"}'] > 0 and after["leone_pages"] > 0


def test_a_session_computes_each_token_once(tiny):
    messages, said = [], 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"turn {turn}"})
        status, body = chat(tiny, messages=messages, session="talk", max_tokens=8, seed=turn)
        assert status == 200
        usage = body["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == said
        messages.append(body["choices"][0]["message"])
        ended = body["choices"][0]["finish_reason"] == "stop"
        said = usage["total_tokens"] - (1 if not ended else 1)  # the last token was never fed
        if turn == 1:
            assert call(tiny, "POST", "/v1/sessions/talk/fork", {"to": "other"})[0] == 200
    _, _, body = call(tiny, "GET", "/v1/sessions")
    assert {"talk", "other"} <= {session["name"] for session in body["data"]}
    for path, field, status, code in (
            ("nobody/fork", {"to": "x"}, 404, "session_not_found"),
            ("talk/fork", {"to": "other"}, 409, "session_exists"),
            ("talk/fork", {"to": "../x"}, 400, "invalid_request"),
            ("talk/fork", {}, 400, "invalid_request"), ("talk/fork", [], 400, "invalid_request"),
            ("a%20b/hibernate", {}, 400, "invalid_request")):
        got, _, body = call(tiny, "POST", f"/v1/sessions/{path}", field)
        assert (got, body["error"]["code"]) == (status, code), path
    for name in "talk", "other":
        assert call(tiny, "DELETE", f"/v1/sessions/{name}")[0] == 200
    assert call(tiny, "DELETE", "/v1/sessions/talk")[0] == 404


def test_a_conversation_of_ten_turns_computes_each_token_once(tmp_path):
    """Also across a hibernation and a restart of the server; a fork goes on as its source does."""
    messages, known, turns = [], 0, iter(range(10))

    def say(server, text, session="talk", stream=False):
        """(answer, usage) of the conversation so far and one more turn."""
        fields = dict(messages=[*messages, {"role": "user", "content": text}], max_tokens=4,
                      temperature=0, extra_body={"session": session})
        client = client_of(server)
        if stream:
            chunks, texts = streamed(client, stream_options={"include_usage": True}, **fields)
            return texts[0], chunks[-1].usage
        answer = client.chat.completions.create(model="m", **fields)
        return answer.choices[0].message.content, answer.usage

    def talk(server, count):
        nonlocal known
        for turn in itertools.islice(turns, count):
            text = f"City {turn}?"
            said, usage = say(server, text, stream=turn % 2 == 1)
            assert usage.prompt_tokens_details.cached_tokens == known, turn
            known = usage.prompt_tokens + usage.completion_tokens - 1  # the last was never fed
            messages.extend([{"role": "user", "content": text},
                             {"role": "assistant", "content": said}])

    path = smol()
    open_it = lambda: open_model(path, "cpu", context=2048, max_rows=2, session_store=tmp_path)
    with serve(open_it) as server:
        talk(server, 4)
        assert call(server, "POST", "/v1/sessions/talk/hibernate")[0] == 200
        talk(server, 2)
    with serve(open_it) as server:
        talk(server, 4)
        assert next(turns, None) is None
        assert call(server, "POST", "/v1/sessions/talk/fork", {"to": "other"})[0] == 200
        said, usage = say(server, "Why?", "talk")
        again, its_usage = say(server, "Why?", "other")
        assert said == again and usage.prompt_tokens_details.cached_tokens == known
        # Of the other one, pages of talk's new turn are known, too.
        assert its_usage.prompt_tokens_details.cached_tokens >= known


@pytest.mark.parametrize("key, begun", [(b"k" * 32, [1]), (None, [])])
def test_the_model_is_hashed_before_the_first_receipt_waits(key, begun):
    engine, calls = InstantEngine(), []
    engine.model_hash.begin = lambda: calls.append(1)
    with serve(engine, receipt_key=key):
        assert calls == begun


def test_receipts():
    key = b"k" * 32
    with serve(lambda: open_model(quantised("llama3"), "cpu"), receipt_key=key) as server:
        status, body = chat(server, max_tokens=4, receipt=True, seed=3)
        receipt = body["receipt"]
        receipts.verify(key, receipt)
        receipts.check_tokens(receipt, body["prompt_token_ids"], body["token_ids"])
        assert receipt["id"] == body["id"] and receipt["sampling"]["seed"] == 3
        sock = open_stream(server, max_tokens=4, receipt=True, seed=3,
                           stream_options={"include_usage": True})
        events = events_of(read_all(sock))
        sock.close()
        last = events[-1]
        receipts.verify(key, last["receipt"])
        assert last["choices"] == [] and last["token_ids"] == body["token_ids"]
        assert events[-2]["usage"]["completion_tokens"] == 4
        same = ("model_sha256", "prompt_tokens_sha256", "output_tokens_sha256", "sampling")
        assert all(last["receipt"][name] == receipt[name] for name in same)
        assert chat(server, receipt=True, n=2)[0] == 400


# ---- many clients ----------------------------------------------------------------------------


def test_many_streams_equal_their_solo_runs(tiny):
    """64 of them, among others that are cancelled, that read slowly and that go away."""
    engine, count, length = tiny.engine, 64, 10
    gc.collect()
    assert eventually(lambda: not tiny.deadlines and not engine.busy)
    threads = set(threading.enumerate())
    texts = [f"Prompt {i} " + "abc " * (i % 23) for i in range(count)]
    before = samples(tiny)
    results, failures = {}, []

    def stream(i):
        sock = open_stream(tiny, "/v1/completions", prompt=texts[i], max_tokens=length, seed=i,
                           temperature=1.0, ignore_eos=True, logprobs=0,
                           receive_buffer=2048 if i % 8 == 0 else None)
        if i % 8 == 0:
            time.sleep(0.5)
        try:
            events = events_of(read_all(sock))
            results[i] = "".join(choice["text"] for event in events for choice in event["choices"])
        except Exception as error:
            failures.append(error)
        sock.close()

    def nuisance(i):
        sock = open_stream(tiny, "/v1/completions", prompt="long " * 60, max_tokens=60,
                           ignore_eos=True)
        if i % 2:  # goes away while it decodes, else while its prompt is read
            while b"data: " not in sock.recv(4096):
                pass
        sock.close()

    running = [threading.Thread(target=stream, args=[i]) for i in range(count)]
    running += [threading.Thread(target=nuisance, args=[i]) for i in range(16)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(120)
    assert not failures and len(results) == count
    after = samples(tiny)
    assert after["leone_steps_of_16_rows_total"] > before["leone_steps_of_16_rows_total"]
    assert eventually(lambda: not engine.busy and not tiny.writer.answers and not tiny.deadlines)
    assert engine.pool.free_count + engine.prefixes.unused == engine.pool.n_pages
    assert len(engine.free_slots) == engine.max_sessions + 1
    gauges = [name for name in before if "memory_bytes" in name]
    assert all(samples(tiny)[name] == before[name] for name in gauges)
    assert eventually(lambda: set(threading.enumerate()) <= threads), threading.enumerate()
    # A stop changes engines, so a solo run has one of its own.
    with open_model(quantised("llama3"), "cpu", max_rows=1) as solo:
        for i in range(0, count, 1 if LONG else 6):
            request = solo.submit(solo.tokenize(texts[i]), leone.Sampling(seed=i), length,
                                  ignore_eos=True)
            while solo.step():
                pass
            assert results[i] == request.text, i


def test_no_thread_is_left():
    before = set(threading.enumerate())
    with serve(InstantEngine(pieces_of=ENDLESS)) as server:
        socks = [open_stream(server) for _ in range(5)]
        idle = socket.create_connection(server.server_address[:2])
        assert eventually(lambda: len(server.engine.active) == 5)
    for sock in socks:  # whose last event may find no room where nobody reads
        sock.close()
    assert eventually(lambda: set(threading.enumerate()) <= before), threading.enumerate()
    idle.close()


CLIENT = Path(__file__).with_name("serving.py")


@pytest.mark.parametrize("step_seconds", [0.0, 0.006])
def test_overhead(step_seconds):
    """64 streams of an engine that costs nothing, or as much time as a large model on a card."""
    tokens = 300 if step_seconds else 600
    engine = InstantEngine(pieces_of=ENDLESS, step_seconds=step_seconds)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(serving.SWITCH_S)
    try:
        with serve(engine) as server:
            command = [sys.executable, str(CLIENT), *map(str, server.server_address[:2]), "64",
                       str(tokens)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        sys.setswitchinterval(interval)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    print(result)
    assert result["tokens"] == 64 * tokens  # each in an event of its own
    busy = os.getloadavg()[0] / os.cpu_count()
    limit = (10_000 if not step_seconds else 5_000) / max(1, busy)
    assert result["tokens"] / result["seconds"] > limit, result
    assert result["gap_p99"] < 0.1 * max(1, busy), result


# ---- the program -----------------------------------------------------------------------------


def start(*args, **options):
    """(process, its url) of a server on the tiny model."""
    process = subprocess.Popen(
        [sys.executable, "server.py", "-m", str(quantised("llama3")), "--backend", "cpu", "--bind",
         "127.0.0.1:0", *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **options)
    host, port = re.fullmatch(r"http://(.*):(\d+)\n", process.stdout.readline()).groups()
    process.server_address = host, int(port)
    ready = eventually(lambda: call(process, "GET", "/health")[0] == 200, seconds=60)
    assert ready, process.kill() or process.communicate()
    return process


def test_flood():
    """1,000 at once against a queue of 16: answers or typed refusals, and little memory."""
    process = start("--queue", "16", "--batch-size", "8", "--quiet")
    try:
        memory = lambda: int(re.search(r"VmRSS:\s+(\d+)", Path(
            f"/proc/{process.pid}/status").read_text())[1]) / 1024
        chat(process, max_tokens=8)
        before, highest = memory(), 0
        expected = chat(process, "flood", max_tokens=8, temperature=0)[1]["choices"][0]["message"]
        selector, answers = selectors.DefaultSelector(), []
        for _ in range(1000):
            sock = socket.socket()
            sock.settimeout(20)
            sock.connect(process.server_address)
            send(sock, "/v1/chat/completions", {
                "messages": [{"role": "user", "content": "flood"}], "max_tokens": 8,
                "temperature": 0})
            selector.register(sock, selectors.EVENT_READ, bytearray())
        until = time.monotonic() + 100
        while selector.get_map() and time.monotonic() < until:
            highest = max(highest, memory())
            for key, _ in selector.select(1):
                try:
                    data = key.fileobj.recv(1 << 16)
                except ConnectionError:
                    data = b""
                key.data.extend(data)
                head, _, body = bytes(key.data).partition(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                if not data or length and len(body) == int(length[1]):
                    answers.append((int(head[9:12] or 0), json.loads(body or "null")))
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        assert len(answers) == 1000
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 429}, {status: statuses.count(status) for status in statuses}
        assert statuses.count(200) >= 16
        for status, body in answers:
            if status == 200:
                assert body["choices"][0]["message"] == expected
            else:
                assert body["error"]["code"] in ("queue_full", "kv_capacity",
                                                 "too_many_connections")
                assert body["error"]["retry_after_ms"] > 0
        assert highest - before < 300, (before, highest)
        assert chat(process, "flood", max_tokens=8, temperature=0)[1]["choices"][0]["message"] \
            == expected
    finally:
        process.kill()
        process.communicate()


def test_signals_drain_and_stop(tmp_path):
    process = start("--session-store", str(tmp_path), "--batch-size", "2")
    try:
        assert chat(process, max_tokens=4, session="kept")[0] == 200
        # More than sockets hold: it cannot end before it is read.
        sock = open_stream(process, receive_buffer=4096, max_tokens=400, ignore_eos=True,
                           logprobs=True, top_logprobs=20)
        data = sock.recv(4096)
        process.send_signal(signal.SIGTERM)
        refused = lambda: call(process, "POST", "/v1/chat/completions", {"messages": HI})[0] == 503
        assert eventually(refused, seconds=5)
        data += read_all(sock)
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert events_of(data)[-1]["choices"][0]["finish_reason"] == "length"
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0 and "Traceback" not in log
        assert (tmp_path / "kept.kv").exists()
        line = next(line for line in log.splitlines() if "tokens 400" in line)
        assert re.search(r"POST /v1/chat/completions 200 prompt \d+ cached \d+ ttft \S+ s "
                         r"tokens 400 \S+ tok/s( drafts \d+/\d+ right)? length$", line), line
    finally:
        process.kill()
    process = start()
    sock = open_stream(process, max_tokens=480, ignore_eos=True)
    sock.recv(4096)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=5)
    assert process.returncode in (0, 130) and "Traceback" not in log
    sock.close()


@pytest.mark.parametrize("args, text", [
    (["-m", "no-such.gguf"], "no-such.gguf"), (["--bind", "0.0.0.0:0"], "--allow-remote"),
    (["--bind", "nowhere.invalid:80"], "--bind"), (["--bind", "127.0.0.1:99999"], "port must"),
    (["--bind", "x"], "--bind"), (["--api-key", ""], "API key"),
    (["--prefill-chunk", "0"], "prefill_chunk"),
    (["--batch-size", "-1"], "max_rows"), (["--receipt-key", "README.md"], "README.md"),
    (["--session-store", "README.md"], "session store"),
    (["--draft", ""], "choose auto"), (["--receipt-key", "none/key"], "check the path"),
    (["--api-key", "@no-such-file"], "no-such")])
def test_mistakes_of_the_command_line(args, text):
    mistake(args, text)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        mistake(["--bind", f"127.0.0.1:{port}"], f"cannot listen at 127.0.0.1:{port}: Address "
                "already in use; give another HOST:PORT with --bind")
    mistake(["--bind", "192.0.2.1:80", "--allow-remote"], "give another HOST:PORT")


def mistake(args, text):
    run = subprocess.run(
        [sys.executable, "server.py", "-m", str(quantised("llama3")), "--backend", "cpu", "--bind",
         "127.0.0.1:0", *args], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and text in run.stderr, run.stderr
    assert "Traceback" not in run.stderr and len(run.stderr.strip().splitlines()) == 1


# ---- README ----------------------------------------------------------------------------------


def test_snippets_of_the_readme(small_smol):
    """The curl and Python examples of README.md do what they show."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    commands = [text.removeprefix("$ ") for kind, text in blocks
                if kind == "console" and text.startswith("$ curl ")]
    programs = [text for kind, text in blocks if kind == "python" and "OpenAI(" in text]
    assert commands and programs
    here = lambda text: text.replace("http://127.0.0.1:8080", small_smol.url)
    for command in commands:
        run = subprocess.run(["sh", "-c", here(command)], capture_output=True, text=True,
                             timeout=300)
        assert "Paris" in json.loads(run.stdout)["choices"][0]["message"]["content"], run
    for program in programs:
        run = subprocess.run([sys.executable, "-c", here(program)], capture_output=True, text=True,
                             timeout=300)
        assert run.returncode == 0 and len(run.stdout) > 20, run


# ---- drafts ----------------------------------------------------------------------------------


def test_answers_say_what_was_drafted(capsys):
    """In usage and for each token; drafts that repeat the prompt, right or wrong."""
    fields = dict(messages=[{"role": "user", "content": "ab " * 20}], temperature=0, max_tokens=40,
                  logprobs=True, ignore_eos=True)
    with serve(lambda: open_model(quantised("llama3"), "cpu", draft="ngram", draft_length=3)) as s:
        _, _, plain = call(s, "POST", "/v1/chat/completions", {**fields, "speculation": False})
        _, _, body = call(s, "POST", "/v1/chat/completions", fields)
        with open_stream(s, **fields, stream_options={"include_usage": True}) as sock:
            events = events_of(read_all(sock))
        stats = s.engine.stats
    details = body["usage"]["completion_tokens_details"]
    assert events[-1]["usage"]["completion_tokens_details"] == details
    entries = body["choices"][0]["logprobs"]["content"]
    assert entries == [entry for event in events for choice in event["choices"]
                       for entry in (choice.get("logprobs") or {"content": []})["content"]]
    drafted = [entry.pop("drafted", False) for entry in entries]
    assert 0 < sum(drafted) == details["accepted_prediction_tokens"] < len(drafted)
    assert sum(details.values()) == stats["drafted_tokens"] / 2
    assert plain["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert entries == plain["choices"][0]["logprobs"]["content"]


# ---- bench --serve ---------------------------------------------------------------------------


def bench(capsys, url, *more):
    code = cli.main(["bench", "--serve", url, *more])
    return code, *capsys.readouterr()


def test_bench_of_a_server(tiny, capsys, monkeypatch):
    monkeypatch.setattr(tools, "ANSWER", 9)
    before = tiny.engine.stats["generated_tokens"]
    code, out, _ = bench(capsys, tiny.url, "--users", "1,3", "--json")
    result = json.loads(out)
    assert code == 0 and result["model"] == "model" and result["tokens"] == 9
    assert tiny.engine.stats["generated_tokens"] - before == 9 * (1 + 3) * 4
    for record, users in zip(result["serve"], (1, 3), strict=True):
        assert record["users"] == users
        assert 0 < record["slowest"] <= record["tokens_per_s"] <= record["fastest"]
        assert 0 < record["first_token_ms"] <= record["latest_ms"]
        assert record["slowest"] < 9 * users / (record["latest_ms"] / 1000)
    code, out, _ = bench(capsys, tiny.url + "/", "--users", "2")
    assert code == 0 and "| users | tokens_per_s |" in out and "| 2 | " in out


def test_bench_asks_each_user_something_else(capsys):
    asked = []
    engine = InstantEngine(pieces_of=lambda prompt: asked.append(prompt) or list("def"))
    with serve(engine, api_key="secret") as server:
        code, out, _ = bench(capsys, server.url, "--users", "70", "--api-key", "secret", "--json")
        assert code == 0 and len(set(asked)) == len(asked) == 4 * 70
        assert json.loads(out)["serve"][0]["users"] == 70
        assert all(language in "".join(asked) for language in tools.LANGUAGES)
        code, _, err = bench(capsys, server.url, "--users", "2")
        assert code == 2 and "status 401" in err and err.count("\n") == 1


def test_bench_of_what_is_no_server(instant, capsys):
    free = socket.socket()
    free.bind(("127.0.0.1", 0))  # nobody listens there
    mistakes = {"http://127.0.0.1:%d" % free.getsockname()[1]: "does not answer",
                instant.url + "/v1": "status 404", "nonsense": "is no URL", "ftp://x": "is no URL",
                "http://": "does not answer", "http://[": "such as http"}
    with serve(InstantEngine(context=4)) as small, serve(InstantEngine("")) as silent:
        capsys.readouterr()  # the servers' log
        mistakes |= {small.url: "status 400", silent.url: "gave no text"}
        for url, problem in mistakes.items():
            code, out, err = bench(capsys, url, "--users", "2")
            assert code == 2 and out == "" and problem in err, (url, err)
            assert err.startswith("leone: ") and err.count("\n") == 1
    for more in (["--users", "0"], ["--users", "1,x"], ["-m", "model.gguf"]):
        assert bench(capsys, instant.url, *more)[0] == 2
    assert cli.main(["bench"]) == 2 and "-m FILE" in capsys.readouterr().err
    free.close()


def test_bench_of_a_server_that_breaks_off(capsys):
    """Answers that are not HTTP, no JSON, another JSON, no events, an error, or half of one."""
    models = b'{"data": [{"id": "m"}]}'
    ok = lambda body: b"HTTP/1.0 200 OK\r\n\r\n" + body
    for replies in (
            [b"garbage\r\n"], [ok(b"<html>")], [ok(b"[]")], [ok(b'{"data": []}')],
            [ok(models), ok(b"hello\n")], [ok(models), ok(b'data: {"choices": [3]}\n')],
            [ok(models), ok(b'data: {"error": {"message": "no"}}\n')],
            [ok(models), ok(b'data: {"cho')], [ok(models), b""],
            [ok(models), b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhalf"]):
        listener = socket.create_server(("127.0.0.1", 0))

        def answer():
            for reply in replies:
                connection, _ = listener.accept()
                connection.recv(1 << 16)
                connection.sendall(reply)
                connection.close()
        thread = threading.Thread(target=answer)
        thread.start()
        code, out, err = bench(capsys, "http://127.0.0.1:%d" % listener.getsockname()[1],
                               "--users", "1")
        thread.join()
        listener.close()
        assert code == 2 and out == "" and err.startswith("leone: "), replies
        assert err.count("\n") == 1, replies
