// The gradients of LayerNorm over the last dimension (layer_norm.hip); with ADDED those of the norm of a sum that is kept as well:
//
//   normed[r, c] = (s[r, c] - mean[r]) scale[r],  scale[r] = 1 / sqrt(variance[r] + eps),  s = x, with ADDED x + added, rounded
//   out[r, c] = scale[r] (g[r, c] - mean of g[r] - normed[r, c] mean of g[r] normed[r]) + sum_grad[r, c],  g = grad gamma
//   gamma's gradient [c] = sum over r of grad[r, c] normed[r, c], beta's [c] = sum over r of grad[r, c]
//
//   grad, x, added, sum_grad, out  (rows, C)      fp16 or bf16, contiguous, any alignment; sum_grad and added with ADDED alone
//   gamma                          (C)            fp16, bf16 or float32, or none
//   moments                        (rows, 2)      float32: mean, scale
//   parts                          (parts, C, 2)  float32: of so many rows, what gamma's and beta's gradients are sums of
//
// One kernel per compilation, that of the only STEP_ which is defined: STEP_INPUT makes out, and moments where they are not null;
// STEP_PARTS makes parts of grad, x and moments. norm_gradients.hip adds the parts. So a network whose norms are frozen, as a LoRA's
// is, takes one launch.
//
// Numerics. All is float32 but what is read and written. Mean and scale are made anew, as the forward pass makes them: values count from
// their row's first one, differences are taken from the mean. No atomics, and all orders are fixed: the same input, the same bits.
//
// Tiling. STEP_INPUT cuts rows as layer_norm.hip does: teams of 2^lane_bits work-items, each with HELD vectors of x and of grad in
// registers, so that memory is read once; with HELD 0, for rows that are longer or no multiple of eight, a row is read three times.
// STEP_PARTS gives a work-group a part of the rows and `width` columns, VECTOR channels each, and each work-item UNROLL rows at a time.
#include "common/pair_sums.h"

// STEP_INPUT or STEP_PARTS, BF16_HALVES, ADDED, AFFINE, HELD, VECTOR, UNROLL, THREADS come as definitions
// (lib_rocm_sd/ops/layer_norm_backward/kernel.py).
struct LayerNormBackwardParams {  // the same in lib_rocm_sd/ops/layer_norm_backward/kernel.py
    const u16* grad;
    const u16* x;
    const u16* added;
    const u16* sum_grad;
    u16* out;
    const void* gamma;
    float* moments;
    float* parts;
    u32 rows, channels;
    u32 lanes, lane_bits;                  // STEP_INPUT: 2^lane_bits work-items make a row
    u32 part_rows, width, column_blocks;   // STEP_PARTS: rows of a part; columns of a work-group; work-groups per row
    u32 aligned;                           // 16-byte accesses may be used
    float eps, share;                      // share: 1 / channels
};

DEVICE float rounded_sum(float a, float b) { return Half::to(Half::from(a + b)); }

#if STEP_INPUT

using Values = Vector<8>;

DEVICE Values added_up(const Values& a, const Values& b) {
    Values sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.words.word[i] = pack2<Half>(a.at(2 * i) + b.at(2 * i), a.at(2 * i + 1) + b.at(2 * i + 1));
    return sum;
}

// Eight values of gamma, as they lie in memory.
struct Gamma {
    Words<4> part[AFFINE == kAffineF32 ? 2 : 1];
    template <bool kAligned> static DEVICE Gamma load(const void* from, u32 channel) {
        Gamma made;
        if constexpr (AFFINE == kAffineF32) {
            const Words<1>* first = (const Words<1>*)from + channel;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if constexpr (!kAligned) made.part[i / 4].word[i % 4] = first[i].word[0];
            if constexpr (kAligned) made.part[0] = *(const Words<4>*)first, made.part[1] = *(const Words<4>*)(first + 4);
        } else if constexpr (AFFINE != kAffineNone) {
            made.part[0] = load_eight<kAligned>((const u16*)from + channel);
        }
        return made;
    }
    DEVICE float at(int i) const {
        if constexpr (AFFINE == kAffineNone) return 1.0f;
        if constexpr (AFFINE == kAffineF32) return bits_float(part[i / 4].word[i % 4]);
        const u16 half = (u16)(part[0].word[i / 2] >> (i % 2 * 16));
        return AFFINE == kAffineF16 ? F16::to(half) : BF16::to(half);
    }
};

// Which row a work-item has a part of. Teams behind the last row read that one, and write nothing.
struct Place {
    u32 lane, row;
    bool active;
    i64 start;  // of the row's first value
    DEVICE explicit Place(const LayerNormBackwardParams& p) {
        lane = thread_id() & (p.lanes - 1);
        const u32 wanted = block_id() * (THREADS >> p.lane_bits) + (thread_id() >> p.lane_bits);
        active = wanted < p.rows;
        row = min2(wanted, p.rows - 1);
        start = (i64)row * p.channels;
    }
};

constexpr int kWaves = THREADS / WAVE_SIZE;
constexpr int kLdsBytes = max2(4 * kWaves * 4, 16);
EXPORT_LDS_BYTES(kLdsBytes)

// The sums over a team of each of `x`, the same in all of it; every work-item comes here. `lds` has kCount floats for each wave, used
// once.
template <int kCount> DEVICE void over_team(const LayerNormBackwardParams& p, float (&x)[kCount], float* lds) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        x[i] += lane_xor<1>(x[i]), x[i] += lane_xor<2>(x[i]);
        if (p.lanes >= 8) x[i] += lane_xor<4>(x[i]);
        if (p.lanes >= 16) x[i] += lane_xor<8>(x[i]);
        if (p.lanes >= 32) x[i] += lane_xor<16>(x[i]);
        if constexpr (WAVE_SIZE == 64)
            if (p.lanes >= 64) x[i] += lane_xor<32>(x[i]);
    }
    const u32 waves = p.lanes / WAVE_SIZE, wave = thread_id() / WAVE_SIZE;
    if (kWaves > 1 && waves > 1) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (thread_id() % WAVE_SIZE == 0) lds[i * kWaves + wave] = x[i];
        barrier();
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            x[i] = 0.0f;
            for (u32 from = 0; from < waves; ++from) x[i] += lds[i * kWaves + (wave & ~(waves - 1)) + from];
        }
    }
}

DEVICE float first_of(const LayerNormBackwardParams& p, const Place& place) {
    const float first = Half::to(p.x[place.start]);
    return ADDED ? rounded_sum(first, Half::to(p.added[place.start])) : first;
}

DEVICE void write_moments(const LayerNormBackwardParams& p, const Place& place, float mean, float scale) {
    if (p.moments && place.active && place.lane == 0) write_pair(p.moments + (i64)place.row * 2, mean, scale);
}

#if HELD > 0

template <bool kAligned> DEVICE void make_row(const LayerNormBackwardParams& p, float* lds) {
    const Place place(p);
    const u32 vectors = p.channels / 8;
    const auto vector = [&](int i) { return place.lane + (u32)i * p.lanes; };
    const auto channel = [&](int i) { return min2(vector(i), vectors - 1) * 8; };
    Values values[HELD], grads[HELD], added[ADDED ? HELD : 1];
    Gamma gamma[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        values[i] = Values::template load<kAligned>(p.x + place.start + channel(i));
        if constexpr (ADDED) added[i] = Values::template load<kAligned>(p.added + place.start + channel(i));
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) grads[i] = Values::template load<kAligned>(p.grad + place.start + channel(i));
    const float first = first_of(p, place);
#pragma unroll
    for (int i = 0; i < HELD; ++i) gamma[i] = Gamma::template load<kAligned>(p.gamma, channel(i));
    one_by_one();  // all that is read is asked for before anything waits for a part of it
    float sum[1] = {}, squares[1] = {}, sums[2] = {};
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if constexpr (ADDED) values[i] = added_up(values[i], added[i]);
        float eight = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) eight += values[i].at(j) - first;
        sum[0] += vector(i) < vectors ? eight : 0.0f;
    }
    over_team(p, sum, lds);
    const float mean = sum[0] * p.share;
    const auto difference = [&](int i, int j) { return values[i].at(j) - first - mean; };
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        float eight = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) eight = fma_f32(difference(i, j), difference(i, j), eight);
        squares[0] += vector(i) < vectors ? eight : 0.0f;
    }
    over_team(p, squares, lds + kWaves);
    const float scale = reciprocal_sqrt(fma_f32(squares[0], p.share, p.eps));
    write_moments(p, place, first + mean, scale);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        float all = 0.0f, products = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float g = grads[i].at(j) * gamma[i].at(j);
            all += g, products = fma_f32(g, difference(i, j) * scale, products);
        }
        sums[0] += vector(i) < vectors ? all : 0.0f, sums[1] += vector(i) < vectors ? products : 0.0f;
    }
    over_team(p, sums, lds + 2 * kWaves);
    const float level = sums[0] * p.share, slope = sums[1] * p.share;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if (!place.active || vector(i) >= vectors) continue;
        Values more = {};
        if constexpr (ADDED) more = Values::template load<kAligned>(p.sum_grad + place.start + channel(i));
        Values::template store<kAligned>(p.out + place.start + channel(i), [&](int j) {
            const float g = grads[i].at(j) * gamma[i].at(j), made = scale * (g - level - difference(i, j) * scale * slope);
            return ADDED ? made + more.at(j) : made;
        });
    }
}

#else

// Calls eights(channel) for a work-item's vectors of a row, and ones(channel) for its part of what is left.
template <typename F, typename G> DEVICE void each_part(const LayerNormBackwardParams& p, const Place& place, F eights, G ones) {
    const u32 vectors = p.channels / 8;
    for (u32 v = place.lane; v < vectors; v += p.lanes) eights(v * 8);
    for (u32 c = vectors * 8 + place.lane; c < p.channels; c += p.lanes) ones(c);
}

template <bool kAligned> DEVICE void make_row(const LayerNormBackwardParams& p, float* lds) {
    const Place place(p);
    const auto eight_of = [&](u32 c) {
        const Values values = Values::template load<kAligned>(p.x + place.start + c);
        if constexpr (ADDED) return added_up(values, Values::template load<kAligned>(p.added + place.start + c));
        return values;
    };
    const auto one_of = [&](u32 c) {
        const float value = Half::to(p.x[place.start + c]);
        return ADDED ? rounded_sum(value, Half::to(p.added[place.start + c])) : value;
    };
    const float first = first_of(p, place);
    Moments<1> moments;
    each_part(
        p, place,
        [&](u32 c) {
            const Values values = eight_of(c);
            moments.template add<8, true>([&](int, int i) { return values.at(i) - first; }, 8);
        },
        [&](u32 c) {
            const float value = one_of(c) - first;
            moments.template add<1, true>([&](int, int) { return value; }, 1);
        });
    float sum[1] = {moments.count * moments.mean[0]}, sums[2] = {};
    over_team(p, sum, lds);
    const float mean = sum[0] * p.share, apart = moments.mean[0] - mean;
    float squares[1] = {fma_f32(moments.count * apart, apart, moments.m2[0])};
    over_team(p, squares, lds + kWaves);
    const float scale = reciprocal_sqrt(fma_f32(squares[0], p.share, p.eps));
    write_moments(p, place, first + mean, scale);
    const auto normed_of = [&](float value) { return (value - first - mean) * scale; };
    each_part(
        p, place,
        [&](u32 c) {
            const Values values = eight_of(c), grads = Values::template load<kAligned>(p.grad + place.start + c);
            const Gamma gamma = Gamma::template load<kAligned>(p.gamma, c);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float g = grads.at(i) * gamma.at(i);
                sums[0] += g, sums[1] = fma_f32(g, normed_of(values.at(i)), sums[1]);
            }
        },
        [&](u32 c) {
            const float g = Half::to(p.grad[place.start + c]) * affine(p.gamma, AFFINE, c, 1.0f);
            sums[0] += g, sums[1] = fma_f32(g, normed_of(one_of(c)), sums[1]);
        });
    over_team(p, sums, lds + 2 * kWaves);
    const float level = sums[0] * p.share, slope = sums[1] * p.share;
    if (!place.active) return;
    const auto made = [&](float g, float value) { return scale * (g - level - normed_of(value) * slope); };
    each_part(
        p, place,
        [&](u32 c) {
            const Values values = eight_of(c), grads = Values::template load<kAligned>(p.grad + place.start + c);
            const Gamma gamma = Gamma::template load<kAligned>(p.gamma, c);
            Values more = {};
            if constexpr (ADDED) more = Values::template load<kAligned>(p.sum_grad + place.start + c);
            Values::template store<kAligned>(p.out + place.start + c, [&](int i) {
                const float one = made(grads.at(i) * gamma.at(i), values.at(i));
                return ADDED ? one + more.at(i) : one;
            });
        },
        [&](u32 c) {
            const float one = made(Half::to(p.grad[place.start + c]) * affine(p.gamma, AFFINE, c, 1.0f), one_of(c));
            p.out[place.start + c] = Half::from(ADDED ? one + Half::to(p.sum_grad[place.start + c]) : one);
        });
}

#endif

KERNEL(THREADS) layer_norm_backward(LayerNormBackwardParams p) {
    LDS(memory, kLdsBytes);
    if (p.aligned) make_row<true>(p, (float*)memory);
    else make_row<false>(p, (float*)memory);
}

#else  // STEP_PARTS

using Values = Vector<VECTOR>;

constexpr int kLdsBytes = kPairBytes<VECTOR>;
static_assert(kLdsBytes <= LDS_BYTES, "the exchange does not fit the LDS of this GPU");
EXPORT_LDS_BYTES(kLdsBytes)

// The rows first, first + step, ... below last of VECTOR channels.
template <bool kAligned> DEVICE void add_up(const LayerNormBackwardParams& p, u32 channel, u32 first, u32 last, u32 step, PairSums<VECTOR>& sums) {
    for (u32 begun = first; begun < last; begun += UNROLL * step) {
        Values grads[UNROLL], values[UNROLL], added[ADDED ? UNROLL : 1];
        Words<2> moments[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u32 row = min2(begun + (u32)i * step, last - 1);
            const i64 at = (i64)row * p.channels + channel;
            grads[i] = Values::template load<kAligned>(p.grad + at), values[i] = Values::template load<kAligned>(p.x + at);
            if constexpr (ADDED) added[i] = Values::template load<kAligned>(p.added + at);
            moments[i] = *(const Words<2>*)(p.moments + (i64)row * 2);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const bool exists = begun + (u32)i * step < last;
            const float mean = bits_float(moments[i].word[0]), scale = bits_float(moments[i].word[1]);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                const float grad = grads[i].at(k), value = ADDED ? rounded_sum(values[i].at(k), added[i].at(k)) : values[i].at(k);
                sums.first[k] += exists ? grad * ((value - mean) * scale) : 0.0f, sums.second[k] += exists ? grad : 0.0f;
            }
        }
    }
}

KERNEL(THREADS) layer_norm_backward_parts(LayerNormBackwardParams p) {
    LDS(memory, kLdsBytes);
    const u32 row = thread_id() / p.width, column = thread_id() % p.width, rows = THREADS / p.width, part = block_id() / p.column_blocks;
    const u32 channel = (block_id() % p.column_blocks * p.width + column) * VECTOR;
    const u32 first = part * p.part_rows + row, last = min2(part * p.part_rows + p.part_rows, p.rows);
    const bool active = row < rows && channel < p.channels;
    PairSums<VECTOR> sums;
    if (active && p.aligned) add_up<true>(p, channel, first, last, rows, sums);
    else if (active) add_up<false>(p, channel, first, last, rows, sums);
    add_rows(sums, (float*)memory, (int)row, (int)column, (int)rows, (int)p.width);
    if (!active || row != 0) return;
    float* to = p.parts + ((i64)part * p.channels + channel) * 2;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) write_pair(to + 2 * k, sums.first[k], sums.second[k]);
}

#endif
