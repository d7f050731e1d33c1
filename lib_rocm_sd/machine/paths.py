"""The usual way through a loop, without executing it: the cheapest one that loads what a pass has
to load, in attention's loop over the keys a tile of keys and values.

A loop branches for what is rare: misaligned rows, the tail, a new maximum. Each such side is the
longer one, so the shortest way from the loop's header back to it is the usual pass. What a branch
skips because no lane is left is not left out.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.machine.classify import Kind
from lib_rocm_sd.machine.listing import Function, Instruction
from lib_rocm_sd.machine.loops import Block, Loop, blocks_of, loops_of
from lib_rocm_sd.machine.mix import Mix, mix_of
from lib_rocm_sd.machine.rates import cycles_of

_NO_LANES = "s_cbranch_execz"
_SKIPPED = 1e6
"""Weighs what should not be skipped, so that it is only where there is no other way."""


class NoWayError(ValueError):
    """No way leads through a loop, or it is not one loop that walks over the keys."""


@dataclass(frozen=True)
class Chunks:
    """A loop inside the one over the keys: how often it is passed, and what a wave loads then."""

    passes: int
    bytes: int


@dataclass(frozen=True)
class _Step:
    """From one block, or from all passes of a loop, to the next block."""

    weight: float
    bytes: int
    passed: Counter[int]
    to: int


class _Ways:
    def __init__(self, function: Function, arch: Arch, least_bytes: int) -> None:
        self.function, self.arch, self.least_bytes = function, arch, least_bytes
        self.blocks: list[Block] = blocks_of(function)
        self.loops: list[Loop] = loops_of(self.blocks)
        self.chunks: dict[int, Chunks] = {}
        self.mixes = [mix_of(self.code(block), arch.wave_size) for block in self.blocks]
        self.weights = [self.weight(mix) for mix in self.mixes]

    def code(self, block: Block) -> tuple[Instruction, ...]:
        return tuple(self.function.instructions[block.first : block.last])

    def weight(self, mix: Mix) -> float:
        """Cycles, and a little for each instruction that the cost model does not count."""
        cycles = cycles_of(mix, self.arch)
        return cycles.matrix + cycles.issue + 0.01 * sum(mix.counts.values())

    def inner(self, index: int) -> list[int]:
        return [number for number, loop in enumerate(self.loops) if loop.parent == index]

    def all_blocks(self, index: int) -> frozenset[int]:
        inner = (self.all_blocks(number) for number in self.inner(index))
        return self.loops[index].blocks.union(*inner)

    def whole(self, index: int) -> Mix:
        """All that stands in a loop and in those inside it."""
        blocks = (self.blocks[block] for block in sorted(self.all_blocks(index)))
        return mix_of((each for block in blocks for each in self.code(block)), self.arch.wave_size)

    def loaded(self, passed: Counter[int]) -> int:
        return sum(self.mixes[block].global_bytes * passed[block] for block in passed)

    def mix(self, passed: Counter[int]) -> Mix:
        """All that is executed where each block is passed so often."""
        code = (
            instruction
            for block, times in sorted(passed.items())
            for instruction in self.code(self.blocks[block]) * times
        )
        return mix_of(code, self.arch.wave_size)

    def usual(self, index: int) -> Counter[int]:
        """How often each of a loop's own blocks is executed on the cheapest way that reads or
        writes global memory, or on the cheapest where none does.
        """
        try:
            passed = self.through(index, 1)
        except NoWayError:
            passed = self.through(index, 0)
        own = self.loops[index].blocks
        return Counter({block: times for block, times in passed.items() if block in own})

    def through(self, index: int, least_bytes: int) -> Counter[int]:
        """How often each block is executed on the cheapest way from a loop's header back to it that
        loads so much. Raises NoWayError.
        """
        loop = self.loops[index]
        waiting: list[tuple[float, int, int, int, Counter[int]]]
        waiting = [(0.0, 0, loop.header, least_bytes, Counter())]
        done: set[tuple[int, int]] = set()
        count = 0
        while waiting:
            weight, _, at, left, passed = heapq.heappop(waiting)
            if at == loop.header and passed:
                if not left:
                    return passed
                continue
            if (at, left) in done:
                continue
            done.add((at, left))
            for step in self._onward(at, index):
                count += 1
                onward = (max(0, left - step.bytes), passed + step.passed)
                heapq.heappush(waiting, (weight + step.weight, count, step.to, *onward))
        raise NoWayError(f"{self.function.name}: no way through loop {index} loads {least_bytes}")

    def _onward(self, at: int, index: int) -> Iterator[_Step]:
        """Each step on inside of a loop."""
        within = [number for number in self.inner(index) if at in self.all_blocks(number)]
        if within:
            passed, members = self._all_passes(within[0]), self.all_blocks(within[0])
        else:
            passed, members = Counter({at: 1}), frozenset((at,))
        weight = sum(self.weights[block] * times for block, times in passed.items())
        body = self.all_blocks(index)
        for block in sorted(members):
            for to in self.blocks[block].successors:
                back = to == at == self.loops[index].header
                if to in body and (to not in members or back):
                    more = self.skipping(block, to)
                    yield _Step(weight + more, self.loaded(passed), passed, to)

    def _all_passes(self, index: int) -> Counter[int]:
        """Block counts for all passes of an inner loop. A loop without known chunks loads keys or
        values: half of `least_bytes`.
        """
        chunks = self.chunks.get(index)
        passed = self.through(index, chunks.bytes if chunks else 0)
        if chunks is None:
            each = self.loaded(passed)
            times = -(-self.least_bytes // (2 * each)) if each else 1
        else:
            times = chunks.passes
        return Counter({block: count * times for block, count in passed.items()})

    def skipping(self, block: int, to: int) -> float:
        last = self.function.instructions[self.blocks[block].last - 1]
        return _SKIPPED if last.mnemonic == _NO_LANES and to != block + 1 else 0.0


def usual_passes(function: Function, arch: Arch) -> list[Mix]:
    """What one pass of each of `loops_of` executes, without the loops inside it: the cheapest way
    that reads or writes global memory, if any does. A product of matrices reads its next chunk
    there, which is a whole one. Raises NoWayError, UnknownInstructionError, UnknownRateError.
    """
    ways = _Ways(function, arch, 0)
    return [ways.mix(ways.usual(index)) for index in range(len(ways.loops))]


def usual_pass(
    function: Function, arch: Arch, least_bytes: int, chunks: Sequence[Chunks] = ()
) -> Mix:
    """What one pass of attention's loop over the keys executes, the outer one with exponentials.

    `least_bytes`: what a wave loads in a pass. `chunks`: of the first loops inside it that use LDS;
    what comes after is not passed, as it does again what they did. Raises NoWayError,
    ControlFlowError, UnknownInstructionError, UnknownRateError.
    """
    ways = _Ways(function, arch, least_bytes)
    outer = [index for index, loop in enumerate(ways.loops) if loop.parent is None]
    keys = [index for index in outer if ways.whole(index).of(Kind.TRANSCENDENTAL)]
    if len(keys) != 1:
        raise NoWayError(f"{function.name} has {len(keys)} outer loops with exponentials")
    if chunks:
        inner = [index for index in ways.inner(keys[0]) if ways.whole(index).of(Kind.LDS)]
        if len(inner) < len(chunks):
            raise NoWayError(f"{function.name} has {len(inner)} loops over chunks")
        ways.chunks = dict.fromkeys(inner, Chunks(0, 0)) | dict(zip(inner, chunks, strict=False))
    return ways.mix(ways.through(keys[0], least_bytes))
