"""Runs a kernel of a code object: work-groups, waves, barriers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from lib_rocm_sd.lab.cycles import Kind, work_of
from tests.verify.amdgpu import limits, loader
from tests.verify.amdgpu.atomics import compile_atomic
from tests.verify.amdgpu.control import BARRIER, END, SPLIT, compile_control
from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import (
    EndlessError,
    ExecutionError,
    HazardError,
    UnsupportedError,
)
from tests.verify.amdgpu.hazards import LdsMemory
from tests.verify.amdgpu.lds import LdsSpace, LdsTraffic, compile_lds
from tests.verify.amdgpu.loader import FloatMode, Program
from tests.verify.amdgpu.matrix import compile_matrix
from tests.verify.amdgpu.memory import Buffer, Memory
from tests.verify.amdgpu.races import Races
from tests.verify.amdgpu.salu import Step, compile_scalar
from tests.verify.amdgpu.schedules import schedule_of
from tests.verify.amdgpu.state import Waves
from tests.verify.amdgpu.vector import compile_vector
from tests.verify.amdgpu.vmem import Space, Traffic, compile_memory

VERSION = 1
"""Raise it where something is computed or judged otherwise than before: what was executed and right
(tests/ledger.py) is executed again then.
"""
LANES_AT_ONCE = 4096
"""About so many work-items are executed together, as whole work-groups."""
MOST_STEPS = 5_000_000
"""Instructions of one set of waves after which a kernel counts as one that does not end."""
_KERNARG_AT = 0x7D0000000000
_PACKET_AT = 0x7D8000000000
_PLACES = {"kernarg_segment_ptr": _KERNARG_AT, "dispatch_ptr": _PACKET_AT}
_TTMP7, _TTMP8, _TTMP9 = 115, 116, 117
_FIRST_AGPR = 256


@dataclass(frozen=True)
class Counts:
    """What a run executed. `executed[i]`: waves that executed `instructions[i]`; `traffic` and
    `lds` by the same i. Wave instructions, not lanes.
    """

    wave_size: int
    waves: int
    instructions: tuple[Instruction, ...]
    executed: tuple[int, ...]
    traffic: dict[int, Traffic] = field(default_factory=dict)
    lds: dict[int, LdsTraffic] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Wave instructions."""
        return sum(self.executed)

    @property
    def lane_instructions(self) -> int:
        """Instructions times the lanes of a wave."""
        return self.total * self.wave_size

    def by_name(self) -> Counter[str]:
        """Wave instructions by the families' common name."""
        found: Counter[str] = Counter()
        for each, count in zip(self.instructions, self.executed, strict=True):
            found[each.name] += count
        return found

    def by_kind(self) -> dict[Kind, int]:
        """Wave instructions by who executes them; a pair (VOPD) counts as one vector one, and so
        does a dot product, though RDNA2 multiplies matrices with it.
        """
        found: dict[Kind, int] = {}
        for name, count in self.by_name().items():
            vector = name == "V_DUAL" or name.startswith("V_DOT2")
            kind = Kind.VECTOR if vector else work_of(name.lower()).kind
            found[kind] = found.get(kind, 0) + count
        return found

    @property
    def loaded_bytes(self) -> int:
        """From global memory, by vector loads."""
        return sum(each.loaded_bytes for each in self.traffic.values())

    @property
    def stored_bytes(self) -> int:
        """To global memory."""
        return sum(each.stored_bytes for each in self.traffic.values())

    @property
    def lds_bytes(self) -> int:
        """Read and written."""
        return sum(each.bytes for each in self.lds.values())

    @property
    def conflict_clocks(self) -> int:
        """Clocks that LDS bank conflicts cost all waves together."""
        return sum(each.conflict_clocks for each in self.lds.values())


def run(
    code: bytes,
    entry: str,
    kernarg: bytes,
    grid: int,
    block: int,
    memory: Memory,
    seed: int = 1,
    schedule: int = 0,
    groups: Sequence[int] | None = None,
    packet: bytes = b"",
) -> Counts:
    """Execute `entry` on `grid` work-groups of `block` work-items, both one-dimensional.

    `schedule`: 0 is lockstep, others are drawn. `groups`: the only ones that are executed, all
    where None. `packet`: of AQL, by which it is dispatched; AMD's own kernels read their sizes
    there. `memory` is changed. Raises ExecutionError.
    """
    program = loader.load(code, entry)
    limits.check(program, kernarg, _KERNARG_AT, grid, block)
    own = np.frombuffer(kernarg + b"\0" * (-len(kernarg) % 4), np.uint8)
    image = np.frombuffer(program.image + b"\0" * (-len(program.image) % 4), np.uint8)
    whole = memory.with_(
        Buffer(_KERNARG_AT, own, writable=False, name="arguments"),
        Buffer(_PACKET_AT, np.frombuffer(packet, np.uint8), writable=False, name="packet"),
        Buffer(loader.LOADED_AT, image, writable=False, name="code"),
    )
    compiled = _compiled(code, entry)
    with np.errstate(all="ignore"):
        try:
            run = _Run(program, compiled, whole, block, seed, schedule)
            return run.all_groups(range(grid) if groups is None else groups)
        except ExecutionError as error:
            if schedule:
                error.where += f", schedule {schedule} of seed {seed}"
            raise
        finally:
            compiled.connect(Memory())  # the caller's may go


@dataclass(frozen=True)
class _Compiled:
    """The steps of a program, and the memory that they act on."""

    space: Space
    lds: LdsSpace
    steps: list[Step]

    def connect(self, memory: Memory) -> None:
        """Act on this from now on, with nothing counted."""
        self.space.memory, self.space.traffic, self.space.scratch = memory, {}, {}
        self.space.races = Races(memory)
        self.lds.memory, self.lds.traffic = LdsMemory(0, 0), {}


@lru_cache(maxsize=64)
def _compiled(code: bytes, entry: str) -> _Compiled:
    program = loader.load(code, entry)
    made = _Compiled(Space(Memory(), program.scratch_bytes), LdsSpace(LdsMemory(0, 0)), [])
    index_of = program.index_of()

    def at_first(place: int) -> Step:
        """Many are never executed."""

        def step(b: Waves) -> int | None:
            ins = program.instructions[place]
            try:
                found = compile_step(ins, place, index_of, made.space, made.lds, program.mode)
            except UnsupportedError as error:
                found = _raises(error)
            made.steps[place] = found
            return found(b)

        return step

    made.steps.extend(map(at_first, range(len(program.instructions))))
    return made


def forget() -> None:
    """Drop the programs that were executed: millions of objects, and amdgpu_host looks through all
    objects for tensors.
    """
    _compiled.cache_clear()
    loader.load.cache_clear()


class _Run:
    def __init__(
        self,
        program: Program,
        compiled: _Compiled,
        memory: Memory,
        block: int,
        seed: int,
        schedule: int,
    ) -> None:
        compiled.connect(memory)
        compiled.space.races.two_caches = program.two_caches
        self.program, self.block = program, block
        self.space, self.lds, self.steps = compiled.space, compiled.lds, compiled.steps
        self.executed = [0] * len(self.steps)
        self.waves_per_group = -(-block // program.wave_size)
        self.schedule = schedule_of(seed, schedule, self.waves_per_group)
        self.live = np.zeros(0, np.int64)

    def all_groups(self, groups: Sequence[int]) -> Counts:
        """Execute these work-groups, in sets that fit a cache, in a random order."""
        at_once = max(1, LANES_AT_ONCE // (self.waves_per_group * self.program.wave_size))
        for some in self.schedule.sets(groups, at_once):
            self._groups(some)
        return Counts(
            self.program.wave_size,
            len(groups) * self.waves_per_group,
            self.program.instructions,
            tuple(self.executed),
            self.space.traffic,
            self.lds.traffic,
        )

    def _groups(self, groups: Any) -> None:
        self.lds.memory = LdsMemory(len(groups), self.program.lds_bytes)
        self.space.races.begin(len(groups))
        self.space.scratch = {}
        self.live = np.full(len(groups), self.waves_per_group)
        ready = self.schedule.begun(self._begun(groups))
        waiting: list[Waves] = []
        left = MOST_STEPS
        while ready or waiting:
            passed, waiting = self.schedule.released(ready, waiting, self.live)
            for b in passed:
                b.epoch += 1
                self.space.races.passed(b)
            batch, ready, stops, most = self.schedule.chosen(ready + passed)
            left -= self._go(batch, stops, min(most, left + 1), ready, waiting)
            if left < 0:
                raise EndlessError(f"not at an end after {MOST_STEPS} instructions")

    def _begun(self, groups: Any) -> Waves:
        program, per_group = self.program, self.waves_per_group
        registers = _FIRST_AGPR + program.agprs if program.agprs else program.vgprs
        b = Waves(registers, per_group * len(groups), program.wave_size)
        place = np.arange(b.count)
        b.group[...], b.wave[...] = groups[place // per_group], place % per_group
        b.slot[...] = place // per_group
        b.lds_base[...] = b.slot * self.lds.memory.stride
        at = 0
        for name, count in program.user_sgprs:
            if name in _PLACES:
                b.write_s(at, np.uint32(_PLACES[name] & 0xFFFFFFFF))
                b.write_s(at + 1, np.uint32(_PLACES[name] >> 32))
            at += count
        if program.family == "rdna4":
            b.write_s(_TTMP7, np.uint32(0))  # the group's y and z
            b.write_s(_TTMP8, (b.wave << 25).astype(np.uint32))
            b.write_s(_TTMP9, b.group.astype(np.uint32))
        elif program.group_id_sgpr:
            b.write_s(at, b.group.astype(np.uint32))
        item = b.wave[:, None] * b.lanes + np.arange(b.lanes)
        b.write_mask(126, item < self.block)
        b.put_v(0, item.astype(np.uint32))
        return b

    def _go(
        self, b: Waves, stops: set[int], most: int, ready: list[Waves], waiting: list[Waves]
    ) -> int:
        """Execute until these waves part, wait, end, may meet others or have executed `most`
        instructions; what they become is put where it belongs.
        """
        steps, executed, count, place, done = self.steps, self.executed, b.count, b.pc, 0
        try:
            while True:
                executed[place] += count
                done += 1
                result = steps[place](b)
                if result is None:
                    place += 1
                    if done < most and (not stops or place not in stops):
                        continue
                elif result >= 0:
                    place = result
                    if done < most and not stops:
                        continue
                break
        except ExecutionError as error:
            error.where = str(self.program.instructions[place])
            error.address = self.program.instructions[place].address
            raise
        except IndexError as error:
            where = self.program.instructions[place]
            raise ExecutionError(f"a register that was not allocated ({error}), {where}") from error
        self._sort(b, result, place, ready, waiting)
        return done

    def _sort(
        self, b: Waves, result: int | None, place: int, ready: list[Waves], waiting: list[Waves]
    ) -> None:
        if result is None or result >= 0:
            b.pc = place
            ready.append(b)
        elif result == BARRIER:
            b.pc = place + 1
            waiting.append(b)
        elif result == SPLIT:
            assert b.branch is not None
            taken = b.part(np.flatnonzero(b.branch))
            taken.pc = self.steps[place].target  # type: ignore[attr-defined]
            other = b.part(np.flatnonzero(~b.branch))
            other.pc = place + 1
            ready += [taken, other]
        elif result == END:
            if b.signalled.any():
                raise HazardError("a wave ends between signalling a barrier and waiting for it")
            np.subtract.at(self.live, b.slot, 1)


def compile_step(
    ins: Instruction,
    place: int,
    index_of: dict[int, int],
    space: Space,
    lds: LdsSpace,
    mode: FloatMode,
) -> Step:
    """What `ins` does to waves. Raises UnsupportedError."""
    if ins.name.startswith("V_"):
        step = compile_matrix(ins) or compile_vector(ins, mode)
    else:
        step = (
            compile_scalar(ins)
            or compile_control(ins, index_of)
            or compile_atomic(ins, place, space)
            or compile_memory(ins, place, space)
            or compile_lds(ins, place, lds)
        )
    if step is None:
        raise UnsupportedError(f"no semantics for {ins.name}")
    return step


def _raises(error: UnsupportedError) -> Step:
    """Code that is never reached may hold anything."""

    def step(b: Waves) -> None:
        raise UnsupportedError(error.message)

    return step
