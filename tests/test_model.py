"""The loader: parser, Config, binding and doctor, against the gguf package and plain formulas."""
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

import crafted as c
import device
import leone
import gguf_file
import model
import reference
import tools
from errors import ModelError
from models import draft_logits

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
    "mixtral": (2, 256, 4, 2, 64, False, False),
    "qwen3moe": (2, 512, 4, 1, 128, True, False),
    "deepseek2": (2, 512, 4, 1, 320, False, False),
    "deepseek2-lite": (2, 512, 4, 1, 320, False, False),
    "qwen35": (4, 256, 2, 1, 256, True, False),
    "qwen35moe": (2, 256, 2, 1, 256, True, False),
    "qwen3next": (2, 512, 2, 1, 256, True, False),
}
FILES = list(SUPPORTED)
LATENT = dict(latent=True, value_dim=256, key_dim=192, out_dim=128, n_dense_layers=1,
              n_experts=8, n_experts_used=2, n_ff_experts=256, n_ff_shared=512)
DELTA = dict(q_gated=True, rope_dim=64, conv_width=4, delta_dim=128, delta_k_heads=2,
             delta_v_heads=4)
GATED = dict(n_experts=4, n_experts_used=2, n_ff_experts=256, n_ff_shared=256, shared_gated=True,
             router_norm=True, recurrent=(True, False))
BEYOND_DENSE = {  # fields of Config that differ from their defaults
    "mixtral": dict(n_experts=4, n_experts_used=2, n_ff_experts=256, router_norm=True),
    "qwen3moe": dict(n_experts=8, n_experts_used=2, n_ff_experts=256, router_norm=True),
    "deepseek2": LATENT | dict(q_rank=256, router_scale=4.0),
    "deepseek2-lite": LATENT,
    "qwen35": DELTA | dict(recurrent=(True, True, True, False), n_mtp=1),
    "qwen35moe": DELTA | GATED,
    "qwen3next": DELTA | GATED | dict(delta_grouped=True),
}


def golden(family):
    return GOLDEN / f"{family}-q4km.gguf"


class Recorder:
    """An op table whose handles are what it was given."""

    def __init__(self):
        self.matrices = []

    def matrix(self, tensors, bias=None):
        self.matrices.append((tensors, bias))
        return tensors, bias

    experts = matrix

    def gated(self, gate_up, down, norm):
        return self.matrix(gate_up), self.matrix(down)

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
    ours, theirs = gguf_file.GGUF(golden(family)), gguf.GGUFReader(golden(family))
    names = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert list(ours.metadata) == names
    for name in names:
        expected, found = theirs.fields[name].contents(), ours.metadata[name]
        if isinstance(found, list):
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
    found = gguf_file.GGUF(path).metadata
    assert found["texts"] == texts
    assert found["none"] == [] and found["no"].tolist() == []
    assert found["floats"].tolist() == [0.5, -1.0] and found["ints"].tolist() == [3, -4]
    assert found["flags"].tolist() == [False, True, True]


def test_a_text_of_any_bytes(tmp_path):
    path = write(tmp_path / "a.gguf", {"text": b"a\xffb"}, {})
    assert gguf_file.GGUF(path).metadata["text"] == "a\ufffdb"


def test_version_2(tmp_path):
    path = write(tmp_path / "v2.gguf", *c.tiny_model(), version=2)
    assert model.load(gguf_file.GGUF(path), Recorder())[0].name == "tiny"


def test_typed_values(tmp_path):
    path = write(tmp_path / "a.gguf", {"number": 3, "flag": True, "real": 0.5, "text": "t"}, {})
    file = gguf_file.GGUF(path)
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
    whole = gguf_file.GGUF(tiny(tmp_path))
    for path in split(tmp_path):
        joined = gguf_file.GGUF(path)
        assert [part.name[:7] for part in joined.paths] == ["m-00001", "m-00002", "m-00003"]
        assert joined.metadata["general.name"] == "tiny"
        assert joined.tensors.keys() == whole.tensors.keys()
        for name, tensor in whole.tensors.items():
            assert joined.tensors[name].data.tobytes() == tensor.data.tobytes()
        model.load(joined, Recorder())


def test_split_file_in_disorder(tmp_path):
    paths = split(tmp_path, part1={"split.no": 0})
    with pytest.raises(ModelError, match="split.no of m-00002-of-00003.gguf must be 1, not 0"):
        gguf_file.GGUF(paths[0])
    paths = split(tmp_path, part2={"split.count": 4})
    with pytest.raises(ModelError, match="split.count of m-00003-of-00003.gguf must be 3, not 4"):
        gguf_file.GGUF(paths[0])
    paths = split(tmp_path)
    write(paths[1], {"split.no": 1, "split.count": 3}, c.tiny_model()[1])
    with pytest.raises(ModelError, match="is in two parts"):
        gguf_file.GGUF(paths[0])
    paths[2].unlink()
    with pytest.raises(ModelError, match="cannot open .*m-00003-of-00003.gguf"):
        gguf_file.GGUF(paths[0])
    with pytest.raises(ModelError, match="must be named NAME-00001-of-00003.gguf"):
        gguf_file.GGUF(paths[0].rename(tmp_path / "renamed.gguf"))


# ---- Config --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SUPPORTED)
def test_config(family):
    cfg = model.Config.from_gguf(gguf_file.GGUF(golden(family)))
    found = (cfg.n_layers, cfg.n_ff, cfg.n_heads, cfg.n_kv_heads, cfg.head_dim, cfg.qk_norm)
    assert found == SUPPORTED[family][:-1]
    assert (cfg.n_embd, cfg.n_vocab, cfg.n_tokens) == (256, 512, 512)
    assert cfg.n_ctx == {"phi3": 4096, "deep": 2560}.get(family[:4], 512)
    assert cfg.rope_neox == family.startswith(("qwen", "phi3"))
    assert cfg.rms_eps == pytest.approx(1e-6 if family.startswith(("qwen", "deep")) else 1e-5)
    if not cfg.latent:
        assert cfg.attn_scale == 1 / math.sqrt(cfg.head_dim)
        assert cfg.value_dim == cfg.key_dim == cfg.out_dim == cfg.head_dim
    expected = dict(latent=False, q_gated=False, q_rank=0, n_mtp=0)
    expected |= {field.name: field.default for field in dataclasses.fields(cfg)
                 if field.default is not dataclasses.MISSING} | BEYOND_DENSE.get(family, {})
    assert {name: getattr(cfg, name) for name in expected} == expected
    assert len(dataclasses.fields(cfg)) <= 42
    hash(cfg)


def test_layers_of_a_hybrid(tmp_path):
    """Named one by one, by an interval, or by its default of 4; the draft head is none of them."""
    cfg = model.Config.from_gguf(gguf_file.GGUF(golden("qwen35")))
    assert (cfg.n_state_layers, cfg.n_kv_layers, cfg.delta_channels) == (3, 2, 1024)
    metadata, tensors = c.contents(gguf_file.GGUF(golden("qwen35")))
    for key in ("attention.recurrent_layers", "full_attention_interval"):
        del metadata[f"qwen35.{key}"]
        path = write(tmp_path / "a.gguf", metadata, tensors)
        assert model.Config.from_gguf(gguf_file.GGUF(path)) == cfg
    metadata["qwen35.full_attention_interval"] = 2
    cfg = model.Config.from_gguf(gguf_file.GGUF(write(tmp_path / "b.gguf", metadata, tensors)))
    assert cfg.recurrent == (True, False, True, False)


def test_bytes_of_kv_and_state():
    cfg = model.Config.from_gguf(gguf_file.GGUF(golden("deepseek2")))
    assert cfg.kv_bytes_per_token("f16") == 2 * 2 * 320  # layers, rank + rotated values
    cfg = model.Config.from_gguf(gguf_file.GGUF(golden("qwen35")))
    assert cfg.kv_bytes_per_token("f32") == 4 * 2 * 2 * 256  # two layers, K and V
    for pending, ring in ((1, 4), (9, 18)):
        expected = 3 * (4 * 128 * 128 + ring * (1024 + 256 + 512 + 8)) * 4
        assert cfg.state_bytes(pending) == expected
        assert reference.Reference().states(cfg, 5, pending).nbytes == 5 * expected


def test_yarn_of_latent_attention():
    """The magnitude of cosine and sine is 1; the scores grow by its square instead."""
    for family, multiplier in (("deepseek2", 0.1), ("deepseek2-lite", 0.0707)):
        cfg = model.Config.from_gguf(gguf_file.GGUF(golden(family)))
        growth = 1 + multiplier * math.log(40)
        assert cfg.rope_magnitude == 1
        assert cfg.attn_scale == pytest.approx(growth ** 2 / math.sqrt(192), rel=1e-6)
        np.testing.assert_allclose(cfg.rope_sets[0], list(yarn_angles(1e4, 64, 40, 64)), rtol=1e-13)


def test_router_keys(tmp_path):
    cfg = model.Config.from_gguf(gguf_file.GGUF(write(tmp_path / "a.gguf", *c.tiny_latent())))
    assert cfg.router_sigmoid and cfg.router_norm and cfg.router_scale == 2.5
    assert (cfg.router_groups, cfg.router_groups_used, cfg.n_ff_shared) == (2, 1, 48)
    metadata, tensors = c.tiny_mixture()
    for norm in True, False:  # the key is stronger than the family
        metadata["llama.expert_weights_norm"] = norm
        cfg = model.Config.from_gguf(gguf_file.GGUF(write(tmp_path / "b.gguf", metadata, tensors)))
        assert cfg.router_norm == norm and not cfg.router_sigmoid


def plain_angle(base, rope_dim, pair):
    return 1 / base ** (2 * pair / rope_dim)


@pytest.mark.parametrize("family, base", [("mistral", 1e6), ("qwen25", 1e6), ("qwen3", 1e6),
                                          ("phi3", 1e4)])
def test_plain_rope(family, base):
    cfg = model.Config.from_gguf(gguf_file.GGUF(golden(family)))
    expected = [plain_angle(base, cfg.head_dim, j) for j in range(cfg.head_dim // 2)]
    assert len(cfg.rope_sets) == 1 and cfg.rope_long_from == 0 and cfg.rope_magnitude == 1
    np.testing.assert_allclose(cfg.rope_sets[0], expected, rtol=1e-14)


def test_linear_rope(tmp_path):
    """With a type, without one, and as "none", which switches the factor off."""
    for keys, factor in (({"type": "linear", "factor": 4.0}, 4), ({"factor": 4.0}, 4),
                         ({"type": "none", "factor": 4.0}, 1)):
        keys = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
        cfg = model.Config.from_gguf(gguf_file.GGUF(tiny(tmp_path, keys)))
        expected = [plain_angle(1e4, 8, j) / factor for j in range(4)]
        np.testing.assert_allclose(cfg.rope_sets[0], expected, rtol=1e-14)


def test_partial_rope(tmp_path):
    cfg = model.Config.from_gguf(gguf_file.GGUF(tiny(tmp_path, {"llama.rope.dimension_count": 4})))
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
    cfg = model.Config.from_gguf(gguf_file.GGUF(golden("llama3")))
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
    cfg = model.Config.from_gguf(gguf_file.GGUF(golden("qwen3-yarn")))
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
    cfg = model.Config.from_gguf(gguf_file.GGUF(path))
    expected = np.array(list(yarn_angles(1e4, 64, 8, 4096, fast=16, slow=2))) / divisors
    np.testing.assert_allclose(cfg.rope_sets[0], expected, rtol=1e-13)
    assert cfg.rope_magnitude == pytest.approx(0.75 * (0.1 * math.log(8) + 1), rel=1e-14)


def test_longrope():
    file = gguf.GGUFReader(golden("phi3-longrope"))
    table = {tensor.name: tensor.data for tensor in file.tensors}
    plain = np.array([plain_angle(1e4, 64, pair) for pair in range(32)])
    cfg = model.Config.from_gguf(gguf_file.GGUF(golden("phi3-longrope")))
    for found, name in zip(cfg.rope_sets, ("short", "long"), strict=True):
        expected = plain / table[f"rope_factors_{name}.weight"].astype(np.float64)
        np.testing.assert_allclose(found, expected, rtol=1e-14)
    assert cfg.rope_sets[0] != cfg.rope_sets[1] and cfg.rope_long_from == 256
    magnitude = math.sqrt(1 + math.log(4096 / 256) / math.log(256))
    assert cfg.rope_magnitude == pytest.approx(magnitude, rel=1e-7)  # the key is float32


def test_padded_token_table(tmp_path):
    path = tiny(tmp_path, changed_tensors={"token_embd.weight": np.ones((9, 16), np.float32)})
    cfg = model.Config.from_gguf(gguf_file.GGUF(path))
    assert (cfg.n_vocab, cfg.n_tokens) == (9, 6)


# ---- binding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_tensor_is_bound_once(family):
    file, ops, seen = gguf_file.GGUF(golden(family)), Recorder(), []
    cfg, weights = model.load(file, ops, lambda done, total: seen.append((done, total)))
    bound = Counter()
    for tensors, _ in ops.matrices:
        for tensor in tensors:
            bound[tensor.name.split("[")[0]] += tensor.data.nbytes  # halves end in [0] and [1]
    matrices = {name: tensor.data.nbytes for name, tensor in file.tensors.items()
                if (len(tensor.shape) > 1 or "gate_inp" in name) and "ssm_conv1d" not in name}
    assert bound == matrices
    for tensors, bias in ops.matrices:
        assert len({tensor.shape[-1] for tensor in tensors}) == 1
        assert bias is None or bias.shape == (sum(tensor.shape[0] for tensor in tensors),)
    assert len(weights.layers) == cfg.n_layers
    assert (weights.output is weights.embed) == SUPPORTED[family][-1]
    kinds = [type(layer.mixer) for layer in weights.layers]
    mixers = {"deep": [model.Latent] * 2, "qwen3next": [model.DeltaNet, model.Attention],
              "qwen35moe": [model.DeltaNet, model.Attention],
              "qwen35": [model.DeltaNet] * 3 + [model.Attention]}
    assert kinds == mixers.get(family[:4], mixers.get(family, [model.Attention] * cfg.n_layers))
    places = [layer.mixer[0] for layer in weights.layers if type(layer.mixer) is not model.DeltaNet]
    assert places == list(range(cfg.n_kv_layers - cfg.n_mtp))
    for i, layer in enumerate(weights.layers):
        mixed = cfg.n_experts > 0 and i >= cfg.n_dense_layers
        assert type(layer.ffn) is (model.Mixture if mixed else model.Dense)
        if type(layer.mixer) is model.Attention:
            assert (layer.mixer.q_norm is None) != cfg.qk_norm
    done = [pair[0] for pair in seen]
    assert done == sorted(done) and done[-1] == seen[-1][1]


def test_bias_follows_the_rows():
    file = gguf_file.GGUF(golden("qwen25"))
    _, weights = model.load(file, Recorder())
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(golden("qwen25")).tensors}
    for i, layer in enumerate(weights.layers):
        tensors, bias = layer.mixer.qkv
        assert [tensor.name for tensor in tensors] == [f"blk.{i}.attn_{x}.weight" for x in "qkv"]
        expected = np.concatenate([raw[f"blk.{i}.attn_{x}.bias"] for x in "qkv"])
        assert bias.dtype == np.float32 and np.array_equal(bias, expected) and bias.any()


def test_fused_and_split_forms_are_the_same_rows(tmp_path):
    metadata, tensors = c.tiny_model()
    load = lambda name: model.load(gguf_file.GGUF(write(tmp_path / name, metadata, tensors)),
                                   Recorder())[1]
    separate = load("a.gguf")
    stack = lambda names: np.concatenate([tensors.pop(f"blk.0.{name}.weight") for name in names])
    tensors["blk.0.attn_qkv.weight"] = stack(["attn_q", "attn_k", "attn_v"])
    tensors["blk.0.ffn_up.weight"] = stack(["ffn_gate", "ffn_up"])
    tensors["blk.0.attn_qkv.bias"] = np.arange(64, dtype=np.float32)
    fused = load("b.gguf")
    for part, name in (("mixer", "qkv"), ("ffn", "gate_up")):
        rows = [b"".join(tensor.data.tobytes() for tensor in
                         getattr(getattr(weights.layers[0], part), name)[0])
                for weights in (separate, fused)]
        assert rows[0] == rows[1]
    assert fused.layers[0].mixer.qkv[1].tolist() == list(range(64))


def test_fused_experts_are_the_same_rows(tmp_path):
    metadata, tensors = c.tiny_mixture()
    plain = answers_of(write(tmp_path / "a.gguf", metadata, tensors))
    names = ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")
    tensors["blk.0.ffn_gate_up_exps.weight"] = np.concatenate(
        [tensors.pop(name) for name in names], axis=1)
    fused = answers_of(write(tmp_path / "b.gguf", metadata, tensors))
    np.testing.assert_allclose(fused, plain, rtol=1e-5, atol=1e-5)


def answers_of(path, ids=(0, 1, 2, 3, 4, 1, 5, 2, 0)):
    with leone.Engine(path, "cpu", "f32", context=64) as engine:
        return engine.logits(ids)


def test_old_files_of_latent_attention(tmp_path):
    """One attn_kv_b instead of k_b and v_b, true head sizes instead of stored ones: equal bits."""
    file = gguf_file.GGUF(golden("deepseek2-lite"))
    metadata, tensors = c.contents(file)
    metadata |= {"deepseek2.attention.key_length": 192, "deepseek2.attention.value_length": 128,
                 "deepseek2.attention.head_count_kv": 4}
    for key in "key_length_mla", "value_length_mla":
        del metadata[f"deepseek2.attention.{key}"]
    for block in "blk.0.", "blk.1.":
        k_b, v_b = (gguf.quants.dequantize(file.tensors[name].data, file.tensors[name].type)
                    .reshape(file.tensors[name].shape) for name in
                    (f"{block}attn_k_b.weight", f"{block}attn_v_b.weight"))
        del tensors[f"{block}attn_k_b.weight"], tensors[f"{block}attn_v_b.weight"]
        tensors[f"{block}attn_kv_b.weight"] = np.concatenate(
            [k_b.swapaxes(1, 2), v_b], axis=1).reshape(4 * 256, 256)
    ids = np.random.default_rng(8).integers(0, 512, 20)
    old = write(tmp_path / "old.gguf", metadata, tensors)
    np.testing.assert_array_equal(answers_of(old, ids), answers_of(golden("deepseek2-lite"), ids))


def test_rows_of_beta_and_alpha():
    """A file may hold for each k head its rows of beta, then of alpha."""
    file = gguf_file.GGUF(golden("qwen3next"))
    inputs = model.load(file, Recorder())[1].layers[0].mixer.inputs[0]
    rows = file.tensors["blk.0.ssm_ba.weight"].data.reshape(8, -1)
    assert np.array_equal(inputs[-1].data.reshape(8, -1), rows[[0, 1, 4, 5, 2, 3, 6, 7]])


# ---- the draft head ------------------------------------------------------------------------------


def drafts_of(path, ids=(0, 1, 2, 3, 4, 1, 5, 2, 0), chunk=512):
    with leone.Engine(path, "cpu", "f32", context=64, prefill_chunk=chunk) as engine:
        return draft_logits(engine, ids)


def test_announced_draft_head_that_is_not_there(tmp_path):
    """Such a file runs as it would without; only drafts are refused."""
    metadata, tensors = c.tiny_hybrid()
    whole = write(tmp_path / "a.gguf", metadata, tensors)
    without = {name: tensor for name, tensor in tensors.items() if "blk.2." not in name}
    path = write(tmp_path / "b.gguf", metadata, without)
    assert model.Config.from_gguf(gguf_file.GGUF(path)).n_mtp == 0
    np.testing.assert_array_equal(answers_of(path), answers_of(whole))
    with pytest.raises(ModelError, match="no draft head"):
        leone.Engine(path, "cpu", context=64, draft="mtp")
    del tensors["blk.2.nextn.hnorm.weight"]
    with pytest.raises(ModelError, match="'blk.2.nextn.hnorm.weight' .* is missing"):
        model.load(gguf_file.GGUF(write(tmp_path / "c.gguf", metadata, tensors)), Recorder())


def test_draft_head_with_a_table_of_its_own(tmp_path):
    metadata, tensors = c.tiny_hybrid()
    plain = drafts_of(write(tmp_path / "a.gguf", metadata, tensors))
    assert np.isfinite(plain).all() and np.ptp(plain, axis=0).min() > 0
    table = tensors["token_embd.weight"]
    tensors |= {"blk.2.nextn.embed_tokens.weight": table,
                "blk.2.nextn.shared_head_head.weight": table[::-1]}
    own = drafts_of(write(tmp_path / "b.gguf", metadata, tensors))
    np.testing.assert_array_equal(own[:, ::-1], plain)


def test_drafts_do_not_depend_on_chunks(tmp_path):
    path = write(tmp_path / "a.gguf", *c.tiny_hybrid())
    np.testing.assert_array_equal(drafts_of(path, chunk=2), drafts_of(path))


def test_unneeded_tensors_pass(tmp_path):
    tables = {"blk.0.attn_rot_embd.weight": np.ones(4, np.float32)}
    model.load(gguf_file.GGUF(tiny(tmp_path, changed_tensors=tables)), Recorder())


# ---- families die at the loader ------------------------------------------------------------------

ARCHITECTURES = re.compile(r"\b(llama|mistral|mixtral|qwen\w*|phi3|deepseek2|gemma\w*)\b(?!-bpe)")
BELOW_THE_LOADER = ("reference.py", "device.py", "kernels.cu", "kv.py", "leone.py", "sampling.py")


def test_no_architecture_below_the_loader():
    for name in BELOW_THE_LOADER:
        if (ROOT / name).exists():
            assert not ARCHITECTURES.findall((ROOT / name).read_text()), name
    text = (ROOT / "model.py").read_text()
    table = re.search(r"^FAMILIES = \{.*?^\}", text, re.M | re.S)
    assert len(ARCHITECTURES.findall(table[0])) == 9
    assert not ARCHITECTURES.findall(text.replace(table[0], ""))


# ---- doctor --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FILES)
def test_doctor_reports_every_family(family, capsys):
    tools.doctor(golden(family), as_json=True)
    report = json.loads(capsys.readouterr().out)
    tensors = gguf.GGUFReader(golden(family)).tensors
    assert report["supported"] and report["problem"] is None and report["kv"] is not None
    assert report["parameters"] == sum(int(tensor.n_elements) for tensor in tensors)
    assert sum(entry["tensors"] for entry in report["formats"]) == len(tensors)
    assert sum(entry["bytes"] for entry in report["formats"]) == sum(
        int(tensor.n_bytes) for tensor in tensors)
    assert report["tokenizer"]["tokens"] == 512 and report["context"] > 0
    tools.doctor(golden(family))
    lines = capsys.readouterr().out
    assert ("a token)" in lines) == ("n_experts" in BEYOND_DENSE.get(family, {}))
    assert ("for each live session" in lines) == ("recurrent" in BEYOND_DENSE.get(family, {}))
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
    cfg, _ = model.load(gguf_file.GGUF(golden("qwen3")), tools.CheckOnly())
    scratch = cfg.scratch_bytes(2049, leone.PENDING)
    assert scratch > 4 * (2049 * (4 * cfg.n_ff + 6 * cfg.n_embd) + 9 * cfg.n_vocab)
    room = card["free_bytes"] - on_card - tools.CUDA_OVERHEAD - scratch
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
CALLS, KILOBYTES = 8, 400 << 10  # of functions, for each token and merge; in all

# A small process measures: a child of this one would count pages that it shares after the fork.
MEASURE = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(child.pid, 0)
print(usage.ru_maxrss, os.waitstatus_to_exitcode(status))
"""
COUNT_CALLS = """
import cProfile, sys, cli
profile = cProfile.Profile()
status = profile.runcall(cli.main, sys.argv[1:])
print(sum(entry.callcount for entry in profile.getstats()))
sys.exit(status)
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


@pytest.mark.parametrize("family", ["qwen3", "gemma7"])
def test_doctor_on_a_large_vocabulary(family, tmp_path):
    path = write_large(tmp_path / "large.gguf", family)
    command = sys.executable, "-c", COUNT_CALLS, "doctor", "--json", "-m", path
    run = subprocess.run([sys.executable, "-c", MEASURE, *command], cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, check=True)
    report, calls, measured = run.stdout.splitlines()
    report, (kilobytes, status) = json.loads(report), map(int, measured.split())
    assert status == 0 and report["tokenizer"]["tokens"] == 250_000
    assert report["supported"] == (family == "qwen3")
    assert int(calls) < CALLS * 500_000 and kilobytes < KILOBYTES
