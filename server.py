#!/usr/bin/env python3
"""The server: an OpenAI subset, sessions, metrics and a page, over one engine.

    python server.py -m MODEL --bind 127.0.0.1:8080

Three kinds of thread share the work:

    handlers   one per connection: read and check a request, render and tokenise the prompt, submit
               it, sleep until it is answered, write the end of the answer
    engine     owns the device: calls what other threads posted, then Engine.step()
    writer     turns the events of all requests into bytes for all clients, on sockets that never
               block; it sees which clients went away, and wakes their handlers

What a request may say and how an answer is put is in api.py; read that first. Here follow answers
under way, the writer, the server, HTTP, the command line.
"""
import contextlib
import ipaddress
import itertools
import os
import re
import secrets
import signal
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote

import chat
import cli
import receipts
from api import Choice, Order, encode, error_object, parse_json
from errors import LeoneError, Overloaded, RequestError, require
from leone import COUNTERS, VERSION

BODY_LIMIT = 16 << 20  # bytes
MOST_CONNECTIONS = 500  # that are served; as many more are told that they are too many
READ_S = 30  # for the head and the body of a request, from the last answer or the connection on
SEND_S = 30  # a client that takes no byte for so long is given up
SEND_BUFFER = 1 << 17  # bytes that the system may hold for a client that lags
TICK_S = 0.05  # how often the writer looks at clients that lag, and for those that went away
KEEPALIVE_S = 15  # a stream that is silent for so long gets a comment
STUCK_S = 60  # /health fails when no step has ended for so long while work waits
SWITCH_S = 5e-4  # how long a thread may keep the interpreter while others want it


def write_log(line):
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def report_bug(error):
    """One line on an error that should not exist, with its place."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    write_log(f"internal error at {Path(at.filename).name}:{at.lineno}: "
              f"{type(error).__name__}: {chat.one_line(error)}")
    return LeoneError("internal error; please report it with the line in the server's log")


class Answer:
    """One HTTP answer under way: its choices, its client, and the bytes that wait for it."""

    def __init__(self, order, requests, server, handler):
        self.order, self.connection = order, handler.connection
        self.chunked = handler.request_version == "HTTP/1.1"
        self.choices = [Choice(order, request, i, server) for i, request in enumerate(requests)]
        prefix, kind = (("chatcmpl", "chat.completion" + ".chunk" * order.stream) if order.is_chat
                        else ("cmpl", "text_completion"))
        self.head = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind,
                     "created": int(time.time()), "model": server.model_name,
                     "system_fingerprint": server.fingerprint}
        self.done = threading.Event()  # the writer has finished with it
        self.gone = self.error = None  # why its client gets no more; why a request failed
        self.buffer, self.lagged = bytearray(), False  # lagged: what is new will go out together
        self.moved = time.monotonic()  # when bytes were last taken
        if order.stream and order.is_chat:
            role = {"delta": {"role": "assistant", "content": ""}}
            self.buffer += b"".join(self.event({**c.part([], []), **role}) for c in self.choices)

    def event(self, *choices, **more):
        """A server-sent event with these choices."""
        usage = {"usage": None} if self.order.include_usage else {}
        return self.framed(f"data: {encode({**self.head, 'choices': choices, **usage, **more})}")

    def framed(self, text):
        data = text.encode() + b"\n\n"
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data

    def pump(self):
        """Send what is new. True once there will be no more. OSError if its client is gone."""
        if not self.flush():
            return False
        for choice in self.choices:
            news = choice.advance()
            self.error = self.error or choice.request.error
            if self.order.stream and not self.error:
                if self.lagged and news:
                    news = [tuple(sum(parts, []) for parts in zip(*news))]
                parts = [choice.part(*new) for new in news if any(new)]
                if news and choice.finish:
                    parts.append(choice.part([], [], choice.finish))
                self.buffer += b"".join(map(self.event, parts))
        self.lagged = False
        return self.flush() and bool(self.error or all(c.finish for c in self.choices))

    def flush(self):
        """Send what the socket takes. True if that is all there is."""
        with contextlib.suppress(BlockingIOError):
            if self.buffer:
                del self.buffer[:self.connection.send(self.buffer)]
                self.moved = time.monotonic()
        self.lagged |= bool(self.buffer)
        return not self.buffer

    def look_after(self):
        """Like pump, also for a client that went away, takes nothing, or has long heard nothing."""
        with contextlib.suppress(BlockingIOError):  # it says nothing, as it should
            if not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionError("disconnected")
        silent = time.monotonic() - self.moved
        if self.buffer and silent > SEND_S:
            raise TimeoutError("too slow")
        if self.order.stream and not self.buffer and silent > KEEPALIVE_S:
            self.buffer += self.framed(": keepalive")
        return self.pump()

    def usage(self):
        requests = [choice.request for choice in self.choices]
        prompt, completion = len(requests[0].prompt), sum(len(r.tokens) for r in requests)
        drafted, accepted = sum(r.drafted for r in requests), sum(r.accepted for r in requests)
        return {"prompt_tokens": prompt, "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": requests[0].cached_tokens},
                "completion_tokens_details": {"accepted_prediction_tokens": accepted,
                                              "rejected_prediction_tokens": drafted - accepted}}

    def times(self):
        """Seconds to the first token, and from one to the next on average (None where there is no
        next one), of the first choice."""
        request, now = self.choices[0].request, time.perf_counter()
        first, last = request.first_token or now, request.finished or now
        gaps = len(request.tokens) - 1
        return first - request.submitted, (last - first) / gaps if gaps > 0 else None

    def summary(self):
        """The end of its line in the log."""
        usage, (first, gap) = self.usage(), self.times()
        finish = self.gone or ",".join(sorted({c.finish or "error" for c in self.choices}))
        rate = f"{self.order.n / gap:.1f} tok/s " if gap else ""
        right, wrong = usage["completion_tokens_details"].values()
        rate += f"drafts {right}/{right + wrong} right " if right + wrong else ""
        return (f"prompt {usage['prompt_tokens']} "
                f"cached {usage['prompt_tokens_details']['cached_tokens']} ttft {first:.3f} s "
                f"tokens {usage['completion_tokens']} {rate}{finish}")


# ---- the writer ------------------------------------------------------------------------------


class Writer(threading.Thread):
    """Sends what the engine generates. One token is one event; a client that lags gets several
    tokens in its next event, and one that takes nothing is given up."""

    def __init__(self):
        super().__init__(name="writer", daemon=True)
        self.stopped = False
        self.answers = {}  # Request -> its Answer
        self.notices, self.awake = deque(), threading.Event()  # Requests that have news

    def notify(self, request):
        """Any thread: see to `request` soon. Never blocks."""
        self.notices.append(request)
        if not self.awake.is_set():
            self.awake.set()

    def take_over(self, answer):
        """Any thread: from now on the answer's socket is the writer's, until it is done."""
        answer.connection.setblocking(False)
        self.answers.update((choice.request, answer) for choice in answer.choices)
        self.notify(answer.choices[0].request)

    def run(self):
        ticked = 0
        while not self.stopped:
            self.awake.wait(TICK_S if self.answers else 1.0)
            self.awake.clear()
            noticed = (self.notices.popleft() for _ in range(len(self.notices)))
            self.see_to(dict.fromkeys(map(self.answers.get, noticed)), Answer.pump)
            if time.monotonic() > ticked + TICK_S:
                ticked = time.monotonic()
                self.see_to(set(self.answers.values()), Answer.look_after)

    def see_to(self, answers, send):
        """Hand those that are finished, or went wrong, back to the threads that wait for them."""
        for answer in answers:
            try:
                if not answer or not send(answer):
                    continue
            except OSError as error:
                answer.gone = chat.one_line(error)
            except Exception as error:
                answer.error = report_bug(error)
            for choice in answer.choices:
                del self.answers[choice.request]
            answer.done.set()


# ---- the server ------------------------------------------------------------------------------


def shut(connection, how=socket.SHUT_RDWR):
    with contextlib.suppress(OSError):  # it is already
        connection.shutdown(how)


class Server(socketserver.ThreadingTCPServer):
    """Listens, and owns the engine thread and the writer. start() it, then close() or abort()."""
    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024

    def __init__(self, open_engine, address=("127.0.0.1", 0), model_name="model", api_key=None,
                 cors=None, receipt_key=None, quiet=False, verbose=False):
        """open_engine() is called in the engine thread. address: an IPv4 address and a port. cors:
        origin of web pages that may call. receipt_key: bytes. quiet: no line per request,
        verbose: also for /health and /metrics."""
        self.open_engine, self.model_name, self.api_key = open_engine, model_name, api_key
        self.cors, self.receipt_key, self.quiet, self.verbose = cors, receipt_key, quiet, verbose
        self.engine = self.failure = None
        self.draining = self.stopping = False
        self.loaded = threading.Event()  # the engine is there, or will never be
        self.ended = Future()  # done when the engine thread is
        self.work, self.posted = threading.Event(), deque()  # (Future, function) for its thread
        self.gate = threading.Lock()  # nothing is submitted to an engine that ends
        self.steps, self.progress = 0, time.monotonic()  # when a step last ended, or none had to
        self.deadlines = {}  # open connection -> when its request must be there; None: it is
        self.samples, self.samples_lock = Counter(), threading.Lock()  # of /metrics
        super().__init__(address, Handler)
        self.loopback = ipaddress.ip_address(address[0]).is_loopback
        self.url = "http://{}:{}".format(*self.server_address)
        self.writer = Writer()
        self.threads = [
            threading.Thread(target=self.serve_forever, args=[0.1], name="accept", daemon=True),
            threading.Thread(target=self.run_engine, name="engine", daemon=True)]

    def start(self):
        for thread in self.writer, *self.threads:
            thread.start()
        return self

    def close(self):
        """Refuse what is new, finish what runs, hibernate sessions, end all threads."""
        self.draining = True
        while None in list(self.deadlines.values()):
            time.sleep(0.02)
        self.abort()

    def abort(self):
        """End all threads; what runs is cancelled."""
        self.draining = self.stopping = True
        self.work.set()
        self.shutdown()
        for thread in self.threads:
            thread.join()
        self.server_close()
        self.writer.stopped = True
        self.writer.awake.set()
        self.writer.join()
        for connection in list(self.deadlines):  # what is being written is still written
            shut(connection, socket.SHUT_RD)

    # ---- connections, in the accept thread ---------------------------------------------------

    def process_request(self, connection, client_address):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if len(self.deadlines) >= 2 * MOST_CONNECTIONS:
            return super().shutdown_request(connection)
        self.deadlines[connection] = time.monotonic() + READ_S
        super().process_request(connection, client_address)

    def service_actions(self):
        """Ten times a second: end connections whose request does not come."""
        for connection, deadline in list(self.deadlines.items()):
            if deadline and time.monotonic() > deadline:
                shut(connection)

    def shutdown_request(self, connection):
        super().shutdown_request(connection)
        self.deadlines.pop(connection, None)

    def handle_error(self, *_):
        if not isinstance(error := sys.exc_info()[1], OSError):  # else its client went away
            report_bug(error)

    # ---- the engine thread -----------------------------------------------------------------

    def run_engine(self):
        try:
            engine = self.open_engine()
            self.template = engine.gguf.metadata.get("tokenizer.chat_template")
            self.shown = frozenset(id for id, token in enumerate(engine.tokenizer.tokens)
                                   if token.decode(errors="replace") in chat.MARKERS)
            self.most_text = engine.longest * max(map(len, engine.tokenizer.tokens))  # bytes
            self.fingerprint = f"leone-{VERSION}-{engine.ops.name}-{engine.kv.format}"
            if self.receipt_key:
                engine.model_hash.begin()  # before the first receipt waits for it
            engine.on_event, self.engine = self.writer.notify, engine
            self.loaded.set()
            write_log(f"{self.model_name} is ready: {self.fingerprint}")
            while not self.stopping:
                self.turn(engine)
            with self.gate:
                engine.fail(RequestError("the server stops", 503, "draining"))
            engine.close()
        except BaseException as error:  # whatever it is, nobody may wait for this thread in vain
            known = isinstance(error, (LeoneError, OSError, MemoryError))
            text = chat.one_line(error if known else report_bug(error))
            with self.gate:
                self.failure = LeoneError(f"the engine has failed: {text}; restart the server")
                if self.engine:
                    self.engine.fail(self.failure)
            write_log(f"leone: {self.failure if self.engine else text}")
        self.ended.set_result(None)
        self.loaded.set()

    def turn(self, engine):
        """Serve other threads, then make one step."""
        self.work.clear()
        while self.posted:
            future, function = self.posted.popleft()
            try:
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)
        if engine.steps != self.steps or not engine.busy:
            self.steps, self.progress = engine.steps, time.monotonic()
        if engine.busy:
            engine.step()
        else:
            self.work.wait(1.0)

    def usable(self):
        """The engine; RequestError with status 503 where requests cannot be taken."""
        require(not self.failure, str(self.failure), 503, "engine_failed")
        require(not self.draining, "the server is shutting down", 503, "draining")
        require(self.engine, "the model is being loaded; try again later", 503, "loading")
        return self.engine

    def on_engine(self, function):
        """Call function(engine) in the engine thread, between two steps; returns its result."""
        self.usable()
        future = Future()
        self.posted.append((future, function))
        self.work.set()
        if future not in wait([future, self.ended], return_when=FIRST_COMPLETED).done:
            self.usable()  # says why
        return future.result()

    def submit(self, order, choice):
        """The request for one choice of an order. Raises RequestError, Overloaded."""
        shown = self.shown if order.is_chat else frozenset()
        with self.gate:
            request = self.usable().submit(
                order.prompt, order.sampling, order.max_tokens, order.ignore_eos, order.session,
                choice, order.salt, order.top_logprobs, shown, order.speculation)
        self.work.set()
        return request

    # ---- what it says of itself ------------------------------------------------------------

    def count(self, sample, value=1):
        with self.samples_lock:
            self.samples[sample] += value

    def metrics(self):
        """Prometheus text."""
        stats = self.engine.stats if self.engine else {}
        samples = {f'memory_bytes{{kind="{kind}"}}': size
                   for kind, size in stats.pop("bytes", {}).items()}
        samples.update((name + "_total" * (name in ("steps", *COUNTERS)), n)
                       for name, n in stats.items())
        with self.samples_lock:
            samples.update(self.samples, connections=len(self.deadlines))
        family = lambda sample: re.sub(r"(_sum|_count)?(\{.*)?$", "", sample)
        lines = []
        for name, group in itertools.groupby(sorted(samples, key=family), family):
            kind = ("counter" if name.endswith("_total") else
                    "summary" if name.endswith("_seconds") else "gauge")
            lines.append(f"# TYPE leone_{name} {kind}")
            lines += [f"leone_{sample} {samples[sample]}" for sample in group]
        return "\n".join(lines) + "\n"


# ---- HTTP ------------------------------------------------------------------------------------

CSP = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
       "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
       "frame-ancestors 'none'")


HEAD_CODES = {414: "path_too_long", 431: "headers_too_large", 501: "method_unknown",
              505: "http_version"}


class Handler(BaseHTTPRequestHandler):
    """One connection and its requests, one after another."""
    protocol_version = request_version = default_request_version = "HTTP/1.1"
    timeout = SEND_S
    disable_nagle_algorithm = True
    route, body_is_unread, stream = "other", False, None  # stream: an Answer whose head is sent

    def log_message(self, *_):
        pass

    def send_error(self, status, message=None, explain=None):
        """What the standard library finds wrong with the head of a request."""
        self.close_connection, self.command, self.route, self.stream = True, "?", "other", None
        self.send_problem(RequestError(message or self.responses[status][0], int(status),
                                       HEAD_CODES.get(status, "malformed_request")))

    def respond(self):
        try:
            self.route, self.stream = "other", None
            self.body_is_unread = bool(self.headers.get("transfer-encoding")
                                       or self.headers.get("content-length", "0") != "0")
            self.check_caller()
            self.dispatch()
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            self.send_problem(error if isinstance(error, LeoneError) else report_bug(error))
        self.server.deadlines[self.connection] = time.monotonic() + READ_S

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = respond

    def check_caller(self):
        """RequestError for callers that must not be listened to."""
        server, hosts = self.server, self.headers.get_all("host", [])
        if len(server.deadlines) > MOST_CONNECTIONS:
            self.close_connection = True
            raise Overloaded(f"{MOST_CONNECTIONS} connections are open; try again later", 0, 0,
                             1000, "too_many_connections")
        one_host = len(hosts) == 1 or self.request_version != "HTTP/1.1"
        require(one_host and not self.headers.defects, "the head of the request is malformed",
                400, "malformed_request")
        host, origin = (hosts or ["localhost"])[0].strip(), self.headers.get("origin")
        require(not server.loopback or is_local(host),
                "call this server by an IP address or as localhost", 403, "host_not_allowed")
        own = not origin or server.cors in ("*", origin) or origin.partition("://")[2] == host
        require(own, "pages of another origin may not call this server; start it with "
                "--cors ORIGIN", 403, "origin_not_allowed")

    def dispatch(self):
        target = re.sub("(?i)^https?://[^/?]*", "", self.path) or "/"  # the absolute form
        server, path = self.server, unquote(target.partition("?")[0])
        matches = ((route, re.fullmatch(route.replace("*", "([^/]+)"), path)) for route in ROUTES)
        self.route, match = next((pair for pair in matches if pair[1]), ("other", None))
        require(match, "there is no such path; SERVING.md lists them", 404, "not_found")
        methods, method = ROUTES[self.route], self.command.replace("HEAD", "GET")
        if self.command == "OPTIONS" and server.cors:
            return self.send(200, b"")
        require(method in methods, f"this path takes {', '.join(methods)}", 405,
                "method_not_allowed")
        key, given = server.api_key, self.headers.get("authorization", "").encode("latin-1")
        require(not key or path in ("/", "/health")
                or secrets.compare_digest(given, f"Bearer {key}".encode()),
                "the API key is missing or wrong; send Authorization: Bearer KEY", 401,
                "invalid_api_key")
        methods[method](self, self.read_body(), *match.groups())

    def read_body(self):
        require(not self.headers.get("transfer-encoding"), "send the body with a Content-Length",
                411, "length_required")
        given = {length.strip() for length in self.headers.get_all("content-length", ["0"])}
        require(re.fullmatch("[0-9]{1,15}", ",".join(given)), "Content-Length is not a number", 400,
                "malformed_request")
        length = int(given.pop())
        require(length <= BODY_LIMIT, f"the body has {length} bytes; {BODY_LIMIT} are allowed", 413,
                "body_too_large")
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError
        self.body_is_unread = False
        self.server.deadlines[self.connection] = None
        return body

    # ---- answers -----------------------------------------------------------------------------

    def send_head(self, status, kind, headers):
        self.close_connection |= self.body_is_unread or self.server.draining
        headers = {"Server": f"leone/{VERSION}", "Content-Type": kind,
                   "X-Content-Type-Options": "nosniff", **headers}
        if self.server.cors:
            headers.update({"Access-Control-Allow-Origin": self.server.cors, "Vary": "Origin",
                            "Access-Control-Allow-Methods": "GET, POST, DELETE",
                            "Access-Control-Allow-Headers": "Authorization, Content-Type"})
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, status, body, kind="application/json", headers={}, outcome=""):
        """A whole answer; body: bytes, or what becomes JSON."""
        data = body if isinstance(body, bytes) else encode(body).encode("utf-8", "replace")
        self.record(status, outcome)
        self.send_head(status, kind, {"Content-Length": len(data), **headers})
        if self.command != "HEAD":
            self.wfile.write(data)
        if self.body_is_unread:
            # Closed at once, the system might throw away the answer because of what still comes.
            shut(self.connection, socket.SHUT_WR)
            while self.rfile.read1(1 << 16):
                pass

    def send_problem(self, error):
        status, body = error_object(error)
        code, headers = body["error"]["code"], {}
        if self.stream:  # the client must see that it did not end well
            self.close_connection = True
            return self.end_stream(status, code, self.stream.framed(f"data: {encode(body)}"))
        delay = getattr(error, "retry_after_ms", 1000 if status == 503 else None)
        if delay is not None:
            headers = {"retry-after-ms": delay, "Retry-After": -(-delay // 1000)}
        if status == 405:
            headers = {"Allow": ", ".join(ROUTES[self.route])}
        self.send(status, body, headers=headers, outcome=code)

    def record(self, status, outcome):
        """Count and log the request."""
        server = self.server
        server.count(f'http_requests_total{{route="{self.route}",status="{status}"}}')
        if server.verbose or not server.quiet and self.route not in ("/health", "/metrics"):
            write_log(f"{self.command} {self.route} {status} {outcome}")

    # ---- completions -------------------------------------------------------------------------

    def complete(self, body, is_chat):
        server = self.server
        server.usable()
        order, requests = Order(parse_json(body), is_chat, server), []
        try:
            for choice in range(order.n):
                requests.append(server.submit(order, choice))
            self.answer(Answer(order, requests, server, self))
        finally:
            for request in requests:
                request.cancel()

    def answer(self, answer):
        server, order = self.server, answer.order
        if order.stream:
            self.close_connection |= not answer.chunked
            self.stream = answer
            self.send_head(200, "text/event-stream", {
                "Cache-Control": "no-cache", "X-Accel-Buffering": "no",
                **({"Transfer-Encoding": "chunked"} if answer.chunked else {})})
        server.writer.take_over(answer)
        while not answer.done.wait(0.5) and not server.writer.stopped:
            pass
        self.connection.settimeout(self.timeout)
        if answer.gone or not answer.done.is_set():
            self.close_connection = True
            return self.record(499, answer.summary())
        if answer.error:
            raise answer.error
        while order.session and answer.choices[0].request.slot >= 0 and not server.ended.done():
            time.sleep(1e-3)  # a step under way may still use its memory; then its turn is over
        for name, seconds in zip(("time_to_first_token", "inter_token"), answer.times()):
            server.count(f"{name}_seconds_sum", seconds or 0.0)
            server.count(f"{name}_seconds_count", int(seconds is not None))
        receipt = self.receipt(answer) if order.receipt else {}
        usage = {"usage": answer.usage()}
        if order.stream:
            ends = [usage] * order.include_usage + [receipt] * order.receipt
            self.end_stream(200, answer.summary(), *(answer.event(**end) for end in ends),
                            answer.framed("data: [DONE]"))
        else:
            self.send(200, {**answer.head, "choices": [c.whole() for c in answer.choices],
                            **usage, **receipt}, outcome=answer.summary())

    def end_stream(self, status, outcome, *events):
        self.record(status, outcome)
        self.wfile.write(b"".join(events) + (b"0\r\n\r\n" if self.stream.chunked else b""))

    def receipt(self, answer):
        server, request = self.server, answer.choices[0].request
        described = receipts.describe(
            server.engine, request, answer.head["id"], server.engine.model_hash.result(),
            server.template if answer.order.is_chat else None)
        return {"receipt": receipts.make(server.receipt_key, described),
                "prompt_token_ids": request.prompt, "token_ids": request.tokens}

    # ---- the other routes --------------------------------------------------------------------

    def page(self, _):
        page = Path(__file__).with_name("index.html").read_bytes()
        self.send(200, page, "text/html; charset=utf-8", {"Content-Security-Policy": CSP})

    def health(self, _):
        server, silent = self.server, time.monotonic() - self.server.progress
        require(not server.usable().busy or silent <= STUCK_S,
                f"no step has ended for {silent:.0f} s", 503, "stuck")
        self.send(200, {"status": "ok", "model": server.model_name})

    def models(self, _):
        engine = self.server.usable()
        self.send(200, {"object": "list", "data": [{
            "id": self.server.model_name, "object": "model", "created": 0, "owned_by": "leone",
            "meta": {"n_ctx": engine.longest, "n_vocab": engine.cfg.n_vocab}}]})

    def list_sessions(self, _):
        data = self.server.on_engine(lambda engine: engine.sessions.list())
        self.send(200, {"object": "list", "data": data})

    def change_session(self, change, *names):
        self.server.on_engine(lambda engine: getattr(engine.sessions, change)(*names))
        self.send(200, {"object": "session", "name": names[-1], "change": change})


ROUTES = {  # path -> method -> function(handler, body, *parts of the path)
    "/": {"GET": Handler.page},
    "/health": {"GET": Handler.health},
    "/metrics": {"GET": lambda self, _: self.send(
        200, self.server.metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")},
    "/v1/models": {"GET": Handler.models},
    "/v1/chat/completions": {"POST": lambda self, body: self.complete(body, is_chat=True)},
    "/v1/completions": {"POST": lambda self, body: self.complete(body, is_chat=False)},
    "/v1/sessions": {"GET": Handler.list_sessions},
    "/v1/sessions/*": {"DELETE": lambda self, _, name: self.change_session("delete", name)},
    "/v1/sessions/*/fork": {"POST": lambda self, body, name: self.change_session(
        "fork", name, parse_json(body).get("to"))},
    "/v1/sessions/*/hibernate": {
        "POST": lambda self, _, name: self.change_session("hibernate", name)}}


def is_local(host):
    """Whether a Host header can be meant for this machine. The name of another one may be the trick
    of a web page to reach us (DNS rebinding); an address cannot."""
    name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return f".{name}".endswith(".localhost") or name == socket.gethostname().lower()


# ---- command line ----------------------------------------------------------------------------


def build_parser():
    parser = cli.Parser(prog="server.py", fromfile_prefix_chars="@",
                        description="Serve a GGUF model over HTTP. @FILE reads options from FILE.")
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("-m", "--model", required=True, metavar="FILE", help="GGUF file")
    for option in "--backend", "--kv", "--ctx", "--prefill-chunk", "--draft":
        add(option, **cli.OPTIONS[option])
    for name, default, text in (
            ("--sessions", 8, "sequences that hold memory at once (default 8)"),
            ("--batch-size", 8, "sequences that decode in one step (default 8)"),
            ("--queue", 64, "requests that may wait (default 64)"),
            ("--queue-tokens", None, "tokens of these (default: any number)"),
            ("--state-cache", 2048, "MiB of host memory for recurrent states (default 2048)")):
        add(name, type=int, default=default, metavar="N", help=text)
    add("--session-store", metavar="DIR", help="folder in which idle sessions survive")
    add("--bind", default="127.0.0.1:8080", metavar="HOST:PORT",
        help="default %(default)s; port 0 takes a free one; the URL is printed")
    add("--allow-remote", action="store_true", help="permit an address that others can reach")
    add("--api-key", metavar="KEY", help="clients must send it")
    add("--cors", metavar="ORIGIN", help="web pages of this origin may call; * means all")
    add("--receipt-key", metavar="FILE", help="sign receipts with this key; made if absent")
    add("--quiet", action="store_true", help="no line per request")
    add("--verbose", action="store_true", help="a line for /health and /metrics too")
    return parser


def open_server(args):
    """The server that the command line asks for, not started. Raises RequestError, OSError."""
    require(args.api_key != "", "the API key is empty; leave --api-key out to need none")
    receipt_key = args.receipt_key and receipts.load_key(args.receipt_key)
    open_engine = lambda: cli.open_engine(
        args, max_rows=args.batch_size, queue=args.queue, queue_tokens=args.queue_tokens,
        sessions=args.sessions, session_store=args.session_store,
        state_cache=args.state_cache << 20)
    host, _, port = args.bind.rpartition(":")
    try:
        address = socket.gethostbyname(host or "127.0.0.1"), int(port)
        require(ipaddress.ip_address(address[0]).is_loopback or args.allow_remote,
                f"{host} can be reached from other machines; say --allow-remote if that is meant, "
                "and set --api-key")
        return Server(open_engine, address, Path(args.model).stem, args.api_key, args.cors,
                      receipt_key, args.quiet, args.verbose)
    except (OSError, ValueError, OverflowError) as error:  # of the name, of the number, of its size
        raise RequestError(f"cannot listen at {args.bind}: {getattr(error, 'strerror', error)}; "
                           "give another HOST:PORT with --bind, port 0 for a free one") from None


def run(args):
    """Serve until a signal comes; returns the exit code."""
    sys.setswitchinterval(SWITCH_S)
    server, stop = open_server(args), threading.Event()

    def on_signal(*_):
        if stop.is_set() or not server.loaded.is_set():
            os._exit(130)  # the second one does not wait, nor does one while loading
        stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    print(server.start().url, flush=True)
    while not stop.wait(0.2):
        if server.failure and not server.engine:
            return 2
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(cli.main(parser=build_parser()))
