// Linear layers: y = epilogue(x w^T), halves in and out, sums in float32.
//
//   x (rows, k), rows x_stride apart; weights (columns, k) row-major as nn.Linear has them, up to three, each with its own columns of y;
//   bias (columns); residual and y (rows, columns), the columns of the weights side by side. k and columns are multiples of 8.
//   plain   y = x w^T + bias + residual
//   GATE    y = (x a^T + bias_a) * gelu(x b^T + bias_b) + residual, where the one weight is (2 columns, k): a's rows, then b's
//   SPLIT   partial[s] = x w^T over the s-th part of k, which linear_sum adds in the order of s before it does all the rest
//   MANY    plain, by up to 144 weights: all that a step makes of its prompt, or of its time embedding. Together they have work-groups
//           enough without parts of k. A work-group finds its weight by bisection, in scalar registers.
//   linear_gate  y = a * gelu(b) + residual of x (rows, 2 columns), which a library has made: a, then b, with their bias
//
// Tiling. M is columns of y, that is rows of the weights, and N is rows of x: both lie along k, as A and B want it, and a lane's rows of D
// lie together in y. A work-group computes WAVES_OUT * TILES_OUT * 16 rows of the weights by WAVES_ROWS * TILES_ROWS * 16 rows of x; with
// GATE half of each wave's tiles are a's and half are b's, so that both factors of an element are in one lane and no copy of the weights
// with mingled rows is needed. CHUNK_K of k are staged in LDS while the next are on their way through registers into a second buffer.
// Rows past the last repeat it, and what they give is not written; what is past the last k is zero on both sides. `together`
// blocks of rows pass along the weights, so that what work-groups read at the same time stays in the cache.
//
// What a lane stages is found by 32 bits of its own from a scalar address, and fragments come by one read each: in a pass of the loop
// 5 to 9 vector instructions stand beside the matrix unit's on RDNA3 and 4, where 32 to 56 stood with 64-bit addresses and reads that
// LLVM 19 took apart. For RDNA2 see mma.h.
//
// Tried on an H200 and lost: writing the next chunk to LDS in the midst of a chunk's products, so that it does not wait for all waves
// (a step of SDXL 35.9 ms of linear layers instead of 35.4).
#include "common/mma.h"
#include "common/tile.h"

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif

struct LinearParams {  // the same in lib_rocm_sd/ops/linear/kernel.py
    const u16* x;
    const u16 *weights_0, *weights_1, *weights_2;
    const u16 *bias_0, *bias_1, *bias_2;  // null where there is none
    const u16* residual;                  // null, or like out, which it may be
    u16* out;
    float* partial;                             // (parts, rows, columns), with GATE twice the columns
    u32 x_stride, residual_stride, out_stride;  // halves from one row to the next
    u32 rows, k;
    u32 columns_0, columns_1, columns_2, columns;  // of y: by each weight, and all
    u32 row_blocks, blocks, together;              // work-groups along the rows, a multiple of `together`, and along the columns
    u32 parts, part_chunks;                        // of k, and the chunks in each; the last may have fewer
};

#if MANY
constexpr int kMostWeights = 144;  // the argument has 4 KiB
struct LinearManyParams : LinearParams {  // the same in kernel.py; what LinearParams says of single weights is not used
    const u16* weights[kMostWeights];
    const u16* bias[kMostWeights];         // null where there is none
    u32 first_column[kMostWeights + 1];    // of y, of each weight; then the number of columns
    u32 first_block[kMostWeights];         // along the columns; the largest number where there is no weight
};
using Params = LinearManyParams;
#else
using Params = LinearParams;
#endif

// The upper tail of the normal distribution from z >= 0 on, within 1e-5 of itself: exp(-z^2 / 2) times a polynomial in 1 / (1 + 0.3 z),
// fitted to it by least squares.
DEVICE float upper_tail(float z) {
    const float t = reciprocal(fma_f32(0.3f, z, 1.0f));
    float sum = fma_f32(0.0356745385f, t, -0.157202035f);
    sum = fma_f32(sum, t, 0.206351623f);
    sum = fma_f32(sum, t, -0.0536818355f);
    sum = fma_f32(sum, t, 0.128560632f);
    sum = fma_f32(sum, t, 0.0999138057f);
    sum = fma_f32(sum, t, 0.120753907f);
    sum = fma_f32(sum, t, 0.119629301f);
    return sum * t * exp2_fast(-0.72134752044448170f * z * z);
}

// As torch's without an approximation: infinite for infinity, NaN for -infinity and NaN.
DEVICE float gelu(float x) {
    const float tail = upper_tail(abs_f32(x));
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <int N> DEVICE float half_of(const Words<N>& x, int i) { return Half::to((u16)(x.word[i / 2] >> (i % 2 * 16))); }

// N halves of y, from column `column` on, from sums that have their bias: gated, with the residual, rounded once.
template <int N> DEVICE void write_row(const LinearParams& p, int row, int column, float (&sums)[N]) {
    if (p.residual) {
        const auto added = *(const Words<N / 2>*)in_global(p.residual + (i64)row * p.residual_stride + column);
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] += half_of(added, i);
    }
    Words<N / 2> y;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) y.word[i] = pack2<Half>(sums[2 * i], sums[2 * i + 1]);
    *(Words<N / 2>*)in_global(p.out + (i64)row * p.out_stride + column) = y;
}

template <int N> DEVICE void add_bias(const u16* bias, int column, float (&sums)[N]) {
    if (!bias) return;
    const auto added = *(const Words<N / 2>*)(bias + column);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += half_of(added, i);
}

#if defined(STEP_SUM)

// One work-item makes eight columns of a row.
KERNEL(THREADS) linear_sum(LinearParams p) {
    const u32 item = block_id() * THREADS + thread_id(), eights = p.columns / 8;
    const u32 row = item / eights;
    int column = (int)(item % eights * 8);
    if (!(row < p.rows)) return;
    constexpr int kHalves = GATE ? 2 : 1;
    float sums[kHalves][8] = {};
    const float* from = p.partial + (i64)row * (p.columns * kHalves) + column;
    for (u32 part = 0; part < p.parts; ++part, from += (i64)p.rows * (p.columns * kHalves))
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const auto four = *(const Words<4>*)(from + h * p.columns + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[h][i + j] += bits_float(four.word[j]);
            }
    const int all = column;
    const u16* bias = p.bias_0;
    if (!GATE && column >= (int)p.columns_0) {
        column -= (int)p.columns_0, bias = p.bias_1;
        if (column >= (int)p.columns_1) column -= (int)p.columns_1, bias = p.bias_2;
    }
    add_bias(bias, column, sums[0]);
    if constexpr (GATE) {
        add_bias(bias, column + (int)p.columns, sums[1]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[0][i] *= gelu(sums[1][i]);
    }
    write_row(p, (int)row, all, sums[0]);
}

#elif defined(STEP_GATE)

// One work-item makes eight columns of a row, each by itself: two at a time, LLVM copies constants into pairs of which one half is never
// read and never written.
KERNEL(THREADS) linear_gate(LinearParams p) {
    const u32 item = block_id() * THREADS + thread_id(), eights = p.columns / 8;
    const u32 row = item / eights;
    const int column = (int)(item % eights * 8);
    if (!(row < p.rows)) return;
    const u16* from = p.x + (i64)row * p.x_stride + column;
    const auto value = *(const Words<4>*)from, gate = *(const Words<4>*)(from + p.columns);
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = half_of(value, i) * bits_float(kept_here(float_bits(gelu(half_of(gate, i)))));
    write_row(p, (int)row, column, sums);
}

#else

struct Product {
    using Unit = Mma<Half>;
    using A = typename Unit::A;
    using B = typename Unit::B;
    static constexpr int kElements = sizeof(typename Unit::D) / sizeof(float);
    static constexpr int kRun = Unit::kColumns == 1 ? kElements : 2;  // elements of a D that lie together in y
    static constexpr int kWaves = WAVES_OUT * WAVES_ROWS, kThreads = kWaves * WAVE_SIZE;
    static constexpr int kHalves = GATE ? 2 : 1, kWaveTiles = TILES_OUT / kHalves;  // tiles of columns of y
    static constexpr int kBlockA = WAVES_OUT * TILES_OUT * 16, kBlockB = WAVES_ROWS * TILES_ROWS * 16;
    static constexpr int kBlockColumns = kBlockA / kHalves;
    using Rows = LdsRows<CHUNK_K, false>;
    using PlaceA = InRows<kBlockA, CHUNK_K, kThreads>;
    using PlaceB = InRows<kBlockB, CHUNK_K, kThreads>;
    static constexpr int kRoundsA = PlaceA::Items::kRounds, kRoundsB = PlaceB::Items::kRounds;
    static constexpr int kBufferHalves = (kBlockA + kBlockB) * Rows::kLd, kLdsBytes = 2 * kBufferHalves * 2;
    static_assert(kThreads % (CHUNK_K / 8) == 0, "a work-item always stages the same eight of a chunk");
    static_assert(TILES_OUT % kHalves == 0, "as many tiles of one half of the weights as of the other");
    static_assert(kLdsBytes <= LDS_BYTES, "the chunks do not fit the LDS of this GPU");

    const Params& p;
    u16* lds;
    int wave_out, wave_row, first_row, first_column, columns, column_before, part;
    const u16 *weights, *bias;
    const unsigned char* x;
    u32 from_a[kRoundsA], from_b[kRoundsB];  // bytes from weights, and from x, to what this work-item stages of the first chunk
    Words<4> ahead_a[kRoundsA], ahead_b[kRoundsB];
    typename Unit::D acc[TILES_OUT][TILES_ROWS];

    DEVICE Product(const Params& params, u16* memory) : p(params), lds(memory) {
        const u32 wave = wave_uniform(thread_id() / WAVE_SIZE);
        wave_out = (int)(wave % WAVES_OUT), wave_row = (int)(wave / WAVES_OUT);
        const u32 tiles = p.row_blocks * p.blocks, tile = block_id() % tiles, strip = p.together * p.blocks, here = tile % strip;
        part = (int)(block_id() / tiles);
        first_row = (int)(tile / strip * p.together + here % p.together) * kBlockB;
        if (empty()) return;
        find_weights((int)(here / p.together));
        x = (const unsigned char*)in_global(p.x + (i64)first_row * p.x_stride);
        const u32 eight = thread_id() % (CHUNK_K / 8) * 16;
#pragma unroll
        for (int i = 0; i < kRoundsA; ++i) from_a[i] = row_of_weights(PlaceA::row(PlaceA::Items::item(i))) * p.k * 2 + eight;
#pragma unroll
        for (int i = 0; i < kRoundsB; ++i) {
            const int row = PlaceB::row(PlaceB::Items::item(i));
            from_b[i] = (u32)min2(row, (int)p.rows - first_row - 1) * p.x_stride * 2 + eight;
        }
    }

    // Of the work-groups of the last rows, which are as many as of the others.
    DEVICE bool empty() const { return !(first_row < (int)p.rows); }
    static DEVICE int blocks_of(u32 columns) { return ((int)columns + kBlockColumns - 1) / kBlockColumns; }
#if MANY
    DEVICE void find_weights(int block) {
        int of = 0;
#pragma unroll
        for (int step = 128; step; step /= 2)
            if (of + step < kMostWeights && p.first_block[of + step] <= (u32)block) of += step;
        weights = in_global(p.weights[of]), bias = in_global(p.bias[of]), column_before = (int)p.first_column[of];
        columns = (int)p.first_column[of + 1] - column_before;
        first_column = (block - (int)p.first_block[of]) * kBlockColumns;
    }
#else
    DEVICE void find_weights(int block) {
        weights = p.weights_0, bias = p.bias_0, columns = (int)p.columns_0, column_before = 0;
        if (!GATE && block >= blocks_of(p.columns_0)) {
            block -= blocks_of(p.columns_0);
            weights = p.weights_1, bias = p.bias_1, columns = (int)p.columns_1, column_before = (int)p.columns_0;
            if (block >= blocks_of(p.columns_1)) {
                block -= blocks_of(p.columns_1);
                weights = p.weights_2, bias = p.bias_2, columns = (int)p.columns_2, column_before += (int)p.columns_1;
            }
        }
        first_column = block * kBlockColumns;
    }
#endif
    // Which row of the weights is the `row`-th of the work-group's.
    DEVICE u32 row_of_weights(int row) const {
        const int tile = row / 16 % TILES_OUT, wave = row / 16 / TILES_OUT;
        const int column = first_column + (wave * kWaveTiles + tile % kWaveTiles) * 16 + row % 16;
        return (u32)(min2(column, columns - 1) + tile / kWaveTiles * columns);
    }

    // read_eights where the chunk has `rest` of k: what is past them is read from the chunk's beginning, and is zero.
    template <int kRounds>
    static DEVICE void read_tail(Words<4> (&ahead)[kRounds], const void* base, const u32 (&from)[kRounds], int rest) {
        const int first = (int)(thread_id() % (CHUNK_K / 8) * 8);
        const bool real = first < rest;
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const Words<4> x = *(const Words<4>*)((const unsigned char*)base + from[i] - (real ? 0 : first * 2));
#pragma unroll
            for (int w = 0; w < 4; ++w) ahead[i].word[w] = real ? x.word[w] : 0;
        }
    }
    DEVICE void fetch(int chunk) {
        const int rest = (int)p.k - chunk * CHUNK_K;
        const void *a = weights + chunk * CHUNK_K, *b = x + chunk * CHUNK_K * 2;
        if (rest >= CHUNK_K) read_eights(ahead_a, a, from_a), read_eights(ahead_b, b, from_b);
        else read_tail(ahead_a, a, from_a, rest), read_tail(ahead_b, b, from_b, rest);
    }

    DEVICE void store(u16* buffer) {
        put_eights<PlaceA, Rows>(buffer, ahead_a);
        put_eights<PlaceB, Rows>(buffer + kBlockA * Rows::kLd, ahead_b);
    }

    DEVICE void multiply(const u16* buffer) {
        const u16* tile_b = buffer + kBlockA * Rows::kLd;
#if defined(MATRIX_UNIT_DOT2)
#pragma unroll 1
#else
#pragma unroll
#endif
        for (int k = 0; k < CHUNK_K; k += 16) {
            A a[TILES_OUT];
#pragma unroll
            for (int i = 0; i < TILES_OUT; ++i) a[i] = Unit::template tile_a<Rows>(buffer, (wave_out * TILES_OUT + i) * 16, k);
#pragma unroll
            for (int j = 0; j < TILES_ROWS; ++j) {
                const B b = Unit::template tile_b<Rows>(tile_b, (wave_row * TILES_ROWS + j) * 16, k);
#pragma unroll
                for (int i = 0; i < TILES_OUT; ++i) Unit::template multiply<16>(a[i], b, acc[i][j]);
            }
        }
    }

    // Calls use(row of x, column of these weights, tile, first element) for what this lane has of y.
    template <typename F> DEVICE void each_run(F use) {
#pragma unroll
        for (int i = 0; i < kWaveTiles; ++i)
#pragma unroll
            for (int e = 0; e < kElements; e += kRun) {
                const int column = first_column + (wave_out * kWaveTiles + i) * 16 + Unit::row(e);
#pragma unroll
                for (int j = 0; j < TILES_ROWS; ++j) {
                    const int row = first_row + (wave_row * TILES_ROWS + j) * 16 + Unit::column(Unit::column_of(e));
                    if (row < (int)p.rows && column < columns) use(row, column, i, j, e);
                }
            }
    }
    DEVICE void sums_of(int i, int j, int e, float (&sums)[kRun]) const {
#pragma unroll
        for (int r = 0; r < kRun; ++r) sums[r] = acc[i][j].v[e + r];
    }

    DEVICE void write() {
        each_run([&](int row, int column, int i, int j, int e) {
            float sums[kRun];
            sums_of(i, j, e, sums);
            add_bias(bias, column, sums);
            if constexpr (GATE) {
                float gates[kRun];
                sums_of(i + kWaveTiles, j, e, gates);
                add_bias(bias, columns + column, gates);
#pragma unroll
                for (int r = 0; r < kRun; ++r) sums[r] *= gelu(gates[r]);
            }
            write_row(p, row, column_before + column, sums);
        });
    }

    DEVICE void write_partial() {
        each_run([&](int row, int column, int i, int j, int e) {
            float* to = p.partial + ((i64)part * p.rows + row) * (p.columns * kHalves) + column_before + column;
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                float sums[kRun];
                sums_of(i + h * kWaveTiles, j, e, sums);
                constexpr int kAccess = min2(kRun, 4);
#pragma unroll
                for (int r = 0; r < kRun; r += kAccess) {
                    Words<kAccess> some;
#pragma unroll
                    for (int s = 0; s < kAccess; ++s) some.word[s] = float_bits(sums[r + s]);
                    *(Words<kAccess>*)(to + h * columns + r) = some;
                }
            }
        });
    }

    DEVICE void run() {
        if (empty()) return;
        const int chunks = ((int)p.k + CHUNK_K - 1) / CHUNK_K;
        const int first = SPLIT ? part * (int)p.part_chunks : 0;
        const int past = SPLIT ? min2(chunks, first + (int)p.part_chunks) : chunks;
#pragma unroll
        for (int i = 0; i < TILES_OUT; ++i)
#pragma unroll
            for (int j = 0; j < TILES_ROWS; ++j)
#pragma unroll
                for (int e = 0; e < kElements; ++e) acc[i][j].v[e] = 0.0f;
        fetch(first);
#pragma unroll 1
        for (int chunk = first; chunk < past; ++chunk) {
            u16* buffer = lds + chunk % 2 * kBufferHalves;
            store(buffer);
            barrier();
            if (chunk + 1 < past) fetch(chunk + 1);
            multiply(buffer);
        }
        if constexpr (SPLIT) write_partial();
        else write();
    }
};

EXPORT_LDS_BYTES(Product::kLdsBytes)

WAVES_AT_ONCE KERNEL(Product::kThreads) linear(Params p) {
    LDS(memory, Product::kLdsBytes);
    Product(p, (u16*)memory).run();
}

#endif
