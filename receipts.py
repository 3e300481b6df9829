#!/usr/bin/env python3
"""Receipts: signed statements of what an answer was computed from, and of what it was.

    python receipts.py verify FILE --key FILE

A receipt is a JSON object (schema_version, id, created, model_sha256, ..., see `describe`) whose
field `hmac` is the HMAC-SHA256, in hex, of all its other fields in canonical JSON: names sorted,
no spaces, everything but ASCII escaped, no NaN or infinity, a float with an integral value written
as that integer (to JSON 1.0 and 1 are one number, and browsers write the latter), any other float
as the shortest decimal that reads back as the same double. Token ids are hashed as little-endian
int32. Verifying needs this file, errors.py, Python and the key.
"""
import argparse
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

from errors import RequestError, require

SCHEMA_VERSION = 1

# ---- the key ---------------------------------------------------------------------------------


def load_key(path, create=True):
    """The bytes of the key file at `path`; where there is none, one is made.

    Raises RequestError if others may read it or it is no key, OSError if it cannot be read.
    """
    path = Path(path)
    if create and not path.exists():
        create_key(path)
    info = path.stat()
    require(path.is_file() and not info.st_mode & 0o077 and 32 <= info.st_size <= 4096,
            f"key file {path} has mode {info.st_mode & 0o777:o} and {info.st_size} bytes; it must "
            "be a file of mode 600 with 32 to 4096 bytes")
    return path.read_bytes()


def create_key(path):
    """Let a new key appear at `path` in one piece; if another process is faster, its key stays."""
    with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # mode 0600
        file.write(secrets.token_bytes(32))
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)  # unlike a rename it never replaces


# ---- making and verifying --------------------------------------------------------------------


def describe(engine, request, answer_id, model_sha256, template=None):
    """What a receipt says of a finished request.

    template: text of the chat template that made the prompt, None where none did.
    """
    from leone import VERSION  # here, because verifying needs no engine
    on_card = engine.ops.name == "cuda"
    return {
        "schema_version": SCHEMA_VERSION, "id": answer_id, "created": int(time.time()),
        "engine_version": VERSION, "backend": engine.ops.name, "kv_format": engine.kv.format,
        "gpu_architecture": f"sm_{engine.ops.arch}" if on_card else "cpu",
        "cubin_sha256": engine.ops.fingerprint if on_card else None,
        "model_sha256": model_sha256, "rope_set": request.rope_set,
        "template_sha256": None if template is None else sha256(template.encode()),
        "sampling": {
            **vars(request.sampling), "stop": list(request.sampling.stop),
            "logit_bias": {str(token): bias for token, bias in request.sampling.bias_pairs()},
            "choice": request.choice, "max_tokens": request.max_tokens,
            "ignore_eos": request.ignore_eos},
        "prompt_tokens": len(request.prompt), "completion_tokens": len(request.tokens),
        "prompt_tokens_sha256": hash_tokens(request.prompt),
        "output_tokens_sha256": hash_tokens(request.tokens),
        "finish_reason": request.finish_reason,
    }


def make(key, fields):
    """The receipt of these fields: the same, signed."""
    return {**fields, "hmac": signature(key, fields)}


def verify(key, receipt):
    """Raise RequestError unless the receipt, a dict, was made with `key` and is unchanged."""
    fields = dict(receipt)
    given = str(fields.pop("hmac", "")).encode("utf-8", "replace")
    require(hmac.compare_digest(signature(key, fields).encode(), given),
            "the receipt was changed, or made with another key")
    require(fields.get("schema_version") == SCHEMA_VERSION,
            f"the receipt is of another version than {SCHEMA_VERSION}; take a newer Leone")


def check_tokens(receipt, prompt, output):
    """Raise RequestError unless the receipt is about these token ids (None: not known)."""
    for what, ids in ("prompt", prompt), ("output", output):
        require(ids is None or hash_tokens(ids) == receipt.get(f"{what}_tokens_sha256"),
                f"the {what} token ids are not those of the receipt")


def signature(key, fields):
    plain = json.loads(json.dumps(fields, allow_nan=False), parse_float=integral)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def integral(text):
    """The number that JSON has as this text, 1.0 as an integer."""
    return int(float(text)) if float(text).is_integer() else float(text)


def hash_tokens(ids):
    return sha256(struct.pack(f"<{len(ids)}i", *ids))


def sha256(data):
    return hashlib.sha256(data).hexdigest()


# ---- the hash of a model ---------------------------------------------------------------------


class ModelHash:
    """SHA-256 of a model's files, all parts in order: of those that were there when this was made,
    as the model that was loaded then is what is used. Any thread may ask for it."""

    def __init__(self, paths):
        self.paths, self.identity, self.sha256 = paths, identify(paths), None
        self.lock = threading.Lock()  # whoever comes first computes it, the others wait

    def begin(self):
        """Compute it beside everything else."""
        threading.Thread(target=self.compute, name="model hash", daemon=True).start()

    def compute(self):
        with self.lock, contextlib.suppress(OSError):  # result() says that there is none
            if self.sha256 is None and identify(self.paths) == self.identity:
                sha256 = hash_model(self.paths)
                self.sha256 = sha256 if identify(self.paths) == self.identity else None

    def result(self):
        """The hash in hex; waits for it. Raises RequestError if there are other files by now."""
        self.compute()
        require(self.sha256, "the model file has changed or gone since it was loaded, so nothing "
                "can be said of it; restart with the file in place", 503, "model_changed")
        return self.sha256


def identify(paths):
    """What changes when the files do. Raises OSError."""
    infos = [os.stat(path) for path in paths]
    return " ".join(f"{i.st_dev}:{i.st_ino}:{i.st_size}:{i.st_mtime_ns}" for i in infos)


def hash_model(paths):
    """The hash in hex. The user's cache folder keeps it as long as the files do not change."""
    identity = identify(paths)
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache, known = Path(folder, "leone", "models.json"), {}
    with contextlib.suppress(OSError, ValueError, TypeError):  # absent or damaged: empty
        known = dict(json.loads(cache.read_bytes()))
    if identity not in known:
        digest = hashlib.sha256()
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                hashlib.file_digest(file, lambda: digest)
        known[identity] = digest.hexdigest()
        with contextlib.suppress(OSError):  # not to be written: read again the next time
            cache.parent.mkdir(parents=True, exist_ok=True)
            temporary = cache.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(known, indent=1))
            temporary.replace(cache)
    return known[identity]


# ---- files and the command line --------------------------------------------------------------


def read(path):
    """(receipt, prompt token ids, output token ids) of a JSON file: an answer of the server with
    its receipt, or a receipt alone; ids that it does not hold are None.

    Raises RequestError if there is no receipt in it, OSError if it cannot be read.
    """
    try:
        record = json.loads(Path(path).read_bytes(), object_pairs_hook=unique)
        record = {"receipt": record} if "hmac" in record else record
        found = [record.get(name) for name in ("receipt", "prompt_token_ids", "token_ids")]
        if not isinstance(found[0], dict):
            raise TypeError
        signature(b"", found[0])
        for ids in found[1:]:
            hash_tokens([] if ids is None else ids[:])  # dicts have no slices
        return found
    except (ValueError, TypeError, AttributeError, RecursionError, struct.error):
        raise RequestError(f"{path} is not a JSON file that holds a receipt") from None


def unique(pairs):
    """A JSON object, in which no name may occur twice: readers differ in which one they take."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object has a name twice")
    return dict(pairs)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="receipts.py", description="Check receipts of Leone.")
    parser.add_argument("command", choices=["verify"], help="exits 0: valid, 1: not, 2: unknown")
    parser.add_argument("file", metavar="FILE", help="a receipt, or an answer that holds one")
    parser.add_argument("--key", required=True, metavar="FILE", help="the server's --receipt-key")
    args = parser.parse_args(argv)
    try:
        key = load_key(args.key, create=False)
        receipt, prompt, output = read(args.file)
    except (RequestError, OSError) as error:
        problem = getattr(error, "strerror", None)
        print(f"receipts: {f'{error.filename}: {problem}; check the path' if problem else error}",
              file=sys.stderr)
        return 2
    try:
        verify(key, receipt)
        check_tokens(receipt, prompt, output)
    except RequestError as error:
        print(f"not valid: {error}")
        return 1
    absent = [what for what, ids in (("prompt", prompt), ("output", output)) if ids is None]
    covered = (f"the file holds no {' and no '.join(absent)} token ids" if absent
               else "with these token ids")
    print(f"valid: {receipt['id']}, {receipt['completion_tokens']} tokens, {covered}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
