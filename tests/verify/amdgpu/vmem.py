"""Global, scratch and scalar memory instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.poison import POISON
from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import OutOfBoundsError, UnsupportedError
from tests.verify.amdgpu.memory import Memory
from tests.verify.amdgpu.operands import null_code, scalar, vector, vgpr
from tests.verify.amdgpu.races import Races
from tests.verify.amdgpu.salu import Step
from tests.verify.amdgpu.state import LDS, LOAD, SMEM, STORE, Waves

Array = np.ndarray[Any, Any]
_FLAT = ("FLAT", "VFLAT")
"""Forms that may reach LDS too, and so count as an LDS access as well. Here they reach buffers."""
_LINE = 128
"""Bytes that count as one transfer."""
_OLD_SIZES = {"DWORD": 4, "DWORDX2": 8, "DWORDX3": 12, "DWORDX4": 16, "DWORDX8": 32}
_OLD_SIZES |= {"DWORDX16": 64, "UBYTE": 1, "SBYTE": 1, "USHORT": 2, "SSHORT": 2, "SHORT": 2}
_OLD_SIZES |= {"BYTE": 1, "SHORT_D16": 2, "SHORT_D16_HI": 2, "BYTE_D16_HI": 1}


@dataclass
class Traffic:
    """What one memory instruction has moved. `lines`: 128-byte lines touched, per wave."""

    loaded_bytes: int = 0
    stored_bytes: int = 0
    lines: int = 0
    fewest_lines: int = 0


@dataclass
class Space:
    """Memory as the instructions of one run see it; `traffic` by place of the instruction."""

    memory: Memory
    scratch_bytes: int = 0
    traffic: dict[int, Traffic] = field(default_factory=dict)
    races: Races = field(default_factory=Races)
    scratch: dict[tuple[int, int], Array] = field(default_factory=dict)


def _size(ins: Instruction) -> int:
    name = re.sub(r"^(GLOBAL|SCRATCH|FLAT|S)_(LOAD|STORE)_", "", ins.name)
    if name in _OLD_SIZES:
        return _OLD_SIZES[name]
    match = re.fullmatch(r"(?:D16_(?:HI_)?)?[BUI](\d+)", name)
    if match is None:
        raise UnsupportedError(ins.name)
    return int(match[1]) // 8


def _store_counter(ins: Instruction) -> int:
    return LOAD if ins.family == "cdna" else STORE


def compile_memory(ins: Instruction, place: int, space: Space) -> Step | None:
    """The step of a memory instruction; None where it is another's."""
    if re.match(r"S_LOAD_", ins.name):
        return _scalar_load(ins, space)
    if ins.form not in ("GLOBAL", "SCRATCH", "VGLOBAL", "VSCRATCH", *_FLAT):
        return None
    if re.match(r"(GLOBAL|SCRATCH|FLAT)_(LOAD|STORE)_", ins.name) is None or "LDS" in ins.name:
        raise UnsupportedError(ins.name)
    global_ = not ins.name.startswith("SCRATCH")
    address = _address(ins) if global_ else _scratch_address(ins)
    if "_LOAD_" in ins.name:
        return _load(ins, place, space, address, global_)
    return _store(ins, place, space, address, global_)


def _offset(ins: Instruction) -> int:
    name, bits = ("ioffset", 24) if ins.has("ioffset") else ("offset", 13)
    bits -= ins.family == "rdna2"
    value = ins.get(name)
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _data_register(ins: Instruction, load: bool) -> int:
    name = "vdst" if load else "vsrc" if ins.has("vsrc") else "data"
    register = ins.get(name) - 256
    return register + 256 if ins.has("acc") and ins.get("acc") else register


def _address(ins: Instruction) -> Callable[[Waves], Array]:
    """(waves, lanes) uint64."""
    name = "vaddr" if ins.has("vaddr") else "addr"
    code, base = ins.get(name), ins.get("saddr")
    offset = np.uint64(_offset(ins) & 0xFFFFFFFFFFFFFFFF)
    if base in (127, null_code(ins.family)) or ins.form in _FLAT:
        whole = vector(ins, code, "u64")
        return lambda b: whole(b) + offset
    start, low = scalar(ins, base, "u64"), vector(ins, code, "u32")
    return lambda b: start(b)[:, None] + low(b).astype(np.uint64) + offset


def _scratch_address(ins: Instruction) -> Callable[[Waves], Array]:
    """(waves, lanes) uint64, from the beginning of each lane's own scratch."""
    base, offset = ins.get("saddr"), _offset(ins)
    name = "vaddr" if ins.has("vaddr") else "addr"
    parts = []
    if base not in (null_code(ins.family), 127):
        start = scalar(ins, base, "u32")
        parts.append(lambda b: start(b).astype(np.int64)[:, None])
    if ins.get("sve"):
        own = vector(ins, ins.get(name), "u32")
        parts.append(lambda b: own(b).astype(np.int64))

    def address(b: Waves) -> Array:
        total = np.full((b.count, b.lanes), offset, np.int64)
        for part in parts:
            total = total + part(b)
        return total.view(np.uint64)

    return address


def _count(space: Space, place: int, b: Waves, at: Array, size: int, store: bool) -> None:
    traffic = space.traffic.setdefault(place, Traffic())
    active = b.exec.sum(axis=1)
    moved = int(active.sum()) * size
    if store:
        traffic.stored_bytes += moved
    else:
        traffic.loaded_bytes += moved
    lines = np.where(b.exec, at // np.uint64(_LINE), np.uint64(0xFFFFFFFFFFFFFFFF))
    lines = np.sort(lines, axis=1)
    changes = (lines[:, 1:] != lines[:, :-1]).sum(axis=1) + 1 - (active < b.lanes)
    traffic.lines += int(np.where(active > 0, changes, 0).sum())
    traffic.fewest_lines += int(np.ceil(active * size / _LINE).sum())


def _named(error: OutOfBoundsError, b: Waves) -> OutOfBoundsError:
    """With wave and lane for the place among active lanes that the message begins with."""
    match = re.match(r"\[(\d+)\] (.*)", error.message)
    if match is None:
        return error
    wave, lane = np.argwhere(b.exec)[int(match[1])]
    where = f"lane {lane} of wave {b.wave[wave]}, group {b.group[wave]}"
    return OutOfBoundsError(f"{match[2]}: {where}")


def _load(
    ins: Instruction, place: int, space: Space, address: Callable[[Waves], Array], global_: bool
) -> Step:
    size, register = _size(ins), _data_register(ins, load=True)
    put, flat_ = _loaded_words(ins, size), ins.form in _FLAT

    def step(b: Waves) -> None:
        b.issue(LOAD)
        if flat_:
            b.issue(LDS)
        at = address(b)
        if b.exec.any():
            flat = at[b.exec]
            try:
                if global_:
                    data = space.memory.load(flat, size)
                    space.races.load(b, ins, flat, size, LOAD, b.exec)
                    _count(space, place, b, at, size, store=False)
                else:
                    data = _from_scratch(space, b, flat, size)
            except OutOfBoundsError as error:
                raise _named(error, b) from None
            put(b, register, data)
        for each in range(register, register + max(1, size // 4)):
            b.expect_v(each, LOAD)

    return step


def _loaded_words(ins: Instruction, size: int) -> Callable[[Waves, int, Array], None]:
    """Puts (n, words) uint32, or (n, bytes) uint8 of less than a word, into registers."""
    if size >= 4:

        def words(b: Waves, register: int, data: Array) -> None:
            for place in range(size // 4):
                if b.full:
                    b.vl[register + place][...] = data[:, place].reshape(b.count, b.lanes)
                else:
                    b.vl[register + place][b.exec] = data[:, place]

        return words
    narrow, signed = _narrow(ins, size)
    d16, high = "D16" in ins.name, "_HI" in ins.name
    # RDNA's loads return in order, so two may be on their way to the halves of one register. With
    # CDNA's error correction a half is merged with what the register holds.
    merges = ins.family == "cdna"

    def part(b: Waves, register: int, data: Array) -> None:
        value = np.ascontiguousarray(data).view(narrow)[:, 0]
        if d16:
            value = value.astype(np.int16 if signed else np.uint16).view(np.uint16)
            if merges and b.v_bad[register]:
                b.check_v(register, np.zeros_like(b.exec))
            b.vh[register][..., int(high)][b.exec] = value
        else:
            b.vl[register][b.exec] = value.astype(np.int32).view(np.uint32)

    return part


def _narrow(ins: Instruction, size: int) -> tuple[Any, bool]:
    """The type of less than a word that is loaded, and whether it has a sign."""
    signed = re.search(r"_(I8|I16|SBYTE|SSHORT)$", ins.name) is not None
    return ({1: np.int8, 2: np.int16} if signed else {1: np.uint8, 2: np.uint16})[size], signed


def _store(
    ins: Instruction, place: int, space: Space, address: Callable[[Waves], Array], global_: bool
) -> Step:
    size, register = _size(ins), _data_register(ins, load=False)
    reads = [vgpr(register + each, "u32") for each in range(max(1, size // 4))]
    high, counter, flat_ = "_HI" in ins.name, _store_counter(ins), ins.form in _FLAT

    def step(b: Waves) -> None:
        at = address(b)
        words = np.stack([read(b)[b.exec] for read in reads], axis=1)
        b.issue(counter)
        if flat_:
            b.issue(LDS)
        if not b.exec.any():
            return
        data = words.view(np.uint8)
        data = data[:, 2 : 2 + size] if high else data[:, :size]
        try:
            if global_:
                flat = at[b.exec]
                space.races.store(b, ins, flat, data, counter)
                space.memory.store(flat, data)
                space.races.stored(b, flat, data)
                _count(space, place, b, at, size, store=True)
            else:
                _to_scratch(space, b, at[b.exec], data)
        except OutOfBoundsError as error:
            raise _named(error, b) from None

    return step


# -- scratch: one array per wave, (lanes, bytes) ------------------------------------------------


def _of_waves(space: Space, b: Waves, at: Array, size: int) -> tuple[list[Array], Array, Array]:
    if len(at) and int(at.max()) + size > space.scratch_bytes:
        place = int(np.argmax(at))
        raise OutOfBoundsError(
            f"[{place}] scratch access of {size} bytes at {int(at[place]):#x}, "
            f"each lane has {space.scratch_bytes:#x}"
        )
    own = []
    for group, wave in zip(b.group, b.wave, strict=True):
        key = (int(group), int(wave))
        if key not in space.scratch:
            poison = np.full(-(-space.scratch_bytes // 4) * b.lanes, POISON, np.uint32)
            space.scratch[key] = poison.view(np.uint8).reshape(b.lanes, -1)
        own.append(space.scratch[key])
    waves, lanes = np.nonzero(b.exec)
    return own, waves, lanes


def _from_scratch(space: Space, b: Waves, at: Array, size: int) -> Array:
    own, waves, lanes = _of_waves(space, b, at, size)
    out = np.empty((len(at), size), np.uint8)
    columns = np.arange(size)
    for place, memory in enumerate(own):
        rows = waves == place
        out[rows] = memory[lanes[rows, None], at[rows, None].astype(np.int64) + columns]
    return out.view(np.uint32) if size % 4 == 0 else out


def _to_scratch(space: Space, b: Waves, at: Array, data: Array) -> None:
    own, waves, lanes = _of_waves(space, b, at, data.shape[1])
    columns = np.arange(data.shape[1])
    for place, memory in enumerate(own):
        rows = waves == place
        memory[lanes[rows, None], at[rows, None].astype(np.int64) + columns] = data[rows]


# -- scalar loads --------------------------------------------------------------------------------


def _scalar_load(ins: Instruction, space: Space) -> Step:
    size, target = _size(ins), ins.get("sdata")
    base = scalar(ins, ins.get("sbase"), "u64")
    name, bits = ("ioffset", 24) if ins.has("ioffset") else ("offset", 21)
    raw = ins.get(name)
    fixed = np.uint64((raw - (1 << bits) if raw >> (bits - 1) & 1 else raw) & 0xFFFFFFFFFFFFFFFF)
    moved = None
    if ins.family == "cdna" and not ins.get("imm"):
        raise UnsupportedError("a scalar load without an immediate offset")
    if ins.family != "cdna" and ins.get("soffset") != null_code(ins.family):
        moved = scalar(ins, ins.get("soffset"), "u32")
    if ins.family == "cdna" and ins.get("soffset_en"):
        moved = scalar(ins, ins.get("soffset"), "u32")

    def step(b: Waves) -> None:
        b.issue(SMEM)
        at = np.broadcast_to(base(b) + fixed, b.count)
        if moved is not None:
            at = at + moved(b)
        if (at & np.uint64(min(size, 4) - 1)).any():
            raise UnsupportedError("a scalar load that is not aligned")
        data = space.memory.load(at, size)
        space.races.load(b, ins, at, size, SMEM, None)
        if size < 4:  # gfx12's, extended to a word
            part = np.ascontiguousarray(data).view(_narrow(ins, size)[0])
            data = part.astype(np.int32).view(np.uint32)
        for place in range(max(1, size // 4)):
            if b.s_bad[target + place] & 2:
                b.check_s(target + place)
            b.s[target + place] = data[:, place]
            b.expect_s(target + place)

    return step
