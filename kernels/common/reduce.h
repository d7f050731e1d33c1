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
template <typename Unit> DEVICE float row_sum(float x) { return Unit::reduce_row(x, Sum()); }
