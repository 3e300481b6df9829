#!/usr/bin/env python3
"""Leone: any GGUF model on one GPU, the same bits whatever the load.

    leone.py       this file: the engine (load, step, generate) and the command line
    model.py       GGUF file -> Config + weights; one forward pass for every family
    tokenizer.py   text <-> token ids            chat.py      chat templates
    reference.py   NumPy twin of every kernel    device.py    CUDA driver, memory, launches
    kernels.cu     every kernel                  kv.py        pages, page tables, batches
    sampling.py    what a sampled token is       tools.py     doctor, bench, perplexity, diff

An Engine owns one model and one device. Requests are submitted to it, and every call of step()
runs one forward pass over rows of many requests: all that are decoding, then chunks of prompts
that are being read.
"""
import argparse
import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

import chat
import model
import tools
from errors import LeoneError, ModelError, DeviceError, Overloaded, RequestError
from kv import PAGE, Batch, PagePool
from sampling import ROW, Sampling
from tokenizer import Tokenizer

VERSION = "0.1.0"
FEED = -1  # token of a row whose token is still on the device: the last one sampled for its slot
DECODE_BUCKETS = 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128  # row counts that have a graph
LOGIT_ROWS = 64  # rows of logits computed at a time when all are wanted


@dataclass
class Event:
    """One generated token: id, the text that became certain with it, log probability."""
    token: int
    text: str
    logprob: float


@dataclass(eq=False)
class Request:
    """One sequence from submission to its last token. Read `tokens`, `text`, `finish_reason`."""
    prompt: list
    sampling: Sampling
    max_tokens: int
    stream: object  # tokenizer.Stream
    ignore_eos: bool = False
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"
    error: LeoneError | None = None
    cancelled: bool = False
    events: deque = field(default_factory=deque)
    # where it stands
    slot: int = -1
    pages: list = field(default_factory=list)
    draw: object = None  # sampling.ROW record; only its position changes from step to step
    rope_set: int = 0
    read: int = 0  # prompt tokens whose forward pass was launched
    sampled: int = 0  # tokens whose sampling was launched
    in_flight: int = 0  # launched steps that name it
    held: str = ""  # text that may be the beginning of a stop string
    submitted: float = 0.0
    first_token: float = 0.0  # time of the first token, 0.0 before
    finished: float = 0.0

    def cancel(self):
        """Stop at the next step; what was generated stays."""
        self.cancelled = True


class Engine:
    """A model on a device, and the requests that it is working on."""

    def __init__(self, path, backend="auto", kv="f16", prefill_chunk=512, max_rows=64, context=None,
                 queue=1024, progress=None):
        """Load the model at `path`.

        backend: "auto" (CUDA where there is a card), "cuda", "cpu". kv: format of the KV cache,
        "f32", "f16" or "q8". prefill_chunk: prompt tokens of one step. max_rows: sequences that
        decode at once. context: tokens of KV cache in all (default: what the model and the free
        memory allow).
        progress: called with (done bytes, all bytes) while weights load.
        Raises ModelError, DeviceError.
        """
        if kv not in ("f32", "f16", "q8"):
            raise RequestError(f'kv is "{kv}"; choose f32, f16 or q8', param="kv")
        for name, value in (("prefill_chunk", prefill_chunk), ("max_rows", max_rows)):
            if not isinstance(value, int) or not 1 <= value <= 65536:
                raise RequestError(f"{name} is {value!r}; it must be 1 to 65536", param=name)
        if context is not None and not 1 <= context <= 1 << 31:
            raise RequestError(f"the context is {context} tokens; it must be 1 or more",
                               param="context")
        self.gguf = model.GGUF(path)
        self.tokenizer = Tokenizer(self.gguf.metadata)
        self.ops = open_backend(backend)
        try:
            self.cfg, self.weights = model.load(self.gguf, self.ops, progress)
            self.prefill_chunk, self.max_rows, self.queue_limit = prefill_chunk, max_rows, queue
            n_pages, longest = self.plan_pages(kv, context)
            self.kv = self.ops.pages(self.cfg, n_pages, kv)
        except BaseException:
            self.ops.close()
            raise
        self.pool = PagePool(n_pages)
        self.page_table = np.zeros((max_rows + 1, longest), np.int32)
        self.free_slots = list(range(max_rows, -1, -1))
        self.waiting, self.active, self.in_flight = deque(), [], deque()
        self.steps = 0
        self.tile_tokens = self.ops.tile_tokens(self.cfg)

    def plan_pages(self, kv, context):
        """How many pages to hold, and the most that one sequence may have."""
        longest = -(-self.cfg.n_ctx // PAGE)
        if context is not None:
            return -(-context // PAGE), min(longest, -(-context // PAGE))
        room = int(self.ops.free_memory() * 0.9) // (PAGE * self.cfg.kv_bytes_per_token(kv))
        if room < 1:
            raise DeviceError("no memory is left for the KV cache; use a smaller model or --kv q8")
        n_pages = min(room, longest * self.max_rows)
        return n_pages, min(longest, n_pages)

    @property
    def parameters(self):
        """How many values the matrices hold that a token is multiplied with."""
        return sum(t.shape[0] * t.shape[1] for t in self.read_tensors())

    @property
    def bytes_per_token(self):
        """Bytes of weights that a step reads, in the format in which the backend keeps them."""
        return sum(self.ops.stored_bytes(t) for t in self.read_tensors())

    def read_tensors(self):
        tied = "output.weight" not in self.gguf.tensors
        return [t for t in self.gguf.tensors.values()
                if len(t.shape) == 2 and (tied or t.name != "token_embd.weight")]

    def close(self):
        """Give the memory back. The engine cannot be used afterwards."""
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

    def chat_tokens(self, messages, **kwargs):
        """Token ids of a conversation in the model's own template. User text stays plain text."""
        template = self.gguf.metadata.get("tokenizer.chat_template")
        if template is None:
            raise ModelError("this model has no chat template; use a plain prompt instead")
        tok = self.tokenizer
        parts = chat.render(template, messages,
                            bos_token=tok.text_of(tok.bos_id),
                            eos_token=tok.text_of(tok.eos_id), **kwargs)
        return tok.encode_parts(parts)

    # ---- requests ----------------------------------------------------------------------------

    def submit(self, prompt, sampling=Sampling(), max_tokens=None, ignore_eos=False):
        """Queue a prompt (text or ids); returns its Request. Raises RequestError, Overloaded."""
        sampling.validate(self.cfg.n_vocab)
        ids = self.tokenize(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        longest = self.page_table.shape[1] * PAGE
        if max_tokens is None:
            max_tokens = max(1, min(longest, self.cfg.n_ctx) - len(ids) - 1)
        self.check_ids(ids)
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens!r}; it must be 1 or more",
                               param="max_tokens")
        limit = min(longest - 1, self.cfg.n_ctx)
        if len(ids) + max_tokens > limit:
            raise RequestError(
                f"{len(ids)} prompt tokens + {max_tokens} new ones exceed the context of {limit}; "
                "shorten the prompt or ask for fewer tokens", code="context_length_exceeded")
        if len(self.waiting) >= self.queue_limit:
            raise Overloaded("the queue is full; try again later", self.pages_for(ids, max_tokens),
                             self.pool.free_count, 1000, code="queue_full")
        request = Request(ids, sampling.seeded(), max_tokens, self.tokenizer.stream(after=ids[-1]),
                          ignore_eos, submitted=time.perf_counter())
        request.rope_set = self.rope_set(len(ids) + max_tokens)
        self.waiting.append(request)
        return request

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
        ids = [int(i) for i in ids]
        self.check_ids(ids)
        self.drain()
        request = Request(ids, Sampling(), 1, None)
        if self.pages_for(ids, 0) > min(self.page_table.shape[1], self.pool.free_count):
            raise RequestError(f"{len(ids)} tokens do not fit in the KV cache of "
                               f"{self.pool.free_count * PAGE}", code="context_length_exceeded")
        self.reserve(request, self.pages_for(ids, 0))
        chunk = min(self.prefill_chunk, LOGIT_ROWS)
        rope_set, rows = self.rope_set(len(ids)), []
        try:
            for at in range(0, len(ids), chunk):
                part = ids[at:at + chunk]
                batch = Batch.of([(request.slot, at, part, rope_set, len(part))], self.page_table,
                                 self.tile_tokens)
                rows.append(self.ops.download(self.forward(self.ops.upload_batch(batch))))
        finally:
            self.release(request)
        return np.concatenate(rows)

    def forward(self, batch):
        return model.forward(self.cfg, self.weights, batch, self.kv, self.ops)

    def check_ids(self, ids):
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        if min(ids) < 0 or max(ids) >= self.cfg.n_vocab:
            raise RequestError(f"token ids must be 0 to {self.cfg.n_vocab - 1}", param="prompt")

    def rope_set(self, length):
        """Which RoPE factors a sequence of `length` tokens uses, decided once at admission."""
        return int(len(self.cfg.rope_sets) > 1 and length > self.cfg.rope_long_from)

    # ---- memory of a sequence ----------------------------------------------------------------

    def pages_for(self, ids, max_tokens):
        """Pages of a request, with room for the token of a step launched ahead."""
        return -(-(len(ids) + max_tokens + 1) // PAGE)

    def reserve(self, request, count):
        request.pages = self.pool.take(count)
        request.slot = self.free_slots.pop()
        self.page_table[request.slot, :count] = request.pages

    def release(self, request):
        self.pool.give(request.pages)
        self.free_slots.append(request.slot)
        request.pages, request.slot = [], -1

    # ---- the scheduler -----------------------------------------------------------------------

    def step(self):
        """One batch step: admit, choose rows, run them, deliver. False when nothing is left to do.

        A backend that runs beside Python is kept one step ahead: its next step is launched before
        the tokens of the last are read.
        """
        self.admit()
        launched = self.launch_step()
        while len(self.in_flight) > (self.ops.steps_ahead if launched else 0):
            self.deliver(*self.in_flight.popleft())
        return bool(self.in_flight or self.active or self.waiting)

    def drain(self):
        """Read the tokens of all launched steps."""
        while self.in_flight:
            self.deliver(*self.in_flight.popleft())

    def admit(self):
        """First come, first served: the head of the queue waits until its pages are free."""
        for request in [r for r in self.waiting if r.cancelled]:
            self.waiting.remove(request)
            self.finish(request, "cancelled")
        while self.waiting and len(self.active) < self.max_rows:
            count = self.pages_for(self.waiting[0].prompt, self.waiting[0].max_tokens)
            if count > self.pool.free_count:
                return
            request = self.waiting.popleft()
            self.reserve(request, count)
            self.active.append(request)
            slot = -1
            if request.sampling.adjusts:
                slot = request.slot
                table = request.sampling.adjustment(self.cfg.n_vocab, request.prompt)
                self.ops.adjust(slot, table, len(self.page_table))
            request.draw = request.sampling.row(adjustment=slot)

    def choose_rows(self):
        """[(request, tokens, position, wanted)]: all decoding sequences, then chunks of prompts."""
        chosen, budget = [], self.prefill_chunk
        for request in self.active:
            if request.cancelled:
                self.finish(request, "cancelled")
            if request.finish_reason is None and 0 < request.sampled < request.max_tokens:
                token = request.tokens[-1] if len(request.tokens) == request.sampled else FEED
                chosen.append((request, [token], len(request.prompt) + request.sampled - 1, 1))
        for request in self.active:
            left = len(request.prompt) - request.read
            if request.finish_reason is None and left and budget:
                part = request.prompt[request.read:request.read + budget]
                chosen.append((request, part, request.read, int(len(part) == left)))
                budget -= len(part)
        return chosen

    def launch_step(self):
        chosen = self.choose_rows()
        self.sweep()
        if not chosen:
            return False
        spans = [(r.slot, position, ids, r.rope_set, wanted) for r, ids, position, wanted in chosen]
        batch = Batch.of(spans, self.page_table, self.tile_tokens)
        sampled = [r for r, _, _, wanted in chosen if wanted]
        rows = len(batch.tokens)
        decoding = rows == len(sampled) and rows <= DECODE_BUCKETS[-1]
        if decoding and self.ops.captures:
            batch = batch.padded_to(next(b for b in DECODE_BUCKETS if b >= rows))
        draws = np.zeros(len(batch.logit_rows), ROW)  # zeros are padding
        for i, request in enumerate(sampled):
            draws[i] = request.draw
            draws[i]["position"] = len(request.prompt) + request.sampled
        key = len(draws) if decoding else None
        batch, draws = self.ops.upload_batch(batch), self.ops.upload_draws(draws)

        def run():
            return self.ops.sample(self.forward(batch), draws, batch)

        result = self.ops.run(key, run)
        for request, ids, _, wanted in chosen:
            request.read = min(request.read + len(ids), len(request.prompt))
            request.sampled += wanted
            request.in_flight += 1
        self.in_flight.append((chosen, sampled, self.ops.fetch(result)))
        self.steps += 1
        return True

    def deliver(self, chosen, sampled, result):
        """Wait for a launched step and hand its tokens out."""
        tokens, logprobs = result()
        for request, token, logprob in zip(sampled, tokens.tolist(), logprobs.tolist()):
            if request.finish_reason is None:  # else it ended after this step was launched
                self.accept(request, token, logprob)
        for request, *_ in chosen:
            request.in_flight -= 1
        self.sweep()

    def sweep(self):
        """Free what ended requests held, once no launched step names them."""
        for request in [r for r in self.active if r.finish_reason and not r.in_flight]:
            self.active.remove(request)
            self.release(request)

    def accept(self, request, token, logprob):
        if token < 0:
            request.error = DeviceError(
                "the logits are not finite: a value left the range of float16; try --kv f32")
            return self.finish(request, "error")
        request.first_token = request.first_token or time.perf_counter()
        request.tokens.append(token)
        request.logprobs.append(logprob)
        ended = token in self.tokenizer.eos_ids and not request.ignore_eos
        unknown = token >= self.cfg.n_tokens  # a row that only pads the table: it has no text
        text = request.held + ("" if ended or unknown else request.stream.feed(token))
        last = ended or len(request.tokens) == request.max_tokens
        if last:
            text += request.stream.flush()
        text, request.held, stopped = split_at_stop(text, request.sampling.stop, last)
        request.text += text
        request.events.append(Event(token, text, logprob))
        if ended or stopped:
            self.finish(request, "stop")
        elif last:
            self.finish(request, "length")

    def finish(self, request, reason):
        request.finish_reason, request.finished = reason, time.perf_counter()


def split_at_stop(text, stops, last):
    """(text before a stop string, text held back because one may begin there, a stop was found)."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    if found:
        return text[:min(found)], "", True
    held = 0
    if not last:
        held = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
                   default=0)
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


# ---- command line ----------------------------------------------------------------------------


def main(argv=None):
    args = build_parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except LeoneError as error:
        print(f"leone: {error}", file=sys.stderr)
    except MemoryError:
        print("leone: out of memory; use a smaller model, a shorter --ctx or --kv q8",
              file=sys.stderr)
    except OSError as error:
        print(f"leone: {error.filename or 'file'}: {error.strerror}; check the path",
              file=sys.stderr)
    return 2


def build_parser():
    parser = argparse.ArgumentParser(
        prog="leone.py", description="Run any GGUF model: the same bits whatever the load.")
    parser.add_argument("--version", action="version", version=f"leone {VERSION}")
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name, run, summary, engine=True):
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.set_defaults(run=run)
        sub.add_argument("-m", "--model", required=True, metavar="FILE", help="GGUF file")
        if engine:
            sub.add_argument("--backend", choices=("auto", "cuda", "cpu"), default="auto",
                             help="auto: CUDA where there is a usable card (default)")
            sub.add_argument("--kv", choices=("f32", "f16", "q8"), default="f16",
                             help="format of the KV cache (default f16)")
            sub.add_argument("--ctx", type=int, metavar="N",
                             help="tokens of KV cache in all (default: what fits)")
            sub.add_argument("--prefill-chunk", type=int, default=512, metavar="N",
                             help="prompt tokens of one step (default 512)")
        return sub

    def prompt(sub):
        source = sub.add_mutually_exclusive_group(required=True)
        source.add_argument("-p", "--prompt", metavar="TEXT")
        source.add_argument("-f", "--file", metavar="FILE",
                            help="read the text from FILE, - for stdin")

    sub = command("generate", run_generate, "Continue a prompt, or answer it with --chat.")
    prompt(sub)
    sub.add_argument("-n", "--max-tokens", type=int, default=256, metavar="N",
                     help="most tokens to generate (default 256)")
    sub.add_argument("--chat", action="store_true", help="use the model's chat template")
    sub.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T",
                     help="0 takes the most likely token (default)")
    sub.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off (default)")
    sub.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off (default)")
    sub.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off (default)")
    sub.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    sub.add_argument("--presence-penalty", type=float, default=0.0, metavar="R")
    sub.add_argument("--frequency-penalty", type=float, default=0.0, metavar="R")
    sub.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default: random)")
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT",
                     help="stop before this text; may be given several times")
    sub.add_argument("--ignore-eos", action="store_true", help="go on after the end of the answer")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("tokenize", run_tokenize, "Show the token ids of a text.", engine=False)
    prompt(sub)
    sub.add_argument("--special", action="store_true", help="read control tokens in the text")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("doctor", run_doctor, "Report on a model file, the card and the build.",
                  engine=False)
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("bench", run_bench, "Measure decode and prefill speed.")
    sub.add_argument("--rows", default="1,8", metavar="N,N", help="sequences at once (default 1,8)")
    sub.add_argument("--profile", action="store_true", help="time each op")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("perplexity", run_perplexity, "Perplexity of a text in windows.")
    sub.add_argument("-f", "--file", required=True, metavar="FILE")
    sub.add_argument("-c", "--window", type=int, default=512, metavar="N",
                     help="tokens of a window (default 512)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("diff", run_diff, "Run a prompt on both backends and compare every buffer.")
    prompt(sub)
    return parser


def open_engine(args, **options):
    progress = show_progress if sys.stderr.isatty() else None
    return Engine(args.model, args.backend, args.kv, args.prefill_chunk, context=args.ctx,
                  progress=progress, **options)


def show_progress(done, total):
    end = "\r" if done < total else "\r\033[K"
    print(f"loading {done / 1e9:.1f} of {total / 1e9:.1f} GB", end=end, file=sys.stderr, flush=True)


def read_text(args):
    if args.prompt is not None:
        text = args.prompt
    elif args.file == "-":
        text = sys.stdin.read()
    else:
        text = read_file(args.file)
    # bytes of the command line that are not UTF-8 arrive as lone surrogates
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_file(path):
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        return file.read()


def run_generate(args):
    text = read_text(args)
    sampling = Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
        repetition_penalty=args.repetition_penalty, presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty, seed=args.seed, stop=tuple(args.stop))
    began = time.perf_counter()
    with open_engine(args, max_rows=1) as engine:
        loaded = time.perf_counter()
        if args.chat:
            messages = [{"role": "system", "content": args.system}] if args.system else []
            ids = engine.chat_tokens([*messages, {"role": "user", "content": text}])
        else:
            ids = engine.tokenize(text)
        request = engine.submit(ids, sampling, args.max_tokens, args.ignore_eos)
        try:
            while engine.step():
                show_answer(request, len(ids), args.json)
            show_answer(request, len(ids), args.json)
        except KeyboardInterrupt:
            request.finish_reason = "cancelled"
            request.finished = time.perf_counter()
        if request.error:
            raise request.error
        report(args, engine, request, loaded - began)
        return 130 if request.finish_reason == "cancelled" else 0


def show_answer(request, prompt_tokens, quiet):
    """Print what is new of the answer; before it, on a terminal, how much of the prompt is read."""
    if not request.tokens and request.read < prompt_tokens and sys.stderr.isatty():
        print(f"reading {request.read} of {prompt_tokens} tokens", end="\r\033[K", file=sys.stderr)
    while request.events:
        text = request.events.popleft().text
        if not quiet:
            print(text, end="", flush=True)


def report(args, engine, request, load_seconds):
    tokens = len(request.tokens)
    prefill = max(request.first_token - request.submitted, 0.0)
    decode = request.finished - request.first_token if tokens else 0.0
    rate = (tokens - 1) / decode if tokens > 1 and decode > 0 else 0.0
    gigabytes = rate * engine.bytes_per_token / 1e9
    if args.json:
        print(json.dumps({
            "prompt_tokens": request.prompt, "tokens": request.tokens, "text": request.text,
            "finish_reason": request.finish_reason,
            "timings": {"load_s": load_seconds, "prefill_s": prefill, "decode_s": decode,
                        "decode_tokens_per_s": rate, "weights_gb_per_s": gigabytes},
            "model": {"file": os.path.basename(args.model), "name": engine.cfg.name,
                      "backend": engine.ops.name, "kv": engine.kv.format}}))
    else:
        print()
        print(f"[{len(request.prompt)} prompt tokens in {prefill:.2f} s, {tokens} tokens, "
              f"{rate:.1f} tok/s, {gigabytes:.1f} GB/s of weights, {engine.ops.name}, "
              f"{request.finish_reason}]", file=sys.stderr)


def run_tokenize(args):
    tokenizer = Tokenizer(model.GGUF(args.model).metadata)
    ids = tokenizer.encode(read_text(args), special=args.special, bos=tokenizer.add_bos)
    if args.json:
        print(json.dumps({"tokens": ids}))
    else:
        for token in ids:
            print(f"{token:7d}  {tokenizer.token_bytes(token, special=True)!r}")


def run_doctor(args):
    return tools.doctor(args.model, as_json=args.json)


def run_bench(args):
    rows = [int(n) for n in args.rows.split(",") if n.strip().isdigit() and int(n)]
    if not rows:
        raise RequestError(f'--rows is "{args.rows}"; give numbers such as 1,8,64')
    with open_engine(args, max_rows=max(rows)) as engine:
        tools.bench(engine, rows, profile=args.profile, as_json=args.json)


def run_perplexity(args):
    with open_engine(args, max_rows=1) as engine:
        tools.perplexity(engine, read_file(args.file), args.window, as_json=args.json)


def run_diff(args):
    return tools.diff(args.model, read_text(args), args.kv)


if __name__ == "__main__":
    sys.exit(main())
