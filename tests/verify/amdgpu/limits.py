"""A launch, held against what its code object was compiled for and what its GPU has."""

from __future__ import annotations

from math import prod

from lib_rocm_sd.arch import Arch, by_gfx
from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.runtime.codeobject import waves_by_registers
from tests.verify.amdgpu.errors import LaunchError
from tests.verify.amdgpu.loader import Program

MOST_WORK_ITEMS = (1 << 32) - 1
"""HIP's limit of grid x block in one dimension."""
KERNARG_ALIGN = 16
"""What every driver aligns arguments to (HSA Runtime, hsa_region_t of arguments)."""
_WAVE_SCRATCH = {"rdna4": ((1 << 18) - 1) * 256, "rdna3": ((1 << 15) - 1) * 256}
_LEAST_WAVE_SCRATCH = ((1 << 13) - 1) * 1024
"""Bytes of a wave, by the fields of COMPUTE_TMPRING_SIZE; of families not named above."""


def check(program: Program, kernarg: bytes, at: int, grid: int, block: int) -> None:
    """Arguments `kernarg` at address `at`, `grid` groups of `block`. Raises LaunchError."""
    arch = by_gfx(program.gfx)
    if arch is None:
        raise LaunchError(f"no row for {program.gfx} in arch.json")
    wrong = [
        *_of_block(program, arch, grid, block),
        *_of_memory(program, arch),
        *_of_arguments(program, len(kernarg), at),
    ]
    if wrong:
        raise LaunchError(f"{program.entry}: {'; '.join(wrong)}")


def check_wave(program: Program, arch: Arch) -> None:
    """LaunchError where waves are not what our kernels and launches count on."""
    if program.wave_size != arch.wave_size:
        said = f"compiled for waves of {program.wave_size}, {arch.gfx} has {arch.wave_size}"
        raise LaunchError(f"{program.entry}: {said}")


def _of_block(program: Program, arch: Arch, grid: int, block: int) -> list[str]:
    needs = program.resources
    required = needs.required_block
    return reasons(
        (grid < 1 or block < 1, f"a launch of {grid} work-groups of {block}"),
        (
            block > needs.max_block,
            f"compiled for {needs.max_block} work-items, launched with {block}",
        ),
        (
            required and prod(required) != block,
            f"compiled for {required} work-items exactly, launched with {block}",
        ),
        (
            grid * block > MOST_WORK_ITEMS,
            f"{grid * block} work-items are more than one launch may have",
        ),
        (
            needs.vgprs > arch.max_vgprs or not waves_by_registers(arch, needs, max(block, 1)),
            f"{block} work-items of {needs.vgprs} registers are more than {arch.gfx} has",
        ),
    )


def _of_memory(program: Program, arch: Arch) -> list[str]:
    needs = program.resources
    most = _WAVE_SCRATCH.get(program.family, _LEAST_WAVE_SCRATCH) // program.wave_size
    return reasons(
        (
            needs.lds_bytes > arch.lds_bytes,
            f"{needs.lds_bytes} bytes of LDS, a work-group of {arch.gfx} has {arch.lds_bytes}",
        ),
        (
            needs.scratch_bytes > most,
            f"{needs.scratch_bytes} bytes of scratch, a lane of {arch.gfx} has {most}",
        ),
        (needs.dynamic_stack, "a stack of which nobody knows how large it will be"),
    )


def _of_arguments(program: Program, given: int, at: int) -> list[str]:
    needs = program.resources
    align = needs.kernarg_align
    return reasons(
        (
            given != needs.kernarg_bytes,
            f"{given} bytes of arguments, {needs.kernarg_bytes} expected",
        ),
        (
            align < 1 or align & (align - 1) or align > KERNARG_ALIGN,
            f"arguments at multiples of {align} bytes, drivers give {KERNARG_ALIGN}",
        ),
        (at % max(align, 1), f"arguments at {at:#x}, no multiple of {align}"),
    )
