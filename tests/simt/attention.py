"""Attention cases for the shim: tensors in awkward layouts, a run, a comparison with torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lib_rocm_sd.arch import KERNELS_DIR, Arch, by_gfx
from lib_rocm_sd.ops.attention import AttentionProblem, MatrixAttention, problem_of, reference
from tests.simt.launch import ShimLaunch

UNITS = ("gfx1030", "gfx1100", "gfx1200", "gfx942", "sm_80")
"""One row of arch.json per matrix unit: dot2, wmma_gfx11, wmma_gfx12, mfma, mma_sm80."""
HEAD_DIMS = (8, 40, 64, 72, 80, 128, 160, 256, 512)
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "bool": torch.bool,
}
LAYOUTS = ("plain", "heads first", "packed", "misaligned")
"""How (B, S, H, D) lies in memory; what a layout leaves unused holds NaN."""


@dataclass(frozen=True)
class Setting:
    """How a case is run: as which GPU, in which order, with which sanitizer and sources."""

    gfx: str
    seed: int = 1
    sanitize: str | None = None
    kernels_dir: Path = KERNELS_DIR
    config: int = 0

    @property
    def arch(self) -> Arch:
        arch = by_gfx(self.gfx)
        assert arch is not None
        return arch


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` (B, S, H, D) as a view of a storage of its own, of which it uses the last element."""
    batch, seq, heads, dim = x.shape
    if layout == "plain":
        return x.clone()
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        view = x.new_full((batch, seq, 2, heads, dim), math.nan)[:, :, 1]
    elif layout == "misaligned":
        row = heads * (dim + 3)
        storage = x.new_full((1 + batch * seq * row,), math.nan)
        view = storage[1:].view(batch, seq, heads, dim + 3)[..., 3:]
    else:
        raise ValueError(layout)
    return view.copy_(x)


def draw(
    problem: AttentionProblem, layouts: Sequence[str] = ("plain",) * 3, seed: int = 1
) -> list[torch.Tensor]:
    """Random q, k, v in these layouts."""
    p = problem
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for seq, layout in zip((p.seq_q, p.seq_k, p.seq_k), layouts, strict=True):
        x = torch.randn((p.batch, seq, p.heads, p.head_dim), generator=generator)
        tensors.append(lay_out(x.to(DTYPES[p.dtype]), layout))
    return tensors


def random_mask(shape: Sequence[int], dtype: str, seed: int = 1) -> torch.Tensor:
    """A mask that leaves out a third of the keys, never the first."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(tuple(shape), generator=generator) < 0.67
    keep[..., 0] = True
    if dtype == "bool":
        return keep
    bias = torch.randn(tuple(shape), generator=generator)
    return bias.masked_fill(~keep, -math.inf).to(DTYPES[dtype])


def attend(
    setting: Setting,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """What the kernel makes of it, through MatrixAttention.run. Raises SimtError."""
    launch = ShimLaunch(setting.arch, setting.seed, setting.sanitize, setting.kernels_dir)
    variant, problem = MatrixAttention(), problem_of(q, k, v, mask)
    config = variant.configs(setting.arch, problem)[setting.config]
    with launch.knows(q, k, v, mask):
        return variant.run(launch, config, q, k, v, mask, scale)


def torchs_own(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The best that torch does in a half type: float32 inside, only the result is rounded."""
    wide_q, wide_k, wide_v = (x.float().transpose(1, 2) for x in (q, k, v))
    scores = wide_q @ wide_k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return (scores.softmax(-1).nan_to_num(0.0) @ wide_v).transpose(1, 2).flatten(2).to(q.dtype)


@dataclass(frozen=True)
class Errors:
    """Against float64. The root of the mean square shows a systematic error of any element."""

    largest: float
    rms: float

    @classmethod
    def of(cls, out: torch.Tensor, exact: torch.Tensor) -> Errors:
        error = out.double() - exact
        return cls(error.abs().max().item(), error.square().mean().sqrt().item())


def compare(
    setting: Setting,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> list[str]:
    """What is wrong: a largest error of more than twice torch's own, an rms of more than 1.5 times.

    The weights, too, are rounded to the half type before they meet v: this alone gives an rms of
    some 1.3 times that of rounding the result only.
    """
    exact = reference(q, k, v, mask, scale)
    ours = Errors.of(attend(setting, q, k, v, mask, scale), exact)
    theirs = Errors.of(torchs_own(q, k, v, mask, scale), exact)
    good = ours.largest <= 2 * theirs.largest and ours.rms <= 1.5 * theirs.rms
    return [] if good else [f"{ours}, torch's own {theirs}"]
