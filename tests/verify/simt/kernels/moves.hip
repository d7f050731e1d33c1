// Every move between lanes, once: out[row * 64 + lane]. The rows are named in tests/simt/test_simt_instructions.py.
#include "common/platform.h"

struct MovesParams {
    const u32* value;   // one word per lane
    const u32* index;   // one word per lane
    u32* out;
};

KERNEL(WAVE_SIZE) moves(MovesParams p) {
    const u32 lane = thread_id(), value = p.value[lane], index = p.index[lane];
    const int x = (int)value, old = (int)(1000 + lane);
    u32* out = p.out + lane;
    const auto put = [&out](u32 result) { *out = result, out += 64; };
    put(__builtin_amdgcn_ds_bpermute((int)(index * 4), x));
    put(__builtin_amdgcn_ds_permute((int)(index * 4), x));
    put(__builtin_amdgcn_ds_swizzle(x, 0x401f));  // lane ^ 16
    put(__builtin_amdgcn_ds_swizzle(x, 0x80b1));  // quad 1, 0, 3, 2
    put(__builtin_amdgcn_readfirstlane(x));
    put(__builtin_amdgcn_readlane(x, 5));
    put(__builtin_amdgcn_update_dpp(old, x, 0x1b, 0xf, 0xf, false));   // quad_perm 3, 2, 1, 0
    put(__builtin_amdgcn_update_dpp(old, x, 0x103, 0xf, 0xf, true));   // row_shl 3, zero from outside
    put(__builtin_amdgcn_update_dpp(old, x, 0x111, 0xf, 0xf, false));  // row_shr 1, old from outside
    put(__builtin_amdgcn_update_dpp(old, x, 0x125, 0xf, 0xf, false));  // row_ror 5
    put(__builtin_amdgcn_update_dpp(old, x, 0x140, 0xf, 0xf, false));  // row_mirror
    put(__builtin_amdgcn_update_dpp(old, x, 0x141, 0xf, 0xf, false));  // row_half_mirror
    put(__builtin_amdgcn_update_dpp(old, x, 0x140, 0x2, 0xf, false));  // only the second row of 16
    put(__builtin_amdgcn_update_dpp(old, x, 0x140, 0xf, 0x1, false));  // only the first bank of each row
    put(__builtin_amdgcn_mov_dpp(x, 0x140, 0xf, 0xf, true));
#if WAVE_SIZE == 32 || defined(__gfx90a__)
    put(__builtin_amdgcn_update_dpp(old, x, 0x157, 0xf, 0xf, false));  // row_share 7 (row_newbcast on gfx90a)
#endif
#if WAVE_SIZE == 32
    put(__builtin_amdgcn_update_dpp(old, x, 0x165, 0xf, 0xf, false));  // row_xmask 5
    put(__builtin_amdgcn_permlane16(value, value, 0x89abcdefu, 0x01234567u, true, false));
    put(__builtin_amdgcn_permlanex16(value, value, 0x76543210u, 0xfedcba98u, true, false));
    put(__builtin_amdgcn_ballot_w32(value & 1));
#else
    const auto votes = __builtin_amdgcn_ballot_w64(value & 1);
    put((u32)votes);
    put((u32)(votes >> 32));
#endif
}
