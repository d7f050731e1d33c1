// GroupNorm, and SiLU after it: one pass over the image for its statistics, one to apply them. Small channels-last images are made in
// one launch, by group_norm_whole.hip.
//
//   out[n,c,p] = f(x[n,c,p] scale[n,c] + shift[n,c]),  scale = gamma[c] / sqrt(variance[n,g] + eps),  shift = beta[c] - mean[n,g] scale[n,c]
//
//   x, out       (N, pixels, C) or (N, C, pixels)   fp16 or bf16, contiguous, any alignment
//   statistics   (N, parts, C, 4)    float32: mean, sum of squared differences from it, count, unused; of one part of the pixels
//   norm         (N, C, 2)           float32: scale, shift
//
// One kernel per compilation, that of the only STEP_ which is defined: STEP_STATISTICS x -> statistics, STEP_MERGE statistics ->
// statistics of fewer parts, STEP_FINALIZE statistics -> norm, STEP_APPLY x, norm -> out, and STEP_FINISH, what is left to do after
// a library's convolution, in one pass: out = x + bias (+ shortcut), its statistics, and a flag where a value does not fit. With
// PHASES the convolution was one of 2x2 taps to 4 C channels, standing for an upsampled image's (see upsample_conv.hip): x is
// (N, source_rows, source_columns, 4, C), and out pixel (2 y + py, 2 x + px) is x[y + above + py, x + px, 2 py + px].
//
// Numerics. No square of a sum is ever subtracted from a sum of squares. A work-item reads a batch of values into registers and
// passes over them twice, once for the mean and once for the differences from it; batches, lanes and parts are merged by the
// formula of Chan, Golub and LeVeque (1979). All orders are fixed: the same input gives the same bits.
//
// Tiling. A work-item reads 16 bytes at a time and keeps UNROLL such reads in flight. In (N, pixels, C) they are eight channels, the
// same ones for every pixel that the work-item meets, so that eight means live in registers: a work-group is a grid of rows (pixels)
// by `width` columns (eight channels each). In (N, C, pixels) the channel is one and the 16 bytes are pixels: a work-group is
// THREADS / width teams of `width` lanes, a team takes one part of one channel. Where a channel begins between two multiples of 16
// bytes, up to seven values before the first and after the last whole vector are read one by one.
#include "common/group_norm.h"

// BF16_HALVES, CHANNELS_LAST, VECTOR, SILU, SHORTCUT, STATISTICS, PHASES, THREADS, UNROLL come as definitions
// (lib_rocm_sd/ops/group_norm/kernel.py).
struct GroupNormImageParams {  // the same in group_norm_kernel.py
    const u16* x;
    u16* out;
    float* statistics;
    const float* norm;
    u32 channels, pixels, parts, part_pixels;
    u32 width, column_blocks;  // of a work-group, see above; (N, pixels, C) only: work-groups per row of channels
    u32 units;                 // (N, C, pixels) only: parts of channels in all
    u32 aligned;               // 16-byte accesses may be used
    u32 groups;                // work-groups of this launch
    u32 bias_stride;           // STEP_FINISH only, as what follows: floats from one image's bias to the next's; 0: one for all
    const float* bias;         // (C) or (N, C)
    const u16* shortcut;       // like out
    u32* overflow;             // set to 1 where a value does not fit the half type; may be null
    u32 source_rows, source_columns, above, columns;  // PHASES only; columns: of out
};

struct GroupNormMergeParams {  // the same in group_norm_kernel.py
    const float* statistics;
    float* out;  // statistics or norm
    const void* gamma;
    const void* beta;
    u32 parts, statistics_channels, channels, group_channels;
    u32 out_parts, part_parts, width, column_blocks;  // STEP_MERGE only
    u32 gamma_kind, beta_kind;
    float eps;
};

constexpr int kExchanged = THREADS / 2;  // moments that are in LDS at a time
template <int K> constexpr int kExchangeBytes = (2 * K + 1) * kExchanged * 4;

// Row 0 of `rows` gets the moments of its column over all rows; every work-item of the work-group comes here.
template <int K> DEVICE void merge_rows(Moments<K>& mine, float* lds, int row, int column, int rows, int width) {
    for (int left = rows; left > 1;) {
        const int half = (left + 1) / 2;
        float* place = lds + (row < half ? row : row - half) * width + column;
        if (row >= half && row < left) {
#pragma unroll
            for (int k = 0; k < K; ++k) place[2 * k * kExchanged] = mine.mean[k], place[(2 * k + 1) * kExchanged] = mine.m2[k];
            place[2 * K * kExchanged] = mine.count;
        }
        barrier();
        if (row + half < left) {
            Moments<K> other[1];
#pragma unroll
            for (int k = 0; k < K; ++k)
                other[0].mean[k] = place[2 * k * kExchanged], other[0].m2[k] = place[(2 * k + 1) * kExchanged];
            other[0].count = place[2 * K * kExchanged];
            mine.merge(other);
        }
        barrier();
        left = half;
    }
}

DEVICE void write_moments(float* to, float mean, float m2, float count) {
    *(Words<4>*)to = Words<4>{{float_bits(mean), float_bits(m2), float_bits(count), 0}};
}
DEVICE Moments<1> read_moments(const float* from) {
    const Words<4> words = *(const Words<4>*)from;
    Moments<1> moments;
    moments.mean[0] = bits_float(words.word[0]), moments.m2[0] = bits_float(words.word[1]), moments.count = bits_float(words.word[2]);
    return moments;
}

// Whether all of a batch exists, known to the compiler.
template <bool kWhole> struct Batch {
    static constexpr bool whole = kWhole;
    int valid;
};

#if STEP_STATISTICS || STEP_APPLY || STEP_FINISH
using Values = Vector<VECTOR>;

#if STEP_APPLY
DEVICE float result(float x, float scale, float shift) { return normed<SILU>(x, scale, shift); }
// From the end of the image on: what the pass for statistics read last may still be in a cache.
DEVICE u32 block_in_order(const GroupNormImageParams& p) { return p.groups - 1 - block_id(); }
#else
DEVICE u32 block_in_order(const GroupNormImageParams&) { return block_id(); }
#endif

#if CHANNELS_LAST

// Where a work-item is in (N, pixels, C): VECTOR channels from `channel` on, pixels first, first + rows, ... below last.
struct Place {
    int row, column, rows;
    u32 image, part, channel, first, last;
    i64 offset;  // of pixel 0, in elements
    bool active;
    DEVICE explicit Place(const GroupNormImageParams& p) {
        const u32 thread = thread_id(), block = block_in_order(p);
        row = (int)(thread / p.width), column = (int)(thread % p.width), rows = (int)(THREADS / p.width);
        part = block / p.column_blocks % p.parts, image = block / p.column_blocks / p.parts;
        channel = (block % p.column_blocks * p.width + (u32)column) * VECTOR;
        first = part * p.part_pixels + (u32)row, last = min2(part * p.part_pixels + p.part_pixels, p.pixels);
        offset = (i64)image * p.pixels * p.channels + channel;
        active = row < rows && channel < p.channels;
    }
    // Calls body(batch, pixel) for batches of UNROLL pixels: pixel, pixel + rows, ...
    template <typename F> DEVICE void each_batch(F body) const {
        if (!active) return;
        u32 pixel = first;
        for (; pixel + (UNROLL - 1) * rows < last; pixel += UNROLL * rows) body(Batch<true>{UNROLL}, pixel);
        if (pixel < last) body(Batch<false>{(int)((last - 1 - pixel) / rows) + 1}, pixel);
    }
    // The i-th pixel of a batch; those past the end repeat the first, which no other work-item writes to.
    DEVICE u32 pixel_of(u32 pixel, int i) const {
        const u32 wanted = pixel + (u32)(i * rows);
        return wanted < last ? wanted : pixel;
    }
    // Its offset.
    template <bool kWhole> DEVICE i64 at(const GroupNormImageParams& p, Batch<kWhole>, u32 pixel, int i) const {
        return offset + (i64)(kWhole ? pixel + (u32)(i * rows) : pixel_of(pixel, i)) * p.channels;
    }
};

#if STEP_STATISTICS || STEP_FINISH
DEVICE void write_part(const GroupNormImageParams& p, const Place& place, const Moments<VECTOR>& moments) {
    if (!place.active || place.row != 0) return;
    float* to = p.statistics + (((i64)place.image * p.parts + place.part) * p.channels + place.channel) * 4;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) write_moments(to + 4 * k, moments.mean[k], moments.m2[k], moments.count);
}
#endif

#if STEP_STATISTICS

template <bool kAligned> DEVICE void summarize(const GroupNormImageParams& p, const Place& place, Moments<VECTOR>& moments) {
    place.each_batch([&](auto batch, u32 pixel) {
        Values values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) values[i] = Values::template load<kAligned>(p.x + place.at(p, batch, pixel, i));
        moments.template add<UNROLL, decltype(batch)::whole>([&](int k, int i) { return values[i].at(k); }, batch.valid);
    });
}

DEVICE void statistics(const GroupNormImageParams& p, float* lds) {
    const Place place(p);
    Moments<VECTOR> moments;
    if (p.aligned) summarize<true>(p, place, moments);
    else summarize<false>(p, place, moments);
    merge_rows(moments, lds, place.row, place.column, place.rows, (int)p.width);
    write_part(p, place, moments);
}

#elif STEP_FINISH

// Where the value of out's element `at`, of pixel `pixel`, comes from.
DEVICE i64 source_of(const GroupNormImageParams& p, const Place& place, i64 at, u32 pixel) {
    if constexpr (!PHASES) return at;
    const u32 y = pixel / p.columns, x = pixel % p.columns, phase = y % 2 * 2 + x % 2;
    const i64 row = (i64)place.image * p.source_rows + p.above + y / 2 + y % 2;
    return ((row * p.source_columns + x / 2 + x % 2) * 4 + phase) * p.channels + place.channel;
}

template <bool kAligned> DEVICE void complete(const GroupNormImageParams& p, const Place& place, Moments<VECTOR>& moments) {
    if (!place.active) return;
    const float* row = p.bias + (i64)place.image * p.bias_stride + place.channel;
    float bias[VECTOR];
    bool fits = true;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) bias[k] = row[k];
    place.each_batch([&](auto batch, u32 pixel) {
        Values values[UNROLL], added[SHORTCUT ? UNROLL : 1];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const i64 at = source_of(p, place, place.at(p, batch, pixel, i), place.pixel_of(pixel, i));
            values[i] = Values::template load<kAligned>(p.x + at);
        }
        if constexpr (SHORTCUT)
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) added[i] = Values::template load<kAligned>(p.shortcut + place.at(p, batch, pixel, i));
        float sums[UNROLL][VECTOR];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                sums[i][k] = values[i].at(k) + bias[k];
                if constexpr (SHORTCUT) sums[i][k] += added[i].at(k);
                if (!Half::kIsBF16 && !(abs_f32(sums[i][k]) < 65520.0f)) fits = false;
            }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (decltype(batch)::whole || i < batch.valid)
                Values::template store<kAligned>(p.out + place.at(p, batch, pixel, i), [&](int k) { return sums[i][k]; });
        if constexpr (STATISTICS)
            moments.template add<UNROLL, decltype(batch)::whole>([&](int k, int i) { return sums[i][k]; }, batch.valid);
    });
    if (!fits && p.overflow) *p.overflow = 1;
}

DEVICE void finish(const GroupNormImageParams& p, float* lds) {
    const Place place(p);
    Moments<VECTOR> moments;
    if (p.aligned) complete<true>(p, place, moments);
    else complete<false>(p, place, moments);
    if constexpr (STATISTICS) {
        merge_rows(moments, lds, place.row, place.column, place.rows, (int)p.width);
        write_part(p, place, moments);
    }
}

#else  // STEP_APPLY

template <bool kAligned> DEVICE void transform(const GroupNormImageParams& p, const Place& place) {
    if (!place.active) return;
    const float* norm = p.norm + ((i64)place.image * p.channels + place.channel) * 2;
    float scale[VECTOR], shift[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) scale[k] = norm[2 * k], shift[k] = norm[2 * k + 1];
    place.each_batch([&](auto batch, u32 pixel) {
        Values values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) values[i] = Values::template load<kAligned>(p.x + place.at(p, batch, pixel, i));
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (decltype(batch)::whole || i < batch.valid)
                Values::template store<kAligned>(p.out + place.at(p, batch, pixel, i),
                                                 [&](int k) { return result(values[i].at(k), scale[k], shift[k]); });
    });
}

DEVICE void apply(const GroupNormImageParams& p) {
    const Place place(p);
    if (p.aligned) transform<true>(p, place);
    else transform<false>(p, place);
}

#endif

#else  // (N, C, pixels)

// Where a team is: `count` values of one channel from `start` on, of which those from `head` on are `vectors` whole vectors.
struct Place {
    int lane, team, lanes;
    u32 part, count, head, vectors;
    i64 run, start;  // run: n * C + c
    bool active;
    DEVICE Place(const GroupNormImageParams& p, const u16* aligned_to) {
        const u32 thread = thread_id();
        lanes = (int)p.width, lane = (int)(thread % p.width), team = (int)(thread / p.width);
        const i64 unit = (i64)block_in_order(p) * (THREADS / p.width) + team;
        active = unit < (i64)p.units;
        run = unit / p.parts, part = (u32)(unit % p.parts);
        start = run * p.pixels + (i64)part * p.part_pixels;
        count = active ? min2(p.part_pixels, p.pixels - part * p.part_pixels) : 0;
        const u32 past = (u32)((u64)(aligned_to + start) / 2 % VECTOR);
        head = min2((u32)((VECTOR - past) % VECTOR), count);
        vectors = (count - head) / VECTOR;
    }
    // Calls body(batch, vector) for batches of UNROLL vectors: vector, vector + lanes, ...
    template <typename F> DEVICE void each_batch(F body) const {
        u32 vector = (u32)lane;
        for (; vector + (UNROLL - 1) * lanes < vectors; vector += UNROLL * lanes) body(Batch<true>{UNROLL}, vector);
        if (vector < vectors) body(Batch<false>{(int)((vectors - 1 - vector) / lanes) + 1}, vector);
    }
    // Of the i-th vector of a batch; those past the end repeat the last.
    template <bool kWhole> DEVICE i64 at(Batch<kWhole>, u32 vector, int i) const {
        const u32 wanted = vector + (u32)(i * lanes);
        return start + head + (i64)(kWhole ? wanted : min2(wanted, vectors - 1)) * VECTOR;
    }
    // Calls body(element) for what is before the first and after the last whole vector.
    template <typename F> DEVICE void each_single(F body) const {
        const u32 singles = count - vectors * VECTOR;
        for (u32 i = (u32)lane; i < singles; i += (u32)lanes) body(start + (i < head ? i : i + vectors * VECTOR));
    }
};

#if STEP_STATISTICS

DEVICE void statistics(const GroupNormImageParams& p, float* lds) {
    const Place place(p, p.x);
    Moments<1> moments;
    place.each_batch([&](auto batch, u32 vector) {
        Values values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) values[i] = Values::template load<true>(p.x + place.at(batch, vector, i));
        moments.template add<UNROLL * VECTOR, decltype(batch)::whole>([&](int, int i) { return values[i / VECTOR].at(i % VECTOR); },
                                                           batch.valid * VECTOR);
    });
    place.each_single([&](i64 element) {
        const float x = Half::to(p.x[element]);
        moments.template add<1, true>([&](int, int) { return x; }, 1);
    });
    merge_rows(moments, lds, place.lane, place.team, place.lanes, THREADS / place.lanes);
    if (place.active && place.lane == 0) {
        const i64 image = place.run / p.channels, channel = place.run % p.channels;
        write_moments(p.statistics + ((image * p.parts + place.part) * p.channels + channel) * 4, moments.mean[0], moments.m2[0], moments.count);
    }
}

#else  // STEP_APPLY

template <bool kAligned> DEVICE void transform(const GroupNormImageParams& p, const Place& place) {
    if (!place.active) return;
    const float scale = p.norm[place.run * 2], shift = p.norm[place.run * 2 + 1];
    place.each_batch([&](auto batch, u32 vector) {
        Values values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) values[i] = Values::template load<kAligned>(p.x + place.at(batch, vector, i));
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (decltype(batch)::whole || i < batch.valid)
                Values::template store<true>(p.out + place.at(batch, vector, i), [&](int k) { return result(values[i].at(k), scale, shift); });
    });
    place.each_single([&](i64 element) { p.out[element] = Half::from(result(Half::to(p.x[element]), scale, shift)); });
}

DEVICE void apply(const GroupNormImageParams& p) {
    const Place place(p, p.out);
    if (p.aligned) transform<true>(p, place);
    else transform<false>(p, place);
}

#endif

#endif
#endif

#if STEP_STATISTICS

constexpr int kLdsBytes = kExchangeBytes<CHANNELS_LAST ? VECTOR : 1>;
static_assert(kLdsBytes <= LDS_BYTES, "the exchange does not fit the LDS of this GPU");
EXPORT_LDS_BYTES(kLdsBytes)

KERNEL(THREADS) group_norm_statistics(GroupNormImageParams p) {
    LDS(memory, kLdsBytes);
    statistics(p, (float*)memory);
}

#elif STEP_FINISH

constexpr int kLdsBytes = STATISTICS ? kExchangeBytes<VECTOR> : 16;
static_assert(kLdsBytes <= LDS_BYTES, "the exchange does not fit the LDS of this GPU");
EXPORT_LDS_BYTES(kLdsBytes)

KERNEL(THREADS) group_norm_finish(GroupNormImageParams p) {
    LDS(memory, kLdsBytes);
    finish(p, (float*)memory);
}

#elif STEP_APPLY

KERNEL(THREADS) group_norm_apply(GroupNormImageParams p) { apply(p); }

#else

constexpr int kLdsBytes = kExchangeBytes<1>;
EXPORT_LDS_BYTES(kLdsBytes)

// Entries first, first + step, ... below last of which entry i lies at from + offset(i) floats; UNROLL of them in flight.
template <typename F> DEVICE Moments<1> merge_entries(const float* from, u32 first, u32 last, u32 step, F offset) {
    Moments<1> moments;
    for (u64 entry = first; entry < last; entry += (u64)UNROLL * step) {
        Moments<1> batch[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) batch[i] = read_moments(from + offset((u32)min2(entry + (u64)i * step, (u64)last - 1)));
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (entry + (u64)i * step >= last) batch[i] = Moments<1>();
        moments.merge(batch);
    }
    return moments;
}

#if STEP_MERGE

KERNEL(THREADS) group_norm_merge(GroupNormMergeParams p) {
    LDS(memory, kLdsBytes);
    const u32 block = block_id(), row = thread_id() / p.width, column = thread_id() % p.width, rows = THREADS / p.width;
    const u32 part = block / p.column_blocks % p.out_parts, image = block / p.column_blocks / p.out_parts;
    const u32 channel = block % p.column_blocks * p.width + column, stride = p.statistics_channels * 4;
    const u32 first = part * p.part_parts, last = min2(first + p.part_parts, p.parts);
    const bool active = row < rows && channel < p.channels;
    Moments<1> moments;
    if (active)
        moments = merge_entries(p.statistics + (i64)image * p.parts * stride + channel * 4, first + row, last, rows,
                                [&](u32 entry) { return (i64)entry * stride; });
    merge_rows(moments, (float*)memory, (int)row, (int)column, (int)rows, (int)p.width);
    if (active && row == 0)
        write_moments(p.out + (((i64)image * p.out_parts + part) * p.channels + channel) * 4, moments.mean[0], moments.m2[0], moments.count);
}

#else  // STEP_FINALIZE

KERNEL(THREADS) group_norm_finalize(GroupNormMergeParams p) {
    LDS(memory, kLdsBytes);
    float* lds = (float*)memory;
    const u32 groups = p.channels / p.group_channels, image = block_id() / groups, first = block_id() % groups * p.group_channels;
    const u32 stride = p.statistics_channels * 4;
    Moments<1> moments = merge_entries(
        p.statistics + (i64)image * p.parts * stride + first * 4, thread_id(), p.parts * p.group_channels, THREADS,
        [&](u32 entry) { return (i64)(entry / p.group_channels) * stride + entry % p.group_channels * 4; });
    merge_rows(moments, lds, (int)thread_id(), 0, THREADS, 1);
    if (thread_id() == 0) lds[0] = moments.mean[0], lds[1] = reciprocal_sqrt(moments.m2[0] / moments.count + p.eps);
    barrier();
    const float mean = lds[0], share = lds[1];
    for (u32 channel = first + thread_id(); channel < first + p.group_channels; channel += THREADS) {
        const float scale = share * affine(p.gamma, p.gamma_kind, channel, 1.0f);
        float* to = p.out + ((i64)image * p.channels + channel) * 2;
        to[0] = scale, to[1] = fma_f32(-mean, scale, affine(p.beta, p.beta_kind, channel, 0.0f));
    }
}

#endif
#endif
