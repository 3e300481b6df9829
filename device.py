"""The CUDA backend: driver, memory with counters, launches, graphs, and the ops of kernels.cu.

An op's result lives in a fixed scratch buffer until the same op is called again (`linear`: with
weights of the same role), so a step allocates nothing and can be captured into a graph. Shapes are
(rows, columns). All work goes to one stream, in order.
"""
import contextlib
import ctypes
import hashlib
import itertools
import math
import struct
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, quants

from errors import DeviceError
from kv import GRAPH_SIZES, PAGE, PARTS_LIMIT, ROW_ARRAYS, Batch, state_layout
from sampling import SLICE

try:
    from cuda.bindings import driver
except ImportError as error:  # the CPU backend needs none of it
    driver, DRIVER_MISSING = None, f"cuda-python is not installed ({error}); run: make venv"

HERE = Path(__file__).resolve().parent
CUBIN, SOURCE = HERE / "kernels.cubin", HERE / "kernels.cu"
LANDING_BYTES = 1 << 16
HASH_LENGTH = 64  # the SHA-256 of kernels.cu in hex, appended to the fat binary
BUILD_HINT = "run: make kernels.cubin"


# ---- driver calls ----------------------------------------------------------------------------


def call(name, *args):
    """Results of the driver function `name` without their status. Raises DeviceError."""
    status, *results = getattr(driver, name)(*args)
    if status:
        raise DeviceError(f"{name} failed: {status.name}. {hint(status.name)}")
    return results[0] if len(results) == 1 else results


def hint(status):
    if "OUT_OF_MEMORY" in status:
        return "Lower --ctx, --sessions or --kv, or free the card (nvidia-smi shows who holds it)."
    if "NO_BINARY_FOR_GPU" in status or "INVALID_IMAGE" in status or "INVALID_PTX" in status:
        return "The built kernels do not fit this card; run: make clean kernels.cubin"
    if "ILLEGAL" in status or "LAUNCH" in status:
        return "A kernel went wrong: please report it with the output of `leone.py doctor`."
    return "See `leone.py doctor` for the state of driver and card."


def first_card():
    """Raises DeviceError: why there is none."""
    if driver is None:
        raise DeviceError(DRIVER_MISSING)
    try:
        call("cuInit", 0)
    except RuntimeError:  # libcuda.so is not there
        raise DeviceError("this machine has no NVIDIA driver; use --backend cpu") from None
    if call("cuDeviceGetCount") == 0:
        raise DeviceError("the driver sees no GPU; use --backend cpu")
    return call("cuDeviceGet", 0)


def probe():
    """Facts about the first card as a dict, or one line that says why there is none."""
    try:
        card = first_card()
        call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", card))
        free, total = call("cuMemGetInfo")
        call("cuCtxPopCurrent")
        call("cuDevicePrimaryCtxRelease", card)
        version = call("cuDriverGetVersion")
        return dict(name=card_name(card), arch=architecture(card), free_bytes=free,
                    total_bytes=total, driver=f"{version // 1000}.{version % 1000 // 10}")
    except DeviceError as error:
        return str(error)


def attribute(card, name):
    return call("cuDeviceGetAttribute",
                getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), card)


def architecture(card):
    return (10 * attribute(card, "COMPUTE_CAPABILITY_MAJOR")
            + attribute(card, "COMPUTE_CAPABILITY_MINOR"))


def card_name(card):
    return call("cuDeviceGetName", 128, card).split(b"\0")[0].decode()


def cubin_state():
    """"ok", or one line that says what is wrong with kernels.cubin. Without kernels.cu beside it
    (a packed distribution) the cubin is taken as it is."""
    if not CUBIN.exists():
        return f"kernels.cubin is not built; {BUILD_HINT}"
    built_from = CUBIN.read_bytes()[-HASH_LENGTH:].decode("ascii", "replace")
    if SOURCE.exists() and built_from != hashlib.sha256(SOURCE.read_bytes()).hexdigest():
        return f"kernels.cubin was built from another kernels.cu; {BUILD_HINT}"
    return "ok"


# ---- memory and launches ---------------------------------------------------------------------


class Buffer(NamedTuple):  # quickly made: a step makes hundreds
    """A piece of device memory: address, shape and NumPy dtype of what lies there."""
    ptr: int
    shape: tuple
    dtype: np.dtype

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, shape, dtype=None, offset=0):
        return Buffer(self.ptr + offset, tuple(shape), np.dtype(dtype or self.dtype))

    def at(self, offset):
        """What lies `offset` bytes further on, for a kernel that knows its shape."""
        return self.view((), offset=offset)


@dataclass(frozen=True)
class Activations:
    """Input of a matrix product: f16 rows in the order of unpack_rows, columns padded with zeros.

    `scale` is f32 [rows], a power of two that multiplies the row afterwards, or None for 1.
    """
    data: Buffer
    scale: Buffer | None
    rows: int
    cols: int


def padded(n, multiple):
    return -(-n // multiple) * multiple


def chunks_of(cols):
    """Chunks of 64 columns in a packed row: two at a time share their scales."""
    return padded(cols, 128) // 64


def unpack_rows(x):
    """[rows, cols] from rows in the order in which the lanes of linear read them: [8 rows][chunk]
    [2][lane 4 row + t][8 columns], where lane t has 32 columns of two chunks, from 32t on."""
    return x.reshape(len(x) // 8, -1, 2, 2, 8, 4, 8).transpose(0, 4, 1, 5, 2, 3, 6).reshape(x.shape)


# ---- how weights and KV pages lie in memory ----------------------------------------------------

TILE_ROWS, PART_CHUNKS = 16, 4
STACK = 4  # row blocks that one launch of linear takes
STAGING_BYTES = 32 << 20  # weights on their way to the card
KV_FORMATS = {"f32": 0, "f16": 1, "q8": 2}  # as kernels.cu counts them
Q8_BLOCK = 32  # values along head_dim that share an f16 scale
# Values of K and of V in a head, for which there are tensor-core attention kernels, and how many of
# their blocks a multiprocessor holds. The last two are latent: K holds V.
ATTENTION_BLOCKS = {(64, 64): 4, (80, 80): 4, (96, 96): 4, (128, 128): 4, (192, 192): 3,
                    (256, 256): 3, (320, 256): 2, (576, 512): 1}
ATTENTION_ROWS = 16  # (token, query head) pairs of one attention tile; twice that in a wide one
FOUR_WARPS, EIGHT_WARPS = 128, 256  # threads of a block of attention
WIDEST_HEAD = 128  # for which there are wide tiles
PROMPT_HEADS = 64, 96, 128, 256  # for which attention_prompt has kernels, with f16
SEGMENT = 256  # positions under one running softmax
ROW_VALUES = 12  # of a thread of the kernels that hold a row in a block, while there are threads
SAMPLE_THREADS, SAMPLE_STATE_BYTES, SAMPLE_SLICE_BYTES = 512, 39016, 16  # as in kernels.cu
DELTA_DIM, MOST_TAPS = 128, 4  # of the gated delta net: values of a head, width of convolution

# How kernels.cu holds weights of a format (see `Packed` there), in the order of enum WeightFormat:
# 32-bit words of a lane for a chunk, bytes of scales of a 16-row tile for a part.
PACKINGS = {"Q4_K": (4, 320), "Q5_K": (5, 320), "Q6_K": (6, 288), "Q8_0": (8, 256),
            "Q4_0": (4, 256), "Q4_1": (4, 512), "F16": (16, 0)}
FORMAT_NUMBERS = {name: number for number, name in enumerate(PACKINGS)}
REPACKED_AS_F16 = "BF16", "F32"
FEW_ROWS = 8  # of a step whose kernels are launched early
# Kernels for up to 16 rows of x: threads of a block, and blocks that a multiprocessor holds.
FEW_KERNELS = {"linear_few_8": (256, 2), "linear_few_8_three": (256, 3), "linear_few_16": (256, 2),
               "linear_experts_8": (128, 6)}
# Those for more: rows and columns of y that a block holds, its threads and KB of shared memory (see
# `linear_staged` in kernels.cu); us on an H200, at K = 4096, of the first block on each
# multiprocessor and of each further one.
MORE_KERNELS = {"linear_16x96": (16, 96, 256, 84, 12, 9), "linear_32x32": (32, 32, 256, 92, 7, 5),
                "linear_32x64": (32, 64, 256, 96, 10, 9), "linear_32x96": (32, 96, 256, 98, 15, 15),
                "linear_32x192": (32, 192, 128, 49, 31, 22),
                "linear_64x128": (64, 128, 128, 49, 30, 25)}
EXPERTS_SOME = 32, 128, 256, 40  # likewise
MOST_EXPERTS, MOST_GROUPS = 512, 32  # that `route` can choose from
MOST_TOKENS = 1 << 20  # of a vocabulary that `sample` can draw from


def packing_of(tensor):
    """The format in which a tensor is packed: its own, or F16."""
    return tensor.type.name if tensor.type.name in PACKINGS else "F16"


def in_turns(gate_up):
    """A tensor in which eight rows of gate and eight of up alternate, from one or two that hold all
    rows of gate, then all of up. Two formats become one: F32, which is packed as F16."""
    kind, (*experts, _, cols) = gate_up[0].type, gate_up[0].shape
    rows = sum(tensor.shape[-2] for tensor in gate_up)
    parts = [np.asarray(tensor.data).reshape(*tensor.shape[:-1], -1) for tensor in gate_up]
    if any(tensor.type != kind for tensor in gate_up):
        kind, parts = GGMLQuantizationType.F32, [
            quants.dequantize(part, t.type).view(np.uint8) for part, t in zip(parts, gate_up)]
    # [experts, tile, gate | up, bytes of eight rows]
    turns = [part.reshape(math.prod(experts), -1, rows // TILE_ROWS, 8 * part.shape[-1])
             .swapaxes(1, 2) for part in parts]
    return replace(gate_up[0], type=kind, shape=(*experts, rows, cols),
                   data=np.concatenate(turns, axis=2).reshape(-1))


def packed_bytes(format, rows, cols):
    """Bytes of `rows` rows in whole tiles of TILE_ROWS."""
    words, part_bytes = PACKINGS[format]
    chunks = chunks_of(cols)
    tile = padded(chunks * 128 * words + -(-chunks // PART_CHUNKS) * part_bytes, 128)
    return -(-rows // TILE_ROWS) * tile


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of a matrix in one packed format."""
    packed: Buffer
    format: str
    rows: int


@dataclass(frozen=True)
class Matrix:
    """A stack of row blocks [rows, cols] in device memory, or `count` of them, of experts."""
    role: str  # its first tensor's name without the layer
    blocks: tuple  # each with the tiles of all experts, one after the other
    weight_scale: Buffer  # f32 [count, rows], powers of two that multiply the product of a row
    bias: Buffer | None  # f32 [rows]
    rows: int
    cols: int
    count: int
    gated: bool = False  # its tiles hold eight rows of gate and eight of up: see linear_silu

    def first(self, rows):
        """Its first rows, of the first block."""
        return replace(self, rows=rows, blocks=(replace(self.blocks[0], rows=rows),))


@dataclass(frozen=True)
class Routes:
    """Which experts a token goes to and how much each counts, and the work that this makes."""
    experts: Buffer  # int32 [rows, k], ascending, -1 for padding
    weights: Buffer  # f32 [rows, k]
    pairs: Buffer  # int32 [rows * k]: places in `experts`, sorted by expert
    items: Buffer  # int32 [n, 4], see list_items in kernels.cu
    tile: int  # most pairs of an item


@dataclass(frozen=True)
class Pages:
    """KV storage [layer, page, kv head, K|V, PAGE, head_dim]; q8 has its scales behind each block.

    Latent attention stores K alone, whose first values are V. Pages start as zeros and are only
    written by rope_kv, rope_latent and copy_page: they never hold NaN.
    """
    data: Buffer
    n_layers: int  # that hold KV
    n_pages: int
    format: str
    states: object = None  # of recurrent layers

    @property
    def nbytes(self):
        return self.data.nbytes

    @property
    def page_bytes(self):
        """Bytes of one page in one layer."""
        return self.nbytes // (self.n_pages * self.n_layers)

    def blocks(self, pages):
        """The storage of each of `pages` in each layer, as byte Buffers."""
        return [self.data.view((self.page_bytes,), np.uint8,
                               (layer * self.n_pages + page) * self.page_bytes)
                for page in pages for layer in range(self.n_layers)]


@dataclass(frozen=True)
class States:
    """Recurrent state f32 [slot, layer, .]: first S [v head, d of v, d of k], then the ring of
    `ring` records of `record_values` values; see States in reference.py."""
    data: Buffer
    nbytes: int
    ring: int
    record_values: int
    saves: list = field(default_factory=list)  # pinned blocks of one slot's size that nobody holds

    def of(self, slot):
        """The state of `slot` in all layers, as a Buffer of bytes."""
        size = self.nbytes // self.data.shape[0]
        return self.data.view((size,), np.uint8, slot * size)


def model_problem(cfg, kv_format):
    """Why the kernels cannot run this model, in one line, or None. Latent attention takes any
    number of query heads: those of one token may fill several tiles."""
    has_tiles = (cfg.head_dim, cfg.value_dim) in ATTENTION_BLOCKS
    if cfg.n_heads > cfg.n_kv_heads * ATTENTION_ROWS and not cfg.latent:
        problem = f"{cfg.n_heads} query heads share {cfg.n_kv_heads} KV heads"
    elif not has_tiles and not (kv_format == "f32" and cfg.head_dim in range(32, 257, 32)):
        problem = f"no kernel for heads of {cfg.head_dim} values"
    elif kv_format == "q8" and cfg.head_dim % Q8_BLOCK:
        return f"no q8 kernel for heads of {cfg.head_dim} values: use --kv f16"
    elif cfg.n_experts > MOST_EXPERTS or cfg.router_groups > MOST_GROUPS:
        problem = (f"the CUDA kernels know at most {MOST_EXPERTS} experts a layer in {MOST_GROUPS} "
                   f"groups, this model has {cfg.n_experts} in {cfg.router_groups}")
    elif cfg.n_vocab > MOST_TOKENS:
        problem = f"the CUDA kernels draw from at most {MOST_TOKENS:,} tokens, not {cfg.n_vocab:,}"
    elif cfg.n_state_layers and (cfg.delta_dim != DELTA_DIM or cfg.delta_v_heads % 2
                                 or cfg.conv_width > MOST_TAPS):
        problem = (f"the CUDA kernels take delta nets with an even number of heads of {DELTA_DIM} "
                   f"values, {MOST_TAPS} taps at most: not {cfg.delta_v_heads} of {cfg.delta_dim}, "
                   f"{cfg.conv_width} taps")
    else:
        return None
    return f"{problem}: use --backend cpu"


def row_threads(cols):
    """Threads of a block that holds a row: whole warps."""
    return min(1024, padded(-(-cols // ROW_VALUES), 32))


def few_shares(blocks, total):
    """How many of `total` thread blocks work on each row block: by bytes, a tile each at most."""
    tiles = [-(-b.rows // TILE_ROWS) for b in blocks]
    if sum(tiles) <= total:
        return tiles
    nbytes = sum(b.packed.nbytes for b in blocks)
    return [min(n, max(1, total * b.packed.nbytes // nbytes)) for n, b in zip(tiles, blocks)]


def tile_of(tokens):
    """Most tokens of an item, by how many an expert has on average."""
    return FEW_ROWS if tokens <= FEW_ROWS else EXPERTS_SOME[0]


# ---- the backend -------------------------------------------------------------------------------


class Device:
    """One card: a context, a stream, the kernels, memory with counters, and the ops."""
    name = "cuda"

    def __init__(self):
        self.card = first_card()
        if (state := cubin_state()) != "ok":
            raise DeviceError(state)
        self.arch, self.card_name = architecture(self.card), card_name(self.card)
        self.architecture = f"sm_{self.arch}"
        self.multiprocessors = attribute(self.card, "MULTIPROCESSOR_COUNT")
        self.kernels = {}
        self.allocated = {}  # purpose -> bytes that the driver gave
        self.scratch = {}  # (name, columns, dtype) -> Buffer
        self.addresses = {}  # ptr -> (nbytes, purpose), for free()
        self.frequencies = {}  # Config.rope_sets -> f64 [sets, pairs]
        self.graphs = {}  # key -> (graph, result), None before its capture
        self.warm_ups = 0  # steps that were no replay of a graph
        self.adjustments = None  # sampling.ADJUSTMENT [slots, n_vocab], from the first penalty on
        self.page_table = None  # what the device's copy holds
        # the last kv.Batch, the same with Buffers, where it lies, and its arrays in one piece
        self.uploaded = None, None, None, None
        with contextlib.ExitStack() as self.opened:  # what was opened is closed if a call fails
            context = call("cuDevicePrimaryCtxRetain", self.card)
            self.opened.callback(call, "cuDevicePrimaryCtxRelease", self.card)
            call("cuCtxSetCurrent", context)
            self.stream = self.open("cuStreamCreate", 0, undo="cuStreamDestroy")
            image = CUBIN.read_bytes()[:-HASH_LENGTH]
            self.library = self.open("cuLibraryLoadData", image, [], [], 0, [], [], 0,
                                     undo="cuLibraryUnload")
            self.fingerprint = hashlib.sha256(image).hexdigest()
            # pinned memory for results on their way to the host, taken in turn
            self.landings = itertools.cycle([
                (self.open("cuEventCreate", 0, undo="cuEventDestroy"),
                 int(self.open("cuMemAllocHost", LANDING_BYTES, undo="cuMemFreeHost")))
                for _ in range(16)])  # more than a draft has rounds
            self.opened.callback(self.free_all)
            self.opened = self.opened.pop_all()
        self.single_rows = self.longest_span = 0  # of the batch: sequences of one row in front
        # On sm_90 and later a kernel may start while its predecessor ends: see follow_predecessor.
        self.launch_early = False
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        self.launch_config = driver.CUlaunchConfig()
        self.launch_config.attrs = [early]
        self.launch_config.blockDimY = self.launch_config.blockDimZ = 1
        self.launch_config.hStream = self.stream
        # Parameters are written into fixed slots; the driver copies them during the launch call.
        self.slots = (ctypes.c_uint64 * 32)()
        self.slot_pointers = (ctypes.c_void_p * 32)(
            *(ctypes.addressof(self.slots) + 8 * i for i in range(32)))
        self.parameters = ctypes.addressof(self.slot_pointers)

    def open(self, name, *args, undo):
        """What the driver function `name` makes, given to the function `undo` by close()."""
        made = call(name, *args)
        self.opened.callback(call, undo, made)
        return made

    def close(self):
        """Give everything back. A second call does nothing."""
        self.opened.close()

    def free_all(self):
        self.drop_graphs()
        for ptr in list(self.addresses):
            self.free(ptr)

    def kernel(self, name, smem):
        """The kernel `name`; one that takes dynamic shared memory may take all that there is."""
        if name not in self.kernels:
            function = call("cuLibraryGetKernel", self.library, name.encode())
            if smem:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                most = attribute(self.card, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
                call("cuKernelSetAttribute", limit, most, function, self.card)
            self.kernels[name] = driver.CUfunction(int(function))
        return self.kernels[name]

    def launch(self, name, grid, block, args, smem=0, early=False):
        """Launch kernel `name` with `grid` (x, y, z) blocks of `block` threads; y and z are 1 where
        they are left out.

        args: Buffer or None (64-bit pointer), int (int32), float (float32). It is launched early
        with a step that is, or if it says so.
        """
        if 0 in grid:  # no rows, for example no logits wanted
            return
        for i, value in enumerate(args):
            if isinstance(value, Buffer):
                self.slots[i] = value.ptr
            elif isinstance(value, float):
                struct.pack_into("<f", self.slots, 8 * i, value)
            else:
                self.slots[i] = int(value or 0) & 0xFFFFFFFF
        config = self.launch_config
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.sharedMemBytes = block, smem
        config.numAttrs = int(self.arch >= 90 and (early or self.launch_early))
        call("cuLaunchKernelEx", config, self.kernel(name, smem), self.parameters, 0)

    def alloc(self, nbytes, purpose):
        """`nbytes` of device memory, zeros, counted under `purpose`. Raises DeviceError."""
        ptr = int(call("cuMemAlloc", max(nbytes, 16)))
        self.addresses[ptr] = nbytes, purpose
        self.allocated[purpose] = self.allocated.get(purpose, 0) + nbytes
        call("cuMemsetD8Async", ptr, 0, max(nbytes, 16), self.stream)
        return Buffer(ptr, (nbytes,), np.dtype(np.uint8))

    def free(self, buffer):
        """Give memory back, once nothing that was launched can still use it."""
        self.synchronize()
        ptr = buffer.ptr if isinstance(buffer, Buffer) else buffer
        nbytes, purpose = self.addresses.pop(ptr)
        self.allocated[purpose] -= nbytes
        call("cuMemFree", ptr)

    def buffer(self, name, shape, dtype):
        """Fixed scratch for the result of op `name`: [rows, columns], reused by its next call."""
        dtype, rows = np.dtype(dtype), shape[0]
        key = name, *shape[1:], dtype
        have = self.scratch.get(key)
        if have is None or have.shape[0] < rows:
            if have is not None:
                self.free(self.scratch.pop(key))
                self.drop_graphs()
            capacity = padded(rows, 64) if rows > 64 else max(8, 1 << (rows - 1).bit_length())
            nbytes = capacity * math.prod(shape[1:]) * dtype.itemsize
            have = self.scratch[key] = self.alloc(nbytes, "scratch").view(
                (capacity, *shape[1:]), dtype)
        return have.view(shape)

    def upload(self, array, purpose):
        """A NumPy array as a new device Buffer."""
        array = np.ascontiguousarray(array)
        buffer = self.alloc(array.nbytes, purpose).view(array.shape, array.dtype)
        self.write(buffer, array)
        return buffer

    def write(self, buffer, array):
        """Copy an array to the start of a Buffer, in stream order. The array may change afterwards:
        of memory that is not pinned the driver has a copy when the call returns."""
        if array.nbytes:
            call("cuMemcpyHtoDAsync", buffer.ptr, array.ctypes.data, array.nbytes, self.stream)

    def download(self, buffer):
        """The contents of a Buffer or of Activations as a NumPy array; waits for the stream."""
        if isinstance(buffer, Activations):
            values = unpack_rows(self.download(buffer.data))[:buffer.rows, :buffer.cols].astype(
                np.float32)
            return values if buffer.scale is None else values * self.download(buffer.scale)[:, None]
        array = np.empty(buffer.shape, buffer.dtype)
        if array.nbytes:
            call("cuMemcpyDtoHAsync", array.ctypes.data, buffer.ptr, array.nbytes, self.stream)
            self.synchronize()
        return array

    def download_row(self, buffer, row):
        cols = buffer.shape[1]
        return self.download(buffer.view((cols,), offset=row * cols * buffer.dtype.itemsize))

    def synchronize(self):
        call("cuStreamSynchronize", self.stream)

    # ---- loading -----------------------------------------------------------------------------

    def matrix(self, tensors, bias=None):
        """Stack the row blocks `tensors`, each [rows, cols], with an optional bias [rows].

        Weights keep their format; one that has no kernel becomes F16. Neighbours of one format are
        packed together. Tensors [experts, rows, cols] give a stack for each expert.
        """
        stack = [tensor.parts() for tensor in tensors]
        count, rows = len(stack[0]), sum(parts[0].shape[0] for parts in stack)
        cols = tensors[0].shape[-1]
        if cols % 8:
            raise DeviceError(f"the CUDA kernels read eight columns at a time, and a matrix of "
                              f"this model has {cols}: use --backend cpu")
        weight_scale = self.alloc(4 * count * rows, "weights").view((count, rows), np.float32)

        def block_of(parts):  # the same for neighbours of one format that fill whole tiles
            return packing_of(parts[0]), parts[0].shape[0] % TILE_ROWS and id(parts)

        blocks, row = [], 0
        for (format, _), members in itertools.groupby(stack, block_of):
            members = list(members)
            height = sum(parts[0].shape[0] for parts in members)
            nbytes = packed_bytes(format, height, cols)
            packed = self.alloc(count * nbytes, "weights")
            for expert in range(count):
                first = 0
                for tensor in (parts[expert] for parts in members):
                    at = expert * nbytes + packed_bytes(format, first, cols)
                    self.repack(tensor, packed.at(at),
                                weight_scale.at(4 * (expert * rows + row + first)))
                    first += tensor.shape[0]
            blocks.append(RowBlock(packed, format, height))
            row += height
        role = ".".join(tensors[0].name.split(".")[-2:])
        return Matrix(role, tuple(blocks), weight_scale,
                      None if bias is None else self.vector(bias), rows, cols, count)

    experts = matrix

    def gated(self, gate_up, down, norm):
        """(gate_up, down): matrices for linear_silu and for what takes its result. `gate_up` is one
        tensor or two, with rows of gate, then of up; `norm` the vector of the RMSNorm before them.

        A power of two for each expert multiplies up and divides down. It brings into [2^14, 2^15)
        what no silu(gate) * up exceeds: the largest cols * |gate row| * |up row|, columns times
        `norm`, since before those the length of an RMSNorm's result is at most sqrt(cols). The
        root of the mean square lies 2^12 to 2^16 below in the layers of SmolLM2, whose cols is 576,
        and in proportion to cols elsewhere. f16 keeps all its bits for the first 2^28.
        """
        down = self.matrix(down)
        gate_up = replace(self.matrix([in_turns(gate_up)]), gated=True)
        (block,), rows, cols = gate_up.blocks, gate_up.count * gate_up.rows, gate_up.cols
        squares = self.buffer("repack", (rows,), np.float32)
        self.launch("linear_silu_squares", (rows,), 128, (
            block.packed, norm, squares, FORMAT_NUMBERS[block.format], cols, chunks_of(cols)))
        of_tiles = lambda x: self.download(x).reshape(gate_up.count, -1, 2, TILE_ROWS // 2)
        scale, lengths = of_tiles(gate_up.weight_scale), np.sqrt(of_tiles(squares))
        most = cols * np.prod(lengths * scale, axis=2, dtype=np.float64).max(axis=(1, 2))
        factor = np.ldexp(np.float32(1), np.clip(15 - np.frexp(most)[1], -100, 100))
        scale[:, :, 1] *= factor[:, None, None]
        self.write(gate_up.weight_scale, scale)
        self.write(down.weight_scale, self.download(down.weight_scale) / factor[:, None])
        return gate_up, down

    def repack(self, tensor, packed, weight_scale):
        """Bring a tensor to the card in pieces, and into packed order there."""
        self.launch_early = False  # these kernels wait for none before them
        rows, cols = tensor.shape
        source = np.asarray(tensor.data).reshape(rows, -1)
        format = tensor.type.name
        native = format in PACKINGS or format in REPACKED_AS_F16
        row_bytes = source[0].nbytes if native else 4 * cols
        step = max(STAGING_BYTES // row_bytes // TILE_ROWS, 1) * TILE_ROWS
        raw = self.buffer("repack", (max(step * row_bytes, STAGING_BYTES),), np.uint8)
        for first in range(0, rows, step):
            part = source[first:first + step]
            self.write(raw, part if native else quants.dequantize(part, tensor.type))
            self.launch(f"linear_repack_{format if native else 'F32'}",
                        (-(-len(part) // TILE_ROWS),), 256,
                        (raw, packed.at(packed_bytes(packing_of(tensor), first, cols)),
                         weight_scale.at(4 * first), len(part), cols))

    def vector(self, array):
        return self.upload(np.asarray(array, np.float32), "weights")

    def pages(self, cfg, n_pages, kv_format, n_states=0, pending=1):
        """Zeroed storage for `n_pages` pages of all layers, with `states` for the recurrent layers
        of `n_states` sequences. Raises DeviceError."""
        if problem := model_problem(cfg, kv_format):
            raise DeviceError(problem)
        for key in [key for key in self.scratch if key[0] == "repack"]:  # the weights are there
            self.free(self.scratch.pop(key))
        data = self.alloc(n_pages * PAGE * cfg.kv_bytes_per_token(kv_format), "kv")
        states = self.states(cfg, n_states, pending) if cfg.n_state_layers else None
        return Pages(data, cfg.n_kv_layers, n_pages, kv_format, states)

    def states(self, cfg, n_states, pending):
        """Zeroed recurrent state of `n_states` slots; a step leaves at most `pending` tokens
        pending. Raises DeviceError."""
        matrix, ring, record = state_layout(cfg, pending)
        shape = n_states, cfg.n_state_layers, matrix + ring * record
        data = self.alloc(4 * math.prod(shape), "states").view(shape, np.float32)
        return States(data, data.nbytes, ring, record)

    def tile_tokens(self, cfg):
        """Most rows of one attention tile: consecutive tokens of a sequence."""
        tile_rows = ATTENTION_ROWS * (2 if cfg.head_dim <= WIDEST_HEAD else 1)
        return max(1, tile_rows // (cfg.n_heads // cfg.n_kv_heads))

    # ---- steps: upload, run, fetch -----------------------------------------------------------

    # Decoded tokens between two writes of a recurrent state: with 1, 3, 4 and 6 the delta ops of 64
    # rows of the 27B take 119, 82, 79 and 79 us a layer on an H200.
    state_interval = 4
    steps_ahead = 1  # steps that may be launched before the tokens of the last are read
    captures = True  # decode batches are padded to a bucket and replayed as a graph

    def upload_batch(self, batch):
        """A kv.Batch whose fields are Buffers, copied into fixed places in stream order. One that
        comes again has gone on in place since, see Batch.advance."""
        if batch is not self.uploaded[0]:
            self.place_batch(batch)
        _, on_device, block, packed = self.uploaded
        self.write(block, packed)
        return on_device

    def place_batch(self, batch):
        # Worth 7% of a step of 1 row and 3% of 8 (8B on an H200); at 64 rows it costs 10%, since
        # waiting blocks take room, and an eager launch takes Python longer.
        self.launch_early = len(batch.tokens) <= FEW_ROWS
        lengths = batch.spans[:, 1]
        self.longest_span = int(lengths.max())
        self.single_rows = int((lengths > 1).argmax()) if self.longest_span > 1 else len(lengths)
        table = self.buffer("page_table", batch.page_table.shape, np.int32)
        if not np.array_equal(self.page_table, batch.page_table):
            self.page_table = batch.page_table
            self.write(table, self.page_table)
        packed = np.concatenate([getattr(batch, name).ravel() for name in ROW_ARRAYS])
        block, fields, at = self.buffer("batch", packed.shape, np.int32), {}, 0
        for name in ROW_ARRAYS:
            array = getattr(batch, name)
            setattr(batch, name, packed[at:at + array.size].reshape(array.shape))
            fields[name] = Buffer(block.ptr + 4 * at, array.shape, block.dtype)
            at += array.size
        self.uploaded = batch, Batch(**fields, page_table=table), block, packed

    def upload_draws(self, draws):
        """sampling.ROW records [rows], one per row of logits, in a fixed buffer."""
        block = self.buffer("draws", draws.shape, draws.dtype)
        self.write(block, draws)
        return block

    def adjust(self, slot, table, n_slots):
        """Penalties and bias of the sequence in `slot`: sampling.ADJUSTMENT [n_vocab]."""
        if self.adjustments is None:  # most engines never need it: 8 bytes a token id and slot
            self.adjustments = self.alloc(n_slots * table.nbytes, "scratch").view(
                (n_slots, len(table)), table.dtype)
            self.drop_graphs()
        self.write(self.adjustments.view(table.shape, offset=slot * table.nbytes), table)

    def run(self, key, work):
        """work(), whose launches are captured into a graph at the second call with this `key`.

        Returns what work() returned: buffers that the graph fills again at every replay.
        """
        if key is None:
            return work()
        self.warm_ups += not self.graphs.get(key)
        if key not in self.graphs:
            self.graphs[key] = None  # the first call loads kernels and finds the scratch sizes
            return work()
        if self.graphs[key] is None:
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            call("cuStreamBeginCapture", self.stream, mode)
            try:
                result = work()
            finally:
                graph = call("cuStreamEndCapture", self.stream)
            self.graphs[key] = call("cuGraphInstantiate", graph, 0), result
            call("cuGraphDestroy", graph)
        graph, result = self.graphs[key]
        call("cuGraphLaunch", graph, self.stream)
        return result

    def drop_graphs(self):
        """Forget the captured graphs: a buffer that they name has moved."""
        for graph, _ in filter(None, self.graphs.values()):
            call("cuGraphExecDestroy", graph)
        self.graphs = {}

    def fetch(self, buffers):
        """Start copying `buffers`, which lie close behind each other, to the host; the returned
        function waits and gives arrays."""
        start, end = buffers[0].ptr, buffers[-1].ptr + buffers[-1].nbytes
        if end - start > LANDING_BYTES:
            downloaded = [self.download(buffer) for buffer in buffers]
            return lambda: downloaded
        event, landing = next(self.landings)
        call("cuMemcpyDtoHAsync", landing, start, end - start, self.stream)
        call("cuEventRecord", event, self.stream)

        def wait():
            call("cuEventSynchronize", event)
            return [np.frombuffer(ctypes.string_at(landing + buffer.ptr - start, buffer.nbytes),
                                  buffer.dtype).reshape(buffer.shape) for buffer in buffers]
        return wait

    def stored_bytes(self, tensor):
        """Bytes that a weight tensor takes on the card."""
        return sum(packed_bytes(packing_of(part), *part.shape) for part in tensor.parts())

    def free_memory(self):
        """Bytes that the driver can still give."""
        return call("cuMemGetInfo")[0]

    def measure_bandwidth(self):
        """GB/s at which the card reads memory: bytes read plus written of a large copy."""
        size = 1 << 30
        source, target = self.alloc(size, "bench"), self.alloc(size, "bench")
        before, copies = self.mark(), 5
        for _ in range(copies):
            call("cuMemcpyDtoDAsync", target.ptr, source.ptr, size, self.stream)
        elapsed = self.milliseconds(before, self.mark())
        self.free(source), self.free(target)
        return 2e-6 * size * copies / elapsed

    def mark(self):
        """A point in the stream, for one call of milliseconds()."""
        event = call("cuEventCreate", 0)
        call("cuEventRecord", event, self.stream)
        return event

    def milliseconds(self, before, after):
        """Time between two marks, which are given back; waits until the stream is there."""
        call("cuEventSynchronize", after)
        elapsed = call("cuEventElapsedTime", before, after)
        call("cuEventDestroy", before), call("cuEventDestroy", after)
        return elapsed

    def run_ahead(self):
        """Keep the card busy for a while, so that the launches that follow queue up behind."""
        block = self.buffer("busy", (1 << 28,), np.uint8)
        for _ in range(400):
            call("cuMemsetD8Async", block.ptr, 0, block.nbytes, self.stream)

    # ---- ops, in the order in which the forward pass calls them --------------------------------

    def activations(self, name, rows, cols):
        """Scratch for a GEMM input with a scale per row."""
        data = self.buffer(name, (padded(rows, 8), padded(cols, 128)), np.float16)
        return Activations(data, self.buffer(f"{name}_scale", (rows,), np.float32), rows, cols)

    def embed(self, table, batch):
        """h [rows, n_embd] f32: one row of the table per token.

        Token -1 (FEED in kernels.cu) is the one that was drawn last for the row's slot; other
        negative tokens give zeros.
        """
        rows = batch.tokens.shape[0]
        h = self.buffer("embed", (rows, table.cols), np.float32)
        block = table.blocks[0]
        self.launch("embed", (rows,), 128, (
            block.packed, table.weight_scale, batch.tokens, batch.slots, self.last_tokens(batch),
            h, FORMAT_NUMBERS[block.format], table.cols, chunks_of(table.cols)))
        return h

    def rmsnorm(self, h, weight, eps, rows=None):
        """x = h / sqrt(mean(h^2) + eps) * weight of h f32 [., cols]: all rows, or int32 `rows`.

        cols = len(weight); h may have more columns.
        """
        cols = weight.shape[0]
        x = self.activations("rmsnorm", (h if rows is None else rows).shape[0], cols)
        self.launch("rmsnorm", (x.rows,), row_threads(cols), (
            h, weight, rows, x.data, x.scale, cols, h.shape[1], x.data.shape[1], float(eps)))
        return x

    def rmsnorm_f32(self, h, weight, eps, rows=None):
        """The same as f32 [n, cols]: not the input of a matrix product."""
        n, cols = (h if rows is None else rows).shape[0], weight.shape[0]
        out = self.buffer("rmsnorm_f32", (n, cols), np.float32)
        self.launch("rmsnorm_f32", (n,), row_threads(cols),
                    (h, weight, rows, out, cols, h.shape[1], float(eps)))
        return out

    def scale_rows(self, values, heads=1, pitch=None, width=None):
        """x [rows * heads, width]: `heads` pieces, `pitch` apart, of each row of f32 `values`.

        By default the whole row is one piece. What a matrix product takes.
        """
        rows, cols = values.shape
        x = self.activations("scale_rows", rows * heads, width or cols)
        stride = x.data.shape[1]
        self.launch("scale_rows", (x.rows,), row_threads(stride),
                    (values, x.data, x.scale, cols, heads, pitch or cols, x.cols, stride))
        return x

    def linear(self, x, w, out=None):
        """y [rows, w.rows] f32 = x W^T (+ bias), in the Buffer `out` if there is one."""
        y = out or self.buffer(f"linear {w.role}", (x.rows, w.rows), np.float32)
        self.multiply(x, w, y)
        return y

    def linear_silu(self, x, w, routes=None):
        """x [rows, F] = silu(gate) * up of x W^T, rows of gate first, with `routes` for each row
        and each of its experts, see linear_experts. Made by `gated`, w needs no scale of rows.
        """
        rows, cols = routes.pairs.shape[0] if routes else x.rows, w.rows // 2
        # The columns that pad it are never written: scratch starts as zeros.
        y = self.buffer(f"linear_silu_{cols}", (padded(rows, 8), padded(cols, 128)), np.float16)
        self.linear_experts(x, w, routes, y) if routes else self.linear(x, w, y)
        return Activations(y, None, rows, cols)

    def linear_add(self, x, w, h):
        """h += x W^T (+ bias), in place."""
        self.multiply(x, w, h, add=True)

    def multiply(self, x, w, y, add=False, items=None):
        """Choose a kernel by the number of rows. All of them give the same bits.

        items: of experts, most tokens of an item, how many there are, and what the kernel takes.
        """
        if not x.rows:  # a chunk of a prompt wants no logits
            return
        assert w.gated == (y.dtype == np.float16)
        tile, n_items, *rest = items or (None, 0)
        column = 0
        for i in range(0, len(w.blocks), STACK):
            blocks = w.blocks[i:i + STACK]
            name = (self.linear_kernel(x.rows, blocks) if tile is None else
                    "linear_experts_8" if tile == FEW_ROWS else "linear_experts_some")
            grid, threads, shares, smem = self.linear_plan(name, x.rows, blocks, n_items)
            stack = lambda values: (*values, *(None,) * (STACK - len(blocks)))
            self.launch(name, grid, threads, (
                x.data, x.scale, w.weight_scale.at(4 * column), w.bias and w.bias.at(4 * column),
                y.at(4 * column), x.rows, w.rows, chunks_of(w.cols), add, w.gated,
                *stack(b.packed for b in blocks), *stack(b.rows for b in blocks), *stack(shares),
                sum(FORMAT_NUMBERS[b.format] << 8 * j for j, b in enumerate(blocks)), *rest), smem)
            column += sum(b.rows for b in blocks)

    def linear_kernel(self, rows, blocks):
        """The kernel for a product with `rows` rows of x."""
        tiles = sum(-(-b.rows // TILE_ROWS) for b in blocks)
        if rows <= 8:
            return "linear_few_8" if tiles <= 2 * self.multiprocessors else "linear_few_8_three"
        narrow = tiles <= 8 * self.multiprocessors
        if rows <= 16 and (narrow or any(b.format == "F16" for b in blocks)):
            return "linear_few_16"

        def microseconds(name):
            height, columns, *_, first, further = MORE_KERNELS[name]
            thread_blocks = -(-rows // height) * sum(-(-b.rows // columns) for b in blocks)
            return first + further * ((thread_blocks - 1) // self.multiprocessors)
        return min(MORE_KERNELS, key=microseconds)

    def linear_plan(self, name, rows, blocks, n_items):
        """Grid, threads of a block, thread blocks per row block and bytes of shared memory."""
        if name in FEW_KERNELS:
            threads, held = FEW_KERNELS[name]
            # Of many items some have no pairs, and their blocks end at once.
            held *= 2 if n_items > 16 else 1
            shares = few_shares(blocks, held * self.multiprocessors // (n_items or 1))
            return (sum(shares), n_items or 1), threads, shares, 0
        height, columns, threads, smem, *_ = MORE_KERNELS.get(name, EXPERTS_SOME)
        shares = [-(-b.rows // columns) for b in blocks]
        grid = (sum(shares), n_items) if n_items else (-(-rows // height), sum(shares))
        return grid, threads, shares, 1024 * smem

    def rope_angles(self, cfg, batch):
        """cos and sin f32 [rows, 2, rope_dim / 2] of position times the row's frequencies."""
        if cfg.rope_sets not in self.frequencies:
            table = np.array(cfg.rope_sets, np.float64)
            self.frequencies[cfg.rope_sets] = self.upload(table, "weights")
        rows, pairs = batch.positions.shape[0], cfg.rope_dim // 2
        angles = self.buffer("rope_angles", (rows, 2, pairs), np.float32)
        self.launch("rope_angles", (-(-rows * pairs // 128),), 128,
                    (batch.positions, batch.rope_sets, self.frequencies[cfg.rope_sets], angles,
                     rows, pairs, float(cfg.rope_magnitude)))
        return angles

    def rope_kv(self, qkv, angles, q_norm, k_norm, cfg, layer, kv, batch):
        """Split qkv f32 [rows, (heads + 2 kv heads) head_dim], norm and rotate q and k, store K, V.

        Returns q [rows, heads * head_dim], f16, or f32 with f32 KV. With cfg.q_gated each q is
        followed by a gate of its size, see sigmoid_gate. Rows with a negative slot store nothing.
        """
        rows, heads = qkv.shape[0], cfg.n_heads + 2 * cfg.n_kv_heads
        assert qkv.shape[1] == (heads + cfg.n_heads * cfg.q_gated) * cfg.head_dim
        q, work = self.heads(angles, cfg, layer, kv, batch)
        self.launch("rope_kv", (rows, -(-heads // 4)), 128,
                    (qkv, q_norm, k_norm, cfg.q_gated, *work))
        return q

    def heads(self, angles, cfg, layer, kv, batch):
        """(scratch for q [rows, heads * head_dim], struct Heads of kernels.cu)."""
        q = self.buffer("queries", (angles.shape[0], cfg.n_heads * cfg.head_dim),
                        np.float32 if kv.format == "f32" else np.float16)
        return q, (angles, q, kv.data, batch.page_table, batch.slots, batch.positions, layer,
                   kv.n_pages, batch.page_table.shape[1], cfg.n_heads, cfg.n_kv_heads,
                   cfg.head_dim, cfg.rope_dim, cfg.rope_neox, KV_FORMATS[kv.format],
                   float(cfg.rms_eps))

    def rope_latent(self, content, q, kv_a, angles, kv_norm, cfg, layer, kv, batch):
        """Queries and key of latent attention, whose key holds the value: rank = cfg.value_dim.

        Returns q [rows, heads * head_dim], f16, or f32 with f32 KV: the `rank` values of a head in
        `content`, then the rotated last rope_dim of the key_dim values of a head in `q`. Stores as
        K the last head_dim columns of kv_a: `rank` values, normed, then rope_dim, rotated. Columns
        of q after the heads and of kv_a before the last head_dim are not read. All f32.
        """
        out, work = self.heads(angles, cfg, layer, kv, batch)
        self.launch("rope_latent", (content.shape[0], -(-(cfg.n_heads + 1) // 4)), 128,
                    (content, q, kv_a, kv_norm, q.shape[1], kv_a.shape[1], cfg.key_dim, *work))
        return out

    def attention(self, q, cfg, layer, kv, batch):
        """x [rows, heads * head_dim] = softmax(q K^T * attn_scale) V over positions 0..own.

        With cfg.latent x is [rows * heads, value_dim]: each head goes into its own product.
        """
        heads, dim, width, rows = cfg.n_heads, cfg.head_dim, cfg.value_dim, q.shape[0]
        assert q.shape[1] == heads * dim
        row_heads = 1 if cfg.latent else heads  # of a row of x
        x_rows, cols = rows * heads // row_heads, row_heads * width
        max_pages = batch.page_table.shape[1]
        scale = cfg.attn_scale * math.log2(math.e)  # the kernels take powers of two
        if kv.format == "f32":
            values = self.buffer("attention_f32", (x_rows, cols), np.float32)
            self.launch("attention_f32", (rows, heads), 32,
                        (q, values, kv.data, batch.page_table, batch.positions, batch.slots, layer,
                         kv.n_pages, max_pages, cfg.n_kv_heads, dim, width, scale))
            return self.scale_rows(values)
        # Weights add up to one and V is f16: the result needs no row scale. The columns that pad
        # it are never written: scratch starts as zeros, and each width has its own.
        out = self.buffer(f"attention_{cols}", (padded(x_rows, 8), padded(cols, 128)), np.float16)
        segments, tiles = -(-max_pages * PAGE // SEGMENT), batch.tiles.shape[0]
        # A step too large for a graph has prompts, which come behind sequences of one row.
        prompt = rows > GRAPH_SIZES[-1] and kv.format == "f16" and dim in PROMPT_HEADS
        wide = "_wide" if not prompt and rows > tiles and dim <= WIDEST_HEAD else ""
        single, rows = (self.single_rows, self.single_rows) if prompt else (tiles, rows)
        blocks = -(-heads // ATTENTION_ROWS) if cfg.latent else cfg.n_kv_heads  # of a tile
        busy = max(single, 1) * blocks
        splits = self.attention_splits(cfg, busy, segments, 4 * rows * heads * width)
        idle = self.multiprocessors // (busy * splits)  # see `shares` in attention_tile
        shares = 1 if wide or idle < 2 else 2 if idle < 4 else 4
        # [rows, heads, segments, .]; as rows here, so that page tables of all widths share them.
        parts = (None, None) if splits == 1 else (
            self.buffer("attention_values", (rows * segments, heads * width), np.float32),
            self.buffer("attention_states", (rows * segments, heads, 2), np.float32))

        # Attention starts early whatever the number of rows: rope_kv before it leaves room.
        def launch(kind, grid, threads, tiles, span_rows=0, smem=0):
            self.launch(f"attention_{kv.format}_{dim}{kind}", grid, threads, (
                q, out, *parts, kv.data, batch.page_table, tiles, layer, kv.n_pages, max_pages,
                segments, heads, cfg.n_kv_heads, out.shape[1], scale, span_rows), smem, early=True)

        staged = not wide and not cfg.latent
        few = staged and busy * shares * splits <= self.multiprocessors
        threads = EIGHT_WARPS if cfg.latent or few else FOUR_WARPS
        # Where staged: struct Shared of attention_tile, and two rounds of 4 KB a warp.
        launch("_few" if few else wide, (single, blocks * shares, splits), threads, batch.tiles,
               smem=staged * (1024 * -(-dim // 32) + 260 * threads + 8352))
        if splits > 1:
            # Few rows with many segments: their parts go to many multiprocessors.
            threads = 32 if rows * heads < self.multiprocessors else padded(width, 32)
            self.launch("attention_merge", (rows, heads, -(-width // threads)), threads,
                        (*parts, out, batch.positions, batch.slots, segments, out.shape[1], width,
                         row_heads), early=True)
        if prompt:
            span_rows = 4 * ATTENTION_ROWS // (heads // cfg.n_kv_heads)
            keys = 64 if dim <= WIDEST_HEAD else 32
            grid = -(-self.longest_span // span_rows), blocks, batch.spans.shape[0] - single
            launch("_prompt", grid, FOUR_WARPS, batch.spans.at(24 * single), span_rows,
                   4 * dim * (64 + keys))
        return Activations(out, None, x_rows, cols)

    def attention_splits(self, cfg, blocks, segments, segment_bytes):
        """Over how many to spread the segments of each of `blocks`: as many as the card holds.

        It is fixed when a graph is captured, so it looks at what the page table can hold. It moves
        no bits: the segments of a row are merged in index order either way.
        """
        room = self.multiprocessors * ATTENTION_BLOCKS[cfg.head_dim, cfg.value_dim] // blocks
        fits = 0 < segments * segment_bytes <= PARTS_LIMIT
        return max(1, min(room, segments)) if fits else 1

    def delta_conv(self, u, mixer, cfg, layer, kv, batch):
        """c f32 [rows, delta_channels + 2 H_v] = q | k | v | beta | decay of u f32 [rows, .]."""
        rows, cols = u.shape[0], cfg.delta_channels + 2 * cfg.delta_v_heads
        c = self.buffer("delta_conv", (rows, cols), np.float32)
        self.launch("delta_conv", (min(rows, 128), -(-cfg.delta_channels // (4 * DELTA_DIM))), 128,
                    self.delta_net(u, mixer, c, None, cfg, layer, kv, batch))
        return c

    def delta_rule(self, u, c, cfg, layer, kv, batch):
        """o f32 [rows, H_v d] = S^T q; the states take what enters, see kv.Batch.of."""
        o = self.buffer("delta_rule", (u.shape[0], cfg.delta_v_heads * DELTA_DIM), np.float32)
        grid = 4 * cfg.delta_v_heads // cfg.delta_k_heads, cfg.delta_k_heads, batch.spans.shape[0]
        kind = "prompt" if self.longest_span > 2 else "decode"
        self.launch(f"delta_rule_{kind}", grid, 128,
                    self.delta_net(u, None, c, o, cfg, layer, kv, batch))
        return o

    def delta_net(self, u, mixer, c, o, cfg, layer, kv, batch):
        """struct DeltaNet of kernels.cu."""
        _, n_layers, values = kv.states.data.shape
        weights = (mixer.conv, mixer.dt, mixer.decay) if mixer else (None,) * 3
        return (u, *weights, c, o, kv.states.data.at(4 * layer * values), batch.spans,
                batch.slots, batch.positions, u.shape[0], cfg.delta_k_heads, cfg.delta_v_heads,
                cfg.delta_grouped, cfg.conv_width, kv.states.ring, u.shape[1], c.shape[1],
                kv.states.record_values, n_layers * values, float(cfg.rms_eps))

    def delta_norm(self, o, u, norm, cfg):
        """x [rows, H_v d] = rmsnorm of each head of o, times silu(z) with z in u behind v."""
        rows, cols = o.shape
        x = self.activations("delta_norm", rows, cols)
        self.launch("delta_norm", (rows,), row_threads(cols),
                    (o, u.at(4 * cfg.delta_channels), norm, x.data, x.scale, cols,
                     u.shape[1], float(cfg.rms_eps)))
        return x

    def sigmoid_gate(self, x, qkv, cfg):
        """x [rows, heads * head_dim], in place, times the sigmoid of the gates in qkv, see rope_kv.
        """
        self.launch("sigmoid_gate", (x.rows, -(-x.cols // 1024)), 128,
                    (x.data, qkv, x.cols, x.data.shape[1], qkv.shape[1], cfg.head_dim))
        return x

    def route(self, logits, bias, cfg, batch):
        """Routes of each row of logits f32 [rows, n_experts or more], and the items they make."""
        (rows, stride), n, k = logits.shape, cfg.n_experts, cfg.n_experts_used
        n_pairs, tile = rows * k, tile_of(rows * k / n)
        busy = min(n, n_pairs)  # with pairs; all but one of them may have a single one
        routes = Routes(self.buffer("route_experts", (rows, k), np.int32),
                        self.buffer("route_weights", (rows, k), np.float32),
                        self.buffer("route_pairs", (n_pairs,), np.int32),
                        self.buffer("route_items", (busy + (n_pairs - busy) // tile, 4), np.int32),
                        tile)
        self.launch("route", (-(-rows // 8),), 256, (
            logits, bias, batch.slots, routes.weights, routes.experts, routes.pairs, routes.items,
            self.buffer("route_finished", (1,), np.uint32), rows, stride, n, k, cfg.router_sigmoid,
            cfg.router_norm, float(cfg.router_scale), cfg.router_groups, cfg.router_groups_used,
            tile.bit_length() - 1, routes.items.shape[0]))
        return routes

    def linear_experts(self, x, w, routes, out=None):
        """y f32 [rows * k, w.rows] = for each row and each of its experts, x times that one's rows.

        x has a row for each row, or for each of its k experts. Without an expert y is anything.
        """
        n_pairs = routes.pairs.shape[0]
        y = out or self.buffer("linear_experts", (n_pairs, w.rows), np.float32)
        self.multiply(x, w, y, items=(
            routes.tile, routes.items.shape[0], routes.items, routes.pairs, n_pairs // x.rows, 1,
            x.rows > routes.experts.shape[0]))
        return y

    def linear_heads(self, x, w):
        """y f32 [rows, heads * w.rows] = row r * heads + h of x times the rows of head h."""
        heads, rows = w.count, x.rows // w.count
        y, tile = self.buffer("linear_heads", (x.rows, w.rows), np.float32), tile_of(rows)
        self.multiply(x, w, y, items=(tile, heads * -(-rows // tile), None, None, 1, heads, True))
        return y.view((rows, heads * w.rows))

    def combine(self, y, routes, shared, logits, h):
        """h f32 += what a row's experts gave, by weight, in index order, then the shared expert.

        `shared` [rows, n_embd] or None counts sigmoid(last column of `logits`), or 1 without them.
        """
        rows, cols = h.shape
        self.launch("combine", (-(-cols // 256), rows), 256,
                    (y, routes.experts, routes.weights, shared, logits, h, routes.experts.shape[1],
                     cols, logits.shape[1] if logits else 0))

    def sample(self, logits, draws, batch):
        """(tokens int32, log probabilities f32) of one drawn token per row; see sampling.py.

        The tokens are also kept for rows of the next step that ask for the last one of their slot.
        """
        rows, n_vocab = logits.shape
        n_slices = -(-n_vocab // SLICE)
        drawn = self.buffer("sample", (2 * rows,), np.int32)  # in one piece, see fetch
        tokens, logprobs = drawn.view((rows,)), drawn.view((rows,), np.float32, 4 * rows)
        args = (logits, draws, self.adjustments,
                self.buffer("sample_state", (rows, SAMPLE_STATE_BYTES), np.uint8),
                self.buffer("sample_slices", (rows, n_slices, SAMPLE_SLICE_BYTES), np.uint8),
                tokens, self.last_tokens(batch), logprobs, batch.slots, batch.logit_rows, n_vocab)
        self.launch("sample_slices", (-(-n_slices // 4), rows), 128, args)
        # Four tokens a thread, or more with many rows: it does not change what the blocks find.
        blocks = max(1, min(-(-n_slices // 4), 2 * self.multiprocessors // max(rows, 1)))
        for name in "sample_cut", "sample":
            self.launch(name, (blocks, rows), SAMPLE_THREADS, args)
        return tokens, logprobs

    def last_tokens(self, batch):
        """int32 [slots]: the token drawn last for each row of the page table."""
        return self.buffer("last_tokens", (batch.page_table.shape[0],), np.int32)

    def copy_page(self, kv, source, target):
        """Page `target` of all layers becomes a copy of page `source`."""
        self.launch("copy_page", (-(-kv.page_bytes // 4096), kv.n_layers), 256,
                    (kv.data, kv.n_pages, kv.page_bytes, source, target))

    def save_pages(self, kv, pages):
        """The contents of `pages` in all layers as bytes, for load_pages of the same backend."""
        return np.concatenate([self.download(block) for block in kv.blocks(pages)])

    def load_pages(self, kv, pages, data):
        for block, page in zip(kv.blocks(pages), data.reshape(-1, kv.page_bytes)):
            self.write(block, page)

    def save_state(self, kv, slot):
        """The recurrent state of `slot` as bytes, for load_state of the same backend.

        The copy runs in stream order: the bytes are there after the next synchronize(), and must
        not be written to. They lie in pinned memory, which lasts until close() and is used again
        once nobody holds the array or a view of it.
        """
        state, free = kv.states.of(slot), kv.states.saves
        if not free:
            free.append(int(self.open("cuMemAllocHost", state.nbytes, undo="cuMemFreeHost")))
            self.allocated["snapshots"] = self.allocated.get("snapshots", 0) + state.nbytes
        address = free.pop()
        raw = (ctypes.c_uint8 * state.nbytes).from_address(address)
        weakref.finalize(raw, free.append, address)
        call("cuMemcpyDtoHAsync", address, state.ptr, state.nbytes, self.stream)
        return np.frombuffer(raw, np.uint8)

    def load_state(self, kv, slot, data):
        self.write(kv.states.of(slot), data)
