// The builtins that stay within a lane: out[row * 64 + item].
#include "common/platform.h"

struct ArithmeticParams {
    const u32* x;  // three words per item
    u32* out;
};

KERNEL(WAVE_SIZE) arithmetic(ArithmeticParams p) {
    const u32 item = thread_id();
    const u32 *x = p.x + 3 * item;
    u32* out = p.out + item;
    out[0] = __builtin_amdgcn_perm(x[0], x[1], x[2]);
    out[64] = __builtin_amdgcn_alignbit(x[0], x[1], x[2]);
    out[128] = __builtin_amdgcn_alignbyte(x[0], x[1], x[2]);
    out[192] = float_bits(__builtin_amdgcn_exp2f(bits_float(x[0])));
    out[256] = __builtin_bit_cast(u32, __builtin_amdgcn_cvt_pkrtz(bits_float(x[0]), bits_float(x[1])));
}
