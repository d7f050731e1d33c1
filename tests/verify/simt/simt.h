// Kernel source on the CPU: what kernels/common/platform.h asks of the machine when SIMT_SHIM is defined. The names, argument
// orders and types are those of clang's AMD builtins; the semantics are AMD's ISA documents' (see instructions.cpp).
//
// A work-item is a fiber (scheduler.cpp). A cross-lane or matrix instruction is a rendezvous of the whole wave: every lane leaves
// its operands and waits, then all results are computed at once. A barrier is a rendezvous of the whole work-group. Lanes that
// wait at different instructions, or wait for one that has returned, end the program with a message.
#pragma once

namespace simt {

typedef unsigned short u16;
typedef unsigned int u32;

constexpr int kMaxWave = 64;

struct Move {  // an instruction that moves 32-bit values between lanes
    u32 old, value, control[4], result;
};
struct Product {  // a matrix instruction; `d` holds C before and D after
    u16 a[16], b[16];
    float d[8];
    int bf16;
};

typedef void (*WaveCompute)(void* const* operands, int wave_size);
#define SIMT_WAVE_OPS(X)                                                                                            \
    X(ds_bpermute) X(ds_permute) X(ds_swizzle) X(dpp) X(permlane16) X(permlanex16) X(readlane) X(readfirstlane)     \
    X(ballot) X(wave_barrier) X(wmma_gfx11) X(wmma_gfx12) X(mfma_16x16x16) X(mma_m16n8k16)
#define SIMT_DECLARE(name) void name(void* const* operands, int wave_size);
namespace compute {
SIMT_WAVE_OPS(SIMT_DECLARE)
}

// `convergent` keeps the compiler from copying a call into the branches of a condition, so that one instruction of the source has
// one call site, whichever way a lane came.
__attribute__((convergent, noinline)) void wave_op(const char* name, WaveCompute compute, void* operands);
__attribute__((convergent, noinline)) bool group_barrier(bool vote);  // true in all work-items if one voted so
unsigned char* lds(unsigned bytes);  // the work-group's array: `bytes` exactly, at a multiple of 128, filled with NaN
u32 item_id();
u32 group_id();
float exp2_flushed(float x);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

typedef _Float16 v2h __attribute__((ext_vector_type(2)));
typedef _Float16 v4h __attribute__((ext_vector_type(4)));
typedef _Float16 v8h __attribute__((ext_vector_type(8)));
typedef _Float16 v16h __attribute__((ext_vector_type(16)));
typedef short v2s __attribute__((ext_vector_type(2)));
typedef short v4s __attribute__((ext_vector_type(4)));
typedef short v8s __attribute__((ext_vector_type(8)));
typedef short v16s __attribute__((ext_vector_type(16)));
typedef float v4f __attribute__((ext_vector_type(4)));
typedef float v8f __attribute__((ext_vector_type(8)));

#define SIMT_INLINE __attribute__((always_inline)) inline

SIMT_INLINE bool barrier_any(bool x) { return group_barrier(x); }

SIMT_INLINE float to_float(u16 half, bool bf16) {
    return bf16 ? __builtin_bit_cast(float, (u32)half << 16) : (float)__builtin_bit_cast(_Float16, half);
}

template <typename Vector> SIMT_INLINE void copy(void* to, const Vector& from) {
    __builtin_memcpy_inline(to, &from, sizeof(Vector));
}

SIMT_INLINE u32 move(const char* name, WaveCompute compute, u32 old, u32 value, u32 c0 = 0, u32 c1 = 0, u32 c2 = 0, u32 c3 = 0) {
    Move operands = {old, value, {c0, c1, c2, c3}, 0};
    wave_op(name, compute, &operands);
    return operands.result;
}

template <typename AB, typename D> SIMT_INLINE D product(const char* name, WaveCompute compute, AB a, AB b, D c, int bf16) {
    Product operands;
    copy(operands.a, a), copy(operands.b, b), copy(operands.d, c);
    operands.bf16 = bf16;
    wave_op(name, compute, &operands);
    D d;
    __builtin_memcpy_inline(&d, operands.d, sizeof(D));
    return d;
}

SIMT_INLINE _Float16 half_toward_zero(float x) {
    const _Float16 near = (_Float16)x;
    const bool beyond = __builtin_fabsf((float)near) > __builtin_fabsf(x);
    return __builtin_bit_cast(_Float16, (u16)(__builtin_bit_cast(u16, near) - beyond));
}

SIMT_INLINE float dot2(v2s a, v2s b, float c, bool clamp, bool bf16) {  // V_DOT2_F32_F16 and V_DOT2_F32_BF16
    const float low = to_float((u16)a[0], bf16) * to_float((u16)b[0], bf16);
    const float d = low + to_float((u16)a[1], bf16) * to_float((u16)b[1], bf16) + c;
    return !clamp ? d : d > 1.0f ? 1.0f : d > 0.0f ? d : 0.0f;
}

SIMT_INLINE void mma_m16n8k16(float* d, const u32* a, const u32* b, const float* c, int bf16) {
    Product operands;
    __builtin_memcpy_inline(operands.a, a, 16);
    __builtin_memcpy_inline(operands.b, b, 8);
    __builtin_memcpy_inline(operands.d, c, 16);
    operands.bf16 = bf16;
    wave_op("mma.m16n8k16", compute::mma_m16n8k16, &operands);
    __builtin_memcpy_inline(d, operands.d, 16);
}
SIMT_INLINE void mma_m16n8k16_f16(float* d, const u32* a, const u32* b, const float* c) { mma_m16n8k16(d, a, b, c, 0); }
SIMT_INLINE void mma_m16n8k16_bf16(float* d, const u32* a, const u32* b, const float* c) { mma_m16n8k16(d, a, b, c, 1); }

// cp.async: what was in LDS is gone when the copy begins, and what is copied is there when its group has landed. Only what it does
// to the kernel's memory is the race detector's business.
struct Copy {
    void* to;
    u32 word[4], group;
};
constexpr int kMaxItems = 1024, kMaxCopies = 256;
inline Copy copies[kMaxItems][kMaxCopies];
inline int copy_count[kMaxItems];
inline u32 copy_group[kMaxItems];
#define SIMT_BOOKKEEPING __attribute__((no_sanitize("thread"), noinline)) inline
__attribute__((noinline)) inline void move_16(void* to, const void* from) {
    for (int i = 0; i < 4; ++i) ((u32 __attribute__((may_alias))*)to)[i] = ((const u32 __attribute__((may_alias))*)from)[i];
}
SIMT_BOOKKEEPING void remember_copy(u32 item, void* lds, const u32* word) {
    if (copy_count[item] == kMaxCopies) fail("more than %d copies on their way in one work-item", kMaxCopies);
    copies[item][copy_count[item]++] = {lds, {word[0], word[1], word[2], word[3]}, copy_group[item]};
}
SIMT_BOOKKEEPING bool take_landed(u32 item, u32 pending, Copy* landed) {
    if (copy_count[item] == 0 || copies[item][0].group + pending >= copy_group[item]) return false;
    *landed = copies[item][0];
    for (int i = 1; i < copy_count[item]; ++i) copies[item][i - 1] = copies[item][i];
    --copy_count[item];
    return true;
}
SIMT_BOOKKEEPING void copies_begun() { ++copy_group[item_id()]; }
inline void copy_async(void* lds, const void* global, bool wanted) {
    const u32 gone[4] = {~0u, ~0u, ~0u, ~0u};
    u32 word[4] = {0, 0, 0, 0};
    if (wanted) move_16(word, global);
    move_16(lds, gone);
    remember_copy(item_id(), lds, word);
}
inline void copies_landed(u32 pending) {
    Copy copy;
    while (take_landed(item_id(), pending, &copy)) move_16(copy.to, copy.word);
}

}  // namespace simt

// Ids and synchronisation.
SIMT_INLINE unsigned __builtin_amdgcn_workitem_id_x() { return simt::item_id(); }
SIMT_INLINE unsigned __builtin_amdgcn_workgroup_id_x() { return simt::group_id(); }
SIMT_INLINE void __builtin_amdgcn_s_barrier() { simt::group_barrier(false); }
SIMT_INLINE void __builtin_amdgcn_fence(unsigned, const char*) {}
SIMT_INLINE void __builtin_amdgcn_wave_barrier() { simt::move("wave_barrier", simt::compute::wave_barrier, 0, 0); }
SIMT_INLINE void __builtin_amdgcn_sched_barrier(int) {}
SIMT_INLINE void __builtin_amdgcn_sched_group_barrier(int, int, int) {}
SIMT_INLINE void __builtin_amdgcn_s_setprio(short) {}
SIMT_INLINE void __builtin_amdgcn_s_waitcnt(int) {}

// Moves between lanes.
SIMT_INLINE int __builtin_amdgcn_ds_bpermute(int byte_index, int value) {
    return (int)simt::move("ds_bpermute", simt::compute::ds_bpermute, 0, value, byte_index);
}
SIMT_INLINE int __builtin_amdgcn_ds_permute(int byte_index, int value) {
    return (int)simt::move("ds_permute", simt::compute::ds_permute, 0, value, byte_index);
}
SIMT_INLINE int __builtin_amdgcn_ds_swizzle(int value, int pattern) {
    return (int)simt::move("ds_swizzle", simt::compute::ds_swizzle, 0, value, pattern);
}
SIMT_INLINE int __builtin_amdgcn_update_dpp(int old, int value, int control, int row_mask, int bank_mask, bool bound_control) {
    return (int)simt::move("update_dpp", simt::compute::dpp, old, value, control, row_mask, bank_mask, bound_control);
}
SIMT_INLINE int __builtin_amdgcn_mov_dpp(int value, int control, int row_mask, int bank_mask, bool bound_control) {
    return (int)simt::move("mov_dpp", simt::compute::dpp, 0xffffffffu, value, control, row_mask, bank_mask, bound_control);
}
SIMT_INLINE unsigned __builtin_amdgcn_permlane16(unsigned old, unsigned value, unsigned select_low, unsigned select_high,
                                                 bool fetch_inactive, bool bound_control) {
    return simt::move("permlane16", simt::compute::permlane16, old, value, select_low, select_high, fetch_inactive, bound_control);
}
SIMT_INLINE unsigned __builtin_amdgcn_permlanex16(unsigned old, unsigned value, unsigned select_low, unsigned select_high,
                                                  bool fetch_inactive, bool bound_control) {
    return simt::move("permlanex16", simt::compute::permlanex16, old, value, select_low, select_high, fetch_inactive, bound_control);
}
SIMT_INLINE int __builtin_amdgcn_readlane(int value, int lane) {
    return (int)simt::move("readlane", simt::compute::readlane, 0, value, lane);
}
SIMT_INLINE int __builtin_amdgcn_readfirstlane(int value) {
    return (int)simt::move("readfirstlane", simt::compute::readfirstlane, 0, value);
}
SIMT_INLINE unsigned __builtin_amdgcn_ballot_w32(bool x) { return simt::move("ballot", simt::compute::ballot, 0, x); }
SIMT_INLINE unsigned long __builtin_amdgcn_ballot_w64(bool x) {
    const unsigned long low = simt::move("ballot", simt::compute::ballot, 0, x);
    return low | (unsigned long)simt::move("ballot", simt::compute::ballot, 0, x, 1) << 32;
}

// Arithmetic within a lane.
SIMT_INLINE float __builtin_amdgcn_exp2f(float x) { return simt::exp2_flushed(x); }
SIMT_INLINE float __builtin_amdgcn_rcpf(float x) { return 1.0f / x; }
SIMT_INLINE float __builtin_amdgcn_rsqf(float x) { return 1.0f / __builtin_sqrtf(x); }
SIMT_INLINE simt::v2h __builtin_amdgcn_cvt_pkrtz(float low, float high) {  // V_CVT_PK_RTZ_F16_F32
    return simt::v2h{simt::half_toward_zero(low), simt::half_toward_zero(high)};
}
SIMT_INLINE float __builtin_amdgcn_fdot2(simt::v2h a, simt::v2h b, float c, bool clamp) {
    return simt::dot2(__builtin_bit_cast(simt::v2s, a), __builtin_bit_cast(simt::v2s, b), c, clamp, false);
}
SIMT_INLINE float __builtin_amdgcn_fdot2_f32_bf16(simt::v2s a, simt::v2s b, float c, bool clamp) {
    return simt::dot2(a, b, c, clamp, true);
}
SIMT_INLINE unsigned __builtin_amdgcn_perm(unsigned high, unsigned low, unsigned select) {  // V_PERM_B32: `low` has bytes 0..3
    const unsigned long long both = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned s = select >> 8 * i & 0xff;
        unsigned byte;
        if (s >= 13) byte = 0xff;
        else if (s == 12) byte = 0;
        else if (s >= 8) byte = both >> (16 * (s - 8) + 15) & 1 ? 0xff : 0;  // sign of a 16-bit half
        else byte = both >> 8 * s & 0xff;
        result |= byte << 8 * i;
    }
    return result;
}
SIMT_INLINE unsigned __builtin_amdgcn_alignbit(unsigned high, unsigned low, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
SIMT_INLINE unsigned __builtin_amdgcn_alignbyte(unsigned high, unsigned low, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> 8 * (shift & 3));
}

// Matrix instructions.
SIMT_INLINE simt::v8f __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(simt::v16h a, simt::v16h b, simt::v8f c) {
    return simt::product("wmma_f32_16x16x16_f16_w32", simt::compute::wmma_gfx11, a, b, c, 0);
}
SIMT_INLINE simt::v8f __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(simt::v16s a, simt::v16s b, simt::v8f c) {
    return simt::product("wmma_f32_16x16x16_bf16_w32", simt::compute::wmma_gfx11, a, b, c, 1);
}
SIMT_INLINE simt::v8f __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(simt::v8h a, simt::v8h b, simt::v8f c) {
    return simt::product("wmma_f32_16x16x16_f16_w32_gfx12", simt::compute::wmma_gfx12, a, b, c, 0);
}
SIMT_INLINE simt::v8f __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(simt::v8s a, simt::v8s b, simt::v8f c) {
    return simt::product("wmma_f32_16x16x16_bf16_w32_gfx12", simt::compute::wmma_gfx12, a, b, c, 1);
}
SIMT_INLINE simt::v4f __builtin_amdgcn_mfma_f32_16x16x16f16(simt::v4h a, simt::v4h b, simt::v4f c, int cbsz, int abid, int blgp) {
    if (cbsz | abid | blgp) simt::fail("mfma_f32_16x16x16f16: cbsz, abid and blgp must be 0, not %d, %d, %d", cbsz, abid, blgp);
    return simt::product("mfma_f32_16x16x16f16", simt::compute::mfma_16x16x16, a, b, c, 0);
}
SIMT_INLINE simt::v4f __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(simt::v4s a, simt::v4s b, simt::v4f c, int cbsz, int abid, int blgp) {
    if (cbsz | abid | blgp) simt::fail("mfma_f32_16x16x16bf16_1k: cbsz, abid and blgp must be 0, not %d, %d, %d", cbsz, abid, blgp);
    return simt::product("mfma_f32_16x16x16bf16_1k", simt::compute::mfma_16x16x16, a, b, c, 1);
}
