"""Vector instructions to steps: encodings, modifiers, and what does not fit valu.TABLE's form."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.verify.amdgpu import dpp, floats, lanes, packed
from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import UnsupportedError
from tests.verify.amdgpu.loader import FloatMode
from tests.verify.amdgpu.operands import (
    DTYPES,
    Read,
    Write,
    copied,
    mask,
    modified,
    null_code,
    vector,
    vector_target,
)
from tests.verify.amdgpu.salu import Step
from tests.verify.amdgpu.state import EXEC, VCC, Waves
from tests.verify.amdgpu.valu import (
    ACCUMULATING,
    COMPARISONS,
    TABLE,
    WITH_LITERAL,
    ZEROES_HIGH_ON_GFX9,
)

Array = np.ndarray[Any, Any]
_FIELDS = {
    "VOP1": ("src0",),
    "VOP2": ("src0", "vsrc1"),
    "VOPC": ("src0", "vsrc1"),
    "VOP3": ("src0", "src1", "src2"),
}
_SIXTEEN = ("f16", "u16", "i16")
_TRUE16 = ("rdna3", "rdna4")
"""Families whose short forms name halves of registers."""


def sources(ins: Instruction, kinds: tuple[str, ...], mode: FloatMode | None = None) -> list[Read]:
    """The reads of an instruction's sources, with all modifiers of its form."""
    base = next((key for key in _FIELDS if ins.form.startswith(key)), None)
    if base is None or "DPP8" in ins.form or ("DPP" in ins.form and base == "VOP3"):
        raise UnsupportedError(f"{ins.name} in form {ins.form}")
    reads = []
    for place, kind in enumerate(kinds):
        if "SDWA" in ins.form:
            read = dpp.selected(ins, place, kind)
        elif "DPP16" in ins.form and place == 0:
            read = dpp.moved(ins, kind)
        elif "DPP16" in ins.form:
            read = _after_dpp(ins, place, kind)
        else:
            read = _plain(ins, _FIELDS[base][place], place, kind)
        if mode is not None and kind == "f32" and not mode.denorm_32 & 1:
            read = _flushed(read)
        reads.append(read)
    return reads


def _after_dpp(ins: Instruction, place: int, kind: str) -> Read:
    read = vector(ins, ins.get("vsrc1"), kind)
    return modified(read, kind, bool(ins.get("src1_neg")), bool(ins.get("src1_abs")))


def _plain(ins: Instruction, field: str, place: int, kind: str) -> Read:
    code, high = ins.get(field), False
    if ins.is_vop3 and ins.has("opsel"):
        high = bool(ins.get("opsel") >> place & 1)
    elif kind in _SIXTEEN and ins.family in _TRUE16 and code >= 256 + 128:
        code, high = code - 128, True  # short forms name halves of the first 128 registers
    read = vector(ins, code, kind, high)
    negate, absolute = ins.get("neg") >> place & 1, ins.get("abs") >> place & 1
    return modified(read, kind, bool(negate), bool(absolute))


def _flushed(read: Read) -> Read:
    return lambda b: floats.flushed(read(b))


def target(ins: Instruction, kind: str, mode: FloatMode | None = None) -> Write:
    """The write of the instruction's vector result, with clamp, omod, op_sel, SDWA and DPP."""
    register = ins.get("vdst") - 256
    if "SDWA" in ins.form:
        write = dpp.placed(ins, register, kind)
    else:
        high = bool(ins.is_vop3 and ins.has("opsel") and ins.get("opsel") >> 3 & 1)
        if high and kind not in _SIXTEEN:
            raise UnsupportedError("op_sel of a 32-bit result")
        short = ins.family in _TRUE16 and not ins.is_vop3 and kind in _SIXTEEN
        if short and register >= 128:
            register, high = register - 128, True
        zero_rest = ins.family == "cdna" and ins.name in ZEROES_HIGH_ON_GFX9
        write = vector_target(register, kind, high, zero_rest)
    if "DPP16" in ins.form:
        write = dpp.only_valid(ins, write)
    if ins.get("omod"):
        raise UnsupportedError("omod")
    if ins.get("clmp"):
        write = _clamped(write, kind, mode)
    if mode is not None and kind == "f32" and not mode.denorm_32 & 2:
        inner = write
        write = lambda b, value: inner(b, floats.flushed(value))  # noqa: E731
    return write


def _clamped(write: Write, kind: str, mode: FloatMode | None) -> Write:
    if kind not in ("f32", "f16") or (mode is not None and not mode.dx10_clamp):
        raise UnsupportedError(f"clamp of {kind}")

    def clamp(b: Waves, value: Any) -> None:
        clipped = np.clip(np.nan_to_num(value, nan=0.0), 0.0, 1.0)
        write(b, clipped.astype(DTYPES[kind]))

    return clamp


def compile_vector(ins: Instruction, mode: FloatMode) -> Step | None:
    """The step of a vector instruction; None where it is another's. Raises UnsupportedError."""
    name = ins.name
    if name in TABLE:
        return _of_table(ins, mode)
    if name == "V_DUAL":
        return _dual(ins, mode)
    if name in ACCUMULATING or name in WITH_LITERAL:
        return _accumulates(ins, mode)
    if name.startswith("V_CMP"):
        return _compares(ins, mode)
    if name in ("V_CNDMASK_B16", "V_CNDMASK_B32"):
        return _selects(ins)
    if name in ("V_MOV_B16", "V_MOV_B32", "V_MOV_B64"):
        return _moves(ins)
    if name in _SPECIAL:
        return _SPECIAL[name](ins, mode)
    return lanes.compile_lanes(ins) or packed.compile_packed(ins)


def _rounds(ins: Instruction, kind: str, mode: FloatMode) -> None:
    if kind == "f32" and mode.round_32:
        raise UnsupportedError(f"{ins.name} with float32 rounding mode {mode.round_32}")
    if kind == "f16" and mode.denorm_16_64 != 3:
        raise UnsupportedError(f"{ins.name} without float16 denormals")


def _of_table(ins: Instruction, mode: FloatMode) -> Step:
    kind, kinds, function = TABLE[ins.name]
    _rounds(ins, kind, mode)
    if kind == "f16" and mode.round_16_64:
        if ins.name != "V_CVT_F16_F32" or mode.round_16_64 != 3:
            raise UnsupportedError(f"{ins.name} with float16 rounding mode {mode.round_16_64}")
        function = floats.half_toward_zero
    reads, write = sources(ins, kinds, mode), target(ins, kind, mode)
    if len(reads) == 1:
        only = reads[0]
        return lambda b: write(b, function(only(b)))
    if len(reads) == 2:
        first, second = reads
        return lambda b: write(b, function(first(b), second(b)))
    one, two, three = reads
    return lambda b: write(b, function(one(b), two(b), three(b)))


def _accumulates(ins: Instruction, mode: FloatMode) -> Step:
    _rounds(ins, "f32", mode)
    kind = _kind_of_factors(ins.name)
    first, second = sources(ins, (kind, kind), mode)
    first = _factor(ins, ins.name, ins.get("src0"), first)
    write = target(ins, "f32", mode)
    if ins.name in WITH_LITERAL:
        literal, of = vector(ins, 255, "f32"), WITH_LITERAL[ins.name]
        return lambda b: write(b, of(first(b), second(b), literal(b)))
    own, function = vector(ins, ins.get("vdst"), "f32"), ACCUMULATING[ins.name]
    return lambda b: write(b, function(first(b), second(b), own(b)))


def _kind_of_factors(name: str) -> str:
    """A register of a dot product's holds two halves."""
    return "u32" if name.startswith("V_DOT2") else "f32"


def _factor(ins: Instruction, name: str, code: int, read: Read) -> Read:
    """Read a factor: a float as an inline constant is the lower half alone, the upper is zero (LLVM
    18, SIInstrInfo and SIMCCodeEmitter; earlier ones took it for both, so their code is wrong).
    """
    if not (name.startswith("V_DOT2") and 240 <= code <= 248):
        return read
    if name.endswith("BF16"):
        raise UnsupportedError("a constant in a pair of halves")
    half = vector(ins, code, "f16")
    return lambda b: half(b).view(np.uint16).astype(np.uint32)


def _moves(ins: Instruction) -> Step:
    kind = {"V_MOV_B16": "u16", "V_MOV_B32": "u32", "V_MOV_B64": "u64"}[ins.name]
    if ins.get("neg") or ins.get("abs"):
        raise UnsupportedError("neg or abs of a move")
    (read,) = sources(ins, (kind,))
    write = target(ins, kind)
    if kind == "u32" and ins.get("src0") >= 256:
        read, write = copied(ins.get("src0") - 256, ins.get("vdst") - 256)
    return lambda b: write(b, read(b))


def _mask_target(ins: Instruction) -> int:
    if ins.form.startswith("VOPC_SDWA"):
        return ins.get("sdst") if ins.get("sd") else VCC
    return VCC if ins.form.startswith("VOPC") else ins.get("vdst")


def _compares(ins: Instruction, mode: FloatMode) -> Step:
    parts = ins.name.split("_")
    if parts[2] == "CLASS" or parts[2] not in COMPARISONS or parts[3].lower() not in DTYPES:
        raise UnsupportedError(ins.name)
    kind, compare = parts[3].lower(), COMPARISONS[parts[2]]
    if ins.get("clmp"):
        raise UnsupportedError("clamp of a comparison")
    first, second = sources(ins, (kind, kind), mode)
    into_exec = parts[1] == "CMPX"
    out = _mask_target(ins)
    if into_exec and ins.family != "cdna":
        out = EXEC

    def step(b: Waves) -> None:
        result = np.logical_and(compare(first(b), second(b)), b.exec)
        b.write_mask(out, result)
        if into_exec and out != EXEC:
            b.write_mask(EXEC, result)

    return step


def _selects(ins: Instruction) -> Step:
    changed = ins.get("neg") or ins.get("abs") or ins.get("src0_neg") or ins.get("src0_abs")
    wide = ins.name == "V_CNDMASK_B32"
    kind = ("f32" if changed else "u32") if wide else ("f16" if changed else "u16")
    first, second = sources(ins, (kind, kind))
    condition = mask(ins, ins.get("src2") if ins.is_vop3 else VCC)
    write = target(ins, kind)
    return lambda b: write(b, np.where(condition(b), second(b), first(b)))


# -- carries, division, wide multiplication --------------------------------------------------


def _mask_out(ins: Instruction) -> int:
    """The SGPR that takes a mask, VCC in the short form; -1 for none."""
    if not ins.has("sdst"):
        return VCC
    code = ins.get("sdst")
    return -1 if code == null_code(ins.family) else code


def _put_mask(b: Waves, register: int, value: Array) -> None:
    if register >= 0:
        b.write_mask(register, np.broadcast_to(value & b.exec, b.exec.shape))


def _carries(ins: Instruction, mode: FloatMode) -> Step:
    first, second = sources(ins, ("u32", "u32"))
    if ins.name.startswith("V_SUBREV"):
        first, second = second, first
    sign = 1 if ins.name.startswith("V_ADD") else -1
    carried = None
    if "_CI_" in ins.name:
        carried = mask(ins, ins.get("src2") if ins.is_vop3 else VCC)
    write, out = vector_target(ins.get("vdst") - 256, "u32"), _mask_out(ins)
    if ins.get("clmp"):
        raise UnsupportedError("clamp of a carry")

    def step(b: Waves) -> None:
        x, y = first(b).astype(np.int64), second(b).astype(np.int64)
        total = x + sign * y
        if carried is not None:
            total = total + sign * carried(b)
        overflow = np.broadcast_to((total > 0xFFFFFFFF) | (total < 0), b.exec.shape)
        write(b, (total & 0xFFFFFFFF).astype(np.uint32))
        _put_mask(b, out, overflow)

    return step


def _multiply_add_wide(ins: Instruction, mode: FloatMode) -> Step:
    """Compilers use it for 32 bits too, with nothing in the upper word of what is added: then
    nothing is in the upper word of the result.
    """
    first, second, third = sources(ins, ("u32", "u32", "u64"))
    register, out = ins.get("vdst") - 256, _mask_out(ins)
    write, upper = vector_target(register, "u64"), ins.get("src2") - 256 + 1

    def step(b: Waves) -> None:
        missing = b.missing_v(upper) if upper > 0 else None
        if missing is None:
            added = third(b)
        else:
            bad, b.v_bad[upper] = b.v_bad[upper], 0
            added = third(b)
            b.v_bad[upper] = bad
        total = first(b).astype(np.uint64) * second(b).astype(np.uint64) + added
        write(b, total)
        if out >= 0:
            _put_mask(b, out, total < added)
        if missing is not None:
            b.forget_v(register + 1, missing)
            b.forget_mask(out)

    return step


def _divide_scale(ins: Instruction, mode: FloatMode) -> Step:
    reads = sources(ins, ("f32", "f32", "f32"), mode)
    write, out = vector_target(ins.get("vdst") - 256, "f32"), _mask_out(ins)

    def step(b: Waves) -> None:
        result, undo = floats.divide_scale(*(read(b) for read in reads))
        write(b, result)
        _put_mask(b, out, undo)

    return step


def _divide_fmas(ins: Instruction, mode: FloatMode) -> Step:
    reads = sources(ins, ("f32", "f32", "f32"), mode)
    write, scaled = target(ins, "f32", mode), mask(ins, VCC)

    def step(b: Waves) -> None:
        first, second, quotient = (read(b) for read in reads)
        write(b, floats.divide_fmas(first, second, quotient, scaled(b)))

    return step


def _any_of_three(ins: Instruction, mode: FloatMode) -> Step:
    """V_BITOP3: bit 4 x + 2 y + z of a table of eight is the result for bits x, y and z. The table
    lies where other instructions have their modifiers.
    """
    table = ins.get("omod") << 6 | ins.get("abs") << 3 | ins.get("neg")
    kind, opsel = ("u32", 0) if ins.name.endswith("B32") else ("u16", ins.get("opsel"))
    reads = [
        vector(ins, ins.get(field), kind, bool(opsel >> place & 1))
        for place, field in enumerate(_FIELDS["VOP3"])
    ]
    write = vector_target(ins.get("vdst") - 256, kind, bool(opsel >> 3))

    def step(b: Waves) -> None:
        x, y, z = (read(b) for read in reads)
        out = np.zeros((), DTYPES[kind])
        for row in range(8):
            if table >> row & 1:
                chosen = (
                    each if row >> 2 - place & 1 else ~each for place, each in enumerate((x, y, z))
                )
                out = out | np.bitwise_and.reduce(np.broadcast_arrays(*chosen))
        write(b, out)

    return step


_SPECIAL: dict[str, Any] = {
    "V_BITOP3_B16": _any_of_three,
    "V_BITOP3_B32": _any_of_three,
    **{f"V_{op}_CO_U32": _carries for op in ("ADD", "SUB", "SUBREV")},
    **{f"V_{op}_CO_CI_U32": _carries for op in ("ADD", "SUB", "SUBREV")},
    "V_MAD_U64_U32": _multiply_add_wide,
    "V_DIV_SCALE_F32": _divide_scale,
    "V_DIV_FMAS_F32": _divide_fmas,
}


# -- two instructions at once ----------------------------------------------------------------


def _dual(ins: Instruction, mode: FloatMode) -> Step:
    """Both halves read before either writes."""
    _rounds(ins, "f32", mode)
    if mode.denorm_32 != 3:
        raise UnsupportedError("VOPD without float32 denormals")
    first, write_first = _half(ins, "x")
    second, write_second = _half(ins, "y")

    def step(b: Waves) -> None:
        x, y = first(b), second(b)
        write_first(b, x)
        write_second(b, y)

    return step


def _half(ins: Instruction, side: str) -> tuple[Read, Write]:
    name = getattr(ins.raw, f"op{side}").name.replace("V_DUAL_", "V_")
    name = {"V_MAX_NUM_F32": "V_MAX_F32", "V_MIN_NUM_F32": "V_MIN_F32"}.get(name, name)
    codes = ins.get(f"src{side}0"), ins.get(f"vsrc{side}1")
    register = ins.get(f"vdst{side}") - 256
    if name == "V_MOV_B32":
        if codes[0] >= 256:
            return copied(codes[0] - 256, register)
        return vector(ins, codes[0], "u32"), vector_target(register, "u32")
    if name == "V_CNDMASK_B32":
        a, c, which = vector(ins, codes[0], "u32"), vector(ins, codes[1], "u32"), mask(ins, VCC)
        return lambda b: np.where(which(b), c(b), a(b)), vector_target(register, "u32")
    if name in ACCUMULATING or name in WITH_LITERAL:
        literal = name in WITH_LITERAL
        function = WITH_LITERAL[name] if literal else ACCUMULATING[name]
        x, y = (vector(ins, code, _kind_of_factors(name)) for code in codes)
        x = _factor(ins, name, codes[0], x)
        last = vector(ins, 255, "f32") if literal else vector(ins, register + 256, "f32")
        return lambda b: function(x(b), y(b), last(b)), vector_target(register, "f32")
    if name not in TABLE or len(TABLE[name][1]) != 2:
        raise UnsupportedError(f"{name} in a pair")
    kind, kinds, of = TABLE[name]
    p, q = (vector(ins, code, each) for code, each in zip(codes, kinds, strict=True))
    return lambda b: of(p(b), q(b)), vector_target(register, kind)
