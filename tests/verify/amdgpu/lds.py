"""DS instructions: LDS accesses, and moves between lanes by the LDS hardware."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import UnsupportedError
from tests.verify.amdgpu.hazards import LdsMemory
from tests.verify.amdgpu.operands import vector, vgpr
from tests.verify.amdgpu.salu import Step
from tests.verify.amdgpu.state import LDS, Waves

Array = np.ndarray[Any, Any]
_OLD_NAMES = (  # of CDNA, and those of RDNA
    ("DS_READ2ST64_", "DS_LOAD_2ADDR_STRIDE64_"),
    ("DS_WRITE2ST64_", "DS_STORE_2ADDR_STRIDE64_"),
    ("DS_READ2_", "DS_LOAD_2ADDR_"),
    ("DS_WRITE2_", "DS_STORE_2ADDR_"),
    ("DS_READ_", "DS_LOAD_"),
    ("DS_WRITE_", "DS_STORE_"),
)
_ACCESS = re.compile(r"DS_(LOAD|STORE)_(2ADDR_)?(STRIDE64_)?([BUI])(\d+)(_D16)?(_HI)?$")


@dataclass
class LdsTraffic:
    """What one LDS instruction has moved, and the clocks that bank conflicts cost."""

    bytes: int = 0
    accesses: int = 0
    conflict_clocks: int = 0


@dataclass
class LdsSpace:
    """LDS as the instructions of one run see it; `memory` is set anew for each set of groups."""

    memory: LdsMemory
    traffic: dict[int, LdsTraffic] = field(default_factory=dict)


def compile_lds(ins: Instruction, place: int, space: LdsSpace) -> Step | None:
    """The step of a DS instruction; None where it is another's."""
    if ins.form != "DS":
        return None
    if ins.get("gds"):
        raise UnsupportedError("GDS")
    if ins.name in ("DS_BPERMUTE_B32", "DS_PERMUTE_B32"):
        return _permutes(ins)
    if ins.name == "DS_SWIZZLE_B32":
        return _swizzles(ins)
    name = ins.name
    for old, new in _OLD_NAMES:
        name = name.replace(old, new)
    match = _ACCESS.match(name)
    if match is None:
        raise UnsupportedError(ins.name)
    size = int(match[5]) // 8
    offsets = [ins.get("offset0") | ins.get("offset1") << 8]
    if match[2]:
        scale = size * (64 if match[3] else 1)
        offsets = [ins.get("offset0") * scale, ins.get("offset1") * scale]
    if match[1] == "LOAD":
        part = _Part(match[4] == "I", bool(match[6]), bool(match[7]))
        return _load(ins, place, space, offsets, size, part)
    return _store(ins, place, space, offsets, size, bool(match[7]))


def _register(ins: Instruction, name: str) -> int:
    register = ins.get(name) - 256
    return register + 256 if ins.has("acc") and ins.get("acc") else register


def _note(space: LdsSpace, place: int, b: Waves, at: Array, size: int) -> None:
    traffic = space.traffic.setdefault(place, LdsTraffic())
    traffic.bytes += int(b.exec.sum()) * size
    traffic.accesses += b.count
    traffic.conflict_clocks += space.memory.conflicts(b, at, size)


@dataclass(frozen=True)
class _Part:
    """How a load of less than a word fills its register: `d16`, the half that `high` names."""

    signed: bool
    d16: bool
    high: bool

    def put(self, b: Waves, register: int, source: Array) -> None:
        """(n,) uint8 or uint16 of the active lanes."""
        if self.signed:
            source = source.view(np.dtype(f"i{source.dtype.itemsize}"))
        if self.d16:
            b.vh[register][..., int(self.high)][b.exec] = source.astype(np.int16).view(np.uint16)
        else:
            b.vl[register][b.exec] = source.astype(np.int32).view(np.uint32)


def _load(
    ins: Instruction, place: int, space: LdsSpace, offsets: list[int], size: int, part: _Part
) -> Step:
    address = vector(ins, ins.get("addr"), "u32")
    words = max(1, size // 4)
    first = _register(ins, "vdst")
    merges = part.d16 and ins.family == "cdna"

    def step(b: Waves) -> None:
        base = address(b).astype(np.int64)
        if merges and b.v_bad[first]:
            b.check_v(first, np.zeros_like(b.exec))
        b.issue(LDS)
        for turn, offset in enumerate(offsets):
            at = base + offset
            if b.exec.any():
                places = space.memory.places(b, at, size, min(size, 8) if size != 12 else 4)
                space.memory.touch(b, places, size, writes=False)
                _note(space, place, b, at, size)
                _put(b, first + turn * words, space.memory, places, size, part)
        for each in range(first, first + words * len(offsets)):
            b.expect_v(each, LDS)

    return step


def _put(b: Waves, register: int, memory: LdsMemory, places: Array, size: int, part: _Part) -> None:
    if size < 4:
        part.put(b, register, memory.halves[places >> 1] if size == 2 else memory.bytes[places])
        return
    found = memory.words[(places >> 2)[:, None] + np.arange(size // 4)]
    for word in range(size // 4):
        if b.full:
            b.vl[register + word][...] = found[:, word].reshape(b.count, b.lanes)
        else:
            b.vl[register + word][b.exec] = found[:, word]


def _store(
    ins: Instruction, place: int, space: LdsSpace, offsets: list[int], size: int, high: bool
) -> Step:
    address = vector(ins, ins.get("addr"), "u32")
    words = max(1, size // 4)
    if size == 1:
        raise UnsupportedError("LDS stores of a byte: races are noted by half words")
    starts = [_register(ins, name) for name in ("data0", "data1")[: len(offsets)]]
    reads = [[vgpr(start + each, "u32") for each in range(words)] for start in starts]

    def step(b: Waves) -> None:
        base = address(b).astype(np.int64)
        values = [np.stack([read(b)[b.exec] for read in part], axis=1) for part in reads]
        b.issue(LDS)
        if not b.exec.any():
            return
        for offset, value in zip(offsets, values, strict=True):
            at = base + offset
            places = space.memory.places(b, at, size, min(size, 8) if size != 12 else 4)
            space.memory.touch(b, places, size, writes=True)
            _note(space, place, b, at, size)
            if size == 2:
                half = value[:, 0] >> np.uint32(16 * high)
                space.memory.halves[places >> 1] = half.astype(np.uint16)
            else:
                space.memory.words[(places >> 2)[:, None] + np.arange(words)] = value

    return step


# -- moves between lanes -----------------------------------------------------------------------


def _permutes(ins: Instruction) -> Step:
    """DS_BPERMUTE_B32: a lane takes the value of the lane that it names by its byte address / 4.
    An inactive lane gives 0. DS_PERMUTE_B32 sends instead.
    """
    if ins.name == "DS_PERMUTE_B32":
        raise UnsupportedError(ins.name)
    address = vector(ins, ins.get("addr"), "u32")
    data, target = _register(ins, "data0"), _register(ins, "vdst")
    offset = ins.get("offset0") | ins.get("offset1") << 8
    in_halves = ins.family in ("rdna2", "rdna3")

    def step(b: Waves) -> None:
        lane = ((address(b) + np.uint32(offset)) >> np.uint32(2)).astype(np.int64) % b.lanes
        if in_halves and b.lanes == 64 and ((lane ^ np.arange(64)) & 32)[b.exec].any():
            raise UnsupportedError(f"{ins.name} of wave64 that names a lane of the other half")
        rows = np.broadcast_to(np.arange(b.count)[:, None], lane.shape)
        if b.v_bad[data]:
            needed = np.zeros_like(b.exec)
            needed[rows[b.exec], lane[b.exec]] = True
            b.check_v(data, needed & b.exec)
        sent = np.where(b.exec, b.vl[data], np.uint32(0))
        taken = np.take_along_axis(sent, lane, axis=1)
        b.issue(LDS)
        np.copyto(b.vl[target], taken, where=b.exec)
        b.expect_v(target, LDS)

    return step


def _swizzles(ins: Instruction) -> Step:
    """DS_SWIZZLE_B32 in its bit-mask mode, within 32 lanes."""
    control = ins.get("offset0") | ins.get("offset1") << 8
    if control & 0x8000:
        raise UnsupportedError(f"swizzle {control:#x}")
    and_, or_, xor = control & 31, control >> 5 & 31, control >> 10 & 31
    data, target = _register(ins, "addr"), _register(ins, "vdst")

    def step(b: Waves) -> None:
        lane = np.arange(b.lanes)
        source = (lane & ~31) | (((lane & and_) | or_) ^ xor)
        if b.v_bad[data]:
            b.check_v(data, b.exec)
        sent = np.where(b.exec, b.vl[data], np.uint32(0))
        b.issue(LDS)
        np.copyto(b.vl[target], sent[:, source], where=b.exec)
        b.expect_v(target, LDS)

    return step
