// RMSNorm of queries and keys over each head (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019), while the rows that
// one stream's layers made, or two streams', come to lie one after another for attention:
//
//   out[n, t] = normed(x[n, t]) for t < tokens, else normed(more[n, t - tokens])
//
//   x (N, tokens, 3, heads, D), more (N, words, 3, heads, D)  queries, keys and values; fp16 or bf16, dense
//   out (N, tokens + words, 3, heads, D)                      like them
//   normed: a head q of the queries becomes q / sqrt(mean(q^2) + eps) weight_q, one of the keys likewise; values stay as they are, and
//   what has no weight does. weight_q, weight_k (D) of each stream, like x; each may be null
//   ROTARY: each pair of neighbouring columns (a, b) of queries and keys then becomes (m0 a + m1 b, m2 a + m3 b), with float32 factors of
//   the token's place in the output and of the pair (Su and others, "RoFormer", 2021): 1: m0 = cos[2 i], m1 = -sin[2 i], m2 =
//   sin[2 i + 1], m3 = cos[2 i + 1] of rotary, rotary_sin (N or 1, tokens + words, D); 2: rotary (N or 1, tokens + words, D / 2, 4). Rows of x
//   may be parts of longer ones.
//
// Without this, a block of a diffusion transformer reads queries and keys to normalise them and once more to put two streams together.
// Numerics: float32 but what is read and written; all orders are fixed.
//
// Tiling. A head's row is made by 2^lane_bits work-items of a wave, each with eight values of it, which are 16 bytes; those past the row's
// end add nothing. No work-item has a second row.
#include "common/tile.h"

// BF16_HALVES, THREADS and, with it, ROTARY come as definitions (lib_rocm_sd/ops/layer_norm/heads.py).
#if !defined(ROTARY)
#define ROTARY 0
#endif
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
    const float* rotary;
    const float* rotary_sin;
    u32 rotary_apart, apart;  // floats between two images' factors; halves between two tokens' rows of x
};

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif

DEVICE float half_of(const Words<4>& eight, int i) { return Half::to((u16)(eight.word[i / 2] >> (i % 2 * 16))); }

#if ROTARY
struct alignas(16) Four {
    float at[4];
};

template <bool kAligned> DEVICE Four load_four(const float* from) {
    if constexpr (kAligned) return *(const Four*)from;
    else return Four{{from[0], from[1], from[2], from[3]}};
}

// The matrices of the four pairs among eight columns of a token's head, from `column` on.
template <bool kAligned> struct Rotation {
    Four four[4];
    DEVICE void load(const HeadsParams& p, u32 image, u32 place, u32 column) {
        const u32 at = image * p.rotary_apart + (place * p.head_dim + column) * ROTARY;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (ROTARY == 2) four[i] = load_four<kAligned>(p.rotary + at + 4 * i);
            else four[i] = load_four<kAligned>((i < 2 ? p.rotary : p.rotary_sin) + at + i % 2 * 4);
        }
    }
    DEVICE float entry(int pair, int i) const {
        if constexpr (ROTARY == 2) return four[pair].at[i];
        const int column = pair % 2 * 2 + i / 2;
        const float cos = four[pair / 2].at[column], sin = four[2 + pair / 2].at[column];
        return i == 0 || i == 3 ? cos : i == 1 ? -sin : sin;
    }
    DEVICE void turn(int pair, float& a, float& b) const {
        const float first = fma_f32(entry(pair, 1), b, entry(pair, 0) * a);
        b = fma_f32(entry(pair, 2), a, entry(pair, 3) * b);
        a = first;
    }
};
#endif

template <bool kAligned> DEVICE void make_row(const HeadsParams& p) {
    const u32 item = block_id() * THREADS + thread_id(), lane = item & ((1u << p.lane_bits) - 1), wanted = item >> p.lane_bits;
    const u32 row = min2(wanted, p.rows - 1), eights = p.head_dim / 8;
    const u32 token = row / (3 * p.heads), head = row % (3 * p.heads), part = head / p.heads;
    const u32 all = p.tokens + p.words, image = token / all, place = token % all;
    const bool first = place < p.tokens;
    const u32 source = first ? image * p.tokens + place : image * p.words + (place - p.tokens);
    const u32 column = min2(lane, eights - 1) * 8;
#if ROTARY
    const u32 begin = source * (first ? p.apart : 3 * p.heads * p.head_dim) + head * p.head_dim;
#else
    const u32 begin = (source * 3 * p.heads + head) * p.head_dim;
#endif
    Words<4> values = load_eight<kAligned>((first ? p.x : p.more) + (begin + column));
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
    if (ROTARY ? part < 2 : weight != nullptr) {
        const float scale = weight ? reciprocal_sqrt(fma_f32(squares, p.share, first ? p.eps : p.more_eps)) : 1.0f;
        const Words<4> weights = weight ? load_eight<kAligned>(weight + column) : Words<4>{};
#if ROTARY
        Rotation<kAligned> rotation;
        rotation.load(p, image, place, column);
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float a = weight ? half_of(values, 2 * i) * scale * half_of(weights, 2 * i) : half_of(values, 2 * i);
            float b = weight ? half_of(values, 2 * i + 1) * scale * half_of(weights, 2 * i + 1) : half_of(values, 2 * i + 1);
#if ROTARY
            rotation.turn(i, a, b);
#endif
            values.word[i] = pack2<Half>(a, b);
        }
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
