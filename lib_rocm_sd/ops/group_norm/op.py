"""GroupNorm, and the steps that it consists of, as the engine, the tests and the tuner see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lib_rocm_sd.ops.base import CPU, SEED, Op, TrialInputs, norm_tolerance
from lib_rocm_sd.ops.group_norm import formula, whole
from lib_rocm_sd.ops.group_norm import inputs as group_norm_inputs
from lib_rocm_sd.ops.group_norm import problem as problems
from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
    NormInputs,
)
from lib_rocm_sd.ops.group_norm.ours import (
    KernelApply,
    KernelFinalize,
    KernelGroupNorm,
    KernelNorm,
    KernelStatistics,
)
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
    small_images,
)
from lib_rocm_sd.ops.group_norm.torch import (
    TorchApply,
    TorchFinalize,
    TorchGroupNorm,
    TorchNorm,
    TorchStatistics,
    TritonGroupNorm,
)
from lib_rocm_sd.ops.keys import key_of
from lib_rocm_sd.ops.lazily import torch

# What the first trial on a card runs beside the test problems: an image that fills work-groups,
# and images that do not lie as the kernels read them.


_Make = Callable[..., Any]


def _trial_inputs(make: _Make, problem: NormProblem | GroupNormProblem) -> TrialInputs:
    p, (small, _) = problem, small_images(problem)
    found = [
        (f"{small}, at an odd address", partial(_misaligned, small, make)),
        (f"{small}, with gaps", partial(_with_gaps, small, make)),
    ]
    most = whole.holds(p.channels, p.pixels, p.groups, p.form.vector) if p.channels_last else 0
    if most:
        full = replace(small, batch=1, height=1, width=most)
        found.append((str(full), partial(make, full, CPU, SEED)))
    return found


def _misaligned(problem: Any, make: _Make) -> Any:
    """x one half behind a multiple of 16 bytes."""
    made = make(problem, CPU, SEED)
    room = torch.zeros(made.x.numel() + 1, dtype=made.x.dtype)
    return made._replace(x=room[1:].as_strided(made.x.shape, made.x.stride(), 1).copy_(made.x))


def _with_gaps(problem: Any, make: _Make) -> Any:
    """x between whose pixels others lie."""
    made = make(problem, CPU, SEED)
    batch, channels, height, width = made.x.shape
    order = (0, 3, 1, 2) if problem.channels_last else (0, 1, 2, 3)
    sizes = (
        (height, 2 * width, channels) if problem.channels_last else (channels, height, 2 * width)
    )
    room = torch.zeros((batch, *sizes), dtype=made.x.dtype).permute(order)
    return made._replace(x=room[..., ::2].copy_(made.x))


def _wide_dtype(problem: Any) -> torch.dtype:
    return torch.float64 if problem.dtype == "float64" else torch.float32


def _images() -> tuple[ImageProblem, ...]:
    return tuple(
        dict.fromkeys(
            ImageProblem(*p.shape, p.dtype, p.channels_last)
            for p in (*(problem for _, problem in problems.USUAL), *problems.ODD)
        )
    )


def _norms() -> tuple[NormProblem, ...]:
    return tuple(
        dict.fromkeys(
            NormProblem(*p.shape, p.dtype, p.channels_last, p.groups, p.affine)
            for p in problems.ODD
        )
    )


STATISTICS: Op[ImageProblem, ImageInputs] = Op(
    name="group norm statistics",
    family="group_norm",
    title="Group norm, statistics",
    variants=(KernelStatistics(), TorchStatistics()),
    problem_of=group_norm_inputs.image_problem_of,
    key_of=key_of,
    reference=lambda inputs: formula.reference_statistics(*inputs),
    make_inputs=group_norm_inputs.image_inputs,
    tolerance=problems.wide_tolerance,
    output_shape=lambda p: (p.batch, p.parts, p.channels, 4),
    test_problems=problems.small_images,
    cases=_images(),
    usual=(("VAE 1024x1024, last level", ImageProblem(1, 128, 1024, 1024)),),
    output_dtype=_wide_dtype,
    measured_as=problems.measured_image,
)


FINALIZE: Op[FinalizeProblem, FinalizeInputs] = Op(
    name="group norm finalize",
    family="group_norm",
    title="Group norm, norm",
    variants=(KernelFinalize(), TorchFinalize()),
    problem_of=group_norm_inputs.finalize_problem_of,
    key_of=key_of,
    reference=lambda inputs: formula.reference_norm(*inputs),
    make_inputs=group_norm_inputs.finalize_inputs,
    tolerance=problems.wide_tolerance,
    output_shape=lambda p: (p.batch, p.channels, 2),
    test_problems=problems.small_statistics,
    usual=(("VAE 1024x1024, last level", FinalizeProblem(1, 1024, 128, 32)),),
    measured_as=problems.measured_statistics,
)


NORM: Op[NormProblem, NormInputs] = Op(
    name="group norm of an image",
    family="group_norm",
    title="Group norm, norm of an image",
    variants=(KernelNorm(), TorchNorm()),
    problem_of=group_norm_inputs.norm_problem_of,
    key_of=key_of,
    reference=lambda inputs: formula.reference_norm(
        formula.reference_statistics(inputs[0]), *inputs[1:]
    ),
    make_inputs=group_norm_inputs.norm_inputs,
    tolerance=problems.wide_tolerance,
    output_shape=lambda p: (p.batch, p.channels, 2),
    test_problems=problems.small_images,
    cases=_norms(),
    usual=(("SDXL, 32x32", NormProblem(2, 1280, 32, 32)),),
    output_dtype=_wide_dtype,
    trial_inputs=partial(_trial_inputs, group_norm_inputs.norm_inputs),
)


APPLY: Op[ApplyProblem, ApplyInputs] = Op(
    name="group norm apply",
    family="group_norm",
    title="Group norm, apply",
    variants=(KernelApply(), TorchApply()),
    problem_of=group_norm_inputs.apply_problem_of,
    key_of=key_of,
    reference=lambda inputs: formula.reference_apply(*inputs),
    make_inputs=group_norm_inputs.apply_inputs,
    tolerance=norm_tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.small_images,
    usual=(("VAE 1024x1024, last level", ApplyProblem(1, 128, 1024, 1024)),),
    results=group_norm_inputs.empty_image,
    measured_as=problems.measured_image,
)


GROUP_NORM_SILU: Op[GroupNormProblem, GroupNormInputs] = Op(
    name="group norm",
    family="group_norm",
    title="Group norm",
    variants=(KernelGroupNorm(), TorchGroupNorm()),
    problem_of=group_norm_inputs.problem_of,
    key_of=key_of,
    reference=lambda inputs: formula.reference(*inputs),
    make_inputs=group_norm_inputs.make_inputs,
    tolerance=norm_tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.small_images,
    cases=(*(problem for _, problem in problems.USUAL), *problems.ODD),
    usual=problems.USUAL,
    results=group_norm_inputs.empty_image,
    trial_inputs=partial(_trial_inputs, group_norm_inputs.make_inputs),
    measured_only=(TritonGroupNorm(),),
)
OPS = (GROUP_NORM_SILU, STATISTICS, FINALIZE, APPLY, NORM)
