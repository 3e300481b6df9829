"""Sampling: the parameters of a request, and the oracle that says which token they draw.

The token is a pure function of one row of float32 logits, the parameters, the seed, the choice
index and the position. `sample` in kernels.cu computes the same function, to the last token.

1. Penalties, each step one rounded float32 operation. For tokens that occurred in prompt or output:
   l = l / repetition if l > 0 else l * repetition. For tokens that occurred in the output, count
   times: l = (l - presence) - (frequency * count). For every token: l = l + bias.
2. Temperature 0: the largest l. Here and below, equal logits rank by the lower token id first.
3. Otherwise gap_i = l_i - l_max and x_i = gap_i * (1 / temperature), both in float64, and three
   filters, each of which keeps a prefix of the ranking:
   top_k   the first k tokens;
   top_p   integer weights w_i = floor(exp(x_i) * 2^40), so that no order of summation exists; exp
           is float32 here. With Z the sum over what top_k kept, a token stays while the weights
           before it sum to less than ceil(P * Z / 2^32); P is top_p rounded to a multiple of
           2^-32, at least one;
   min_p   tokens with gap_i >= temperature * log(min_p).
4. The token has the largest x_i + G_i, rounded down to a multiple of 2^-38, with Gumbel noise
   G_i = -log(-log(u_i)), where u_i = (word + 0.5) / 2^32 and word is number i mod 4 of the four
   that Philox4x32-10 makes under key = seed, counter = (position, choice, i div 4, 0).

u is between 2^-33 and 1 - 2^-33, so G is between -3.14 and 22.88. The best token scores at least
-3.14: one with x < -26.02 never wins, and only x < -27.7 has weight 0. So both sides skip what lies
below -REACH = -28.

The logprob is that of the model's own distribution: raw logits, temperature 1. Each slice of SLICE
ids has its sum of weights relative to its own largest logit. Scaled to the largest of all and
rounded down to integers, they add up to the total, which is good to 1e-6. A row with a NaN, a +inf
or no finite logit gives token -1, and its request must fail.

exp and log are the polynomials below, because libraries differ in the last bit; NumPy never fuses
a * b + c, nor does the kernel.
"""

import math
import secrets
from dataclasses import dataclass, replace
from numbers import Integral, Real

import numpy as np

from errors import RequestError

REACH = 28.0            # x below -REACH: weight 0, and out of reach of the noise
COLDEST = 1e-9          # temperatures below this are 0
IN_PROMPT = 1 << 31     # flag beside the count in ADJUSTMENT

# One row to sample; the kernel reads the same 64 bytes. np.zeros(n, ROW) is padding.
ROW = np.dtype([
    ("seed", np.uint64),
    ("inverse_temperature", np.float64),    # 0 = greedy
    ("min_gap", np.float64),                # temperature * max(log(min_p), -REACH)
    ("position", np.uint32),                # of the drawn token in its sequence, prompt included
    ("choice", np.uint32),
    ("top_k", np.uint32),                   # 0 = off
    ("top_p", np.uint32),                   # in units of 2^-32, 0 = off
    ("repetition", np.float32),
    ("presence", np.float32),
    ("frequency", np.float32),
    ("adjustment", np.int32),               # row of the adjustments table, -1 = none
    ("active", np.int32),                   # 0 = padding: draws -1 and touches nothing
], align=True)

# What penalties and bias know of a token; a request that uses them holds a row of n_vocab of these.
ADJUSTMENT = np.dtype([("count", np.uint32), ("bias", np.float32)])


# ------------------------------------------------------------------------------------------------
# Parameters
# ------------------------------------------------------------------------------------------------

LIMITS = {              # kind, inclusive bounds
    "temperature": (Real, 0, 100), "top_p": (Real, 0, 1), "min_p": (Real, 0, 1),
    "repetition_penalty": (Real, 0.01, 100), "presence_penalty": (Real, -2, 2),
    "frequency_penalty": (Real, -2, 2),
    "top_k": (Integral, 0, 2**31 - 1), "seed": (Integral, -2**63, 2**64 - 1)}
LARGEST_BIAS, MOST_STOPS, LONGEST_STOP = 100, 16, 1024


@dataclass(frozen=True)
class Sampling:
    """What a request asks of the sampler; the defaults draw from the model's own distribution."""

    temperature: float = 1.0            # 0 = always the most probable token
    top_k: int = 0                      # 0 = off
    top_p: float = 1.0                  # 1 = off
    min_p: float = 0.0                  # 0 = off
    repetition_penalty: float = 1.0     # 1 = off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict | tuple = ()       # {token id: bias} or pairs
    seed: int | None = None             # None = drawn at submission, see `seeded`
    stop: tuple = ()                    # strings that end the answer

    def validate(self, n_vocab):
        """Raise RequestError, naming the field, unless every value is usable."""
        for name, limits in LIMITS.items():
            if name != "seed" or self.seed is not None:
                check_number(getattr(self, name), *limits, name)
        for token, bias in self.bias_pairs():
            check_number(token, Integral, 0, n_vocab - 1, "logit_bias", "token id")
            check_number(bias, Real, -LARGEST_BIAS, LARGEST_BIAS, "logit_bias")
        if not isinstance(self.stop, (tuple, list)) or len(self.stop) > MOST_STOPS:
            raise RequestError(f"stop must be a list of at most {MOST_STOPS} strings", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= LONGEST_STOP:
                raise RequestError(f"a stop string must have 1 to {LONGEST_STOP} characters",
                                   param="stop")

    def bias_pairs(self):
        """logit_bias as a list of (token id, bias); RequestError if it is no such thing."""
        try:
            return list(dict(self.logit_bias).items())
        except (TypeError, ValueError):
            raise RequestError("logit_bias must map token ids to numbers",
                               param="logit_bias") from None

    def seeded(self):
        """The same with a seed, of 53 bits so that every JSON reader can hand it back exactly."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(53))

    @property
    def adjusts(self):
        """True if penalties or bias are on: such a request needs a row of the adjustments table."""
        return (self.repetition_penalty != 1 or self.presence_penalty != 0
                or self.frequency_penalty != 0 or bool(self.bias_pairs()))

    def row(self, position=0, choice=0, adjustment=-1):
        """ROW record of this (validated, seeded) request."""
        cold = self.temperature < COLDEST
        floor = float(log(np.float64(self.min_p))) if self.min_p > 0 else -REACH
        top_p = min(max(round(self.top_p * 2**32), 1), 2**32 - 1) if self.top_p < 1 else 0
        return np.array((  # in the order of ROW
            self.seed % 2**64, 0.0 if cold else 1.0 / float(self.temperature),
            float(self.temperature) * max(floor, -REACH), position, choice, self.top_k, top_p,
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty,
            adjustment, True), ROW)[()]

    def adjustment(self, n_vocab, prompt, output=()):
        """ADJUSTMENT [n_vocab] after these prompt and output token ids."""
        table = np.zeros(n_vocab, ADJUSTMENT)
        table["count"] = np.bincount(np.asarray(output, np.int64), minlength=n_vocab)
        table["count"][np.asarray(prompt, np.int64)] |= np.uint32(IN_PROMPT)
        for token, bias in self.bias_pairs():
            table["bias"][token] = bias
        return table


def check_number(value, kind, low, high, param, what=None):
    # NaN fails the comparison; True is an Integral to Python but not to a caller.
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        noun = "a number" if kind is Real else "an integer"
        raise RequestError(f"{what or param} must be {noun} from {low} to {high}", param=param)


# ------------------------------------------------------------------------------------------------
# Arithmetic that the kernel repeats bit by bit
# ------------------------------------------------------------------------------------------------

LOG2_E = 1.4426950408889634
LN2_HIGH = 6.93147180369123816490e-01       # ln 2 to 33 bits: its product with an exponent is exact
LN2_LOW = 1.90821492927058770002e-10        # ln 2 - LN2_HIGH
SQRT_HALF = 0.7071067811865476
WEIGHT_BITS = 40
SLICE = 512             # token ids that share a maximum, see `logprob`


def weight(x):
    """floor(exp(x) * 2^40) as int64 by float32 arithmetic, within 4e-7 of the result; 0 below
    -REACH and for NaN. x [n], at most 0, is rounded to float32."""
    f = np.float32
    x = np.where(x >= -REACH, x, -REACH).astype(f)      # weight(-REACH) is 0 too
    k = np.rint(x * f(LOG2_E))
    r = (x - k * f(0.693145751953125)) - k * f(1.42860677e-6)       # k ln(2), the first exact
    p = np.full_like(r, 1 / math.factorial(7))
    for n in range(6, -1, -1):
        p = p * r + f(1 / math.factorial(n))
    return (p * (k.astype(np.int32) + (127 + WEIGHT_BITS) << 23).view(f)).astype(np.int64)


def log(v):
    """Natural logarithm of positive, normal float64 values, to about 5e-16 of the result."""
    m, e = np.frexp(v)
    small = m < SQRT_HALF
    m, e = np.where(small, m * 2, m), e - small         # m in [sqrt(1/2), sqrt(2))
    s = (m - 1) / (m + 1)
    z = s * s                                           # <= 0.0295: 12 terms of atanh leave 1e-18
    p = np.full_like(z, 1 / 23)
    for n in range(21, 0, -2):
        p = p * z + 1 / n
    return e * LN2_HIGH + (2 * s * p + e * LN2_LOW)


def philox(seed, position, choice, block):
    """Philox4x32-10 words, uint32 [n, 4], for counters (position, choice, block [n], 0)."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c = [np.uint64(position), np.uint64(choice), block.astype(np.uint64), np.uint64(0)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        even, odd = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(odd >> half) ^ c[1] ^ np.uint64(key[0]), odd & low,
             (even >> half) ^ c[3] ^ np.uint64(key[1]), even & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, axis=-1).astype(np.uint32)


def uniform(row, ids):
    """u in (0, 1), float64 exactly, for these ascending token ids [n]."""
    block = ids // 4
    first = np.diff(block, prepend=-1) > 0          # one Philox call serves up to four tokens
    words = philox(int(row["seed"]), int(row["position"]), int(row["choice"]), block[first])
    return (words[np.cumsum(first) - 1, ids % 4] + 0.5) * 2.0**-32


def rank_keys(logits, ids):
    """uint64 keys: the larger, the earlier in the ranking. Low 32 bits = ~id."""
    bits = (logits + np.float32(0)).view(np.uint32)     # + 0 turns -0.0 into 0.0
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return ordered.astype(np.uint64) << np.uint64(32) | (0xFFFFFFFF - ids.astype(np.uint64))


# ------------------------------------------------------------------------------------------------
# The oracle
# ------------------------------------------------------------------------------------------------

def sample(logits, rows, adjustments=None):
    """Draw one token for each row.

    logits float32 [n, n_vocab], rows ROW [n], adjustments ADJUSTMENT [slots, n_vocab].
    Returns tokens int32 [n] (-1: padding, or a broken row) and logprobs float32 [n].
    Counts each drawn token in its adjustments row, so a slot may occur only once in a call.
    """
    tokens = np.full(len(rows), -1, np.int32)
    logprobs = np.zeros(len(rows), np.float32)
    for i, row in enumerate(rows):
        if row["active"]:
            slot = int(row["adjustment"])
            adjustment = adjustments[slot] if slot >= 0 else None
            tokens[i], logprobs[i] = sample_row(logits[i], row, adjustment)
            if slot >= 0 and tokens[i] >= 0:
                adjustment["count"][tokens[i]] += 1
    return tokens, logprobs


def sample_row(logits, row, adjustment=None):
    """(token, logprob) of logits float32 [n_vocab] under a ROW record; (-1, 0.0) if broken."""
    values = logits if adjustment is None else adjusted(logits, row, adjustment)
    token = int(np.argmax(values))          # the lowest id among equals, or the first NaN
    if not np.isfinite(values[token]):
        return -1, np.float32(0)
    if row["inverse_temperature"] > 0:
        token = draw(values, values[token], row)
    return token, logprob(logits, token)


def adjusted(logits, row, adjustment):
    """Logits after penalties and bias, float32 [n_vocab]."""
    count, bias = adjustment["count"], adjustment["bias"]
    said = count & np.uint32(IN_PROMPT - 1)
    with np.errstate(over="ignore", invalid="ignore"):
        repeated = np.where(logits > 0, logits / row["repetition"], logits * row["repetition"])
        values = np.where(count > 0, repeated, logits)
        frequent = (values - row["presence"]) - row["frequency"] * said.astype(np.float32)
        return np.where(said > 0, frequent, values) + bias


def draw(values, top, row):
    """Token id: the filters, then the argmax of x + noise. `top` is the largest of `values`."""
    gap = values.astype(np.float64) - np.float64(top)
    x = gap * row["inverse_temperature"]
    ids = np.flatnonzero(x >= -REACH)
    if row["top_k"] or row["top_p"]:
        ids = ids[prefix(rank_keys(values[ids], ids), x[ids], int(row["top_k"]), int(row["top_p"]))]
    ids = ids[gap[ids] >= row["min_gap"]]
    u = uniform(row, ids)
    # The library's log is right to 1e-12 here: whatever it puts 1e-6 behind its best cannot win.
    rough = x[ids] - np.log(-np.log(u))
    close = rough >= rough.max() - 1e-6
    ids, u = ids[close], u[close]
    return int(ids[np.argmax(np.floor((x[ids] - log(-log(u)) + 32) * 2.0**38))])


def prefix(keys, x, top_k, top_p):
    """Indices, ascending, of what top_k and then top_p keep of tokens with these keys and x [n]."""
    floor = np.uint64(0)
    if 0 < top_k < len(keys):
        floor = np.partition(keys, -top_k)[-top_k]
    if top_p:
        order = np.flatnonzero(keys >= floor)
        order = order[np.argsort(keys[order])[::-1]]
        w = weight(x[order])
        total = np.cumsum(w)
        limit = -(-top_p * int(total[-1]) >> 32)        # ceil(P * Z / 2^32)
        floor = keys[order[np.count_nonzero(total - w < limit) - 1]]
    return np.flatnonzero(keys >= floor)


def logprob(logits, token):
    """log softmax(logits)[token] as float32; logits float32 [n_vocab]."""
    slices = np.full((-(-len(logits) // SLICE), SLICE), -np.inf, np.float32)
    slices.reshape(-1)[:len(logits)] = logits
    tops = slices.max(axis=1)
    with np.errstate(invalid="ignore"):                 # -inf less -inf
        sums = weight(slices - tops[:, None]).sum(axis=1)
    total = (sums * weight(tops - tops.max()).astype(np.float64) * 2.0**-WEIGHT_BITS).astype(int)
    return np.float32((np.float64(logits[token]) - tops.max())
                      - log(np.float64(total.sum()) * 2.0**-WEIGHT_BITS))
