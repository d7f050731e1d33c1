// From scores to weights, with a base that moves only where it must: see the head of attention.hip.
#pragma once
#include "attention_tiles.h"
#include "reduce.h"

// How far in bits the base of the weights may lag behind the largest score, and how large weights may become, or a lane's sum of
// them: 2^12, far from what fp16 can hold. Up to kMostBase, rounding a base to float32 changes a weight by less than rounding it to fp16.
constexpr int kSlackBits = 8, kMostBits = 12;
constexpr float kMostBase = 4096.0f;
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLargestLse = 100000.0f;  // beyond it float32 has no place for a sum of weights

#if defined(__CUDACC__) && !defined(SIMT_SHIM)
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#elif !defined(SIMT_SHIM) && __has_builtin(__builtin_amdgcn_logf)
DEVICE float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
#else
DEVICE float log2_fast(float x) { return __builtin_log2f(x); }
#endif

struct PerQuery {
    float of[Q_TILES][Unit::kColumns];
};
struct Tallies {  // of a lane's weights over a tile
    typename Unit::Tally of[Q_TILES];
};

struct AttentionSoftmax : AttentionTiles {
    DEVICE AttentionSoftmax(const AttentionParams& params, unsigned char* memory) : AttentionTiles(params, memory) {}

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
        const bool tail = first_k + BLOCK_K > seq_k();
        if constexpr (MASK_KIND == kMaskNone)
            if (!tail) return;
        first_k = (int)kept_here((u32)first_k);  // or the addresses of all elements would be kept between two passes
        const int past = seq_k() - first_k - Unit::lane_row();
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
                        const int key = min2(first_k + Unit::lane_row() + key_in, seq_k() - 1);
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
};
