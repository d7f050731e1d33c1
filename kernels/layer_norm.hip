// LayerNorm over the last dimension, of x or of a sum:
//
//   ADDED kNothing  of x
//   ADDED kTensor   of sum[r, c] = x[r, c] + added[r, c], rounded, which is kept
//   ADDED kRows     of x[r, c] + added[c] + more[c], rounded
//   ADDED kKeptRows the same; kept is sum[r, c] = x[r, c] + added[c] + more[c] + ahead[c], rounded once
//   ADDED kGated    of sum[r, c] = x[r, c] + gate[i, c] added[r, c], rounded once, which is kept; with MODULATED
//
// The two of rows are for a library's product that is added to x in place, which leaves no room for its bias: the norm before it adds that
// (ahead), or the norms after it do.
//
//   out[r, c] = (sum[r, c] - mean[r]) / sqrt(variance[r] + eps) gamma[c] + beta[c]
//
// MODULATED: gamma and beta are of the image i = r / tokens that a row is of, 1 + scale[i, c] and shift[i, c], as in the blocks of
// diffusion transformers (adaptive LayerNorm: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2022, section 3.2).
//
// RMS: RMSNorm, which has no mean and no beta (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019):
//
//   kRms      out[r, c] = x[r, c] / sqrt(max(square_mean[r], eps)) gamma[c]
//   kRmsSilu  SiLU of that
//
//   x, added           (rows, C)  fp16 or bf16, any row stride, any alignment
//   out, sum           (rows, C)  like x, contiguous
//   gamma, beta        (C)        fp16, bf16 or float32, both alike, or none
//   added, more, ahead (C)        with rows: like x, each may be null
//   scale, shift, gate (images, C) like x, all of one row stride: at gamma, beta and more
//
// Numerics. All is float32 but what is read and written. Values count from their row's first one, so that a row that lies far from
// zero loses nothing where it is added up, and a constant row gives beta. The squared differences are taken from the mean, which is
// known by then: no square of a sum is ever subtracted from a sum of squares. All orders are fixed: the same input, the same bits.
//
// Tiling. A row is made by a team of 2^lane_bits work-items, from four to a whole work-group, which is THREADS >> lane_bits teams. A
// work-item has HELD vectors of its row, of eight values and 16 bytes each, in registers: memory is read once. Teams are as small as
// six vectors a work-item allow. So 8, 16 and 32 of them make rows of 320, 640 and 1280, with five each and none idle. With HELD 0,
// for rows that are longer or no multiple of eight, a row is read twice, and what the work-items of a team have seen is merged by the
// formula of Chan, Golub and LeVeque (1979).
#include "common/tile.h"

// BF16_HALVES, ADDED, AFFINE, HELD, THREADS come as definitions, others with MODULATED or RMS (lib_rocm_sd/ops/layer_norm/kernel.py).
enum AffineKind { kAffineNone, kAffineF16, kAffineBF16, kAffineF32 };
#ifndef MODULATED
#define MODULATED 0
#endif
#ifndef RMS
#define RMS 0
#endif
enum RmsKind { kNoRms, kRms, kRmsSilu };
static_assert(RMS == kNoRms || HELD > 0, "no row of an RMSNorm is read twice");
enum AddedKind { kNothing, kTensor, kRows, kKeptRows, kGated };
constexpr bool kBiased = ADDED == kRows || ADDED == kKeptRows, kSummed = ADDED == kTensor || ADDED == kGated;
constexpr bool kAffineLate = kBiased || ADDED == kGated;  // in the registers of what was added

struct LayerNormParams {  // the same in lib_rocm_sd/ops/layer_norm/kernel.py
    const u16* x;
    const u16* added;
    u16* out;
    u16* sum;
    const void* gamma;
    const void* beta;
    const u16* more;
    const u16* ahead;
    i64 x_stride, added_stride;  // between rows, in halves
    u32 rows, channels;
    u32 lanes, lane_bits;  // 2^lane_bits work-items make a row
    u32 aligned;           // 16-byte accesses may be used
    float eps, share;      // share: 1 / channels
#if MODULATED
    u32 tokens;        // rows of an image
    u32 image_stride;  // between rows of scale, shift and gate, in halves
#endif
};

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif

template <typename Type> DEVICE float half_of(const Words<4>& eight, int i) {
    return Type::to((u16)(eight.word[i / 2] >> (i % 2 * 16)));
}

template <typename F> DEVICE Words<4> packed(F value) {
    Words<4> eight;
#pragma unroll
    for (int i = 0; i < 4; ++i) eight.word[i] = pack2<Half>(value(2 * i), value(2 * i + 1));
    return eight;
}

template <bool kAligned> DEVICE void store_eight(u16* to, const Words<4>& eight) {
    if constexpr (kAligned) {
        *(Words<4>*)to = eight;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[2 * i] = (u16)eight.word[i], to[2 * i + 1] = (u16)(eight.word[i] >> 16);
    }
}

DEVICE Words<4> added_up(const Words<4>& a, const Words<4>& b) {
    return packed([&](int i) { return half_of<Half>(a, i) + half_of<Half>(b, i); });
}
DEVICE Words<4> added_up(const Words<4>& a, const Words<4>& b, const Words<4>& gate) {
    return packed([&](int i) { return fma_f32(half_of<Half>(gate, i), half_of<Half>(b, i), half_of<Half>(a, i)); });
}

// Eight values of gamma, or of beta.
template <typename Type> struct AffineHalves {
    Words<4> eight;
    DEVICE float at(int i) const { return half_of<Type>(eight, i); }
    static DEVICE float one(const void* from, u32 channel) { return Type::to(((const u16*)from)[channel]); }
    template <bool kAligned> static DEVICE AffineHalves load(const void* from, u32 channel) {
        return {load_eight<kAligned>((const u16*)from + channel)};
    }
};
struct AffineFloats {
    Words<4> part[2];
    DEVICE float at(int i) const { return bits_float(part[i / 4].word[i % 4]); }
    static DEVICE float one(const void* from, u32 channel) { return bits_float(((const Words<1>*)from)[channel].word[0]); }
    template <bool kAligned> static DEVICE AffineFloats load(const void* from, u32 channel) {
        const Words<1>* first = (const Words<1>*)from + channel;
        AffineFloats made;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kAligned) made.part[i] = *(const Words<4>*)(first + 4 * i);
            else
#pragma unroll
                for (int j = 0; j < 4; ++j) made.part[i].word[j] = first[4 * i + j].word[0];
        }
        return made;
    }
};
struct AffineNone {
    static DEVICE float one(const void*, u32) { return 0.0f; }
    DEVICE float at(int) const { return 0.0f; }
    template <bool kAligned> static DEVICE AffineNone load(const void*, u32) { return {}; }
};
template <int kKind> struct AffineOf { using Type = AffineNone; };
template <> struct AffineOf<kAffineF16> { using Type = AffineHalves<F16>; };
template <> struct AffineOf<kAffineBF16> { using Type = AffineHalves<BF16>; };
template <> struct AffineOf<kAffineF32> { using Type = AffineFloats; };
using Affine = typename AffineOf<AFFINE>::Type;

DEVICE float transformed(float difference, float scale, float gamma, float beta) {
    if constexpr (RMS != kNoRms) {
        const float normed = difference * scale * gamma;
        return RMS == kRmsSilu ? normed * reciprocal(1.0f + exp2_fast(-1.44269504088896341f * normed)) : normed;
    }
    return AFFINE == kAffineNone ? difference * scale : fma_f32(difference * scale, MODULATED ? 1.0f + gamma : gamma, beta);
}

// Which row a work-item has a part of. Teams behind the last row read that one, and write nothing.
struct Place {
    u32 lane;
    bool active;
    const u16 *x, *added;
    i64 out;  // of the row's first value, in out and sum
#if MODULATED
    u32 image;  // of its image's first value, in scale, shift and gate
#endif
    DEVICE explicit Place(const LayerNormParams& p) {
        lane = thread_id() & (p.lanes - 1);
        const u32 wanted = block_id() * (THREADS >> p.lane_bits) + (thread_id() >> p.lane_bits);
        active = wanted < p.rows;
        const i64 row = min2(wanted, p.rows - 1);
        x = p.x + row * p.x_stride;
        added = kSummed ? p.added + row * p.added_stride : x;
        out = row * p.channels;
#if MODULATED
        image = (u32)row / p.tokens * p.image_stride;
#endif
    }
};

#if MODULATED
#define OF_ROW(array) ((const u16*)p.array + place.image)
#else
#define OF_ROW(array) p.array
#endif

// What is normalised, and kept, of one value x with kBiased; a row that is not there is zeros.
DEVICE float value_of(const u16* row, u32 channel) { return row ? Half::to(row[channel]) : 0.0f; }
DEVICE float biased(const LayerNormParams& p, u16 x, u32 channel) { return Half::to(x) + value_of(p.added, channel) + value_of(p.more, channel); }

// The same of eight.
struct EightBiases {
    Words<4> added, more, ahead;
    template <bool kAligned> DEVICE void load(const LayerNormParams& p, u32 channel) {
        *this = {};
        if (p.added) added = load_eight<kAligned>(p.added + channel);
        if (p.more) more = load_eight<kAligned>(p.more + channel);
        if (ADDED == kKeptRows && p.ahead) ahead = load_eight<kAligned>(p.ahead + channel);
    }
    DEVICE float sum(const Words<4>& x, int i) const { return half_of<Half>(x, i) + half_of<Half>(added, i) + half_of<Half>(more, i); }
    DEVICE Words<4> kept(const Words<4>& x) const {
        return packed([&](int i) { return sum(x, i) + half_of<Half>(ahead, i); });
    }
    DEVICE Words<4> normed(const Words<4>& x) const {
        return packed([&](int i) { return sum(x, i); });
    }
};

// The first value of a row of what is normalised.
DEVICE float first_of(const LayerNormParams& p, u16 x, u16 added, const u16* gate) {
    if constexpr (ADDED == kGated) return Half::to(Half::from(fma_f32(Half::to(*gate), Half::to(added), Half::to(x))));
    if constexpr (kBiased) return Half::to(Half::from(biased(p, x, 0)));
    return Half::to(ADDED == kTensor ? Half::from(Half::to(x) + Half::to(added)) : x);
}

constexpr int kWaves = THREADS / WAVE_SIZE;
constexpr int kLdsBytes = max2(2 * kWaves * 4, 16);
EXPORT_LDS_BYTES(kLdsBytes)

// What the other half of 2, 4, .. 64 lanes that lie together has, where all lanes of a half have the same. Up to 16 lanes an
// instruction reads it on the way (DPP: quad_perm, row_half_mirror, row_mirror, in every ISA from gfx9 on).
template <int kLanes> DEVICE float other_half(float x) {
#if !defined(__CUDACC__) || defined(SIMT_SHIM)
    if constexpr (kLanes <= 16) {
        constexpr int kControl = kLanes == 2 ? 0xb1 : kLanes == 4 ? 0x4e : kLanes == 8 ? 0x141 : 0x140;
        return bits_float((u32)__builtin_amdgcn_update_dpp(0, (int)float_bits(x), kControl, 0xf, 0xf, true));
    }
#endif
    return lane_xor<kLanes / 2>(x);
}

// The sum over a team, the same in all of it; every work-item comes here. `lds` has a float for each wave, used once.
DEVICE float over_team(const LayerNormParams& p, float x, float* lds) {
    x += other_half<2>(x), x += other_half<4>(x);
    if (p.lanes >= 8) x += other_half<8>(x);
    if (p.lanes >= 16) x += other_half<16>(x);
    if (p.lanes >= 32) x += other_half<32>(x);
    if constexpr (WAVE_SIZE == 64)
        if (p.lanes >= 64) x += other_half<64>(x);
    const u32 waves = p.lanes / WAVE_SIZE, wave = thread_id() / WAVE_SIZE;
    if (kWaves > 1 && waves > 1) {
        if (thread_id() % WAVE_SIZE == 0) lds[wave] = x;
        barrier();
        x = 0.0f;
        for (u32 i = 0; i < waves; ++i) x += lds[(wave & ~(waves - 1)) + i];
    }
    return x;
}

#if HELD > 0

template <bool kAligned> DEVICE void make_row(const LayerNormParams& p, float* lds) {
    const Place place(p);
    const u32 vectors = p.channels / 8;
    const auto vector = [&](int i) { return place.lane + (u32)i * p.lanes; };
    const auto channel = [&](int i) { return min2(vector(i), vectors - 1) * 8; };
    Words<4> values[HELD], added[kSummed ? HELD : 1], gate[ADDED == kGated ? HELD : 1];
    Affine gamma[HELD], beta[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        values[i] = load_eight<kAligned>(place.x + channel(i));
        if constexpr (kSummed) added[i] = load_eight<kAligned>(place.added + channel(i));
        if constexpr (ADDED == kGated) gate[i] = load_eight<kAligned>(OF_ROW(more) + channel(i));
    }
    const u16 first_x = *place.x, first_added = *place.added;
    EightBiases rows[kBiased ? HELD : 1];
    if constexpr (kBiased)
#pragma unroll
        for (int i = 0; i < HELD; ++i) rows[i].load<kAligned>(p, channel(i));
    const auto ask_for_affine = [&] {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            gamma[i] = Affine::template load<kAligned>(OF_ROW(gamma), channel(i));
            if constexpr (RMS == kNoRms) beta[i] = Affine::template load<kAligned>(OF_ROW(beta), channel(i));
        }
    };
    if constexpr (!kAffineLate) ask_for_affine();
    one_by_one();  // all that is read is asked for before anything waits for a part of it
    const float first = RMS ? 0.0f : first_of(p, first_x, first_added, OF_ROW(more));
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if constexpr (kSummed) {
            if constexpr (ADDED == kGated) values[i] = added_up(values[i], added[i], gate[i]);
            else values[i] = added_up(values[i], added[i]);
            if (place.active && vector(i) < vectors) store_eight<kAligned>(p.sum + place.out + channel(i), values[i]);
        }
        if constexpr (kBiased) {
            if constexpr (ADDED == kKeptRows)
                if (place.active && vector(i) < vectors)
                    store_eight<kAligned>(p.sum + place.out + channel(i), rows[i].kept(values[i]));
            values[i] = rows[i].normed(values[i]);
#pragma unroll
            for (int w = 0; w < 4; ++w) values[i].word[w] = kept_here(values[i].word[w]);  // rounded now: LLVM 19 spills the comparisons on CDNA
        }
        float eight = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) eight += half_of<Half>(values[i], j) - first;
        sum += vector(i) < vectors ? eight : 0.0f;
    }
    if constexpr (kAffineLate) ask_for_affine();
    const float mean = RMS ? 0.0f : over_team(p, sum, lds) * p.share;
    const auto difference = [&](int i, int j) { return half_of<Half>(values[i], j) - first - mean; };
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        float eight = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) eight = fma_f32(difference(i, j), difference(i, j), eight);
        squares += vector(i) < vectors ? eight : 0.0f;
    }
    squares = over_team(p, squares, lds + kWaves);
    const float least = squares * p.share < p.eps ? p.eps : squares * p.share;  // NaN stays
    const float scale = reciprocal_sqrt(RMS ? least : fma_f32(squares, p.share, p.eps));
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        if (place.active && vector(i) < vectors)
            store_eight<kAligned>(p.out + place.out + channel(i), packed([&](int j) {
                return transformed(difference(i, j), scale, gamma[i].at(j), RMS ? 0.0f : beta[i].at(j));
            }));
}

#else

// Mean, and sum of squared differences from it, of the values that a work-item has seen.
struct Moments {
    float mean = 0.0f, m2 = 0.0f, count = 0.0f;
    template <int kValues, typename F> DEVICE void add(F value) {
        const float total = count + kValues;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum += value(i) - mean;
        const float moved = fma_f32(sum, reciprocal(total), mean), step = mean - moved;
        m2 = fma_f32(count * step, step, m2);
#pragma unroll
        for (int i = 0; i < kValues; ++i) m2 = fma_f32(value(i) - moved, value(i) - moved, m2);
        mean = moved, count = total;
    }
};

// Calls eights(channel) for a work-item's vectors of a row, and ones(channel) for its part of what is left.
template <typename F, typename G> DEVICE void each_part(const LayerNormParams& p, const Place& place, F eights, G ones) {
    const u32 vectors = p.channels / 8;
    for (u32 v = place.lane; v < vectors; v += p.lanes) eights(v * 8);
    for (u32 c = vectors * 8 + place.lane; c < p.channels; c += p.lanes) ones(c);
}

template <bool kAligned> DEVICE void make_row(const LayerNormParams& p, float* lds) {
    const Place place(p);
    u16 *const sums = p.sum + place.out, *const out = p.out + place.out;
    EightBiases rows;
    const float first = first_of(p, *place.x, *place.added, OF_ROW(more));
    Moments moments;
    each_part(
        p, place,
        [&](u32 c) {
            Words<4> values = load_eight<kAligned>(place.x + c);
            if constexpr (kBiased) {
                rows.load<kAligned>(p, c);
                if (ADDED == kKeptRows && place.active) store_eight<kAligned>(sums + c, rows.kept(values));
                values = rows.normed(values);
            }
            if constexpr (kSummed) {
                const Words<4> added = load_eight<kAligned>(place.added + c);
                if constexpr (ADDED == kGated) values = added_up(values, added, load_eight<kAligned>(OF_ROW(more) + c));
                else values = added_up(values, added);
                if (place.active) store_eight<kAligned>(sums + c, values);
            }
            moments.add<8>([&](int i) { return half_of<Half>(values, i) - first; });
        },
        [&](u32 c) {
            u16 value = place.x[c];
            if constexpr (kBiased) {
                const float sum = biased(p, value, c);
                if (ADDED == kKeptRows && place.active) sums[c] = Half::from(sum + value_of(p.ahead, c));
                value = Half::from(sum);
            }
            if constexpr (kSummed) {
                const float added = Half::to(place.added[c]);
                value = Half::from(ADDED == kGated ? fma_f32(Half::to(OF_ROW(more)[c]), added, Half::to(value)) : Half::to(value) + added);
                if (place.active) sums[c] = value;
            }
            moments.add<1>([&](int) { return Half::to(value) - first; });
        });
    const float mean = over_team(p, moments.count * moments.mean, lds) * p.share, apart = moments.mean - mean;
    const float squares = over_team(p, fma_f32(moments.count * apart, apart, moments.m2), lds + kWaves);
    const float scale = reciprocal_sqrt(fma_f32(squares, p.share, p.eps));
    if (!place.active) return;
    const u16* from = kSummed ? sums : place.x;
    each_part(
        p, place,
        [&](u32 c) {
            Words<4> values = load_eight<kAligned>(from + c);
            if constexpr (kBiased) rows.load<kAligned>(p, c), values = rows.normed(values);
            const Affine gamma = Affine::template load<kAligned>(OF_ROW(gamma), c);
            const Affine beta = Affine::template load<kAligned>(OF_ROW(beta), c);
            store_eight<kAligned>(out + c, packed([&](int i) {
                return transformed(half_of<Half>(values, i) - first - mean, scale, gamma.at(i), beta.at(i));
            }));
        },
        [&](u32 c) {
            const float difference = Half::to(kBiased ? Half::from(biased(p, from[c], c)) : from[c]) - first - mean;
            out[c] = Half::from(transformed(difference, scale, Affine::one(OF_ROW(gamma), c), Affine::one(OF_ROW(beta), c)));
        });
}

#endif

KERNEL(THREADS) layer_norm(LayerNormParams p) {
    LDS(memory, kLdsBytes);
    if (p.aligned) make_row<true>(p, (float*)memory);
    else make_row<false>(p, (float*)memory);
}
