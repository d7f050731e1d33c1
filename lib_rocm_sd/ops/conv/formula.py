"""The formula of the convolutions by torch's operators; the float64 reference."""

from __future__ import annotations

from collections.abc import Callable

from lib_rocm_sd.ops.conv.inputs import ConvInputs, Finish, NextNorm
from lib_rocm_sd.ops.conv.problem import STATISTICS_ROWS, Band, Epilogue
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.group_norm.formula import moments_of
from lib_rocm_sd.ops.lazily import F, torch


def convolve(
    kind: str,
    x: torch.Tensor,
    weights: ConvWeights,
    norm: torch.Tensor | None,
    shortcut: torch.Tensor | None,
    band: Band | None = None,
    embedding: torch.Tensor | None = None,
    shortcut_weight: torch.Tensor | None = None,
    epilogue: Epilogue | None = None,
    second: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula by torch's operators in the dtype of x, norm and SiLU in float32 at least.
    `shortcut_weight`: in place of the weights'.
    """
    if norm is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale, offset = norm.to(wide)[:, None, None].unbind(-1)
        x = F.silu(x.to(wide) * scale + offset).to(x.dtype)
    weight, bias, own = weights.plain(x)
    shortcut_weight = own if shortcut_weight is None else shortcut_weight.to(x)
    image = x[..., : weight.shape[1]].permute(0, 3, 1, 2)
    y = convolve_plain(kind, image, weight, band, bias)
    if embedding is not None:
        y = y + embedding.to(y)[:, None, None]
    if epilogue is not None:
        y = activated(y, epilogue, weights.slopes) * epilogue.scale
    before = y
    if shortcut is not None:
        y = y + (shortcut if shortcut_weight is None else F.linear(shortcut, shortcut_weight))
    if epilogue is not None and epilogue.activation == "gate":
        y = y * (before.sigmoid() - 0.5)
    if epilogue is not None and second is not None:
        y = y * epilogue.second_scale + second
    return F.pad(y, (0, -y.shape[3] % 8)).contiguous()


def activated(y: torch.Tensor, epilogue: Epilogue, slopes: torch.Tensor | None) -> torch.Tensor:
    """The activation of y (..., Co); `slopes` (Co): a PReLU's."""
    if epilogue.activation == "leaky relu":
        return F.leaky_relu(y, epilogue.slope)
    if epilogue.activation == "prelu" and slopes is not None:
        return torch.where(y < 0, y * slopes.to(y), y)
    return F.silu(y) if epilogue.activation == "silu" else y


def enlarged(image: torch.Tensor) -> torch.Tensor:
    """The image (N, C, H, W) with each pixel four times."""
    return F.interpolate(image, scale_factor=2.0, mode="nearest")


def convolve_plain(
    kind: str,
    image: torch.Tensor,
    weight: torch.Tensor,
    band: Band | None = None,
    bias: torch.Tensor | None = None,
    enlarge: Callable[[torch.Tensor], torch.Tensor] = enlarged,
) -> torch.Tensor:
    """(N, Ho, Wo, Co) by torch's convolution of the image (N, Ci, H, W)."""
    if kind == "upsample":
        image = enlarge(image)
    if kind == "3x3 stride 2":
        y = F.conv2d(F.pad(image, (0, 1, 0, 1)), weight, bias, stride=2)
    elif kind == "3x3 stride 2 padded" and band is not None:
        y = F.conv2d(F.pad(image, (1, 1, 1 - band.above, 1)), weight, bias, stride=2)
        return y.permute(0, 2, 3, 1)[:, : band.rows]
    elif kind == "3x3 stride 2 padded":
        y = F.conv2d(image, weight, bias, stride=2, padding=1)
    else:
        y = F.conv2d(image, weight, bias, padding=1)
    y = y.permute(0, 2, 3, 1)
    if band is None:
        return y
    first = band.above * (2 if kind == "upsample" else 1)
    return y[:, first : first + band.rows]


def statistics_of_rows(y: torch.Tensor) -> torch.Tensor:
    """The statistics (N, parts, C, 4) of y (N, H, W, C), a part for STATISTICS_ROWS rows."""
    whole = y.shape[1] // STATISTICS_ROWS
    parts = [
        y[:, : whole * STATISTICS_ROWS].unflatten(1, (whole, STATISTICS_ROWS)).flatten(2, 3),
        y[:, None, whole * STATISTICS_ROWS :].flatten(2, 3),
    ]
    return torch.cat([moments_of(part) for part in parts if part.numel()], 1)


def norm_from(mean: torch.Tensor, variance: torch.Tensor, norm: NextNorm) -> torch.Tensor:
    """Scale and shift (N, C, 2) from the moments (N, groups) of the groups."""
    each = norm.gamma.shape[0] // norm.groups
    rstd = (variance + norm.eps).rsqrt().repeat_interleave(each, 1)
    scale = rstd * norm.gamma.to(rstd)
    return torch.stack((scale, norm.beta.to(rstd) - mean.repeat_interleave(each, 1) * scale), -1)


def given(
    statistics: torch.Tensor,
    phases: int,
    next_norm: NextNorm | None,
    band: Band | None,
    finish: Finish,
) -> torch.Tensor | None:
    """A band's statistics (N, phases, parts, C, 4), or the norm made from an image's statistics.

    `statistics`: (N, phases * parts, C, 4). Parts are rows of tiles, wherever an image is cut. So
    the parts of its bands equal its own to the bit, and have their order if put together along
    `parts`.
    """
    if band is not None or next_norm is None:
        return statistics.unflatten(1, (phases, -1))
    return finish(statistics, next_norm.gamma, next_norm.beta, next_norm.groups, next_norm.eps)


def reference(kind: str, inputs: ConvInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y in float64, and the next norm (of a band: statistics) if one is asked for."""
    x, weights, norm, shortcut, next_norm, _, band, *_ = inputs
    fused = inputs.embedding, inputs.shortcut_weight, inputs.epilogue, inputs.second
    norm, shortcut = (None if t is None else t.double() for t in (norm, shortcut))
    y = convolve(kind, x.double(), weights, norm, shortcut, band, *fused)
    if next_norm is None:
        return y, None
    result = y[..., : weights.weight.shape[0]]
    if band is not None:
        return y, statistics_of_rows(result)[:, None]
    groups = result.unflatten(-1, (next_norm.groups, -1))
    variance, mean = torch.var_mean(groups, (1, 2, 4), correction=0)
    return y, norm_from(mean, variance, next_norm)
