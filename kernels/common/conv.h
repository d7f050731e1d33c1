// Convolution as implicit GEMM over channels-last images, shared by conv3x3.hip and upsample_conv.hip.
//
//   out[n, y, x, co] = bias[co] + sum over taps and ci of weight[co, tap, ci] * f(in[n, y', x', ci])  (+ shortcut)
//
// where f is nothing, or GroupNorm followed by SiLU from given statistics: f(z) = silu(z * scale[n, ci] + shift[n, ci]), and zero
// outside of the image. M is co, N is pixels, K is (chunk of channels, tap, channel).
//
// Tiling. A work-group computes WAVES_CO * TILES_CO * 16 channels of WAVES_PIX * TILES_PIX rows of 16 pixels. For each chunk of
// CHUNK_C channels the patch of the input that all taps need is staged once in LDS, f applied on the way, so that f costs
// each value once per patch and not once per tap; while one chunk is multiplied the next is on its way through registers
// into a second buffer. Weights are packed beforehand (pack.hip) in the order in which lanes want them and go from memory
// straight to registers. A lane's column is a pixel, and its rows are channels, which lie together in memory.
//
// A shortcut is more K: the image it comes from multiplied by 1x1 weights, or by the identity for a plain residual. The matrix
// unit thereby also does what would otherwise be a change of layout, and exactly.
#pragma once
#include "mma.h"
#include "reduce.h"
#include "tile.h"

enum Shortcut { kShortcutNone, kShortcutIdentity, kShortcutConv };

struct ConvParams {  // the same in lib_rocm_sd/ops/conv_kernel.py
    const u16* in;               // (N, H, W, ci)
    const u16* weights;          // packed: (co / 16, ci / CHUNK_C, taps, CHUNK_C / 16) tiles; one such set per phase
    const float* bias;           // (co)
    const float* norm;           // (N, ci, 2): scale, shift
    const u16* shortcut;         // (N, out_h, out_w, shortcut_ci)
    const u16* shortcut_weights; // packed: (co / 16, shortcut_ci / 16) tiles, or one tile, the identity
    u16* out;                    // (N, out_h, out_w, out_channels)
    float* statistics;           // (N, parts, co, 4): mean, sum of squared differences from it, count, unused
    u32* overflow;               // set to 1 where a value does not fit the half type; may be null
    u32 h, w, ci, out_h, out_w, co, out_channels, shortcut_ci;  // out_h, out_w: of this phase's grid; co: padded to 16
    u32 tiles_x, tiles_y, blocks_co, image_h, image_w;  // image_h, image_w: rows and columns of `out`
    u32 above;  // rows of `in` before the one at which out's first row lies; 0 but for a band of an image
};

template <typename Unit> struct Packed {
    static constexpr int kHalves = Unit::kDistinctLanes * (int)(sizeof(typename Unit::A) / 2);  // of one 16 x 16 tile
    static DEVICE typename Unit::A load(const u16* tile) {
        typename Unit::A a;
        load_words<sizeof(a) / 4>(a.w, tile + lane_id() % Unit::kDistinctLanes * (int)(sizeof(a) / 2));
        return a;
    }
};

// TAPS x TAPS taps, the first at input (y * STRIDE + offset). OUT_STEP 2: this is one of four phases of an upsampled image.
template <typename Half, int TAPS, int STRIDE, int OUT_STEP> struct Convolution {
    using Unit = Mma<Half>;
    static constexpr int kElements = sizeof(typename Unit::D) / sizeof(float);
    static constexpr int kThreads = WAVES_CO * WAVES_PIX * WAVE_SIZE;
    static constexpr int kRows = WAVES_PIX * TILES_PIX, kPatchH = (kRows - 1) * STRIDE + TAPS, kPatchW = 15 * STRIDE + TAPS;
    static constexpr int kLd = CHUNK_C + kLdsPad, kEights = CHUNK_C / 8;
    static constexpr int kItems = kPatchH * kPatchW * kEights, kItemsPerThread = (kItems + kThreads - 1) / kThreads;
    static constexpr int kBufferHalves = kPatchH * kPatchW * kLd, kLdsBytes = 2 * kBufferHalves * 2;
    static_assert(kThreads % kEights == 0, "a work-item always stages the same channels of a chunk");
    static_assert(kLdsBytes <= LDS_BYTES, "the patches do not fit the LDS of this GPU");

    const ConvParams& p;
    u16* lds;
    int image, first_y, first_x, first_co_tile, wave_co, wave_pix, phase_y, phase_x, part, parts;
    const u16* weights;
    Words<4> ahead[kItemsPerThread];
    typename Unit::D acc[TILES_CO][TILES_PIX];

    DEVICE Convolution(const ConvParams& params, unsigned char* memory) : p(params), lds((u16*)memory) {
        const u32 wave = wave_uniform(thread_id() / WAVE_SIZE);
        wave_co = (int)(wave % WAVES_CO), wave_pix = (int)(wave / WAVES_CO);
        u32 block = block_id();
        const int block_co = (int)(block % p.blocks_co);
        block /= p.blocks_co;
        const u32 tiles = p.tiles_x * p.tiles_y, tile = block % tiles, phases = OUT_STEP * OUT_STEP;
        const u32 phase = block / tiles % phases;
        image = (int)(block / tiles / phases);
        phase_y = (int)(phase / OUT_STEP), phase_x = (int)(phase % OUT_STEP);
        first_x = (int)(tile % p.tiles_x) * 16, first_y = (int)(tile / p.tiles_x) * kRows;
        first_co_tile = (block_co * WAVES_CO + wave_co) * TILES_CO;
        parts = (int)(tiles * phases) * WAVES_PIX;
        part = (int)(phase * tiles + tile) * WAVES_PIX + wave_pix;
        weights = p.weights + (i64)phase * (p.co / 16) * (p.ci / 16) * (TAPS * TAPS * Packed<Unit>::kHalves);
    }

    // Input row or column of a patch's first: padding 1 before for a 3x3, 0 before for a strided one, by phase for 2x2.
    static DEVICE int origin(int first, int phase) {
        return first * STRIDE + (TAPS == 2 ? phase - 1 : STRIDE == 2 ? 0 : -1);
    }
    DEVICE bool inside(int item, int& y, int& x) const {
        const int pixel = item / kEights;
        y = origin(first_y, phase_y) + (int)p.above + pixel / kPatchW, x = origin(first_x, phase_x) + pixel % kPatchW;
        return item < kItems && y >= 0 && y < (int)p.h && x >= 0 && x < (int)p.w;
    }

    DEVICE void fetch(int chunk) {
#pragma unroll
        for (int i = 0; i < kItemsPerThread; ++i) {
            const int item = (int)thread_id() + i * kThreads;
            int y, x;
            const bool real = inside(item, y, x);
            y = real ? y : 0, x = real ? x : 0;
            const u16* from = p.in + (((i64)image * p.h + y) * p.w + x) * p.ci + chunk * CHUNK_C + item % kEights * 8;
            ahead[i] = *(const Words<4>*)from;
        }
    }

    static DEVICE float silu(float z) { return z * reciprocal(1.0f + exp2_fast(-1.44269504088896341f * z)); }

    DEVICE void store(int chunk) {
        u16* buffer = lds + chunk % 2 * kBufferHalves;
        float norm[16];
        if constexpr (NORM) {
            const float* from = p.norm + ((i64)image * p.ci + chunk * CHUNK_C + thread_id() % kEights * 8) * 2;
#pragma unroll
            for (int i = 0; i < 16; ++i) norm[i] = from[i];
        }
#pragma unroll
        for (int i = 0; i < kItemsPerThread; ++i) {
            const int item = (int)thread_id() + i * kThreads;
            int y, x;
            const bool real = inside(item, y, x);
            Words<4> value = ahead[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if constexpr (NORM) {
                    const float low = Half::to((u16)value.word[j]), high = Half::to((u16)(value.word[j] >> 16));
                    value.word[j] = pack2<Half>(silu(fma_f32(low, norm[4 * j], norm[4 * j + 1])),
                                                silu(fma_f32(high, norm[4 * j + 2], norm[4 * j + 3])));
                }
                value.word[j] = real ? value.word[j] : 0;
            }
            if (item < kItems) *(Words<4>*)(buffer + item / kEights * kLd + item % kEights * 8) = value;
        }
    }

    DEVICE int co_tile(int i) const { return min2(first_co_tile + i, (int)p.co / 16 - 1); }

    DEVICE void multiply(int chunk) {
        const u16* buffer = lds + chunk % 2 * kBufferHalves;
        constexpr int kSteps = CHUNK_C / 16, kChunkTiles = TAPS * TAPS * kSteps;
        const int chunks = (int)p.ci / CHUNK_C;
#pragma unroll
        for (int tap = 0; tap < TAPS * TAPS; ++tap)
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                typename Unit::A a[TILES_CO];
#pragma unroll
                for (int i = 0; i < TILES_CO; ++i)
                    a[i] = Packed<Unit>::load(
                        weights + ((i64)(co_tile(i) * chunks + chunk) * kChunkTiles + tap * kSteps + k) * Packed<Unit>::kHalves);
#pragma unroll
                for (int j = 0; j < TILES_PIX; ++j) {
                    const int row = (wave_pix * TILES_PIX + j) * STRIDE + tap / TAPS;
                    const auto b = Unit::load_b(buffer + (row * kPatchW + tap % TAPS) * kLd + k * 16, kLd * STRIDE, 15);
#pragma unroll
                    for (int i = 0; i < TILES_CO; ++i) Unit::template multiply<16>(a[i], b, acc[i][j]);
                }
            }
    }

    DEVICE int pixel_y(int j) const { return first_y + wave_pix * TILES_PIX + j; }

    DEVICE void add_shortcut() {
        const int last = min2((int)p.out_w - 1 - first_x, 15), steps = (int)p.shortcut_ci / 16;
#pragma unroll
        for (int j = 0; j < TILES_PIX; ++j) {
            const int y = min2(pixel_y(j), (int)p.out_h - 1);
            const u16* from = p.shortcut + (((i64)image * p.out_h + y) * p.out_w + first_x) * p.shortcut_ci;
            if constexpr (SHORTCUT == kShortcutIdentity) {
                const auto a = Packed<Unit>::load(p.shortcut_weights);
#pragma unroll
                for (int i = 0; i < TILES_CO; ++i)
                    Unit::template multiply<16>(a, Unit::gather_b(from + co_tile(i) * 16, (int)p.shortcut_ci, last), acc[i][j]);
            } else {
                for (int k = 0; k < steps; ++k) {
                    const auto b = Unit::gather_b(from + k * 16, (int)p.shortcut_ci, last);
#pragma unroll
                    for (int i = 0; i < TILES_CO; ++i) {
                        const auto a = Packed<Unit>::load(p.shortcut_weights + (i64)(co_tile(i) * steps + k) * Packed<Unit>::kHalves);
                        Unit::template multiply<16>(a, b, acc[i][j]);
                    }
                }
            }
        }
    }

    DEVICE bool counts(int j, int c) const {
        return pixel_y(j) < (int)p.out_h && first_x + Unit::column(c) < (int)p.out_w;
    }

    // Mean, and squared differences from it, of each channel over the pixels of this wave: two passes over registers.
    DEVICE void write_statistics() {
        float count = 0.0f;
#pragma unroll
        for (int j = 0; j < TILES_PIX; ++j)
            count += pixel_y(j) < (int)p.out_h ? (float)min2((int)p.out_w - first_x, 16) : 0.0f;
        const float share = count > 0.0f ? 1.0f / count : 0.0f;
        float* to = p.statistics + ((i64)image * parts + part) * p.co * 4;
#pragma unroll
        for (int i = 0; i < TILES_CO; ++i)
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                if (Unit::column_of(e) != 0) continue;
                float sum = 0.0f, squares = 0.0f;
                each_column(i, e, [&](int, int, float x) { sum += x; });
                const float mean = row_sum<Unit>(sum) * share;
                each_column(i, e, [&](int, int, float x) { squares += (x - mean) * (x - mean); });
                squares = row_sum<Unit>(squares);
                if (Unit::first_of_row() && first_co_tile + i < (int)p.co / 16) {
                    float* place = to + ((first_co_tile + i) * 16 + Unit::row(e)) * 4;
                    place[0] = mean, place[1] = squares, place[2] = count, place[3] = 0.0f;
                }
            }
    }
    // The values of row(e) that this lane holds, over its pixel tiles and columns.
    template <typename F> DEVICE void each_column(int i, int e, F use) {
#pragma unroll
        for (int j = 0; j < TILES_PIX; ++j)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c)
                if (counts(j, c)) use(j, c, acc[i][j].v[e + Unit::element_step(c)]);
    }

    DEVICE void write() {
        bool fits = true;
#pragma unroll
        for (int j = 0; j < TILES_PIX; ++j) {
            const int y = pixel_y(j) * OUT_STEP + phase_y;
#pragma unroll
            for (int i = 0; i < TILES_CO; ++i) {
                const int first_channel = (first_co_tile + i) * 16;
                if constexpr (!Half::kIsBF16)
#pragma unroll
                    for (int e = 0; e < kElements; ++e)
                        if (counts(j, Unit::column_of(e)) && !(abs_f32(acc[i][j].v[e]) < 65520.0f)) fits = false;
                Unit::pieces(Unit::pack(acc[i][j]), [&](int n, int channel, auto piece) {
                    const int x = first_x + n;
                    if (pixel_y(j) < (int)p.out_h && x < (int)p.out_w && first_channel + channel < (int)p.out_channels)
                        *(decltype(piece)*)(p.out + (((i64)image * p.image_h + y) * p.image_w + x * OUT_STEP + phase_x) * p.out_channels +
                                            first_channel + channel) = piece;
                });
            }
        }
        if (!fits && p.overflow) *p.overflow = 1;
    }

    DEVICE void run() {
#pragma unroll
        for (int i = 0; i < TILES_CO; ++i)
#pragma unroll
            for (int j = 0; j < TILES_PIX; ++j)
#pragma unroll
                for (int e = 0; e < kElements; ++e) acc[i][j].v[e] = p.bias[co_tile(i) * 16 + Unit::row(e)];
        const int chunks = (int)p.ci / CHUNK_C;
        fetch(0);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            store(chunk);
            barrier();
            fetch(min2(chunk + 1, chunks - 1));
            multiply(chunk);
        }
        if constexpr (SHORTCUT != kShortcutNone) add_shortcut();
        write();
        if constexpr (STATISTICS) write_statistics();
    }
};
