"""The CPU emulation of CUDA finds the faults that it is there for, and rounds as a card does."""
import platform
import shutil

import numpy as np
import pytest

from emulator import build, driver

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"),
                                reason="the emulator needs g++ on x86-64")

KERNELS = r"""
#include <cuda_fp16.h>
#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__

KERNEL reads_behind(const int* from, int* to) { to[threadIdx.x] = from[threadIdx.x + 1]; }
KERNEL misaligned(const int* from, int* to) {
    to[threadIdx.x] = reinterpret_cast<const int2*>(from + 1)->x;
}
KERNEL index_too_large(const int* from, int* to) {
    int values[4] = {from[0], 1, 2, 3};
    to[threadIdx.x] = values[threadIdx.x];
}
KERNEL shifts_too_far(const int* from, int* to) { to[threadIdx.x] = from[0] >> threadIdx.x + 16; }
KERNEL never_meets(const int* from, int* to) {
    if (threadIdx.x < 32) asm volatile("bar.sync %0, %1;" ::"r"(3), "r"(64) : "memory");
    to[threadIdx.x] = from[threadIdx.x];
}
KERNEL lane_missing(const int* from, int* to) {
    to[threadIdx.x] = from[threadIdx.x];
    if (threadIdx.x != 5) to[threadIdx.x] += __shfl_xor_sync(0xffffffffu, from[0], 1);
    else __syncthreads();
}
KERNEL too_large(const int* from, int* to) {
    __shared__ int numbers[2][8000];
    numbers[1][threadIdx.x] = from[0];
    to[threadIdx.x] = numbers[1][threadIdx.x];
}
KERNEL follows_nobody(const int* from, int* to) { to[threadIdx.x] = from[threadIdx.x]; }

// Each thread takes the value of the thread 32 places on, or as many back.
template <bool BARRIER>
DEVICE void exchange(const int* from, int* to) {
    __shared__ int numbers[64], unused;
    numbers[threadIdx.x] = from[threadIdx.x];
    if (BARRIER) __syncthreads();
    to[64 * blockIdx.x + threadIdx.x] = numbers[threadIdx.x ^ 32];
}
KERNEL exchanges(const int* from, int* to) { exchange<true>(from, to); }
KERNEL exchanges_early(const int* from, int* to) { exchange<false>(from, to); }

template <bool WAITS>
DEVICE void copy(const int* from, int* to) {
    extern __shared__ __align__(16) int numbers[];
    const unsigned at = unsigned(__cvta_generic_to_shared(numbers + threadIdx.x));
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(at),
                 "l"(from + threadIdx.x), "n"(4));
    asm volatile("cp.async.commit_group;");
    if (WAITS) asm volatile("cp.async.wait_group 0;");
    to[threadIdx.x] = numbers[threadIdx.x];
}
KERNEL copies(const int* from, int* to) { copy<true>(from, to); }
KERNEL copies_early(const int* from, int* to) { copy<false>(from, to); }

KERNEL multiplies_and_adds(const unsigned* from, unsigned* to) {
    unsigned d;
    const unsigned* own = from + 3 * threadIdx.x;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(own[0]), "r"(own[1]), "r"(own[2]));
    to[threadIdx.x] = d;
}

// a [16][16] and b [8][16] f16 -> d [16][8] f32, twice: operands from ldmatrix and by hand.
KERNEL multiplies_matrices(const unsigned* a, const unsigned* b, float* d) {
    __shared__ __align__(16) unsigned tile[128];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 128; i += 32) tile[i] = a[i];
    __syncwarp();
    unsigned x[4];
    const unsigned row = unsigned(__cvta_generic_to_shared(tile + lane % 16 * 8 + lane / 16 * 4));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
    for (int way = 0; way < 2; way++) {
        const unsigned own[4] = {a[8 * g + t], a[8 * (g + 8) + t], a[8 * g + t + 4],
                                 a[8 * (g + 8) + t + 4]};
        float sum[4] = {};
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};\n"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(way ? x[0] : own[0]), "r"(way ? x[1] : own[1]), "r"(way ? x[2] : own[2]),
              "r"(way ? x[3] : own[3]), "r"(b[8 * g + t]), "r"(b[8 * g + t + 4]));
        for (int i = 0; i < 4; i++) d[128 * way + 8 * (g + i / 2 * 8) + 2 * t + i % 2] = sum[i];
    }
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("emulator") / "faulty.cu"
    path.write_text(KERNELS)
    return path


def run(source, name, inputs, shape, dtype, grid=1, threads=64, shared=0, early=False):
    """The array that a kernel writes, whose last parameter is its address."""
    arrays = [np.ascontiguousarray(array) for array in inputs]
    places = [driver.cuMemAlloc(array.nbytes)[1] for array in arrays]
    stream, result = driver.Stream(), np.zeros(shape, dtype)
    for place, array in zip(places, arrays):
        driver.cuMemcpyHtoDAsync(place, array.ctypes.data, array.nbytes, stream)
    target = driver.cuMemAlloc(result.nbytes)[1]
    try:
        values = [address.to_bytes(8, "little") for address in (*places, target)]
        driver.Kernel(name, build.library(source, 90, name)).launch(
            (grid, 1, 1), threads, shared, early, values)
        driver.cuMemcpyDtoHAsync(result.ctypes.data, target, result.nbytes, stream)
    finally:
        for place in (*places, target):
            driver.cuMemFree(place)
    return result


NUMBERS = np.random.default_rng(0).integers(-1000, 1000, 64).astype(np.int32)


@pytest.mark.parametrize("name, message", [
    ("reads_behind", "thread 63: .* 1 bytes behind one of 256 bytes"),
    ("misaligned", "faulty.cu:8: misaligned"), ("index_too_large", "thread 4: .*:12: index 4"),
    ("shifts_too_far", "thread 16: .*shift by 32"),
    ("never_meets", "deadlock, .*32 threads are at barrier 3"),
    ("lane_missing", "deadlock"), ("too_large", "48 KB")])
def test_faults_are_named(source, name, message):
    with pytest.raises(driver.EmulationError, match=f"kernel {name}, block .*{message}"):
        run(source, name, [NUMBERS], 64, np.int32)


def test_a_kernel_that_follows_nobody(source):
    assert np.array_equal(run(source, "follows_nobody", [NUMBERS], 64, np.int32), NUMBERS)
    with pytest.raises(driver.EmulationError, match="predecessor"):
        run(source, "follows_nobody", [NUMBERS], 64, np.int32, early=True)


def test_a_missing_barrier_shows(source):
    want = np.tile(np.roll(NUMBERS, 32), (2, 1))
    assert np.array_equal(run(source, "exchanges", [NUMBERS], (2, 64), np.int32, grid=2), want)
    wrong = run(source, "exchanges_early", [NUMBERS], (2, 64), np.int32, grid=2) != want
    assert wrong[0, :32].all() and wrong[1, 32:].all()  # either way, by the order of the block


def test_a_missing_wait_shows(source):
    assert np.array_equal(run(source, "copies", [NUMBERS], 64, np.int32, shared=256), NUMBERS)
    assert (run(source, "copies_early", [NUMBERS], 64, np.int32, shared=256) == -1).all()


def test_fma_rounds_once(source):
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal((3, 128)) * 2.0 ** rng.integers(-12, 8, (3, 128))).astype(
        np.float16)
    # a product that ends at a half, which the sum moves off it
    a[:2], b[:2], c[:2] = 1 + 2.0 ** -10, 1 + 2.0 ** -1, (2.0 ** -24, -2.0 ** -24)
    packed = np.stack([a, b, c]).reshape(3, 64, 2).transpose(1, 0, 2)
    got = run(source, "multiplies_and_adds", [packed], 128, np.float16)
    want = (a.astype(np.float64) * b + c).astype(np.float16)
    assert np.array_equal(got, want) and got[0] != got[1]


def test_matrix_product(source):
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((rows, 16)).astype(np.float16) for rows in (16, 8))
    got = run(source, "multiplies_matrices", [a, b], (2, 16, 8), np.float32, threads=32)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.abs(got[0] - want).max() < 1e-5 and np.array_equal(got[0], got[1])


def test_unknown_assembly_is_named(tmp_path):
    path = tmp_path / "unknown.cu"
    path.write_text('extern "C" __global__ void f(int* p) { asm("vote.bad.pred %0;" : "=r"(*p)); }')
    with pytest.raises(build.UnknownAssembly, match="vote.bad.pred"):
        build.library(path, 90, "f")
