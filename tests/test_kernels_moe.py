"""Mixtures of experts: the router against plain formulae, and every kernel against its twin in
float64 and bit for bit against `linear` with one expert's matrix, or against itself in other
company.
"""
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType

import device as device_module
import reference
from gguf_file import Tensor
from test_kernels import (close, device, heads_config, packed_weights, random_activations,
                          random_tensor, some_rows, weights_of)

ROWS = 1, 3, 8, 9, 33, 70


def router(n_experts, used, sigmoid=False, norm=True, scale=1.0, groups=1, groups_used=1):
    """What the ops read of a Config."""
    return SimpleNamespace(
        n_experts=n_experts, n_experts_used=used, router_sigmoid=sigmoid, router_norm=norm,
        router_scale=scale, router_groups=groups, router_groups_used=groups_used)


ROUTERS = {
    "mixtral": router(8, 2), "all of four": router(4, 4), "qwen3moe": router(128, 8),
    "deepseek2 lite": router(64, 6, norm=False), "qwen3next": router(512, 10),
    "deepseek2": router(160, 6, norm=False, scale=16.0, groups=8, groups_used=3),
    "deepseek3": router(256, 8, True, scale=2.5, groups=8, groups_used=4),
    "sigmoid": router(96, 16, True, norm=False), "unbiased sigmoid": router(40, 4, True),
    "many groups": router(64, 4, True, True, 1, 32, 3)}
BIASED = "deepseek3", "sigmoid", "many groups"
every_router = pytest.mark.parametrize("name", ROUTERS)


def plain_route(logits, bias, cfg):
    """Experts and weights of one row, as one would write them down."""
    if cfg.router_sigmoid:
        probability = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        power = [math.exp(x - max(logits)) for x in logits]
        probability = [x / math.fsum(power) for x in power]
    score = [p + b for p, b in zip(probability, bias)]
    size = cfg.n_experts // cfg.router_groups

    def group_score(group):
        best = sorted(score[group * size:(group + 1) * size], reverse=True)
        return best[0] + best[1] if cfg.router_sigmoid else best[0]
    groups = sorted(range(cfg.router_groups), key=lambda g: (-group_score(g), g))
    allowed = [e for e in range(cfg.n_experts) if e // size in groups[:cfg.router_groups_used]]
    experts = sorted(sorted(allowed, key=lambda e: (-score[e], e))[:cfg.n_experts_used])
    weights = [probability[e] for e in experts]
    total = max(math.fsum(weights), 6.1e-5) if cfg.router_norm else 1
    return experts, [weight / total * cfg.router_scale for weight in weights]


def router_inputs(rng, name, rows):
    """Logits with many ties, one column more than there are experts, and the bias."""
    cfg = ROUTERS[name]
    logits = (np.round(rng.standard_normal((rows, cfg.n_experts + 1)) * 6) / 4).astype(np.float32)
    bias = None
    if name in BIASED:
        bias = rng.choice(np.float32([-0.25, 0, 0.125]), cfg.n_experts)
        logits[:, :-1] += bias / 2  # sums of other probabilities and biases are not equal
    else:
        logits[rows // 2] -= 16  # sigmoids that nearly vanish
    logits[-1] = 0.25  # nothing but ties
    slots = np.arange(rows, dtype=np.int32)
    slots[rows // 3::5] = -1 if rows > 1 else 0
    return cfg, logits, bias, SimpleNamespace(slots=slots)


@every_router
def test_route_by_plain_formulae(name):
    cfg, logits, bias, batch = router_inputs(np.random.default_rng(1), name, 33)
    for dtype in np.float32, np.float64:
        ops = reference.Reference(dtype)
        cast = lambda x: None if x is None else x.astype(dtype)
        routes = ops.route(cast(logits), cast(bias), cfg, batch)
        assert routes.experts.dtype == np.int32 and routes.weights.dtype == dtype
        for row, slot in enumerate(batch.slots):
            experts, weights = plain_route(
                logits[row, :-1].tolist(), np.zeros(cfg.n_experts) if bias is None else bias, cfg)
            if slot < 0:
                experts, weights = [-1] * cfg.n_experts_used, [0] * cfg.n_experts_used
            assert routes.experts[row].tolist() == experts
            np.testing.assert_allclose(routes.weights[row], weights, rtol=3e-6)


def upload_or_none(device, x):
    return None if x is None else device.upload(x, "test")


def routed(device, logits, bias, cfg, batch):
    step = SimpleNamespace(slots=device.upload(batch.slots, "test"))
    return device.route(device.upload(logits, "test"), upload_or_none(device, bias), cfg, step)


def both_tiles(monkeypatch):
    for tile in 8, 32:
        monkeypatch.setattr(device_module, "tile_of", lambda tokens, tile=tile: tile)
        yield tile


@pytest.mark.gpu
@every_router
def test_route(device, monkeypatch, name):
    rng = np.random.default_rng(2)
    for rows in ROWS:
        cfg, logits, bias, batch = router_inputs(rng, name, rows)
        cast = lambda x: None if x is None else x.astype(np.float64)
        want = reference.Reference(np.float64).route(cast(logits), cast(bias), cfg, batch)
        for tile in both_tiles(monkeypatch):
            routes = routed(device, logits, bias, cfg, batch)
            experts, weights = device.download(routes.experts), device.download(routes.weights)
            assert np.array_equal(experts, want.experts)
            np.testing.assert_allclose(weights, want.weights, rtol=3e-6)
            pairs, listed = device.download(routes.pairs), []
            for expert, first, count, _ in device.download(routes.items):
                assert 0 <= count <= tile
                mine = pairs[first:first + count]
                assert (experts.reshape(-1)[mine] == expert).all()
                listed += mine.tolist()
            assert sorted(listed) == np.flatnonzero(experts.reshape(-1) >= 0).tolist()
        last = SimpleNamespace(slots=batch.slots[-1:])
        alone = device.download(routed(device, logits[-1:], bias, cfg, last).weights)
        assert np.array_equal(alone[0], weights[-1])


@pytest.mark.gpu
def test_route_of_broken_logits(device):
    """NaN and infinities give k different experts of the model: nobody reads past the weights."""
    cfg = ROUTERS["deepseek3"]
    logits = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    logits[0], logits[1, 5], logits[2], logits[3, 9] = np.nan, np.nan, -np.inf, np.inf
    batch = SimpleNamespace(slots=np.zeros(4, np.int32))
    for sigmoid in True, False:
        cfg = SimpleNamespace(**{**vars(cfg), "router_sigmoid": sigmoid})
        experts = device.download(routed(device, logits, None, cfg, batch).experts)
        assert (np.diff(experts) > 0).all() and experts.min() >= 0 and experts.max() < 256


def random_experts(rng, kind, count, rows, cols):
    """A tensor [count, rows, cols]."""
    flat = random_tensor(rng, kind, count * rows, cols, f"{kind} {rows}")
    return Tensor(flat.name, flat.type, (count, rows, cols), flat.data)


def check_pairs(device, tensors, results, x, values, row_of, expert_of):
    """`results`, [pairs, rows] in several ways, are what `linear` gives with the pair's expert."""
    first, *others = results
    assert all(np.array_equal(first.view(np.uint32), y.view(np.uint32)) for y in others)
    stacks = [list(parts) for parts in zip(*(t.parts() for t in tensors))]
    for expert, stack in enumerate(stacks):
        mine = np.flatnonzero(expert_of == expert)
        if not len(mine):
            continue
        dense = device.download(device.linear(x, device.matrix(stack)))[row_of[mine]]
        assert np.array_equal(dense.view(np.uint32), first[mine].view(np.uint32)), expert
        packed = np.concatenate([packed_weights(part) for part in stack])
        error = np.abs(first[mine] - values[row_of[mine]] @ packed.T)
        assert (error <= 2.0 ** -18 * (np.abs(values) @ np.abs(packed).T)[row_of[mine]]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kinds, heights, cols", [
    (["Q4_K", "Q6_K"], [40, 24], 768), (["Q8_0"], [72], 160), (["F16", "F16"], [32, 32], 96),
    (["Q4_K"], [144], 2304), (["Q5_0"], [16], 128)])
def test_linear_experts(device, monkeypatch, kinds, heights, cols):
    """The bits of `linear`, in tiles of 8 and 32, for tokens (gate, up) and for pairs (down)."""
    rng = np.random.default_rng(cols)
    count, k = 5, 2
    tensors = [random_experts(rng, kind, count, rows, cols) for kind, rows in zip(kinds, heights)]
    w = device.experts(tensors)
    cfg = router(count, k)
    for rows in ROWS if cols < 2000 else (33,):
        logits = rng.standard_normal((rows, count)).astype(np.float32)
        logits[:, 3] += 2  # much wanted
        slots = np.arange(rows, dtype=np.int32)
        slots[1::7] = -1
        for x_rows in rows, rows * k:
            x, values = random_activations(device, rng, x_rows, cols)
            results = []
            for _ in both_tiles(monkeypatch):
                routes = routed(device, logits, None, cfg, SimpleNamespace(slots=slots))
                results.append(device.download(device.linear_experts(x, w, routes)))
            experts = device.download(routes.experts).reshape(-1)
            results = [np.where(experts[:, None] < 0, 0, y) for y in results]
            check_pairs(device, tensors, results, x, values,
                        np.arange(rows * k) // (rows * k // x_rows), experts)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds, width, cols", [(["Q4_K", "Q4_K"], 136, 768), (["Q8_0"], 24, 160)])
def test_linear_silu_of_experts(device, monkeypatch, kinds, width, cols):
    """The bits of a dense network with one expert's weights, in tiles of 8 and 32."""
    rng = np.random.default_rng(cols)
    count, k = 5, 2
    gate_up = [random_experts(rng, kind, count, 2 * width // len(kinds), cols) for kind in kinds]
    down = random_experts(rng, "F16", count, 48, width)
    norm = device.upload(rng.uniform(1, 2, cols).astype(np.float32), "test")
    w, w_down = device.gated(gate_up, [down], norm)
    own = [device.gated([t.parts()[e] for t in gate_up], [down.parts()[e]], norm)
           for e in range(count)]
    for rows in 3, 33, 70:
        logits = rng.standard_normal((rows, count)).astype(np.float32)
        batch = SimpleNamespace(slots=np.arange(rows, dtype=np.int32))
        x = device.rmsnorm(device.upload(rng.standard_normal((rows, cols)).astype(np.float32),
                                         "test"), norm, 1e-6)
        dense = []
        for expert in own:
            y = device.linear_silu(x, expert[0])
            dense.append((device.download(y), device.download(device.linear(y, expert[1]))))
        for _ in both_tiles(monkeypatch):
            routes = routed(device, logits, None, router(count, k), batch)
            y = device.linear_silu(x, w, routes)
            z = device.download(device.linear_experts(y, w_down, routes))
            experts = device.download(routes.experts)
            for pair, (got, after) in enumerate(zip(device.download(y), z)):
                expected = dense[experts.reshape(-1)[pair]]
                assert np.array_equal(got, expected[0][pair // k])
                assert np.array_equal(after, expected[1][pair // k])


@pytest.mark.gpu
@pytest.mark.parametrize("kind, height, cols", [("Q5_0", 80, 128), ("Q8_0", 48, 512),
                                                ("Q4_K", 24, 256)])
def test_linear_heads(device, monkeypatch, kind, height, cols):
    rng = np.random.default_rng(cols)
    heads = 3
    tensors = [random_experts(rng, kind, heads, height, cols)]
    w = device.experts(tensors)
    for rows in ROWS:
        x, values = random_activations(device, rng, rows * heads, cols)
        results = []
        for _ in both_tiles(monkeypatch):
            y = device.linear_heads(x, w)
            assert y.shape == (rows, heads * height)
            results.append(device.download(y).reshape(rows * heads, height))
        every = np.arange(rows * heads)
        check_pairs(device, tensors, results, x, values, every, every % heads)


@pytest.mark.gpu
@pytest.mark.parametrize("shared, gated", [(False, False), (True, False), (True, True)])
def test_combine(device, shared, gated):
    rng = np.random.default_rng(4)
    cfg, cols = router(16, 5), 584
    for rows in ROWS:
        logits = (rng.standard_normal((rows, 17)) * 3).astype(np.float32)
        slots = np.arange(rows, dtype=np.int32)
        slots[2::7] = -1
        routes = routed(device, logits, None, cfg, SimpleNamespace(slots=slots))
        experts, weights = device.download(routes.experts), device.download(routes.weights)
        y = rng.standard_normal((rows * 5, cols)).astype(np.float32)
        y[experts.reshape(-1) < 0] = 0
        h, extra = rng.standard_normal((2, rows, cols)).astype(np.float32)
        want = h.astype(np.float64)
        oracle = reference.Reference(np.float64)
        oracle.combine(y.astype(np.float64), reference.Routes(experts, weights.astype(np.float64)),
                       extra.astype(np.float64) if shared else None,
                       logits.astype(np.float64) if gated else None, want)
        y[experts.reshape(-1) < 0] = np.nan  # left over from an earlier step

        def result(first, last):
            part = lambda x, n=1: device.upload(x[first * n:last * n], "test")
            own = device_module.Routes(part(experts), part(weights), None, None, 8)
            to = part(h)
            device.combine(part(y, 5), own, part(extra) if shared else None,
                           part(logits) if gated else None, to)
            return device.download(to)
        got = result(0, rows)
        close(got, want, 1e-6)
        assert np.array_equal(result(rows - 1, rows)[0], got[-1])


@pytest.mark.parametrize("n_experts, groups, fits", [
    (512, 32, True), (513, 1, False), (330, 33, False)])
def test_too_many_experts_are_refused(n_experts, groups, fits):
    cfg = heads_config(64, 1, 1)
    vars(cfg).update(n_experts=n_experts, router_groups=groups)
    problem = device_module.model_problem(cfg, "f16")
    assert problem is None if fits else "512 experts a layer in 32 groups" in problem


def test_experts_on_the_cpu():
    """A row's result has the same bits alone and among others, and the right value."""
    rng = np.random.default_rng(5)
    tensors = [random_experts(rng, "Q8_0", 6, rows, 96) for rows in (40, 24)]
    down = [random_experts(rng, "F16", 6, 48, 32)]
    cfg, logits = router(6, 3), rng.standard_normal((70, 7)).astype(np.float32)
    x, slots = rng.standard_normal((70, 96)).astype(np.float32), np.arange(70, dtype=np.int32)
    slots[11] = -1

    def result(ops, rows):
        cast = lambda array: array[rows].astype(ops.dtype)
        gate_up, last = ops.experts(tensors), ops.experts(down)
        routes = ops.route(cast(logits), None, cfg, SimpleNamespace(slots=slots[rows]))
        y = ops.linear_experts(ops.linear_silu(cast(x), gate_up, routes), last, routes)
        h = np.zeros((len(rows), 48), ops.dtype)
        ops.combine(y, routes, cast(x)[:, :48], cast(logits), h)
        return h, ops.linear_heads(np.tile(cast(x), 2).reshape(-1, 32), last)
    ops = reference.Reference()
    together, heads = result(ops, np.arange(0, 70, 2))
    for at in 0, 3, 17, 34:
        alone, head = result(ops, np.array([2 * at, 0]))
        assert np.array_equal(alone[0], together[at]) and np.array_equal(head[0], heads[at])
    want, want_heads = result(reference.Reference(np.float64), np.arange(0, 70, 2))
    close(together, want, 1e-5), close(heads, want_heads, 1e-5)
    padding, _ = result(ops, np.array([11]))
    close(padding[0], x[11, :48] / (1 + np.exp(-logits[11, -1])), 1e-6)
