// Attention at a head_dim whose tiles come in parts, where copies to LDS pass no register (cp.async on NVIDIA): head_dim 512. Included
// by attention.hip, whose head explains the rest.
//
// Of a tile, a wave scores its own keys and sums its own columns of the output, so what it reads of K and V no other wave reads. It
// copies that for itself, part after part through a ring of its own: CHUNK_D columns of its keys, then CHUNK_K keys of its columns.
// While one part is read the next two are on their way, and their copies are begun between products. The group meets twice in a tile:
// before weights are stored, since those of the last tile must have been read, and before they are read; and where it looks for a
// maximum.
#pragma once

static_assert(kPartsAhead && Q_IN_LDS && WAVES_Q == 1 && kTilesD % WAVES_D == 0, "waves share all queries, and the columns evenly");

struct PartsAttention : Attention {
    static constexpr int kAhead = kBuffersPart - 1;
    static constexpr int kStepsD = CHUNK_D / 16, kStepsK = CHUNK_K / 16;
    static constexpr int kProducts = kStepsD * Q_TILES, kSums = kStepsK * kWaveTilesD;  // of a part of K, of V
    static constexpr int kShares = 4;  // in which a part is copied
    static_assert(kAhead < kChunksD && kAhead < kChunksK, "a tile has more parts than are on their way");
    static_assert(kProducts % kShares == 0 && kSums % kShares == 0 && kStepsK % 2 == 0, "shares and buffers must divide");
    static_assert(Unit::kSumsByProduct && Q_TILES <= kWaveTilesD, "weights are read between the products of one step");

    WaveCopies<kTileRowsK, CHUNK_D, RowsK> key_copies;
    WaveCopies<CHUNK_K, kTileColumnsV, RowsV> value_copies;
    u32 slot;  // of the part that is read
    // What the next products read of Q, or of P; it outlasts a part.
    typename Unit::B queries[2], weights[2][Q_TILES];

    DEVICE PartsAttention(const AttentionParams& params, unsigned char* memory) : Attention(params, memory) {}

    DEVICE int own_key() const { return wave_d * kTileRowsK; }
    DEVICE u16* part(u32 in) const { return (u16*)(lds + kOffsetK + (wave_d * kBuffersPart + in) * kBytesPart); }
    DEVICE u32 last_slot() const { return slot == 0 ? kBuffersPart - 1 : slot - 1; }

    DEVICE void run() {
        begin_copies();
        load_queries();
        barrier();  // Q is complete
#pragma unroll 1
        for (int first_k = 0; first_k < seq_k(); first_k += BLOCK_K) {
            score_tile(first_k);
            weigh_tile(first_k);
            barrier();  // P is complete
            sum_tile(first_k);
        }
        finish();
    }
    DEVICE void begin_copies() {
        key_copies.prepare(key_rows(own_key(), 0), p.k_stride[1]);
        value_copies.prepare(v + wave_d * kTileColumnsV, p.v_stride[1]);
#pragma unroll
        for (slot = 1; slot <= kAhead; ++slot) copy_keys(0, (int)slot - 1, 0, 1), copies_begun();
        slot = kAhead;
    }
    // One of `shares` of part `chunk` of a tile, of K or of V, to the slot that was read before this one. What is not whole, or not
    // aligned, goes there at once with the last share.
    DEVICE void copy_keys(int first_k, int chunk, int share, int shares) {
        const bool whole = p.aligned && seq_k() - first_k - own_key() >= kTileRowsK;
        key_copies.begin_share(part(last_slot()), whole, share, shares);
        if (share < shares - 1) return;
        key_copies.move(-kTileRowsK, CHUNK_D);
        if (!whole) copy_keys_at_once(last_slot(), first_k, chunk);
    }
    DEVICE void copy_keys_at_once(u32 to, int first_k, int chunk) {
        const int first = first_k + own_key();
        copy_rows<kTileRowsK, CHUNK_D, RowsK, WAVE_SIZE>(part(to), key_rows(first, chunk), p.k_stride[1], seq_k() - first, lane_id());
    }
    DEVICE void copy_values(int first_k, int chunk, int share, int shares) {
        const int first = first_k + chunk * CHUNK_K, rows = seq_k() - first;
        const bool whole = p.aligned && rows >= CHUNK_K;
        value_copies.begin_share(part(last_slot()), whole, share, shares);
        if (share < shares - 1 || whole) return;
        const u16* const from = value_rows(first) + wave_d * kTileColumnsV;
        copy_rows<CHUNK_K, kTileColumnsV, RowsV, WAVE_SIZE>(part(last_slot()), from, p.v_stride[1], rows, lane_id());
    }
    // Waits for the next part; what lay in the slot that is copied to then has been read by the wave.
    DEVICE void next_part() {
        copies_landed<kAhead - 1>();
        wave_sync();
        slot = slot == kBuffersPart - 1 ? 0 : slot + 1;
    }

    DEVICE void score_tile(int first_k) {
        clear_scores(0, kWaveTilesK);
        load_query(0, 0);
#pragma unroll 2
        for (int chunk = 0; chunk < kChunksD - kAhead; ++chunk) {
            next_part();
            score_part(chunk, [&](int share) { copy_keys(first_k, chunk + kAhead, share, kShares); });
            copies_begun();
        }
        key_copies.move(BLOCK_K, -HEAD_DIM);
#pragma unroll 1
        for (int ahead = 0; ahead < kAhead; ++ahead) {
            next_part();
            score_part(kChunksD - kAhead + ahead, [&](int share) { copy_values(first_k, ahead, share, kShares); });
            copies_begun();
        }
    }
    // S^T += K Q^T for one part. What a product reads is asked for before the product before it; shares are copied in between.
    template <typename F> DEVICE void score_part(int chunk, F copy) {
        typename Unit::A keys[2][kWaveTilesK];
        const auto load_keys = [&](int d) {
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i) keys[d % 2][i] = Unit::template tile_a<RowsK>(part(slot), i * 16, d * 16);
        };
        load_keys(0);
#pragma unroll
        for (int n = 0; n < kProducts; ++n) {
            const int d = n / Q_TILES, t = n % Q_TILES;
            if (n + 1 < kProducts || chunk + 1 < kChunksD) load_query(chunk, n + 1);
            if (t == Q_TILES - 1 && d + 1 < kStepsD) load_keys(d + 1);
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i) Unit::template multiply<16>(keys[d % 2][i], queries[n % 2], s[t][i]);
            if ((n + 1) % (kProducts / kShares) == 0) copy(n * kShares / kProducts);
        }
    }
    DEVICE void load_query(int chunk, int n) {
        queries[n % 2] = Unit::template tile_b<RowsQ>(q_tile(0), n % Q_TILES * 16, chunk * CHUNK_D + n / Q_TILES * 16);
    }

    // Weights with the base of the tile before; if one of any wave is not good, all score the tile again.
    DEVICE void weigh_tile(int first_k) {
        mask_scores(first_k);
        if (first_k == 0) rebase<0>(true);
        u32 outside = MASK_KIND == kMaskNone && !base_is_small();
        const Tallies tallies = weigh_all(settled_base());
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) outside |= tallies.of[t].template outside<kMostBits>();
        if (barrier_any(outside != 0)) {  // also: P has been read by all
            score_again(first_k);
            softmax<0>(first_k);
        }
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
            typename Unit::D sums = {};
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i) {
                Unit::template multiply<8>(Unit::ones(), p_fragment[t][i], sums);
                Unit::pieces(p_fragment[t][i], [&](int n, int key, auto part) {
                    *(decltype(part)*)RowsP::place(p_tile(t), n, own_key() + i * 16 + key) = part;
                });
            }
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) l[t][c] += sums.v[Unit::element_step(c)];
        }
    }
    // By way of the slot that was read last; the others have the first parts of V by now.
    DEVICE void score_again(int first_k) {
        clear_scores(0, kWaveTilesK);
        load_query(0, 0);
#pragma unroll 1
        for (int chunk = 0; chunk < kChunksD; ++chunk) {
            wave_sync();
            copy_keys_at_once(slot, first_k, chunk);
            wave_sync();
            score_part(chunk, [](int) {});
        }
    }

    DEVICE void sum_tile(int first_k) {
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) load_weights(0, 0, t);
#pragma unroll 2
        for (int chunk = 0; chunk < kChunksK - kAhead; ++chunk) {
            next_part();
            sum_part(chunk, [&](int share) { copy_values(first_k, chunk + kAhead, share, kShares); });
            copies_begun();
        }
#pragma unroll 1
        for (int ahead = 0; ahead < kAhead; ++ahead) {
            next_part();
            sum_part(kChunksK - kAhead + ahead, [&](int share) { copy_keys(first_k + BLOCK_K, ahead, share, kShares); });
            copies_begun();
        }
    }
    // O^T += V^T P^T for one part.
    template <typename F> DEVICE void sum_part(int chunk, F copy) {
        typename Unit::A values[2];
        const auto load_values = [&](int n) {
            values[n % 2] = Unit::template load_a_transposed<16, RowsV>(part(slot), n / kWaveTilesD * 16, n % kWaveTilesD * 16);
        };
        load_values(0);
#pragma unroll
        for (int n = 0; n < kSums; ++n) {
            const int i = n / kWaveTilesD, d = n % kWaveTilesD;
            if (n + 1 < kSums) load_values(n + 1);
            if (d < Q_TILES && (i + 1 < kStepsK || chunk + 1 < kChunksK)) load_weights(chunk, i + 1, d);
#pragma unroll
            for (int t = 0; t < Q_TILES; ++t) Unit::template multiply<16>(values[n % 2], weights[i % 2][t], o[t][d]);
            if ((n + 1) % (kSums / kShares) == 0) copy(n * kShares / kSums);
        }
    }
    DEVICE void load_weights(int chunk, int i, int t) {
        weights[i % 2][t] = Unit::template tile_b<RowsP>(p_tile(0), t * 16, chunk * CHUNK_K + i * 16);
    }
};
using Kernel = PartsAttention;
