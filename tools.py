"""What a user asks about a model, a machine or an answer: doctor, bench, ..., replay."""
import contextlib
import itertools
import json
import math
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from statistics import median
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

import device
import gguf_file
import model
import receipts
import spec
from errors import DeviceError, ModelError, RequestError, require
from kv import PAGE, Batch, common_prefix
from leone import PENDING, VERSION, Engine
from sampling import Sampling
from tokenizer import Tokenizer

# ---- what all of them print ----------------------------------------------------------------------


def columns(records):
    """Lines of a table: a row for each record, a column for each of their fields."""
    table = []
    for name in records[0] if records else ():
        cells = [name, *(cell(name, record[name]) for record in records)]
        width = max(map(len, cells))
        is_text = isinstance(records[0][name], str)
        table.append([text.ljust(width) if is_text else text.rjust(width) for text in cells])
    return ["  ".join(row).rstrip() for row in zip(*table)]


def cell(name, value):
    """A field of a record as text, "" for None; bytes are known by their name."""
    if value is None or isinstance(value, str):
        return value or ""
    if name.endswith("bytes"):
        return size(value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def markdown(records):
    """The same as lines of Markdown."""
    rows = [[cell(*field) for field in record.items()] for record in records]
    return [f"| {' | '.join(row)} |" for row in (records[0], ["---:"] * len(records[0]), *rows)]


def size(n_bytes):
    return f"{n_bytes / 2**20:,.1f} MiB"


def printable(text):
    """Text in one line, with escapes for control characters, which could steer a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def progress(text, last=False):
    """Show on a terminal how far something is; the next line to be printed takes its place."""
    if sys.stderr.isatty():
        print(text, end="\r\033[K" if last else "\r", file=sys.stderr, flush=True)


# ---- doctor: what a model is and what this machine can do with it --------------------------------

KV_FORMATS = "f32", "f16", "q8"
CUDA_OVERHEAD = 512 << 20  # bytes for the CUDA context


class CheckOnly:
    """An op table that takes weights and does nothing: loading with it checks a file's tensors."""

    def matrix(self, tensors, bias=None):
        """Read nothing."""

    experts = matrix

    def gated(self, gate_up, down, norm):
        return None, None

    def vector(self, array):
        """The loader has looked at the values already."""


def doctor(path, as_json=False, deep=False):
    """Print what `examine` finds out, as a table or as one JSON object. Returns 1 if `deep` finds
    bits that differ.

    Raises ModelError where the file is damaged or does not hold what its family needs.
    """
    report = examine(path)
    if deep:
        report["same_bits"] = compare_bits(path)
    print(json.dumps(report) if as_json else "\n".join(table(report)))
    return int(deep and not all(report["same_bits"].values()))


def compare_bits(path):
    """Promise 1 on this machine: {KV format: whether every way to compute gave the same bits}.

    150 random tokens are read in chunks of 64, 16, 3 and 1, then continued alone and among seven
    others of other lengths.
    """
    rng, same = np.random.default_rng(3), {}
    for kv_format in KV_FORMATS:
        with Engine(path, kv=kv_format, max_rows=8, context=4096) as engine:
            draw = lambda count: rng.integers(0, engine.cfg.n_tokens, count).tolist()
            ids, logits = draw(150), []
            for engine.prefill_chunk in (64, 16, 3, 1):
                logits.append(engine.logits(ids).tobytes())
            engine.prefill_chunk, answers = 64, []
            for others in ([], [draw(20 * n + 5) for n in range(7)]):
                requests = [engine.submit(prompt, Sampling(seed=1), 16, True, salt=str(others))
                            for prompt in (ids, *others)]
                finish(engine, requests)
                answers.append((requests[0].tokens, requests[0].logprobs))
            same[kv_format] = len(set(logits)) == 1 and answers[0] == answers[1]
    return same


def examine(path):
    """The report as a dict of plain values. Reads the header and the norm vectors, no matrix."""
    gguf = gguf_file.GGUF(path)
    problem = model.unsupported(gguf)
    cfg, weights = (None, None) if problem else model.load(gguf, CheckOnly())
    family = gguf.value("general.architecture", str)
    card = device.probe()
    on_card = card if isinstance(card, dict) else None
    formats = count_formats(gguf.tensors.values())
    try:
        tokenizer = Tokenizer(gguf.metadata).prepare().describe()
    except ModelError as error:
        if not problem:
            raise
        tokenizer = {"problem": str(error)}
    return {
        "path": str(gguf.path), "files": len(gguf.paths),
        "file_bytes": sum(part.stat().st_size for part in gguf.paths),
        "name": gguf.value("general.name", str, None), "architecture": family,
        "supported": problem is None, "problem": problem,
        "parameters": sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
        "active_parameters": weights.active_parameters if cfg and cfg.n_experts else None,
        "layers": gguf.value(f"{family}.block_count", int, None),
        "context": gguf.value(f"{family}.context_length", int, None),
        "state_bytes": cfg and cfg.state_bytes(PENDING), "formats": formats,
        "cuda_problem": cfg and device.model_problem(cfg, "f16"),
        "kv": describe_kv(cfg, on_card, sum(entry["gpu_bytes"] for entry in formats)),
        "gpu": on_card, "gpu_problem": None if on_card else card, "cubin": device.cubin_state(),
        "tokenizer": tokenizer, "notes": notes(gguf, family, cfg),
        "chat_template": gguf.value("tokenizer.chat_template", str, None) is not None}


def count_formats(tensors):
    """One entry per type, matrices and vectors apart: how many, how large, what becomes of them."""
    formats = {}
    for tensor in tensors:
        kind, is_vector = tensor.type.name, len(tensor.shape) == 1
        cuda = ("as it is" if is_vector or kind in device.PACKINGS else
                "stored as F16" if kind in device.REPACKED_AS_F16 else
                "expanded to F16" if gguf_file.can_dequantise(tensor.type) else "not supported")
        cpu = ("as it is" if is_vector or kind == "F32" else
               "expanded to F32" if gguf_file.can_dequantise(tensor.type) else "not supported")
        entry = formats.setdefault((is_vector, kind), {
            "type": kind, "used_for": "vectors" if is_vector else "matrices",
            "tensors": 0, "bytes": 0, "gpu_bytes": 0, "cuda": cuda, "cpu": cpu})
        entry["tensors"] += 1
        entry["bytes"] += tensor.data.nbytes
        entry["gpu_bytes"] += (2 * math.prod(tensor.shape) if cuda.endswith("F16")
                               else tensor.data.nbytes)
    return sorted(formats.values(), key=lambda entry: -entry["bytes"])


def describe_kv(cfg, card, weight_bytes):
    """For each KV format: bytes per token, of a whole context, and of all that one sequence with
    such a context needs on a card; tokens of one sequence that fit on the present one."""
    if cfg is None:
        return None
    scratch = cfg.scratch_bytes(2048 + 1, PENDING)  # --prefill-chunk, and a row that decodes
    described, held = {}, weight_bytes + CUDA_OVERHEAD + scratch + cfg.state_bytes(PENDING)
    room = max(0, card["free_bytes"] - held) if card else 0
    for kv_format in KV_FORMATS:
        per_token = cfg.kv_bytes_per_token(kv_format)
        on_cuda = card and not device.model_problem(cfg, kv_format)
        described[kv_format] = {
            "bytes_per_token": per_token, "context_bytes": per_token * cfg.n_ctx,
            "needs_bytes": held + per_token * cfg.n_ctx,
            "fits_tokens": room // (per_token * PAGE) * PAGE if on_cuda else None}
    return described


def notes(gguf, family, cfg):
    """What a user should know although nothing is wrong."""
    found = []
    window = gguf.metadata.get(f"{family}.attention.sliding_window", 0)
    if isinstance(window, int) and cfg and 0 < window < cfg.n_ctx:
        found.append(f"the sliding window of {window:,} tokens is not applied: attention sees all")
    if cfg and cfg.n_tokens < cfg.n_vocab:
        found.append(f"the token table has {cfg.n_vocab - cfg.n_tokens} rows of padding")
    if cfg and cfg.rope_long_from:
        found.append(f"a prompt and answer of more than {cfg.rope_long_from:,} tokens "
                     "use the long RoPE factors")
    return found


def table(report):
    """The report as lines for people."""
    card, tokenizer, context = report["gpu"], report["tokenizer"], report["context"]
    files = f" in {report['files']} files" if report["files"] > 1 else ""
    active = f" ({report['active_parameters']:,} a token)" if report["active_parameters"] else ""
    named = lambda token: f"{token['id']} {token['text']!r}" if token else "none"
    facts = [
        ("model", f"{report['name'] or report['path']} ({report['architecture']}, "
                  f"{report['layers'] or '?'} layers, {report['parameters']:,} parameters{active}, "
                  f"{size(report['file_bytes'])}{files})"),
        ("family", report["problem"] or "supported"),
        ("context", f"{context:,} tokens" if context else "unknown"),
        ("tokenizer", f"none: {tokenizer['problem']}" if "problem" in tokenizer else
         f"{tokenizer['model']} {tokenizer['pre'] or ''}, {tokenizer['tokens']:,} tokens, "
         f"bos {named(tokenizer['bos'])}, eos {named(tokenizer['eos'])}"),
        ("chat", "template in the file" if report["chat_template"] else "no template"),
        ("gpu", f"none: {report['gpu_problem']}" if card is None else
         f"{card['name']} (sm_{card['arch']}, driver for CUDA {card['driver']}), "
         f"{size(card['free_bytes'])} of {size(card['total_bytes'])} free"),
        ("kernels", report["cuda_problem"] or report["cubin"]),
        *([("state", f"{size(report['state_bytes'])} for each live session, beside its KV, and as "
                     "much on the host for each idle one")] if report["state_bytes"] else []),
        *(("note", note) for note in report["notes"]),
        *(("bits", f"{kv_format} KV: " + ("the same, however a prompt is cut or batched" if same
                                          else "NOT THE SAME; please report this"))
          for kv_format, same in report.get("same_bits", {}).items())]
    kv = [{"kv": kv_format, **entry} for kv_format, entry in (report["kv"] or {}).items()]
    for entry in kv:
        if entry["fits_tokens"] is None:
            entry["fits_tokens"] = "not on CUDA" if card else "no GPU"
    return [*(f"{label:11}{printable(text)}" for label, text in facts),
            "", *columns(report["formats"]), "", *columns(kv)]


# ---- bench -----------------------------------------------------------------------------------

PROMPT = 128  # tokens of the prompts before decoding is timed
# New tokens of a decoding run, repeats of every run, prompt lengths whose reading is timed.
THOROUGH, QUICK = (128, 5, (512, 4096)), (16, 3, (512,))  # on the CPU a row may take seconds


def bench(engine, rows, profile=False, as_json=False, synthetic=None, folder=None):
    """Time decoding at each number of sequences in `rows`, and prefill; print a table or JSON.

    With drafts on, decoding is timed once more with them. synthetic: the share of drafts that are
    to be right; the proposer works as ever, then its tokens are replaced. folder: where to put the
    evidence, see write_evidence.
    """
    rng = np.random.default_rng(7)
    new, repeats, prefills = QUICK if engine.ops.name == "cpu" else THOROUGH
    require(max(rows) * engine.pages_for(range(PROMPT), new) <= engine.pool.n_pages,
            f"{max(rows)} sequences of {PROMPT + new} tokens do not fit at once in "
            f"{engine.pool.n_pages * PAGE} tokens of KV cache; use fewer --rows or a larger --ctx")

    def run(n, prompt, new):
        prompts = rng.integers(0, engine.cfg.n_vocab, (n, prompt)).tolist()
        return timed(engine, prompts, new, speculation=False)

    roof = engine.ops.measure_bandwidth()
    result = dict(describe_machine(engine), read_bandwidth_gb_per_s=roof, decode=[], drafts=[],
                  prefill=[])
    for n in rows:
        run(n, PROMPT, 4)  # builds the graphs
        progress(f"decoding {n} rows")
        _, seconds, hosts, _ = zip(*(run(n, PROMPT, new) for _ in range(repeats)))
        speeds = spread([n * (new - 1) / each for each in seconds])
        steps_per_s = speeds["tokens_per_s"] / n
        gigabytes = steps_per_s * engine.bytes_per_step(n) / 1e9
        result["decode"].append(dict(
            rows=n, **speeds, ms_per_step=1e3 / steps_per_s, gb_per_s=gigabytes,
            share=gigabytes / roof, host_us=median(hosts) if engine.ops.steps_ahead else None))
        if type(engine.proposer) is not spec.Proposer:
            prompts = rng.integers(0, engine.cfg.n_vocab, (n, PROMPT)).tolist()
            result["drafts"].append(bench_drafts(engine, prompts, new, repeats, synthetic))
    longest = min(engine.page_table.shape[1] * PAGE - 1, engine.cfg.n_ctx)
    for length in (length for length in prefills if length < longest):
        progress(f"reading {length} tokens")
        run(1, length, 1)
        speeds = spread([length / run(1, length, 1)[0] for _ in range(repeats)])
        result["prefill"].append(dict(
            tokens=length, **speeds,
            tflop_per_s=2e-12 * engine.weights.active_parameters * speeds["tokens_per_s"]))
    if profile:
        result["ops"] = profile_ops(engine, rng)
    progress("", last=True)
    print(json.dumps(result) if as_json else "\n".join(bench_table(result)))
    if folder:
        write_evidence(result, Path(folder))
    return result


def timed(engine, prompts, new, speculation, ignore_eos=True):
    """Answer `prompts` by their most likely tokens, `new` at most, all at once: (seconds to the
    last first token, seconds from there to the end, microseconds of a step that Python did not
    wait for the card, in the steps between; {prompt: tokens}). The last step is left out there:
    it puts ended requests away."""
    requests = [engine.submit(prompt, Sampling(temperature=0), new, ignore_eos,
                              speculation=speculation) for prompt in prompts]
    began = time.perf_counter()
    while engine.step() and not all(request.first_token for request in requests):
        pass
    at, steps, waited = time.perf_counter(), engine.steps, engine.counts["seconds_waited"]
    while engine.step() and max(len(request.tokens) for request in requests) < new - 1:
        pass
    host = time.perf_counter() - at - (engine.counts["seconds_waited"] - waited)
    host *= 1e6 / max(1, engine.steps - steps)
    finish(engine, requests)
    first, last = (max(getattr(r, name) for r in requests) for name in ("first_token", "finished"))
    return first - began, last - first, host, {tuple(r.prompt): r.tokens for r in requests}


def spread(speeds):
    """The speeds of several runs, as fields of a record."""
    return dict(tokens_per_s=median(speeds), slowest=min(speeds), fastest=max(speeds))


def finish(engine, requests):
    """Steps until all is done. Raises the error of a request that failed."""
    while engine.step():
        pass
    for request in requests:
        if request.error:
            raise request.error


def describe_machine(engine):
    """What the numbers of a benchmark are about."""
    cfg, card = engine.cfg, device.probe()
    return dict(
        leone=VERSION, date=time.strftime("%Y-%m-%d"), model=cfg.name, file=engine.gguf.path.name,
        layers=cfg.n_layers, n_embd=cfg.n_embd, n_vocab=cfg.n_vocab, n_experts=cfg.n_experts,
        matrix_bytes={entry["type"]: entry["bytes"] for entry in count_formats(
            engine.gguf.tensors.values()) if entry["used_for"] == "matrices"},
        backend=engine.ops.name, card=engine.ops.card_name, architecture=engine.ops.architecture,
        driver=card["driver"] if engine.ops.name == "cuda" else None,
        kernels=engine.ops.fingerprint, kv=engine.kv.format)


def write_evidence(result, folder):
    """A Markdown file: the tables of a benchmark, then all that is known of it as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.]+", "-", f"{result['card']} {Path(result['file']).stem}")
    tables = ["\n".join(markdown(result[part])) for part in ("decode", "prefill") if result[part]]
    (folder / f"{name}.md").write_text("\n\n".join([
        f"# {result['model']} on {result['card']}",
        "Medians of several runs, and the slowest and the fastest run.", *tables,
        f"```json\n{json.dumps(result, indent=1)}\n```\n"]))


def bench_drafts(engine, prompts, new, repeats, synthetic=None, ignore_eos=True):
    """Decode `prompts` plainly, then the same ones with drafts, of which a share of `synthetic` is
    made right if it is not None."""
    real, controller = engine.proposer, engine.controller

    def run(speculation):
        """Tokens a second behind the first ones, {prompt: tokens}."""
        _, seconds, _, answers = timed(engine, prompts, new, speculation, ignore_eos)
        return (sum(map(len, answers.values())) - len(answers)) / seconds, answers

    plain, (_, answers) = median(run(False)[0] for _ in range(repeats)), run(False)
    if synthetic is not None:
        engine.proposer = Synthetic(real, answers, synthetic)
    run(True)  # builds graphs, learns what pays
    before = engine.stats
    speed = median(run(True)[0] for _ in range(repeats))
    engine.proposer, after = real, engine.stats
    tokens, sweeps, drafts, right = (after[name] - before[name] for name in (
        "generated_tokens", "sweeps", "drafted_tokens", "accepted_tokens"))
    tokens -= len(prompts) * repeats  # the first ones, which the prompts' last rows gave
    require(tokens, "an answer ends with its first token, and nothing can be measured")
    tried = controller.tried[-1, 1:]
    return dict(rows=len(prompts), synthetic_acceptance=synthetic, tokens_per_s=speed,
                plain_tokens_per_s=plain, gain=speed / plain, tokens_per_sweep=tokens / sweeps,
                drafts_per_token=drafts / tokens, accepted=right / max(1, drafts),
                right_by_place=(controller.right[-1, 1:] / np.maximum(tried, 1e-9))[tried > 0.5]
                .tolist())


def bench_prompts(engine, path, as_json=False):
    """What drafts do for the answers to the prompts of a JSON file [{"kind": text, "prompt": list
    of lines}, ..], one after another, through the chat template, up to their end; print a table."""
    try:
        prompts = [(str(item["kind"]), "\n".join([] + item["prompt"]))
                   for item in json.loads(Path(path).read_bytes())]
    except (ValueError, TypeError, LookupError, RecursionError):
        prompts = []
    require(prompts, f'{path} is no JSON list of {{"kind": text, "prompt": list of lines}}; see '
            "tests/prompts.json")
    new, repeats = (64, 1) if engine.ops.name == "cpu" else (512, 5)
    records = []
    for kind, text in prompts:
        progress(f"prompt {len(records) + 1} of {len(prompts)}")
        ids = engine.chat_tokens([dict(role="user", content=text)])
        found = bench_drafts(engine, [ids], new, repeats, ignore_eos=False)
        del found["synthetic_acceptance"], found["right_by_place"], found["rows"]
        records.append(dict(kind=kind, prompt_tokens=len(ids), **found))
    gains = {kind: median(r["gain"] for r in records if r["kind"] == kind) for kind, _ in prompts}
    progress("", last=True)
    print(json.dumps(dict(prompts=records, median_gain=gains)) if as_json else
          "\n".join([*columns(records), "", "median gain", *columns([gains])]))


class Synthetic(spec.Proposer):
    """The drafts of another proposer with other tokens: each is right with a given chance."""

    def __init__(self, real, answers, share):
        self.real, self.answers, self.share = real, answers, share
        self.leave, self.forget = real.leave, real.forget
        self.rng = np.random.default_rng(9)

    def propose(self, wants):
        self.real.propose(wants)
        drafts = {}
        for request, most in wants.items():
            right = self.answers[tuple(request.prompt)][len(request.tokens):][:most]
            drafts[request] = [token if self.rng.random() < self.share else int(not token)
                               for token in right]
        return drafts


def bench_table(result):
    yield (f"{result['model']}, {result['card']}, {result['kv']} KV, "
           f"memory reads {result['read_bandwidth_gb_per_s']:.0f} GB/s")
    yield from ("", *columns(result["decode"]))
    for found in map(dict, result["drafts"]):
        assumed = found.pop("synthetic_acceptance")
        places = " ".join(f"{share:.0%}" for share in found.pop("right_by_place"))
        yield from ("", "with drafts, right by place: " + places + (
            f" (SYNTHETIC: {assumed:.0%} of the drafts made right)" if assumed is not None else ""))
        yield from columns([found])
    yield from ("", *columns(result["prefill"]))
    for rows, ops in result.get("ops", {}).items():
        total = sum(op["ms"] for op in ops)
        yield from ("", f"one step of {rows} rows: {total:.3f} ms in ops", *columns(ops))


def profile_ops(engine, rng):
    """{rows: [what is known of each op]} of one eager step of 1 row, and of a full prefill chunk.
    """
    found = {}
    for rows in (1, min(engine.prefill_chunk, engine.page_table.shape[1] * PAGE)):
        ids = rng.integers(0, engine.cfg.n_vocab, rows).tolist()
        for _ in range(2):  # the first pass warms up
            watched = WatchedOps(engine.ops, lambda *call: (weight_bytes(*call), engine.ops.mark()),
                                 lambda _: engine.ops.mark())
            with batch_of(engine, ids, 1) as batch:
                engine.ops.run_ahead()
                model.forward(engine.cfg, engine.weights, batch, engine.kv, watched)
                engine.ops.synchronize()
            sums = {}  # name -> calls, ms, bytes
            for name, (nbytes, before), after in watched.calls:
                more = 1, engine.ops.milliseconds(before, after), nbytes
                sums[name] = [a + b for a, b in zip(sums.get(name, (0, 0.0, 0)), more)]
        total = sum(ms for _, ms, _ in sums.values())
        found[rows] = [
            dict(op=name, calls=calls, ms=ms, share=ms / total, weight_bytes=nbytes or None,
                 gb_per_s=1e-6 * nbytes / ms or None)
            for name, (calls, ms, nbytes) in sorted(sums.items(), key=lambda op: -op[1][1])]
    return found


def weight_bytes(name, args):
    """Bytes of the matrix that an op reads, 0 of those that read none or only a part of it."""
    if (name, len(args)) not in (("linear", 2), ("linear_add", 3), ("linear_silu", 2)):
        return 0
    parts = ([block.packed for block in args[1].blocks] if isinstance(args[1], device.Matrix) else
             [panel.values for panel in args[1].panels if panel.values is not None])
    return sum(part.nbytes for part in parts)


# ---- bench --serve -------------------------------------------------------------------------------

# Tokens of each answer, runs that count, seconds to say which model it is and without a byte.
ANSWER, SERVE_REPEATS, HELLO_TIMEOUT, SERVE_TIMEOUT = 128, 3, 20, 600
LANGUAGES = "Python", "C", "Rust", "Go", "Java", "JavaScript", "Haskell", "Lua"
TASKS = ("reverses a linked list", "splits a line of CSV with quotes", "sorts by merging",
         "finds the shortest way through a grid", "evaluates an arithmetic expression",
         "reads Roman numerals", "prints a tree level by level", "merges overlapping intervals")


def task(number):
    """A coding task, another one for each number."""
    language, what = LANGUAGES[number // len(TASKS) % len(LANGUAGES)], TASKS[number % len(TASKS)]
    return f"Write a function in {language} that {what}. Call it f{number}."


def bench_server(url, users, api_key=None, as_json=False):
    """Time a server of the OpenAI API, this one or another, with each number of `users` at once,
    each of whom asks for ANSWER tokens; print a table. Raises RequestError if one gets no answer.
    """
    require(url.startswith(("http://", "https://")),
            f"{url} is no URL of a server; give one such as http://127.0.0.1:8080")
    try:
        model_name, records = time_server(url.rstrip("/"), users, api_key)
    except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"{url} does not answer like a server of the OpenAI API ({error}); give "
                           "the URL of one that runs, such as http://127.0.0.1:8080") from None
    print(json.dumps(dict(model=model_name, tokens=ANSWER, serve=records)) if as_json else
          "\n".join([f"{model_name}, {ANSWER} tokens for each user", "", *markdown(records)]))


def time_server(url, users, api_key):
    """(name of its model, a record for each number of users)."""
    opener, numbers, records = build_opener(ProxyHandler({})), itertools.count(), []
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key or 'none'}"}

    def ask(path, body=None):
        data, timeout = body and json.dumps(body).encode(), SERVE_TIMEOUT if body else HELLO_TIMEOUT
        try:
            return opener.open(Request(url + path, data, headers), timeout=timeout)
        except HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise RequestError(f"{error.url} answered with status {error.code}: {said}") from None

    def answer(number):
        """(milliseconds to the first token, tokens)"""
        began, first, tokens = time.perf_counter(), None, 0
        with ask("/v1/chat/completions", dict(
                model=model_name, messages=[dict(role="user", content=task(number))],
                max_tokens=ANSWER, temperature=0, ignore_eos=True, stream=True,
                stream_options=dict(include_usage=True))) as response:
            for line in response:
                event = json.loads(line[5:]) if re.match(rb"data: *{", line) else {}
                require(not event.get("error"), f"{url} failed: {event.get('error')}")
                delta = event["choices"][0]["delta"] if event.get("choices") else {}
                if any(map(delta.get, ("content", "reasoning_content", "reasoning"))):
                    first = first or 1e3 * (time.perf_counter() - began)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        require(first and tokens, f"{url} gave no text, or did not say of how many tokens")
        return first, tokens

    def run(count):
        """(tokens a second of all users together, milliseconds to the first token of each)."""
        began = time.perf_counter()
        firsts, tokens = zip(*pool.map(answer, itertools.islice(numbers, count)))
        return sum(tokens) / (time.perf_counter() - began), firsts

    with ask("/v1/models") as response:
        model_name = json.load(response)["data"][0]["id"]
    with ThreadPoolExecutor(max(users)) as pool:
        for count in users:
            progress(f"{count} users")
            run(count)  # builds the graphs
            speeds, firsts = zip(*(run(count) for _ in range(SERVE_REPEATS)))
            firsts = sum(firsts, ())
            records.append(dict(users=count, **spread(speeds), first_token_ms=median(firsts),
                                latest_ms=max(firsts)))
    return model_name, records


@contextlib.contextmanager
def batch_of(engine, ids, wanted):
    """The uploaded Batch of one sequence past the scheduler: the tokens `ids`, of which the last
    `wanted` have logits."""
    with engine.lone_sequence(len(ids)) as slot:
        yield engine.ops.upload_batch(Batch.of(
            [(slot, 0, ids, engine.rope_set(len(ids)), wanted)], engine.page_table,
            engine.tile_tokens))


class WatchedOps:
    """An op table that notes each call of another one: (name, before(name, arguments), after(what
    it gave))."""

    def __init__(self, ops, before, after):
        self.ops, self.before, self.after, self.calls = ops, before, after, []

    def __getattr__(self, name):
        op = getattr(self.ops, name)

        def watched(*args, **options):
            before, result = self.before(name, args), op(*args, **options)
            given = args[-1] if result is None else result  # ops without result change h, the last
            self.calls.append((name, before, self.after(given)))
            return result
        return watched


# ---- perplexity ------------------------------------------------------------------------------


def perplexity(engine, text, window, as_json=False):
    """Perplexity over non-overlapping windows of `window` tokens, each from an empty cache.

    Only predictions in the second half of a window count, as is usual for GGUF files; a rest is
    dropped.
    """
    ids = engine.tokenizer.encode(text, special=False, bos=False)
    count = len(ids) // window if window >= 4 else 0
    require(count, f"the text has {len(ids)} tokens, a window {window}; give a longer text or a "
            "window of 4 tokens or more with -c")
    losses = []  # mean of each window
    for index in range(count):
        part = np.array(ids[index * window:(index + 1) * window])
        logits = engine.logits(part)[window // 2:-1].astype(np.float64)
        if not np.isfinite(logits).all():
            raise DeviceError("the logits are not finite: a value left the range of float16; "
                              "try --kv f32")
        logits -= logits.max(axis=-1, keepdims=True)
        wanted = logits[np.arange(len(logits)), part[window // 2 + 1:]]
        losses.append(float(np.mean(np.log(np.exp(logits).sum(axis=-1)) - wanted)))
        value = math.exp(sum(losses) / len(losses))
        progress(f"window {index + 1} of {count}: {value:.4f}", last=index + 1 == count)
    print(json.dumps(dict(perplexity=value, window=window, windows=count)) if as_json else
          f"perplexity {value:.4f} over {count} windows of {window} tokens")
    return value


# ---- diff ------------------------------------------------------------------------------------

# Of the buffer's largest value: f16 inputs, summed over the layers before; with q8 a value may
# round to its neighbour, 1/127 of its block's largest away. Measured on eight models, 9 and 200
# tokens: at most 8.9e-3, and 3.0e-2 for q8 (after attention over rounded K and V).
DIFF_TOLERANCE = {"f32": 1e-2, "f16": 1e-2, "q8": 4e-2}


def buffers_of(engine, text):
    """[(op, layer or -1, a copy of what it gave, as rows)] of one pass over the prompt."""
    ids, place = engine.checked_ids(engine.tokenize(text)), {"layer": -1}

    def numbered(layers):
        for place["layer"], layer in enumerate(layers):
            yield layer
        place["layer"] = -1

    def copied(value):
        value = engine.ops.download(getattr(value, "weights", value))  # weights: of experts
        return value.reshape(len(value), -1).copy()

    engine.weights.layers = numbered(engine.weights.layers)
    watched = WatchedOps(engine.ops, lambda *_: place["layer"], copied)
    with batch_of(engine, ids, len(ids)) as batch:
        model.forward(engine.cfg, engine.weights, batch, engine.kv, watched)
    return watched.calls


def diff(path, text, kv_format):
    """Run the prompt on both backends, compare every buffer. Returns 1 at one that differs."""
    runs, records = [], []
    for backend in "cuda", "cpu":
        with Engine(path, backend, kv_format, max_rows=1) as engine:
            runs.append(buffers_of(engine, text))
    for (name, layer, actual), (_, _, expected) in zip(*runs):
        largest = float(np.abs(expected).max())
        error = float(np.abs(actual - expected).max())
        good = error <= DIFF_TOLERANCE[kv_format] * largest  # false for NaN
        records.append(dict(result_of=name, layer=layer if layer >= 0 else "", largest=largest,
                            error=error, share=error / largest if largest else 0.0))
        if not good:
            break
    print(*columns(records), "all buffers agree" if good else "the last one differs", sep="\n")
    return int(not good)


# ---- replay ----------------------------------------------------------------------------------

# Fields of a receipt that may differ here; then the bits may, too.
SURROUNDINGS = "engine_version", "backend", "gpu_architecture", "cubin_sha256"


def replay(path, model_path, key_path=None, backend="auto"):
    """Run again what a receipt describes. Returns 1 if other tokens come out than `path` holds.

    path: JSON file with receipt, prompt_token_ids and token_ids, such as an answer of the server.
    key_path: the key, to check the signature as well.
    Raises RequestError if the file, the key or the model is not the one of the receipt.
    """
    receipt, prompt, tokens = receipts.read(path)
    require(prompt is not None and tokens is not None, f"{path} holds no token ids: save the "
            'server\'s answer to a request with "receipt": true as it is')
    if key_path:
        receipts.verify(receipts.load_key(key_path, create=False), receipt)
    receipts.check_tokens(receipt, prompt, None)
    try:
        fields = dict(receipt["sampling"])
        options = {name: fields.pop(name) for name in ("max_tokens", "ignore_eos", "choice")}
        fields["logit_bias"] = {int(id_): bias for id_, bias in fields["logit_bias"].items()}
        sampling = Sampling(**fields)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RequestError("the receipt does not say how its tokens were sampled") from None
    model_hash = receipts.hash_model(gguf_file.GGUF(model_path).paths)
    require(model_hash == receipt.get("model_sha256"), f"{model_path} is not the model of the "
            f"receipt, whose SHA-256 is {receipt.get('model_sha256')}; name that file with -m")
    with Engine(model_path, backend, receipt.get("kv_format"), max_rows=1) as engine:
        request = engine.submit(prompt, sampling, **options)
        here = receipts.describe(engine, request, receipt.get("id"), model_hash)
        require(here["rope_set"] == receipt.get("rope_set"),
                "the receipt names other RoPE factors than its lengths call for")
        for name in SURROUNDINGS:
            if here[name] != receipt.get(name):
                print(f"{name} was {receipt.get(name)} and is {here[name]} here: bits may differ",
                      file=sys.stderr)
        reason = receipt.get("finish_reason")
        cancelled = reason == "cancelled"
        end = len(tokens) if cancelled else request.max_tokens
        while len(request.tokens) < end and engine.step():
            pass
        if request.error:
            raise request.error
    new = request.tokens[:end]
    if new != tokens:
        at = common_prefix(tokens, new)
        was, now = ((ids[at:] or ["nothing"])[0] for ids in (tokens, new))
        print(f"different at token {at}: it was {was} and is {now} here")
        return 1
    receipts.check_tokens(receipt, None, tokens)
    if not cancelled and request.finish_reason != reason:
        print(f"different: finish_reason was {reason} and is {request.finish_reason} here")
        return 1
    signed = "its signature is valid" if key_path else "its signature was not checked (no --key)"
    print(f"equal: all {len(tokens)} tokens came out again; {signed}")
    return 0
