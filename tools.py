"""What a user asks about a model or a machine: doctor."""
import json
import math

import device
import model
from errors import ModelError
from kv import PAGE
from tokenizer import Tokenizer

# ---- doctor: what a model is and what this machine can do with it --------------------------------

# Matrices of these types stay as they are on the GPU; all others are expanded to F16 there.
CUDA_FORMATS = {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "F16", "BF16"}
KV_FORMATS = "f32", "f16", "q8"
CUDA_OVERHEAD = 512 << 20  # bytes for the CUDA context and the scratch buffers of a step


class CheckOnly:
    """An op table that takes weights and does nothing: loading with it checks a file's tensors."""

    def matrix(self, tensors, bias=None):
        """Read nothing."""

    def vector(self, array):
        """The loader has looked at the values already."""


def doctor(path, as_json=False):
    """Print what `examine` finds out, as a table or as one JSON object.

    Raises ModelError where the file is damaged or does not hold what its family needs.
    """
    report = examine(path)
    print(json.dumps(report) if as_json else "\n".join(table(report)))


def examine(path):
    """The report as a dict of plain values. Reads the header and the norm vectors, no matrix."""
    gguf = model.GGUF(path)
    problem = model.unsupported(gguf)
    cfg = None if problem else model.load(gguf, CheckOnly())[0]
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
        "layers": gguf.value(f"{family}.block_count", int, None),
        "context": gguf.value(f"{family}.context_length", int, None),
        "formats": formats,
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
            cuda = "own kernel" if kind in CUDA_FORMATS else "expanded to F16"
            cpu = "as it is" if kind == "F32" else "expanded to F32"
        entry = formats.setdefault((is_vector, kind), {
            "type": kind, "used_for": "vectors" if is_vector else "matrices",
            "tensors": 0, "bytes": 0, "gpu_bytes": 0, "cuda": cuda, "cpu": cpu})
        entry["tensors"] += 1
        entry["bytes"] += tensor.data.nbytes
        entry["gpu_bytes"] += (2 * math.prod(tensor.shape) if cuda == "expanded to F16"
                               else tensor.data.nbytes)
    return sorted(formats.values(), key=lambda entry: -entry["bytes"])


def describe_kv(cfg, card, weight_bytes):
    """For each KV format: bytes per token and of a whole context, tokens that fit on the card."""
    if cfg is None:
        return None
    described = {}
    for kv_format in KV_FORMATS:
        per_token = cfg.kv_bytes_per_token(kv_format)
        fits = None
        if card:
            room = max(0, card["free_bytes"] - weight_bytes - CUDA_OVERHEAD)
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
    yield row("model", f"{name} ({printable(report['architecture'])}, {layers}"
                       f"{report['parameters']:,} parameters, {size(report['file_bytes'])}{files})")
    yield row("family", printable(report["problem"]) if report["problem"] else "supported")
    yield row("context", f"{report['context']:,} tokens" if report["context"] else "unknown")
    yield row("tokenizer", printable(tokenizer_line(report["tokenizer"])))
    yield row("chat", "template in the file" if report["chat_template"] else "no template")
    card = report["gpu"]
    yield row("gpu", f"none: {report['gpu_problem']}" if card is None else
              f"{card['name']} (sm_{card['arch']}, driver for CUDA {card['driver']}), "
              f"{size(card['free_bytes'])} of {size(card['total_bytes'])} free")
    yield row("kernels", report["cubin"])
    for note in report["notes"]:
        yield row("note", note)
    yield ""
    yield row("weights", f"{'':10}{'tensors':>9}{'size':>12}  {'on CUDA':17}on the CPU")
    for entry in report["formats"]:
        yield row(entry["type"], f"{entry['used_for']:10}{entry['tensors']:>9,}"
                  f"{size(entry['bytes']):>12}  {entry['cuda']:17}{entry['cpu']}")
    if report["kv"]:
        yield ""
        yield row("--kv", f"{'bytes/token':>19}{'context':>12}  fits on the card now")
        for kv_format, entry in report["kv"].items():
            fits = entry["fits_tokens"]
            whole = " (the whole context)" if fits and fits >= report["context"] else ""
            yield row(kv_format, f"{entry['bytes_per_token']:>19,}"
                      f"{size(entry['context_bytes']):>12}  "
                      + ("no GPU" if fits is None else f"{fits:,} tokens{whole}"))


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
    """Text from a file without the control characters that could steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
