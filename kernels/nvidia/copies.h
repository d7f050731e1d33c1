// Tiles that go from global memory to LDS without passing a register, where there is such a thing: cp.async on NVIDIA.
//
// Such a copy moves 128 bytes at a time only from a multiple of 128 to a multiple of 128. Where LDS rows of 128 bytes were padded by
// 16, each took 2.6 writes to LDS and twice the sectors of L2 (H200, counted by ncu): hence rows that are swizzled (LdsRows).
#pragma once
#include "common/tile.h"

// Tile after tile of kRows x kColumns (in eights) to LDS, zeros for rows past the end, by copies that the caller waits for. Rows
// begin at multiples of 16 bytes, the last of a tile less than 4 GiB behind the first. If kOneColumn, a work-item's pieces lie below
// each other, kStep rows apart, and need one address.
template <int kRows, int kColumns, typename Rows, int kThreads> struct TileCopies {
    static constexpr bool kOneColumn = kThreads % (kColumns / 8) == 0;
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
        if constexpr (!kOneColumn) return kItems % kThreads == 0 || item(j) < (u32)kItems;  // asked of all: ptxas then spills less
        return below(j + 1) <= kRows || (int)row(j) < kRows - below(j);
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

// One tile of kRows x kColumns (in eights) to LDS, zeros for rows past the end, in few instructions: two work-items to a row, each every other
// eight columns, so that all its pieces of a row lie at constants from the first. Rows begin at multiples of 16 bytes.
template <int kRows, int kColumns, typename Rows, int kThreads> DEVICE void copy_tile(u16* lds, const u16* tile, i64 row_stride, int rows) {
    constexpr int kStep = kThreads / 2;
    static_assert(kRows % kStep == 0 && Rows::kPlaces == 1, "rows are whole rounds, and not swizzled");
    const int row = (int)thread_id() / 2, column = (int)thread_id() % 2 * 8;
    const u16* from = tile + row * row_stride + column;
    u16* const to = Rows::place(lds, row, column);
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
#pragma unroll
        for (int i = 0; i < kColumns; i += 16)
            if (i + 16 <= kColumns || column == 0) copy_async(to + first * Rows::kLd + i, from + i, first + row < rows);
        from += kStep * row_stride;
    }
}

// Where a copy reads and where it writes. Both are kept and moved in place: cp.async reads its registers late, and what else the compiler
// would put there has to wait (docs/attention.md). A NearAddress stays within the 4 GiB in which it
// lies, so that its upper half never changes and one addition moves it, where 64 bits take two.
struct NearAddress {
    static constexpr int kReachBits = 32;
    u64 at;
    DEVICE void place(const void* to) { at = (u64)to; }
    DEVICE void move(u32 bytes) {
#if defined(SIMT_SHIM)
        const u64 reach = (u64)1 << kReachBits;
        at = at / reach * reach + (at + bytes) % reach;
#else
        asm volatile("{ .reg .u32 low, high; mov.b64 {low, high}, %0; add.u32 low, low, %1; mov.b64 %0, {low, high}; }" : "+l"(at) : "r"(bytes));
#endif
    }
    // Whether all of `rows` rows of kColumns halves, each behind the one before, lie where this one can go.
    template <int kColumns> static DEVICE bool reaches(const u16* first_row, u64 row_stride, u32 rows) {
        return ((u64)first_row ^ (u64)(first_row + (rows - 1) * row_stride + kColumns - 1)) >> kReachBits == 0;
    }
};
#if defined(SIMT_SHIM)
struct LdsAddress {
    char* at;
    DEVICE void place(const void* to) { at = (char*)to; }
    DEVICE void move(int bytes) { at += bytes; }
};
DEVICE void copy_async(const LdsAddress& lds, int further, const NearAddress& global, int right, bool wanted) {
    copy_async(lds.at + further, (const char*)global.at + right, wanted);
}
#else
struct LdsAddress {
    u32 at;
    DEVICE void place(const void* to) { at = (u32)__cvta_generic_to_shared(to); }
    DEVICE void move(int bytes) { at = kept_value(at + bytes); }
};
DEVICE void copy_async(const LdsAddress& lds, int further, const NearAddress& global, int right, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(lds.at + further), "l"(global.at + right), "r"(wanted ? 16 : 0) : "memory");
}
#endif

// Tile after tile of keys and of values, kRows x kColumns (in eights) each, the values kApart bytes behind the keys in LDS, by copies that
// the caller waits for; zeros for rows past the end. Rows begin at multiples of 16 bytes, and all of a head lie where a NearAddress
// reaches. Where what is left of each tile would keep half of the waves busy, one half copies what is left of the keys and the other
// what is left of the values.
template <int kRows, int kColumns, typename Rows, int kThreads, int kApart> struct PairCopies {
    // A piece is eight columns of each span of a row: further spans are so by a constant, and need no address. Spans are whole lines of LDS.
    static constexpr int kSpan = kColumns % 128 == 0 ? 64 : kColumns, kWide = kColumns / kSpan;
    static constexpr int kChunks = kSpan / 8, kItems = kRows * kChunks, kRest = kItems % kThreads;
    static constexpr bool kShared = kItems > kThreads && kRest * 2 == kThreads && kRest % WAVE_SIZE == 0;
    static_assert(!kShared || kWide == 1, "what is left is copied eight columns at a time");
    static constexpr int kEach = kItems / kThreads + (kRest != 0 && !kShared);
    static constexpr bool kAlike = Rows::kPlaces == 1 || kThreads % (8 * kChunks) == 0;  // a work-item's pieces are swizzled alike
    NearAddress keys[kEach], values[kEach], rest;
    LdsAddress to[kAlike ? 1 : kEach], rest_to;
    u32 key_step, value_step, rest_step;

    DEVICE void prepare(const u16* first_keys, i64 key_stride, const u16* first_values, i64 value_stride, u16* key_tile) {
        key_step = (u32)key_stride * 2 * kRows, value_step = (u32)value_stride * 2 * kRows;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            keys[j].place(first_keys + row(j) * key_stride + column(j));
            values[j].place(first_values + row(j) * value_stride + column(j));
            if (j == 0 || !kAlike) to[kAlike ? 0 : j].place(Rows::place(key_tile, row(j), column(j)));
        }
        if constexpr (kShared) {
            rest.place((has_keys() ? first_keys + row(kEach) * key_stride : first_values + row(kEach) * value_stride) + column(kEach));
            rest_to.place((char*)Rows::place(key_tile, row(kEach), column(kEach)) + (has_keys() ? 0 : kApart));
            rest_step = wave_uniform(has_keys() ? key_step : value_step);
        }
    }
    // Of piece j; kEach is what is left.
    static DEVICE u32 item(int j) { return j * kThreads + (j == kEach && !has_keys() ? thread_id() - kRest : thread_id()); }
    static DEVICE int row(int j) { return (int)(item(j) / kChunks); }
    static DEVICE int column(int j) { return (int)(item(j) % kChunks * 8); }
    static DEVICE bool has(int j) { return (j + 1) * kThreads <= kItems || item(j) < (u32)kItems; }
    static DEVICE bool has_keys() { return thread_id() < (u32)kRest; }

    // Of tiles of which so many rows exist, perhaps none; if kWhole, all. Keys first: values lie where these moved to.
    template <bool kWhole> DEVICE void begin_keys(int rows) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) begin(keys[j], 0, j, kWhole || row(j) < rows);
    }
    template <bool kWhole> DEVICE void begin_values(int rows, int key_rows) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) begin(values[j], kApart, j, kWhole || row(j) < rows);
        if constexpr (kShared) copy_async(rest_to, 0, rest, 0, kWhole || row(kEach) < (has_keys() ? key_rows : rows));
    }
    DEVICE void begin(const NearAddress& from, int further, int j, bool wanted) {
        if (!has(j)) return;
#pragma unroll
        for (int i = 0; i < kWide; ++i)
            copy_async(to[kAlike ? 0 : j], further + (kAlike ? j * kThreads * 16 * kWide : 0) + i * kSpan * 2, from, i * kSpan * 2, wanted);
    }
    // To the next tiles, in LDS so many bytes further; before copies are begun, as behind them that would have to wait.
    DEVICE void move_keys(int lds_bytes) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            keys[j].move(key_step);
            if (j == 0 || !kAlike) to[kAlike ? 0 : j].move(lds_bytes);
        }
    }
    DEVICE void move_values(int lds_bytes) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) values[j].move(value_step);
        if constexpr (kShared) rest.move(rest_step), rest_to.move(lds_bytes);
    }
    // Keys of which the values are not due yet.
    DEVICE void begin_keys_alone(int rows, int lds_bytes) {
        begin_keys<false>(rows), move_keys(lds_bytes);
        if constexpr (kShared) {
            if (has_keys()) copy_async(rest_to, 0, rest, 0, row(kEach) < rows), rest.move(rest_step);
            rest_to.move(lds_bytes);
        }
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
