"""A kernel's loops with what stands in them and what that bounds; the usual way through a loop,
without executing it; and what attention executes for one (query, key) pair, counted, not measured.

A loop is a strongly connected part of the graph of basic blocks. It branches for what is rare:
misaligned rows, the tail, a new maximum. Each such side is the longer one, so the shortest way from
the loop's header back to it that loads what a pass has to load, in attention's loop over the keys a
tile of keys and values, is the usual pass. What a branch skips because no lane is left is not left
out.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.lab.cycles import Cycles, Kind, Mix, cycles_of, mix_of
from lib_rocm_sd.lab.listing import Function, Instruction

_END = re.compile(r"s_endpgm(_\w+)?$")
_NOT_FOLLOWED = re.compile(r"s_(setpc|swappc|call|rfe|cbranch_(g_fork|i_fork|join)|subvector)")


class ControlFlowError(ValueError):
    """A call, or a jump to an address in a register: the ways through it are not known."""


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
    """The basic blocks, in the order of their addresses. Raises ControlFlowError."""
    code = function.instructions
    starts = {0}
    for index, instruction in enumerate(code):
        if _NOT_FOLLOWED.match(instruction.mnemonic):
            raise ControlFlowError(f"{function.name}: {instruction.mnemonic} is not followed")
        if instruction.target is not None:
            starts.add(instruction.target)
        if instruction.target is not None or _END.match(instruction.mnemonic):
            starts.add(index + 1)
    firsts = sorted(start for start in starts if start < len(code))
    number = {first: index for index, first in enumerate(firsts)}
    ends = [*firsts[1:], len(code)]
    return [
        Block(
            first,
            end,
            tuple(number[to] for to in _ways_on(code[end - 1], end) if to in number),
        )
        for first, end in zip(firsts, ends, strict=True)
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
    found: list[Loop] = []
    _nested(blocks, _reached_blocks(blocks), set(), 1, None, found)
    return found


def straight_blocks(blocks: list[Block], loops: list[Loop]) -> set[int]:
    """The blocks that are reached and lie in no loop."""
    return _reached_blocks(blocks).difference(*(loop.blocks for loop in loops))


def _reached_blocks(blocks: list[Block]) -> set[int]:
    seen, waiting = {0}, [0]
    while waiting:
        for to in blocks[waiting.pop()].successors:
            if to not in seen:
                seen.add(to)
                waiting.append(to)
    return seen


def _nested(
    blocks: list[Block],
    among: set[int],
    cut: set[tuple[int, int]],
    depth: int,
    parent: int | None,
    found: list[Loop],
) -> set[int]:
    """Append the loops `among` these blocks; the blocks that lie in them."""
    covered: set[int] = set()
    for part in _connected(blocks, among, cut):
        header = min(_entries(blocks, part) or part)
        mine = len(found)
        found.append(Loop(header, frozenset(part), depth, parent, True))
        back = {(block, header) for block in part}
        inner = _nested(blocks, part, cut | back, depth + 1, mine, found)
        found[mine] = Loop(header, frozenset(part - inner), depth, parent, not inner)
        covered |= part
    return covered


def _entries(blocks: list[Block], part: set[int]) -> set[int]:
    return {
        to
        for index, block in enumerate(blocks)
        if index not in part
        for to in block.successors
        if to in part
    }


def _connected(blocks: list[Block], among: set[int], cut: set[tuple[int, int]]) -> list[set[int]]:
    """The strongly connected parts with a cycle (Tarjan, without recursion), by first block."""
    edges = {
        index: [to for to in blocks[index].successors if to in among and (index, to) not in cut]
        for index in among
    }
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    parts: list[set[int]] = []
    for root in sorted(among):
        if root not in order:
            _visit(root, edges, order, low, stack, parts)
    return sorted((part for part in parts if _cyclic(part, edges)), key=min)


def _cyclic(part: set[int], edges: dict[int, list[int]]) -> bool:
    return len(part) > 1 or any(index in edges[index] for index in part)


def _visit(
    root: int,
    edges: dict[int, list[int]],
    order: dict[int, int],
    low: dict[int, int],
    stack: list[int],
    parts: list[set[int]],
) -> None:
    work: list[tuple[int, Iterator[int]]] = []

    def enter(node: int) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        work.append((node, iter(edges[node])))

    enter(root)
    while work:
        node, ways = work[-1]
        to = next(ways, None)
        if to is None:
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == order[node]:
                at = stack.index(node)
                parts.append(set(stack[at:]))
                del stack[at:]
        elif to not in order:
            enter(to)
        elif to in stack:
            low[node] = min(low[node], order[to])


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


class Ways:
    """The ways through a kernel's loops. `least_bytes`: what a wave loads in an outer pass."""

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

    def standing(self, blocks: Iterable[int]) -> Mix:
        """All that stands in these blocks."""
        code = (each for block in sorted(blocks) for each in self.code(self.blocks[block]))
        return mix_of(code, self.arch.wave_size)

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

    def usual_passes(self) -> list[Mix]:
        """What one pass of each loop executes, without the loops inside it: the cheapest way that
        reads or writes global memory, if any does. A product of matrices reads its next chunk
        there, which is a whole one. Raises NoWayError, UnknownInstructionError, UnknownRateError.
        """
        return [self.mix(self.usual(index)) for index in range(len(self.loops))]

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


def usual_pass(
    function: Function, arch: Arch, least_bytes: int, chunks: Sequence[Chunks] = ()
) -> Mix:
    """What one pass of attention's loop over the keys executes, the outer one with exponentials.

    `least_bytes`: what a wave loads in a pass. `chunks`: of the first loops inside it that use LDS;
    what comes after is not passed, as it does again what they did. Raises NoWayError,
    ControlFlowError, UnknownInstructionError, UnknownRateError.
    """
    ways = Ways(function, arch, least_bytes)
    outer = [index for index, loop in enumerate(ways.loops) if loop.parent is None]
    keys = [
        index for index in outer if ways.standing(ways.all_blocks(index)).of(Kind.TRANSCENDENTAL)
    ]
    if len(keys) != 1:
        raise NoWayError(f"{function.name} has {len(keys)} outer loops with exponentials")
    if chunks:
        inner = [
            index
            for index in ways.inner(keys[0])
            if ways.standing(ways.all_blocks(index)).of(Kind.LDS)
        ]
        if len(inner) < len(chunks):
            raise NoWayError(f"{function.name} has {len(inner)} loops over chunks")
        ways.chunks = dict.fromkeys(inner, Chunks(0, 0)) | dict(zip(inner, chunks, strict=False))
    return ways.mix(ways.through(keys[0], least_bytes))


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
    """Raises ControlFlowError, UnknownInstructionError, UnknownRateError, NoWayError."""
    ways = Ways(function, arch, 0)
    straight = ways.standing(straight_blocks(ways.blocks, ways.loops))
    usual = enumerate(ways.usual_passes())
    works = tuple(_loop_work(ways, index, mix) for index, mix in usual)
    return KernelWork(straight, cycles_of(straight, arch), works, _hot(works))


def _loop_work(ways: Ways, index: int, usual: Mix) -> LoopWork:
    loop, arch = ways.loops[index], ways.arch
    skipped = _skipped(ways.blocks, loop.header, ways.all_blocks(index))
    mix, conditional = ways.standing(loop.blocks), ways.standing(loop.blocks & skipped)
    cycles = cycles_of(mix, arch)
    return LoopWork(loop.depth, loop.parent, mix, conditional, cycles, cycles_of(usual, arch))


def _skipped(blocks: list[Block], header: int, body: frozenset[int]) -> frozenset[int]:
    """The blocks of `body` around which some way leads from the header back to it."""
    return frozenset(block for block in body - {header} if _returns(blocks, header, body - {block}))


def _returns(blocks: list[Block], header: int, body: frozenset[int]) -> bool:
    seen: set[int] = set()
    waiting = [header]
    while waiting:
        for to in blocks[waiting.pop()].successors:
            if to == header:
                return True
            if to in body and to not in seen:
                seen.add(to)
                waiting.append(to)
    return False


def _hot(loops: tuple[LoopWork, ...]) -> int | None:
    def weight(index: int) -> tuple[float, int, int]:
        loop = loops[index]
        return (loop.cycles.matrix, loop.mix.global_bytes, loop.mix.of(Kind.VECTOR))

    return max(range(len(loops)), key=weight, default=None)


class NoPairsError(ValueError):
    """The loop over the keys, or what a pass through it computes, could not be made out."""


@dataclass(frozen=True)
class PerPair:
    """Instructions: those of a wave times its lanes, so that 1 is one instruction of one lane for
    each pair. `vector` is without matrix and transcendental ones, both halves of a dual-issue pair
    counted; `vector_slots` their issue slots. `scalar` with scalar loads and branches. Bytes of all
    lanes. `estimated_cycles`: of a SIMD for 1024 pairs, and `bound` on the use of the matrix units,
    by the cost model; 0 where none are used.
    """

    matrix: float
    transcendental: float
    vector: float
    vector_slots: float
    scalar: float
    lds: float
    lds_bytes: float
    global_bytes: float
    estimated_cycles: float
    bound: float

    def as_dict(self) -> dict[str, float]:
        """Rounded, for JSON."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def pairs_in_loop(function: Function, arch: Arch, pairs: int) -> PerPair:
    """Counts per pair in the loop with the most matrix work. Nothing in it may be conditional.
    `pairs`: those that one wave computes in a pass. Raises NoPairsError, ControlFlowError,
    UnknownInstructionError, UnknownRateError.
    """
    work = analysed(function, arch)
    if work.hot is None:
        raise NoPairsError(f"{function.name} has no loop")
    hot = work.loops[work.hot]
    if hot.conditional.counts or any(loop.parent == work.hot for loop in work.loops):
        raise NoPairsError(f"{function.name}: parts of the loop are conditional or loops")
    return per_pair(hot.mix, arch, pairs)


def per_pair(mix: Mix, arch: Arch, pairs: int) -> PerPair:
    """Counts per pair, from the wave instructions that did the work of `pairs` pairs."""
    mix = mix.beside(arch.matrix)
    each = arch.wave_size / pairs
    cycles = cycles_of(mix, arch)
    return PerPair(
        matrix=mix.of(Kind.MATRIX) * each,
        transcendental=mix.of(Kind.TRANSCENDENTAL) * each,
        vector=mix.of(Kind.VECTOR) * each,
        vector_slots=mix.vector_slots * each,
        scalar=sum(map(mix.of, (Kind.SCALAR, Kind.SCALAR_MEMORY, Kind.BRANCH))) * each,
        lds=mix.of(Kind.LDS) * each,
        lds_bytes=mix.lds_bytes / pairs,
        global_bytes=mix.global_bytes / pairs,
        estimated_cycles=1024 * cycles.total / pairs,
        bound=cycles.bounds().get("bound", 0.0),
    )
