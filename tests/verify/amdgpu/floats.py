"""Float arithmetic as the vector unit does it: every result rounded once, to nearest even.

Arrays are float32 unless a name says otherwise; denormals are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_LEAST_NORMAL = float(np.finfo(np.float32).tiny)
_MIDPOINT = np.uint64(0x10000000)
_LOW_BITS = np.uint64(0x1FFFFFFF)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once. The product is exact in float64; where the sum, rounded to float64,
    lies half-way between two float32, the part that was lost decides.
    """
    a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
    product = a64 * b64
    c64 = np.asarray(c, np.float64)
    total = np.asarray(product + c64)
    suspect = (total.view(np.uint64) & _LOW_BITS) == _MIDPOINT
    small = np.abs(total) < _LEAST_NORMAL
    if small.any():
        suspect |= small & (total != 0) & _half_way_denormal(total)
    if suspect.any():
        parts = (np.broadcast_to(part, total.shape)[suspect] for part in (total, product, c64))
        total[suspect] = _nudged(*parts)
    return total.astype(np.float32)


def _half_way_denormal(total: Array) -> Array:
    units = np.where(np.isfinite(total), total, 0.0) * 2.0**149
    return units - np.floor(units) == 0.5


def _nudged(total: Array, product: Array, c: Array) -> Array:
    back = total - product
    lost = (product - (total - back)) + (c - back)
    move = np.isfinite(lost) & (lost != 0)
    return np.where(move, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)


def quiet(x: Array) -> Array:
    """Signalling NaN becomes quiet."""
    bits = np.asarray(x).view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, bits | np.uint32(0x400000), bits).view(np.float32)


def is_signalling(x: Array) -> Array:
    """Where x is a signalling NaN."""
    bits = np.asarray(x).view(np.uint32)
    return ((bits & 0x7FFFFFFF) > 0x7F800000) & ((bits & 0x400000) == 0)


def maximum(a: Array, b: Array) -> Array:
    """IEEE 754-2008 maxNum: a number rather than NaN, +0 rather than -0, a signalling NaN gives a
    quiet one (IEEE mode).
    """
    a, b = np.broadcast_arrays(a, b)
    out = np.fmax(a, b)
    equal = a == b
    if equal.any():
        both = (a.view(np.uint32) & b.view(np.uint32)).view(np.float32)
        out = np.where(equal, both, out)
    return _signals(a, b, out)


def minimum(a: Array, b: Array) -> Array:
    """minNum, likewise; -0 rather than +0."""
    a, b = np.broadcast_arrays(a, b)
    out = np.fmin(a, b)
    equal = a == b
    if equal.any():
        either = (a.view(np.uint32) | b.view(np.uint32)).view(np.float32)
        out = np.where(equal, either, out)
    return _signals(a, b, out)


def _signals(a: Array, b: Array, out: Array) -> Array:
    for each in (b, a):
        if np.isnan(each).any():
            signalling = is_signalling(np.ascontiguousarray(each))
            if signalling.any():
                out = np.where(signalling, quiet(np.ascontiguousarray(each)), out)
    return out


def maximum3(a: Array, b: Array, c: Array) -> Array:
    """The largest of three, in pairs."""
    return maximum(maximum(a, b), c)


def minimum3(a: Array, b: Array, c: Array) -> Array:
    """The smallest of three, in pairs."""
    return minimum(minimum(a, b), c)


def median3(a: Array, b: Array, c: Array) -> Array:
    """The one in the middle; with a NaN the smallest of the others."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    largest = maximum3(a, b, c)
    middle = np.where(
        largest == a, maximum(b, c), np.where(largest == b, maximum(a, c), maximum(a, b))
    )
    return np.where(nan, minimum3(a, b, c), middle)


def flushed(x: Array) -> Array:
    """Denormals become zeros of their sign."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < np.float32(_LEAST_NORMAL), np.copysign(np.float32(0), x), x)


def _transcendental(function: Any) -> Any:
    """In float64, rounded once; the unit knows no denormals, neither in nor out."""

    def of(x: Array) -> Array:
        return flushed(function(np.asarray(flushed(x), np.float64)).astype(np.float32))

    return of


exp2 = _transcendental(np.exp2)
log2 = _transcendental(np.log2)
reciprocal = _transcendental(lambda x: 1.0 / x)
reciprocal_sqrt = _transcendental(lambda x: 1.0 / np.sqrt(x))
sqrt = _transcendental(np.sqrt)


def to_unsigned(x: Array) -> Array:
    """float32 -> uint32, toward zero; beyond the range the nearest, NaN 0."""
    wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=2.0**32, neginf=0.0)
    return np.clip(wide, 0, 2.0**32 - 1).astype(np.uint32)


def to_signed(x: Array) -> Array:
    """float32 -> int32, likewise."""
    wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=2.0**31, neginf=-(2.0**31))
    return np.clip(wide, -(2.0**31), 2.0**31 - 1).astype(np.int32)


def half_toward_zero(x: Array) -> Array:
    """float32 -> float16, rounded toward zero; never to infinity from a finite number."""
    near = x.astype(np.float16)
    beyond = np.abs(near.astype(np.float32)) > np.abs(x)
    return np.where(beyond, np.nextafter(near, np.float16(0)), near)


def bfloat16_to_float(bits: Array) -> Array:
    """uint16 -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def dot2(a: Array, b: Array, c: Array) -> Array:
    """c + the products of two float16 in each of a and b (uint32); in float64, rounded once."""
    return _dot2(a, b, c, lambda halves: halves.view(np.float16))


def dot2_bf16(a: Array, b: Array, c: Array) -> Array:
    """The same of bfloat16."""
    return _dot2(a, b, c, bfloat16_to_float)


def _dot2(a: Array, b: Array, c: Array, of: Any) -> Array:
    x, y = (of(_halves(each)).astype(np.float64) for each in (a, b))
    products = x * y
    total = np.asarray(c, np.float64) + products[..., 0] + products[..., 1]
    return np.asarray(total).astype(np.float32)


def _halves(words: Array) -> Array:
    """Of uint32, (..., 2) uint16."""
    words = np.ascontiguousarray(words).reshape(np.shape(words))
    return words[..., None].view(np.uint16)


def exponent(x: Array) -> Array:
    """The biased exponent, as int32."""
    return ((np.asarray(x, np.float32).view(np.uint32) >> 23) & 0xFF).astype(np.int32)


def divide_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """V_DIV_FIXUP_F32: the special cases of numerator / denominator."""
    q, d, n = np.broadcast_arrays(quotient, denominator, numerator)
    sign = np.signbit(d) ^ np.signbit(n)
    signed = np.where(sign, -np.abs(q), np.abs(q))
    difference = exponent(n) - exponent(d)
    tiny = (difference < -150) & (d != 0) & (n != 0)
    signed = np.where(tiny, np.where(sign, np.float32(-0.0), np.float32(0.0)), signed)
    infinite = np.where(sign, np.float32(-np.inf), np.float32(np.inf))
    zero = np.where(sign, np.float32(-0.0), np.float32(0.0))
    signed = np.where(np.isinf(d) | (n == 0), zero, signed)
    signed = np.where((d == 0) | np.isinf(n), infinite, signed)
    nothing = ((d == 0) & (n == 0)) | (np.isinf(d) & np.isinf(n))
    signed = np.where(nothing, np.array(0xFFC00000, np.uint32).view(np.float32), signed)
    signed = np.where(np.isnan(d), quiet(np.ascontiguousarray(d)), signed)
    return np.where(np.isnan(n), quiet(np.ascontiguousarray(n)), signed).astype(np.float32)


def divide_fmas(a: Array, b: Array, quotient: Array, scaled: Array) -> Array:
    """V_DIV_FMAS_F32: a * b + quotient; where V_DIV_SCALE_F32 multiplied the numerator or the
    denominator by 2**64, the other way round. The manuals write 2**32, which would not undo it.
    """
    a64, b64, q64 = (np.asarray(each, np.float64) for each in (a, b, quotient))
    undone = (a64 * b64 + q64) * np.where(exponent(quotient) > 127, 2.0**64, 2.0**-64)
    return np.where(scaled, undone.astype(np.float32), fma(a, b, quotient))


def divide_scale(s0: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """V_DIV_SCALE_F32: s0, scaled if the division would leave the range, and where V_DIV_FMAS has
    to undo it.
    """
    s0, d, n = np.broadcast_arrays(s0, denominator, numerator)
    up, down = (s0 * np.float32(2.0**64)), (s0 * np.float32(2.0**-64))
    d64 = np.asarray(d, np.float64)
    inverse_small = np.abs(1.0 / d64) < np.finfo(np.float64).tiny
    ratio = np.abs(np.asarray(n / d))
    ratio_small = (ratio < _LEAST_NORMAL) & (ratio > 0)
    d_small = (np.abs(d) < _LEAST_NORMAL) & (d != 0)
    rows = (  # condition, result, undo
        ((n == 0) | (d == 0), np.full_like(s0, np.nan), False),
        (exponent(n) - exponent(d) >= 96, np.where(s0 == d, up, s0), True),
        (d_small, up, False),
        (inverse_small & ratio_small, np.where(s0 == d, up, s0), True),
        (inverse_small, down, False),
        (ratio_small, np.where(s0 == n, up, s0), True),
        (exponent(n) <= 23, up, False),
    )
    out, undo = s0.copy(), np.zeros(s0.shape, bool)
    open_ = np.ones(s0.shape, bool)
    for condition, result, flag in rows:
        take = open_ & condition
        out = np.where(take, result, out)
        undo |= take & flag
        open_ &= ~condition
    return out.astype(np.float32), undo
