// CUDA on a CPU, for tests of kernels.cu without a card: the language extensions, the intrinsics
// and the PTX that the kernels use. build.py rewrites inline assembly into calls of the functions
// marked PTX here: a new opcode needs one, named like it without hints, results first.
#pragma once
#include <immintrin.h>

#include <cmath>

#include "fibers.h"

using std::isfinite;
using std::isinf;
using std::isnan;

#define __global__ inline  // compiled only if named: a library holds one kernel
#define __device__ inline
#define __host__
#define __forceinline__
#define __constant__
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

#define VECTORS(TYPE, NAME)                                                                       \
    struct alignas(2 * sizeof(TYPE)) NAME##2 { TYPE x, y; };                                      \
    struct alignas(4 * sizeof(TYPE) < 16 ? 4 * sizeof(TYPE) : 16) NAME##4 { TYPE x, y, z, w; };   \
    inline NAME##2 make_##NAME##2(TYPE x, TYPE y) { return {x, y}; }                              \
    inline NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }
VECTORS(uint8_t, uchar)
VECTORS(uint16_t, ushort)
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(float, float)
VECTORS(double, double)

// ---- f16 ---------------------------------------------------------------------------------------

struct __half { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };

template <typename To, typename From>
To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __half2float(__half x) { return _cvtsh_ss(x.bits); }
inline __half __float2half_rn(float x) { return {uint16_t(_cvtss_sh(x, 0))}; }
inline __half __ushort_as_half(uint16_t x) { return {x}; }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }

// a * b + c, rounded once. The product is exact in f32, the sum is rounded to odd there.
inline __half __hfma(__half a, __half b, __half c) {
    const float p = __half2float(a) * __half2float(b), q = __half2float(c), sum = p + q;
    const float from_q = sum - p, error = (p - (sum - from_q)) + (q - from_q);
    unsigned bits = bits_of<unsigned>(sum);
    if ((error > 0 || error < 0) && !(bits & 1)) bits += (error > 0) == (sum > 0) ? 1 : -1;
    return __float2half_rn(bits_of<float>(bits));
}
// Sums and products of two f16 round twice like once: f32 has more than 2 * 11 + 1 bits.
inline __half __hadd(__half a, __half b) {
    return __float2half_rn(__half2float(a) + __half2float(b));
}
inline __half __hsub(__half a, __half b) {
    return __float2half_rn(__half2float(a) - __half2float(b));
}
inline __half __hmul(__half a, __half b) {
    return __float2half_rn(__half2float(a) * __half2float(b));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hmul2_rn(__half2 a, __half2 b) { return __hmul2(a, b); }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline float __low2float(__half2 x) { return __half2float(x.x); }
inline float __high2float(__half2 x) { return __half2float(x.y); }
inline float2 __half22float2(__half2 x) { return {__low2float(x), __high2float(x)}; }
inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}

// ---- intrinsics --------------------------------------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline float __fdividef(float a, float b) { return fabsf(b) > 0x1p126f ? a * 0.0f : a / b; }
inline float __expf(float x) { return expf(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline void sincospi(double x, double* sine, double* cosine) {
    constexpr long double PI = 3.14159265358979323846264338327950288L;
    const long double turned = remainder(x, 2.0) * PI;
    *sine = sinl(turned), *cosine = cosl(turned);
}
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline double __longlong_as_double(long long x) { return bits_of<double>(x); }
inline long long __double_as_longlong(double x) { return bits_of<long long>(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline double __ull2double_rn(unsigned long long x) { return double(x); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (uint64_t(high) << 32 | low) << by % 32 >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (uint64_t(high) << 32 | low) >> by % 32;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned pick) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned made = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned byte = bytes >> 8 * (pick >> 4 * i & 7) & 255;
        made |= (pick >> 4 * i & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return made;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T>
T __ldg(const T* p) { return *p; }
template <typename A, typename B>
auto max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
    else return T(a) > T(b) ? T(a) : T(b);
}
template <typename A, typename B>
auto min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
    else return T(a) < T(b) ? T(a) : T(b);
}

// Atomics of integers: there are no float atomics in this project. Fibers cannot be interrupted.
#define ATOMIC(NAME, RESULT)                                                                      \
    template <typename T, typename U>                                                             \
    T NAME(T* p, U with) {                                                                        \
        static_assert(std::is_integral_v<T>, "sums of floats depend on the order of threads");    \
        const T old = *p, value = T(with);                                                        \
        *p = RESULT;                                                                              \
        return old;                                                                               \
    }
ATOMIC(atomicAdd, old + value)
ATOMIC(atomicInc, old >= value ? 0 : old + 1)
ATOMIC(atomicMax, old > value ? old : value)
ATOMIC(atomicMin, old < value ? old : value)
ATOMIC(atomicOr, old | value)
ATOMIC(atomicExch, value)
#undef ATOMIC
template <typename T>
T atomicCAS(T* p, T expected, T value) {
    const T old = *p;
    if (old == expected) *p = value;
    return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- what threads do together ------------------------------------------------------------------

inline size_t __cvta_generic_to_shared(const void* p) {
    const size_t at = static_cast<const char*>(p) - emulator::arena;
    if (at >= emulator::DYNAMIC_END) emulator::fail("%p is not in shared memory", p);
    return at;
}

inline void __syncthreads() { emulator::barrier(0, 0, true); }

namespace emulator {

// The value of lane `source`, or the lane's own if that is outside of its segment.
template <typename T>
struct Shuffle {
    static constexpr const char* NAME = "__shfl_sync";
    struct In { T value; int source; };
    static void run(unsigned arrived, const In* const* in, T* const* out) {
        for (int lane = 0; lane < 32; lane++) {
            if (!(arrived >> lane & 1)) continue;
            const int from = in[lane]->source < 0 ? lane : in[lane]->source;
            if (!(arrived >> from & 1)) fail("a shuffle reads lane %d, which takes no part", from);
            *out[lane] = in[from]->value;
        }
    }
};
template <typename T>
T shuffle(unsigned mask, T value, int source, bool inside) {
    using Op = Shuffle<T>;
    return collective<Op, T>(mask, typename Op::In{value, inside ? source : -1});
}

struct Ballot {
    static constexpr const char* NAME = "__ballot_sync";
    static void run(unsigned arrived, const bool* const* in, unsigned* const* out) {
        unsigned votes = 0;
        for (int lane = 0; lane < 32; lane++) votes |= (arrived >> lane & 1 && *in[lane]) << lane;
        for (int lane = 0; lane < 32; lane++)
            if (arrived >> lane & 1) *out[lane] = votes;
    }
};

struct Meeting {
    static constexpr const char* NAME = "__syncwarp";
    static void run(unsigned, const bool* const*, bool* const*) {}
};

template <typename T, typename Op>
struct Reduce {
    static constexpr const char* NAME = "__reduce_sync";
    static void run(unsigned arrived, const T* const* in, T* const* out) {
        T all = *in[__builtin_ctz(arrived)];
        for (int lane = __builtin_ctz(arrived) + 1; lane < 32; lane++)
            if (arrived >> lane & 1) all = Op()(all, *in[lane]);
        for (int lane = 0; lane < 32; lane++)
            if (arrived >> lane & 1) *out[lane] = all;
    }
};

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = emulator::current->lane;
    return emulator::shuffle(mask, value, lane / width * width + source % width, true);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = emulator::current->lane;
    return emulator::shuffle(mask, value, lane - int(by), lane % width >= int(by));
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = emulator::current->lane;
    return emulator::shuffle(mask, value, lane + int(by), lane % width + int(by) < width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
    const int lane = emulator::current->lane, source = lane ^ with;
    return emulator::shuffle(mask, value, source, source / width <= lane / width);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    return emulator::collective<emulator::Ballot, unsigned>(mask, vote);
}
inline void __syncwarp(unsigned mask = ~0u) {
    emulator::collective<emulator::Meeting, bool>(mask, true);
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote); }
inline bool __all_sync(unsigned mask, bool vote) { return !__ballot_sync(mask, !vote); }
#define REDUCE(NAME, EXPRESSION)                                                                  \
    struct NAME##_of { template <typename T> T operator()(T a, T b) { return EXPRESSION; } };     \
    template <typename T>                                                                         \
    T __reduce_##NAME##_sync(unsigned mask, T value) {                                            \
        return emulator::collective<emulator::Reduce<T, NAME##_of>, T>(mask, value);              \
    }
REDUCE(add, a + b)
REDUCE(max, a > b ? a : b)
REDUCE(min, a < b ? a : b)
REDUCE(or, a | b)
REDUCE(and, a & b)
#undef REDUCE

// ---- PTX: one function for each opcode, without its hints --------------------------------------

namespace ptx {

#define PTX inline void

enum Space { global, shared };
template <Space SPACE, typename T, int N>
T* place(uint64_t address) {
    return SPACE == shared ? emulator::shared_at<T>(address, N * sizeof(T))
                           : emulator::aligned<T>(address, N * sizeof(T));
}
template <Space SPACE, typename T, typename... Out>
void ld(uint64_t address, Out&... out) {
    const T* from = place<SPACE, T, sizeof...(Out)>(address);
    const auto set = [](auto& to, T value) {  // a wider register is filled up
        if constexpr (sizeof to > sizeof value) to = value;
        else to = bits_of<std::decay_t<decltype(to)>>(value);
    };
    (set(out, *from++), ...);
}
template <Space SPACE, typename T, typename... In>
void st(uint64_t address, In... in) {
    T* to = place<SPACE, T, sizeof...(In)>(address);
    ((*to++ = bits_of<T>(in)), ...);
}

PTX griddepcontrol_launch_dependents() {}
PTX prefetch_global_L2(uint64_t) {}
PTX griddepcontrol_wait() { emulator::waited_for_predecessor = true; }
PTX bar_sync(unsigned id, unsigned threads = 0) { emulator::barrier(id, threads, true); }
PTX bar_arrive(unsigned id, unsigned threads) { emulator::barrier(id, threads, false); }

PTX mov_b32(uint16_t& low, uint16_t& high, unsigned x) { low = x, high = x >> 16; }
PTX mov_b32(unsigned& d, uint16_t low, uint16_t high) { d = low | unsigned(high) << 16; }
PTX mov_b32(unsigned& d, unsigned a) { d = a; }
PTX mov_f32(float& d, float a) { d = a; }
PTX setp_ne_u32(bool& d, unsigned a, unsigned b) { d = a != b; }
PTX lop3_b32(unsigned& d, unsigned a, unsigned b, unsigned c, unsigned table) {
    d = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
}
PTX ex2_approx_ftz_f32(float& d, float x) {
    d = exp2f(x);
    if (d < 0x1p-126f) d = 0.0f;
}

#define TWO_HALVES(x) bits_of<__half2>(x)
PTX fma_rn_f16x2(unsigned& d, unsigned a, unsigned b, unsigned c) {
    d = bits_of<unsigned>(__hfma2(TWO_HALVES(a), TWO_HALVES(b), TWO_HALVES(c)));
}
PTX add_rn_f16x2(unsigned& d, unsigned a, unsigned b) {
    d = bits_of<unsigned>(__hadd2(TWO_HALVES(a), TWO_HALVES(b)));
}
PTX sub_rn_f16x2(unsigned& d, unsigned a, unsigned b) {
    d = bits_of<unsigned>(__hsub2(TWO_HALVES(a), TWO_HALVES(b)));
}
PTX mul_rn_f16x2(unsigned& d, unsigned a, unsigned b) {
    d = bits_of<unsigned>(__hmul2(TWO_HALVES(a), TWO_HALVES(b)));
}
#undef TWO_HALVES

// Until its group is waited for, the target holds garbage.
PTX cp_async_shared_global(unsigned to, uint64_t from, unsigned bytes, unsigned filled = ~0u) {
    auto& copies = emulator::current->copies;
    if (copies.empty()) copies.emplace_back();
    char* target = emulator::shared_at(to, bytes);
    memset(target, emulator::GARBAGE, bytes);
    copies.back().push_back({target, emulator::aligned(from, bytes), bytes,
                             filled < bytes ? filled : bytes});
}
PTX cp_async_commit_group() { emulator::current->copies.emplace_back(); }
PTX cp_async_wait_group(unsigned may_wait) {
    auto& copies = emulator::current->copies;  // the last group is open
    while (copies.size() > may_wait + 1) {
        for (const emulator::Copy& copy : copies.front()) {
            memset(copy.to, 0, copy.bytes);
            memcpy(copy.to, copy.from, copy.filled);
        }
        copies.erase(copies.begin());
    }
}
PTX cp_async_wait_all() {
    cp_async_commit_group();
    cp_async_wait_group(0);
}

// Lane i has the address of row i % 8 of matrix i / 8 and gets two values of row i / 4 of each.
template <int N, bool TRANSPOSED>
struct LoadMatrix {
    static constexpr const char* NAME = "ldmatrix";
    struct Out { unsigned word[N]; };
    static void run(unsigned arrived, const unsigned* const* in, Out* const* out) {
        if (arrived != ~0u) emulator::fail("ldmatrix needs all lanes of a warp");
        for (int m = 0; m < N; m++) {
            uint16_t tile[8][8];
            for (int row = 0; row < 8; row++)
                memcpy(tile[row], emulator::shared_at(*in[8 * m + row], 16), 16);
            for (int lane = 0; lane < 32; lane++) {
                const int a = lane / 4, b = lane % 4 * 2;
                out[lane]->word[m] = TRANSPOSED ? tile[b][a] | unsigned(tile[b + 1][a]) << 16
                                                : tile[a][b] | unsigned(tile[a][b + 1]) << 16;
            }
        }
    }
};
template <bool TRANSPOSED, typename... Word>
void ldmatrix(unsigned address, Word&... word) {
    using Op = LoadMatrix<sizeof...(Word), TRANSPOSED>;
    const auto made = emulator::collective<Op, typename Op::Out>(~0u, address);
    int m = 0;
    ((word = made.word[m++]), ...);
}

// d = c + a b: a [16][16] and b [16][8] in f16, products exact, summed in f32 with k ascending.
struct Mma {
    static constexpr const char* NAME = "mma";
    struct In { unsigned a[4], b[2]; float c[4]; };
    struct Out { float d[4]; };
    static void run(unsigned arrived, const In* const* in, Out* const* out) {
        typedef float Row __attribute__((vector_size(32)));
        if (arrived != ~0u) emulator::fail("mma needs all lanes of a warp");
        float a[16][16], d[16][8];
        Row b[16];
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            float x[8];
            _mm256_storeu_ps(x, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)in[lane]->a)));
            for (int i = 0; i < 8; i++) a[g + 8 * (i / 2 % 2)][2 * t + 8 * (i / 4) + i % 2] = x[i];
            const __m128 y = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)in[lane]->b));
            for (int i = 0; i < 4; i++) b[2 * t + 8 * (i / 2) + i % 2][g] = y[i];
        }
        for (int row = 0; row < 16; row++) {
            Row sum = {};
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k];
            memcpy(d[row], &sum, sizeof sum);
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                out[lane]->d[i] = in[lane]->c[i] + d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
};
PTX mma_sync_m16n8k16_row_col_f32_f16_f16_f32(
    float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
    unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
    const Mma::In in = {{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
    const auto made = emulator::collective<Mma, Mma::Out>(~0u, in);
    d0 = made.d[0], d1 = made.d[1], d2 = made.d[2], d3 = made.d[3];
}

}  // namespace ptx
