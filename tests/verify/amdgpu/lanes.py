"""Vector instructions that look across lanes, or that move between lanes and scalars."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import UndefinedError, UnsupportedError
from tests.verify.amdgpu.operands import Read, scalar, scalar_target, vector, vector_target
from tests.verify.amdgpu.salu import Step
from tests.verify.amdgpu.state import Waves

Array = np.ndarray[Any, Any]


def compile_lanes(ins: Instruction) -> Step | None:
    """The step; None where the instruction is another's."""
    name = ins.name
    if name in ("V_READFIRSTLANE_B32", "V_READLANE_B32"):
        return _reads_lane(ins)
    if name == "V_WRITELANE_B32":
        return _writes_lane(ins)
    if name in ("V_PERMLANEX16_B32", "V_PERMLANE16_B32"):
        return _permutes(ins)
    if name in ("V_MBCNT_LO_U32_B32", "V_MBCNT_HI_U32_B32"):
        return _counts(ins)
    if name.startswith("V_S_"):
        return _uniform(ins)
    if name == "V_SWAP_B32":
        return _swaps(ins)
    return None


def _raw(b: Waves, register: int, needed: Array) -> Array:
    """All lanes of a VGPR, of which those in `needed` must have been written."""
    if b.v_bad[register]:
        b.check_v(register, needed)
    return b.vl[register]


def _reads_lane(ins: Instruction) -> Step:
    code = ins.get("src0")
    if code < 256:
        raise UnsupportedError(f"{ins.name} of a scalar")
    register, first = code - 256, ins.name == "V_READFIRSTLANE_B32"
    which: Read | None = None
    if not first:
        which = scalar(ins, ins.get("src1"), "u32")
    # CDNA's table names the scalar target as if it were a VGPR.
    write = scalar_target(ins, ins.get("vdst") & 0xFF, "u32")

    def step(b: Waves) -> None:
        if which is None:
            lane = np.argmax(b.exec, axis=1)  # lane 0 where none is active
        else:
            lane = np.broadcast_to(which(b), b.count).astype(np.int64) % b.lanes
        rows = np.arange(b.count)
        needed = np.zeros_like(b.exec)
        needed[rows, lane] = True
        write(b, _raw(b, register, needed)[rows, lane])

    return step


def _writes_lane(ins: Instruction) -> Step:
    value, which = scalar(ins, ins.get("src0"), "u32"), scalar(ins, ins.get("src1"), "u32")
    register = ins.get("vdst") - 256

    def step(b: Waves) -> None:
        lane = np.broadcast_to(which(b), b.count).astype(np.int64) % b.lanes
        before, full = b.exec, b.full
        b.exec = np.zeros_like(before)
        b.exec[np.arange(b.count), lane] = True
        b.full = False
        b.put_v(register, np.broadcast_to(value(b), b.count)[:, None])
        b.exec, b.full = before, full

    return step


def _permutes(ins: Instruction) -> Step:
    """V_PERMLANE(X)16_B32: each lane takes one of its own row, or (X) of the other row of 16."""
    other = 16 if ins.name == "V_PERMLANEX16_B32" else 0
    code = ins.get("src0")
    if code < 256 or ins.get("neg") or ins.get("abs") or ins.get("clmp"):
        raise UnsupportedError(f"{ins.name} with modifiers or a scalar source")
    low, high = scalar(ins, ins.get("src1"), "u32"), scalar(ins, ins.get("src2"), "u32")
    fetch_inactive, register = ins.get("opsel") & 1, code - 256
    write = vector_target(ins.get("vdst") - 256, "u32")

    def step(b: Waves) -> None:
        lane = np.arange(b.lanes)
        shift = (lane % 8 * 4).astype(np.uint32)
        words = np.stack([np.broadcast_to(x(b), b.count) for x in (low, high)])
        choice = (words[lane % 16 // 8].T >> shift) & np.uint32(15)
        source = ((lane & ~15) ^ other) + choice.astype(np.int64)
        active = np.take_along_axis(b.exec, source, axis=1)
        if not fetch_inactive and (b.exec & ~active).any():
            raise UndefinedError("permlane that reads an inactive lane without fetching it")
        needed = np.zeros_like(b.exec)
        np.put_along_axis(needed, source, True, axis=1)
        if not b.full and b.v_bad[register]:
            needed = np.zeros_like(b.exec)
            rows = np.broadcast_to(np.arange(b.count)[:, None], source.shape)
            needed[rows[b.exec], source[b.exec]] = True
        write(b, np.take_along_axis(_raw(b, register, needed), source, axis=1))

    return step


def _counts(ins: Instruction) -> Step:
    """V_MBCNT: the set bits of a mask below this lane, plus a number."""
    masked, added = (
        vector(ins, ins.get("src0"), "u32"),
        vector(ins, ins.get("src1" if ins.is_vop3 else "vsrc1"), "u32"),
    )
    write = vector_target(ins.get("vdst") - 256, "u32")
    first = 0 if "_LO_" in ins.name else 32

    def step(b: Waves) -> None:
        below = np.clip(np.arange(b.lanes) - first, 0, 32).astype(np.uint64)
        ones = ((np.uint64(1) << below) - np.uint64(1)).astype(np.uint32)
        bits = np.ascontiguousarray(np.broadcast_to(masked(b) & ones, b.exec.shape))
        counted = np.unpackbits(bits.view(np.uint8).reshape(*bits.shape, 4), axis=2).sum(axis=2)
        write(b, counted.astype(np.uint32) + added(b))

    return step


def _uniform(ins: Instruction) -> Step:
    """RDNA4's V_S_...: a transcendental of a scalar."""
    from tests.verify.amdgpu.valu import TABLE

    row = TABLE.get(ins.name.replace("V_S_", "V_"))
    if row is None or row[1] != ("f32",) or ins.get("clmp") or ins.get("omod"):
        raise UnsupportedError(ins.name)
    if ins.get("neg") or ins.get("abs"):
        raise UnsupportedError(f"{ins.name} with modifiers")
    read, write = scalar(ins, ins.get("src0"), "f32"), scalar_target(ins, ins.get("vdst"), "f32")
    return lambda b: write(b, row[2](read(b)))


def _swaps(ins: Instruction) -> Step:
    codes = ins.get("src0"), ins.get("vdst")
    reads = [vector(ins, code, "u32") for code in codes]
    writes = [vector_target(code - 256, "u32") for code in reversed(codes)]

    def step(b: Waves) -> None:
        values = [np.array(read(b)) for read in reads]
        for write, value in zip(writes, values, strict=True):
            write(b, value)

    return step
