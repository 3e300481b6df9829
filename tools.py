"""What a user asks about a model, a machine or an answer: doctor, bench, ..., replay."""
import json
import math
import sys
import time
from itertools import zip_longest

import numpy as np

import device
import model
import receipts
import reference
import spec
from errors import DeviceError, ModelError, RequestError
from kv import PAGE, Batch
from leone import PENDING, Engine
from sampling import Sampling
from tokenizer import Tokenizer

# ---- doctor: what a model is and what this machine can do with it --------------------------------

KV_FORMATS = "f32", "f16", "q8"
CUDA_OVERHEAD = 512 << 20  # bytes for the CUDA context and the scratch buffers of a step


class CheckOnly:
    """An op table that takes weights and does nothing: loading with it checks a file's tensors."""

    def matrix(self, tensors, bias=None):
        """Read nothing."""

    experts = matrix

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
                request, *_ = [engine.submit(prompt, Sampling(seed=1), 16, True, salt=str(others))
                               for prompt in (ids, *others)]
                while engine.step():
                    pass
                answers.append((request.tokens, request.logprobs))
            same[kv_format] = len(set(logits)) == 1 and answers[0] == answers[1]
    return same


def examine(path):
    """The report as a dict of plain values. Reads the header and the norm vectors, no matrix."""
    gguf = model.GGUF(path)
    problem = model.unsupported(gguf)
    cfg, weights = (None, None) if problem else model.load(gguf, CheckOnly())
    family = gguf.value("general.architecture", str)
    card = device.probe()
    on_card = card if isinstance(card, dict) else None
    formats = count_formats(gguf.tensors.values())
    return {
        "path": str(gguf.path),
        "files": len(gguf.paths),
        "file_bytes": sum(part.stat().st_size for part in gguf.paths),
        "name": gguf.value("general.name", str, None),
        "architecture": family,
        "supported": problem is None,
        "problem": problem,
        "parameters": sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
        "active_parameters": weights.active_parameters if cfg and cfg.n_experts else None,
        "state_bytes": cfg and cfg.state_bytes(PENDING),
        "layers": gguf.value(f"{family}.block_count", int, None),
        "context": gguf.value(f"{family}.context_length", int, None),
        "formats": formats,
        "cuda_problem": cuda_problem(cfg),
        "kv": describe_kv(cfg, on_card, sum(entry["gpu_bytes"] for entry in formats)),
        "gpu": on_card,
        "gpu_problem": None if on_card else card,
        "cubin": device.cubin_state(),
        "tokenizer": describe_tokenizer(gguf, needed=problem is None),
        "chat_template": gguf.value("tokenizer.chat_template", str, None) is not None,
        "notes": notes(gguf, family, cfg),
    }


def count_formats(tensors):
    """One entry per type, matrices and vectors apart: how many, how large, what becomes of them."""
    formats = {}
    for tensor in tensors:
        kind, is_vector = tensor.type.name, len(tensor.shape) == 1
        if is_vector:
            cuda, cpu = "as it is", "as it is"
        elif not model.can_dequantise(tensor.type):
            cuda, cpu = "not supported", "not supported"
        else:
            cuda = ("as it is" if kind in device.PACKINGS else
                    "stored as F16" if kind in device.REPACKED_AS_F16 else "expanded to F16")
            cpu = "as it is" if kind == "F32" else "expanded to F32"
        entry = formats.setdefault((is_vector, kind), {
            "type": kind, "used_for": "vectors" if is_vector else "matrices",
            "tensors": 0, "bytes": 0, "gpu_bytes": 0, "cuda": cuda, "cpu": cpu})
        entry["tensors"] += 1
        entry["bytes"] += tensor.data.nbytes
        entry["gpu_bytes"] += (2 * math.prod(tensor.shape) if cuda.endswith("F16")
                               else tensor.data.nbytes)
    return sorted(formats.values(), key=lambda entry: -entry["bytes"])


def cuda_problem(cfg, kv_format="f16"):
    """Why the CUDA kernels have no attention for this model, or None."""
    return cfg and device.attention_problem(cfg, kv_format)


def describe_kv(cfg, card, weight_bytes):
    """For each KV format: bytes per token and of a whole context, tokens of one sequence that fit
    on the card."""
    if cfg is None:
        return None
    described = {}
    for kv_format in KV_FORMATS:
        per_token = cfg.kv_bytes_per_token(kv_format)
        fits = None
        if card and not cuda_problem(cfg, kv_format):
            held = weight_bytes + CUDA_OVERHEAD + cfg.state_bytes(PENDING)
            room = max(0, card["free_bytes"] - held)
            fits = room // (per_token * PAGE) * PAGE
        described[kv_format] = {"bytes_per_token": per_token,
                                "context_bytes": per_token * cfg.n_ctx, "fits_tokens": fits}
    return described


def describe_tokenizer(gguf, needed):
    """What the tokenizer says of itself, or why there is none: an error only if it is needed."""
    try:
        tokenizer = Tokenizer(gguf.metadata)
        tokenizer.prepare()
        return tokenizer.describe()
    except ModelError as error:
        if needed:
            raise
        return {"problem": str(error)}


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
    name = printable(report["name"] or report["path"])
    layers = f"{report['layers']} layers, " if report["layers"] else ""
    files = f" in {report['files']} files" if report["files"] > 1 else ""
    active = f" ({report['active_parameters']:,} a token)" if report["active_parameters"] else ""
    yield row("model", f"{name} ({printable(report['architecture'])}, {layers}"
                       f"{report['parameters']:,} parameters{active}, "
                       f"{size(report['file_bytes'])}{files})")
    yield row("family", printable(report["problem"]) if report["problem"] else "supported")
    yield row("context", f"{report['context']:,} tokens" if report["context"] else "unknown")
    yield row("tokenizer", printable(tokenizer_line(report["tokenizer"])))
    yield row("chat", "template in the file" if report["chat_template"] else "no template")
    card = report["gpu"]
    yield row("gpu", f"none: {report['gpu_problem']}" if card is None else
              f"{card['name']} (sm_{card['arch']}, driver for CUDA {card['driver']}), "
              f"{size(card['free_bytes'])} of {size(card['total_bytes'])} free")
    yield row("kernels", report["cuda_problem"] or report["cubin"])
    for note in report["notes"]:
        yield row("note", note)
    for kv_format, same in report.get("same_bits", {}).items():
        yield row("bits", f"{kv_format} KV: " + ("the same, however a prompt is cut or batched"
                                                 if same else "NOT THE SAME; please report this"))
    yield ""
    yield row("weights", f"{'':10}{'tensors':>9}{'size':>12}  {'on CUDA':17}on the CPU")
    for entry in report["formats"]:
        yield row(entry["type"], f"{entry['used_for']:10}{entry['tensors']:>9,}"
                  f"{size(entry['bytes']):>12}  {entry['cuda']:17}{entry['cpu']}")
    if report["state_bytes"]:
        yield row("state", f"{size(report['state_bytes'])} for each live session, beside its KV")
    if report["kv"]:
        yield ""
        yield row("--kv", f"{'bytes/token':>19}{'context':>12}  fits on the card now")
        for kv_format, entry in report["kv"].items():
            fits = entry["fits_tokens"]
            whole = " (the whole context)" if fits and fits >= report["context"] else ""
            yield row(kv_format, f"{entry['bytes_per_token']:>19,}"
                      f"{size(entry['context_bytes']):>12}  "
                      + (f"{fits:,} tokens{whole}" if fits is not None else
                         "not on CUDA" if card else "no GPU"))


def tokenizer_line(tokenizer):
    if "problem" in tokenizer:
        return "none: " + tokenizer["problem"]
    named = lambda token: f"{token['id']} {token['text']!r}" if token else "none"
    pre = f" / {tokenizer['pre']}" if tokenizer["pre"] else ""
    return (f"{tokenizer['model']}{pre}, {tokenizer['tokens']:,} tokens, "
            f"bos {named(tokenizer['bos'])}, eos {named(tokenizer['eos'])}")


def row(label, text):
    return f"{label:11}{text}"


def size(n_bytes):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024 or unit == "GiB":
            return f"{n_bytes:,.0f} B" if unit == "B" else f"{n_bytes:,.1f} {unit}"
        n_bytes /= 1024


def printable(text):
    """Text in one line, with escapes for control characters, which could steer a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


# ---- bench -----------------------------------------------------------------------------------

PROMPT, NEW = 128, 128  # tokens of a bench request
PREFILLS = 512, 4096  # prompt lengths whose reading is timed
REPEATS = 5


def bench(engine, rows, profile=False, as_json=False, synthetic=None):
    """Time decoding at each number of sequences in `rows`, and prefill; print a table or JSON.

    With drafts on, decoding is timed once more with them. synthetic: the share of drafts that are
    to be right; the proposer works as ever, then its tokens are replaced.
    """
    rng = np.random.default_rng(7)

    def run(n, prompt, new):
        """Seconds to the last first token, seconds from there to the end."""
        requests = [engine.submit(rng.integers(0, engine.cfg.n_vocab, prompt).tolist(),
                                  Sampling(temperature=0), new, ignore_eos=True,
                                  speculation=False) for _ in range(n)]
        began = time.perf_counter()
        while engine.step():
            pass
        error = next((r.error for r in requests if r.error), None)
        if error:
            raise error
        first = max(r.first_token for r in requests)
        return first - began, max(r.finished for r in requests) - first

    quick = engine.ops.name == "cpu"  # seconds a row there
    new, repeats = (16, 3) if quick else (NEW, REPEATS)
    roof = engine.ops.measure_bandwidth()
    result = dict(model=engine.cfg.name, backend=engine.ops.name, card=engine.ops.card_name,
                  kv=engine.kv.format, read_bandwidth_gb_per_s=roof, decode=[], prefill=[],
                  drafts=[])
    longest = min(engine.page_table.shape[1] * PAGE - 1, engine.cfg.n_ctx)
    if max(rows) * engine.pages_for(range(PROMPT), new) > engine.pool.n_pages:
        raise RequestError(f"{max(rows)} sequences of {PROMPT + new} tokens do not fit at once in "
                           f"{engine.pool.n_pages * PAGE} tokens of KV cache; use fewer --rows or "
                           "a larger --ctx")
    for n in rows:
        run(n, PROMPT, 4)  # builds the graphs
        speeds = sorted(n * (new - 1) / run(n, PROMPT, new)[1] for _ in range(repeats))
        speed = speeds[repeats // 2]
        gigabytes = speed / n * engine.bytes_per_step(n) / 1e9
        result["decode"].append(dict(
            rows=n, tokens_per_s=speed, slowest=speeds[0], fastest=speeds[-1],
            ms_per_step=1e3 * n / speed, gb_per_s=gigabytes, share=gigabytes / roof))
        if type(engine.proposer) is not spec.Proposer:
            result["drafts"].append(bench_drafts(engine, n, new, repeats, synthetic))
    flop = 2 * engine.weights.active_parameters
    for length in PREFILLS:
        if length < longest and not (quick and length > 512):
            run(1, length, 1)
            seconds = sorted(run(1, length, 1)[0] for _ in range(repeats))[repeats // 2]
            result["prefill"].append(dict(tokens=length, tokens_per_s=length / seconds,
                                          tflop_per_s=flop * length / seconds / 1e12))
    if profile:
        result["ops"] = profile_ops(engine, rng)
    print(json.dumps(result) if as_json else bench_table(result))
    return result


def bench_drafts(engine, n, new, repeats, synthetic):
    """Decode `n` sequences plainly, then the same ones with drafts, of which a share of `synthetic`
    is made right if it is not None."""
    rng, real = np.random.default_rng(8), engine.proposer
    prompts = [rng.integers(0, engine.cfg.n_vocab, PROMPT).tolist() for _ in range(n)]

    def run(speculation):
        requests = [engine.submit(prompt, Sampling(temperature=0), new, ignore_eos=True,
                                  speculation=speculation) for prompt in prompts]
        while engine.step():
            pass
        began, ended = (max(getattr(r, name) for r in requests)
                        for name in ("first_token", "finished"))
        return n * (new - 1) / (ended - began), {tuple(r.prompt): r.tokens for r in requests}

    plain, (_, answers) = sorted(run(False)[0] for _ in range(repeats)), run(False)
    if synthetic is not None:
        engine.proposer = Synthetic(real, answers, synthetic)
    run(True)  # builds graphs, learns what pays
    before = engine.stats
    drafted = sorted(run(True)[0] for _ in range(repeats))
    after, engine.proposer, controller = engine.stats, real, engine.controller
    tokens, sweeps = (after[name] - before[name] for name in ("generated_tokens", "sweeps"))
    tried = controller.tried[-1, 1:]
    return dict(rows=n, synthetic_acceptance=synthetic, tokens_per_s=drafted[repeats // 2],
                gain=drafted[repeats // 2] / plain[repeats // 2], tokens_per_sweep=tokens / sweeps,
                right_by_place=(controller.right[-1, 1:] / np.maximum(tried, 1e-9))[tried > 0.5]
                .tolist())


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
    lines = [f"{result['model']}, {result['card']}, {result['kv']} KV, "
             f"memory reads {result['read_bandwidth_gb_per_s']:.0f} GB/s", "",
             "rows    tok/s (slowest .. fastest)   ms/step    GB/s   share"]
    for d in result["decode"]:
        spread = f"({d['slowest']:8.1f} .. {d['fastest']:8.1f})"
        lines.append(f"{d['rows']:4d} {d['tokens_per_s']:8.1f} {spread}"
                     f" {d['ms_per_step']:9.3f} {d['gb_per_s']:7.1f} {d['share']:6.1%}")
    for d in result["drafts"]:
        assumed = d["synthetic_acceptance"]
        note = "" if assumed is None else f" (SYNTHETIC: {assumed:.0%} of the drafts made right)"
        places = " ".join(f"{share:.0%}" for share in d["right_by_place"])
        lines.append(f"{d['rows']:4d} {d['tokens_per_s']:8.1f} with drafts, {d['gain']:.2f} times "
                     f"plain, {d['tokens_per_sweep']:.2f} tokens a sweep, right: {places}{note}")
    lines.append("")
    for p in result["prefill"]:
        lines.append(f"prefill {p['tokens']:5d}: {p['tokens_per_s']:8.0f} tok/s, "
                     f"{p['tflop_per_s']:.1f} TFLOP/s")
    for rows, ops in result.get("ops", {}).items():
        total = sum(ms for _, ms in ops.values())
        lines += ["", f"one step of {rows} rows: {total:.3f} ms in ops",
                  "op            calls        ms   share"]
        for name, (calls, ms) in sorted(ops.items(), key=lambda item: -item[1][1]):
            lines.append(f"{name:12} {calls:6d} {ms:9.3f} {ms / total:7.1%}")
    return "\n".join(lines)


def profile_ops(engine, rng):
    """{rows: {op: (calls, ms)}} of one eager step of 1 row, and of a full prefill chunk."""
    found = {}
    for rows in (1, min(engine.prefill_chunk, engine.page_table.shape[1] * PAGE)):
        timed = TimedOps(engine.ops)
        engine.make_room(-(-rows // PAGE))
        pages = engine.pool.take(-(-rows // PAGE))
        table = np.array([pages], np.int32)
        ids = rng.integers(0, engine.cfg.n_vocab, rows).tolist()
        batch = engine.ops.upload_batch(Batch.of([(0, 0, ids, 0, 1)], table, engine.tile_tokens))
        for _ in range(2):  # the first call warms up
            timed.start()
            model.forward(engine.cfg, engine.weights, batch, engine.kv, timed)
            found[rows] = timed.stop()
        engine.pool.give(pages)
    return found


class TimedOps:
    """An op table that times every call of another one."""

    def __init__(self, ops):
        self.ops, self.marks = ops, []

    def __getattr__(self, name):
        op = getattr(self.ops, name)

        def timed(*args, **options):
            before = self.ops.mark()
            result = op(*args, **options)
            self.marks.append((name, before, self.ops.mark()))
            return result
        return timed

    def start(self):
        self.marks = []
        self.ops.run_ahead()

    def stop(self):
        self.ops.synchronize()
        found = {}
        for name, before, after in self.marks:
            calls, ms = found.get(name, (0, 0.0))
            found[name] = calls + 1, ms + self.ops.milliseconds(before, after)
        return found


# ---- perplexity ------------------------------------------------------------------------------


def perplexity(engine, text, window, as_json=False):
    """Perplexity over non-overlapping windows of `window` tokens, each from an empty cache.

    Only predictions in the second half of a window count, as is usual for GGUF files; a rest is
    dropped.
    """
    ids = engine.tokenizer.encode(text, special=False, bos=False)
    count = len(ids) // window if window >= 4 else 0
    if not count:
        raise RequestError(f"the text has {len(ids)} tokens, a window {window}; give a longer text "
                           "or a window of 4 tokens or more with -c")
    total, predictions = 0.0, 0
    for index in range(count):
        part = np.array(ids[index * window:(index + 1) * window])
        logits = engine.logits(part)[window // 2:-1].astype(np.float64)
        if not np.isfinite(logits).all():
            raise DeviceError("the logits are not finite: a value left the range of float16; "
                              "try --kv f32")
        wanted = part[window // 2 + 1:]
        largest = logits.max(axis=-1)
        log_sum = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
        total += float((log_sum - logits[np.arange(len(wanted)), wanted]).sum())
        predictions += len(wanted)
        if sys.stderr.isatty():
            print(f"window {index + 1} of {count}: {np.exp(total / predictions):.4f}",
                  end="\r\033[K" if index + 1 == count else "\r", file=sys.stderr, flush=True)
    value = float(np.exp(total / predictions))
    print(json.dumps(dict(perplexity=value, window=window, windows=count)) if as_json else
          f"perplexity {value:.4f} over {count} windows of {window} tokens")
    return value


# ---- diff ------------------------------------------------------------------------------------

# Of the buffer's largest value: f16 inputs, summed over the layers before; with q8 a value may
# round to its neighbour, 1/127 of its block's largest away. Measured on eight models, 9 and 200
# tokens: at most 8.9e-3, and 3.0e-2 for q8 (after attention over rounded K and V).
DIFF_TOLERANCE = {"f32": 1e-2, "f16": 1e-2, "q8": 4e-2}


class ShownOps:
    """An op table that keeps a copy of what each op of another one gave or changed."""

    def __init__(self, ops):
        self.ops, self.layer, self.buffers = ops, -1, []

    def numbered(self, layers):
        for self.layer, layer in enumerate(layers):
            yield layer
        self.layer = -1

    def __getattr__(self, name):
        op = getattr(self.ops, name)

        def shown(*args, **options):
            result = op(*args, **options)
            value = args[-1] if result is None else result  # ops without result change h, the last
            value = getattr(value, "weights", value)  # of experts
            value = self.ops.download(value)
            self.buffers.append((name, self.layer, value.reshape(len(value), -1).copy()))
            return result
        return shown


def diff(path, text, kv_format):
    """Run the prompt on both backends, compare every buffer. Returns 1 at one that differs."""
    gguf = model.GGUF(path)
    tokenizer = Tokenizer(gguf.metadata)
    ids = tokenizer.encode(text, special=False, bos=tokenizer.add_bos)
    if not ids:
        raise RequestError("the prompt is empty; give some text")
    runs = []
    for ops in (reference.Reference(np.float32), device.Device()):
        try:
            cfg, weights = model.load(gguf, ops)
            pages = -(-len(ids) // PAGE)
            kv = ops.pages(cfg, pages, kv_format, 1)
            rope_set = int(len(cfg.rope_sets) > 1 and len(ids) > cfg.rope_long_from)
            batch = Batch.of([(0, 0, ids, rope_set, len(ids))],
                             np.arange(pages, dtype=np.int32)[None], ops.tile_tokens(cfg))
            shown = ShownOps(ops)
            weights.layers = shown.numbered(weights.layers)
            model.forward(cfg, weights, ops.upload_batch(batch), kv, shown)
        finally:
            ops.close()
        runs.append(shown.buffers)
    print("layer  result of         largest     error  error/largest")
    for (name, layer, expected), (_, _, actual) in zip(*runs):
        largest = float(np.abs(expected).max())
        error = float(np.abs(actual - expected).max())
        good = error <= DIFF_TOLERANCE[kv_format] * largest  # false for NaN
        print(f"{layer if layer >= 0 else '':5}  {name:14} {largest:10.4g} {error:9.3g} "
              f"{error / largest if largest else 0:10.2e}{'' if good else '  <-- differs'}")
        if not good:
            return 1
    print("all buffers agree")
    return 0


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
    if prompt is None or tokens is None:
        raise RequestError(f"{path} holds no token ids: save the server's answer to a request with "
                           '"receipt": true as it is')
    if key_path:
        receipts.verify(receipts.load_key(key_path, create=False), receipt)
    receipts.check_tokens(receipt, prompt, None)
    try:
        fields = dict(receipt["sampling"])
        options = {name: fields.pop(name) for name in ("max_tokens", "ignore_eos", "choice")}
        fields["logit_bias"] = {int(id_): bias for id_, bias in fields["logit_bias"].items()}
        sampling = Sampling(**fields)
        if not 0 <= options["choice"] < 2**32:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RequestError("the receipt does not say how its tokens were sampled") from None
    model_hash = receipts.hash_model(model.GGUF(model_path).paths)
    if model_hash != receipt.get("model_sha256"):
        raise RequestError(f"{model_path} is not the model of the receipt, whose SHA-256 is "
                           f"{receipt.get('model_sha256')}; name that file with -m")
    with Engine(model_path, backend, receipt.get("kv_format"), max_rows=1) as engine:
        request = engine.submit(prompt, sampling, **options)
        here = receipts.describe(engine, request, receipt.get("id"), model_hash)
        if here["rope_set"] != receipt.get("rope_set"):
            raise RequestError("the receipt names other RoPE factors than its lengths call for")
        for name in SURROUNDINGS:
            if here[name] != receipt.get(name):
                print(f"{name} was {receipt.get(name)} and is {here[name]} here: bits may differ",
                      file=sys.stderr)
        cancelled = receipt.get("finish_reason") == "cancelled"
        end = len(tokens) if cancelled else request.max_tokens
        while len(request.tokens) < end and engine.step():
            pass
        if request.error:
            raise request.error
    new = request.tokens[:end]
    if new != tokens:
        at = next(i for i, pair in enumerate(zip_longest(tokens, new)) if pair[0] != pair[1])
        was, now = ((ids[at:] or ["nothing"])[0] for ids in (tokens, new))
        print(f"different at token {at}: it was {was} and is {now} here")
        return 1
    receipts.check_tokens(receipt, None, tokens)
    if not cancelled and request.finish_reason != receipt.get("finish_reason"):
        print(f"different: finish_reason was {receipt.get('finish_reason')} and is "
              f"{request.finish_reason} here")
        return 1
    signed = "its signature is valid" if key_path else "its signature was not checked (no --key)"
    print(f"equal: all {len(tokens)} tokens came out again; {signed}")
    return 0
