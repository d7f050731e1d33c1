"""Random inputs for GroupNorm and its steps."""

from __future__ import annotations

from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.group_norm.formula import wide_of
from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
    NormInputs,
)
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
)
from lib_rocm_sd.ops.lazily import torch


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def draw_image(
    problem: ImageProblem, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Random, each channel around a mean of its own, in the problem's memory format."""
    means = 2 * torch.randn((1, problem.channels, 1, 1), generator=generator)
    x = torch.randn(problem.shape, generator=generator) + means
    if problem.channels_last:
        x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return x.to(DTYPES[problem.dtype]).to(device)


def _draw_affine(
    channels: int, affine: str, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if affine == "none":
        return None, None
    gamma = 1 + 0.3 * torch.randn(channels, generator=generator)
    beta = 0.5 * torch.randn(channels, generator=generator)
    return tuple(t.to(DTYPES[affine]).to(device) for t in (gamma, beta))  # type: ignore[return-value]


def image_inputs(problem: ImageProblem, device: torch.device, seed: int) -> ImageInputs:
    """x."""
    return ImageInputs(draw_image(problem, device, _generator(seed)))


def apply_inputs(problem: ApplyProblem, device: torch.device, seed: int) -> ApplyInputs:
    """x, norm, silu."""
    generator = _generator(seed)
    x = draw_image(problem, device, generator)
    norm = torch.randn((problem.batch, problem.channels, 2), generator=generator)
    wide = torch.promote_types(DTYPES[problem.dtype], torch.float32)
    return ApplyInputs(x, norm.to(wide).to(device), problem.silu)


def finalize_inputs(problem: FinalizeProblem, device: torch.device, seed: int) -> FinalizeInputs:
    """statistics, gamma, beta, groups, eps; one part of several has no pixels."""
    p, generator = problem, _generator(seed)
    shape = (p.batch, p.parts, p.channels)
    mean = torch.randn(shape, generator=generator) + 2
    count = torch.randint(1, 100, (1, p.parts, 1), generator=generator).expand(shape).clone()
    if p.parts > 1:
        count[:, p.parts // 2] = 0
        mean[:, p.parts // 2] = 0
    m2 = count * torch.rand(shape, generator=generator)
    statistics = torch.stack((mean, m2, count.float(), torch.zeros(shape)), -1)
    affine = _draw_affine(p.channels, p.affine, device, generator)
    made = statistics.to(DTYPES[p.dtype]).to(device)
    return FinalizeInputs(made, *affine, p.groups, 1e-6)


def make_inputs(problem: GroupNormProblem, device: torch.device, seed: int) -> GroupNormInputs:
    """x, gamma, beta, groups, eps, silu."""
    generator = _generator(seed)
    x = draw_image(problem, device, generator)
    affine = _draw_affine(problem.channels, problem.affine, device, generator)
    added = None
    if problem.added:
        drawn = torch.randn((problem.batch, problem.channels), generator=generator)
        added = drawn.to(wide_of(x)).to(device)
    return GroupNormInputs(x, *affine, problem.groups, 1e-6, problem.silu, added)


def norm_inputs(problem: NormProblem, device: torch.device, seed: int) -> NormInputs:
    """x, gamma, beta, groups, eps."""
    generator = _generator(seed)
    x = draw_image(problem, device, generator)
    affine = _draw_affine(problem.channels, problem.affine, device, generator)
    return NormInputs(x, *affine, problem.groups, 1e-6)
