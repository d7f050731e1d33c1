"""From a function to its loops: basic blocks, and the strongly connected parts of their graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lib_rocm_sd.machine.listing import Function, Instruction

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
    _nested(blocks, _reached(blocks), set(), 1, None, found)
    return found


def straight_blocks(blocks: list[Block], loops: list[Loop]) -> set[int]:
    """The blocks that are reached and lie in no loop."""
    return _reached(blocks).difference(*(loop.blocks for loop in loops))


def _reached(blocks: list[Block]) -> set[int]:
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
