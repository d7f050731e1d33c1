// What a kernel may ask of the machine, and nothing else: work-item ids, the barrier, LDS, cross-lane moves, exp2, packed
// conversions. No vendor header is included. Four compilers stand behind it:
//   HIP language (comgr, hiprtc, hipcc, clang -x hip)   AMD builtins
//   CUDA language (NVRTC)                               development on an NVIDIA card, inline PTX
//   SIMT_SHIM                                           x86, tests only: tests/verify/simt/simt.h defines the same builtins
#pragma once

#if defined(SIMT_SHIM)
#include "simt.h"
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// KERNEL(threads[, groups]): a kernel's signature begins so; it is compiled for work-groups of `threads` and, on NVIDIA, such that
// `groups` of them fit a compute unit by their registers.
#if defined(SIMT_SHIM)
#define DEVICE __attribute__((convergent)) inline  // as in the languages of GPUs: no call of a barrier is copied
#define CONSTEXPR constexpr
#define KERNEL(threads, ...) extern "C" void
#elif defined(__CUDACC__)
#define DEVICE __device__ __forceinline__
#define CONSTEXPR __host__ __device__ constexpr
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
#else
#define DEVICE __attribute__((device)) __attribute__((always_inline)) inline
#define CONSTEXPR __attribute__((host)) __attribute__((device)) constexpr
#define KERNEL(threads, ...) \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads))) void
#endif

// WAVES_AT_ONCE stands before KERNEL where the matrix unit's registers are many.
#if defined(MATRIX_UNIT_MFMA) && !defined(SIMT_SHIM)
// Two waves on a SIMD have 256 registers each, all of which hold anything; with more there would be a second kind.
#define WAVES_AT_ONCE __attribute__((amdgpu_waves_per_eu(2)))
#else
#define WAVES_AT_ONCE
#endif

// LDS(name, bytes): one array per kernel, contents undefined at start; aligned to 16 bytes, where copies pass no register to 128.
#if defined(SIMT_SHIM)
#define LDS(name, bytes) unsigned char* name = simt::lds(bytes)
#elif defined(__CUDACC__)
#define LDS(name, bytes) extern __shared__ __align__(128) uint4 name##_words[]; unsigned char* name = (unsigned char*)name##_words
#define EXPORT_LDS_BYTES(bytes) extern "C" __constant__ const unsigned rocm_sd_lds_bytes = (bytes);
#else
#define LDS(name, bytes) static __attribute__((shared)) __attribute__((aligned(16))) unsigned char name[bytes]
#endif
#if !defined(EXPORT_LDS_BYTES)
#define EXPORT_LDS_BYTES(bytes)
#endif

// N 32-bit words (1, 2 or 4) moved by one memory access; the only type through which LDS is read and written.
#if defined(__CUDACC__) && !defined(SIMT_SHIM)
#define MAY_ALIAS
#else
#define MAY_ALIAS __attribute__((may_alias))
#endif
template <int N> struct alignas(N * 4) MAY_ALIAS Words {
    u32 word[N];
};

template <typename T> CONSTEXPR T min2(T a, T b) { return a < b ? a : b; }
template <typename T> CONSTEXPR T max2(T a, T b) { return a < b ? b : a; }

#if defined(__CUDACC__) && !defined(SIMT_SHIM)

DEVICE u32 thread_id() { return threadIdx.x; }
DEVICE u32 block_id() { return blockIdx.x; }
DEVICE void barrier() { __syncthreads(); }
DEVICE void loads_landed() {}
// Orders what the lanes of a wave do in LDS before it and after it.
DEVICE void wave_sync() { __syncwarp(); }
// x is equal in all lanes of a wave: tells the compiler so.
DEVICE u32 wave_uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal_sqrt(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float max_f32(float a, float b) { return fmaxf(a, b); }
template <int MASK> DEVICE u32 lane_xor(u32 x) { return __shfl_xor_sync(0xffffffffu, x, MASK); }
DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
DEVICE u16 f32_to_f16(float x) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
DEVICE float f16_to_f32(u16 h) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x; }
DEVICE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
DEVICE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }
DEVICE u32 kept_here(u32 x) { return x; }
template <typename T> DEVICE T* in_global(T* p) { return p; }

#else  // AMD builtins, or the shim's definitions of them

DEVICE u32 thread_id() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block_id() { return __builtin_amdgcn_workgroup_id_x(); }
// All waves of the work-group are here, and what they did in LDS is done. Global memory is not ordered: loads stay in flight, and no
// kernel hands anything from wave to wave there. The language's fence would order it, too: on RDNA, where the waves of a group may run
// on two CUs, it waits for all loads and empties both caches, and with them the rest of each line that a product's next chunk wants. On
// RDNA3 and 4 LLVM 19's builtin alone waits for loads as well. What is read behind the assembly is read by vector loads, also where all
// lanes want the same: LLVM takes it for something that may have stored.
DEVICE void barrier() {
#if defined(SIMT_SHIM)
    __builtin_amdgcn_s_barrier();
#elif defined(__GFX12__)
    asm volatile("s_wait_dscnt 0x0\n\ts_barrier_signal -1\n\ts_barrier_wait -1" ::: "memory");
#else
    asm volatile("s_waitcnt lgkmcnt(0)\n\ts_barrier" ::: "memory");
#endif
}
// Orders this wave's loads before what others store behind the next barrier: nobody writes over what is still to be read. On RDNA it
// waits for them; the waves of one CU are in order.
DEVICE void loads_landed() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); }
DEVICE void wave_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
DEVICE u32 wave_uniform(u32 x) { return (u32)__builtin_amdgcn_readfirstlane((int)x); }
// True in every lane of a wave where x is in some lane.
#if WAVE_SIZE == 32 && (defined(SIMT_SHIM) || __has_builtin(__builtin_amdgcn_ballot_w32))
DEVICE bool any_lane(bool x) { return __builtin_amdgcn_ballot_w32(x) != 0; }
#elif defined(SIMT_SHIM) || __has_builtin(__builtin_amdgcn_ballot_w64)
DEVICE bool any_lane(bool x) { return __builtin_amdgcn_ballot_w64(x) != 0; }
#else  // LLVM before 16; 33: not equal
DEVICE bool any_lane(bool x) { return __builtin_amdgcn_uicmp((u32)x, 0, 33) != 0; }
#endif
DEVICE u32 float_bits(float x) { return __builtin_bit_cast(u32, x); }
DEVICE float bits_float(u32 x) { return __builtin_bit_cast(float, x); }
#if defined(SIMT_SHIM) || __has_builtin(__builtin_amdgcn_exp2f)
DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
#else
DEVICE float exp2_fast(float x) { return __builtin_exp2f(x); }
#endif
DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }  // within 1 unit in the last place
DEVICE float reciprocal_sqrt(float x) { return __builtin_amdgcn_rsqf(x); }  // likewise
DEVICE float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float max_f32(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE u16 f32_to_f16(float x) { return __builtin_bit_cast(u16, (_Float16)x); }
DEVICE float f16_to_f32(u16 h) { return (float)__builtin_bit_cast(_Float16, h); }
// The lower, and the upper, halves of a and b; a's becomes the lower one.
DEVICE u32 low_halves(u32 a, u32 b) { return __builtin_amdgcn_perm(b, a, 0x05040100u); }
DEVICE u32 high_halves(u32 a, u32 b) { return __builtin_amdgcn_perm(b, a, 0x07060302u); }

// x, computed before what follows. LLVM did not know that V_PERMLANEX16_B32 (before 21) and WMMA (before 22 or 23) need all lanes
// (llvm-project #142962, #165602, #178314) and moves them behind a branch that only some lanes take.
DEVICE u32 kept_here(u32 x) {
#if !defined(SIMT_SHIM)
    asm volatile("" : "+v"(x));
#endif
    return x;
}

// The same place. That a pointer out of an array among the arguments leads to global memory is something LLVM has to be told, or it
// reads by FLAT instructions: those take no scalar address, and count as accesses of LDS, too. Without the number between them it
// takes the two casts for none.
template <typename T> DEVICE T* in_global(T* p) {
#if defined(SIMT_SHIM)
    return p;
#else
    return (T*)(__attribute__((address_space(1))) T*)(u64)p;
#endif
}

// 1, of which the compiler does not know that it is.
DEVICE float unknown_one() {
    float x = 1.0f;
#if !defined(SIMT_SHIM)
    asm("" : "+s"(x));
#endif
    return x;
}

// The value of x in lane (lane ^ MASK). RDNA has an instruction for 16 (RDNA3 ISA 16.9, V_PERMLANEX16_B32: the selects
// 0..15 in order exchange the two rows of a half wave); anything else goes through LDS hardware (DS_BPERMUTE_B32,
// byte address = 4 * lane), which needs no LDS memory.
template <int MASK> DEVICE u32 lane_xor(u32 x) {
    const u32 lane = thread_id() % WAVE_SIZE;
#if WAVE_SIZE == 32
    if constexpr (MASK == 16) return kept_here(__builtin_amdgcn_permlanex16(x, x, 0x76543210u, 0xfedcba98u, true, false));
#endif
    return __builtin_amdgcn_ds_bpermute((int)((lane ^ MASK) * 4), (int)x);
}

// The value of x in the lane that lies N lanes before in a row of 16, the row's last lanes before its first (DPP row_ror, in
// every ISA from gfx9 on).
template <int N> DEVICE float row_rotate(float x) {
    return bits_float((u32)__builtin_amdgcn_update_dpp(0, (int)float_bits(x), 0x120 + N, 0xf, 0xf, true));
}

#endif

// What stands before is not interleaved with what stands after, by a compiler that would spend registers on it or wait too early.
DEVICE void one_by_one() {
#if !defined(SIMT_SHIM) && !defined(__CUDACC__)
#if __has_builtin(__builtin_amdgcn_sched_barrier)
    __builtin_amdgcn_sched_barrier(0);
#endif
#endif
}

// Copies of 16 bytes from global memory to LDS that pass no register (PTX ISA 9.7.9.25.3, cp.async): begun by copy_async, zeros
// in place of what is not `wanted`. copies_begun ends a group of them; after copies_landed all groups but the last kPending are
// complete for this work-item, and after a barrier for the others. With AMD_LOOPS=1 an NVIDIA card does without them, as AMD does.
#if !defined(AMD_LOOPS)
#define AMD_LOOPS 0
#endif
#if defined(__CUDACC__) && !defined(SIMT_SHIM)
constexpr bool kCopiesAsync = !AMD_LOOPS;
DEVICE void copy_async(void* lds, const void* global, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((u32)__cvta_generic_to_shared(lds)), "l"(global), "r"(wanted ? 16 : 0) : "memory");
}
DEVICE void copies_begun() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> DEVICE void copies_landed() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }
// Values to keep. The compiler would compute the address of shared memory anew at every use, which takes tens of cycles, and turn sums
// of addresses back into products.
template <typename T> DEVICE T* kept_address(T* p) { asm volatile("" : "+l"(p)); return p; }
// The same of LDS, which the compiler would no longer know to lie there.
DEVICE unsigned char* kept_lds(unsigned char* p) { p = kept_address(p); __builtin_assume(__isShared(p)); return p; }
DEVICE u32 kept_value(u32 x) { asm volatile("" : "+r"(x)); return x; }
// A barrier; true in all work-items of the group if x is in one.
DEVICE bool barrier_any(bool x) { return __syncthreads_or(x); }
#elif defined(SIMT_SHIM) && defined(MATRIX_UNIT_MMA_SM80)
constexpr bool kCopiesAsync = !AMD_LOOPS;
DEVICE void copy_async(void* lds, const void* global, bool wanted) { simt::copy_async(lds, global, wanted); }
DEVICE void copies_begun() { simt::copies_begun(); }
template <int kPending> DEVICE void copies_landed() { simt::copies_landed(kPending); }
template <typename T> DEVICE T* kept_address(T* p) { return p; }
DEVICE unsigned char* kept_lds(unsigned char* p) { return p; }
DEVICE u32 kept_value(u32 x) { return x; }
DEVICE bool barrier_any(bool x) { return simt::barrier_any(x); }
#else
constexpr bool kCopiesAsync = false;
template <typename T> DEVICE T* kept_address(T* p) { return p; }
DEVICE unsigned char* kept_lds(unsigned char* p) { return p; }
DEVICE u32 kept_value(u32 x) { return x; }
#endif

DEVICE float abs_f32(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }
DEVICE float infinity() { return bits_float(0x7f800000u); }

template <int MASK> DEVICE float lane_xor(float x) { return bits_float(lane_xor<MASK>(float_bits(x))); }

// bfloat16 by integer arithmetic, round to nearest even; NaN stays NaN (its quiet bit is set).
DEVICE u16 f32_to_bf16(float x) {
    const u32 bits = float_bits(x);
    const u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (u16)((x == x ? rounded : bits | 0x400000u) >> 16);
}
DEVICE float bf16_to_f32(u16 h) { return bits_float((u32)h << 16); }

// The two half types a kernel is compiled for.
struct F16 {
    static constexpr bool kIsBF16 = false;
    static CONSTEXPR u16 power_of_2(int exponent) { return (u16)((exponent + 15) << 10); }
    static DEVICE u16 from(float x) { return f32_to_f16(x); }
    static DEVICE float to(u16 h) { return f16_to_f32(h); }
};
struct BF16 {
    static constexpr bool kIsBF16 = true;
    static CONSTEXPR u16 power_of_2(int exponent) { return (u16)((exponent + 127) << 7); }
    static DEVICE u16 from(float x) { return f32_to_bf16(x); }
    static DEVICE float to(u16 h) { return bf16_to_f32(h); }
};

#if defined(MATRIX_UNIT_MMA_SM80)
// The larger of each of two halves, NaN where one is.
template <typename Half> DEVICE u32 max_halves(u32 a, u32 b) {
#if defined(SIMT_SHIM)
    const auto larger = [](u16 x, u16 y) { return Half::to(x) != Half::to(x) || Half::to(x) > Half::to(y) ? x : y; };
    return larger((u16)a, (u16)b) | (u32)larger((u16)(a >> 16), (u16)(b >> 16)) << 16;
#else
    u32 larger;
    if constexpr (Half::kIsBF16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#endif
}
#endif

template <typename Half> DEVICE u32 pack2(float low, float high) {
#if defined(__CUDACC__) && !defined(SIMT_SHIM)
    u32 both;
    if constexpr (Half::kIsBF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
    return (u32)Half::from(low) | ((u32)Half::from(high) << 16);
}
