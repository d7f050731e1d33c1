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

// kItems pieces of work, of which each work-item has one in each of kRounds rounds. In the last, whole waves and lanes may have
// none: `item` then is the last.
template <int kItems, int kThreads> struct Rounds {
    static constexpr int kRounds = (kItems + kThreads - 1) / kThreads;
    static constexpr bool kFull = kItems % kThreads == 0;
    static DEVICE u32 item(int round, u32 thread = thread_id()) { return min2(thread + round * kThreads, (u32)kItems - 1); }
    static DEVICE bool has(int round) {
        if ((round + 1) * kThreads <= kItems) return true;
        if ((int)wave_uniform(thread_id() / WAVE_SIZE) * WAVE_SIZE + round * kThreads >= kItems) return false;
        return kItems % WAVE_SIZE == 0 || (int)thread_id() + round * kThreads < kItems;
    }
};

// Which eight columns of a tile an item is, of one row, consecutive items along a row, ..
template <int kTileRows, int kColumns, int kThreads> struct InRows {
    static constexpr int kRows = kTileRows, kRowsEach = 1, kChunks = kColumns / 8;
    using Items = Rounds<kRows * kChunks, kThreads>;
    static constexpr bool kRegular = Items::kFull && kThreads % kChunks == 0;  // from round to round so many rows and columns
    static constexpr int kStepRows = kThreads / kChunks, kStepColumns = 0;
    static DEVICE int row(u32 item) { return (int)(item / kChunks); }
    static DEVICE int column(u32 item) { return (int)(item % kChunks * 8); }
};
// .. or of two rows, consecutive items down the columns.
template <int kTileRows, int kColumns, int kThreads> struct InPairs {
    static constexpr int kRows = kTileRows, kRowsEach = 2, kPairs = kRows / 2;
    using Items = Rounds<kPairs * (kColumns / 8), kThreads>;
    static constexpr bool kRegular = Items::kFull && kThreads % kPairs == 0;
    static constexpr int kStepRows = 0, kStepColumns = kThreads / kPairs * 8;
    static DEVICE int row(u32 item) { return (int)(item % kPairs * 2); }
    static DEVICE int column(u32 item) { return (int)(item / kPairs * 8); }
};

// A tile on its way from global memory to LDS, in registers, so that other work can be done meanwhile: nothing waits for it between
// `fetch` and `store`. Rows from `rows` on (at least one exists) become zeros. Most tiles are whole and aligned: then a load's
// address is a scalar, the same for all lanes, and 32 bits of each lane, which are computed once. So the last row of an aligned
// tile must begin less than 4 GiB behind the first (attention.py sees to it).
template <typename Place> struct Fetched {
    using Items = typename Place::Items;
    static constexpr int kOffsets = Place::kRegular ? 1 : Items::kRounds;
    Words<4> part[Items::kRounds][Place::kRowsEach];
    u32 offset[kOffsets];  // in bytes

    // Before the first `fetch`.
    DEVICE void place(i64 row_stride) {
#pragma unroll
        for (int j = 0; j < kOffsets; ++j) {
            const u32 i = Items::item(j);
            offset[j] = ((u32)Place::row(i) * (u32)row_stride + (u32)Place::column(i)) * 2;
        }
    }
    DEVICE void fetch(const u16* tile, i64 row_stride, int rows, bool aligned) {
        if (aligned && rows >= Place::kRows) fetch_whole(tile, row_stride);
        else if (aligned) fetch_some<true>(tile, row_stride, rows);
        else fetch_some<false>(tile, row_stride, rows);
    }
    DEVICE void fetch_whole(const u16* tile, i64 row_stride) {
        // An offset that changes with each pass of a loop, or LLVM widens it to 64 bits before the loop and adds those.
#pragma unroll
        for (int j = 0; j < kOffsets; ++j) offset[j] = kept_here(offset[j]);
#pragma unroll
        for (int j = 0; j < Items::kRounds; ++j)
#pragma unroll
            for (int r = 0; r < Place::kRowsEach; ++r) {
                const int rows = (Place::kRegular ? j * Place::kStepRows : 0) + r;
                const u16* from = tile + rows * row_stride + (Place::kRegular ? j * Place::kStepColumns : 0);
                part[j][r] = *(const Words<4>*)((const char*)from + offset[Place::kRegular ? 0 : j]);
            }
    }
    template <bool kAligned> DEVICE void fetch_some(const u16* tile, i64 row_stride, int rows) {
        const u32 thread = kept_here(thread_id());  // what follows from it is not computed before the loop, nor held in registers
#pragma unroll
        for (int j = 0; j < Items::kRounds; ++j)
#pragma unroll
            for (int r = 0; r < Place::kRowsEach; ++r) {
                const u32 i = Items::item(j, thread);
                part[j][r] = load_row<kAligned>(tile + Place::column(i), row_stride, Place::row(i) + r, rows);
            }
    }
};

// lds[r][c] = tile[r][c], kRows x kColumns (in eights), each word xor `flip`.
template <int kRows, int kColumns, int kLd, int kThreads> struct Tile : Fetched<InRows<kRows, kColumns, kThreads>> {
    using Place = InRows<kRows, kColumns, kThreads>;
    DEVICE void store(u16* lds, u32 flip = 0) const {
#pragma unroll
        for (int j = 0; j < Place::Items::kRounds; ++j) {
            if (!Place::Items::has(j)) continue;
            const u32 i = Place::Items::item(j);
            Words<4> x = this->part[j][0];
#pragma unroll
            for (int w = 0; w < 4; ++w) x.word[w] ^= flip;
            *(Words<4>*)(lds + Place::row(i) * kLd + Place::column(i)) = x;
        }
    }
};

// lds[c][r] = tile[r][c], kRows even. A work-item turns two rows of eight columns into eight words; consecutive work-items have
// consecutive row pairs, so that their words fall into consecutive banks.
template <int kRows, int kColumns, int kLd, int kThreads> struct TransposedTile : Fetched<InPairs<kRows, kColumns, kThreads>> {
    using Place = InPairs<kRows, kColumns, kThreads>;
    DEVICE void store(u16* lds) const {
#pragma unroll
        for (int j = 0; j < Place::Items::kRounds; ++j) {
            if (!Place::Items::has(j)) continue;
            const u32 i = Place::Items::item(j);
            u16* to = lds + Place::column(i) * kLd + Place::row(i);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const u32 low = this->part[j][0].word[w], high = this->part[j][1].word[w];
                *(Words<1>*)(to + 2 * w * kLd) = Words<1>{{low_halves(low, high)}};
                *(Words<1>*)(to + (2 * w + 1) * kLd) = Words<1>{{high_halves(low, high)}};
            }
        }
    }
};

// Tile after tile of kRows x kColumns (in eights) to LDS, zeros for rows past the end, by copies that the caller waits for. Rows
// begin at multiples of 16 bytes, the last of a tile less than 4 GiB behind the first. If kOneColumn, a work-item's pieces lie below
// each other, kStep rows apart, and need one address; where kChunks does not divide kThreads, the last work-items then have none, so
// that it is done there only if kFewRegisters.
template <int kRows, int kColumns, int kLd, int kThreads, bool kFewRegisters> struct TileCopies {
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
        if constexpr (!kOneColumn) return kItems % kThreads == 0 || item(j) < (u32)kItems;
        const bool in_row = kThreads % kChunks == 0 || thread_id() < (u32)(kStep * kChunks);
        return in_row && (below(j + 1) <= kRows || (int)row(j) < kRows - below(j));
    }
    // `rows` exist, perhaps none. The next call is for the next tile.
    DEVICE void begin(u16* lds, int rows) {
        begin_share(lds, rows, 0, 0, 1);
        go_on();
    }
    // One of `shares` of a tile that lies `first_column` columns further; then to the tile below.
    DEVICE void begin_share(u16* lds, int rows, int first_column, int share, int shares) const {
#pragma unroll
        for (int j = share * kEach / shares; j < (share + 1) * kEach / shares; ++j) {
            const u32 away = kOneColumn ? below(j) * row_bytes : offset[kOneColumn ? 0 : j];
            u16* const to = lds + row(j) * kLd + column(j) + below(j) * kLd;
            if (has(j)) copy_async(to, from + away + first_column * 2, (int)row(j) < rows - below(j));
        }
    }
    DEVICE void go_on() { from += kRows * row_bytes; }
};

// lds[r][c] = tile[r][c], kRows x kColumns (in eights) of any alignment and row stride, zeros for rows past the end. In few registers,
// for what is rare.
template <int kRows, int kColumns, int kLd, int kThreads> DEVICE void copy_rows(u16* lds, const u16* tile, i64 row_stride, int rows) {
    using Place = InRows<kRows, kColumns, kThreads>;
#pragma unroll 1
    for (int i = (int)thread_id(); i < kRows * Place::kChunks; i += kThreads) {
        const int row = Place::row(i), column = Place::column(i);
        Words<4> x = {{0, 0, 0, 0}};
        if (row < rows) x = load_eight<false>(tile + row * row_stride + column);
        *(Words<4>*)(lds + row * kLd + column) = x;
    }
}

// Zeros in columns from kFirst to kLast (in eights) of kRows rows.
template <int kRows, int kFirst, int kLast, int kLd, int kThreads> DEVICE void clear_columns(u16* lds) {
    for (int i = (int)thread_id(); i < kRows * ((kLast - kFirst) / 8); i += kThreads)
        *(Words<4>*)(lds + i % kRows * kLd + kFirst + i / kRows * 8) = Words<4>{{0, 0, 0, 0}};
}
