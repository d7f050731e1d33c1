"""Two tilings that other extensions use, written anew from their description, for comparison.

Both run the coder on pieces of its input, so each GroupNorm sees the statistics of a piece, and
the mid-block's attention no further than the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

TILE = 512
"""Pixels a side of a tile."""
DECODER_MARGIN, ENCODER_MARGIN = 88, 32
"""Pixels beyond each edge of a tile that per-tile GroupNorm tiling computes and crops."""

Call = Callable[[torch.Tensor], torch.Tensor]
Scale = tuple[int, int]


def overlap_blend(call: Call, image: torch.Tensor, scale: Scale, tile: int) -> torch.Tensor:
    """Tiles of `tile` rows and columns of the input, a quarter overlapping, blended linearly.

    image (N, C, H, W) to (N, C', H * scale, W * scale). `scale` is a fraction; `tile` is a multiple
    of four times its denominator.
    """
    step, overlap = tile - tile // 4, tile // 4
    total = weight = None
    for top, left in _corners(image, step, overlap):
        made = call(image[:, :, top : top + tile, left : left + tile]).float()
        rows, columns = (_scaled(place, scale) for place in (top, left))
        if total is None or weight is None:
            height, width = (_scaled(size, scale) for size in image.shape[2:])
            total = made.new_zeros((*made.shape[:2], height, width))
            weight = made.new_zeros((height, width))
        ramp = _scaled(overlap, scale)
        share = _share(rows, made.shape[2], total.shape[2], ramp, made.device)[:, None]
        share = share * _share(columns, made.shape[3], total.shape[3], ramp, made.device)
        bottom, right = rows + made.shape[2], columns + made.shape[3]
        total[:, :, rows:bottom, columns:right] += made * share
        weight[rows:bottom, columns:right] += share
    if total is None or weight is None:
        raise ValueError(f"an image without pixels: {tuple(image.shape)}")
    return (total / weight).to(image.dtype)


def per_tile_norm(
    call: Call, image: torch.Tensor, scale: Scale, tile: int, margin: int
) -> torch.Tensor:
    """Tiles of `tile` rows and columns of the input, computed with `margin` more on each side.

    The margin is cropped, nothing is blended. Sizes as in `overlap_blend`; `margin` is a multiple
    of the scale's denominator.
    """
    height, width = image.shape[2:]
    output = None
    for top, left in _corners(image, tile, 0):
        above, before = max(top - margin, 0), max(left - margin, 0)
        bottom, right = min(top + tile, height), min(left + tile, width)
        piece = image[:, :, above : bottom + margin, before : right + margin]
        made = call(piece)
        if output is None:
            size = (_scaled(height, scale), _scaled(width, scale))
            output = made.new_empty((*made.shape[:2], *size))
        rows = slice(_scaled(top, scale), _scaled(bottom, scale))
        columns = slice(_scaled(left, scale), _scaled(right, scale))
        skip = (_scaled(top - above, scale), _scaled(left - before, scale))
        output[:, :, rows, columns] = made[
            :,
            :,
            skip[0] : skip[0] + rows.stop - rows.start,
            skip[1] : skip[1] + columns.stop - columns.start,
        ]
    if output is None:
        raise ValueError(f"an image without pixels: {tuple(image.shape)}")
    return output


def _corners(image: torch.Tensor, step: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Where tiles begin; none that lies wholly in the overlap with the one before."""
    height, width = image.shape[2:]
    for top in range(0, max(height - overlap, min(height, 1)), step):
        for left in range(0, max(width - overlap, min(width, 1)), step):
            yield top, left


def _share(place: int, length: int, end: int, ramp: int, device: torch.device) -> torch.Tensor:
    """The weight of each row of a tile: rising and falling over `ramp` but at the image's edges."""
    share = torch.ones(length, device=device)
    rising = (torch.arange(min(ramp, length), device=device) + 0.5) / ramp
    if place > 0:
        share[: rising.numel()] *= rising
    if place + length < end:
        share[length - rising.numel() :] *= rising.flip(0)
    return share


def _scaled(pixels: int, scale: Scale) -> int:
    return pixels * scale[0] // scale[1]
