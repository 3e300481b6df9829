"""Chat templates: a conversation in the words that the model was trained on.

A GGUF file carries its template as Jinja code, which comes from strangers: it runs in an immutable
sandbox, for SECONDS at most and up to LONGEST characters. What users write must never become a
control token. So wherever user text spells one, a mark is put inside; the rendered text is cut at
the marks, and the tokenizer looks for control tokens inside a piece only.
"""
import json
import re
import sys
import time
from datetime import datetime

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from errors import LeoneError, ModelError, RequestError

SECONDS = 2.0
LONGEST = 1 << 24  # characters of a rendered conversation, and of any string on the way
MARK = "\ufdd0"  # a code point that Unicode reserves for uses such as this
ROLES = "system", "developer", "user", "assistant", "tool"


def render(template, messages, control_texts=(), tools=None, add_generation_prompt=True, **names):
    """The conversation as parts [(text, may hold control tokens)] for Tokenizer.encode_parts.

    messages: [{"role", "content", ...}] in OpenAI's form. control_texts: what control tokens look
    like. names: what else the template may read (bos_token, eos_token, enable_thinking, ...).
    Raises RequestError with the template's own message where it refuses the conversation.
    """
    for message in messages:
        if message.get("role") not in ROLES:
            raise RequestError(f"role {message.get('role')!r} is unknown; use one of "
                               f"{', '.join(ROLES)}", param="messages")
    longest_first = sorted(filter(None, control_texts), key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    text = run(compiled(template), dict(
        names, messages=marked(messages, control), tools=marked(tools, control),
        add_generation_prompt=add_generation_prompt))
    return [(part, True) for part in text.split(MARK) if part]


def marked(value, control):
    """A copy of JSON-like `value` with a MARK after the first character of each control text."""
    if isinstance(value, str):
        return control.sub(lambda found: found[0][0] + MARK + found[0][1:], value.replace(MARK, ""))
    if isinstance(value, dict):
        return {marked(key, control): marked(item, control) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [marked(item, control) for item in value]
    return value


# ---- the sandbox -----------------------------------------------------------------------------


class Refused(Exception):
    """The template called raise_exception, or took too much time or memory."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with operators that cannot build huge values."""
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name)
        for name in ("center", "format", "indent", "wordwrap"):  # a width makes them huge
            self.filters.pop(name)
        self.filters["tojson"] = tojson
        self.filters["indent"] = indent
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def call_binop(self, context, operator, left, right):
        sizes = [abs(x) if isinstance(x, int) else len(x) for x in (left, right)
                 if isinstance(x, (int, str, list, tuple))]
        if operator == "**" and max(sizes, default=0) > 64 or (
                operator == "%" and isinstance(left, str)) or (
                operator == "*" and len(sizes) == 2 and sizes[0] * sizes[1] > LONGEST):
            raise Refused(f"an operand of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj, attr, value):
        widths = "center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"
        return attr not in widths and super().is_safe_attribute(obj, attr, value)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter sorts keys and escapes <, >, & and ': not what models were trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def indent(text, width=4, first=False, blank=False):
    if not isinstance(width, int) or width > 64:
        raise Refused("indent is too wide")
    lines = [line and " " * width + line if line or not blank else " " * width
             for line in text.split("\n")]
    return "\n".join(lines if first else [text.split("\n")[0], *lines[1:]])


def raise_exception(message):
    raise Refused(message)


def compiled(source):
    """The template as a Jinja object, with training marks taken out. Raises ModelError."""
    try:
        return Sandbox().from_string(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source))
    except (jinja2.TemplateError, RecursionError, ValueError) as error:
        raise ModelError(f"the chat template does not compile: {one_line(error)}") from None


def run(template, names):
    """Render under a watch that looks at the clock and at local strings on every line."""
    deadline = time.monotonic() + SECONDS

    def watch(frame, event, _):
        if time.monotonic() > deadline:
            raise Refused(f"it took more than {SECONDS:.0f} s")
        if event == "line" and frame.f_code.co_filename == "<template>":
            for value in frame.f_locals.values():
                if isinstance(value, (str, list)) and len(value) > LONGEST:
                    raise Refused("it makes a value that is too long")
        return watch

    before, size, pieces = sys.gettrace(), 0, []
    sys.settrace(watch)
    try:
        for piece in template.generate(names):
            size += len(piece)
            if size > LONGEST:
                raise Refused("the text becomes too long")
            pieces.append(piece)
    except LeoneError:
        raise
    except Exception as error:  # whatever a stranger's template does is an error of this request
        raise RequestError(f"the chat template refused: {one_line(error)}",
                           param="messages") from None
    finally:
        sys.settrace(before)
    return "".join(pieces)


def one_line(error):
    return " ".join(str(error).split())[:300] or type(error).__name__
