// Reductions over the lanes that share a column, or a row, of a D fragment (see mma.h).
#pragma once
#include "mma.h"

struct Max {
    DEVICE float operator()(float a, float b) const { return max_f32(a, b); }
};
struct Sum {
    DEVICE float operator()(float a, float b) const { return a + b; }
};

template <typename Unit> DEVICE float column_max(float x) { return Unit::reduce_column(x, Max()); }
template <typename Unit> DEVICE float column_sum(float x) { return Unit::reduce_column(x, Sum()); }
template <typename Unit> DEVICE float row_sum(float x) {
#if defined(MATRIX_UNIT_MMA_SM80)
    return Unit::reduce_row(x, Sum());
#else  // a row of D lies in sixteen lanes, whose sums are equal at the end: each addition is the same one, seen from both sides
    x += row_rotate<8>(x);
    x += row_rotate<4>(x);
    x += row_rotate<2>(x);
    return x + row_rotate<1>(x);
#endif
}
