// Attention where copies to LDS pass no register (cp.async on NVIDIA): two ways to overlap them, and what is done with rows that they
// cannot read. Included by attention.hip, whose head explains the rest.
#pragma once

static_assert(!kParts, "attention_parts.h is for that");

struct CopyingAttention : Attention {
    // Forms of the pipeline, of several that were measured: ptxas gives each other registers, and some have none to spare.
    static constexpr bool kBF16At40 = HEAD_DIM == 40 && BF16_HALVES;
    static constexpr bool kFewRegisters = kPipelined && (HEAD_DIM == 80 || kBF16At40), kKeepsBase = HEAD_DIM != 64 && !kBF16At40;
    static constexpr bool kCopiesFirst = HEAD_DIM == 64 || HEAD_DIM == 128;

    TileCopies<BLOCK_K, HEAD_DIM, RowsK, kThreads, kFewRegisters> key_copies;
    TileCopies<CHUNK_K, HEAD_DIM, RowsV, kThreads, kFewRegisters> value_copies;
    static_assert(!kPipelined || Unit::kSumsByProduct, "the pipeline adds no tallies");
    PerQuery settled;  // settled_base() since the last time that it moved, if kKeepsBase
    u32 large_base;    // whether it is too large for that

    DEVICE CopyingAttention(const AttentionParams& params, unsigned char* memory) : Attention(params, memory) {}

    template <int kSlots> static DEVICE u32 slot_after(u32 slot) { return slot == kSlots - 1 ? 0 : slot + 1; }
    template <int kSlots> static DEVICE u32 slot_before(u32 slot) { return slot == 0 ? kSlots - 1 : slot - 1; }

    // Tile after tile: K of the next one is on its way while the values of this one are summed, V while K is scored. The first tile is
    // begun before Q is loaded: where keys are few, a group's only tile takes one trip to memory.
    DEVICE void run_copied() {
#pragma unroll 1
        for (int first_k = 0; true; first_k += BLOCK_K) {
            copies_landed<1>();
            barrier();
            weigh_tile(first_k);
            copies_landed<0>();
            barrier();  // also: K has been read by all, P is complete
            const bool last = first_k + BLOCK_K >= (int)p.seq_k;
            if (!last) begin_keys(first_k + BLOCK_K);
            accumulate_all(0);
            if (last) return;
            barrier();  // V has been read by all
            begin_values(first_k + BLOCK_K);
        }
    }
    // Tile after tile of queries, K and V in LDS from the first on: there are several only where all keys are one tile.
    DEVICE void run_resident() {
        begin_keys(0), begin_values(0);
#pragma unroll 1
        while (true) {
            load_queries();
            run_copied();
            finish();
            const u32 next = (u32)first_q + p.head_groups * kBlockQ;
            if (next >= p.seq_q) return;
            first_q = (int)next;
            barrier();  // O has left the place of Q
        }
    }
    // Rows that 16-byte accesses cannot read are copied at once.
    DEVICE void begin_keys(int first_k) {
        const int rows = (int)p.seq_k - first_k;
        if (p.aligned) key_copies.begin(k_tiles(), rows), copies_begun();
        else copy_rows<BLOCK_K, HEAD_DIM, RowsK, kThreads>(k_tiles(), key_rows(first_k, 0), p.k_stride[1], rows, thread_id());
    }
    DEVICE void begin_values(int first_k) {
        const int rows = (int)p.seq_k - first_k;
        if (p.aligned) value_copies.begin(v_tiles(), rows), copies_begun();
        else copy_rows<BLOCK_K, HEAD_DIM, RowsV, kThreads>(v_tiles(), value_rows(first_k), p.v_stride[1], rows, thread_id());
    }

    // In a pipeline: while the weights of tile j + 1 are computed, the matrix unit sums the values of tile j and scores the keys of tile
    // j + 2, and the copies are on their way of keys j + 4 and values j + 2. Tiles lie in rings of five and of three. Whether a tile's
    // weights are good is asked after the next barrier, where waves wait anyway; if not, it is scored again, as the first tile is.
    // Where Q is in LDS, registers do not suffice for scores within that block: they are made of keys j + 1 before it.
    DEVICE void run_pipelined() {
        u32 outside = 1;
        k_slot = 1;
#pragma unroll 1
        for (int first_k = 0; true; first_k += BLOCK_K) {
            copies_landed<1>();
            barrier();  // also: what is overwritten from here on has been read by all
            if (any_lane(outside != 0)) score_again(first_k);
            const int next_k = first_k + BLOCK_K;
            if (next_k >= (int)p.seq_k) {
                copies_landed<0>();
                return accumulate_all(0);
            }
            if (Q_IN_LDS && has_queries()) score<kWaveTilesK>(0, 0);
            mask_scores(next_k);
            k_slot = slot_after<kBuffersK>(k_slot);
            outside = overlap(next_k);
            v_slot = slot_after<kBuffersV>(v_slot);
        }
    }
    DEVICE bool has_queries() const { return query(0) < (int)p.seq_q; }
    // The tile before the one that k_slot tells, then that one.
    DEVICE void score_again(int first_k) {
        const u32 next = k_slot;
        k_slot = slot_before<kBuffersK>(k_slot);
        score<kWaveTilesK>(0, 0);
        softmax<0>(first_k);
        k_slot = next;
        if constexpr (!Q_IN_LDS) score<kWaveTilesK>(0, 0);
        settled = settled_base();
        large_base = MASK_KIND == kMaskNone && !base_is_small();
    }
    // Two groups of copies, then one per tile.
    DEVICE void begin_pipeline() {
        const auto keys = [&](int tile) { key_copies.begin(keys_in(tile), (int)p.seq_k - tile * BLOCK_K); };
        const auto values = [&](int tile) { value_copies.begin(values_in(tile), (int)p.seq_k - tile * BLOCK_K); };
        keys(0), keys(1), keys(2), values(0), copies_begun();
        keys(3), values(1), copies_begun();
    }
    // 0 if this lane's weights are good.
    DEVICE u32 overlap(int first_k) {
        Tallies tallies = {};
        const PerQuery base = kKeepsBase ? settled : settled_base();
        const int rows = (int)p.seq_k - first_k - BLOCK_K;
        const auto copy_keys = [&] { key_copies.begin(keys_in(k_slot < kBuffersK - 2 ? k_slot + 2 : k_slot - (kBuffersK - 2)), rows - 2 * BLOCK_K); };
        const auto copy_values = [&] { value_copies.begin(values_in(slot_before<kBuffersV>(v_slot)), rows); };
        if (Q_IN_LDS && !has_queries()) {
            copy_keys(), copy_values(), copies_begun();
            return 0;
        }
#pragma unroll
        for (int i = 0; i < kWaveTilesK; ++i) {
            accumulate(0, i);
            weigh(i, base, tallies);
            if (i == 0) copy_keys();
            if (kCopiesFirst && i == 0) copy_values();
            if constexpr (!Q_IN_LDS) score<1>(i, 0);
            if (!kCopiesFirst && i == kWaveTilesK - 1) copy_values();
        }
        copies_begun();
        u32 outside = large_base;
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) outside |= tallies.of[t].outside(kMostWeight);
        return outside;
    }

    DEVICE void run() {
        keys.place(p.k_stride[1]);
        values.place(p.v_stride[1]);
        key_copies.prepare(k, p.k_stride[1]);
        value_copies.prepare(v, p.v_stride[1]);
        if constexpr (kCopied) return run_resident();
        if (p.aligned) begin_pipeline();
        load_queries();
        if (p.aligned) run_pipelined();
        else run_whole();
        finish();
    }
};
using Kernel = CopyingAttention;
