// Tiles that go from global memory to LDS without passing a register, where there is such a thing: cp.async on NVIDIA.
//
// Such a copy moves 128 bytes at a time only from a multiple of 128 to a multiple of 128. Where LDS rows of 128 bytes were padded by
// 16, each took 2.6 writes to LDS and twice the sectors of L2 (H200, counted by ncu): hence rows that are swizzled (LdsRows).
#pragma once
#include "tile.h"

// Tile after tile of kRows x kColumns (in eights) to LDS, zeros for rows past the end, by copies that the caller waits for. Rows
// begin at multiples of 16 bytes, the last of a tile less than 4 GiB behind the first. If kOneColumn, a work-item's pieces lie below
// each other, kStep rows apart, and need one address; where kChunks does not divide kThreads, the last work-items then have none, so
// that it is done there only if kFewRegisters. If kAsksAll, it is asked who has a piece also where all do: where
// registers are fewest ptxas then spills less.
template <int kRows, int kColumns, typename Rows, int kThreads, bool kFewRegisters, bool kAsksAll> struct TileCopies {
    static constexpr bool kOneColumn = kFewRegisters || kThreads % (kColumns / 8) == 0;
    static constexpr int kChunks = kColumns / 8, kItems = kRows * kChunks, kStep = kThreads / kChunks;
    static constexpr int kEach = kOneColumn ? (kRows + kStep - 1) / kStep : (kItems + kThreads - 1) / kThreads;
    const char* from;  // the next tile, if kOneColumn at this work-item's first piece
    u32 row_bytes, offset[kOneColumn ? 1 : kEach];
    DEVICE void prepare(const u16* first_tile, i64 row_stride) {
        row_bytes = (u32)row_stride * 2;
        from = (const char*)first_tile;
        if constexpr (kOneColumn) from += row(0) * row_bytes + column(0) * 2;
        else
#pragma unroll
            for (int j = 0; j < kEach; ++j) offset[j] = row(j) * row_bytes + column(j) * 2;
    }
    // Of piece j, if kOneColumn `below(j)` rows further down.
    static DEVICE u32 item(int j) { return thread_id() + (kOneColumn ? 0 : j * kThreads); }
    static DEVICE u32 row(int j) { return item(j) / kChunks; }
    static DEVICE u32 column(int j) { return item(j) % kChunks * 8; }
    static CONSTEXPR int below(int j) { return kOneColumn ? j * kStep : 0; }
    static DEVICE bool has(int j) {
        if constexpr (!kOneColumn) return (kAsksAll ? kItems % kThreads == 0 : (j + 1) * kThreads <= kItems) || item(j) < (u32)kItems;
        const bool in_row = kThreads % kChunks == 0 || thread_id() < (u32)(kStep * kChunks);
        return in_row && (below(j + 1) <= kRows || (int)row(j) < kRows - below(j));
    }
    // `rows` exist, perhaps none. The next call is for the next tile.
    DEVICE void begin(u16* lds, int rows) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const u32 away = kOneColumn ? below(j) * row_bytes : offset[kOneColumn ? 0 : j];
            const int alike = below(j) % 8 == 0 ? below(j) : 0;  // rows so far apart are swizzled alike
            u16* const to = Rows::place(lds, (int)row(j) + below(j) - alike, (int)column(j)) + alike * Rows::kLd;
            if (has(j)) copy_async(to, from + away, below(j) < rows - (int)row(j));
        }
        from += kRows * row_bytes;
    }
};

// Whole tiles of kRows x kColumns (in eights) that a wave copies for itself, one below the other or elsewhere after `move`. Rows as for
// TileCopies. Addresses are sums: products with a row's bytes took more instructions than all the rest of a copy.
template <int kRows, int kColumns, typename Rows> struct WaveCopies {
    static constexpr int kChunks = kColumns / 8, kStep = WAVE_SIZE / kChunks, kEach = kRows / kStep;
    static_assert(WAVE_SIZE % kChunks == 0 && kRows % kStep == 0, "a wave copies whole rows");
    const char* from;  // this lane's last piece: added to before a copy, not behind it, which would have to wait until it is read
    u32 step_bytes;
    DEVICE void prepare(const u16* first_tile, i64 row_stride) {
        step_bytes = kept_value((u32)row_stride * 2 * kStep);
        from = (const char*)(first_tile + row() * row_stride + column()) - step_bytes;
    }
    static DEVICE int row() { return (int)(thread_id() % WAVE_SIZE) / kChunks; }
    static DEVICE int column() { return (int)(thread_id() % WAVE_SIZE) % kChunks * 8; }
    // One of `shares` of a tile; if not `wanted`, addresses alone go on.
    DEVICE void begin_share(u16* lds, bool wanted, int share, int shares) {
        u16* const first = Rows::place(lds, row(), column());
#pragma unroll
        for (int j = share * kEach / shares; j < (share + 1) * kEach / shares; ++j) {
            from = kept_address(from + step_bytes);
            if (wanted) copy_async(Rows::below(first, j * kStep), from, true);
        }
    }
    DEVICE void move(int rows, int columns) { from = kept_address(from + (i64)(rows / kStep) * step_bytes + columns * 2); }
};

// lds[r][c] = tile[r][c], kRows x kColumns (in eights) of any alignment and row stride, zeros for rows past the end; by kThreads
// work-items, of which this is number `thread`. In few registers, for what is rare.
template <int kRows, int kColumns, typename Rows, int kThreads>
DEVICE void copy_rows(u16* lds, const u16* tile, i64 row_stride, int rows, u32 thread) {
    using Place = InRows<kRows, kColumns, kThreads>;
#pragma unroll 1
    for (int i = (int)thread; i < kRows * Place::kChunks; i += kThreads) {
        const int row = Place::row(i), column = Place::column(i);
        Words<4> x = {{0, 0, 0, 0}};
        if (row < rows) x = load_eight<false>(tile + row * row_stride + column);
        *(Words<4>*)Rows::place(lds, row, column) = x;
    }
}
