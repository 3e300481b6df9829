"""A stand-in for cuda.bindings.driver: the calls that device.py makes, carried out on the CPU.

Everything is synchronous. Each allocation ends at a page that cannot be touched and begins as NaN.
What a driver reports as an error of a launch is raised as EmulationError, with what is known of it.
"""
import ctypes
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from . import build

ARCH = int(os.environ.get("LEONE_EMULATE_ARCH", 90))
MULTIPROCESSORS, TOTAL_BYTES = 132, 12 << 30
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}.get(ARCH, 99 << 10)
PLAIN_SHARED_BYTES = 48 << 10  # that a launch may have without a word before
GUARD, ALIGNMENT, GARBAGE = 4096, 128, 0xFF


class EmulationError(Exception):
    pass


class Names:
    """An enumeration whose members are their names."""
    def __getattr__(self, name):
        return name


CUdevice_attribute = CUfunction_attribute = CUlaunchAttributeID = CUstreamCaptureMode = Names()
CUlaunchConfig, CUfunction = SimpleNamespace, int


def CUlaunchAttribute():
    return SimpleNamespace(id=None, value=SimpleNamespace())


def error(name):
    return (SimpleNamespace(name=f"CUDA_ERROR_{name}"),)


# ---- the card ----------------------------------------------------------------------------------


def cuDeviceGetAttribute(attribute, card):
    return 0, {"COMPUTE_CAPABILITY_MAJOR": ARCH // 10, "COMPUTE_CAPABILITY_MINOR": ARCH % 10,
               "MULTIPROCESSOR_COUNT": MULTIPROCESSORS,
               "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": SHARED_BYTES,
               }[attribute.removeprefix("CU_DEVICE_ATTRIBUTE_")]


def cuDeviceGetName(length, card):
    return 0, f"CPU emulation of sm_{ARCH}".encode() + b"\0"


def cuDeviceGetCount():
    return 0, 1


def cuDriverGetVersion():
    return 0, 13000


def cuDeviceGet(number):
    return 0, number


def cuDevicePrimaryCtxRetain(card):
    return 0, "context"


def cuCtxPopCurrent():
    return 0, "context"


def nothing_to_do(*_):
    return (0,)


cuInit = cuCtxPushCurrent = cuCtxSetCurrent = cuDevicePrimaryCtxRelease = nothing_to_do
cuLibraryUnload = cuStreamDestroy = cuEventDestroy = cuEventSynchronize = nothing_to_do
cuGraphDestroy = cuGraphExecDestroy = nothing_to_do

# ---- memory ------------------------------------------------------------------------------------

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NO_ACCESS, READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE = 0, 3, 0x4022
MAP_FAILED = ctypes.c_void_p(-1).value

allocations = {}  # address -> (bytes, start of the mapping, its length)


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def cuMemAlloc(nbytes):
    nbytes = int(nbytes)  # of NumPy, at times
    if sum(size for size, _, _ in allocations.values()) + nbytes > TOTAL_BYTES:
        return error("OUT_OF_MEMORY")
    if any(stream.captured is not None for stream in streams):
        return error("STREAM_CAPTURE_UNSUPPORTED")
    taken = round_up(nbytes, ALIGNMENT)
    length = round_up(taken, GUARD) + 2 * GUARD
    start = libc.mmap(None, length, READ_WRITE, PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    if start == MAP_FAILED:
        return error("OUT_OF_MEMORY")
    end = start + length - GUARD
    libc.mprotect(start, GUARD, NO_ACCESS), libc.mprotect(end, GUARD, NO_ACCESS)
    ctypes.memset(start + GUARD, GARBAGE, length - 2 * GUARD)
    allocations[end - taken] = nbytes, start, length
    return 0, end - taken


def cuMemFree(address):
    nbytes, start, length = allocations.pop(address)
    before = ctypes.string_at(start + GUARD, address - start - GUARD)
    behind = ctypes.string_at(address + nbytes, start + length - GUARD - address - nbytes)
    libc.munmap(start, length)
    if (before + behind).strip(bytes([GARBAGE])):
        raise EmulationError(f"a kernel has written beside an allocation of {nbytes} bytes")
    return (0,)


cuMemAllocHost, cuMemFreeHost = cuMemAlloc, cuMemFree


def cuMemGetInfo():
    used = sum(size for size, _, _ in allocations.values())
    return 0, TOTAL_BYTES - used, TOTAL_BYTES


def describe(address):
    """Where an address lies beside the nearest allocation."""
    distances = [(max(start - address, address - start - size + 1), start, size)
                 for start, (size, _, _) in allocations.items()]
    distance, start, size = min(distances, default=(0, 0, 0))
    return f"{distance} bytes {'before' if address < start else 'behind'} one of {size} bytes"


def check_range(address, nbytes):
    if not any(start <= address and address + nbytes <= start + size
               for start, (size, _, _) in allocations.items()):
        raise EmulationError(f"a copy or memset of {nbytes} bytes leaves its allocation: it ends "
                             f"{describe(address + nbytes - 1)}")


def copy(target, source, nbytes, stream, *device_addresses):
    nbytes = int(nbytes)

    def work():
        for address in device_addresses:
            check_range(address, nbytes)
        ctypes.memmove(target, source, nbytes)
    return stream.take(work)


def cuMemcpyHtoDAsync(target, source, nbytes, stream):
    return copy(target, source, nbytes, stream, target)


def cuMemcpyDtoHAsync(target, source, nbytes, stream):
    return copy(target, source, nbytes, stream, source)


def cuMemcpyDtoDAsync(target, source, nbytes, stream):
    return copy(target, source, nbytes, stream, target, source)


def cuMemsetD8Async(target, value, nbytes, stream):
    nbytes = int(nbytes)

    def work():
        check_range(target, nbytes)
        ctypes.memset(target, value, nbytes)
    return stream.take(work)


# ---- streams, events, graphs -------------------------------------------------------------------

streams = []


class Stream:
    captured = None  # the work of a graph that is being made

    def take(self, work):
        if self.captured is None:
            work()
        else:
            self.captured.append(work)
        return (0,)


def cuStreamCreate(flags):
    streams.append(Stream())
    return 0, streams[-1]


def cuStreamSynchronize(stream):
    return (0,) if stream.captured is None else error("STREAM_CAPTURE_UNSUPPORTED")


def cuStreamBeginCapture(stream, mode):
    stream.captured = []
    return (0,)


def cuStreamEndCapture(stream):
    graph, stream.captured = stream.captured, None
    return 0, graph


def cuGraphInstantiate(graph, flags):
    return 0, tuple(graph)


def cuGraphLaunch(graph, stream):
    for work in graph:
        stream.take(work)
    return (0,)


def cuEventCreate(flags):
    return 0, SimpleNamespace(time=None)


def cuEventRecord(event, stream):
    event.time = time.perf_counter()
    return (0,)


def cuEventElapsedTime(before, after):
    return 0, 1e3 * (after.time - before.time)


# ---- kernels -----------------------------------------------------------------------------------

kernels = []
lock = threading.Lock()  # a library holds the state of one launch


class Kernel:
    stacks = None  # of the threads: shared, since a process has a limited number of mappings

    def __init__(self, name, path):
        code = ctypes.CDLL(str(path))
        sizes = (ctypes.c_int * 64)()
        self.sizes = sizes[:code.emulator_parameters(sizes)]
        self.name, self.most_threads = name, code.emulator_most_threads()
        self.dynamic_limit = None  # until cuKernelSetAttribute sets one
        self.static_shared = code.emulator_static_shared
        self.run = code.emulator_launch
        self.run.restype = ctypes.c_char_p
        self.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint,
                             ctypes.c_int, ctypes.c_void_p]
        code.emulator_stacks.restype = ctypes.c_void_p
        Kernel.stacks = Kernel.stacks or code.emulator_stacks()

    def launch(self, grid, threads, shared, early, values):
        held = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        with lock:
            problem = self.run(self.stacks, (ctypes.c_uint * 3)(*grid), threads, shared, early,
                               pointers)
        if problem:
            problem = problem.decode()
            if found := re.search(r"device memory, at (0x\w+)", problem):
                problem += f", {describe(int(found[1], 16))}"
            raise EmulationError(problem)
        most = PLAIN_SHARED_BYTES if self.dynamic_limit is None else SHARED_BYTES
        taken = self.static_shared() + (self.dynamic_limit or shared)
        if taken > most:
            raise EmulationError(f"kernel {self.name} has {self.static_shared()} bytes of static "
                                 f"and up to {self.dynamic_limit or shared} of dynamic shared "
                                 f"memory, together more than {most}")


def cuLibraryLoadData(image, *_):
    """The image is the path of kernels.cu: see stand_in_for_cubin in __init__.py."""
    return 0, Path(os.fsdecode(image))


def cuLibraryGetKernel(source, name):
    try:
        kernels.append(Kernel(name.decode(), build.library(source, ARCH, name.decode())))
    except KeyError:
        return error("NOT_FOUND")
    return 0, len(kernels) - 1


def cuKernelSetAttribute(attribute, value, handle, card):
    if value > SHARED_BYTES:
        return error("INVALID_VALUE")
    kernels[handle].dynamic_limit = value
    return (0,)


def cuLaunchKernelEx(config, handle, parameters, extra):
    kernel, threads = kernels[handle], config.blockDimX
    grid = config.gridDimX, config.gridDimY, config.gridDimZ
    if not 0 < threads <= kernel.most_threads or min(grid) < 1 or max(grid[1:]) > 65535:
        raise EmulationError(f"launch of {kernel.name}: a grid of {grid} blocks of {threads} "
                             f"threads, at most {kernel.most_threads}")
    pointers = (ctypes.c_void_p * len(kernel.sizes)).from_address(parameters)
    values = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, kernel.sizes)]
    arguments = grid, threads, config.sharedMemBytes, config.numAttrs and ARCH >= 90, values
    return config.hStream.take(lambda: kernel.launch(*arguments))
