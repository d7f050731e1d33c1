// out[i] = a * x[i] + x[i ^ 1], through LDS and a barrier: a kernel that touches what every kernel touches.
#include "common/platform.h"

#ifndef THREADS
#define THREADS 64
#endif

struct ScaleParams {
    const float* x;
    float* out;
    i64 count;
    float a;
};

EXPORT_LDS_BYTES(THREADS * 4)

KERNEL(THREADS) scale(ScaleParams p) {
    LDS(lds, THREADS * 4);
    float* shared = (float*)lds;
    const u32 lane = thread_id();
    const i64 i = (i64)block_id() * THREADS + lane;
    const float x = i < p.count ? p.x[i] : 0.0f;
    shared[lane] = x;
    barrier();
    if (i < p.count) p.out[i] = fma_f32(p.a, x, shared[lane ^ 1]);
}
