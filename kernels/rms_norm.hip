// RMSNorm of queries and keys over each head (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019), while the rows that
// one stream's layers made, or two streams', come to lie one after another for attention:
//
//   out[n, t] = normed(x[n, t]) for t < tokens, else normed(more[n, t - tokens])
//
//   x (N, tokens, 3, heads, D), more (N, words, 3, heads, D)  queries, keys and values; fp16 or bf16, dense
//   out (N, tokens + words, 3, heads, D)                      like them
//   normed: a head q of the queries becomes q / sqrt(mean(q^2) + eps) weight_q, one of the keys likewise; values stay as they are, and
//   what has no weight does. weight_q, weight_k (D) of each stream, like x; each may be null
//
// Without this, a block of a diffusion transformer reads queries and keys to normalise them and once more to put two streams together.
// Numerics: float32 but what is read and written; all orders are fixed.
//
// Tiling. A head's row is made by 2^lane_bits work-items of a wave, each with eight values of it, which are 16 bytes; those past the row's
// end add nothing. No work-item has a second row.
#include "common/tile.h"

// BF16_HALVES, THREADS come as definitions (lib_rocm_sd/ops/layer_norm/heads.py).
struct HeadsParams {  // the same in lib_rocm_sd/ops/layer_norm/heads.py
    const u16* x;
    const u16* more;
    u16* out;
    const u16* weight_q;
    const u16* weight_k;
    const u16* more_q;
    const u16* more_k;
    u32 tokens, words, heads, head_dim;
    u32 rows, lane_bits;  // of all heads; 2^lane_bits work-items make one
    u32 aligned;          // 16-byte accesses may be used
    float eps, more_eps, share;  // share: 1 / head_dim
};

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif

DEVICE float half_of(const Words<4>& eight, int i) { return Half::to((u16)(eight.word[i / 2] >> (i % 2 * 16))); }

template <bool kAligned> DEVICE void make_row(const HeadsParams& p) {
    const u32 item = block_id() * THREADS + thread_id(), lane = item & ((1u << p.lane_bits) - 1), wanted = item >> p.lane_bits;
    const u32 row = min2(wanted, p.rows - 1), eights = p.head_dim / 8;
    const u32 token = row / (3 * p.heads), head = row % (3 * p.heads), part = head / p.heads;
    const u32 all = p.tokens + p.words, image = token / all, place = token % all;
    const bool first = place < p.tokens;
    const u32 source = first ? image * p.tokens + place : image * p.words + (place - p.tokens);
    const u32 column = min2(lane, eights - 1) * 8;
    Words<4> values = load_eight<kAligned>((first ? p.x : p.more) + ((source * 3 * p.heads + head) * p.head_dim + column));
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fma_f32(half_of(values, i), half_of(values, i), squares);
    squares = lane < eights ? squares : 0.0f;
    if (p.lane_bits > 0) squares += lane_xor<1>(squares);
    if (p.lane_bits > 1) squares += lane_xor<2>(squares);
    if (p.lane_bits > 2) squares += lane_xor<4>(squares);
    if (p.lane_bits > 3) squares += lane_xor<8>(squares);
    if (p.lane_bits > 4) squares += lane_xor<16>(squares);
    const u16* of_q = first ? p.weight_q : p.more_q;
    const u16* of_k = first ? p.weight_k : p.more_k;
    const u16* weight = part == 0 ? of_q : part == 1 ? of_k : nullptr;
    if (weight) {
        const float scale = reciprocal_sqrt(fma_f32(squares, p.share, first ? p.eps : p.more_eps));
        const Words<4> weights = load_eight<kAligned>(weight + column);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            values.word[i] = pack2<Half>(half_of(values, 2 * i) * scale * half_of(weights, 2 * i),
                                         half_of(values, 2 * i + 1) * scale * half_of(weights, 2 * i + 1));
    }
    if (wanted >= p.rows || lane >= eights) return;
    u16* out = p.out + (row * p.head_dim + column);
    if constexpr (kAligned) {
        *(Words<4>*)out = values;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[2 * i] = (u16)values.word[i], out[2 * i + 1] = (u16)(values.word[i] >> 16);
    }
}

KERNEL(THREADS) rms_norm_heads(HeadsParams p) {
    if (p.aligned) make_row<true>(p);
    else make_row<false>(p);
}
