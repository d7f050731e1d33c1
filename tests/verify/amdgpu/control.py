"""Branches, waits, barriers and the end: what changes where waves go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import HazardError, UnsupportedError
from tests.verify.amdgpu.hazards import barrier_is_safe
from tests.verify.amdgpu.operands import null_code
from tests.verify.amdgpu.salu import Step
from tests.verify.amdgpu.state import LDS, LOAD, SMEM, STORE, VCC, Waves

BARRIER, END, SPLIT = -1, -2, -3
"""What a step returns instead of the place to go on at; None is the next one."""
_MINUS_ONE = 193
"""The source code of the inline constant -1: the work-group's barrier on RDNA4."""


def compile_control(ins: Instruction, index_of: dict[int, int]) -> Step | None:
    """The step; None where the instruction is another's. Raises UnsupportedError."""
    name = ins.name
    if name in ("S_ENDPGM", "S_SENDMSG"):
        return _ends(ins)
    if name == "S_BRANCH" or name.startswith("S_CBRANCH_"):
        return _branches(ins, index_of)
    if name.startswith("S_WAITCNT") or name.startswith("S_WAIT_"):
        return _waits(ins)
    if name in ("BUFFER_GL0_INV", "GLOBAL_INV"):
        return _empties
    if name == "S_BARRIER":
        return _barrier
    if name == "S_BARRIER_SIGNAL":
        return _signals(ins)
    if name == "S_BARRIER_WAIT":
        return _meets(ins)
    return None


def _ends(ins: Instruction) -> Step:
    if ins.name == "S_ENDPGM":
        return lambda b: END
    if ins.get("simm16") & 0xFF != 3:
        raise UnsupportedError(f"message {ins.get('simm16')}")
    return lambda b: None  # vector registers are given back before the end


def _branches(ins: Instruction, index_of: dict[int, int]) -> Step:
    distance = ins.get("simm16")
    address = ins.address + 4 + 4 * (distance - 0x10000 if distance & 0x8000 else distance)
    if address not in index_of:
        raise UnsupportedError(f"{ins.name} to {address:#x}, where no instruction begins")
    target = index_of[address]
    condition = _CONDITIONS.get(ins.name)
    if ins.name == "S_BRANCH":
        return lambda b: target
    if condition is None:
        raise UnsupportedError(ins.name)

    def step(b: Waves) -> int | None:
        taken = condition(b)
        if taken.all():
            return target
        if not taken.any():
            return None
        b.branch = taken
        return SPLIT

    step.target = target  # type: ignore[attr-defined]
    return step


def _vcc(b: Waves) -> Any:
    return b.mask_of(VCC).any(axis=1)


_CONDITIONS: dict[str, Callable[[Waves], Any]] = {
    "S_CBRANCH_SCC0": lambda b: ~b.scc,
    "S_CBRANCH_SCC1": lambda b: b.scc,
    "S_CBRANCH_VCCZ": lambda b: ~_vcc(b),
    "S_CBRANCH_VCCNZ": _vcc,
    "S_CBRANCH_EXECZ": lambda b: ~b.exec.any(axis=1),
    "S_CBRANCH_EXECNZ": lambda b: b.exec.any(axis=1),
}


def _fields(ins: Instruction) -> dict[int, int]:
    """Counter -> how many accesses may be left on their way."""
    left = ins.get("simm16")
    if ins.name == "S_WAITCNT" and ins.family in ("cdna", "rdna2"):
        lgkm = left >> 8 & (0xF if ins.family == "cdna" else 0x3F)
        return {LOAD: (left & 0xF) | left >> 10 & 0x30, LDS: lgkm, SMEM: lgkm}
    if ins.name == "S_WAITCNT":
        lgkm = left >> 4 & 0x3F
        return {LOAD: left >> 10 & 0x3F, LDS: lgkm, SMEM: lgkm}
    if ins.name == "S_WAITCNT_VSCNT":
        if ins.get("sdst") != null_code(ins.family):
            raise UnsupportedError("a wait for stores by a register")
        return {STORE: left & 0x3F}
    single = {"S_WAIT_LOADCNT": LOAD, "S_WAIT_STORECNT": STORE, "S_WAIT_DSCNT": LDS}
    single["S_WAIT_KMCNT"] = SMEM
    if ins.name in single:
        return {single[ins.name]: left & 0x3F}
    if ins.name == "S_WAIT_LOADCNT_DSCNT":
        return {LOAD: left >> 8 & 0x3F, LDS: left & 0x3F}
    if ins.name == "S_WAIT_STORECNT_DSCNT":
        return {STORE: left >> 8 & 0x3F, LDS: left & 0x3F}
    raise UnsupportedError(ins.name)


def _waits(ins: Instruction) -> Step:
    if ins.name in ("S_WAIT_ALU", "S_WAITCNT_DEPCTR"):
        return lambda b: None
    left = tuple(_fields(ins).items())

    def step(b: Waves) -> None:
        for counter, number in left:
            b.wait(counter, number)

    return step


def _empties(b: Waves) -> None:
    """The cache of a CU."""
    b.fresh[...] = b.epoch


def _barrier(b: Waves) -> int:
    barrier_is_safe(b)
    b.settled[...] = b.done
    return BARRIER


def _signals(ins: Instruction) -> Step:
    if ins.get("ssrc0") != _MINUS_ONE:
        raise UnsupportedError("a barrier that is not the work-group's")

    def step(b: Waves) -> None:
        barrier_is_safe(b)
        if b.signalled.any():
            raise HazardError("a barrier is signalled twice")
        b.signalled[...] = True
        b.settled[...] = b.done

    return step


def _meets(ins: Instruction) -> Step:
    if ins.get("simm16") != 0xFFFF:
        raise UnsupportedError("a barrier that is not the work-group's")

    def step(b: Waves) -> int:
        if not b.signalled.all():
            raise HazardError("a barrier is waited for that was not signalled")
        b.signalled[...] = False
        return BARRIER

    return step
