"""GroupNorm by torch's operators: statistics, norms, the reference.

Images are (N, C, H, W) here, in either memory format; group_norm.py says what else there is.
"""

from __future__ import annotations

from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.group_norm import kernel
from lib_rocm_sd.ops.lazily import F, torch


def is_channels_last(x: torch.Tensor) -> bool:
    """True if the pixels of x (N, C, H, W) are taken one after the other, False for channels."""
    if x.is_contiguous() and (x.shape[1] % 8 or x.shape[2] * x.shape[3] > 1):
        return False
    single = x.shape[1] == 1 and x.is_contiguous(memory_format=torch.channels_last)
    return single or x.stride(1) == 1


def dense(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """x without gaps in memory, a copy if need be, and whether it is channels-last."""
    if is_channels_last(x):
        return x.contiguous(memory_format=torch.channels_last), True
    return x.contiguous(), False


def part_pixels(x: torch.Tensor) -> int:
    """Pixels of each part but the last, in the statistics of x."""
    form = kernel.form_of(DTYPE_NAMES[x.dtype], x.shape[1], is_channels_last(x))
    return kernel.part_pixels(x.shape[0], x.shape[1], x.shape[2] * x.shape[3], form)


def statistics_of(x: torch.Tensor) -> torch.Tensor:
    """The statistics of x in float32, or float64 for a float64 x, by torch's operators."""
    flat = x.permute(0, 2, 3, 1).flatten(1, 2)
    each, pixels = part_pixels(x), flat.shape[1]
    whole = pixels // each
    found = [moments_of(flat[:, : whole * each].unflatten(1, (whole, each)))] if whole else []
    if pixels % each:
        found.append(moments_of(flat[:, None, whole * each :]))
    return torch.cat(found, 1)


def moments_of(parts: torch.Tensor) -> torch.Tensor:
    """(N, parts, C, 4) of (N, parts, pixels, C)."""
    count = parts.shape[2]
    variance, mean = torch.var_mean(parts.to(wide_of(parts)), 2, correction=0)
    return torch.stack(
        (mean, variance * count, torch.full_like(mean, count), torch.zeros_like(mean)), -1
    )


def wide_of(x: torch.Tensor) -> torch.dtype:
    """float32, or float64 for what is float64."""
    return torch.promote_types(x.dtype, torch.float32)


def channels_of(
    statistics: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None
) -> int:
    """How many channels the norm has."""
    given = gamma if gamma is not None else beta
    return statistics.shape[2] if given is None else given.shape[0]


def norm_from(
    statistics: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """The norm of merged statistics, in their dtype, by torch's operators."""
    channels = channels_of(statistics, gamma, beta)
    mean, m2, count, _ = statistics[:, :, :channels].unflatten(2, (groups, -1)).unbind(-1)
    total = count.sum((1, 3), keepdim=True)
    merged = (count * mean).sum((1, 3), keepdim=True) / total
    variance = (m2 + count * (mean - merged).square()).sum((1, 3)) / total[:, 0, :, 0]
    rstd, center = (
        t.repeat_interleave(channels // groups, 1)
        for t in ((variance + eps).rsqrt(), merged[:, 0, :, 0])
    )
    scale = rstd if gamma is None else rstd * gamma.to(rstd)
    shift = -center * scale
    return torch.stack((scale, shift if beta is None else shift + beta.to(rstd)), -1)


def applied(x: torch.Tensor, norm: torch.Tensor, silu: bool) -> torch.Tensor:
    """The norm applied in float32 at least, SiLU'd, in the dtype of x, by torch's operators."""
    scale, shift = norm.to(torch.promote_types(wide_of(x), norm.dtype))[..., None, None].unbind(2)
    y = x.to(scale.dtype) * scale + shift
    return (F.silu(y) if silu else y).to(x.dtype)


def reference(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula in float64, over all values of a group at once."""
    x = x.double() if added is None else x.double() + added.double()[..., None, None]
    values = x.contiguous().unflatten(1, (groups, -1))
    variance, mean = torch.var_mean(values, (2, 3, 4), correction=0, keepdim=True)
    y = ((values - mean) / (variance + eps).sqrt()).flatten(1, 2)
    if gamma is not None:
        y = y * gamma.double()[:, None, None]
    if beta is not None:
        y = y + beta.double()[:, None, None]
    return F.silu(y) if silu else y


def reference_statistics(x: torch.Tensor) -> torch.Tensor:
    """The statistics in float64."""
    flat = x.double().permute(0, 2, 3, 1).flatten(1, 2)
    return torch.cat([moments_of(part[:, None]) for part in flat.split(part_pixels(x), 1)], 1)


def reference_norm(
    statistics: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """The norm in float64."""
    return norm_from(statistics.double(), gamma, beta, groups, eps)


def reference_apply(x: torch.Tensor, norm: torch.Tensor, silu: bool) -> torch.Tensor:
    """The norm applied in float64."""
    return applied(x.double(), norm.double(), silu)
