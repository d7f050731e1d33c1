"""The usual way through a loop with branches, without executing it: the cheapest one.

A kernel's loop branches for what is rare: misaligned rows, the tail, a new maximum. Each such side
is the longer one, so that the shortest way from the loop's header back to it is the usual pass. Not
left out is what a branch skips because no lane is left, and what loads from memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
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
Passes = Callable[[list[Mix]], list[int]]


class NoWayError(ValueError):
    """No way leads through a loop, or it is not one loop that walks over the keys."""


@dataclass(frozen=True)
class _Way:
    """One pass: how often each block is executed, and what that weighs."""

    weight: float
    blocks: Counter[int]


class _Ways:
    def __init__(self, function: Function, arch: Arch) -> None:
        self.function, self.arch = function, arch
        self.blocks: list[Block] = blocks_of(function)
        self.loops: list[Loop] = loops_of(self.blocks)
        self.passes: dict[int, int] = {}
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

    def steps(self, block: int) -> Iterator[tuple[float, int]]:
        """Where a block leads to, each with what is to be added for what it skips."""
        for to in self.blocks[block].successors:
            yield (_SKIPPED if to != block + 1 and self.skips(block, to) else 0.0), to

    def skips(self, block: int, to: int) -> bool:
        """Whether going on at `to` leaves out what is usually executed."""
        last = self.function.instructions[self.blocks[block].last - 1]
        if last.mnemonic == _NO_LANES:
            return True
        between = range(block + 1, to)
        loads = any(self.mixes[each].of(Kind.GLOBAL) for each in between)
        works = any(self.mixes[each].of(Kind.MATRIX) for each in between)
        leaves = any(end > to for each in between for end in self.blocks[each].successors)
        return loads and not works and not leaves

    def through(self, index: int) -> _Way:
        """The cheapest way from a loop's header back to it. Raises NoWayError."""
        loop = self.loops[index]
        inside = {
            block: number for number in self.inner(index) for block in self.all_blocks(number)
        }
        waiting: list[tuple[float, int, int, Counter[int]]] = [(0.0, 0, loop.header, Counter())]
        done: set[int] = set()
        count = 0
        while waiting:
            weight, _, at, passed = heapq.heappop(waiting)
            if at == loop.header and passed:
                return _Way(weight, passed)
            if at in done:
                continue
            done.add(at)
            for step_weight, step, to in self._onward(at, loop, inside):
                count += 1
                heapq.heappush(waiting, (weight + step_weight, count, to, passed + step))
        raise NoWayError(f"{self.function.name}: no way leads through loop {index}")

    def _onward(
        self, at: int, loop: Loop, inside: dict[int, int]
    ) -> Iterator[tuple[float, Counter[int], int]]:
        """Weight, blocks and end of each step on: a block, or all passes of a loop inside."""
        if at not in inside:
            weight, step, ends = self.weights[at], Counter({at: 1}), list(self.steps(at))
        else:
            number = inside[at]
            way, times = self.through(number), self.passes.get(number, 1)
            members = self.all_blocks(number)
            weight, step = times * way.weight, Counter(dict.fromkeys(way.blocks, 0))
            for block, passes in way.blocks.items():
                step[block] = passes * times
            ends = [
                (0.0, to)
                for block in sorted(members)
                for to in self.blocks[block].successors
                if to not in members
            ]
        for more, to in ends:
            if to in loop.blocks or to in inside:
                yield weight + more, step, to


def usual_pass(function: Function, arch: Arch, passes: Passes) -> Mix:
    """What one pass of attention's loop over the keys executes, the outer one with exponentials, if
    the loops inside it that use LDS are passed as often as `passes` says, in their order.

    Raises NoWayError, ControlFlowError, UnknownInstructionError, UnknownRateError.
    """
    ways = _Ways(function, arch)

    def whole(index: int) -> Mix:
        blocks = (ways.blocks[block] for block in sorted(ways.all_blocks(index)))
        return mix_of((each for block in blocks for each in ways.code(block)), arch.wave_size)

    outer = [index for index, loop in enumerate(ways.loops) if loop.parent is None]
    working = [index for index in outer if whole(index).of(Kind.TRANSCENDENTAL)]
    if len(working) != 1:
        raise NoWayError(f"{function.name} has {len(working)} outer loops with exponentials")
    inner = [index for index in ways.inner(working[0]) if whole(index).of(Kind.LDS)]
    ways.passes = dict(zip(inner, passes([whole(index) for index in inner]), strict=True))
    way = ways.through(working[0])
    code = (
        instruction
        for block, times in sorted(way.blocks.items())
        for instruction in ways.code(ways.blocks[block]) * times
    )
    return mix_of(code, arch.wave_size)
