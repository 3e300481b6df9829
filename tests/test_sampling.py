"""The sampling oracle: its arithmetic, its filters against plain ones, and what it draws."""
import math

import numpy as np
import pytest

import sampling
from errors import RequestError
from sampling import Sampling

N = 200


def row(position=7, **options):
    return Sampling(**{"seed": 11, **options}).row(position)


def random_logits(seed=0, n=N):
    return (np.random.default_rng(seed).standard_normal(n) * 3).astype(np.float32)


def test_philox_known_answer():
    """The published answer of Philox4x32-10 for a zero counter and a zero key."""
    words = sampling.philox(0, 0, 0, np.array([0]))[0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_exp_and_log_are_accurate():
    x = -np.random.default_rng(1).uniform(0, 20, 20000)
    exact = np.array([math.exp(v) for v in x]) * 2.0**40
    assert (np.abs(sampling.weight(x) - exact) <= 1 + 1e-13 * exact).all()
    assert sampling.weight(np.array([0.0, -100.0])).tolist() == [1 << 40, 0]
    v = 10.0 ** np.random.default_rng(2).uniform(-12, 12, 20000)
    np.testing.assert_allclose(sampling.log(v), [math.log(a) for a in v], rtol=2e-15, atol=1e-16)


def test_greedy_takes_the_first_of_the_largest():
    logits = random_logits()
    logits[[30, 90]] = 50
    assert sampling.sample_row(logits, row(temperature=0))[0] == 30


def kept(logits, temperature, top_k, top_p, min_p):
    """The tokens that pass, by the plain rules in high precision."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if top_k:
        order = order[:top_k]
    weight = {i: math.exp((float(logits[i]) - float(logits.max())) / temperature) for i in order}
    total, before, nucleus = sum(weight.values()), 0.0, []  # the first always stays
    for i in order:
        if nucleus and before >= top_p * total * (1 - 1e-9):
            break
        nucleus.append(i)
        before += weight[i]
    return {i for i in nucleus if weight[i] ** temperature >= min_p ** temperature * (1 - 1e-12)}


@pytest.mark.parametrize("options", [
    dict(top_k=5), dict(top_p=0.6), dict(min_p=0.1), dict(top_k=40, top_p=0.9, min_p=0.02),
    dict(top_k=1), dict(top_p=0.0), dict(min_p=1.0), dict(top_k=N + 5)])
def test_filters_pass_exactly_these(options):
    """Over many draws all tokens that pass a filter with some probability come, and no other."""
    logits = random_logits(3)
    full = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    allowed = kept(logits, **full)
    drawn = {sampling.sample_row(logits, row(position, **full))[0] for position in range(3000)}
    assert drawn <= allowed
    weight = {i: math.exp(float(logits[i] - logits.max()) / 1.5) for i in allowed}
    likely = {i for i in allowed if weight[i] / sum(weight.values()) > 0.01}
    assert likely <= drawn


def test_draws_follow_the_distribution():
    logits, draws = random_logits(4, 12), 20000
    counts = np.bincount([sampling.sample_row(logits, row(p, temperature=0.8))[0]
                          for p in range(draws)], minlength=12)
    p = np.exp(logits.astype(np.float64) / 0.8)
    expected = draws * p / p.sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 36  # 11 degrees of freedom: exceeded once in 6,000 seeds


def test_noise_belongs_to_seed_position_and_choice():
    logits = random_logits(5)
    draw = lambda **o: [sampling.sample_row(logits, Sampling(
        temperature=3, seed=o.get("seed", 1)).row(p, o.get("choice", 0)))[0] for p in range(50)]
    assert draw() == draw() != draw(seed=2)
    assert draw() != draw(choice=1)
    assert draw(seed=1) != draw(seed=1 + 2**40)  # the whole seed counts


def test_penalties():
    logits = random_logits(6)
    params = Sampling(temperature=0, repetition_penalty=2.0, presence_penalty=0.5,
                      frequency_penalty=0.25, logit_bias={9: 1.5}, seed=1)
    table = params.adjustment(N, prompt=[3, 4], output=[4, 5, 5])
    got = sampling.adjusted(logits, params.row(), table)
    want = logits.astype(np.float64)
    for token in (3, 4, 5):
        want[token] = want[token] / 2 if want[token] > 0 else want[token] * 2
    want[4] -= 0.5 + 0.25
    want[5] -= 0.5 + 0.5
    want[9] += 1.5
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_logprob_is_the_models_own():
    logits = random_logits(7)
    token, logprob = sampling.sample_row(logits, row(temperature=0.3, top_k=3))
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert abs(logprob - exact[token]) < 1e-6


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_draw_nothing(bad):
    logits = random_logits(8)
    logits[5] = bad
    for temperature in (0.0, 1.0):
        assert sampling.sample_row(logits, row(temperature=temperature))[0] == -1
    assert sampling.sample_row(np.full(N, -np.inf, np.float32), row())[0] == -1


@pytest.mark.parametrize("field, value", [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "1"), ("top_k", -1),
    ("top_k", 1.5), ("top_p", 1.1), ("min_p", -1), ("seed", 2**64), ("seed", True),
    ("repetition_penalty", 0), ("presence_penalty", 3), ("stop", ("",)), ("stop", "text"),
    ("stop", (1,)), ("logit_bias", {N: 1}), ("logit_bias", {1: float("nan")}),
    ("logit_bias", [1, 2]), ("logit_bias", {"1": 1})])
def test_bad_parameters_name_their_field(field, value):
    with pytest.raises(RequestError) as caught:
        Sampling(**{field: value}).validate(N)
    assert caught.value.param == field and caught.value.status == 400
