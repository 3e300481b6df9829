"""The CUDA backend: driver, memory with counters, launches, graphs, and the ops of kernels.cu.

An op's result lives in a fixed scratch buffer until the same op is called again, so a step
allocates nothing and can be captured into a graph. Shapes are (rows, columns). All work goes to
one stream, in order.
"""
import ctypes
import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from errors import DeviceError

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
    """Call the driver function `name`. Returns its results without the status; raises DeviceError."""
    status, *results = getattr(driver, name)(*args)
    if status:
        raise DeviceError(f"{name} failed: {status.name}. {hint(status.name)}")
    return results[0] if len(results) == 1 else results


def hint(status):
    if "OUT_OF_MEMORY" in status:
        return "Lower --ctx, --sessions or --kv, or free the card (nvidia-smi shows who holds it)."
    if "NO_BINARY_FOR_GPU" in status or "INVALID_IMAGE" in status or "INVALID_PTX" in status:
        return f"The built kernels do not fit this card; {BUILD_HINT}"
    if "ILLEGAL" in status or "LAUNCH" in status:
        return "A kernel went wrong: please report it with the output of `leone.py doctor`."
    return "See `leone.py doctor` for the state of driver and card."


def probe():
    """Facts about the first card as a dict, or one line that says why there is none."""
    if driver is None:
        return DRIVER_MISSING
    try:
        call("cuInit", 0)
        if call("cuDeviceGetCount") == 0:
            return "the driver sees no GPU"
        card = call("cuDeviceGet", 0)
        context = call("cuDevicePrimaryCtxRetain", card)
        call("cuCtxPushCurrent", context)
        free, total = call("cuMemGetInfo")
        call("cuCtxPopCurrent")
        call("cuDevicePrimaryCtxRelease", card)
        version = call("cuDriverGetVersion")
        return dict(name=card_name(card), arch=architecture(card), free_bytes=free,
                    total_bytes=total, driver=f"{version // 1000}.{version % 1000 // 10}")
    except (DeviceError, RuntimeError) as error:  # RuntimeError: libcuda.so is not there
        return str(error).splitlines()[0]


def attribute(card, name):
    return call("cuDeviceGetAttribute",
                getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), card)


def architecture(card):
    return (10 * attribute(card, "COMPUTE_CAPABILITY_MAJOR")
            + attribute(card, "COMPUTE_CAPABILITY_MINOR"))


def card_name(card):
    return call("cuDeviceGetName", 128, card).split(b"\0")[0].decode()


def source_hash():
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def cubin_state():
    """"ok", or one line that says what is wrong with kernels.cubin. Without kernels.cu beside it
    (a packed distribution) the cubin is taken as it is."""
    if not CUBIN.exists():
        return f"kernels.cubin is not built; {BUILD_HINT}"
    built_from = CUBIN.read_bytes()[-HASH_LENGTH:].decode("ascii", "replace")
    if SOURCE.exists() and built_from != source_hash():
        return f"kernels.cubin was built from another kernels.cu; {BUILD_HINT}"
    return "ok"


# ---- memory and launches ---------------------------------------------------------------------


@dataclass(frozen=True)
class Buffer:
    """A piece of device memory: address, shape and NumPy dtype of what lies there."""
    ptr: int
    shape: tuple
    dtype: np.dtype

    @property
    def nbytes(self):
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def view(self, shape, dtype=None, offset=0):
        return Buffer(self.ptr + offset, tuple(shape), np.dtype(dtype or self.dtype))


@dataclass(frozen=True)
class Activations:
    """Input of a matrix product: f16 rows, padded with zeros to a multiple of 64 columns.

    `scale` is f32 [rows], a power of two that multiplies the row afterwards, or None for 1.
    """
    data: Buffer
    scale: Buffer | None
    rows: int
    cols: int


@dataclass(frozen=True)
class DeviceBatch:
    """A kv.Batch on the device: the same fields as Buffers, and what launches depend on."""
    tokens: Buffer
    positions: Buffer
    slots: Buffer
    rope_sets: Buffer
    logit_rows: Buffer
    tiles: Buffer
    page_table: Buffer
    rows: int
    longest: int  # largest position + 1 when the batch was made; a replayed graph may see more


def padded(n, multiple):
    return -(-n // multiple) * multiple


class Device:
    """One card: a context, a stream, the kernels, memory with counters, and the ops."""
    name = "cuda"

    def __init__(self):
        state = cubin_state()
        if driver is None:
            raise DeviceError(DRIVER_MISSING)
        if state != "ok":
            raise DeviceError(state)
        try:
            call("cuInit", 0)
        except RuntimeError as error:
            raise DeviceError(f"no NVIDIA driver: {error}; use --backend cpu") from None
        self.card = call("cuDeviceGet", 0)
        self.arch, self.card_name = architecture(self.card), card_name(self.card)
        self.multiprocessors = attribute(self.card, "MULTIPROCESSOR_COUNT")
        self.context = call("cuDevicePrimaryCtxRetain", self.card)
        call("cuCtxSetCurrent", self.context)
        self.stream = call("cuStreamCreate", 0)
        image = CUBIN.read_bytes()[:-HASH_LENGTH]
        self.library = call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
        self.fingerprint = hashlib.sha256(image).hexdigest()
        self.kernels = {}
        self.allocated = {}  # purpose -> bytes that the driver gave
        self.scratch = {}  # (name, columns, dtype) -> Buffer
        self.generation = 0  # grows when a scratch buffer moves: captured graphs are stale then
        self.addresses = {}  # ptr -> (nbytes, purpose), for free()
        self.graphs = {}  # (key, generation) -> (graph, result), None before its capture
        self.page_table = None  # what the device's copy holds
        self.landings = [(call("cuEventCreate", 0), int(call("cuMemAllocHost", LANDING_BYTES)))
                         for _ in range(4)]  # pinned memory for results on their way to the host
        self.landing = 0
        # Parameters are written into fixed slots; the driver copies them during the launch call.
        self.slots = (ctypes.c_uint64 * 32)()
        self.slot_pointers = (ctypes.c_void_p * 32)(
            *(ctypes.addressof(self.slots) + 8 * i for i in range(32)))
        self.parameters = ctypes.addressof(self.slot_pointers)

    def close(self):
        if self.context is None:
            return
        self.synchronize()
        for ptr in list(self.addresses):
            self.free(ptr)
        for _, staging in self.landings:
            call("cuMemFreeHost", staging)
        call("cuLibraryUnload", self.library)
        call("cuStreamDestroy", self.stream)
        call("cuDevicePrimaryCtxRelease", self.card)
        self.context = None

    def use_in_this_thread(self):
        call("cuCtxSetCurrent", self.context)

    def kernel(self, name, smem=0):
        """The kernel `name`, allowed to use `smem` bytes of dynamic shared memory."""
        function, allowed = self.kernels.get(name, (None, 49152))
        if function is None:
            found = call("cuLibraryGetKernel", self.library, name.encode())
            function = driver.CUfunction(int(found))
        if smem > allowed:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuKernelSetAttribute", limit, smem, driver.CUkernel(int(function)), self.card)
            allowed = smem
        self.kernels[name] = function, allowed
        return function

    def launch(self, name, grid, block, args, smem=0):
        """Launch kernel `name` with `grid` (x, y, z) blocks of `block` threads.

        args: Buffer or None (64-bit pointer), int (int32), float (float32).
        """
        function = self.kernel(name, smem)
        for i, value in enumerate(args):
            if isinstance(value, Buffer):
                self.slots[i] = value.ptr
            elif value is None:
                self.slots[i] = 0
            elif isinstance(value, float):
                self.slots[i] = struct.unpack("<I", struct.pack("<f", value))[0]
            else:
                self.slots[i] = int(value) & 0xFFFFFFFF
        call("cuLaunchKernel", function, *grid, block, 1, 1, smem, self.stream, self.parameters, 0)

    def alloc(self, nbytes, purpose):
        """`nbytes` of device memory, counted under `purpose`. Raises DeviceError."""
        ptr = int(call("cuMemAlloc", max(nbytes, 16)))
        self.addresses[ptr] = nbytes, purpose
        self.allocated[purpose] = self.allocated.get(purpose, 0) + nbytes
        return Buffer(ptr, (nbytes,), np.dtype(np.uint8))

    def free(self, buffer):
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
                self.synchronize()
                self.free(have)
                self.generation += 1
            capacity = max(8, 1 << (rows - 1).bit_length())
            nbytes = capacity * int(np.prod(shape[1:])) * dtype.itemsize
            block = self.alloc(nbytes, "scratch")
            call("cuMemsetD8Async", block.ptr, 0, max(nbytes, 16), self.stream)
            have = self.scratch[key] = block.view((capacity, *shape[1:]), dtype)
        return have.view(shape)

    def upload(self, array, purpose):
        """A NumPy array as a new device Buffer."""
        array = np.ascontiguousarray(array)
        buffer = self.alloc(array.nbytes, purpose).view(array.shape, array.dtype)
        self.write(buffer, array)
        return buffer

    def write(self, buffer, array):
        """Copy host memory to the device and wait: the host array may change afterwards."""
        if array.nbytes:
            call("cuMemcpyHtoDAsync", buffer.ptr, array.ctypes.data, array.nbytes, self.stream)
            self.synchronize()

    def download(self, buffer):
        """The contents of a Buffer or of Activations as a NumPy array; waits for the stream."""
        if isinstance(buffer, Activations):
            values = self.download(buffer.data)[:, :buffer.cols].astype(np.float32)
            return values if buffer.scale is None else values * self.download(buffer.scale)[:, None]
        array = np.empty(buffer.shape, buffer.dtype)
        if array.nbytes:
            call("cuMemcpyDtoHAsync", array.ctypes.data, buffer.ptr, array.nbytes, self.stream)
            self.synchronize()
        return array

    def synchronize(self):
        call("cuStreamSynchronize", self.stream)

    # ---- steps: upload, run, fetch -----------------------------------------------------------

    steps_ahead = 1  # steps that may be launched before the tokens of the last are read
    captures = True  # decode batches are padded to a bucket and replayed as a graph

    def upload_batch(self, batch):
        """A kv.Batch as a DeviceBatch in fixed buffers, in stream order."""
        fields = [batch.tokens, batch.positions, batch.slots, batch.rope_sets, batch.logit_rows,
                  batch.tiles.reshape(-1)]
        packed = np.concatenate(fields)
        block = self.buffer("batch", (len(packed),), np.int32)
        call("cuMemcpyHtoDAsync", block.ptr, packed.ctypes.data, packed.nbytes, self.stream)
        table = self.buffer("page_table", batch.page_table.shape, np.int32)
        if self.page_table is None or not np.array_equal(self.page_table, batch.page_table):
            self.page_table = batch.page_table.copy()
            call("cuMemcpyHtoDAsync", table.ptr, self.page_table.ctypes.data,
                 self.page_table.nbytes, self.stream)
        starts = np.cumsum([0] + [4 * len(f) for f in fields]).tolist()
        parts = [block.view((len(f),), offset=at) for f, at in zip(fields, starts)]
        tiles = parts.pop().view(batch.tiles.shape)
        return DeviceBatch(*parts, tiles, table, len(batch.tokens), int(batch.positions.max()) + 1)

    def run(self, key, work):
        """work(), whose launches are captured into a graph at the second call with this `key`.

        Returns what work() returned: buffers that the graph fills again at every replay.
        """
        if key is None:
            return work()
        key = key, self.generation
        if key not in self.graphs:
            self.graphs = {k: g for k, g in self.graphs.items() if k[1] == self.generation}
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

    def fetch(self, buffers):
        """Start copying `buffers` to the host; the returned function waits and gives arrays."""
        event, staging = self.landings[self.landing]
        self.landing = (self.landing + 1) % len(self.landings)
        arrays, at = [], 0
        for buffer in buffers:
            call("cuMemcpyDtoHAsync", staging + at, buffer.ptr, buffer.nbytes, self.stream)
            raw = (ctypes.c_byte * buffer.nbytes).from_address(staging + at)
            arrays.append(np.frombuffer(raw, buffer.dtype).reshape(buffer.shape))
            at += padded(buffer.nbytes, 16)
        call("cuEventRecord", event, self.stream)

        def wait():
            call("cuEventSynchronize", event)
            return [array.copy() for array in arrays]
        return wait

    def free_memory(self):
        """Bytes that the driver can still give."""
        return call("cuMemGetInfo")[0]

    def measure_bandwidth(self):
        """GB/s at which the card reads memory: bytes read plus written of a large copy."""
        size = 1 << 30
        source, target = self.alloc(size, "bench"), self.alloc(size, "bench")
        copy = lambda: call("cuMemcpyDtoDAsync", target.ptr, source.ptr, size, self.stream)
        copy()
        times = []
        for _ in range(5):
            before = self.mark()
            copy()
            after = self.mark()
            self.synchronize()
            times.append(self.milliseconds(before, after))
        self.free(source), self.free(target)
        return 2e-6 * size / sorted(times)[2]

    def mark(self):
        """A point in the stream, for milliseconds()."""
        event = call("cuEventCreate", 0)
        call("cuEventRecord", event, self.stream)
        return event

    def milliseconds(self, before, after):
        elapsed = call("cuEventElapsedTime", before, after)
        return elapsed

    def run_ahead(self):
        """Keep the card busy for a while, so that the launches that follow queue up behind."""
        block = self.buffer("busy", (1 << 28,), np.uint8)
        for _ in range(400):
            call("cuMemsetD8Async", block.ptr, 0, block.nbytes, self.stream)

    # ---- ops ---------------------------------------------------------------------------------
