// Attention, forward: out = softmax(scale * q k^T + mask) v, never holding more than one tile of scores.
//
//   q (B, Sq, H, D), k and v (B, Sk, H, D)   fp16 or bf16, any 64-bit strides, last stride 1
//   mask (B, H, Sq, Sk)                      optional: bool, fp16, bf16 or float32, any strides (0 broadcasts);
//        (B)                                 with KEY_LENGTHS: int32, how many of the first keys count, at least one
//   out (B, Sq, H * D)                       contiguous, 16-byte aligned
//   lse (B, H, Sq)                           float32, with LEAVES_LSE: the log-sum-exp of each query's logits, in base 2, for
//                                            attention_backward.hip; 0 for a query whose keys are all masked, infinite beyond kLargestLse
//
// Online softmax (Milakov and Gimelshein 2018; Dao, FlashAttention-2, 2023) in base 2 and float32: for each tile of keys
//   p = 2^(scale s - m),  l = l + sum_k p,  o = o + p v,   at the end out = o / l.
// The base m need not be the largest score: any m will do with which p and its sums stay within what fp16 and float32 hold, and
// rounding p is relative. So m stays what it was, the largest score of the first tile, and no maximum is looked for, until a
// weight gets out of bounds: then the tile is scored again, m moved to its maximum, and l and o are scaled by 2^(m - m'). l sums
// what was rounded: a key with nearly all the weight then gives back v as it is.
//
// Tiling. A work-group takes BLOCK_Q queries of one head and walks over all keys, BLOCK_K at a time; K lies in LDS as it comes,
// V transposed, or as it comes where the unit transposes as it reads. Both products are computed transposed, S^T = K Q^T and O^T =
// V^T P^T, so that a lane holds few queries (one on AMD): what concerns a query stays within two to four lanes, and P^T is already,
// or nearly, in the layout in which the second product wants it. Waves are laid out as WAVES_Q (each with Q_TILES * 16 queries) x
// WAVES_D. For large head_dim the WAVES_D waves of a group share their queries: each scores its own part of the keys, P goes
// through LDS, and each sums its own part of the head dimension. At head_dim 512 the tiles come in parts, CHUNK_D columns of K and
// CHUNK_K keys of V at a time, through one buffer, which is what makes it fit 64 KiB.
//
// head_dim need not be a multiple of 16: q k^T runs over zero-padded columns (40 -> 48), or the last eight alone where the unit can;
// V, O and all memory traffic have exactly head_dim columns, though a unit that only knows 16 rows idles in half of the last tile.
//
// Work-groups with a rest of the queries come last. Parameters, tiles and softmax have their files, which this one includes: values, O
// and the loops stand here. Where copies to LDS pass no register, other loops take the place of the two here: nvidia/attention_copies.h
// with attention_rest.h, and attention_parts.h for tiles that come in parts.
//
// Measured on an NVIDIA H200 and tried in vain: docs/attention.md. For AMD only instructions were counted.
//
// NaN and infinity propagate as in torch. A query whose keys are all masked gives zeros.
#if defined(__clang_major__) && __clang_major__ < 16 && !defined(SIMT_SHIM)
#error "attention.hip needs LLVM 16 or newer: code that LLVM 15 made of it for gfx90a gave wrong results when it was executed"
#endif

#include "common/attention_softmax.h"

struct Attention : AttentionSoftmax {
    DEVICE Attention(const AttentionParams& params, unsigned char* memory) : AttentionSoftmax(params, memory) {}

    // O^T += V^T P^T for 16 keys of a chunk, and l if kSumsByProduct and no other wave takes part.
    DEVICE void accumulate(int chunk, int i) {
        typename Unit::B weights[Q_TILES];
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
            if constexpr (WAVES_D > 1) weights[t] = Unit::template tile_b<RowsP>(p_tile(t), 0, chunk * CHUNK_K + i * 16);
            else weights[t] = p_fragment[t][i];
        }
#pragma unroll
        for (int d = 0; d < kWaveTilesD; ++d) sum_columns(i, d, weights);
        if constexpr (Unit::kSumsByProduct && WAVES_D == 1) sum_rounded(Unit::ones(), weights);
    }
    DEVICE void sum_columns(int i, int d, const typename Unit::B (&weights)[Q_TILES]) {
        const int first_d = (wave_d * kWaveTilesD + d) * 16;
        const bool half_tile = kHalfTile && WAVES_D == 1 && d == kTilesD - 1;
        const auto a = values_of(i, first_d, half_tile);
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
            if (half_tile) Unit::template multiply<8>(a, weights[t], o[t][d]);
            else Unit::template multiply<16>(a, weights[t], o[t][d]);
        }
    }
    DEVICE void sum_rounded(const typename Unit::A& ones, const typename Unit::B (&weights)[Q_TILES]) {
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) Unit::template multiply<8>(ones, weights[t], total[t]);
    }
    DEVICE void accumulate_all(int chunk) {
#pragma unroll
        for (int i = 0; i < CHUNK_K / 16; ++i) accumulate(chunk, i);
    }
    // 16 columns of V, as rows, for 16 keys.
    DEVICE typename Unit::A values_of(int i, int first_d, bool half_tile) const {
        if constexpr (kPipelined) {
            if (half_tile) return ring_values.template load<8>(k_at, i * 16, first_d);
            return ring_values.template load<16>(k_at, i * 16, first_d);
        } else if constexpr (Unit::kTransposes) {
            if (half_tile) return Unit::template load_a_transposed<8, RowsV>(v_tiles(), i * 16, first_d);
            return Unit::template load_a_transposed<16, RowsV>(v_tiles(), i * 16, min2(first_d, kTileColumnsV - 16));
        } else {
            const int first_row = kRaggedD ? min2(first_d, HEAD_DIM - 1) : first_d;
            return Unit::load_a(v_tiles() + first_row * kLdV + i * 16, kLdV, kRaggedD ? HEAD_DIM - 1 - first_row : 15);
        }
    }

    // The sum of all weights of each of this lane's queries.
    DEVICE void sum_weights() {
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                l[t][c] = kPartsAhead ? l[t][c] : Unit::kSumsByProduct ? total[t].v[Unit::element_step(c)] : column_sum<Unit>(l[t][c]);
                if constexpr (WAVES_D > 1)
                    if (Unit::first_of_column()) *stat(wave_d, t, c) = l[t][c];
            }
        if constexpr (WAVES_D == 1) return;
        barrier();
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                l[t][c] = 0.0f;
#pragma unroll
                for (int w = 0; w < WAVES_D; ++w) l[t][c] += *stat(w, t, c);
            }
    }

    DEVICE void finish() {
        sum_weights();
        put_tiles<Q_TILES>(0);
    }
    // O of kTiles tiles: o[0], o[1], .. are the wave's tiles `first`, `first` + 1, ..
    template <int kTiles> DEVICE void put_tiles(int first) {
        u16* const rows = (u16*)kept_lds((unsigned char*)q_tile(0));
        if constexpr (kStagedOut) wave_sync();  // the wave has read its Q
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            if constexpr (LEAVES_LSE) put_lse(first + t, t);
            float inverse[Unit::kColumns];
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c)
                inverse[c] = MASK_KIND != kMaskNone && l[t][c] == 0.0f ? 0.0f : 1.0f / l[t][c];
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d) {
#pragma unroll
                for (int e = 0; e < kElements; ++e) o[t][d].v[e] *= inverse[Unit::column_of(e)];
                const int tile_d = (wave_d * kWaveTilesD + d) * 16;
                Unit::pieces(Unit::pack(o[t][d]), [&](int n, int column, auto part) {
                    if constexpr (kStagedOut) *(decltype(part)*)(rows + ((first + t) * 16 + n) * kLdQ + tile_d + column) = part;
                    else if (query(t) + n < (int)p.seq_q && tile_d + column < HEAD_DIM) *(decltype(part)*)(out_row(t, n) + tile_d + column) = part;
                });
            }
        }
        if constexpr (kStagedOut) write_rows<kTiles>(rows, first);
    }
    // Of the wave's tile `tile`, of which base and sum are the t-th.
    DEVICE void put_lse(int tile, int t) const {
        if (wave_d != 0 || !Unit::first_of_column()) return;
        float* const to = p.lse + ((u32)batch * p.heads + head) * p.seq_q;
#pragma unroll
        for (int c = 0; c < Unit::kColumns; ++c) {
            const int row = query(tile) + Unit::column(c);
            const float lse = m[t][c] * score_scale() + log2_fast(l[t][c]);
            if (row < (int)p.seq_q) to[row] = l[t][c] == 0.0f ? 0.0f : abs_f32(lse) > kLargestLse ? infinity() : lse;
        }
    }
    DEVICE int query(int tile) const { return first_q + (wave_q * Q_TILES + tile) * 16; }
    DEVICE u16* out_row(int tile, int n) const {
        const i64 first = ((i64)batch * p.seq_q + query(0)) * p.heads + head;  // the wave's
        return p.out + first * HEAD_DIM + (u64)(u32)(tile * 16 + n) * (p.heads * HEAD_DIM);
    }
    // Rows of O of some of the wave's tiles from LDS, where they took the place of its Q, by accesses of 16 bytes.
    template <int kTiles> DEVICE void write_rows(const u16* rows, int first_tile) const {
        constexpr int kChunks = HEAD_DIM / 8;
        u16* const first = out_row(0, 0);
        const u32 row_step = p.heads * HEAD_DIM;
        wave_sync();
#pragma unroll
        for (int t = first_tile; t < first_tile + kTiles; ++t)
#pragma unroll
            for (int i = lane_id(); i < 16 * kChunks; i += WAVE_SIZE) {
                const int n = i / kChunks, column = i % kChunks * 8;
                if (query(t) + n < (int)p.seq_q) *(Words<4>*)(first + (u32)(t * 16 + n) * row_step + column) = *(const Words<4>*)(rows + (t * 16 + n) * kLdQ + column);
            }
    }

    // All of a tile of K and V lies in LDS. With AHEAD the next one is meanwhile on its way through registers; after the last, the
    // last once more.
    DEVICE void run_whole() {
        constexpr bool kAhead = AHEAD && !kPipelined;
        if constexpr (kAhead) fetch_keys(0, 0), fetch_values(0);
#pragma unroll 1
        for (int first_k = 0; first_k < seq_k(); first_k += BLOCK_K) {
            if constexpr (!kAhead) fetch_keys(first_k, 0), fetch_values(first_k);
            barrier();  // what lay in LDS has been read by all
            keys.store(k_tiles());
            values.store(v_tiles());
            barrier();
            const int next_k = first_k + BLOCK_K < seq_k() ? first_k + BLOCK_K : first_k;
            if constexpr (kAhead) fetch_keys(next_k, 0), fetch_values(next_k);
            weigh_tile(first_k);
            if constexpr (WAVES_D > 1) barrier();  // P is complete
            accumulate_all(0);
        }
    }

    // A chunk of K or V lies in LDS at a time.
    DEVICE void run_in_parts() {
#pragma unroll 1
        for (int first_k = 0; first_k < seq_k(); first_k += BLOCK_K) {
            clear_scores(0, kWaveTilesK);
#pragma unroll 1
            for (int chunk = 0; chunk < kPaddedD / CHUNK_D; ++chunk) {
                fetch_keys(first_k, chunk);
                barrier();  // what lay in this part of LDS has been read by all
                keys.store(k_tiles());
                barrier();
                score<kWaveTilesK>(0, chunk);
            }
            softmax<kSlackBits>(first_k);
#pragma unroll 1
            for (int chunk = 0; chunk < BLOCK_K / CHUNK_K; ++chunk) {
                fetch_values(first_k + chunk * CHUNK_K);
                barrier();  // K has been read, P is complete
                values.store(v_tiles());
                barrier();
                accumulate_all(chunk);
            }
        }
    }

    DEVICE void run() {
        keys.place(p.k_stride[1]);
        values.place(p.v_stride[1]);
        load_queries();
        if constexpr (kParts) run_in_parts();
        else run_whole();
        finish();
    }
};

#if defined(MATRIX_UNIT_MMA_SM80) && !AMD_LOOPS
#include "nvidia/copies.h"
#endif
#if defined(MATRIX_UNIT_MMA_SM80) && !AMD_LOOPS && CHUNK_D >= HEAD_DIM
#include "nvidia/attention_copies.h"
#include "nvidia/attention_rest.h"
#elif defined(MATRIX_UNIT_MMA_SM80) && !AMD_LOOPS && AHEAD
#include "nvidia/attention_parts.h"
#else
using Kernel = Attention;
#endif

KERNEL(kThreads, MIN_GROUPS) attention_forward(AttentionParams p) {
    LDS(memory, kLdsBytes);
    Kernel(p, memory).run();
}
