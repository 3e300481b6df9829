"""kernels.cu for the CPU: one shared library for each kernel, built when it is first asked for.

The preprocessed source is rewritten where C++ cannot express CUDA: inline assembly becomes calls of
the functions of namespace ptx in cuda_emulator.h, __shared__ variables become places in an arena.
Libraries are kept in the system's temporary folder, under the hash of all that goes into them.
"""
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADER = HERE / "cuda_emulator.h"
# x86-64-v3 has the f16 conversions. Local variables start as garbage; alignment, bounds of arrays
# and shifts are checked while a kernel runs.
OPTIONS = ("-std=c++17", "-O2", "-march=x86-64-v3", "-ffp-contract=off", "-fno-strict-aliasing",
           "-fPIC", "-fvisibility=hidden", "-w", "-ftrivial-auto-var-init=pattern",
           "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero",
           "-fno-sanitize-recover=all")

# What an operand is read or written as, by the letter of its constraint.
OPERAND_TYPES = {"r": "unsigned", "l": "uint64_t", "h": "uint16_t", "f": "float", "d": "double"}
PTX_TYPES = {"pred": "bool", "f16": "uint16_t", "f16x2": "unsigned", "f32": "float",
             "f64": "double", **{f"{letter}{bits}": f"{sign}int{bits}_t"
                                 for letter, sign in (("b", "u"), ("u", "u"), ("s", ""))
                                 for bits in (8, 16, 32, 64)}}
# Parts of an opcode that do not change what it computes.
HINTS = {"aligned", "nc", "volatile", "relaxed", "weak", "cta", "gpu", "cg", "ca", "cs", "lu", "cv"}


class UnknownAssembly(Exception):
    pass


class CompilerError(Exception):
    pass


# ---- Splitting text --------------------------------------------------------------------------


def closing(text, start):
    """The index of the bracket that closes the one at `start`, outside of string literals."""
    depth, i = 0, start
    while True:
        if text[i] == '"':
            i = re.compile(r'"(\\.|[^"\\])*"').match(text, i).end()
            continue
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
        i += 1


def split(text, separator):
    """The pieces of text between separators that are in no bracket and no string literal."""
    pieces, start, i = [], 0, 0
    while i < len(text):
        if text[i] in "([{":
            i = closing(text, i)
        elif text[i] == '"':
            i = re.compile(r'"(\\.|[^"\\])*"').match(text, i).end() - 1
        elif text[i] == separator:
            pieces.append(text[start:i])
            start = i + 1
        i += 1
    return [piece.strip() for piece in (*pieces, text[start:])]


# ---- Inline assembly -------------------------------------------------------------------------


@functools.cache
def known_opcodes():
    return set(re.findall(r"\bPTX (\w+)\(", HEADER.read_text()))


def instruction(text):
    """One PTX instruction as a statement of C++."""
    if declared := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S):
        return f"{PTX_TYPES[declared[1]]} {declared[2]};"
    predicate, opcode, rest = re.fullmatch(r"(?:@(!?\w+)\s+)?([\w.:]+)\s*(.*)", text, re.S).groups()
    condition = f"if ({predicate}) " if predicate else ""
    parts = [part for part in re.split(r"(?<!:)\.(?!:)", opcode)
             if part not in HINTS and "::" not in part]
    operands = [re.sub(r"[{}\[\]]", "", operand) for operand in split(rest, ",") if operand]
    if parts[0] == "ldmatrix":
        transposed = str("trans" in parts).lower()
        return f"ptx::ldmatrix<{transposed}>({operands[1]}, {operands[0]});"
    if parts[0] in ("ld", "st") and parts[1] in ("global", "shared"):
        address, values = (operands[1], operands[0]) if parts[0] == "ld" else operands
        return (f"{condition}ptx::{parts[0]}<ptx::{parts[1]}, {PTX_TYPES[parts[-1]]}>"
                f"({address}, {values});")
    name = "_".join(parts)
    if name not in known_opcodes():
        raise UnknownAssembly(f"ptx::{name}({', '.join(operands)})")
    return f"{condition}ptx::{name}({', '.join(operands)});"


def statement(assembly):
    """The inside of asm(...) as a compound statement of C++."""
    code, *operands = split(assembly, ":")
    code = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', code)).replace("\\n", " ").replace("\\t", " ")
    code = code.strip()
    if code.startswith("{") and closing(code, 0) == len(code) - 1:
        code = code[1:-1]
    bound, number = [], 0
    for is_input, group in enumerate(operands[:2]):
        for operand in filter(None, split(group, ",")):
            letters, value = re.fullmatch(r'"([^"]*)"\s*\((.*)\)', operand, re.S).groups()
            kind = OPERAND_TYPES.get(letters[-1])
            if kind is None:  # "n": known when compiled
                bound.append(f"constexpr auto ptx_{number} = {value};")
            elif is_input:
                bound.append(f"{kind} ptx_{number} = ({kind})({value});")
            else:
                bound.append(f"{kind}& ptx_{number} = ({kind}&)({value});")
            number += 1
    body = [instruction(re.sub(r"%(\d+)", r"ptx_\1", text.strip()))
            for text in code.split(";") if text.strip()]
    return f"do {{ {' '.join([*bound, *body])} }} while (0)"


def without_assembly(text):
    made, at = [], 0
    for found in re.finditer(r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(", text):
        end = closing(text, found.end() - 1)
        assembly = text[found.end():end]
        try:
            code = statement(assembly)
        except (UnknownAssembly, KeyError, AttributeError, ValueError) as error:
            raise UnknownAssembly(
                f"the emulator does not know this inline assembly: {' '.join(assembly.split())}\n"
                f"it lacks {error}; add a PTX function to {HEADER.name}") from None
        made += text[at:found.start()], code, "\n" * assembly.count("\n")
        at = end + 1
    return "".join(made) + text[at:]


# ---- Shared memory and kernels -----------------------------------------------------------------


def shared_variables(match):
    """A __shared__ declaration as references into the arena."""
    dynamic, declaration = match.groups()
    aligned = re.search(r"(?:__align__|alignas)\(([^()]*)\)", declaration)
    declaration = declaration.replace(aligned[0], "") if aligned else declaration
    kind, declarators = re.fullmatch(r"\s*(.+?)\s+(\w+\s*(?:\[.*)?(?:,.*)?)", declaration,
                                     re.S).groups()
    if dynamic:
        name = re.match(r"\w+", declarators)[0]
        return f"{kind}* const {name} = static_cast<{kind}*>(emulator::dynamic_shared());"
    made = []
    for declarator in split(declarators, ","):
        name, dimensions = re.fullmatch(r"(\w+)\s*(.*)", declarator, re.S).groups()
        alignment = aligned[1] if aligned else f"alignof({name}_type)"
        made.append(f"typedef {kind} {name}_type{dimensions}; {name}_type& {name} = "
                    f"emulator::shared<{name}_type, {alignment}>([] {{}});")
    return " ".join(made)


def kernels_of(text):
    """name -> the most threads that __launch_bounds__ allows, an expression."""
    made = {}
    for found in re.finditer(r"__global__\s+void\s+(?=__launch_bounds__|\w+\s*\()", text):
        at, most = found.end(), "1024"
        if text.startswith("__launch_bounds__", at):
            start = text.index("(", at)
            end = closing(text, start)
            most, at = split(text[start + 1:end], ",")[0], end + 1
        made[re.compile(r"\s*(\w+)\s*\(").match(text, at)[1]] = most
    return made


def run_compiler(arguments, text=""):
    done = subprocess.run(["g++", *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompilerError("g++ for the emulator:\n" + "\n".join(done.stderr.split("\n")[:30]))
    return done.stdout


@functools.cache
def translated(source, arch):
    """(text for g++, kernels) of kernels.cu. Raises UnknownAssembly or CompilerError."""
    lines = Path(source).read_text()
    lines = re.sub(r"^#include.*$", "", lines, flags=re.M)
    text = run_compiler(["-E", "-x", "c++", f"-D__CUDA_ARCH__={10 * arch}", "-D__CUDACC__", "-"],
                        f'#line 1 "{Path(source).name}"\n{lines}')
    text = without_assembly(text)
    text = re.sub(r"\b(extern\s+)?__shared__\s+([^;]*);", shared_variables, text)
    return f'#include "{HEADER}"\n{text}', kernels_of(text)


def folder():
    """Where built libraries are kept."""
    path = Path(tempfile.gettempdir()) / f"leone-emulator-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def library(source, arch, kernel):
    """Path of the built library of a kernel.

    Raises UnknownAssembly, CompilerError, or KeyError if there is no such kernel.
    """
    text, kernels = translated(source, arch)
    text += f"\nEMULATED_KERNEL({kernel}, ({kernels[kernel]}))\n"
    headers = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    key = hashlib.sha256("\0".join([*headers, text, *OPTIONS]).encode())
    path = folder() / f"{kernel}-{key.hexdigest()[:20]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            compiled, linked = f"{scratch}/kernel.o", f"{scratch}/kernel.so"
            run_compiler([*OPTIONS, "-c", "-x", "c++", "-", "-o", compiled], text)
            run_compiler(["-shared", compiled, "-o", linked])
            Path(linked).replace(path)
    return path
