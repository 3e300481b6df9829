"""GGUF file -> Config + weights, and the one forward pass.

    GGUF      a bounds-checked view of one file, or of all parts of a split one: metadata, tensors
    Config    the numbers that describe a model; below it nobody knows which family runs
    load      binds every tensor by name, shape and type, and hands it to an op table
    forward   the pass itself, over the same op table

What the file says is never trusted: a number is used only after it was checked against the size of
the file, and whatever is wrong with a file ends in a ModelError of one line.
"""
import functools
import math
import mmap
import os
import re
import reprlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from errors import ModelError

# ---- GGUF: the file ------------------------------------------------------------------------------

MAX_HEADER = 32 << 20  # bytes; the largest vocabularies of today need 16 MB
MAX_ENTRIES = 1 << 16  # metadata keys, tensors: real files have at most a few thousand
MAX_NAME = 128  # bytes of a key or a tensor name
MAX_SIZE = 1 << 20  # of a width, a head count, a number of layers
MAX_POSITION = (1 << 31) - 1  # positions are int32
ALIGNMENTS = [1 << bits for bits in range(3, 17)]  # 8 bytes to 64 KiB

# Value types of the format: a number or an array of numbers is read with its NumPy type.
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1",
           10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, STRING, ARRAY = 7, 8, 9

SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
REQUIRED = object()  # default of a key that must be there


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor as it lies in the file."""
    name: str
    type: GGMLQuantizationType
    shape: tuple  # NumPy order: (rows, cols), the last axis is contiguous
    data: np.ndarray  # uint8 [bytes], a read-only view of the mapped file

    def parts(self):
        """The matrices (rows, cols) of a tensor (n, rows, cols), or the tensor itself."""
        if len(self.shape) < 3:
            return [self]
        return [replace(self, name=f"{self.name}[{i}]", shape=self.shape[1:], data=data)
                for i, data in enumerate(self.data.reshape(self.shape[0], -1))]


class Strings(Sequence):
    """An array of strings that stays in the mapped file; items are bytes, any bytes.

    `list(strings)` copies the whole block once and is the fast way to read them all.
    """

    def __init__(self, buffer, start, ends):
        self.buffer, self.start, self.ends = buffer, start, ends

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, index):
        index = range(len(self))[index]
        start = self.ends[index - 1] if index else self.start
        return self.buffer[start + 8:self.ends[index]]  # 8 bytes of length lie before each string

    def __iter__(self):
        block = self.buffer[self.start:self.ends[-1]] if self.ends else b""
        start = 0
        for end in self.ends:
            yield block[start + 8:end - self.start]
            start = end - self.start


class Header:
    """Reads the header of one file in order; every read is checked against what is left of it."""

    def __init__(self, path, buffer):
        self.path, self.buffer, self.position = path, buffer, 0
        self.limit = min(len(buffer), MAX_HEADER)

    def fail(self, message):
        raise ModelError(f"{self.path}: {message}")

    def take(self, n_bytes, what):
        """The offset of the next `n_bytes`, which are passed over."""
        start = self.position
        if n_bytes > self.limit - start:
            self.fail(f"{what} goes on past byte {self.limit}, where the file or the longest "
                      "header ends; fetch the model again")
        self.position = start + n_bytes
        return start

    def numbers(self, kind, count, what):
        """A read-only array of `count` numbers of NumPy type `kind`, a view of the file."""
        start = self.take(np.dtype(kind).itemsize * count, what)
        return np.frombuffer(self.buffer, kind, count, start)

    def number(self, kind, what):
        return self.numbers(kind, 1, what)[0].item()

    def count(self, what):
        """A number of entries that follow."""
        n = self.number("<u8", what)
        if n > MAX_ENTRIES:
            self.fail(f"{what} is {n}, but no model has more than {MAX_ENTRIES}; fetch it again")
        return n

    def string(self, what):
        start = self.take(self.number("<u8", f"the length of {what}"), what)
        return self.buffer[start:self.position]

    def name(self, what):
        text = self.string(what).decode(errors="replace")
        if len(text) > MAX_NAME or not text.isprintable() or "\ufffd" in text:
            self.fail(f"{what} must be at most {MAX_NAME} printable characters of UTF-8, "
                      f"not {text[:40]!r}")
        return text

    def value(self, key):
        """A metadata value: int, float, bool, str, Strings, or a read-only array of numbers."""
        kind = self.number("<u4", f"the type of {key!r}")
        if kind == ARRAY:
            kind = self.number("<u4", f"the item type of {key!r}")
            count = self.number("<u8", f"the length of {key!r}")
            if kind == STRING:
                return self.strings(count, key)
            return self.typed_numbers(kind, count, key)
        if kind == STRING:
            return self.string(repr(key)).decode(errors="replace")
        return self.typed_numbers(kind, 1, key)[0].item()

    def typed_numbers(self, kind, count, key):
        if kind not in NUMBERS:
            self.fail(f"{key!r} has the unknown value type {kind}")
        values = self.numbers(NUMBERS[kind], count, repr(key))
        return values != 0 if kind == BOOL else values

    def strings(self, count, key):
        """Walk over `count` strings. The loop is tight: vocabularies have 250,000 entries."""
        start, position, ends = self.position, self.position, array("Q")
        if count > (self.limit - start) // 8:
            self.fail(f"{key!r} has {count} strings, which go on past the end of the file")
        length_at, add = struct.Struct("<Q").unpack_from, ends.append
        try:
            for _ in range(count):
                position += 8 + length_at(self.buffer, position)[0]
                add(position)
        except (struct.error, OverflowError):  # an offset past the end, or past 2^63
            position = len(self.buffer) + 1
        self.take(position - start, f"a string of {key!r}")
        return Strings(self.buffer, start, ends)

    def tensor_entry(self):
        """(name, type, shape, offset, bytes) of one tensor."""
        name = self.name("the name of a tensor")
        n_dims = self.number("<u4", f"the rank of tensor {name!r}")
        if not 1 <= n_dims <= 4:
            self.fail(f"tensor {name!r} has {n_dims} dimensions; 1 to 4 are allowed")
        shape = tuple(self.numbers("<u8", n_dims, f"the shape of tensor {name!r}").tolist()[::-1])
        kind = self.number("<u4", f"the type of tensor {name!r}")
        offset = self.number("<u8", f"the offset of tensor {name!r}")
        try:
            kind = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self.fail(f"tensor {name!r} has the unknown type {kind}; update the gguf package")
        elements = math.prod(shape)
        if not 0 < elements <= len(self.buffer) * block:  # then no later product can be large
            self.fail(f"tensor {name!r} of shape {shape} cannot lie in {len(self.buffer)} bytes")
        if shape[-1] % block:
            self.fail(f"tensor {name!r} has rows of {shape[-1]} values; "
                      f"{kind.name} needs a multiple of {block}")
        return name, kind, shape, offset, elements // block * block_bytes


def map_file(path):
    """The file as read-only memory. Opening a pipe would block, so only a plain file will do."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ModelError(f"{path} is not a plain file; give the path of a GGUF file")
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: it is empty, or the path cannot be one
        reason = getattr(error, "strerror", error)
        raise ModelError(f"cannot open {str(path)!r}: {reason}; check the path") from error


def read_file(path):
    """(metadata, tensors) of one GGUF file, both dicts by name. Reads the header only."""
    buffer = map_file(path)
    header = Header(path, buffer)
    if buffer[:4] != b"GGUF":
        header.fail("this is not a GGUF file: it does not begin with the letters GGUF")
    header.take(4, "the magic")
    version = header.number("<u4", "the version")
    if version not in (2, 3):
        header.fail(f"GGUF version {version}: only 2 and 3 are supported; convert the model again")
    n_tensors, n_keys = header.count("the number of tensors"), header.count("the number of keys")

    metadata = {}
    for _ in range(n_keys):
        key = header.name("a metadata key")
        if key in metadata:
            header.fail(f"the key {key!r} is there twice")
        metadata[key] = header.value(key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment not in ALIGNMENTS:
        header.fail(f"general.alignment is {reprlib.repr(alignment)}; "
                    "it must be a power of two from 8 to 65536")

    entries = [header.tensor_entry() for _ in range(n_tensors)]
    start_of_data = -(-header.position // alignment) * alignment
    everything, tensors = np.frombuffer(buffer, np.uint8), {}
    for name, kind, shape, offset, n_bytes in entries:
        start = start_of_data + offset
        if name in tensors:
            header.fail(f"tensor {name!r} is there twice")
        if offset % alignment:
            header.fail(f"tensor {name!r} lies at {offset}, not at a multiple of {alignment}")
        if start + n_bytes > len(buffer):
            header.fail(f"tensor {name!r} ends at byte {start + n_bytes}, but the file has "
                        f"{len(buffer)}; fetch the model again")
        tensors[name] = Tensor(name, kind, shape, everything[start:start + n_bytes])
    return metadata, tensors


class GGUF:
    """A model file, or all parts of a split one whichever is named. Reads headers only.

    `metadata` and `tensors` are dicts by name; arrays of the metadata are lazy (see Header.value).
    """

    def __init__(self, path):
        self.path = Path(path)
        self.paths = [self.path]
        self.metadata, self.tensors = read_file(self.path)
        if self.value("split.count", int, 0) > 1:
            self.join_parts()

    def join_parts(self):
        """Replace what one part said by the metadata of the first part and the tensors of all."""
        name, count = SPLIT_NAME.fullmatch(self.path.name), self.metadata["split.count"]
        if not name or int(name[3]) != count:
            self.fail(f"a part of {count} must be named NAME-00001-of-{count:05}.gguf and so on")
        self.paths = [self.path.with_name(f"{name[1]}-{i:05}-of-{count:05}.gguf")
                      for i in range(1, count + 1)]
        self.tensors = {}
        for number, path in reversed(list(enumerate(self.paths))):  # the first part comes last
            self.metadata, tensors = read_file(path)
            for key, expected in (("split.count", count), ("split.no", number)):
                if self.value(key, int) != expected:
                    self.fail(f"{key} of {path.name} must be {expected}, not {self.metadata[key]}")
            twice = tensors.keys() & self.tensors.keys()
            if twice:
                self.fail(f"tensor {min(twice)!r} is in two parts")
            self.tensors = tensors | self.tensors

    def fail(self, message):
        raise ModelError(f"{self.path}: {message}")

    def value(self, key, kind, default=REQUIRED):
        """The metadata value of `key`, which must be a `kind`: int, float, bool, str or Strings."""
        found = self.metadata.get(key, default)
        if found is REQUIRED:
            self.fail(f"the key {key!r} is missing; expected a value of type {kind.__name__}")
        if kind is float and type(found) is int:
            return float(found)
        if found is not default and type(found) is not kind:
            self.fail(f"the key {key!r} must be of type {kind.__name__}, not {reprlib.repr(found)}")
        return found

    def size(self, key, default=REQUIRED, most=MAX_SIZE):
        """An int of the metadata in 1..most."""
        found = self.value(key, int, default)
        if not 1 <= found <= most:
            self.fail(f"the key {key!r} must lie in 1..{most}, not {found}")
        return found

    def real(self, key, default=REQUIRED, most=1e30):
        """A positive float of the metadata, far enough from 0 and infinity to compute with."""
        found = self.value(key, float, default)
        if not 1e-30 < found < most:
            self.fail(f"the key {key!r} must lie in 1e-30..{most:g}, not {found}")
        return found

    def tensor(self, name, shape):
        """The Tensor `name`, which must have this shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            self.fail(f"tensor {name!r} of shape {shape} is missing")
        if tensor.shape != shape:
            self.fail(f"tensor {name!r} must have shape {shape}, not {tensor.shape}")
        return tensor

    def vector(self, name, length):
        """The values of a one-dimensional F32 tensor, which must be finite: float32 [length]."""
        tensor = self.tensor(name, (length,))
        if tensor.type != GGMLQuantizationType.F32:
            self.fail(f"tensor {name!r} must be of type F32, not {tensor.type.name}")
        values = tensor.data.view("<f4")
        if not np.isfinite(values).all():
            self.fail(f"tensor {name!r} holds values that are not finite; fetch the model again")
        return values


@functools.cache
def can_dequantise(kind):
    """Whether the gguf package expands weights of this GGML type."""
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        return True
    except NotImplementedError:
        return False


# ---- Config: the numbers of a model --------------------------------------------------------------

# Architectures that run -> they rotate the pairs (j, j + n/2) of a head; otherwise (2j, 2j + 1).
FAMILIES = {
    "llama": False,  # Llama 3 and Mistral
    "qwen2": True,
    "qwen3": True,
    "phi3": True,
}


def unsupported(gguf):
    """One line that says why this model cannot run, or None."""
    family = gguf.value("general.architecture", str)
    if family in FAMILIES and gguf.value(f"{family}.expert_count", int, 0) == 0:
        return None
    family = family if family not in FAMILIES else family + " with experts"
    return (f"family {family[:40]!r} is not supported yet; "
            f"supported: {', '.join(FAMILIES)} without experts")


@dataclass(frozen=True)
class Config:
    """What the forward pass has to know. Filled from the metadata and from which tensors exist."""
    name: str  # as the file calls itself
    n_layers: int
    n_embd: int  # width of the residual stream
    n_ff: int  # width inside the feed-forward network
    n_vocab: int  # rows of the token table, columns of the logits
    n_tokens: int  # ids that the tokenizer knows; rows from here to n_vocab are padding
    n_ctx: int  # most positions the model was made for
    n_heads: int  # query heads
    n_kv_heads: int  # heads of K and of V; each serves n_heads / n_kv_heads query heads
    head_dim: int  # values of one head of Q, K and V
    rms_eps: float  # added to the mean square in RMSNorm
    qk_norm: bool  # each head of Q and K is normalised before it is rotated
    attn_scale: float  # multiplies the scores
    rope_dim: int  # how many first values of a head are rotated
    rope_neox: bool  # rotated pairs are (j, j + rope_dim / 2); otherwise (2j, 2j + 1)
    rope_sets: tuple  # one or two tuples of rope_dim / 2 angles per position, in radians
    rope_long_from: int  # sequences longer than this take the second set; 0: there is one set
    rope_magnitude: float  # multiplies cosine and sine

    @classmethod
    def from_gguf(cls, gguf):
        """Read and check the metadata. Raises ModelError, also for a family that does not run."""
        problem = unsupported(gguf)
        if problem:
            gguf.fail(problem)
        family = gguf.value("general.architecture", str)
        n_embd = gguf.size(f"{family}.embedding_length")
        n_heads = gguf.size(f"{family}.attention.head_count")
        n_kv_heads = gguf.size(f"{family}.attention.head_count_kv", n_heads)
        if n_heads % n_kv_heads:
            gguf.fail(f"{n_heads} query heads cannot be shared out over {n_kv_heads} KV heads")
        head_dim = gguf.size(f"{family}.attention.key_length", n_embd // n_heads)
        if gguf.size(f"{family}.attention.value_length", n_embd // n_heads) != head_dim:
            gguf.fail("heads of K and V with different sizes are not supported")
        rms_eps = gguf.real(f"{family}.attention.layer_norm_rms_epsilon", most=1)
        n_ctx = gguf.size(f"{family}.context_length", most=MAX_POSITION)
        rope_dim = gguf.size(f"{family}.rope.dimension_count", head_dim)
        if rope_dim > head_dim or rope_dim % 2:
            gguf.fail(f"cannot rotate {rope_dim} of the {head_dim} values of a head")
        rope_sets, rope_long_from, rope_magnitude = read_rope(gguf, family, rope_dim, n_ctx)
        n_vocab, n_tokens = read_vocabulary(gguf, n_embd)
        return cls(
            name=gguf.value("general.name", str, gguf.path.stem),
            n_layers=gguf.size(f"{family}.block_count"),
            n_ff=gguf.size(f"{family}.feed_forward_length"),
            rope_neox=FAMILIES[family],
            qk_norm="blk.0.attn_q_norm.weight" in gguf.tensors,
            attn_scale=1 / math.sqrt(head_dim),
            n_embd=n_embd, n_vocab=n_vocab, n_tokens=n_tokens, n_ctx=n_ctx,
            n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, rms_eps=rms_eps,
            rope_dim=rope_dim, rope_sets=rope_sets, rope_long_from=rope_long_from,
            rope_magnitude=rope_magnitude,
        )

    def kv_bytes_per_token(self, kv_format):
        """Bytes that one position takes in the KV cache of all layers."""
        per_value = {"f32": 4, "f16": 2, "q8": 1 + 2 / 32}[kv_format]  # q8: an f16 scale per 32
        return int(2 * self.n_layers * self.n_kv_heads * self.head_dim * per_value)


# Metadata below FAMILY.rope. that is read here; only the last changes nothing.
ROPE_KEYS = {"dimension_count", "freq_base", "scaling.type", "scaling.factor",
             "scaling.original_context_length", "scaling.attn_factor", "scaling.yarn_beta_fast",
             "scaling.yarn_beta_slow", "scaling.finetuned"}


def read_vocabulary(gguf, n_embd):
    """(rows of the token table, tokens of the tokenizer). The table may be padded."""
    table = gguf.tensors.get("token_embd.weight")
    n_vocab = table.shape[0] if table else 0
    gguf.tensor("token_embd.weight", (n_vocab, n_embd))
    n_tokens = n_vocab
    if "tokenizer.ggml.tokens" in gguf.metadata:
        n_tokens = len(gguf.value("tokenizer.ggml.tokens", Strings))
    if not 0 < n_tokens <= n_vocab:
        gguf.fail(f"the tokenizer has {n_tokens} tokens, but the token table has {n_vocab} rows")
    return n_vocab, n_tokens


def read_rope(gguf, family, rope_dim, n_ctx):
    """(sets, long_from, magnitude) of Config: every way of scaling ends in these three.

    A set holds the angle per position of each rotated pair, float64. Tables in the file divide it,
    one for all sequences or one each for short and long ones; then the key `type` acts on it.
    """
    strange = [key for key in gguf.metadata if key.startswith(f"{family}.rope.")
               and key.removeprefix(f"{family}.rope.") not in ROPE_KEYS]
    if strange:
        gguf.fail(f"the key {strange[0]!r} is not understood; the model would answer wrongly")
    scaling = f"{family}.rope.scaling."
    kind = gguf.value(scaling + "type", str, "linear")  # linear with factor 1 changes nothing
    if kind not in ("none", "linear", "yarn", "longrope"):
        gguf.fail(f"RoPE scaling {kind[:40]!r} is not supported; "
                  "supported: none, linear, yarn, longrope")
    factor = gguf.real(scaling + "factor", REQUIRED if kind == "yarn" else 1.0)
    original = gguf.size(scaling + "original_context_length", n_ctx, most=MAX_POSITION)
    magnitude = gguf.real(scaling + "attn_factor", 1.0)

    base = gguf.real(f"{family}.rope.freq_base", 10000.0)
    angles = base ** (-np.arange(0, rope_dim, 2) / rope_dim)
    tables = [name for name in ("rope_factors_short.weight", "rope_factors_long.weight",
                                "rope_freqs.weight") if name in gguf.tensors]
    if len(tables) == 2 and tables[1] == "rope_factors_long.weight":
        long_from = original
    elif tables in ([], ["rope_freqs.weight"]):
        long_from = 0
    else:
        gguf.fail(f"RoPE tables {', '.join(tables)}: expected short and long ones, or rope_freqs")
    if kind == "longrope" and not long_from:
        gguf.fail("RoPE scaling 'longrope' needs the tensors rope_factors_short and _long")
    divisors = [gguf.vector(name, rope_dim // 2).astype(np.float64) for name in tables]
    if any((divisor <= 0).any() for divisor in divisors):
        gguf.fail(f"RoPE tables {', '.join(tables)} must hold positive numbers only")
    sets = [angles / divisor for divisor in divisors] or [angles]

    if kind == "linear":
        sets = [angles / factor for angles in sets]
    elif kind == "yarn":
        blend = yarn_blend(gguf, scaling, rope_dim, base, original)
        sets = [angles * (blend / factor + 1 - blend) for angles in sets]
        magnitude *= 0.1 * math.log(max(factor, 1)) + 1
    return tuple(tuple(angles.tolist()) for angles in sets), long_from, magnitude


def yarn_blend(gguf, scaling, rope_dim, base, original):
    """How far YaRN stretches each pair: 0 where the pair turns fast, 1 where it turns slowly.

    The bounds are the pairs that turn beta_fast and beta_slow times within the original context.
    """
    def pair_that_turns(times):
        return rope_dim * math.log(original / (2 * math.pi * times)) / (2 * math.log(base))

    if base <= 1:
        gguf.fail(f"YaRN needs a RoPE base above 1, not {base}")
    low = max(0, math.floor(pair_that_turns(gguf.real(scaling + "yarn_beta_fast", 32.0))))
    high = min(rope_dim - 1, math.ceil(pair_that_turns(gguf.real(scaling + "yarn_beta_slow", 1.0))))
    return np.clip((np.arange(rope_dim // 2) - low) / max(0.001, high - low), 0, 1)


# ---- weights: every tensor has its place ---------------------------------------------------------


@dataclass
class Layer:
    """Handles of one layer's weights. Attention, then a gated feed-forward network."""
    attn_norm: object  # vector [n_embd]
    qkv: object  # matrix: rows of q, k, v; with a bias where the model has one
    q_norm: object  # vector [head_dim] or None
    k_norm: object  # vector [head_dim] or None
    attn_out: object  # matrix [n_embd, n_heads * head_dim]
    ffn_norm: object  # vector [n_embd]
    gate_up: object  # matrix [2 n_ff, n_embd]: rows of gate, then of up
    down: object  # matrix [n_embd, n_ff]


@dataclass
class Weights:
    """Handles of all weights, as the op table made them."""
    embed: object  # matrix [n_vocab, n_embd], the token table
    layers: list
    output_norm: object  # vector [n_embd]
    output: object  # matrix [n_vocab, n_embd]; the token table itself where the two are tied


# Tensors that no op reads, and why.
IGNORED = {
    "rope_freqs.weight": "is in Config.rope_sets",
    "rope_factors_short.weight": "is in Config.rope_sets",
    "rope_factors_long.weight": "is in Config.rope_sets",
    "attn_rot_embd.weight": "angles that old converters wrote for each layer; Config computes them",
}


class Binder:
    """Takes tensors from a file by name, shape and type, and hands them to an op table."""

    def __init__(self, gguf, ops, progress):
        self.gguf, self.ops, self.progress = gguf, ops, progress
        self.unbound = {name for name in gguf.tensors
                        if re.sub(r"^blk\.\d+\.", "", name) not in IGNORED}
        self.total = sum(gguf.tensors[name].data.nbytes for name in self.unbound)
        self.done = 0

    def take(self, tensor):
        self.unbound.discard(tensor.name)
        self.done += tensor.data.nbytes

    def read(self, name, length):
        """The values of a vector, float32 [length]."""
        values = self.gguf.vector(name, length)
        self.take(self.gguf.tensors[name])
        return values

    def vector(self, name, length):
        return self.ops.vector(self.read(name, length))

    def matrix(self, rows, cols, bias=None):
        """A stack of row blocks. rows: {tensor name: its rows}; bias: float32 [all rows], None."""
        tensors = [self.gguf.tensor(name, (n, cols)) for name, n in rows.items()]
        for tensor in tensors:
            if not can_dequantise(tensor.type):
                self.gguf.fail(f"tensor {tensor.name!r} is of type {tensor.type.name}, "
                               "which cannot hold weights; convert the model again")
            self.take(tensor)
        handle = self.ops.matrix(tensors, bias)
        if self.progress:
            self.progress(self.done, self.total)
        return handle

    def qkv(self, cfg, block):
        """Rows of q, k and v, from one fused tensor or from three, with or without a bias."""
        n_q, n_kv = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
        rows = {f"{block}.attn_q": n_q, f"{block}.attn_k": n_kv, f"{block}.attn_v": n_kv}
        if f"{block}.attn_qkv.weight" in self.unbound:
            rows = {f"{block}.attn_qkv": n_q + 2 * n_kv}
        bias = None
        if any(f"{part}.bias" in self.unbound for part in rows):
            bias = np.concatenate([self.read(f"{part}.bias", n) for part, n in rows.items()])
        return self.matrix({f"{part}.weight": n for part, n in rows.items()}, cfg.n_embd, bias)

    def layer(self, cfg, index):
        block = f"blk.{index}"
        head_norm = lambda name: self.vector(f"{block}.{name}.weight", cfg.head_dim)
        gate_up = {f"{block}.ffn_gate.weight": cfg.n_ff, f"{block}.ffn_up.weight": cfg.n_ff}
        if f"{block}.ffn_gate.weight" not in self.unbound:  # one tensor holds gate, then up
            gate_up = {f"{block}.ffn_up.weight": 2 * cfg.n_ff}
        return Layer(
            attn_norm=self.vector(f"{block}.attn_norm.weight", cfg.n_embd),
            qkv=self.qkv(cfg, block),
            q_norm=head_norm("attn_q_norm") if cfg.qk_norm else None,
            k_norm=head_norm("attn_k_norm") if cfg.qk_norm else None,
            attn_out=self.matrix({f"{block}.attn_output.weight": cfg.n_embd},
                                 cfg.n_heads * cfg.head_dim),
            ffn_norm=self.vector(f"{block}.ffn_norm.weight", cfg.n_embd),
            gate_up=self.matrix(gate_up, cfg.n_embd),
            down=self.matrix({f"{block}.ffn_down.weight": cfg.n_embd}, cfg.n_ff),
        )



def load(gguf, ops, progress=None):
    """(Config, Weights) with every tensor of the file bound or known to be unneeded.

    ops: an op table; its `matrix` and `vector` make the handles. progress: called with
    (bytes done, bytes in all) after each matrix. Raises ModelError.
    """
    cfg = Config.from_gguf(gguf)
    binder = Binder(gguf, ops, progress)
    embed = binder.matrix({"token_embd.weight": cfg.n_vocab}, cfg.n_embd)
    output_norm = binder.vector("output_norm.weight", cfg.n_embd)
    layers = [binder.layer(cfg, index) for index in range(cfg.n_layers)]
    output = embed
    if "output.weight" in gguf.tensors:
        output = binder.matrix({"output.weight": cfg.n_vocab}, cfg.n_embd)
    if binder.unbound:
        gguf.fail(f"tensor {min(binder.unbound)!r} ({len(binder.unbound)} in all) has no place "
                  "in this family; without it the model would answer wrongly")
    return cfg, Weights(embed, layers, output_norm, output)


# ---- the forward pass ------------------------------------------------------------------------


def forward(cfg, weights, batch, kv, ops, see=None):
    """Logits of batch.logit_rows, float32 [n, n_vocab], as a handle of the backend `ops`.

    Writes K and V of all rows to the pages that batch.page_table names. `see(name, layer, value)`
    is shown every intermediate buffer: `leone.py diff` compares two backends with it.
    """
    see = see or (lambda name, layer, value: None)
    h = ops.embed(weights.embed, batch)  # the residual stream, rows x n_embd
    see("embed", -1, h)
    angles = ops.rope_angles(cfg, batch)
    for i, layer in enumerate(weights.layers):
        x = ops.rmsnorm(h, layer.attn_norm, cfg.rms_eps)
        see("attn_norm", i, x)
        qkv = ops.linear(x, layer.qkv)
        see("qkv", i, qkv)
        q = ops.rope_kv(qkv, angles, layer.q_norm, layer.k_norm, cfg, i, kv, batch)
        see("q", i, q)
        x = ops.attention(q, cfg, i, kv, batch)
        see("attention", i, x)
        ops.linear_add(x, layer.attn_out, h)
        see("attn_out", i, h)

        x = ops.rmsnorm(h, layer.ffn_norm, cfg.rms_eps)
        see("ffn_norm", i, x)
        gate_up = ops.linear(x, layer.gate_up)
        see("gate_up", i, gate_up)
        x = ops.silu_mul(gate_up)
        see("silu_mul", i, x)
        ops.linear_add(x, layer.down, h)
        see("ffn_out", i, h)
    x = ops.rmsnorm(h, weights.output_norm, cfg.rms_eps, batch.logit_rows)
    see("output_norm", -1, x)
    logits = ops.linear(x, weights.output)
    see("logits", -1, logits)
    return logits
