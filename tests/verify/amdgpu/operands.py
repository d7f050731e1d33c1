"""Reading and writing operands: each a closure over register numbers, made once per instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import UnsupportedError
from tests.verify.amdgpu.state import EXEC, Waves

Array = np.ndarray[Any, Any]
Read = Callable[[Waves], Any]
Write = Callable[[Waves, Any], None]

DTYPES: dict[str, Any] = {
    "f32": np.float32,
    "u32": np.uint32,
    "i32": np.int32,
    "f16": np.float16,
    "u16": np.uint16,
    "i16": np.int16,
    "u64": np.uint64,
    "i64": np.int64,
}
_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
_INVERSE_2PI = {"f32": 0x3E22F983, "u32": 0x3E22F983, "i32": 0x3E22F983, "f16": 0x3118}
LITERAL = 255


def null_code(family: str) -> int:
    """The register that reads as zero and takes nothing; CDNA has none."""
    return {"cdna": -1, "rdna2": 125}.get(family, 124)


def constant(ins: Instruction, code: int, kind: str) -> Array | None:
    """The value of an inline constant or the literal, None for a register."""
    dtype = DTYPES[kind]
    if 128 <= code <= 208:
        number = code - 128 if code <= 192 else 192 - code
        if kind == "f32":
            return np.array(number & 0xFFFFFFFF, np.uint32).view(np.float32)
        if kind == "f16":
            return np.array(number & 0xFFFF, np.uint16).view(np.float16)
        return np.array(number & (2 ** (8 * np.dtype(dtype).itemsize) - 1)).astype(dtype)
    if code in _FLOATS:
        if kind in ("f32", "f16"):
            return np.array(_FLOATS[code], dtype)
        if kind in ("u32", "i32"):
            return np.array(_FLOATS[code], np.float32).view(dtype)
        raise UnsupportedError(f"a float constant as {kind}")
    if code == 248:
        if kind not in _INVERSE_2PI:
            raise UnsupportedError(f"1/(2 pi) as {kind}")
        return np.array(_INVERSE_2PI[kind], np.uint16 if kind == "f16" else np.uint32).view(dtype)
    if code == LITERAL:
        return _literal(ins, kind)
    return None


def _literal(ins: Instruction, kind: str) -> Array:
    if not ins.has("literal"):
        raise UnsupportedError("a literal in a form without one")
    bits = ins.get("literal")
    if kind in ("f16", "u16", "i16"):
        return np.array(bits & 0xFFFF, np.uint16).view(DTYPES[kind])
    if kind == "i64":
        return np.array(bits, np.uint32).view(np.int32).astype(np.int64)
    if kind == "u64":
        return np.array(bits, np.uint64)
    return np.array(bits, np.uint32).view(DTYPES[kind])


# -- scalar operands: (waves,) ----------------------------------------------------------------


def scalar(ins: Instruction, code: int, kind: str) -> Read:
    """An SGPR, a pair, a constant or a special register, per wave; not of 16 bits."""
    fixed = constant(ins, code, kind)
    if fixed is not None:
        return lambda b: fixed
    dtype = DTYPES[kind]
    if code == null_code(ins.family):
        zero = np.array(0, dtype)
        return lambda b: zero
    if code == 253 and kind in ("u32", "i32"):
        return lambda b: b.scc.astype(dtype)
    if code >= 128:
        raise UnsupportedError(f"scalar source {code}")
    return _sgpr(code, kind)


def _sgpr(code: int, kind: str) -> Read:
    dtype = DTYPES[kind]
    if np.dtype(dtype).itemsize == 4:

        def read(b: Waves) -> Array:
            if b.s_bad[code]:
                b.check_s(code)
            return b.s[code].view(dtype)

        return read

    def read_pair(b: Waves) -> Array:
        for each in (code, code + 1):
            if b.s_bad[each]:
                b.check_s(each)
        low, high = b.s[code].astype(np.uint64), b.s[code + 1].astype(np.uint64)
        return (low | high << np.uint64(32)).view(dtype)

    return read_pair


def scalar_target(ins: Instruction, code: int, kind: str) -> Write:
    """Writes (waves,) or a number into an SGPR or a pair."""
    if code == null_code(ins.family):
        return lambda b, value: None
    if code >= 128:
        raise UnsupportedError(f"scalar target {code}")
    dtype = DTYPES[kind]
    if np.dtype(dtype).itemsize == 4:

        def write(b: Waves, value: Any) -> None:
            b.write_s(code, np.asarray(value, dtype).view(np.uint32))

        return write

    def write_pair(b: Waves, value: Any) -> None:
        bits = np.asarray(value, dtype).view(np.uint64)
        b.write_s(code, (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32), refresh=False)
        b.write_s(code + 1, (bits >> np.uint64(32)).astype(np.uint32), refresh=False)
        if code == EXEC:
            b.refresh_exec()

    return write_pair


# -- vector operands: broadcast to (waves, lanes) ---------------------------------------------


def vector(ins: Instruction, code: int, kind: str, high: bool = False) -> Read:
    """A VGPR, SGPR or constant as the kind says; `high`: the upper half of a 16-bit operand."""
    if code < 256:
        return _broadcast(ins, code, kind, high)
    return vgpr(code - 256, kind, high)


def vgpr(register: int, kind: str, high: bool = False) -> Read:
    """A VGPR by its number; 256 and up are accumulation VGPRs."""
    if kind in ("f16", "u16", "i16"):
        dtype, place = DTYPES[kind], int(high)

        def read_half(b: Waves) -> Array:
            if b.v_bad[register]:
                b.check_v(register)
            return b.vh[register][..., place].view(dtype)

        return read_half
    if high:
        raise UnsupportedError(f"the upper half of {kind}")
    if kind in ("u64", "i64"):
        return _vgpr_pair(register, kind)
    where = {"f32": "vfl", "u32": "vl", "i32": "vil"}[kind]

    def read(b: Waves) -> Array:
        if b.v_bad[register]:
            b.check_v(register)
        found: Array = getattr(b, where)[register]
        return found

    return read


def copied(source: int, register: int) -> tuple[Read, Write]:
    """The read and the write of a plain copy of a VGPR, each for itself. Lanes in which nothing was
    written count as unwritten in the copy, too: compilers copy what no instruction uses.
    """

    def read(b: Waves) -> tuple[Array, Array | None]:
        missing = b.missing_v(source)
        return b.vl[source].copy(), missing

    def write(b: Waves, found: tuple[Array, Array | None]) -> None:
        value, missing = found
        b.put_v(register, value)
        if missing is not None:
            b.forget_v(register, missing)

    return read, write


def _vgpr_pair(register: int, kind: str) -> Read:
    dtype = DTYPES[kind]

    def read(b: Waves) -> Array:
        for each in (register, register + 1):
            if b.v_bad[each]:
                b.check_v(each)
        low, high = b.vl[register].astype(np.uint64), b.vl[register + 1].astype(np.uint64)
        return (low | high << np.uint64(32)).view(dtype)

    return read


def _broadcast(ins: Instruction, code: int, kind: str, high: bool) -> Read:
    fixed = constant(ins, code, kind)
    if fixed is not None:
        if high:
            raise UnsupportedError("the upper half of a constant")
        return lambda b: fixed
    if kind in ("f16", "u16", "i16"):
        whole, shift, dtype = scalar(ins, code, "u32"), np.uint32(16 * high), DTYPES[kind]
        return lambda b: (whole(b) >> shift).astype(np.uint16).view(dtype)[..., None]
    inner = scalar(ins, code, kind)
    return lambda b: inner(b)[..., None]


def mask(ins: Instruction, code: int) -> Read:
    """A lane mask in SGPRs, as bool (waves, lanes)."""
    if code >= 128:
        raise UnsupportedError(f"lane mask {code}")
    return lambda b: b.mask_of(code)


def modified(read: Read, kind: str, negate: bool, absolute: bool) -> Read:
    """With |x| and then -x, of floats."""
    if not (negate or absolute):
        return read
    if kind not in ("f32", "f16"):
        raise UnsupportedError(f"neg or abs of {kind}")

    def changed(b: Waves) -> Any:
        value = read(b)
        if absolute:
            value = np.abs(value)
        return np.negative(value) if negate else value

    return changed


def vector_target(register: int, kind: str, high: bool = False, zero_rest: bool = False) -> Write:
    """Writes the active lanes of a VGPR. 16 bits: the named half, the other kept or zeroed."""
    if kind in ("f16", "u16", "i16"):
        return _half_target(register, kind, high, zero_rest)
    if kind in ("u64", "i64"):

        def write_pair(b: Waves, value: Any) -> None:
            bits = np.asarray(value).astype(DTYPES[kind], copy=False).view(np.uint64)
            b.put_v(register, (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32))
            b.put_v(register + 1, (bits >> np.uint64(32)).astype(np.uint32))

        return write_pair
    where = {"f32": "vfl", "u32": "vl", "i32": "vil"}[kind]

    def write(b: Waves, value: Any) -> None:
        target = getattr(b, where)[register]
        if b.full:
            target[...] = value
        else:
            np.copyto(target, value, where=b.exec, casting="unsafe")
        if b.v_bad[register]:
            b.wrote_v(register)

    return write


def _half_target(register: int, kind: str, high: bool, zero_rest: bool) -> Write:
    dtype = DTYPES[kind]

    def write(b: Waves, value: Any) -> None:
        bits = np.asarray(value, dtype).view(np.uint16)
        np.copyto(b.vh[register][..., int(high)], bits, where=b.exec)
        if zero_rest:
            np.copyto(b.vh[register][..., 1 - int(high)], 0, where=b.exec)
        if b.v_bad[register]:
            b.wrote_v(register)

    return write
