"""The gated delta net of both backends: against a plain float64 loop, and bit for bit against
itself in other chunks, with drafts dropped, in other company and in another slot.

The CUDA half needs a GPU. States start as NaN: what an earlier owner of a slot left must not count.
"""
from types import SimpleNamespace

import numpy as np
import pytest

import device as device_module
import reference
from kv import Batch
from test_kernels import heads_config

SLOTS, PENDING, LAYER = 3, 8, 1


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ops(request):
    opened = reference.Reference() if request.param == "cpu" else device_module.Device()
    yield opened
    opened.close()


def delta_config(grouped=True, dim=128, k_heads=2, v_heads=6, width=4):
    """What the delta ops read of a Config."""
    return SimpleNamespace(
        conv_width=width, delta_dim=dim, delta_k_heads=k_heads, delta_v_heads=v_heads,
        delta_grouped=grouped, delta_channels=(2 * k_heads + v_heads) * dim, n_state_layers=2,
        rms_eps=1e-6)


def random_u(rng, cfg, rows):
    """u = q | k | v | z | beta | alpha, the last two far into both ends of their functions."""
    v_heads = cfg.delta_v_heads
    u = rng.standard_normal((rows, cfg.delta_channels + v_heads * cfg.delta_dim + 2 * v_heads))
    u[:, -2 * v_heads:] *= 10.0 ** rng.integers(-1, 3, (rows, 1))
    return u.astype(np.float32)


class Net:
    """One layer on one backend."""

    def __init__(self, ops, cfg, pending=PENDING):
        rng, heads = np.random.default_rng(0), cfg.delta_v_heads
        self.ops, self.cfg, self.on_card = ops, cfg, ops.name == "cuda"
        self.weights = SimpleNamespace(
            conv=rng.standard_normal((cfg.delta_channels, cfg.conv_width)),
            dt=rng.uniform(-5, 1, heads), decay=-rng.uniform(0.05, 4, heads),
            norm=rng.uniform(0.5, 2, cfg.delta_dim))
        self.mixer = SimpleNamespace(
            **{name: ops.vector(array) for name, array in vars(self.weights).items()})
        states = ops.states(cfg, SLOTS, pending)
        self.kv = SimpleNamespace(states=states)
        if self.on_card:
            ops.write(states.data, np.full(states.data.shape, np.nan, np.float32))
        else:
            states.data[:] = np.nan

    def upload(self, array):
        return self.ops.upload(array, "test") if self.on_card else array

    def run(self, *spans):
        """(c, o, x), each a list of one array per span (slot, position, u[, pending, entering])."""
        batch = self.ops.upload_batch(Batch.of(
            [(slot, position, [0] * len(u), 0, 1, *state) for slot, position, u, *state in spans],
            np.zeros((SLOTS, 4), np.int32), 16))
        u = self.upload(np.concatenate([span[2] for span in spans]))
        c = self.ops.delta_conv(u, self.mixer, self.cfg, LAYER, self.kv, batch)
        o = self.ops.delta_rule(u, c, self.cfg, LAYER, self.kv, batch)
        x = self.ops.delta_norm(o, u, self.mixer.norm, self.cfg)
        ends = np.cumsum([len(span[2]) for span in spans])[:-1]
        return [np.split(self.ops.download(y).copy(), ends) for y in (c, o, x)]

    def rows(self, *spans):
        """What run() gives, side by side: one array of rows per span."""
        return [np.concatenate(parts, axis=1) for parts in zip(*self.run(*spans))]


def close(got, want, tolerance):
    """Fails where an error is above `tolerance` of the largest value."""
    used = np.abs(got - want) / (tolerance * np.abs(want).max())
    worst = np.unravel_index(np.argmax(used), used.shape)
    assert used[worst] <= 1, f"at {worst}: {got[worst]}, not {want[worst]}"


def silu(x):
    return x / (1 + np.exp(-x))


def widths_of(ops):
    return [(128, 4), (32, 4), (48, 3)] if ops.name == "cpu" else [(128, 4), (128, 3)]


def test_delta_conv(ops):
    for dim, width in widths_of(ops):
        cfg = delta_config(dim=dim, width=width)
        net, u = Net(ops, cfg), random_u(np.random.default_rng(1), cfg, 9)
        c = np.concatenate(net.run((0, 0, u[:2]))[0] + net.run((0, 2, u[2:]))[0])
        w, channels, heads = net.weights, cfg.delta_channels, cfg.delta_v_heads
        u = u.astype(np.float64)
        for t in range(len(u)):
            x = sum(w.conv[:, width - 1 - back] * u[t - back, :channels]
                    for back in range(width) if back <= t)
            x = silu(x).reshape(-1, dim)
            for head in range(2 * cfg.delta_k_heads):
                x[head] /= np.sqrt(np.sum(x[head] ** 2) + cfg.rms_eps)
            x[:cfg.delta_k_heads] /= np.sqrt(dim)
            for head, want in enumerate(x):
                close(c[t, head * dim:head * dim + dim], want, 1e-5)
            beta, alpha = np.split(u[t, -2 * heads:], 2)
            softplus = np.log1p(np.exp(np.minimum(alpha + w.dt, 500)))
            close(c[t, channels:channels + heads], 1 / (1 + np.exp(-beta)), 1e-5)
            close(c[t, channels + heads:], np.exp(w.decay * softplus), 1e-5)


@pytest.mark.parametrize("grouped", [True, False])
def test_delta_rule(ops, grouped):
    for dim, _ in widths_of(ops):
        cfg = delta_config(grouped, dim)
        net, u = Net(ops, cfg), random_u(np.random.default_rng(2), cfg, 40)
        (c,), (o,), _ = net.run((0, 0, u))
        n_k, heads = cfg.delta_k_heads, cfg.delta_v_heads
        state = np.zeros((heads, dim, dim))
        want = np.zeros(o.shape)
        for token, row in zip(c.astype(np.float64), want):
            q, k, v = np.split(token[:-2 * heads].reshape(-1, dim), [n_k, 2 * n_k])
            beta, decay = np.split(token[-2 * heads:], 2)
            for head in range(heads):
                s, kk = state[head], k[head // 3 if grouped else head % 2]
                s *= decay[head]
                s += np.outer(kk, beta[head] * (v[head] - s.T @ kk))
                row[head * dim:head * dim + dim] = s.T @ q[head // 3 if grouped else head % 2]
        for got_head, want_head in zip(np.split(o, heads, 1), np.split(want, heads, 1)):
            close(got_head, want_head, 1e-5)


def test_delta_norm(ops):
    for dim, _ in widths_of(ops):
        cfg = delta_config(dim=dim)
        net, u = Net(ops, cfg), random_u(np.random.default_rng(3), cfg, 11)
        _, (o,), (x,) = net.run((0, 0, u))
        heads = o.astype(np.float64).reshape(len(o), -1, dim)
        norm = heads / np.sqrt(np.mean(heads ** 2, axis=-1, keepdims=True) + cfg.rms_eps)
        z = u[:, cfg.delta_channels:cfg.delta_channels + o.shape[1]].astype(np.float64)
        want = (norm * net.weights.norm).reshape(o.shape) * silu(z)
        for got_row, want_row in zip(x, want):  # f16 with a scale per row on the card
            close(got_row, want_row, 1e-3 if net.on_card else 1e-5)


@pytest.fixture(scope="module")
def whole(ops):
    """A sequence of 70 tokens and what each gives when all come as one prompt."""
    cfg = delta_config()
    u = random_u(np.random.default_rng(4), cfg, 70)
    rows, = Net(ops, cfg).rows((0, 0, u))
    assert np.isfinite(rows).all() and (np.abs(rows).max(axis=1) > 0.1).all()
    return cfg, u, rows


@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_chunks_move_no_bit(ops, whole, size):
    cfg, u, want = whole
    net = Net(ops, cfg)
    for at in range(0, len(u), size):
        got, = net.rows((1, at, u[at:at + size]))
        assert np.array_equal(got, want[at:at + size])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_dropped_tokens_leave_no_trace(ops, whole, rows, late):
    """Steps of `rows` pending tokens of which 0 to `rows` count, with and without a prompt before;
    at last a prompt behind pending tokens. late: they enter the state when the ring is full."""
    cfg, u, want = whole
    rng = np.random.default_rng(5)
    for start in (0, 5):
        net, pending, at = Net(ops, cfg, pending=rows << late), 0, start  # the smallest ring
        if start:
            net.rows((2, 0, u[:start]))
        for kept in (*range(rows, -1, -1), 1, rows):
            drafts = random_u(rng, cfg, rows)
            drafts[:kept] = u[at:at + kept]
            full = pending + kept + rows > net.kv.states.ring
            entering = pending if full or not late else 0
            got, = net.rows((2, at, drafts, pending, entering))
            assert np.array_equal(got[:kept], want[at:at + kept])
            at, pending = at + kept, pending + kept - entering
        for end in (at + 5, at + 6):
            got, = net.rows((2, at, u[at:end], pending, pending + end - at))
            assert np.array_equal(got, want[at:end])
            at, pending = end, 0


def test_company_moves_no_bit(ops, whole):
    """Prompt, decode and drafts of three sequences and padding in one batch, in any order."""
    cfg, u, want = whole
    other = random_u(np.random.default_rng(6), cfg, 70)
    for order in ((0, 1, 2, 3), (3, 2, 0, 1), (1, 3, 2, 0)):
        alone, crowd = Net(ops, cfg), Net(ops, cfg)
        for net in alone, crowd:
            net.run((1, 0, other[:4]), (2, 0, u[:20]))
            net.run((1, 4, other[4:6], 0, 0), (2, 20, u[20:21], 0, 0))
        spans = [(0, 0, u[:33]), (1, 6, other[6:11], 2, 2), (2, 21, u[21:22], 1, 0),
                 (-1, 0, other[60:62], 0, 0)]
        expected = [alone.rows(span)[0] for span in spans]
        got = crowd.rows(*(spans[i] for i in order))
        for i, rows in zip(order, got):
            assert np.array_equal(rows, expected[i])
        assert np.array_equal(expected[0], want[:33]) and np.array_equal(expected[2], want[21:22])
        v_values = cfg.delta_v_heads * cfg.delta_dim
        assert not expected[3][:, -2 * v_values:].any()  # padding


def test_saved_state_goes_on_in_another_slot(ops, whole):
    cfg, u, want = whole
    net = Net(ops, cfg)
    net.rows((0, 0, u[:30]))
    net.rows((0, 30, u[30:33], 0, 0))
    saved = ops.save_state(net.kv, 0)
    net.rows((0, 32, u[32:40], 2, 10))  # the slot moves on, what was saved does not
    later = ops.save_state(net.kv, 0)
    ops.synchronize()
    assert saved.dtype == np.uint8 and len(saved) == len(later) == net.kv.states.nbytes // SLOTS
    for slot, data in ((1, saved), (2, saved.copy())):  # pinned memory, and a file's
        ops.load_state(net.kv, slot, data)
        got, = net.rows((slot, 33, u[33:50], 3, 20))
        assert np.array_equal(got, want[33:50])
    ops.load_state(net.kv, 1, later)
    got, = net.rows((1, 40, u[40:41]))
    assert np.array_equal(got, want[40:41])


@pytest.mark.gpu
def test_pinned_memory_is_used_again():
    ops = device_module.Device()
    net = Net(ops, delta_config())
    first = ops.save_state(net.kv, 0)
    second, address, first_bytes = ops.save_state(net.kv, 0), first.ctypes.data, first.nbytes
    assert second.ctypes.data != address
    piece = first[:16]
    del first
    assert ops.save_state(net.kv, 0).ctypes.data not in (address, second.ctypes.data)
    del piece
    assert ops.save_state(net.kv, 0).ctypes.data == address
    assert ops.allocated["snapshots"] == 3 * first_bytes
    ops.close()


@pytest.mark.parametrize("dim, v_heads, width, fits", [
    (64, 6, 4, False), (128, 5, 4, False), (128, 6, 5, False), (128, 6, 4, True)])
def test_other_sizes_are_refused(dim, v_heads, width, fits):
    cfg = heads_config(64, 1, 1)
    vars(cfg).update(n_state_layers=2, delta_dim=dim, delta_v_heads=v_heads, conv_width=width)
    problem = device_module.model_problem(cfg, "f16")
    assert problem is None if fits else "--backend cpu" in problem
