// Where LdsRows puts what: a work-item for each row of a tile of THREADS rows and COLUMNS columns.
#include "common/tile.h"

struct RowsParams {
    u32* place;   // [row][column], in halves from the tile's beginning
    u32* across;  // the same, from the place of one of the first sixteen columns
    u32* below;   // the same, from the place in one of the first four rows
    u32* kept;    // the same, of another tile of a ring that begins elsewhere, from the place in one of the first eight rows
};

KERNEL(THREADS) rows(RowsParams p) {
    using Rows = LdsRows<COLUMNS, SWIZZLED>;
    LDS(memory, THREADS * Rows::kLd * 2);
    u16* const tile = (u16*)memory;
    const int row = (int)thread_id();
    constexpr u32 kRing = 3 * 128, kTile = 10 * 128;
    for (int column = 0; column < COLUMNS; ++column) {
        const u32 i = row * COLUMNS + column;
        const u16* const first = Rows::place(tile, row, column % 16);
        p.place[i] = (u32)(Rows::place(tile, row, column) - tile);
        p.across[i] = Rows::across((u32)(first - tile) * 2, column / 16 * 16) / 2;
        LanePlace<Rows> lane;
        lane.prepare(kRing + (u32)(Rows::place(tile, row % 8, column % 16) - tile) * 2);
        p.kept[i] = (lane.at(kTile, row / 8 * 8, column / 16 * 16) - kTile - kRing) / 2;
        p.below[i] = (u32)(Rows::below(Rows::place(tile, row % 4, column), row / 4 * 4) - tile);
    }
}
