"""sampling.py against its own definition: arithmetic, filters, noise, parameters."""
import decimal
import itertools
import math

import numpy as np
import pytest

import sampling
from errors import RequestError
from sampling import ADJUSTMENT, IN_PROMPT, ROW, Sampling


def draw(logits, position=0, choice=0, adjustment=None, **parameters):
    parameters.setdefault("seed", 1)
    row = Sampling(**parameters).row(position, choice, -1 if adjustment is None else 0)
    return sampling.sample_row(np.asarray(logits, np.float32), row, adjustment)


# ---- arithmetic --------------------------------------------------------------------------------

def test_log_is_accurate():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.random(500), np.exp(rng.uniform(-40, 40, 500)),
                             1 - np.exp(rng.uniform(-36, -1, 500)),  # where log is near 0
                             [1.0, 2.0, 0.5, 2.0**-33, 1 - 2.0**-33, 1e-300, 5e-324]])
    with decimal.localcontext(prec=40):
        for value, got in zip(values.tolist(), sampling.log(values).tolist()):
            want = decimal.Decimal(value).ln()
            assert abs(decimal.Decimal(got) - want) <= abs(want) * decimal.Decimal("6e-16"), value


def test_weight_is_the_exponential_rounded_down():
    rng = np.random.default_rng(1)
    x = np.concatenate([-rng.random(20000) * 27.7, -np.exp(rng.uniform(-40, 0, 300)), [0.0]])
    want = np.exp(x.astype(np.float32).astype(np.float64)) * 2**40
    assert (np.abs(sampling.weight(x) - want) <= 1 + 4e-7 * want).all()
    assert sampling.weight(np.array([0.0, -0.0, -27.7, -27.73, -28.0, -1e300, -np.inf, np.nan])
                           ).tolist() == [2**40, 2**40, 1, 0, 0, 0, 0, 0]


def philox_by_the_letter(key, counter):
    """Philox4x32-10 in Python integers; counter of four words."""
    k, c = [key & 0xFFFFFFFF, key >> 32], list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_philox_words_of_every_token():
    # The known answers of the generator's authors; the oracle has no use for their fourth word.
    assert sampling.philox(0, 0, 0, np.array([0])).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C,
                                                                 0x9B00DBD8]]
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox_by_the_letter(2**64 - 1, [ones] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6,
                                                           0x6D5451FD]
    assert philox_by_the_letter(0x299F31D0A4093822, pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420,
                                                            0x24126EA1]
    row = Sampling(seed=2**63 + 12345).row(position=77, choice=3)
    ids = np.array([0, 1, 3, 4, 9, 10, 11, 151935])
    want = [(philox_by_the_letter(2**63 + 12345, (77, 3, i // 4, 0))[i % 4] + 0.5) / 2**32
            for i in ids.tolist()]
    assert sampling.uniform(row, ids).tolist() == want


# ---- the drawn token ---------------------------------------------------------------------------

def by_the_letter(logits, row):
    """The definition with sorted lists and Python integers; no prefilter, no vector tricks."""
    ranking = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    top = float(logits[ranking[0]])
    if row["inverse_temperature"] == 0:
        return ranking[0]
    gap = {i: float(logits[i]) - top for i in ranking}
    x = {i: gap[i] * float(row["inverse_temperature"]) for i in ranking}
    if row["top_k"]:
        ranking = ranking[:int(row["top_k"])]
    if row["top_p"]:
        weights = [int(sampling.weight(np.array([x[i]]))[0]) for i in ranking]
        limit = int(row["top_p"]) * sum(weights)
        ranking = [i for n, i in enumerate(ranking) if sum(weights[:n]) * 2**32 < limit]
    ranking = [i for i in ranking if gap[i] >= float(row["min_gap"])]

    def score(i):
        word = philox_by_the_letter(int(row["seed"]), (int(row["position"]), int(row["choice"]),
                                                       i // 4, 0))[i % 4]
        u = np.float64((word + 0.5) / 2**32)
        return math.floor((x[i] - sampling.log(-sampling.log(u)) + 32) * 2**38)
    return max(sorted(ranking), key=score)


LOGITS = {
    "normal": lambda rng, n: rng.standard_normal(n) * 3,
    "ties": lambda rng, n: rng.integers(-2, 3, n),
    "equal": lambda rng, n: np.zeros(n),
    "signed zeros": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "flat": lambda rng, n: rng.standard_normal(n) * 1e-3,
    "masked": lambda rng, n: np.where(rng.random(n) < 0.9, -np.inf, rng.standard_normal(n)),
    "huge": lambda rng, n: rng.standard_normal(n) * 1e37,
}


@pytest.mark.parametrize("kind", LOGITS)
def test_filters_by_the_letter(kind):
    rng = np.random.default_rng(2)
    grid = itertools.product((0, 0.01, 1.0, 100.0), (0, 1, 5, 40, 1000), (0.0, 0.1, 0.5, 0.97, 1.0),
                             (0.0, 0.05, 1.0))
    for temperature, top_k, top_p, min_p in grid:
        logits = LOGITS[kind](rng, 60).astype(np.float32)
        logits[rng.integers(60)] = 0.5
        row = Sampling(temperature, top_k, top_p, min_p, seed=int(rng.integers(2**62))).row(
            int(rng.integers(1000)), int(rng.integers(4)))
        assert sampling.sample_row(logits, row)[0] == by_the_letter(logits, row), row


def test_rare_tokens_are_within_reach():
    """150,000 tokens 12 nats behind win about half of the time; the prefilter must not lose one."""
    logits = np.full(151936, -12.0, np.float32)
    logits[17] = 0
    rows = [Sampling(seed=5).row(position) for position in range(16)]
    tokens = [sampling.sample_row(logits, row)[0] for row in rows]
    assert tokens == [by_noise(logits, row) for row in rows]
    assert 2 < tokens.count(17) < 14


def by_noise(logits, row):
    u = sampling.uniform(row, np.arange(len(logits)))
    x = (logits.astype(np.float64) - float(logits.max())) * row["inverse_temperature"]
    return int(np.argmax(x - sampling.log(-sampling.log(u))))


def test_noise_is_never_cut_off():
    """Whole rows scored without any prefilter, at temperatures that spread the winners."""
    rng = np.random.default_rng(3)
    for position in range(30):
        logits = (rng.standard_normal(5003) * 4).astype(np.float32)
        row = Sampling(temperature=0.5 + position / 10, seed=9).row(position)
        assert sampling.sample_row(logits, row)[0] == by_noise(logits, row)


def test_top_p_bound_is_exact():
    """A sum that misses the bound by a fraction of one unit: only exact integers can tell."""
    gaps = -np.linspace(0.1, 3, 20001, dtype=np.float32).astype(np.float64)
    for gap, w in zip(gaps, sampling.weight(gaps).tolist()):
        total = 2**40 + w
        p = -(-2**72 // total)                      # least P with P * Z / 2^32 >= 2^40
        if 0 < p * total - 2**72 < 2**32:
            break
    else:
        pytest.fail("no such pair of weights")
    keys = sampling.rank_keys(np.array([0, gap], np.float32), np.arange(2))
    x = np.array([0, gap])
    assert sampling.prefix(keys, x, 0, p).tolist() == [0, 1]
    assert sampling.prefix(keys, x, 0, p - 1).tolist() == [0]


@pytest.mark.parametrize("parameters, kept", [
    (dict(temperature=1.0), range(8)), (dict(temperature=0.5), range(8)),
    (dict(temperature=1.0, top_k=3), (1, 4, 6)), (dict(temperature=1.0, min_p=0.3), (1, 4, 6)),
    (dict(temperature=1.0, top_p=0.75), (1, 4, 6)), (dict(temperature=2.0), range(8)),
])
def test_frequencies_follow_the_distribution(parameters, kept):
    p = np.array([0.03, 0.4, 0.02, 0.06, 0.25, 0.06, 0.15, 0.03])
    logits = np.log(p).astype(np.float32)
    row, trials = Sampling(seed=11, **parameters).row(), 4000
    counts = np.zeros(8)
    for row["position"] in range(trials):
        counts[sampling.sample_row(logits, row)[0]] += 1
    want = np.zeros(8)
    want[list(kept)] = p[list(kept)] ** (1 / parameters["temperature"])
    want *= trials / want.sum()
    assert not counts[want == 0].any()
    chi2 = ((counts - want)[want > 0] ** 2 / want[want > 0]).sum()
    assert chi2 < 24.3                              # one in a thousand at 7 degrees of freedom


def test_token_depends_on_seed_position_and_choice_only():
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((40, 300)).astype(np.float32)
    rows = np.array([Sampling(seed=i % 3, temperature=2.0).row(i // 3, i % 2) for i in range(40)])
    tokens, logprobs = sampling.sample(logits, rows)
    order = rng.permutation(40)
    again = sampling.sample(logits[order], rows[order])
    assert np.array_equal(again[0], tokens[order]) and np.array_equal(again[1], logprobs[order])

    flat = np.zeros(1000)
    seen = {draw(flat, **at)[0] for at in (
        dict(), dict(position=1), dict(choice=1), dict(seed=2), dict(seed=2**32 + 1))}
    assert len(seen) == 5
    assert draw(flat, seed=-1) == draw(flat, seed=2**64 - 1)


def test_logprob_is_of_the_raw_distribution():
    rng = np.random.default_rng(5)
    for scale in (0.01, 1, 8):
        logits = (rng.standard_normal(49152) * scale).astype(np.float32)
        exact = logits.astype(np.longdouble)
        exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
        for parameters in (dict(temperature=0), dict(temperature=3.0, top_k=50), dict(min_p=0.5)):
            token, logprob = draw(logits, **parameters)
            assert abs(logprob - exact[token]) < 1e-6 * max(1, abs(exact[token]))


# ---- penalties, broken rows, batches -----------------------------------------------------------

def test_penalties_step_by_step():
    f = np.float32
    logits = np.array([1.7, -1.7, 2.3, 0.9, -0.4, 5.0], f)
    request = Sampling(temperature=0, repetition_penalty=1.3, presence_penalty=0.7,
                       frequency_penalty=0.1, logit_bias={5: -4.5}, seed=0)
    table = request.adjustment(6, prompt=[0, 1, 4], output=[1, 2, 2, 2])
    assert table["count"].tolist() == [IN_PROMPT, IN_PROMPT | 1, 3, 0, IN_PROMPT, 0]
    got = sampling.adjusted(logits, request.row(), table)
    want = [f(1.7) / f(1.3),                                            # only in the prompt
            f(f(-1.7) * f(1.3) - f(0.7)) - f(0.1) * f(1),
            f(f(2.3) / f(1.3) - f(0.7)) - f(0.1) * f(3),
            f(0.9), f(-0.4) * f(1.3), f(5.0) + f(-4.5)]
    assert got.dtype == np.float32 and got.tolist() == want
    assert sampling.sample_row(logits, request.row(), table)[0] == 0    # 1.31 beats 0.9
    assert not Sampling().adjusts and request.adjusts
    assert all(Sampling(**{name: value}).adjusts for name, value in (
        ("repetition_penalty", 1.1), ("presence_penalty", 0.1), ("frequency_penalty", -0.1),
        ("logit_bias", {1: 1.0})))


def test_a_batch_counts_its_tokens_and_skips_padding():
    rows = np.zeros(4, ROW)
    request = Sampling(temperature=0, frequency_penalty=2.0, seed=0)
    rows[0], rows[2] = request.row(adjustment=1), Sampling(temperature=0, seed=0).row()
    rows[3] = request.row(adjustment=0)
    logits = np.tile(np.array([1.0, 3.0, 2.0], np.float32), (4, 1))
    logits[3] = np.nan
    tables = np.zeros((2, 3), ADJUSTMENT)
    tokens = [sampling.sample(logits, rows, tables)[0].tolist() for _ in range(3)]
    # A penalty of 2 a mention: 3 wins, then 2 beats 3 - 2, then 1 ties with 3 - 2 and comes first.
    assert tokens == [[1, -1, 1, -1], [2, -1, 1, -1], [0, -1, 1, -1]]
    assert tables["count"].tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [np.nan, -np.nan, np.inf])
def test_broken_rows(broken, temperature):
    for place in (0, 5, 9):
        logits = np.arange(10, dtype=np.float32)
        logits[place] = broken
        assert draw(logits, temperature=temperature) == (-1, 0)
    assert draw(np.full(10, -np.inf), temperature=temperature) == (-1, 0)
    only = np.full(10, -np.inf)
    only[6] = -3
    assert draw(only, temperature=temperature) == (6, 0)


# ---- parameters --------------------------------------------------------------------------------

@pytest.mark.parametrize("name, values", {
    "temperature": [-0.1, 101, math.nan, math.inf, "1", None, True, 10**400, [1], 1j],
    "top_k": [-1, 2**31, 1.5, "3", None, True, math.nan],
    "top_p": [-0.1, 1.1, math.nan, "0.5", None, False],
    "min_p": [-0.1, 1.1, math.nan, "0.5", None],
    "repetition_penalty": [0, -1, 101, math.nan, math.inf, "1"],
    "presence_penalty": [-2.1, 2.1, math.nan, None],
    "frequency_penalty": [-2.1, 2.1, math.nan, {}],
    "seed": [2**64, -2**63 - 1, 1.0, "7", True, math.nan],
    "stop": ["text", [""], [1], None, [None], ["x"] * 17, ["x" * 1025], {"a": 1}],
    "logit_bias": [{-1: 1.0}, {100: 1.0}, {"5": 1.0}, {1: "x"}, {1: math.nan}, {1: 101}, {1: True},
                   {1.5: 1}, [1, 2], 7, None, [(1, 2, 3)], {True: 1.0}],
}.items())
def test_validation_names_the_field(name, values):
    for value in values:
        with pytest.raises(RequestError) as error:
            Sampling(**{name: value}).validate(n_vocab=100)
        assert error.value.param == name and error.value.status == 400, value
        assert "\n" not in str(error.value) and len(str(error.value)) < 120


def test_valid_edges():
    for parameters in (
            dict(), dict(temperature=0, top_p=0, min_p=1), dict(temperature=1e-12), dict(top_p=1),
            dict(temperature=100, top_k=2**31 - 1, seed=2**64 - 1), dict(seed=-2**63),
            dict(logit_bias={0: -100, 99: 100}, stop=["x"] * 16), dict(logit_bias=[(3, 1)]),
            dict(temperature=np.float32(0.7), top_k=np.int64(4)), dict(min_p=5e-324)):
        request = Sampling(**parameters)
        request.validate(n_vocab=100)
        table = request.adjustment(100, [5], [6])
        token, logprob = sampling.sample_row(np.arange(100, dtype=np.float32),
                                             request.seeded().row(), table)
        assert 0 <= token < 100 and math.isfinite(logprob)


def test_seed_is_drawn_once():
    seeds = {Sampling().seeded().seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**53 for seed in seeds)
    assert Sampling(seed=3).seeded().seed == 3


def test_layout_is_that_of_the_kernel():
    assert ROW.itemsize == 64 and ADJUSTMENT.itemsize == 8
    assert {name: offset for name, (_, offset) in ROW.fields.items()} == dict(
        seed=0, inverse_temperature=8, min_gap=16, position=24, choice=28, top_k=32, top_p=36,
        repetition=40, presence=44, frequency=48, adjustment=52, active=56)
