// What attention_backward.hip is compiled with and called with, what lies where in LDS, and the loads and products of its passes.
#pragma once
#include "mma.h"
#include "tile.h"

// BF16_HALVES, HEAD_DIM, MASK_KIND, PASS, WAVES_N, WAVES_D, N_TILES, M_TILES, BLOCK_M, HELD, AHEAD, UNROLL, MIN_GROUPS come as definitions
// (lib_rocm_sd/ops/attention_backward/kernel.py).
enum MaskKind { kMaskNone, kMaskBool, kMaskF16, kMaskBF16, kMaskF32 };
enum Pass { kQueries, kKeys };

struct BackwardParams {  // the same in kernel.py
    const u16* q;
    const u16* k;
    const u16* v;
    const u16* out;
    const u16* grad;
    const void* mask;
    const float* lse;  // (B, H, Sq), as delta: the log-sum-exp of each query's logits in base 2, as the forward pass left it
    float* delta;
    u16* q_grad;
    u16* k_grad;
    u16* v_grad;
    i64 q_stride[3], k_stride[3], v_stride[3], out_stride[3], grad_stride[3];  // batch, seq, head; in elements
    i64 mask_stride[4];                                                        // batch, head, query, key; in elements
    u32 heads, seq_q, seq_k;
    u32 tiles;            // work-groups of each head
    float scale, scale2;  // of scores, and the same times log2(e)
    u32 aligned;          // all but the mask may be read by 16-byte accesses
};

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif
using Unit = Mma<Half>;
constexpr int kElements = sizeof(typename Unit::D) / sizeof(float);
constexpr bool kKeysPass = PASS == kKeys;

constexpr int kThreads = WAVES_N * WAVES_D * WAVE_SIZE;
constexpr int kBlockN = WAVES_N * N_TILES * 16;
constexpr int kPaddedD = round_up(HEAD_DIM, 16);
constexpr int kTilesD = kPaddedD / 16, kWaveTilesD = (kTilesD + WAVES_D - 1) / WAVES_D;
constexpr bool kHalfTile = HEAD_DIM % 16 == 8, kRaggedD = kHalfTile || kTilesD % WAVES_D != 0;

#if defined(MATRIX_UNIT_MMA_SM80)
constexpr bool kBranches = true;  // around what only the last keys need
#else
constexpr bool kBranches = false;  // LLVM 19 spills around it on RDNA
#endif

// LDS, in bytes: other1 and other2 by rows and, where they are needed so, transposed; own1 and own2 unless both are HELD in registers,
// then these lie there first; then lse and -delta of the other rows, if these are queries, else delta of the own ones.
using RowsD = LdsRows<kPaddedD, false>;
using RowsM = LdsRows<BLOCK_M, false>;
constexpr bool kTurned1 = !Unit::kTransposes, kTurned2 = kKeysPass && !Unit::kTransposes;
constexpr int kBytesRows = BLOCK_M * RowsD::kLd * 2, kBytesTurned = HEAD_DIM * RowsM::kLd * 2, kBytesOwn = kBlockN * RowsD::kLd * 2;
constexpr int kOffsetTurned1 = kBytesRows, kOffsetRows2 = kOffsetTurned1 + (kTurned1 ? kBytesTurned : 0);
constexpr int kOffsetTurned2 = kOffsetRows2 + kBytesRows, kEndOther = kOffsetTurned2 + (kTurned2 ? kBytesTurned : 0);
constexpr bool kOwnStays = HELD != 3;
constexpr int kOffsetOwn = kOwnStays ? kEndOther : 0, kOffsetStats = max2(kEndOther, kOffsetOwn + 2 * kBytesOwn);
constexpr int kLdsBytes = kOffsetStats + (kKeysPass ? 2 * BLOCK_M : kBlockN) * 4;

static_assert(HEAD_DIM % 8 == 0 && BLOCK_M % (M_TILES * 16) == 0, "tiles must divide");
constexpr int kStats = (2 * BLOCK_M + kThreads - 1) / kThreads;  // numbers of queries that a work-item brings
static_assert(kBlockN * HEAD_DIM / 8 * 4 <= kOffsetStats, "what delta is summed of lies where tiles will");
static_assert(kLdsBytes <= LDS_BYTES, "the tiles do not fit the LDS of this GPU");
EXPORT_LDS_BYTES(kLdsBytes)

// lds[r][c] and turned[c][r] = tile[r][c]: one read from global memory for both.
struct BothWays : Fetched<InPairs<BLOCK_M, HEAD_DIM, kThreads>> {
    using Place = InPairs<BLOCK_M, HEAD_DIM, kThreads>;
    DEVICE void store(u16* rows, u16* turned) const {
#pragma unroll
        for (int j = 0; j < Place::Items::kRounds; ++j) {
            if (!Place::Items::has(j)) continue;
            const u32 i = Place::Items::item(j);
            const int row = Place::row(i), column = Place::column(i);
#pragma unroll
            for (int r = 0; r < 2; ++r) *(Words<4>*)(rows + (row + r) * RowsD::kLd + column) = this->part[j][r];
            u16* const to = turned + column * RowsM::kLd + row;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const u32 low = this->part[j][0].word[w], high = this->part[j][1].word[w];
                *(Words<1>*)(to + 2 * w * RowsM::kLd) = Words<1>{{low_halves(low, high)}};
                *(Words<1>*)(to + (2 * w + 1) * RowsM::kLd) = Words<1>{{high_halves(low, high)}};
            }
        }
    }
};
struct AsRows : Tile<BLOCK_M, HEAD_DIM, RowsD, kThreads> {
    DEVICE void store(u16* rows, u16*) const { Tile<BLOCK_M, HEAD_DIM, RowsD, kThreads>::store(rows); }
};
template <bool kBoth> struct OtherTile {
    using Type = AsRows;
};
template <> struct OtherTile<true> {
    using Type = BothWays;
};

struct BackwardTiles {
    const BackwardParams& p;
    unsigned char* lds;
    int batch, head, first_n, wave_n, wave_d;
    typename OtherTile<kTurned1>::Type other_1;
    typename OtherTile<kTurned2>::Type other_2;
    float stat_ahead[kStats] = {};  // on its way to LDS, as tiles are
    typename Unit::B own_1[N_TILES][kTilesD], own_2[N_TILES][kTilesD];  // if HELD

    DEVICE BackwardTiles(const BackwardParams& params, unsigned char* memory) : p(params), lds(kept_lds(memory)) {
        const u32 wave = wave_uniform(thread_id() / WAVE_SIZE), block = block_id(), batch_head = block / p.tiles;
        wave_n = (int)(wave / WAVES_D), wave_d = WAVES_D == 1 ? 0 : (int)(wave % WAVES_D);
        first_n = (int)(block % p.tiles) * kBlockN;
        head = (int)(batch_head % p.heads), batch = (int)(batch_head / p.heads);
    }

    DEVICE int own_length() const { return (int)(kKeysPass ? p.seq_k : p.seq_q); }
    DEVICE int other_length() const { return (int)(kKeysPass ? p.seq_q : p.seq_k); }
    DEVICE int own_row(int tile) const { return first_n + (wave_n * N_TILES + tile) * 16; }
    template <typename Strides> DEVICE const u16* row_of(const u16* tensor, const Strides& stride, int row) const {
        return tensor + batch * stride[0] + head * stride[2] + row * stride[1];
    }
    DEVICE const auto& stride_1(bool own) const { return own == kKeysPass ? p.k_stride : p.q_stride; }
    DEVICE const auto& stride_2(bool own) const { return own == kKeysPass ? p.v_stride : p.grad_stride; }
    DEVICE const u16* rows_1(bool own, int row) const { return row_of(own == kKeysPass ? p.k : p.q, stride_1(own), row); }
    DEVICE const u16* rows_2(bool own, int row) const { return row_of(own == kKeysPass ? p.v : p.grad, stride_2(own), row); }
    // The first of this head's queries; there are no more of them than work-items.
    template <typename T> DEVICE T* of_queries(T* sums) const { return sums + ((u32)batch * p.heads + head) * p.seq_q; }

    DEVICE u16* other_rows(int which) const { return (u16*)(lds + (which == 1 ? 0 : kOffsetRows2)); }
    DEVICE u16* other_turned(int which) const { return (u16*)(lds + (which == 1 ? kOffsetTurned1 : kOffsetTurned2)); }
    DEVICE u16* own_rows(int which) const { return (u16*)(lds + kOffsetOwn + (which - 1) * kBytesOwn); }
    DEVICE float* stats() const { return (float*)(lds + kOffsetStats); }

    // Own rows, rows past the last as zeros; and zeros in the columns after head_dim that are read, of all tiles.
    DEVICE void load_own() {
        const int rows = own_length() - first_n;
        Tile<kBlockN, HEAD_DIM, RowsD, kThreads> tile;
        tile.place(stride_1(true)[1]);
        tile.fetch(rows_1(true, first_n), stride_1(true)[1], rows, p.aligned);
        tile.store(own_rows(1));
        tile.place(stride_2(true)[1]);
        tile.fetch(rows_2(true, first_n), stride_2(true)[1], rows, p.aligned);
        tile.store(own_rows(2));
        clear_columns<2 * kBlockN, HEAD_DIM, kPaddedD, RowsD::kLd, kThreads>(own_rows(1));
        if constexpr (HELD != 0) hold_own();
        clear_columns<BLOCK_M, HEAD_DIM, kPaddedD, RowsD::kLd, kThreads>(other_rows(1));
        clear_columns<BLOCK_M, HEAD_DIM, kPaddedD, RowsD::kLd, kThreads>(other_rows(2));
        other_1.place(stride_1(false)[1]);
        other_2.place(stride_2(false)[1]);
    }
    DEVICE void hold_own() {
        barrier();
#pragma unroll
        for (int t = 0; t < N_TILES; ++t)
#pragma unroll
            for (int d = 0; d < kTilesD; ++d) {
                if constexpr (HELD & 1) own_1[t][d] = own_in_lds(1, t, d);
                if constexpr (HELD & 2) own_2[t][d] = own_in_lds(2, t, d);
            }
        if constexpr (!kOwnStays) barrier();  // other tiles take the place
    }
    DEVICE typename Unit::B own_in_lds(int which, int t, int d) const {
        return Unit::template tile_b<RowsD>(own_rows(which) + (wave_n * N_TILES + t) * 16 * RowsD::kLd, 0, d * 16);
    }

    DEVICE void fetch(int first_m) {
        const int rows = other_length() - first_m;
        other_1.fetch(rows_1(false, first_m), stride_1(false)[1], rows, p.aligned);
        other_2.fetch(rows_2(false, first_m), stride_2(false)[1], rows, p.aligned);
        if constexpr (kKeysPass)
#pragma unroll
            for (int j = 0; j < kStats; ++j) {
                const int i = j * kThreads + (int)thread_id();
                stat_ahead[j] = of_queries<const float>(i < BLOCK_M ? p.lse : p.delta)[first_m + min2(i % BLOCK_M, rows - 1)];
            }
    }
    // What was fetched.
    DEVICE void store(int first_m) {
        other_1.store(other_rows(1), other_turned(1));
        other_2.store(other_rows(2), other_turned(2));
        if constexpr (kKeysPass)
#pragma unroll
            for (int j = 0; j < kStats; ++j) {  // a query past the end weighs nothing
                const int i = j * kThreads + (int)thread_id();
                const bool exists = i % BLOCK_M < other_length() - first_m;
                if (i < BLOCK_M) stats()[i] = exists ? stat_ahead[j] : infinity();
                else if (i < 2 * BLOCK_M) stats()[i] = exists ? -stat_ahead[j] : 0.0f;
            }
    }

    // x[i][t] += other own^T for the i-th sixteen other rows, from `row` of those in LDS on, and all own rows of the wave.
    template <int kWhich> DEVICE void multiply_rows(int row, typename Unit::D (&x)[M_TILES][N_TILES]) const {
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) {
            const bool eight = Unit::kSumsEight && kHalfTile && d == kTilesD - 1;
            const u16* const rows = other_rows(kWhich);
            typename Unit::B own[N_TILES];
            if constexpr (HEAD_DIM > 128) one_by_one();  // or LLVM reads more ahead than registers hold
#pragma unroll
            for (int t = 0; t < N_TILES; ++t) own[t] = HELD & kWhich ? held<kWhich>(t, d) : own_in_lds(kWhich, t, d);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
                const int at = row + i * 16;
                const auto a = eight ? Unit::template load_a_eight<RowsD>(rows, at, d * 16) : Unit::template tile_a<RowsD>(rows, at, d * 16);
#pragma unroll
                for (int t = 0; t < N_TILES; ++t) {
                    if (eight) Unit::multiply_eight(a, own[t], x[i][t]);
                    else Unit::template multiply<16>(a, own[t], x[i][t]);
                }
            }
        }
    }
    template <int kWhich> DEVICE const typename Unit::B& held(int t, int d) const {
        return kWhich == 1 ? own_1[t][d] : own_2[t][d];
    }
    // Sixteen columns of other rows, as rows, from `row` of those in LDS.
    template <int kWhich> DEVICE typename Unit::A transposed(int row, int first_d, bool half_tile) const {
        if constexpr (Unit::kTransposes) {
            if (half_tile) return Unit::template load_a_transposed<8, RowsD>(other_rows(kWhich), row, first_d);
            return Unit::template load_a_transposed<16, RowsD>(other_rows(kWhich), row, min2(first_d, kPaddedD - 16));
        } else {
            const int first_row = kRaggedD ? min2(first_d, HEAD_DIM - 1) : first_d;
            return Unit::load_a(other_turned(kWhich) + first_row * RowsM::kLd + row, RowsM::kLd, kRaggedD ? HEAD_DIM - 1 - first_row : 15);
        }
    }

    // A finite bias stays finite: the least float32, with which a query may be left no key, would be -infinity in base 2.
    static DEVICE float base_2(float bias) { return abs_f32(bias) > 2.3e38f ? bias : 1.44269504088896341f * bias; }
    DEVICE float mask_at(i64 i) const {
        if constexpr (MASK_KIND == kMaskBool) return ((const unsigned char*)p.mask)[i] ? 0.0f : -infinity();
        else if constexpr (MASK_KIND == kMaskF16) return base_2(F16::to(((const u16*)p.mask)[i]));
        else if constexpr (MASK_KIND == kMaskBF16) return base_2(BF16::to(((const u16*)p.mask)[i]));
        else return base_2(((const float*)p.mask)[i]);
    }
    // The logit in base 2, less `lse` in base 2, of a score in element e of a tile of own rows.
    DEVICE float logit(float score, int t, int e, int other, float lse) const {
        if constexpr (MASK_KIND == kMaskNone) {
            return fma_f32(score, p.scale2, -lse);
        } else {
            const int own = min2(own_row(t) + Unit::column(Unit::column_of(e)), own_length() - 1), last = min2(other, other_length() - 1);
            const int query = kKeysPass ? last : own, key = kKeysPass ? own : last;
            const float bias = mask_at(batch * p.mask_stride[0] + head * p.mask_stride[1] + query * p.mask_stride[2] + key * p.mask_stride[3]);
            return fma_f32(score, p.scale2, bias) - lse;
        }
    }
};
