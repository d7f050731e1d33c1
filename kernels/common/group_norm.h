// What the kernels of GroupNorm have in common: vectors of halves, moments and their merge, gamma and beta.
#pragma once
#include "tile.h"

enum AffineKind { kAffineNone, kAffineF16, kAffineBF16, kAffineF32 };

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif

// VECTOR halves that lie together.
template <int N> struct Vector;
template <> struct Vector<8> {
    Words<4> words;
    DEVICE float at(int i) const { return Half::to((u16)(words.word[i / 2] >> (i % 2 * 16))); }
    template <bool kAligned> static DEVICE Vector load(const u16* from) { return {load_eight<kAligned>(from)}; }
    template <bool kAligned, typename F> static DEVICE void store(u16* to, F value) {
        Words<4> words;
#pragma unroll
        for (int i = 0; i < 4; ++i) words.word[i] = pack2<Half>(value(2 * i), value(2 * i + 1));
        if constexpr (kAligned) {
            *(Words<4>*)to = words;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[2 * i] = (u16)words.word[i], to[2 * i + 1] = (u16)(words.word[i] >> 16);
        }
    }
};
template <> struct Vector<1> {
    u16 half;
    DEVICE float at(int) const { return Half::to(half); }
    template <bool> static DEVICE Vector load(const u16* from) { return {*from}; }
    template <bool, typename F> static DEVICE void store(u16* to, F value) { *to = Half::from(value(0)); }
};

// Means, and sums of squared differences from them, of K channels over `count` values each.
template <int K> struct Moments {
    float mean[K] = {}, m2[K] = {}, count = 0.0f;

    // kValues values of each channel; only the first `valid` (at least one) count, unless kWhole.
    template <int kValues, bool kWhole, typename F> DEVICE void add(F value, int valid) {
        const float more = kWhole ? (float)kValues : (float)valid, total = count + more, share = reciprocal(total);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                const float d = value(k, i) - mean[k];
                sum += kWhole || i < valid ? d : 0.0f;
            }
            const float moved = fma_f32(sum, share, mean[k]), step = mean[k] - moved;
            float squares = fma_f32(count * step, step, m2[k]);
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                const float d = value(k, i) - moved;
                squares = kWhole || i < valid ? fma_f32(d, d, squares) : squares;
            }
            mean[k] = moved, m2[k] = squares;
        }
        count = total;
    }
    // Other moments of the same channels; nothing where all counts are zero.
    template <int kOthers> DEVICE void merge(const Moments (&others)[kOthers]) {
        float total = count;
#pragma unroll
        for (int i = 0; i < kOthers; ++i) total += others[i].count;
        const float share = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
        for (int k = 0; k < K; ++k) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kOthers; ++i) sum = fma_f32(others[i].count, others[i].mean[k] - mean[k], sum);
            const float moved = fma_f32(sum, share, mean[k]), step = mean[k] - moved;
            float squares = fma_f32(count * step, step, m2[k]);
#pragma unroll
            for (int i = 0; i < kOthers; ++i) {
                const float d = others[i].mean[k] - moved;
                squares += fma_f32(others[i].count * d, d, others[i].m2[k]);
            }
            mean[k] = moved, m2[k] = squares;
        }
        count = total;
    }
};

// gamma or beta of a channel; `otherwise` where there is none.
DEVICE float affine(const void* values, u32 kind, u32 channel, float otherwise) {
    if (kind == kAffineF16) return F16::to(((const u16*)values)[channel]);
    if (kind == kAffineBF16) return BF16::to(((const u16*)values)[channel]);
    return kind == kAffineF32 ? ((const float*)values)[channel] : otherwise;
}

// A value with its norm, and SiLU after it.
template <bool kSilu> DEVICE float normed(float x, float scale, float shift) {
    const float z = fma_f32(x, scale, shift);
    return kSilu ? z * reciprocal(1.0f + exp2_fast(-1.44269504088896341f * z)) : z;
}
