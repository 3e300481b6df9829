"""Speculation: several tokens per sweep of the weights, and not one of them different.

The contract. A request decodes as if it had no drafts: its tokens, logprobs, text, events and
finish reason are those of plain decoding, bit for bit, greedy or sampled. This needs no rejection
sampling and no approximation, because of what the engine promises anyway:

* A drafting sequence has n + 1 rows in a step: its last token at position p, then n drafts behind
  it, each at its own position. The logits of a row are a function of the tokens before it, so each
  row has the bits that plain decoding would give it, as long as the drafts before it are right.
* `sample` draws from every row with the request's own parameters and the noise of that row's
  position, which is what plain decoding would draw there.
* The engine accepts the drawn tokens one by one, as ever: stop strings, EOS, max_tokens and
  cancellation act in the middle of a run. It ends behind the first token that is not the draft of
  the next row: that token is still the right one, the rows behind it are not.
* KV is cut by length: rows that were not kept are overwritten. Recurrent state cannot be cut, so
  the rows of a decoding sequence stay pending until the next step, which applies those that were
  kept (see kv.Batch.of). No row lies behind prompt + max_tokens, so drafts need no pages.
* Requests with penalties or a bias do not draft: there the counts of tokens would have to be taken
  back. A request's drafts wait until its last token is known, so a step behind drafts is launched
  when they were read.

What a proposer suggests, and how many tokens the Controller asks it for, may depend on timing and
on other requests. It decides how fast the tokens come, never which.
"""
import numpy as np

MAX_DRAFT = 8  # most drafts of a sequence in one step


class Proposer:
    """Where drafts come from. One serves all requests of an engine, on its thread."""

    def propose(self, wants):
        """{request: drafts} for {request: most drafts}: token ids that may follow its tokens.

        All of a request's tokens are known. Requests without a suggestion are left out.
        """
        raise NotImplementedError

    def forget(self, request):
        """The request has ended."""


class NGram(Proposer):
    """Prompt lookup: where the last tokens stood before, what followed them may follow again."""
    SIZES = 4, 3, 2  # of the n-grams, longest first

    def __init__(self):
        self.indexes = {}  # request -> (its tokens, {n-gram: place of the token behind it})

    def propose(self, wants):
        drafts = {}
        for request, most in wants.items():
            ids, places = self.index(request)
            grams = (tuple(ids[-size:]) for size in self.SIZES)
            at = next((places[gram] for gram in grams if gram in places), None)
            if at is not None:  # a draft that reaches the end goes on with itself
                period = len(ids) - at
                drafts[request] = [ids[at + i % period] for i in range(most)]
        return drafts

    def index(self, request):
        """The latest place of each n-gram that has a token behind it."""
        ids, places = self.indexes.setdefault(request, ([], {}))
        known = len(ids)
        ids += request.prompt[known:] + request.tokens[max(0, known - len(request.prompt)):]
        for at in range(max(known, 1), len(ids)):
            for size in self.SIZES:
                if size <= at:
                    places[tuple(ids[at - size:at])] = at
        return ids, places

    def forget(self, request):
        self.indexes.pop(request, None)


class Controller:
    """Chooses how many drafts each sequence gets in the next step, for the most tokens a second.

    It knows two things by measurement: how often drafts prove right, by their place in the draft,
    of each sequence and of all together; and how long steps take, without drafts and with them
    (these wait for each other), by the rows that they have if all drafts come that were asked for.
    What it knows ages: chances drift back to OPTIMISM and times fall, by AGE a step, until what was
    given up is tried again. A trial that costs a share c of a step comes about every c / (1 - AGE)
    steps, so that trials of one kind cost about 1 - AGE in all, however dear each is.
    """
    AGE = 0.999
    WINDOW = 0.9  # an outcome weighs so much less with each that follows
    OPTIMISM = 0.5  # the chance of a draft where nothing is known
    SMOOTHING = 0.2  # share of a new time in the average, more where that is old
    SIZES = np.array([*range(1, 9), *(n << i for i in range(3, 16) for n in (2, 3))])  # in rows
    WARM_UP = 2  # first steps of a size that do not count: they load kernels and capture graphs

    def __init__(self, n_slots, fixed=None):
        """fixed: drafts of each sequence in each step, with nothing left to choose."""
        self.fixed, self.steps = fixed, 0
        # [slot, place in the draft]: decayed counts; place 0: was there any draft? Row -1: all.
        self.tried = np.zeros((n_slots + 1, MAX_DRAFT + 1))
        self.right = np.zeros((n_slots + 1, MAX_DRAFT + 1))
        # [drafts or not, size]: averages, when they were measured last, and how often
        self.seconds = np.zeros((2, len(self.SIZES)))
        self.measured = np.full((2, len(self.SIZES)), -np.inf)
        self.count = np.zeros((2, len(self.SIZES)), np.int64)

    def lengths(self, limits):
        """{request: drafts to ask for} of the decoding sequences, those with none left out.

        limits: {request: most drafts that it can have}, of all that decode in the next step.
        """
        if self.fixed is not None:
            return {r: min(most, self.fixed) for r, most in limits.items() if most > 0}
        self.steps += 1
        count, slots = len(limits), [r.slot for r in limits] + [-1]
        if not any(most > 0 for most in limits.values()) or not self.known(False).size:
            return {}
        self.tried[slots] *= self.AGE
        self.right[slots] *= self.AGE
        common = (self.right[-1] + self.OPTIMISM) / (self.tried[-1] + 1)
        rates = (self.right[slots[:-1]] + 2 * common) / (self.tried[slots[:-1]] + 2)
        chances = rates.cumprod(axis=1)  # that a draft is there, that it is right up to place 1, ..
        allowed = np.arange(MAX_DRAFT) < np.array(list(limits.values()))[:, None]
        gains = np.where(allowed, chances[:, 1:], 0).ravel()
        order = np.argsort(-gains, kind="stable")[:np.count_nonzero(gains)]  # best drafts first
        rows = count + 1 + np.arange(order.size)
        # No more than twice the rows that any step had: what lies beyond is not known.
        largest = max(self.known(False).max(), self.known(True).max(initial=0))
        order = order[rows <= 2 * self.SIZES[largest]]
        if not order.size:
            return {}
        plain = self.cost(False, count)
        rows, tokens = rows[:order.size], count + np.cumsum(gains[order])
        speeds = tokens / np.maximum(plain, self.cost(True, rows))
        best = speeds.argmax()
        if speeds[best] * plain <= count:
            return {}
        lengths = np.bincount(order[:best + 1] // MAX_DRAFT, minlength=count).tolist()
        return {request: n for request, n in zip(limits, lengths) if n}

    def known(self, drafts):
        """Indices of the sizes whose steps were measured, ascending."""
        return np.flatnonzero(self.measured[int(drafts)] > 0)

    def cost(self, drafts, rows):
        """Seconds of steps of so many rows; those of the nearest known where that is not known."""
        known = self.known(drafts)
        if not known.size:
            return 0.0
        age = self.steps - self.measured[int(drafts), known]
        return np.interp(np.searchsorted(self.SIZES, rows), known, self.seconds[int(drafts), known] * self.AGE ** age)

    def time(self, rows, drafts, seconds):
        """A step of decoding sequences took so long, which was to have so many rows."""
        at = int(drafts), np.searchsorted(self.SIZES, rows)
        self.count[at] += 1
        if self.count[at] > self.WARM_UP:
            age, known = self.steps - self.measured[at], self.seconds[at]
            share = min(1, max(self.SMOOTHING, age * (1 - self.AGE)))
            if known:  # something else may have held the machine up
                seconds = min(seconds, 2 * known)
            self.seconds[at] += share * (seconds - known)
            self.measured[at] = self.steps

    def learn(self, request, drafted, right=0):
        """Of `drafted` tokens for a request that was to have some, the first `right` were right."""
        tried, won = min(drafted, right + 1) + 1, right + 1 if drafted else 0
        for row in (request.slot, -1):
            self.tried[row, :tried] = self.tried[row, :tried] * self.WINDOW + 1
            self.right[row, :tried] *= self.WINDOW
            self.right[row, :won] += 1

    def forget(self, request):
        self.tried[request.slot] = self.right[request.slot] = 0


def proposer(name, engine):
    """The Proposer that --draft names: "off" (None), "ngram", "mtp" (the model's own head), the
    path of a smaller model, or "auto": mtp where the file has the head, else ngram.
    Raises ModelError."""
    if name == "off":
        return None
    return NGram()
