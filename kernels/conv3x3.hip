// 3x3 convolution over channels-last halves with GroupNorm + SiLU, shortcut and statistics fused: see common/conv.h.
//
//   in (N, H, W, Ci), out (N, H, W, Co), padding 1; CONV_STRIDE 2: out (N, (H + padding + 1 - 3) / 2 + 1, ..), padding 0 before
//   and 1 after as in the encoder of Stable Diffusion's VAE, or 1 on all sides as in its UNet: one code for both. Ci and Co are padded
//   to multiples of 16 by the caller.
#include "common/conv.h"

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif
using Conv = Convolution<Half, 3, CONV_STRIDE, 1>;

EXPORT_LDS_BYTES(Conv::kLdsBytes)

WAVES_AT_ONCE KERNEL(Conv::kThreads) conv3x3(ConvParams p) {
    LDS(memory, Conv::kLdsBytes);
    Conv(p, memory).run();
}
