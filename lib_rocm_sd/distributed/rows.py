"""Which rows of a UNet's images each rank has, and why some UNets cannot be split so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lib_rocm_sd.distributed.shares import Part, split

LEAST_ROWS = 2
"""Fewest rows of the smallest image for each rank."""
BLOCKS: dict[str, set[str | None]] = {
    "down_block_types": {"DownBlock2D", "CrossAttnDownBlock2D"},
    "mid_block_type": {"UNetMidBlock2DCrossAttn", "UNetMidBlock2D", None},
    "up_block_types": {"UpBlock2D", "CrossAttnUpBlock2D"},
}
"""Blocks in which rows meet only in convolutions, GroupNorm and self-attention."""


@dataclass(frozen=True)
class RowSplit:
    """The rows of the largest image, `height` x `width`, by rank.

    Ranks begin at multiples of `factor`, by which the smallest image is smaller: so every image
    between is parted between the same places.
    """

    height: int
    width: int
    factor: int
    parts: tuple[Part, ...]

    def of(self, height: int) -> list[Part]:
        """The rows of the image of this height. Raises ValueError where the UNet has none such."""
        by, found = 1, self.height
        while found != height:
            by, found = 2 * by, -(-found // 2)
            if by > self.factor:
                raise ValueError(f"no image of the UNet has {height} rows: {self.height} at first")
        return self._smaller(by)

    def tokens(self, rank: int, count: int) -> list[int]:
        """By rank, the pixels of the image of which `rank` has `count`. Raises ValueError, too."""
        by = 1
        while by <= self.factor:
            rows, width = self._smaller(by), -(-self.width // by)
            if (rows[rank][1] - rows[rank][0]) * width == count:
                return [(last - first) * width for first, last in rows]
            by *= 2
        raise ValueError(f"no image of the UNet has {count} pixels on rank {rank}")

    def _smaller(self, by: int) -> list[Part]:
        return [(-(-first // by), -(-last // by)) for first, last in self.parts]


def row_split(height: int, width: int, factor: int, weights: Sequence[float]) -> RowSplit:
    """Raises ValueError where a rank would have too few rows."""
    units = -(-height // factor)
    try:
        parts = split(units, weights, LEAST_ROWS)
    except ValueError:
        most = units // LEAST_ROWS
        raise ValueError(
            f"{height} rows are {units} of the smallest image: enough for {most} ranks of "
            f"{LEAST_ROWS} rows each, not for {len(weights)}"
        ) from None
    rows = tuple((first * factor, min(last * factor, height)) for first, last in parts)
    return RowSplit(height, width, factor, rows)


def obstacles(unet: nn.Module) -> list[str]:
    """Why the rows of this UNet's images cannot be split over ranks; empty if they can."""
    config: Any = getattr(unet, "config", None)
    if type(unet).__name__ != "UNet2DConditionModel" or config is None:
        return [f"{type(unet).__name__} is no UNet2DConditionModel of diffusers"]
    found = []
    for name, known in BLOCKS.items():
        given = getattr(config, name, None)
        kinds = given if isinstance(given, (list, tuple)) else [given]
        found += [f"a block is of another kind: {kind}" for kind in kinds if kind not in known]
    for name, module in unet.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            found.append(f"{name or 'the UNet'} is compiled")
        if isinstance(module, nn.Conv2d):
            found += [f"{name}: {why}" for why in _of_convolution(module)]
        if isinstance(module, nn.GroupNorm) and type(module).forward is not nn.GroupNorm.forward:
            found.append(f"{name}: a GroupNorm with a forward of its own")
        if getattr(module, "fused_projections", False):
            found.append(f"{name}: its projections are fused")
        if type(module).__name__ == "GatedSelfAttentionDense":
            found.append(f"{name}: attention to boxes beside the image")
    return found


def _of_convolution(module: nn.Conv2d) -> list[str]:
    found = []
    if type(module).forward is not nn.Conv2d.forward:
        found.append("a convolution with a forward of its own")
    rows = (module.kernel_size[0], module.stride[0], _padding(module))
    if rows not in ((1, 1, 0), (3, 1, 1), (3, 2, 1)):
        found.append("kernel {}, stride {}, padding {}".format(*rows))
    if module.dilation[0] != 1 or module.padding_mode != "zeros":
        found.append(f"dilation {module.dilation[0]}, padding mode {module.padding_mode}")
    return found


def _padding(module: nn.Conv2d) -> int | str:
    return module.padding if isinstance(module.padding, str) else module.padding[0]
