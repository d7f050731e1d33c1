"""VOP3P: pairs of values in one instruction, and multiply-add of mixed widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.verify.amdgpu import floats
from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import UninitializedError, UnsupportedError
from tests.verify.amdgpu.operands import Read, modified, vector, vector_target
from tests.verify.amdgpu.salu import Step
from tests.verify.amdgpu.state import Waves

Array = np.ndarray[Any, Any]
_PAIRS: dict[str, tuple[int, Any]] = {
    "V_PK_FMA_F32": (3, floats.fma),
    "V_PK_MUL_F32": (2, np.multiply),
    "V_PK_ADD_F32": (2, np.add),
}
_HALVES: dict[str, tuple[str, Any]] = {
    "V_PK_MUL_F16": ("f16", np.multiply),
    "V_PK_ADD_F16": ("f16", np.add),
    "V_PK_MUL_LO_U16": ("u16", np.multiply),
    "V_PK_ADD_U16": ("u16", np.add),
    "V_PK_SUB_U16": ("u16", np.subtract),
}
_DOTS: dict[str, Any] = {"V_DOT2_F32_F16": floats.dot2, "V_DOT2_F32_BF16": floats.dot2_bf16}


def compile_packed(ins: Instruction) -> Step | None:
    """The step; None where the instruction is another's."""
    if ins.name in ("V_FMA_MIX_F32", "V_FMA_MIXLO_F16", "V_FMA_MIXHI_F16"):
        return _mixed(ins)
    if ins.name in _PAIRS:
        return _pairs(ins)
    if ins.name == "V_PK_MOV_B32":
        return _moves(ins)
    if ins.name in _HALVES:
        return _halves(ins)
    if ins.name in _DOTS:
        return _dots(ins)
    return None


def _high_selects(ins: Instruction) -> int:
    return ins.get("opsel_hi") | ins.get("opsel_hi2") << 2


def _mixed(ins: Instruction) -> Step:
    """Each source is float32, or (op_sel_hi) one half of a register (op_sel)."""
    reads = []
    for place, field in enumerate(("src0", "src1", "src2")):
        half = _high_selects(ins) >> place & 1
        upper = bool(ins.get("opsel") >> place & 1)
        if upper and not half:
            raise UnsupportedError("op_sel of a float32 source of a mixed multiply-add")
        kind = "f16" if half else "f32"
        read = vector(ins, ins.get(field), kind, upper)
        # Here neg_hi means the absolute value.
        negate, absolute = ins.get("neg") >> place & 1, ins.get("neg_hi") >> place & 1
        reads.append(modified(read, kind, bool(negate), bool(absolute)))
    if ins.get("clmp"):
        raise UnsupportedError("clamp of a mixed multiply-add")
    register = ins.get("vdst") - 256
    if ins.name == "V_FMA_MIX_F32":
        write = vector_target(register, "f32")
        return lambda b: write(b, floats.fma(*(read(b) for read in reads)))
    write = vector_target(register, "f16", high=ins.name == "V_FMA_MIXHI_F16")
    return lambda b: write(b, floats.fma(*(read(b) for read in reads)).astype(np.float16))


def _word(ins: Instruction, field: str, upper: int, kind: str) -> Read:
    """The lower or upper register of a pair."""
    code = ins.get(field)
    if 128 <= code < 256:
        if upper and code != 128:
            raise UnsupportedError("the upper word of a constant")
        return vector(ins, code, kind)
    return vector(ins, code + upper, kind)


def _pairs(ins: Instruction) -> Step:
    count, function = _PAIRS[ins.name]
    if ins.get("clmp"):
        raise UnsupportedError("clamp of a pair")
    sides = []
    for selects, negates in ((ins.get("opsel"), "neg"), (_high_selects(ins), "neg_hi")):
        reads = []
        for place, field in enumerate(("src0", "src1", "src2")[:count]):
            read = _word(ins, field, selects >> place & 1, "f32")
            reads.append(modified(read, "f32", bool(ins.get(negates) >> place & 1), False))
        sides.append(reads)
    register = ins.get("vdst") - 256
    targets = [vector_target(each, "f32") for each in (register, register + 1)]

    def step(b: Waves) -> None:
        made = [_half_of_pair(b, function, reads) for reads in sides]
        for place, (write, value) in enumerate(zip(targets, made, strict=True)):
            if value is None:
                b.forget_v(register + place, b.exec)
            else:
                write(b, value)

    return step


def _half_of_pair(b: Waves, function: Any, reads: Sequence[Read]) -> Array | None:
    """None where it is made of what was never written: compilers use one half of a pair only."""
    try:
        made: Array = function(*(read(b) for read in reads))
    except UninitializedError:
        return None
    return made


def _moves(ins: Instruction) -> Step:
    """V_PK_MOV_B32: a word of source 0, chosen by op_sel, then one of source 1."""
    if ins.get("neg") or ins.get("neg_hi") or ins.get("clmp"):
        raise UnsupportedError("modifiers of a move")
    first = _word(ins, "src0", ins.get("opsel") & 1, "u32")
    second = _word(ins, "src1", ins.get("opsel") >> 1 & 1, "u32")
    register = ins.get("vdst") - 256
    low, high = vector_target(register, "u32"), vector_target(register + 1, "u32")

    def step(b: Waves) -> None:
        x, y = np.array(first(b)), np.array(second(b))
        low(b, x)
        high(b, y)

    return step


def _halves(ins: Instruction) -> Step:
    kind, function = _HALVES[ins.name]
    if ins.get("clmp"):
        raise UnsupportedError("clamp of a pair")
    sides = []
    for selects, negates in ((ins.get("opsel"), "neg"), (_high_selects(ins), "neg_hi")):
        reads = []
        for place, field in enumerate(("src0", "src1")):
            if 128 <= ins.get(field) < 256:
                raise UnsupportedError("a constant in a pair of halves")
            read = vector(ins, ins.get(field), kind, bool(selects >> place & 1))
            reads.append(modified(read, kind, bool(ins.get(negates) >> place & 1), False))
        sides.append(reads)
    register = ins.get("vdst") - 256
    low, high = vector_target(register, kind), vector_target(register, kind, high=True)

    def step(b: Waves) -> None:
        first = function(*(read(b) for read in sides[0]))
        second = function(*(read(b) for read in sides[1]))
        low(b, first)
        high(b, second)

    return step


def _low_twice(read: Read) -> Read:
    """op_sel_hi is zero: the lower half is both factors."""
    low = np.uint32(0xFFFF)
    return lambda b: read(b) & low | read(b) << np.uint32(16)


def _dots(ins: Instruction) -> Step:
    if ins.get("neg") or ins.get("neg_hi") or ins.get("clmp") or ins.get("opsel"):
        raise UnsupportedError("modifiers of a dot product")
    codes = ins.get("src0"), ins.get("src1")
    if any(128 < code < 255 for code in codes):
        raise UnsupportedError("a constant in a pair of halves")
    first, second = (
        read if _high_selects(ins) >> place & 1 else _low_twice(read)
        for place, read in enumerate(vector(ins, code, "u32") for code in codes)
    )
    added, function = vector(ins, ins.get("src2"), "f32"), _DOTS[ins.name]
    write = vector_target(ins.get("vdst") - 256, "f32")
    return lambda b: write(b, function(first(b), second(b), added(b)))
