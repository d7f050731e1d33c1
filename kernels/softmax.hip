// The weights of attention from a matrix of scores that a library's product made, where head_dim is so large that a score matrix
// (in slices) costs less than keeping a query's output in registers:
//
//   weights[r, k] = 2^(scale (scores[r, k] - top[r])),  sums[r] = sum_k weights[r, k]
//
//   top (rows) the score whose scale * score is largest; subtracted before scores are scaled, so that no rounded product is
//   compared with an exact one: from |scale * score| of 2^29 on, the top key's own weight would be 0 or infinity
//   scores (rows, keys) float32, weights (rows, keys) fp16 or bf16, sums (rows) float32; all contiguous
//
// Weights are not divided by their sum, which would push those of long rows below what a half resolves; the caller divides the
// product with the values instead. A work-group takes a row. It is held in registers, HELD times four scores of it by each
// work-item; with HELD 0, for rows that are longer or no multiple of four, it is read twice.
#include "common/platform.h"

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif

struct SoftmaxParams {  // the same in lib_rocm_sd/ops/attention/ours.py
    const float* scores;
    u16* weights;
    float* sums;
    u32 keys;
    float scale;  // times log2(e)
};

constexpr int kLdsBytes = THREADS * 4;
EXPORT_LDS_BYTES(kLdsBytes)

// combine over all work-items, the same order always; every work-item gets the result.
template <typename F> DEVICE float over_group(float* lds, float x, F combine) {
    const int thread = (int)thread_id();
    barrier();
    lds[thread] = x;
    barrier();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (thread < half) lds[thread] = combine(lds[thread], lds[thread + half]);
        barrier();
    }
    return lds[0];
}

// use(first key, values) for this work-item's keys, four or one at a time.
template <typename F> DEVICE void each_score(const SoftmaxParams& p, const float* row, F use) {
    if (p.keys % 4 == 0) {
#pragma unroll 4
        for (u32 k = thread_id() * 4; k < p.keys; k += THREADS * 4) use(k, *(const Words<4>*)(row + k));
    } else {
        for (u32 k = thread_id(); k < p.keys; k += THREADS) use(k, *(const Words<1>*)(row + k));
    }
}

// 1, or -1 where a negative scale makes the least score the one that counts. A product with it is exact.
DEVICE float sign_of_scale(const SoftmaxParams& p) { return p.scale < 0.0f ? -1.0f : 1.0f; }

DEVICE float weigh(const SoftmaxParams& p, u32 score, float largest) {
    return exp2_fast(abs_f32(p.scale) * fma_f32(bits_float(score), sign_of_scale(p), -largest));
}

template <int N> DEVICE float write_weights(const SoftmaxParams& p, u16* to, Words<N> part, float largest) {
    float weights[N], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) weights[i] = weigh(p, part.word[i], largest), sum += weights[i];
    if constexpr (N == 4) *(Words<2>*)to = Words<2>{{pack2<Half>(weights[0], weights[1]), pack2<Half>(weights[2], weights[3])}};
    else *to = Half::from(weights[0]);
    return sum;
}

template <int N> DEVICE float largest_of(const SoftmaxParams& p, Words<N> part, float largest) {
#pragma unroll
    for (int i = 0; i < N; ++i) largest = max_f32(largest, sign_of_scale(p) * bits_float(part.word[i]));
    return largest;
}

DEVICE void softmax_row(const SoftmaxParams& p, float* lds) {
    const float* row = p.scores + (i64)block_id() * p.keys;
    u16* to = p.weights + (i64)block_id() * p.keys;
    const auto larger = [](float a, float b) { return max_f32(a, b); };
    float largest = -infinity(), sum = 0.0f;
    if constexpr (HELD > 0) {
        Words<4> held[max2(HELD, 1)];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u32 k = (i * THREADS + thread_id()) * 4;
            if (k < p.keys) held[i] = *(const Words<4>*)(row + k), largest = largest_of(p, held[i], largest);
        }
        largest = over_group(lds, largest, larger);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u32 k = (i * THREADS + thread_id()) * 4;
            if (k < p.keys) sum += write_weights(p, to + k, held[i], largest);
        }
    } else {
        each_score(p, row, [&](u32, auto part) { largest = largest_of(p, part, largest); });
        largest = over_group(lds, largest, larger);
        each_score(p, row, [&](u32 k, auto part) { sum += write_weights(p, to + k, part, largest); });
    }
    sum = over_group(lds, sum, [](float a, float b) { return a + b; });
    if (thread_id() == 0) p.sums[block_id()] = sum;
}

KERNEL(THREADS) softmax_rows(SoftmaxParams p) {
    LDS(memory, kLdsBytes);
    softmax_row(p, (float*)memory);
}
