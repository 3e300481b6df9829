"""Latent attention (V lies in K), gates, and rows of f32 as results or as GEMM inputs: every kernel
against its NumPy twin in float64, and bit for bit against itself in other company."""
import itertools

import numpy as np
import pytest

import reference
from kv import PAGE
from test_kernels import (LENGTHS, batch_of, close, device, heads_config, random_pages, raw_rows,
                          read_pages, shuffled_table)

pytestmark = pytest.mark.gpu


def latent_config(rank, heads, rope_dim=64, key_dim=96, neox=False, n_layers=2):
    """What the ops of latent attention read of a Config."""
    cfg = heads_config(rank + rope_dim, heads, 1, rope_dim, neox, n_layers)
    cfg.value_dim, cfg.latent, cfg.key_dim = rank, True, key_dim
    return cfg


def values_of(device, x):
    """The values of Activations as float64, and their bits."""
    raw = raw_rows(device, x)[:, :x.cols]
    scale = 1 if x.scale is None else device.download(x.scale).astype(np.float64)[:, None]
    return raw * np.float64(1) * scale, (raw * scale).tobytes()


@pytest.mark.parametrize("cols, width", [(64, 64), (4096, 4096), (700, 576)])
def test_rmsnorm_f32(device, cols, width):
    """As rmsnorm, which also takes the first columns of wider rows, with nothing lost to f16."""
    rng = np.random.default_rng(cols)
    h = rng.standard_normal((9, cols)).astype(np.float32) * 10.0 ** rng.integers(-3, 5, (9, 1))
    h = h.astype(np.float32)
    h[3, :width] = 0
    h[5, 7] = 3e6
    w = rng.uniform(0.1, 30, width).astype(np.float32)
    handle, weight = device.upload(h, "test"), device.upload(w, "test")
    oracle = reference.Reference(np.float64)
    for picked in (None, np.array([8, 5, 5, 0], np.int32)):
        rows = None if picked is None else device.upload(picked, "test")
        want = oracle.rmsnorm_f32(h.astype(np.float64), w.astype(np.float64), 1e-5, picked)
        got = device.download(device.rmsnorm_f32(handle, weight, 1e-5, rows))
        x, _ = values_of(device, device.rmsnorm(handle, weight, 1e-5, rows))
        for row in range(len(want)):
            close(got[row], want[row], 1e-6)
            close(x[row], want[row], 1e-3)
    alone = device.rmsnorm_f32(handle.view((1, cols), offset=8 * cols * 4), weight, 1e-5)
    assert np.array_equal(device.download(alone)[0], got[0])


@pytest.mark.parametrize("cols, heads, pitch, width", [
    (520, None, None, None), (3 * 192 + 20, 3, 192, 128), (5 * 48, 5, 48, 44),
    (2 * 6000, 2, 6000, 5000)])
def test_scale_rows(device, cols, heads, pitch, width):
    rng = np.random.default_rng(cols)
    values = rng.standard_normal((7, cols)).astype(np.float32)
    values *= 10.0 ** rng.integers(-30, 30, (7, 1))
    values[2] = 0
    pieces = [] if heads is None else [heads, pitch, width]
    want = reference.Reference(np.float64).scale_rows(values.astype(np.float64), *pieces)
    handle = device.upload(values, "test")
    x = device.scale_rows(handle, *pieces)
    scale = device.download(x.scale)
    assert (np.frexp(scale)[0] == 0.5).all() and not raw_rows(device, x)[:, x.cols:].any()
    got, together = values_of(device, x)
    for row in range(len(want)):
        close(got[row], want[row], 5e-4)
    last = handle.view((1, cols), offset=6 * cols * 4)
    _, alone = values_of(device, device.scale_rows(last, *pieces))
    assert together.endswith(alone)


@pytest.mark.parametrize("kv_format", ["f32", "f16", "q8"])
@pytest.mark.parametrize("rank, heads, neox", [(256, 4, False), (512, 16, False), (256, 21, True)])
def test_rope_latent(device, kv_format, rank, heads, neox):
    """The keys of a mixed batch land in their pages; nothing else in the storage changes."""
    rng = np.random.default_rng(rank + heads)
    cfg = latent_config(rank, heads, neox=neox)
    table, n_pages = shuffled_table(rng, [130, 70, 1])
    batch = batch_of([(0, 60, 70), (1, 69, 1), (2, 0, 1)], table, 5)
    batch.slots[10:13] = -1
    rows = len(batch.tokens)
    before, kv = random_pages(device, rng, cfg, n_pages, kv_format)
    want = reference.Pages(cfg, n_pages, kv_format, np.dtype(np.float64))
    arrays = [rng.standard_normal(shape).astype(np.float32) * 3 for shape in (
        (rows, heads * rank), (rows, heads * cfg.key_dim + 12), (rows, 40 + cfg.head_dim))]
    arrays[0][4, 1] = 1e6  # more than f16 holds
    norm = rng.uniform(0.5, 2, rank).astype(np.float32)
    oracle, layer = reference.Reference(np.float64), 1
    want_q = oracle.rope_latent(*(x.astype(np.float64) for x in arrays),
                                oracle.rope_angles(cfg, batch), norm, cfg, layer, want, batch)
    uploaded, on_device = [device.upload(x, "test") for x in arrays], device.upload_batch(batch)
    weight = device.upload(norm, "test")

    def run(rows, batch):
        parts = [x.view((rows, x.shape[1])) for x in uploaded]
        return device.download(device.rope_latent(*parts, device.rope_angles(cfg, batch), weight,
                                                  cfg, layer, kv, batch)).astype(np.float64)
    got_q = run(rows, on_device)
    largest = np.inf if kv_format == "f32" else 65504
    close(got_q, np.clip(want_q.reshape(rows, -1), -largest, largest), 1e-3)

    got, real = read_pages(device, kv, before), batch.slots >= 0
    written = np.zeros((n_pages, PAGE), bool)
    places = (table[batch.slots[real], batch.positions[real] // PAGE], batch.positions[real] % PAGE)
    written[places] = True
    for now, then in zip(got.arrays, before.arrays):
        then = then.astype(now.dtype)
        assert np.array_equal(now[0], then[0])
        assert np.array_equal(now[1, :, 0, 0][~written], then[1, :, 0, 0][~written])
    for page, offset in set(zip(*map(np.ndarray.tolist, places))):
        for got_row, want_row in zip(got.load(layer, page), want.load(layer, page)):
            close(got_row[:, offset], want_row[:, offset], 9e-3 if kv_format == "q8" else 1e-3)
    # The first row alone: the bits that it has among others.
    alone = run(1, device.upload_batch(batch_of([(0, 60, 1)], table, 5)))
    assert np.array_equal(alone[0], got_q[0])
    for now, then in zip(read_pages(device, kv, before).arrays, got.arrays):
        assert np.array_equal(now, then)


@pytest.mark.parametrize("kv_format", ["f32", "f16", "q8"])
@pytest.mark.parametrize("rank, heads", [(256, 4), (256, 16), (512, 16), (512, 5), (512, 40)])
def test_latent_attention(device, monkeypatch, kv_format, rank, heads):
    """Against the oracle, in one split and in as many as there are segments: the same bits."""
    rng = np.random.default_rng(rank + heads)
    cfg = latent_config(rank, heads)
    lengths = LENGTHS[2:] if heads < 40 else LENGTHS[-3:]
    table, n_pages = shuffled_table(rng, lengths)
    pages, kv = random_pages(device, rng, cfg, n_pages, kv_format)
    oracle, layer, tokens = reference.Reference(np.float64), 1, device.tile_tokens(cfg)
    decode = batch_of([(slot, n - 1, 1) for slot, n in enumerate(lengths)], table, tokens)
    chunks = batch_of([(slot, n - 7, 7) for slot, n in enumerate(lengths)], table, tokens)
    for batch in (decode.padded_to(16), chunks):
        q = rng.standard_normal((len(batch.tokens), heads, cfg.head_dim)) * 2
        q = q.astype(np.float32 if kv_format == "f32" else np.float16)
        want = oracle.attention(q.astype(np.float64), cfg, layer, pages, batch)
        uploaded, bits = device.upload(q.reshape(len(q), -1), "test"), set()
        for multiprocessors in (1, 10000):
            monkeypatch.setattr(device, "multiprocessors", multiprocessors)
            x = device.attention(uploaded, cfg, layer, kv, device.upload_batch(batch))
            assert (x.rows, x.cols) == want.shape == (len(q) * heads, rank)
            got, raw = values_of(device, x)
            bits.add(raw)
            assert not got[np.repeat(batch.slots < 0, heads)].any()
            for row in np.flatnonzero(np.repeat(batch.slots >= 0, heads)):
                close(got[row], want[row])
        assert len(bits) == 1


@pytest.mark.parametrize("kv_format", ["f32", "f16", "q8"])
@pytest.mark.parametrize("rank, heads", [(256, 4), (512, 16), (256, 24)])
def test_latent_attention_bits(device, monkeypatch, kv_format, rank, heads):
    """A row has the same bits in a chunk, wherever that is cut, alone, and among others."""
    rng = np.random.default_rng(heads)
    cfg = latent_config(rank, heads, n_layers=1)
    lengths = [530, *rng.integers(1, 400, 6)]
    table, n_pages = shuffled_table(rng, lengths)
    _, kv = random_pages(device, rng, cfg, n_pages, kv_format)
    tokens = device.tile_tokens(cfg)
    stored = np.float32 if kv_format == "f32" else np.float16
    q = rng.standard_normal((530, heads * cfg.head_dim)).astype(stored)
    others = rng.standard_normal((6, heads * cfg.head_dim)).astype(stored)

    def rows_of(spans, queries):
        batch = device.upload_batch(batch_of(spans, table, tokens))
        x = device.attention(device.upload(queries, "test"), cfg, 0, kv, batch)
        return values_of(device, x)[0].reshape(len(queries), -1)

    whole_of = {}  # first row of a stretch -> its bits
    # around a page's edge, a segment's edge, and two segments' edge; folded in a block, or merged
    for stretch, multiprocessors in itertools.product(
            (range(58, 70), range(250, 262), range(505, 518)), (1, 10000)):
        monkeypatch.setattr(device, "multiprocessors", multiprocessors)
        first, n = stretch[0], len(stretch)
        queries = q[first:first + n]
        whole = rows_of([(0, first, n)], queries)
        assert np.array_equal(whole, whole_of.setdefault(first, whole))
        for cut in (1, 7):  # the rows after the cut sit at other places of their tiles
            parts = rows_of([(0, first, cut), (0, first + cut, n - cut)], queries)
            assert np.array_equal(parts, whole)
        for i in (0, 6, n - 1):
            assert np.array_equal(rows_of([(0, first + i, 1)], queries[i:i + 1])[0], whole[i])
        at = int(rng.integers(0, 7))
        spans = [(slot, length - 1, 1) for slot, length in enumerate(lengths) if slot]
        spans.insert(at, (0, first + n - 1, 1))
        assert np.array_equal(rows_of(spans, np.insert(others, at, queries[-1], axis=0))[at],
                              whole[-1])


@pytest.mark.parametrize("kv_format", ["f32", "f16"])
@pytest.mark.parametrize("head_dim, group, n_kv_heads", [(64, 3, 2), (256, 6, 2), (80, 5, 1)])
def test_sigmoid_gate(device, kv_format, head_dim, group, n_kv_heads):
    """Gated q through rope_kv and attention; the gate closes and opens fully at its ends."""
    rng = np.random.default_rng(head_dim)
    cfg = heads_config(head_dim, group, n_kv_heads, head_dim // 2)
    cfg.q_gated = True
    table, n_pages = shuffled_table(rng, [70, 3])
    batch = batch_of([(0, 30, 40), (1, 2, 1)], table, device.tile_tokens(cfg))
    pages, kv = random_pages(device, rng, cfg, n_pages, kv_format)
    rows, heads = len(batch.tokens), cfg.n_heads
    qkv = rng.standard_normal((rows, 2 * heads + 2 * n_kv_heads, head_dim)).astype(np.float32)
    gates = qkv[:, 1:2 * heads:2]
    gates *= 5
    gates[3, 0, :4] = -200, 200, -np.inf, np.inf
    qkv = qkv.reshape(rows, -1)
    norm = rng.uniform(0.5, 2, head_dim).astype(np.float32)
    oracle, layer = reference.Reference(np.float64), 1
    wide = qkv.astype(np.float64)
    q = oracle.rope_kv(wide, oracle.rope_angles(cfg, batch), norm, norm, cfg, layer, pages, batch)
    want = oracle.attention(q, cfg, layer, pages, batch)
    plain, want = want, oracle.sigmoid_gate(want, wide, cfg)

    def run(qkv, batch):
        handle, weight = device.upload(qkv, "test"), device.upload(norm, "test")
        q = device.rope_kv(handle, device.rope_angles(cfg, batch), weight, weight, cfg, layer, kv,
                           batch)
        x = device.attention(q, cfg, layer, kv, batch)
        return values_of(device, device.sigmoid_gate(x, handle, cfg))
    got, _ = run(qkv, device.upload_batch(batch))
    for row in range(rows):
        close(got[row], want[row], 2e-3 if row != 3 else 4e-3)
    assert got[3, 0] == got[3, 2] == 0 and np.abs(got[3, [1, 3]] - plain[3, [1, 3]]).max() < 4e-3
    alone, _ = run(qkv[-1:], device.upload_batch(batch_of([(1, 2, 1)], table, 1)))
    assert np.array_equal(alone[0], got[-1])
