"""A kernel's loops with what stands in them and what that bounds, and the usual way through a loop,
without executing it.

A loop is a strongly connected part of the graph of basic blocks. It branches for what is rare:
misaligned rows, the tail, a new maximum. Each such side is the longer one, so the cheapest way from
the loop's header back to it that loads what a pass has to load is the usual pass. What a branch
skips because no lane is left is not left out.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.lab.cycles import Cycles, Kind, Mix, NotUnderstoodError, cycles_of, mix_of
from lib_rocm_sd.lab.listing import Function, Instruction

_END = re.compile(r"s_endpgm(_\w+)?$")
_NOT_FOLLOWED = re.compile(r"s_(setpc|swappc|call|rfe|cbranch_(g_fork|i_fork|join)|subvector)")


@dataclass(frozen=True)
class Block:
    """Instructions `first` to `last`, without `last`, entered only at the first."""

    first: int
    last: int
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """`blocks` without those of the loops inside it. `parent`: the loop around it, as an index into
    the list, or None. `innermost`: no loop inside.
    """

    header: int
    blocks: frozenset[int]
    depth: int
    parent: int | None
    innermost: bool


def blocks_of(function: Function) -> list[Block]:
    """The basic blocks, in the order of their addresses. Raises NotUnderstoodError."""
    code = function.instructions
    starts = {0}
    for index, instruction in enumerate(code):
        if _NOT_FOLLOWED.match(instruction.mnemonic):
            raise NotUnderstoodError(f"{function.name}: {instruction.mnemonic} is not followed")
        if instruction.target is not None:
            starts.add(instruction.target)
        if instruction.target is not None or _END.match(instruction.mnemonic):
            starts.add(index + 1)
    firsts = sorted(start for start in starts if start < len(code))
    number = {first: index for index, first in enumerate(firsts)}
    ends = [*firsts[1:], len(code)]
    successors = (_ways_on(code[end - 1], end) for end in ends)
    return [
        Block(first, end, tuple(number[to] for to in onward if to in number))
        for first, end, onward in zip(firsts, ends, successors, strict=True)
    ]


def _ways_on(last: Instruction, after: int) -> list[int]:
    if _END.match(last.mnemonic):
        return []
    if last.target is None:
        return [after]
    return [last.target] if last.mnemonic == "s_branch" else [last.target, after]


def loops_of(blocks: list[Block]) -> list[Loop]:
    """The loops that are reached from the first block, outer before inner.

    A loop is a strongly connected part of the graph; the loops inside it are what is left strongly
    connected without the edges to its header. So a loop with two entries is one loop, too.
    """
    loops: list[Loop] = []
    _add_loops(blocks, _run_blocks(blocks), set(), 1, None, loops)
    return loops


def straight_blocks(blocks: list[Block], loops: list[Loop]) -> set[int]:
    """The blocks that are reached and lie in no loop."""
    return _run_blocks(blocks).difference(*(loop.blocks for loop in loops))


def _run_blocks(blocks: list[Block]) -> set[int]:
    every = range(len(blocks))
    return _reached([0], {block: blocks[block].successors for block in every}, every)


def _reached(
    starts: Iterable[int], edges: Mapping[int, Iterable[int]], among: Iterable[int]
) -> set[int]:
    """Where ways from `starts` lead that stay `among` these blocks, with the starts."""
    allowed = set(among)
    seen = allowed.intersection(starts)
    waiting = list(seen)
    while waiting:
        onward = allowed.intersection(edges[waiting.pop()]) - seen
        seen |= onward
        waiting += onward
    return seen


def _add_loops(
    blocks: list[Block],
    among: set[int],
    cut: set[tuple[int, int]],
    depth: int,
    parent: int | None,
    loops: list[Loop],
) -> set[int]:
    """Append the loops `among` these blocks; the blocks that lie in them."""
    covered: set[int] = set()
    for part in _connected(blocks, among, cut):
        outside = (block for index, block in enumerate(blocks) if index not in part)
        entries = {to for block in outside for to in block.successors if to in part}
        header, place = min(entries or part), len(loops)
        loops.append(Loop(header, frozenset(part), depth, parent, True))
        back = {(block, header) for block in part}
        inner = _add_loops(blocks, part, cut | back, depth + 1, place, loops)
        loops[place] = Loop(header, frozenset(part - inner), depth, parent, not inner)
        covered |= part
    return covered


def _connected(
    blocks: list[Block], among: set[int], cut: set[tuple[int, int]]
) -> Iterator[set[int]]:
    """The strongly connected parts with a cycle, by first block."""
    onward = {
        index: [to for to in blocks[index].successors if to in among and (index, to) not in cut]
        for index in among
    }
    back: dict[int, list[int]] = {index: [] for index in among}
    for index, successors in onward.items():
        for to in successors:
            back[to].append(index)
    left = set(among)
    for first in sorted(among):
        if first in left:
            part = _reached([first], onward, _reached([first], back, left))
            left -= part
            if len(part) > 1 or first in onward[first]:
                yield part


_NO_LANES = "s_cbranch_execz"
_SKIPPED = 1e6
"""Weighs what should not be skipped, so that it is only where there is no other way."""


class NoWayError(ValueError):
    """No way leads through a loop."""


@dataclass(frozen=True)
class _Step:
    """From one block, or from all passes of a loop, to the next block."""

    weight: float
    bytes: int
    passed: Counter[int]
    to: int


class Ways:
    """The ways through a kernel's loops."""

    def __init__(self, function: Function, arch: Arch) -> None:
        self.function, self.arch = function, arch
        self.blocks: list[Block] = blocks_of(function)
        self.loops: list[Loop] = loops_of(self.blocks)
        self.mixes = [mix_of(self.code(block), arch.wave_size) for block in self.blocks]
        self.weights = [self._weight(mix) for mix in self.mixes]

    def code(self, block: Block) -> tuple[Instruction, ...]:
        return tuple(self.function.instructions[block.first : block.last])

    def _weight(self, mix: Mix) -> float:
        """Cycles, and a little for each instruction that the cost model does not count."""
        cycles = cycles_of(mix, self.arch)
        return cycles.matrix + cycles.issue + 0.01 * sum(mix.counts.values())

    def inner(self, index: int) -> list[int]:
        return [number for number, loop in enumerate(self.loops) if loop.parent == index]

    def all_blocks(self, index: int) -> frozenset[int]:
        inner = (self.all_blocks(number) for number in self.inner(index))
        return self.loops[index].blocks.union(*inner)

    def standing(self, blocks: Iterable[int]) -> Mix:
        """All that stands in these blocks."""
        return self.mix(Counter(dict.fromkeys(blocks, 1)))

    def mix(self, passed: Counter[int]) -> Mix:
        """All that is executed where each block is passed so often."""
        code = (
            instruction
            for block, times in sorted(passed.items())
            for instruction in self.code(self.blocks[block]) * times
        )
        return mix_of(code, self.arch.wave_size)

    def loaded(self, passed: Counter[int]) -> int:
        """Bytes."""
        return sum(self.mixes[block].global_bytes * passed[block] for block in passed)

    def usual_pass(self, index: int) -> Mix:
        """What one pass of a loop executes, without the loops inside it: the cheapest way that
        reads or writes global memory, if any does. A product of matrices reads its next chunk
        there, which is a whole one. Raises NoWayError, NotUnderstoodError.
        """
        try:
            passed = self.through(index, 1)
        except NoWayError:
            passed = self.through(index, 0)
        own = self.loops[index].blocks
        return self.mix(Counter({block: n for block, n in passed.items() if block in own}))

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
            passed, members = self.all_passes(within[0]), self.all_blocks(within[0])
        else:
            passed, members = Counter({at: 1}), frozenset((at,))
        weight = sum(self.weights[block] * times for block, times in passed.items())
        body = self.all_blocks(index)
        for block in sorted(members):
            last = self.function.instructions[self.blocks[block].last - 1]
            for to in self.blocks[block].successors:
                back = to == at == self.loops[index].header
                if to in body and (to not in members or back):
                    skips = last.mnemonic == _NO_LANES and to != block + 1
                    more = _SKIPPED if skips else 0.0
                    yield _Step(weight + more, self.loaded(passed), passed, to)

    def all_passes(self, index: int) -> Counter[int]:
        """Block counts for all passes of an inner loop: one that loads costs nothing here."""
        passed = self.through(index, 0)
        times = 0 if self.loaded(passed) else 1
        return Counter({block: count * times for block, count in passed.items()})


@dataclass(frozen=True)
class LoopWork:
    """One loop, without the loops inside it. `conditional`: what of `mix` a pass may skip. `usual`:
    of the cheapest pass that reads or writes global memory, if any does.

    `depth`: 1 for an outermost loop; `parent`: the loop around it, by its place in the list.
    """

    depth: int
    parent: int | None
    mix: Mix
    conditional: Mix
    cycles: Cycles
    usual: Cycles


@dataclass(frozen=True)
class KernelWork:
    """`straight`: what is in no loop. `hot`: the place of the loop that matters most: the one with
    the most matrix cycles, else the most global bytes; None where there is no loop.
    """

    straight: Mix
    straight_cycles: Cycles
    loops: tuple[LoopWork, ...]
    hot: int | None


def analysed(function: Function, arch: Arch) -> KernelWork:
    """Raises NotUnderstoodError, NoWayError."""
    ways = Ways(function, arch)
    straight = ways.standing(straight_blocks(ways.blocks, ways.loops))
    works: list[LoopWork] = []
    for index, loop in enumerate(ways.loops):
        skipped = _skipped(ways.blocks, loop.header, ways.all_blocks(index))
        mix, conditional = ways.standing(loop.blocks), ways.standing(loop.blocks & skipped)
        cycles = cycles_of(mix, arch), cycles_of(ways.usual_pass(index), arch)
        works.append(LoopWork(loop.depth, loop.parent, mix, conditional, *cycles))
    return KernelWork(straight, cycles_of(straight, arch), tuple(works), _hot(works))


def _skipped(blocks: list[Block], header: int, body: frozenset[int]) -> frozenset[int]:
    """The blocks of `body` around which some way leads from the header back to it."""
    onward = {block: blocks[block].successors for block in body}
    starts = blocks[header].successors
    others = body - {header}
    return frozenset(each for each in others if header in _reached(starts, onward, body - {each}))


def _hot(loops: list[LoopWork]) -> int | None:
    def weight(index: int) -> tuple[float, int, int]:
        loop = loops[index]
        return (loop.cycles.matrix, loop.mix.global_bytes, loop.mix.of(Kind.VECTOR))

    return max(range(len(loops)), key=weight, default=None)
