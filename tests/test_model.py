"""The loader: parser, Config, binding and doctor, against the gguf package and plain formulas."""
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

import crafted as c
import device
import model
import reference
import tools
from errors import ModelError

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
SUPPORTED = {  # family: layers, n_ff, query heads, KV heads, head_dim, qk_norm, tied
    "llama3": (2, 512, 4, 2, 64, False, True),
    "mistral": (2, 512, 4, 2, 128, False, False),
    "qwen25": (2, 512, 4, 2, 64, False, True),
    "qwen3": (2, 512, 4, 2, 128, True, True),
    "qwen3-yarn": (2, 256, 4, 2, 64, True, True),
    "phi3": (2, 512, 4, 4, 64, False, False),
    "phi3-longrope": (2, 512, 4, 2, 64, False, False),
}
COMING = ("mixtral", "qwen3moe", "deepseek2", "deepseek2-lite", "qwen35", "qwen35moe", "qwen3next")
FILES = [*SUPPORTED, *COMING]


def golden(family):
    return GOLDEN / f"{family}-q4km.gguf"


class Recorder:
    """An op table whose handles are what it was given."""

    def __init__(self):
        self.matrices = []

    def matrix(self, tensors, bias=None):
        self.matrices.append((tensors, bias))
        return tensors, bias

    def vector(self, array):
        return array


def write(path, *args, **fields):
    path.write_bytes(c.file_bytes(*args, **fields))
    return path


def tiny(tmp_path, changed_keys=(), changed_tensors=()):
    """Path of the tiny model with other metadata or tensors."""
    metadata, tensors = c.tiny_model()
    return write(tmp_path / "tiny.gguf", metadata | dict(changed_keys),
                 tensors | dict(changed_tensors))


# ---- the parser ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FILES)
def test_same_as_the_gguf_package(family):
    ours, theirs = model.GGUF(golden(family)), gguf.GGUFReader(golden(family))
    names = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert list(ours.metadata) == names
    for name in names:
        expected, found = theirs.fields[name].contents(), ours.metadata[name]
        if isinstance(found, model.Strings):
            assert [text.decode() for text in found] == expected
        elif isinstance(found, np.ndarray):
            assert found.tolist() == expected
        else:
            assert found == expected and type(found) is type(expected)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for expected in theirs.tensors:
        found = ours.tensors[expected.name]
        assert found.type == expected.tensor_type
        assert found.shape == tuple(expected.shape.tolist()[::-1])
        assert found.data.tobytes() == expected.data.tobytes()


def test_arrays(tmp_path):
    texts = [b"", b"a", b"\xff\x00\xfe", "ä".encode(), b"x" * 1000]
    path = write(tmp_path / "a.gguf", {"texts": texts, "floats": [0.5, -1.0], "ints": [3, -4]}, {},
                 extra_keys=[c.array("none", c.STRING, 0, b""), c.array("no", c.U8, 0, b""),
                             c.array("flags", c.BOOL, 3, bytes([0, 1, 2]))])
    found = model.GGUF(path).metadata
    assert list(found["texts"]) == texts and len(found["texts"]) == 5
    assert [found["texts"][i] for i in (0, 2, 4, -1, -5)] == [texts[i] for i in (0, 2, 4, -1, -5)]
    with pytest.raises(IndexError):
        found["texts"][5]
    assert list(found["none"]) == [] and found["no"].tolist() == []
    assert found["floats"].tolist() == [0.5, -1.0] and found["ints"].tolist() == [3, -4]
    assert found["flags"].tolist() == [False, True, True]


def test_a_text_of_any_bytes(tmp_path):
    path = write(tmp_path / "a.gguf", {"text": b"a\xffb"}, {})
    assert model.GGUF(path).metadata["text"] == "a\ufffdb"


def test_version_2(tmp_path):
    path = write(tmp_path / "v2.gguf", *c.tiny_model(), version=2)
    assert model.load(model.GGUF(path), Recorder())[0].name == "tiny"


def test_typed_values(tmp_path):
    path = write(tmp_path / "a.gguf", {"number": 3, "flag": True, "real": 0.5, "text": "t"}, {})
    file = model.GGUF(path)
    assert file.value("number", int) == 3 and file.value("number", float) == 3.0
    assert file.value("flag", bool) is True and file.value("none", str, "x") == "x"
    for key, kind in (("number", bool), ("number", str), ("flag", int), ("real", int), ("no", int)):
        with pytest.raises(ModelError, match=f"'{key}'.*{kind.__name__}"):
            file.value(key, kind)


def split(folder, count=3, **changed):
    """Paths of the tiny model in `count` files; changed: part0={key: value} and so on."""
    metadata, tensors = c.tiny_model()
    names, paths = list(tensors), []
    for number in range(count):
        keys = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        keys |= changed.get(f"part{number}", {})
        part = {name: tensors[name] for name in names[number::count]}
        paths.append(write(folder / f"m-{number + 1:05}-of-{count:05}.gguf",
                           keys | metadata if number == 0 else keys, part))
    return paths


def test_split_file(tmp_path):
    whole = model.GGUF(tiny(tmp_path))
    for path in split(tmp_path):
        joined = model.GGUF(path)
        assert [part.name[:7] for part in joined.paths] == ["m-00001", "m-00002", "m-00003"]
        assert joined.metadata["general.name"] == "tiny"
        assert joined.tensors.keys() == whole.tensors.keys()
        for name, tensor in whole.tensors.items():
            assert joined.tensors[name].data.tobytes() == tensor.data.tobytes()
        model.load(joined, Recorder())


def test_split_file_in_disorder(tmp_path):
    paths = split(tmp_path, part1={"split.no": 0})
    with pytest.raises(ModelError, match="split.no of m-00002-of-00003.gguf must be 1, not 0"):
        model.GGUF(paths[0])
    paths = split(tmp_path, part2={"split.count": 4})
    with pytest.raises(ModelError, match="split.count of m-00003-of-00003.gguf must be 3, not 4"):
        model.GGUF(paths[0])
    paths = split(tmp_path)
    write(paths[1], {"split.no": 1, "split.count": 3}, c.tiny_model()[1])
    with pytest.raises(ModelError, match="is in two parts"):
        model.GGUF(paths[0])
    paths[2].unlink()
    with pytest.raises(ModelError, match="cannot open .*m-00003-of-00003.gguf"):
        model.GGUF(paths[0])
    with pytest.raises(ModelError, match="must be named NAME-00001-of-00003.gguf"):
        model.GGUF(paths[0].rename(tmp_path / "renamed.gguf"))


# ---- Config --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SUPPORTED)
def test_config(family):
    cfg = model.Config.from_gguf(model.GGUF(golden(family)))
    found = (cfg.n_layers, cfg.n_ff, cfg.n_heads, cfg.n_kv_heads, cfg.head_dim, cfg.qk_norm)
    assert found == SUPPORTED[family][:-1]
    assert (cfg.n_embd, cfg.n_vocab, cfg.n_tokens) == (256, 512, 512)
    assert cfg.n_ctx == (4096 if family.startswith("phi3") else 512)
    assert cfg.rope_neox == (family not in ("llama3", "mistral"))
    assert cfg.rms_eps == pytest.approx(1e-6 if family.startswith("qwen") else 1e-5)
    assert cfg.attn_scale == 1 / math.sqrt(cfg.head_dim)
    assert len(model.Config.__dataclass_fields__) <= 30
    hash(cfg)


@pytest.mark.parametrize("family", COMING)
def test_coming_families_are_refused(family):
    file = model.GGUF(golden(family))
    with pytest.raises(ModelError, match="not supported yet; supported: llama, qwen2, qwen3, phi3"):
        model.load(file, Recorder())


def plain_angle(base, rope_dim, pair):
    return 1 / base ** (2 * pair / rope_dim)


@pytest.mark.parametrize("family, base", [("mistral", 1e6), ("qwen25", 1e6), ("qwen3", 1e6),
                                          ("phi3", 1e4)])
def test_plain_rope(family, base):
    cfg = model.Config.from_gguf(model.GGUF(golden(family)))
    expected = [plain_angle(base, cfg.head_dim, j) for j in range(cfg.head_dim // 2)]
    assert len(cfg.rope_sets) == 1 and cfg.rope_long_from == 0 and cfg.rope_magnitude == 1
    np.testing.assert_allclose(cfg.rope_sets[0], expected, rtol=1e-14)


def test_linear_rope(tmp_path):
    """With a type, without one, and as "none", which switches the factor off."""
    for keys, factor in (({"type": "linear", "factor": 4.0}, 4), ({"factor": 4.0}, 4),
                         ({"type": "none", "factor": 4.0}, 1)):
        keys = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
        cfg = model.Config.from_gguf(model.GGUF(tiny(tmp_path, keys)))
        expected = [plain_angle(1e4, 8, j) / factor for j in range(4)]
        np.testing.assert_allclose(cfg.rope_sets[0], expected, rtol=1e-14)


def test_partial_rope(tmp_path):
    cfg = model.Config.from_gguf(model.GGUF(tiny(tmp_path, {"llama.rope.dimension_count": 4})))
    np.testing.assert_allclose(cfg.rope_sets[0], [1, 0.01], rtol=1e-14)


def test_llama3_rope():
    """The rule of the model's authors, with the numbers that the fixture was made with."""
    factor, low, high, original, base, rope_dim = 8.0, 1.0, 4.0, 64, 500000.0, 64
    expected = []
    for pair in range(rope_dim // 2):
        angle = plain_angle(base, rope_dim, pair)
        wavelength = 2 * math.pi / angle
        smooth = (original / wavelength - low) / (high - low)
        if wavelength > original / low:
            angle /= factor
        elif wavelength >= original / high:
            angle = (1 - smooth) * angle / factor + smooth * angle
        expected.append(angle)
    cfg = model.Config.from_gguf(model.GGUF(golden("llama3")))
    assert len(cfg.rope_sets) == 1 and cfg.rope_magnitude == 1
    np.testing.assert_allclose(cfg.rope_sets[0], expected, rtol=1e-6)  # the table is float32


def yarn_angles(base, rope_dim, factor, original, fast=32.0, slow=1.0):
    """YaRN as its paper has it: interpolate what turns slowly, leave what turns fast."""
    def bound(turns):
        return rope_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(bound(fast)), 0), min(math.ceil(bound(slow)), rope_dim - 1)
    for pair in range(rope_dim // 2):
        angle = plain_angle(base, rope_dim, pair)
        keep = 1 - min(max((pair - low) / (high - low), 0), 1)
        yield angle / factor * (1 - keep) + angle * keep


def test_yarn_rope():
    cfg = model.Config.from_gguf(model.GGUF(golden("qwen3-yarn")))
    assert cfg.rope_magnitude == pytest.approx(0.1 * math.log(4) + 1, rel=1e-14)
    np.testing.assert_allclose(cfg.rope_sets[0], list(yarn_angles(1e6, 64, 4, 64)), rtol=1e-13)
    assert cfg.rope_sets[0][0] == 1 and cfg.rope_sets[0][-1] < plain_angle(1e6, 64, 31) / 3.9


def test_yarn_rope_with_all_its_keys(tmp_path):
    """head_dim 64 and original context 4096; betas, attention factor and divisors in the file."""
    keys = {"type": "yarn", "factor": 8.0, "original_context_length": 4096, "attn_factor": 0.75,
            "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "finetuned": True}
    keys = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    keys |= {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
    divisors = np.linspace(1, 3, 32, dtype=np.float32)
    path = tiny(tmp_path, keys, {"rope_freqs.weight": divisors})
    cfg = model.Config.from_gguf(model.GGUF(path))
    expected = np.array(list(yarn_angles(1e4, 64, 8, 4096, fast=16, slow=2))) / divisors
    np.testing.assert_allclose(cfg.rope_sets[0], expected, rtol=1e-13)
    assert cfg.rope_magnitude == pytest.approx(0.75 * (0.1 * math.log(8) + 1), rel=1e-14)


def test_longrope():
    file = gguf.GGUFReader(golden("phi3-longrope"))
    table = {tensor.name: tensor.data for tensor in file.tensors}
    plain = np.array([plain_angle(1e4, 64, pair) for pair in range(32)])
    cfg = model.Config.from_gguf(model.GGUF(golden("phi3-longrope")))
    for found, name in zip(cfg.rope_sets, ("short", "long"), strict=True):
        expected = plain / table[f"rope_factors_{name}.weight"].astype(np.float64)
        np.testing.assert_allclose(found, expected, rtol=1e-14)
    assert cfg.rope_sets[0] != cfg.rope_sets[1] and cfg.rope_long_from == 256
    magnitude = math.sqrt(1 + math.log(4096 / 256) / math.log(256))
    assert cfg.rope_magnitude == pytest.approx(magnitude, rel=1e-7)  # the key is float32


def test_padded_token_table(tmp_path):
    path = tiny(tmp_path, changed_tensors={"token_embd.weight": np.ones((9, 16), np.float32)})
    cfg = model.Config.from_gguf(model.GGUF(path))
    assert (cfg.n_vocab, cfg.n_tokens) == (9, 6)


# ---- binding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_tensor_is_bound_once(family):
    file, ops, seen = model.GGUF(golden(family)), Recorder(), []
    cfg, weights = model.load(file, ops, lambda done, total: seen.append((done, total)))
    bound = [tensor.name for tensors, _ in ops.matrices for tensor in tensors]
    matrices = [name for name, tensor in file.tensors.items() if len(tensor.shape) == 2]
    assert sorted(bound) == sorted(matrices)
    for tensors, bias in ops.matrices:
        assert len({tensor.shape[1] for tensor in tensors}) == 1
        assert bias is None or bias.shape == (sum(tensor.shape[0] for tensor in tensors),)
    assert len(weights.layers) == cfg.n_layers
    assert (weights.output is weights.embed) == SUPPORTED[family][-1]
    assert all((layer.q_norm is None) != cfg.qk_norm for layer in weights.layers)
    done = [pair[0] for pair in seen]
    assert done == sorted(done) and done[-1] == seen[-1][1]


def test_bias_follows_the_rows():
    file = model.GGUF(golden("qwen25"))
    _, weights = model.load(file, Recorder())
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(golden("qwen25")).tensors}
    for i, layer in enumerate(weights.layers):
        tensors, bias = layer.qkv
        assert [tensor.name for tensor in tensors] == [f"blk.{i}.attn_{x}.weight" for x in "qkv"]
        expected = np.concatenate([raw[f"blk.{i}.attn_{x}.bias"] for x in "qkv"])
        assert bias.dtype == np.float32 and np.array_equal(bias, expected) and bias.any()


def test_fused_and_split_forms_are_the_same_rows(tmp_path):
    metadata, tensors = c.tiny_model()
    separate = model.load(model.GGUF(write(tmp_path / "a.gguf", metadata, tensors)), Recorder())[1]
    stack = lambda names: np.concatenate([tensors.pop(f"blk.0.{name}.weight") for name in names])
    tensors["blk.0.attn_qkv.weight"] = stack(["attn_q", "attn_k", "attn_v"])
    tensors["blk.0.ffn_up.weight"] = stack(["ffn_gate", "ffn_up"])
    tensors["blk.0.attn_qkv.bias"] = np.arange(64, dtype=np.float32)
    fused = model.load(model.GGUF(write(tmp_path / "b.gguf", metadata, tensors)), Recorder())[1]
    for name in ("qkv", "gate_up"):
        rows = [b"".join(tensor.data.tobytes() for tensor in getattr(weights.layers[0], name)[0])
                for weights in (separate, fused)]
        assert rows[0] == rows[1]
    assert fused.layers[0].qkv[1].tolist() == list(range(64))


def test_unneeded_tensors_pass(tmp_path):
    tables = {"blk.0.attn_rot_embd.weight": np.ones(4, np.float32)}
    model.load(model.GGUF(tiny(tmp_path, changed_tensors=tables)), Recorder())


# ---- families die at the loader ------------------------------------------------------------------

ARCHITECTURES = re.compile(r"\b(llama|mistral|mixtral|qwen\w*|phi3|deepseek2|gemma\w*)\b(?!-bpe)")
BELOW_THE_LOADER = ("reference.py", "device.py", "kernels.cu", "kv.py", "leone.py", "sampling.py")


def test_no_architecture_below_the_loader():
    for name in BELOW_THE_LOADER:
        if (ROOT / name).exists():
            assert not ARCHITECTURES.findall((ROOT / name).read_text()), name
    text = (ROOT / "model.py").read_text()
    table = re.search(r"^FAMILIES = \{.*?^\}", text, re.M | re.S)
    assert len(ARCHITECTURES.findall(table[0])) == 4
    assert not ARCHITECTURES.findall(text.replace(table[0], ""))


# ---- doctor --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FILES)
def test_doctor_reports_every_family(family, capsys):
    tools.doctor(golden(family), as_json=True)
    report = json.loads(capsys.readouterr().out)
    tensors = gguf.GGUFReader(golden(family)).tensors
    assert report["supported"] == (family in SUPPORTED)
    assert (report["problem"] is None) == report["supported"] == (report["kv"] is not None)
    assert report["parameters"] == sum(int(tensor.n_elements) for tensor in tensors)
    assert sum(entry["tensors"] for entry in report["formats"]) == len(tensors)
    assert sum(entry["bytes"] for entry in report["formats"]) == sum(
        int(tensor.n_bytes) for tensor in tensors)
    assert report["tokenizer"]["tokens"] == 512 and report["context"] > 0
    tools.doctor(golden(family))
    lines = capsys.readouterr().out
    assert ("not supported yet" in lines) == (not report["supported"])
    assert max(map(len, lines.splitlines())) < 160


def test_deep_doctor_finds_bits_that_depend_on_the_batch(capsys, monkeypatch):
    assert tools.doctor(golden("llama3"), deep=True) == 0
    assert capsys.readouterr().out.count("KV: the same") == 3
    monkeypatch.setattr(reference.Reference, "multiply", lambda self, x, weight, out:
                        np.matmul(x, weight, out=out))
    assert tools.doctor(golden("llama3"), as_json=True, deep=True) == 1
    assert set(json.loads(capsys.readouterr().out)["same_bits"].values()) == {False}


def test_doctor_counts_bytes(monkeypatch):
    card = dict(name="Card", arch=90, driver="13.0", total_bytes=24 << 30, free_bytes=1 << 30)
    monkeypatch.setattr(device, "probe", lambda: card)
    report = tools.examine(golden("qwen3"))
    values = 2 * 2 * 2 * 128  # K and V, layers, KV heads, head_dim
    per_token = {kv: entry["bytes_per_token"] for kv, entry in report["kv"].items()}
    assert per_token == {"f32": 4 * values, "f16": 2 * values, "q8": values + values // 32 * 2}
    on_card = sum(entry["gpu_bytes"] for entry in report["formats"])
    room = card["free_bytes"] - on_card - tools.CUDA_OVERHEAD
    for kv, entry in report["kv"].items():
        assert entry["fits_tokens"] == room // per_token[kv] // 64 * 64
    assert "sm_90" in "\n".join(tools.table(report))
    card["free_bytes"] = 1 << 20
    assert tools.examine(golden("qwen3"))["kv"]["q8"]["fits_tokens"] == 0


def test_doctor_says_what_becomes_of_each_format(tmp_path):
    path = tiny(tmp_path, changed_tensors={
        "blk.0.ffn_up.weight": ([16, 24], c.F16, bytes(768)),
        "output.weight": np.ones((6, 16), np.float32)})
    formats = {(entry["type"], entry["used_for"]): entry
               for entry in tools.examine(path)["formats"]}
    assert formats["F16", "matrices"]["cuda"] == "as it is"
    assert formats["F32", "matrices"]["cuda"] == "stored as F16"
    assert formats["F32", "matrices"]["gpu_bytes"] * 2 == formats["F32", "matrices"]["bytes"]
    assert formats["F32", "vectors"]["cuda"] == "as it is"


def test_doctor_names_heads_that_cuda_refuses(tmp_path, monkeypatch):
    card = dict(name="Card", arch=90, driver="13.0", total_bytes=24 << 30, free_bytes=23 << 30)
    monkeypatch.setattr(device, "probe", lambda: card)
    report = tools.examine(tiny(tmp_path))
    assert report["cuda_problem"] == "no kernel for heads of 8 values: use --backend cpu"
    assert {entry["fits_tokens"] for entry in report["kv"].values()} == {None}
    text = "\n".join(tools.table(report))
    assert report["cuda_problem"] in text and text.count("not on CUDA") == 3
    assert tools.examine(golden("qwen3"))["cuda_problem"] is None


def test_doctor_notes(tmp_path):
    path = tiny(tmp_path, {"llama.attention.sliding_window": 32},
                {"token_embd.weight": np.ones((9, 16), np.float32)})
    window, padding = tools.examine(path)["notes"]
    assert "32 tokens is not applied" in window and "3 rows of padding" in padding
    note, = tools.examine(golden("phi3-longrope"))["notes"]
    assert "more than 256 tokens" in note


def test_doctor_prints_no_control_characters(tmp_path, capsys):
    tools.doctor(tiny(tmp_path, {"general.name": "\x1b[2Jevil\n"}))
    assert "\x1b" not in capsys.readouterr().out


# ---- a large vocabulary --------------------------------------------------------------------------

SYMBOLS, PAIRS, HIDDEN = 500, 249_500, 32_000
SECONDS, KILOBYTES = 1.5, 400 << 10

# A small process measures: a child of this one would count pages that it shares after the fork.
MEASURE = """
import os, subprocess, sys, time
began = time.perf_counter()
child = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(child.pid, 0)
print(time.perf_counter() - began, usage.ru_maxrss, os.waitstatus_to_exitcode(status))
"""


def write_large(path, family):
    """A sparse file of 16 GB: a true header with 250,000 tokens and merges, and no weights."""
    letters = [chr(0x4E00 + i) for i in range(SYMBOLS)]
    pairs = [(a, b) for a in letters for b in letters][:PAIRS]
    merges = [f"{a} {b}" for a, b in pairs] + [f"{a} {b}" for a, b in pairs[:SYMBOLS]]
    metadata = {
        "general.architecture": family, f"{family}.block_count": 1,
        f"{family}.context_length": 32768, f"{family}.embedding_length": HIDDEN,
        f"{family}.feed_forward_length": 64, f"{family}.attention.head_count": 1,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{family}.attention.key_length": 64, f"{family}.attention.value_length": 64,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": letters + [a + b for a, b in pairs],
        "tokenizer.ggml.token_type": [1] * 250_000, "tokenizer.ggml.merges": merges}
    lengths = {"token_embd": [HIDDEN, 250_000], "output_norm": [HIDDEN],
               "blk.0.attn_norm": [HIDDEN], "blk.0.ffn_norm": [HIDDEN]}
    lengths |= {f"blk.0.{name}": [HIDDEN, 64]
                for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")}
    lengths |= {f"blk.0.{name}": [64, HIDDEN] for name in ("attn_output", "ffn_down")}
    entries, offset = [], 0
    for name, shape in lengths.items():
        kind, width = (c.F32, 4) if len(shape) == 1 else (c.F16, 2)
        entries.append(c.tensor_entry(name + ".weight", shape, kind, offset))
        offset += math.prod(shape) * width
    header = c.file_bytes(metadata, {}, extra_tensors=entries)
    path.write_bytes(header)
    os.truncate(path, len(header) + len(c.padding(len(header))) + offset)
    assert path.stat().st_size > 16e9
    return path


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
def test_doctor_on_a_large_vocabulary(family, tmp_path):
    path = write_large(tmp_path / "large.gguf", family)
    for _ in range(5):  # a busy machine may need more than one try
        command = sys.executable, "leone.py", "doctor", "--json", "-m", path
        run = subprocess.run([sys.executable, "-c", MEASURE, *command], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, check=True)
        report, measured = run.stdout.splitlines()
        report, (seconds, kilobytes, status) = json.loads(report), map(float, measured.split())
        assert status == 0 and report["tokenizer"]["tokens"] == 250_000
        assert report["supported"] == (family == "qwen3")
        assert kilobytes < KILOBYTES
        if seconds < SECONDS:
            break
    assert seconds < SECONDS
