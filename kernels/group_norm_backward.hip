// The gradients of GroupNorm, and of SiLU after it (group_norm_silu.hip):
//
//   normed[n,c,p] = x[n,c,p] norm[n,c,0] + norm[n,c,1],  z = normed gamma[c] + beta[c],  g = grad f'(z), f' SiLU's derivative or 1
//   out = scale[n,g] (g gamma[c] - mean of g gamma over the group - normed mean of g gamma normed over the group)
//   gamma's gradient [c] = sum over n, p of g normed, beta's [c] = sum over n, p of g
//
//   grad, x, out  (N, pixels, C) or (N, C, pixels)  fp16 or bf16, contiguous, any alignment
//   norm          (N, C, 2)         float32: scale = 1 / sqrt(variance + eps), shift = -mean scale; without gamma and beta
//   gamma, beta   (C)               fp16, bf16 or float32, both alike, or none
//   sums          (N, parts, C, 2)  float32: of a part of the pixels, sums of g normed and of g
//   totals        (N, C, 2)         float32: the same of all pixels; norm_gradients.hip adds those of the images
//   factors       (N, C, 4)         float32: z = x factors[0] + factors[1], out = g factors[0] + x factors[2] + factors[3]
//
// The norm is made anew, by the forward pass's own kernels. One kernel per compilation, that of the only STEP_ which is defined:
// STEP_SUMS x, grad, norm -> sums; STEP_COMBINE sums -> totals, factors; STEP_APPLY x, grad, factors -> out.
//
// Numerics. All is float32 but what is read and written. No atomics, and all orders are fixed: the same input gives the same bits.
//
// Tiling. As in group_norm_silu.hip. In (N, pixels, C) a work-group is a grid of rows (pixels) by `width` columns, VECTOR channels each,
// and a work-item keeps UNROLL pixels of x and of grad in flight. In (N, C, pixels) it is THREADS / width teams of `width` lanes, each
// with one part of one channel, eight pixels at a time; what is no whole eight is read one by one, all of a part where it does not begin
// at a multiple of 16 bytes in halves. STEP_COMBINE has a work-group for each group of each image.
#include "common/pair_sums.h"

// STEP_SUMS, STEP_COMBINE or STEP_APPLY, BF16_HALVES, CHANNELS_LAST, VECTOR, SILU, AFFINE, THREADS, UNROLL come as definitions
// (lib_rocm_sd/ops/group_norm_backward/kernel.py). AFFINE is of STEP_SUMS with SILU.
struct GroupNormBackwardParams {  // the same in lib_rocm_sd/ops/group_norm_backward/kernel.py
    const u16* grad;
    const u16* x;
    u16* out;
    const float* norm;
    const float* factors;
    float* sums;
    const void* gamma;
    const void* beta;
    u32 channels, pixels, parts, part_pixels;
    u32 width, column_blocks;  // of a work-group, see above; (N, pixels, C) only: work-groups per row of channels
    u32 units;                 // (N, C, pixels) only: parts of channels in all
    u32 aligned;               // 16-byte accesses may be used
};

struct GroupNormCombineParams {  // the same in lib_rocm_sd/ops/group_norm_backward/kernel.py
    const float* sums;
    const float* norm;
    const void* gamma;
    const void* beta;
    float* totals;
    float* factors;
    u32 parts, channels, group_channels, width;  // width: channels that a work-group adds up at a time
    u32 kind;     // AffineKind of gamma and beta
    float share;  // 1 / values of a group
};

#if STEP_COMBINE

constexpr int kLdsBytes = kPairBytes<1>;
EXPORT_LDS_BYTES(kLdsBytes)

KERNEL(THREADS) group_norm_backward_combine(GroupNormCombineParams p) {
    LDS(memory, kLdsBytes);
    float* lds = (float*)memory;
    const u32 groups = p.channels / p.group_channels, image = block_id() / groups, start = block_id() % groups * p.group_channels;
    const u32 row = thread_id() / p.width, column = thread_id() % p.width, rows = THREADS / p.width;
    const i64 here = (i64)image * p.channels + start;  // the group's first channel
    PairSums<1> group;
    for (u32 begun = 0; begun < p.group_channels; begun += p.width) {
        const u32 channel = begun + column;
        const bool active = row < rows && channel < p.group_channels;
        PairSums<1> sums;
        if (active) {
            const float* from = p.sums + ((i64)image * p.parts * p.channels + start + channel) * 2;
            sums = added_pairs(from, row, p.parts, rows, p.channels * 2);
        }
        add_rows(sums, lds, (int)row, (int)column, (int)rows, (int)p.width);
        if (active && row == 0) {
            const float gamma = affine(p.gamma, p.kind, start + channel, 1.0f);
            write_pair(p.totals + (here + channel) * 2, sums.first[0], sums.second[0]);
            group.first[0] = fma_f32(gamma, sums.first[0], group.first[0]);
            group.second[0] = fma_f32(gamma, sums.second[0], group.second[0]);
        }
    }
    add_rows(group, lds, row == 0 ? (int)column : THREADS, 0, (int)p.width, 1);
    if (thread_id() == 0) lds[0] = group.first[0] * p.share, lds[1] = group.second[0] * p.share;
    barrier();
    const float slope = lds[0], level = lds[1];
    for (u32 channel = thread_id(); channel < p.group_channels; channel += THREADS) {
        const Words<2> norm = *(const Words<2>*)(p.norm + (here + channel) * 2);
        const float scale = bits_float(norm.word[0]), shift = bits_float(norm.word[1]);
        const float gamma = affine(p.gamma, p.kind, start + channel, 1.0f), beta = affine(p.beta, p.kind, start + channel, 0.0f);
        *(Words<4>*)(p.factors + (here + channel) * 4) = Words<4>{
            {float_bits(scale * gamma), float_bits(fma_f32(shift, gamma, beta)), float_bits(-scale * slope * scale),
             float_bits(-scale * fma_f32(shift, slope, level))}};
    }
}

#else  // STEP_SUMS, STEP_APPLY

using Values = Vector<CHANNELS_LAST ? VECTOR : 8>;

// SiLU's derivative s (1 + z (1 - s)) with s = 1 / (1 + e^-z).
DEVICE float derived(float grad, float z) {
    if (!SILU) return grad;
    const float s = reciprocal(1.0f + exp2_fast(-1.44269504088896341f * z));
    return grad * (s * fma_f32(z, 1.0f - s, 1.0f));
}

#if STEP_SUMS
// Of a channel: what STEP_SUMS needs to add a pixel.
struct Norm {
    float scale, shift, gamma, beta;
    DEVICE void read(const GroupNormBackwardParams& p, i64 run, u32 channel) {
        const Words<2> pair = *(const Words<2>*)(p.norm + run * 2);
        scale = bits_float(pair.word[0]), shift = bits_float(pair.word[1]);
        gamma = affine(p.gamma, AFFINE, channel, 1.0f), beta = affine(p.beta, AFFINE, channel, 0.0f);
    }
    DEVICE void add(float& products, float& all, float x, float grad, bool exists) const {
        const float normed = fma_f32(x, scale, shift), g = derived(grad, fma_f32(normed, gamma, beta));
        products += exists ? g * normed : 0.0f, all += exists ? g : 0.0f;
    }
};
#else
// Of a channel: what STEP_APPLY needs.
struct Factors {
    Words<4> of;
    DEVICE void read(const GroupNormBackwardParams& p, i64 run, u32) { of = *(const Words<4>*)(p.factors + run * 4); }
    DEVICE float at(int i) const { return bits_float(of.word[i]); }
    DEVICE float result(float x, float grad) const {
        return fma_f32(derived(grad, fma_f32(x, at(0), at(1))), at(0), fma_f32(x, at(2), at(3)));
    }
};
#endif

#if CHANNELS_LAST

// Where a work-item is: VECTOR channels from `channel` on, pixels first, first + rows, ... below last.
struct Place {
    u32 row, column, rows, image, part, channel, first, last;
    i64 offset;  // of pixel 0, in elements
    bool active;
    DEVICE explicit Place(const GroupNormBackwardParams& p) {
        const u32 thread = thread_id(), block = block_id();
        row = thread / p.width, column = thread % p.width, rows = THREADS / p.width;
        part = block / p.column_blocks % p.parts, image = block / p.column_blocks / p.parts;
        channel = (block % p.column_blocks * p.width + column) * VECTOR;
        first = part * p.part_pixels + row, last = min2(part * p.part_pixels + p.part_pixels, p.pixels);
        offset = (i64)image * p.pixels * p.channels + channel;
        active = row < rows && channel < p.channels;
    }
    DEVICE i64 run(const GroupNormBackwardParams& p) const { return (i64)image * p.channels + channel; }
};

// Calls body(i-th pixel's offset, x, grad, whether it exists) for pixels of a work-item, UNROLL at a time.
template <bool kAligned, typename F> DEVICE void each_pixel(const GroupNormBackwardParams& p, const Place& place, F body) {
    for (u32 begun = place.first; begun < place.last; begun += UNROLL * place.rows) {
        Values values[UNROLL], grads[UNROLL];
        i64 at[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            at[i] = place.offset + (i64)min2(begun + (u32)i * place.rows, place.last - 1) * p.channels;
            values[i] = Values::template load<kAligned>(p.x + at[i]), grads[i] = Values::template load<kAligned>(p.grad + at[i]);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) body(at[i], values[i], grads[i], begun + (u32)i * place.rows < place.last);
    }
}

#if STEP_SUMS

template <bool kAligned> DEVICE void add_up(const GroupNormBackwardParams& p, const Place& place, PairSums<VECTOR>& sums) {
    Norm norms[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) norms[k].read(p, place.run(p) + k, place.channel + k);
    each_pixel<kAligned>(p, place, [&](i64, const Values& x, const Values& grad, bool exists) {
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) norms[k].add(sums.first[k], sums.second[k], x.at(k), grad.at(k), exists);
    });
}

DEVICE void make_sums(const GroupNormBackwardParams& p, float* lds) {
    const Place place(p);
    PairSums<VECTOR> sums;
    if (place.active && p.aligned) add_up<true>(p, place, sums);
    else if (place.active) add_up<false>(p, place, sums);
    add_rows(sums, lds, (int)place.row, (int)place.column, (int)place.rows, (int)p.width);
    if (!place.active || place.row != 0) return;
    float* to = p.sums + (((i64)place.image * p.parts + place.part) * p.channels + place.channel) * 2;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) write_pair(to + 2 * k, sums.first[k], sums.second[k]);
}

#else  // STEP_APPLY

template <bool kAligned> DEVICE void transform(const GroupNormBackwardParams& p, const Place& place) {
    if (!place.active) return;
    Factors factors[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) factors[k].read(p, place.run(p) + k, place.channel + k);
    each_pixel<kAligned>(p, place, [&](i64 at, const Values& x, const Values& grad, bool exists) {
        if (exists) Values::template store<kAligned>(p.out + at, [&](int k) { return factors[k].result(x.at(k), grad.at(k)); });
    });
}

#endif

#else  // (N, C, pixels)

// Where a team is: `count` values of one channel from `start` on.
struct Place {
    u32 lane, team, lanes, run, part, count;  // run: n * C + c
    i64 start;
    bool active;
    DEVICE explicit Place(const GroupNormBackwardParams& p) {
        const u32 thread = thread_id();
        lanes = p.width, lane = thread % p.width, team = thread / p.width;
        const u32 unit = block_id() * (THREADS / p.width) + team;
        active = unit < p.units;
        run = unit / p.parts, part = unit % p.parts;
        start = (i64)run * p.pixels + part * p.part_pixels;
        count = active ? min2(p.part_pixels, p.pixels - part * p.part_pixels) : 0;
    }
    DEVICE u32 channel(const GroupNormBackwardParams& p) const { return run % p.channels; }
};

// Calls eights(offset, x, grad, whether they exist) for a lane's vectors, UNROLL at a time, and one(offset) for what is left.
template <typename F, typename G> DEVICE void each_pixel(const GroupNormBackwardParams& p, const Place& place, F eights, G one) {
    const u32 vectors = p.aligned ? place.count / 8 : 0;
    for (u32 begun = place.lane; begun < vectors; begun += UNROLL * place.lanes) {
        Values values[UNROLL], grads[UNROLL];
        i64 at[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            at[i] = place.start + min2(begun + (u32)i * place.lanes, vectors - 1) * 8;
            values[i] = Values::template load<true>(p.x + at[i]), grads[i] = Values::template load<true>(p.grad + at[i]);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) eights(at[i], values[i], grads[i], begun + (u32)i * place.lanes < vectors);
    }
    for (u32 i = vectors * 8 + place.lane; i < place.count; i += place.lanes) one(place.start + i);
}

#if STEP_SUMS

DEVICE void make_sums(const GroupNormBackwardParams& p, float* lds) {
    const Place place(p);
    PairSums<1> sums;
    if (place.active) {
        Norm norm;
        norm.read(p, place.run, place.channel(p));
        each_pixel(
            p, place,
            [&](i64, const Values& x, const Values& grad, bool exists) {
#pragma unroll
                for (int i = 0; i < 8; ++i) norm.add(sums.first[0], sums.second[0], x.at(i), grad.at(i), exists);
            },
            [&](i64 at) { norm.add(sums.first[0], sums.second[0], Half::to(p.x[at]), Half::to(p.grad[at]), true); });
    }
    add_rows(sums, lds, (int)place.lane, (int)place.team, (int)place.lanes, THREADS / (int)p.width);
    if (!place.active || place.lane != 0) return;
    const i64 image = place.run / p.channels;
    write_pair(p.sums + ((image * p.parts + place.part) * p.channels + place.channel(p)) * 2, sums.first[0], sums.second[0]);
}

#else  // STEP_APPLY

template <bool> DEVICE void transform(const GroupNormBackwardParams& p, const Place& place) {
    if (!place.active) return;
    Factors factors;
    factors.read(p, place.run, 0);
    each_pixel(
        p, place,
        [&](i64 at, const Values& x, const Values& grad, bool exists) {
            if (exists) Values::template store<true>(p.out + at, [&](int i) { return factors.result(x.at(i), grad.at(i)); });
        },
        [&](i64 at) { p.out[at] = Half::from(factors.result(Half::to(p.x[at]), Half::to(p.grad[at]))); });
}

#endif
#endif

#if STEP_SUMS

constexpr int kLdsBytes = kPairBytes<CHANNELS_LAST ? VECTOR : 1>;
static_assert(kLdsBytes <= LDS_BYTES, "the exchange does not fit the LDS of this GPU");
EXPORT_LDS_BYTES(kLdsBytes)

KERNEL(THREADS) group_norm_backward_sums(GroupNormBackwardParams p) {
    LDS(memory, kLdsBytes);
    make_sums(p, (float*)memory);
}

#else

KERNEL(THREADS) group_norm_backward_apply(GroupNormBackwardParams p) {
    const Place place(p);
    if (CHANNELS_LAST && !p.aligned) transform<false>(p, place);
    else transform<true>(p, place);
}

#endif
#endif
