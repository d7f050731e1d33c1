// Attention, forward: out = softmax(scale * q k^T + mask) v, never holding more than one tile of scores.
//
//   q (B, Sq, H, D), k and v (B, Sk, H, D)   fp16 or bf16, any 64-bit strides, last stride 1
//   mask (B, H, Sq, Sk)                      optional: bool, fp16, bf16 or float32, any strides (0 broadcasts)
//   out (B, Sq, H * D)                       contiguous, 16-byte aligned
//
// Online softmax (Milakov and Gimelshein 2018; Dao, FlashAttention-2, 2023) in base 2 and float32: for each tile of keys
//   m' = max(m, max_k s),  p = 2^(s - m'),  l = l 2^(m - m') + sum_k p,  o = o 2^(m - m') + p v,   at the end out = o / l.
//
// Tiling. A work-group takes BLOCK_Q queries of one head and walks over all keys, BLOCK_K at a time; K lies in LDS as it comes,
// V transposed. Both products are computed transposed, S^T = K Q^T and O^T = V^T P^T, so that a lane holds few queries (one on
// AMD): the softmax of a query is a reduction within the lane and over two to four lanes, and P^T is already, or nearly, in the
// layout in which the second product wants it. Waves are laid out as WAVES_Q (each with Q_TILES * 16 queries) x WAVES_D. For large
// head_dim the WAVES_D waves of a group share their queries: each scores its own part of the keys, P goes through LDS, and
// each sums its own part of the head dimension. At head_dim 512 the tiles come in parts, CHUNK_D columns of K and CHUNK_K keys of
// V at a time, through one buffer, which is what makes it fit 64 KiB.
//
// head_dim need not be a multiple of 16: q k^T runs over zero-padded columns (40 -> 48); V, O and all memory traffic have
// exactly head_dim columns, though a unit that only knows 16 rows idles in half of the last tile.
//
// Tried: on an NVIDIA H200, head_dim 40 and 64, 4096 keys, fetching the next tile of K and V into registers while this one is
// computed (AHEAD) and two tiles of queries per wave took 404 to 268 us and 670 to 472 us; zeroing the rows past the end when they
// are loaded instead of when they are stored undid it, since the load then has to be waited for. On AMD both cost registers.
//
// NaN and infinity propagate as in torch. A query whose keys are all masked gives zeros.
#include "common/mma.h"
#include "common/reduce.h"
#include "common/tile.h"

// BF16_HALVES, HEAD_DIM, MASK_KIND, WAVES_Q, WAVES_D, Q_TILES, BLOCK_K, Q_IN_LDS, CHUNK_D, CHUNK_K, AHEAD come as definitions
// (lib_rocm_sd/ops/attention_kernel.py).
enum MaskKind { kMaskNone, kMaskBool, kMaskF16, kMaskBF16, kMaskF32 };

struct AttentionParams {  // the same in attention_kernel.py
    const u16* q;
    const u16* k;
    const u16* v;
    u16* out;
    const void* mask;
    i64 q_stride[3], k_stride[3], v_stride[3];  // batch, seq, head; in elements
    i64 mask_stride[4];                         // batch, head, query, key; in elements
    u32 heads, seq_q, seq_k, q_blocks;
    float scale;  // times log2(e); above 0
    u32 flip;     // 0x80008000 where q is to be negated, which makes up for a negative scale
    u32 aligned;  // q, k and v may be read by 16-byte accesses
};

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif
using Unit = Mma<Half>;
constexpr int kElements = sizeof(typename Unit::D) / sizeof(float);

constexpr int kWaves = WAVES_Q * WAVES_D, kThreads = kWaves * WAVE_SIZE;
constexpr int kBlockQ = WAVES_Q * Q_TILES * 16;
constexpr int kPaddedD = round_up(HEAD_DIM, 16);
constexpr int kTilesD = kPaddedD / 16, kWaveTilesD = (kTilesD + WAVES_D - 1) / WAVES_D;
constexpr int kTilesK = BLOCK_K / 16, kWaveTilesK = kTilesK / WAVES_D;
constexpr bool kParts = CHUNK_D < kPaddedD || CHUNK_K < BLOCK_K;
constexpr bool kHalfTile = HEAD_DIM % 16 == 8, kRaggedD = kHalfTile || kTilesD % WAVES_D != 0;

// LDS, in bytes: Q if it stays there, then K and V^T (one after the other in time if kParts), then P and one float per wave and query.
constexpr int kLdQ = kPaddedD + kLdsPad, kLdK = CHUNK_D + kLdsPad, kLdV = CHUNK_K + kLdsPad, kLdP = BLOCK_K + kLdsPad;
constexpr int kBytesQ = kBlockQ * kLdQ * 2, kBytesK = BLOCK_K * kLdK * 2, kBytesV = HEAD_DIM * kLdV * 2;
constexpr int kOffsetKV = Q_IN_LDS ? kBytesQ : 0, kOffsetV = kOffsetKV + (kParts ? 0 : kBytesK);
constexpr int kBytesKV = kParts ? max2(kBytesK, kBytesV) : kBytesK + kBytesV;
constexpr int kOffsetP = Q_IN_LDS ? kOffsetKV + kBytesKV : max2(kBytesKV, kBytesQ);
constexpr int kOffsetStats = kOffsetP + (WAVES_D > 1 ? kBlockQ * kLdP * 2 : 0);
constexpr int kLdsBytes = kOffsetStats + (WAVES_D > 1 ? WAVES_D * kBlockQ * 4 : 0);

static_assert(HEAD_DIM % 8 == 0 && BLOCK_K % (16 * WAVES_D) == 0 && kPaddedD % CHUNK_D == 0 && BLOCK_K % CHUNK_K == 0, "tiles must divide");
static_assert(CHUNK_D == kPaddedD || kPaddedD == HEAD_DIM, "padded columns only in an only chunk");
static_assert(WAVES_D > 1 || CHUNK_K == BLOCK_K, "P in registers is not indexed by a chunk");
static_assert(CHUNK_D % 16 == 0 && CHUNK_K % 16 == 0, "a chunk is whole 16-wide tiles");
static_assert(kLdsBytes <= LDS_BYTES, "the tiles do not fit the LDS of this GPU");
EXPORT_LDS_BYTES(kLdsBytes)

struct Attention {
    const AttentionParams& p;
    unsigned char* lds;
    int batch, head, first_q, wave_q, wave_d;
    const u16 *k, *v;
    typename Unit::B q_fragment[Q_IN_LDS ? 1 : Q_TILES][Q_IN_LDS ? 1 : kTilesD];
    typename Unit::D s[Q_TILES][kWaveTilesK];
    typename Unit::B p_fragment[Q_TILES][kWaveTilesK];
    typename Unit::D o[Q_TILES][kWaveTilesD];
    float m[Q_TILES][Unit::kColumns], l[Q_TILES][Unit::kColumns];
    TileAhead<BLOCK_K, min2(CHUNK_D, HEAD_DIM), kLdK, kThreads> keys;
    TransposedTileAhead<CHUNK_K, HEAD_DIM, kLdV, kThreads> values;

    DEVICE Attention(const AttentionParams& params, unsigned char* memory) : p(params), lds(memory) {
        const u32 wave = wave_uniform(thread_id() / WAVE_SIZE), block = block_id();
        wave_q = (int)(wave / WAVES_D), wave_d = (int)(wave % WAVES_D);
        first_q = (int)(block % p.q_blocks) * kBlockQ;
        head = (int)(block / p.q_blocks % p.heads), batch = (int)(block / p.q_blocks / p.heads);
        k = p.k + batch * p.k_stride[0] + head * p.k_stride[2];
        v = p.v + batch * p.v_stride[0] + head * p.v_stride[2];
    }

    DEVICE u16* q_tile(int tile) const { return (u16*)lds + (wave_q * Q_TILES + tile) * 16 * kLdQ; }
    DEVICE u16* p_tile(int tile) const { return (u16*)(lds + kOffsetP) + (wave_q * Q_TILES + tile) * 16 * kLdP; }
    DEVICE u16* k_tiles() const { return (u16*)(lds + kOffsetKV); }
    DEVICE u16* v_tiles() const { return (u16*)(lds + kOffsetV); }
    // The float of a query that wave `from` of this group owns.
    DEVICE float* stat(int from, int tile, int c) const {
        return (float*)(lds + kOffsetStats) + from * kBlockQ + (wave_q * Q_TILES + tile) * 16 + Unit::column(c);
    }

    // Zeros in the columns after head_dim, once: no tile is written there. Without Q_IN_LDS, K takes the place of Q.
    DEVICE void clear_padding() {
        if constexpr (!kHalfTile) return;
        clear_columns<Q_IN_LDS ? kBlockQ : max2(kBlockQ, BLOCK_K), HEAD_DIM, kPaddedD, kLdQ, kThreads>((u16*)lds);
        if constexpr (Q_IN_LDS) clear_columns<BLOCK_K, HEAD_DIM, kPaddedD, kLdK, kThreads>(k_tiles());
    }

    DEVICE void load_queries() {
        const u16* q = p.q + batch * p.q_stride[0] + head * p.q_stride[2] + first_q * p.q_stride[1];
        const int rows = (int)p.seq_q - first_q;
        if (p.aligned) stage<kBlockQ, HEAD_DIM, kLdQ, kThreads, true>((u16*)lds, q, p.q_stride[1], rows, p.flip);
        else stage<kBlockQ, HEAD_DIM, kLdQ, kThreads, false>((u16*)lds, q, p.q_stride[1], rows, p.flip);
        clear_padding();
        if constexpr (!Q_IN_LDS) {
            barrier();
#pragma unroll
            for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
                for (int d = 0; d < kTilesD; ++d) q_fragment[t][d] = Unit::load_b(q_tile(t) + d * 16, kLdQ);
        }
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) m[t][c] = -infinity(), l[t][c] = 0.0f;
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d) o[t][d] = {};
        }
    }

    DEVICE const u16* key_rows(int first_k, int chunk) const { return k + first_k * p.k_stride[1] + chunk * CHUNK_D; }
    DEVICE const u16* value_rows(int first_k) const { return v + first_k * p.v_stride[1]; }

    DEVICE void stage_keys(int first_k, int chunk) {
        constexpr int kColumns = min2(CHUNK_D, HEAD_DIM);
        const int rows = (int)p.seq_k - first_k;
        const u16* from = key_rows(first_k, chunk);
        if (p.aligned) stage<BLOCK_K, kColumns, kLdK, kThreads, true>(k_tiles(), from, p.k_stride[1], rows);
        else stage<BLOCK_K, kColumns, kLdK, kThreads, false>(k_tiles(), from, p.k_stride[1], rows);
    }
    DEVICE void stage_values(int first_k) {
        const int rows = (int)p.seq_k - first_k;
        const u16* from = value_rows(first_k);
        if (p.aligned) stage_transposed<CHUNK_K, HEAD_DIM, kLdV, kThreads, true>(v_tiles(), from, p.v_stride[1], rows);
        else stage_transposed<CHUNK_K, HEAD_DIM, kLdV, kThreads, false>(v_tiles(), from, p.v_stride[1], rows);
    }
    DEVICE void fetch(int first_k) {
        const int rows = (int)p.seq_k - first_k;
        if (p.aligned) {
            keys.template fetch<true>(key_rows(first_k, 0), p.k_stride[1], rows);
            values.template fetch<true>(value_rows(first_k), p.v_stride[1], rows);
        } else {
            keys.template fetch<false>(key_rows(first_k, 0), p.k_stride[1], rows);
            values.template fetch<false>(value_rows(first_k), p.v_stride[1], rows);
        }
    }

    // S^T += K Q^T over one chunk of columns.
    DEVICE void score(int chunk) {
#pragma unroll
        for (int d = 0; d < CHUNK_D / 16; ++d) {
            typename Unit::B from_lds[Q_TILES];
            if constexpr (Q_IN_LDS)
#pragma unroll
                for (int t = 0; t < Q_TILES; ++t) from_lds[t] = Unit::load_b(q_tile(t) + chunk * CHUNK_D + d * 16, kLdQ);
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i) {
                const auto a = Unit::load_a(k_tiles() + (wave_d * kWaveTilesK + i) * 16 * kLdK + d * 16, kLdK, 15);
#pragma unroll
                for (int t = 0; t < Q_TILES; ++t) {
                    if constexpr (Q_IN_LDS) Unit::template multiply<16>(a, from_lds[t], s[t][i]);
                    else Unit::template multiply<16>(a, q_fragment[t][d], s[t][i]);
                }
            }
        }
    }

    // The mask's row for a query that this lane holds; rows past the end repeat the last.
    DEVICE i64 mask_row(int tile, int c) const {
        const int query = min2(first_q + (wave_q * Q_TILES + tile) * 16 + Unit::column(c), (int)p.seq_q - 1);
        return batch * p.mask_stride[0] + head * p.mask_stride[1] + query * p.mask_stride[2];
    }
    // A finite bias stays finite: the least float32, with which a query may be left no key, would be -infinity in base 2.
    static DEVICE float base_2(float bias) {
        return abs_f32(bias) > 2.3e38f ? bias : 1.44269504088896341f * bias;
    }
    DEVICE float mask_at(i64 i) const {
        if constexpr (MASK_KIND == kMaskBool) return ((const unsigned char*)p.mask)[i] ? 0.0f : -infinity();
        else if constexpr (MASK_KIND == kMaskF16) return 1.44269504088896341f * F16::to(((const u16*)p.mask)[i]);
        else if constexpr (MASK_KIND == kMaskBF16) return base_2(BF16::to(((const u16*)p.mask)[i]));
        else return base_2(((const float*)p.mask)[i]);
    }

    // With a mask, scores become base-2 logits here; without one, p.scale is part of the exponent's FMA. Keys past the end weigh
    // nothing.
    DEVICE void mask_scores(int first_k) {
        const bool tail = first_k + BLOCK_K > (int)p.seq_k;
        if constexpr (MASK_KIND == kMaskNone)
            if (!tail) return;
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
            i64 mask_rows[Unit::kColumns] = {};
            if constexpr (MASK_KIND != kMaskNone)
#pragma unroll
                for (int c = 0; c < Unit::kColumns; ++c) mask_rows[c] = mask_row(t, c);
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i)
#pragma unroll
                for (int e = 0; e < kElements; ++e) {
                    float& x = s[t][i].v[e];
                    const int key = first_k + (wave_d * kWaveTilesK + i) * 16 + Unit::row(e);
                    if constexpr (MASK_KIND != kMaskNone)
                        x = x * p.scale + mask_at(mask_rows[Unit::column_of(e)] + min2(key, (int)p.seq_k - 1) * p.mask_stride[3]);
                    if (tail) x = key < (int)p.seq_k ? x : -infinity();
                }
        }
    }

    // The largest score or logit of each of this lane's queries over the tile, over all waves that share the query.
    DEVICE void tile_max(float (&largest)[Q_TILES][Unit::kColumns]) {
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                float x = -infinity();
#pragma unroll
                for (int i = 0; i < kWaveTilesK; ++i)
#pragma unroll
                    for (int e = 0; e < kElements; ++e)
                        if (Unit::column_of(e) == c) x = max_f32(x, s[t][i].v[e]);
                largest[t][c] = column_max<Unit>(x);
                if constexpr (WAVES_D > 1)
                    if (Unit::first_of_column()) *stat(wave_d, t, c) = largest[t][c];
            }
        if constexpr (WAVES_D > 1) {
            barrier();
#pragma unroll
            for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
                for (int c = 0; c < Unit::kColumns; ++c)
#pragma unroll
                    for (int w = 0; w < WAVES_D; ++w) largest[t][c] = max_f32(largest[t][c], *stat(w, t, c));
        }
    }

    DEVICE void softmax(int first_k) {
        const float scale = MASK_KIND == kMaskNone ? p.scale : 1.0f;
        mask_scores(first_k);
        float largest[Q_TILES][Unit::kColumns];
        tile_max(largest);
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
            float base[Unit::kColumns], shrink[Unit::kColumns];
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                const float m_new = max_f32(m[t][c], largest[t][c] * scale);
                // With a mask, a query may not have met any key yet: any finite base gives p = 0 for it. Without one,
                // -inf - -inf = NaN is what torch gives too.
                base[c] = MASK_KIND != kMaskNone && m_new == -infinity() ? 0.0f : m_new;
                shrink[c] = exp2_fast(m[t][c] - base[c]);
                m[t][c] = m_new;
                l[t][c] *= shrink[c];
            }
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d)
#pragma unroll
                for (int e = 0; e < kElements; ++e) o[t][d].v[e] *= shrink[Unit::column_of(e)];
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i) {
#pragma unroll
                for (int e = 0; e < kElements; ++e) {
                    float& x = s[t][i].v[e];
                    x = exp2_fast(fma_f32(x, scale, -base[Unit::column_of(e)]));
                    l[t][Unit::column_of(e)] += x;
                }
                p_fragment[t][i] = Unit::pack(s[t][i]);
                s[t][i] = {};
                if constexpr (WAVES_D > 1) {
                    u16* tile = p_tile(t) + (wave_d * kWaveTilesK + i) * 16;
                    Unit::pieces(p_fragment[t][i], [&](int n, int key, auto part) { *(decltype(part)*)(tile + n * kLdP + key) = part; });
                }
            }
        }
    }

    // O^T += V^T P^T over one chunk of keys.
    DEVICE void accumulate(int chunk) {
#pragma unroll
        for (int i = 0; i < CHUNK_K / 16; ++i) {
            typename Unit::B weights[Q_TILES];
#pragma unroll
            for (int t = 0; t < Q_TILES; ++t) {
                if constexpr (WAVES_D > 1) weights[t] = Unit::load_b(p_tile(t) + (chunk * CHUNK_K + i * 16), kLdP);
                else weights[t] = p_fragment[t][i];
            }
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d) {
                const int first_d = (wave_d * kWaveTilesD + d) * 16;
                const int first_row = kRaggedD ? min2(first_d, HEAD_DIM - 1) : first_d;
                const auto a = Unit::load_a(v_tiles() + first_row * kLdV + i * 16, kLdV, kRaggedD ? HEAD_DIM - 1 - first_row : 15);
#pragma unroll
                for (int t = 0; t < Q_TILES; ++t) {
                    if (kHalfTile && WAVES_D == 1 && d == kTilesD - 1) Unit::template multiply<8>(a, weights[t], o[t][d]);
                    else Unit::template multiply<16>(a, weights[t], o[t][d]);
                }
            }
        }
    }

    DEVICE void finish() {
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                l[t][c] = column_sum<Unit>(l[t][c]);
                if constexpr (WAVES_D > 1)
                    if (Unit::first_of_column()) *stat(wave_d, t, c) = l[t][c];
            }
        if constexpr (WAVES_D > 1) barrier();
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
            float inverse[Unit::kColumns];
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                float sum = l[t][c];
                if constexpr (WAVES_D > 1) {
                    sum = 0.0f;
#pragma unroll
                    for (int w = 0; w < WAVES_D; ++w) sum += *stat(w, t, c);
                }
                inverse[c] = MASK_KIND != kMaskNone && sum == 0.0f ? 0.0f : 1.0f / sum;
            }
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d) {
#pragma unroll
                for (int e = 0; e < kElements; ++e) o[t][d].v[e] *= inverse[Unit::column_of(e)];
                const int tile_d = (wave_d * kWaveTilesD + d) * 16, tile_q = first_q + (wave_q * Q_TILES + t) * 16;
                Unit::pieces(Unit::pack(o[t][d]), [&](int n, int column, auto part) {
                    if (tile_q + n < (int)p.seq_q && tile_d + column < HEAD_DIM)
                        *(decltype(part)*)(p.out + (((i64)batch * p.seq_q + tile_q + n) * p.heads + head) * HEAD_DIM + tile_d + column) = part;
                });
            }
        }
    }

    // All of a tile of K and V lies in LDS. With AHEAD the next one is meanwhile on its way through registers.
    DEVICE void run_whole() {
        if constexpr (AHEAD) fetch(0);
#pragma unroll 1
        for (int first_k = 0; first_k < (int)p.seq_k; first_k += BLOCK_K) {
            barrier();  // what lay in LDS has been read by all
            if constexpr (AHEAD) {
                keys.store(k_tiles());
                values.store(v_tiles());
            } else {
                stage_keys(first_k, 0);
                stage_values(first_k);
            }
            barrier();
            if (AHEAD && first_k + BLOCK_K < (int)p.seq_k) fetch(first_k + BLOCK_K);
            score(0);
            softmax(first_k);
            if constexpr (WAVES_D > 1) barrier();  // P is complete
            accumulate(0);
        }
    }

    // A chunk of K or V lies in LDS at a time.
    DEVICE void run_in_parts() {
#pragma unroll 1
        for (int first_k = 0; first_k < (int)p.seq_k; first_k += BLOCK_K) {
#pragma unroll 1
            for (int chunk = 0; chunk < kPaddedD / CHUNK_D; ++chunk) {
                barrier();  // what lay in this part of LDS has been read by all
                stage_keys(first_k, chunk);
                barrier();
                score(chunk);
            }
            softmax(first_k);
#pragma unroll 1
            for (int chunk = 0; chunk < BLOCK_K / CHUNK_K; ++chunk) {
                barrier();  // K has been read, P is complete
                stage_values(first_k + chunk * CHUNK_K);
                barrier();
                accumulate(chunk);
            }
        }
    }

    DEVICE void run() {
        load_queries();
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i) s[t][i] = {};
        if constexpr (kParts) run_in_parts();
        else run_whole();
        finish();
    }
};

KERNEL(kThreads) attention_forward(AttentionParams p) {
    LDS(memory, kLdsBytes);
    Attention(p, memory).run();
}
