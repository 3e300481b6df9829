"""Help for the tests of the server: an engine that answers at once, servers, plain HTTP."""
import contextlib
import http.client
import json
import selectors
import socket
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import leone
import server as serving
from errors import Overloaded, RequestError
from sampling import Sampling

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


class Characters:
    """A tokenizer in which every character is a token, and its code point the id."""
    tokens, eos_ids, add_bos = [bytes(4)], frozenset([3]), False  # the longest takes 4 bytes

    def token_bytes(self, id, special=False):
        return b"" if id == 3 and not special else chr(id).encode("utf-8", "replace")

    def decode(self, ids, special=False):
        return "".join(map(chr, ids))


class NoSessions:
    list = staticmethod(list)

    def answers(self, name):
        return {}

    def delete(self, name, new_name=None):
        raise RequestError("there is no such session", status=404, code="session_not_found")

    fork = hibernate = delete


class InstantEngine:
    """Engine with the scheduler's manners and no arithmetic: each step gives each active request
    its next token. Tests script it: `pieces_of(prompt)` is the answer, as a list of texts."""

    def __init__(self, text="hello", rows=64, queue=1024, context=1 << 20, template=TEMPLATE,
                 pieces_of=None, step_seconds=0.0):
        self.text, self.rows, self.queue, self.step_seconds = text, rows, queue, step_seconds
        self.pieces_of = pieces_of or (lambda prompt: list(self.text))
        self.waiting, self.active, self.lock = deque(), [], threading.Lock()
        self.on_event, self.counts = lambda request: None, Counter()
        self.tokenizer = Characters()
        self.cfg = SimpleNamespace(n_ctx=context, n_vocab=1 << 20, n_tokens=0x110000)
        self.longest = context
        self.gguf = SimpleNamespace(metadata={"tokenizer.chat_template": template})
        self.ops, self.kv = SimpleNamespace(name="cpu"), SimpleNamespace(format="f32")
        self.sessions, self.queue_limit, self.max_sessions = NoSessions(), queue, rows
        self.model_hash = SimpleNamespace(begin=lambda: None, result=lambda: "0" * 64)
        self.before_step = lambda: None
        self.closed, self.steps = False, 0

    @property
    def busy(self):
        return bool(self.waiting or self.active)

    @property
    def stats(self):
        return {"waiting": len(self.waiting), "active": len(self.active), "steps": self.steps,
                **self.counts, "bytes": {"kv": 0}}

    def close(self):
        self.closed = True

    def tokenize(self, text, special=False):
        return list(map(ord, text))

    def detokenize(self, ids):
        return self.tokenizer.decode(ids)

    def chat_tokens(self, messages, tools=None, known=(), **names):
        said = "".join(f"<|{m['role']}|>{m['content']}\n" for m in messages)
        return self.tokenize(said + "<|assistant|>" + names.get("opening", ""))

    def submit(self, prompt, sampling, max_tokens=None, ignore_eos=False, session=None, choice=0,
               salt="", top_logprobs=0, shown=frozenset(), speculation=None):
        sampling.validate(self.cfg.n_vocab)
        if not isinstance(prompt, list) or not prompt or not all(
                isinstance(id, int) and 0 <= id < 0x110000 for id in prompt):
            raise RequestError("the prompt is empty, or holds what is no token", param="prompt")
        max_tokens = max_tokens or self.cfg.n_ctx - len(prompt)
        if len(prompt) + max_tokens > self.cfg.n_ctx:
            raise RequestError("too long", code="context_length_exceeded")
        request = leone.Request(prompt, sampling, max_tokens, None, ignore_eos, session, choice,
                                salt, top_logprobs, submitted=time.perf_counter())
        request.stream = iter(self.pieces_of(self.tokenizer.decode(prompt)))
        with self.lock:
            if len(self.waiting) >= self.queue:
                raise Overloaded("the queue is full; try again later", 1, 0, 150,
                                 code="queue_full")
            self.waiting.append(request)
        return request

    def step(self):
        self.before_step()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        while self.waiting and len(self.active) < self.rows:
            self.active.append(self.waiting.popleft())
        self.steps += 1
        self.counts["rows"] += len(self.active)
        for request in list(self.active):
            if request.cancelled:
                self.finish(request, "cancelled")
                continue
            piece = next(request.stream, None)
            token = 3 if piece is None else ord(piece[0])
            request.first_token = request.first_token or time.perf_counter()
            request.tokens.append(token)
            request.logprobs.append(-0.5)
            request.top.append([(token, -0.5), (65, -1.5)][:request.top_logprobs])
            text, request.held, stopped = leone.split_at_stop(
                request.held + (piece or ""), request.sampling.stop,
                piece is None or len(request.tokens) == request.max_tokens)
            request.text += text
            request.events.append(leone.Event(token, text, -0.5))
            if stopped or piece is None:
                self.finish(request, "stop")
            elif len(request.tokens) == request.max_tokens:
                self.finish(request, "length")
            else:
                self.on_event(request)
        return self.busy

    def finish(self, request, reason):
        self.active.remove(request)
        request.finish_reason, request.finished = reason, time.perf_counter()
        self.on_event(request)

    def fail(self, error):
        with self.lock:
            requests = [*self.active, *self.waiting]
            self.waiting.clear()
            self.active.clear()
        for request in requests:
            request.error, request.finish_reason = error, "error"
            self.on_event(request)


@contextlib.contextmanager
def serve(engine, **options):
    """A running server for an engine, or for what opens one."""
    server = serving.Server(engine if callable(engine) else lambda: engine, quiet=True, **options)
    server.start()
    try:
        assert server.loaded.wait(60)
        yield server
    finally:
        server.abort()


def call(server, method, path, body=None, headers={}):
    """(status, headers, body) of one request; JSON is parsed."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    try:
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        data = response.read()
        is_json = "json" in response.headers.get("Content-Type", "")
        data = json.loads(data) if is_json and data else data.decode()
        return response.status, response.headers, data
    finally:
        connection.close()


def chat(server, text="hi", **fields):
    """(status, body) of a chat with one message."""
    status, _, body = call(server, "POST", "/v1/chat/completions",
                           {"messages": [{"role": "user", "content": text}], **fields})
    return status, body


def open_stream(server, path="/v1/chat/completions", receive_buffer=None, **fields):
    """A socket on which a stream has been asked for."""
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect(server.server_address[:2])
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    send(sock, path, body)
    return sock


def send(sock, path, body):
    data = json.dumps(body).encode()
    sock.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
                 % (path.encode(), len(data), data))


def events_of(data):
    """The JSON of the server-sent events in a (chunked) answer's bytes."""
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def read_all(sock, end=b"0\r\n\r\n"):
    data = b""
    while not data.endswith(end) and (more := sock.recv(1 << 16)):
        data += more
    return data


def eventually(condition, seconds=20):
    """Waits for a condition; says whether it came true."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def measure(host, port, streams, tokens):
    """Read so many streams of one-letter tokens; print how fast they came, as JSON."""
    selector, finished = selectors.DefaultSelector(), []
    began = time.perf_counter()
    for _ in range(int(streams)):
        sock = open_stream(SimpleNamespace(server_address=(host, int(port))),
                           max_tokens=int(tokens))
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, [])  # times at which tokens came
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)
            key.data.extend([time.perf_counter()] * data.count(b'"delta":{"content":"x"}'))
            if not data or data.endswith(b"\r\n0\r\n\r\n"):
                selector.unregister(key.fileobj)
                finished.append(key.data)
    seconds = time.perf_counter() - began
    gaps = sorted(after - before for times in finished for before, after in zip(times, times[1:]))
    print(json.dumps({"tokens": sum(map(len, finished)), "seconds": seconds,
                      "gap_p50": gaps[len(gaps) // 2], "gap_p99": gaps[len(gaps) * 99 // 100],
                      "gap_max": gaps[-1]}))


if __name__ == "__main__":
    measure(*sys.argv[1:])
