// Attention, forward: out = softmax(scale * q k^T + mask) v, never holding more than one tile of scores.
//
//   q (B, Sq, H, D), k and v (B, Sk, H, D)   fp16 or bf16, any 64-bit strides, last stride 1
//   mask (B, H, Sq, Sk)                      optional: bool, fp16, bf16 or float32, any strides (0 broadcasts)
//   out (B, Sq, H * D)                       contiguous, 16-byte aligned
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
// Work-groups with a rest of the queries come last. Where copies to LDS pass no register, other loops take the place of the two here:
// common/attention_copies.h with attention_rest.h, and attention_parts.h for tiles that come in parts.
//
// Measured on an NVIDIA H200 and tried in vain: docs/attention.md. For AMD only instructions were counted.
//
// NaN and infinity propagate as in torch. A query whose keys are all masked gives zeros.
#include "common/mma.h"
#include "common/reduce.h"
#include "common/tile.h"

#if defined(__clang_major__) && __clang_major__ < 16 && !defined(SIMT_SHIM)
#error "attention.hip needs LLVM 16 or newer: code that LLVM 15 made of it for gfx90a gave wrong results when it was executed"
#endif

// BF16_HALVES, HEAD_DIM, MASK_KIND, WAVES_Q, WAVES_D, Q_TILES, BLOCK_K, Q_IN_LDS, CHUNK_D, CHUNK_K, AHEAD, MIN_GROUPS come as definitions
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
    u32 heads, seq_q, seq_k;
    u32 batch_heads;  // batch times heads
    float scale;  // times log2(e); above 0
    u32 flip;     // 0x80008000 where q is to be negated, which makes up for a negative scale
    u32 aligned;  // q, k and v may be read by 16-byte accesses
    u32 head_groups;  // work-groups of each head; if kCopied they may be fewer than tiles of queries
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
constexpr bool kPipelined = AHEAD && kCopiesAsync && !kParts, kPartsAhead = AHEAD && kCopiesAsync && kParts;
constexpr bool kCopied = kCopiesAsync && !AHEAD && !kParts;
constexpr int kBuffers = kPipelined ? (Q_IN_LDS ? 4 : 5) : 1, kBuffersPart = kPartsAhead ? 3 : 1;
constexpr int kTileRowsK = kPartsAhead ? kWaveTilesK * 16 : BLOCK_K, kTileColumnsV = kPartsAhead ? kWaveTilesD * 16 : kPaddedD;
constexpr int kChunksD = kPaddedD / CHUNK_D, kChunksK = BLOCK_K / CHUNK_K;
constexpr bool kHalfTile = HEAD_DIM % 16 == 8, kRaggedD = kHalfTile || kTilesD % WAVES_D != 0;

// LDS, in bytes: Q if it stays there, then K and V (one after the other in time if kParts; V transposed unless the unit transposes
// as it reads), in rings of tiles, or if kPartsAhead in a ring of parts for each wave, then P and one float per wave and query.
using RowsQ = LdsRows<kPaddedD, kPartsAhead>;
using RowsK = LdsRows<kCopiesAsync ? min2(CHUNK_D, HEAD_DIM) : CHUNK_D, kCopiesAsync>;
using RowsV = LdsRows<Unit::kTransposes ? min2(kTileColumnsV, HEAD_DIM) : CHUNK_K, kCopiesAsync>;
using RowsP = LdsRows<BLOCK_K, kPartsAhead>;
constexpr int kLdQ = RowsQ::kLd, kLdK = RowsK::kLd, kLdP = RowsP::kLd, kLdV = RowsV::kLd;
constexpr int kBytesQ = kBlockQ * kLdQ * 2, kBytesK = kTileRowsK * kLdK * 2, kBytesV = (Unit::kTransposes ? CHUNK_K : HEAD_DIM) * kLdV * 2;
// How many sixteens of Q's columns a wave holds in registers, from the first on: all, or where Q stays in LDS as many as registers suffice for.
constexpr int kHeldD = !Q_IN_LDS ? kTilesD : kPipelined && HEAD_DIM == 128 && Q_TILES == 2 && MASK_KIND == kMaskNone ? 3 : 0;
constexpr bool kOwnQ = Q_IN_LDS || kPipelined || kCopied, kStagedOut = kCopiesAsync && kOwnQ && WAVES_D == 1;
// Where in its ring of K this lane reads is kept where registers suffice, that of V in every pipeline.
constexpr bool kKeepsKeyPlaces = kPipelined && !Q_IN_LDS;
constexpr int kBytesPart = max2(kBytesK, kBytesV);
constexpr int kOffsetK = kOwnQ ? kBytesQ : 0, kOffsetV = kOffsetK + (kParts ? 0 : kBuffers * kBytesK);
constexpr int kEndKV = kParts ? kOffsetK + (kPartsAhead ? kWaves : 1) * kBuffersPart * kBytesPart : kOffsetV + kBuffers * kBytesV;
constexpr int kOffsetP = kOwnQ ? kEndKV : max2(kEndKV, kBytesQ);
constexpr int kOffsetStats = kOffsetP + (WAVES_D > 1 ? kBlockQ * kLdP * 2 : 0);
constexpr int kLdsBytes = kOffsetStats + (WAVES_D > 1 ? WAVES_D * kBlockQ * 4 : 0);

static_assert(HEAD_DIM % 8 == 0 && BLOCK_K % (16 * WAVES_D) == 0 && kPaddedD % CHUNK_D == 0 && BLOCK_K % CHUNK_K == 0, "tiles must divide");
static_assert(CHUNK_D == kPaddedD || kPaddedD == HEAD_DIM, "padded columns only in an only chunk");
static_assert(WAVES_D > 1 || CHUNK_K == BLOCK_K, "P in registers is not indexed by a chunk");
static_assert(!kPipelined || WAVES_D == 1, "the pipeline is for waves on their own");
static_assert(!kPipelined || kBytesK == kBytesV, "one offset serves both rings");
static_assert(CHUNK_D % 16 == 0 && CHUNK_K % 16 == 0, "a chunk is whole 16-wide tiles");
static_assert(kLdsBytes <= LDS_BYTES, "the tiles do not fit the LDS of this GPU");
static_assert(!kCopiesAsync || (kOffsetK | kOffsetV | kOffsetP | kBytesK | kBytesV | kBytesPart) % 128 == 0, "LdsRows counts on that");
EXPORT_LDS_BYTES(kLdsBytes)

// How far in bits the base of the weights may lag behind the largest score, and how large weights may become, or a lane's sum of
// them: 2^12, far from what fp16 can hold. Up to kMostBase, rounding a base to float32 changes a weight by less than rounding it to fp16.
constexpr int kSlackBits = 8, kMostBits = 12;
constexpr float kMostBase = 4096.0f;
constexpr float kLog2E = 1.44269504088896341f;

template <bool kTransposes> struct ValueTile {
    using Type = TransposedTile<CHUNK_K, HEAD_DIM, kLdV, kThreads>;
};
template <> struct ValueTile<true> {
    using Type = Tile<CHUNK_K, HEAD_DIM, RowsV, kThreads>;
};

struct PerQuery {
    float of[Q_TILES][Unit::kColumns];
};
struct Tallies {  // of a lane's weights over a tile
    typename Unit::Tally of[Q_TILES];
};

struct Attention {
    const AttentionParams& p;
    unsigned char* lds;
    int batch, head, first_q, wave_q, wave_d;
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
    DEVICE Attention(const AttentionParams& params, unsigned char* memory) : p(params), lds(kPartsAhead ? kept_address(memory) : kept_lds(memory)) {
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
    }

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

    // The mask's row for a query that this lane holds; rows past the end repeat the last.
    DEVICE i64 mask_row(int tile, int c) const {
        const int query = min2(first_q + (wave_q * Q_TILES + tile) * 16 + Unit::column(c), (int)p.seq_q - 1);
        return batch * p.mask_stride[0] + head * p.mask_stride[1] + query * p.mask_stride[2];
    }
    // A finite bias stays finite: the least float32, with which a query may be left no key, would be -infinity in base 2.
    static DEVICE float base_2(float bias) {
        return abs_f32(bias) > 2.3e38f ? bias : kLog2E * bias;
    }
    DEVICE float mask_at(i64 i) const {
        if constexpr (MASK_KIND == kMaskBool) return ((const unsigned char*)p.mask)[i] ? 0.0f : -infinity();
        else if constexpr (MASK_KIND == kMaskF16) return kLog2E * F16::to(((const u16*)p.mask)[i]);
        else if constexpr (MASK_KIND == kMaskBF16) return base_2(BF16::to(((const u16*)p.mask)[i]));
        else return base_2(((const float*)p.mask)[i]);
    }

    // With a mask, scores become base-2 logits here; without one, p.scale is part of the exponent's FMA. Keys past the end weigh
    // nothing.
    DEVICE void mask_scores(int first_k) {
        const bool tail = first_k + BLOCK_K > (int)p.seq_k;
        if constexpr (MASK_KIND == kMaskNone)
            if (!tail) return;
        first_k = (int)kept_here((u32)first_k);  // or the addresses of all elements would be kept between two passes
        const int past = (int)p.seq_k - first_k - Unit::lane_row();
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
                    const int key_in = (wave_d * kWaveTilesK + i) * 16 + Unit::row_step(e);
                    if constexpr (MASK_KIND != kMaskNone) {
                        const int key = min2(first_k + Unit::lane_row() + key_in, (int)p.seq_k - 1);
                        x = x * p.scale + mask_at(mask_rows[Unit::column_of(e)] + key * p.mask_stride[3]);
                    }
                    if (tail) x = key_in < past ? x : -infinity();
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

    // Without a mask, scores are scaled on their way into the exponent.
    DEVICE float score_scale() const { return MASK_KIND == kMaskNone ? p.scale : 1.0f; }
    // With a mask, a query may not have met any key yet: any finite base gives p = 0 for it. Without one, -inf - -inf = NaN is what
    // torch gives too.
    DEVICE float base(int t, int c) const { return MASK_KIND != kMaskNone && m[t][c] == -infinity() ? 0.0f : m[t][c]; }

    // Moves the base m of each query up to its largest score so far, or lets it lag by up to kSlack bits, with what was summed, if
    // anything was.
    template <int kSlack> DEVICE void rebase(bool summed) {
        float largest[Q_TILES][Unit::kColumns];
        tile_max(largest);
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
            bool lags = false;
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) lags = lags || !((largest[t][c] - m[t][c]) * score_scale() <= kSlack);
            if (!any_lane(lags)) continue;
            float shrink[Unit::kColumns];
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                const float before = m[t][c];
                m[t][c] = max_f32(before, largest[t][c]);
                if (kCopied && !summed) continue;
                shrink[c] = exp2_fast((before - base(t, c)) * score_scale());
                l[t][c] *= shrink[c];
            }
            if (kCopied && !summed) continue;
            scale_sums(t, shrink);
        }
    }
    // What was summed for a tile of queries, with weights of another base.
    DEVICE void scale_sums(int t, const float (&factor)[Unit::kColumns]) {
#pragma unroll
        for (int d = 0; d < kWaveTilesD; ++d)
#pragma unroll
            for (int e = 0; e < kElements; ++e) o[t][d].v[e] *= factor[Unit::column_of(e)];
        if constexpr (Unit::kSumsByProduct)
#pragma unroll
            for (int e = 0; e < kElements / 2; ++e) total[t].v[e] *= factor[Unit::column_of(e)];
    }

    // What is subtracted from the exponents of the weights. With a settled base, one FMA scales and subtracts; its product of base and
    // scale, which is rounded, must then be small: see `within_limits`. Else the base is subtracted from the scores themselves.
    DEVICE PerQuery settled_base() const {
        PerQuery x;
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) x.of[t][c] = m[t][c] * score_scale();
        return x;
    }
    DEVICE PerQuery subtract_base() {
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t)
#pragma unroll
            for (int i = 0; i < kWaveTilesK; ++i)
#pragma unroll
                for (int e = 0; e < kElements; ++e) s[t][i].v[e] -= base(t, Unit::column_of(e));
        return {};
    }

    // P = 2^(scale S - base) for one of the wave's tiles of keys.
    DEVICE void weigh(int i, const PerQuery& base, Tallies& tallies) {
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
#pragma unroll
            for (int e = 0; e < kElements; ++e) weigh_one(t, i, e, base);
            p_fragment[t][i] = Unit::weights(s[t][i], tallies.of[t]);
            if constexpr (WAVES_D > 1 && !kPartsAhead) {
                if constexpr (Unit::kSumsByProduct) Unit::template multiply<8>(Unit::ones(), p_fragment[t][i], total[t]);
                u16* tile = p_tile(t) + (wave_d * kWaveTilesK + i) * 16;
                Unit::pieces(p_fragment[t][i], [&](int n, int key, auto part) { *(decltype(part)*)(tile + n * kLdP + key) = part; });
            }
        }
    }
    DEVICE void weigh_one(int t, int i, int e, const PerQuery& base) {
        float& x = s[t][i].v[e];
        x = exp2_fast(fma_f32(x, score_scale(), -base.of[t][Unit::column_of(e)]));
    }
    DEVICE Tallies weigh_all(const PerQuery& base) {
        Tallies tallies = {};
#pragma unroll
        for (int i = 0; i < kWaveTilesK; ++i) weigh(i, base, tallies);
        return tallies;
    }
    DEVICE void add(const Tallies& tallies) {
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) tallies.of[t].add_to(l[t]);
    }
    // Whether the weights made with a settled base are good in all lanes. Not so where one is not a number, nor where no key was met.
    DEVICE bool within_limits(const Tallies& tallies) const {
        bool within = true;
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) {
            within = within && tallies.of[t].template within<kMostBits>();
            if constexpr (MASK_KIND == kMaskNone) within = within && base_is_small(t);
        }
        return !any_lane(!within);
    }
    DEVICE bool base_is_small(int t) const {
        bool small = true;
#pragma unroll
        for (int c = 0; c < Unit::kColumns; ++c) small = small && abs_f32(m[t][c] * score_scale()) <= kMostBase;
        return small;
    }
    DEVICE bool base_is_small() const {
        bool small = true;
#pragma unroll
        for (int t = 0; t < Q_TILES; ++t) small = small && base_is_small(t);
        return !any_lane(!small);
    }

    // From scores to weights, with a base that follows the scores.
    template <int kSlack> DEVICE void softmax(int first_k) {
        mask_scores(first_k);
        rebase<kSlack>(true);
        add(weigh_all(subtract_base()));
    }
    // Scores and weights of a whole tile. Where no other wave takes part, the base of the tile before does, as long as the weights
    // stay within limits: no maximum is looked for. Else the tile is scored again, by the same code: a copy of it took 2.5 moves
    // between registers for each pair on RDNA.
    DEVICE void weigh_tile(int first_k) {
        bool settled = WAVES_D == 1 && first_k > 0;
        Tallies tallies;
#pragma unroll 1
        while (true) {
            score<kWaveTilesK>(0, 0);
            mask_scores(first_k);
            PerQuery base = settled_base();
            if (!settled) {
                rebase<WAVES_D == 1 ? 0 : kSlackBits>(first_k > 0);
                base = kCopied && base_is_small() ? settled_base() : subtract_base();
            }
            tallies = weigh_all(base);
            if (!settled || within_limits(tallies)) break;
            settled = false;
        }
        add(tallies);
    }

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
        for (int first_k = 0; first_k < (int)p.seq_k; first_k += BLOCK_K) {
            if constexpr (!kAhead) fetch_keys(first_k, 0), fetch_values(first_k);
            barrier();  // what lay in LDS has been read by all
            keys.store(k_tiles());
            values.store(v_tiles());
            barrier();
            const int next_k = first_k + BLOCK_K < (int)p.seq_k ? first_k + BLOCK_K : first_k;
            if constexpr (kAhead) fetch_keys(next_k, 0), fetch_values(next_k);
            weigh_tile(first_k);
            if constexpr (WAVES_D > 1) barrier();  // P is complete
            accumulate_all(0);
        }
    }

    // A chunk of K or V lies in LDS at a time.
    DEVICE void run_in_parts() {
#pragma unroll 1
        for (int first_k = 0; first_k < (int)p.seq_k; first_k += BLOCK_K) {
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

#if defined(MATRIX_UNIT_MMA_SM80)
#include "common/copies.h"
#endif
#if defined(MATRIX_UNIT_MMA_SM80) && CHUNK_D >= HEAD_DIM
#include "common/attention_copies.h"
#include "common/attention_rest.h"
#elif defined(MATRIX_UNIT_MMA_SM80) && AHEAD
#include "common/attention_parts.h"
#else
using Kernel = Attention;
#endif

KERNEL(kThreads, MIN_GROUPS) attention_forward(AttentionParams p) {
    LDS(memory, kLdsBytes);
    Kernel(p, memory).run();
}
