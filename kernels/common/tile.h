// Tiles between global memory and LDS. Global rows are halves with any 64-bit row stride and any alignment of two bytes.
#pragma once
#include "platform.h"

constexpr int kLdsPad = 8;

// How the rows of a tile, of halves, lie in LDS. Lanes that read sixteen bytes from eight consecutive rows meet different banks
// either way: rows are padded, or groups of eight columns trade places. The latter is for copies that pass no register (nvidia/copies.h).
template <int kColumns, bool kSwizzled> struct LdsRows {
    static constexpr int kLd = kColumns + (kSwizzled ? 0 : kLdsPad);
    static constexpr u32 kPlaces = !kSwizzled ? 1 : kColumns % 64 == 0 ? 8 : kColumns % 32 == 0 ? 4 : kColumns % 16 == 0 ? 2 : 1;
    static constexpr int kGroup = max2(16, (int)kPlaces * 8), kWays = kGroup / 16;  // columns further by kGroup lie further by kGroup
    static DEVICE int turned(int row) { return (int)((u32)row / (8 / kPlaces) % kPlaces * 8); }
    template <typename T> static DEVICE T* place(T* tile, int row, int column) { return tile + row * kLd + (column ^ turned(row)); }
    // The next two are for tiles that begin at multiples of 128 bytes. From a place in one of the first rows to the same column so many
    // rows further, a multiple of a power of two that is not less than the number of first rows.
    static DEVICE u16* below(u16* place, int rows) { return (u16*)((u64)place ^ (u64)(turned(rows) * 2)) + rows * kLd; }
    // From the address in bytes of one of the first sixteen columns to the same row's column so many further, a multiple of sixteen.
    static DEVICE u32 across(u32 address, int columns) {
        return (address ^ (columns % kGroup * 2)) + columns / kGroup * (kGroup * 2);
    }
};

// What a lane adds to where a tile lies in LDS, a multiple of 128 bytes, to get to a row and a column: computed once and kept.
template <typename Rows> struct LanePlace {
    u32 way[Rows::kWays];
    // `first`: the address in bytes of the lane's own place, among the first sixteen rows and columns, in the first tile.
    DEVICE void prepare(u32 first) {
#pragma unroll
        for (int i = 0; i < Rows::kWays; ++i) way[i] = kept_value(Rows::across(first, 16 * i));
    }
    // So many rows and columns further, multiples of eight and of sixteen, in the tile that begins so many bytes behind the first.
    DEVICE u32 at(u32 tile_bytes, int rows, int columns) const {
        return way[columns % Rows::kGroup / 16] + tile_bytes + (columns / Rows::kGroup * Rows::kGroup + rows * Rows::kLd) * 2;
    }
};

CONSTEXPR int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Eight halves of global memory; kAligned says that the address is a multiple of 16 bytes.
// Where it is not, LLVM makes of halves side by side accesses of words at 2 mod 4: for amdhsa it assumes unaligned-access-mode
// (GCNSubtarget): SH_MEM_CONFIG.alignment_mode UNALIGNED of the ISA documents, which ROCm sets. In mode DWORD the two
// lowest bits of an address are ignored. A trial reads at such addresses and compares with float64.
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

// Eights of halves, each so many bytes from `base`, which is the same in all lanes of a wave.
template <int kRounds> DEVICE void read_eights(Words<4> (&ahead)[kRounds], const void* base, u32 (&from)[kRounds]) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
        from[i] = kept_here(from[i]);  // or LLVM widens it to 64 bits before the loop around, and adds those
        const Words<4> eight = *(const Words<4>*)((const unsigned char*)base + from[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) ahead[i].word[j] = eight.word[j];
    }
}
// A tile in LDS from them.
template <typename Place, typename Rows> DEVICE void put_eights(u16* to, const Words<4> (&ahead)[Place::Items::kRounds]) {
#pragma unroll
    for (int i = 0; i < Place::Items::kRounds; ++i) {
        const u32 item = Place::Items::item(i);
        Words<4> eight;
#pragma unroll
        for (int j = 0; j < 4; ++j) eight.word[j] = ahead[i].word[j];
        if (Place::Items::has(i)) *(Words<4>*)(to + Place::row(item) * Rows::kLd + Place::column(item)) = eight;
    }
}

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
template <int kRows, int kColumns, typename Rows, int kThreads> struct Tile : Fetched<InRows<kRows, kColumns, kThreads>> {
    using Place = InRows<kRows, kColumns, kThreads>;
    DEVICE void store(u16* lds, u32 flip = 0) const {
#pragma unroll
        for (int j = 0; j < Place::Items::kRounds; ++j) {
            if (!Place::Items::has(j)) continue;
            const u32 i = Place::Items::item(j);
            Words<4> x = this->part[j][0];
#pragma unroll
            for (int w = 0; w < 4; ++w) x.word[w] ^= flip;
            // Rows::place, but as a call it makes LLVM order the code of some GPUs otherwise.
            *(Words<4>*)(lds + Place::row(i) * Rows::kLd + (Place::column(i) ^ Rows::turned(Place::row(i)))) = x;
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

// Zeros in columns from kFirst to kLast (in eights) of kRows rows.
template <int kRows, int kFirst, int kLast, int kLd, int kThreads> DEVICE void clear_columns(u16* lds) {
    for (int i = (int)thread_id(); i < kRows * ((kLast - kFirst) / 8); i += kThreads)
        *(Words<4>*)(lds + i % kRows * kLd + kFirst + i / kRows * 8) = Words<4>{{0, 0, 0, 0}};
}
