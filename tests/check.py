"""`make check`: code lines against the reading budget, line length, and the README's file map.

    python tests/check.py           print the counts; exit 1 with one line for each problem
    python tests/check.py --write   put the counts into README.md first

A code line holds something that is not a comment, a docstring or white space.
"""
import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The core is what an afternoon covers. Of kernels.cu it holds what stands above this ruler.
CORE = "model.py", "reference.py", "device.py", "kv.py", "leone.py", "kernels.cu"
END_OF_CORE = "// ==== beyond the core"
CORE_LIMIT, TOTAL_LIMIT, FILE_LIMIT, LINE_LIMIT = 4230, 9110, 800, 100
FILE_LIMITS = {"kernels.cu": 2700}

COUNTED = ".py", ".cu", ".html"
LINE_LIMITED = (*COUNTED, ".css", ".js", ".sh", "Makefile", "run")
FIXTURES = "tests/golden/"  # data made elsewhere
# The brackets keep the patterns from finding themselves.
UNWANTED = {
    "a path of one machine": re.compile(r"(?<![\w.$~-])/(?:hom[e]|roo[t]|wor[k]|User[s])/"),
    "unfinished work": re.compile(r"\b(?:TOD[O]|FIXM[E])\b"),
}


# ---- Counting --------------------------------------------------------------------------------


def python_code_lines(text):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {(node.body[0].lineno, node.body[0].col_offset)
                  for node in ast.walk(ast.parse(text))
                  if isinstance(node, documented) and ast.get_docstring(node) is not None}
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENDMARKER)
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout and token.start not in docstrings:
            code.update(range(token.start[0], token.end[0] + 1))
    return sum(bool(line.strip()) for n, line in enumerate(text.split("\n"), 1) if n in code)


def cuda_code_lines(text):
    literal = r"""(["'])(?:\\.|(?!\1)[^\\\n])*\1"""  # a // in it starts no comment
    return filled_lines(re.sub(rf"{literal}|//[^\n]*|/\*.*?\*/", keep_literal, text, flags=re.S))


def html_code_lines(text):
    return filled_lines(re.sub(r"<!--.*?-->|/\*.*?\*/|(?m:^[ \t]*//[^\n]*)", "", text, flags=re.S))


def keep_literal(match):
    return match[0] if match[1] else ""


def filled_lines(text):
    return sum(bool(line.strip()) for line in text.split("\n"))


def code_lines(path, text):
    count = {".py": python_code_lines, ".cu": cuda_code_lines, ".html": html_code_lines}
    return count[path.suffix](text)


def committed_files():
    """Every file of the repository that is committed or could be: ignored ones are left out."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        sys.exit("make check asks git for the list of files: run it in a clone")
    return sorted(ROOT / name for name in set(listed.stdout.split("\0")) - {""}
                  if (ROOT / name).is_file())


# ---- Checks: each yields one line for each problem -------------------------------------------


def budget_problems(counts, core, total):
    for name, lines in counts.items():
        limit = FILE_LIMITS.get(name, FILE_LIMIT)
        if lines > limit:
            yield f"{name}: {lines} code lines, {limit} allowed"
    for name, lines, limit in ("core", core, CORE_LIMIT), ("all files", total, TOTAL_LIMIT):
        if lines > limit:
            yield f"{name}: {lines} code lines, {limit} allowed"


def text_problems(path):
    name = path.relative_to(ROOT).as_posix()
    data = path.read_bytes()
    if b"\0" in data or name.startswith(FIXTURES):
        return
    for n, line in enumerate(data.decode().split("\n"), 1):
        if name.endswith(LINE_LIMITED) and len(line) > LINE_LIMIT:
            yield f"{name}:{n}: {len(line)} characters, {LINE_LIMIT} allowed"
        for what, pattern in UNWANTED.items():
            if pattern.search(line):
                yield f"{name}:{n}: {what}: {line.strip()[:60]}"


MAP_ROW = re.compile(r"^\| `?([\w. ]+?)`? \| +([\d,]+|-) \|", re.M)


def map_section(readme):
    """(start, end) of the file map in README.md: from its heading to the next one."""
    start = readme.index("\n## Map\n")
    return start, readme.index("\n## ", start + 1)


def map_problems(readme, rows):
    start, end = map_section(readme)
    found = dict(MAP_ROW.findall(readme[start:end]))
    for name in sorted(rows.keys() | found.keys()):
        if name not in found:
            yield f"README.md: the map lacks {name}: add a row that says what it is"
        elif name not in rows:
            yield f"README.md: the map names {name}, which is not there"
        elif found[name] != f"{rows[name]:,}":
            yield (f"README.md: the map says {found[name]} for {name}, counted {rows[name]:,}: "
                   "run python tests/check.py --write")


def with_counts(readme, rows):
    """README.md with the counted numbers in its map."""
    def fill(match):
        cell, count = match[0], rows.get(match[1])
        return cell if count is None else cell[:match.start(2) - match.start()] + f"{count:,} |"
    start, end = map_section(readme)
    return readme[:start] + MAP_ROW.sub(fill, readme[start:end]) + readme[end:]


def main(write):
    files = committed_files()
    texts = {path.name: path.read_text() for path in files
             if path.parent == ROOT and path.suffix in COUNTED}
    counts = {name: code_lines(Path(name), text) for name, text in texts.items()}
    core = sum(code_lines(Path(name), texts[name].split(END_OF_CORE)[0])
               for name in CORE if name in texts)
    total = sum(counts.values())
    rows = {**counts, "the core": core, "everything": total}

    readme = ROOT / "README.md"
    if write:
        readme.write_text(with_counts(readme.read_text(), rows))
    print(f"{'code lines':>24} {'limit':>7} {'KB':>6}")
    for name, lines in counts.items():
        kilobytes = len(texts[name].encode()) / 1000
        print(f"{name:13} {lines:10,} {FILE_LIMITS.get(name, FILE_LIMIT):7,} {kilobytes:6.1f}")
    print(f"{'the core':13} {core:10,} {CORE_LIMIT:7,}")
    print(f"{'everything':13} {total:10,} {TOTAL_LIMIT:7,}")

    problems = [*budget_problems(counts, core, total),
                *(problem for path in files for problem in text_problems(path)),
                *map_problems(readme.read_text(), rows)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(write="--write" in sys.argv[1:]))
