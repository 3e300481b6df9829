#!/usr/bin/env python3
"""The server: an OpenAI subset, sessions, metrics and a page, over one engine.

    python server.py -m MODEL --bind 127.0.0.1:8080

Three kinds of thread share the work:

    handlers   one per connection: read and check a request, render and tokenise the prompt, submit
               it, sleep until it is answered, write the end of the answer
    engine     owns the device: calls what other threads posted, then Engine.step()
    writer     turns the events of all requests into bytes for all clients, on sockets that never
               block; it sees which clients went away, and cancels what they asked for

What a request may say and how an answer is put is in api.py; read that first. Here follow answers
under way, the writer, the server, HTTP, the command line.
"""
import argparse
import hmac
import ipaddress
import itertools
import math
import os
import re
import secrets
import selectors
import signal
import socket
import socketserver
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, wait
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote

import chat
import cli
import receipts
from api import Choice, Order, encode, error_object, parse_json, text_of
from errors import LeoneError, Overloaded, RequestError
from leone import VERSION

BODY_LIMIT = 16 << 20  # bytes
MOST_CONNECTIONS = 512
READ_S = 30  # for the head and the body of a request, from the last answer or the connection on
SEND_S = 30  # a client that takes no byte for so long is given up
SEND_BUFFER = 1 << 17  # bytes that the system may hold for a client that lags
BACKLOG = 1 << 14  # tokens that may wait for it
BURST = 16  # tokens that one sequence sends before the others have their turn
KEEPALIVE_S = 15  # a stream that is silent for so long gets a comment
STUCK_S = 60  # /health fails when no step has ended for so long while work waits
LINGER_S = 2  # how long a refused client may take to read why
SWITCH_S = 5e-4  # how long a thread may keep the interpreter while others want it


def write_log(line):
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def report_bug(error):
    """One line on an error that should not exist, with its place."""
    at = error.__traceback__
    while at.tb_next:
        at = at.tb_next
    place = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"
    write_log(f"internal error at {place}: {type(error).__name__}: {chat.one_line(error)}")
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
        self.gone = None  # why its client gets no more, if so
        self.error = None  # of a request that failed
        self.buffer = bytearray()
        self.moved = time.monotonic()  # when bytes were last taken
        self.mask, self.reads = 0, selectors.EVENT_READ  # what its socket is watched for

    def event(self, *choices, **more):
        """A server-sent event with these choices."""
        usage = {"usage": None} if self.order.include_usage else {}
        return self.framed(f"data: {encode({**self.head, 'choices': choices, **usage, **more})}")

    def framed(self, text):
        data = text.encode() + b"\n\n"
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data

    def usage(self):
        requests = [choice.request for choice in self.choices]
        prompt = sum(len(request.prompt) for request in requests[::self.order.n])
        cached = sum(request.cached_tokens for request in requests[::self.order.n])
        completion = sum(len(request.tokens) for request in requests)
        reasoning = sum(choice.reasoning_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": cached},
                "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def summary(self):
        """The end of its line in the log."""
        usage, requests = self.usage(), [choice.request for choice in self.choices]
        first = min(request.first_token for request in requests) or math.inf
        seconds = max(request.finished for request in requests) - first
        rate = (usage["completion_tokens"] - len(requests)) / seconds if seconds > 0 else 0
        finish = self.gone or ",".join(sorted({c.finish or "error" for c in self.choices}))
        return (f"prompt {usage['prompt_tokens']} "
                f"cached {usage['prompt_tokens_details']['cached_tokens']} "
                f"ttft {first - requests[0].submitted:.3f} s "
                f"tokens {usage['completion_tokens']} {rate:.1f} tok/s {finish}")


# ---- the writer ------------------------------------------------------------------------------


class Writer(threading.Thread):
    """Sends what the engine generates. One token is one event; a client that lags gets several
    tokens in its next event, and one that takes nothing is given up."""

    def __init__(self, server):
        super().__init__(name="writer", daemon=True)
        self.server, self.stopped = server, False
        self.notices = deque()  # an Answer to take over, or a Request that has news
        self.awake, (self.bell, self.waker) = False, socket.socketpair()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.bell, selectors.EVENT_READ)
        self.answers = {}  # Request -> its Answer
        self.first_token = Histogram(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
        self.between_tokens = Histogram(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)

    def notify(self, item):
        """Any thread: see to `item` soon. Never blocks."""
        self.notices.append(item)
        if not self.awake:
            self.awake = True
            self.waker.send(b"\0")

    def run(self):
        swept = 0
        while not self.stopped:
            for key, _ in self.selector.select(1.0):
                if key.data:
                    self.guarded(self.ready, key.data)
                else:
                    self.bell.recv(64)
            self.awake = False
            for item in dict.fromkeys(self.notices.popleft() for _ in range(len(self.notices))):
                if isinstance(item, Answer):
                    self.guarded(self.take_over, item)
                elif item in self.answers:
                    self.guarded(self.pump, self.answers[item])
            if time.monotonic() > swept + 1:
                swept = time.monotonic()
                self.sweep(swept)
        for answer in set(self.answers.values()):
            self.let_go(answer, "stopped")

    def close(self):
        for resource in self.selector, self.bell, self.waker:
            resource.close()

    def guarded(self, method, answer):
        """Call a method. Whatever goes wrong ends this answer, not the thread."""
        try:
            if not answer.done.is_set():
                method(answer)
        except OSError:
            self.let_go(answer, "disconnected")
        except Exception as error:
            answer.error = report_bug(error)
            self.let_go(answer)

    def take_over(self, answer):
        for choice in answer.choices:
            self.answers[choice.request] = answer
            if answer.order.stream and answer.order.is_chat:
                answer.buffer += answer.event({
                    "index": choice.index, "delta": {"role": "assistant", "content": ""},
                    "logprobs": None, "finish_reason": None})
        self.flush(answer)
        self.pump(answer)

    def pump(self, answer, together=False):
        """Send what is new; together: as one event per choice."""
        if answer.buffer:  # its client lags
            if sum(len(choice.request.events) for choice in answer.choices) > BACKLOG:
                self.let_go(answer, "too slow")
            return
        for choice in answer.choices:
            before = choice.taken
            news = choice.advance(BACKLOG if together else BURST)
            self.observe(choice, choice.taken - before)
            if choice.request.events:
                self.notify(choice.request)
            answer.error = answer.error or choice.request.error
            if not answer.order.stream or answer.error:
                continue
            if together and news:
                news = [tuple(sum(parts, []) for parts in zip(*news))]
            for deltas, entries in news:
                if deltas or entries:
                    answer.buffer += answer.event(choice.part(deltas, entries))
            if news and choice.finish:
                answer.buffer += answer.event(choice.part([], [], choice.finish))
        self.flush(answer)
        if not answer.buffer and (answer.error or all(c.finish for c in answer.choices)):
            self.let_go(answer)

    def observe(self, choice, count):
        """Times as clients see them: there is none between tokens that are sent together."""
        now, request = time.perf_counter(), choice.request
        if count:
            if choice.last_time:
                self.between_tokens.add(now - choice.last_time)
            else:
                self.first_token.add(request.first_token - request.submitted)
            self.between_tokens.add(0, count - 1)
            choice.last_time = now

    def flush(self, answer):
        """Send what the socket takes, and watch it for what may come next."""
        try:
            if answer.buffer:
                del answer.buffer[:answer.connection.send(answer.buffer)]
                answer.moved = time.monotonic()
        except BlockingIOError:
            pass
        self.watch(answer, answer.reads | selectors.EVENT_WRITE * bool(answer.buffer))

    def watch(self, answer, mask):
        if mask != answer.mask:
            if answer.mask:
                self.selector.unregister(answer.connection)
            if mask:
                self.selector.register(answer.connection, mask, answer)
            answer.mask = mask

    def ready(self, answer):
        """Its socket can be read or written."""
        try:
            if answer.reads and not answer.connection.recv(1, socket.MSG_PEEK):
                return self.let_go(answer, "disconnected")
            answer.reads = 0  # its next request is there already, and hides its end
        except BlockingIOError:
            pass
        lagged = bool(answer.buffer)
        self.flush(answer)
        if lagged and not answer.buffer:
            self.pump(answer, together=True)

    def let_go(self, answer, gone=None):
        """Hand an answer back to the thread that waits for it. gone: why nobody is there to read
        it; what still runs for it is cancelled."""
        for choice in answer.choices:
            choice.request.cancel()
            self.answers.pop(choice.request, None)
        self.watch(answer, 0)
        answer.gone = gone
        answer.done.set()

    def sweep(self, now):
        """Once a second: clients that take nothing, silent streams, requests that never come."""
        for answer in set(self.answers.values()):
            if answer.buffer and now - answer.moved > SEND_S:
                self.let_go(answer, "too slow")
            elif answer.order.stream and not answer.buffer and now - answer.moved > KEEPALIVE_S:
                answer.buffer += answer.framed(": keepalive")
                self.guarded(self.flush, answer)
        for connection, deadline in list(self.server.deadlines.items()):
            if now > deadline:
                shut(connection)


def shut(connection, how=socket.SHUT_RDWR):
    try:
        connection.shutdown(how)
    except OSError:  # it is already
        pass


class Histogram:
    """Counts of values up to each bound, for Prometheus. Only one thread may add."""

    def __init__(self, *bounds):
        self.counts, self.sum = dict.fromkeys((*bounds, math.inf), 0), 0.0

    def add(self, value, times=1):
        self.counts[next(bound for bound in self.counts if value <= bound)] += times
        self.sum += value * times

    def samples(self, name):
        for bound, total in zip(self.counts, itertools.accumulate(self.counts.values())):
            yield f'{name}_bucket{{le="{"+Inf" if bound == math.inf else bound}"}} {total}'
        yield from (f"{name}_sum {self.sum}", f"{name}_count {total}")


# ---- the server ------------------------------------------------------------------------------

COUNTERS = ("steps", "rows", "steps_of_16_rows", "prompt_tokens", "cached_tokens",
            "generated_tokens")  # of Engine.stats; the others are gauges


class Server(socketserver.ThreadingTCPServer):
    """Listens, and owns the engine thread and the writer. start() it, then close() or abort()."""
    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024

    def __init__(self, open_engine, address=("127.0.0.1", 0), model_name="model", api_key=None,
                 cors=None, receipt_key=None, quiet=False, verbose=False):
        """open_engine() is called in the engine thread. address: an IP address and a port. cors:
        origin of web pages that may call. receipt_key: bytes. quiet: no line per request,
        verbose: also for /health and /metrics."""
        self.open_engine, self.model_name, self.api_key = open_engine, model_name, api_key
        self.cors, self.receipt_key, self.quiet, self.verbose = cors, receipt_key, quiet, verbose
        self.engine = self.failure = None
        self.draining = self.stopping = False
        self.loaded, self.ended = threading.Event(), threading.Event()  # the engine; or failed to
        self.work, self.posted = threading.Event(), deque()  # (Future, function) for its thread
        self.gate = threading.Lock()  # nothing is submitted to an engine that ends
        self.steps, self.progress = 0, time.monotonic()  # when a step last ended, or none had to
        self.deadlines = {}  # open connection -> when its request must be there
        self.refused = deque()  # (when to close it, connection)
        self.counts, self.count_lock = Counter(), threading.Lock()  # of (route, HTTP status)
        ip = ipaddress.ip_address(address[0])
        self.loopback = ip.is_loopback
        self.address_family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        super().__init__(address, Handler)
        host = f"[{ip}]" if ip.version == 6 else ip
        self.url = f"http://{host}:{self.server_address[1]}"
        self.writer = Writer(self)
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
        self.work.set()
        self.ended.wait()
        until = time.monotonic() + 2 * SEND_S
        while self.writer.answers and time.monotonic() < until:
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
        self.writer.notify(None)
        self.writer.join()
        until = time.monotonic() + SEND_S
        while self.deadlines and time.monotonic() < until:  # idle connections, last answers
            for connection in list(self.deadlines):
                shut(connection, socket.SHUT_RD)
            time.sleep(0.01)
        self.writer.close()

    def process_request(self, connection, client_address):
        """In the accept thread: a thread for the connection, or a refusal without one."""
        while self.refused and self.refused[0][0] < time.monotonic():
            self.refused.popleft()[1].close()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if len(self.deadlines) < MOST_CONNECTIONS:
            self.deadlines[connection] = time.monotonic() + READ_S
            return super().process_request(connection, client_address)
        self.count("connection", 429)
        body = encode(error_object(Overloaded(
            f"{MOST_CONNECTIONS} connections are open; try again later", 0, 0, 1000,
            "too_many_connections"))[1]).encode()
        connection.setblocking(False)
        connection.send(b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\n"
                        b"Retry-After: 1\r\nretry-after-ms: 1000\r\nConnection: close\r\n"
                        b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        shut(connection, socket.SHUT_WR)
        # Closed at once, its system might throw away the answer because of what it still sends.
        self.refused.append((time.monotonic() + LINGER_S, connection))

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
            self.style = chat.style_of(self.template)
            self.shown = frozenset(id for id, token in enumerate(engine.tokenizer.tokens)
                                   if token.decode(errors="replace") in chat.MARKERS)
            self.fingerprint = f"leone-{VERSION}-{engine.ops.name}-{engine.kv.format}"
            engine.on_event, self.engine = self.writer.notify, engine
            self.loaded.set()
            write_log(f"{self.model_name} is ready: {self.fingerprint}")
            while not self.turn(engine):
                pass
        except BaseException as error:  # whatever it is, nobody may wait for this thread in vain
            known = isinstance(error, (LeoneError, OSError, MemoryError))
            text = chat.one_line(error if known else report_bug(error))
            with self.gate:
                self.failure = LeoneError(f"the engine has failed: {text}; restart the server")
                if self.engine:
                    self.engine.fail(self.failure)
            write_log(f"leone: {self.failure if self.engine else text}")
        self.ended.set()
        self.loaded.set()

    def turn(self, engine):
        """Serve other threads, then make one step. True if the engine has been closed."""
        self.work.clear()
        while self.posted:
            future, function = self.posted.popleft()
            try:
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)
        if engine.steps != self.steps or not engine.busy:
            self.steps, self.progress = engine.steps, time.monotonic()
        if self.stopping:
            engine.fail(RequestError("the server stops", status=503, code="draining"))
        if self.draining:
            with self.gate:  # what passed it before is in the queue, and nothing passes it now
                if not engine.busy:
                    engine.close()
                    return True
        if engine.busy:
            engine.step()
        else:
            self.work.wait(1.0)

    def usable(self):
        """The engine; RequestError with status 503 where requests cannot be taken."""
        for state, code, message in (
                (self.failure, "engine_failed", str(self.failure)),
                (self.draining, "draining", "the server is shutting down"),
                (not self.engine, "loading", "the model is being loaded; try again later")):
            if state:
                raise RequestError(message, status=503, code=code)
        return self.engine

    def on_engine(self, function):
        """Call function(engine) in the engine thread, between two steps; returns its result."""
        self.usable()
        future = Future()
        self.posted.append((future, function))
        self.work.set()
        while not self.ended.is_set():
            wait([future], timeout=1.0)
            if future.done():
                return future.result()
        return self.usable()  # says why the engine has ended

    def submit(self, order):
        """The requests of an order, all of them or none. Raises RequestError, Overloaded."""
        requests, shown = [], self.shown if order.is_chat else frozenset()
        with self.gate:
            engine = self.usable()
            try:
                for ids, choice in itertools.product(order.prompts, range(order.n)):
                    requests.append(engine.submit(
                        ids, order.sampling, order.max_tokens, order.ignore_eos, order.session,
                        choice, order.salt, order.top_logprobs, shown))
            except BaseException:
                for request in requests:
                    request.cancel()
                raise
            finally:
                self.work.set()
        return requests

    # ---- what sessions said ----------------------------------------------------------------

    def remember(self, choice):
        """Keep the tokens of an answer: the tokenizer might make others of the same text."""
        engine, request, text = self.engine, choice.request, text_of(choice.deltas)
        ids = [id for id in request.tokens if id not in engine.tokenizer.eos_ids]
        if request.session and text and engine.detokenize(ids) == text:
            for said in text, text.strip():  # some templates strip it
                engine.sessions.answers(request.session)[said] = ids

    # ---- what it says of itself ------------------------------------------------------------

    def health(self):
        """(HTTP status, body) of /health: 200 only if requests are taken and answered."""
        try:
            engine = self.usable()
        except RequestError as error:
            return error.status, {"status": error.code, "message": str(error)}
        silent = time.monotonic() - self.progress
        if engine.busy and silent > STUCK_S:
            return 503, {"status": "stuck", "message": f"no step has ended for {silent:.0f} s"}
        return 200, {"status": "ok", "model": self.model_name}

    def metrics(self):
        """Prometheus text."""
        lines = []

        def metric(name, kind, samples):
            lines.extend((f"# TYPE leone_{name} {kind}", *samples))

        def labelled(name, labels, values):
            for key, value in values:
                pairs = ",".join(f'{label}="{text}"' for label, text in zip(labels, key))
                yield f"leone_{name}{{{pairs}}} {value}"

        stats = self.engine.stats if self.engine else {}
        memory = [((kind,), size) for kind, size in stats.pop("bytes", {}).items()]
        metric("memory_bytes", "gauge", labelled("memory_bytes", ["kind"], memory))
        for key, value in {**stats, "connections": len(self.deadlines)}.items():
            name, kind = (key + "_total", "counter") if key in COUNTERS else (key, "gauge")
            metric(name, kind, [f"leone_{name} {value}"])
        with self.count_lock:
            counts = sorted(self.counts.items())
        metric("http_requests_total", "counter",
               labelled("http_requests_total", ["route", "status"], counts))
        for name, histogram in (("time_to_first_token_seconds", self.writer.first_token),
                                ("inter_token_seconds", self.writer.between_tokens)):
            metric(name, "histogram", histogram.samples(f"leone_{name}"))
        return "\n".join(lines) + "\n"

    def count(self, route, status):
        with self.count_lock:
            self.counts[route, status] += 1


# ---- HTTP ------------------------------------------------------------------------------------

CSP = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
       "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
       "frame-ancestors 'none'")


class Handler(BaseHTTPRequestHandler):
    """One connection and its requests, one after another."""
    protocol_version = request_version = default_request_version = "HTTP/1.1"
    timeout = SEND_S
    disable_nagle_algorithm = True
    began, route, outcome, body_is_unread, head_is_sent = 0, "other", "", False, False

    def parse_request(self):
        self.began, self.route, self.outcome = time.perf_counter(), "other", ""
        self.body_is_unread = self.head_is_sent = False
        return super().parse_request()

    def handle_expect_100(self):
        return True  # read_body() says it, once it knows that it wants the body

    def log_message(self, *_):
        pass

    def send_error(self, status, message=None, explain=None):
        """What the standard library finds wrong with the head of a request."""
        self.close_connection, self.command = True, "?"
        self.send_problem(RequestError(message or self.responses[status][0], status=int(status)))

    def respond(self):
        try:
            self.body_is_unread = bool(self.headers.get("transfer-encoding")
                                       or self.headers.get("content-length", "0") != "0")
            self.check_caller()
            self.dispatch()
        except LeoneError as error:
            self.send_problem(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            self.close_connection, told = True, report_bug(error)
            if not self.head_is_sent:
                self.send_problem(told)
        self.server.deadlines[self.connection] = time.monotonic() + READ_S

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = respond

    def check_caller(self):
        """RequestError for callers that must not be listened to."""
        server, hosts = self.server, self.headers.get_all("host", [])
        if self.headers.defects or len(hosts) != 1 and self.request_version == "HTTP/1.1":
            raise RequestError("the head of the request is malformed", code="malformed_request")
        host, origin = (hosts or ["localhost"])[0].strip(), self.headers.get("origin")
        if server.loopback and not is_local(host):
            raise RequestError("call this server by an IP address or as localhost", status=403,
                               code="host_not_allowed")
        if origin and server.cors not in ("*", origin) and origin.partition("://")[2] != host:
            raise RequestError("pages of another origin may not call this server; start it with "
                               "--cors ORIGIN", status=403, code="origin_not_allowed")

    def dispatch(self):
        path = unquote(self.path.partition("?")[0])
        method = "GET" if self.command == "HEAD" else self.command
        matches = ((route, re.fullmatch(route.replace("*", "([^/]+)"), path)) for route in ROUTES)
        self.route, match = next((pair for pair in matches if pair[1]), ("other", None))
        methods = ROUTES.get(self.route, {})
        if not match:
            raise RequestError("there is no such path; README.md lists those that are there",
                               status=404, code="not_found")
        if method == "OPTIONS" and self.server.cors:
            return self.send(200, b"", headers={
                "Access-Control-Allow-Methods": ", ".join(methods),
                "Access-Control-Allow-Headers": "Authorization, Content-Type"})
        if method not in methods:
            return self.send_problem(RequestError(
                f"this path takes {', '.join(methods)}", status=405, code="method_not_allowed"),
                {"Allow": ", ".join(methods)})
        key, given = self.server.api_key, self.headers.get("authorization", "").encode("latin-1")
        if key and path not in ("/", "/health") and not hmac.compare_digest(
                given, f"Bearer {key}".encode()):
            raise RequestError("the API key is missing or wrong; send Authorization: Bearer KEY",
                               status=401, code="invalid_api_key")
        methods[method](self, self.read_body(), *match.groups())

    def read_body(self):
        lengths = {length.strip() for length in self.headers.get_all("content-length", ["0"])}
        if self.headers.get("transfer-encoding"):
            raise RequestError("send Content-Length; chunked request bodies are not taken",
                               status=411, code="length_required")
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,15}", length := lengths.pop()):
            raise RequestError("Content-Length is not a number", code="malformed_request")
        if int(length) > BODY_LIMIT:
            raise RequestError(f"the body has {length} bytes; {BODY_LIMIT} are allowed", status=413,
                               code="body_too_large")
        if self.headers.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError
        self.body_is_unread = False
        self.server.deadlines[self.connection] = math.inf
        return body

    # ---- answers -----------------------------------------------------------------------------

    def send_head(self, status, kind, headers):
        self.head_is_sent = True
        self.close_connection |= self.body_is_unread or self.server.draining
        headers = {"Server": f"leone/{VERSION}", "Content-Type": kind,
                   "X-Content-Type-Options": "nosniff", **headers}
        if self.server.cors:
            headers.update({"Access-Control-Allow-Origin": self.server.cors, "Vary": "Origin"})
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, status, body, kind="application/json", headers={}):
        """A whole answer; body: bytes, or what becomes JSON."""
        data = body if isinstance(body, bytes) else encode(body).encode("utf-8", "replace")
        self.record(status)
        self.send_head(status, kind, {"Content-Length": len(data), **headers})
        if self.command != "HEAD":
            self.wfile.write(data)
        if self.body_is_unread:  # see Server.process_request; the deadline bounds this
            shut(self.connection, socket.SHUT_WR)
            while self.rfile.read1(1 << 16):
                pass

    def send_problem(self, error, headers={}):
        status, body = error_object(error)
        delay = getattr(error, "retry_after_ms", 1000 if status == 503 else None)
        if delay is not None:
            headers = {"retry-after-ms": delay, "Retry-After": -(-delay // 1000)}
        self.outcome = self.outcome or body["error"]["code"]
        self.send(status, body, headers=headers)

    def record(self, status):
        """Count and log the request."""
        server, seconds = self.server, time.perf_counter() - self.began
        server.count(self.route, status)
        if server.verbose or not server.quiet and self.route not in ("/health", "/metrics"):
            write_log(f"{self.command} {self.route} {status} {seconds:.3f} s {self.outcome}")

    # ---- completions -------------------------------------------------------------------------

    def complete(self, body, is_chat):
        server = self.server
        server.usable()
        order = Order(parse_json(body), is_chat, server)
        answer = Answer(order, server.submit(order), server, self)
        if order.stream:
            self.close_connection |= not answer.chunked
            self.send_head(200, "text/event-stream", {
                "Cache-Control": "no-cache", "X-Accel-Buffering": "no",
                **({"Transfer-Encoding": "chunked"} if answer.chunked else {})})
        self.connection.setblocking(False)
        server.writer.notify(answer)
        while not answer.done.wait(1.0) and not server.writer.stopped:
            pass
        self.connection.settimeout(self.timeout)
        self.outcome = answer.summary()
        if answer.gone or not answer.done.is_set():
            self.close_connection = True
            return self.record(499)
        for choice in answer.choices:
            server.remember(choice)
        if order.stream:
            self.end_stream(answer)
        elif answer.error:
            raise answer.error
        else:
            self.send(200, {**answer.head, "choices": [c.whole() for c in answer.choices],
                            "usage": answer.usage(), **self.receipt(answer)})

    def end_stream(self, answer):
        """What follows the tokens: usage and receipt, or the error, which the client must see."""
        events, status = [], 200
        try:
            if answer.error:
                raise answer.error
            if answer.order.include_usage:
                events.append(answer.event(usage=answer.usage()))
            if answer.order.receipt:
                events.append(answer.event(**self.receipt(answer)))
            events.append(answer.framed("data: [DONE]"))
        except (LeoneError, OSError) as error:  # OSError: the model file cannot be hashed
            status, body = error_object(error)
            events.append(answer.framed(f"data: {encode(body)}"))
            self.close_connection = True
        self.record(status)
        self.wfile.write(b"".join(events) + (b"0\r\n\r\n" if answer.chunked else b""))

    def receipt(self, answer):
        if not answer.order.receipt:
            return {}
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

    def models(self, _, name=None):
        server, cfg = self.server, self.server.usable().cfg
        model = {"id": server.model_name, "object": "model", "created": 0, "owned_by": "leone",
                 "meta": {"n_ctx": cfg.n_ctx, "n_vocab": cfg.n_vocab}}
        if name not in (None, server.model_name):
            raise RequestError(f"the model here is {server.model_name}", status=404,
                               code="model_not_found", param="model")
        self.send(200, model if name else {"object": "list", "data": [model]})

    def list_sessions(self, _):
        data = self.server.on_engine(lambda engine: engine.sessions.list())
        self.send(200, {"object": "list", "data": data})

    def fork_session(self, body, name):
        to = parse_json(body).get("to")
        self.server.on_engine(lambda engine: engine.sessions.fork(name, to))
        self.send(200, {"object": "session", "name": to})

    def change_session(self, change, name):
        self.server.on_engine(lambda engine: getattr(engine.sessions, change)(name))
        self.send(200, {"object": "session", "name": name, "change": change})


ROUTES = {  # path -> method -> function(handler, body, *parts of the path)
    "/": {"GET": Handler.page},
    "/health": {"GET": lambda self, _: self.send(*self.server.health())},
    "/metrics": {"GET": lambda self, _: self.send(
        200, self.server.metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")},
    "/v1/models": {"GET": Handler.models},
    "/v1/models/*": {"GET": Handler.models},
    "/v1/chat/completions": {"POST": lambda self, body: self.complete(body, is_chat=True)},
    "/v1/completions": {"POST": lambda self, body: self.complete(body, is_chat=False)},
    "/v1/sessions": {"GET": Handler.list_sessions},
    "/v1/sessions/*": {"DELETE": lambda self, _, name: self.change_session("delete", name)},
    "/v1/sessions/*/fork": {"POST": Handler.fork_session},
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
    parser = argparse.ArgumentParser(
        prog="server.py", description="Serve a GGUF model to many clients over HTTP.")
    add = parser.add_argument
    add("-m", "--model", required=True, metavar="FILE", help="GGUF file")
    add("--bind", default="127.0.0.1:8080", metavar="HOST:PORT",
        help="default %(default)s; port 0 takes a free one; the URL is printed")
    add("--allow-remote", action="store_true", help="permit an address that others can reach")
    add("--api-key", metavar="KEY", help="clients must send it; @FILE reads it from a file")
    add("--cors", metavar="ORIGIN", help="web pages of this origin may call; * means all")
    for name, default, text in (
            ("--sessions", 8, "sequences that hold memory at once"),
            ("--batch-size", 8, "sequences that decode in one step"),
            ("--queue", 64, "requests that may wait"), ("--queue-tokens", None, "tokens of these"),
            ("--ctx", None, "tokens of KV cache in all; default: what fits"),
            ("--prefill-chunk", 512, "prompt tokens of one step")):
        add(name, type=int, default=default, metavar="N",
            help=f"{text} (default {default})" if default else text)
    add("--session-store", metavar="DIR", help="folder in which idle sessions survive")
    add("--receipt-key", metavar="FILE", help="sign receipts with this key; made if absent")
    add("--backend", choices=("auto", "cuda", "cpu"), default="auto")
    add("--kv", choices=("f32", "f16", "q8"), default="f16", help="format of the KV cache")
    add("--quiet", action="store_true", help="no line per request")
    add("--verbose", action="store_true", help="a line for /health and /metrics too")
    return parser


def open_server(args):
    """The server that the command line asks for, not started. Raises LeoneError, OSError."""
    host, _, port = args.bind.rpartition(":")
    try:
        address = socket.getaddrinfo(host.strip("[]") or "127.0.0.1", int(port))[0][4][:2]
        if address[1] != int(port):
            raise ValueError
    except (OSError, ValueError):
        raise RequestError(f'--bind is "{args.bind}"; give HOST:PORT of this machine') from None
    if not ipaddress.ip_address(address[0]).is_loopback and not args.allow_remote:
        raise RequestError(f"{host} can be reached from other machines; say --allow-remote if that "
                           "is meant, and set --api-key")
    key = args.api_key
    if key and key.startswith("@"):
        key = Path(key[1:]).read_text().strip()
    if key == "":
        raise RequestError("the API key is empty; leave --api-key out to need none")

    def open_engine():
        return cli.open_engine(
            args, max_rows=args.batch_size, queue=args.queue, queue_tokens=args.queue_tokens,
            sessions=args.sessions, session_store=args.session_store)

    return Server(open_engine, address, Path(args.model).stem, key, args.cors,
                  args.receipt_key and receipts.load_key(args.receipt_key), args.quiet,
                  args.verbose)


def main(argv=None):
    args = build_parser().parse_args(argv)
    sys.setswitchinterval(SWITCH_S)
    try:
        server = open_server(args)
    except (LeoneError, OSError) as error:
        print(f"leone: {chat.one_line(error)}", file=sys.stderr)
        return 2
    stop = threading.Event()

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
    sys.exit(main())
