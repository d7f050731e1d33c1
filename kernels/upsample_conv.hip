// Nearest x2 upsampling followed by a 3x3 convolution, as four 2x2 convolutions of the small image: output pixel (2y + py, 2x + px)
// sees only input rows y + py - 1 and y + py, and columns likewise, so the taps that fall on the same input pixel are summed
// beforehand. 16 multiplications for 36, and the large intermediate image never exists.
//
//   in (N, H, W, Ci), out (N, 2H, 2W, Co); weights: four sets, phase py * 2 + px. See common/conv.h.
//
// WEIGHTS_IN_ROWS: as the nine taps of the 3x3 lie, over the small image read as if it were large. 36 multiplications, but no copy.
#include "common/conv.h"

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif
using Conv = Convolution<Half, WEIGHTS_IN_ROWS ? 3 : 2, 1, WEIGHTS_IN_ROWS ? 1 : 2, WEIGHTS_IN_ROWS ? 2 : 1>;

EXPORT_LDS_BYTES(Conv::kLdsBytes)

WAVES_AT_ONCE KERNEL(Conv::kThreads) upsample_conv(ConvParams p) {
    LDS(memory, Conv::kLdsBytes);
    Conv(p, memory).run();
}
