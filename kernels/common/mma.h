// One matrix product, D (16 x 16, float) += A (16 x 16, half) * B (16 x 16, half), on every matrix unit. With
// nvidia/mma_sm80.h the only file that knows lane layouts. m is a row of A and D, n a column of B and D, k the summed index; l is the lane,
// w words hold two halves of consecutive k, the lower k in the low half.
//
// Sources: "RDNA3 Instruction Set Architecture" 7.9 (WMMA), "RDNA4 ISA" 7.12 (WMMA), "AMD Instinct MI200/MI300 ISA" 7.1 (MFMA,
// V_MFMA_F32_16X16X16_F16), PTX ISA 9.7.15 (mma.m16n8k16).
//
//   unit         wave  A: lane holds            B: lane holds            D: element e of lane l
//   wmma_gfx11   32    m = 8(l%2) + l%16/2,     n = l%16, k = 0..15      n = l%16, m = 8(l/16) + e
//                      k = 0..15
//   wmma_gfx12   32    m = l%16, k = 8(l/16)..  n = l%16, k = 8(l/16)..  n = l%16, m = 8(l/16) + e
//   mfma         64    m = l%16, k = 4(l/16)..  n = l%16, k = 4(l/16)..  n = l%16, m = 4(l/16) + e
//   dot2         32    m = (l + 8(l/16))%16     n = l%16, k = 0..15      n = l%16, m = 8(l/16) + e
//   mma_sm80     32    the instruction computes D^T = B^T A^T, so that here too a lane holds few columns:
//                      m = l/4, l/4 + 8         n = l/4, l/4 + 8         n = l/4 + 8((e/2)%2), m = 8(e/4) + 2(l%4) + e%2
//                      k = 2(l%4).., 2(l%4)+8.. k = 2(l%4).., 2(l%4)+8..
//
// WMMA of gfx11 gives row 2e + l/16 of its own A in element e: so it is given A's rows in the order 0, 8, 1, 9, .., 15.
//
// Every unit offers: A, B, D; row(e), column(c), column_of(e) and kColumns; first_of_column, true in one of the lanes that share
// a column, and reduce_column over them; load_a and load_b, from rows in LDS that begin at multiples of 16 bytes, gather_a and
// gather_b, from any memory; multiply; pack, which turns a D into the B of a following product with k = m; weights, which does
// so with numbers from 0 on and keeps account of them in a Tally, which can tell whether all were within a limit (no NaN is) and,
// unless kSumsByProduct, has this lane's part of the sum of each column; then a product with ones() is to be their sum; pieces,
// which walks a B by memory access; kDistinctLanes, in how many lanes A differs; multiply_eight, which sums the first eight k, for half
// the cost if kSumsEight. row(e) is lane_row() + row_step(e); on NVIDIA the latter is a constant, on AMD it is all of row(e): LLVM 22
// spilled registers over comparisons with constants. element_step(c) leads from an element of column
// 0 to the one of column c in the same row. kTransposes: the unit also has load_a_transposed, from an LDS tile whose rows are k, and
// KeysInRing and ValuesInRing, for tiles whose place in LDS changes from pass to pass.
#pragma once
#include "platform.h"

DEVICE int lane_id() { return (int)(thread_id() % WAVE_SIZE); }

template <int N> struct Fragment {
    u32 w[N];
};
template <int N> struct Accumulator {
    float v[N];
};

// With WHOLE_LOADS four words are loaded as one vector. As words, where fragments of several steps are read in one stretch of code, LLVM
// 19 puts together some that do not belong together, and takes them apart again: 75 registers more in a convolution for gfx1100 whose
// weights lie in rows, four reads for one and moves beside them in a linear layer for gfx1201. A packed convolution whose shortcut has a
// weight is the other way round: 24 registers more with it.
#if !defined(WHOLE_LOADS)
#define WHOLE_LOADS 1
#endif
#if WHOLE_LOADS && !defined(SIMT_SHIM) && !defined(__CUDACC__)
typedef u32 FourWords __attribute__((ext_vector_type(4))) __attribute__((may_alias));
DEVICE Words<4> whole_words(const u16* from) {
    const FourWords four = *(const FourWords*)from;
    return Words<4>{{four.x, four.y, four.z, four.w}};
}
#else
DEVICE Words<4> whole_words(const u16* from) { return *(const Words<4>*)from; }
#endif

// N words from `from`, by accesses of at most 16 bytes. `from` is aligned to one access.
template <int N> DEVICE void load_words(u32* to, const u16* from) {
    constexpr int kAccess = N < 4 ? N : 4;
#pragma unroll
    for (int i = 0; i < N; i += kAccess) {
        Words<kAccess> part;
        if constexpr (WHOLE_LOADS && kAccess == 4) part = whole_words(from + 2 * i);
        else part = *(const Words<kAccess>*)(from + 2 * i);
#pragma unroll
        for (int j = 0; j < kAccess; ++j) to[i + j] = part.word[j];
    }
}

#if !defined(MATRIX_UNIT_MMA_SM80)

typedef _Float16 v2h __attribute__((ext_vector_type(2)));
typedef short v2s __attribute__((ext_vector_type(2)));

// pack2 of numbers from 0 on, by fewer instructions. fp16: V_FMA_MIXLO_F16 and V_FMA_MIXHI_F16, which LLVM takes for a multiply-add
// that it cannot resolve, instead of two conversions and a third to put them together; on CDNA it makes more of it. bfloat16: what
// lies half-way goes up instead of to even; a NaN without a bit among the upper sixteen of its payload's would become a number.
// Tried: toward zero, one instruction for two numbers (V_CVT_PK_RTZ_F16_F32, V_PERM_B32). Attention's rms error became 1.47 to 1.64
// times that of float32 rounded once, with these it is 1.18 to 1.37, both with sums of the rounded weights.
template <typename Half> DEVICE u32 pack2_weights(float low, float high) {
    if constexpr (Half::kIsBF16) return high_halves(float_bits(low) + 0x8000u, float_bits(high) + 0x8000u);
#if !defined(MATRIX_UNIT_MFMA)
    const float one = unknown_one();
    return __builtin_bit_cast(u32, v2h{(_Float16)fma_f32(low, one, 0.0f), (_Float16)fma_f32(high, one, 0.0f)});
#else
    return pack2<Half>(low, high);
#endif
}

// What the four AMD units share: a lane holds one row of A and one column of B, `kHalves` consecutive k of it, and
// `kElements` consecutive rows of D. `Unit`, which inherits it, states what it has differently.
template <typename Unit, typename Half, int kHalves, int kElements> struct OneColumnUnit {
    using A = Fragment<kHalves / 2>;
    using B = Fragment<kHalves / 2>;
    using D = Accumulator<kElements>;
    using Own = Fragment<kElements / 2>;  // D as halves
    static constexpr int kColumns = 1;
    static constexpr bool kTransposes = false;
    static constexpr bool kSumsByProduct = false;
    static constexpr bool kSumsEight = false;
    template <int kRows, typename Rows> static DEVICE A load_a_transposed(const u16*, int, int);  // not on this unit
    static DEVICE A ones();                                                                       // nor this
    template <typename Rows> struct KeysInRing {                                                  // nor these
        DEVICE void prepare(const u16*);
        DEVICE A load(u32, int, int) const;
        DEVICE A load_eight(u32, int, int) const;
    };
    template <typename Rows> struct ValuesInRing {
        DEVICE void prepare(const u16*);
        template <int kRows> DEVICE A load(u32, int, int) const;
    };
    template <typename Rows> static DEVICE A tile_a(const u16* tile, int row, int column) {
        return load_a(tile + row * Rows::kLd + column, Rows::kLd, 15);
    }
    template <typename Rows> static DEVICE A load_a_eight(const u16* tile, int row, int column) { return tile_a<Rows>(tile, row, column); }
    template <typename Rows> static DEVICE B tile_b(const u16* tile, int row, int column) {
        return load_b(tile + row * Rows::kLd + column, Rows::kLd);
    }
    static DEVICE void multiply_eight(const A& a, const B& b, D& d) { Unit::template multiply<16>(a, b, d); }
    static constexpr bool kDotsBF16 = false;
    static DEVICE int column(int) { return lane_id() % 16; }
    static CONSTEXPR int column_of(int) { return 0; }
    static CONSTEXPR int element_step(int) { return 0; }
    static DEVICE bool first_of_column() { return lane_id() < 16; }
    static DEVICE bool first_of_row() { return lane_id() % 16 == 0; }
    static DEVICE int row_of_a() { return lane_id() % 16; }
    static DEVICE int first_k() { return kHalves == 16 ? 0 : kHalves * (lane_id() / 16); }
    static DEVICE int row(int e) { return kElements * (lane_id() / 16) + e; }
    static DEVICE int lane_row() { return 0; }
    static DEVICE int row_step(int e) { return Unit::row(e); }

    // Rows past last_row repeat it: the caller ignores what they give.
    static DEVICE A load_a(const u16* tile, int ld, int last_row) {
        A a;
        load_words<kHalves / 2>(a.w, tile + min2(Unit::row_of_a(), last_row) * ld + first_k());
        return a;
    }
    // Columns past last_column repeat it: the caller ignores what they give.
    static DEVICE B load_b(const u16* tile, int ld, int last_column = 15) {
        B b;
        load_words<kHalves / 2>(b.w, tile + min2(lane_id() % 16, last_column) * ld + first_k());
        return b;
    }
    static DEVICE A gather_a(const u16* tile, int ld, int last_row) { return load_a(tile, ld, last_row); }
    static DEVICE B gather_b(const u16* tile, int ld, int last_column) { return load_b(tile, ld, last_column); }
    template <typename F> static DEVICE float reduce_column(float x, F combine) {
        x = combine(x, lane_xor<16>(x));
        if constexpr (WAVE_SIZE == 64) x = combine(x, lane_xor<32>(x));
        return x;
    }
    template <typename F> static DEVICE float reduce_row(float x, F combine) {
        x = combine(x, lane_xor<1>(x));
        x = combine(x, lane_xor<2>(x));
        x = combine(x, lane_xor<4>(x));
        return combine(x, lane_xor<8>(x));
    }

    // Where a lane needs sixteen k and has eight, the other half wave has the others.
    static DEVICE B operand(const Own& own) {
        if constexpr (kHalves == kElements) return own;
        const bool upper = lane_id() >= 16;
        B b;
#pragma unroll
        for (int i = 0; i < kElements / 2; ++i) {
            const u32 ours = own.w[i], theirs = lane_xor<16>(ours);
            b.w[i] = upper ? theirs : ours;
            b.w[kElements / 2 + i] = upper ? ours : theirs;
        }
        return b;
    }
    static DEVICE u32 packed(u32 halves) { return halves; }
    static DEVICE B pack(const D& d) {
        Own own;
#pragma unroll
        for (int i = 0; i < kElements / 2; ++i) own.w[i] = Unit::packed(pack2<Half>(d.v[2 * i], d.v[2 * i + 1]));
        return operand(own);
    }

    // sum + both halves of x.
    static DEVICE float add_halves(u32 x, float sum) {
        if constexpr (!Half::kIsBF16)
            return __builtin_amdgcn_fdot2(__builtin_bit_cast(v2h, x), __builtin_bit_cast(v2h, 0x3c003c00u), sum, false);
        else if constexpr (Unit::kDotsBF16)
            return __builtin_amdgcn_fdot2_f32_bf16(__builtin_bit_cast(v2s, x), __builtin_bit_cast(v2s, 0x3f803f80u), sum, false);
        else return sum + bits_float(x << 16) + bits_float(x & 0xffff0000u);
    }
    // The sum is that of the rounded weights: one instruction for two, and what rounding adds to all of them goes out of the quotient.
    struct Tally {
        float sum[1] = {0.0f};
        template <int kMostBits> DEVICE bool within() const { return sum[0] <= (float)(1 << kMostBits); }
        DEVICE void add_to(float (&l)[1]) const { l[0] += sum[0]; }
    };
    static DEVICE B weights(const D& d, Tally& tally) {
        Own own;
#pragma unroll
        for (int i = 0; i < kElements / 2; ++i) {
            own.w[i] = Unit::packed(pack2_weights<Half>(d.v[2 * i], d.v[2 * i + 1]));
            tally.sum[0] = add_halves(own.w[i], tally.sum[0]);
        }
        return operand(own);
    }

    template <typename F> static DEVICE void pieces(const B& b, F store) {
        if constexpr (kHalves == kElements) {
            store(lane_id() % 16, first_k(), __builtin_bit_cast(Words<kElements / 2>, b));
        } else {  // both half waves have the whole column: each takes its own half of it
            const bool upper = lane_id() >= 16;
            Words<4> part;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 below = b.w[i], above = b.w[4 + i];  // values: a choice of places would end in scratch memory
                part.word[i] = upper ? above : below;
            }
            store(lane_id() % 16, 8 * (lane_id() / 16), part);
        }
    }
};

#endif

#if defined(MATRIX_UNIT_WMMA_GFX11)

typedef _Float16 v16h __attribute__((ext_vector_type(16)));
typedef short v16s __attribute__((ext_vector_type(16)));
typedef float v8f __attribute__((ext_vector_type(8)));

template <typename Half> struct Mma : OneColumnUnit<Mma<Half>, Half, 16, 8> {
    using A = Fragment<8>;
    using B = Fragment<8>;
    using D = Accumulator<8>;
    static constexpr int kDistinctLanes = 16;
    static constexpr bool kDotsBF16 = true;
    static DEVICE int row_of_a() { return 8 * (lane_id() % 2) + lane_id() % 16 / 2; }
    template <int kRows> static DEVICE void multiply(const A& a, const B& b, D& d) {
        const v8f c = __builtin_bit_cast(v8f, d);
        if constexpr (Half::kIsBF16)
            d = __builtin_bit_cast(D, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(
                                          __builtin_bit_cast(v16s, a), __builtin_bit_cast(v16s, b), c));
        else
            d = __builtin_bit_cast(D, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(
                                          __builtin_bit_cast(v16h, a), __builtin_bit_cast(v16h, b), c));
    }
};

#elif defined(MATRIX_UNIT_WMMA_GFX12)

typedef _Float16 v8h __attribute__((ext_vector_type(8)));
typedef short v8s __attribute__((ext_vector_type(8)));
typedef float v8f __attribute__((ext_vector_type(8)));

template <typename Half> struct Mma : OneColumnUnit<Mma<Half>, Half, 8, 8> {
    using A = Fragment<4>;
    using B = Fragment<4>;
    using D = Accumulator<8>;
    static constexpr int kDistinctLanes = 32;
    static constexpr bool kDotsBF16 = true;
    template <int kRows> static DEVICE void multiply(const A& a, const B& b, D& d) {
        const v8f c = __builtin_bit_cast(v8f, d);
        if constexpr (Half::kIsBF16)
            d = __builtin_bit_cast(D, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(
                                          __builtin_bit_cast(v8s, a), __builtin_bit_cast(v8s, b), c));
        else
            d = __builtin_bit_cast(D, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(
                                          __builtin_bit_cast(v8h, a), __builtin_bit_cast(v8h, b), c));
    }
    // All lanes have their part of the product before any leaves for a branch.
    static DEVICE u32 packed(u32 halves) { return kept_here(halves); }
};

#elif defined(MATRIX_UNIT_MFMA)

// LLVM 17's code for CDNA was wrong when it was executed: of attention, since it wrote two halves of 1.0 as the constant 1.0, whose upper
// half is 0, and of a convolution that read a register which nobody had written. 18's is right.
#if defined(__clang_major__) && !defined(SIMT_SHIM)
constexpr int kLlvm = __clang_major__;
#else
constexpr int kLlvm = 18;
#endif

typedef _Float16 v4h __attribute__((ext_vector_type(4)));
typedef short v4s __attribute__((ext_vector_type(4)));
typedef float v4f __attribute__((ext_vector_type(4)));

template <typename Half> struct Mma : OneColumnUnit<Mma<Half>, Half, 4, 4> {
    using A = Fragment<2>;
    using B = Fragment<2>;
    using D = Accumulator<4>;
    static constexpr int kDistinctLanes = 64;
    template <int kRows> static DEVICE void multiply(const A& a, const B& b, D& d) {
        static_assert(kRows < 0 || kLlvm >= 18, "CDNA's matrix products need LLVM 18 or newer: code that LLVM 17 made of them was wrong");
        const v4f c = __builtin_bit_cast(v4f, d);
        if constexpr (Half::kIsBF16)
            d = __builtin_bit_cast(D, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
                                          __builtin_bit_cast(v4s, a), __builtin_bit_cast(v4s, b), c, 0, 0, 0));
        else
            d = __builtin_bit_cast(D, __builtin_amdgcn_mfma_f32_16x16x16f16(
                                          __builtin_bit_cast(v4h, a), __builtin_bit_cast(v4h, b), c, 0, 0, 0));
    }
};

#elif defined(MATRIX_UNIT_DOT2)

// No matrix unit: each lane sums eight rows of its column with packed dot products, taking A's rows from the lanes that
// hold them (DPP row_share, RDNA2 ISA 13.3.9: every lane of a row of 16 reads one lane of that row). The upper half wave
// holds A rotated by eight rows, so that row_share:e is row e below and row e + 8 above. bfloat16 has no such dot product
// on these chips and takes two FMAs.
template <typename Half> struct Mma : OneColumnUnit<Mma<Half>, Half, 16, 8> {
    using A = Fragment<8>;
    using B = Fragment<8>;
    using D = Accumulator<8>;
    static constexpr int kDistinctLanes = 32;
    static DEVICE int row_of_a() { return (lane_id() + 8 * (lane_id() / 16)) % 16; }
    static DEVICE float dot(u32 a, u32 b, float c) {
        if constexpr (Half::kIsBF16) {
            c = fma_f32(bits_float(a << 16), bits_float(b << 16), c);
            return fma_f32(bits_float(a & 0xffff0000u), bits_float(b & 0xffff0000u), c);
        } else {
            return __builtin_amdgcn_fdot2(__builtin_bit_cast(v2h, a), __builtin_bit_cast(v2h, b), c, false);
        }
    }
    // c + the dot product of b and of what lane E of this lane's sixteen has of A.
    template <int E> static DEVICE float dot_shared(u32 a, u32 b, float c) {
#if !defined(SIMT_SHIM)
        if constexpr (!Half::kIsBF16) {  // LLVM 19 makes two of it, and keeps what the first has moved: 32 to 112 registers
            asm("v_dot2c_f32_f16_dpp %0, %1, %2 row_share:%3 row_mask:0xf bank_mask:0xf" : "+v"(c) : "v"(a), "v"(b), "n"(E));
            return c;
        }
#endif
        return dot((u32)__builtin_amdgcn_update_dpp(0, (int)a, 0x150 + E, 0xf, 0xf, true), b, c);
    }
    template <int E> static DEVICE void one_row(const A& a, const B& b, D& d) {
#pragma unroll
        for (int i = 0; i < 8; ++i) d.v[E] = dot_shared<E>(a.w[i], b.w[i], d.v[E]);
    }
    template <int kRows> static DEVICE void multiply(const A& a, const B& b, D& d) {
        one_row<0>(a, b, d), one_row<1>(a, b, d), one_row<2>(a, b, d), one_row<3>(a, b, d);
        one_row<4>(a, b, d), one_row<5>(a, b, d), one_row<6>(a, b, d), one_row<7>(a, b, d);
    }
};

#elif defined(MATRIX_UNIT_MMA_SM80)
#include "nvidia/mma_sm80.h"

#else
#error "no matrix unit: compile with one MATRIX_UNIT_... of arch.json defined"
#endif
