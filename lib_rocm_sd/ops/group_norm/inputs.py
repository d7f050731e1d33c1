"""The tensors of GroupNorm and its steps: their checks, problems, keys, random ones."""

from __future__ import annotations

from typing import Any, NamedTuple

from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES
from lib_rocm_sd.ops.group_norm.formula import channels_of, is_channels_last, wide_of
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
)
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.lazily import torch


class ImageInputs(NamedTuple):
    """x (N, C, H, W)."""

    x: torch.Tensor


class ApplyInputs(NamedTuple):
    """x (N, C, H, W), norm (N, C, 2)."""

    x: torch.Tensor
    norm: torch.Tensor
    silu: bool


class FinalizeInputs(NamedTuple):
    """statistics (N, parts, C, 4), gamma and beta (C)."""

    statistics: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    groups: int
    eps: float


class NormInputs(NamedTuple):
    """x (N, C, H, W), gamma and beta (C)."""

    x: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    groups: int
    eps: float = 1e-5


class GroupNormInputs(NamedTuple):
    """x (N, C, H, W), gamma and beta (C); `added` (N, C) float32 (float64 for a float64 x) is added
    to each pixel of its image first.
    """

    x: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    groups: int
    eps: float = 1e-5
    silu: bool = True
    added: torch.Tensor | None = None


def _given(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors.items() if t is not None}


def _image_errors(x: torch.Tensor, **others: torch.Tensor) -> list[str]:
    return tensor_errors(x=x, **others) or reasons(
        (x.ndim != 4, "x must be (N, C, H, W)"),
        (
            x.dtype not in DTYPE_NAMES or x.dtype == torch.bool,
            f"dtype {x.dtype} is not a float type known here",
        ),
    )


def _affine_errors(
    channels: int, groups: int, device: torch.device, **affine: torch.Tensor | None
) -> list[str]:
    given = {name: tensor for name, tensor in affine.items() if tensor is not None}
    return reasons(
        (
            groups < 1 or channels % max(groups, 1) != 0,
            f"{channels} channels do not divide into {groups} groups",
        ),
        *(
            (t.shape != (channels,), f"{name} must have {channels} values")
            for name, t in given.items()
        ),
        *((t.device != device, f"{name} must be on {device}") for name, t in given.items()),
        *(
            (t.dtype not in DTYPE_NAMES or t.dtype == torch.bool, f"{name} of {t.dtype}")
            for name, t in given.items()
        ),
    )


def _affine(gamma: torch.Tensor | None, beta: torch.Tensor | None) -> str:
    given = gamma if gamma is not None else beta
    return "none" if given is None else DTYPE_NAMES[given.dtype]


def image_problem_of(inputs: ImageInputs) -> ImageProblem:
    """The problem of an image's statistics. ValueError, with the shape, where x is no image."""
    x = inputs[0]
    wrong = _image_errors(x)
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(x=x)}")
    batch, channels, height, width = x.shape
    return ImageProblem(batch, channels, height, width, DTYPE_NAMES[x.dtype], is_channels_last(x))


def _fields(p: ImageProblem) -> tuple[int, int, int, int, str, bool]:
    return (*p.shape, p.dtype, p.channels_last)


def apply_problem_of(inputs: ApplyInputs) -> ApplyProblem:
    """ValueError, with all shapes, where x and norm do not go together."""
    x, norm, silu = inputs
    wrong = _image_errors(x, norm=norm) or reasons(
        (norm.shape != (*x.shape[:2], 2), "norm must be (N, C, 2)"),
        (norm.device != x.device, "norm must be on the device of x"),
    )
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(x=x, norm=norm)}")
    image = image_problem_of(ImageInputs(x))
    return ApplyProblem(*_fields(image), silu=silu)


def finalize_problem_of(inputs: FinalizeInputs) -> FinalizeProblem:
    """ValueError, with all shapes. Channels of the statistics beyond gamma's are ignored."""
    statistics, gamma, beta, groups, _ = inputs
    given = _given(gamma=gamma, beta=beta)
    wrong = tensor_errors(statistics=statistics, **given) or reasons(
        (
            statistics.ndim != 4 or statistics.shape[-1] != 4,
            "statistics must be (N, parts, C, 4)",
        ),
        (
            statistics.dtype not in (torch.float32, torch.float64),
            f"statistics in {statistics.dtype}",
        ),
    )
    channels = 0
    if not wrong:
        channels = channels_of(statistics, gamma, beta)
        wrong = reasons(
            (channels > statistics.shape[2], "gamma has more channels than the statistics")
        ) + _affine_errors(channels, groups, statistics.device, gamma=gamma, beta=beta)
    if wrong:
        named = described(statistics=statistics, gamma=gamma, beta=beta)
        raise ValueError(f"{'; '.join(wrong)}: {named}")
    return FinalizeProblem(
        statistics.shape[0],
        statistics.shape[1],
        channels,
        groups,
        DTYPE_NAMES[statistics.dtype],
        _affine(gamma, beta),
    )


def norm_problem_of(inputs: NormInputs) -> NormProblem:
    """The problem of an image's norm. ValueError, with all shapes, on a caller's mistake."""
    x, gamma, beta, groups, _ = inputs
    wrong = _image_errors(x, **_given(gamma=gamma, beta=beta)) or _affine_errors(
        x.shape[1], groups, x.device, gamma=gamma, beta=beta
    )
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(x=x, gamma=gamma, beta=beta)}")
    image = image_problem_of(ImageInputs(x))
    return NormProblem(*_fields(image), groups=groups, affine=_affine(gamma, beta))


def problem_of(inputs: GroupNormInputs) -> GroupNormProblem:
    """The problem of a whole GroupNorm. ValueError, with all shapes, on a caller's mistake."""
    norm = norm_problem_of(NormInputs(*inputs[:5]))
    x, silu, added = inputs.x, inputs.silu, inputs.added
    if added is not None:
        wrong = tensor_errors(added=added) or reasons(
            (added.shape != x.shape[:2], "added must be (N, C)"),
            (added.dtype != wide_of(x), f"added must be {wide_of(x)}"),
            (added.device != x.device, "added must be on the device of x"),
        )
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}: {described(x=x, added=added)}")
    fused = {"groups": norm.groups, "affine": norm.affine, "added": added is not None}
    return GroupNormProblem(*_fields(norm), silu=silu, **fused)  # type: ignore[arg-type]


def empty_image(problem: ImageProblem, inputs: Any) -> torch.Tensor:
    """A result like x, without values, in the memory format that variants choose."""
    order = torch.channels_last if problem.channels_last else torch.contiguous_format
    return torch.empty_like(inputs.x, memory_format=order)


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
