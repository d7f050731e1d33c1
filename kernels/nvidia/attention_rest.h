// The last queries of a head, where no more are left than one wave takes. One wave would score all keys while the others of its group idle,
// and where whole groups end together all would wait for it. So the waves share these queries: each takes 16 of them and 16 keys of every
// tile, with a base of its own, and at the end they add up. Included by attention.hip, after attention_copies.h.
#pragma once

struct SharedRest : CopyingAttention {
    // At 128 alone it was measured. (Where head_dim ends in a half tile, its last columns would have to be read as such.)
    static constexpr bool kSharesRest = kPipelined && Q_IN_LDS && HEAD_DIM == 128 && MASK_KIND == kMaskNone && WAVES_Q == Q_TILES * kTilesK;
    static_assert(!kSharesRest || kLdK == kLdV, "one offset leads to the wave's rows of K and of V");

    int tile, part;  // the wave's tile of queries, and its sixteen of each tile of keys
    u32 part_bytes;  // where these begin in a tile
    u32 begun_at;    // where in their rings lie the tiles begun last

    DEVICE SharedRest(const AttentionParams& params, unsigned char* memory) : CopyingAttention(params, memory) {}
    DEVICE bool is_rest() const { return (int)p.seq_q - first_q <= Q_TILES * 16; }

    // A pass sums the values of a tile, of which the weights are there, scores the keys of the next one and makes its weights. It is so short
    // that copies are begun three passes ahead; a base is moved at once, so that no tile is kept to be scored again.
    DEVICE void run_shared() {
        tile = wave_q % Q_TILES, part = wave_q / Q_TILES, wave_q = 0;
        part_bytes = (u32)part * (16 * kLdK * 2);
        begun_at = (kLag + 1) * kBytesK;
        copy_next(0);
        typename Unit::B held[kTilesD];
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) held[d] = Unit::template tile_b<RowsQ>(q_tile(tile), 0, d * 16);
        settled = {}, large_base = 1;
        score_part(0, held);
        weigh_part(0);
        k_at = kBytesK;
#pragma unroll 1
        for (int next_k = BLOCK_K; next_k < seq_k(); next_k += BLOCK_K) {
            copies_landed<2>();
            barrier();  // also: what is overwritten from here on has been read by all
            score_part(k_at, held);
            copy_next(next_k);
            sum_part();
            weigh_part(next_k);
            k_at = next_place(k_at);
        }
        copies_landed<0>();  // all, as sums take the place of keys
        barrier();
        sum_part();
        add_up();
        if (part != 0) return;
#pragma unroll
        for (int c = 0; c < Unit::kColumns; ++c) l[0][c] = total[0].v[Unit::element_step(c)];
        put_tiles<1>(tile);
    }
    // Values two tiles after the one at first_k, and keys kLag tiles later.
    DEVICE void copy_next(int first_k) {
        const int rows = seq_k() - first_k - 2 * BLOCK_K, key_rows = rows - kLag * BLOCK_K;
        const u32 place = next_place(begun_at);
        const int further = (int)(place - begun_at);
        begun_at = place;
        copies.move_keys(further), copies.template begin_keys<false>(key_rows);
        copies.move_values(further), copies.template begin_values<false>(rows, key_rows), copies_begun();
    }
    // Four sums, as each product waits for the one before.
    DEVICE void score_part(u32 at, const typename Unit::B (&queries)[kTilesD]) {
        typename Unit::D sums[4] = {};
#pragma unroll
        for (int d = 0; d < kTilesD; ++d)
            multiply_keys(Unit::template tile_a<RowsK>(keys_at(at + part_bytes), 0, d * 16), queries[d], d, sums[d % 4]);
#pragma unroll
        for (int e = 0; e < kElements; ++e) s[0][0].v[e] = (sums[0].v[e] + sums[1].v[e]) + (sums[2].v[e] + sums[3].v[e]);
    }
    DEVICE void sum_part() {
#pragma unroll
        for (int d = 0; d < kTilesD; ++d)
            Unit::template multiply<16>(ring_values.template load<16>(k_at + part_bytes, 0, d * 16), p_fragment[0][0], o[0][d]);
        Unit::template multiply<8>(Unit::ones(), p_fragment[0][0], total[0]);
    }
    // P, with the base as it is, or if that will not do with the largest score. A part may lie past the end: no weight, then.
    DEVICE void weigh_part(int first_k) {
        if (first_k + BLOCK_K > seq_k()) {
            const int past = seq_k() - first_k - 16 * part - Unit::lane_row();
#pragma unroll
            for (int e = 0; e < kElements; ++e)
                if (Unit::row_step(e) >= past) s[0][0].v[e] = -infinity();
        }
        typename Unit::D x;
        typename Unit::Tally tally;
#pragma unroll
        for (int e = 0; e < kElements; ++e) x.v[e] = exp2_fast(fma_f32(s[0][0].v[e], p.scale, -settled.of[0][Unit::column_of(e)]));
        p_fragment[0][0] = Unit::weights(x, tally);
        if (any_lane((large_base | tally.template outside<kMostBits>()) != 0)) move_base();
    }
    DEVICE void move_base() {
        float shrink[Unit::kColumns], lowest[Unit::kColumns];
        large_base = 0;
#pragma unroll
        for (int c = 0; c < Unit::kColumns; ++c) {
            float largest = m[0][c];
#pragma unroll
            for (int e = 0; e < kElements; ++e)
                if (Unit::column_of(e) == c) largest = max_f32(largest, s[0][0].v[e]);
            largest = column_max<Unit>(largest);
            lowest[c] = finite_base(largest);
            shrink[c] = exp2_fast((m[0][c] - lowest[c]) * p.scale);
            m[0][c] = largest, settled.of[0][c] = largest * p.scale;
            large_base |= !(abs_f32(settled.of[0][c]) <= kMostBase);
        }
        scale_sums(0, shrink);
        typename Unit::D x;
        typename Unit::Tally tally;
#pragma unroll
        for (int e = 0; e < kElements; ++e) x.v[e] = exp2_fast((s[0][0].v[e] - lowest[Unit::column_of(e)]) * p.scale);
        p_fragment[0][0] = Unit::weights(x, tally);
    }
    static DEVICE float finite_base(float largest) { return largest == -infinity() ? 0.0f : largest; }

    // What the other parts summed, to the first, through LDS: base, sum and O of each lane.
    DEVICE void add_up() {
        constexpr int kSums = 2 * Unit::kColumns, kFloats = kSums + kTilesD * kElements;
        static_assert(!kSharesRest || (kTilesK - 1) * Q_TILES * kFloats * WAVE_SIZE * 4 <= kBuffers * kBytesK, "the sums take the place of K");
        const auto sums_of = [&](int which) { return (float*)keys_at(0) + ((which - 1) * Q_TILES + tile) * kFloats * WAVE_SIZE + lane_id(); };
        if (part != 0) {
            float* const to = sums_of(part);
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) to[c * WAVE_SIZE] = m[0][c], to[(Unit::kColumns + c) * WAVE_SIZE] = total[0].v[Unit::element_step(c)];
#pragma unroll
            for (int i = 0; i < kTilesD * kElements; ++i) to[(kSums + i) * WAVE_SIZE] = o[0][i / kElements].v[i % kElements];
        }
        barrier();
        if (part != 0) return;
#pragma unroll 1
        for (int which = 1; which < kTilesK; ++which) {
            const float* const from = sums_of(which);
            float mine[Unit::kColumns], theirs[Unit::kColumns];
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) {
                const float other = from[c * WAVE_SIZE], largest = max_f32(m[0][c], other), base = finite_base(largest);
                mine[c] = exp2_fast((m[0][c] - base) * p.scale), theirs[c] = exp2_fast((other - base) * p.scale);
                m[0][c] = largest;
            }
            scale_sums(0, mine);
#pragma unroll
            for (int c = 0; c < Unit::kColumns; ++c) total[0].v[Unit::element_step(c)] += from[(Unit::kColumns + c) * WAVE_SIZE] * theirs[c];
#pragma unroll
            for (int i = 0; i < kTilesD * kElements; ++i)
                o[0][i / kElements].v[i % kElements] += from[(kSums + i) * WAVE_SIZE] * theirs[Unit::column_of(i % kElements)];
        }
    }

    DEVICE void run() {
        keys.place(p.k_stride[1]);
        values.place(p.v_stride[1]);
        if constexpr (kCopied) {
            key_copies.prepare(k, p.k_stride[1]);
            value_copies.prepare(v, p.v_stride[1]);
            return run_resident();
        }
        const bool pipelined = p.aligned && reaches(k, p.k_stride[1]) && reaches(v, p.v_stride[1]);
        if constexpr (kCopiesQueries) {
            if (p.aligned) begin_queries();
            if (pipelined) begin_pipeline(), take_queries<2>();
            else if (p.aligned) copies_begun(), take_queries<0>();
            else load_queries();
        } else {
            if (pipelined) begin_pipeline();
            load_queries();
        }
        prepare_rings();
        if constexpr (kSharesRest) {
            if (pipelined && is_rest()) return run_shared();
        }
        if (pipelined) run_pipelined();
        else run_whole();
        finish();
    }
};
using Kernel = SharedRest;
