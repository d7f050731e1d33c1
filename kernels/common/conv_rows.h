// A convolution's weights as nn.Conv2d has them in channels-last memory, with no packed copy: a matrix (co, taps * ci) with dense rows,
// column tap * ci + channel; a shortcut's (co, shortcut_ci) is one with a single tap.
//
// For a chunk of channels and one tap, a work-group's rows of so many channels go through registers into one of two buffers of LDS,
// while the tap before them is multiplied.
#pragma once
#include "tile.h"

// kBlock rows by kColumns columns at a time.
template <int kBlock, int kColumns, int kThreads> struct WeightRows {
    using Rows = LdsRows<kColumns, false>;
    using Place = InRows<kBlock, kColumns, kThreads>;
    static constexpr int kRounds = Place::Items::kRounds, kHalves = kBlock * Rows::kLd;  // of a buffer
    u16* lds;
    u32 from[kRounds];  // bytes from a tap's first channel, in the matrix' first row, to what this work-item stages
    Words<4> ahead[kRounds];
    int buffer = 0;

    // Rows from `first` on, of which those past the last of `rows` repeat it.
    DEVICE void find(int first, int rows, u32 columns) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const u32 item = Place::Items::item(i);
            from[i] = ((u32)min2(first + Place::row(item), rows - 1) * columns + (u32)Place::column(item)) * 2;
        }
    }
    DEVICE void fetch(const u16* tap) { read_eights(ahead, tap, from); }
    // What has been fetched, in LDS after a barrier.
    DEVICE const u16* put() {
        u16* to = lds + buffer * kHalves;
        put_eights<Place, Rows>(to, ahead);
        buffer ^= 1;
        return to;
    }
};

// The identity (16 x 16), of 1 by these bits, in LDS after a barrier.
template <int kLd, int kThreads> DEVICE void put_identity(u16* lds, u16 one) {
    for (int i = (int)thread_id(); i < 128; i += kThreads) {
        const int row = i / 8, pair = i % 8;
        const u32 ones = row % 2 ? (u32)one << 16 : (u32)one;
        *(Words<1>*)(lds + row * kLd + pair * 2) = Words<1>{{row / 2 == pair ? ones : 0}};
    }
}
