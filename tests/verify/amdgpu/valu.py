"""Vector instructions that work lane by lane, but for those in lanes.py and matrix.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.verify.amdgpu import floats

Array = np.ndarray[Any, Any]
_U32, _U64 = np.uint32, np.uint64


def _wide(x: Array) -> Array:
    return np.asarray(x).astype(np.uint64)


def _mul24(x: Array) -> Array:
    return x & _U32(0xFFFFFF)


def _signed24(x: Array) -> Array:
    return (x << np.int32(8)) >> np.int32(8)


def _perm(a: Array, b: Array, selector: Array) -> Array:
    data = _wide(a) << _U64(32) | _wide(b)
    out = np.zeros(np.broadcast_shapes(data.shape, selector.shape), np.uint32)
    for byte in range(4):
        which = (selector >> _U32(8 * byte)) & _U32(0xFF)
        shift = _wide(np.minimum(which, 7)) * _U64(8)
        plain = (data >> shift) & _U64(0xFF)
        sign_at = _wide(np.clip(which.astype(np.int64) - 8, 0, 3)) * _U64(16) + _U64(15)
        sign = ((data >> sign_at) & _U64(1)) * _U64(0xFF)
        value = np.where(which < 8, plain, np.where(which < 12, sign, 0))
        value = np.where(which >= 13, _U64(0xFF), value).astype(np.uint32)
        out |= value << _U32(8 * byte)
    return out


def _reversed(a: Array) -> Array:
    out = np.zeros_like(a)
    for bit in range(32):
        out |= (a >> _U32(bit) & _U32(1)) << _U32(31 - bit)
    return out


def _bfe_u32(a: Array, offset: Array, width: Array) -> Array:
    ones = (_U32(1) << (width & _U32(31))) - _U32(1)
    return (a >> (offset & _U32(31))) & ones


def _bfe_i32(a: Array, offset: Array, width: Array) -> Array:
    size = (width & np.int32(31)).astype(np.int64)
    shifted = a.astype(np.int64) >> (offset & np.int32(31)).astype(np.int64)
    shifted = (shifted << (64 - size) % 64) >> (64 - size) % 64
    return np.where(size == 0, 0, shifted).astype(np.int32)


def _alignbit(a: Array, b: Array, shift: Array) -> Array:
    whole = _wide(a) << _U64(32) | _wide(b)
    return (whole >> _wide(shift & _U32(31))).astype(np.uint32)


def _alignbyte(a: Array, b: Array, shift: Array) -> Array:
    whole = _wide(a) << _U64(32) | _wide(b)
    return (whole >> (_wide(shift & _U32(3)) * _U64(8))).astype(np.uint32)


def _left(shift: Array, x: Array) -> Array:
    return x << (shift & _U32(31))


def _right(shift: Array, x: Array) -> Array:
    return x >> (shift & _U32(31))


def _arithmetic(shift: Array, x: Array) -> Array:
    return x >> (shift & _U32(31)).astype(np.int32)


def _high(a: Array, b: Array) -> Array:
    return (_wide(a) * _wide(b) >> _U64(32)).astype(np.uint32)


def _pack_halves(a: Array, b: Array) -> Array:
    a, b = np.broadcast_arrays(a, b)
    low = np.ascontiguousarray(a).view(np.uint16).astype(np.uint32)
    return low | np.ascontiguousarray(b).view(np.uint16).astype(np.uint32) << _U32(16)


def _to_half(x: Array) -> Array:
    return x.astype(np.float16)


def _mad_legacy(a: Array, b: Array, c: Array) -> Array:
    """Two roundings, and no denormals: MAD and MAC before they were fused."""
    product = floats.flushed(floats.flushed(a) * floats.flushed(b))
    return floats.flushed(product + floats.flushed(c))


def _bits_of_half(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint16).astype(np.uint32)


_F, _U, _I, _H, _W = "f32", "u32", "i32", "f16", "u16"
TABLE: dict[str, tuple[str, tuple[str, ...], Any]] = {
    # name: kind of the result, kinds of the sources, function
    "V_ADD_F32": (_F, (_F, _F), np.add),
    "V_SUB_F32": (_F, (_F, _F), np.subtract),
    "V_SUBREV_F32": (_F, (_F, _F), lambda a, b: b - a),
    "V_MUL_F32": (_F, (_F, _F), np.multiply),
    "V_FMA_F32": (_F, (_F, _F, _F), floats.fma),
    "V_MAX_F32": (_F, (_F, _F), floats.maximum),
    "V_MIN_F32": (_F, (_F, _F), floats.minimum),
    "V_MAX3_F32": (_F, (_F, _F, _F), floats.maximum3),
    "V_MIN3_F32": (_F, (_F, _F, _F), floats.minimum3),
    "V_MED3_F32": (_F, (_F, _F, _F), floats.median3),
    "V_EXP_F32": (_F, (_F,), floats.exp2),
    "V_LOG_F32": (_F, (_F,), floats.log2),
    "V_RCP_F32": (_F, (_F,), floats.reciprocal),
    "V_RCP_IFLAG_F32": (_F, (_F,), floats.reciprocal),
    "V_RSQ_F32": (_F, (_F,), floats.reciprocal_sqrt),
    "V_SQRT_F32": (_F, (_F,), floats.sqrt),
    "V_TRUNC_F32": (_F, (_F,), np.trunc),
    "V_FLOOR_F32": (_F, (_F,), np.floor),
    "V_CEIL_F32": (_F, (_F,), np.ceil),
    "V_RNDNE_F32": (_F, (_F,), np.rint),
    "V_DIV_FIXUP_F32": (_F, (_F, _F, _F), floats.divide_fixup),
    "V_LDEXP_F32": (_F, (_F, _I), lambda a, b: np.ldexp(a.astype(np.float64), b)),
    "V_CVT_F32_U32": (_F, (_U,), lambda a: a.astype(np.float32)),
    "V_CVT_F32_I32": (_F, (_I,), lambda a: a.astype(np.float32)),
    "V_CVT_U32_F32": (_U, (_F,), floats.to_unsigned),
    "V_CVT_I32_F32": (_I, (_F,), floats.to_signed),
    "V_CVT_U32_U16": (_U, (_W,), lambda a: a.astype(np.uint32)),
    "V_CVT_F16_F32": (_H, (_F,), _to_half),
    "V_CVT_F32_F16": (_F, (_H,), lambda a: a.astype(np.float32)),
    "V_CVT_PK_RTZ_F16_F32": (
        *(_U, (_F, _F)),
        lambda a, b: _pack_halves(floats.half_toward_zero(a), floats.half_toward_zero(b)),
    ),
    "V_CVT_PK_F16_F32": (_U, (_F, _F), lambda a, b: _pack_halves(_to_half(a), _to_half(b))),
    "V_MUL_F16": (_H, (_H, _H), np.multiply),
    "V_ADD_F16": (_H, (_H, _H), np.add),
    "V_PACK_B32_F16": (_U, (_H, _H), _pack_halves),
    "V_ADD_NC_U32": (_U, (_U, _U), np.add),
    "V_SUB_NC_U32": (_U, (_U, _U), np.subtract),
    "V_SUBREV_NC_U32": (_U, (_U, _U), lambda a, b: b - a),
    "V_ADD3_U32": (_U, (_U, _U, _U), lambda a, b, c: a + b + c),
    "V_XAD_U32": (_U, (_U, _U, _U), lambda a, b, c: (a ^ b) + c),
    "V_AND_B32": (_U, (_U, _U), np.bitwise_and),
    "V_OR_B32": (_U, (_U, _U), np.bitwise_or),
    "V_XOR_B32": (_U, (_U, _U), np.bitwise_xor),
    "V_XNOR_B32": (_U, (_U, _U), lambda a, b: ~(a ^ b)),
    "V_NOT_B32": (_U, (_U,), np.bitwise_not),
    "V_OR3_B32": (_U, (_U, _U, _U), lambda a, b, c: a | b | c),
    "V_XOR3_B32": (_U, (_U, _U, _U), lambda a, b, c: a ^ b ^ c),
    "V_AND_OR_B32": (_U, (_U, _U, _U), lambda a, b, c: (a & b) | c),
    "V_BFI_B32": (_U, (_U, _U, _U), lambda a, b, c: (a & b) | (~a & c)),
    "V_LSHL_OR_B32": (_U, (_U, _U, _U), lambda a, b, c: _left(b, a) | c),
    "V_LSHL_ADD_U32": (_U, (_U, _U, _U), lambda a, b, c: _left(b, a) + c),
    "V_ADD_LSHL_U32": (_U, (_U, _U, _U), lambda a, b, c: _left(c, a + b)),
    "V_LSHLREV_B32": (_U, (_U, _U), _left),
    "V_LSHRREV_B32": (_U, (_U, _U), _right),
    "V_ASHRREV_I32": (_I, (_U, _I), _arithmetic),
    "V_LSHLREV_B64": ("u64", (_U, "u64"), lambda a, b: b << (_wide(a) & _U64(63))),
    "V_LSHRREV_B64": ("u64", (_U, "u64"), lambda a, b: b >> (_wide(a) & _U64(63))),
    "V_ASHRREV_I64": ("i64", (_U, "i64"), lambda a, b: b >> (a.astype(np.int64) & 63)),
    "V_LSHL_ADD_U64": (
        *("u64", ("u64", _U, "u64")),
        lambda a, b, c: (a << (_wide(b) & _U64(7))) + c,
    ),
    "V_BFE_U32": (_U, (_U, _U, _U), _bfe_u32),
    "V_BFE_I32": (_I, (_I, _I, _I), _bfe_i32),
    "V_BFREV_B32": (_U, (_U,), _reversed),
    "V_PERM_B32": (_U, (_U, _U, _U), _perm),
    "V_ALIGNBIT_B32": (_U, (_U, _U, _U), _alignbit),
    "V_ALIGNBYTE_B32": (_U, (_U, _U, _U), _alignbyte),
    "V_MUL_LO_U32": (_U, (_U, _U), np.multiply),
    "V_MUL_HI_U32": (_U, (_U, _U), _high),
    "V_MUL_U32_U24": (_U, (_U, _U), lambda a, b: _mul24(a) * _mul24(b)),
    "V_MUL_I32_I24": (_I, (_I, _I), lambda a, b: _signed24(a) * _signed24(b)),
    "V_MAD_U32_U24": (_U, (_U, _U, _U), lambda a, b, c: _mul24(a) * _mul24(b) + c),
    "V_MAD_I32_I24": (_I, (_I, _I, _I), lambda a, b, c: _signed24(a) * _signed24(b) + c),
    "V_MIN_I32": (_I, (_I, _I), np.minimum),
    "V_MAX_I32": (_I, (_I, _I), np.maximum),
    "V_MIN_U32": (_U, (_U, _U), np.minimum),
    "V_MAX_U32": (_U, (_U, _U), np.maximum),
    "V_MIN3_I32": (_I, (_I, _I, _I), lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "V_MAX3_I32": (_I, (_I, _I, _I), lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "V_MED3_I32": (
        *(_I, (_I, _I, _I)),
        lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)),
    ),
    "V_AND_B16": (_W, (_W, _W), np.bitwise_and),
    "V_OR_B16": (_W, (_W, _W), np.bitwise_or),
    "V_XOR_B16": (_W, (_W, _W), np.bitwise_xor),
    "V_NOT_B16": (_W, (_W,), np.bitwise_not),
    "V_ADD_NC_U16": (_W, (_W, _W), np.add),
    "V_SUB_NC_U16": (_W, (_W, _W), np.subtract),
    "V_MUL_LO_U16": (_W, (_W, _W), np.multiply),
    "V_MAD_U16": (_W, (_W, _W, _W), lambda a, b, c: a * b + c),
    "V_LSHLREV_B16": (_W, (_W, _W), lambda a, b: b << (a & np.uint16(15))),
    "V_LSHRREV_B16": (_W, (_W, _W), lambda a, b: b >> (a & np.uint16(15))),
}
ACCUMULATING: dict[str, Any] = {  # target = function(source 0, source 1, target)
    "V_FMAC_F32": floats.fma,
    "V_MAC_F32": _mad_legacy,
    "V_DOT2ACC_F32_F16": floats.dot2,
    "V_DOT2ACC_F32_BF16": floats.dot2_bf16,
}
WITH_LITERAL: dict[str, Any] = {  # (source 0, source 1, literal)
    "V_FMAMK_F32": lambda a, b, k: floats.fma(a, k, b),
    "V_FMAAK_F32": floats.fma,
    "V_MADMK_F32": lambda a, b, k: _mad_legacy(a, k, b),
    "V_MADAK_F32": _mad_legacy,
}
COMPARISONS: dict[str, Any] = {
    "F": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "LT": np.less,
    "EQ": np.equal,
    "LE": np.less_equal,
    "GT": np.greater,
    "LG": lambda a, b: (a < b) | (a > b),
    "NE": np.not_equal,
    "GE": np.greater_equal,
    "O": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "U": lambda a, b: np.isnan(a) | np.isnan(b),
    "NGE": lambda a, b: ~(a >= b),
    "NLG": lambda a, b: ~((a < b) | (a > b)),
    "NGT": lambda a, b: ~(a > b),
    "NLE": lambda a, b: ~(a <= b),
    "NEQ": lambda a, b: ~(a == b),
    "NLT": lambda a, b: ~(a < b),
    "T": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}
ZEROES_HIGH_ON_GFX9 = {name for name, row in TABLE.items() if row[0] in (_H, _W)}
"""16-bit results: gfx9 zeroes the upper half of the register, RDNA keeps it."""
