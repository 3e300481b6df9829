"""Requests that are made from openapi.json and then spoilt: whatever comes, the server answers.

Every answer has the form that openapi.json promises, no status is 500, no request hangs, and the
log has no error of the server's own. LEONE_TEST_LONG=1 runs more of them.
"""
import copy
import http.client
import json
import os
import random
import re
import threading
from pathlib import Path

import pytest

import api
import server as serving
from models import engine as open_model, quantised
from serving import InstantEngine, call, eventually, serve

API = json.loads(Path(serving.__file__).with_name("openapi.json").read_text())
LONG = bool(os.environ.get("LEONE_TEST_LONG"))

STRANGE = [
    None, True, False, 0, -1, 1, 2, 63, 64, 65, 2**31, 2**53, 2**63, 2**64, 10**39, -(2**63) - 1,
    0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, 1.5, "", " ", "x", "0", "null", "\0", "\n\n", "é",
    "😀" * 3,
    "\u202e", "\ufeff", "%s%n", "../../etc/passwd", "<|im_end|>", "<|eot_id|>", "{{ 7*7 }}",
    "{% raise %}", "x" * 5000, [], {}, [[]], [None], [[[[]]]], {"": None}, {"a": {"b": []}},
    {"__class__": 1}, [1, "x", None], [0] * 300, ["x"] * 300, {str(i): i for i in range(300)},
    {"role": "user", "content": "x"}, {"type": "function"}, {"type": "json_object"}]
# Text that JSON writers do not produce.
RAW = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"0." + b"1" * 5000, b"\\ud800",
       b'"\\ud800"', b'"\\udc00\\ud800"', b"\xff", b"\xc3", b"\0", b"[" * 200, b'{"a":' * 200, b"]",
       b"}", b'"', b",", b"01", b"'", b"//", b'"n": 1, "n": 2,', b"tru", b"\xef\xbb\xbf"]
HEADERS = [("Content-Type", "text/plain"), ("Content-Length", "0"), ("Content-Length", "1e3"),
           ("Content-Length", "-5"), ("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "x"),
           ("Host", "evil.com"), ("Host", "[::1"), ("Host", "a b"), ("Origin", "http://evil.com"),
           ("Origin", "\x7f"), ("Authorization", "Bearer x"), ("Expect", "100-continue"),
           ("Expect", "x"), ("Connection", "close"), ("Connection", "upgrade"), ("Upgrade", "h2c"),
           ("X-Long", "y" * 30_000), ("Accept-Encoding", "gzip"), ("Content-Encoding", "gzip")]


def sample(schema, rng):
    """A value that this schema of openapi.json allows."""
    if "$ref" in schema:
        target = API
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return sample(target, rng)
    if "oneOf" in schema:
        return sample(rng.choice(schema["oneOf"]), rng)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type", "object")
    kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
    if kind == "object":
        fields = {name: sample(field, rng) for name, field in schema.get("properties", {}).items()
                  if name in schema.get("required", ()) or rng.random() < 0.3}
        if "propertyNames" in schema:
            fields = {str(rng.randrange(600)): rng.uniform(-100, 100) for _ in range(3)}
        return fields
    if kind == "array":
        return [sample(schema["items"], rng) for _ in range(rng.choice([1, 1, 2, 5]))]
    if kind == "string":
        return rng.choice(["a", "user", "hello there", "now", "Z_9"])
    low, high = schema.get("minimum", 0), schema.get("maximum", 500)
    if kind in ("integer", "number"):
        small = rng.randint(int(low) if low > -5 else 0, int(min(high, low + 4 if low > -5 else 4)))
        return small if kind == "integer" else rng.choice([small, rng.uniform(low, min(high, 2))])
    return {"boolean": rng.random() < 0.5, "null": None}[kind]


def places(value, path=()):
    """Paths of all values inside of this one."""
    yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def spoil(value, rng):
    """The value with something in it removed, doubled or replaced by a strange one."""
    path = rng.choice(list(places(value)))
    if not path:
        return copy.deepcopy(rng.choice(STRANGE)) if rng.random() < 0.05 else value
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    how = rng.random()
    if how < 0.15:
        del inner[path[-1]]
    elif how < 0.25 and isinstance(inner, dict):
        inner[rng.choice(["x", "", "echo", "functions", "stop", "n"])] = inner.pop(path[-1])
    else:
        inner[path[-1]] = copy.deepcopy(rng.choice(STRANGE))
    return value


def make(rng, longest):
    """(method, path, body, headers) of one request."""
    path, operations = rng.choice(list(API["paths"].items())) if rng.random() < 0.15 else (
        rng.choice([pair for pair in API["paths"].items() if "completions" in pair[0]]))
    method, operation = rng.choice(list(operations.items()))
    path = path.replace("{name}", rng.choice(["a", "b", "x" * 70, "%00", "..", "%2e%2e", "%c3%a9",
                                              "%zz"]))
    body, headers = b"", []
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        value = sample(schema, rng)
        if isinstance(value, dict) and "completions" in path:
            value["max_tokens"] = rng.randint(1, longest)
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            value = spoil(value, rng)
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
    if rng.random() < 0.1 and body:
        at = rng.randrange(len(body))
        body = body[:at] + rng.choice(RAW) + body[at + rng.randrange(3):]
    if rng.random() < 0.03:
        body = body[:rng.randrange(len(body) + 1)]
    if rng.random() < 0.1:
        headers.append(rng.choice(HEADERS))
    if rng.random() < 0.05:
        method = rng.choice(["GET", "PUT", "PATCH", "OPTIONS", "HEAD", "TRACE", "POST", "X"])
    if rng.random() < 0.03:
        path += rng.choice(["/", "?a=b", "#x", "/..", "%", "//", "?" + "x" * 3000])
    return method.upper(), path, body, headers


def send(address, method, path, body, headers):
    """(status, content type, body) of a request that may be malformed; None if refused unread."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        names = {name for name, _ in headers}
        connection.putrequest(method, path, skip_host="Host" in names, skip_accept_encoding=True)
        if not names & {"Content-Length", "Transfer-Encoding"}:
            connection.putheader("Content-Length", str(len(body)))
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.headers.get("Content-Type", ""), response.read()
    except (ConnectionError, http.client.RemoteDisconnected):
        return None
    finally:
        connection.close()


def check(request, answer):
    assert answer is not None, request
    status, kind, data = answer
    assert status in (200, 400, 401, 403, 404, 405, 409, 411, 413, 429, 431, 501), (request, answer)
    if request[0] == "HEAD":
        return
    if status != 200:
        error = json.loads(data)["error"]
        assert {"message", "type", "param", "code"} <= set(error), (request, answer)
        assert isinstance(error["message"], str) and 0 < len(error["message"]) < 600
        assert error["param"] is None or isinstance(error["param"], str)
    elif "event-stream" in kind:
        assert data.endswith(b"data: [DONE]\n\n"), (request, answer)
    elif "json" in kind and data:
        json.loads(data)


@pytest.mark.parametrize("kind, count, longest", [
    ("instant", 20_000 if LONG else 4500, 40), ("model", 20_000 if LONG else 500, 3)])
def test_spoilt_requests(kind, count, longest, capsys):
    def open_engine():
        if kind == "instant":
            return InstantEngine(template="<tool_call> <think> </think>", context=5000)
        return open_model(quantised("llama3"), "cpu", context=64, max_rows=8)

    failures, statuses = [], {}
    numbers = iter(range(count))
    with serve(open_engine, receipt_key=b"k" * 32) as server:
        def work():
            for number in numbers:
                request = make(random.Random(f"{kind} {number}"), longest)
                try:
                    answer = send(server.server_address[:2], *request)
                    check(request, answer)
                    statuses[answer[0]] = statuses.get(answer[0], 0) + 1
                except Exception as error:
                    failures.append((number, request, error))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3000)
        assert not failures, (len(failures), failures[0])
        assert eventually(lambda: not server.engine.busy)
        assert call(server, "GET", "/health")[0] == 200
        assert statuses[200] > count / 20 and statuses[400] > count / 5, statuses
    log = capsys.readouterr().err
    assert "internal error" not in log and "Traceback" not in log


class Watched(dict):
    """A body that notes which fields are looked at."""

    def __init__(self, *args):
        super().__init__(*args)
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("name, required", [
    ("ChatRequest", {"messages": [{"role": "user", "content": "x"}]}),
    ("CompletionRequest", {"prompt": "x"})])
def test_the_description_names_every_field(name, required):
    described = set(API["components"]["schemas"][name]["properties"])
    with serve(InstantEngine()) as server:
        body = Watched(required)
        api.Order(body, name == "ChatRequest", server)
        assert body.names - set(api.REFUSED) == described


def test_the_description_names_every_path():
    described = {re.sub(r"\{\w+\}", "*", path): {method.upper() for method in methods}
                 for path, methods in API["paths"].items()}
    assert described == {path: set(methods) for path, methods in serving.ROUTES.items()}
