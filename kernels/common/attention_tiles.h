// A work-group of attention.hip: which queries are its own, its tiles of Q, K and V, and their scores.
#pragma once
#include "attention_layout.h"

template <bool kTransposes> struct ValueTile {
    using Type = TransposedTile<CHUNK_K, HEAD_DIM, kLdV, kThreads>;
};
template <> struct ValueTile<true> {
    using Type = Tile<CHUNK_K, HEAD_DIM, RowsV, kThreads>;
};

struct AttentionTiles {
    const AttentionParams& p;
    unsigned char* lds;
    int batch, head, first_q, wave_q, wave_d;
    int length;  // if KEY_LENGTHS
    const u16 *k, *v;
    typename Unit::B q_fragment[kHeldD == 0 ? 1 : Q_TILES][max2(kHeldD, 1)];
    typename Unit::D s[Q_TILES][kWaveTilesK];
    typename Unit::B p_fragment[Q_TILES][kWaveTilesK];
    typename Unit::D o[Q_TILES][kWaveTilesD];
    float m[Q_TILES][Unit::kColumns], l[Q_TILES][Unit::kColumns];  // m as scores are before they are scaled
    typename Unit::D total[Q_TILES];                               // l, if kSumsByProduct and not kPartsAhead
    u32 k_at = 0;  // where in their rings lie the tiles that are read, in bytes
    typename Unit::template KeysInRing<RowsK> ring_keys;      // if kKeepsKeyPlaces
    typename Unit::template ValuesInRing<RowsV> ring_values;  // if kPipelined
    Tile<BLOCK_K, min2(CHUNK_D, HEAD_DIM), RowsK, kThreads> keys;
    typename ValueTile<Unit::kTransposes>::Type values;

    // (Told that they lie in LDS, parts of tiles get other registers, and some are spilled.)
    DEVICE AttentionTiles(const AttentionParams& params, unsigned char* memory)
        : p(params), lds(kPartsAhead ? kept_address(memory) : kept_lds(memory)) {
        const u32 wave = wave_uniform(thread_id() / WAVE_SIZE), block = block_id();
        wave_q = WAVES_Q == 1 ? 0 : (int)(wave / WAVES_D);  // a constant, where the compiler could not know it
        wave_d = (int)(wave % WAVES_D);
        u32 batch_head;
        if constexpr (kCopied) {
            batch_head = block / p.head_groups, first_q = (int)(block % p.head_groups) * kBlockQ;
        } else {  // first the groups with all their queries, then those with a rest of them: these end sooner
            const u32 whole = p.seq_q / kBlockQ, first_rest = whole * p.batch_heads;
            batch_head = block < first_rest ? block / whole : block - first_rest;
            first_q = (int)(block < first_rest ? block % whole : whole) * kBlockQ;
        }
        head = (int)(batch_head % p.heads), batch = (int)(batch_head / p.heads);
        k = p.k + batch * p.k_stride[0] + head * p.k_stride[2];
        v = p.v + batch * p.v_stride[0] + head * p.v_stride[2];
        if constexpr (KEY_LENGTHS) {
            const int given = ((const int*)p.mask)[batch * p.mask_stride[0]];
            length = min2(max2(given, 1), (int)p.seq_k);
        }
    }

    // How many keys this group's image has: tiles behind them are not read.
    DEVICE int seq_k() const { return KEY_LENGTHS ? length : (int)p.seq_k; }

    DEVICE u16* q_tile(int tile) const { return (u16*)lds + (wave_q * Q_TILES + tile) * 16 * kLdQ; }
    DEVICE u16* p_tile(int tile) const { return (u16*)(lds + kOffsetP) + (wave_q * Q_TILES + tile) * 16 * kLdP; }
    // By bytes in their rings, and by tiles.
    DEVICE u16* keys_at(u32 at) const { return (u16*)(lds + kOffsetK + at); }
    DEVICE u16* values_at(u32 at) const { return (u16*)(lds + kOffsetV + at); }
    DEVICE u16* keys_in(u32 slot) const { return keys_at(slot * (kParts ? kBytesPart : kBytesK)); }
    DEVICE u16* values_in(u32 slot) const { return values_at(slot * (kParts ? kBytesPart : kBytesV)); }
    DEVICE u16* k_tiles() const { return keys_at(k_at); }
    DEVICE u16* v_tiles() const { return values_at(k_at); }
    // The float of a query that wave `from` of this group owns.
    DEVICE float* stat(int from, int tile, int c) const {
        return (float*)(lds + kOffsetStats) + from * kBlockQ + (wave_q * Q_TILES + tile) * 16 + Unit::column(c);
    }

    // Zeros in the columns after head_dim that are read, once: no tile is written there. Without Q_IN_LDS, K takes the place of Q.
    DEVICE void clear_padding() {
        if constexpr (!kHalfTile || Unit::kSumsEight) return;
        clear_columns<kOwnQ ? kBlockQ : max2(kBlockQ, BLOCK_K), HEAD_DIM, kPaddedD, kLdQ, kThreads>((u16*)lds);
        if constexpr (kOwnQ)
#pragma unroll
            for (int slot = 0; slot < kBuffers; ++slot)
                clear_columns<BLOCK_K, HEAD_DIM, kPaddedD, kLdK, kThreads>(keys_in(slot));
    }

    DEVICE const u16* query_rows() const { return p.q + batch * p.q_stride[0] + head * p.q_stride[2] + first_q * p.q_stride[1]; }
    DEVICE void load_queries() {
        const u16* const q = query_rows();
        const int rows = (int)p.seq_q - first_q;
        Tile<kBlockQ, HEAD_DIM, RowsQ, kThreads> tile;
        tile.place(p.q_stride[1]);
        tile.fetch(q, p.q_stride[1], rows, p.aligned);
        tile.store((u16*)lds, p.flip);
        clear_padding();
        if constexpr (kHeldD > 0) barrier();
        begin_sums();
    }
    // Q lies in LDS.
    DEVICE void begin_sums() {
        if constexpr (kHeldD > 0) {
#pragma unroll
            for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
                for (int d = 0; d < kHeldD; ++d) q_fragment[t][d] = Unit::template tile_b<RowsQ>(q_tile(t), 0, d * 16);
        }
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) m[t][c] = -infinity(), l[t][c] = 0.0f;
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d) o[t][d] = {};
            total[t] = {};
        }
    }

    DEVICE const u16* key_rows(int first_k, int chunk) const { return k + first_k * p.k_stride[1] + chunk * CHUNK_D; }
    DEVICE const u16* value_rows(int first_k) const { return v + first_k * p.v_stride[1]; }

    DEVICE void fetch_keys(int first_k, int chunk) {
        keys.fetch(key_rows(first_k, chunk), p.k_stride[1], (int)p.seq_k - first_k, p.aligned);
    }
    DEVICE void fetch_values(int first_k) { values.fetch(value_rows(first_k), p.v_stride[1], (int)p.seq_k - first_k, p.aligned); }

    DEVICE void clear_scores(int first, int end) {
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
            for (int i = first; i < end; ++i) s[t][i] = {};
    }
    // S^T += K Q^T for kMany of the wave's tiles of keys and one chunk of columns; S begins at 0 where that is all columns.
    template <int kMany> DEVICE void score(int first, int chunk) {
        if constexpr (!kParts) clear_scores(first, first + kMany);
#pragma unroll
        for (int d = 0; d < CHUNK_D / 16; ++d) {
            typename Unit::B from_lds[Q_TILES];
            if constexpr (Q_IN_LDS)
#pragma unroll
                for (int t = 0; t < Q_TILES; ++t) from_lds[t] = Unit::template tile_b<RowsQ>(q_tile(t) + chunk * CHUNK_D, 0, d * 16);
#pragma unroll
            for (int i = first; i < first + kMany; ++i) {
                const auto a = keys_of(i, d);
#pragma unroll
                for (int t = 0; t < Q_TILES; ++t)
                    multiply_keys(a, Q_IN_LDS ? from_lds[t] : held_queries(t, d), d, s[t][i]);
            }
        }
    }
    // For d below kHeldD.
    DEVICE const typename Unit::B& held_queries(int t, int d) const { return q_fragment[kHeldD == 0 ? 0 : t][min2(d, max2(kHeldD, 1) - 1)]; }
    // 16 columns, or the last eight, of one of the wave's tiles of keys.
    static DEVICE bool only_eight(int d) { return Unit::kSumsEight && kHalfTile && d == kTilesD - 1; }
    DEVICE typename Unit::A keys_of(int i, int d) const {
        const int row = (wave_d * kWaveTilesK + i) * 16;
        if constexpr (kKeepsKeyPlaces) return only_eight(d) ? ring_keys.load_eight(k_at, row, d * 16) : ring_keys.load(k_at, row, d * 16);
        return only_eight(d) ? Unit::template load_a_eight<RowsK>(k_tiles(), row, d * 16) : Unit::template tile_a<RowsK>(k_tiles(), row, d * 16);
    }
    static DEVICE void multiply_keys(const typename Unit::A& keys, const typename Unit::B& queries, int d, typename Unit::D& scores) {
        if (only_eight(d)) Unit::multiply_eight(keys, queries, scores);
        else Unit::template multiply<16>(keys, queries, scores);
    }
};
