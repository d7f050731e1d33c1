// Attention where copies to LDS pass no register (cp.async on NVIDIA): two ways to overlap them, and what is done with rows that they
// cannot read. Included by attention.hip, whose head explains the rest.
#pragma once

static_assert(!kParts, "attention_parts.h is for that");

struct CopyingAttention : Attention {
    // Forms of the pipeline, of several that were measured: ptxas gives each other registers, and some have none to spare.
    // Where places are kept the base is not.
    static constexpr bool kMixed = kKeepsPlaces && HEAD_DIM == 64 && Q_TILES == 2, kFewRegisters = kPipelined && HEAD_DIM == 40;
    static constexpr bool kCopiesFirst = HEAD_DIM == 64 || HEAD_DIM == 128;

    TileCopies<BLOCK_K, HEAD_DIM, RowsK, kThreads, kFewRegisters, kCopied> key_copies;
    TileCopies<CHUNK_K, HEAD_DIM, RowsV, kThreads, kFewRegisters, kCopied> value_copies;
    static_assert(!kPipelined || Unit::kSumsByProduct, "the pipeline adds no tallies");
    typename Unit::A ones;  // if kMixed
    PerQuery settled;  // settled_base() since the last time that it moved, if not kKeepsPlaces
    u32 large_base;    // whether it is too large for that

    DEVICE CopyingAttention(const AttentionParams& params, unsigned char* memory) : Attention(params, memory) {}

    // The next place in a ring of so many tiles, in bytes, and the one before.
    template <int kBuffers, int kBytes> static DEVICE u32 after(u32 at) { return at == (kBuffers - 1) * kBytes ? 0 : at + kBytes; }
    template <int kBuffers, int kBytes> static DEVICE u32 before(u32 at) { return (at == 0 ? kBuffers * kBytes : at) - kBytes; }

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
    // j + 2, and the copies are on their way of keys j + 4 and values j + 2. Tiles lie in rings of five and of three, or both of five:
    // then values j beside keys j + 2, so that one offset tells what is read and another where copies go. Whether a tile's weights are
    // good is asked after the next barrier, where waves wait anyway; if not, it is scored again, as the first tile is. Where Q is in LDS,
    // registers do not suffice for scores within that block: they are made of keys j + 1 before it.
    DEVICE void run_pipelined() {
        u32 outside = 1;
        k_at = kBytesK;
#pragma unroll 1
        for (int first_k = 0; true; first_k += BLOCK_K) {
            copies_landed<1>();
            barrier();  // also: what is overwritten from here on has been read by all
            if (any_lane(outside != 0)) score_again(first_k);
            const int next_k = first_k + BLOCK_K;
            if (next_k >= (int)p.seq_k) {
                copies_landed<0>();
                if constexpr (kEvenRings) k_at = next_keys();
                return accumulate_all(0);
            }
            if (Q_IN_LDS && has_queries()) score<kWaveTilesK>(0, 0);
            mask_scores(next_k);
            k_at = next_keys();
            outside = overlap(next_k);
            if constexpr (!kEvenRings) v_at = after<kBuffersV, kBytesV>(v_at);
        }
    }
    DEVICE void prepare_rings() {
        if constexpr (kMixed) {
            ones = Unit::ones();
            ones.w[0] = kept_value(ones.w[0]), ones.w[1] = kept_value(ones.w[1]);
        }
        if constexpr (kKeepsPlaces) ring_keys.prepare(keys_in(0)), ring_values.prepare(values_in(0));
    }
    DEVICE u32 next_keys() const { return after<kBuffersK, kBytesK>(k_at); }
    DEVICE bool has_queries() const { return query(0) < (int)p.seq_q; }
    // The tile before the one at k_at, then that one.
    DEVICE void score_again(int first_k) {
        const u32 next = k_at;
        k_at = before<kBuffersK, kBytesK>(k_at);
        score<kWaveTilesK>(0, 0);
        softmax<0>(first_k);
        k_at = next;
        if constexpr (!Q_IN_LDS) score<kWaveTilesK>(0, 0);
        settled = settled_base();
        large_base = MASK_KIND == kMaskNone && !base_is_small();
    }
    // Two groups of copies, then one per tile.
    DEVICE void begin_pipeline() {
        const auto keys = [&](int tile) { key_copies.begin(keys_in(tile), (int)p.seq_k - tile * BLOCK_K); };
        const auto values = [&](int tile) { value_copies.begin(values_in(kEvenRings ? tile + 2 : tile), (int)p.seq_k - tile * BLOCK_K); };
        keys(0), keys(1), keys(2), values(0), copies_begun();
        keys(3), values(1), copies_begun();
    }
    // 0 if this lane's weights are good.
    DEVICE u32 overlap(int first_k) {
        Tallies tallies = {};
        const PerQuery base = kKeepsPlaces ? settled_base() : settled;
        const int rows = (int)p.seq_k - first_k - BLOCK_K;
        const u32 to = k_at < (kBuffersK - 2) * kBytesK ? k_at + 2 * kBytesK : k_at - (kBuffersK - 2) * kBytesK;
        const auto copy_keys = [&] { key_copies.begin(keys_at(to), rows - 2 * BLOCK_K); };
        const auto copy_values = [&] { value_copies.begin(values_at(kEvenRings ? to : before<kBuffersV, kBytesV>(v_at)), rows); };
        if (Q_IN_LDS && !has_queries()) {
            copy_keys(), copy_values(), copies_begun();
            return 0;
        }
        if constexpr (kMixed) {
            mix(base, tallies, [&] { copy_keys(), copy_values(); });
        } else {
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i) {
                accumulate(0, i);
                weigh(i, base, tallies);
                if (i == 0) copy_keys();
                if (kCopiesFirst && i == 0) copy_values();
                if constexpr (!Q_IN_LDS) score<1>(i, 0);
                if (!kCopiesFirst && i == kWaveTilesK - 1) copy_values();
            }
        }
        copies_begun();
#pragma unroll
        for (int t = 1; t < Q_TILES; ++t) tallies.of[0].join(tallies.of[t]);
        return large_base | tallies.of[0].template outside<kMostBits>();
    }
    // The same in finer grains: first all values are summed, then all keys are scored, and between the products of a tile of keys a tile of
    // weights is computed, a word or so at a time. For two tiles of queries: there are twice as many tiles of weights as of keys.
    template <typename Copy> DEVICE void mix(const PerQuery& base, Tallies& tallies, Copy copy) {
        typename Unit::B weights[kWaveTilesK][Q_TILES];  // of the tile before
#pragma unroll
        for (int i = 0; i < kWaveTilesK; ++i)
#pragma unroll
            for (int t = 0; t < Q_TILES; ++t) weights[i][t] = p_fragment[t][i];
#pragma unroll
        for (int n = 0; n < 2 * kWaveTilesK; ++n) {
            const int i = n % kWaveTilesK;
            typename Unit::D scores[Q_TILES] = {};
            if (n == kWaveTilesK) copy();
#pragma unroll
            for (int d = 0; d < kTilesD; ++d) {
                if (n < kWaveTilesK) sum_columns(i, d, weights[i]);
                else add_scores(i, d, scores);
                weigh_words(n / Q_TILES, n % Q_TILES, d, base, tallies);
            }
            if (n < kWaveTilesK) sum_rounded(ones, weights[i]);
            else
#pragma unroll
                for (int t = 0; t < Q_TILES; ++t) s[t][i] = scores[t];
        }
    }
    DEVICE void add_scores(int i, int d, typename Unit::D (&scores)[Q_TILES]) {
        const auto a = keys_of(i, d);
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) multiply_keys(a, held_queries(t, d), d, scores[t]);
    }
    // The d-th share of what `weigh` does for one tile of queries.
    DEVICE void weigh_words(int i, int t, int d, const PerQuery& base, Tallies& tallies) {
        constexpr int kWords = kElements / 2;
#pragma unroll
        for (int j = kWords * d / kTilesD; j < kWords * (d + 1) / kTilesD; ++j) {
#pragma unroll
            for (int e = 2 * j; e < 2 * j + 2; ++e) weigh_one(t, i, e, base);
            p_fragment[t][i].w[j] = Unit::weight_word(s[t][i], j, tallies.of[t]);
        }
    }

    DEVICE void run() {
        keys.place(p.k_stride[1]);
        values.place(p.v_stride[1]);
        key_copies.prepare(k, p.k_stride[1]);
        value_copies.prepare(v, p.v_stride[1]);
        if constexpr (kCopied) return run_resident();
        if (p.aligned) begin_pipeline();
        load_queries();
        prepare_rings();
        if (p.aligned) run_pipelined();
        else run_whole();
        finish();
    }
};
using Kernel = CopyingAttention;
