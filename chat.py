"""Chats: messages, through the template of the model file, to a prompt; an answer to its parts.

    messages = prepare_messages(request["messages"], style)     # checked, plain text
    parts = render(template, messages, tools)                   # [(text, from_template)]
    parser = Parser(style_of(template), tools, starts_in_reasoning(prompt))
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
import contextlib
import functools
import json
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import ModelError, RequestError, require

TIME_LIMIT_S = 2.0  # a page-long template takes 0.1 s to compile and 5 ms to render
MEMORY_LIMIT = 1 << 30  # bytes of address space
OUTPUT_LIMIT = 1 << 22  # characters
# A template may build "<|user|>" from these; any other role is foreign text.
ROLES = "system", "developer", "user", "assistant", "tool"
NAME = r"[\w.:/-]{1,128}"  # of a tool or a participant
NAMES = "1 to 128 letters, digits or any of _ . : / -"


# ---- the prompt --------------------------------------------------------------------------------


def prepare_messages(messages, style=None):
    """Messages of the OpenAI API, checked, as templates want them; the given ones stay unchanged.

    Lists of text parts become one text (a newline between parts), "developer" is "system",
    arguments of tool calls become a dict if they are JSON of an object. null is as good as absent,
    absent content "". style: DeepSeek's templates want arguments as text, and know calls by a
    content of None. Raises RequestError.
    """
    check(isinstance(messages, list) and messages, "messages must be a list of at least one")
    deepseek = style is not None and style.tools == "deepseek"
    return [prepared_message(message, f"messages[{index}]", deepseek)
            for index, message in enumerate(messages)]


check = functools.partial(require, param="messages")


def is_name(value):
    return isinstance(value, str) and re.fullmatch(NAME, value)


def prepared_message(message, where, deepseek):
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
    for key in "content", "reasoning_content", "tool_call_id", "refusal":
        check(isinstance(message.get(key, ""), str), f"{where}.{key} must be text")
    check(is_name(message.get("name", "none")), f"{where}.name must be {NAMES}")
    check(isinstance(calls, list) and (role == "assistant" or not calls),
          f"{where}.tool_calls must be a list, and the role assistant")
    if calls:
        message["tool_calls"] = [prepared_call(call, f"{where}.tool_calls[{index}]", deepseek)
                                 for index, call in enumerate(calls)]
        if deepseek:
            message["content"] = message["content"] or None
    return dict(message, role="system" if role == "developer" else role)


def prepared_call(call, where, as_text):
    name, arguments = (field(call, "function", key) for key in ("name", "arguments"))
    check(isinstance(field(call, "id"), str | None), f"{where}.id must be text")
    check(field(call, "type") in (None, "function"), f'{where}.type must be "function"')
    check(is_name(name), f"{where}.function.name must be {NAMES}")
    check(isinstance(arguments, str), f"{where}.function.arguments must be JSON text")
    with contextlib.suppress(ValueError):  # some model's mistake: the template shows it as it is
        value = strict_json(arguments.strip() or "{}")
        if isinstance(value, dict) and not as_text:
            arguments = value
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
    """The process that renders: started when first needed, and again when it had to be stopped.

    It ends with this one, which holds the other end of its stdin.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.process = None

    def ask(self, request):
        """(kind, answer) for a line of JSON; see parts_of."""
        answer = b""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.process = subprocess.Popen(
                    [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is not for it
            process = self.process
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(request.encode() + b"\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
            finally:  # also if we are interrupted: its answer must not reach the next request
                if not answer.endswith(b"\n"):
                    process.kill()
                    process.communicate()
        if process.returncode is None:
            return json.loads(answer)
        if process.returncode == -signal.SIGALRM:
            return limit(f"takes more than {TIME_LIMIT_S:g} s")
        return limit(f"broke its renderer (exit status {process.returncode})")


renderer = Renderer()


# ---- in the rendering process ------------------------------------------------------------------


class Text(str):
    """A string that knows its characters' origin: `_origin` has a byte for each, 1 = template.

    Everywhere it acts as a str. The operations below keep the origin, others give a plain str.
    """

    def __new__(cls, text, origin=None):
        self = super().__new__(cls, text)
        self._origin = origin or bytes(len(text))
        return self

    def __str__(self):
        return self

    def __add__(self, other):
        return joined([self, other])

    def __radd__(self, other):
        return joined([other, self])

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
        text = f"environment.template_text({node.value!r})"
        self.write(text if isinstance(node.value, str) else repr(node.value))

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
        self.filters["tojson"] = tojson
        self.globals.update(raise_exception=raise_exception, strftime_now=time.strftime)


def raise_exception(message):
    raise ValueError(message)


def tojson(value, ensure_ascii=False, **layout):
    # Jinja's own filter sorts keys and escapes <, >, & and ': not what models were trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


compiled = functools.lru_cache(maxsize=8)(Environment().from_string)


def parts_of(template, variables):
    """("parts", [(text, from_template)]), or the kind of error and its message."""
    try:
        template = compiled(template)
    except Exception as error:
        return "model", f"line {getattr(error, 'lineno', '?')}: {one_line(error)}"
    for name in ("bos_token", "eos_token"):
        variables[name] = template_text(variables[name] or "")
    try:
        for message in variables["messages"]:
            if field(message, "role") in ROLES:
                message["role"] = template_text(message["role"])
        text = joined(template.root_render_func(template.new_context(variables)))
        if len(text) > OUTPUT_LIMIT:
            return limit(f"writes more than {OUTPUT_LIMIT} characters")
    except MemoryError:
        return limit(f"needs more than {MEMORY_LIMIT >> 20} MiB of memory")
    except Exception as error:
        return "invalid_request", f"the chat template refuses these messages: {one_line(error)}"
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

# JSON, but strings may also hold line breaks and single backslashes, as models write them.
ESCAPE = r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
CHARACTERS = rf'(?:[^"\\]|{ESCAPE})++', r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?"
KEY = rf'"(?:[^"\\\x00-\x1f]|{ESCAPE}){{0,999}}+"', r'"(?:[^"\\]|\\.){0,999}+\\?'
SCALAR = r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)"
VALUE = rf'(?:["{{\[]|{SCALAR}(?={SPACE}|[,\]}}]))', r"[-+.\w]{0,999}"
MEMBER = KEY, GAP, ":", GAP, VALUE
CLOSING = {"{": "}", "[": "]", '"': '"', "}": "}", "]": "]"}
NEXT = {  # what is open, by its first character if nothing is in it yet, else by its last
    "{": [(GAP, "}"), (GAP, *MEMBER)], "}": [(GAP, "}"), (GAP, ",", GAP, *MEMBER)],
    "[": [(GAP, "]"), (GAP, VALUE)], "]": [(GAP, "]"), (GAP, ",", GAP, VALUE)],
    '"': [(CHARACTERS,), ('"',), ("\\",)]}
DEPTH_LIMIT = 64  # or clients could not read the arguments

# Calls. Those in JSON stream if the name comes first; others must be read as a whole.
NAMED = rf"(?P<name>{NAME})", r"[\w.:/-]{0,128}"
OPENING = GAP, (r"[\[,;]?",) * 2, GAP, "{"  # in a list, or after a semicolon as Llama 3 does
CALL = (*OPENING, GAP, '"name"', GAP, ":", GAP, '"', NAMED, '"', GAP, ",", GAP,
        ('"(?:arguments|parameters)"', '"[a-z]*'), GAP, ":", GAP, "{")
WHOLE_CALL = (*OPENING, (rf'(?P<name>)(?={SPACE}*"(?:name|arguments|parameters|type|id)")',
                         rf'{SPACE}*(?:"[a-z]*)?'))
PARAMETER = (GAP, "<parameter=", (r"(?P<key>[^<>\n]{1,128})", r"[^<>\n]{0,128}"), ">",
             (r"(?:\n|(?=[^\n]))", ""))
PARAMETER_END = "</parameter>"
VALUE_END = ending((PARAMETER_END,), r"\n?")

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK = ((NAMED, SEPARATOR, GAP, "{"),
            ("function", SEPARATOR, NAMED, GAP, "```json", GAP, "{"))


class Format(NamedTuple):
    """A way to write tool calls. The first one that has a fingerprint in a template is it."""
    fingerprints: tuple
    heads: dict  # marker -> what leads from it into arguments, besides a call in JSON
    ends: tuple  # markers that may follow calls
    # Llama 3: an answer may begin with a call that has no marker, so it must name a known tool.
    bare: bool = False


FORMATS = {
    "qwen_xml": Format(("<function=",), {"<tool_call>": [(GAP, "<function=", NAMED, ">")],
                                         "<function=": [(NAMED, ">")]}, ("]", "</tool_call>")),
    "hermes": Format(("<tool_call>",), {"<tool_call>": []}, ("]", "</tool_call>")),
    "mistral": Format(("[TOOL_CALLS]",), {"[TOOL_CALLS]": [
        (GAP, NAMED, GAP, "{"), (GAP, NAMED, "[ARGS]", GAP, "{"),
        (GAP, NAMED, "[CALL_ID]", (r"\w*", r"\w*"), "[ARGS]", GAP, "{")]}, ("]",)),
    "deepseek": Format((CALLS_BEGIN, CALL_BEGIN), {
        CALLS_BEGIN: [(GAP, CALL_BEGIN, *head) for head in DEEPSEEK],
        CALL_BEGIN: DEEPSEEK}, ("```", CALL_END, CALLS_END)),
    "llama3": Format(("<|python_tag|>", "ipython"), {"<|python_tag|>": []}, ("]",), bare=True)}
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
    """True if the text of a prompt ends with the tag that opens reasoning."""
    return prompt.rstrip().endswith(tuple(opening for opening, _ in REASONING))


class Parser:
    """Splits an answer into reasoning, content and tool calls while it comes.

    feed(text) and finish() return lists of deltas:
        ("reasoning", text), ("content", text)
        ("tool_call", index, name)      a call begins; its id is ids[index]
        ("arguments", index, fragment)  the fragments of a call make one JSON object
    How the text was cut into pieces makes no difference to the deltas' joined texts. Arguments come
    out as they come in: valid JSON byte for byte (what a string must not hold is escaped), values
    between XML tags as JSON of the type that the tool's schema gives. White space next to a call or
    around reasoning is dropped, all else that belongs to no call is content. Without tools nothing
    is a call.

    A call begins when its name and the beginning of its arguments are there. What turns out to be
    no call before that is content, unchanged. When a call breaks off later, its open string, lists
    and objects are closed, and the text goes on as content.

    A grammar is a generator that yields where it needs more text; what it decides never depends on
    where the text was cut. _at is the next character to read; what lies between _from and _at is
    read, but in no delta yet.
    """

    def __init__(self, style, tools, starts_in_reasoning, one_call=False):
        """tools: the request's list, as in the OpenAI API, or None: nothing may be a call.
        one_call: what follows the first call is no part of the answer."""
        self.ids, self._one_call = [], one_call
        self.over = False  # nothing can follow
        self._deltas, self._text, self._from, self._at, self._ended = [], "", 0, 0, False
        self._format = FORMATS.get(style.tools) if tools else None
        self._tools = {str(field(tool, "function", "name")):  # -> {parameter: schema}
                       field(tool, "function", "parameters", "properties") for tool in tools or []}
        self._grammar = self._answer(style.reasoning, starts_in_reasoning)

    def feed(self, text):
        self._text = self._text[self._from:] + text
        self._at, self._from = self._at - self._from, 0
        self.over = next(self._grammar, True) is True
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self):
        self._ended = True
        return self.feed("")

    # what grammars are made of

    def _delta(self, *delta):
        if delta[-1]:
            self._deltas.append(delta)

    def _read(self, kind):
        self._delta(kind, self._text[self._from:self._at])
        self._from = self._at

    def _write(self, text):
        self._delta("arguments", len(self.ids) - 1, text)
        self._from = self._at

    def _write_string(self):
        self._write(tojson(self._text[self._from:self._at])[1:-1])

    def _skip(self, *_):
        """Where _write is not wanted."""

    def _next(self, *rows):
        """Read the first of these rows of atoms that the text is, or grows into: its match.

        None if it is none of them.
        """
        for whole, beginning in (growing(*row) for row in rows):
            while not (match := whole.match(self._text, self._at)):
                if self._ended or not beginning.match(self._text, self._at):
                    break
                yield
            else:
                self._at = match.end()
                return match

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
                yield from self._calls([])
        while not (self._one_call and self.ids) and (
                marker := (yield from self._until(markers, self._read, "content"))):
            yield from self._calls(format.heads[marker])

    # calls

    def _calls(self, heads):
        """Calls, one after another, and what may follow them; what is none is content."""
        count = len(self.ids)
        while (yield from self._call(heads)):
            self._from, heads = self._at, []
            if self._one_call:
                return
        if len(self.ids) == count:
            return self._read("content")
        yield from self._skip_space()
        while (yield from self._next(*((GAP, end) for end in self._format.ends))):
            yield from self._skip_space()

    def _call(self, heads):
        """A call, True if it ends as it should."""
        head = yield from self._next(*heads, CALL, WHOLE_CALL)
        if head and not head["name"]:
            return (yield from self._whole_call())
        if not head or not self._begin(head["name"], "{"):
            return False
        if head[0].endswith(">"):
            return (yield from self._parameters(head["name"]))
        return ((yield from self._json(self._write))
                and (head[0].count("{") == 1 or (yield from self._json(self._skip, "}"))))

    def _begin(self, name, arguments):
        """Begin a call; True if it may be one."""
        if self._format.bare and name not in self._tools:
            return False
        self.ids.append(secrets.token_hex(5)[:9])  # Mistral's templates want nine letters or digits
        self._delta("tool_call", len(self.ids) - 1, name)
        self._write(arguments)
        return True

    def _whole_call(self):
        """A call in JSON, from after its brace, whose name does not come first."""
        start = self._at - self._from - 1  # _from stays, _text is cut there
        if not (yield from self._json(self._skip)):
            return False
        try:
            call = strict_json(self._text[self._from + start:self._at])
            arguments = call.get("arguments", call.get("parameters", {}))
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            complete = re.fullmatch(NAME, call.get("name")) and text[0] == "{"
        except (ValueError, TypeError):
            return False
        return complete and self._begin(call["name"], text)

    def _json(self, write, opened="{"):
        """The rest of an object; True if it ends. If it breaks off, what is open is closed.

        opened: "}" if something of the object has been read, see NEXT.
        """
        opened = [opened]
        while opened and len(opened) <= DEPTH_LIMIT:
            if not (match := (yield from self._next(*NEXT[opened[-1]]))):
                break
            text, closing = match[0], CLOSING[opened[-1]]
            in_string = closing == '"'
            write(RAW.sub(escaped, text) if in_string else text)
            if text.lstrip() == closing:
                opened.pop()
            elif not in_string:
                opened[-1] = closing
                opened += text[-1] if text[-1] in '{["' else ""
        write("".join(CLOSING[last] for last in reversed(opened)))
        return not opened

    def _parameters(self, name):
        """<parameter=KEY> VALUE </parameter> and so on to </function>, written as JSON."""
        separator, marker = "", True
        while marker and (tag := (yield from self._next(PARAMETER))):
            self._write(f"{separator}{tojson(tag['key'])}: ")
            separator, types = ", ", types_of(field(self._tools, name, tag["key"]))
            if types <= {"string"}:
                self._write('"')
                marker = yield from self._until(VALUE_END, self._write_string)
                self._write('"')
            else:
                marker = yield from self._until(VALUE_END, self._skip)
                value = self._text[self._from:self._at].removesuffix(PARAMETER_END)
                self._write(typed(value.removesuffix("\n"), types))
        end = marker and (yield from self._next((GAP, "</function>")))
        self._write("}")
        return end


RAW = re.compile(r"[\x00-\x1f]|^\\$")  # what a string must not hold as it is


def escaped(match):
    return tojson(match[0])[1:-1]


def types_of(schema):
    """The names of the JSON types that a schema (or part of one) allows, as far as it says."""
    if isinstance(schema, str):
        return {schema}
    if isinstance(schema, dict):
        schema = [schema.get(key) for key in ("type", "anyOf", "oneOf")]
    return set().union(*map(types_of, schema)) if isinstance(schema, list) else set()


def typed(text, types):
    """JSON of a parameter that need not be a string: the text if it is JSON, else a string."""
    word = text.strip()
    if "boolean" in types:
        word = {"True": "true", "False": "false"}.get(word, word)
    try:
        value = strict_json(word)
    except ValueError:
        return tojson(text)
    return word if value is None or "string" not in types else tojson(text)


if __name__ == "__main__":
    serve()
