// The gradients of a norm's gamma and beta, from what work-groups, or images, made of them:
//
//   gamma[c] = sum over parts of pairs[part, c, 0],  beta[c] = sum over parts of pairs[part, c, 1]
//
//   pairs        (parts, C, 2)  float32
//   gamma, beta  (C)            fp16, bf16 or float32, rounded once
//
// No atomics, and all orders are fixed: the same input gives the same bits. A work-group makes `width` columns, its THREADS / width rows
// take every so many-th part.
#include "common/pair_sums.h"

// BF16_HALVES, THREADS come as definitions (lib_rocm_sd/ops/layer_norm_backward/gradients.py); the former is of no account here.
struct NormGradientsParams {  // the same in lib_rocm_sd/ops/layer_norm_backward/gradients.py
    const float* pairs;
    void* gamma;
    void* beta;
    u32 parts, channels, width, kind;  // kind: AffineKind of gamma and beta
};

constexpr int kLdsBytes = kPairBytes<1>;
EXPORT_LDS_BYTES(kLdsBytes)

DEVICE void write_one(void* to, u32 kind, u32 channel, float value) {
    if (kind == kAffineF16) ((u16*)to)[channel] = F16::from(value);
    else if (kind == kAffineBF16) ((u16*)to)[channel] = BF16::from(value);
    else ((float*)to)[channel] = value;
}

KERNEL(THREADS) norm_gradients(NormGradientsParams p) {
    LDS(memory, kLdsBytes);
    const u32 row = thread_id() / p.width, column = thread_id() % p.width, rows = THREADS / p.width;
    const u32 channel = block_id() * p.width + column;
    const bool active = channel < p.channels;
    PairSums<1> sums;
    if (active) sums = added_pairs(p.pairs + channel * 2, row, p.parts, rows, p.channels * 2);
    add_rows(sums, (float*)memory, (int)row, (int)column, (int)rows, (int)p.width);
    if (active && row == 0) {
        write_one(p.gamma, p.kind, channel, sums.first[0]);
        write_one(p.beta, p.kind, channel, sums.second[0]);
    }
}
