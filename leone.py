#!/usr/bin/env python3
"""Leone: GGUF models on one GPU, the same bits whatever the load.

    leone.py       this file: the engine         cli.py       the command line
    model.py       GGUF file -> Config + weights; one forward pass for every family
    tokenizer.py   text <-> token ids            chat.py      chat templates
    reference.py   NumPy twin of every kernel    device.py    CUDA driver, memory, launches
    kernels.cu     every kernel                  kv.py        pages, known prefixes, batches
    gguf_file.py   the file, which may be hostile
    sampling.py    what a sampled token is       sessions.py  conversations in memory and on disk
    spec.py        drafts of tokens to come      receipts.py  signed receipts
    tools.py       doctor, bench, diff, ...      server.py    HTTP, sessions, and the page

An Engine owns one model and one device. Requests are submitted to it, and every call of step()
runs one forward pass over rows of many requests: all that are decoding, then chunks of prompts
that are being read.
"""
import sys

if __name__ == "__main__":  # before the other imports, so that Ctrl-C stops those cleanly, too
    import cli
    sys.exit(cli.main())

import contextlib
import operator
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np

import chat
import gguf_file
import model
import receipts
import spec
from errors import LeoneError, ModelError, DeviceError, Overloaded, RequestError, require
from kv import FEED, PAGE, Batch, PagePool, PrefixCache, Snapshot, SnapshotCache, common_prefix
from sampling import ROW, Sampling, check_number
from sessions import Sessions
from tokenizer import Tokenizer

VERSION = "0.1.0"
PENDING = spec.MAX_DRAFT + 1  # most tokens of a sequence outside of its recurrent state
LOGIT_ROWS = 64  # rows of logits computed at a time when all are wanted
COUNTERS = ("rows", "steps_of_16_rows", "sweeps", "prompt_tokens", "cached_tokens",
            "generated_tokens", "drafted_tokens", "accepted_tokens")  # of Engine.stats
SNAPSHOT_TOKENS = 8192  # of a long prompt, after which the recurrent state is remembered


@dataclass(slots=True)
class Event:
    """One generated token: id, the text that became certain with it, log probability."""
    token: int
    text: str
    logprob: float
    drafted: bool = field(default=False, compare=False)  # the token was a draft that proved right


@dataclass(eq=False, slots=True)
class Request:
    """One sequence from submission to its last token. Read `tokens`, `text`, `finish_reason`."""
    prompt: list
    sampling: Sampling
    max_tokens: int
    stream: object  # tokenizer.Stream
    ignore_eos: bool = False
    session: str | None = None  # name of the conversation that it continues
    choice: int = 0  # which of several answers to one prompt
    salt: str = ""  # prompts share known prefixes only with those of the same salt
    top_logprobs: int = 0  # how many of the most likely tokens to report at each position
    most_drafts: int = 0  # of one step
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    top: list = field(default_factory=list)  # per token [(id, log probability)], best first
    text: str = ""
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    error: LeoneError | None = None
    cancelled: bool = False
    events: deque = field(default_factory=deque)
    cached_tokens: int = 0  # prompt tokens whose KV was there already
    # where it stands
    slot: int = -1
    pages: list | None = None  # None until its known prefix was looked up
    rope_set: int = 0
    state: object = None  # kv.Snapshot to begin from, recurrent models only
    marks: list = field(default_factory=list)  # prompt lengths at which to remember the state
    committed: int = 0  # tokens that are in the recurrent state; what is behind them is pending
    read: int = 0  # prompt tokens whose forward pass was launched
    sampled: int = 0  # tokens whose sampling was launched
    held: str = ""  # text that may be the beginning of a stop string
    last_step: int = -1  # number of the last step with rows of it
    drafted: int = 0  # tokens that were drafted for it
    accepted: int = 0  # and those of them that proved right
    submitted: float = 0.0  # times are those of time.perf_counter()
    started: float = 0.0
    first_token: float = 0.0  # time of the first token, 0.0 before
    finished: float = 0.0

    def cancel(self):
        """Stop at the next step; what was generated stays. Any thread may call it."""
        self.cancelled = True

    @property
    def root(self):
        """What tells apart KV of the same tokens: see kv.PrefixCache."""
        return f"{self.rope_set} {self.salt}"


@dataclass
class Step:
    """A launched step, whose tokens are still to be read."""
    chosen: list  # see Engine.choose_rows
    sampled: list  # see Engine.draw
    batch: Batch  # as it was run, padding included
    h: object  # the residual stream of its rows, until the next step is launched
    drafts: dict  # request -> the drafts behind its token
    result: object  # waits and gives (tokens, log probabilities) of the rows that want them
    logits: dict  # row -> its logits, where a request asked for top_logprobs
    wants: dict  # request -> drafts asked for; if any, the next step waits for this one's tokens
    rows: int  # if all of them came; 0 where a prompt was read or a graph made, too
    began: float


class Engine:
    """A model on a device, and the requests that it is working on."""

    def __init__(self, path, backend="auto", kv="f16", prefill_chunk=2048, max_rows=64,
                 context=None, queue=1024, queue_tokens=None, sessions=None, session_store=None,
                 state_cache=2 << 30, draft="auto", draft_length=None, progress=None):
        """Load the model at `path`.

        backend: "auto" (CUDA where there is a card), "cuda", "cpu". kv: format of the KV cache,
        "f32", "f16" or "q8". prefill_chunk: prompt tokens of one step, of which a step in which
        others decode has a quarter. max_rows: sequences that decode in one step. context: tokens of
        KV cache in all (default: what the model and the free memory allow). queue, queue_tokens:
        requests, and tokens of them, that may wait.
        sessions: sequences that hold memory at once (default max_rows, or fewer where recurrent
        states would take more than a quarter of the memory). session_store: folder in
        which idle sessions survive. state_cache: bytes of host memory for the recurrent states that
        later prompts may begin from. draft: where drafts come from, see spec.proposer.
        draft_length: drafts of a sequence in each step (default: as many as pay). progress: called
        with (done bytes, all bytes) while weights load.
        Raises ModelError, DeviceError.
        """
        require(kv in ("f32", "f16", "q8"), f'kv is "{kv}"; choose f32, f16 or q8', param="kv")
        self.max_sessions = max_rows if sessions is None else sessions
        limits = {"prefill_chunk": (prefill_chunk, 8192), "max_rows": (max_rows, 4096),
                  "sessions": (self.max_sessions, 65536), "context": (context, 1 << 31),
                  "queue": (queue, 1 << 31), "queue_tokens": (queue_tokens, 1 << 62),
                  "draft_length": (draft_length, spec.MAX_DRAFT)}
        for name, (value, most) in limits.items():
            if value is not None:
                check_number(value, int, 1, most, name)
        check_number(state_cache, int, 0, 1 << 62, "state_cache")
        spec.check_name(draft)  # before the model is loaded, which takes a while
        self.gguf = gguf_file.GGUF(path)
        self.model_hash = receipts.ModelHash(self.gguf.paths)
        self.tokenizer = Tokenizer(self.gguf.metadata)
        self.sessions = Sessions(self, session_store)  # another may have the store: say so at once
        self.ops = None
        try:
            self.ops = open_backend(backend)
            self.cfg, self.weights = model.load(self.gguf, self.ops, progress)
            self.prefill_chunk, self.max_rows = prefill_chunk, max_rows
            self.proposer = spec.proposer(draft, self)
            if sessions is None and self.cfg.n_state_layers:  # states leave most memory to KV
                room = self.ops.free_memory() // 4 // self.cfg.state_bytes(PENDING)
                self.max_sessions = max(1, min(max_rows, room - 1))
            self.queue_limit, self.queue_tokens = queue, queue_tokens
            n_pages, longest = self.plan_pages(kv, context)
            self.proposer.allocate(n_pages, kv)
            self.kv = self.ops.pages(self.cfg, n_pages, kv, self.max_sessions + 1, PENDING)
            self.controller = spec.Controller(self.max_sessions + 1,
                                              0 if draft == "off" else draft_length)
            self.pool = PagePool(n_pages)
            self.prefixes = (SnapshotCache(self.pool, state_cache) if self.cfg.n_state_layers
                             else PrefixCache(self.pool))
        except BaseException:
            self.sessions.unlock()
            if self.ops:
                self.ops.close()
            raise
        if session_store:
            self.model_hash.begin()  # the first file to be written or read needs it
        self.page_table = np.zeros((self.max_sessions + 1, longest), np.int32)
        self.draws = np.zeros(self.max_sessions + 1, ROW)  # of each slot, but for the position
        self.free_slots = list(range(self.max_sessions, -1, -1))
        self.waiting, self.active, self.in_flight = deque(), [], deque()
        self.lock = threading.Lock()  # of the queue: requests come from any thread
        self.on_event = lambda request: None  # called when a request has events or has ended
        self.steps, self.counts, self.closed = 0, defaultdict(int), False
        self.last_step = None
        self.delivered = 0.0  # when the tokens of the last step were there; 0 after a pause
        self.seconds_held = 0.0  # moving average of how long a request holds its pages
        self.tile_tokens = self.ops.tile_tokens(self.cfg)

    def plan_pages(self, kv, context):
        """How many pages to hold, and the most that one sequence may have."""
        longest = -(-self.cfg.n_ctx // PAGE)
        if context is not None:
            return -(-context // PAGE), min(longest, -(-context // PAGE))
        models = [(self.cfg, self.max_rows * PENDING), *self.proposer.models]
        room = int(self.ops.free_memory() * 0.9)
        room -= (self.max_sessions + 1) * self.cfg.state_bytes(PENDING)
        if self.ops.captures:
            room -= sum(cfg.scratch_bytes(self.prefill_chunk + self.max_rows, logits)
                        for cfg, logits in models)
        room //= PAGE * sum(cfg.kv_bytes_per_token(kv) for cfg, _ in models)
        if room < 1:
            raise DeviceError("no memory is left for the KV cache; use a smaller model, fewer "
                              "--sessions or --kv q8")
        n_pages = min(room, longest * self.max_sessions)
        return n_pages, min(longest, n_pages)

    @property
    def longest(self):
        """Most tokens of a sequence: what the model was made for, or what the KV cache holds."""
        return min(self.page_table.shape[1] * PAGE, self.cfg.n_ctx)

    def bytes_per_step(self, rows):
        """Bytes of weights that a step reads, in the format in which the backend keeps them.

        Of experts as many as `rows` tokens use that choose them at random.
        """
        return round(sum((1 - (1 - share) ** rows) * self.ops.stored_bytes(tensor)
                         for tensor, share in self.weights.reads if share))

    def close(self):
        """Put idle sessions into the store and give the memory back. It is the last call."""
        if not self.closed:
            self.closed = True
            try:
                self.drain()
                self.sessions.close()
            finally:
                self.sessions.unlock()
                self.ops.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- text --------------------------------------------------------------------------------

    def tokenize(self, text, special=False):
        """Token ids of `text`, with BOS where the model wants it.

        special: control tokens in the text are read as such.
        """
        return self.tokenizer.encode(text, special=special, bos=self.tokenizer.add_bos)

    def detokenize(self, ids):
        return self.tokenizer.decode(ids)

    def chat_tokens(self, messages, /, known=(), **kwargs):
        """Token ids of a conversation in the model's own template. User text stays plain text.

        known: {text: ids} of earlier answers. Where a message is such a text, it becomes the ids
        that were sampled, which need not be those that the tokenizer makes of it.
        kwargs: see chat.render. Raises ModelError, RequestError.
        """
        template = self.gguf.metadata.get("tokenizer.chat_template")
        if template is None:
            raise ModelError("this model has no chat template; use a plain prompt instead")
        tok = self.tokenizer
        parts = chat.render(template, messages,
                            bos_token=tok.text_of(tok.bos_id),
                            eos_token=tok.text_of(tok.eos_id), **kwargs)
        return tok.encode_parts(parts, known=dict(known))

    # ---- requests ----------------------------------------------------------------------------

    def submit(self, prompt, sampling=Sampling(), max_tokens=None, ignore_eos=False, session=None,
               choice=0, salt="", top_logprobs=0, shown=frozenset(), speculation=None):
        """Queue a prompt (text or ids); returns its Request. Any thread may call it.

        max_tokens: default what the context holds. session: name of a conversation whose KV stays.
        choice, salt, top_logprobs: see Request. shown: ids of control tokens that the text of the
        answer shows. speculation: most drafts of a step, False for none; they never change the
        answer. Raises RequestError, and Overloaded where the queue is full.
        """
        require(isinstance(sampling, Sampling), "sampling must be a leone.Sampling",
                param="sampling")
        sampling.validate(self.cfg.n_vocab)
        ids = self.checked_ids(self.tokenize(prompt) if isinstance(prompt, str) else prompt)
        if max_tokens is None:
            max_tokens = max(1, self.longest - len(ids))
        check_number(max_tokens, int, 1, 1 << 31, "max_tokens")
        length = len(ids) + max_tokens
        require(length <= self.longest,
                f"{len(ids)} prompt tokens + {max_tokens} new ones exceed the context of "
                f"{self.longest}; shorten the prompt or ask for fewer tokens",
                code="context_length_exceeded")
        if speculation is None or isinstance(speculation, bool):
            speculation = 0 if speculation is False else spec.MAX_DRAFT
        check_number(speculation, int, 0, spec.MAX_DRAFT, "speculation",
                     "speculation, unless it is true or false,")
        check_number(top_logprobs, int, 0, self.cfg.n_vocab, "top_logprobs")
        check_number(choice, int, 0, 2**32 - 1, "choice")
        request = Request(ids, sampling.seeded(), max_tokens,
                          self.tokenizer.stream(special=shown, after=ids[-1]), ignore_eos,
                          session, choice, salt, top_logprobs, rope_set=self.rope_set(length),
                          most_drafts=0 if sampling.adjusts else speculation,
                          marks=self.marks_in(ids), submitted=time.perf_counter())
        with self.lock:
            room = self.queue_limit + max(0, self.max_sessions - len(self.active))
            tokens = sum(len(r.prompt) + r.max_tokens for r in self.waiting)
            if len(self.waiting) >= room or self.queue_tokens and (
                    self.waiting and tokens + length > self.queue_tokens):
                raise self.overloaded(self.pages_for(ids, max_tokens))
            if session is not None:
                self.sessions.claim(session, request)
            self.waiting.append(request)
        return request

    def marks_in(self, ids):
        """Prompt lengths at which a recurrent state is worth remembering: every SNAPSHOT_TOKENS;
        where messages begin with the same control token as the prompt, the ends of the system
        prompt and of the conversation before the answer's header; else all but the last token."""
        if not self.cfg.n_state_layers:
            return []
        marks = set(range(SNAPSHOT_TOKENS, len(ids), SNAPSHOT_TOKENS))
        special = self.tokenizer.is_special(ids[0])
        starts = [i for i, id in enumerate(ids) if special and i and id == ids[0]]
        marks.update(starts[:1] + starts[-1:] or [len(ids) - 1])
        return sorted(marks - {0})

    def overloaded(self, pages):
        """The error for a request of so many pages that finds the queue full."""
        available = self.pool.free_count + self.prefixes.unused
        seconds = self.seconds_held * (len(self.waiting) + 1) / max(1, len(self.active))
        return Overloaded(
            f"the queue is full: {len(self.waiting)} requests wait, {available} pages of KV cache "
            f"are free, this request needs {pages}; try again later", pages, available,
            round(1000 * min(max(seconds, 0.1), 60)),
            code="kv_capacity" if pages > available else "queue_full")

    def generate(self, prompt, sampling=Sampling(), max_tokens=None, ignore_eos=False):
        """Yield an Event per token of the answer to `prompt` (text or ids), as they come."""
        request = self.submit(prompt, sampling, max_tokens, ignore_eos)
        try:
            while request.finish_reason is None or request.events:
                while request.events:
                    yield request.events.popleft()
                if request.finish_reason is None:
                    self.step()
            if request.error:
                raise request.error
        finally:
            request.cancel()

    def logits(self, ids):
        """Teacher-forced logits, float32 [len(ids), n_vocab]: row i says what follows ids[:i + 1].
        """
        ids = self.checked_ids(ids)
        with self.lone_sequence(len(ids)) as slot:
            return np.concatenate([self.ops.download(
                self.forward(self.ops.upload_batch(batch))[0]) for batch in self.chunks(slot, ids)])

    @contextlib.contextmanager
    def lone_sequence(self, length):
        """A slot with pages for `length` tokens, between two steps. Raises RequestError."""
        self.drain()
        count, longest = -(-length // PAGE), self.page_table.shape[1]
        if count > longest or not self.make_room(count):
            free = min(longest, self.pool.free_count + self.prefixes.unused) * PAGE
            raise RequestError(f"{length} tokens do not fit: a sequence can have {free} now; "
                               "shorten the text", code="context_length_exceeded")
        pages, slot = self.pool.take(count), self.free_slots.pop()
        self.last_step = None  # what it left on the device is overwritten now
        self.page_table[slot, :count] = pages
        try:
            yield slot
        finally:
            self.pool.give(pages)
            self.free_slots.append(slot)

    def chunks(self, slot, ids):
        """Batches that read all `ids` and want logits of every row."""
        chunk, rope_set = min(self.prefill_chunk, LOGIT_ROWS), self.rope_set(len(ids))
        for at in range(0, len(ids), chunk):
            part = ids[at:at + chunk]
            yield Batch.of([(slot, at, part, rope_set, len(part))], self.page_table,
                           self.tile_tokens)

    def forward(self, batch):
        """(logits of the rows that want them, the residual stream of all rows)."""
        h = model.trunk(self.cfg, self.weights, batch, self.kv, self.ops)
        return model.output(self.cfg, self.weights, h, batch, self.ops), h

    def checked_ids(self, ids):
        """`ids` as a list of integers. Raises RequestError if they are no prompt."""
        require(not self.closed, "the engine is closed; open another one")
        try:
            ids = [] if isinstance(ids, (str, bytes)) else [operator.index(i) for i in ids]
        except TypeError:
            raise RequestError("the prompt must be text or token ids", param="prompt") from None
        require(ids, "the prompt is empty; give at least one token", param="prompt")
        require(min(ids) >= 0 and max(ids) < self.cfg.n_vocab,
                f"token ids must be 0 to {self.cfg.n_vocab - 1}", param="prompt")
        return ids

    def rope_set(self, length):
        """Which RoPE factors a sequence of `length` tokens uses, decided once at admission."""
        return int(len(self.cfg.rope_sets) > 1 and length > self.cfg.rope_long_from)

    # ---- memory of a sequence ----------------------------------------------------------------

    def pages_for(self, ids, max_tokens):
        return -(-(len(ids) + max_tokens) // PAGE)

    def make_room(self, count):
        """True once `count` pages are free. Known prefixes go first, then idle sessions."""
        if count > self.pool.n_pages - len({page for r in self.active for page in r.pages}):
            return False
        while not self.prefixes.make_room(count):
            if not self.sessions.park():
                return False
        return True

    def reserve(self, request):
        """Give a request its pages and slot, known ones for what they hold of its prompt.

        False if it has to wait. Raises RequestError for a session that cannot be restored.
        """
        if request.pages is None and not self.find_prefix(request):
            return False
        while len(self.active) + self.sessions.resident >= self.max_sessions:
            if not self.sessions.park():
                return False
        missing = self.pages_for(request.prompt, request.max_tokens) - len(request.pages)
        at, inside = divmod(request.cached_tokens, PAGE)
        shared = bool(inside) and self.pool.holders[request.pages[at]] > 1
        if shared and not self.make_room(missing + 1):  # no room for a copy: compute it again
            kept = 0 if request.state else at  # a recurrent state is good for one length only
            self.pool.give(request.pages[kept:])
            del request.pages[kept:]
            request.cached_tokens = request.read = kept * PAGE
            missing, shared, request.state = missing + at + 1 - kept, False, None
        if not self.make_room(missing + shared):
            return False
        request.pages += self.pool.take(missing)
        if shared:  # the next token would be written into a page that others read
            [copy] = self.pool.take(1)
            self.ops.copy_page(self.kv, request.pages[at], copy)
            self.pool.give([request.pages[at]])
            request.pages[at] = copy
        request.slot = self.free_slots.pop()
        self.page_table[request.slot, :len(request.pages)] = request.pages
        request.committed = request.cached_tokens
        if request.state:
            self.ops.load_state(self.kv, request.slot, request.state.data)
            request.committed, request.state = request.state.committed, None
        return True

    def find_prefix(self, request):
        """Take over what is known of the prompt; at least its last token is always computed."""
        session = request.session and self.sessions.open(request.session)
        if request.session and session is None:
            return False
        before_last = request.prompt[:-1]
        pages, cached, state = self.prefixes.find(before_last, request.root)
        if session:
            tokens, known, known_state = session.take()
            same = common_prefix(tokens, before_last) if session.root == request.root else 0
            if self.cfg.n_state_layers and (known_state is None or same < len(tokens)):
                same = 0  # the session went another way: its state is past the fork
            if same > cached:
                pages, known, cached, state = known, pages, same, known_state
            keep = -(-cached // PAGE)
            self.pool.give(known + pages[keep:])
            pages = pages[:keep]
        request.pages, request.cached_tokens, request.read = pages, cached, cached
        request.state = state
        return True

    def remember(self, request, ids):
        """Let later requests begin with `ids`, which this one has computed. Returns the snapshot of
        its recurrent state, or None for a model that has none or without memory for it."""
        state = None
        if self.cfg.n_state_layers:
            try:
                state = Snapshot(request.committed, self.ops.save_state(self.kv, request.slot))
            except DeviceError:
                return None
        self.prefixes.add(ids, request.pages[:-(-len(ids) // PAGE)], request.root, state)
        return state

    def release(self, request):
        """Take slot and pages back from an ended request. What it computed stays known."""
        computed = request.read + max(0, len(request.tokens) - 1)  # the last token was never fed
        ids = [] if request.error else (request.prompt + request.tokens)[:computed]
        pages = request.pages or []
        state = request.state  # of one that was never admitted
        if ids and request.slot >= 0:
            state = self.remember(request, ids)
            if self.cfg.n_state_layers and state is None:
                ids = []  # without its state the KV is of no use
        if request.session is not None:
            kept = -(-len(ids) // PAGE)
            self.sessions.keep(request, ids, pages[:kept], state)
            pages = pages[kept:]
        self.pool.give(pages)
        if request.slot >= 0:
            self.free_slots.append(request.slot)
            self.proposer.forget(request)
            self.controller.forget(request)
            held = time.perf_counter() - request.started
            self.seconds_held += (held - self.seconds_held) * 0.1
            request.slot = -1

    # ---- the scheduler -----------------------------------------------------------------------

    def step(self):
        """One batch step: admit, choose rows, run them, deliver. False when nothing is left to do.

        A backend that runs beside Python is kept one step ahead: its next step is launched before
        the tokens of the last are read. Not so behind drafts, nor before them.
        """
        self.drop_cancelled()
        self.admit()
        if self.in_flight and self.in_flight[-1].wants:
            self.deliver_all()
        decoding = self.decoding()
        wants = self.controller.lengths({
            r: min(r.most_drafts, r.max_tokens - r.sampled - 1) for r in decoding})
        if wants and self.in_flight:  # drafts follow tokens that are known
            self.deliver_all()
            decoding = self.decoding()
            wants = {r: n for r, n in wants.items() if r.finish_reason is None}
        launched = self.launch_step(decoding, wants)
        self.deliver_all(but=self.ops.steps_ahead if launched else 0)
        return self.busy

    @property
    def busy(self):
        return bool(self.in_flight or self.active or self.waiting)

    def drain(self):
        """Read the tokens of all launched steps, and let go of what was cancelled."""
        self.deliver_all()
        self.drop_cancelled()

    def deliver_all(self, but=0):
        while len(self.in_flight) > but:
            self.deliver(self.in_flight.popleft())

    def drop_cancelled(self):
        with self.lock:
            waiting = [r for r in self.waiting if r.cancelled]
            for request in waiting:
                self.waiting.remove(request)
        for request in waiting:
            self.release(request)
        for request in [*waiting, *self.active]:
            if request.cancelled and request.finish_reason is None:
                self.finish(request, "cancelled")
        self.sweep()

    def admit(self):
        """First come, first served: the head of the queue waits until its pages are free."""
        while self.waiting:
            request = self.waiting[0]
            try:
                if not self.reserve(request):
                    return
            except LeoneError as error:
                request.error = error
            self.waiting.popleft()
            if request.error:
                self.release(request)
                self.finish(request, "error")
                continue
            self.active.append(request)
            request.started = time.perf_counter()
            self.counts["prompt_tokens"] += len(request.prompt)
            self.counts["cached_tokens"] += request.cached_tokens
            slot = -1
            if request.sampling.adjusts:
                slot = request.slot
                table = request.sampling.adjustment(self.cfg.n_vocab, request.prompt)
                try:
                    self.ops.adjust(slot, table, len(self.page_table))
                except DeviceError as error:  # no memory for it
                    request.error = error
                    self.finish(request, "error")
            self.draws[request.slot] = request.sampling.row(choice=request.choice, adjustment=slot)

    def decoding(self):
        """The sequences that decode in the next step: where there are more than max_rows, those
        that waited longest have their turn."""
        decoding = [r for r in self.active
                    if r.finish_reason is None and 0 < r.sampled < r.max_tokens]
        if len(decoding) > self.max_rows:
            decoding.sort(key=lambda r: (r.last_step, r.sampled))
        return decoding[:self.max_rows]

    def choose_rows(self, decoding, drafts):
        """[(request, tokens, position, wanted)]: decoding sequences, each with its drafts, then
        chunks of prompts."""
        chosen = []
        for request in decoding:
            token = request.tokens[-1] if len(request.tokens) == request.sampled else FEED
            ids = [token, *drafts.get(request, ())]
            chosen.append((request, ids, len(request.prompt) + request.sampled - 1, len(ids)))
        reading = [r for r in self.active if r.finish_reason is None and r.read < len(r.prompt)]
        for request, count in self.share_chunk(reading, self.chunk(decoding)):
            part = request.prompt[request.read:request.read + count]
            last = request.read + count == len(request.prompt)
            chosen.append((request, part, request.read, int(last)))
        return chosen

    def chunk(self, decoding):
        """Tokens of prompts in a step: fewer where it holds up others, who decode."""
        return -(-self.prefill_chunk // 4) if decoding else self.prefill_chunk

    def share_chunk(self, reading, budget):
        """(request, tokens to read) of one chunk: first come, first served, but half of it is for
        the prompt that ends soonest, so that a short one need not wait for a long one."""
        left = {request: next((mark for mark in request.marks if mark > request.read),
                              len(request.prompt)) - request.read for request in reading}
        shares = dict.fromkeys(reading, 0)
        if len(reading) > 1:
            shortest = min(reading, key=left.get)
            shares[shortest] = min(left[shortest], budget // 2)
            budget -= shares[shortest]
        for request in reading:
            more = min(left[request] - shares[request], budget)
            shares[request] += more
            budget -= more
        return [(request, count) for request, count in shares.items() if count]

    def launch_step(self, decoding, wants):
        """Launch a forward pass and the drawing of tokens. False if no row is left to run."""
        began, last, warm_ups = time.perf_counter(), self.last_step, self.ops.warm_ups
        if (last and decoding and not wants and last.rows == len(decoding) == len(self.active)
                and [r for r, _ in last.sampled] == decoding and last.batch.advance(last.rows)):
            # The last step again, every sequence one token further: nothing else changes.
            batch, sampled, rows, drafts = last.batch, last.sampled, last.rows, {}
            chosen = [(r, ids, position + 1, 1) for r, ids, position, _ in last.chosen]
            states = self.states_of(chosen)
            if self.cfg.n_state_layers:
                batch.spans[:rows, 4:] = states
        else:
            drafts = self.proposer.propose(wants) if wants else {}
            chosen = self.choose_rows(decoding, drafts)
            if not chosen:
                return False
            states = self.states_of(chosen)
            batch = Batch.of([(r.slot, position, ids, r.rope_set, wanted, *state)
                              for (r, ids, position, wanted), state in zip(chosen, states)],
                             self.page_table, self.tile_tokens)
            sampled = [(r, i) for r, _, _, wanted in chosen for i in range(wanted)]
            rows = len(batch.tokens)
        self.last_step = None  # its batch has gone on: if this step fails, the next begins anew
        if last:
            self.proposer.leave(last)
        *result, logits, h, batch = self.draw("", self.forward, batch, sampled, slice(len(sampled)))
        result = self.ops.fetch(result)
        # Rare and large: these rows wait for their step here, before the next one overwrites them.
        rows_of_logits = {row: self.ops.download_row(logits, row)
                          for row, (request, _) in enumerate(sampled) if request.top_logprobs}
        for (request, ids, position, wanted), (_, entering) in zip(chosen, states):
            request.last_step = self.steps
            request.sampled += wanted > 0
            request.committed += entering
            if position >= len(request.prompt):
                continue
            request.read = position + len(ids)
            if wanted and not self.cfg.n_state_layers or request.read in request.marks:
                self.remember(request, request.prompt[:request.read])
        usual = len(decoding) == len(chosen) and warm_ups == self.ops.warm_ups
        wanted = len(decoding) + sum(wants.values()) if usual else 0
        self.last_step = Step(chosen, sampled, batch, h, drafts, result, rows_of_logits, wants,
                              wanted, began)
        self.in_flight.append(self.last_step)
        self.steps += 1
        self.counts["rows"] += rows
        self.counts["steps_of_16_rows"] += len(sampled) >= 16
        self.counts["sweeps"] += bool(decoding)
        return True

    def states_of(self, chosen):
        """(pending, entering) of each span, see Batch.of.

        Prompts enter the recurrent state in memory at once, and all before them. Decoded tokens
        stay pending, since not all may count, until the next ones begin another interval;
        intervals of slots are staggered, so that steps take the same time.
        """
        if not self.cfg.n_state_layers:
            return [(0, 0)] * len(chosen)
        interval, states = self.ops.state_interval, []
        for request, ids, position, _ in chosen:
            pending, end = position - request.committed, position + len(ids)
            begin = request.committed + request.slot
            if position < len(request.prompt):
                entering = end - request.committed
            elif begin // interval < (end - 1 + request.slot) // interval:
                entering = pending
            else:
                entering = 0
            states.append((pending, entering))
        return states

    def draw(self, name, forward, batch, sampled, rows):
        """Launch a forward pass and the drawing of tokens: (tokens, log probabilities, logits, h,
        the batch as it was run).

        name: of the graphs, None for no graph. forward: batch -> (logits, h). sampled: pairs
        (request, i), for each of which its request's next token but i is drawn, from these `rows`
        of logits.
        """
        if batch.draws is None:  # it does not go on from the last step
            if self.ops.captures and name is not None and (sizes := batch.graph_sizes()):
                batch = batch.padded_to(*sizes)
            batch.draws = np.zeros(len(batch.logit_rows), ROW)  # zeros are padding
            batch.draws[rows] = self.draws[[request.slot for request, _ in sampled]]
            batch.draws["position"][rows] = [len(r.prompt) + r.sampled + i for r, i in sampled]
        uploaded, draws = self.ops.upload_batch(batch), self.ops.upload_draws(batch.draws)

        def run():
            logits, h = forward(uploaded)
            return *self.ops.sample(logits, draws, uploaded), logits, h
        key = batch.sizes and (name, *batch.sizes, batch.page_table.shape[1])
        return *self.ops.run(key, run), batch

    def deliver(self, step):
        """Wait for a launched step and hand its tokens out."""
        before = time.perf_counter()
        tokens, logprobs = step.result()
        now = time.perf_counter()
        self.counts["seconds_waited"] += now - before
        if step.rows:
            self.controller.time(step.rows, bool(step.wants), now - (self.delivered or step.began))
        for request, drafts in step.drafts.items():
            request.drafted += len(drafts)  # before anybody hears of the end
        before, wrong = {request: request.accepted for request in step.wants}, None
        for row, ((request, i), token, logprob) in enumerate(
                zip(step.sampled, tokens.tolist(), logprobs.tolist())):
            if request is wrong or request.finish_reason is not None:
                continue  # the row follows a wrong draft, or was launched before the request ended
            if request.top_logprobs and token >= 0:
                request.top.append(most_likely(step.logits[row], request.top_logprobs,
                                               token, logprob))
            drafts = step.drafts.get(request, ())
            right = i < len(drafts) and drafts[i] == token  # then the next row is, too
            request.accepted += right
            self.accept(request, token, logprob, right)
            if not right or request.cancelled:
                wrong = request
        for request in step.wants:  # no other step names it: all its tokens are known now
            drafted = len(step.drafts.get(request, ()))
            accepted = request.accepted - before[request]
            self.controller.learn(request, drafted, accepted)
            request.sampled = len(request.tokens)
            self.counts["drafted_tokens"] += drafted
            self.counts["accepted_tokens"] += accepted
        self.sweep()
        self.delivered = now if self.busy else 0.0

    def sweep(self):
        """Free what ended requests held, once no launched step names them."""
        done = self.steps - len(self.in_flight)
        for request in [r for r in self.active if r.finish_reason and r.last_step < done]:
            self.active.remove(request)
            self.release(request)

    def accept(self, request, token, logprob, drafted):
        if token < 0:
            request.error = DeviceError(
                "the logits are not finite: a value left the range of float16; try --kv f32")
            return self.finish(request, "error")
        request.first_token = request.first_token or time.perf_counter()
        self.counts["generated_tokens"] += 1
        request.tokens.append(token)
        request.logprobs.append(logprob)
        ended = token in self.tokenizer.eos_ids and not request.ignore_eos
        reason = ("stop" if ended else
                  "length" if len(request.tokens) == request.max_tokens else None)
        unknown = token >= self.cfg.n_tokens  # a row that only pads the table: it has no text
        text = "" if ended or unknown else request.stream.feed(token)
        if reason:
            text += request.stream.flush()
        if stop := request.sampling.stop:
            text, request.held, stopped = split_at_stop(request.held + text, stop, bool(reason))
            reason = "stop" if stopped else reason
        request.text += text
        request.events.append(Event(token, text, logprob, drafted))
        if reason:
            self.finish(request, reason)
        else:
            self.on_event(request)

    def finish(self, request, reason):
        if reason == "cancelled":  # what was held back can no longer be a stop string
            request.text += request.held + request.stream.flush()
        request.finish_reason, request.finished = reason, time.perf_counter()
        self.on_event(request)

    def fail(self, error):
        """End every request with `error`: the device has stopped working."""
        with self.lock:
            requests = [*self.active, *self.waiting]
            self.waiting.clear()
            self.active.clear()
            self.in_flight.clear()
        for request in requests:
            if request.finish_reason is None:
                request.error = error
                self.finish(request, "error")

    @property
    def stats(self):
        """Counters since the start, and what is held now. bytes: what the driver really gave."""
        return {
            "waiting": len(self.waiting), "active": len(self.active), "steps": self.steps,
            "pages": self.pool.n_pages, "pages_free": self.pool.free_count,
            "pages_cached": self.prefixes.unused, "sessions_resident": self.sessions.resident,
            "sessions_stored": self.sessions.stored, "bytes": dict(self.ops.allocated),
            **{name: self.counts[name] for name in COUNTERS}}


def most_likely(logits, count, token, logprob):
    """[(id, log probability)] of the largest logits, best first and equal ones by id.

    logits: float32 [n_vocab], of which `token` has the log probability `logprob`.
    """
    best = np.argpartition(logits, -count)[-count:]
    best = sorted(best.tolist(), key=lambda id: (-logits[id], id))
    return [(id, logprob + float(logits[id]) - float(logits[token])) for id in best]


def split_at_stop(text, stops, last):
    """(text before a stop string, text held back because one may begin there, a stop was found)."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    if found:
        return text[:min(found)], "", True
    held = 0 if last else max((n for stop in stops for n in range(1, len(stop))
                               if text.endswith(stop[:n])), default=0)
    return text[:len(text) - held], text[len(text) - held:], False


def open_backend(name):
    """The op table for `name`: "cuda", "cpu", or "auto" for CUDA wherever a card is usable."""
    if name not in ("auto", "cuda", "cpu"):
        raise RequestError(f'backend is "{name}"; choose auto, cuda or cpu', param="backend")
    if name != "cpu":
        import device
        if name == "cuda" or isinstance(device.probe(), dict):
            return device.Device()
    import reference
    return reference.Reference()
