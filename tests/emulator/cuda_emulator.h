// CUDA on a CPU, for tests of kernels.cu without a card: the language extensions, the intrinsics
// and the PTX that the kernels use. build.py rewrites inline assembly into calls of the functions
// marked PTX here, and shared variables into pieces of the arena.
//
// The threads of a block are fibers on one core; blocks run one after another. Lanes of a warp
// that wait for each other (shuffle, mma, __syncwarp) meet in a Group, threads of a block in a
// Barrier. Odd blocks run their threads in reverse order, so that a missing barrier shows.
// Shared memory starts as NaN, and so does what cp.async has not waited for.
#pragma once
#include <immintrin.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <tuple>
#include <type_traits>
#include <vector>

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

struct uint3 { unsigned x, y, z; };
using dim3 = uint3;
#define VECTORS(TYPE, NAME)                                                                       \
    struct alignas(2 * sizeof(TYPE)) NAME##2 { TYPE x, y; };                                      \
    struct alignas(4 * sizeof(TYPE) < 16 ? 4 * sizeof(TYPE) : 16) NAME##4 { TYPE x, y, z, w; };   \
    inline NAME##2 make_##NAME##2(TYPE x, TYPE y) { return {x, y}; }                              \
    inline NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }
VECTORS(int8_t, char)
VECTORS(uint8_t, uchar)
VECTORS(int16_t, short)
VECTORS(uint16_t, ushort)
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(float, float)
VECTORS(double, double)
VECTORS(long long, longlong)
VECTORS(unsigned long long, ulonglong)

// ---- fibers ------------------------------------------------------------------------------------

// Saves what a call must preserve and the stack pointer to *from, and goes on where `to` was saved.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.local emulator_switch
emulator_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

namespace emulator {

constexpr unsigned MOST_THREADS = 1024, MOST_BARRIERS = 16, STACK_BYTES = 1 << 16, PAGE_BYTES = 4096;
constexpr unsigned STATIC_BYTES = 48 << 10, DYNAMIC_BYTES = 256 << 10;
constexpr unsigned DYNAMIC_END = STATIC_BYTES + PAGE_BYTES + DYNAMIC_BYTES;
constexpr int GARBAGE = 0xff;  // bytes of a NaN, whatever the type

struct Warp;
struct Copy { char* to; const char* from; unsigned bytes, filled; };  // of cp.async
struct Fiber {
    void* stack_pointer;
    Warp* warp;
    uint3 thread;
    unsigned lane;
    std::vector<std::vector<Copy>> copies;  // by group, the last one open
    const char* waits_for;
};
// Lanes that are in the same collective operation with the same mask.
struct Group { void (*combine)(Warp&, unsigned mask); unsigned mask, arrived; };
struct Warp {
    Fiber* fibers;
    unsigned live, ready;  // lanes
    std::vector<Group> groups;
    const void* in[32];
    void* out[32];
};
struct Barrier { unsigned arrived, expected; std::vector<Fiber*> waiting; };

static Fiber fibers[MOST_THREADS], *current;
static Warp warps[MOST_THREADS / 32];
static Barrier barriers[MOST_BARRIERS];
static void* scheduler;
static char *arena, *stacks, message[1000];
static unsigned live_threads, static_used, dynamic_bytes, launch_number;
static bool reversed, failed, waited_for_predecessor;
static void (*body)(void**);
static void** parameters;
static const char* kernel_name;

}  // namespace emulator

static uint3 blockIdx;
static dim3 blockDim, gridDim;
#define threadIdx (emulator::current->thread)
#define warpSize 32

namespace emulator {

// Ends the launch with an error that names the kernel and, in a kernel, the thread.
[[noreturn]] static void fail(const char* format, ...) {
    int n = snprintf(message, sizeof message, "kernel %s, block (%u, %u, %u)", kernel_name,
                     blockIdx.x, blockIdx.y, blockIdx.z);
    if (current) n += snprintf(message + n, sizeof message - n, ", thread %u", current->thread.x);
    n += snprintf(message + n, sizeof message - n, ": ");
    va_list values;
    va_start(values, format);
    vsnprintf(message + n, sizeof message - n, format, values);
    failed = true;
    void* nowhere;
    emulator_switch(&nowhere, scheduler);
    __builtin_unreachable();
}

static Fiber* next_of(const Warp& warp) {
    if (!warp.ready) return nullptr;
    return warp.fibers + (reversed ? 31 - __builtin_clz(warp.ready) : __builtin_ctz(warp.ready));
}

// Runs other threads until somebody makes this one ready again.
static void wait(const char* what) {
    Fiber* self = current;
    self->waits_for = what;
    self->warp->ready &= ~(1u << self->lane);
    current = next_of(*self->warp);
    emulator_switch(&self->stack_pointer, current ? current->stack_pointer : scheduler);
}

static void complete(Warp& warp, unsigned index) {
    const Group group = warp.groups[index];
    warp.groups.erase(warp.groups.begin() + index);
    group.combine(warp, group.arrived);
    warp.ready |= group.arrived;
}

template <typename Combine, typename In, typename Out>
static void combine_lanes(Warp& warp, unsigned arrived) {
    const In* in[32];
    Out* out[32];
    for (int lane = 0; lane < 32; lane++) {
        in[lane] = static_cast<const In*>(warp.in[lane]);
        out[lane] = static_cast<Out*>(warp.out[lane]);
    }
    Combine::run(arrived, in, out);
}

// Gives `in` to Combine::run(arrived, in[32], out[32]), which runs once, when all lanes of `mask`
// that have not ended are here.
template <typename Combine, typename Out, typename In>
static Out collective(unsigned mask, const In& in) {
    Fiber* self = current;
    Warp& warp = *self->warp;
    const unsigned bit = 1u << self->lane;
    Out out{};
    if (!(mask & bit)) fail("%s: the lane is not in its own mask %08x", Combine::NAME, mask);
    warp.in[self->lane] = &in;
    warp.out[self->lane] = &out;
    const auto combine = combine_lanes<Combine, In, Out>;
    unsigned i = 0;
    while (i < warp.groups.size() &&
           !(warp.groups[i].mask == mask && warp.groups[i].combine == combine)) i++;
    if (i == warp.groups.size()) warp.groups.push_back({combine, mask, 0});
    warp.groups[i].arrived |= bit;
    if (warp.groups[i].arrived == (mask & warp.live)) complete(warp, i);
    else wait(Combine::NAME);
    return out;
}

static void release(Barrier& barrier) {
    for (Fiber* fiber : barrier.waiting) fiber->warp->ready |= 1u << fiber->lane;
    barrier.waiting.clear();
    barrier.arrived = 0;
}

// `threads` 0: all that have not ended.
static void barrier(unsigned id, unsigned threads, bool waits) {
    static const char* const names[] = {
        "barrier 0 (__syncthreads)", "barrier 1", "barrier 2", "barrier 3", "barrier 4",
        "barrier 5", "barrier 6", "barrier 7", "barrier 8", "barrier 9", "barrier 10", "barrier 11",
        "barrier 12", "barrier 13", "barrier 14", "barrier 15"};
    if (id >= MOST_BARRIERS) fail("barrier %u: a block has 16", id);
    if (threads % 32) fail("barrier %u for %u threads: whole warps only", id, threads);
    Barrier& barrier = barriers[id];
    if (barrier.arrived && barrier.expected != threads)
        fail("barrier %u for %u threads, but others wait for %u", id, threads, barrier.expected);
    barrier.expected = threads;
    if (++barrier.arrived >= (threads ? threads : live_threads)) release(barrier);
    else if (waits) barrier.waiting.push_back(current), wait(names[id]);
}

static void thread_main() {
    body(parameters);
    Fiber* self = current;
    Warp& warp = *self->warp;
    self->copies.clear();
    live_threads--;
    warp.live &= ~(1u << self->lane);
    for (unsigned i = warp.groups.size(); i-- > 0;)
        if (warp.groups[i].arrived == (warp.groups[i].mask & warp.live)) complete(warp, i);
    for (Barrier& barrier : barriers)
        if (barrier.arrived && !barrier.expected && barrier.arrived == live_threads)
            release(barrier);
    wait("nothing");
    __builtin_unreachable();
}

// ---- launches ----------------------------------------------------------------------------------

static void start_block(unsigned threads) {
    memset(arena, GARBAGE, STATIC_BYTES);
    memset(arena + DYNAMIC_END - dynamic_bytes, GARBAGE, dynamic_bytes);
    for (Barrier& barrier : barriers) barrier.arrived = 0, barrier.waiting.clear();
    live_threads = threads;
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        Warp& warp = warps[i / 32];
        if (i % 32 == 0) {
            warp.fibers = &fiber;
            warp.live = warp.ready = threads - i < 32 ? (1u << (threads - i)) - 1 : ~0u;
            warp.groups.clear();
        }
        fiber.warp = &warp, fiber.lane = i % 32, fiber.thread = {i, 0, 0};
        fiber.copies.clear();
        // Where emulator_switch finds six registers and an address; tops are spread over the cache.
        void** top = reinterpret_cast<void**>(stacks + (i + 1) * STACK_BYTES - 128 * (1 + i % 32));
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(thread_main);
        fiber.stack_pointer = top - 6;
    }
}

static void run_block(unsigned threads) {
    const unsigned n_warps = (threads + 31) / 32;
    start_block(threads);
    while (live_threads) {
        bool progress = false;
        for (unsigned i = 0; i < n_warps; i++) {
            Warp& warp = warps[reversed ? n_warps - 1 - i : i];
            if (!(current = next_of(warp))) continue;
            progress = true;
            emulator_switch(&scheduler, current->stack_pointer);
            if (failed) return;
        }
        if (progress) continue;
        for (unsigned i = 0; i < threads; i++)
            if (fibers[i].warp->live >> fibers[i].lane & 1) {
                current = &fibers[i];
                snprintf(message, sizeof message, "kernel %s, block (%u, %u, %u): deadlock, %u "
                         "threads wait: thread %u for %s", kernel_name, blockIdx.x, blockIdx.y,
                         blockIdx.z, live_threads, i, current->waits_for);
                failed = true;
                return;
            }
    }
    for (unsigned id = 0; id < MOST_BARRIERS; id++)
        if (barriers[id].arrived) {
            snprintf(message, sizeof message, "kernel %s, block (%u, %u, %u): ended with %u arrivals "
                     "at barrier %u that nobody waits for", kernel_name, blockIdx.x, blockIdx.y,
                     blockIdx.z, barriers[id].arrived, id);
            failed = true;
        }
}

static uintptr_t fault_address, fault_pc;
alignas(16) static char fault_stack[STACK_BYTES], signal_stack[STACK_BYTES];

static void after_fault() {
    const char* at = reinterpret_cast<const char*>(fault_address);
    if (at >= stacks && at < stacks + MOST_THREADS * STACK_BYTES)
        fail("more than %u bytes of local variables", STACK_BYTES - PAGE_BYTES);
    if (at >= arena && at < arena + DYNAMIC_END + PAGE_BYTES)
        fail("access outside of shared memory, at %ld", long(at - arena));
    fail("access outside of device memory, at %#lx", long(at));
}

// Goes on in after_fault, on a stack of its own.
static void on_fault(int, siginfo_t* info, void* context) {
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    fault_address = reinterpret_cast<uintptr_t>(info->si_addr);
    registers[REG_RIP] = reinterpret_cast<greg_t>(after_fault);
    registers[REG_RSP] = reinterpret_cast<greg_t>(fault_stack + sizeof fault_stack - 8);
}

static char* reserve(size_t bytes) {
    void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return static_cast<char*>(made);
}

static void set_up() {
    stacks = reserve(size_t(MOST_THREADS) * STACK_BYTES);
    for (unsigned i = 0; i < MOST_THREADS; i++)
        mprotect(stacks + size_t(i) * STACK_BYTES, PAGE_BYTES, PROT_NONE);
    arena = reserve(DYNAMIC_END + PAGE_BYTES);
    mprotect(arena + STATIC_BYTES, PAGE_BYTES, PROT_NONE);
    mprotect(arena + DYNAMIC_END, PAGE_BYTES, PROT_NONE);
}

// Null, or one line that says what went wrong.
static const char* launch(const char* name, const unsigned* grid, unsigned threads,
                          unsigned shared_bytes, bool early, void (*kernel)(void**), void** values) {
    if (!stacks) set_up();
    kernel_name = name, body = kernel, parameters = values;
    dynamic_bytes = (shared_bytes + 127) / 128 * 128;
    static_used = 0, failed = waited_for_predecessor = false;
    launch_number++;
    blockDim = {threads, 1, 1};
    gridDim = {grid[0], grid[1], grid[2]};
    struct sigaction action = {}, before[2];
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    stack_t stack = {}, stack_before;
    stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &stack_before);
    sigaction(SIGSEGV, &action, &before[0]), sigaction(SIGBUS, &action, &before[1]);
    unsigned number = 0;
    for (unsigned z = 0; z < grid[2] && !failed; z++)
        for (unsigned y = 0; y < grid[1] && !failed; y++)
            for (unsigned x = 0; x < grid[0] && !failed; x++) {
                blockIdx = {x, y, z};
                reversed = number++ % 2;
                run_block(threads);
            }
    sigaction(SIGSEGV, &before[0], nullptr), sigaction(SIGBUS, &before[1], nullptr);
    sigaltstack(&stack_before, nullptr);
    if (!failed && early && !waited_for_predecessor) {
        snprintf(message, sizeof message, "kernel %s: launched early, but it never waits for its "
                 "predecessor (griddepcontrol.wait)", name);
        failed = true;
    }
    return failed ? message : nullptr;
}

template <typename... P, size_t... I>
void call(void (*kernel)(P...), void** values, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<P>*>(values[I])...);
}
template <typename... P>
void call(void (*kernel)(P...), void** values) {
    call(kernel, values, std::index_sequence_for<P...>());
}
template <typename... P>
int sizes_of(void (*)(P...), int* sizes) {
    int n = 0;
    ((sizes[n++] = sizeof(P)), ...);
    return n;
}

// What a library exports. THREADS: that __launch_bounds__ allows.
#define EXPORT extern "C" __attribute__((visibility("default")))
#define EMULATED_KERNEL(NAME, THREADS)                                                            \
    EXPORT const char* emulator_launch(const unsigned* grid, unsigned threads, unsigned shared,   \
                                       int early, void** values) {                                \
        return emulator::launch(#NAME, grid, threads, shared, early,                              \
                                [](void** p) { emulator::call(NAME, p); }, values);               \
    }                                                                                             \
    EXPORT int emulator_parameters(int* sizes) { return emulator::sizes_of(NAME, sizes); }        \
    EXPORT int emulator_most_threads() { return THREADS; }                                        \
    EXPORT unsigned emulator_static_shared() { return emulator::static_used; }

// ---- shared memory -----------------------------------------------------------------------------

inline void* dynamic_shared() { return arena + DYNAMIC_END - dynamic_bytes; }

// The place of a __shared__ variable; each has a type `Unique` of its own.
template <typename T, typename Unique>
T& shared(Unique) {
    static unsigned offset, launched;
    if (launched != launch_number) {
        launched = launch_number;
        offset = (static_used + alignof(T) - 1) / alignof(T) * alignof(T);
        static_used = offset + sizeof(T);
        if (static_used > STATIC_BYTES) fail("more than 48 KB of static shared memory");
    }
    return *reinterpret_cast<T*>(arena + offset);
}

template <typename T = char>
T* aligned(uint64_t address, unsigned bytes = sizeof(T)) {
    if (address % bytes) fail("misaligned access of %u bytes at %#lx", bytes, long(address));
    return reinterpret_cast<T*>(address);
}
template <typename T = char>
T* shared_at(uint64_t address, unsigned bytes = sizeof(T)) {
    if (address + bytes > DYNAMIC_END) fail("access outside of shared memory, at %lu", address);
    return aligned<T>(reinterpret_cast<uint64_t>(arena) + address, bytes);
}

}  // namespace emulator

inline size_t __cvta_generic_to_shared(const void* p) {
    const size_t at = static_cast<const char*>(p) - emulator::arena;
    if (at >= emulator::DYNAMIC_END) emulator::fail("%p is not in shared memory", p);
    return at;
}

// Checks that g++ puts in; their data begin with the place in the source.
struct SourceLocation { const char* file; unsigned line, column; };
extern "C" void __ubsan_handle_type_mismatch_v1_abort(SourceLocation* at, void* pointer) {
    emulator::fail("%s:%u: misaligned access at %p", at->file, at->line, pointer);
}
extern "C" void __ubsan_handle_out_of_bounds_abort(SourceLocation* at, size_t index) {
    emulator::fail("%s:%u: index %ld is outside of its array", at->file, at->line, long(index));
}
extern "C" void __ubsan_handle_shift_out_of_bounds_abort(SourceLocation* at, size_t,
                                                                size_t by) {
    emulator::fail("%s:%u: shift by %ld", at->file, at->line, long(by));
}
extern "C" void __ubsan_handle_divrem_overflow_abort(SourceLocation* at, size_t, size_t) {
    emulator::fail("%s:%u: integer division by zero", at->file, at->line);
}

// ---- f16 ---------------------------------------------------------------------------------------

struct __half { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
using half = __half;
using half2 = __half2;

template <typename To, typename From>
To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __half2float(__half x) { return _cvtsh_ss(x.bits); }
inline __half __float2half_rn(float x) { return {uint16_t(_cvtss_sh(x, 0))}; }
inline __half __float2half(float x) { return __float2half_rn(x); }
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
inline __half __hmul_rn(__half a, __half b) { return __hmul(a, b); }
inline __half __hadd_rn(__half a, __half b) { return __hadd(a, b); }
inline __half2 __hmul2_rn(__half2 a, __half2 b) { return __hmul2(a, b); }
inline __half2 __hadd2_rn(__half2 a, __half2 b) { return __hadd2(a, b); }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }
inline float __low2float(__half2 x) { return __half2float(x.x); }
inline float __high2float(__half2 x) { return __half2float(x.y); }
inline float2 __half22float2(__half2 x) { return {__low2float(x), __high2float(x)}; }
inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}
inline __half2 __float22half2_rn(float2 x) { return __floats2half2_rn(x.x, x.y); }

// ---- intrinsics --------------------------------------------------------------------------------

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline float __fdividef(float a, float b) { return fabsf(b) > 0x1p126f ? a * 0.0f : a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
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
inline float __int2float_rn(int x) { return float(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
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
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
    return c;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
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
ATOMIC(atomicSub, old - value)
ATOMIC(atomicMax, old > value ? old : value)
ATOMIC(atomicMin, old < value ? old : value)
ATOMIC(atomicOr, old | value)
ATOMIC(atomicAnd, old & value)
ATOMIC(atomicXor, old ^ value)
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

template <typename T>
struct Match {
    static constexpr const char* NAME = "__match_any_sync";
    static void run(unsigned arrived, const T* const* in, unsigned* const* out) {
        for (int lane = 0; lane < 32; lane++)
            for (int other = 0; arrived >> lane & 1 && other < 32; other++)
                if (arrived >> other & 1 && *in[other] == *in[lane]) *out[lane] |= 1u << other;
    }
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
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
    return emulator::collective<emulator::Match<T>, unsigned>(mask, value);
}
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
    ((out = bits_of<Out>(*from++)), ...);
}
template <Space SPACE, typename T, typename... In>
void st(uint64_t address, In... in) {
    T* to = place<SPACE, T, sizeof...(In)>(address);
    ((*to++ = bits_of<T>(in)), ...);
}

PTX griddepcontrol_launch_dependents() {}
PTX griddepcontrol_wait() { emulator::waited_for_predecessor = true; }
PTX bar_sync(unsigned id, unsigned threads = 0) { emulator::barrier(id, threads, true); }
PTX bar_arrive(unsigned id, unsigned threads) { emulator::barrier(id, threads, false); }
PTX prefetch_global_L2(uint64_t) {}

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
PTX prmt_b32(unsigned& d, unsigned a, unsigned b, unsigned pick) { d = __byte_perm(a, b, pick); }
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
