// Tiles between global memory and LDS. Global rows are halves with any 64-bit row stride and any alignment of two bytes;
// LDS rows are padded by eight halves, so that lanes reading 16 bytes from consecutive rows meet different banks.
#pragma once
#include "platform.h"

constexpr int kLdsPad = 8;

CONSTEXPR int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Eight halves of global memory; kAligned says that the address is a multiple of 16 bytes.
template <bool kAligned> DEVICE Words<4> load_eight(const u16* from) {
    Words<4> x;
    if constexpr (kAligned) {
        x = *(const Words<4>*)from;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x.word[i] = (u32)from[2 * i] | ((u32)from[2 * i + 1] << 16);
    }
    return x;
}

// The same from row `row` of a tile of which `rows` exist (at least one), else zeros. The load is not conditional, so that
// several can be in flight.
template <bool kAligned> DEVICE Words<4> load_row(const u16* tile, i64 row_stride, int row, int rows) {
    Words<4> x = load_eight<kAligned>(tile + min2(row, rows - 1) * row_stride);
#pragma unroll
    for (int i = 0; i < 4; ++i) x.word[i] = row < rows ? x.word[i] : 0;
    return x;
}

// lds[r][c] = global[r][c], kRows x kColumns, zero for rows from `rows` on and columns from kValid on (both multiples of 8).
template <int kRows, int kColumns, int kValid, int kLd, int kThreads, bool kAligned>
DEVICE void stage(u16* lds, const u16* global, i64 row_stride, int rows) {
    constexpr int kChunks = kColumns / 8, kValidChunks = min2(kValid, kColumns) / 8;
#pragma unroll 4
    for (int i = (int)thread_id(); i < kRows * kValidChunks; i += kThreads) {
        const int row = i / kValidChunks, column = i % kValidChunks * 8;
        *(Words<4>*)(lds + row * kLd + column) = load_row<kAligned>(global + column, row_stride, row, rows);
    }
    if constexpr (kValidChunks < kChunks)
        for (int i = (int)thread_id(); i < kRows * (kChunks - kValidChunks); i += kThreads)
            *(Words<4>*)(lds + i % kRows * kLd + (kValidChunks + i / kRows) * 8) = Words<4>{{0, 0, 0, 0}};
}

// lds[c][r] = global[r][c], kRows (even) x kColumns, zero for rows from `rows` on. A work-item turns two rows of eight
// columns into eight words; consecutive work-items take consecutive row pairs, so that their words fall into consecutive banks.
template <int kRows, int kColumns, int kLd, int kThreads, bool kAligned>
DEVICE void stage_transposed(u16* lds, const u16* global, i64 row_stride, int rows) {
    constexpr int kPairs = kRows / 2;
#pragma unroll 2
    for (int i = (int)thread_id(); i < kPairs * (kColumns / 8); i += kThreads) {
        const int row = i % kPairs * 2, column = i / kPairs * 8;
        const Words<4> low = load_row<kAligned>(global + column, row_stride, row, rows);
        const Words<4> high = load_row<kAligned>(global + column, row_stride, row + 1, rows);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u16* to = lds + (column + 2 * j) * kLd + row;
            *(Words<1>*)to = Words<1>{{(low.word[j] & 0xffffu) | (high.word[j] << 16)}};
            *(Words<1>*)(to + kLd) = Words<1>{{(low.word[j] >> 16) | (high.word[j] & 0xffff0000u)}};
        }
    }
}
