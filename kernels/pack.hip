// Weights in the order in which the matrix unit's lanes want them: tile t (16 x 16 halves, row-major) becomes
// packed[t][lane][words of its A fragment]. One wave per tile. Done once per set of weights.
#include "common/mma.h"

#if BF16_HALVES
using Unit = Mma<BF16>;
#else
using Unit = Mma<F16>;
#endif

struct PackParams {  // the same in lib_rocm_sd/ops/conv/kernel.py
    const u16* tiles;
    u16* packed;
};

KERNEL(WAVE_SIZE) pack_tiles(PackParams p) {
    constexpr int kWords = sizeof(typename Unit::A) / 4;
    const auto a = Unit::gather_a(p.tiles + (i64)block_id() * 256, 16, 15);
    u16* to = p.packed + ((i64)block_id() * Unit::kDistinctLanes + lane_id()) * kWords * 2;
    if (lane_id() < Unit::kDistinctLanes)
#pragma unroll
        for (int i = 0; i < kWords; ++i) *(Words<1>*)(to + 2 * i) = Words<1>{{a.w[i]}};
}
