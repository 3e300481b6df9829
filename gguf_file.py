"""A bounds-checked view of a GGUF file, or of all parts of a split one: metadata and tensors.

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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from errors import ModelError

MAX_HEADER = 32 << 20  # bytes; the largest vocabularies of today need 16 MB
MAX_ENTRIES = 1 << 16  # metadata keys, tensors: real files have at most a few thousand
MAX_ITEMS = 1 << 21  # of an array: vocabularies and their merges have at most 520,000
MAX_NAME = 128  # bytes of a key or a tensor name
MAX_SIZE = 1 << 20  # of a width, a head count, a number of layers
MAX_POSITION = (1 << 31) - 1  # positions are int32
ALIGNMENTS = [1 << bits for bits in range(3, 17)]  # 8 bytes to 64 KiB

# Value types of the format: a number or an array of numbers is read with its NumPy type.
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
           10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9

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


class Header:
    """Reads the header of one file in order; every read is checked against what is left of it."""

    def __init__(self, path, buffer):
        self.path, self.buffer, self.position = path, buffer, 0
        self.limit = min(len(buffer), MAX_HEADER)

    def require(self, condition, problem):
        """ModelError unless the condition holds."""
        if not condition:
            raise ModelError(f"{self.path}: {problem}")

    def take(self, n_bytes, what):
        """The offset of the next `n_bytes`, which are passed over."""
        start = self.position
        self.require(n_bytes <= self.limit - start, f"{what} goes on past byte {self.limit}, where "
                     "the file or the longest header ends; fetch the model again")
        self.position = start + n_bytes
        return start

    def numbers(self, kind, count, what):
        """A read-only array of `count` numbers of NumPy type `kind`, a view of the file."""
        start = self.take(np.dtype(kind).itemsize * count, what)
        return np.frombuffer(self.buffer, kind, count, start)

    def number(self, kind, what):
        return self.numbers(kind, 1, what)[0].item()

    def count(self, what, most=MAX_ENTRIES):
        """A number of entries that follow."""
        n = self.number("<u8", what)
        self.require(n <= most, f"{what} is {n}, but no model has more than {most}; fetch it again")
        return n

    def string(self, what):
        start = self.take(self.number("<u8", f"the length of {what}"), what)
        return self.buffer[start:self.position]

    def name(self, what):
        text = self.string(what).decode(errors="replace")
        self.require(len(text) <= MAX_NAME and text.isprintable() and "\ufffd" not in text,
                     f"{what} must be at most {MAX_NAME} printable characters of UTF-8, "
                     f"not {text[:40]!r}")
        return text

    def value(self, key):
        """A metadata value: int, float, bool, str, a list of bytes (the strings of an array, which
        may be any bytes), or a read-only array of numbers."""
        kind, count = self.number("<u4", f"the type of {key!r}"), None
        if kind == ARRAY:
            kind = self.number("<u4", f"the item type of {key!r}")
            count = self.count(f"the length of {key!r}", MAX_ITEMS)
        if kind == STRING:
            return (self.string(repr(key)).decode(errors="replace") if count is None
                    else self.strings(count, key))
        self.require(kind in NUMBERS, f"{key!r} has the unknown value type {kind}")
        if count is None:
            return self.number(NUMBERS[kind], repr(key))
        return self.numbers(NUMBERS[kind], count, repr(key))

    def strings(self, count, key):
        """The next `count` strings. The loop is tight: vocabularies have 250,000 entries."""
        block = memoryview(self.buffer)[self.position:self.limit]
        at, found, length_at = 0, [], struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                end = at + 8 + length_at(block, at)[0]
                found.append(block[at + 8:end].tobytes())
                at = end
        except (struct.error, OverflowError):  # an offset past the end, or past 2^63
            at = len(block) + 1
        self.take(at, f"a string of {key!r}")
        return found

    def tensor_entry(self):
        """(name, type, shape, offset, bytes) of one tensor."""
        name = self.name("the name of a tensor")
        n_dims = self.number("<u4", f"the rank of tensor {name!r}")
        self.require(1 <= n_dims <= 4,
                     f"tensor {name!r} has {n_dims} dimensions; 1 to 4 are allowed")
        shape = tuple(self.numbers("<u8", n_dims, f"the shape of tensor {name!r}").tolist()[::-1])
        kind = self.number("<u4", f"the type of tensor {name!r}")
        offset = self.number("<u8", f"the offset of tensor {name!r}")
        self.require(kind in GGML_QUANT_SIZES,
                     f"tensor {name!r} has the unknown type {kind}; update the gguf package")
        kind, (block, block_bytes) = GGMLQuantizationType(kind), GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        self.require(0 < elements <= len(self.buffer) * block,  # so no later product can be large
                     f"tensor {name!r} of shape {shape} cannot lie in {len(self.buffer)} bytes")
        self.require(shape[-1] % block == 0, f"tensor {name!r} has rows of {shape[-1]} values; "
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
        raise ModelError(f"cannot open {str(path)!r}: {reason}; check the path, or fetch "
                         "the file again") from error


def read_file(path):
    """(metadata, tensors) of one GGUF file, both dicts by name. Reads the header only."""
    buffer = map_file(path)
    header = Header(path, buffer)
    header.require(buffer[:4] == b"GGUF",
                   "this is not a GGUF file: it does not begin with the letters GGUF; fetch it "
                   "again, or give the path of another")
    header.take(4, "the magic")
    version = header.number("<u4", "the version")
    header.require(version in (2, 3), f"GGUF version {version}: only 2 and 3 are supported; "
                   "convert the model again")
    n_tensors, n_keys = header.count("the number of tensors"), header.count("the number of keys")

    metadata = {}
    for _ in range(n_keys):
        key = header.name("a metadata key")
        header.require(key not in metadata, f"the key {key!r} is there twice")
        metadata[key] = header.value(key)
    alignment = metadata.get("general.alignment", 32)
    header.require(isinstance(alignment, int) and alignment in ALIGNMENTS,
                   f"general.alignment is {reprlib.repr(alignment)}; it must be a power of two "
                   "from 8 to 65536")

    entries = [header.tensor_entry() for _ in range(n_tensors)]
    start_of_data = -(-header.position // alignment) * alignment
    everything, tensors = np.frombuffer(buffer, np.uint8), {}
    for name, kind, shape, offset, n_bytes in entries:
        start = start_of_data + offset
        header.require(name not in tensors, f"tensor {name!r} is there twice")
        header.require(offset % alignment == 0,
                       f"tensor {name!r} lies at {offset}, not at a multiple of {alignment}")
        header.require(start + n_bytes <= len(buffer), f"tensor {name!r} ends at byte "
                       f"{start + n_bytes}, but the file has {len(buffer)}; fetch the model again")
        tensors[name] = Tensor(name, kind, shape, everything[start:start + n_bytes])
    return metadata, tensors


class GGUF:
    """A model file, or all parts of a split one whichever is named. Reads headers only.

    `metadata` and `tensors` are dicts by name; for values of the metadata see Header.value.
    """
    require = Header.require

    def __init__(self, path):
        self.path = Path(path)
        self.paths = [self.path]
        self.metadata, self.tensors = read_file(self.path)
        if self.value("split.count", int, 0) > 1:
            self.join_parts()

    def join_parts(self):
        """Replace what one part said by the metadata of the first part and the tensors of all."""
        name, count = SPLIT_NAME.fullmatch(self.path.name), self.metadata["split.count"]
        self.require(name and int(name[3]) == count,
                     f"a part of {count} must be named NAME-00001-of-{count:05}.gguf and so on")
        self.paths = [self.path.with_name(f"{name[1]}-{i:05}-of-{count:05}.gguf")
                      for i in range(1, count + 1)]
        self.tensors = {}
        for number, path in reversed(list(enumerate(self.paths))):  # the first part comes last
            self.metadata, tensors = read_file(path)
            for key, expected in (("split.count", count), ("split.no", number)):
                found = self.value(key, int)
                self.require(found == expected,
                             f"{key} of {path.name} must be {expected}, not {found}")
            twice = min(tensors.keys() & self.tensors.keys(), default=None)
            self.require(twice is None, f"tensor {twice!r} is in two parts")
            self.tensors = tensors | self.tensors

    def value(self, key, kind, default=REQUIRED):
        """The metadata value of `key`, which must be a `kind`; an int may stand for a float."""
        found = self.metadata.get(key, default)
        self.require(found is not REQUIRED,
                     f"the key {key!r} is missing; expected a value of type {kind.__name__}")
        if kind is float and type(found) is int:
            return float(found)
        self.require(found is default or type(found) is kind,
                     f"the key {key!r} must be of type {kind.__name__}, not {reprlib.repr(found)}")
        return found

    def size(self, key, default=REQUIRED, most=MAX_SIZE, least=1):
        """An int of the metadata in least..most."""
        found = self.value(key, int, default)
        self.require(least <= found <= most,
                     f"the key {key!r} must lie in {least}..{most}, not {found}")
        return found

    def real(self, key, default=REQUIRED, most=1e30):
        """A positive float of the metadata, far enough from 0 and infinity to compute with."""
        found = self.value(key, float, default)
        self.require(1e-30 < found < most,
                     f"the key {key!r} must lie in 1e-30..{most:g}, not {found}")
        return found

    def tensor(self, name, shape):
        """The Tensor `name`, which must have this shape."""
        tensor = self.tensors.get(name)
        self.require(tensor, f"tensor {name!r} of shape {shape} is missing")
        if (1, *tensor.shape) == shape:  # some files store a matrix of one row as a vector
            tensor = replace(tensor, shape=shape)
        self.require(tensor.shape == shape,
                     f"tensor {name!r} must have shape {shape}, not {tensor.shape}")
        return tensor

    def vector(self, name, *shape):
        """The values of an F32 tensor, which must be finite: float32 of this shape."""
        tensor = self.tensor(name, shape)
        self.require(tensor.type == GGMLQuantizationType.F32,
                     f"tensor {name!r} must be of type F32, not {tensor.type.name}")
        values = tensor.data.view("<f4")
        self.require(np.isfinite(values).all(),
                     f"tensor {name!r} holds values that are not finite; fetch the model again")
        return values.reshape(shape)


@functools.cache
def can_dequantise(kind):
    """Whether the gguf package expands weights of this GGML type."""
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        return True
    except NotImplementedError:
        return False
