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
  the rows of a decoding sequence stay pending until a later step, which applies those that were
  kept (see kv.Batch.of). No row lies behind prompt + max_tokens, so drafts need no pages.
* Requests with penalties or a bias do not draft: there the counts of tokens would have to be taken
  back. A request's drafts wait until its last token is known, so a step behind drafts is launched
  when they were read.

What a proposer suggests, and how many tokens the Controller asks it for, may depend on timing and
on other requests. It decides how fast the tokens come, never which.
"""
import os
from dataclasses import replace
from itertools import takewhile

import numpy as np

import gguf_file
import model
from errors import require
from kv import FEED, GRAPH_SIZES, Batch

MAX_DRAFT = 8  # most drafts of a sequence in one step
# Token ids that the model's own head drafts, of those that BPE merged first: the most frequent. It
# reads so many rows of an output matrix that is larger than all else it reads.
FREQUENT = 1 << 15


class Proposer:
    """Where drafts come from: nowhere. One serves all requests of an engine, on its thread."""
    models = ()  # (Config, most rows with logits in a step) of models of its own

    def propose(self, wants):
        """{request: drafts} for {request: most drafts}: token ids that may follow its tokens.

        All of a request's tokens are known. Requests without a suggestion are left out.
        """
        return {}

    def allocate(self, n_pages, kv_format):
        """Make room for KV of its own, under the page numbers of the engine's."""

    def leave(self, step):
        """The next step is launched now: what this one left on the device is overwritten."""

    def forget(self, request):
        """The request has ended."""


def tokens_of(request, start, end=None):
    """Prompt and answer of a request from place `start` to place `end`."""
    count = len(request.prompt)
    answer = request.tokens[max(0, start - count):end if end is None else max(0, end - count)]
    return request.prompt[start:end] + answer


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
        ids += tokens_of(request, known)
        for at in range(max(known, 1), len(ids)):
            for size in self.SIZES:
                if size <= at:
                    places[tuple(ids[at - size:at])] = at
        return ids, places

    def forget(self, request):
        self.indexes.pop(request, None)


class DraftModel(Proposer):
    """A smaller model with the same tokens. It draws its drafts with the parameters and the noise
    that the engine will draw with, so that the two differ no more often than the models do."""

    def __init__(self, path, engine):
        gguf = gguf_file.GGUF(path)
        words = [file.value("tokenizer.ggml.tokens", list, []) for file in (gguf, engine.gguf)]
        gguf.require(words[0] == words[1], "a draft model must have the tokens of the model that "
                     "it drafts for; choose another one, or --draft ngram")
        self.engine, self.read = engine, {}  # request -> tokens whose KV is there
        self.cfg, self.weights = model.load(gguf, engine.ops)
        gguf.require(self.cfg.n_vocab >= engine.cfg.n_vocab, f"a draft model must have at least "
                     f"{engine.cfg.n_vocab} rows in its token table; choose another one")
        gguf.require(not self.cfg.n_state_layers, "a draft model cannot be a recurrent one; choose "
                     "another, or --draft ngram")
        self.tile_tokens = engine.ops.tile_tokens(self.cfg)
        self.models = (self.cfg, max(engine.max_rows, GRAPH_SIZES[-1])),

    def allocate(self, n_pages, kv_format):
        self.kv = self.engine.ops.pages(self.cfg, n_pages, kv_format)

    def propose(self, wants):
        """Reads what is new, at most a chunk in all: who has more to read waits for its drafts."""
        room, spans, drafts = self.engine.chunk(decoding=True), [], {}
        for request, most in wants.items():
            start = self.read.get(request, 0)
            new = tokens_of(request, start)
            if len(new) <= room:
                drafts[request] = []
            spans.append(self.span(request, start, new[:room], request in drafts))
            self.read[request] = start + len(new[:room])
            room -= len(new[:room])
        drawn, going = [], list(drafts)
        for i in range(max(wants.values())):
            drawn.append((going, self.draw(spans, going, i)))
            going = [r for r in going if i + 1 < wants[r]]
            spans = [self.span(r, self.read[r] + i, [FEED], True) for r in going]
            if not going:
                break
        return drafts_of(drawn, self.engine.cfg.n_vocab)

    def span(self, request, position, ids, wanted):
        long = len(request.prompt) + request.max_tokens > self.cfg.rope_long_from
        return (request.slot, position, ids, int(len(self.cfg.rope_sets) > 1 and long), int(wanted))

    def draw(self, spans, requests, place):
        forward = lambda batch: (
            model.forward(self.cfg, self.weights, batch, self.kv, self.engine.ops), None)
        batch = Batch.of([span for span in spans if span[2]], self.engine.page_table,
                         self.tile_tokens)
        return draw_last(self.engine, "draft", forward, batch, [(r, place) for r in requests])[0]

    def forget(self, request):
        self.read.pop(request, None)


class Mtp(Proposer):
    """The model's own head: from the last layer's result at a position and the token behind it, it
    drafts the token behind that, and goes on from there.

    It has KV of its own in the pages of the sequence, one layer more. What it has not seen, because
    the engine ran ahead without drafts, it does without. Its batches have the rows of the step that
    it follows, with nothing in those that it does not need: so its input stays where it is. Its
    logits are those of FREQUENT tokens.
    """

    def __init__(self, engine):
        self.engine, self.followed, self.weights = engine, None, engine.weights
        if engine.cfg.n_vocab > FREQUENT:
            head = engine.weights.mtp
            self.weights = replace(engine.weights,
                                   mtp=head._replace(output=head.output.first(FREQUENT)))

    def leave(self, step):
        if step is not self.followed and (active := self.pairs(step, ())):
            self.draw(self.hidden(step), active, ())

    def propose(self, wants):
        """First the pairs of the last step that are known by now, then draft after draft."""
        step = self.followed = self.engine.last_step
        active, drawn = self.pairs(step, wants) if step else {}, []
        hidden = self.hidden(step) if active else None
        for place in range(max(wants.values())):
            wanted = [request for request in active if wants.get(request, 0) > place]
            if not wanted:
                break
            tokens, hidden = self.draw(hidden, active, wanted, place)
            drawn.append((wanted, tokens))
            active = {r: (active[r][0] + len(active[r][2]) - 1, active[r][1] + len(active[r][2]),
                          [FEED]) for r in wanted}
        return drafts_of(drawn, self.engine.cfg.n_vocab)

    def pairs(self, step, wants):
        """{request: (first row, its position, the tokens behind its and the next rows')}, in the
        order of rows: of sequences that want drafts, and of prompts."""
        active, row = {}, 0
        for request, ids, position, _ in step.chosen:
            reads = position < len(request.prompt) and request.most_drafts and request.slot >= 0
            if reads or request in wants:
                known = tokens_of(request, position + 1, position + len(ids) + 1)
                active[request] = row, position, known
            row += len(ids)
        return {request: pairs for request, pairs in active.items() if pairs[2]}

    def hidden(self, step):
        engine = self.engine
        return engine.ops.rmsnorm_f32(step.h, engine.weights.output_norm, engine.cfg.rms_eps)

    def draw(self, hidden, active, wanted, place=0):
        """(see draw_last, a token at `place` of the draft of each of `wanted`; next `hidden`)."""
        engine, spans, end = self.engine, [], 0
        for request, (row, position, ids) in active.items():
            spans.append((-1, 0, [-2] * (row - end), 0, 0))
            spans.append((request.slot, position, ids, request.rope_set, int(request in wanted)))
            end = row + len(ids)
        spans.append((-1, 0, [-2] * (hidden.shape[0] - end), 0, 0))
        batch = Batch.of([span for span in spans if span[2]], engine.page_table,
                         engine.tile_tokens)
        forward = lambda batch: model.mtp(engine.cfg, self.weights, hidden, batch, engine.kv,
                                          engine.ops)
        # `hidden` of other sizes, after a step that read prompts, would make graphs without end.
        name = f"mtp {hidden.shape[0]}" if hidden.shape[0] in GRAPH_SIZES else None
        return draw_last(engine, name, forward, batch, [(r, place) for r in wanted])


def draw_last(engine, name, forward, batch, sampled):
    """(a function that waits for the tokens of Engine.draw, its last result), from the rows of
    `batch` that want logits. The tokens are on the device: the next batch can FEED on them.

    Small batches get logits in all rows: then a graph can be replayed.
    """
    rows, count = slice(None), len(batch.tokens)
    if name and sampled and engine.ops.captures and count <= GRAPH_SIZES[-1]:
        rows, batch.logit_rows = batch.logit_rows, np.arange(count, dtype=np.int32)
    tokens, *_, last, _ = engine.draw(name, forward, batch, sampled, rows)
    if not sampled:
        return list, last
    arrived = engine.ops.fetch([tokens])
    return lambda: arrived()[0][rows].tolist(), last


def drafts_of(drawn, n_vocab):
    """{request: drafts}, from the requests and the tokens of each round. A draft ends before the
    first token that is none: of broken logits, or a row that only pads the table."""
    drafts = {}
    for requests, tokens in drawn:
        for request, token in zip(requests, tokens()):
            drafts.setdefault(request, []).append(token)
    drafts = {request: list(takewhile(lambda token: 0 <= token < n_vocab, draft))
              for request, draft in drafts.items()}
    return {request: draft for request, draft in drafts.items() if draft}


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
    PAUSE = 8  # steps between two looks while no draft pays: one takes as long as a step of Python
    WARM_UP = 2  # first steps of a size that do not count: caches are cold

    def __init__(self, n_slots, fixed=None):
        """fixed: drafts of each sequence in each step, with nothing left to choose."""
        self.fixed, self.steps, self.none_pays = fixed, 0, False
        # [slot, place in the draft]: decayed counts; place 0: was there any draft? Row -1: all.
        self.outcomes = np.zeros((2, n_slots + 1, MAX_DRAFT + 1))
        self.tried, self.right = self.outcomes
        # [drafts or not, size]: averages, when they were measured last, and how often
        self.seconds = np.zeros((2, len(self.SIZES)))
        self.measured, self.count = np.zeros((2, 2, len(self.SIZES)))
        self.largest = 0  # most rows of a step that was measured

    def lengths(self, limits):
        """{request: drafts to ask for} of the decoding sequences, those with none left out.

        limits: {request: most drafts that it can have}, of all that decode in the next step.
        """
        if self.fixed is not None:
            return {r: n for r, most in limits.items() if (n := min(most, self.fixed)) > 0}
        if not any(limits.values()):
            return {}
        self.steps += 1
        self.outcomes *= self.AGE
        if self.none_pays and self.steps % self.PAUSE:
            return {}
        count, plain = len(limits), self.cost(False, len(limits))
        if not plain:  # not known yet
            return {}
        tried, right = self.outcomes[:, [*(request.slot for request in limits), -1]]  # -1: all
        common = (right[-1] + self.OPTIMISM) / (tried[-1] + 1)
        rates = (right[:-1] + 2 * common) / (tried[:-1] + 2)
        chances = rates.cumprod(axis=1)  # that a draft is there, that it is right up to place 1, ..
        allowed = np.arange(MAX_DRAFT) < np.array([*limits.values()])[:, None]
        gains = (chances[:, 1:] * allowed).ravel()
        order = (-gains).argsort()[:np.count_nonzero(gains)]  # best drafts first
        # No more than twice the rows that any step had: what lies beyond is not known.
        order = order[:max(0, 2 * self.largest - count)]
        seconds = np.maximum(plain, self.cost(True, count + np.arange(len(order) + 1)))
        seconds[0] = plain
        speeds = (count + np.append(0, gains[order]).cumsum()) / seconds
        chosen = order[:speeds.argmax()]  # none where that is as good
        self.none_pays = not chosen.size
        lengths = np.bincount(chosen // MAX_DRAFT, minlength=count).tolist()
        return {request: n for request, n in zip(limits, lengths) if n}

    def cost(self, drafts, rows):
        """Seconds of steps of so many rows: of the nearest size where theirs is not known, and 0
        where none is."""
        known, = (self.count[int(drafts)] > self.WARM_UP).nonzero()
        if not known.size:
            return 0 * rows
        age = self.steps - self.measured[int(drafts), known]
        seconds = self.seconds[int(drafts), known] * self.AGE ** age
        return np.interp(self.SIZES.searchsorted(rows), known, seconds)

    def time(self, rows, drafts, seconds):
        """A step of decoding sequences took so long, which was to have so many rows."""
        at = int(drafts), self.SIZES.searchsorted(rows)
        self.count[at] += 1
        if self.count[at] > self.WARM_UP:
            age, known = self.steps - self.measured[at], self.seconds[at]
            share = min(1, max(self.SMOOTHING, age * (1 - self.AGE)))
            if known:  # something else may have held the machine up
                seconds = min(seconds, 2 * known)
            self.seconds[at] = known + (share if known else 1) * (seconds - known)
            self.measured[at], self.largest = self.steps, max(self.largest, rows)

    def learn(self, request, drafted, right=0):
        """Of `drafted` tokens for a request that was to have some, the first `right` were right."""
        tried, won = min(drafted, right + 1) + 1, right + 1 if drafted else 0
        for row in (request.slot, -1):
            self.outcomes[:, row, :tried] *= self.WINDOW
            self.tried[row, :tried] += 1
            self.right[row, :won] += 1

    def forget(self, request):
        self.tried[request.slot] = self.right[request.slot] = 0


def check_name(name):
    """RequestError unless `name` may name a proposer."""
    is_path = isinstance(name, (str, os.PathLike)) and os.path.isfile(name)
    require(is_path or name in ("auto", "off", "ngram", "mtp"), f'--draft is "{name}", which is no '
            "file; choose auto, off, ngram, mtp or the GGUF file of a smaller model", param="draft")


def proposer(name, engine):
    """The Proposer that --draft names: "off", "ngram", "mtp" (the model's own head), the
    path of a smaller model, or "auto": mtp where the file has the head, else ngram.
    Raises ModelError."""
    engine.gguf.require(name != "mtp" or engine.cfg.n_mtp,
                        "the file has no draft head (MTP); use --draft ngram")
    if name == "mtp" or name == "auto" and engine.cfg.n_mtp:
        return Mtp(engine)
    if name in ("ngram", "auto"):
        return NGram()
    return Proposer() if name == "off" else DraftModel(name, engine)
