"""Scalar instructions: one value per wave, arrays of (waves,)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.verify.amdgpu import floats
from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import UnsupportedError
from tests.verify.amdgpu.operands import scalar, scalar_target
from tests.verify.amdgpu.state import EXEC, Waves

Array = np.ndarray[Any, Any]
Step = Callable[[Waves], "int | None"]
_U64 = np.uint64


def _wide(x: Array) -> Array:
    return np.asarray(x).astype(np.int64)


def _overflow(exact: Array) -> Array:
    return (exact > 0x7FFFFFFF) | (exact < -0x80000000)


def _low(exact: Array) -> Array:
    return (exact & 0xFFFFFFFF).astype(np.uint32)


def _add_u32(a: Array, b: Array) -> tuple[Array, Array]:
    total = _wide(a) + _wide(b)
    return _low(total), total > 0xFFFFFFFF


def _sub_u32(a: Array, b: Array) -> tuple[Array, Array]:
    return _low(_wide(a) - _wide(b)), a < b


def _add_i32(a: Array, b: Array) -> tuple[Array, Array]:
    total = _wide(a) + _wide(b)
    return _low(total).view(np.int32), _overflow(total)


def _sub_i32(a: Array, b: Array) -> tuple[Array, Array]:
    total = _wide(a) - _wide(b)
    return _low(total).view(np.int32), _overflow(total)


def _tested(function: Any) -> Any:
    def of(*values: Array) -> tuple[Array, Array]:
        result = function(*values)
        return result, result != 0

    return of


def _plain(function: Any) -> Any:
    return lambda *values: (function(*values), None)


def _bfe_u32(a: Array, b: Array) -> Array:
    width = (b >> np.uint32(16)) & np.uint32(0x7F)
    bits = _U64(a) >> (b & np.uint32(31)).astype(_U64)
    return (bits & ((_U64(1) << width.astype(_U64)) - _U64(1))).astype(np.uint32)


def _bfe_i32(a: Array, b: Array) -> Array:
    width = np.minimum((b.astype(np.int64) >> 16) & 0x7F, 32)
    up = np.maximum(32 - width - (b.astype(np.int64) & 31), 0)
    shifted = (_wide(a) << (32 + up)) >> (64 - width)
    return np.where(width == 0, 0, shifted).astype(np.int32)


_SHIFT_32, _SHIFT_64 = np.uint32(31), np.uint64(63)
# name: result kind, source kinds, function -> (result, scc or None where it stays)
_TWO: dict[str, tuple[str, str, str, Any]] = {
    "S_ADD_U32": ("u32", "u32", "u32", _add_u32),
    "S_SUB_U32": ("u32", "u32", "u32", _sub_u32),
    "S_ADD_I32": ("i32", "i32", "i32", _add_i32),
    "S_SUB_I32": ("i32", "i32", "i32", _sub_i32),
    "S_MUL_I32": ("u32", "u32", "u32", _plain(lambda a, b: a * b)),
    "S_MUL_HI_U32": (
        *("u32", "u32", "u32"),
        _plain(lambda a, b: (_U64(a) * _U64(b) >> _U64(32)).astype(np.uint32)),
    ),
    "S_MUL_HI_I32": (
        *("i32", "i32", "i32"),
        _plain(lambda a, b: (_wide(a) * _wide(b) >> 32).astype(np.int32)),
    ),
    "S_MUL_U64": ("u64", "u64", "u64", _plain(lambda a, b: a * b)),
    "S_ADD_NC_U64": ("u64", "u64", "u64", _plain(lambda a, b: a + b)),
    "S_SUB_NC_U64": ("u64", "u64", "u64", _plain(lambda a, b: a - b)),
    "S_AND_B32": ("u32", "u32", "u32", _tested(np.bitwise_and)),
    "S_AND_B64": ("u64", "u64", "u64", _tested(np.bitwise_and)),
    "S_OR_B32": ("u32", "u32", "u32", _tested(np.bitwise_or)),
    "S_OR_B64": ("u64", "u64", "u64", _tested(np.bitwise_or)),
    "S_XOR_B32": ("u32", "u32", "u32", _tested(np.bitwise_xor)),
    "S_XOR_B64": ("u64", "u64", "u64", _tested(np.bitwise_xor)),
    "S_AND_NOT1_B32": ("u32", "u32", "u32", _tested(lambda a, b: a & ~b)),
    "S_AND_NOT1_B64": ("u64", "u64", "u64", _tested(lambda a, b: a & ~b)),
    "S_OR_NOT1_B32": ("u32", "u32", "u32", _tested(lambda a, b: a | ~b)),
    "S_OR_NOT1_B64": ("u64", "u64", "u64", _tested(lambda a, b: a | ~b)),
    "S_NAND_B32": ("u32", "u32", "u32", _tested(lambda a, b: ~(a & b))),
    "S_NAND_B64": ("u64", "u64", "u64", _tested(lambda a, b: ~(a & b))),
    "S_NOR_B32": ("u32", "u32", "u32", _tested(lambda a, b: ~(a | b))),
    "S_NOR_B64": ("u64", "u64", "u64", _tested(lambda a, b: ~(a | b))),
    "S_XNOR_B32": ("u32", "u32", "u32", _tested(lambda a, b: ~(a ^ b))),
    "S_XNOR_B64": ("u64", "u64", "u64", _tested(lambda a, b: ~(a ^ b))),
    "S_LSHL_B32": ("u32", "u32", "u32", _tested(lambda a, b: a << (b & _SHIFT_32))),
    "S_LSHR_B32": ("u32", "u32", "u32", _tested(lambda a, b: a >> (b & _SHIFT_32))),
    "S_ASHR_I32": (
        *("i32", "i32", "u32"),
        _tested(lambda a, b: a >> (b & _SHIFT_32).astype(np.int32)),
    ),
    "S_LSHL_B64": (
        *("u64", "u64", "u32"),
        _tested(lambda a, b: a << (b.astype(np.uint64) & _SHIFT_64)),
    ),
    "S_LSHR_B64": (
        *("u64", "u64", "u32"),
        _tested(lambda a, b: a >> (b.astype(np.uint64) & _SHIFT_64)),
    ),
    "S_ASHR_I64": (
        *("i64", "i64", "u32"),
        _tested(lambda a, b: a >> (b.astype(np.int64) & 63)),
    ),
    "S_BFE_U32": ("u32", "u32", "u32", _tested(_bfe_u32)),
    "S_BFE_I32": ("i32", "i32", "u32", _tested(_bfe_i32)),
    "S_MIN_I32": ("i32", "i32", "i32", lambda a, b: (np.minimum(a, b), a < b)),
    "S_MAX_I32": ("i32", "i32", "i32", lambda a, b: (np.maximum(a, b), a >= b)),
    "S_MIN_U32": ("u32", "u32", "u32", lambda a, b: (np.minimum(a, b), a < b)),
    "S_MAX_U32": ("u32", "u32", "u32", lambda a, b: (np.maximum(a, b), a >= b)),
    "S_MUL_F32": ("f32", "f32", "f32", _plain(np.multiply)),
    "S_ADD_F32": ("f32", "f32", "f32", _plain(np.add)),
    "S_SUB_F32": ("f32", "f32", "f32", _plain(np.subtract)),
    "S_LSHL1_ADD_U32": ("u32", "u32", "u32", lambda a, b: _shift_add(a, b, 1)),
    "S_LSHL2_ADD_U32": ("u32", "u32", "u32", lambda a, b: _shift_add(a, b, 2)),
    "S_LSHL3_ADD_U32": ("u32", "u32", "u32", lambda a, b: _shift_add(a, b, 3)),
    "S_LSHL4_ADD_U32": ("u32", "u32", "u32", lambda a, b: _shift_add(a, b, 4)),
    "S_PACK_LL_B32_B16": (
        *("u32", "u32", "u32"),
        _plain(lambda a, b: (a & np.uint32(0xFFFF)) | (b << np.uint32(16))),
    ),
}


def _shift_add(a: Array, b: Array, shift: int) -> tuple[Array, Array]:
    total = (_wide(a) << shift) + _wide(b)
    return _low(total), total > 0xFFFFFFFF


def _abs_i32(a: Array) -> Array:
    return np.abs(_wide(a)).astype(np.uint32).view(np.int32)


_ONE: dict[str, tuple[str, str, Any]] = {
    "S_MOV_B32": ("u32", "u32", _plain(lambda a: a)),
    "S_MOV_B64": ("u64", "u64", _plain(lambda a: a)),
    "S_NOT_B32": ("u32", "u32", _tested(np.bitwise_not)),
    "S_NOT_B64": ("u64", "u64", _tested(np.bitwise_not)),
    "S_ABS_I32": ("i32", "i32", _tested(_abs_i32)),
    "S_SEXT_I32_I16": ("i32", "u32", _plain(lambda a: a.astype(np.uint16).view(np.int16))),
    "S_SEXT_I32_I8": ("i32", "u32", _plain(lambda a: a.astype(np.uint8).view(np.int8))),
    "S_CVT_F32_U32": ("f32", "u32", _plain(lambda a: a.astype(np.float32))),
    "S_CVT_F32_I32": ("f32", "i32", _plain(lambda a: a.astype(np.float32))),
    "S_CVT_U32_F32": ("u32", "f32", _plain(floats.to_unsigned)),
    "S_CVT_I32_F32": ("i32", "f32", _plain(floats.to_signed)),
    "S_TRUNC_F32": ("f32", "f32", _plain(np.trunc)),
    "S_FLOOR_F32": ("f32", "f32", _plain(np.floor)),
}
_COMPARE: dict[str, Any] = {
    "EQ": np.equal,
    "LG": np.not_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "LT": np.less,
    "LE": np.less_equal,
}
_NOTHING = {  # hints, cache control and clocks: no state that a kernel can see
    *("S_NOP", "V_NOP", "S_CLAUSE", "S_DELAY_ALU", "S_SETPRIO", "S_SLEEP"),
    "S_SET_INST_PREFETCH_DISTANCE",
    *("S_WAITCNT_DEPCTR", "S_WAIT_ALU", "BUFFER_GL1_INV", "GLOBAL_WB"),
    *("S_CODE_END", "S_ICACHE_INV", "S_INST_PREFETCH", "BUFFER_INV", "BUFFER_WBL2"),
}


def compile_scalar(ins: Instruction) -> Step | None:
    """The step of a scalar instruction that computes; None where it is another's."""
    name = ins.name
    if name in _NOTHING:
        return lambda b: None
    if name in _TWO:
        target, first, second, function = _TWO[name]
        return _computes(ins, target, (("ssrc0", first), ("ssrc1", second)), function)
    if name in _ONE:
        target, first, function = _ONE[name]
        return _computes(ins, target, (("ssrc0", first),), function)
    if name.startswith("S_CMP_"):
        return _compares(ins)
    if name in ("S_BITCMP0_B32", "S_BITCMP1_B32"):
        return _tests_bit(ins, int(name[8]))
    if name.startswith(("S_CMPK_", "S_MOVK_", "S_ADDK_", "S_MULK_")):
        return _short(ins)
    if name.endswith(("_SAVEEXEC_B32", "_SAVEEXEC_B64")):
        return _saves_exec(ins)
    if name in ("S_ADDC_U32", "S_SUBB_U32"):
        return _carries(ins)
    if name.startswith("S_CSELECT_B"):
        return _selects(ins)
    if name in ("S_FMAMK_F32", "S_FMAAK_F32", "S_FMAC_F32"):
        return _fma(ins)
    return None


def _computes(
    ins: Instruction, target: str, sources: tuple[tuple[str, str], ...], function: Any
) -> Step:
    reads = [scalar(ins, ins.get(field), kind) for field, kind in sources]
    write = scalar_target(ins, ins.get("sdst"), target)
    float_result = target == "f32"

    def step(b: Waves) -> None:
        result, scc = function(*(read(b) for read in reads))
        write(b, result)
        if scc is not None:
            b.scc[...] = scc

    if float_result and ins.family == "cdna":
        raise UnsupportedError("scalar floats on CDNA")
    return step


def _compares(ins: Instruction) -> Step:
    _, _, condition, kind = ins.name.split("_")
    kinds = {"B32": "u32", "B64": "u64"}
    if condition not in _COMPARE:
        raise UnsupportedError(ins.name)
    reads = [
        scalar(ins, ins.get(field), kinds.get(kind, kind.lower())) for field in ("ssrc0", "ssrc1")
    ]
    compare = _COMPARE[condition]

    def step(b: Waves) -> None:
        b.scc[...] = compare(reads[0](b), reads[1](b))

    return step


def _tests_bit(ins: Instruction, wanted: int) -> Step:
    bits, place = (scalar(ins, ins.get(field), "u32") for field in ("ssrc0", "ssrc1"))

    def step(b: Waves) -> None:
        b.scc[...] = (bits(b) >> (place(b) & np.uint32(31)) & np.uint32(1)) == wanted

    return step


def _short(ins: Instruction) -> Step:
    code, number = ins.get("sdst"), ins.get("simm16")
    signed = number - 0x10000 if number & 0x8000 else number
    if ins.name.startswith("S_CMPK_"):
        _, _, condition, kind = ins.name.split("_")
        compare, read = _COMPARE[condition], scalar(ins, code, kind.lower())
        against = np.array(signed, np.int32) if kind == "I32" else np.array(number, np.uint32)

        def check(b: Waves) -> None:
            b.scc[...] = compare(read(b), against)

        return check
    write = scalar_target(ins, code, "i32")
    value = np.array(signed, np.int32)
    if ins.name == "S_MOVK_I32":
        return lambda b: write(b, value)
    before = scalar(ins, code, "i32")
    if ins.name == "S_MULK_I32":
        return lambda b: write(b, before(b) * value)

    def add(b: Waves) -> None:
        result, scc = _add_i32(before(b), value)
        write(b, result)
        b.scc[...] = scc

    return add


def _saves_exec(ins: Instruction) -> Step:
    kind = "u32" if ins.name.endswith("B32") else "u64"
    combine = {
        "S_AND_SAVEEXEC": lambda s, e: s & e,
        "S_OR_SAVEEXEC": lambda s, e: s | e,
        "S_XOR_SAVEEXEC": lambda s, e: s ^ e,
        "S_AND_NOT1_SAVEEXEC": lambda s, e: s & ~e,
        "S_OR_NOT1_SAVEEXEC": lambda s, e: s | ~e,
    }.get(ins.name[:-4])
    if combine is None:
        raise UnsupportedError(ins.name)
    read = scalar(ins, ins.get("ssrc0"), kind)
    now, write_exec = scalar(ins, EXEC, kind), scalar_target(ins, EXEC, kind)
    write = scalar_target(ins, ins.get("sdst"), kind)

    def step(b: Waves) -> None:
        before = now(b).copy()
        result = combine(read(b), before)
        write(b, before)
        write_exec(b, result)
        b.scc[...] = result != 0

    return step


def _carries(ins: Instruction) -> Step:
    reads = [scalar(ins, ins.get(field), "u32") for field in ("ssrc0", "ssrc1")]
    write = scalar_target(ins, ins.get("sdst"), "u32")
    sign = 1 if ins.name == "S_ADDC_U32" else -1

    def step(b: Waves) -> None:
        total = _wide(reads[0](b)) + sign * (_wide(reads[1](b)) + b.scc)
        write(b, _low(total))
        b.scc[...] = (total > 0xFFFFFFFF) | (total < 0)

    return step


def _selects(ins: Instruction) -> Step:
    kind = "u32" if ins.name.endswith("B32") else "u64"
    reads = [scalar(ins, ins.get(field), kind) for field in ("ssrc0", "ssrc1")]
    write = scalar_target(ins, ins.get("sdst"), kind)
    return lambda b: write(b, np.where(b.scc, reads[0](b), reads[1](b)))


def _fma(ins: Instruction) -> Step:
    first, second = (scalar(ins, ins.get(field), "f32") for field in ("ssrc0", "ssrc1"))
    write = scalar_target(ins, ins.get("sdst"), "f32")
    if ins.name == "S_FMAC_F32":
        own = scalar(ins, ins.get("sdst"), "f32")
        return lambda b: write(b, floats.fma(first(b), second(b), own(b)))
    literal = scalar(ins, 255, "f32")
    if ins.name == "S_FMAMK_F32":
        return lambda b: write(b, floats.fma(first(b), literal(b), second(b)))
    return lambda b: write(b, floats.fma(first(b), second(b), literal(b)))
