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

// lds[r][c] = global[r][c], kRows x kColumns (in eights), zero for rows from `rows` on, each word xor `flip`.
template <int kRows, int kColumns, int kLd, int kThreads, bool kAligned>
DEVICE void stage(u16* lds, const u16* global, i64 row_stride, int rows, u32 flip = 0) {
    constexpr int kChunks = kColumns / 8;
#pragma unroll 4
    for (int i = (int)thread_id(); i < kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, column = i % kChunks * 8;
        Words<4> x = load_row<kAligned>(global + column, row_stride, row, rows);
#pragma unroll
        for (int w = 0; w < 4; ++w) x.word[w] ^= flip;
        *(Words<4>*)(lds + row * kLd + column) = x;
    }
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

// A tile, kRows x kColumns (in eights), that travels from global memory to LDS through registers, so that other work can be done
// on the way: nothing waits for it before `store`. fetch: rows from `rows` on repeat the last; store: as zeros.
template <int kRows, int kColumns, int kLd, int kThreads> struct TileAhead {
    static constexpr int kChunks = kColumns / 8, kItems = kRows * kChunks, kEach = (kItems + kThreads - 1) / kThreads;
    Words<4> part[kEach];
    int valid;
    template <bool kAligned> DEVICE void fetch(const u16* global, i64 row_stride, int rows) {
        valid = rows;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const int i = min2((int)thread_id() + j * kThreads, kItems - 1);
            part[j] = load_eight<kAligned>(global + i % kChunks * 8 + min2(i / kChunks, rows - 1) * row_stride);
        }
    }
    DEVICE void store(u16* lds) const {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const int i = (int)thread_id() + j * kThreads;
            Words<4> x;
#pragma unroll
            for (int w = 0; w < 4; ++w) x.word[w] = i / kChunks < valid ? part[j].word[w] : 0;
            if (kItems % kThreads == 0 || i < kItems) *(Words<4>*)(lds + i / kChunks * kLd + i % kChunks * 8) = x;
        }
    }
};

// Zeros in columns from kFirst to kLast (in eights) of kRows rows.
template <int kRows, int kFirst, int kLast, int kLd, int kThreads> DEVICE void clear_columns(u16* lds) {
    for (int i = (int)thread_id(); i < kRows * ((kLast - kFirst) / 8); i += kThreads)
        *(Words<4>*)(lds + i % kRows * kLd + kFirst + i / kRows * 8) = Words<4>{{0, 0, 0, 0}};
}

// The same tile, kRows even, stored as lds[c][r]. A work-item turns two rows of eight columns into eight words; consecutive
// work-items take consecutive row pairs, so that their words fall into consecutive banks.
template <int kRows, int kColumns, int kLd, int kThreads> struct TransposedTileAhead {
    static constexpr int kPairs = kRows / 2, kItems = kPairs * (kColumns / 8), kEach = (kItems + kThreads - 1) / kThreads;
    Words<4> low[kEach], high[kEach];
    int valid;
    template <bool kAligned> DEVICE void fetch(const u16* global, i64 row_stride, int rows) {
        valid = rows;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const int i = min2((int)thread_id() + j * kThreads, kItems - 1), row = i % kPairs * 2;
            low[j] = load_eight<kAligned>(global + i / kPairs * 8 + min2(row, rows - 1) * row_stride);
            high[j] = load_eight<kAligned>(global + i / kPairs * 8 + min2(row + 1, rows - 1) * row_stride);
        }
    }
    DEVICE void store(u16* lds) const {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const int i = (int)thread_id() + j * kThreads;
            if (kItems % kThreads != 0 && i >= kItems) continue;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int row = i % kPairs * 2;
                const u32 a = row < valid ? low[j].word[w] : 0, b = row + 1 < valid ? high[j].word[w] : 0;
                u16* to = lds + (i / kPairs * 8 + 2 * w) * kLd + row;
                *(Words<1>*)to = Words<1>{{(a & 0xffffu) | (b << 16)}};
                *(Words<1>*)(to + kLd) = Words<1>{{(a >> 16) | (b & 0xffff0000u)}};
            }
        }
    }
};
