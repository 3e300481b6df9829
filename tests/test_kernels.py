"""Every kernel against its NumPy twin in float64, at shapes picked by code path, and bit for bit
against itself in other company.

Inputs are random. Copies, moves, indices and draws must be equal; products and attention may be off
by 2e-3 of the largest value. `make sanitize` runs a selection under compute-sanitizer.
"""
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

import device as device_module
import reference
import sampling
from errors import DeviceError
from kv import PAGE, Batch
from gguf_file import Tensor
from model import Config


@pytest.fixture(scope="module")
def device():
    opened = device_module.Device()
    yield opened
    opened.close()


TOLERANCE = 2e-3  # of the largest value


def close(got, want, tolerance=TOLERANCE):
    """Fails with the worst place, both values and the share of the tolerance that was used."""
    error = np.abs(got - want)
    limit = tolerance * np.abs(want).max()
    worst = np.unravel_index(np.nanargmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    assert error[worst] <= limit, (f"at {worst}: {got[worst]}, reference {want[worst]}, "
                                   f"{error[worst] / limit:.1f} times the tolerance")


def heads_config(head_dim, group, n_kv_heads, rope_dim=None, neox=True, n_layers=2):
    """What the attention ops read of a Config."""
    rope_dim = rope_dim or head_dim
    short = 10000.0 ** (-np.arange(rope_dim // 2) * 2 / rope_dim)
    cfg = SimpleNamespace(
        n_layers=n_layers, n_kv_layers=n_layers, n_state_layers=0, n_heads=group * n_kv_heads,
        n_kv_heads=n_kv_heads, head_dim=head_dim, value_dim=head_dim, latent=False, q_gated=False,
        rms_eps=1e-6, attn_scale=head_dim ** -0.5, rope_dim=rope_dim, rope_neox=neox,
        n_experts=0, router_groups=1, n_vocab=512,
        rope_sets=(tuple(short), tuple(short / 3)), rope_magnitude=1.19)
    cfg.kv_bytes_per_token = lambda kv_format: Config.kv_bytes_per_token(cfg, kv_format)
    return cfg


def test_segments_of_attention_are_split_while_their_parts_fit():
    """A step that only reads prompts has no parts, nor memory for them."""
    card = SimpleNamespace(multiprocessors=132)
    splits = [device_module.Device.attention_splits(card, heads_config(128, 4, 8), 8, 512, nbytes)
              for nbytes in (1 << 14, 0, 1 << 20)]
    assert splits == [66, 1, 1]


def raw_rows(device, x):
    """The f16 values of Activations [rows, padded cols], without their scale."""
    return device_module.unpack_rows(device.download(x.data))[:x.rows]


def device_bytes(pages):
    """A reference.Pages as the bytes of the device's storage: [layers, pages, heads, 2, bytes]."""
    blocks = pages.data.shape[:4]
    data = pages.data.astype(np.float32) if pages.format == "f32" else pages.data
    parts = [np.ascontiguousarray(data).view(np.uint8).reshape(*blocks, -1)]
    if pages.scales is not None:
        parts.append(np.ascontiguousarray(pages.scales).view(np.uint8).reshape(*blocks, -1))
    return np.concatenate(parts, -1)


def read_pages(device, kv, like):
    """The device's storage as a reference.Pages shaped like `like`."""
    raw = device.download(kv.data).reshape(*like.data.shape[:4], -1)
    stored = np.dtype(np.float32) if like.format == "f32" else like.data.dtype
    size = int(np.prod(like.data.shape[4:])) * stored.itemsize
    pages = reference.Pages.__new__(reference.Pages)
    pages.format, pages.dtype, pages.value_dim = like.format, like.dtype, like.value_dim
    pages.data = np.ascontiguousarray(raw[..., :size]).view(stored).reshape(like.data.shape)
    pages.scales = None if like.scales is None else np.ascontiguousarray(
        raw[..., size:]).view(np.float16).reshape(like.scales.shape)
    return pages


def random_pages(device, rng, cfg, n_pages, kv_format):
    """The same random K and V in the reference's and in the device's pages, unused places too."""
    pages = reference.Pages(cfg, n_pages, kv_format, np.dtype(np.float64))
    x = rng.standard_normal(pages.data.shape).astype(np.float32)
    if kv_format == "q8":
        pages.data[:], pages.scales[:] = reference.quantise_q8(x)
    else:
        pages.data[:] = x
    kv = device.pages(cfg, n_pages, kv_format)
    device.write(kv.data, np.ascontiguousarray(device_bytes(pages)))
    return pages, kv


def shuffled_table(rng, lengths):
    """A page table for sequences of `lengths` tokens over shuffled pages, and their number."""
    counts = [-(-int(n) // PAGE) for n in lengths]
    table, order, at = np.zeros((len(lengths), max(counts)), np.int32), rng.permutation(
        sum(counts) + 2), 0
    for slot, count in enumerate(counts):
        table[slot, :count], at = order[at:at + count], at + count
    return table, sum(counts) + 2


def batch_of(spans, table, tile_tokens):
    """A Batch of spans (slot, position, rows)."""
    return Batch.of([(slot, position, [0] * rows, 0, 1) for slot, position, rows in spans], table,
                    tile_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [64, 100, 576, 4096])
def test_rmsnorm(device, cols):
    rng = np.random.default_rng(cols)
    h = rng.standard_normal((33, cols)).astype(np.float32)
    h *= 10.0 ** rng.integers(-3, 5, (33, 1))
    h[3] = 0
    h[5, 7] = 3e6  # a massive activation: f16 without a row scale would overflow
    w = rng.uniform(0.1, 30, cols).astype(np.float32)
    handle, weight = device.upload(h, "test"), device.upload(w, "test")
    rows = np.array([32, 5, 5, 0], np.int32)
    oracle = reference.Reference(np.float64)
    for picked in (None, rows):
        x = device.rmsnorm(handle, weight, 1e-5,
                           None if picked is None else device.upload(picked, "test"))
        raw, scale = raw_rows(device, x), device.download(x.scale)
        assert not raw[:, cols:].any() and (np.frexp(scale)[0] == 0.5).all()
        want = oracle.rmsnorm(h.astype(np.float64), w.astype(np.float64), 1e-5, picked)
        got = raw[:, :cols].astype(np.float64) * scale[:, None]
        for row in range(len(got)):
            close(got[row], want[row], 1e-3)
    together = raw_rows(device, device.rmsnorm(handle, weight, 1e-5))
    for row in (0, 5, 32):
        alone = device.rmsnorm(handle.view((1, cols), offset=row * cols * 4), weight, 1e-5)
        assert np.array_equal(raw_rows(device, alone)[0], together[row])


@pytest.mark.gpu
def test_rope_angles(device):
    cfg = heads_config(96, 1, 1, rope_dim=72)
    n = 301
    rng = np.random.default_rng(0)
    batch = batch_of([(0, 0, n)], np.zeros((1, 5), np.int32), 16)
    batch.positions = rng.integers(0, 1 << 20, n).astype(np.int32)
    batch.rope_sets = rng.integers(0, 2, n).astype(np.int32)
    want = reference.Reference(np.float64).rope_angles(cfg, batch)
    got = device.download(device.rope_angles(cfg, device.upload_batch(batch)))
    assert np.abs(got - want).max() < 2e-7


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["f32", "f16", "q8"])
@pytest.mark.parametrize("head_dim, rope_dim, neox, norms", [
    (64, 64, False, False), (96, 72, True, False), (128, 128, True, True), (192, 96, False, True),
    (256, 64, True, True)])
def test_rope_kv(device, kv_format, head_dim, rope_dim, neox, norms):
    """K and V of a mixed batch land in their pages; nothing else in the storage changes."""
    rng = np.random.default_rng(head_dim)
    cfg = heads_config(head_dim, 3, 2, rope_dim, neox)
    table, n_pages = shuffled_table(rng, [130, 70, 1])
    batch = batch_of([(0, 60, 70), (1, 69, 1), (2, 0, 1)], table, 5)
    batch.slots[10:13] = -1
    before, kv = random_pages(device, rng, cfg, n_pages, kv_format)
    want = reference.Pages(cfg, n_pages, kv_format, np.dtype(np.float64))
    heads = cfg.n_heads + 2 * cfg.n_kv_heads
    qkv = rng.standard_normal((len(batch.tokens), heads * head_dim)).astype(np.float32)
    q_norm, k_norm = (rng.uniform(0.5, 2, head_dim).astype(np.float32) for _ in range(2))
    oracle, layer = reference.Reference(np.float64), 1
    vectors = [q_norm, k_norm] if norms else [None, None]
    upload = lambda x: None if x is None else device.upload(x, "test")
    want_q = oracle.rope_kv(qkv.astype(np.float64), oracle.rope_angles(cfg, batch), *vectors, cfg,
                            layer, want, batch)
    on_device = device.upload_batch(batch)
    got_q = device.download(device.rope_kv(upload(qkv), device.rope_angles(cfg, on_device),
                                           *map(upload, vectors), cfg, layer, kv, on_device))
    close(got_q.astype(np.float64), want_q.reshape(len(qkv), -1))

    got = read_pages(device, kv, before)
    real = batch.slots >= 0
    written = np.zeros(before.data.shape[1:2] + (PAGE,), bool)
    places = (table[batch.slots[real], batch.positions[real] // PAGE], batch.positions[real] % PAGE)
    written[places] = True
    same = ~written[:, None, None, :]
    same = np.broadcast_to(same, before.data.shape[1:5])
    expected = before.data.astype(got.data.dtype)
    assert np.array_equal(got.data[1][same], expected[1][same])
    assert np.array_equal(got.data[0], expected[0])
    if got.scales is not None:
        assert np.array_equal(got.scales[1][same], before.scales[1][same])
        assert np.array_equal(got.scales[0], before.scales[0])
    for page, offset in set(zip(*map(np.ndarray.tolist, places))):
        for kind in range(2):  # a rounding of q8 may fall to the other side: one step of 127
            got_row, want_row = (p.load(layer, page)[kind][:, offset] for p in (got, want))
            close(got_row, want_row, 9e-3 if kv_format == "q8" else 1e-3)
    # V is neither normed nor rotated: its stored bits are those of the reference.
    want_rows, got_rows = (p.data[layer, places[0], :, 1, places[1]] for p in (want, got))
    assert np.array_equal(got_rows, want_rows.astype(got_rows.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["f16", "q8"])
def test_rope_kv_stays_finite(device, kv_format):
    """What f16 cannot hold is cut, so that a page never holds Inf or NaN for others to read."""
    cfg = heads_config(64, 1, 1)
    table = np.zeros((1, 1), np.int32)
    batch = device.upload_batch(batch_of([(0, 0, 4)], table, 16))
    qkv = np.ones((4, 192), np.float32)
    qkv[0, 130], qkv[1, 140], qkv[2, 150], qkv[3, 128:] = 1e9, -np.inf, np.nan, 1e-12
    pages, kv = random_pages(device, np.random.default_rng(0), cfg, 1, kv_format)
    device.rope_kv(device.upload(qkv, "test"), device.rope_angles(cfg, batch), None, None, cfg, 0,
                   kv, batch)
    values = read_pages(device, kv, pages).load(0, 0)[1][0, :4]
    assert np.isfinite(values).all() and np.isfinite(values.astype(np.float16)).all()
    assert values[0, 2] > 65000 and values[1, 12] < -65000 and np.abs(values[3]).max() < 1e-6


# Sequences that end inside and at the edges of pages (64) and segments (256).
LENGTHS = 1, 2, 63, 64, 65, 255, 256, 257, 300, 511, 512, 513, 1000


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["f32", "f16", "q8"])
@pytest.mark.parametrize("head_dim, group, n_kv_heads", [
    (64, 3, 3), (64, 1, 2), (64, 7, 2), (80, 4, 2), (96, 1, 3), (128, 4, 2), (128, 8, 1),
    (128, 16, 1), (192, 3, 2), (256, 2, 1), (256, 6, 2)])
def test_attention(device, monkeypatch, kv_format, head_dim, group, n_kv_heads):
    if (kv_format, head_dim) == ("q8", 80):
        pytest.skip("80 values are not whole blocks of q8")
    rng = np.random.default_rng(head_dim + group)
    cfg = heads_config(head_dim, group, n_kv_heads)
    table, n_pages = shuffled_table(rng, LENGTHS)
    pages, kv = random_pages(device, rng, cfg, n_pages, kv_format)
    oracle, layer = reference.Reference(np.float64), 1
    tokens = device.tile_tokens(cfg)
    stored = np.float32 if kv_format == "f32" else np.float16
    decode = batch_of([(slot, n - 1, 1) for slot, n in enumerate(LENGTHS)], table, tokens)
    # up to 20 last rows of each sequence; a tile may hold rows with and without a further segment
    chunks = batch_of([(slot, max(0, n - 20), min(n, 20)) for slot, n in enumerate(LENGTHS)], table,
                      tokens)
    for batch in (decode, decode.padded_to(16), chunks):
        q = rng.standard_normal((len(batch.tokens), cfg.n_heads, head_dim)) * 2
        q = q.astype(stored)
        want = oracle.attention(q.astype(np.float64), cfg, layer, pages, batch)
        uploaded = device.upload(q.reshape(len(q), -1), "test")
        results = []
        for multiprocessors in (1, 10000):  # one split; as many as there are segments
            monkeypatch.setattr(device, "multiprocessors", multiprocessors)
            x = device.attention(uploaded, cfg, layer, kv, device.upload_batch(batch))
            results.append(raw_rows(device, x))
            got = device.download(x).astype(np.float64)
            for row in range(len(q)):  # long rows average out: each has its own maximum
                if want[row].any():
                    close(got[row], want[row])
                else:
                    assert not got[row].any()
        assert np.array_equal(*results), "merged segments differ from those folded in one block"


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["f32", "f16", "q8"])
@pytest.mark.parametrize("head_dim, group", [
    (64, 3), (80, 5), (96, 1), (128, 4), (128, 7), (192, 2), (256, 6)])
def test_attention_bits(device, monkeypatch, kv_format, head_dim, group):
    """A row has the same bits in a chunk, wherever that is cut, alone, and among 32 others."""
    if (kv_format, head_dim) == ("q8", 80):
        pytest.skip("80 values are not whole blocks of q8")
    rng = np.random.default_rng(group)
    cfg = heads_config(head_dim, group, 2, n_layers=1)
    lengths = [530] + list(rng.integers(1, 400, 32))
    table, n_pages = shuffled_table(rng, lengths)
    _, kv = random_pages(device, rng, cfg, n_pages, kv_format)
    tokens = device.tile_tokens(cfg)
    stored = np.float32 if kv_format == "f32" else np.float16
    # three stretches: around a page's edge, a segment's edge, and a prompt over two segments' edge
    stretches = [range(50, 80), range(245, 270), range(385, 530)]
    q = rng.standard_normal((530, cfg.n_heads * head_dim)).astype(stored)
    others = rng.standard_normal((32, cfg.n_heads * head_dim)).astype(stored)

    def rows_of(spans, queries):
        batch = batch_of(spans, table, tokens)
        x = device.attention(device.upload(queries, "test"), cfg, 0, kv, device.upload_batch(batch))
        raw = raw_rows(device, x)
        return raw if x.scale is None else raw * device.download(x.scale)[:, None]

    whole_of = {}  # first row of a stretch -> its bits
    # with few multiprocessors one block folds all segments, with many each has its own
    for stretch, multiprocessors in itertools.product(stretches, (1, 20, 10000)):
        monkeypatch.setattr(device, "multiprocessors", multiprocessors)
        first, n = stretch[0], len(stretch)
        whole = rows_of([(0, first, n)], q[first:first + n])
        assert np.array_equal(whole, whole_of.setdefault(first, whole))
        for cut in (1, 7, n - 1):  # the rows after the cut sit at other places of their tiles
            parts = rows_of([(0, first, cut), (0, first + cut, n - cut)], q[first:first + n])
            assert np.array_equal(parts, whole)
        for i in range(0, n, n // 5):
            assert np.array_equal(rows_of([(0, first + i, 1)], q[first + i:first + i + 1])[0],
                                  whole[i])
        at = int(rng.integers(0, 33))
        spans = [(slot, n - 1, 1) for slot, n in enumerate(lengths) if slot]
        spans.insert(at, (0, first + n - 1, 1))
        queries = np.insert(others, at, q[first + n - 1], axis=0)
        assert np.array_equal(rows_of(spans, queries)[at], whole[-1])


@pytest.mark.gpu
def test_attention_refuses(device):
    for cfg, kv_format, message in (
            (heads_config(72, 1, 1), "f16", "no kernel for heads of 72 values: use --backend cpu"),
            (heads_config(80, 1, 1), "q8", "no q8 kernel for heads of 80 values: use --kv f16"),
            (heads_config(64, 17, 1), "f16", "17 query heads share 1 KV heads")):
        with pytest.raises(DeviceError, match=message):
            device.pages(cfg, 1, kv_format)


@pytest.mark.gpu
def test_matrix_refuses(device):
    with pytest.raises(DeviceError, match="eight columns"):
        device.matrix([random_tensor(np.random.default_rng(0), "F16", 16, 90)])


@pytest.mark.gpu
def test_close_gives_everything_back():
    opened = device_module.Device()
    weight = opened.upload(np.ones(64, np.float32), "weights")
    for rows in (1, 1, 1, 40, 1, 1):  # captured, dropped as scratch moves, captured again
        h = opened.upload(np.ones((rows, 64), np.float32), "test")
        x = opened.run(rows, lambda: opened.rmsnorm(h, weight, 0.0))
        assert (opened.fetch([opened.buffer("rmsnorm_scale", (rows,), np.float32)])()[0] > 0).all()
        assert x.rows == rows
    assert [bool(ready) for ready in opened.graphs.values()] == [True]
    for _ in range(2):
        opened.close()
        assert not opened.graphs and not opened.addresses and not any(opened.allocated.values())


def test_a_failed_start_gives_everything_back(monkeypatch, tmp_path):
    """Whatever driver call of the start fails, those before it are undone."""
    undo = {"cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease", "cuEventCreate":
            "cuEventDestroy", "cuStreamCreate": "cuStreamDestroy", "cuLibraryLoadData":
            "cuLibraryUnload", "cuMemAllocHost": "cuMemFreeHost"}
    (tmp_path / "kernels.cubin").write_bytes(b"kernels")
    monkeypatch.setattr(device_module, "CUBIN", tmp_path / "kernels.cubin")
    monkeypatch.setattr(device_module, "driver", SimpleNamespace())
    for name, value in dict(cubin_state="ok", architecture=90, card_name="card",
                            attribute=1).items():
        monkeypatch.setattr(device_module, name, lambda *_, value=value: value)
    for last in range(3, 13):
        done = []

        def call(name, *args):
            if len(done) == last and name not in undo.values():
                raise DeviceError(name)
            done.append(name)
            return 1
        monkeypatch.setattr(device_module, "call", call)
        with pytest.raises(DeviceError):
            device_module.Device()
        for made, undone in undo.items():
            assert done.count(made) == done.count(undone), (last, made)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["f32", "f16", "q8"])
def test_copy_page(device, kv_format):
    cfg = heads_config(96, 1, 3, n_layers=3)
    pages, kv = random_pages(device, np.random.default_rng(0), cfg, 5, kv_format)
    device.copy_page(kv, 3, 1)
    reference.Reference(np.float64).copy_page(pages, 3, 1)
    got = read_pages(device, kv, pages)
    assert np.array_equal(got.data, pages.data.astype(got.data.dtype))
    assert pages.scales is None or np.array_equal(got.scales, pages.scales)


# bytes of a block, where its f16 fields lie, values of a block, and the integer that means zero
BLOCKS = {"Q4_K": (144, (0, 2), 256, 8), "Q5_K": (176, (0, 2), 256, 16),
          "Q6_K": (210, (208,), 256, 32), "Q8_0": (34, (0,), 32, 128), "Q4_0": (18, (0,), 32, 8),
          "Q4_1": (20, (0, 2), 32, 0)}
FORMATS = [*BLOCKS, "F16", "BF16", "F32", "Q5_0"]


def random_tensor(rng, kind, rows, cols, name="w"):
    """A matrix as it would lie in a file: any integers, scales over 4 octaves, rows over 12."""
    octaves = rng.integers(-16, -4, (rows, 1))
    if kind in BLOCKS:
        size, fields, values, _ = BLOCKS[kind]
        data = rng.integers(0, 256, (rows, cols // values, size), dtype=np.uint8)
        for at in fields:
            d = (2.0 ** (rng.uniform(-4, 0, data.shape[:2]) + octaves)).astype(np.float16)
            d *= 1 if kind in ("Q4_K", "Q5_K") else rng.choice(np.float16([-1, 1]), d.shape)
            data[..., at:at + 2] = d[..., None].view(np.uint8)
    else:
        octaves = octaves + 40 if kind == "BF16" else octaves  # far outside of what f16 holds
        data = quants.quantize((rng.standard_normal((rows, cols)) * 2.0 ** octaves).astype(
            np.float32), GGMLQuantizationType[kind])
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return Tensor(name, GGMLQuantizationType[kind], (rows, cols), raw)


def weights_of(tensor):
    raw = tensor.data.reshape(tensor.shape[0], -1)
    return quants.dequantize(raw, tensor.type).astype(np.float64)


def packed_weights(tensor):
    """float64 [rows, cols], what the kernels multiply with: f16 times a power of two for each row.

    The arithmetic of repack, decode_scales and dequantise, step by step.
    """
    f16 = lambda x: np.asarray(x).astype(np.float16).astype(np.float64)
    name, (rows, cols) = tensor.type.name, tensor.shape

    def factor(largest):  # brings the largest of a row into [2^14, 2^15)
        return 2.0 ** (15 - np.frexp(largest.max(axis=1, keepdims=True))[1])
    if name not in BLOCKS:
        w = weights_of(tensor)
        return f16(w * factor(np.abs(w))) / factor(np.abs(w))
    size, fields, values, zero = BLOCKS[name]
    raw = tensor.data.reshape(rows, cols // values, size)

    def with_fields(*numbers):  # the weights, were the block's f16 fields these
        changed = raw.copy()
        for at, number in zip(fields, numbers):
            changed[..., at:at + 2] = np.array([number], np.float16).view(np.uint8)
        return quants.dequantize(changed.reshape(rows, -1), tensor.type).astype(np.float64)
    d, *low = (np.repeat(raw[..., at:at + 2].copy().view(np.float16)[..., 0].astype(np.float64),
                         values, axis=1) for at in fields)
    product = with_fields(1, 0)  # scale of the sub-block times (integer - zero)
    if name in ("Q4_K", "Q5_K"):
        six = raw[..., 4:16].astype(int)
        six = np.concatenate([six[..., :4] & 63, six[..., 8:] & 15 | six[..., :4] >> 6 << 4], -1)
        six = np.repeat(six.reshape(rows, -1), 32, axis=1)
        scale = factor(63 * np.maximum(np.abs(d) * zero / 8, np.abs(low[0]) / 8))
        s = f16(d * scale * six)
        offset = f16(with_fields(0, 1) * low[0] * scale / 8 + s * zero / 8)
        offset = f16(f16(d * scale * six - s) * (zero - 0.5) / 8 + f16(offset - s / 16))
        integers, offset = product / np.maximum(six, 1) - zero + 0.5, f16(offset * 2.0 ** -17)
        return f16(integers * 2.0 ** -20 * s + offset) * (2.0 ** 20 / scale)
    if name == "Q4_1":
        scale = factor(np.maximum(np.abs(d), np.abs(low[0]) / 32))
        integers, s, offset = product, f16(d * scale), f16(low[0] * scale * 2.0 ** -24)
    else:
        eight = np.ones_like(product)
        if name == "Q6_K":
            eight = np.repeat(raw[..., 192:208].copy().view(np.int8).reshape(rows, -1), 16, axis=1)
        scale = factor((128 if name == "Q6_K" else 1) * np.abs(d))
        integers, s = product / np.where(eight == 0, 1, eight) + zero, f16(d * scale * eight)
        offset = f16(s * -zero * 2.0 ** -24)
    if name != "Q8_0":  # every other pair of integers lies four bits higher, with a scale to match
        s = np.where(np.arange(cols) // 2 % 2, f16(s * 2.0 ** -4) * 16, s)
    return f16(integers * s * 2.0 ** -24 + offset) * (2.0 ** 24 / scale)


def pack_rows(x):
    """The inverse of device.unpack_rows; NaN in the rows that fill up the last eight."""
    tiles = np.full((-(-len(x) // 8) * 8, x.shape[1]), np.nan, np.float16)
    tiles[:len(x)] = x
    return tiles.reshape(len(tiles) // 8, 8, -1, 4, 2, 2, 8).transpose(
        0, 2, 4, 5, 1, 3, 6).reshape(tiles.shape)


def random_activations(device, rng, rows, cols):
    """Activations with scales that differ from row to row, and their values in float64."""
    padded = -(-cols // 128) * 128
    x = np.zeros((rows, padded), np.float16)
    x[:, :cols] = rng.standard_normal((rows, cols)) * 100
    scale = 2.0 ** rng.integers(-12, 6, rows).astype(np.float32)
    handle = device_module.Activations(device.upload(pack_rows(x), "test"),
                                       device.upload(scale, "test"), rows, cols)
    return handle, x[:, :cols].astype(np.float64) * scale[:, None]


def some_rows(device, x, rows):
    """The first rows of Activations."""
    return device_module.Activations(x.data.view((-(-rows // 8) * 8, x.data.shape[1])),
                                     x.scale.view((rows,)), rows, x.cols)


def check_linear(device, rng, kinds, heights, cols, counts, bias=True):
    tensors = [random_tensor(rng, kind, rows, cols) for kind, rows in zip(kinds, heights)]
    offset = rng.standard_normal(sum(heights)).astype(np.float32) if bias else None
    w = device.matrix(tensors, offset)
    x, values = random_activations(device, rng, max(counts), cols)
    weights = np.concatenate([weights_of(t) for t in tensors])
    want = values @ weights.T
    want = want + offset if bias else want
    # The size of a usual result; 2e-3 of the largest of many is 8e-3 of a usual one.
    usual = np.outer(np.linalg.norm(values, axis=1), np.linalg.norm(weights, axis=1)) / cols ** 0.5
    usual = usual + np.abs(offset) if bias else usual
    # With what the packed weights say, only the sums are rounded.
    packed = np.concatenate([packed_weights(t) for t in tensors])
    exact = values @ packed.T + (offset if bias else 0)
    sums = np.abs(values) @ np.abs(packed).T + (np.abs(offset) if bias else 0)
    before = rng.standard_normal(want.shape).astype(np.float32)
    together = None
    for rows in sorted(counts, reverse=True):
        got = device.download(device.linear(some_rows(device, x, rows), w))
        assert (np.abs(got - want[:rows]) <= 8e-3 * usual[:rows]).all()
        assert (np.abs(got - exact[:rows]) <= 2.0 ** -18 * sums[:rows]).all()
        assert np.linalg.norm(got - want[:rows]) < 1e-3 * np.linalg.norm(want[:rows]), rows
        together = got if together is None else together
        assert np.array_equal(got.view(np.uint32), together[:rows].view(np.uint32)), rows
        h = device.upload(before[:rows], "test")
        device.linear_add(some_rows(device, x, rows), w, h)
        assert np.array_equal(device.download(h), before[:rows] + got)


@pytest.mark.gpu
def test_linear_keeps_a_result_by_role(device):
    """A result stays until weights of the same role, in any layer, give the next one."""
    rng = np.random.default_rng(0)
    x, _ = random_activations(device, rng, 3, 128)
    down, up, of_next_layer = (
        device.matrix([random_tensor(rng, "F16", 48, 128, name)]) for name in (
            "blk.0.attn_q_a.weight", "blk.0.attn_q_b.weight", "blk.1.attn_q_a.weight"))
    y = device.linear(x, down)
    before = device.download(y)
    device.linear(x, up)
    assert np.array_equal(device.download(y), before)
    assert device.linear(x, of_next_layer) == y


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_linear_small(device, kind):
    """One partial tile of every format, few and many rows."""
    rng = np.random.default_rng(1)
    check_linear(device, rng, [kind], [200], 512, [1, 9, 33, 70])


ROW_COUNTS = 1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 100, 128, 200, 512


@pytest.mark.gpu
@pytest.mark.parametrize("kinds, heights, cols", [
    (["Q4_K"], [16], 256), (["Q4_K"], [4096], 4096), (["Q4_K"], [1032], 4352),
    (["Q4_K", "Q4_K", "Q6_K"], [512, 128, 128], 2048), (["Q6_K"], [4096], 1024),
    (["Q4_1"], [1536], 576), (["Q4_1"], [576], 1536), (["Q8_0"], [2056], 576),
    (["Q4_0", "Q8_0", "F16", "Q4_1", "Q8_0"], [16, 32, 48, 64, 80], 96), (["F16"], [1000], 608),
    (["Q5_K"], [640], 1280), (["BF16"], [4100], 320)])
def test_linear(device, kinds, heights, cols):
    """Right to 1e-3, and the same bits for every number of rows, so whichever kernel runs."""
    check_linear(device, np.random.default_rng(cols), kinds, heights, cols, ROW_COUNTS,
                 bias=cols != 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_linear_blocks(device, kind, monkeypatch):
    """The same bits in blocks of every shape: more parts of K than groups of warps, the last one
    not whole; rows and columns that fill no block."""
    rng = np.random.default_rng(8)
    cols = 2560 if kind in ("Q4_K", "Q5_K", "Q6_K") else 2432
    w = device.matrix([random_tensor(rng, kind, rows, cols) for rows in (280, 24)])
    x, _ = random_activations(device, rng, 70, cols)
    few = device.download(device.linear(some_rows(device, x, 8), w))
    with monkeypatch.context() as small:
        small.setattr(device, "multiprocessors", 3)  # a block takes several tiles
        for rows in (8, 16):
            got = device.download(device.linear(some_rows(device, x, rows), w))
            assert np.array_equal(got[:8].view(np.uint32), few.view(np.uint32)), rows
    want = None
    for name in device_module.MORE_KERNELS:
        monkeypatch.setattr(device, "linear_kernel", lambda rows, blocks: name)
        got = device.download(device.linear(x, w))
        want = got if want is None else want
        assert np.array_equal(got[:8].view(np.uint32), few.view(np.uint32)), name
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), name


@pytest.mark.gpu
def test_linear_of_no_rows(device, monkeypatch):
    """A chunk of a prompt that wants no logits: a kernel would read the row before the first."""
    rng = np.random.default_rng(4)
    w = device.matrix([random_tensor(rng, "Q4_K", 272, 768)])
    x = some_rows(device, random_activations(device, rng, 8, 768)[0], 0)
    monkeypatch.setattr(device, "launch", None)
    assert device.download(device.linear(x, w)).shape == (0, 272)


@pytest.mark.gpu
def test_linear_add(device):
    """Other rows, garbage among them, do not touch a row."""
    rng = np.random.default_rng(2)
    w = device.matrix([random_tensor(rng, "Q4_K", 272, 768)])
    x, _ = random_activations(device, rng, 65, 768)
    expected = {}
    for rows in ROW_COUNTS[:10]:
        data = raw_rows(device, x)[:rows]
        data[1:] = rng.choice(np.array([np.inf, -np.inf, np.nan, 6e4, 0]), (rows - 1, 768))
        mixed = device_module.Activations(device.upload(pack_rows(data), "test"),
                                          x.scale.view((rows,)), rows, 768)
        h = device.upload(np.zeros((rows, 272), np.float32), "test")
        device.linear_add(mixed, w, h)
        expected[device.download(h)[0].tobytes()] = rows
    assert len(expected) == 1


def silu_of(y):
    """silu(gate) * up of f32 [rows, 2F] in float64."""
    gate, up = np.split(y.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        return reference.silu(gate) * up


@pytest.mark.gpu
@pytest.mark.parametrize("kinds, width, cols", [
    (["Q4_K", "Q4_K"], 520, 768), (["Q6_K"], 96, 512), (["Q5_K", "Q5_K"], 136, 256),
    (["Q8_0", "Q4_1"], 24, 160), (["BF16"], 40, 96), (["Q4_1", "Q4_1"], 104, 96),
    (["Q5_0", "Q5_0"], 8, 128), (["Q4_0"], 200, 160), (["F16", "F32"], 64, 104)])
def test_linear_silu(device, kinds, width, cols):
    """f16 of what `linear` says, in one tensor or two, times a power of two that the next matrix
    undoes and that leaves room for the largest result that there can be."""
    rng = np.random.default_rng(width)
    tensors = [random_tensor(rng, kind, 2 * width // len(kinds), cols) for kind in kinds]
    last = random_tensor(rng, "F16", 64, width)
    norm = rng.uniform(-4, 4, cols).astype(np.float32)
    norm[5] = 100
    gain = device.upload(norm, "test")
    gate_up, down = device.gated(tensors, [last], gain)
    unscaled = device.matrix([last])
    factor = (device.download(unscaled.weight_scale) / device.download(down.weight_scale))[0]
    assert (factor == factor[0]).all()

    gate, up = np.split(np.concatenate([weights_of(t) for t in tensors]) * norm, 2)
    lengths = np.linalg.norm(gate, axis=1), np.linalg.norm(up, axis=1)
    longest = np.argmax(lengths[0] * lengths[1])
    gate, up = (rows[longest] / length[longest] for rows, length in zip((gate, up), lengths))
    h = rng.standard_normal((70, cols)).astype(np.float32)
    h[3], h[4], h[5] = gate + up, gate - up, 0  # one of two is half the bound, or more
    h[6, 5] = 1e6
    x = device.rmsnorm(device.upload(h, "test"), gain, 1e-9)
    want = silu_of(device.download(device.linear(x, device.matrix(tensors)))) * factor[0]
    largest = np.abs(want[3:5]).max()
    assert 2 ** 12 < largest < 2 ** 15
    oracle, values = reference.Reference(np.float64), device.download(x).astype(np.float64)
    close(want / factor[0], oracle.linear_silu(values, oracle.matrix(tensors)))
    for rows in 70, 33, 9, 8, 1:
        y = device.linear_silu(some_rows(device, x, rows), gate_up)
        raw = raw_rows(device, y)
        assert y.scale is None and not raw[:, width:].any()
        error = np.abs(raw[:, :width] - want[:rows])
        assert (error <= 2.0 ** -10.9 * np.abs(want[:rows]) + 2.0 ** -24.9).all()
        together = raw if rows == 70 else together
        assert np.array_equal(raw, together[:rows])
        z = device.download(device.linear(y, down))
        close(z, raw[:, :width] / factor[0].astype(np.float64) @ weights_of(last).T)


@pytest.mark.gpu
def test_gated_networks_that_do_not_fit(device):
    rng = np.random.default_rng(0)
    gate_up, down = (random_tensor(rng, "F16", *shape) for shape in ((24, 64), (64, 12)))
    with pytest.raises(DeviceError, match="eight columns at a time"):
        device.gated([gate_up], [down], None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_embed_small(device, kind):
    rng = np.random.default_rng(3)
    table = random_tensor(rng, kind, 300, 768)
    w = device.matrix([table])
    tokens = np.array([0, 299, 5, -2, 8, 15, 16, -1, 17], np.int32)
    slots = np.array([0, 0, 0, -1, 0, 0, 0, 2, 0], np.int32)
    step = SimpleNamespace(tokens=device.upload(tokens, "test"), slots=device.upload(slots, "test"),
                           page_table=device.upload(np.zeros((3, 1), np.int32), "test"))
    device.write(device.last_tokens(step), np.array([1, 2, 77], np.int32))
    got = device.download(device.embed(w, step))
    packed, true = packed_weights(table), weights_of(table)
    want = packed[[0, 299, 5, 0, 8, 15, 16, 77, 17]]
    want[3] = 0
    assert np.array_equal(got, want)
    # Scale, offset and weight are rounded to f16. The largest block of a row sets its range.
    error, largest = (x.reshape(300, -1, 32) for x in (np.abs(packed - true), np.abs(true)))
    largest = largest.max(axis=2, keepdims=True)
    assert (error <= 1.2e-3 * largest + 2.0 ** -17 * largest.max(axis=1, keepdims=True)).all()


test_embed = test_embed_small


def sample_logits(rng, kind, n_vocab):
    """float32 [n_vocab] that drives the sampler into one of its corners."""
    normal = rng.standard_normal(n_vocab).astype(np.float32)
    if kind == "ties":                      # a dozen values only: rankings are decided by the ids
        return np.round(normal * 2)
    if kind == "equal":
        return np.full(n_vocab, 0.25, np.float32)
    if kind == "flat":
        return normal * np.float32(0.01)
    if kind == "zeros":                     # 0.0 and -0.0 are one value
        return np.where(normal > 0, np.float32(-0.0), np.where(normal > -1, np.float32(0), normal))
    if kind == "masked":
        return np.where(rng.random(n_vocab) < 0.99, np.float32(-np.inf), normal * 5)
    if kind == "huge":
        return normal * np.float32(1e37)
    if kind == "edge":                      # more tokens than a list holds in the last of all bins
        return np.where(rng.random(n_vocab) < 0.3, np.float32(-28.02), np.minimum(normal, 0))
    if kind == "half":
        return (normal * 4).astype(np.float16).astype(np.float32)
    return normal * np.float32(3) + (normal > 3) * np.float32(6)


def sample_cases(rng, n_vocab):
    """(kind of logits, Sampling) for every combination of filters, penalties among them."""
    kinds = itertools.cycle(["model", "ties", "model", "flat", "half", "zeros", "masked", "equal",
                             "huge"])
    grid = itertools.product((0, 0.01, 0.7, 1.0, 3.0, 100.0), (0, 1, 5, 40, n_vocab + 7),
                             (0.0, 0.1, 0.5, 0.95, 0.9999, 1.0), (0.0, 0.05, 1.0))
    for number, (temperature, top_k, top_p, min_p) in enumerate(grid):
        if n_vocab > 1000 and number % 3 != n_vocab // 64 % 3:
            continue                        # large rows take every third combination
        kind, extra = next(kinds), {}
        if number % 4 == 1:
            bias = {int(i): float(b) for i, b in zip(rng.integers(0, n_vocab, 5),
                                                     rng.uniform(-20, 20, 5))}
            extra = dict(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.3,
                         logit_bias=bias)
            kind = "cancel" if temperature == 0 else kind
        if temperature == 1 and top_k > n_vocab and top_p == 1:
            kind, extra = "edge", {}
        yield kind, sampling.Sampling(temperature, top_k, top_p, min_p, **extra,
                                      seed=int(rng.integers(0, 2**63)))


@pytest.mark.gpu
@pytest.mark.parametrize("n_vocab", [509, 512, 49152, 151936])
def test_sample(device, n_vocab):
    """The kernel draws the oracle's token from the same bits, whatever the filters and the ties."""
    rng = np.random.default_rng(n_vocab)
    cases = list(sample_cases(rng, n_vocab))
    for start in range(0, len(cases), 30):
        batch = cases[start:start + 30] + 3 * [("broken", sampling.Sampling(seed=1))]
        logits = np.stack([sample_logits(rng, kind, n_vocab) for kind, _ in batch + batch[:1]])
        rows = np.zeros(len(logits), sampling.ROW)      # the last one stays padding
        tables = []
        for i, (kind, request) in enumerate(batch):
            rows[i] = request.row(position=int(rng.integers(0, 2**20)), choice=i % 3,
                                  adjustment=len(tables) if request.adjusts else -1)
            if request.adjusts:
                likely = np.argsort(logits[i])[-50:]
                tables.append(request.adjustment(n_vocab, rng.choice(likely, 30),
                                                 rng.choice(likely, 40)))
            if kind == "cancel":  # penalties make all logits equal but for their roundings
                tables[-1]["bias"], tables[-1]["count"] = 0, rng.integers(1, 14, n_vocab)
                level = 2.7 - 0.3 * tables[-1]["count"]
                logits[i] = np.where(level > 0, level * 1.3, level / 1.3) * rng.uniform(
                    1, 1 + 2e-7, n_vocab)
        logits[-4, n_vocab // 2] = -np.nan
        logits[-3, n_vocab - 1] = np.inf
        logits[-2] = -np.inf
        adjustments = np.stack(tables)

        device.adjustments = device.upload(adjustments, "test")
        order = rng.permutation(len(rows)).astype(np.int32)  # logits i are of batch row order[i]
        step = SimpleNamespace(
            slots=device.upload(np.arange(len(rows), dtype=np.int32)[::-1], "test"),
            logit_rows=device.upload(order, "test"),
            page_table=device.upload(np.zeros((len(rows), 1), np.int32), "test"))
        device.write(device.last_tokens(step), np.full(len(rows), 7, np.int32))
        tokens, logprobs = map(device.download, device.sample(
            device.upload(logits, "test"), device.upload_draws(rows), step))
        counted = device.download(device.adjustments)
        following = device.download(device.last_tokens(step))[::-1][order]

        want_tokens, want_logprobs = sampling.sample(logits, rows, adjustments)
        wrong = np.flatnonzero(tokens != want_tokens)
        assert not len(wrong), (f"row {wrong[0]} of {batch[wrong[0]]}: token "
                                f"{tokens[wrong[0]]}, oracle {want_tokens[wrong[0]]}")
        np.testing.assert_allclose(logprobs, want_logprobs, rtol=0, atol=1e-6)
        assert np.array_equal(counted["count"], adjustments["count"])
        assert list(tokens[-4:]) == [-1] * 4
        assert np.array_equal(following[:-1], np.maximum(tokens[:-1], 0)) and following[-1] == 7

        # Alone, a row has more blocks.
        i = rng.choice([i for i, (_, request) in enumerate(batch[:-3]) if not request.adjusts])
        zero = device.upload(np.zeros((1, 1), np.int32), "test")
        alone = device.sample(device.upload(logits[i:i + 1], "test"), device.upload_draws(
            rows[i:i + 1]), SimpleNamespace(slots=zero, logit_rows=zero, page_table=zero))
        assert [device.download(x)[0] for x in alone] == [tokens[i], logprobs[i]]
