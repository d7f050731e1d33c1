"""What is executed as machine code, and how far from the right values its results may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lib_rocm_sd.arch import Arch, by_gfx

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One problem, by one config, on one GPU. `layout`, `values`, `scale` and what `mask_of` says
    are those of attention (drawn.py); `layout` also of images, "misaligned", "wide", "band",
    "normed", and of rows, "misaligned", "apart".
    `schedule`: in which order waves take turns, 0 for lockstep.
    """

    gfx: str
    op: str
    problem: Any
    config: int = 0
    layout: str = "plain"
    seed: int = 1
    compiled_by: str = "clang"
    values: str = "random"
    scale: float | None = None
    mask_of: str = "rows"
    schedule: int = 0

    @property
    def arch(self) -> Arch:
        arch = by_gfx(self.gfx)
        assert arch is not None
        return arch

    def __str__(self) -> str:
        how = f"config {self.config} {self.layout} {self.values} {self.compiled_by}"
        how += f" scale {self.scale}" * (self.scale is not None)
        how += f" mask of {self.mask_of}" * (getattr(self.problem, "mask", "none") != "none")
        how += f" schedule {self.schedule} of seed {self.seed}" * bool(self.schedule)
        return f"{self.gfx} {self.op} {self.problem} {how}"


def largest(output: torch.Tensor, exact: torch.Tensor) -> float:
    return (output.double() - exact).abs().max().item()


def judged(ours: float, theirs: float, slack: float = 0.0) -> list[str]:
    """At most twice the error of torch's own in the same half type; NaN is wrong."""
    good = ours <= 2 * theirs + slack
    return [] if good else [f"largest error {ours}, torch's own {theirs}"]
