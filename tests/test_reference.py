"""The NumPy backend where values leave the range of a format: no trace in later answers."""
from types import SimpleNamespace

import numpy as np
import pytest

import crafted
import leone
import reference
import tools
from errors import DeviceError, RequestError

LARGE = {"nan": np.nan, "inf": np.inf, "1e38": 1e38, "1e5": 1e5}


def model_with(tmp_path, value, head_dim=32):
    """A model whose token "c" has `value` in its embedding, and large K and V."""
    metadata, tensors = crafted.tiny_model()
    rng = np.random.default_rng(3)
    metadata |= {"llama.attention.key_length": head_dim, "llama.attention.value_length": head_dim}
    for name, rows in ("attn_q", 4), ("attn_k", 2), ("attn_v", 2):
        tensors[f"blk.0.{name}.weight"] = rng.standard_normal((rows * head_dim, 16), np.float32)
    tensors["blk.0.attn_output.weight"] = rng.standard_normal((16, 4 * head_dim), np.float32)
    tensors["output.weight"] = rng.standard_normal((6, 16), np.float32)
    tensors["token_embd.weight"][:, 3] = 0
    tensors["token_embd.weight"][2, 3] = value
    for name in "attn_k", "attn_v":  # only "c" has a value there: its V leaves the range of f16
        tensors[f"blk.0.{name}.weight"][:, 3] = 1e9
    path = tmp_path / "large.gguf"
    path.write_bytes(crafted.file_bytes(metadata, tensors))
    return path


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_values_out_of_range_leave_no_trace(value, kv, tmp_path):
    """Freed pages keep what a request stored: it must not reach the next one, nor an earlier row.
    """
    ordinary = [0, 1, 3, 4, 1]
    with leone.Engine(model_with(tmp_path, value), "cpu", kv, context=64) as engine:
        before = engine.logits(ordinary)
        request = engine.submit([2] * 40, leone.Sampling(temperature=0), 20)
        while engine.step():
            pass
        assert request.finish_reason in ("error", "length", "stop")
        if not np.isfinite(value):
            assert isinstance(request.error, DeviceError)
        mixed = engine.logits(ordinary + [2, 2])
        np.testing.assert_array_equal(mixed[:len(ordinary)], before)
        np.testing.assert_array_equal(engine.logits(ordinary), before)
        assert np.isfinite(before).all()


def test_store_holds_what_the_kernel_stores():
    """As store_value in kernels.cu: clamped to the range of f16, and NaN at its lower end."""
    x = np.zeros((1, 1, 32), np.float32)
    x[..., :4] = np.nan, np.inf, -np.inf, 65510
    cfg = SimpleNamespace(n_kv_layers=1, n_kv_heads=1, head_dim=32, value_dim=32, latent=False)
    for kv_format, largest in ("f16", 65504), ("q8", 512 * 127):
        kv = reference.Pages(cfg, 1, kv_format, np.dtype(np.float32))
        batch = SimpleNamespace(slots=np.array([0]), positions=np.array([5]),
                                page_table=np.array([[0]]))
        kv.store_rows(0, batch, x, x)
        for stored in kv.load(0, 0):
            assert stored[0, 5, :5].tolist() == [-largest, largest, -largest, largest, 0]


def test_q8_wants_whole_blocks(tmp_path):
    with pytest.raises(RequestError, match="heads of this model have 24; use --kv f16"):
        leone.Engine(model_with(tmp_path, 1.0, head_dim=24), "cpu", "q8", context=64)


def test_perplexity_of_a_broken_model_is_an_error(tmp_path):
    with leone.Engine(model_with(tmp_path, np.nan), "cpu", context=64) as engine:
        assert tools.perplexity(engine, "abab" * 4, 4) > 0
        with pytest.raises(DeviceError, match="the logits are not finite"):
            tools.perplexity(engine, "cccc", 4)
