// Attention where copies to LDS pass no register (cp.async on NVIDIA): two ways to overlap them, and what is done with rows that they
// cannot read. Included by attention.hip, whose head explains the rest.
#pragma once

static_assert(!kParts, "attention_parts.h is for that");

struct CopyingAttention : Attention {
    // Forms of the pipeline, of several that were measured: ptxas gives each other registers, and some have none to spare. The base of the
    // weights is kept, or computed in each pass.
    static constexpr bool kCopiesFirst = HEAD_DIM == 80 || HEAD_DIM == 128 || (HEAD_DIM == 64 && Q_TILES == 1);
    static constexpr bool kKeepsBase = HEAD_DIM > 128;
    static constexpr bool kCopiesQueries = kPipelined && Q_IN_LDS;
    static constexpr int kLag = kBuffers - 3;  // how many tiles values come after the keys

    TileCopies<BLOCK_K, HEAD_DIM, RowsK, kThreads> key_copies;  // if kCopied
    TileCopies<CHUNK_K, HEAD_DIM, RowsV, kThreads> value_copies;
    PairCopies<BLOCK_K, HEAD_DIM, RowsK, kThreads, kOffsetV - kOffsetK> copies;  // if kPipelined
    static_assert(!kPipelined || Unit::kSumsByProduct, "the pipeline adds no tallies");
    PerQuery settled;  // settled_base() since it moved last, if kKeepsBase; in attention_rest.h always
    u32 large_base;    // whether it is too large for that

    DEVICE CopyingAttention(const AttentionParams& params, unsigned char* memory) : Attention(params, memory) {}

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
            const bool last = first_k + BLOCK_K >= seq_k();
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
        const int rows = seq_k() - first_k;
        if (p.aligned) key_copies.begin(k_tiles(), rows), copies_begun();
        else copy_rows<BLOCK_K, HEAD_DIM, RowsK, kThreads>(k_tiles(), key_rows(first_k, 0), p.k_stride[1], rows, thread_id());
    }
    DEVICE void begin_values(int first_k) {
        const int rows = seq_k() - first_k;
        if (p.aligned) value_copies.begin(v_tiles(), rows), copies_begun();
        else copy_rows<BLOCK_K, HEAD_DIM, RowsV, kThreads>(v_tiles(), value_rows(first_k), p.v_stride[1], rows, thread_id());
    }

    // In a pipeline: while the weights of tile j + 1 are computed, the matrix unit sums the values of tile j and scores the keys of tile
    // j + 2, and the copies are on their way of keys j + 4 and values j + 2. Tiles lie in rings of five, values j beside keys j + 2, so that
    // one offset tells what is read and another where copies go. Whether a tile's weights are good is acted on after the next barrier, where
    // waves wait anyway: if not, it is scored again, as the first tile is. Where Q is in LDS, registers do not suffice for scores within
    // that block: they are made of keys j + 1 before it, so that rings of four do, values j beside keys j + 1.
    //
    // Most passes copy whole tiles. These have a loop of their own, in which nothing asks where rows end.
    DEVICE void run_pipelined() {
        u32 outside = 1;
        int first_k = 0;
        k_at = kBytesK;
        const bool whole_group = !Q_IN_LDS || first_q + kBlockQ <= (int)p.seq_q;
        const int last_whole = whole_group ? (int)kept_value(seq_k() - (kLag + 3) * BLOCK_K) : -1;
#pragma unroll 1
        for (; first_k <= last_whole; first_k += BLOCK_K) {
            meet(first_k, outside);
            outside = pass<true>(first_k);
        }
#pragma unroll 1
        for (; true; first_k += BLOCK_K) {
            meet(first_k, outside);
            if (first_k + BLOCK_K >= seq_k()) break;
            outside = pass<false>(first_k);
        }
        copies_landed<0>();
        if constexpr (!Q_IN_LDS) k_at = next_place(k_at);
        accumulate_all(0);
    }
    DEVICE void meet(int first_k, u32 outside) {
        copies_landed<1>();
        barrier();  // also: what is overwritten from here on has been read by all
        if (outside != 0) score_again(first_k);
    }
    // The weights of the tile after the one at first_k; 1 if those of the wave are not good. If kWhole, all copied rows exist, and all queries
    // where Q is in LDS.
    template <bool kWhole> DEVICE u32 pass(int first_k) {
        if (Q_IN_LDS && (kWhole || has_queries())) score_ahead();
        if (!kWhole || MASK_KIND != kMaskNone) mask_scores(first_k + BLOCK_K);
        if constexpr (!Q_IN_LDS) k_at = next_place(k_at);
        const u32 outside = overlap<kWhole>(first_k);
        if constexpr (Q_IN_LDS) k_at = next_place(k_at);
        return outside;
    }
    // As `score`, with Q in LDS: what the next products read is asked for before those at hand.
    DEVICE void score_ahead() {
        typename Unit::B queries[2][Q_TILES];
        typename Unit::A keys[2][kWaveTilesK];
        const auto load = [&](int d) {
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i) keys[d % 2][i] = keys_of(i, d);
#pragma unroll
            for (int t = 0; t < Q_TILES; ++t) queries[d % 2][t] = d < kHeldD ? held_queries(t, d) : Unit::template tile_b<RowsQ>(q_tile(t), 0, d * 16);
        };
        clear_scores(0, kWaveTilesK);
        load(0);
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) {
            if (d + 1 < kTilesD) load(d + 1);
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i)
#pragma unroll
                for (int t = 0; t < Q_TILES; ++t) multiply_keys(keys[d % 2][i], queries[d % 2][t], d, s[t][i]);
        }
    }
    // In the rings, in bytes: the place after one, and the one before.
    static DEVICE u32 next_place(u32 at) { return at == (kBuffers - 1) * kBytesK ? 0 : at + kBytesK; }
    static DEVICE u32 last_place(u32 at) { return (at == 0 ? kBuffers * kBytesK : at) - kBytesK; }
    DEVICE bool has_queries() const { return query(0) < (int)p.seq_q; }
    DEVICE void prepare_rings() {
        if constexpr (kKeepsKeyPlaces) ring_keys.prepare(keys_in(0));
        ring_values.prepare(values_in(0));
    }
    // The tile before the one at k_at, then that one.
    DEVICE void score_again(int first_k) {
        const u32 next = k_at;
        k_at = last_place(k_at);
        score<kWaveTilesK>(0, 0);
        softmax<0>(first_k);
        k_at = next;
        if constexpr (!Q_IN_LDS) score<kWaveTilesK>(0, 0);
        settled = settled_base();
        large_base = MASK_KIND == kMaskNone && !base_is_small();
    }
    // Two groups of copies, before them one of Q and the first keys if kCopiesQueries; then one per tile.
    DEVICE void begin_pipeline() {
        copies.prepare(k, p.k_stride[1], v, p.v_stride[1], keys_in(0));
#pragma unroll
        for (int tile = 0; tile < kLag; ++tile) copies.begin_keys_alone(seq_k() - tile * BLOCK_K, kBytesK);
        if constexpr (kCopiesQueries) copies_begun();
        begin_values_and_keys(0);
        copies.move_keys(kBytesK), copies.move_values(kBytesK);
        begin_values_and_keys(1);
    }
    DEVICE void begin_queries() {
        if constexpr (kCopiesQueries) copy_tile<kBlockQ, HEAD_DIM, RowsQ, kThreads>((u16*)lds, query_rows(), p.q_stride[1], (int)p.seq_q - first_q);
    }
    template <int kPending> DEVICE void take_queries() {
        copies_landed<kPending>();
        barrier();
        if (p.flip != 0) flip_queries();
        begin_sums();
    }
    DEVICE void flip_queries() {
        Words<1>* const words = (Words<1>*)lds;
#pragma unroll 1
        for (int i = (int)thread_id(); i < kBlockQ * kLdQ / 2; i += kThreads) words[i].word[0] ^= p.flip;
        barrier();
    }
    DEVICE void begin_values_and_keys(int tile) {  // values of this one and keys kLag tiles later
        const int rows = seq_k() - tile * BLOCK_K, key_rows = rows - kLag * BLOCK_K;
        copies.template begin_keys<false>(key_rows), copies.template begin_values<false>(rows, key_rows), copies_begun();
    }
    // 1 if weights of the wave are not good.
    template <bool kWhole> DEVICE u32 overlap(int first_k) {
        Tallies tallies = {};
        const PerQuery base = kKeepsBase ? settled : settled_base();
        const int rows = seq_k() - first_k - 2 * BLOCK_K, key_rows = rows - kLag * BLOCK_K;
        const int further = k_at == (kBuffers - 2) * kBytesK ? -(kBuffers - 1) * kBytesK : kBytesK;
        const auto copy_keys = [&] { copies.move_keys(further), copies.template begin_keys<kWhole>(key_rows); };
        const auto copy_values = [&] { copies.move_values(further), copies.template begin_values<kWhole>(rows, key_rows); };
        if (Q_IN_LDS && !kWhole && !has_queries()) {
            copy_keys(), copy_values(), copies_begun();
            return 0;
        }
#pragma unroll
        for (int i = 0; i < kWaveTilesK; ++i) {
            if (i == 0) accumulate(0, 0);
            if (i + 1 < kWaveTilesK) accumulate(0, i + 1);
            if (i == 0) copy_keys();
            weigh(i, base, tallies);
            if (kCopiesFirst && i == 0) copy_values();
            if constexpr (!Q_IN_LDS) score<1>(i, 0);
            if (!kCopiesFirst && i == kWaveTilesK - 1) copy_values();
        }
        copies_begun();
#pragma unroll
        for (int t = 1; t < Q_TILES; ++t) tallies.of[0].join(tallies.of[t]);
        return any_lane((large_base | tallies.of[0].template outside<kMostBits>()) != 0);
    }

    DEVICE bool reaches(const u16* rows, i64 row_stride) const { return NearAddress::reaches<HEAD_DIM>(rows, row_stride, p.seq_k); }
};
