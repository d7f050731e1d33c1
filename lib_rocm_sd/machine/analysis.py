"""A kernel's loops with what stands in them and what that bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.machine.classify import Kind
from lib_rocm_sd.machine.listing import Function, Instruction
from lib_rocm_sd.machine.loops import Block, Loop, blocks_of, loops_of, straight_blocks
from lib_rocm_sd.machine.mix import Mix, mix_of
from lib_rocm_sd.machine.paths import usual_passes
from lib_rocm_sd.machine.rates import Cycles, cycles_of


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
    blocks = blocks_of(function)
    loops = loops_of(blocks)
    straight = mix_of(_code(function, blocks, straight_blocks(blocks, loops)), arch.wave_size)
    usual = [cycles_of(mix, arch) for mix in usual_passes(function, arch)]
    found = tuple(
        _loop_work(function, blocks, loops, index, usual[index], arch)
        for index in range(len(loops))
    )
    return KernelWork(straight, cycles_of(straight, arch), found, _hot(found))


def _loop_work(
    function: Function,
    blocks: list[Block],
    loops: list[Loop],
    index: int,
    usual: Cycles,
    arch: Arch,
) -> LoopWork:
    loop = loops[index]
    skipped = _skipped(blocks, loop.header, _all_blocks(loops, index))
    mix = mix_of(_code(function, blocks, loop.blocks), arch.wave_size)
    conditional = mix_of(_code(function, blocks, loop.blocks & skipped), arch.wave_size)
    return LoopWork(loop.depth, loop.parent, mix, conditional, cycles_of(mix, arch), usual)


def _code(function: Function, blocks: list[Block], which: Iterable[int]) -> Iterable[Instruction]:
    for index in sorted(which):
        yield from function.instructions[blocks[index].first : blocks[index].last]


def _all_blocks(loops: list[Loop], index: int) -> frozenset[int]:
    """With those of the loops inside it."""
    inner = [number for number, loop in enumerate(loops) if loop.parent == index]
    return loops[index].blocks.union(*(_all_blocks(loops, number) for number in inner))


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
