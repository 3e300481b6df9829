"""Chats: messages, through the template of the model file, to a prompt; an answer to its parts.

    messages = prepare_messages(request["messages"], style)     # checked, plain text
    parts = render(template, messages, tools)                   # [(text, from_template)]
    parser = Parser(style_of(template), tools, starts_in_reasoning(parts))
    parser.feed(text), parser.finish()                          # reasoning, content, tool calls

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
import secrets
import signal
import string
import subprocess
import sys
import threading
from typing import NamedTuple

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
MESSAGES_LIMIT = 10_000
NAME = r"[\w.:/-]{1,128}"  # of a tool or a participant


# ---- the prompt --------------------------------------------------------------------------------


def prepare_messages(messages, style=None):
    """Messages of the OpenAI API, checked, as templates want them; the given ones stay unchanged.

    Lists of text parts become one text (a newline between parts), "developer" is "system",
    arguments of tool calls become a dict if they are JSON of an object. null is as good as absent,
    absent content "". style: DeepSeek's templates know calls by a content of None. Raises
    RequestError.
    """
    check(isinstance(messages, list) and 0 < len(messages) <= MESSAGES_LIMIT,
          f"messages must be a list of 1 to {MESSAGES_LIMIT} messages")
    prepared = [prepared_message(message, f"messages[{index}]", style)
                for index, message in enumerate(messages)]
    try:
        size = len(json.dumps(prepared, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:  # lone surrogates, too
        check(False, f"messages are not plain JSON: {one_line(error)}")
    check(size <= OUTPUT_LIMIT, f"messages hold more than {OUTPUT_LIMIT} bytes; send less")
    return prepared


def check(condition, problem):
    if not condition:
        raise RequestError(problem, param="messages")


def check_name(name, where):
    check(isinstance(name, str) and re.fullmatch(NAME, name),
          f"{where} must be 1 to 128 letters, digits or any of _ . : / -")


def prepared_message(message, where, style):
    check(isinstance(message, dict), f"{where} must be an object")
    message = {key: value for key, value in message.items() if value is not None}
    role, calls = message.get("role"), message.pop("tool_calls", [])
    check(role in ROLES, f"{where}.role must be one of {', '.join(ROLES)}")
    check(role == "assistant" or "content" in message, f"{where}.content is missing")
    content = message.setdefault("content", "")
    if isinstance(content, list):
        check(all(field(part, "type") == "text" and isinstance(field(part, "text"), str)
                  for part in content), f'{where}.content may hold parts of type "text" only')
        message["content"] = "\n".join(part["text"] for part in content)
    for key in "content", "reasoning_content", "tool_call_id":
        check(isinstance(message.get(key, ""), str), f"{where}.{key} must be text")
    check_name(message.get("name", "none"), f"{where}.name")
    check(isinstance(calls, list) and (role == "assistant" or not calls),
          f"{where}.tool_calls must be a list, and the role assistant")
    if calls:
        message["tool_calls"] = [prepared_call(call, f"{where}.tool_calls[{index}]")
                                 for index, call in enumerate(calls)]
        if style and style.tools == "deepseek":
            message["content"] = message["content"] or None
    return dict(message, role="system" if role == "developer" else role)


def prepared_call(call, where):
    name, arguments = (field(call, "function", key) for key in ("name", "arguments"))
    check_name(name, f"{where}.function.name")
    check(isinstance(arguments, (str, dict)), f"{where}.function.arguments must be JSON text")
    if isinstance(arguments, str):
        try:
            value = strict_json(arguments.strip() or "{}")
            arguments = value if isinstance(value, dict) else arguments
        except ValueError:
            pass  # some model's mistake: the template shows it as it is
    return dict(call, function=dict(call["function"], arguments=arguments))


def field(value, *path):
    """value[path[0]][path[1]]..., or None where there is no such thing."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def strict_json(text):
    """The value of this JSON text. Raises ValueError, also for NaN and what is nested too deep."""
    try:
        return json.loads(text, parse_constant=int)  # int("NaN") is such an error
    except RecursionError:
        raise ValueError("nested too deep") from None


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


class Arguments(dict):
    """Arguments of a tool call: a mapping to some templates, and JSON text to others."""

    def __str__(self):
        return tojson(self)

    def __add__(self, other):
        return str(self) + other

    def __radd__(self, other):
        return other + str(self)


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
            for call in field(message, "tool_calls") or ():
                if isinstance(field(call, "function", "arguments"), dict):
                    call["function"]["arguments"] = Arguments(call["function"]["arguments"])
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


# ---- the answer --------------------------------------------------------------------------------
# Texts come in pieces, so a pattern has a companion: what may yet grow into a match of it.

SPACE = r"[ \t\r\n]"  # of JSON
GAP = (SPACE + "*+",) * 2


@functools.cache
def growing(*atoms):
    """(the pattern of these atoms in a row, the pattern of all that may grow into a match).

    An atom is a literal, or a pair of regexes like the result, of which the second may be generous.
    """
    whole, beginning = "", "(?!)"
    for atom in reversed(atoms):
        if isinstance(atom, str):
            atom = re.escape(atom), "|".join(re.escape(atom[:size]) for size in range(len(atom)))
        whole = atom[0] + whole
        beginning = rf"(?:(?:{atom[1]})\Z|{atom[0]}{beginning})"
    return re.compile(whole), re.compile(beginning)


@functools.cache
def ending(markers, space):
    """The pattern to search for the first of markers, or the beginning of one where text ends."""
    begun = "|".join(re.escape(marker[:size]) for marker in markers for size in range(len(marker)))
    return re.compile(rf"{space}(?:(?P<marker>{'|'.join(map(re.escape, markers))})|(?:{begun})\Z)")


SPACES = rf"(?:(?<!{SPACE}){SPACE}+)?"  # a whole run of them, or the search would be quadratic
NOTHING = re.compile(r"(?P<marker>(?!))?\Z")

# JSON: inside a list or object an item comes next, the first or a later one, or the end.
PLAIN = r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))'
PIECE = rf'(?:{PLAIN}*+(?P<end>")|{PLAIN}++)', r'(?:\\(?:u[0-9a-fA-F]{0,3})?)?'
KEY = rf'"{PLAIN}{{0,999}}+"', r'"(?:[^"\\]|\\.){0,999}+\\?'
SCALAR = r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)"
VALUE = rf'(?:["{{\[]|{SCALAR}(?={SPACE}|[,\]}}]))', r"[-+.\w]{0,999}"
BRACKETS = {"{": "}", "[": "]"}
ITEM = {"}": (KEY, GAP, ":", GAP, VALUE), "]": (VALUE,)}
DEPTH_LIMIT = 64  # or clients could not read the arguments

# Calls. Those in JSON stream if the name comes first; others must be read as a whole.
NAMED = rf"(?P<name>{NAME})", r"[\w.:/-]{0,128}"
CALL = ("{", GAP, '"name"', GAP, ":", GAP, '"', NAMED, '"', GAP, ",", GAP,
        ('"(?:arguments|parameters)"', '"[a-z]*'), GAP, ":", GAP, "{")
FIRST = GAP, (r"\[?", r"\[?"), GAP
LATER = GAP, ("[,;]?", "[,;]?"), GAP  # Llama 3 puts semicolons between calls
BARE = *LATER, "{", GAP, ('"(?:arguments|parameters|type|id)"', '"[a-z]*')
PARAMETER = (GAP, "<parameter=", (r"(?P<key>[^<>\n]{1,128})", r"[^<>\n]{0,128}"), ">",
             (r"(?:\n|(?=[^\n]))", ""))
PARAMETER_END = "</parameter>"
VALUE_END = ending((PARAMETER_END,), r"\n?")
NULL = (r"(?i:null)\n?", r"(?i:n?u?l?l?)\n?"), PARAMETER_END
JSON_TYPES = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"},
              dict: {"object"}}

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK = ((NAMED, SEPARATOR, GAP, "{"),
            ("function", SEPARATOR, NAMED, GAP, "```json", GAP, "{"))


class Format(NamedTuple):
    """A way to write tool calls. The first one that has a fingerprint in a template is it."""
    fingerprints: tuple
    # Marker -> what leads from it into arguments, besides a call in JSON or the first of a list.
    heads: dict
    ends: tuple = ()  # markers that may follow calls
    # Llama 3: an answer may begin with a call that has no marker, so it must name a known tool.
    bare: bool = False


FORMATS = {
    "qwen_xml": Format(("<function=",), {"<tool_call>": ((GAP, "<function=", NAMED, ">"),),
                                         "<function=": ((NAMED, ">"),)}, ("]", "</tool_call>")),
    "hermes": Format(("<tool_call>",), {"<tool_call>": ()}, ("]", "</tool_call>")),
    "mistral": Format(("[TOOL_CALLS]",), {"[TOOL_CALLS]": (
        (GAP, NAMED, GAP, "{"), (GAP, NAMED, "[ARGS]", GAP, "{"),
        (GAP, NAMED, "[CALL_ID]", (r"\w*", r"\w*"), "[ARGS]", GAP, "{"))}, ("]",)),
    "deepseek": Format((CALLS_BEGIN, CALL_BEGIN), {
        CALLS_BEGIN: [(GAP, CALL_BEGIN, *head) for head in DEEPSEEK],
        CALL_BEGIN: DEEPSEEK}, ("```", CALL_END, CALLS_END)),
    "llama3": Format(("<|python_tag|>", "ipython"), {"<|python_tag|>": ()}, ("]",), bare=True)}
REASONING = ("<think>", "</think>"), ("[THINK]", "[/THINK]")

# What models write as one token, often a control token, and the parser must see as text.
MARKERS = frozenset([
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>",
    CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END, *REASONING[0], *REASONING[1]])


class Style(NamedTuple):
    """How a model's answers are written."""
    tools: str | None  # a key of FORMATS
    reasoning: tuple | None  # one of REASONING


def style_of(template):
    """The Style that this template (None: there is none) teaches, by what it says itself."""
    template = template or ""
    tools = (name for name, format in FORMATS.items()
             if any(fingerprint in template for fingerprint in format.fingerprints))
    return Style(next(tools, None), next((tags for tags in REASONING if tags[1] in template), None))


def starts_in_reasoning(prompt):
    """True if a prompt (text, or parts as from render) ends with the tag that opens reasoning."""
    if not isinstance(prompt, str):
        prompt = "".join(text for text, from_template in prompt[-1:] if from_template)
    return prompt.rstrip().endswith(tuple(opening for opening, _ in REASONING))


class Parser:
    """Splits an answer into reasoning, content and tool calls while it comes.

    feed(text) and finish() return lists of deltas:
        ("reasoning", text), ("content", text)
        ("tool_call", index, name)      a call begins; its id is ids[index]
        ("arguments", index, fragment)  the fragments of a call make one JSON object
    How the text was cut into pieces makes no difference to the deltas' joined texts. Arguments come
    out as they come in: valid JSON byte for byte, values between XML tags as JSON of the type
    that the tool's schema gives. White space next to a call or around reasoning is dropped, all
    else that belongs to no call is content. Without tools nothing is a call.

    A call begins when its name and the beginning of its arguments are there. What turns out to be
    no call before that is content, unchanged. When a call breaks off later, its open string, lists
    and objects are closed, incomplete is True, and the text goes on as content. In arguments,
    characters that a JSON string must not hold are escaped and a comma before a closing bracket
    is dropped.

    A grammar is a generator that yields where it needs more text; what it decides never depends on
    where the text was cut. _at is the next character to read; what lies between _from and _at is
    read, but in no delta yet.
    """

    def __init__(self, style, tools, starts_in_reasoning):
        """tools: the request's list, as in the OpenAI API, or None: nothing may be a call."""
        self.ids = []
        self.incomplete = False  # a call broke off
        self._deltas, self._text, self._from, self._at, self._ended = [], "", 0, 0, False
        self._format = FORMATS.get(style.tools) if tools else None
        self._tools = {str(field(tool, "function", "name")):  # -> {parameter: schema}
                       field(tool, "function", "parameters", "properties") for tool in tools or []}
        self._grammar = self._answer(style.reasoning, starts_in_reasoning)

    @property
    def has_tool_calls(self):
        return bool(self.ids)

    def feed(self, text):
        self._text = self._text[self._from:] + text
        self._at, self._from = self._at - self._from, 0
        next(self._grammar, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self):
        self._ended = True
        return self.feed("")

    # what grammars are made of

    def _delta(self, *delta):
        if self._deltas and self._deltas[-1][:-1] == delta[:-1]:
            delta = *delta[:-1], self._deltas.pop()[-1] + delta[-1]
        if delta[-1]:
            self._deltas.append(delta)

    def _read(self, kind):
        self._delta(kind, self._text[self._from:self._at])
        self._from = self._at

    def _write(self, text):
        self._delta("arguments", len(self.ids) - 1, text)
        self._from = self._at

    def _read_string(self):
        self._write(json_text(self._text[self._from:self._at])[1:-1])

    def _next(self, *choices):
        """Read one of these rows of atoms; its match, or None if the text goes on otherwise."""
        patterns = [growing(*atoms) for atoms in choices]
        while True:
            for whole, _ in patterns:
                if match := whole.match(self._text, self._at):
                    self._at = match.end()
                    return match
            if self._ended or not any(begun.match(self._text, self._at) for _, begun in patterns):
                return None
            yield

    def _until(self, pattern, read, *kind):
        """Read up to a marker, in pieces that read() deals with; the marker, None if there is none.

        What may begin the marker is held back, and with it the space before.
        """
        while True:
            found = pattern.search(self._text, self._at)
            marker = found["marker"]
            self._at = len(self._text) if self._ended and not marker else found.start()
            read(*kind)
            if marker or self._ended:
                self._at = found.end()
                return marker
            yield

    def _skip_space(self):
        while True:
            self._at = self._from = re.compile(GAP[0]).match(self._text, self._at).end()
            if self._ended or self._at < len(self._text):
                return
            yield

    def _answer(self, reasoning, opened):
        format, markers = self._format, NOTHING
        if reasoning and ((yield from self._next((GAP, reasoning[0]))) or opened):
            yield from self._skip_space()
            yield from self._until(ending(reasoning[1:], SPACES), self._read, "reasoning")
            yield from self._skip_space()
        if format:
            markers = ending(tuple(format.heads), SPACES)
            if format.bare:
                yield from self._calls([(*LATER, *CALL)], BARE)
        while marker := (yield from self._until(markers, self._read, "content")):
            yield from self._calls([(*FIRST, *CALL), *format.heads[marker]], (*FIRST, "{"))

    # calls

    def _calls(self, heads, whole):
        """Calls, one after another, and what may follow them; what is none is content."""
        count = len(self.ids)
        while head := (yield from self._head(heads, whole)):
            name = head.groupdict().get("name")
            if not name:
                done = yield from self._whole_call(head[0])
            else:
                self._call(name, "{")
                done = yield from (
                    self._parameters(name) if head[0].endswith(">")
                    else self._json(["}"] * head[0].count("{"), self._write))
            if not done:
                break
            self._from = self._at
            heads, whole = [(*LATER, *CALL)], BARE if self._format.bare else (*LATER, "{")
        rest = self._text[self._from:self._at]
        self._delta("content", rest if len(self.ids) == count else rest.lstrip())
        self._from = self._at
        if len(self.ids) > count:
            while (yield from self._next(*((GAP, end) for end in self._format.ends))):
                pass
            yield from self._skip_space()

    def _head(self, heads, whole):
        head = yield from self._next(*heads)
        if head and self._format.bare and head["name"] not in self._tools:
            self._at, head = self._at - len(head[0]), None
        return head or (yield from self._next(whole))

    def _call(self, name, arguments):
        letters = string.ascii_letters + string.digits  # Mistral's templates want nine of them
        self.ids.append("".join(secrets.choice(letters) for _ in range(9)))
        self._delta("tool_call", len(self.ids) - 1, name)
        self._write(arguments)

    def _break_off(self, closing):
        self.incomplete = True
        self._delta("arguments", len(self.ids) - 1, closing)

    def _whole_call(self, head):
        """A call in JSON whose name does not come first; head goes up to its brace or first key."""
        self._at -= len(head) - head.rindex("{") - 1
        start = self._at - self._from - 1  # _from stays, _text is cut there
        if (yield from self._json(["}"], lambda text: None)):
            try:
                call = strict_json(self._text[self._from + start:self._at])
                arguments = call.get("arguments") or call.get("parameters") or {}
                text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            except ValueError:
                call, text = {}, ""
            name = call.get("name")
            if (isinstance(name, str) and re.fullmatch(NAME, name) and text.startswith("{")
                    and (name in self._tools or not self._format.bare)):
                self._call(name, text)
                return True

    def _json(self, brackets, write):
        """The rest of an object, True if it ends: `brackets` are those that close what is open.

        The innermost object is written and, if it breaks off, completed.
        """
        outer, first = len(brackets) - 1, True
        while brackets:
            comma = () if first else (",", GAP)
            match = yield from self._next((GAP, (",?", ",?"), GAP, brackets[-1]),
                                          (GAP, *comma, *ITEM[brackets[-1]]))
            last = match[0][-1] if match else None
            if not match or last in BRACKETS and len(brackets) > DEPTH_LIMIT:
                self._at -= len(match[0]) if match else 0
                break
            write(match[0].replace(",", "") if last == brackets[-1] else match[0])
            first = last in BRACKETS
            if first:
                brackets.append(BRACKETS[last])
            elif last == brackets[-1]:
                brackets.pop()
                write = write if len(brackets) > outer else lambda text: None
            elif last == '"' and not (yield from self._string(write)):
                brackets.append('"')
                break
        if brackets and write == self._write:
            self._break_off("".join(reversed(brackets[outer:])))
        return not brackets

    def _string(self, write):
        """The rest of a string; what JSON does not allow in one is escaped. True if it ends."""
        while not (piece := (yield from self._next((PIECE,)))) or not piece["end"]:
            if piece:
                write(piece[0])
            elif self._at < len(self._text):
                self._at += 1
                write(json_text(self._text[self._at - 1])[1:-1])
            else:
                return False
        write(piece[0])
        return True

    def _parameters(self, name):
        """<parameter=KEY> VALUE </parameter> and so on to </function>, written as JSON."""
        separator, closing = "", "}"
        while tag := (yield from self._next((GAP, "</function>"), PARAMETER)):
            key = tag.groupdict().get("key")
            if key is None:
                self._write("}")
                return True
            before, separator = f"{separator}{json_text(key)}: ", ", "
            types = types_of(field(self._tools, name, key)) - {"string", "null"}
            if (yield from self._next(NULL)):
                self._write(before + "null")
            elif types:
                start = self._at - self._from
                if not (yield from self._until(VALUE_END, lambda: None)):
                    break
                value = self._text[self._from + start:self._at].removesuffix(PARAMETER_END)
                self._write(before + typed(value.removesuffix("\n"), types))
            else:
                self._write(before + '"')
                if not (yield from self._until(VALUE_END, self._read_string)):
                    closing = '"}'
                    break
                self._write('"')
        self._break_off(closing)


def json_text(text):
    return json.dumps(text, ensure_ascii=False)


def types_of(schema):
    """The names of the JSON types that a schema (or part of one) allows, as far as it says."""
    if isinstance(schema, str):
        return {schema}
    if isinstance(schema, dict):
        schema = [schema.get(key) for key in ("type", "anyOf", "oneOf")]
    return set().union(*map(types_of, schema)) if isinstance(schema, list) else set()


def typed(text, types):
    """JSON of a parameter: of one of these types if the text is JSON of it, else a string."""
    word = text.strip()
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    try:
        fits = JSON_TYPES.get(type(strict_json(word)), set()) & types
    except ValueError:
        fits = False
    return word if fits else json_text(text)


if __name__ == "__main__":
    serve()
