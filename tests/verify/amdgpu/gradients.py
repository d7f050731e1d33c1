"""Gradients of norms as machine code: what is executed, and how it is judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lib_rocm_sd.ops.base import KernelSpec, Op
from lib_rocm_sd.ops.group_norm_backward import kernel as group_norm_kernel
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.layer_norm_backward import kernel as layer_norm_kernel
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from tests.ops.gradients import displaced, draw, faults
from tests.ops.running import compute
from tests.verify.amdgpu import judge
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.launch import CodeLaunch

LAYER, GROUP = LAYER_NORM_BACKWARD.name, GROUP_NORM_BACKWARD.name
OPS: dict[str, Op[Any, Any]] = {LAYER: LAYER_NORM_BACKWARD, GROUP: GROUP_NORM_BACKWARD}
KERNELS = {LAYER: layer_norm_kernel, GROUP: group_norm_kernel}
LAYOUTS = ("plain", "misaligned")


def _run(case: Case, launch: CodeLaunch) -> list[str]:
    op = OPS[case.op]
    inputs = draw(op, case.problem)
    if case.layout == "misaligned":
        inputs = displaced(inputs)
    ours = op.variants[0]
    (config,) = ours.configs(case.arch, case.problem)
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    with torch.no_grad(), launch.knows(*tensors):
        output = compute(op, ours, launch, config, inputs)
    with torch.no_grad():
        return faults(op, output, inputs)


judge._RUN.update({name: _run for name in OPS})


def specs_of(case: Case) -> set[KernelSpec]:
    """The kernels that a case launches, also of judge.py's cases."""
    if case.op not in OPS:
        return judge.specs_of(case)
    ours = OPS[case.op].variants[0]
    (config,) = ours.configs(case.arch, case.problem)
    return set(ours.specs(case.arch, case.problem, config))


def layer_norm(gfx: str) -> Iterator[Case]:
    """Every number of vectors held by teams that are less than a wave or a whole work-group, of
    which some work-items have one less; rows that are read thrice; parts of rows and of a rest.
    """
    for turn, held in enumerate(layer_norm_kernel.HELD):
        for added in (True, False):
            for rows, lanes in ((67, 8), (3, 128)):
                shape = (rows, 8 * (lanes * held - 3))
                problem = LayerNormBackwardProblem(shape, added=added)
                for layout in LAYOUTS:
                    yield Case(gfx, LAYER, problem, layout=layout)
            half = replace(problem, dtype="bfloat16", affine="bfloat16")
            yield Case(gfx, LAYER, half, layout=LAYOUTS[turn % 2])
    few = LayerNormBackwardProblem((5, 40), affine="float32")
    yield Case(gfx, LAYER, few)
    yield Case(gfx, LAYER, replace(few, wanted=False, affine="none"))
    for channels, affine in ((7, "float32"), (2051, "float16"), (12304, "bfloat16")):
        for added in (True, False):
            problem = LayerNormBackwardProblem((3, channels), "float16", added, affine)
            yield Case(gfx, LAYER, problem)
    yield Case(gfx, LAYER, LayerNormBackwardProblem((9 * 32, 24)))


def group_norm(gfx: str) -> Iterator[Case]:
    """Both layouts and half types with and without SiLU: parts of several whole batches and of a
    rest, channels that begin at a multiple of 16 bytes and not; wide groups, single channels.
    """
    last = GroupNormBackwardProblem(2, 264, 3, 101, "float16", True, True, 8, "float16")
    first = GroupNormBackwardProblem(1, 6, 16, 541, "float16", False, True, 2, "float16")
    for turn, problem in enumerate((last, first)):
        for silu in (True, False):
            each = replace(problem, silu=silu)
            for layout in LAYOUTS:
                yield Case(gfx, GROUP, each, layout=layout)
            half = replace(each, dtype="bfloat16", affine="bfloat16")
            yield Case(gfx, GROUP, half, layout=LAYOUTS[(turn + silu) % 2])
    single = GroupNormBackwardProblem(2, 37, 5, 7, "float16", True, True, 37, "none")
    yield Case(gfx, GROUP, single)
    yield Case(
        gfx, GROUP, replace(single, channels=74, groups=1, channels_last=False, affine="float32")
    )
    yield Case(gfx, GROUP, replace(first, height=1, width=9, wanted=False))


ALL = {LAYER: layer_norm, GROUP: group_norm}


def few_layer_norms(gfx: str) -> Iterator[Case]:
    """In which planted mistakes are looked for."""
    held = LayerNormBackwardProblem((67, 328), added=True)
    yield Case(gfx, LAYER, held)
    yield Case(gfx, LAYER, replace(held, shape=(1, 40)))
    yield Case(gfx, LAYER, replace(held, shape=(64, 1544)), layout="misaligned")
    yield Case(gfx, LAYER, replace(held, shape=(2, 4072)))
    yield Case(gfx, LAYER, replace(held, shape=(3, 2051)))
    yield Case(gfx, LAYER, replace(held, shape=(9 * 32, 24)))


def few_group_norms(gfx: str) -> Iterator[Case]:
    """The same; the first with more columns than vectors."""
    last = GroupNormBackwardProblem(2, 520, 3, 101, "float16", True, True, 8, "float16")
    yield Case(gfx, GROUP, last)
    yield Case(gfx, GROUP, replace(last, channels=24, groups=3, channels_last=False, width=104))
    yield Case(gfx, GROUP, replace(last, channels=72, groups=1, width=5), layout="misaligned")
    yield Case(gfx, GROUP, replace(last, channels=6, groups=2, channels_last=False, width=7))


def few_of_both(gfx: str) -> Iterator[Case]:
    """Of what both kernels include."""
    yield from few_layer_norms(gfx)
    yield from few_group_norms(gfx)
