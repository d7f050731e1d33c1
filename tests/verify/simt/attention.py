"""Attention cases for the shim: tensors in awkward layouts, a run, a comparison with torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lib_rocm_sd.arch import KERNELS_DIR, Arch, by_gfx
from lib_rocm_sd.ops.attention.inputs import AttentionInputs, problem_of
from lib_rocm_sd.ops.attention.kernel import ordered
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests.ops.attention.judge import numbers
from tests.ops.attention.layouts import lay_out
from tests.ops.running import compute
from tests.verify.simt.launch import ShimLaunch

UNITS = ("gfx1030", "gfx1100", "gfx1200", "gfx942", "sm_90")
"""One row of arch.json per matrix unit: dot2, wmma_gfx11, wmma_gfx12, mfma, mma_sm80."""
HEAD_DIMS = (8, 40, 64, 72, 80, 128, 160, 256, 512)
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "bool": torch.bool,
}


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


def key_lengths(*lengths: int) -> torch.Tensor:
    """Of so many images, as attention takes them in a mask's place."""
    return torch.tensor(lengths, dtype=torch.int32).view(-1, 1, 1, 1)


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
    variant, p = MatrixAttention(), problem_of(AttentionInputs(q, k, v, mask))
    config = ordered(setting.arch, p.dtype, p.head_dim, p.mask)[setting.config]
    with launch.knows(q, k, v, mask):
        return compute(ATTENTION, variant, launch, config, AttentionInputs(q, k, v, mask, scale))


def compare(
    setting: Setting,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> list[str]:
    """What is wrong with it, by the judge of tests/ops/attention/judge.py."""
    return numbers(attend(setting, q, k, v, mask, scale), q, k, v, mask, scale).faults(True)
