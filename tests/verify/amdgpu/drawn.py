"""Inputs that tell a wrong lane, stride, scale or mask from the right one, beside random ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from lib_rocm_sd.ops.attention.kernel import LENGTHS
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem
from tests.ops.attention.layouts import lay_out
from tests.verify.simt.attention import DTYPES, draw, key_lengths

MIXED = {
    "mixed": ("heads first", "packed", "sequence first"),
    "mixed and odd": ("misaligned", "ragged rows", "every second row"),
    "repeated": ("repeated heads", "repeated batch", "plain"),
}
"""Layouts of q, k and v; another name is the layout of all three."""
ALONG = {"along batch": 0, "along rows": 1, "along heads": 2, "along columns": 3}
"""Values that differ along one dimension of (B, S, H, D) only."""
VALUES = ("random", "large", "infinite", "ties", "small", *ALONG)
MASKS = ("rows", "whole", "turned", "keys", "queries", "heads")
"""What a mask differs along: rows and keys, all, all with the keys outermost but for the batch, and
one dimension each.
"""


def tensors(
    problem: AttentionProblem, layout: str, values: str, block_k: int = 64
) -> list[torch.Tensor]:
    """q, k and v of these values, in this layout."""
    made = _SHAPED[values](problem, block_k)
    layouts = MIXED.get(layout, (layout,) * 3)
    return [lay_out(x, each) for x, each in zip(made, layouts, strict=True)]


def _growing(p: AttentionProblem, block_k: int) -> list[torch.Tensor]:
    """The second tile of keys, of block_k, has scores far above the first one's, in the upper lanes
    of a wave of 64.
    """
    q, k, v = draw(p)
    k[:, block_k + 13 : block_k + 15] *= 16
    return [q, k, v]


def _large(p: AttentionProblem, block_k: int) -> list[torch.Tensor]:
    """Near the largest number of the half type; one key has all of a query's weight."""
    q, k, v = draw(p)
    large = 0.99 * torch.finfo(v.dtype).max / v.abs().max().item()
    return [q * 100, k * 100, (v.double() * large).to(v.dtype)]


def _small(p: AttentionProblem, block_k: int) -> list[torch.Tensor]:
    """Values near the least normal number of the half type."""
    q, k, v = draw(p)
    return [q, k, (v.double() * torch.finfo(v.dtype).tiny).to(v.dtype)]


def _infinite(p: AttentionProblem, block_k: int) -> list[torch.Tensor]:
    """The last key's values are infinite, which a row behind it must not make NaN."""
    q, k, v = draw(p)
    v[:, -1, :, ::3] = math.inf
    return [q, k, v]


def _ties(p: AttentionProblem, block_k: int) -> list[torch.Tensor]:
    """All keys are the same."""
    q, k, v = draw(p)
    return [q, k[:, :1].expand(k.shape).clone(), v]


def _along(dimension: int, p: AttentionProblem, block_k: int) -> list[torch.Tensor]:
    found = []
    for x in draw(p):
        count = x.shape[dimension]
        shape = [1] * 4
        shape[dimension] = count
        line = (torch.arange(count) % 61 - 30.0) / 16
        found.append(line.to(x.dtype).view(shape).expand(x.shape).clone())
    return found


_SHAPED: dict[str, Callable[[AttentionProblem, int], list[torch.Tensor]]] = {
    "random": lambda p, _: draw(p),
    "growing": _growing,
    "large": _large,
    "small": _small,
    "ties": _ties,
    "infinite": _infinite,
    **{name: partial(_along, dimension) for name, dimension in ALONG.items()},
}


def mask(problem: AttentionProblem, of: str, seed: int = 1) -> torch.Tensor | None:
    """A mask that leaves out a third of the keys, differs along what `of` says, and leaves a query
    of the whole ones none. Or key lengths.
    """
    p = problem
    if p.mask == "none":
        return None
    if p.mask == LENGTHS:  # the first tile in part, and all
        return key_lengths(*(p.seq_k - b * (p.seq_k - 13) for b in range(p.batch)))
    batch, heads, rows, keys = {
        "rows": (1, 1, p.seq_q, p.seq_k),
        "whole": (p.batch, p.heads, p.seq_q, p.seq_k),
        "turned": (p.batch, p.heads, p.seq_q, p.seq_k),
        "keys": (p.batch, 1, 1, p.seq_k),
        "queries": (1, 1, p.seq_q, 1),
        "heads": (1, p.heads, 1, p.seq_k),
    }[of]
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand((batch, heads, rows, keys), generator=generator) < 0.67
    if of in ("whole", "turned"):
        keep[0, 0, rows // 2] = False
        keep[-1, -1, :, : keys // 2] = False  # nothing in the first tile
    else:
        keep[..., 0] = True
    if p.mask == "bool":
        made = keep
    else:
        bias = torch.randn(keep.shape, generator=generator)
        made = bias.masked_fill(~keep, -math.inf).to(DTYPES[p.mask])
    if of == "turned":
        return made.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    return made


def misaligned(image: torch.Tensor) -> torch.Tensor:
    """The same, dense in the same order, beginning two bytes behind a multiple of 16."""
    storage = image.new_full((image.numel() + 1,), math.nan)
    return storage[1:].as_strided(image.shape, image.stride(), 1).copy_(image)


def _wide(image: torch.Tensor) -> torch.Tensor:
    """The first channels of an image (N, H, W, C) with 16 more."""
    batch, height, width, channels = image.shape
    whole = image.new_full((batch, height, width, channels + 16), math.nan)
    return whole[..., :channels].copy_(image)


def conv(problem: ConvProblem, layout: str, values: str) -> ConvInputs:
    """Inputs with a flag for overflow; a "large" bias makes the second channel overflow. "wide": x
    and the shortcut have more channels than are used. "band": rows from an image's middle.
    """
    made = CONVS[problem.kind].make_inputs(problem, torch.device("cpu"), 5)
    made = made._replace(overflow=torch.zeros(1, dtype=torch.int32))
    if values == "large":
        assert made.weights.bias is not None
        made.weights.bias[1] = LARGE_BIAS
    if layout == "wide":
        made = made._replace(x=_wide(made.x))
        if made.shortcut is not None and not problem.in_place:
            made = made._replace(shortcut=_wide(made.shortcut))
        if made.second is not None:
            made = made._replace(second=_wide(made.second))
    if layout == "misaligned" and made.shortcut is not None:
        made = made._replace(shortcut=misaligned(made.shortcut))
    if layout == "band":
        above, rows = _BANDS[problem.kind]
        shortcut, second = (
            None if added is None else added[:, :rows].contiguous()
            for added in (made.shortcut, made.second)
        )
        made = made._replace(band=Band(above, rows), shortcut=shortcut, second=second)
    return made


_BANDS = {
    "3x3": (1, 7),
    "upsample": (1, 10),
    "3x3 stride 2": (0, 4),
    "3x3 stride 2 padded": (1, 4),
}
"""Rows above, and rows that are made, of images with at least nine, seven and ten rows."""
LARGE_BIAS = 1e5
"""Sums with it do not fit fp16."""


def finish(
    problem: ConvProblem, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, out, bias and shortcut of group_norm_finish; a channel does not fit fp16."""
    p = problem
    shape = (p.batch, *p.out_size, p.out_channels)
    sources = (p.batch, p.height + 2, p.width + 1, 4 * p.out_channels)
    generator = torch.Generator().manual_seed(7)

    def image(*size: int) -> torch.Tensor:
        made = torch.randn(size, generator=generator).to(DTYPES[p.dtype])
        return misaligned(made) if layout == "misaligned" else made

    x = image(*(sources if p.kind == "upsample" else shape))
    rows = (p.batch,) if p.embedding else ()
    bias = torch.randn((*rows, p.out_channels), generator=generator)
    bias[..., 1] = LARGE_BIAS
    shortcut = None if p.shortcut == "none" else image(*shape)
    return x, image(*shape).fill_(math.nan), bias, shortcut


ABOVE = {"3x3": 0, "upsample": 1}
"""Rows of x that group_norm_finish skips."""


def finished(
    problem: ConvProblem, x: torch.Tensor, bias: torch.Tensor, shortcut: torch.Tensor | None
) -> torch.Tensor:
    """What group_norm_finish is to make of it, in float64."""
    wide = x.double()
    if problem.kind == "upsample":
        batch, rows, columns = problem.batch, *problem.out_size
        wide = torch.empty((batch, rows, columns, problem.out_channels), dtype=torch.float64)
        phases = x.double().unflatten(-1, (4, -1))[:, ABOVE[problem.kind] :]
        for phase in range(4):
            down, right = divmod(phase, 2)
            part = phases[:, down : down + rows // 2, right : right + columns // 2, phase]
            wide[:, down::2, right::2] = part
    each = bias.double().view(-1, 1, 1, problem.out_channels)
    return wide + each + (0 if shortcut is None else shortcut.double())
