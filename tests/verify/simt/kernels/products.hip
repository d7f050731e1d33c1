// One matrix instruction on raw registers: what each lane holds comes from, and goes to, memory.
#include "common/platform.h"

struct ProductsParams {
    const u16* a;    // [lane][HALVES_A]
    const u16* b;    // [lane][HALVES_B]
    const float* c;  // [lane][RESULTS]
    float* d;        // [lane][RESULTS]
};

template <int N> using Halves = _Float16 __attribute__((ext_vector_type(N)));
template <int N> using Shorts = short __attribute__((ext_vector_type(N)));
template <int N> using Floats = float __attribute__((ext_vector_type(N)));

#if defined(MATRIX_UNIT_WMMA_GFX11)
#define PRODUCT(kind, a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_##kind##_w32(a, b, c)
#elif defined(MATRIX_UNIT_WMMA_GFX12)
#define PRODUCT(kind, a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_##kind##_w32_gfx12(a, b, c)
#elif defined(MATRIX_UNIT_MFMA)
#define f16_mfma f16
#define bf16_mfma bf16_1k
#define PRODUCT_2(kind, a, b, c) __builtin_amdgcn_mfma_f32_16x16x16##kind(a, b, c, 0, 0, 0)
#define PRODUCT_1(kind, a, b, c) PRODUCT_2(kind, a, b, c)
#define PRODUCT(kind, a, b, c) PRODUCT_1(kind##_mfma, a, b, c)
#endif

KERNEL(WAVE_SIZE) products(ProductsParams p) {
    const u32 lane = thread_id();
    const u16 *a = p.a + lane * HALVES_A, *b = p.b + lane * HALVES_B;
    const float* c = p.c + lane * RESULTS;
    float* d = p.d + lane * RESULTS;
#if defined(MATRIX_UNIT_DOT2)  // RESULTS = 1: a[0] b[0] + a[1] b[1] + c
#if BF16_HALVES
    d[0] = __builtin_amdgcn_fdot2_f32_bf16(*(const Shorts<2>*)a, *(const Shorts<2>*)b, c[0], CLAMP);
#else
    d[0] = __builtin_amdgcn_fdot2(*(const Halves<2>*)a, *(const Halves<2>*)b, c[0], CLAMP);
#endif
#elif defined(MATRIX_UNIT_MMA_SM80)
#if BF16_HALVES
    simt::mma_m16n8k16_bf16(d, (const u32*)a, (const u32*)b, c);
#else
    simt::mma_m16n8k16_f16(d, (const u32*)a, (const u32*)b, c);
#endif
#elif BF16_HALVES
    *(Floats<RESULTS>*)d = PRODUCT(bf16, *(const Shorts<HALVES_A>*)a, *(const Shorts<HALVES_B>*)b, *(const Floats<RESULTS>*)c);
#else
    *(Floats<RESULTS>*)d = PRODUCT(f16, *(const Halves<HALVES_A>*)a, *(const Halves<HALVES_B>*)b, *(const Floats<RESULTS>*)c);
#endif
}
