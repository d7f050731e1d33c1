"""Runs group_norm.py on torch's tensors. Needs Triton and a GPU that it knows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from lib_rocm_sd.triton_kernels.group_norm import PART_PIXELS, apply, merge, statistics
from lib_rocm_sd.triton_kernels.launching import launching

MERGED_PARTS = 128
"""Taken at a time when parts are merged."""
FEW_PARTS = 16
"""Which one wave merges."""


@dataclass(frozen=True)
class NormTile:
    """Elements that a program takes at a time, and its waves. `run`: how many of them lie side by
    side, channels or pixels.
    """

    elements: int
    run: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.elements} elements, {self.run} in a run, {self.num_warps} waves"


CONFIGS = (NormTile(2048, 64, 4), NormTile(4096, 128, 4), NormTile(8192, 256, 8))


def run(
    tile: NormTile,
    x: torch.Tensor,
    last: bool,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> torch.Tensor:
    """The GroupNorm of x (N, C, H, W), which is dense; `last`: it lies channels-last. RuntimeError
    where Triton cannot.
    """
    batch, channels = x.shape[:2]
    pixels = math.prod(x.shape[2:])
    parts = -(-pixels // PART_PIXELS)
    steps = (1, channels) if last else (pixels, 1)
    block_c, block_p = _blocks(tile, last, channels, pixels)
    of_channels = -(-channels // block_c)
    found = x.new_empty((batch, parts, channels, 2), dtype=torch.float32)
    norm = x.new_empty((batch, channels, 2), dtype=torch.float32)
    kind = torch.channels_last if last else torch.contiguous_format
    out = torch.empty_like(x, memory_format=kind)
    width = channels // groups
    with launching(x.device, tile):
        statistics[(batch * parts * of_channels,)](
            *(x, found, channels, pixels, parts, *steps),
            part_pixels=PART_PIXELS,
            block_c=block_c,
            block_p=block_p,
            num_warps=tile.num_warps,
        )
        merge[(batch * groups,)](
            *(found, found if gamma is None else gamma, found if beta is None else beta, norm),
            *(channels, pixels, parts, width, groups, eps),
            part_pixels=PART_PIXELS,
            block_c=triton.next_power_of_2(width),
            block_parts=min(MERGED_PARTS, triton.next_power_of_2(parts)),
            has_gamma=gamma is not None,
            has_beta=beta is not None,
            num_warps=1 if parts <= FEW_PARTS else 4,
        )
        apply[(batch * -(-pixels // block_p) * of_channels,)](
            *(x, norm, out, channels, pixels, *steps),
            block_c=block_c,
            block_p=block_p,
            silu=silu,
            num_warps=tile.num_warps,
        )
    return out


def _blocks(tile: NormTile, last: bool, channels: int, pixels: int) -> tuple[int, int]:
    """Channels and pixels of a block: as many side by side as the tile says, where there are."""
    near = min(tile.run, triton.next_power_of_2(channels if last else pixels))
    far = min(tile.elements // near, triton.next_power_of_2(pixels if last else channels))
    block_c, block_p = (near, far) if last else (far, near)
    return block_c, min(block_p, PART_PIXELS)
