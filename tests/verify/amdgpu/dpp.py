"""DPP and SDWA: sources moved between lanes, and parts of registers as operands."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import UninitializedError, UnsupportedError
from tests.verify.amdgpu.operands import DTYPES, Read, Write, modified, vector, vector_target
from tests.verify.amdgpu.state import Waves

Array = np.ndarray[Any, Any]
_BY_WORD = {"f32": "vfl", "u32": "vl", "i32": "vil"}


@lru_cache(maxsize=256)
def source_lanes(control: int, lanes: int, family: str) -> Array:
    """For each lane the lane it reads, -1 where that lies outside of its row."""
    lane = np.arange(lanes)
    row, place = lane & ~15, lane & 15
    if control <= 0xFF:
        return (lane & ~3) | np.array([control >> 2 * (each & 3) & 3 for each in lane])
    shift = control & 15
    if 0x101 <= control <= 0x10F:
        return np.where(place + shift < 16, lane + shift, -1)
    if 0x111 <= control <= 0x11F:
        return np.where(place >= shift, lane - shift, -1)
    if 0x121 <= control <= 0x12F:
        return row + ((place - shift) & 15)
    if control == 0x140:
        return row + 15 - place
    if control == 0x141:
        return (lane & ~7) + 7 - (lane & 7)
    if 0x150 <= control <= 0x15F:  # row_share; row_newbcast on gfx90a and gfx942
        return row + shift
    if 0x160 <= control <= 0x16F and family != "cdna":
        return row + (place ^ shift)
    raise UnsupportedError(f"DPP control {control:#x}")


def _readable(ins: Instruction, b: Waves) -> tuple[Array, Array]:
    """The source lane of each lane, and where there is one that may be read."""
    lane = source_lanes(ins.get("dpp"), b.lanes, ins.family)
    valid = np.broadcast_to(lane >= 0, b.exec.shape)
    if not ins.get("fi") and not b.full:
        valid = valid & b.exec[:, lane]
    return lane, valid


def _written(ins: Instruction, b: Waves) -> Array:
    allowed = _allowed(ins.get("row_mask"), ins.get("bank_mask"), b.lanes)
    if ins.get("bc"):
        return np.broadcast_to(allowed, b.exec.shape)
    return allowed & _readable(ins, b)[1]


@lru_cache(maxsize=256)
def _allowed(rows: int, banks: int, lanes: int) -> Array:
    lane = np.arange(lanes)
    return (rows >> (lane // 16) & 1 == 1) & (banks >> (lane // 4 % 4) & 1 == 1)


def moved(ins: Instruction, kind: str) -> Read:
    """Source 0 of a DPP16 form, from the lanes that the control names; 0 where there is none."""
    if kind not in _BY_WORD:
        raise UnsupportedError(f"DPP of {kind}")
    register, where = ins.get("vsrc0") - 256, _BY_WORD[kind]

    def read(b: Waves) -> Array:
        lane, valid = _readable(ins, b)
        if b.v_bad[register]:
            b.check_v(register, np.zeros_like(b.exec))
            used = valid & b.exec & _written(ins, b)
            if (used & ~b.v_init[register][:, lane]).any():
                raise UninitializedError(f"v{register} is read by DPP where nothing was written")
        found: Array = getattr(b, where)[register][:, lane]
        return np.where(valid, found, np.zeros((), DTYPES[kind]))

    return modified(read, kind, bool(ins.get("src0_neg")), bool(ins.get("src0_abs")))


def only_valid(ins: Instruction, write: Write) -> Write:
    """The write of a DPP16 form, which leaves lanes alone whose source is none of theirs."""

    def narrowed(b: Waves, value: Any) -> None:
        before, full = b.exec, b.full
        value = np.array(value)
        written = _written(ins, b)
        if written.all():
            write(b, value)
            return
        b.exec = before & written
        b.full = bool(b.exec.all())
        write(b, value)
        b.exec, b.full = before, full

    return narrowed


# -- SDWA --------------------------------------------------------------------------------------

_BYTES, _WORDS, _DWORD = (0, 1, 2, 3), (4, 5), 6


def selected(ins: Instruction, place: int, kind: str) -> Read:
    """Source `place` of an SDWA form: a byte, a word or all of the register."""
    field = "vsrc0" if place == 0 else "vsrc1"
    code = ins.get(field)
    if place == 0 and ins.get("s0") or place == 1 and ins.get("s1"):
        code &= 0xFF  # an SGPR or a constant
    choice, extended = ins.get(f"src{place}_sel"), bool(ins.get(f"src{place}_sext"))
    read = _part(vector(ins, code, "u32"), choice, extended, kind)
    negate, absolute = ins.get(f"src{place}_neg"), ins.get(f"src{place}_abs")
    return modified(read, kind, bool(negate), bool(absolute))


def _part(whole: Read, choice: int, extended: bool, kind: str) -> Read:
    if choice == _DWORD:
        shift, bits = 0, 32
    elif choice in _WORDS:
        shift, bits = 16 * (choice - 4), 16
    elif choice in _BYTES:
        shift, bits = 8 * choice, 8
    else:
        raise UnsupportedError(f"SDWA select {choice}")
    if kind == "f32" and bits != 32 or kind == "f16" and bits == 8 or kind not in DTYPES:
        raise UnsupportedError(f"SDWA select {choice} of {kind}")
    narrow: Any = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
    signed: Any = {8: np.int8, 16: np.int16, 32: np.int32}[bits]
    dtype = np.dtype(DTYPES[kind])
    raw: Any = {2: np.uint16, 4: np.uint32}[dtype.itemsize]

    def read(b: Waves) -> Array:
        part = (whole(b) >> np.uint32(shift)).astype(narrow)
        if extended:
            part = part.view(signed)
        return np.ascontiguousarray(part.astype(raw)).view(dtype)

    return read


def placed(ins: Instruction, register: int, kind: str) -> Write:
    """The write of an SDWA form: into a byte, a word or all of the register; the rest is zeroed
    (UNUSED_PAD) or kept (UNUSED_PRESERVE).
    """
    choice, unused = ins.get("dst_sel"), ins.get("dst_unused")
    if choice == _DWORD:
        if kind in ("f16", "u16", "i16"):
            return vector_target(register, kind, zero_rest=True)
        return vector_target(register, kind)
    if unused not in (0, 2):
        raise UnsupportedError(f"SDWA dst_unused {unused}")
    shift, bits = (16 * (choice - 4), 16) if choice in _WORDS else (8 * choice, 8)
    ones = np.uint32((1 << bits) - 1 << shift)
    old, put = vector(ins, register + 256, "u32"), vector_target(register, "u32")
    dtype = np.dtype(DTYPES[kind])
    raw: Any = {2: np.uint16, 4: np.uint32}[dtype.itemsize]

    def write(b: Waves, value: Any) -> None:
        narrow = np.ascontiguousarray(np.asarray(value, dtype)).view(raw).astype(np.uint32)
        placed_bits = (narrow << np.uint32(shift)) & ones
        put(b, placed_bits | (old(b) & ~ones) if unused == 2 else placed_bits)

    return write
