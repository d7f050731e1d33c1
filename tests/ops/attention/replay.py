"""Runs random problems of tests/ops/attention/problems.py, or one again:

python -m tests.ops.attention.replay PLACE KIND SIZES SEED

PLACE is gfx1100/0 for config 0 of a row of arch.json under the SIMT shim, gpu/0 for this machine's
GPU; KIND is float16:40:none (dtype, head_dim, mask); SIZES is small or large.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from lib_rocm_sd.arch import Arch, by_gfx
from lib_rocm_sd.device import identify
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.runtime import launcher
from tests.ops.attention.judge import Numbers, measure
from tests.ops.attention.problems import SIZES, Kind, Sizes, draw
from tests.ops.running import compute
from tests.verify.simt.launch import ShimLaunch

GPU = "gpu"
AT_A_TIME = 100
"""Problems on a GPU before their numbers are read, which waits for it."""


@dataclass(frozen=True)
class Place:
    """Who computes: a row of arch.json under the shim, or "gpu"; with which config."""

    gfx: str
    config: int = 0

    def __str__(self) -> str:
        return f"{self.gfx}/{self.config}"

    @classmethod
    def parse(cls, text: str) -> Place:
        gfx, _, config = text.partition("/")
        return cls(gfx, int(config or 0))

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:0" if self.gfx == GPU else "cpu")

    @property
    def arch(self) -> Arch:
        arch = identify(self.device).arch if self.gfx == GPU else by_gfx(self.gfx)
        if arch is None:
            raise ValueError(f"{self.gfx} is no GPU that is known here")
        return arch

    def spec(self, kind: Kind) -> Any:
        """The kernel that serves `kind` here."""
        config = kernel.configs(self.arch, kind.head_dim)[self.config]
        return kernel.spec(kind.dtype, kind.head_dim, kind.mask, config)

    def attention(self) -> Callable[..., torch.Tensor]:
        """The kernel of this place, nothing between. `seed`: of the shim's order of waves. As if on
        one compute unit: small problems, too, then give a work-group several tiles of queries.
        """
        variant = MatrixAttention()

        def attend(*inputs: Any, seed: int = 1) -> torch.Tensor:
            config = kernel.configs(self.arch, inputs[0].shape[3])[self.config]
            if self.gfx == GPU:
                launch = launcher.launcher_for(self.device, self.arch)
                with patch("lib_rocm_sd.ops.attention.ours._compute_units", return_value=1):
                    return compute(ATTENTION, variant, launch, config, inputs)
            shim = ShimLaunch(self.arch, seed)
            with shim.knows(*inputs[:4]):
                return compute(ATTENTION, variant, shim, config, inputs)

        return attend


def every_config(place: Place) -> list[tuple[Place, Kind]]:
    """Each config of each usual head_dim, in both half types, without a mask and with one."""
    found: list[tuple[Place, Kind]] = []
    for head_dim in kernel.SHIPPED_HEAD_DIMS:
        for index in range(len(kernel.configs(place.arch, head_dim))):
            for dtype in kernel.DTYPES:
                mask = kernel.MASK_KINDS[1:][len(found) // 2 % 4]
                for each in ("none", mask):
                    found.append((Place(place.gfx, index), Kind(dtype, head_dim, each)))
    return found


@dataclass(frozen=True)
class Result:
    """One problem, solved. `line` solves it again."""

    line: str
    story: str
    numbers: Numbers
    whole: bool

    @property
    def faults(self) -> list[str]:
        return self.numbers.faults(self.whole)

    def __str__(self) -> str:
        return "\n  ".join([self.line, self.story, *(self.faults or [str(self.numbers)])])


def solve(place: Place, kind: Kind, sizes: Sizes, seeds: Sequence[int]) -> list[Result]:
    """The problem of each seed. Raises SimtError where the shim does."""
    attend = place.attention()
    results: list[Result] = []
    for first in range(0, len(seeds), AT_A_TIME):
        part = [_solve(place, attend, kind, sizes, seed) for seed in seeds[first:][:AT_A_TIME]]
        rows = torch.stack([row for _, _, row in part]).tolist()
        for seed, (story, whole, _), row in zip(seeds[first:], part, rows, strict=False):
            line = f"python -m tests.ops.attention.replay {place} {kind} {sizes.name} {seed}"
            results.append(Result(line, story, Numbers(*row), whole))
    return results


def _solve(
    place: Place, attend: Callable[..., torch.Tensor], kind: Kind, sizes: Sizes, seed: int
) -> tuple[str, bool, torch.Tensor]:
    """Story, whether it is whole, and the judge's measures, which are still being computed."""
    drawn = draw(kind, seed, sizes, place.device)
    out = attend(*drawn.inputs, seed=seed)
    return drawn.story, drawn.whole, measure(out, *drawn.inputs)


def main() -> int:
    """Solve one problem and say how well: 1 where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", type=Place.parse)
    parser.add_argument("kind", type=Kind.parse)
    parser.add_argument("sizes", choices=SIZES)
    parser.add_argument("seed", type=int)
    args = parser.parse_args()
    (result,) = solve(args.place, args.kind, SIZES[args.sizes], [args.seed])
    print(result)
    print(result.numbers)
    return 1 if result.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
