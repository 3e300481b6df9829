"""Chat templates: messages, through the Jinja template of the model file, to the prompt in parts.

Two parties are not trusted. The template comes with the model file: it runs in Jinja's immutable
sandbox, and in a process of its own with limits on time and memory, because nothing inside a Python
process stops `9 ** 9 ** 9`, and a slow template must not hold up the engine's thread. The messages
come from anyone: what they say must never become a control token. So every character that comes out
is known as the template's own or as foreign, and only the template's own may form control tokens.

Origin is kept by Text, to which the template's literals are compiled. Any other str is foreign: an
operation that loses track turns control tokens into plain text, never the other way round.

Run as a program, this file is the process that renders: a line of JSON in, a line of JSON out.
"""
import atexit
import datetime
import functools
import json
import re
import resource
import signal
import subprocess
import sys
import threading

from jinja2 import TemplateSyntaxError, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.filters import do_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import ModelError, RequestError

TIME_LIMIT_S = 2.0  # a page-long template takes 0.1 s to compile and 5 ms to render
MEMORY_LIMIT = 1 << 30  # bytes of address space
OUTPUT_LIMIT = 1 << 22  # characters
# A template may build "<|user|>" from these; any other role is foreign text.
ROLES = "system", "developer", "user", "assistant", "tool"


def render(template, messages, tools=None, add_generation_prompt=True, bos_token="", eos_token="",
           **names):
    """The prompt as [(text, from_template)], for Tokenizer.encode_parts.

    Control tokens are to be looked for only inside parts that are from_template. messages, tools
    and names (enable_thinking and the like) hold what JSON can hold. Raises ModelError for a
    template that does not compile, RequestError for messages that it refuses (in its own words)
    or fails on, and for exceeding a limit.
    """
    variables = dict(names, messages=messages, tools=tools, bos_token=bos_token,
                     eos_token=eos_token, add_generation_prompt=add_generation_prompt)
    try:
        request = json.dumps([template, variables, TIME_LIMIT_S])
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"messages are not plain JSON: {one_line(error)}",
                           param="messages") from None
    kind, answer = renderer.ask(request)
    if kind == "parts":
        return [(text, from_template) for text, from_template in answer]
    if kind == "model":
        raise ModelError(f"the chat template does not compile: {answer}")
    raise RequestError(answer, code=kind, param="messages")


def one_line(error):
    return " ".join(str(error).split())[:300] or type(error).__name__


def limit(what):
    return "template_limit", f"the chat template {what}; send less, or check the model file"


class Renderer:
    """The process that renders: started when first needed, and again when it had to be stopped."""

    def __init__(self):
        self.lock = threading.Lock()
        self.process = None
        atexit.register(self.stop)

    def ask(self, request):
        """(kind, answer) for a line of JSON; see parts_of."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.process = subprocess.Popen(
                    [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is not for it
            try:
                self.process.stdin.write(request.encode() + b"\n")
                self.process.stdin.flush()
                answer = self.process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # interrupted: its answer must not reach the next request
                self.stop()
                raise
            if answer.endswith(b"\n"):
                return json.loads(answer)
            status = self.process.wait()
            self.stop()
        if status == -signal.SIGALRM:
            return limit(f"takes more than {TIME_LIMIT_S:g} s")
        return limit(f"broke its renderer (exit status {status})")

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


renderer = Renderer()


# ---- in the rendering process ------------------------------------------------------------------


class Text(str):
    """A string that knows its characters' origin: `_origin` has a byte for each, 1 = template.

    Everywhere it acts as a str. The operations below keep the origin, others give a plain str.
    """

    def __new__(cls, text, origin=None):
        self = super().__new__(cls, text)
        self._origin = bytes(len(text)) if origin is None else origin
        return self

    def __str__(self):
        return self

    def __add__(self, other):
        return joined([self, other]) if is_plain(other) else NotImplemented

    def __radd__(self, other):
        return joined([other, self]) if is_plain(other) else NotImplemented

    def __mul__(self, count):
        return Text(super().__mul__(count), self._origin * count)

    __rmul__ = __mul__

    def __getitem__(self, key):
        origin = self._origin[key]
        return Text(super().__getitem__(key), origin if isinstance(key, slice) else bytes([origin]))

    def lstrip(self, chars=None):
        text = super().lstrip(chars)
        return Text(text, self._origin[len(self) - len(text):])

    def rstrip(self, chars=None):
        text = super().rstrip(chars)
        return Text(text, self._origin[:len(text)])

    def strip(self, chars=None):
        return self.lstrip(chars).rstrip(chars)

    def join(self, items):
        return joined([piece for item in items for piece in (self, item)][1:])


def is_plain(value):
    return isinstance(value, str) and not hasattr(value, "__html__")  # Markup has its own rules


def joined(pieces):
    """The Text of these strings one after another."""
    pieces = list(pieces)
    return Text("".join(pieces), b"".join(
        piece._origin if isinstance(piece, Text) else bytes(len(piece)) for piece in pieces))


@functools.cache
def template_text(text):
    return Text(text, b"\1" * len(text))


class Generator(CodeGenerator):
    """Compiles the literals of a template to Text, and ~ to what keeps the origin."""

    def visit_Const(self, node, frame):
        value = node.as_const(frame.eval_ctx)
        text = isinstance(value, str)
        self.write(f"environment.template_text({value!r})" if text else repr(value))

    def visit_TemplateData(self, node, frame):
        self.write(f"environment.template_text({node.as_const(frame.eval_ctx)!r})")

    def _output_const_repr(self, group):
        return f"environment.template_text({''.join(group)!r})"

    def visit_Concat(self, node, frame):
        self.write("concat(map(str, (")
        for child in node.nodes:
            self.visit(child, frame)
            self.write(", ")
        self.write(")))")


class Generation(Extension):
    """{% generation %} marks what to train on; here it is only what is inside."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """What templates expect: the environment of Hugging Face's apply_chat_template."""
    code_generator_class = Generator
    concat = staticmethod(joined)
    template_text = staticmethod(template_text)

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False,
                         extensions=["jinja2.ext.loopcontrols", Generation])
        self.filters.update(tojson=tojson, join=join)
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)


class Refused(Exception):
    """The template called raise_exception."""


def raise_exception(message):
    raise Refused(message)


def strftime_now(form):
    return datetime.datetime.now().strftime(form)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter sorts keys and escapes <, >, & and ': not what models were trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


@pass_eval_context
def join(context, value, d="", attribute=None):
    return do_join(context, value, d if isinstance(d, Text) else Text(d), attribute)


@functools.lru_cache(maxsize=8)
def compiled(template):
    return Environment().from_string(template)


def parts_of(template, variables):
    """("parts", [(text, from_template)]), or the kind of error and its message."""
    try:
        template = compiled(template)
    except TemplateSyntaxError as error:
        return "model", f"line {error.lineno}: {one_line(error.message)}"
    except Exception as error:
        return "model", one_line(error)
    for name in ("bos_token", "eos_token"):
        variables[name] = template_text(variables[name] or "")
    pieces, length = [], 0
    try:
        for message in variables["messages"]:
            if isinstance(message, dict) and message.get("role") in ROLES:
                message["role"] = template_text(message["role"])
        for piece in template.root_render_func(template.new_context(variables)):
            pieces.append(piece)
            length += len(piece)
            if length > OUTPUT_LIMIT:
                return limit(f"writes more than {OUTPUT_LIMIT} characters")
    except Refused as error:
        return "invalid_request", f"the chat template refuses these messages: {one_line(error)}"
    except MemoryError:
        return limit(f"needs more than {MEMORY_LIMIT >> 20} MiB of memory")
    except Exception as error:
        return "invalid_request", f"the chat template fails on these messages: {one_line(error)}"
    text = joined(pieces)
    return "parts", [(text[run.start():run.end()], run[0][0] == 1)
                     for run in re.finditer(b"\0+|\1+", text._origin)]


def serve():
    """Answer requests until stdin closes. The kernel ends this process when the alarm rings."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin:
        template, variables, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = json.dumps(parts_of(template, variables))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
