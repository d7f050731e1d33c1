// Attention, backward: what out = softmax(scale * q k^T + mask) v makes of a gradient g of out.
//
//   q, out, g (B, Sq, H, D), k and v (B, Sk, H, D)   fp16 or bf16, any 64-bit strides, last stride 1
//   mask (B, H, Sq, Sk)                              optional: bool, fp16, bf16 or float32, any strides (0 broadcasts)
//   q_grad, k_grad, v_grad                           contiguous, 16-byte aligned; a mask gets no gradient
//
// With s = scale q k^T + mask, p = softmax(s), and for each query delta = sum_d g out = sum_k p (g v^T):
//   v_grad = p^T g,   ds = p (g v^T - delta),   q_grad = scale ds k,   k_grad = scale ds^T q
// (Dao, FlashAttention-2, 2023). No p is kept from the forward pass: it is 2^(s log2(e) - lse) with the query's log-sum-exp, lse (B, H, Sq),
// which that pass left (LEAVES_LSE in attention.hip).
//
// Two launches, PASS says which: kQueries makes q_grad, a work-group for a tile of queries, which walks over all keys, and leaves delta;
// kKeys makes k_grad and v_grad, a work-group for a tile of keys, which walks over all queries. Each gradient is summed by one
// work-group in one order: no atomics, the same bits every time. Scores are computed in both, seven products in all where one
// launch with atomics would need five.
//
// Both are one loop. `Own` rows are the work-group's, `other` rows those it walks over, BLOCK_M at a time:
//   S = other1 own1^T, dP = other2 own2^T    with a column of D for each own row, so P and dS are, or nearly, the B of what follows
//   own1_grad^T += other1^T dS               and in kKeys own2_grad^T += other2^T P
// In kKeys own is (k, v) and other (q, g); in kQueries own is (q, g) and other (k, v). other1 and other2 lie in LDS as they come, and
// transposed beside it unless the unit transposes as it reads. Waves are WAVES_N (each with N_TILES * 16 own rows, and M_TILES * 16
// other rows at once) x WAVES_D: those of one group of WAVES_D make the same scores, and each sums its own part of head_dim. Of own1
// and own2 those in HELD (1, 2 or both) stay in registers. UNROLL: how many tiles of other rows are one stretch of code.
//
// A query whose keys are all masked weighs nothing and gets zeros. Measured on NVIDIA and tried in vain: docs/attention.md.
#if defined(__clang_major__) && __clang_major__ < 16 && !defined(SIMT_SHIM)
#error "attention_backward.hip needs LLVM 16 or newer, as attention.hip does"
#endif

#include "common/attention_backward.h"

struct AttentionBackward : BackwardTiles {
    typename Unit::D grad_1[N_TILES][kWaveTilesD], grad_2[N_TILES][kWaveTilesD];  // the second in kKeys only
    float lse[N_TILES][Unit::kColumns], delta[N_TILES][Unit::kColumns];           // of this lane's queries in kQueries

    DEVICE AttentionBackward(const BackwardParams& params, unsigned char* memory) : BackwardTiles(params, memory) {}

    DEVICE void clear() {
#pragma unroll
        for (int t = 0; t < N_TILES; ++t)
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d) {
                grad_1[t][d] = {};
                if constexpr (kKeysPass) grad_2[t][d] = {};
            }
    }

    // From scores to p, and from dp, in kKeys less delta already, to ds, for the tile of other rows that begins at `row` of those in LDS.
    DEVICE void weigh(int first_m, int row, typename Unit::D (&s)[M_TILES][N_TILES], typename Unit::D (&dp)[M_TILES][N_TILES]) {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int t = 0; t < N_TILES; ++t)
#pragma unroll
                for (int e = 0; e < kElements; ++e) {
                    const int m = row + i * 16 + Unit::lane_row() + Unit::row_step(e);
                    s[i][t].v[e] = logit(s[i][t].v[e], t, e, first_m + m, kKeysPass ? stats()[m] : lse[t][Unit::column_of(e)]);
                }
        if constexpr (!kKeysPass)
            if (!kBranches || first_m + BLOCK_M > other_length()) leave_out(first_m + row, s);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int t = 0; t < N_TILES; ++t)
#pragma unroll
                for (int e = 0; e < kElements; ++e) {
                    const float weight = exp2_fast(s[i][t].v[e]);
                    s[i][t].v[e] = weight;
                    dp[i][t].v[e] = weight * (kKeysPass ? dp[i][t].v[e] : dp[i][t].v[e] - delta[t][Unit::column_of(e)]);
                }
    }
    // -infinity for keys past the end. (A query past the end has an infinite lse.)
    DEVICE void leave_out(int first_m, typename Unit::D (&x)[M_TILES][N_TILES]) const {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int t = 0; t < N_TILES; ++t)
#pragma unroll
                for (int e = 0; e < kElements; ++e) {
                    const int m = first_m + i * 16 + Unit::lane_row() + Unit::row_step(e);
                    if (m >= other_length()) x[i][t].v[e] = -infinity();
                }
    }
    // What a product is added to: dp begins at -delta where delta is the row's.
    DEVICE void begin(int row, typename Unit::D (&s)[M_TILES][N_TILES], typename Unit::D (&dp)[M_TILES][N_TILES]) const {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int t = 0; t < N_TILES; ++t) {
                s[i][t] = {}, dp[i][t] = {};
                if constexpr (kKeysPass)
#pragma unroll
                    for (int e = 0; e < kElements; ++e)
                        dp[i][t].v[e] = stats()[BLOCK_M + row + i * 16 + Unit::lane_row() + Unit::row_step(e)];
            }
    }
    // sum += other^T x for sixteen other rows, from `row` of those in LDS, and this wave's part of head_dim.
    template <int kWhich> DEVICE void sum_up(int row, const typename Unit::B (&x)[N_TILES], typename Unit::D (&sum)[N_TILES][kWaveTilesD]) const {
#pragma unroll
        for (int d = 0; d < kWaveTilesD; ++d) {
            const int first_d = (wave_d * kWaveTilesD + d) * 16;
            const bool half_tile = kHalfTile && WAVES_D == 1 && d == kTilesD - 1;
            const auto a = transposed<kWhich>(row, first_d, half_tile);
#pragma unroll
            for (int t = 0; t < N_TILES; ++t) {
                if (half_tile) Unit::template multiply<8>(a, x[t], sum[t][d]);
                else Unit::template multiply<16>(a, x[t], sum[t][d]);
            }
        }
    }
    // M_TILES sixteens of the other rows in LDS.
    DEVICE void walk(int first_m, int row) {
        typename Unit::D s[M_TILES][N_TILES], dp[M_TILES][N_TILES];
        typename Unit::B p_half[M_TILES][N_TILES], ds_half[M_TILES][N_TILES];
        begin(row, s, dp);
        multiply_rows<1>(row, s);
        multiply_rows<2>(row, dp);
        weigh(first_m, row, s, dp);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int t = 0; t < N_TILES; ++t) {
                if constexpr (kKeysPass) p_half[i][t] = Unit::pack(s[i][t]);
                ds_half[i][t] = Unit::pack(dp[i][t]);
            }
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            if constexpr (kKeysPass) sum_up<2>(row + i * 16, p_half[i], grad_2);
            sum_up<1>(row + i * 16, ds_half[i], grad_1);
        }
    }

    DEVICE void put(u16* to, const typename Unit::D (&of)[N_TILES][kWaveTilesD], float factor) const {
#pragma unroll
        for (int t = 0; t < N_TILES; ++t)
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d) {
                typename Unit::D scaled = of[t][d];
#pragma unroll
                for (int e = 0; e < kElements; ++e) scaled.v[e] *= factor;
                const int tile_d = (wave_d * kWaveTilesD + d) * 16;
                Unit::pieces(Unit::pack(scaled), [&](int n, int column, auto part) {
                    const int row = own_row(t) + n;
                    if (row < own_length() && tile_d + column < HEAD_DIM)
                        *(decltype(part)*)(to + (i64)((u32)batch * own_length() + row) * (p.heads * HEAD_DIM) + head * HEAD_DIM + tile_d + column) = part;
                });
            }
    }

    DEVICE void finish() {
        put(kKeysPass ? p.k_grad : p.q_grad, grad_1, p.scale);
        if constexpr (kKeysPass) put(p.v_grad, grad_2, 1.0f);
    }

    // delta, of eights of g and out, whose products' sums meet in LDS: consecutive lanes along a row.
    template <bool kAligned> DEVICE void make_delta() {
        constexpr int kChunks = HEAD_DIM / 8;
        float* const parts = (float*)lds;
        const int rows = own_length() - first_n;
        for (int i = (int)thread_id(); i < kBlockN * kChunks; i += kThreads) {
            const int row = first_n + min2(i / kChunks, rows - 1), column = i % kChunks * 8;
            const Words<4> a = load_eight<kAligned>(row_of(p.grad, p.grad_stride, row) + column);
            const Words<4> b = load_eight<kAligned>(row_of(p.out, p.out_stride, row) + column);
            float x = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                x = fma_f32(Half::to((u16)a.word[w]), Half::to((u16)b.word[w]), x);
                x = fma_f32(Half::to((u16)(a.word[w] >> 16)), Half::to((u16)(b.word[w] >> 16)), x);
            }
            parts[i] = x;
        }
        barrier();
        for (int i = (int)thread_id(); i < kBlockN; i += kThreads) {
            float x = 0.0f;
            for (int c = 0; c < kChunks; ++c) x += parts[i * kChunks + c];
            if (i < rows) of_queries(p.delta)[first_n + i] = x;
            stats()[i] = x;
        }
        barrier();
#pragma unroll
        for (int t = 0; t < N_TILES; ++t)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                delta[t][c] = stats()[(wave_n * N_TILES + t) * 16 + Unit::column(c)];
                lse[t][c] = of_queries(p.lse)[min2(own_row(t) + Unit::column(c), own_length() - 1)];
            }
    }

    DEVICE void run() {
        if constexpr (!kKeysPass) {
            if (p.aligned) make_delta<true>();
            else make_delta<false>();
        }
        load_own();
        clear();
        if constexpr (AHEAD) fetch(0);
        int first_m = 0;
        do {  // there is at least one
            if constexpr (!AHEAD) fetch(first_m);
            barrier();  // what lay in LDS has been read by all
            store(first_m);
            barrier();
            if constexpr (AHEAD) fetch(first_m + BLOCK_M < other_length() ? first_m + BLOCK_M : first_m);
#pragma unroll UNROLL
            for (int row = 0; row < BLOCK_M; row += M_TILES * 16) walk(first_m, row);
            first_m += BLOCK_M;
        } while (first_m < other_length());
        finish();
    }
};

KERNEL(kThreads, MIN_GROUPS) attention_backward(BackwardParams p) {
    LDS(memory, kLdsBytes);
    AttentionBackward(p, memory).run();
}
