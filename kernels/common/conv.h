// Convolution as implicit GEMM over channels-last images, shared by conv3x3.hip and upsample_conv.hip.
//
//   out[n, y, x, co] = bias[n, co] + sum over taps and ci of weight[co, tap, ci] * f(in[n, y', x', ci])  (+ shortcut)
//
// where f is nothing, or GroupNorm followed by SiLU from given statistics: f(z) = silu(z * scale[n, ci] + shift[n, ci]), and zero
// outside of the image. M is co, N is pixels, K is (chunk of channels, tap, channel).
//
// Tiling. A work-group computes WAVES_CO * TILES_CO * 16 channels of WAVES_PIX * TILES_PIX rows of 16 pixels. For each chunk of
// CHUNK_C channels the patch of the input that all taps need is staged once in LDS, f applied on the way, so that f costs
// each value once per patch and not once per tap; while one chunk is multiplied the next is on its way through registers
// into a second buffer. Weights are packed beforehand (pack.hip) in the order in which lanes want them and go from memory
// straight to registers, a step of sixteen channels ahead. A lane's column is a pixel, and its rows are channels, which lie
// together in memory. A row of taps is one stretch of code that a loop repeats: all nine in one stretch let compilers fetch
// so far ahead that they run out of registers, and so would multiplications of two taps mingled.
//
// With WEIGHTS_IN_ROWS weights are read as they lie (conv_rows.h): tap after tap of a chunk they are staged in LDS, once for a
// work-group. The patch then has one buffer, so that chunks can be larger; a 1x1 shortcut is staged as chunks with one tap.
//
// A shortcut is more K: the image it comes from multiplied by 1x1 weights, or by the identity for a plain residual. The matrix
// unit thereby also does what would otherwise be a change of layout, and exactly.
//
// EPILOGUE, of the upscalers' networks: scale * activation(all of the above but the shortcut) + shortcut, and of an identity with a second
// shortcut second_scale * that + second; of kEpilogueGate (z + shortcut) * (sigmoid(z) - 1/2) for the sum. Sums are float32 in registers meanwhile: a value is rounded once, and a scale is not folded
// into weights, which would lose their smallest to denormal halves, nor into the identity, in which 0.2 is no half. Pixels are shuffled
// by torch, not here: before the first convolution and behind the last, where an image of 3 to 48 channels changes its dtype and layout for
// the host in any case, and a store of single halves would cost more than that pass.
//
// Small images (8x8 to 32x32 with 640 to 2560 channels, in a UNet) have pixels for a few work-groups only, each of which would walk a
// K of 23,040 alone. With SPLIT_K several share it: each takes some of the chunks, and of a 1x1 shortcut's channels, and writes its sums
// in float32. conv_sum.hip adds them in their order and does the rest, the shortcut as it is included. No atomics: two launches give
// the same bits each time.
#pragma once
#if !defined(WEIGHTS_IN_ROWS)
#define WEIGHTS_IN_ROWS 0
#endif
#define WHOLE_LOADS WEIGHTS_IN_ROWS
#include "conv_rows.h"
#include "mma.h"
#include "reduce.h"
#include "tile.h"

#if !defined(SPLIT_K)
#define SPLIT_K 0
#endif
#if !defined(EPILOGUE)
#define EPILOGUE 0
#endif

// Hides the past of some values: a compiler computes nothing of it later, and keeps nothing that it has computed of them.
template <typename T> DEVICE void settle(T& values) {
#if !defined(SIMT_SHIM) && !defined(__CUDACC__)
    u32* words = (u32*)&values;
#pragma unroll
    for (int i = 0; i < (int)(sizeof(T) / 4); ++i) asm volatile("" : "+v"(words[i]));
#endif
}

enum Shortcut { kShortcutNone, kShortcutIdentity, kShortcutConv };
enum Epilogue { kEpilogueNone, kEpilogueScale, kEpilogueLeakyRelu, kEpiloguePrelu, kEpilogueSilu, kEpilogueGate };

struct ConvParams {  // the same in lib_rocm_sd/ops/conv/kernel.py
    const u16* in;               // (N, H, W, ci)
    const u16* weights;          // packed: (co / 16, ci / CHUNK_C, taps, CHUNK_C / 16) tiles; one such set per phase
                                 // WEIGHTS_IN_ROWS: (weight_rows, taps * ci)
    const float* bias;           // (co), or (N, co): an embedding of each image added to it
    const float* norm;           // (N, ci, 2): scale, shift
    const u16* shortcut;         // (N, out_h, out_w, shortcut_ci)
    const u16* shortcut_weights; // packed: (co / 16, shortcut_ci / 16) tiles, or one tile, the identity
                                 // WEIGHTS_IN_ROWS: (weight_rows, shortcut_ci), or null
    u16* out;                    // (N, out_h, out_w, out_channels); may begin where shortcut begins, with its strides
    float* statistics;           // (N, parts, co, 4): mean, sum of squared differences from it, count, unused
                                 // SPLIT_K: (N, splits, image_h, image_w, co), sums
    u32* overflow;               // set to 1 where a value does not fit the half type; may be null
    u32 h, w, ci, out_h, out_w, co, out_channels, shortcut_ci;  // out_h, out_w: of this phase's grid; co: padded to 16
    u32 in_stride, shortcut_stride, out_stride;                 // halves from one pixel to the next
    u32 tiles_x, tiles_y, blocks_co, image_h, image_w;          // image_h, image_w: rows and columns of `out`
    u32 above;  // rows of `in` before the one at which out's first row lies; 0 but for a band of an image
    u32 padding;      // of a strided one: rows and columns of zeros before the image, 0 or 1
    u32 bias_stride;  // floats from one image's bias to the next's; 0: one for all
    u32 splits;       // SPLIT_K: work-groups that share what one would do
    u32 weight_rows;  // WEIGHTS_IN_ROWS: channels that the weights make
#if EPILOGUE
    const float* slopes;                  // kEpiloguePrelu: (co)
    const u16* second;                    // as `shortcut`; may be null
    float slope, scale, second_scale;     // slope: kEpilogueLeakyRelu
    u32 second_stride;
#endif
};

template <typename Unit> struct Packed {
    static constexpr int kHalves = Unit::kDistinctLanes * (int)(sizeof(typename Unit::A) / 2);  // of one 16 x 16 tile
    static DEVICE typename Unit::A load(const u16* tile) {
        typename Unit::A a;
        load_words<sizeof(a) / 4>(a.w, tile + lane_id() % Unit::kDistinctLanes * (int)(sizeof(a) / 2));
        return a;
    }
};

// Memory at `base`, the same in all lanes of a wave, plus `bytes`, a lane's own: a base in scalar registers and one vector register.
template <typename T> DEVICE const T& at(const void* base, u32 bytes) { return *(const T*)((const unsigned char*)base + bytes); }

// TAPS x TAPS taps, the first at input (y * STRIDE + offset). OUT_STEP 2: this is one of four phases of an upsampled image. ENLARGE 2:
// the input is read as if each pixel were four.
template <typename Half, int TAPS, int STRIDE, int OUT_STEP, int ENLARGE = 1> struct Convolution {
    using Unit = Mma<Half>;
    using A = typename Unit::A;
    using B = typename Unit::B;
    // Taps and steps whose multiplications stand one after the other in the code. Without a matrix unit they are many.
#if defined(MATRIX_UNIT_DOT2)
    static constexpr int kTapsAtOnce = 1, kStepsAtOnce = 1;
#else
    static constexpr int kTapsAtOnce = TAPS, kStepsAtOnce = CHUNK_C / 16;
#endif
    static constexpr int kElements = sizeof(typename Unit::D) / sizeof(float);
    static constexpr int kWaves = WAVES_CO * WAVES_PIX, kThreads = kWaves * WAVE_SIZE;
    static constexpr int kRows = WAVES_PIX * TILES_PIX, kPatchH = (kRows - 1) * STRIDE + TAPS, kPatchW = 15 * STRIDE + TAPS;
    static constexpr int kLd = CHUNK_C + kLdsPad, kEights = CHUNK_C / 8;
    static constexpr int kItems = kPatchH * kPatchW * kEights, kItemsPerThread = (kItems + kThreads - 1) / kThreads;
    static constexpr int kUnused = kPatchH * kPatchW * kLd;  // of a buffer: where a wave puts what nobody reads
    static constexpr int kBufferHalves = kUnused + 8 * kWaves;
    static constexpr int kBlockCo = WAVES_CO * TILES_CO * 16;
    using Weights = WeightRows<kBlockCo, CHUNK_C, kThreads>;
    static constexpr int kPatches = WEIGHTS_IN_ROWS ? 1 : 2, kPatchBytes = kPatches * kBufferHalves * 2;
    static constexpr int kWeightBytes = WEIGHTS_IN_ROWS ? 2 * Weights::kHalves * 2 : 0;
    static constexpr int kLdsBytes = max2(kPatchBytes + kWeightBytes, STATISTICS ? WAVES_PIX * kBlockCo * 8 : 0);
    static constexpr int kSteps = CHUNK_C / 16, kChunkTiles = TAPS * TAPS * kSteps, kTileBytes = Packed<Unit>::kHalves * 2;
    static_assert(!SPLIT_K || (SHORTCUT != kShortcutIdentity && !STATISTICS), "conv_sum.hip does these");
    static_assert(!EPILOGUE || !(SPLIT_K || WEIGHTS_IN_ROWS || SHORTCUT == kShortcutConv), "not written");
    static_assert(!WEIGHTS_IN_ROWS || OUT_STEP == 1, "phases have sums of taps for weights");
    static_assert(kThreads % kEights == 0, "a work-item always stages the same channels of a chunk");
    static_assert(kLdsBytes <= LDS_BYTES, "the patches do not fit the LDS of this GPU");

    const ConvParams& p;
    unsigned char* lds;
    int image, split, first_y, first_x, block_co, first_co_tile, wave_co, wave_pix, phase_y, phase_x, part, parts;
    const unsigned char* patch;    // the first row of `in` that the patch has, at the image's left
    const unsigned char* weights;  // of this phase
    u32 source[kItemsPerThread];   // bytes from `patch` to what this work-item stages
    u32 place[kItemsPerThread];    // bytes from a buffer to where it puts it
    u32 tile[TILES_CO];            // bytes from `weights` to what this lane reads of the chunk's first step
    Words<4> ahead[kItemsPerThread];
    A next[TILES_CO];
    Weights rows;                  // WEIGHTS_IN_ROWS
    typename Unit::D acc[TILES_CO][TILES_PIX];

    DEVICE Convolution(const ConvParams& params, unsigned char* memory) : p(params), lds(memory) {
        const u32 wave = wave_uniform(thread_id() / WAVE_SIZE);
        wave_co = (int)(wave % WAVES_CO), wave_pix = (int)(wave / WAVES_CO);
        u32 block = block_id();
        block_co = (int)(block % p.blocks_co);
        block /= p.blocks_co;
        const u32 tiles = p.tiles_x * p.tiles_y, index = block % tiles, phases = OUT_STEP * OUT_STEP;
        const u32 phase = block / tiles % phases;
        image = (int)(block / tiles / phases), split = 0;
        if constexpr (SPLIT_K) split = image % (int)p.splits, image /= (int)p.splits;
        phase_y = (int)(phase / OUT_STEP), phase_x = (int)(phase % OUT_STEP);
        first_x = (int)(index % p.tiles_x) * 16, first_y = (int)(index / p.tiles_x) * kRows;
        first_co_tile = (block_co * WAVES_CO + wave_co) * TILES_CO;
        parts = (int)(tiles * phases);
        part = (int)(phase * tiles + index);
        find_patch(wave);
        rows.lds = (u16*)(lds + kPatchBytes);
        if constexpr (WEIGHTS_IN_ROWS) return;
        const u32 tile_bytes = p.ci / 16 * (TAPS * TAPS) * kTileBytes;  // of all steps for sixteen channels
        weights = (const unsigned char*)p.weights + (i64)phase * (p.co / 16) * tile_bytes;
#pragma unroll
        for (int i = 0; i < TILES_CO; ++i) tile[i] = (u32)co_tile(i) * tile_bytes + lane_id() % Unit::kDistinctLanes * (u32)sizeof(A);
    }

    // Input row or column of a patch's first: padding 1 before for a 3x3, as the caller says for a strided one, by phase for 2x2.
    DEVICE int origin(int first, int phase) const {
        return first * STRIDE + (TAPS == 2 ? phase - 1 : STRIDE == 2 ? -(int)p.padding : -1);
    }

    // What this work-item stages of every chunk. Outside of the image it reads anything and puts it aside: there all buffers
    // have zeros, from here on.
    DEVICE void find_patch(u32 wave) {
        const int top = origin(first_y, phase_y) + (int)p.above * ENLARGE, left = origin(first_x, phase_x);
        const int first_row = min2(max2(top, 0) / ENLARGE, (int)p.h - 1);
        patch = (const unsigned char*)(p.in + ((i64)image * p.h + first_row) * p.w * p.in_stride);
#pragma unroll
        for (int i = 0; i < kItemsPerThread; ++i) {
            const int item = (int)thread_id() + i * kThreads, pixel = item / kEights, eight = item % kEights;
            const int y = top + pixel / kPatchW, x = left + pixel % kPatchW;
            const u32 here = (u32)(pixel * kLd + eight * 8) * 2;
            const bool real = item < kItems && y >= 0 && y < (int)p.h * ENLARGE && x >= 0 && x < (int)p.w * ENLARGE;
            source[i] = real ? ((u32)(y / ENLARGE - first_row) * p.w + (u32)(x / ENLARGE)) * p.in_stride * 2 + eight * 16 : 0;
            place[i] = real ? here : kUnused * 2 + wave * 16;
            if (!real && item < kItems) {
                *(Words<4>*)(lds + here) = Words<4>{{0, 0, 0, 0}};
                if constexpr (kPatches == 2) *(Words<4>*)(lds + kBufferHalves * 2 + here) = Words<4>{{0, 0, 0, 0}};
            }
        }
    }

    // Reads what will be stored next; `on` bytes further than the last time.
    DEVICE void fetch(u32 on) {
#pragma unroll
        for (int i = 0; i < kItemsPerThread; ++i) {
            source[i] += on;
            load_words<4>(ahead[i].word, (const u16*)(patch + source[i]));
        }
    }

#if defined(__CUDACC__) && !defined(SIMT_SHIM)
    static DEVICE u32 pair(float low, float high) { return pack2<Half>(low, high); }
#else
    // As one value of two halves, which compilers round and put together at once.
    static DEVICE u32 pair(float low, float high) {
        typedef _Float16 Two __attribute__((ext_vector_type(2)));
        if constexpr (Half::kIsBF16) return pack2<Half>(low, high);
        else return __builtin_bit_cast(u32, Two{(_Float16)low, (_Float16)high});
    }
#endif

    static DEVICE float sigmoid(float z) { return reciprocal(1.0f + exp2_fast(-1.44269504088896341f * z)); }
    static DEVICE float silu(float z) { return z * sigmoid(z); }

    // The norm of two channels: scale, shift, scale, shift. `pairs`: of this work-item's eight channels.
    DEVICE Words<4> norm_of(const float* pairs, int pair) const {
        return at<Words<4>>(pairs + 4 * pair, thread_id() % kEights * 64);
    }

    // Pair after pair of channels, so that few of their scales are in registers.
    DEVICE void normalise(int chunk) {
        const float* pairs = p.norm + ((i64)image * p.ci + chunk * CHUNK_C) * 2;
        Words<4> norm = norm_of(pairs, 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Words<4> now = norm;
            if (j < 3) norm = norm_of(pairs, j + 1);
#pragma unroll
            for (int i = 0; i < kItemsPerThread; ++i) {
                const float low = Half::to((u16)ahead[i].word[j]), high = Half::to((u16)(ahead[i].word[j] >> 16));
                ahead[i].word[j] = pair(silu(fma_f32(low, bits_float(now.word[0]), bits_float(now.word[1]))),
                                        silu(fma_f32(high, bits_float(now.word[2]), bits_float(now.word[3]))));
            }
            one_by_one();
        }
    }

    DEVICE void store(int chunk) {
        if constexpr (NORM) normalise(chunk);
        put(lds + chunk % kPatches * (kBufferHalves * 2));
    }
    DEVICE void put(unsigned char* buffer) {
#pragma unroll
        for (int i = 0; i < kItemsPerThread; ++i) {
            Words<4> value;
#pragma unroll
            for (int j = 0; j < 4; ++j) value.word[j] = ahead[i].word[j];
            *(Words<4>*)(buffer + place[i]) = value;
        }
    }

    DEVICE int co_tile(int i) const { return min2(first_co_tile + i, (int)p.co / 16 - 1); }

    // The weights of a step of this chunk, or of the next one's first. There is a tile after the last one.
    DEVICE void fetch_weights(int step) {
#pragma unroll
        for (int i = 0; i < TILES_CO; ++i) load_words<sizeof(A) / 4>(next[i].w, (const u16*)(weights + tile[i] + step * kTileBytes));
    }

    // `taps`: the first of those that stand one after the other in the code.
    DEVICE void multiply(const u16* taps) {
#pragma unroll
        for (int tap = 0; tap < kTapsAtOnce; ++tap) {
#pragma unroll
            for (int k = 0; k < kStepsAtOnce; ++k) {
                A a[TILES_CO];
#pragma unroll
                for (int i = 0; i < TILES_CO; ++i) a[i] = next[i];
                fetch_weights(tap * kStepsAtOnce + k + 1);
#pragma unroll
                for (int j = 0; j < TILES_PIX; ++j) {
                    const B b = Unit::load_b(taps + (j * STRIDE * kPatchW + tap) * kLd + k * 16, kLd * STRIDE, 15);
#pragma unroll
                    for (int i = 0; i < TILES_CO; ++i) Unit::template multiply<16>(a[i], b, acc[i][j]);
                }
            }
            one_by_one();
        }
#pragma unroll
        for (int i = 0; i < TILES_CO; ++i) tile[i] += kTapsAtOnce * kStepsAtOnce * kTileBytes;
    }

    DEVICE void multiply_chunk(int chunk) {
        const u16* row = (const u16*)lds + chunk % 2 * kBufferHalves + wave_pix * TILES_PIX * STRIDE * kPatchW * kLd;
#pragma unroll 1
        for (int y = 0; y < TAPS; ++y, row += kPatchW * kLd)
#pragma unroll 1
            for (int x = 0; x < TAPS; x += kTapsAtOnce)
#pragma unroll 1
                for (int k = 0; k < kSteps; k += kStepsAtOnce) multiply(row + x * kLd + k * 16);
    }

    // The same by weights of one tap in LDS, and the patch from that tap's first pixel on.
    DEVICE void multiply_tap(const u16* weights, const u16* pixels) {
#if defined(MATRIX_UNIT_DOT2)
#pragma unroll 1
#else
#pragma unroll
#endif
        for (int k = 0; k < CHUNK_C; k += 16) {
            A a[TILES_CO];
#pragma unroll
            for (int i = 0; i < TILES_CO; ++i)
                a[i] = Unit::template tile_a<typename Weights::Rows>(weights, (wave_co * TILES_CO + i) * 16, k);
#pragma unroll
            for (int j = 0; j < TILES_PIX; ++j) {
                const B b = Unit::load_b(pixels + j * STRIDE * kPatchW * kLd + k, kLd * STRIDE, 15);
#pragma unroll
                for (int i = 0; i < TILES_CO; ++i) Unit::template multiply<16>(a[i], b, acc[i][j]);
            }
        }
    }

    // The chunks from `first` to `last`, each multiplied by kTaps x kTaps taps of `matrix`, which has so many channels for a tap.
    template <int kTaps> DEVICE void multiply_rows(const u16* matrix, u32 channels, int first, int last) {
        rows.find(block_co * kBlockCo, (int)p.weight_rows, channels * (kTaps * kTaps));
        const u16* tap = matrix + first * CHUNK_C;
        rows.fetch(tap);
        fetch(first * CHUNK_C * 2);
#pragma unroll 1
        for (int chunk = first; chunk < last; ++chunk) {
            barrier();
            if constexpr (kTaps > 1) store(chunk);
            else put(lds);
            const bool more = chunk + 1 < last;
            const u16* row = (const u16*)lds + wave_pix * TILES_PIX * STRIDE * kPatchW * kLd;
#pragma unroll 1
            for (int y = 0; y < kTaps; ++y, row += kPatchW * kLd)
#pragma unroll 1
                for (int x = 0; x < kTaps; ++x) {
                    const u16* weights = rows.put();
                    barrier();
                    const bool begins = x + y == 0, ends = x + y == 2 * (kTaps - 1);
                    tap = ends ? matrix + (chunk + more) * CHUNK_C : tap + channels;
                    rows.fetch(tap);
                    if (begins) fetch(more ? CHUNK_C * 2 : 0);
                    multiply_tap(weights, row + x * kLd);
                }
        }
    }

    // What this work-item stages of the shortcut's chunks: the pixels that the work-group makes, where the first tap finds them.
    DEVICE void find_shortcut() {
        patch = (const unsigned char*)(p.shortcut + (((i64)image * p.out_h + first_y) * p.out_w + first_x) * p.shortcut_stride);
#pragma unroll
        for (int i = 0; i < kItemsPerThread; ++i) {
            const int item = (int)thread_id() + i * kThreads, pixel = item / kEights, eight = item % kEights;
            const int y = min2(first_y + pixel / 16, (int)p.out_h - 1) - first_y, x = min2(first_x + pixel % 16, (int)p.out_w - 1) - first_x;
            source[i] = ((u32)y * p.out_w + (u32)x) * p.shortcut_stride * 2 + eight * 16;
            const u32 here = (u32)(((pixel / 16) * kPatchW + pixel % 16) * STRIDE * kLd + eight * 8) * 2;
            place[i] = pixel < kRows * 16 ? here : kUnused * 2 + wave_uniform(thread_id() / WAVE_SIZE) * 16;
        }
    }

    DEVICE void multiply_by_rows() {
        const int chunks = (int)p.ci / CHUNK_C;
        multiply_rows<TAPS>(p.weights, p.ci, begin_of(chunks), end_of(chunks));
        if constexpr (SHORTCUT == kShortcutConv) {
            const int more = (int)p.shortcut_ci / CHUNK_C;
            find_shortcut();
            multiply_rows<1>(p.shortcut_weights, p.shortcut_ci, begin_of(more), end_of(more));
        } else if constexpr (SHORTCUT == kShortcutIdentity) {
            add_shortcut();
        }
        if constexpr (SHORTCUT == kShortcutNone) clear_beyond();  // with one there are whole tiles
    }

    // Channels past the last of the weights, which have made those of others instead.
    DEVICE void clear_beyond() {
        if (p.weight_rows % 16 == 0) return;
#pragma unroll
        for (int i = 0; i < TILES_CO; ++i)
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                const bool real = (first_co_tile + i) * 16 + Unit::row(e) < (int)p.weight_rows;
#pragma unroll
                for (int j = 0; j < TILES_PIX; ++j) acc[i][j].v[e] = real ? acc[i][j].v[e] : 0.0f;
            }
    }

    DEVICE int pixel_y(int j) const { return first_y + wave_pix * TILES_PIX + j; }

    // A shortcut's row of pixels for tile j, from channel 0 on. By reference: arguments are loaded where they are used.
    DEVICE const u16* shortcut_row(const u16* const& from, const u32& stride, int j) const {
        const int y = min2(pixel_y(j), (int)p.out_h - 1);
        return from + (((i64)image * p.out_h + y) * p.out_w + first_x) * stride;
    }

    // What this work-group takes of `all` that splits share; all of it without SPLIT_K.
    DEVICE int begin_of(int all) const { return SPLIT_K ? split * all / (int)p.splits : 0; }
    DEVICE int end_of(int all) const { return SPLIT_K ? (split + 1) * all / (int)p.splits : all; }

    // In LDS it takes the place of pixels that the last tap does not read.
    DEVICE A identity() const {
        if constexpr (!WEIGHTS_IN_ROWS) return Packed<Unit>::load(p.shortcut_weights);
        put_identity<kLd, kThreads>((u16*)lds, Half::power_of_2(0));
        barrier();
        return Unit::load_a((const u16*)lds, kLd, 15);
    }

    DEVICE int last_column() const { return min2((int)p.out_w - 1 - first_x, 15); }

    template <bool kGates = false> DEVICE void add_identity(const u16* const& from, const u32& stride) {
        const int last = last_column();
        const A a = identity();
#pragma unroll
        for (int j = 0; j < TILES_PIX; ++j) {
#pragma unroll
            for (int i = 0; i < TILES_CO; ++i) {
                const typename Unit::D before = acc[i][j];
                Unit::template multiply<16>(a, Unit::gather_b(shortcut_row(from, stride, j) + co_tile(i) * 16, (int)stride, last), acc[i][j]);
                if constexpr (kGates)
#pragma unroll
                    for (int e = 0; e < kElements; ++e) acc[i][j].v[e] *= sigmoid(before.v[e]) - 0.5f;
                if constexpr (kTapsAtOnce == 1) one_by_one(), settle(acc[i][j]);
            }
            one_by_one();
        }
    }

    DEVICE void add_shortcut() {
        if constexpr (SHORTCUT == kShortcutIdentity) {
            add_identity(p.shortcut, p.shortcut_stride);
        } else {
            const int last = last_column();
            const int steps = (int)p.shortcut_ci / 16;
#pragma unroll 1
            for (int k = begin_of(steps); k < end_of(steps); ++k) {
                A a[TILES_CO];
#pragma unroll
                for (int i = 0; i < TILES_CO; ++i)
                    a[i] = Packed<Unit>::load(p.shortcut_weights + (i64)(co_tile(i) * steps + k) * Packed<Unit>::kHalves);
#pragma unroll
                for (int j = 0; j < TILES_PIX; ++j) {
                    const B b = Unit::gather_b(shortcut_row(p.shortcut, p.shortcut_stride, j) + k * 16, (int)p.shortcut_stride, last);
#pragma unroll
                    for (int i = 0; i < TILES_CO; ++i) {
                        Unit::template multiply<16>(a[i], b, acc[i][j]);
                        if constexpr (kTapsAtOnce == 1) one_by_one(), settle(a[i]);
                    }
                }
            }
        }
    }

#if EPILOGUE
    template <typename F> DEVICE void each_value(F value_of) {
#pragma unroll
        for (int i = 0; i < TILES_CO; ++i)
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                const int channel = co_tile(i) * 16 + Unit::row(e);
                const float slope = EPILOGUE == kEpiloguePrelu ? p.slopes[channel] : p.slope;
#pragma unroll
                for (int j = 0; j < TILES_PIX; ++j) acc[i][j].v[e] = value_of(acc[i][j].v[e], slope);
            }
    }
    DEVICE void apply_epilogue() {
        each_value([&](float x, float slope) {
            if constexpr (EPILOGUE == kEpilogueLeakyRelu || EPILOGUE == kEpiloguePrelu) x = x < 0.0f ? x * slope : x;
            if constexpr (EPILOGUE == kEpilogueSilu) x = silu(x);
            return x * p.scale;
        });
        if constexpr (SHORTCUT == kShortcutNone) return;
        add_identity<EPILOGUE == kEpilogueGate>(p.shortcut, p.shortcut_stride);
        if (!p.second) return;
        each_value([&](float x, float) { return x * p.second_scale; });
        add_identity(p.second, p.second_stride);
    }
#endif

    DEVICE bool counts(int j, int c) const {
        return pixel_y(j) < (int)p.out_h && first_x + Unit::column(c) < (int)p.out_w;
    }
    // The pixels of the image that the waves numbered `wave` make.
    DEVICE float count(int wave) const {
        const int rows = min2(max2((int)p.out_h - first_y - wave * TILES_PIX, 0), TILES_PIX);
        return (float)(rows * min2((int)p.out_w - first_x, 16));
    }

    // Mean, and squared differences from it, of each channel over the pixels of this wave: two passes over registers. What the
    // waves of a channel have found is merged in their order.
    DEVICE void write_statistics() {
        const float all = count(wave_pix), share = all > 0.0f ? 1.0f / all : 0.0f;
#pragma unroll
        for (int i = 0; i < TILES_CO; ++i)
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                if (Unit::column_of(e) != 0) continue;
                float sum = 0.0f, squares = 0.0f;
                each_column(i, e, [&](float x, bool real) { sum += real ? x : 0.0f; });
                const float mean = row_sum<Unit>(sum) * share;
                each_column(i, e, [&](float x, bool real) { squares += real ? (x - mean) * (x - mean) : 0.0f; });
                squares = row_sum<Unit>(squares);
                const int channel = (wave_co * TILES_CO + i) * 16 + Unit::row(e);
                if (Unit::first_of_row())
                    *(Words<2>*)(lds + (wave_pix * kBlockCo + channel) * 8) = Words<2>{{float_bits(mean), float_bits(squares)}};
            }
        barrier();
        for (int c = (int)thread_id(); c < kBlockCo; c += kThreads) merge_statistics(c);
    }
    // The values of row(e) that this lane holds, over its pixel tiles and columns.
    template <typename F> DEVICE void each_column(int i, int e, F use) {
#pragma unroll
        for (int j = 0; j < TILES_PIX; ++j)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) use(acc[i][j].v[e + Unit::element_step(c)], counts(j, c));
    }
    // Chan, Golub and LeVeque (1979).
    DEVICE void merge_statistics(int c) {
        float mean = 0.0f, squares = 0.0f, all = 0.0f;
#pragma unroll
        for (int wave = 0; wave < WAVES_PIX; ++wave) {
            const Words<2> found = *(const Words<2>*)(lds + (wave * kBlockCo + c) * 8);
            const float more = count(wave), together = all + more, share = together > 0.0f ? more / together : 0.0f;
            const float step = bits_float(found.word[0]) - mean;
            squares += bits_float(found.word[1]) + step * step * (all * share);
            mean += step * share, all = together;
        }
        const int channel = block_co * kBlockCo + c;
        if (channel < (int)p.co)
            *(Words<4>*)(p.statistics + (((i64)image * parts + part) * p.co + channel) * 4) =
                Words<4>{{float_bits(mean), float_bits(squares), float_bits(all), 0}};
    }

    // Bits that are set in a half that is no number, and in none other.
    static DEVICE u32 unfit(u32 halves) { return ((halves & 0x7c007c00u) + 0x04000400u) & 0x80008000u; }

    DEVICE void write() {
        u32 overflown = 0;
#pragma unroll
        for (int j = 0; j < TILES_PIX; ++j) {
            const i64 row = (i64)image * p.image_h + pixel_y(j) * OUT_STEP + phase_y;
            u16* to = p.out + (row * p.image_w + first_x * OUT_STEP + phase_x) * p.out_stride;
            if (pixel_y(j) >= (int)p.out_h) continue;
#pragma unroll
            for (int i = 0; i < TILES_CO; ++i) {
                const int first_channel = (first_co_tile + i) * 16;
                Unit::pieces(Unit::pack(acc[i][j]), [&](int n, int channel, auto piece) {
                    if (first_x + n < (int)p.out_w && first_channel + channel < (int)p.out_channels) {
                        *(decltype(piece)*)((unsigned char*)to + ((u32)(n * OUT_STEP) * p.out_stride + first_channel + channel) * 2) = piece;
                        if constexpr (!Half::kIsBF16)
#pragma unroll
                            for (int w = 0; w < (int)(sizeof(piece) / 4); ++w) overflown |= unfit(piece.word[w]);
                    }
                });
                one_by_one();
            }
        }
        if (overflown && p.overflow) *p.overflow = 1;
    }

    // The sums of a split: kRun rows of a column lie together.
    DEVICE void write_sums() {
        constexpr int kRun = Unit::kColumns == 1 ? 4 : 2;
#pragma unroll
        for (int j = 0; j < TILES_PIX; ++j) {
            const u32 row = (u32)((image * (int)p.splits + split) * (int)p.image_h + pixel_y(j) * OUT_STEP + phase_y);
            float* to = p.statistics + (row * p.image_w + (u32)(first_x * OUT_STEP + phase_x)) * p.co;
#pragma unroll
            for (int i = 0; i < TILES_CO; ++i)
#pragma unroll
                for (int e = 0; e < kElements; e += kRun) {
                    const int column = Unit::column(Unit::column_of(e)), channel = (first_co_tile + i) * 16 + Unit::row(e);
                    if (!counts(j, Unit::column_of(e)) || channel >= (int)p.co) continue;
                    Words<kRun> sums;
#pragma unroll
                    for (int r = 0; r < kRun; ++r) sums.word[r] = float_bits(acc[i][j].v[e + r]);
                    *(Words<kRun>*)(to + (u32)(column * OUT_STEP) * p.co + channel) = sums;
                }
        }
    }

    DEVICE void run() {
        const int chunks = (int)p.ci / CHUNK_C, first_chunk = begin_of(chunks), last_chunk = end_of(chunks);
        if constexpr (SPLIT_K && !WEIGHTS_IN_ROWS)
#pragma unroll
            for (int i = 0; i < TILES_CO; ++i) tile[i] += first_chunk * kChunkTiles * kTileBytes;
        if constexpr (!WEIGHTS_IN_ROWS) fetch(first_chunk * CHUNK_C * 2), fetch_weights(0);
        const float* bias = p.bias + (i64)image * p.bias_stride;
#pragma unroll
        for (int i = 0; i < TILES_CO; ++i)
#pragma unroll
            for (int j = 0; j < TILES_PIX; ++j)
#pragma unroll
                for (int e = 0; e < kElements; ++e) acc[i][j].v[e] = SPLIT_K ? 0.0f : bias[co_tile(i) * 16 + Unit::row(e)];
        if constexpr (WEIGHTS_IN_ROWS) {
            multiply_by_rows();
        } else {
#pragma unroll 1
            for (int chunk = first_chunk; chunk < last_chunk; ++chunk) {
                store(chunk);
                barrier();
                fetch(chunk + 1 < last_chunk ? CHUNK_C * 2 : 0);
                multiply_chunk(chunk);
            }
#if EPILOGUE
            apply_epilogue();
#else
            if constexpr (SHORTCUT != kShortcutNone) add_shortcut();
#endif
        }
        if constexpr (SPLIT_K) return write_sums();
        if constexpr (SHORTCUT != kShortcutNone) loads_landed();  // `out` may be `shortcut`
        if constexpr (SHORTCUT != kShortcutNone || STATISTICS) barrier();  // likewise; and LDS gets another use
        write();
        if constexpr (STATISTICS) write_statistics();
    }
};
