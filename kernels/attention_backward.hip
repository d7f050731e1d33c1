// Attention, backward: what out = softmax(scale * q k^T + mask) v makes of a gradient g of out.
//
//   q, out, g (B, Sq, H, D), k and v (B, Sk, H, D)   fp16 or bf16, any 64-bit strides, last stride 1
//   mask (B, H, Sq, Sk)                              optional: bool, fp16, bf16 or float32, any strides (0 broadcasts)
//   q_grad, k_grad, v_grad                           contiguous, 16-byte aligned; a mask gets no gradient
//
// With s = scale q k^T + mask, p = softmax(s), and for each query delta = sum_d g out = sum_k p (g v^T):
//   v_grad = p^T g,   ds = p (g v^T - delta),   q_grad = scale ds k,   k_grad = scale ds^T q
// (Dao, FlashAttention-2, 2023). No p is kept from the forward pass: it is 2^(s log2(e) - lse) with the query's log-sum-exp, lse.
//
// Two launches, PASS says which: kQueries makes q_grad, a work-group for a tile of queries, which walks over all keys, and leaves lse
// and delta; kKeys makes k_grad and v_grad, a work-group for a tile of keys, which walks over all queries. Each gradient is summed by
// one work-group in one order: no atomics, the same bits every time. Scores are computed in both, seven products in all where one
// launch with atomics would need five.
//
// kQueries needs no lse beforehand: ds is a multiple of p, so it sums with weights 2^(s log2(e) - m), where m is the largest logit so
// far, scales the sum when m moves, and divides by the sum of the weights at the end, as the forward pass does.
//
// Both are one loop. `Own` rows are the work-group's, `other` rows those it walks over, BLOCK_M at a time:
//   S = other1 own1^T, dP = other2 own2^T    with a column of D for each own row, so P and dS are, or nearly, the B of what follows
//   own1_grad^T += other1^T dS               and in kKeys own2_grad^T += other2^T P
// In kKeys own is (k, v) and other (q, g); in kQueries own is (q, g) and other (k, v). other1 and other2 lie in LDS as they come, and
// transposed beside it unless the unit transposes as it reads. Waves are WAVES_N (each with N_TILES * 16 own rows, and M_TILES * 16
// other rows at once) x WAVES_D: those of one group of WAVES_D make the same scores, and each sums its own part of head_dim.
//
// A query whose keys are all masked weighs nothing and gets zeros.
#if defined(__clang_major__) && __clang_major__ < 16 && !defined(SIMT_SHIM)
#error "attention_backward.hip needs LLVM 16 or newer, as attention.hip does"
#endif

#include "common/attention_backward.h"

struct AttentionBackward : BackwardTiles {
    typename Unit::D grad_1[N_TILES][kWaveTilesD], grad_2[N_TILES][kWaveTilesD];  // the second in kKeys only
    // Of this lane's queries in kQueries: the largest logit so far, this lane's part of the sum of weights, delta.
    float largest[N_TILES][Unit::kColumns], total[N_TILES][Unit::kColumns], delta[N_TILES][Unit::kColumns];

    DEVICE AttentionBackward(const BackwardParams& params, unsigned char* memory) : BackwardTiles(params, memory) {}

    DEVICE void clear() {
#pragma unroll
        for (int t = 0; t < N_TILES; ++t)
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d) {
                grad_1[t][d] = {};
                if constexpr (kKeysPass) grad_2[t][d] = {};
            }
        if constexpr (kKeysPass) return;
#pragma unroll
        for (int t = 0; t < N_TILES; ++t)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) largest[t][c] = -infinity(), total[t][c] = 0.0f;
    }

    // From scores to p, and from dp to ds, for the tile of other rows that begins at `row` of those in LDS.
    DEVICE void weigh(int first_m, int row, typename Unit::D (&s)[M_TILES][N_TILES], typename Unit::D (&dp)[M_TILES][N_TILES]) {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int t = 0; t < N_TILES; ++t)
#pragma unroll
                for (int e = 0; e < kElements; ++e) {
                    const int m = row + i * 16 + Unit::lane_row() + Unit::row_step(e);
                    s[i][t].v[e] = logit(s[i][t].v[e], t, e, first_m + m, kKeysPass ? stats()[m] : 0.0f);
                }
        if constexpr (!kKeysPass) {
            if (!kSkips || first_m + BLOCK_M > other_length()) leave_out(first_m + row, s);
            rebase(s);
        }
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int t = 0; t < N_TILES; ++t)
#pragma unroll
                for (int e = 0; e < kElements; ++e) {
                    const int m = row + i * 16 + Unit::lane_row() + Unit::row_step(e), c = Unit::column_of(e);
                    const float weight = exp2_fast(kKeysPass ? s[i][t].v[e] : s[i][t].v[e] - base(largest[t][c]));
                    if constexpr (!kKeysPass) total[t][c] += weight;
                    s[i][t].v[e] = weight;
                    dp[i][t].v[e] = weight * (dp[i][t].v[e] - (kKeysPass ? stats()[BLOCK_M + m] : delta[t][c]));
                }
    }
    // A base of which -infinity can be subtracted.
    static DEVICE float base(float x) { return x == -infinity() ? 0.0f : x; }
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
    // Moves each query's largest logit up to those of these tiles, and with it what was summed; on AMD without a branch, around
    // which LLVM 19 spills on RDNA.
    DEVICE void rebase(const typename Unit::D (&x)[M_TILES][N_TILES]) {
        float next[N_TILES][Unit::kColumns];
        bool moves = false;
#pragma unroll
        for (int t = 0; t < N_TILES; ++t)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                next[t][c] = largest[t][c];
#pragma unroll
                for (int i = 0; i < M_TILES; ++i)
#pragma unroll
                    for (int e = 0; e < kElements; ++e)
                        if (Unit::column_of(e) == c) next[t][c] = max_f32(next[t][c], x[i][t].v[e]);
                moves = moves || next[t][c] > largest[t][c];
            }
        if (kSkips && !any_lane(moves)) return;
#pragma unroll
        for (int t = 0; t < N_TILES; ++t) {
            float shrink[Unit::kColumns];
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                next[t][c] = column_max<Unit>(next[t][c]);
                shrink[c] = exp2_fast(largest[t][c] - base(next[t][c]));
                largest[t][c] = next[t][c];
                total[t][c] *= shrink[c];
            }
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d)
#pragma unroll
                for (int e = 0; e < kElements; ++e) grad_1[t][d].v[e] *= shrink[Unit::column_of(e)];
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

    DEVICE void put(u16* to, const typename Unit::D (&of)[N_TILES][kWaveTilesD], const float (&factor)[N_TILES][Unit::kColumns]) const {
#pragma unroll
        for (int t = 0; t < N_TILES; ++t)
#pragma unroll
            for (int d = 0; d < kWaveTilesD; ++d) {
                typename Unit::D scaled = of[t][d];
#pragma unroll
                for (int e = 0; e < kElements; ++e) scaled.v[e] *= factor[t][Unit::column_of(e)];
                const int tile_d = (wave_d * kWaveTilesD + d) * 16;
                Unit::pieces(Unit::pack(scaled), [&](int n, int column, auto part) {
                    const int row = own_row(t) + n;
                    if (row < own_length() && tile_d + column < HEAD_DIM)
                        *(decltype(part)*)(to + (i64)((u32)batch * own_length() + row) * (p.heads * HEAD_DIM) + head * HEAD_DIM + tile_d + column) = part;
                });
            }
    }

    // What sums become gradients by; in kQueries lse is left on the way.
    DEVICE void finish() {
        float factor[N_TILES][Unit::kColumns], one[N_TILES][Unit::kColumns];
#pragma unroll
        for (int t = 0; t < N_TILES; ++t)
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                factor[t][c] = p.scale, one[t][c] = 1.0f;
                if constexpr (!kKeysPass) {
                    const float all = column_sum<Unit>(total[t][c]);
                    const int query = own_row(t) + Unit::column(c);
                    factor[t][c] = all == 0.0f ? 0.0f : p.scale / all;
                    if (Unit::first_of_column() && query < own_length())
                        of_queries(p.lse)[query] = all == 0.0f ? infinity() : largest[t][c] + log2_fast(all);
                }
            }
        put(kKeysPass ? p.k_grad : p.q_grad, grad_1, factor);
        if constexpr (kKeysPass) put(p.v_grad, grad_2, one);
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
            for (int c = 0; c < Unit::kColumns; ++c) delta[t][c] = stats()[(wave_n * N_TILES + t) * 16 + Unit::column(c)];
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
#pragma unroll 1
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
