"""The page at /, driven in headless Chromium: asking, the wall, the meter, stop, two answers side
by side, the keyboard, a phone, and what a server may do to a stream."""
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import receipts
from models import smol

ROOT = Path(__file__).resolve().parent.parent
POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
          "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        found = [path for path in map(shutil.which, ("chromium", "chromium-browser",
                                                     "google-chrome")) if path]
        path = (found or [playwright.chromium.executable_path])[0]
        if not os.path.exists(path):
            pytest.skip("no Chromium is installed (Debian: apt install chromium)")
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root cannot have one
        chromium = playwright.chromium.launch(executable_path=path, args=sandbox)
        yield chromium
        chromium.close()


# ---- a stand-in for the server, which breaks streams in ways that a real one seldom does ---------


def event(value):
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n"


def delta(text, logprob=-0.1, kind="content"):
    return event({"choices": [{"index": 0, "delta": {kind: text}, "finish_reason": None,
                               "logprobs": {"content": [{"token": text, "logprob": logprob}]}}]})


def ending(ids):
    return [event({"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": len(ids),
                                            "prompt_tokens_details": {"cached_tokens": 12}}}),
            event({"choices": [], "receipt": {"id": "chatcmpl-1", "hmac": "ab"},
                   "prompt_token_ids": [1, 2], "token_ids": ids}), event("[DONE]")]


def answer(words, delay=0.0, end=None):
    """A stream that sends the words one by one."""
    def send(stub, body):
        for word in words:
            time.sleep(delay)
            yield delta(word)
        yield from ending(list(range(len(words)))) if end is None else end
    return send


def beside_others(*answers):
    """What the page gets for two answers; the others of the batch roar until they are stopped."""
    ours = iter(answers)

    def send(stub, body):
        if "story about a lion" not in body["messages"][0]["content"]:
            yield from next(ours)(stub, body)
        for i in range(2000 if "n" in body else 0):
            time.sleep(0.01)
            yield event({"choices": [{"index": i % body["n"], "delta": {"content": "roar "}}]})
    return send


class Stub:
    """Serves index.html and, for every question, the next of `script` (its last one for ever):
    a function of the request body that yields what to send, or (status, headers, body)."""

    def __init__(self):
        stub = self
        self.script, self.bodies, self.headers, self.open = [], [], [], 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                page = self.path == "/"
                data = (ROOT / "index.html").read_bytes() if page else json.dumps(
                    {"object": "list", "data": [{"id": "a-model"}]}).encode()
                self.reply(200, {"Content-Type": "text/html; charset=utf-8" if page else
                                 "application/json", "Content-Security-Policy": POLICY}, data)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.bodies.append(body)
                stub.headers.append(self.headers)
                step = stub.script.pop(0) if len(stub.script) > 1 else stub.script[0]
                if isinstance(step, tuple):
                    return self.reply(step[0], step[1], json.dumps(step[2]).encode())
                self.reply(200, {"Content-Type": "text/event-stream"}, None)
                stub.open += 1
                try:
                    for piece in step(stub, body):
                        self.wfile.write(piece.encode() if isinstance(piece, str) else piece)
                        self.wfile.flush()
                except OSError:  # the browser left
                    pass
                finally:
                    stub.open -= 1

            def reply(self, status, headers, data):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if data is not None:
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/"


@pytest.fixture(scope="module")
def stub():
    stub = Stub()
    yield stub
    stub.http.shutdown()
    stub.http.server_close()


@pytest.fixture
def page(browser, stub, request):
    yield from opened(browser, stub.url)


def opened(browser, url, **options):
    """A page that fails its test if anything goes wrong in its script or against its policy."""
    context = browser.new_context(**options)
    tab = context.new_page()
    tab.set_default_timeout(60000)
    problems = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text)
           if message.type == "error" and "Failed to load resource" not in message.text else None)
    tab.goto(url)
    yield tab
    context.close()
    assert problems == []


def put(page, text):
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def idle(page):
    page.locator("#send", has_text="Ask").wait_for()


def blocks(page):
    return page.locator(".wall i").count()


WORDS = ["The", " lion", " sleeps", " to", "night", ".\n", "Ünder", " trees", " 🦁"]


def test_an_answer(page, stub):
    """Blocks, text, facts, reasoning, receipt; the next question carries the conversation."""
    thoughts = [delta(" hmm", kind="reasoning_content")]
    stub.bodies.clear()
    stub.script[:] = [lambda *_: [*thoughts, *answer(WORDS)(*_)]]
    page.click("summary:text('Settings')")
    page.fill("#temperature", "0.5")
    page.fill("#seed", "7")
    page.fill("#limit", "33")
    put(page, "What does\nthe lion do?")
    idle(page)
    assert blocks(page) == len(WORDS) + 1
    assert page.inner_text(".text") == "".join(WORDS)
    assert page.text_content(".thought") == " hmm"
    assert page.inner_text(".read") == "30 (12)" and page.inner_text(".count") == "10"
    assert page.inner_text(".first").endswith(" s") and float(page.inner_text(".rate")) > 0
    assert page.inner_text("#model") == "a-model" and page.inner_text("#status") == "Done."
    page.click("summary:text('Receipt')")
    assert json.loads(page.inner_text("pre")) == {"receipt": {"id": "chatcmpl-1", "hmac": "ab"},
                                                  "prompt_token_ids": [1, 2],
                                                  "token_ids": list(range(len(WORDS)))}
    body = stub.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "What does\nthe lion do?"}]
    expected = {"temperature": 0.5, "seed": 7, "max_tokens": 33, "stream": True, "logprobs": True,
                "receipt": True, "stream_options": {"include_usage": True}}
    assert {name: body[name] for name in expected} == expected
    put(page, "And then?")
    page.locator("article").nth(1).wait_for()
    idle(page)
    assert [m["content"] for m in stub.bodies[1]["messages"]] == [
        "What does\nthe lion do?", "".join(WORDS), "And then?"]
    page.click("text=New conversation")
    page.locator("article").first.wait_for(state="detached")


def test_tokens_that_were_drafts_are_brighter(page, stub):
    """Also once they were pointed at; their colour still says how probable they were."""
    drafted = delta("b").replace('"token": "b"', '"token": "b", "drafted": true')
    stub.script[:] = [lambda *_: [delta("a"), drafted, delta("c"), *ending([1, 2, 3])]]
    put(page, "drafts?")
    idle(page)
    filters = lambda: page.evaluate(
        "[...document.querySelectorAll('.wall i')].map(block => getComputedStyle(block).filter)")
    assert [name == "none" for name in filters()] == [True, False, True]
    assert "brightness(1." in filters()[1]
    for place in (1, 2):
        page.hover(f".wall i >> nth={place}")
        assert [name == "none" for name in filters()] == [True, False, True]
    colours = page.evaluate("[...document.querySelectorAll('.wall i')].map("
                            "block => getComputedStyle(block).backgroundColor)")
    assert len(set(colours)) == 1


def test_text_is_never_markup(page, stub):
    nasty = "<img src=x onerror=alert(1)><b>bold</b>"
    stub.script[:] = [answer([nasty])]
    put(page, nasty)
    idle(page)
    assert page.inner_text(".text") == nasty == page.inner_text(".question")
    assert page.locator("main img, .text b, .question b").count() == 0


def test_any_cut_of_the_stream(page, stub):
    """Events cut at every byte, with comments, and two in one piece."""
    def send(*_):
        text = ": hello\n\n" + "".join(map(delta, WORDS[:5])) + event({"choices": []})
        text += "".join(map(delta, WORDS[5:]))
        for byte in (text + "".join(ending([0]))).encode():
            yield bytes([byte])
    stub.script[:] = [send]
    put(page, "cut")
    idle(page)
    assert page.inner_text(".text") == "".join(WORDS) and blocks(page) == len(WORDS)


@pytest.mark.parametrize("end, said", [
    ([event({"error": {"message": "The engine stopped."}})], "The engine stopped."),
    ([], "The connection broke before the answer was complete."),
])
def test_a_stream_that_fails(page, stub, end, said):
    stub.script[:] = [answer(["one", " two"], end=end)]
    put(page, "fail")
    page.get_by_text(said).wait_for()
    assert page.inner_text(".text") == "one two"
    idle(page)


def test_refusals(page, stub):
    """A busy server is asked again when it says; no receipts, then without; the key."""
    def refuse(status, message, headers=None, param=None):
        return status, headers or {}, {"error": {"message": message, "param": param}}

    stub.bodies.clear()
    stub.headers.clear()
    stub.script[:] = [refuse(400, "no receipts", param="receipt"),
                      refuse(429, "full", {"Retry-After": "1"}),
                      refuse(401, "This server wants an API key."), answer(["yes"])]
    put(page, "May I?")
    page.get_by_text("Asking again in 1 s").wait_for()
    page.get_by_text("This server wants an API key.").wait_for()
    assert page.input_value("#prompt") == "May I?" and page.locator(".question").count() == 0
    page.click("summary:text('Settings')")
    page.fill("#key", "secret")
    page.click("#send")
    page.locator(".text", has_text="yes").wait_for()
    assert [body["receipt"] for body in stub.bodies] == [True, False, False, False]
    assert [h["Authorization"] for h in stub.headers] == [None, None, None, "Bearer secret"]
    stub.script[:] = [refuse(400, "temperature must be a number from 0 to 100")]
    put(page, "Again?")
    page.get_by_text("temperature must be").wait_for()


def test_meter_moves_and_stop_stops(page, stub):
    stub.script[:] = [answer(["word "] * 1000, delay=0.02)]
    put(page, "a long one")
    page.locator(".wall i").nth(30).wait_for()
    seen = set()
    for _ in range(8):
        seen.add(page.evaluate("document.querySelector('progress').value"))
        page.wait_for_timeout(200)
    assert len(seen) >= 4 and 10 < float(page.inner_text(".rate")) < 60
    page.locator("#send", has_text="Stop").click()
    idle(page)
    assert page.inner_text("#status") == "Stopped."
    count = blocks(page)
    page.wait_for_timeout(300)
    assert 30 < count == blocks(page) < 1000
    deadline = time.monotonic() + 10
    while stub.open and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stub.open == 0  # the server was told


def test_a_difference_is_found(page, stub):
    """Side by side: the same request twice, others in between; a differing token is pointed out."""
    stub.bodies.clear()
    other = WORDS[:4] + [" today"] + WORDS[5:]
    stub.script[:] = [beside_others(answer(WORDS, end=[event("[DONE]")]),
                                    answer(other, end=[event("[DONE]")]))]
    page.check("#twice")
    put(page, "twice")
    page.locator(".verdict").wait_for()
    assert page.inner_text(".verdict") == "The first difference is at token 5."
    assert page.locator(".chosen").count() == 2
    assert page.locator(".token").nth(1).inner_text().startswith('Token 5, " today"')
    first, *others, second = stub.bodies
    assert first == second and first["seed"] >= 0
    assert others[0]["n"] == 7
    idle(page)


def test_keyboard_only(page, stub):
    """Ask, walk over the blocks, open the receipt and stop without a pointer."""
    stub.script[:] = [answer(WORDS)]
    press = page.keyboard.press
    page.wait_for_function("document.activeElement.id === 'prompt'")  # from the start, by itself
    page.keyboard.type("two")
    press("Shift+Enter")
    page.keyboard.type("lines")
    press("Enter")
    page.locator("summary", has_text="Receipt").wait_for()
    focused = lambda: page.evaluate("document.activeElement.id || document.activeElement.className")
    assert page.inner_text(".question") == "two\nlines" and focused() == "prompt"

    def back_to(name):
        for _ in range(12):
            press("Shift+Tab")
            if focused() == name:
                return
        raise AssertionError(f"{name} cannot be reached")

    back_to("wall")
    assert page.inner_text(".token").startswith('Token 1, "The"')
    press("ArrowRight")
    press("ArrowRight")
    assert page.inner_text(".token") == 'Token 3, " sleeps", had a probability of 90.5 %.'
    for _ in range(10):
        press("ArrowRight")
    assert page.inner_text(".token").startswith('Token 9, " 🦁"')
    press("ArrowLeft")
    assert page.inner_text(".token").startswith('Token 8, " trees"')
    press("Tab")
    press("Enter")
    assert page.is_visible("pre")
    stub.script[:] = [answer(["word "] * 1000, delay=0.02)]
    page.focus("#prompt")
    page.keyboard.type("long")
    press("Enter")
    page.locator("article").nth(1).locator(".wall i").nth(3).wait_for()
    press("Escape")
    page.get_by_text("Stopped.").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser, stub, scheme):
    """390 pixels wide, nothing scrolls sideways: long words, an open receipt, two answers."""
    stub.script[:] = [beside_others(*[answer(WORDS + ["x" * 300])] * 2)]
    options = dict(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True,
                   color_scheme=scheme)
    for page in opened(browser, stub.url, **options):
        page.check("#twice")
        page.click("summary:text('Settings')")
        page.fill("#prompt", "y" * 300)
        page.tap("#send")
        page.locator(".verdict").wait_for()
        assert page.inner_text(".verdict") == "Equal: the same 10 tokens."
        page.locator("summary:text('Receipt')").first.tap()
        page.locator(".wall i").nth(2).tap()
        assert page.locator(".token").first.inner_text().startswith('Token 3, " sleeps"')
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        light, dark = "rgb(250, 247, 242)", "rgb(19, 17, 15)"
        colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert colour == (light if scheme == "light" else dark)


# ---- the real server -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(URL, key file) of server.py with the default model."""
    key = tmp_path_factory.mktemp("page") / "key"
    server = subprocess.Popen(
        [sys.executable, "server.py", "-m", smol(), "--backend", "cpu", "--bind", "127.0.0.1:0",
         "--ctx", "4096", "--receipt-key", key], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield server.stdout.readline().strip(), key
    server.terminate()
    server.wait(30)


def test_with_the_real_server(browser, served, tmp_path):
    """Two answers of the real model are equal at different loads, their receipts are valid, the
    conversation goes on, and stop stops."""
    url, key = served
    for page in opened(browser, url):
        page.click("summary:text('Settings')")
        page.set_default_timeout(240000)  # two busy cores do not do many tokens a second
        page.fill("#limit", "8")
        page.check("#twice")
        put(page, "What is the capital of France?")
        page.locator("#status", has_text="Done.").wait_for()
        assert page.inner_text(".verdict").startswith("Equal: the same")
        assert page.locator("article").nth(0).locator(".text").inner_text() == page.locator(
            "article").nth(1).locator(".text").inner_text() != ""
        for place in 0, 1:
            copied = tmp_path / "copied.json"
            copied.write_text(page.locator("pre").nth(place).text_content())
            receipt, *ids = receipts.read(copied)
            receipts.verify(receipts.load_key(key), receipt)
            receipts.check_tokens(receipt, *ids)
        page.uncheck("#twice")
        page.fill("#limit", "400")
        put(page, "Tell me more about it.")
        page.locator("article").nth(2).locator(".wall i").nth(4).wait_for()
        page.click("#send")
        page.get_by_text("Stopped.").wait_for()
        assert 4 < page.locator("article").nth(2).locator(".wall i").count() < 400
