// Two sums for each of K channels, and their sums over the rows of a work-group: what gradients of a norm's gamma and beta need.
#pragma once
#include "group_norm.h"

template <int K> struct PairSums {
    float first[K] = {}, second[K] = {};
};

constexpr int kExchanged = THREADS / 2;  // pairs that are in LDS at a time
template <int K> constexpr int kPairBytes = 2 * K * kExchanged * 4;

// Row 0 of `rows` gets the sums of its column over all rows, in a fixed order; every work-item of the work-group comes here.
template <int K> DEVICE void add_rows(PairSums<K>& mine, float* lds, int row, int column, int rows, int width) {
    for (int left = rows; left > 1;) {
        const int half = (left + 1) / 2;
        float* place = lds + (row < half ? row : row - half) * width + column;
        if (row >= half && row < left) {
#pragma unroll
            for (int k = 0; k < K; ++k) place[2 * k * kExchanged] = mine.first[k], place[(2 * k + 1) * kExchanged] = mine.second[k];
        }
        barrier();
        if (row + half < left) {
#pragma unroll
            for (int k = 0; k < K; ++k) mine.first[k] += place[2 * k * kExchanged], mine.second[k] += place[(2 * k + 1) * kExchanged];
        }
        barrier();
        left = half;
    }
}

DEVICE void write_pair(float* to, float first, float second) { *(Words<2>*)to = Words<2>{{float_bits(first), float_bits(second)}}; }

// The pairs first, first + step, ... below last, of which pair i lies at from + i * stride floats, added in this order; four reads are
// in flight.
DEVICE PairSums<1> added_pairs(const float* from, u32 first, u32 last, u32 step, u32 stride) {
    constexpr int kBatch = 4;
    PairSums<1> sums;
    for (u32 begun = first; begun < last; begun += kBatch * step) {
        Words<2> pairs[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) pairs[i] = *(const Words<2>*)(from + (i64)min2(begun + (u32)i * step, last - 1) * stride);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const bool exists = begun + (u32)i * step < last;
            sums.first[0] += exists ? bits_float(pairs[i].word[0]) : 0.0f;
            sums.second[0] += exists ? bits_float(pairs[i].word[1]) : 0.0f;
        }
    }
    return sums;
}
