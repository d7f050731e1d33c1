// What is left to do after a convolution whose channels were split over work-groups (SPLIT_K in common/conv.h).
//
//   out[n, p, c] = bias[n, c] + sum over s of sums[n, s, p, c] (+ shortcut[n, p, c])
//
//   sums           (N, splits, pixels, co)  float32
//   bias           (co) or (N, co)          float32
//   out, shortcut  (N, pixels, C)           fp16 or bf16, each pixel some multiple of eight halves behind the one before
//   statistics     (N, parts, co, 4)        float32: mean, sum of squared differences from it, count, unused; of kPixels pixels that
//                                           follow each other, whatever rows they are of
//
// The order of all sums is fixed: the same input gives the same bits. A value is rounded once.
//
// Tiling. Such images are small, so all that there is must be in flight: a work-item makes four channels of one pixel, a work-group
// kChannels channels of the kPixels pixels of a part. One work-item for each channel then reads the part's values from LDS, once, and
// passes over them twice. Only images of a few work-groups are split: what lies densely has less than 2^32 values (ops/conv/split.py).
#include "common/tile.h"

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif

constexpr int kPixels = 16, kChannels = 64, kQuads = kChannels / 4, kThreads = kPixels * kQuads;  // the first two also in split.py
constexpr int kLdsBytes = kPixels * kChannels * 4;
EXPORT_LDS_BYTES(kLdsBytes)

struct ConvSumParams {  // the same in lib_rocm_sd/ops/conv/split.py
    const float* sums;
    const float* bias;
    const u16* shortcut;  // may be null
    u16* out;
    float* statistics;    // may be null
    u32* overflow;        // set to 1 where a value does not fit the half type; may be null
    u32 splits, pixels, co, out_channels, parts, blocks_co;  // co: padded to 16, out_channels: to 8
    u32 bias_stride, shortcut_stride, out_stride;            // from one image's bias, or one pixel, to the next; a bias of 0: one for all
};

DEVICE void add_halves(float (&value)[4], const u16* halves) {
    const Words<2> both = *(const Words<2>*)halves;
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] += Half::to((u16)(both.word[i / 2] >> (i % 2 * 16)));
}

DEVICE void write(const ConvSumParams& p, const float (&value)[4], u16* to) {
    bool fits = true;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (!Half::kIsBF16 && !(abs_f32(value[i]) < 65520.0f)) fits = false;
    *(Words<2>*)to = Words<2>{{pack2<Half>(value[0], value[1]), pack2<Half>(value[2], value[3])}};
    if (!fits && p.overflow) *p.overflow = 1;
}

// Of one channel, from LDS: `count` values, kChannels apart, and zeros behind them.
DEVICE void write_moments(const unsigned char* lds, int count, float* to) {
    float value[kPixels], sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
        value[i] = bits_float(((const Words<1>*)lds)[i * kChannels].word[0]);
        sum += value[i];
    }
    const float mean = sum / (float)count;
#pragma unroll
    for (int i = 0; i < kPixels; ++i) squares += i < count ? (value[i] - mean) * (value[i] - mean) : 0.0f;
    *(Words<4>*)to = Words<4>{{float_bits(mean), float_bits(squares), float_bits((float)count), 0}};
}

KERNEL(kThreads) conv_sum(ConvSumParams p) {
    LDS(memory, kLdsBytes);
    const u32 thread = thread_id(), block = block_id();
    const u32 part = block / p.blocks_co % p.parts, image = block / p.blocks_co / p.parts;
    const u32 pixel = part * kPixels + thread / kQuads, first = block % p.blocks_co * kChannels, channel = first + thread % kQuads * 4;
    float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (pixel < p.pixels && channel < p.co) {
        const float* bias = p.bias + (i64)image * p.bias_stride + channel;
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = bias[i];
        const u32 each = p.pixels * p.co;
        const float* sums = p.sums + (image * p.splits * each + pixel * p.co + channel);
#pragma unroll 4
        for (u32 split = 0; split < p.splits; ++split) {
            const Words<4> more = *(const Words<4>*)(sums + split * each);
#pragma unroll
            for (int i = 0; i < 4; ++i) value[i] += bits_float(more.word[i]);
        }
        const i64 at = (i64)image * p.pixels + pixel;
        if (p.shortcut) add_halves(value, p.shortcut + at * p.shortcut_stride + channel);
        if (channel < p.out_channels) write(p, value, p.out + at * p.out_stride + channel);
    }
    if (!p.statistics) return;
    Words<4> mine;
#pragma unroll
    for (int i = 0; i < 4; ++i) mine.word[i] = float_bits(value[i]);
    ((Words<4>*)memory)[thread] = mine;
    barrier();
    if (thread < kChannels && first + thread < p.co)
        write_moments(memory + thread * 4, min2(kPixels, (int)(p.pixels - part * kPixels)),
                      p.statistics + ((image * p.parts + part) * p.co + first + thread) * 4);
}
