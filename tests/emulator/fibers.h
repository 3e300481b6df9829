// The threads of a block are fibers on one core; blocks run one after another. Lanes of a warp that
// wait for each other (shuffle, mma, __syncwarp) meet in a Group, threads of a block in a Barrier.
// Odd blocks run their threads in reverse order, so that a missing barrier shows. Shared memory
// starts as NaN. A fault ends the launch with one line that names kernel, block and thread.
#pragma once
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>
#include <vector>

struct uint3 { unsigned x, y, z; };
using dim3 = uint3;

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

constexpr unsigned MOST_THREADS = 1024, MOST_BARRIERS = 16;
constexpr unsigned STACK_BYTES = 1 << 16, PAGE_BYTES = 4096;
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

template <typename... T>
void report(const char* format, T... values) {
    const size_t size = sizeof message;
    int n = snprintf(message, size, "kernel %s, block (%u, %u, %u)", kernel_name, blockIdx.x,
                     blockIdx.y, blockIdx.z);
    if (current) n += snprintf(message + n, size - n, ", thread %u", current->thread.x);
    n += snprintf(message + n, size - n, ": ");
    n += snprintf(message + n, size - n, format, values...);
    for (unsigned id = 0; id < MOST_BARRIERS; id++)
        if (barriers[id].arrived)
            n += snprintf(message + n, size - n, "; %u threads are at barrier %u",
                          barriers[id].arrived, id);
    failed = true;
}

// Ends the launch from inside a thread.
template <typename... T>
[[noreturn]] void fail(const char* format, T... values) {
    report(format, values...);
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
    if (id >= MOST_BARRIERS) fail("barrier %u: a block has 16", id);
    if (threads % 32) fail("barrier %u for %u threads: whole warps only", id, threads);
    Barrier& barrier = barriers[id];
    if (barrier.arrived && barrier.expected != threads)
        fail("barrier %u for %u threads, but others wait for %u", id, threads, barrier.expected);
    barrier.expected = threads;
    if (++barrier.arrived >= (threads ? threads : live_threads)) release(barrier);
    else if (waits) barrier.waiting.push_back(current), wait(id ? "a barrier" : "__syncthreads");
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
        unsigned i = 0;
        while (!(fibers[i].warp->live >> fibers[i].lane & 1)) i++;
        current = &fibers[i];
        return report("deadlock, it waits for %s", current->waits_for);
    }
    for (const Barrier& barrier : barriers)
        if (barrier.arrived) report("ended with a barrier that is not complete");
}

static uintptr_t fault_address;
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

// One below the other, each with a page at its end that cannot be touched.
static char* make_stacks() {
    char* made = reserve(size_t(MOST_THREADS) * STACK_BYTES);
    for (unsigned i = 0; i < MOST_THREADS; i++)
        mprotect(made + size_t(i) * STACK_BYTES, PAGE_BYTES, PROT_NONE);
    return made;
}

static char* make_arena() {
    char* made = reserve(DYNAMIC_END + PAGE_BYTES);
    mprotect(made + STATIC_BYTES, PAGE_BYTES, PROT_NONE);
    mprotect(made + DYNAMIC_END, PAGE_BYTES, PROT_NONE);
    return made;
}

// Null, or one line that says what went wrong.
static const char* launch(const char* name, void (*kernel)(void**), void** values,
                          const unsigned* grid, unsigned threads, unsigned shared_bytes,
                          bool early) {
    if (!arena) arena = make_arena();
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
    if (!failed && early && !waited_for_predecessor)
        report("launched early, but it never waits for its predecessor (griddepcontrol.wait)");
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
    EXPORT char* emulator_stacks() { return emulator::make_stacks(); }                            \
    EXPORT const char* emulator_launch(char* stacks, const unsigned* grid, unsigned threads,      \
                                       unsigned shared, int early, void** values) {               \
        emulator::stacks = stacks;                                                                \
        return emulator::launch(#NAME, [](void** p) { emulator::call(NAME, p); }, values, grid,   \
                                threads, shared, early);                                          \
    }                                                                                             \
    EXPORT int emulator_parameters(int* sizes) { return emulator::sizes_of(NAME, sizes); }        \
    EXPORT int emulator_most_threads() { return THREADS; }                                        \
    EXPORT unsigned emulator_static_shared() { return emulator::static_used; }

// ---- shared memory -----------------------------------------------------------------------------

inline void* dynamic_shared() { return arena + DYNAMIC_END - dynamic_bytes; }

// The place of a __shared__ variable; each has a type `Unique` of its own.
template <typename T, unsigned ALIGNMENT, typename Unique>
T& shared(Unique) {
    static unsigned offset, launched;
    if (launched != launch_number) {
        launched = launch_number;
        offset = (static_used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
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
