// Leone's kernels. The NumPy function of the same name in reference.py says what a kernel computes;
// kernels whose name begins with that of an op are parts of it.
//
//     linear     weights in packed 4 to 16 bit formats times rows of activations; embed
//     small      rmsnorm, rope_angles, rope_kv, copy_page
//     attention  paged, in segments of 256 positions
//     beyond     loading, f32 KV, latent attention, sampling, experts, gated delta nets
//
// What a row gets never depends on the other rows of a launch. Sums have one order, whichever
// kernel computes them; there are no float atomics. nvcc unrolls short loops of fixed length by
// itself; `#pragma unroll` stands where it would not.

// ---------------------------------------------------------------------------------------------
// Common: types, warp reductions, half conversions
// ---------------------------------------------------------------------------------------------
#include <cuda_fp16.h>
#include <stdint.h>

#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__
constexpr unsigned ALL_LANES = 0xffffffffu;

// Programmatic dependent launch: a kernel may start while the one before it ends. Every kernel lets
// its successor start and then waits for its predecessor, which has waited for its own: what it
// reads is there. Before it waits it reads only what nothing in a step writes (weights).
DEVICE void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Weights that are read after the wait, on their way to the L2 cache.
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE void follow_predecessor() {
    let_successor_start();
    wait_for_predecessor();
}

// An int in a struct that is the one parameter of a kernel: device.py gives each value 8 bytes.
struct alignas(8) Int {
    int value;
    DEVICE operator int() const { return value; }
};

// Butterfly: every lane ends with the same result, whose order is the same whatever the grid.
template <class T, class Op> DEVICE T warp_all(T x, Op op, int lanes = 32) {
    for (int o = lanes / 2; o > 0; o >>= 1) x = op(x, __shfl_xor_sync(ALL_LANES, x, o));
    return x;
}
DEVICE float warp_sum(float x) {
    return warp_all(x, [](float a, float b) { return __fadd_rn(a, b); });
}
DEVICE float warp_max(float x, int lanes = 32) {
    return warp_all(x, [](float a, float b) { return fmaxf(a, b); }, lanes);
}
// The largest of values >= 0, whose bits are in their order.
DEVICE float warp_largest(float x) {
    return __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(x)));
}

// The power of two that brings `largest` into [2^14, 2^15): f16 activations use it as row scale.
// Returns the factor to multiply by; its inverse is exact. Zero or non-finite rows get 1.
DEVICE float row_scale_factor(float largest) {
    int exponent = int(__float_as_uint(largest) >> 23 & 255) - 127;
    if (largest == 0.0f || exponent == 128) return 1.0f;
    exponent = min(max(14 - exponent, -100), 100);
    return __uint_as_float(unsigned(exponent + 127) << 23);
}

// f16 pairs: operands of the tensor core are 32-bit words.
DEVICE __half2 as_half2(unsigned word) { return *reinterpret_cast<const __half2*>(&word); }
DEVICE unsigned as_word(__half2 pair) { return *reinterpret_cast<const unsigned*>(&pair); }
DEVICE unsigned half2_bits(float low, float high) {
    return __half_as_ushort(__float2half_rn(low)) |
           unsigned(__half_as_ushort(__float2half_rn(high))) << 16;
}

// Relative error 1e-6; 0 for large negative x, where the exponential overflows.
DEVICE float times_sigmoid(float x, float gate) { return __fdividef(x, 1.0f + __expf(-gate)); }
DEVICE float silu(float x) { return times_sigmoid(x, x); }
DEVICE float4 silu(float4 x) { return make_float4(silu(x.x), silu(x.y), silu(x.z), silu(x.w)); }

// D += A B: A 16 weight rows x 16 k, B 16 k x 8 tokens, f16 inputs, f32 accumulators.
DEVICE void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---------------------------------------------------------------------------------------------
// linear: y = x W^T. Weights stay quantised in memory and become f16 in registers.
//
// One order of summation, whatever the number of rows. Weights are the 16-row side of the tensor
// core product, tokens its 8-column side. K is walked in chunks of 64 (4 products of 16); four
// chunks are a part. Parts i, i + CHAINS, i + 2 CHAINS, ... are chain i: it sums from zero in the
// tensor core's accumulators, and chain sums are added in index order. K is padded to 128.
//
// Two chunks are 128 values of K: lane 4g+t owns 32 of them, 16 a chunk, from 32t on, of the weight
// rows g and g+8 of a 16-row tile and of token g. So it decodes the scales of a block of 32 once.
// Product j takes values 4j .. 4j+3 of a chunk's 16 from every lane: a permutation of K that both
// sides share. A lane's nibbles of a chunk are one 16-byte load, its activations two.
//
// A packed tile of 16 rows:  chunks  [chunk][32 lanes][WORDS], 512-byte planes of 16 bytes a lane
//                            scales  [part][32 lanes][SCALE_BYTES / 32]
//                            blocks  [part][8 g][BLOCK_BYTES / 8], f16 scales per 256 (K formats)
//
// A small integer n in the low bits of an f16 is n * 2^-24. One fma with the scale * 2^24 gives
// scale * n + offset with one rounding; fields four bits higher take the scale * 2^20. For this
// each weight row is multiplied by a power of two, taken out of the sum again (`weight_scale`).
//
// The minima of Q4_K and Q5_K are larger than their weights, and so would be the errors of rounding
// them (6.6e-4 of a usual weight). There n lies as sign and magnitude of 2 (n - zero), an odd
// number, and the offset scale * zero - min is small: 3.5e-4. Exact weights in f16 have 2.1e-4.
// ---------------------------------------------------------------------------------------------

// The order is that of PACKINGS in device.py. BF16 and F32 are packed as F16.
enum WeightFormat { Q4_K, Q5_K, Q6_K, Q8_0, Q4_0, Q4_1, F16, BF16, F32 };

struct FormatSizes {
    int block_values, block_bytes;  // of a block in the file
    int words;                      // that a lane has of a packed chunk, 32 bits each
    int scale_words;                // that it has of a part's scales
    int half2s;                     // f16 pairs of a part that the four lanes of a row share
};
constexpr FormatSizes SIZES[] = {
    {256, 144, 4, 2, 2}, {256, 176, 5, 2, 2}, {256, 210, 6, 2, 1},  // Q4_K, Q5_K, Q6_K
    {32, 34, 8, 2, 0},   {32, 18, 4, 2, 0},   {32, 20, 4, 4, 0},    // Q8_0, Q4_0, Q4_1
    {1, 2, 16, 0, 0},    {1, 2, 16, 0, 0},    {1, 4, 16, 0, 0}};    // F16, BF16, F32

constexpr int TILE_ROWS = 16;
constexpr int CHUNK = 64;
constexpr int PART_CHUNKS = 4;
constexpr int CHAINS = 8;  // as many as a block of few rows has warps

// f16 pairs
constexpr unsigned HALF2_M0 = 0x80008000, HALF2_2 = 0x40004000, HALF2_M1 = 0xbc00bc00,
                   HALF2_M2_M4 = 0xac00ac00, HALF2_15_16 = 0x3b803b80, HALF2_31_16 = 0x3fc03fc0,
                   HALF2_2_M4 = 0x2c002c00, HALF2_M2_M17 = 0x80808080, HALF2_M2_M19 = 0x80208020,
                   HALF2_M2_M21 = 0x80088008, HALF2_M64 = 0xd400d400, HALF2_1024 = 0x64006400,
                   HALF2_M1152 = 0xe480e480, HALF2_64 = 0x54005400, HALF2_2_M17 = 0x00800080;

DEVICE int chunks_of(int cols) { return (cols + 127) / 128 * 2; }
DEVICE int parts_of(int chunks) { return (chunks + PART_CHUNKS - 1) / PART_CHUNKS; }
DEVICE int tiles_of(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

template <int FORMAT> struct Packed {
    static constexpr FormatSizes SIZE = SIZES[FORMAT];
    static constexpr bool K_SCALES = FORMAT == Q4_K || FORMAT == Q5_K;
    static constexpr bool WHOLE_PARTS = SIZE.block_values == PART_CHUNKS * CHUNK;
    static constexpr int WORDS = SIZE.words, CHUNK_BYTES = 128 * WORDS;
    static constexpr int SCALE_BYTES = 128 * SIZE.scale_words, BLOCK_BYTES = 32 * SIZE.half2s;
    static constexpr int SCALE_WORDS =
        FORMAT == F16 ? 1 : SIZE.scale_words + SIZE.half2s;  // 1: an array has no 0 elements

    static DEVICE int scales_at(int chunks) { return chunks * CHUNK_BYTES; }
    static DEVICE int blocks_at(int chunks) {
        return scales_at(chunks) + parts_of(chunks) * SCALE_BYTES;
    }
    static DEVICE int64_t tile_bytes(int chunks) {
        return (blocks_at(chunks) + parts_of(chunks) * BLOCK_BYTES + 127) / 128 * 128;
    }
};

// The first of the 16 values of K that lanes 4g+t own in a chunk.
DEVICE int first_k(int chunk, int t) { return chunk / 2 * 128 + 32 * t + chunk % 2 * 16; }

// A constant as an argument.
template <int N> struct Is {
    constexpr DEVICE operator int() const { return N; }
};

// Activations lie in 16-byte pieces: [8 tokens][chunk][2][32 lanes], lane 4g+t of token g. This is
// the first of two pieces, CHUNK_PIECES / 2 apart, that hold the lane's 16 values of a chunk.
constexpr int CHUNK_PIECES = 64, PART_PIECES = PART_CHUNKS * CHUNK_PIECES;
DEVICE unsigned piece_of(unsigned token, unsigned chunk, unsigned t, unsigned chunks) {
    return (token / 8 * chunks + chunk) * CHUNK_PIECES + token % 8 * 4 + t;
}
// The piece that holds column k.
DEVICE unsigned piece_at(unsigned token, unsigned k, unsigned chunks) {
    return piece_of(token, k / 128 * 2 + k % 32 / 16, k % 128 / 32, chunks) +
           k % 16 / 8 * (CHUNK_PIECES / 2);
}

// Calls body(Is<FORMAT>) for a packed format that is known at run time.
template <int FORMAT = 0, typename Body> DEVICE void with_format(int format, Body body) {
    if (format == FORMAT) body(Is<FORMAT>());
    else if constexpr (FORMAT < F16) with_format<FORMAT + 1>(format, body);
}

DEVICE unsigned fma2(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE unsigned mul2(unsigned a, unsigned b) { return fma2(a, b, HALF2_M0); }
DEVICE unsigned add2(unsigned a, unsigned b) {
    unsigned d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// Not __byte_perm: these become operand selectors of the products that follow, and cost nothing.
DEVICE unsigned both_low(unsigned x) {
    unsigned d;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {a, a};}" : "=r"(d) : "r"(x));
    return d;
}
DEVICE unsigned both_high(unsigned x) {
    unsigned d;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {b, b};}" : "=r"(d) : "r"(x));
    return d;
}
// x & mask | bits in one instruction: the compiler makes two of it.
DEVICE unsigned and_or(unsigned x, unsigned mask, unsigned bits) {
    unsigned d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
    return d;
}
DEVICE unsigned rotate_left(unsigned x, int bits) { return __funnelshift_l(x, x, bits); }

// NAME<N>(from, words): N words with one instruction. Volatile, so that it stays behind
// wait_for_predecessor: the compiler moves other loads past that.
#define LOAD(NAME, FROM, REGISTER, INSTRUCTION)                                                  \
    template <int N>                                                                             \
    DEVICE void NAME(FROM from, unsigned* words) {                                               \
        if constexpr (N == 4)                                                                    \
            asm volatile(INSTRUCTION ".v4.u32 {%0,%1,%2,%3}, [%4];"                              \
                         : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])        \
                         : REGISTER(from));                                                      \
        else if constexpr (N == 2)                                                               \
            asm volatile(INSTRUCTION ".v2.u32 {%0,%1}, [%2];"                                    \
                         : "=r"(words[0]), "=r"(words[1]) : REGISTER(from));                     \
        else                                                                                     \
            asm volatile(INSTRUCTION ".u32 %0, [%1];" : "=r"(words[0]) : REGISTER(from));        \
    }
// Weights are read once by one warp: past L1, which is left to the activations.
LOAD(load_weights, const uint8_t*, "l", "ld.global.L1::no_allocate.L2::128B")
LOAD(load_activations, const uint4*, "l", "ld.global")
LOAD(load_shared, unsigned, "r", "ld.shared")
#undef LOAD

// Calls visit(Is<N>, byte, word) for each N words of a lane that lie together in a packed chunk.
template <int FORMAT, typename Visit> DEVICE void for_pieces(int lane, Visit visit) {
    constexpr int WORDS = Packed<FORMAT>::WORDS, REST = WORDS % 4;
    for (int i = 0; i < WORDS / 4; i++) visit(Is<4>(), 512 * i + 16 * lane, 4 * i);
    if constexpr (REST > 0) visit(Is<REST>(), WORDS / 4 * 512 + 4 * REST * lane, WORDS - REST);
}

// This lane's words of chunk c of a part of a packed tile.
template <int FORMAT>
DEVICE void load_chunk(const uint8_t* tile, int part, int c, int lane,
                       unsigned (&words)[Packed<FORMAT>::WORDS]) {
    constexpr int BYTES = Packed<FORMAT>::CHUNK_BYTES;
    tile = tile + unsigned(part) * (PART_CHUNKS * BYTES) + c * BYTES;  // unsigned: one sum a part
    for_pieces<FORMAT>(lane, [&](auto n, int byte, int word) {
        load_weights<n>(tile + byte, words + word);
    });
}

// This lane's scale words of one part.
template <int FORMAT>
DEVICE void load_scales(const uint8_t* tile, int chunks, int part, int lane,
                        unsigned (&words)[Packed<FORMAT>::SCALE_WORDS]) {
    using P = Packed<FORMAT>;
    const uint8_t* scales = tile + P::scales_at(chunks) + part * P::SCALE_BYTES;
    const uint8_t* blocks = tile + P::blocks_at(chunks) + part * P::BLOCK_BYTES;
    constexpr int OWN = P::SIZE.scale_words, SHARED = P::SIZE.half2s;
    if constexpr (OWN > 0) load_weights<OWN>(scales + 4 * OWN * lane, words);
    if constexpr (SHARED > 0) load_weights<SHARED>(blocks + 4 * SHARED * (lane >> 2), words + OWN);
}

// What turns the integers of one chunk into weights, as f16 pairs, for the rows g and g+8:
// scale * 2^24 for fields at bit 0, scale * 2^20 for fields at bit 4, and what is added.
struct ChunkScales {
    unsigned low[2], high[2], offset[2];
};

// Scales of chunk c (0..3, known at compile time) of the part whose words these are. Only those of
// Q6_K differ between chunks 2i and 2i+1.
template <int FORMAT>
DEVICE void decode_scales(const unsigned (&words)[Packed<FORMAT>::SCALE_WORDS], int c,
                          ChunkScales& s) {
    if (FORMAT == F16 || (FORMAT != Q6_K && c % 2)) return;
    // Zero of the unsigned integers: 32, 128 or 8.
    constexpr unsigned ZERO = FORMAT == Q6_K   ? HALF2_M2_M19
                              : FORMAT == Q8_0 ? HALF2_M2_M17
                                               : HALF2_M2_M21;
    unsigned low, high, offset;  // row g low, row g+8 high
    if constexpr (Packed<FORMAT>::K_SCALES) {
        // Scale at bit 4, min at bit 10 of each half. Or-ed into the f16 64.0 they are 64 + n.
        const unsigned n = add2(and_or(words[c / 2], 0x03f003f0, HALF2_64), HALF2_M64);
        const unsigned min = add2(and_or(words[c / 2] >> 6, 0x03f003f0, HALF2_64), HALF2_M64);
        high = mul2(n, words[2]);  // d * scale * 2^20
        const unsigned lost = fma2(n, words[2], mul2(high, HALF2_M1));  // when it was rounded
        // 2^17 (scale * zero - dmin * min), each rounding of something small
        constexpr bool Q4 = FORMAT == Q4_K;  // zero is 7.5 or 15.5
        offset = fma2(min, words[3], Q4 ? high : mul2(high, HALF2_2));
        offset = fma2(high, HALF2_M2_M4, offset);
        offset = fma2(lost, Q4 ? HALF2_15_16 : HALF2_31_16, offset);
        offset = mul2(offset, HALF2_2_M17);
    } else {
        low = words[FORMAT == Q4_1 ? c : c / 2];
        if constexpr (FORMAT == Q6_K) {
            // Bytes of scale + 128: chunks 2i and 2i+1 of row g, then of row g+8.
            const unsigned n = and_or(words[c / 2] >> 8 * (c % 2), 0x00ff00ff, HALF2_1024);
            low = mul2(add2(n, HALF2_M1152), words[2]);
        }
        high = mul2(low, HALF2_2_M4);
        if constexpr (FORMAT == Q4_1) offset = words[c + 1];
        else offset = mul2(low, ZERO);
        s.low[0] = both_low(low), s.low[1] = both_high(low);
    }
    s.high[0] = both_low(high), s.high[1] = both_high(high);
    s.offset[0] = both_low(offset), s.offset[1] = both_high(offset);
}

// The weights of products 2 * half and 2 * half + 1 of a chunk, as their A operands.
template <int FORMAT>
DEVICE void dequantise(const unsigned (&words)[Packed<FORMAT>::WORDS], const ChunkScales& s,
                       int half, unsigned (&a)[2][4]) {
    for (int r = 0; r < 2; r++) {
        for (int j = 0; j < 2; j++) {
            if constexpr (FORMAT == F16) {
                a[j][r] = words[8 * r + 4 * half + 2 * j];
                a[j][2 + r] = words[8 * r + 4 * half + 2 * j + 1];
                continue;
            }
            unsigned low, high;  // k, k+1 and k+2, k+3
            if constexpr (Packed<FORMAT>::K_SCALES) {
                // Sign at bit 15, magnitude from bit 3 on, after a rotation by a multiple of 4.
                const unsigned word = words[2 * r + half];
                low = and_or(rotate_left(word, 8 * j), 0x80708070, 0x00080008);
                high = and_or(rotate_left(word, 8 * j + 4), 0x80708070, 0x00080008);
                if constexpr (FORMAT == Q5_K) {  // the magnitude's upper bit
                    const int bit = 8 * r + 4 * half + 2 * j;
                    low |= rotate_left(words[4], bit) & 0x00800080;
                    high |= rotate_left(words[4], bit + 1) & 0x00800080;
                }
            } else if constexpr (FORMAT == Q8_0) {
                low = words[4 * r + 2 * half + j] & 0x00ff00ff;
                high = (words[4 * r + 2 * half + j] >> 8) & 0x00ff00ff;
            } else {
                const unsigned nibbles = words[2 * r + half] >> 8 * j;
                low = nibbles & 0x000f000f;
                high = nibbles & 0x00f000f0;
            }
            if constexpr (FORMAT == Q6_K) {
                const unsigned upper =
                    (half ? rotate_left(words[4 + r], 24) : words[4 + r]) >> 2 * j;
                low |= upper & 0x00300030;
                high |= upper & 0x03000300;
            }
            a[j][r] = fma2(low, Packed<FORMAT>::K_SCALES ? s.high[r] : s.low[r], s.offset[r]);
            a[j][2 + r] = fma2(high, FORMAT == Q8_0 ? s.low[r] : s.high[r], s.offset[r]);
        }
    }
}

// ---- what the kernels share: operands, the place of a block in the stack, the result ----------

// *p if `real`, without a branch.
DEVICE float load_if(bool real, const float* p, float otherwise) {
    float x;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; mov.f32 %0, %3; @p ld.global.f32 %0, [%2];}"
                 : "=f"(x)
                 : "r"(unsigned(real)), "l"(p), "f"(otherwise));
    return x;
}

struct Product {
    const uint4* x;             // [ceil(rows / 8), chunks] tiles of 8 tokens x 64: see piece_of
    const float* x_scale;       // [rows], powers of two, or null for 1
    const float* weight_scale;  // [columns], powers of two
    const float* bias;          // [columns] or null
    float* y;                   // [rows, columns]
    Int rows, columns, chunks;
    Int add;   // y += instead of y =
    Int silu;  // y: f16 pieces [rows, columns / 2] of silu(gate) * up
};

// One element of y from its sum and what it is added to. `scale` is that of the token times that of
// the weight row, a power of two: exact.
DEVICE float result(float sum, float scale, float bias, float before) {
    return __fadd_rn(before, __fadd_rn(__fmul_rn(sum, scale), bias));
}

// Where a product with `silu` stores silu(gate) * up of index k: in pieces, as a product reads it.
// A tile of its weights holds eight rows of gate, then the same ones of up, whose scale has a power
// of two that keeps what is stored below 2^15: see Device.gated.
DEVICE __half* silu_at(const Product& product, int row, int k) {
    return reinterpret_cast<__half*>(product.y) +
           8 * piece_at(row, k, chunks_of(product.columns / 2)) + k % 8;
}

// A stack of up to four row blocks, each of one format. Their outputs lie side by side in y.
struct Stack {
    const uint8_t* packed[4];
    Int rows[4], blocks[4];  // thread blocks that share the tiles of a row block
    Int formats;             // 8 bits each
};

// The share of a thread block: one of `blocks` in a row block.
struct Place {
    const uint8_t* packed;
    int format, rows, column, blocks, index;  // column: the first one in y
};

DEVICE Place place_in(const Stack& stack, int index) {
    Place place = {};
    int column = 0;
    for (int i = 0; i < 4; i++) {
        if (index >= 0 && index < stack.blocks[i])
            place = {stack.packed[i], stack.formats >> 8 * i & 255, stack.rows[i], column,
                     stack.blocks[i], index};
        index -= stack.blocks[i];
        column += stack.rows[i];
    }
    return place;
}

struct Linear {
    Product product;
    Stack stack;
};

// The row of y of a token of a tile, and the row of x of that. Here their own; see `ScatteredRows`.
struct OwnRows {
    DEVICE int y(int token) const { return token; }
    DEVICE int x_of(int y_row) const { return y_row; }
};

// Stores what a lane has of tiles of 16 weight rows x 8 tokens, as the tensor core leaves it: sums
// of `row` and row + 8 of each tile, for `token` and token + 1 of each. Few warps run this, once,
// so both kinds of result have a path without branches in it.
template <int ROW_TILES, int TOKEN_TILES, typename Rows>
DEVICE void store_totals(const Product& product, const Place& place, const Rows& rows, int row,
                         int token, const float (&total)[ROW_TILES][TOKEN_TILES][4]) {
    const int column = place.column + row, odd = row % 2;
    float scale[2 * ROW_TILES], bias[2 * ROW_TILES];  // of the rows row + 8 r
    bool real[2 * ROW_TILES];
    for (int r = 0; r < 2 * ROW_TILES; r++) {
        real[r] = row + 8 * r < place.rows;
        scale[r] = load_if(real[r], product.weight_scale + column + 8 * r, 0.0f);
        bias[r] = load_if(real[r] && product.bias, product.bias + column + 8 * r, 0.0f);
    }
    const auto scale_of = [&](int token) {
        return load_if(token < product.rows && product.x_scale,
                       product.x_scale + rows.x_of(rows.y(token)), 1.0f);
    };
    if (product.silu) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++, token += 8) {
            const float token_scale[] = {scale_of(token), scale_of(token + 1)};
            for (int m = 0; m < ROW_TILES; m++) {
                float x[2];
                for (int i = 0; i < 2; i++)
                    x[i] = silu(total[m][n][i] * (token_scale[i] * scale[2 * m])) *
                           (total[m][n][2 + i] * (token_scale[i] * scale[2 * m + 1]));
                // The lanes of an even row and the next one trade: each stores both for a token.
                const unsigned own = half2_bits(x[0], x[1]);
                const unsigned other = __shfl_xor_sync(ALL_LANES, own, 4);
                const int k = (row + row % TILE_ROWS) / 2 - odd + 8 * m;
                if (token + odd < product.rows && real[2 * m])
                    *reinterpret_cast<unsigned*>(silu_at(product, rows.y(token + odd), k)) =
                        __byte_perm(own, other, odd ? 0x3276 : 0x5410);
            }
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++, token += 8) {
        float* to[2];
        float before[2][2 * ROW_TILES], token_scale[2];
        for (int i = 0; i < 2; i++) {
            const bool inside = token + i < product.rows;
            to[i] = inside ? product.y + int64_t(rows.y(token + i)) * product.columns + column
                           : nullptr;
            token_scale[i] = scale_of(token + i);
            for (int r = 0; r < 2 * ROW_TILES; r++)
                before[i][r] = load_if(inside && real[r] && product.add, to[i] + 8 * r, 0.0f);
        }
        for (int i = 0; i < 2; i++)
            for (int r = 0; r < 2 * ROW_TILES; r++)
                if (to[i] && real[r])
                    to[i][8 * r] = result(total[r / 2][n][r % 2 * 2 + i], token_scale[i] * scale[r],
                                          bias[r], before[i][r]);
    }
}

// ---- few rows: the warps of a block share the chains of a tile ---------------------------------

constexpr int FEW_STRIDE = 20;  // floats of a token's 16 sums in shared memory: no bank conflicts
template <int TOKENS> constexpr int FEW_SUMS = CHAINS * TOKENS * FEW_STRIDE;

// The tiles place.index, place.index + place.blocks, ... of a row block. The loads of a warp run
// ahead of its products by one part, across tiles too.
template <int FORMAT, int TOKEN_TILES, int BLOCKS, int WARPS, typename Rows>
DEVICE void linear_few(const Product& product, const Place& place, const Rows& rows,
                       float (&sums)[2][FEW_SUMS<8 * TOKEN_TILES>]) {
    using P = Packed<FORMAT>;
    constexpr int TOKENS = 8 * TOKEN_TILES;
    // Chunks loaded in advance, as many as there are registers for.
    constexpr bool TIGHT = (FORMAT == Q5_K && BLOCKS > 2) || (!P::WHOLE_PARTS && BLOCKS > 3);
    constexpr int AHEAD = P::WORDS > 8 ? 1 : P::WORDS == 8 || TIGHT ? 2 : 4;
    constexpr int TOKENS_AHEAD = TOKEN_TILES > 1 || BLOCKS > 2 || P::WORDS > 8 ? 2 : 4;

    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x >> 5, 0);  // known to be uniform
    const int chunks = product.chunks, parts = parts_of(chunks);
    const int tiles = tiles_of(place.rows);
    const auto exists = [=](int part, int c) {
        return P::WHOLE_PARTS ? part < parts : part * PART_CHUNKS + c < chunks;
    };
    const unsigned tile_bytes = P::tile_bytes(chunks);
    const int turn = parts < WARPS ? 0 : WARPS / 2;
    int half_of_sums = 0, first = warp;  // the chain with which this warp begins a tile

    const uint4* x[TOKEN_TILES];  // past the end: the last token again, its results are dropped
    for (int n = 0; n < TOKEN_TILES; n++)
        x[n] = product.x +
               piece_of(rows.x_of(rows.y(min(8 * n + g, product.rows - 1))), 0, t, chunks);
    unsigned words[AHEAD][P::WORDS], scales[P::SCALE_WORDS], next_scales[P::SCALE_WORDS];
    unsigned b[TOKENS_AHEAD][TOKEN_TILES][2][4];
    const auto load_ahead = [&](const uint8_t* tile, int part, int c) {
        if (exists(part, c)) load_chunk<FORMAT>(tile, part, c, lane, words[c % AHEAD]);
    };
    const auto load_tokens = [&](int part, int c) {
        if (!exists(part, c)) return;
        for (int n = 0; n < TOKEN_TILES; n++) {
            const uint4* from = x[n] + unsigned(part) * PART_PIECES + c * CHUNK_PIECES;
            load_activations<4>(from, b[c % TOKENS_AHEAD][n][0]);
            load_activations<4>(from + CHUNK_PIECES / 2, b[c % TOKENS_AHEAD][n][1]);
        }
    };

    const uint8_t* tile = place.packed + int64_t(place.index) * tile_bytes;
    for (int c = 0; c < AHEAD; c++) load_ahead(tile, warp, c);
    if (warp < parts) load_scales<FORMAT>(tile, chunks, warp, lane, next_scales);
    wait_for_predecessor();
    for (int c = 0; c < TOKENS_AHEAD; c++) load_tokens(warp, c);

    // Thread 16 i + r adds up token i and row r.
    const int token = threadIdx.x / TILE_ROWS;
    const bool inside = token < min(TOKENS, product.rows);
    const int y_row = rows.y(token);
    const float token_scale =
        load_if(inside && product.x_scale, product.x_scale + rows.x_of(y_row), 1.0f);
    for (int index = place.index; index < tiles; index += place.blocks) {
        const int row = index * TILE_ROWS + threadIdx.x % TILE_ROWS, column = place.column + row;
        const bool mine = inside && row < place.rows;
        float* to = product.y + int64_t(y_row) * product.columns + column;
        const float row_scale = load_if(mine, product.weight_scale + column, 0.0f);
        float bias, before, total = 0.0f;
        const auto load_rest = [&] {
            bias = load_if(mine && product.bias, product.bias + column, 0.0f);
            before = load_if(mine && product.add, to, 0.0f);
        };
        if (BLOCKS == 2) load_rest();  // early, if there are registers to keep it
        float* tile_sums = sums[half_of_sums];
        half_of_sums ^= 1;  // one barrier a tile: the next one takes the other half
#pragma unroll 1
        for (int i = 0; i < CHAINS / WARPS; i++) {
            const int chain = first + WARPS * i;
            float sum[TOKEN_TILES][4] = {};
            for (int part = chain; part < parts; part += CHAINS) {
                // What this warp takes next; parts: nothing.
                int next = part + CHAINS;
                if (next >= parts) next = i + 1 < CHAINS / WARPS ? chain + WARPS : parts;
                const bool same_tile = next < parts;
                const uint8_t* next_tile = same_tile ? tile : tile + place.blocks * tile_bytes;
                if (!same_tile) next = index + place.blocks < tiles ? first ^ turn : parts;
                for (int j = 0; j < P::SCALE_WORDS; j++) scales[j] = next_scales[j];
                if (next < parts) load_scales<FORMAT>(next_tile, chunks, next, lane, next_scales);
                ChunkScales s = {};
#pragma unroll
                for (int c = 0; c < PART_CHUNKS; c++) {
                    if (P::WHOLE_PARTS || exists(part, c)) {
                        decode_scales<FORMAT>(scales, c, s);
                        for (int half = 0; half < 2; half++) {
                            unsigned a[2][4];
                            dequantise<FORMAT>(words[c % AHEAD], s, half, a);
                            for (int n = 0; n < TOKEN_TILES; n++) {
                                const unsigned(&k)[4] = b[c % TOKENS_AHEAD][n][half];
                                mma_16x8x16(sum[n], a[0], k[0], k[1]);
                                mma_16x8x16(sum[n], a[1], k[2], k[3]);
                            }
                        }
                    }
                    const int far = (c + AHEAD) % PART_CHUNKS;
                    if (c + AHEAD < PART_CHUNKS) load_ahead(tile, part, far);
                    else load_ahead(next_tile, next, far);
                    load_tokens(c + TOKENS_AHEAD < PART_CHUNKS ? part : next,
                                (c + TOKENS_AHEAD) % PART_CHUNKS);
                    __syncwarp();  // or the compiler moves all chunks' loads behind the last
                }
                tile = next_tile;
            }
            for (int n = 0; n < TOKEN_TILES; n++)
                for (int j = 0; j < 4; j++)
                    tile_sums[(chain * TOKENS + 8 * n + 2 * t + (j & 1)) * FEW_STRIDE + g +
                              8 * (j >> 1)] = sum[n][j];
        }
        first ^= turn;
        if (BLOCKS > 2) load_rest();
        __syncthreads();
        if (mine) {
            const float* own = tile_sums + token * FEW_STRIDE + threadIdx.x % TILE_ROWS;
            for (int i = 0; i < CHAINS; i++)
                total = __fadd_rn(total, own[i * TOKENS * FEW_STRIDE]);
        }
        const float y = result(total, row_scale * token_scale, bias, before);
        const float up = __shfl_down_sync(ALL_LANES, y, TILE_ROWS / 2);
        if (mine && !product.silu) *to = y;
        if (mine && product.silu && threadIdx.x % TILE_ROWS < TILE_ROWS / 2)
            *silu_at(product, y_row, row - index * TILE_ROWS / 2) = __float2half_rn(silu(y) * up);
    }
}

template <int TOKEN_TILES, int BLOCKS> DEVICE void linear_tiles(const Linear& work) {
    __shared__ float sums[2][FEW_SUMS<8 * TOKEN_TILES>];
    let_successor_start();
    const Place place = place_in(work.stack, blockIdx.x);
    with_format(place.format, [&](auto format) {
        linear_few<format, TOKEN_TILES, BLOCKS, CHAINS>(work.product, place, OwnRows(), sums);
    });
}

// y [rows, columns] (+)= (x [rows, K] W^T) * x_scale * weight_scale + bias, rows <= 8.
// PRECOND: grid (sum of blocks), 256 threads; x padded with zeros to CHUNK * chunks columns.
// A block holds 16 columns at a time; thread 16 i + r ends with row i, column r of them.
// Moves the weights once, x once per multiprocessor, 4 bytes per element of y.
KERNEL __launch_bounds__(32 * CHAINS, 2)
linear_few_8(const __grid_constant__ Linear work) { linear_tiles<1, 2>(work); }

// The same with three blocks on a multiprocessor that load less in advance. 8B on an H200, 1 row:
// q|k|v with 384 tiles 6.6 us instead of 7.5; down with 256 tiles 13 us instead of 11.
KERNEL __launch_bounds__(32 * CHAINS, 3)
linear_few_8_three(const __grid_constant__ Linear work) { linear_tiles<1, 3>(work); }

// The same for rows <= 16.
KERNEL __launch_bounds__(32 * CHAINS, 2)
linear_few_16(const __grid_constant__ Linear work) { linear_tiles<2, 2>(work); }

// ---- more rows: tokens and weights wait in a ring in shared memory ------------------------------

template <int BYTES> DEVICE void copy_async(unsigned to, const void* from) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
    else
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(to), "l"(from),
                     "n"(BYTES));
}
DEVICE void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// A thread block has ROWS rows of x and COLUMNS of y. Its GROUPS groups take the chains in turn.
// The WARPS warps of a group take as many tiles each and share the tokens of a chunk.
// Shared memory: RING_KB of [group][slot][tokens, then each tile's words of a chunk], with as many
// slots as fit, then totals.
template <int FORMAT, int ROWS, int COLUMNS, int WARPS, int GROUPS, int RING_KB, typename Rows>
DEVICE void linear_staged(const Product& product, const Place& place, const Rows& rows,
                          int first_token, uint8_t* shared) {
    using P = Packed<FORMAT>;
    constexpr int TILES = COLUMNS / TILE_ROWS, ROW_TILES = TILES / WARPS, TOKEN_TILES = ROWS / 8;
    constexpr int TOKEN_BYTES = ROWS * CHUNK * 2;
    constexpr bool DIRECT = FORMAT == F16;  // its words are the operands: nothing to gain in a ring
    constexpr int WORD_BYTES = DIRECT ? 0 : P::CHUNK_BYTES;
    constexpr int SLOT_BYTES = TOKEN_BYTES + TILES * WORD_BYTES;
    // A group takes STEP chunks from barrier to barrier, and loads up to STEPS - 1 such in advance.
    constexpr int FITTING = RING_KB * 1024 / (GROUPS * SLOT_BYTES);
    constexpr int STEP = FITTING < 4 ? 1 : 2, STEPS = FITTING < 16 ? FITTING / STEP : 8;
    static_assert(STEPS > 1);
    constexpr int RING_BYTES = STEPS * STEP * SLOT_BYTES;
    constexpr int GROUP_THREADS = 32 * WARPS;
    constexpr int COPIES = 64 * TOKEN_TILES / GROUP_THREADS;  // of 16 bytes, a thread's share
    constexpr int BATCH = TOKEN_TILES < 4 ? TOKEN_TILES : 4;  // token tiles of a burst of products

    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x >> 5, 0);  // known to be uniform
    const int group = warp / WARPS, member = warp % WARPS;
    const int chunks = product.chunks, parts = parts_of(chunks);
    const int tile = place.index * TILES + member * ROW_TILES;
    const uint8_t* tiles[ROW_TILES];
    for (int m = 0; m < ROW_TILES; m++) {  // past the end: the last tile again, stored by nobody
        const int last = (place.rows - 1) / TILE_ROWS;
        tiles[m] = place.packed + min(tile + m, last) * P::tile_bytes(chunks);
    }

    // A slot holds a chunk: pieces of the tokens, then words of the tiles as in the packed tile,
    // where each lane copies and reads its own.
    const unsigned ring = unsigned(__cvta_generic_to_shared(shared)) + group * RING_BYTES;
    const unsigned own_words = TOKEN_BYTES + member * ROW_TILES * WORD_BYTES;
    const int thread = threadIdx.x - group * GROUP_THREADS;
    unsigned copied[COPIES];  // what this thread copies of x, in pieces
    for (int i = 0; i < COPIES; i++) {  // past the end: the last token again, dropped later
        const int piece = thread + i * GROUP_THREADS;
        const int token = min(first_token + piece / CHUNK_PIECES * 8 + g, product.rows - 1);
        copied[i] = piece_of(rows.x_of(rows.y(token)), 0, t, chunks) +
                    piece % CHUNK_PIECES / 32 * (CHUNK_PIECES / 2);
    }
    constexpr int STEP_BYTES = STEP * SLOT_BYTES;
    unsigned slots = ring, far_slots = ring;  // of the step that is read, of the one to be fetched
    int far_chain = group, far = group * PART_CHUNKS;  // that one's chain and first chunk
    const auto next_slots = [=](unsigned slots) {
        return slots + STEP_BYTES == ring + RING_BYTES ? ring : slots + STEP_BYTES;
    };
    const auto fetch_step = [&] {
        if (far < chunks) {
            for (int i = 0; i < COPIES; i++) {
                const uint4* from = product.x + (copied[i] + far * CHUNK_PIECES);
                for (int c = 0; c < STEP; c++)
                    copy_async<16>(far_slots + c * SLOT_BYTES + (thread + i * GROUP_THREADS) * 16,
                                   from + c * CHUNK_PIECES);
            }
            for (int m = 0; m < ROW_TILES && !DIRECT; m++) {
                const uint8_t* from = tiles[m] + far * P::CHUNK_BYTES;
                for (int c = 0; c < STEP; c++)
                    for_pieces<FORMAT>(lane, [&](auto n, int byte, int) {
                        copy_async<4 * n>(far_slots + c * SLOT_BYTES + own_words +
                                              m * P::CHUNK_BYTES + byte,
                                          from + c * P::CHUNK_BYTES + byte);
                    });
            }
        }
        far += STEP;
        if (far % PART_CHUNKS == 0 || far == chunks) {
            far = ((far - 1) / PART_CHUNKS + CHAINS) * PART_CHUNKS;
            if (far >= chunks && (far_chain += GROUPS) < CHAINS) far = far_chain * PART_CHUNKS;
        }
        far_slots = next_slots(far_slots);
        asm volatile("cp.async.commit_group;");
    };
    unsigned scales[ROW_TILES][P::SCALE_WORDS], next_scales[ROW_TILES][P::SCALE_WORDS];
    const auto load_part_scales = [&](int part) {
        if (part < parts)
            for (int m = 0; m < ROW_TILES; m++)
                load_scales<FORMAT>(tiles[m], chunks, part, lane, next_scales[m]);
    };

    load_part_scales(group);
    for (int step = 1; step < STEPS; step++) fetch_step();

    float total[ROW_TILES][TOKEN_TILES][4] = {};  // with several groups: goes via shared memory
    const int chains = min(CHAINS, parts);
    for (int chain = group; chain < chains; chain += GROUPS) {
        float sum[ROW_TILES][TOKEN_TILES][4] = {};
        for (int part = chain; part < parts; part += CHAINS) {
            ChunkScales s[ROW_TILES] = {};
            for (int m = 0; m < ROW_TILES; m++)
                for (int i = 0; i < P::SCALE_WORDS; i++) scales[m][i] = next_scales[m][i];
            load_part_scales(part + CHAINS < parts     ? part + CHAINS
                             : chain + GROUPS < chains ? chain + GROUPS
                                                       : parts);
            const int part_chunks = min(chunks - part * PART_CHUNKS, PART_CHUNKS);
#pragma unroll 1  // half the code, at the same speed
            for (int pair = 0; pair < part_chunks; pair += 2) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    if (c % STEP == 0) {
                        // This step is there, and all warps of the group have read the one before,
                        // whose slots take another one.
                        asm volatile("cp.async.wait_group %0;" ::"n"(STEPS - 2));
                        barrier_sync(group, GROUP_THREADS);
                        fetch_step();
                    }
                    const unsigned slot = slots + c % STEP * SLOT_BYTES;
                    unsigned words[ROW_TILES][P::WORDS];
                    for (int m = 0; m < ROW_TILES; m++) {
                        const unsigned from = slot + own_words + m * P::CHUNK_BYTES;
                        if constexpr (DIRECT) {
                            load_chunk<FORMAT>(tiles[m], part, pair + c, lane, words[m]);
                        } else {
                            for_pieces<FORMAT>(lane, [&](auto n, int byte, int word) {
                                load_shared<n>(from + byte, words[m] + word);
                            });
                        }
                        decode_scales<FORMAT>(scales[m], c, s[m]);
                    }
                    for (int half = 0; half < 2; half++) {
                        unsigned a[ROW_TILES][2][4];
                        for (int m = 0; m < ROW_TILES; m++)
                            dequantise<FORMAT>(words[m], s[m], half, a[m]);
                        const unsigned tokens = slot + 512 * half + 16 * lane;
                        for (int batch = 0; batch < TOKEN_TILES; batch += BATCH) {
                            unsigned b[BATCH][4];
                            for (int n = 0; n < BATCH; n++)
                                load_shared<4>(tokens + (batch + n) * 1024, b[n]);
                            for (int j = 0; j < 2; j++)
                                for (int n = 0; n < BATCH; n++)
                                    for (int m = 0; m < ROW_TILES; m++)
                                        mma_16x8x16(sum[m][batch + n], a[m][j], b[n][2 * j],
                                                    b[n][2 * j + 1]);
                        }
                    }
                    if ((c + 1) % STEP == 0) slots = next_slots(slots);
                }
                for (int m = 0; m < ROW_TILES; m++)  // the scales of the other pair of chunks
                    for (int i = 0; i < P::SIZE.scale_words / 2; i++)
                        scales[m][i] = scales[m][i + P::SIZE.scale_words / 2];
            }
        }
        // With several groups the total goes from group to group in chain order, lane to lane.
        // Barrier `turn` of a warp tells it that this warp of the group before has written.
        static_assert((1 + WARPS) * GROUPS <= 16, "a block has 16 barriers");
        const auto turn = [=](int group) { return (1 + member) * GROUPS + group % GROUPS; };
        const bool takes = GROUPS > 1 && chain > 0, gives = GROUPS > 1 && chain + 1 < chains;
        if (takes) barrier_sync(turn(group), 64);
        float4* at = reinterpret_cast<float4*>(shared + GROUPS * RING_BYTES) +
                     member * ROW_TILES * TOKEN_TILES * 32 + lane;
        for (int m = 0; m < ROW_TILES; m++)
            for (int n = 0; n < TOKEN_TILES; n++, at += 32) {
                float4& all = *reinterpret_cast<float4*>(total[m][n]);
                if (GROUPS > 1) all = takes ? *at : float4{};
                for (int i = 0; i < 4; i++)
                    total[m][n][i] = __fadd_rn(total[m][n][i], sum[m][n][i]);
                if (gives) *at = all;
            }
        if (gives) barrier_arrive(turn(group + 1), 64);
    }
    if ((chains - 1) % GROUPS != group) return;  // the group of the last chain has the totals

    store_totals(product, place, rows, tile * TILE_ROWS + g, first_token + 2 * t, total);
}

template <int ROWS, int... SHAPE> DEVICE void linear_block(const Linear& work) {
    extern __shared__ __align__(128) uint8_t shared[];
    // The successor starts when these blocks end: it would take room from those that still wait.
    wait_for_predecessor();
    const Place place = place_in(work.stack, blockIdx.y);
    with_format(place.format, [&](auto format) {
        linear_staged<format, ROWS, SHAPE...>(work.product, place, OwnRows(), blockIdx.x * ROWS,
                                              shared);
    });
}

// As linear_few_8 for any number of rows: ROWS rows of x and COLUMNS of a row block in each block.
// PRECOND: grid (ceil(rows / ROWS), sum of blocks). Lane 4g+t of a warp ends with rows 2t, 2t+1 and
// columns g, g+8 of its 8 x 16 tiles. Reads a weight once per ROWS, x once per COLUMNS (from L2).
#define LINEAR_BLOCK(ROWS, COLUMNS, BLOCKS, WARPS, GROUPS, RING_KB)                              \
    KERNEL __launch_bounds__(32 * WARPS * GROUPS, BLOCKS)                                        \
    linear_##ROWS##x##COLUMNS(const __grid_constant__ Linear work) {                             \
        linear_block<ROWS, COLUMNS, WARPS, GROUPS, RING_KB>(work);                               \
    }
LINEAR_BLOCK(16, 96, 2, 2, 4, 78)
LINEAR_BLOCK(32, 32, 2, 2, 4, 88)
LINEAR_BLOCK(32, 64, 2, 2, 4, 88)
LINEAR_BLOCK(32, 96, 1, 2, 4, 86)
LINEAR_BLOCK(32, 192, 2, 4, 1, 49)
LINEAR_BLOCK(64, 128, 2, 4, 1, 49)
#undef LINEAR_BLOCK

// ---- embed -------------------------------------------------------------------------------------

constexpr int FEED = -1;  // the token is the one that `sample` drew last for the row's slot

// Calls visit(k, weights k and k + 1) for a row of packed tiles, to be multiplied by weight_scale.
// The threads of a block share its columns, up to the end of the last chunk.
template <typename Visit>
DEVICE void for_weights(const uint8_t* packed, int format, int row, int chunks, Visit visit) {
    const int parts = parts_of(chunks), r = row >> 3 & 1;
    with_format(format, [&](auto format) {
        constexpr int FORMAT = format;
        using P = Packed<FORMAT>;
        const uint8_t* tile = packed + (row / TILE_ROWS) * P::tile_bytes(chunks);
        for (int i = threadIdx.x; i < 4 * parts; i += blockDim.x) {
            const int part = i >> 2, t = i & 3, lane = (row & 7) * 4 + t;
            unsigned words[PART_CHUNKS][P::WORDS], scales[P::SCALE_WORDS];
            load_scales<FORMAT>(tile, chunks, part, lane, scales);
            for (int c = 0; c < PART_CHUNKS; c++)
                if (part * PART_CHUNKS + c < chunks)
                    load_chunk<FORMAT>(tile, part, c, lane, words[c]);
            ChunkScales s = {};
#pragma unroll
            for (int c = 0; c < PART_CHUNKS; c++) {
                const int chunk = part * PART_CHUNKS + c;
                if (chunk >= chunks) break;
                decode_scales<FORMAT>(scales, c, s);
                for (int half = 0; half < 2; half++) {
                    unsigned a[2][4];
                    dequantise<FORMAT>(words[c], s, half, a);
                    for (int i = 0; i < 4; i++) {
                        const unsigned bits = r ? a[i / 2][i % 2 * 2 + 1] : a[i / 2][i % 2 * 2];
                        visit(first_k(chunk, t) + 8 * half + 2 * i,
                              __half22float2(as_half2(bits)));
                    }
                }
            }
        }
    });
}

// h [rows, cols] f32 = row tokens[r] of the packed table; another negative token gives zeros.
// PRECOND: grid (rows), 128 threads; table is one row block; cols % 4 = 0.
// One block holds one row. Moves a packed tile's row (whole lines of 16 rows) and 4 cols bytes.
KERNEL embed(const uint8_t* packed, const float* weight_scale, const int* tokens,
             const int* slots, const int* last_tokens, float* h, int format, int cols, int chunks) {
    follow_predecessor();
    const int fed = last_tokens[max(slots[blockIdx.x], 0)];
    const int token = tokens[blockIdx.x] == FEED ? fed : tokens[blockIdx.x];
    h += int64_t(blockIdx.x) * cols;
    if (token < 0) {
        for (int k = threadIdx.x; k < cols; k += blockDim.x) h[k] = 0.0f;
        return;
    }
    const float scale = weight_scale[token];
    for_weights(packed, format, token, chunks, [=](int k, float2 w) {
        if (k < cols) *reinterpret_cast<float2*>(h + k) = {w.x * scale, w.y * scale};
    });
}

// ---------------------------------------------------------------------------------------------
// Norms, RoPE, KV writes, activation and page copies. Memory moves once; sums have a fixed tree.
// ---------------------------------------------------------------------------------------------

constexpr int PAGE = 64;           // tokens of a KV page
constexpr int Q8_BLOCK = 32;       // values along head_dim that share an f16 scale
constexpr int MOST_BLOCKS = 8;     // of a head: 256 values
constexpr float F16_LARGEST = 65504.0f;
enum KvFormat { KV_F32 = 0, KV_F16 = 1, KV_Q8 = 2 };

// Bytes of the K or of the V block of one page and head: [64][head_dim], scales behind.
__host__ __device__ constexpr int kv_block_bytes(int format, int head_dim) {
    return format == KV_F32   ? PAGE * head_dim * 4
           : format == KV_F16 ? PAGE * head_dim * 2
                              : PAGE * head_dim + PAGE * (head_dim / Q8_BLOCK) * 2;
}

// Byte offset of the K block in storage [layer][page][kv head][K|V][block]. V follows it, except in
// latent attention, where V is the first values of K.
DEVICE int64_t kv_offset(int layer, int n_pages, int page, int n_kv_heads, int head,
                         int block_bytes, bool latent = false) {
    return ((int64_t(layer) * n_pages + page) * n_kv_heads + head) * (latent ? 1 : 2) * block_bytes;
}

// Sum, and largest value >= 0, over a block of at most 1024 threads, the same in every thread.
// Whole warps only; the order depends on the block size alone.
__device__ float2 block_sum_and_largest(float sum, float largest) {
    __shared__ float2 of_warp[32];
    const int lane = threadIdx.x & 31;
    sum = warp_sum(sum), largest = warp_largest(largest);
    if (lane == 0) of_warp[threadIdx.x >> 5] = make_float2(sum, largest);
    __syncthreads();
    const float2 mine = lane < blockDim.x >> 5 ? of_warp[lane] : float2{};
    return make_float2(warp_sum(mine.x), warp_largest(mine.y));
}

// Four neighbouring values.
DEVICE float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
DEVICE float4 load4_if(bool real, const float* p) { return real ? load4(p) : float4{}; }
DEVICE float4 operator*(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float4 operator*(float4 a, float b) { return a * float4{b, b, b, b}; }
DEVICE float squares(float4 x) { return (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w); }
DEVICE float largest_of(float4 x) {
    return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
}

// A row that a block goes over twice; values(i) gives those at i .. i + 3 as float4, zeros from
// cols on. A thread holds its first ones in registers; those of a very long row it computes again.
constexpr int HELD = 3;
template <typename Values> struct Row {
    Values values;
    float4 held[HELD];
    float largest = 0.0f;  // |value| of this thread

    DEVICE Row(Values values, int cols) : values(values) {
        for (int n = 0; n < HELD; n++) held[n] = values(4 * (threadIdx.x + n * blockDim.x));
        each(cols, [&](int, float4 x) { largest = fmaxf(largest, largest_of(x)); });
    }
    // visit(i, values at i) for i < end.
    template <typename Visit> DEVICE void each(int end, Visit visit) {
        int i = 4 * threadIdx.x;
        for (int n = 0; n < HELD; n++, i += 4 * blockDim.x)
            if (i < end) visit(i, held[n]);
        for (; i < end; i += 4 * blockDim.x) visit(i, values(i));
    }
    DEVICE float largest_of_all() { return block_sum_and_largest(0.0f, largest).y; }
    // Row blockIdx.x of the pieces x = values * inverse * factor, zeros from cols up to stride;
    // scale[row] = 1 / factor. `most` is largest_of_all.
    DEVICE void store_scaled(float most, float inverse, int stride, uint4* out, float* scale) {
        const float factor = row_scale_factor(most * inverse);
        if (threadIdx.x == 0) scale[blockIdx.x] = 1.0f / factor;
        each(stride, [&](int i, float4 x) {
            x = x * inverse * factor;
            uint2* to = reinterpret_cast<uint2*>(out + piece_at(blockIdx.x, i, stride / CHUNK));
            to[i / 4 % 2] = make_uint2(half2_bits(x.x, x.y), half2_bits(x.z, x.w));
        });
    }
};

// finish(row, largest, inverse): h[rows[blockIdx.x]] * w, the largest |value| of it, and
// 1 / sqrt(mean(h^2) + eps).
template <typename Finish>
__device__ void normalise_row(const float* h, const float* w, const int* rows, int cols, int pitch,
                              float eps, Finish finish) {
    let_successor_start();
    for (int i = 4 * threadIdx.x; i < cols; i += 4 * blockDim.x) prefetch(w + i);
    wait_for_predecessor();
    h += int64_t(rows ? rows[blockIdx.x] : blockIdx.x) * pitch;
    float sum = 0.0f;
    Row row([&](int i) {
        const float4 x = load4_if(i < cols, h + i);
        sum += squares(x);  // the first time counts
        return x * load4_if(i < cols, w + i);
    }, cols);
    const float2 all = block_sum_and_largest(sum, row.largest);
    finish(row, all.y, rsqrtf(all.x / cols + eps));
}

// x[r] = h[rows[r]] / sqrt(mean(h^2) + eps) * w: h f32 [., pitch], of which the first cols count
// -> x f16 [n, stride], scale [n].
// PRECOND: grid (n), at most 1024 threads; rows null = 0..n-1; cols, pitch % 4 = 0; stride = cols
// up to 128s. One block holds one row. Moves 4 cols + 2 stride bytes a row.
KERNEL rmsnorm(const float* h, const float* w, const int* rows, uint4* x, float* scale, int cols,
               int pitch, int stride, float eps) {
    normalise_row(h, w, rows, cols, pitch, eps, [=](auto& row, float largest, float inverse) {
        row.store_scaled(largest, inverse, stride, x, scale);
    });
}

// angles[r] = cos | sin of positions[r] * frequencies[rope_sets[r]], times magnitude.
// PRECOND: grid (ceil(rows * pairs / 128)), 128 threads; frequencies f64 [sets, pairs].
// One thread holds one pair; the angle is f64, since f32 loses 1e-3 rad at position 16384.
KERNEL rope_angles(const int* positions, const int* rope_sets, const double* frequencies,
                   float* angles, int rows, int pairs, float magnitude) {
    wait_for_predecessor();
    let_successor_start();  // when K and V of steps before are there: see attention_tile
    const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / pairs, pair = i % pairs;
    if (row >= rows) return;
    constexpr double INVERSE_PI = 0.31830988618379067154;
    double sine, cosine;  // in units of pi: the reduction is exact and needs no local memory
    sincospi(positions[row] * frequencies[rope_sets[row] * pairs + pair] * INVERSE_PI, &sine,
             &cosine);
    angles[int64_t(2 * row) * pairs + pair] = float(cosine * magnitude);
    angles[int64_t(2 * row + 1) * pairs + pair] = float(sine * magnitude);
}

// What rope_kv and rope_latent work on: heads of q, then of K, then of V, of each row.
struct Heads {
    const float* angles;  // [rows, cosines | sines, rope_dim / 2]
    char *q, *pages;      // q [rows, H, D] f16, f32 if KV is f32
    const int *page_table, *slots, *positions;
    Int layer, n_pages, max_pages, n_heads, n_kv_heads, head_dim, rope_dim, neox, format;
    float eps;
};

// Where the values of a head go: rows of head_dim values from `block` on, there row `token`.
struct HeadPlace {
    char* block;
    int format, token;  // token < 0: nowhere, since the row has no slot
};

DEVICE HeadPlace place_of(const Heads& work, int row, int head, bool latent) {
    const int kv_head = head - work.n_heads, is_v = kv_head >= work.n_kv_heads;
    if (kv_head < 0) {
        const bool f32 = work.format == KV_F32;
        const int64_t at = (int64_t(row) * work.n_heads + head) * work.head_dim;
        return {work.q + at * (f32 ? 4 : 2), f32 ? KV_F32 : KV_F16, 0};
    }
    const int slot = work.slots[row], position = work.positions[row];
    const int page =
        slot < 0 ? 0 : work.page_table[int64_t(slot) * work.max_pages + position / PAGE];
    const int bytes = kv_block_bytes(work.format, work.head_dim);
    return {work.pages + kv_offset(work.layer, work.n_pages, page, work.n_kv_heads,
                                   kv_head - is_v * work.n_kv_heads, bytes, latent) + is_v * bytes,
            work.format, slot < 0 ? -1 : position % PAGE};
}

// Stores value d (lane d % 32 of a whole warp) of a head. Values that f16 cannot hold are cut at
// its ends: a page never holds Inf or NaN, whoever reads it later.
DEVICE void store_value(const HeadPlace& to, int head_dim, int d, float x) {
    if (to.token < 0) return;
    const int at = to.token * head_dim + d;
    if (to.format == KV_F32) {
        reinterpret_cast<float*>(to.block)[at] = x;
        return;
    }
    x = fminf(fmaxf(x, -F16_LARGEST), F16_LARGEST);
    if (to.format == KV_F16) {
        reinterpret_cast<__half*>(to.block)[at] = __float2half_rn(x);
        return;
    }
    // 512 * 127 is the largest product that f16 holds
    const __half scale = __float2half_rn(fminf(__fdiv_rn(warp_max(fabsf(x)), 127.0f), 512.0f));
    const float step = __half2float(scale);
    const float n = step == 0.0f ? 0.0f : rintf(__fdiv_rn(x, step));
    reinterpret_cast<int8_t*>(to.block)[at] = int8_t(fminf(fmaxf(n, -127.0f), 127.0f));
    if (d % Q8_BLOCK == 0)
        reinterpret_cast<__half*>(to.block + PAGE * head_dim)[at / Q8_BLOCK] = scale;
}

// How value d of a head turns: by its pair's angle, with the pair's other value.
struct Turn {
    int pair, other;
};
DEVICE Turn turn_of(int d, const Heads& work) {
    const int pairs = work.rope_dim / 2, distance = work.neox ? pairs : 1;
    const bool first = work.neox ? d < pairs : d % 2 == 0;
    return {!work.neox ? d / 2 : first ? d : d - pairs, first ? d + distance : d - distance};
}
DEVICE float rotated(const float* x, int d, int other, float cosine, float sine) {
    const float turned = x[other] * sine;
    return x[d] * cosine + (other > d ? -turned : turned);
}

// rope_kv for heads of up to BLOCKS times 32 values.
template <int BLOCKS>
DEVICE void rope_heads(const float* qkv, const float* q_norm, const float* k_norm, int gated,
                       const Heads& work) {
    __shared__ float heads[4][Q8_BLOCK * BLOCKS];
    const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int n_heads = work.n_heads, n_kv_heads = work.n_kv_heads, head_dim = work.head_dim;
    const int head = blockIdx.y * 4 + warp;  // q heads, then k heads, then v heads
    if (head >= n_heads + 2 * n_kv_heads) return;
    const bool is_q = head < n_heads, is_v = head >= n_heads + n_kv_heads;
    const HeadPlace place = place_of(work, row, head, false);
    const float* norm = is_v ? nullptr : is_q ? q_norm : k_norm;
    const int gates = gated * n_heads, pieces = n_heads + gates + 2 * n_kv_heads;
    qkv += (int64_t(row) * pieces + head + min(head * gated, gates)) * head_dim;
    // All that is read is on its way at once: a chain of loads takes longer than moving the bytes.
    float x[BLOCKS] = {}, gain[BLOCKS], cosine[BLOCKS], sine[BLOCKS], sum = 0.0f;
    Turn turn[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        const int d = 32 * i + lane;
        gain[i] = norm && d < head_dim ? norm[d] : 1.0f;
        turn[i] = turn_of(d, work);
        asm volatile("" : "+r"(turn[i].pair), "+r"(turn[i].other));  // now, not after the wait
    }
    const int turning = is_v ? 0 : work.rope_dim;
    const float *cosines = work.angles + int64_t(row) * work.rope_dim,
                *sines = cosines + work.rope_dim / 2;
    asm volatile("" : "+l"(qkv), "+l"(cosines), "+l"(sines));
    wait_for_predecessor();
    for (int i = 0; i < BLOCKS; i++) {
        const int d = 32 * i + lane;
        if (d < head_dim) x[i] = qkv[d];
        if (d < turning) cosine[i] = cosines[turn[i].pair], sine[i] = sines[turn[i].pair];
    }
    for (int i = 0; i < BLOCKS; i++) sum += x[i] * x[i];
    const float inverse = norm ? rsqrtf(warp_sum(sum) / head_dim + work.eps) : 1.0f;
    for (int i = 0; i < BLOCKS; i++) {
        x[i] = x[i] * inverse * gain[i];
        heads[warp][32 * i + lane] = x[i];
    }
    __syncwarp();
    for (int i = 0; i < BLOCKS; i++) {
        const int d = 32 * i + lane;
        if (d < turning) x[i] = rotated(heads[warp], d, turn[i].other, cosine[i], sine[i]);
    }
#pragma unroll
    for (int i = 0; i < BLOCKS && place.format == KV_F16; i++)
        if (32 * i + lane < head_dim) store_value(place, head_dim, 32 * i + lane, x[i]);
#pragma unroll
    for (int i = 0; i < BLOCKS && place.format != KV_F16; i++) {
        if (32 * i + lane >= head_dim) break;
        store_value(place, head_dim, 32 * i + lane, x[i]);
    }
}

// qkv f32 [rows, (H + 2 H_kv) D] -> q [rows, H D] f16 (f32 if KV is f32), K and V into their pages.
// q and k: RMSNorm over the head where norm vectors are given, then rotation of rope_dim values.
// Gated: D gates follow each head of q; they are left to sigmoid_gate.
// PRECOND: grid (rows, ceil((H + 2 H_kv) / 4)), 128 threads; D <= 256, for q8 in blocks of 32.
// One warp holds one head. Moves each value once; rows with slot < 0 write no K and V.
KERNEL __launch_bounds__(128, 8)
rope_kv(const float* qkv, const float* q_norm, const float* k_norm, int gated,
        const __grid_constant__ Heads work) {
    let_successor_start();
    // The fewer instructions, the fewer are fetched while all wait for them.
    if (work.head_dim <= Q8_BLOCK * MOST_BLOCKS / 2)
        rope_heads<MOST_BLOCKS / 2>(qkv, q_norm, k_norm, gated, work);
    else
        rope_heads<MOST_BLOCKS>(qkv, q_norm, k_norm, gated, work);
}

// Page `target` of every layer becomes a copy of page `source`.
// PRECOND: grid (ceil(page_bytes / 4096), layers), 256 threads; page_bytes a multiple of 16.
// One thread holds 16 bytes. Moves 2 page_bytes a layer.
KERNEL copy_page(char* pages, int n_pages, int page_bytes, int source, int target) {
    follow_predecessor();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= page_bytes / 16) return;
    char* layer = pages + int64_t(blockIdx.y) * n_pages * page_bytes;
    reinterpret_cast<uint4*>(layer + int64_t(target) * page_bytes)[i] =
        reinterpret_cast<const uint4*>(layer + int64_t(source) * page_bytes)[i];
}

// ---------------------------------------------------------------------------------------------
// Attention: 16 or 32 queries of a sequence and KV head against its pages, on the tensor cores
// ---------------------------------------------------------------------------------------------
// A tile is up to 16, in a wide kernel 32, (token, query head of the group) pairs that share one KV
// head. Keys go in segments of 256 = four pages of 64. Inside a segment the running maximum moves
// once a page; segments are folded in index order, here or by attention_merge, in the same
// arithmetic. So what a row gets does not depend on who else is in the tile, nor on how segments
// are spread over blocks:
//   score(key) = q . k in one accumulator, head_dim ascending 16 at a time
//   m_i = max(m_i-1, scores of page i * scale), p = f16(2^(score * scale - m_i)), masked: 0
//   o   = o * 2^(m_i-1 - m_i) + P V, keys ascending 16 at a time;  l is one more column, V = 1
// The four warps of a block take a page each for the scores, 32 or 64 columns each for the values;
// eight warps take half a page each. Which keys and columns sit in which slot of an mma is free as
// long as both operands agree, so nothing has to be transposed: a lane reads 4 to 16 bytes of K or
// V at a time, from a page or from the copy that its warp made of a part of it.

constexpr int SEGMENT_PAGES = 4;
constexpr int ATTENTION_WARPS = SEGMENT_PAGES;
constexpr unsigned HALF_ONES = 0x3c003c00u;
constexpr int RING = 2;  // rounds of K or V on their way to a warp
constexpr int NO_END = 0x7fffffff;

// 2^x to 22 bits, 0 for -inf. One instruction everywhere: it must give the same bits everywhere.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^(from - to), where both may be -inf (nothing seen yet).
DEVICE float rescale_factor(float from, float to) {
    return from == to ? 1.0f : exp2_fast(__fsub_rn(from, to));
}

// Softmax state of one row: maximum and sum; `fold` adds a later part and returns the factors of
// the two value vectors.
struct Softmax {
    float m, l;  // -inf and 0 at first
    DEVICE float2 fold(float part_m, float part_l) {
        const float largest = fmaxf(m, part_m);
        const float2 factors = {rescale_factor(m, largest), rescale_factor(part_m, largest)};
        m = largest;
        l = __fmaf_rn(part_l, factors.y, __fmul_rn(l, factors.x));
        return factors;
    }
};

DEVICE float fold_value(float total, float part, float2 factors) {
    return __fmaf_rn(part, factors.y, __fmul_rn(total, factors.x));
}

// The same of a product's two columns of rows g and g + 8.
DEVICE void fold_rows(float4& total, const float (&part)[4], float2 up, float2 down) {
    total = {fold_value(total.x, part[0], up), fold_value(total.y, part[1], up),
             fold_value(total.z, part[2], down), fold_value(total.w, part[3], down)};
}

// The factor of a row's values: zero where nothing was visible (padding), so that it yields zeros.
DEVICE float inverse_sum(float l) { return l == 0.0f ? 0.0f : __frcp_rn(l); }

// Adding zero makes -0 and 0 one: they differ by who was masked.
DEVICE float normalised(float value, float inverse) { return __fmaf_rn(value, inverse, 0.0f); }

// P of 16 keys as an A fragment, from the scores of two products and the maxima of rows g, g + 8.
DEVICE uint4 weights_of(const float (&even)[4], const float (&odd)[4], const float (&m)[2]) {
    const auto pair = [](float x, float y, float m) {
        return half2_bits(exp2_fast(__fsub_rn(x, m)), exp2_fast(__fsub_rn(y, m)));
    };
    return make_uint4(pair(even[0], even[1], m[0]), pair(even[2], even[3], m[1]),
                      pair(odd[0], odd[1], m[0]), pair(odd[2], odd[3], m[1]));
}

// Rows of BYTES of K or V, of consecutive tokens, as they lie in shared memory: so that those that
// lanes read at once, of K for the slots of a product and of V for those of keys, meet all banks.
template <int BYTES, bool KEY> struct TokenRows {
    static DEVICE int at(int token, int chunk) {  // of 16 bytes
        const int row = KEY ? (token & ~6) | (token & 2) << 1 | (token & 4) >> 1
                            : (token & ~15) | (token & 3) << 2 | (token >> 2 & 3);
        const int swap = BYTES == 128 ? (row & 1) * 4 + (row & 2) : BYTES == 64 ? row & 2 : 0;
        return row * BYTES + (chunk ^ swap) * 16;
    }
    // A warp copies TOKENS of them, a 16th of them at a time and none behind token `last`. Only
    // copies past the L1 cache may come before wait_for_predecessor: what it holds may be old.
    template <int TOKENS>
    static DEVICE void copy(unsigned to, const char* from, int pitch, int last, int end) {
        constexpr int CHUNKS = BYTES / 16, AT_ONCE = 32 / CHUNKS;
        const int lane = threadIdx.x & 31, first = at(lane / CHUNKS, lane % CHUNKS);
        from += lane / CHUNKS * pitch + min(lane % CHUNKS * 16, end);
        for (int i = 0; i < TOKENS; i += AT_ONCE) {
            if (i / 16 * 16 > last) break;
            const int other = at(i, 0);
            copy_async<16>(to + (first ^ other % BYTES) + other / BYTES * BYTES, from + i * pitch);
        }
    }
};

// Where a thread starts to read K or V: in the block of a page at value d of a token.
struct KvPlace {
    const char* values;
    const __half* scales;
};

template <bool Q8, int HD> DEVICE KvPlace kv_place(const char* block, int token, int d) {
    const int at = token * HD + d;
    return {block + at * (Q8 ? 1 : 2),
            reinterpret_cast<const __half*>(block + PAGE * HD) + at / Q8_BLOCK};
}

// N (4 or 8) neighbouring values of one token as they lie in a page, expanded to f16 when needed,
// so that waiting for memory overlaps with other work.
template <bool Q8, int N> struct Values {
    static constexpr int WORDS = Q8 ? N / 4 : N / 2;
    struct alignas(4 * WORDS) Words { unsigned word[WORDS]; };
    Words raw;
    __half scale;

    // `offset` in values is a multiple of Q8_BLOCK and known when compiled.
    DEVICE void load(const KvPlace& place, int offset = 0) {
        raw = *reinterpret_cast<const Words*>(place.values + offset * (Q8 ? 1 : 2));
        if constexpr (Q8) scale = place.scales[offset / Q8_BLOCK];
    }

    DEVICE void expand(unsigned (&half2s)[N / 2]) const {
        if constexpr (!Q8) {
            for (int i = 0; i < WORDS; i++) half2s[i] = raw.word[i];
        } else {
            // byte b + 128 behind 0x64 is the f16 1024 + (b + 128): exact, then one rounding
            const __half2 offset = __half2half2(__ushort_as_half(0x6480));  // 1152
            const __half2 scales = __half2half2(scale);
            for (int i = 0; i < N / 2; i++) {
                const unsigned bytes = __byte_perm(raw.word[i / 2] ^ 0x80808080u, 0x64646464u,
                                                   i % 2 ? 0x4342 : 0x4140);
                half2s[i] = as_word(__hmul2_rn(__hsub2(as_half2(bytes), offset), scales));
            }
        }
    }
};

DEVICE void mma_fragment(float (&d)[4], uint4 a, unsigned b0, unsigned b1) {
    const unsigned words[4] = {a.x, a.y, a.z, a.w};
    mma_16x8x16(d, words, b0, b1);
}

struct Attention {
    const __half* q;
    uint4* out;
    float* part_values;
    float2* part_states;
    const char* pages;
    const int *page_table, *tiles;
    Int layer, n_pages, max_pages, max_segments, n_heads, n_kv_heads, stride;
    alignas(8) float scale;
    Int span_rows;  // of a block of attention_prompt
};

// Where a block's struct T lies: at the start of what a launch asks for, or in memory of its own.
template <class T, bool DYNAMIC> DEVICE T& shared_memory() {
    if constexpr (DYNAMIC) {
        extern __shared__ __align__(128) uint8_t shared[];
        return *reinterpret_cast<T*>(shared);
    } else {
        __shared__ T fixed;
        return fixed;
    }
}

// out = softmax(q K^T * scale) V, rows of all tiles: q f16 [rows, H KW] -> f16 [rows, stride]. A
// head has KW values of K and VW of V. VW < KW: latent attention; V is the beginning of K, H_kv is
// one, and out is [rows H, stride].
// PRECOND: grid (tiles, H_kv * shares, splits), 32 WARPS threads; tiles int32 (first row, rows,
// slot, position); rows of a tile * H / H_kv <= 16 TILES; scale = attn_scale * log2(e). Latent:
// grid (tiles, ceil(H / 16) * shares, splits), and a tile has one row where H > 16. Shared memory
// where STAGED: struct Shared, then RING rounds of ROUND_BYTES a warp.
// Block z holds segments z, z + splits, ... With one split it folds them; with more it stores each
// in part_values f32 [rows, H, max_segments, VW] and part_states (m, l) for attention_merge.
// Reads K and V of a tile's context once (latent: V a second time, from the cache); thread (g, t)
// of a warp holds rows g, g + 8 of a product.
template <bool Q8, int KW, int VW, int TILES, int WARPS>
DEVICE void attention_tile(const Attention& work) {
    constexpr bool LATENT = VW < KW;
    constexpr int PAGE_WARPS = WARPS / SEGMENT_PAGES;    // that share the scores of a page
    constexpr int KEYS = PAGE / PAGE_WARPS;              // whose scores a warp computes
    constexpr int COLUMNS = VW <= 32 * WARPS ? 32 : 64;  // of the values, per warp
    constexpr int NEIGHBOURS = COLUMNS / 8;              // columns whose V a thread loads
    constexpr int STEPS = PAGE / 16;                     // mma steps over the keys of a page
    // Pieces of 32 values of K and q. Half of the last may be missing: q has zeros there, and what
    // is read of K is the next key or, behind the last one, V; all of that is finite.
    constexpr int PIECES = (KW + 31) / 32;
    // K and V of single tiles come through a ring in shared memory. Wide and latent ones, which
    // compute more for each byte, load into registers: with the ring prompts of q8 take 1.4 times
    // as long, latent attention 1.2 times (H200).
    constexpr bool STAGED = !LATENT && TILES == 1;
    // A round has K of 32 keys, LINE pieces of each: whole 128-byte lines where heads have them
    // (H200, 64 rows x 1024 tokens: 3.6 TB/s, and 2.7 by half lines); or V of ROUND_STEPS steps.
    constexpr int ROUND_BYTES = 4096, SCALES_AT = ROUND_BYTES / 2;  // q8: scales behind values
    constexpr int LINE = KW % 64 == 0 && TILES == 1 ? 2 : 1, LINES = PIECES / LINE;
    constexpr int ROUND_STEPS = 16 / NEIGHBOURS, PAGE_ROUNDS = STEPS / ROUND_STEPS;
    constexpr int AHEAD = TILES > 1 ? 1 : 2;  // steps whose V is on its way to registers
    constexpr int KEY_ROUNDS = KEYS / 32 * LINES;  // of a segment
    constexpr int ROWS = 16 * TILES;
    constexpr int SIZE = Q8 ? 1 : 2, SCALES = KW / Q8_BLOCK;  // of a token
    using Key = Values<Q8, 8>;
    using Value = Values<Q8, NEIGHBOURS>;
    using KeyRows = TokenRows<32 * LINE * SIZE, true>;
    using ValueRows = TokenRows<COLUMNS * SIZE, false>;
    // Each thread's folded segments are touched once in 256 keys: they lie in shared memory where
    // there is room, otherwise in registers.
    constexpr bool ROOM = !STAGED && VW <= 256;
    constexpr int HOLDERS = ROOM ? 32 * WARPS : 1;
    struct Shared {
        uint4 queries[TILES][2 * PIECES][32];             // A fragments, one uint4 a lane
        uint4 weights[TILES][SEGMENT_PAGES * STEPS][32];  // P, likewise
        float warp_largest[2][WARPS][ROWS];               // two: the next segment may be ahead
        int place[ROWS], visible[ROWS];  // of each row: (row, head) of q, last position it sees
        float4 totals[ROOM ? TILES * NEIGHBOURS : 1][HOLDERS];
        Softmax softmaxes[ROOM ? 2 * TILES : 2][HOLDERS];
    };
    Shared& shared = shared_memory<Shared, STAGED>();
    auto& [queries, weights, warp_largest, place, visible, totals, softmaxes] = shared;
    char* ring = reinterpret_cast<char*>(&shared + 1);
    float4 own_total[TILES * NEIGHBOURS];
    Softmax own_softmax[2 * TILES];
    const auto total = [&](int r, int n) -> float4& {
        const int i = r * NEIGHBOURS + n;
        return ROOM ? totals[i][threadIdx.x] : own_total[i];
    };
    const auto softmax = [&](int i) -> Softmax& {
        return ROOM ? softmaxes[i][threadIdx.x] : own_softmax[i];
    };
    for (int n = 0; n < TILES * NEIGHBOURS; n++) total(n / NEIGHBOURS, n % NEIGHBOURS) = {};
    for (int i = 0; i < 2 * TILES; i++) softmax(i) = {-INFINITY, 0.0f};

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    // A block has `group` query heads of each token: of one KV head, or, latent, up to ROWS of all.
    const int n_heads = work.n_heads, blocks = LATENT ? (n_heads - 1) / ROWS + 1 : work.n_kv_heads;
    const int block_y = TILES > 1 ? blockIdx.y : blockIdx.y % blocks;
    const int kv_head = LATENT ? 0 : block_y;
    // A multiprocessor reads 20 bytes a cycle (H200). Where many are idle, blocks share a tile:
    // each computes all scores, but the values of some warps' columns only.
    const int shares = TILES > 1 ? 1 : gridDim.y / blocks, share = blockIdx.y / blocks;
    const int group = LATENT ? min(ROWS, n_heads - ROWS * block_y) : n_heads / work.n_kv_heads;
    // A prompt's last tiles see most: first.
    const int* tiles = work.tiles + 4 * (gridDim.x - 1 - blockIdx.x);
    const int first_row = tiles[0], n_rows = tiles[1], slot = tiles[2], first_position = tiles[3];
    const int last_position = slot < 0 ? -1 : first_position + n_rows - 1;
    const int tile_pages = last_position / PAGE + (last_position >= 0);
    // The tile before may hold earlier tokens of this step: then none are known to be older.
    const bool continues = blockIdx.x + 1 < gridDim.x && tiles[-2] == slot;
    constexpr int BLOCK_BYTES = kv_block_bytes(Q8 ? KV_Q8 : KV_F16, KW);
    constexpr int HEAD_BYTES = BLOCK_BYTES * (LATENT ? 1 : 2);
    const char* layer = work.pages + kv_offset(work.layer, work.n_pages, 0, work.n_kv_heads,
                                               kv_head, BLOCK_BYTES, LATENT);
    const int* table = work.page_table + int64_t(max(slot, 0)) * work.max_pages;

    const auto keys_of = [=](int page) {
        return layer + int64_t(table[page]) * work.n_kv_heads * HEAD_BYTES;
    };
    const auto values_of = [=](int page) { return keys_of(page) + (LATENT ? 0 : BLOCK_BYTES); };

    if (threadIdx.x < ROWS) {
        const int token = threadIdx.x / group;
        const int head = block_y * (LATENT ? ROWS : group) + threadIdx.x % group;
        place[threadIdx.x] = token < n_rows ? (first_row + token) * n_heads + head : -1;
        visible[threadIdx.x] = token < n_rows && slot >= 0 ? first_position + token : -1;
    }
    constexpr int COLUMN_WARPS = (VW + COLUMNS - 1) / COLUMNS;
    const bool has_columns = warp < COLUMN_WARPS && warp * shares / COLUMN_WARPS == share;
    // Some columns of the last warp may not be there: they repeat others, and are not stored.
    constexpr bool WHOLE = VW % COLUMNS == 0;
    int column = warp * COLUMNS + NEIGHBOURS * g;  // first one whose V this thread takes
    if (!WHOLE) column = min(column, VW - NEIGHBOURS);
    const int ending = WHOLE ? COLUMNS * SIZE : min(COLUMNS, VW - warp * COLUMNS) * SIZE - 16;
    const bool has_sums = has_columns && (WHOLE || warp * COLUMNS + 2 * NEIGHBOURS * t < VW);
    const int page_of_warp = warp / PAGE_WARPS, first_key = warp % PAGE_WARPS * KEYS;
    const int own_key = 4 * (g / 2) + g % 2;  // slot g of a product, see `score`

    // The rounds of a warp, fetched RING ahead of their use: in each segment of the block those of
    // its keys, then those of its columns of V. Lane i has the number of page i.
    int far_segment = blockIdx.z, far_round = 0, far_end = 0, far_pages = 0;
    int far_slot = 0, slot_now = 0;
    const auto enter_far_segment = [&] {
        const int first = far_segment * SEGMENT_PAGES;
        const int here = min(SEGMENT_PAGES, tile_pages - first);
        far_round = page_of_warp < here ? 0 : KEY_ROUNDS;
        far_end = KEY_ROUNDS + (has_columns ? here * PAGE_ROUNDS : 0);
        far_pages = lane < here ? table[first + lane] : 0;
    };
    const auto slot_at = [&](int slot) { return ring + (slot * WARPS + warp) * ROUND_BYTES; };
    // A round with a position from `end` on is not fetched.
    const auto fetch_round = [&](int end) {
        if (far_round < far_end) {
            const bool values = far_round >= KEY_ROUNDS;
            const int round = far_round - values * KEY_ROUNDS;
            const int page = values ? round / PAGE_ROUNDS : page_of_warp;
            const int token = values ? round % PAGE_ROUNDS * ROUND_STEPS * 16
                                     : first_key + round / LINES * 32;
            const int d = values ? warp * COLUMNS : round % LINES * LINE * 32;
            const int tokens = values ? ROUND_STEPS * 16 : 32;
            const int position = (far_segment * SEGMENT_PAGES + page) * PAGE + token;
            if (position + tokens > end) return false;
            const int64_t number = __shfl_sync(ALL_LANES, far_pages, page);
            const char* block = layer + number * work.n_kv_heads * HEAD_BYTES;
            if (values) block += BLOCK_BYTES;
            const char* from = block + (token * KW + d) * SIZE;
            const unsigned to = __cvta_generic_to_shared(slot_at(far_slot));
            const int last = last_position - position;
            if (values)
                ValueRows::template copy<ROUND_STEPS * 16>(to, from, KW * SIZE, last, ending);
            else
                KeyRows::template copy<32>(to, from, KW * SIZE, last, ROUND_BYTES);
            const char* scales = block + PAGE * KW + token * SCALES * 2;
            for (int i = 16 * lane; Q8 && i < tokens * SCALES * 2; i += 16 * 32)
                copy_async<16>(to + SCALES_AT + i, scales + i);
            if (++far_round == far_end) far_segment += gridDim.z, enter_far_segment();
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        far_slot = (far_slot + 1) % RING;
        return true;
    };
    // The next round of this warp has come.
    const auto take_round = [&] {
        asm volatile("cp.async.wait_group %0;" ::"n"(RING - 1) : "memory");
        __syncwarp();
        const char* slot = slot_at(slot_now);
        slot_now = (slot_now + 1) % RING;
        return slot;
    };
    const auto scale_in = [&](const char* slot, int token, int d) {
        return reinterpret_cast<const __half*>(slot + SCALES_AT) + token * SCALES + d / Q8_BLOCK;
    };
    // Where in a round this thread finds its values of K's pieces and of V.
    int key_at[LINE], value_at = NEIGHBOURS * g * SIZE;
    for (int i = 0; i < LINE; i++)
        key_at[i] = KeyRows::at(own_key, (32 * i + 8 * t) * SIZE / 16) + 8 * t * SIZE % 16;
    value_at = ValueRows::at(4 * t, value_at / 16) + value_at % 16;
    // K and V of steps before are there: rope_angles lets what follows start when they are. What
    // has no room in the ring, or gets this step's token, comes as far as the L2 cache.
    if (STAGED) enter_far_segment();
    if (STAGED && PAGE_WARPS > 1 && far_round < far_end) {
        const int pages = min(SEGMENT_PAGES, tile_pages - SEGMENT_PAGES * int(blockIdx.z));
        for (int i = lane; has_columns && i < pages * PAGE; i += 32) {
            const int64_t page = __shfl_sync(ALL_LANES, far_pages, i / PAGE);
            prefetch(layer + page * work.n_kv_heads * HEAD_BYTES + BLOCK_BYTES +
                     (i % PAGE * KW + warp * COLUMNS) * SIZE);
        }
        const int64_t page = __shfl_sync(ALL_LANES, far_pages, page_of_warp);
        if (KEY_ROUNDS > RING || page_of_warp == pages - 1)
            for (int i = 128 * lane; i < KEYS * KW * SIZE; i += 32 * 128)
                prefetch(layer + page * work.n_kv_heads * HEAD_BYTES + first_key * KW * SIZE + i);
    }
    constexpr int SHARE = (TILES * PIECES + WARPS - 1) / WARPS;  // of the queries, for a warp
    uint4 query[SHARE][2] = {};
    int ahead = 0;
#pragma unroll 1
    for (int end = continues ? 0 : first_position;; end = NO_END) {
        while (STAGED && ahead < RING && fetch_round(end)) ahead++;
        if (end == NO_END) break;
        __syncthreads();
        wait_for_predecessor();
        for (int n = 0; n < 2 * SHARE; n++) {
            const int at = warp + n / 2 * WARPS, i = at % PIECES;
            const int row = at / PIECES * 16 + g + n % 2 * 8;
            if (at < TILES * PIECES && visible[row] >= 0 && (KW % 32 == 0 || 32 * i + 8 * t < KW))
                query[n / 2][n % 2] = *reinterpret_cast<const uint4*>(
                    work.q + int64_t(place[row]) * KW + 32 * i + 8 * t);
        }
    }
    for (int n = 0; n < SHARE; n++) {
        const int at = warp + n * WARPS;
        const uint4 x = query[n][0], y = query[n][1];
        if (at >= TILES * PIECES) break;
        queries[at / PIECES][2 * (at % PIECES)][lane] = make_uint4(x.x, y.x, x.y, y.y);
        queries[at / PIECES][2 * (at % PIECES) + 1][lane] = make_uint4(x.z, y.z, x.w, y.w);
    }
    __syncthreads();

    const int n_segments = (tile_pages + SEGMENT_PAGES - 1) / SEGMENT_PAGES;
    int turn = 0;
    for (int segment = blockIdx.z; segment < n_segments; segment += gridDim.z, turn ^= 1) {
        const int first_page = segment * SEGMENT_PAGES;
        const int here = min(SEGMENT_PAGES, tile_pages - first_page);

        // Scores of this warp's keys: slots 2t, 2t + 1 of product n are keys
        // 16 (n / 2) + 4t + 2 (n % 2) and the next one.
        float score[TILES][KEYS / 8][4] = {};
        float largest[2 * TILES];  // of rows g + 8 i
        for (int i = 0; i < 2 * TILES; i++) largest[i] = -INFINITY;
        const auto add_scores = [&](int n, int piece, const Key& key) {
            unsigned b[4];
            key.expand(b);
            for (int r = 0; r < TILES; r++) {
                mma_fragment(score[r][n], queries[r][2 * piece][lane], b[0], b[1]);
                mma_fragment(score[r][n], queries[r][2 * piece + 1][lane], b[2], b[3]);
            }
        };
        const auto token_of = [](int n) { return 16 * (n / 2) + 2 * (n % 2); };
        if (page_of_warp < here) {
            Key key[STEPS][LINE];
            if constexpr (STAGED) {
#pragma unroll 1
                for (int half = 0; half < KEYS / 32; half++) {
#pragma unroll 1
                    for (int i = 0; i < PIECES; i += LINE) {
                        const char* slot = take_round();
                        for (int n = 0; n < STEPS; n++)
                            for (int piece = 0; piece < LINE; piece++)
                                key[n][piece].load(
                                    {slot + key_at[piece] + KeyRows::at(token_of(n), 0),
                                     scale_in(slot, own_key + token_of(n), 32 * (i + piece))});
                        __syncwarp();
                        fetch_round(NO_END);
                        for (int n = 0; n < STEPS; n++)
                            for (int piece = 0; piece < LINE; piece++)
                                add_scores(n, i + piece, key[n][piece]);
                    }
                    // The halves change places: after two they are in order.
                    for (int i = 0; i < STEPS * 4 && KEYS > 32; i++) {
                        float &now = score[0][i / 4][i % 4], x = now;
                        float& other = score[0][(STEPS + i / 4) % (KEYS / 8)][i % 4];
                        now = other, other = x;
                    }
                }
            } else {
                KvPlace from = kv_place<Q8, KW>(keys_of(first_page + page_of_warp),
                                                first_key + own_key, 8 * t);
                auto fetch_key = [&](int n, int piece, const KvPlace& from) {
                    key[n][piece].load(from, token_of(n) * KW + 32 * piece);
                };
                for (int n = 0; n < STEPS; n++)
                    for (int piece = 0; piece < LINE; piece++) fetch_key(n, piece, from);
                for (int half = 0; half < KEYS / 32; half++)
#pragma unroll 1
                    for (int i = 0; i < PIECES; i += LINE) {
                        const int ahead = i + LINE < PIECES ? 32 * LINE : 32 * KW - i * 32;
                        from = {from.values + ahead * SIZE, from.scales + ahead / 32};
                        for (int n = 0; n < STEPS; n++)
                            for (int piece = 0; piece < LINE; piece++) {
                                add_scores(STEPS * half + n, i + piece, key[n][piece]);
                                if (half + 1 < KEYS / 32 || i + LINE < PIECES)
                                    fetch_key(n, piece, from);
                            }
                    }
            }
            const int position = (first_page + page_of_warp) * PAGE + first_key + 4 * t;
            for (int i = 0; i < 2 * TILES; i++) {
                const int last = visible[g + 8 * i];
                for (int n = 0; n < KEYS / 8; n++)
                    for (int e = 0; e < 2; e++) {
                        const int at = position + 16 * (n / 2) + 2 * (n % 2) + e;
                        float& x = score[i / 2][n][i % 2 * 2 + e];
                        x = at <= last ? __fmul_rn(x, work.scale) : -INFINITY;
                        largest[i] = fmaxf(largest[i], x);
                    }
                largest[i] = warp_max(largest[i], 4);
            }
        }
        if (t == 0)
            for (int i = 0; i < 2 * TILES; i++) warp_largest[turn][warp][g + 8 * i] = largest[i];

        // The first values are on their way while the warps exchange maxima and weights.
        Value value[STAGED ? ROUND_STEPS : AHEAD][4];
        auto fetch_value = [&](int step, const KvPlace& from) {
            for (int k = 0; k < 4; k++)
                value[step % AHEAD][k].load(from, (16 * (step % STEPS) + k) * KW);
        };
        KvPlace values = {};
        if (!STAGED && has_columns) {
            values = kv_place<Q8, KW>(values_of(first_page), 4 * t, column);
            for (int step = 0; step < AHEAD; step++) fetch_value(step, values);
        }
        __syncthreads();

        if (page_of_warp < here) {
            for (int r = 0; r < TILES; r++) {
                float m[2] = {-INFINITY, -INFINITY};  // up to this warp's page
                for (int other = 0; other < WARPS; other++)
                    for (int i = 0; i < 2; i++)
                        if (other / PAGE_WARPS <= page_of_warp)
                            m[i] = fmaxf(m[i], warp_largest[turn][other][16 * r + g + 8 * i]);
                for (int i = 0; i < 2; i++)
                    if (m[i] == -INFINITY) m[i] = 0.0f;  // nothing visible yet: weights are 2^-inf
                for (int step = 0; step < KEYS / 16; step++)
                    weights[r][warp * (KEYS / 16) + step][lane] =
                        weights_of(score[r][2 * step], score[r][2 * step + 1], m);
            }
        }
        __syncthreads();
        if (!has_columns) continue;

        // Values: slots 2t, 2t + 1, 2t + 8, 2t + 9 are keys 4t .. 4t + 3 of a step, and slot g of
        // product n is column NEIGHBOURS * g + n of this warp.
        float sum[TILES][4] = {}, o[TILES][NEIGHBOURS][4] = {}, m[2 * TILES];
        for (int i = 0; i < 2 * TILES; i++) m[i] = -INFINITY;
        const auto add_values = [&](int step, const Value(&value)[4]) {
            unsigned v[4][NEIGHBOURS / 2];
            for (int k = 0; k < 4; k++) value[k].expand(v[k]);
            uint4 p[TILES];
            for (int r = 0; r < TILES; r++) {
                p[r] = weights[r][step][lane];
                mma_fragment(sum[r], p[r], HALF_ONES, HALF_ONES);
            }
            for (int n = 0; n < NEIGHBOURS; n++) {
                const unsigned pick = n % 2 ? 0x7632 : 0x5410;
                const unsigned b0 = __byte_perm(v[0][n / 2], v[1][n / 2], pick);
                const unsigned b1 = __byte_perm(v[2][n / 2], v[3][n / 2], pick);
                for (int r = 0; r < TILES; r++) mma_fragment(o[r][n], p[r], b0, b1);
            }
        };
#pragma unroll (STAGED ? 1 : SEGMENT_PAGES)
        for (int page = 0; page < SEGMENT_PAGES; page++) {
            if (page >= here) break;
            for (int i = 0; i < 2 * TILES; i++) {
                const float before = m[i];
                for (int w = page * PAGE_WARPS; w < (page + 1) * PAGE_WARPS; w++)
                    m[i] = fmaxf(m[i], warp_largest[turn][w][g + 8 * i]);
                const float factor = rescale_factor(before, m[i]);
                for (int e = i % 2 * 2; e < i % 2 * 2 + 2; e++) {
                    sum[i / 2][e] = __fmul_rn(sum[i / 2][e], factor);
                    for (int n = 0; n < NEIGHBOURS; n++)
                        o[i / 2][n][e] = __fmul_rn(o[i / 2][n][e], factor);
                }
            }
            if constexpr (STAGED) {
                const int steps = (last_position - (first_page + page) * PAGE) / 16 + 1;
#pragma unroll 1
                for (int round = 0; round < PAGE_ROUNDS; round++) {
                    const char* slot = take_round();
                    for (int i = 0; i < 4 * ROUND_STEPS; i++) {
                        const int token = 16 * (i / 4) + i % 4;
                        value[i / 4][i % 4].load({slot + value_at + ValueRows::at(token, 0),
                                                  scale_in(slot, token + 4 * t, column)});
                    }
                    __syncwarp();
                    fetch_round(NO_END);
                    for (int i = 0; i < ROUND_STEPS; i++) {
                        const int step = round * ROUND_STEPS + i;
                        if (step >= steps) break;  // not seen, so not fetched
                        add_values(page * STEPS + step, value[i]);
                    }
                }
            } else {
                const bool more = page + 1 < here;
                const KvPlace next =
                    kv_place<Q8, KW>(values_of(first_page + page + more), 4 * t, column);
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    add_values(page * STEPS + step, value[step % AHEAD]);
                    if (step + AHEAD < STEPS)
                        fetch_value(step + AHEAD, values);
                    else if (more)
                        fetch_value(step + AHEAD, next);
                }
                values = next;
            }
        }

        // Thread (g, t) now holds columns 2 NEIGHBOURS t .. of its warp, rows g + 8 i.
        if (gridDim.z == 1) {
            for (int r = 0; r < TILES; r++) {
                const float2 up = softmax(2 * r).fold(m[2 * r], sum[r][0]);
                const float2 down = softmax(2 * r + 1).fold(m[2 * r + 1], sum[r][2]);
                for (int n = 0; n < NEIGHBOURS; n++) fold_rows(total(r, n), o[r][n], up, down);
            }
            continue;
        }
        for (int i = 0; i < 2 * TILES; i++) {
            if (visible[g + 8 * i] < 0 || !has_sums) continue;
            const int64_t at = int64_t(place[g + 8 * i]) * work.max_segments + segment;
            float4* to = reinterpret_cast<float4*>(work.part_values + at * VW + warp * COLUMNS +
                                                   2 * NEIGHBOURS * t);
            for (int n = 0; n < 2 * NEIGHBOURS; n += 4) {
                const int e = i % 2 * 2 + n / NEIGHBOURS, c = n % NEIGHBOURS;
                const float(&from)[NEIGHBOURS][4] = o[i / 2];
                to[n / 4] = make_float4(from[c][e], from[c + 1][e], from[c + 2][e], from[c + 3][e]);
            }
            if (warp == 0 && t == 0)
                work.part_states[at] = make_float2(m[i], sum[i / 2][i % 2 * 2]);
        }
    }
    if (gridDim.z > 1 || !has_sums) return;
    for (int i = 0; i < 2 * TILES; i++) {
        const int row_and_head = place[g + 8 * i];
        if (row_and_head < 0) continue;
        const float inverse = inverse_sum(softmax(i).l);
        const int row_heads = LATENT ? 1 : n_heads;  // of a row of out
        const int row = row_and_head / row_heads;
        const int at = row_and_head % row_heads * VW + warp * COLUMNS + 2 * NEIGHBOURS * t;
        unsigned x[NEIGHBOURS];  // pairs of columns
        for (int n = 0; n < NEIGHBOURS; n += 2) {
            const float4 a = total(i / 2, n), b = total(i / 2, n + 1);
            x[n / 2] = half2_bits(normalised(i % 2 ? a.z : a.x, inverse),
                                  normalised(i % 2 ? b.z : b.x, inverse));
            x[(NEIGHBOURS + n) / 2] = half2_bits(normalised(i % 2 ? a.w : a.y, inverse),
                                                 normalised(i % 2 ? b.w : b.y, inverse));
        }
        for (int n = 0; n < NEIGHBOURS; n += 4)
            work.out[piece_at(row, at + 2 * n, work.stride / CHUNK)] =
                make_uint4(x[n], x[n + 1], x[n + 2], x[n + 3]);
    }
}

#define ATTENTION_OF(NAME, Q8, KW, VW, TILES, WARPS, BLOCKS)                                     \
    KERNEL __launch_bounds__(32 * WARPS, BLOCKS)                                                 \
    attention_##NAME(const __grid_constant__ Attention work) {                                   \
        let_successor_start();                                                                   \
        attention_tile<Q8, KW, VW, TILES, WARPS>(work);                                          \
    }
// `few` has more warps, for launches where each block has a multiprocessor for itself.
#define ATTENTION(FORMAT, Q8, HD, BLOCKS)                                                        \
    ATTENTION_OF(FORMAT##_##HD, Q8, HD, HD, 1, 4, BLOCKS)                                        \
    ATTENTION_OF(FORMAT##_##HD##_few, Q8, HD, HD, 1, 8, 1)
ATTENTION(f16, false, 64, 4) ATTENTION(q8, true, 64, 4)
ATTENTION(f16, false, 80, 4)  // 80 values are no whole blocks of q8
ATTENTION(f16, false, 96, 4) ATTENTION(q8, true, 96, 4)
ATTENTION(f16, false, 128, 4) ATTENTION(q8, true, 128, 4)
ATTENTION(f16, false, 192, 3) ATTENTION(q8, true, 192, 3)
ATTENTION(f16, false, 256, 3) ATTENTION(q8, true, 256, 3)
// Twice the rows for one reading of K and V: for tiles of a prompt.
#define ATTENTION_WIDE(FORMAT, Q8, HD, BLOCKS)                                                   \
    ATTENTION_OF(FORMAT##_##HD##_wide, Q8, HD, HD, 2, 4, BLOCKS)
ATTENTION_WIDE(f16, false, 64, 2) ATTENTION_WIDE(q8, true, 64, 2)
ATTENTION_WIDE(f16, false, 80, 2)
ATTENTION_WIDE(f16, false, 96, 3) ATTENTION_WIDE(q8, true, 96, 3)
ATTENTION_WIDE(f16, false, 128, 4) ATTENTION_WIDE(q8, true, 128, 4)
// Latent attention: K holds V.
ATTENTION_OF(f16_320, false, 320, 256, 1, 8, 2) ATTENTION_OF(q8_320, true, 320, 256, 1, 8, 2)
ATTENTION_OF(f16_576, false, 576, 512, 1, 8, 1) ATTENTION_OF(q8_576, true, 576, 512, 1, 8, 1)

// Four 8x8 matrices of f16, transposed: lane i has the address of row i % 8 of matrix i / 8.
DEVICE void load_transposed(unsigned (&d)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row))));
}

// As attention_tile with f16 for many rows: each of four warps takes 16 (token, head) pairs and all
// columns of their sums. K and V of KEYS keys come in turns into two buffers. H200, a layer of an
// 8B prompt: 4096 tokens in 0.60 ms, and 0.81 in wide tiles, which read K and V straight from L2.
// PRECOND: grid (at least rows of the longest span / span_rows, H_kv, spans), 128 threads; tiles
// holds spans, 6 numbers each; span_rows of a block <= 64 H_kv / H. Shared memory: totals f32
// [HD / 8][128][4], two f16 [KEYS][HD].
// Reads K and V once per block; lane (g, t) holds rows g, g + 8 of a product.
template <int HD> DEVICE void attention_prompt(const Attention& work) {
    constexpr int THREADS = 32 * ATTENTION_WARPS, CHUNKS = HD / 8;  // of 16 bytes, of a key
    constexpr int KEYS = HD <= 128 ? 64 : 32, PARTS = PAGE / KEYS, BUFFER = KEYS * CHUNKS;
    constexpr int BLOCK_BYTES = kv_block_bytes(KV_F16, HD);
    constexpr bool ALL_QUERIES = HD <= 128;  // stay in registers; others come from the cache
    extern __shared__ __align__(128) uint8_t shared[];
    float4* totals = reinterpret_cast<float4*>(shared) + threadIdx.x;
    uint4* buffers = reinterpret_cast<uint4*>(shared) + CHUNKS * THREADS;
    wait_for_predecessor();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int n_heads = work.n_heads, group = n_heads / work.n_kv_heads;
    const float scale = work.scale;
    const int* span = work.tiles + 6 * blockIdx.z;
    const int first = (gridDim.x - 1 - blockIdx.x) * work.span_rows;  // those that see most first
    const int n_rows = min(int(work.span_rows), span[1] - first);
    if (n_rows <= 0) return;
    const int slot = span[2], first_position = span[3] + first;
    const int n_pages = slot < 0 ? 0 : (first_position + n_rows - 1) / PAGE + 1;
    // What all rows of the warp see, and what one of them does.
    const int all_see = first_position + 16 * warp / group;
    const int one_sees = first_position + min((16 * warp + 15) / group, n_rows - 1);
    int place[2], visible[2];  // of rows g, g + 8: (row, head) of q, last position they see
    for (int i = 0; i < 2; i++) {
        const int pair = 16 * warp + g + 8 * i, token = pair / group;
        visible[i] = first_position + token;
        place[i] = (span[0] + first + min(token, n_rows - 1)) * n_heads + blockIdx.y * group +
                   pair % group;
    }

    // Chunks of a key change places so that the lanes that read at once meet all banks: K at even
    // and odd pieces of 32 values, V at pairs of chunks.
    const auto chunk_at = [](int key, int chunk) {
        return key * CHUNKS + (chunk ^ (key / 4 % 4 | (CHUNKS % 8 ? 0 : key % 2 * 4)));
    };
    const int k_key = 4 * (g / 2) + g % 2, v_key = lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2;
    const int k_lane[2] = {chunk_at(k_key, t), chunk_at(k_key, t + 4)};
    int v_lane[4];
    for (int i = 0; i < 4; i++) v_lane[i] = chunk_at(v_key, 2 * i + lane / 16);
    const char* layer = work.pages + kv_offset(work.layer, work.n_pages, 0, work.n_kv_heads,
                                               blockIdx.y, BLOCK_BYTES);
    const int* table = work.page_table + int64_t(max(slot, 0)) * work.max_pages;
    int next = 0;  // part of K or V to fetch, while the one before it is used
    const auto acquire = [&] {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        if (next < 2 * PARTS * n_pages) {
            const int64_t block = int64_t(table[next / (2 * PARTS)]) * work.n_kv_heads * 2;
            const char* from = layer + block * BLOCK_BYTES + next % (2 * PARTS) * BUFFER * 16;
            for (int i = 0; i < BUFFER / THREADS; i++) {
                const int at = i * THREADS + threadIdx.x;
                const uint4* to = buffers + next % 2 * BUFFER + chunk_at(at / CHUNKS, at % CHUNKS);
                copy_async<16>(__cvta_generic_to_shared(to), from + at * 16);
            }
        }
        return buffers + (next++ + 1) % 2 * BUFFER;
    };
    acquire();
    uint4 query[ALL_QUERIES ? HD / 16 : 2];  // A fragments
    const unsigned zero = unsigned(work.n_pages) >> 31;
    const auto load_queries = [&](int piece, int to) {
        const uint4* q = reinterpret_cast<const uint4*>(work.q) + 4 * piece + t;
        const uint4 x = q[place[0] * CHUNKS], y = q[place[1] * CHUNKS];
        // Without an operation here the words are copied again for every product.
        query[to] = make_uint4(x.x | zero, y.x | zero, x.y | zero, y.y | zero);
        query[to + 1] = make_uint4(x.z | zero, y.z | zero, x.w | zero, y.w | zero);
    };
    for (int i = 0; ALL_QUERIES && i < HD / 32; i++) load_queries(i, 2 * i);
    for (int n = 0; n < CHUNKS; n++) totals[n * THREADS] = make_float4(0, 0, 0, 0);
    Softmax softmax[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};

    for (int first_page = 0; first_page < n_pages; first_page += SEGMENT_PAGES) {
        float o[CHUNKS][4] = {}, sum[4] = {}, m[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
        for (int page = first_page; page < min(first_page + SEGMENT_PAGES, n_pages); page++) {
            const bool seen = page * PAGE <= one_sees;
            float score[PAGE / 8][4] = {};
            for (int part = 0; part < PARTS; part++) {
                const uint4* keys = acquire();
#pragma unroll (ALL_QUERIES ? HD / 32 : 2)
                for (int i = 0; seen && i < HD / 32; i++) {
                    const int at = ALL_QUERIES ? 2 * i : 0;
                    if (!ALL_QUERIES) load_queries(i, 0);
                    for (int n = 0; n < KEYS / 8; n++) {
                        const uint4 k = keys[k_lane[i % 2] + i / 2 * 8 +
                                             (16 * (n / 2) + 2 * (n % 2)) * CHUNKS];
                        mma_fragment(score[part * KEYS / 8 + n], query[at], k.x, k.y);
                        mma_fragment(score[part * KEYS / 8 + n], query[at + 1], k.z, k.w);
                    }
                }
            }
            float factor[2], base[2];
            for (int i = 0; i < 2; i++) {
                float largest = m[i];
                for (int n = 0; n < PAGE / 8; n++)
                    for (int e = 0; e < 2; e++) {
                        float& x = score[n][2 * i + e];
                        x = __fmul_rn(x, scale);
                        const int at = page * PAGE + 16 * (n / 2) + 4 * t + 2 * (n % 2) + e;
                        if ((page + 1) * PAGE > all_see + 1 && at > visible[i]) x = -INFINITY;
                        largest = fmaxf(largest, x);
                    }
                largest = warp_max(largest, 4);
                factor[i] = rescale_factor(m[i], largest);
                m[i] = largest;
                base[i] = largest == -INFINITY ? 0.0f : largest;
            }
            uint4 p[PAGE / 16];
            for (int step = 0; step < PAGE / 16; step++)
                p[step] = weights_of(score[2 * step], score[2 * step + 1], base);
            if (__any_sync(ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f))
                for (int e = 0; e < 4; e++) {
                    sum[e] = __fmul_rn(sum[e], factor[e / 2]);
                    for (int n = 0; n < CHUNKS; n++) o[n][e] = __fmul_rn(o[n][e], factor[e / 2]);
                }
            for (int part = 0; part < PARTS; part++) {
                const uint4* values = acquire();
                for (int step = 0; seen && step < KEYS / 16; step++) {
                    const uint4 a = p[part * KEYS / 16 + step];
                    mma_fragment(sum, a, HALF_ONES, HALF_ONES);
                    for (int n = 0; n < CHUNKS; n += 2) {
                        unsigned v[4];
                        load_transposed(
                            v, values + v_lane[n / 2 % 4] + n / 8 * 8 + 16 * step * CHUNKS);
                        mma_fragment(o[n], a, v[0], v[1]);
                        mma_fragment(o[n + 1], a, v[2], v[3]);
                    }
                }
            }
        }
        const float2 up = softmax[0].fold(m[0], sum[0]), down = softmax[1].fold(m[1], sum[2]);
        for (int n = 0; n < CHUNKS; n++) fold_rows(totals[n * THREADS], o[n], up, down);
    }
    for (int i = 0; i < 2; i++) {  // a lane has columns 8 n + 2t, 8 n + 2t + 1
        if (visible[i] >= first_position + n_rows) continue;
        const float inverse = inverse_sum(softmax[i].l);
        for (int n = 0; n < CHUNKS; n++) {
            const float4 all = totals[n * THREADS];
            uint4* piece = work.out + piece_at(place[i] / n_heads, place[i] % n_heads * HD + 8 * n,
                                               work.stride / CHUNK);
            reinterpret_cast<unsigned*>(piece)[t] =
                half2_bits(normalised(i ? all.z : all.x, inverse),
                           normalised(i ? all.w : all.y, inverse));
        }
    }
}

#define ATTENTION_PROMPT(HD)                                                                     \
    KERNEL __launch_bounds__(32 * ATTENTION_WARPS, 2)                                            \
    attention_f16_##HD##_prompt(const __grid_constant__ Attention work) {                        \
        attention_prompt<HD>(work);                                                              \
    }
ATTENTION_PROMPT(64) ATTENTION_PROMPT(96) ATTENTION_PROMPT(128) ATTENTION_PROMPT(256)

// Folds the stored segments of each row and head in index order: -> out f16 [rows H / row_heads,
// stride].
// PRECOND: grid (rows, H, z), whole warps, VW threads over z; stored by an attention kernel over
// the same rows. One thread holds one column, those past VW the last one too. Reads 4 (VW + 2)
// bytes a segment; rows with slot < 0 become zero.
KERNEL __launch_bounds__(512)
attention_merge(const float* part_values, const float2* part_states, uint4* out,
                const int* positions, const int* slots, int max_segments, int stride,
                int value_dim, int row_heads) {
    constexpr int BATCH = 32;  // segments on their way while as many are folded
    follow_predecessor();
    const int row = blockIdx.x, row_and_head = row * gridDim.y + blockIdx.y;
    const int lane = threadIdx.x & 31;
    const int column = min(int(blockIdx.z * blockDim.x + threadIdx.x), value_dim - 1);
    const int n_segments = slots[row] < 0 ? 0 : positions[row] / (SEGMENT_PAGES * PAGE) + 1;
    const int64_t first = int64_t(row_and_head) * max_segments;
    Softmax softmax = {-INFINITY, 0.0f};
    float total = 0.0f;
    float2 next_state;
    float next[BATCH];
    const auto fetch = [&](int start) {
        const int64_t at = first + start;
        // Lane i of every warp holds the state of segment i.
        next_state = start + lane < n_segments ? part_states[at + lane] : float2{-INFINITY, 0.0f};
        for (int i = 0; i < BATCH; i++)
            next[i] = start + i < n_segments ? part_values[(at + i) * value_dim + column] : 0.0f;
    };
    fetch(0);
    for (int start = 0; start < n_segments; start += BATCH) {
        const float2 state = next_state;
        float value[BATCH];
        for (int i = 0; i < BATCH; i++) value[i] = next[i];
        fetch(start + BATCH);
        for (int i = 0; i < BATCH; i++) {
            if (start + i >= n_segments) break;
            const float2 factors = softmax.fold(__shfl_sync(ALL_LANES, state.x, i),
                                                __shfl_sync(ALL_LANES, state.y, i));
            total = fold_value(total, value[i], factors);
        }
    }
    const int at = row_and_head % row_heads * value_dim + column;
    uint4* piece = out + piece_at(row_and_head / row_heads, at, stride / CHUNK);
    reinterpret_cast<__half*>(piece)[at % 8] =
        __float2half_rn(normalised(total, inverse_sum(softmax.l)));
}

// ==== beyond the core ============================================================================

// ---------------------------------------------------------------------------------------------
// Loading: blocks as they lie in a GGUF file -> packed tiles
// ---------------------------------------------------------------------------------------------

DEVICE float f16_at(const uint8_t* p) { return __half2float(*reinterpret_cast<const __half*>(p)); }

__device__ const uint4 PADDING[16] = {};  // a block of zeros

// A row as it lies in the file; padding is all zeros.
template <int SOURCE> struct SourceRow {
    static constexpr int VALUES = SIZES[SOURCE].block_values, BYTES = SIZES[SOURCE].block_bytes;
    static constexpr bool FLOATS = VALUES == 1;
    const uint8_t* data;
    int cols;  // 0 past the last row

    __device__ const uint8_t* block(int k) const {
        return k < cols ? data + int64_t(k / VALUES) * BYTES
                        : reinterpret_cast<const uint8_t*>(PADDING);
    }

    __device__ float value(int k) const {  // F16, BF16, F32
        if constexpr (SOURCE == F16) return f16_at(block(k));
        if constexpr (SOURCE == F32) return *reinterpret_cast<const float*>(block(k));
        return __uint_as_float(unsigned(*reinterpret_cast<const uint16_t*>(block(k))) << 16);
    }

    __device__ unsigned integer(int k) const {  // 0 .. 2^bits - 1
        const uint8_t* b = block(k);
        const int i = k % VALUES, byte = i / 64 * 32 + i % 32, nibble = i / 32 % 2 * 4;
        if constexpr (SOURCE == Q4_K) return b[16 + byte] >> nibble & 15;
        if constexpr (SOURCE == Q5_K)
            return (b[48 + byte] >> nibble & 15) | (b[16 + i % 32] >> i / 32 & 1) << 4;
        if constexpr (SOURCE == Q6_K)
            return (b[i / 128 * 64 + i % 64] >> i / 64 % 2 * 4 & 15) |
                   (b[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
        if constexpr (SOURCE == Q8_0) return b[2 + i] ^ 128;
        return b[BYTES - 16 + i % 16] >> i / 16 * 4 & 15;  // Q4_0, Q4_1
    }

    __device__ float d(int k) const { return f16_at(block(k) + (SOURCE == Q6_K ? 208 : 0)); }
    // Q4_K and Q5_K subtract it, Q4_1 adds it.
    __device__ float min(int k) const { return f16_at(block(k) + 2); }
    // 6-bit scale and min of a sub-block of 32 (Q4_K, Q5_K).
    __device__ uint2 scale_and_min(int k) const {
        const uint8_t* b = block(k) + 4;
        const int j = k % 256 / 32;
        if (j < 4) return make_uint2(b[j] & 63, b[j + 4] & 63);
        return make_uint2((b[j + 4] & 15) | b[j - 4] >> 6 << 4, b[j + 4] >> 4 | b[j] >> 6 << 4);
    }
    // 8-bit scale of a sub-block of 16 (Q6_K), plus 128.
    __device__ unsigned scale(int k) const { return block(k)[192 + k % 256 / 16] ^ 128; }

    // What must fit in f16 once multiplied by the row's power of two: see row_scale_factor.
    __device__ float largest_of_block(int k) const {
        if constexpr (FLOATS) return fabsf(value(k));
        if constexpr (SOURCE == Q6_K) return 128.0f * fabsf(d(k));
        if constexpr (SOURCE == Q4_K || SOURCE == Q5_K)
            return 63.0f * fmaxf(fabsf(d(k)) * (SOURCE == Q4_K ? 1 : 2), fabsf(min(k)) / 8.0f);
        if constexpr (SOURCE == Q4_1) return fmaxf(fabsf(d(k)), fabsf(min(k)) / 32.0f);
        return fabsf(d(k));
    }
};

template <int SOURCE>
DEVICE void repack_tile(const uint8_t* source, uint8_t* packed, float* weight_scale, int rows,
                        int cols) {
    using Row = SourceRow<SOURCE>;
    constexpr int FORMAT = Row::FLOATS ? F16 : SOURCE;
    using P = Packed<FORMAT>;
    __shared__ float factors[TILE_ROWS];
    const int chunks = chunks_of(cols), parts = parts_of(chunks);
    const auto row_at = [=](int r) {
        const int row = blockIdx.x * TILE_ROWS + r;
        return Row{source + int64_t(row) * (cols / Row::VALUES) * Row::BYTES,
                   row < rows ? cols : 0};
    };

    for (int r = threadIdx.x / 32; r < TILE_ROWS; r += blockDim.x / 32) {
        const Row row = row_at(r);
        float largest = 0.0f;
        for (int k = threadIdx.x % 32 * Row::VALUES; k < row.cols; k += 32 * Row::VALUES)
            largest = fmaxf(largest, row.largest_of_block(k));
        const float factor = row_scale_factor(warp_max(largest));
        if (threadIdx.x % 32 == 0) {
            factors[r] = factor;
            if (row.cols)
                weight_scale[blockIdx.x * TILE_ROWS + r] =
                    (FORMAT == F16 ? 1.0f : P::K_SCALES ? 0x1p20f : 0x1p24f) / factor;
        }
    }
    __syncthreads();

    packed += blockIdx.x * P::tile_bytes(chunks);
    for (int i = threadIdx.x; i < 32 * chunks; i += blockDim.x) {
        const int chunk = i / 32, lane = i % 32;
        unsigned words[P::WORDS] = {};
        for (int r = 0; r < 2; r++) {
            const Row row = row_at(lane / 4 + 8 * r);
            const float factor = factors[lane / 4 + 8 * r];
#pragma unroll
            for (int e = 0; e < 16; e++) {
                const int k = first_k(chunk, lane % 4) + e;
                const int half = e / 8, pair = e / 2 % 4, side = e % 2 * 16;
                if constexpr (FORMAT == F16) {
                    words[8 * r + e / 2] |= half2_bits(row.value(k) * factor, 0.0f) << side;
                } else if constexpr (FORMAT == Q8_0) {
                    words[4 * r + e / 4] |= row.integer(k) << (side + pair % 2 * 8);
                } else if constexpr (P::K_SCALES) {  // where rotate_left finds them: see dequantise
                    constexpr unsigned HALF = FORMAT == Q4_K ? 8 : 16;
                    const unsigned n = row.integer(k), negative = n < HALF;
                    const unsigned magnitude = negative ? HALF - 1 - n : n - HALF;
                    const int turn = 32 - 4 * pair, turn_5 = 32 - 8 * r - 4 * half - pair;
                    words[2 * r + half] |= rotate_left(
                        (negative << 15 | (magnitude & 7) << 4) << side, turn);
                    if constexpr (FORMAT == Q5_K)
                        words[4] |= rotate_left((magnitude >> 3 << 7) << side, turn_5);
                } else {
                    const unsigned n = row.integer(k);
                    words[2 * r + half] |= (n & 15) << (side + 4 * pair);
                    const int low = side + 4 + pair % 2 * 4;  // where dequantise wants upper bits
                    if constexpr (FORMAT == Q6_K)
                        words[4 + r] |= n >> 4 << ((low + pair / 2 * 2 + 8 * half) & 31);
                }
            }
        }
        for_pieces<FORMAT>(lane, [&](auto n, int byte, int word) {
            unsigned* to = reinterpret_cast<unsigned*>(packed + chunk * P::CHUNK_BYTES + byte);
            for (int i = 0; i < n; i++) to[i] = words[word + i];
        });
    }

    // f16 pairs for the rows g and g + 8: a scale, or what is added.
    const auto half2_of = [&](int g, int k, bool added) {
        constexpr float UNIT = P::K_SCALES ? -0.125f : 0x1p-24f;
        const Row upper = row_at(g), lower = row_at(g + 8);
        return added ? half2_bits(upper.min(k) * factors[g] * UNIT,
                                  lower.min(k) * factors[g + 8] * UNIT)
                     : half2_bits(upper.d(k) * factors[g], lower.d(k) * factors[g + 8]);
    };
    if constexpr (P::SCALE_BYTES > 0) {
        unsigned* scales = reinterpret_cast<unsigned*>(packed + P::scales_at(chunks));
        constexpr int WORDS = P::SIZE.scale_words;
        for (int i = threadIdx.x; i < parts * 32 * WORDS; i += blockDim.x) {
            const int part = i / (32 * WORDS), lane = i / WORDS % 32, at = i % WORDS, g = lane / 4;
            const int k = first_k(part * PART_CHUNKS + at * 4 / WORDS / 2 * 2, lane % 4);
            const Row upper = row_at(g), lower = row_at(g + 8);
            if constexpr (FORMAT == Q6_K) {
                scales[i] = upper.scale(k) | upper.scale(k + 16) << 8 | lower.scale(k) << 16 |
                            lower.scale(k + 16) << 24;
            } else if constexpr (P::K_SCALES) {
                const uint2 first = upper.scale_and_min(k), second = lower.scale_and_min(k);
                scales[i] = first.x << 4 | first.y << 10 | second.x << 20 | second.y << 26;
            } else {
                scales[i] = half2_of(g, k, FORMAT == Q4_1 && at % 2);
            }
        }
    }
    if constexpr (P::BLOCK_BYTES > 0) {
        unsigned* blocks = reinterpret_cast<unsigned*>(packed + P::blocks_at(chunks));
        constexpr int WORDS = P::SIZE.half2s;
        for (int i = threadIdx.x; i < parts * 8 * WORDS; i += blockDim.x)
            blocks[i] = half2_of(i / WORDS % 8, i / (8 * WORDS) * PART_CHUNKS * CHUNK, i % WORDS);
    }
}

// packed tiles and weight_scale [rows] from `rows` rows of `cols` values as they lie in the file.
// PRECOND: grid (ceil(rows / 16)), 256 threads; source 4-byte aligned; packed 128-byte aligned.
// A block holds one tile of 16 rows. Moves the source (scales and floats twice) and the tile.
#define REPACK(SOURCE)                                                                           \
    KERNEL __launch_bounds__(256) linear_repack_##SOURCE(                                        \
        const uint8_t* source, uint8_t* packed, float* weight_scale, int rows, int cols) {       \
        repack_tile<SOURCE>(source, packed, weight_scale, rows, cols);                           \
    }
REPACK(Q4_K) REPACK(Q5_K) REPACK(Q6_K)
REPACK(Q8_0) REPACK(Q4_0) REPACK(Q4_1)
REPACK(F16) REPACK(BF16) REPACK(F32)
#undef REPACK

// squares [rows] = sum of (w * norm)^2 over each row w of packed tiles, without its weight_scale.
// PRECOND: grid (rows), 128 threads; norm [cols]; cols % 4 = 0. One block holds one row.
KERNEL linear_silu_squares(const uint8_t* packed, const float* norm, float* squares, int format,
                           int cols, int chunks) {
    float sum = 0.0f;
    for_weights(packed, format, blockIdx.x, chunks, [&](int k, float2 w) {
        if (k < cols) sum += w.x * norm[k] * w.x * norm[k] + w.y * norm[k + 1] * w.y * norm[k + 1];
    });
    sum = block_sum_and_largest(sum, 0.0f).x;
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

// ---------------------------------------------------------------------------------------------
// Attention over f32 KV: no tensor cores, no promise of speed, nothing is split
// ---------------------------------------------------------------------------------------------

// q f32 [rows, H D] -> out f32 [rows, H VW], which scale_rows turns into a GEMM input: f32 values
// may be larger than f16 holds. scale = attn_scale * log2(e). VW < D: V is the beginning of K.
// PRECOND: grid (rows, H), 32 threads; VW <= 512. One warp holds one row and head; it reads the K
// and V that the row sees once. Rows with slot < 0 become zero.
KERNEL attention_f32(const float* q, float* out, const char* pages, const int* page_table,
                     const int* positions, const int* slots, int layer, int n_pages,
                     int max_pages, int n_kv_heads, int head_dim, int value_dim, float scale) {
    follow_predecessor();
    constexpr int MOST = 512 / 32;  // values of a lane
    const int row = blockIdx.x, head = blockIdx.y, n_heads = gridDim.y, lane = threadIdx.x;
    const int kv_head = head / (n_heads / n_kv_heads), bytes = kv_block_bytes(KV_F32, head_dim);
    const int visible = slots[row] < 0 ? 0 : positions[row] + 1;
    const bool latent = value_dim < head_dim;
    q += (int64_t(row) * n_heads + head) * head_dim;
    out += (int64_t(row) * n_heads + head) * value_dim;
    float m = -INFINITY, sum = 0.0f, o[MOST] = {};
#pragma unroll 4
    for (int at = 0; at < visible; at++) {
        const int page = page_table[int64_t(slots[row]) * max_pages + at / PAGE];
        const float* key = reinterpret_cast<const float*>(
            pages + kv_offset(layer, n_pages, page, n_kv_heads, kv_head, bytes, latent));
        key += at % PAGE * head_dim;
        const float* value = latent ? key : key + PAGE * head_dim;
        float dot = 0.0f;
        for (int d = lane; d < head_dim; d += 32) dot += q[d] * key[d];
        const float score = warp_sum(dot) * scale, largest = fmaxf(m, score);
        const float factor = exp2f(m - largest), weight = exp2f(score - largest);
        m = largest, sum = sum * factor + weight;
        for (int i = 0; i < MOST; i++)
            if (32 * i + lane < value_dim) o[i] = o[i] * factor + weight * value[32 * i + lane];
    }
    for (int i = 0; i < MOST; i++)
        if (32 * i + lane < value_dim) out[32 * i + lane] = visible ? o[i] / sum : 0.0f;
}

// ---------------------------------------------------------------------------------------------
// Latent attention, gates, and rows of f32 as results or as GEMM inputs
// ---------------------------------------------------------------------------------------------

// out[r] f32 [n, cols]: what rmsnorm brings into f16. PRECOND: as there.
KERNEL rmsnorm_f32(const float* h, const float* w, const int* rows, float* out, int cols, int pitch,
                   float eps) {
    normalise_row(h, w, rows, cols, pitch, eps, [=](auto& row, float, float inverse) {
        row.each(cols, [=](int i, float4 x) {
            *reinterpret_cast<float4*>(out + int64_t(blockIdx.x) * cols + i) = x * inverse;
        });
    });
}

// x f16 [rows heads, stride] and scale [rows heads]: pieces of `width` values, `pitch` apart, of
// each row of from f32 [rows, cols].
// PRECOND: grid (rows heads), at most 1024 threads in whole warps; cols, pitch, width % 4 = 0;
// stride = width rounded up to 128. One block holds one piece. Moves 4 width + 2 stride bytes.
KERNEL scale_rows(const float* from, uint4* x, float* scale, int cols, int heads, int pitch,
                  int width, int stride) {
    follow_predecessor();
    const int row = blockIdx.x / heads, head = blockIdx.x % heads;
    const float* piece = from + int64_t(row) * cols + head * pitch;
    Row values([=](int i) { return load4_if(i < width, piece + i); }, width);
    values.store_scaled(values.largest_of_all(), 1.0f, stride, x, scale);
}

// Queries [rows, H (R + D)], f16 (f32 if KV is f32), and the key of latent attention into its page:
// per head R values of `content` f32 [rows, H R], then the last D of a head of q, rotated; of the
// key the last R + D columns of kv_a, RMSNorm over R of them, the others rotated.
// PRECOND: grid (rows, ceil((H + 1) / 4)), 128 threads; R + D, for q8, in blocks of 32.
// One warp holds one head. Moves each value once or twice; rows with slot < 0 write no key.
KERNEL rope_latent(const float* content, const float* q, const float* kv_a, const float* kv_norm,
                   int q_cols, int kv_cols, int key_dim, const __grid_constant__ Heads work) {
    follow_predecessor();
    const int row = blockIdx.x, lane = threadIdx.x & 31, head = blockIdx.y * 4 + threadIdx.x / 32;
    const int n_heads = work.n_heads, head_dim = work.head_dim, rank = head_dim - work.rope_dim;
    if (head > n_heads) return;
    const bool is_key = head == n_heads;
    const HeadPlace place = place_of(work, row, head, true);
    const float* plain = is_key ? kv_a + int64_t(row + 1) * kv_cols - head_dim
                                : content + (int64_t(row) * n_heads + head) * rank;
    const float* turned = is_key ? plain + rank
                                 : q + int64_t(row) * q_cols + (head + 1) * key_dim - work.rope_dim;
    float sum = 0.0f;
    for (int d = lane; is_key && d < rank; d += 32) sum += plain[d] * plain[d];
    const float inverse = rsqrtf(warp_sum(sum) / rank + work.eps);
    for (int d = lane; d < head_dim; d += 32) {
        const Turn turn = turn_of(max(d - rank, 0), work);
        const float* angle = work.angles + int64_t(row) * work.rope_dim + turn.pair;
        float value = d < rank ? plain[d] : rotated(turned, d - rank, turn.other, angle[0],
                                                    angle[work.rope_dim / 2]);
        if (is_key && d < rank) value *= inverse * kv_norm[d];
        store_value(place, head_dim, d, value);
    }
}

// x f16 [rows, stride] *= sigmoid(gate), the gates of rope_kv in qkv f32 [rows, qkv_cols].
// PRECOND: grid (rows, ceil(H D / 1024)), 128 threads; D % 8 = 0.
// One thread holds 8 columns. Moves 8 bytes a column; a row's scale stays.
KERNEL sigmoid_gate(uint4* x, const float* qkv, int cols, int stride, int qkv_cols, int head_dim) {
    follow_predecessor();
    const int row = blockIdx.x, column = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (column >= cols) return;
    const float* gate = qkv + int64_t(row) * qkv_cols + column + (column / head_dim + 1) * head_dim;
    __half2* values = reinterpret_cast<__half2*>(x + piece_at(row, column, stride / CHUNK));
    for (int i = 0; i < 4; i++) {
        const float2 v = __half22float2(values[i]);
        values[i] = __floats2half2_rn(times_sigmoid(v.x, gate[2 * i]),
                                      times_sigmoid(v.y, gate[2 * i + 1]));
    }
}

// ---------------------------------------------------------------------------------------------
// Sampling: sampling.py is the definition, its docstring the explanation. Every number below is
// either exact (integers, keys) or one rounded operation after another, as written there.
// ---------------------------------------------------------------------------------------------

constexpr int SAMPLE_THREADS = 512, SAMPLE_WARPS = SAMPLE_THREADS / 32;
constexpr int SLICE = 512, SLICE_THREADS = 128;     // tokens of a warp of sample_slices; its blocks
constexpr double REACH = 28.0;
constexpr int WEIGHT_BITS = 40, SCORE_BITS = 38, ID_BITS = 20, MOST_ID = (1 << ID_BITS) - 1;
constexpr double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;

struct SampleRow {                          // sampling.ROW
    uint64_t seed;
    double inverse_temperature, min_gap;    // 0 = greedy
    uint32_t position, choice, top_k, top_p;
    float repetition, presence, frequency;
    int adjustment, active;
};
static_assert(sizeof(SampleRow) == 64, "sampling.ROW has 64 bytes");

struct Adjustment {                         // sampling.ADJUSTMENT
    uint32_t count;
    float bias;
};

// floor(exp(x) * 2^40), 0 below -REACH; x <= 0. In float32: a GeForce card has 64 times as much of
// it as of float64.
DEVICE uint64_t sample_weight(float x) {
    if (!(x >= float(-REACH))) return 0;    // NaN too: -inf less -inf
    float k = rintf(__fmul_rn(x, 1.44269504f));
    float r = __fsub_rn(__fsub_rn(x, __fmul_rn(k, 0.693145751953125f)),
                        __fmul_rn(k, 1.42860677e-6f));
    constexpr double FACTORIALS[] = {1, 1, 2, 6, 24, 120, 720, 5040};
    float p = float(1.0 / FACTORIALS[7]);
    for (int n = 6; n >= 0; n--) p = __fadd_rn(__fmul_rn(p, r), float(1.0 / FACTORIALS[n]));
    return uint64_t(__fmul_rn(p, __int_as_float(int(k) + 127 + WEIGHT_BITS << 23)));
}

// Natural logarithm of a positive, normal v.
DEVICE double sample_log(double v) {
    long long bits = __double_as_longlong(v);
    int e = int(bits >> 52) - 1022;
    double m = __longlong_as_double((bits & 0xfffffffffffffLL) | 1022LL << 52);     // [1/2, 1)
    if (m < 0.7071067811865476) {
        m = __dadd_rn(m, m);
        e -= 1;
    }
    double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
    double z = __dmul_rn(s, s);
    double p = 1.0 / 23.0;
    for (int n = 21; n > 0; n -= 2) p = __dadd_rn(__dmul_rn(p, z), 1.0 / n);
    double tail = __dadd_rn(__dmul_rn(__dmul_rn(2.0, s), p), __dmul_rn(double(e), LN2_LOW));
    return __dadd_rn(__dmul_rn(double(e), LN2_HIGH), tail);
}

// Philox4x32-10.
DEVICE uint4 philox(uint64_t seed, uint4 counter) {
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t even = uint64_t(counter.x) * 0xD2511F53u, odd = uint64_t(counter.z) * 0xCD9E8D57u;
        counter = make_uint4(uint32_t(odd >> 32) ^ counter.y ^ key0, uint32_t(odd),
                             uint32_t(even >> 32) ^ counter.w ^ key1, uint32_t(even));
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// Gumbel noise of one Philox word, as the definition has it.
DEVICE double gumbel(uint32_t word) {
    double u = __dmul_rn(__dadd_rn(double(word), 0.5), 1.0 / 4294967296.0);
    return -sample_log(-sample_log(u));
}

// uint32 in the order of the floats; -0 and 0 are equal, NaN is above all.
DEVICE uint32_t float_rank(float x) {
    if (x != x) return 0xffffffffu;
    uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float float_of_rank(uint32_t rank) {
    return __uint_as_float(rank >> 31 ? rank & 0x7fffffffu : ~rank);
}

// Ranking by logit descending, then id ascending: the larger key comes first.
DEVICE uint64_t sample_key(float logit, int id) {
    return uint64_t(float_rank(logit)) << 32 | uint32_t(~id);
}
DEVICE float logit_of_key(uint64_t key) { return float_of_rank(uint32_t(key >> 32)); }
DEVICE int id_of_key(uint64_t key) { return int(~uint32_t(key)); }

template <class T> DEVICE T larger(T a, T b) { return a > b ? a : b; }
DEVICE uint64_t plus(uint64_t a, uint64_t b) { return a + b; }

// True in the last of `blocks` blocks to call this: it sees what the others wrote. `arrived` is
// zero before the first and after the last.
__device__ bool last_to_arrive(unsigned& arrived, unsigned blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {  // its fences are for all: the barriers order the block
        __threadfence();
        last = atomicInc(&arrived, blocks - 1) == blocks - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Every thread gets op over the x of its block; op is exact and commutative.
template <class T, class Op> DEVICE T block_all(T x, Op op) {
    __shared__ T partial[SAMPLE_WARPS];
    x = warp_all(x, op);
    __syncthreads();                        // an earlier result has been read by all
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_all(partial[threadIdx.x % SAMPLE_WARPS], op, SAMPLE_WARPS);
}

// Sum of the x of the threads before this one.
DEVICE uint64_t block_sum_before(uint64_t x) {
    __shared__ uint64_t sums[SAMPLE_THREADS];
    uint64_t up_to = x;
    for (int o = 1; o < SAMPLE_THREADS; o *= 2) {
        __syncthreads();
        sums[threadIdx.x] = up_to;
        __syncthreads();
        if (threadIdx.x >= o) up_to += sums[threadIdx.x - o];
    }
    return up_to - x;
}

// Classes of keys, the largest first: -1, bins 0 to BINS - 1, and BINS for what lies behind them.
constexpr int BINS = SAMPLE_THREADS, LISTED = 4096;
struct SampleBins {
    uint64_t low, high;                     // of the keys in bins
    float top, scale;
    int shift;                              // bins of 2^shift keys; -1: by distance from `top`

    DEVICE int operator()(uint64_t key) const {
        if (key < low || key >= high) return key < low ? BINS : -1;
        if (shift >= 0) return int(high - 1 - key >> shift);
        float depth = (top - logit_of_key(key)) * scale;
        return depth < BINS ? int(depth) : BINS;    // NaN: BINS
    }

    // The lowest key in a bin up to `bin`.
    DEVICE uint64_t lowest_key(int bin) const {
        uint64_t lowest = low, highest = high;
        while (lowest < highest) {
            uint64_t middle = lowest + (highest - lowest) / 2;
            if ((*this)(middle) <= bin) highest = middle;
            else lowest = middle + 1;
        }
        return lowest;
    }
};

struct SampleSums { uint64_t count, weight; };      // of some tokens

// A filter ends in bin `bin`; sums of the tokens before this bin and in it.
struct SampleCut {
    SampleBins bins;
    int bin;
    SampleSums before, inside;
};

// What the blocks of a row tell each other; zero after each call, but for cut, kept and list.
struct SampleState {
    unsigned long long top, best;           // the largest key, the best score
    unsigned arrived, listed;               // blocks, keys in `list`
    SampleCut cut;
    uint64_t kept;                          // weight of what top_k keeps; 0: look into the list
    unsigned long long weights[BINS];
    unsigned counts[BINS];
    uint64_t list[LISTED];                  // keys in the bin of the cut; if kept is 0, up to it
};
static_assert(sizeof(SampleState) == 39016, "device.SAMPLE_STATE_BYTES");

struct SampleSlice {
    uint64_t weight;                        // of the raw logits, relative to their largest, `top`
    float top;
};

// The parameters of the three kernels, and the row of a block as the sampler sees it.
struct Sampler {
    const float* logits;                    // [rows, n_vocab]
    const SampleRow* draws;                 // [rows]
    Adjustment* adjustments;                // [slots, n_vocab]
    SampleState* states;                    // [rows]
    SampleSlice* slices;                    // [rows, slices]
    int *tokens, *last_tokens;              // [rows], [slots]
    float* logprobs;                        // [rows]
    const int *slots, *logit_rows;
    Int n_vocab;

    DEVICE const SampleRow& row() const { return draws[blockIdx.y]; }
    DEVICE SampleState& state() const { return states[blockIdx.y]; }
    DEVICE int n_slices() const { return (n_vocab + SLICE - 1) / SLICE; }
    DEVICE SampleSlice& slice(int i) const { return slices[blockIdx.y * n_slices() + i]; }
    DEVICE const float* row_logits() const { return logits + size_t(blockIdx.y) * n_vocab; }
    DEVICE Adjustment* row_adjustments() const {
        return row().adjustment < 0 ? nullptr : adjustments + size_t(row().adjustment) * n_vocab;
    }
    DEVICE bool filters() const { return row().top_k || row().top_p; }

    // Four logits as they are in memory; behind the last one -inf.
    DEVICE void read_raw(int id, float (&l)[4]) const {
        const float* from = row_logits() + id;
        if (n_vocab % 4 == 0 && id < n_vocab) *reinterpret_cast<float4*>(l) = load4(from);
        else for (int j = 0; j < 4; j++) l[j] = id + j < n_vocab ? from[j] : -INFINITY;
    }

    // Penalties and bias.
    DEVICE void adjust(int id, float (&l)[4]) const {
        const Adjustment* from = row_adjustments();
        for (int j = 0; j < 4 && from != nullptr && id + j < n_vocab; j++) {
            Adjustment a = from[id + j];
            float by = row().repetition;
            uint32_t said = a.count & 0x7fffffffu;
            if (a.count) l[j] = l[j] > 0.0f ? __fdiv_rn(l[j], by) : __fmul_rn(l[j], by);
            by = __fmul_rn(row().frequency, __uint2float_rn(said));
            if (said) l[j] = __fsub_rn(__fsub_rn(l[j], row().presence), by);
            l[j] = __fadd_rn(l[j], a.bias);
        }
    }

    // Calls visit(id, logit[4]) for this thread's tokens, if the row is read by `blocks` blocks.
    template <class Visit> DEVICE void visit(int block, int blocks, Visit visit) const {
        for (int id = 4 * (SAMPLE_THREADS * block + threadIdx.x); id < n_vocab;
             id += 4 * SAMPLE_THREADS * blocks) {
            float l[4];
            read_raw(id, l);
            adjust(id, l);
            visit(id, l);
        }
    }

    // top is the largest logit.
    DEVICE double x_of(float l, float top) const {
        return __dmul_rn(__dsub_rn(double(l), double(top)), row().inverse_temperature);
    }

    // The Philox words of token id and of the three that share its call; that of id alone.
    DEVICE uint4 words(int id) const {
        return philox(row().seed, make_uint4(row().position, row().choice, uint32_t(id) / 4, 0));
    }
    DEVICE uint32_t word(int id) const {
        uint4 w = words(id);
        return id & 2 ? (id & 1 ? w.w : w.z) : (id & 1 ? w.y : w.x);
    }

    // x + noise in fixed point, then ~id; 0 if min_p drops the token.
    DEVICE uint64_t score(float l, float top, uint32_t word, int id) const {
        if (__dsub_rn(double(l), double(top)) < row().min_gap) return 0;
        double score = __dadd_rn(__dadd_rn(x_of(l, top), gumbel(word)), 32.0);
        return uint64_t(__dmul_rn(score, double(1LL << SCORE_BITS))) << ID_BITS | (MOST_ID - id);
    }
};

// First of three launches: the largest key of the row; of each slice, the raw logits' largest and
// their weights relative to it.
// PRECOND: grid (slices / 4, rows), block SLICE_THREADS; of the others: grid (any, rows), block
// SAMPLE_THREADS. n_vocab <= 2^20, no two active rows share a slot.
KERNEL __launch_bounds__(SLICE_THREADS) sample_slices(const Sampler s) {
    follow_predecessor();
    const int slice = (SLICE_THREADS * blockIdx.x + threadIdx.x) / 32;
    const int first = SLICE * slice + 4 * (threadIdx.x % 32);
    float raw[SLICE / 128][4], raw_top = -INFINITY;
    for (int i = 0; i < SLICE / 128; i++) s.read_raw(first + 128 * i, raw[i]);
    if (!s.row().active || slice >= s.n_slices()) return;
    uint64_t top = 0, weight = 0;
    for (int i = 0; i < SLICE / 128; i++) {
        float l[4];
        for (int j = 0; j < 4; j++) raw_top = fmaxf(raw_top, l[j] = raw[i][j]);
        s.adjust(first + 128 * i, l);
        for (int j = 0; j < 4; j++) top = max(top, sample_key(l[j], first + 128 * i + j));
    }
    raw_top = warp_max(raw_top);
    for (int i = 0; i < SLICE / 128; i++)
        for (int j = 0; j < 4; j++) weight += sample_weight(__fsub_rn(raw[i][j], raw_top));
    weight = warp_all(weight, plus);
    top = warp_all(top, larger<uint64_t>);
    if (threadIdx.x % 32 > 0) return;
    s.slice(slice) = {weight, raw_top};
    atomicMax(&s.state().top, (unsigned long long)top);
}

// Adds the tokens that this block takes to the sums of their bins.
__device__ void sample_histogram(const Sampler& s, const SampleBins& bins, int block, int blocks) {
    // Shared memory has native atomics of 32 bits only: a weight is two words.
    __shared__ uint32_t lower[BINS], upper[BINS], counts[BINS];
    const int own = threadIdx.x;
    lower[own] = upper[own] = counts[own] = 0;
    __syncthreads();
    s.visit(block, blocks, [&](int id, const float (&l)[4]) {
        for (int j = 0; j < 4; j++) {
            int bin = bins(sample_key(l[j], id + j));
            if (bin < 0 || bin >= BINS) continue;
            uint64_t weight = sample_weight(float(s.x_of(l[j], bins.top)));
            uint32_t low = uint32_t(weight), old = atomicAdd(&lower[bin], low);
            atomicAdd(&upper[bin], uint32_t(weight >> 32) + (old + low < old));     // the carry
            atomicAdd(&counts[bin], 1u);
        }
    });
    __syncthreads();
    if (counts[own] == 0) return;
    atomicAdd(&s.state().counts[own], counts[own]);
    atomicAdd(&s.state().weights[own], (unsigned long long)upper[own] << 32 | lower[own]);
}

DEVICE uint64_t top_p_limit(uint32_t top_p, uint64_t kept) {    // ceil(top_p * kept / 2^32)
    uint64_t p = top_p, low = p * uint32_t(kept);
    return p * (kept >> 32) + (low >> 32) + (uint32_t(low) != 0);
}

// Second launch, for rows with top_k or top_p: a bin in which the filters end, with so few tokens
// that a list can hold them. One histogram of the row tells, but for more equal logits than that
// and for top_p after a top_k of thousands: there one block goes on with finer bins.
KERNEL __launch_bounds__(SAMPLE_THREADS, 2) sample_cut(const Sampler s) {
    follow_predecessor();
    const SampleRow& row = s.row();
    SampleState& state = s.state();
    const float top = logit_of_key(state.top);
    if (!row.active || row.inverse_temperature == 0.0 || !s.filters() || !isfinite(top)) return;
    const float scale = float((BINS - 1) / REACH * row.inverse_temperature);
    const SampleBins bins{0, state.top + 1, top, scale, -1};
    sample_histogram(s, bins, blockIdx.x, gridDim.x);
    if (!last_to_arrive(s.state().arrived, gridDim.x)) return;

    __shared__ SampleCut found;
    auto take_sums = [&] {                  // of this thread's bin
        return SampleSums{atomicExch(&state.counts[threadIdx.x], 0u),
                          atomicExch(&state.weights[threadIdx.x], 0ull)};
    };
    const SampleSums first = take_sums();
    // The bin in which the count, or the weight, reaches `limit`, or the last one.
    auto find = [&](bool by_weight, uint64_t limit) {
        SampleCut cut{bins};
        for (SampleSums own = first;; own = take_sums()) {
            SampleSums before{cut.before.count + block_sum_before(own.count),
                              cut.before.weight + block_sum_before(own.weight)};
            uint64_t start = by_weight ? before.weight : before.count;
            uint64_t end = start + (by_weight ? own.weight : own.count);
            if (start < limit && (limit <= end || threadIdx.x == BINS - 1))
                found = {cut.bins, int(threadIdx.x), before, own};
            __syncthreads();
            cut = found;
            uint64_t up_to = cut.before.count + cut.inside.count;
            if (cut.inside.count <= LISTED &&
                (by_weight || up_to <= max(limit, uint64_t(LISTED)))) return cut;
            cut.bins = {cut.bins.lowest_key(cut.bin), cut.bins.lowest_key(cut.bin - 1), top};
            while (cut.bins.high - 1 - cut.bins.low >> cut.bins.shift >= BINS) cut.bins.shift++;
            sample_histogram(s, cut.bins, 0, 1);
            __syncthreads();
        }
    };
    uint64_t kept = block_all(first.weight, plus);
    SampleCut cut;
    if (row.top_k) {
        cut = find(false, row.top_k);
        kept = cut.before.weight + cut.inside.weight;
        if (cut.before.count + cut.inside.count <= LISTED) kept = 0, cut.before = {};
    }
    if (row.top_p && kept) cut = find(true, top_p_limit(row.top_p, kept));
    if (threadIdx.x == 0) state.cut = cut, state.kept = kept;
}

// The best score of a thread's tokens before the list. Those in the bins of the list go there.
__device__ uint64_t sample_best(const Sampler& s, float top, int top_id) {
    SampleState& state = s.state();
    auto miss = [](uint32_t word) { return (float(~word) + 0.5f) * (1.0f / 4294967296.0f); };
    // The largest logit scores its noise. Another token wins if -log(u) <= exp(x) * -log(u of the
    // largest), and 1 - u is below its -log(u). In float32 both sides are good to 1e-4.
    const uint32_t top_word = s.word(top_id);
    const float reach =
        -1.001f * (top_word >> 31 ? log1pf(-miss(top_word)) : logf(miss(~top_word)));
    const float inverse = float(s.row().inverse_temperature);
    const SampleBins bins = state.cut.bins;
    const int last = state.cut.bin, first = state.kept ? last : -1;     // in the list
    uint64_t best = 0;
    s.visit(blockIdx.x, gridDim.x, [&](int id, const float (&l)[4]) {
        const uint4 w = s.words(id);
        const uint32_t word[4] = {w.x, w.y, w.z, w.w};
        for (int j = 0; j < 4; j++) {
            if (s.filters()) {
                uint64_t key = sample_key(l[j], id + j);
                int bin = bins(key);
                if (bin >= first && bin <= last) state.list[atomicAdd(&state.listed, 1u)] = key;
                if (bin >= first) continue;
            }
            if (miss(word[j]) <= __expf((l[j] - top) * inverse) * reach)
                best = max(best, s.score(l[j], top, word[j], id + j));
        }
    });
    return best;
}

// The best score of a thread's tokens of the list, of those that the filters keep.
__device__ uint64_t sample_listed(const Sampler& s, float top) {
    __shared__ uint64_t keys[LISTED];
    const SampleState& state = s.state();
    const SampleRow& row = s.row();
    int n = state.listed, size = 64;
    while (size < n) size *= 2;
    for (int i = threadIdx.x; i < size; i += SAMPLE_THREADS) keys[i] = i < n ? state.list[i] : 0;
    for (int run = 2; run <= size; run *= 2)        // bitonic sort, the largest key first
        for (int step = run / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < size / 2; i += SAMPLE_THREADS) {
                int left = 2 * i - (i & step - 1), right = left + step;
                uint64_t a = keys[left], b = keys[right];
                if ((a < b) == ((left & run) == 0)) keys[left] = b, keys[right] = a;
            }
        }
    __syncthreads();

    if (row.top_k) n = min(uint64_t(n), row.top_k - state.cut.before.count);
    const int each = (size + SAMPLE_THREADS - 1) / SAMPLE_THREADS, first = each * threadIdx.x;
    const int end = min(n, first + each);
    auto weight = [&](int i) { return sample_weight(float(s.x_of(logit_of_key(keys[i]), top))); };
    uint64_t mine = 0, best = 0;
    for (int i = first; i < end; i++) mine += weight(i);
    uint64_t kept = state.kept ? state.kept : block_all(mine, plus);
    uint64_t limit = row.top_p ? top_p_limit(row.top_p, kept) : ~0ull;
    uint64_t before = state.cut.before.weight + block_sum_before(mine);
    for (int i = first; i < end && before < limit; before += weight(i++)) {
        int id = id_of_key(keys[i]);
        best = max(best, s.score(logit_of_key(keys[i]), top, s.word(id), id));
    }
    return best;
}

// tokens[row], logprobs[row] = sampling.sample(logits[row] (n_vocab), draws[row]); -1 for padding
// and for a row with a NaN, a +inf or no finite logit. The token (0 for -1) also goes to
// last_tokens[slot of the row], for the next step's embed; it is counted in the adjustments.
// Last launch. Thread 0 of a block holds the result: of the first, or, if there is noise, of the
// last to end. Bytes: 4 n_vocab, 12 with adjustments, in each launch that reads the row: in the
// first, in the second with top_k or top_p, in this one if there is noise.
KERNEL __launch_bounds__(SAMPLE_THREADS, 2) sample(const Sampler s) {
    follow_predecessor();
    const SampleRow& row = s.row();
    const uint64_t top_key = s.state().top;
    const float top = logit_of_key(top_key);
    const bool sound = row.active && isfinite(top);
    const int slot = row.active ? s.slots[s.logit_rows[blockIdx.y]] : 0;
    int token = sound ? id_of_key(top_key) : -1;
    if (sound && row.inverse_temperature > 0.0) {
        uint64_t best = block_all(sample_best(s, top, token), larger<uint64_t>);
        if (threadIdx.x == 0) atomicMax(&s.state().best, (unsigned long long)best);
        if (!last_to_arrive(s.state().arrived, gridDim.x)) return;
        if (s.filters()) best = block_all(sample_listed(s, top), larger<uint64_t>);
        token = MOST_ID - int(max(best, uint64_t(s.state().best)) & MOST_ID);
    } else if (blockIdx.x > 0) return;

    float logprob = 0.0f;
    if (sound) {
        const float drawn = s.row_logits()[token];
        float raw_top = -INFINITY;
        for (int i = threadIdx.x; i < s.n_slices(); i += SAMPLE_THREADS)
            raw_top = fmaxf(raw_top, s.slice(i).top);
        raw_top = block_all(raw_top, larger<float>);
        uint64_t weight = 0;
        for (int i = threadIdx.x; i < s.n_slices(); i += SAMPLE_THREADS) {
            uint64_t scale = sample_weight(__fsub_rn(s.slice(i).top, raw_top));
            double product = __dmul_rn(double(s.slice(i).weight), double(scale));
            weight += uint64_t(__dmul_rn(product, 1.0 / (1LL << WEIGHT_BITS)));
        }
        double all = __dmul_rn(double(block_all(weight, plus)), 1.0 / (1LL << WEIGHT_BITS));
        double gap = __dsub_rn(double(drawn), double(raw_top));
        logprob = float(__dsub_rn(gap, sample_log(all)));
    }
    if (threadIdx.x > 0) return;
    s.tokens[blockIdx.y] = token;
    s.logprobs[blockIdx.y] = logprob;
    if (!row.active) return;
    s.last_tokens[slot] = max(token, 0);
    if (sound && row.adjustment >= 0) s.row_adjustments()[token].count++;
    s.state().top = s.state().best = s.state().listed = 0;
}

// ---------------------------------------------------------------------------------------------
// Mixtures of experts. A pair is a token and one of its experts; an item of work is up to 8 or 32
// pairs of one expert, as many as a tile of a matrix product has tokens.
// ---------------------------------------------------------------------------------------------

constexpr int LANE_EXPERTS = 16, MOST_EXPERTS = 32 * LANE_EXPERTS;
constexpr int ROUTE_ROWS = 8;  // of a block: a warp each
constexpr float SMALLEST_SUM = 6.1e-5f;

struct Routing {
    const float *logits, *bias;
    const int* slots;
    float* weights;
    int *experts, *pairs;
    int4* items;
    unsigned* finished;  // blocks, zero before and after
    Int rows, stride, n_experts, k, sigmoid, norm;
    float scale;
    Int n_groups, n_groups_used, tile_bits, n_items;
};

// One warp: the k best of a row's experts. Lane l holds the `own` experts from own * l on.
DEVICE void route_row(const Routing& work, int row, float (&scores)[MOST_EXPERTS]) {
    const int lane = threadIdx.x & 31, n_experts = work.n_experts, own = (n_experts + 31) / 32;
    const auto each = [&](auto visit) {  // of the lane's experts
        for (int i = 0; i < LANE_EXPERTS; i++) {
            if (i >= own) break;
            visit(i, own * lane + i);
        }
    };
    const bool real = work.slots[row] >= 0;
    float p[LANE_EXPERTS], largest = -INFINITY, sum = 0.0f;
    each([&](int i, int expert) {
        p[i] = expert < n_experts ? work.logits[int64_t(row) * work.stride + expert] : -INFINITY;
        largest = fmaxf(largest, p[i]);
    });
    largest = warp_max(largest);
    each([&](int i, int) {
        sum += p[i] = work.sigmoid ? 1.0f / (1.0f + expf(-p[i])) : expf(p[i] - largest);
    });
    const float share = work.sigmoid ? 1.0f : 1.0f / warp_sum(sum);

    unsigned rank[LANE_EXPERTS], chosen = 0;  // bit i: the lane's expert i
    each([&](int i, int expert) {
        p[i] *= share;
        scores[expert] = work.bias && expert < n_experts ? p[i] + work.bias[expert] : p[i];
        rank[i] = expert < n_experts ? float_rank(scores[expert]) : 0;
    });
    if (work.n_groups > 1) {  // lane g holds group g
        __syncwarp();
        const int size = n_experts / work.n_groups;
        float best = -INFINITY, second = -INFINITY;
        for (int i = lane * size; lane < work.n_groups && i < (lane + 1) * size; i++) {
            second = fmaxf(second, fminf(best, scores[i]));
            best = fmaxf(best, scores[i]);
        }
        const float mine = work.sigmoid ? best + second : best;
        int better = 0;
        for (int g = 0; g < work.n_groups; g++) {
            const float other = __shfl_sync(ALL_LANES, mine, g);
            better += other > mine || (other == mine && g < lane);
        }
        const unsigned kept = __ballot_sync(ALL_LANES, better < work.n_groups_used);
        each([&](int i, int expert) {
            if (rank[i] && !(kept >> expert / size & 1)) rank[i] = 1;
        });
    }
    for (int n = 0; n < work.k; n++) {  // ties go to the lower expert: lower lane, lower i
        unsigned best = 0, at = 0;
        each([&](unsigned i, int) {
            if (rank[i] > best && !(chosen >> i & 1)) best = rank[i], at = i;
        });
        const unsigned top = __reduce_max_sync(ALL_LANES, best);
        if (__ffs(__ballot_sync(ALL_LANES, best == top)) - 1 == lane) chosen |= 1u << at;
    }
    sum = 0.0f;
    int at = row * work.k;  // of the lane's first chosen one
    each([&](int i, int) { sum += chosen >> i & 1 ? p[i] : 0.0f; });
    for (int i = 0; i < own; i++)
        at += __popc(__ballot_sync(ALL_LANES, chosen >> i & 1) & ((1u << lane) - 1));
    const float factor = work.norm ? work.scale / fmaxf(warp_sum(sum), SMALLEST_SUM) : work.scale;
    each([&](int i, int expert) {
        if (!(chosen >> i & 1)) return;
        work.experts[at] = real ? expert : -1;
        work.weights[at++] = real ? p[i] * factor : 0.0f;
    });
}

// One block, whose counts are zero: the pairs sorted by expert, those of one in any order, and the
// items: (expert, its first place in pairs, how many, 0). n_items is what the worst spread needs;
// items without need have no pairs.
DEVICE void list_items(const Routing& work, int (&counts)[MOST_EXPERTS]) {
    const int n_pairs = work.rows * work.k, bits = work.tile_bits, tile = 1 << bits;
#pragma unroll 4
    for (int pair = threadIdx.x; pair < n_pairs; pair += blockDim.x)
        if (work.experts[pair] >= 0) atomicAdd(&counts[work.experts[pair]], 1);
    __syncthreads();
    if (threadIdx.x < 32) {  // the lane's experts lie together
        const int lane = threadIdx.x, own = (work.n_experts + 31) / 32;
        const auto needs = [&](int e) {  // pairs, and items in the upper half
            return uint64_t((counts[e] + tile - 1) >> bits) << 32 | unsigned(counts[e]);
        };
        uint64_t mine = 0;
        for (int e = own * lane; e < own * lane + own; e++) mine += needs(e);
        uint64_t before = mine;
        for (int o = 1; o < 32; o *= 2) {
            const uint64_t other = __shfl_up_sync(ALL_LANES, before, o);
            if (lane >= o) before += other;
        }
        const int n_items = __shfl_sync(ALL_LANES, before, 31) >> 32;
        before -= mine;
        for (int e = own * lane; e < own * lane + own; e++) {
            const int first = before, item = before >> 32, count = counts[e];
            before += needs(e);
            counts[e] = first;  // where its next pair goes
            for (int i = 0; i * tile < count; i++)
                work.items[item + i] = {e, first + i * tile, min(tile, count - i * tile), 0};
        }
        for (int i = n_items + lane; i < work.n_items; i += 32) work.items[i] = {};
    }
    __syncthreads();
#pragma unroll 4
    for (int pair = threadIdx.x; pair < n_pairs; pair += blockDim.x)
        if (work.experts[pair] >= 0) work.pairs[atomicAdd(&counts[work.experts[pair]], 1)] = pair;
}

// experts and weights [rows, k]: the k best of a row's n_experts logits by probability + bias (or
// null), ascending, and their share. Ranks are ordered as the scores: 0 is no expert, 1 one whose
// group is left out. Rows with slot < 0 get -1 and 0. Then what list_items says.
// PRECOND: grid (ceil(rows / 8)), 256 threads; k <= n_experts <= min(stride, 512); n_groups <= 32,
// of equal size, with sigmoid of two experts or more. One warp holds a row; the block that ends
// last lists the items.
KERNEL __launch_bounds__(32 * ROUTE_ROWS) route(const __grid_constant__ Routing work) {
    __shared__ float scores[ROUTE_ROWS][MOST_EXPERTS];
    __shared__ int counts[MOST_EXPERTS];
    let_successor_start();
    for (int e = threadIdx.x; e < MOST_EXPERTS; e += blockDim.x) counts[e] = 0;
    wait_for_predecessor();
    const int warp = threadIdx.x / 32, row = blockIdx.x * ROUTE_ROWS + warp;
    if (row < work.rows) route_row(work, row, scores[warp]);
    if (last_to_arrive(*work.finished, gridDim.x)) list_items(work, counts);
}

// The tokens of an item, by their rows of y; `per_x` neighbours of these share a row of x.
struct ScatteredRows {
    const int* pairs;  // that the item's tokens are, or null: every step-th row
    int first, step, last, per_x;
    DEVICE int y(int token) const {  // past the end: the last token again
        const int at = first + min(token, last) * step;
        return pairs ? pairs[at] : at;
    }
    DEVICE int x_of(int y_row) const { return y_row / per_x; }
};

struct LinearExperts {
    Linear linear;      // each expert's tiles and scales lie behind those of the one before
    const int4* items;  // or null: each token wants all `heads`, row by row of x
    const int* pairs;
    Int per_x, heads;   // heads: 1 with items
    Int known;          // the items were there when the predecessor let this kernel start
};

// Calls body(Is<FORMAT>, product, place, rows) for the item blockIdx.y, if it has tokens.
template <int TOKENS, typename Body> DEVICE void with_item(const LinearExperts& work, Body body) {
    Product product = work.linear.product;
    const int head = blockIdx.y % work.heads, token = blockIdx.y / work.heads * TOKENS;
    int4 item = {head, token * work.heads + head, min(TOKENS, product.rows / work.heads - token),
                 0};
    if (work.items) item = work.items[blockIdx.y];
    if (item.z == 0) return wait_for_predecessor();
    product.rows.value = item.z;
    product.weight_scale += int64_t(item.x) * product.columns;
    Place place = place_in(work.linear.stack, blockIdx.x);
    with_format(place.format, [&](auto format) {
        place.packed +=
            Packed<format>::tile_bytes(product.chunks) * tiles_of(place.rows) * item.x;
        body(format, product, place,
             ScatteredRows{work.pairs, item.y, work.heads, item.z - 1, work.per_x});
    });
}

// y [pairs, columns] = x [pairs / per_x, K] times the rows of the pair's expert, or with heads
// y [tokens, heads, columns] of x [tokens, heads, K]. Items of <= 8 tokens.
// PRECOND: grid (sum of blocks, items), 128 threads. As linear_few_8 with four warps a block: K of
// an expert is short (3 parts of 768), and warps without a part would idle.
constexpr int EXPERT_WARPS = 4;
KERNEL __launch_bounds__(32 * EXPERT_WARPS, 6)
linear_experts_8(const __grid_constant__ LinearExperts work) {
    __shared__ float sums[2][FEW_SUMS<8>];
    if (!work.known) wait_for_predecessor();
    let_successor_start();  // when the items are there for it
    with_item<8>(work, [&](auto format, const Product& product, const Place& place, auto rows) {
        linear_few<format, 1, 6, EXPERT_WARPS>(product, place, rows, sums);
    });
}

// The same with items of <= 32 tokens, and 128 columns a block: x comes from L2 for each of them.
// PRECOND: grid (sum of blocks, items), 256 threads.
KERNEL __launch_bounds__(256, 3) linear_experts_some(const __grid_constant__ LinearExperts work) {
    extern __shared__ __align__(128) uint8_t shared[];
    wait_for_predecessor();
    with_item<32>(work, [&](auto format, const Product& product, const Place& place, auto rows) {
        linear_staged<format, 32, 128, 8, 1, 40>(product, place, rows, 0, shared);
    });
}

// h [rows, cols] += weight * y of a row's k pairs in order, from zero, then shared * gate.
// shared [rows, cols] or null; gate: sigmoid of the last of n_logits logits, 1 if those are null.
// PRECOND: grid (ceil(cols / 256), rows), 256 threads. Moves 4 (k + 3) cols bytes a row.
KERNEL combine(const float* y, const int* experts, const float* weights, const float* shared,
               const float* logits, float* h, int k, int cols, int n_logits) {
    follow_predecessor();
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (column >= cols) return;
    float total = 0.0f;
#pragma unroll 4
    for (int pair = row * k; pair < row * k + k; pair++)
        if (experts[pair] >= 0) total += weights[pair] * y[int64_t(pair) * cols + column];
    const int64_t at = int64_t(row) * cols + column, gate = int64_t(row + 1) * n_logits - 1;
    if (shared) total += logits ? times_sigmoid(shared[at], logits[gate]) : shared[at];
    h[at] += total;
}

// ---------------------------------------------------------------------------------------------
// Gated delta net: S f32 [d of k, d of v] per v head, one token after the other. A token's update
// is the same arithmetic wherever it happens: as a row of 1 or of 512, or later as a pending token.
// In memory S is transposed, [v head][d of v][d of k]: a column is contiguous.
// ---------------------------------------------------------------------------------------------

constexpr int DELTA_DIM = 128;  // values of a head of q, k and v
constexpr int MOST_TAPS = 4;    // of the convolution

// What delta_conv and delta_rule work on: rows of u hold q | k | v | z | beta | alpha, rows of c
// q | k | v | beta | decay, records u of q | k | v, then k | delta | beta | decay; o is
// [rows, H_v, DELTA_DIM].
struct DeltaNet {
    const float *u, *conv, *dt, *decay;  // conv [q | k | v, width], dt and decay [H_v]
    float *c, *o, *states;               // states: this layer of slot 0
    const int *spans, *slots, *positions;
    Int rows, k_heads, v_heads, grouped, width, ring;
    Int u_values, c_values, record_values, slot_values;  // how far the next one is
    float eps;

    DEVICE int channels() const { return (2 * k_heads + v_heads) * DELTA_DIM; }
    DEVICE const float* u_row(int row) const { return u + int64_t(row) * u_values; }
    DEVICE float* c_row(int row) const { return c + int64_t(row) * c_values; }
    DEVICE float* state(int slot) const { return states + int64_t(slot) * slot_values; }
    DEVICE float* record(int slot, int position) const {
        return state(slot) + v_heads * DELTA_DIM * DELTA_DIM +
               unsigned(position) % unsigned(ring) * record_values;
    }
};

// c of every row: silu of the causal convolution of u, q and k brought to length 1 per head, q then
// divided by sqrt(d); beta = sigmoid(beta), decay = exp(decay softplus(alpha + dt)).
// PRECOND: grid (blocks, ceil((2 H_k + H_v) / 4)), 128 threads; the rows of a slot lie together;
// width <= 4. A block takes neighbouring rows, of four heads: one warp holds one head, for v with
// its beta and decay. Reads u `width` times, mostly from the L1 cache.
KERNEL delta_conv(const __grid_constant__ DeltaNet work) {
    let_successor_start();
    const int lane = threadIdx.x & 31, head = blockIdx.y * 4 + threadIdx.x / 32;
    const int v_head = head - 2 * work.k_heads, at = head * DELTA_DIM + lane, width = work.width;
    if (v_head >= work.v_heads) return;
    float weights[MOST_TAPS][DELTA_DIM / 32];  // of the row itself, the one before, ...
    for (int back = 0; back < MOST_TAPS; back++)
        for (int i = 0; i < DELTA_DIM / 32; i++)
            weights[back][i] =
                back < width ? work.conv[(at + 32 * i + 1) * width - 1 - back] : 0.0f;
    const int gate = max(v_head, 0);  // q and k have none
    const float dt = work.dt[gate], decay = work.decay[gate];
    const int share = (work.rows + gridDim.x - 1) / gridDim.x, start = blockIdx.x * share;
    if (share == 1 && lane < 4 * (width - 1) && work.slots[start] >= 0)  // of earlier steps
        prefetch(work.record(work.slots[start], max(work.positions[start] - 1 - lane / 4, 0)) +
                 head * DELTA_DIM + lane % 4 * 32);
    wait_for_predecessor();
    for (int row = start; row < min(work.rows, start + share); row++) {
        const int slot = work.slots[row], position = work.positions[row];
        float u[MOST_TAPS][DELTA_DIM / 32];  // first all loads, which wait together
        for (int back = 0; back < MOST_TAPS; back++) {
            const bool here = row >= back && work.slots[max(row - back, 0)] == slot;  // in u
            const bool real = back == 0 || (back < width && slot >= 0 && position >= back);
            const float* from = back == 0 || here ? work.u_row(row - back)
                                                  : work.record(slot, position - back);
            for (int i = 0; i < DELTA_DIM / 32; i++) u[back][i] = real ? from[at + 32 * i] : 0.0f;
        }
        const float* gates = work.u_row(row) + work.u_values - 2 * work.v_heads + gate;
        const float beta = gates[0], alpha = gates[work.v_heads] + dt;
        float x[DELTA_DIM / 32] = {}, squares = 0.0f;
        for (int back = MOST_TAPS - 1; back >= 0; back--)
            for (int i = 0; i < DELTA_DIM / 32; i++)
                x[i] = fmaf(u[back][i], weights[back][i], x[i]);
        for (float& value : x) value = silu(value), squares = fmaf(value, value, squares);
        const float length = sqrtf(warp_sum(squares) + work.eps);
        const float factor = v_head >= 0            ? 1.0f
                             : head < work.k_heads ? 1.0f / (length * sqrtf(DELTA_DIM))
                                                   : 1.0f / length;
        float* c = work.c_row(row);
        for (int i = 0; i < DELTA_DIM / 32; i++) c[at + 32 * i] = x[i] * factor;
        if (v_head < 0 || lane > 0) continue;
        const float softplus = fmaxf(alpha, 0.0f) + log1pf(expf(-fabsf(alpha)));
        c += work.channels() + v_head;
        c[0] = times_sigmoid(1.0f, beta);
        c[work.v_heads] = expf(decay * softplus);
    }
}

// A lane holds 16 values of k, 4 from 4 part on, of each 32, of two columns of S. Eight lanes,
// part = 0 .. 7, share these. A warp has 8 columns, a block as many as a warp has lanes.
constexpr int DELTA_VALUES = 16, DELTA_PARTS = 8, DELTA_COLUMNS = 2, DELTA_WARPS = 4;
constexpr int DELTA_BLOCK_COLUMNS = 32, DELTA_BLOCKS = DELTA_DIM / DELTA_BLOCK_COLUMNS;

// What a block needs of a token; of a pending one k, delta in place of v, and decay. It waits in
// shared memory: with loads from global memory, one token ahead, 64 rows of decode of the 27B took
// a fifth longer on an H200.
struct DeltaToken {
    float k[DELTA_DIM], q[DELTA_DIM], v[DELTA_BLOCK_COLUMNS], beta, decay, padding[2];
};

DEVICE void load_part(float (&x)[DELTA_VALUES], const float* from) {
    for (int i = 0; i < DELTA_VALUES; i += 4)
        *reinterpret_cast<float4*>(x + i) = load4(from + DELTA_PARTS * i);
}
DEVICE float part_product(const float (&a)[DELTA_VALUES], const float (&b)[DELTA_VALUES]) {
    float even = 0.0f, odd = 0.0f;  // two chains: a product waits for the one before it
    for (int i = 0; i < DELTA_VALUES; i += 2)
        even = fmaf(a[i], b[i], even), odd = fmaf(a[i + 1], b[i + 1], odd);
    return __fadd_rn(even, odd);
}
// The sums over the parts of four values. A lane gives half of them away, twice: it ends with
// a[column] if bit 0 of it is clear, else with b[column], where `column` is its bit 1.
DEVICE float sum_of_parts(const float (&a)[DELTA_COLUMNS], const float (&b)[DELTA_COLUMNS]) {
    const bool keeps_b = threadIdx.x & 1, second = threadIdx.x & 2;
    float x[DELTA_COLUMNS];
    for (int j = 0; j < DELTA_COLUMNS; j++)
        x[j] = __fadd_rn(keeps_b ? b[j] : a[j],
                         __shfl_xor_sync(ALL_LANES, keeps_b ? a[j] : b[j], 1));
    const float sum = __fadd_rn(second ? x[1] : x[0],
                                __shfl_xor_sync(ALL_LANES, second ? x[0] : x[1], 2));
    return __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 4));
}
DEVICE void enter_state(float (&s)[DELTA_VALUES], const float (&k)[DELTA_VALUES], float delta,
                        float decay) {
    for (int i = 0; i < DELTA_VALUES; i++) s[i] = fmaf(k[i], delta, __fmul_rn(decay, s[i]));
}

// Per span and v head: S takes the pending tokens from their records, then the rows, each of which
// gets o = S^T q. Stored is S behind the first `entering` of all these tokens: none, those that are
// pending, or all. Rows that do not enter become records, with the delta that S took in place of v:
// to take it again needs no sums. Of rows that enter only the u counts that the next convolution
// looks back at.
// PRECOND: grid (DELTA_BLOCKS H_v / H_k, H_k, spans), 128 threads; spans int32 (first row, rows,
// slot, position, pending, entering); pending + rows that do not enter <= ring.
// S is in registers; it is read once and stored at most once. The last span comes first: prompts
// stand there, and take longest. State and records are those of earlier steps: they are on their
// way before the wait.
template <bool PROMPT> DEVICE void delta_rule(const DeltaNet& work) {
    let_successor_start();
    constexpr int AHEAD = PROMPT ? 16 : 8;  // tokens that wait in shared memory, twice
    __shared__ __align__(16) DeltaToken ring[2][AHEAD];
    const int* span = work.spans + 6 * (gridDim.z - 1 - blockIdx.z);
    const int first = span[0], rows = span[1], slot = span[2], position = span[3],
              pending = span[4], entering = span[5];
    const bool rows_enter = entering > pending;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, part = lane % DELTA_PARTS;
    const int column = threadIdx.x / DELTA_PARTS * DELTA_COLUMNS;  // the lane's first in the block
    const int k_head = blockIdx.y, of_group = blockIdx.x / DELTA_BLOCKS;
    const int head = work.grouped ? k_head * (gridDim.x / DELTA_BLOCKS) + of_group
                                  : of_group * work.k_heads + k_head;
    const int block_v = head * DELTA_DIM + blockIdx.x % DELTA_BLOCKS * DELTA_BLOCK_COLUMNS;
    const int n_k = work.k_heads * DELTA_DIM, n_v = work.v_heads * DELTA_DIM;
    const bool has_o = (part & 5) == 1;  // in what sum_of_parts gives
    float* o = work.o + int64_t(first - 1) * n_v + block_v + column + part / 2;  // a row behind
    if (slot < 0) {
        wait_for_predecessor();
        for (int row = 0; has_o && row < rows; row++) *(o += n_v) = 0.0f;
        return;
    }
    // Copies the tokens from `t` rows behind the first one on, up to `end`. From k on, a record is
    // like a row of c.
    const float* c = work.c_row(first);
    auto fetch = [&](int t, int end, DeltaToken* token) {
#pragma unroll 1
        for (t += warp, token += warp; t < end; t += DELTA_WARPS, token += DELTA_WARPS) {
            const float* k = t < 0 ? work.record(slot, position + t) + work.channels()
                                   : c + int64_t(t) * work.c_values + n_k;
            const int at = 4 * lane, of_k_head = k_head * DELTA_DIM + at;
            copy_async<16>(__cvta_generic_to_shared(token->k + at), k + of_k_head);
            if (t >= 0)
                copy_async<16>(__cvta_generic_to_shared(token->q + at), k - n_k + of_k_head);
            copy_async<4>(__cvta_generic_to_shared(token->v + lane), k + n_k + block_v + lane);
            if (lane < 2)
                copy_async<4>(__cvta_generic_to_shared(&token->beta + lane),
                              k + n_k + n_v + head + lane * work.v_heads);
        }
        asm volatile("cp.async.commit_group;");
    };
    int t = -pending, end = min(t + AHEAD, 0);
    fetch(t, end, ring[0]);
    float* state = work.state(slot) + (block_v + column) * DELTA_DIM + 4 * part;
    float s[DELTA_COLUMNS][DELTA_VALUES] = {};
    for (int j = 0; position > pending && j < DELTA_COLUMNS; j++)
        load_part(s[j], state + j * DELTA_DIM);
    auto store_state = [&] {
        for (int j = 0; j < DELTA_COLUMNS; j++)
            for (int i = 0; i < DELTA_VALUES; i += 4)
                *reinterpret_cast<float4*>(state + j * DELTA_DIM + DELTA_PARTS * i) =
                    load4(s[j] + i);
    };
    wait_for_predecessor();
    // This lane's part of o is added up with the products of the next token: a sum over lanes is a
    // long wait.
    float out[DELTA_COLUMNS] = {};
    float* record = work.record(slot, position) + work.channels() + n_k + block_v + column;
    const float* ring_end = work.record(slot, 0) + work.ring * work.record_values;
    for (int turn = 0; t < rows; turn ^= 1) {
        const int next = min(end + AHEAD, end < 0 ? 0 : rows);
        fetch(end, next, ring[turn ^ 1]);
        asm volatile("cp.async.wait_group 1;");
        __syncthreads();
        const DeltaToken* token = ring[turn];
        for (; t < end && t < 0; t++, token++) {
            float k[DELTA_VALUES];
            load_part(k, token->k + 4 * part);
            for (int j = 0; j < DELTA_COLUMNS; j++)
                enter_state(s[j], k, token->v[column + j], token->decay);
            if (t == -1 && entering == pending) store_state();
        }
        // Unrolled, a token's loads are on their way during the sums of the one before it: 512 rows
        // of the 27B take 153 us a layer on an H200, in the kernel for decode 194. But it takes
        // registers, and decode waits for memory: 64 rows took 81 us with 5 blocks in a
        // multiprocessor, 71 with 6.
#pragma unroll (PROMPT ? 4 : 1)
        for (; t < end; t++, token++) {
            float k[DELTA_VALUES], q[DELTA_VALUES], known[DELTA_COLUMNS], delta[DELTA_COLUMNS];
            load_part(k, token->k + 4 * part);
            load_part(q, token->q + 4 * part);
            const float2 v = *reinterpret_cast<const float2*>(token->v + column);
            const float beta = token->beta, decay = token->decay;
            for (int j = 0; j < DELTA_COLUMNS; j++) known[j] = part_product(s[j], k);  // S^T k
            const float sum = sum_of_parts(known, out);
            if (has_o && t > 0) *o = sum;
            o += n_v;
            for (int j = 0; j < DELTA_COLUMNS; j++) {
                const float all = __shfl_sync(ALL_LANES, sum, lane - part + 2 * j);
                delta[j] = __fmul_rn(beta, fmaf(-decay, all, j ? v.y : v.x));
                enter_state(s[j], k, delta[j], decay);
                out[j] = part_product(s[j], q);
            }
            if (part == 0) *reinterpret_cast<float2*>(record) = make_float2(delta[0], delta[1]);
            record += work.record_values;
            if (record >= ring_end) record -= work.ring * work.record_values;
        }
        __syncthreads();
        end = next;
    }
    const float sum = sum_of_parts(out, out);
    if (has_o) *o = sum;
    if (rows_enter) store_state();

    const int channels = work.channels(), values = rows_enter ? channels : work.record_values;
    const int kept = rows_enter ? min(rows, work.width - 1) : rows;
    for (int i = 4 * ((blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x);
         i < kept * values; i += 4 * gridDim.x * gridDim.y * blockDim.x) {
        const int row = rows - kept + i / values, at = i % values;
        if (at < channels + n_k || at >= channels + n_k + n_v)  // delta is there
            *reinterpret_cast<float4*>(work.record(slot, position + row) + at) =
                load4(at < channels ? work.u_row(first + row) + at
                                    : c + int64_t(row) * work.c_values + at - channels + n_k);
    }
}
KERNEL __launch_bounds__(32 * DELTA_WARPS, 7)
delta_rule_decode(const __grid_constant__ DeltaNet work) { delta_rule<false>(work); }
KERNEL __launch_bounds__(32 * DELTA_WARPS, 4)
delta_rule_prompt(const __grid_constant__ DeltaNet work) { delta_rule<true>(work); }

// x[r] = rmsnorm of each head of o, times norm and silu(z): o f32 [rows, cols], z in rows of u that
// are u_stride long -> x f16 [rows, stride], scale.
// PRECOND: grid (rows), at most 1024 threads; cols = stride = whole heads of DELTA_DIM.
// One block holds one row, one warp a head at a time.
KERNEL delta_norm(const float* o, const float* z, const float* norm, uint4* x, float* scale,
                  int cols, int u_stride, float eps) {
    follow_predecessor();
    o += int64_t(blockIdx.x) * cols;
    z += int64_t(blockIdx.x) * u_stride;
    Row values([=](int i) {
        const float4 head = load4_if(i < cols, o + i);
        const float inverse = rsqrtf(warp_sum(squares(head)) / DELTA_DIM + eps);
        return head * inverse * load4(norm + i % DELTA_DIM) * silu(load4_if(i < cols, z + i));
    }, cols);
    values.store_scaled(values.largest_of_all(), 1.0f, cols, x, scale);
}
