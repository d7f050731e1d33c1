"""Convolutions whose images reach beyond 2 and 4 GiB, in bytes and in elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.conv.layout import MOST_ROW_VALUES
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvInputs, ConvProblem
from tests.amdgpu.far_attention import launch_on
from tests.amdgpu.launch import CodeLaunch
from tests.amdgpu.sparse import sparse, spread
from tests.ops.running import compute

CPU = torch.device("cpu")
IMAGES = (1 << 21) + 3
"""Of 2^11 values at least."""
CHOSEN = [0, IMAGES // 2, IMAGES - 1]


def among(count: int, chosen: Sequence[int], values: torch.Tensor) -> torch.Tensor:
    """(count, ...) of which only `chosen` are there: `values`."""
    made = sparse((count, *values.shape[1:]), values.dtype)
    made[list(chosen)] = values
    return made


def of_images(entry: str, grid: int, count: int, chosen: Sequence[int]) -> list[int] | None:
    """The work-groups that make the images `chosen` of `count`; None for weights."""
    if entry == "pack_tiles":
        return None
    each = grid // count
    return [image * each + group for image in chosen for group in range(each)]


def _faults(inputs: ConvInputs, problem: ConvProblem, made: torch.Tensor) -> list[str]:
    """At most twice the error of torch's own."""
    op = CONVS[problem.kind]
    plain = inputs._replace(next_norm=None, out=None)
    exact = op.reference(plain)[0]
    theirs = compute(op, op.variants[-1], None, None, plain)[0]
    errors = [(each.double() - exact).abs().max().item() for each in (made, theirs)]
    return [] if errors[0] <= 2 * errors[1] else [f"largest error {errors[0]}, torch's {errors[1]}"]


def _made(
    launch: CodeLaunch,
    problem: ConvProblem,
    inputs: ConvInputs,
    shown: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """The output; kernels may touch what is shown, the weights, and what is made."""
    op, variant, weights = CONVS[problem.kind], MatrixConv(problem.kind), inputs.weights
    config = variant.configs(launch.arch, problem)[0]
    with launch.knows(*shown, weights.weight, weights.bias_on(CPU)):
        out: torch.Tensor = compute(op, variant, launch, config, inputs)[0]
    return out


def images(kind: str, gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Many of them: x, norm, shortcut, output and its statistics."""
    fused: dict[str, Any] = {}
    if kind == "3x3":
        fused = {"norm": True, "shortcut": "conv", "shortcut_channels": 16}
    size = {"3x3": (8, 16), "3x3 stride 2": (16, 32), "upsample": (8, 16)}[kind]
    channels = 32 if kind == "upsample" else 16
    problem = ConvProblem(kind, 3, *size, channels, 16, statistics=True, **fused)
    few = CONVS[kind].make_inputs(problem, CPU, 5)
    kept: list[torch.Tensor] = []

    def finish(statistics: torch.Tensor, *_: Any) -> torch.Tensor:
        kept.append(statistics)
        return statistics

    names = [name for name in ("x", "norm", "shortcut") if getattr(few, name) is not None]
    placed = {name: among(IMAGES, CHOSEN, getattr(few, name)) for name in names}
    inputs = few._replace(**placed, finish=finish)
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=partial(of_images, count=IMAGES, chosen=CHOSEN),
        shown=lambda made: [made[image] for image in CHOSEN],
    )
    shown = [tensor[image] for tensor in placed.values() for image in CHOSEN]
    out = _made(launch, problem, inputs, shown)[CHOSEN]
    return _faults(few, problem, out) + _of_statistics(kept[0][CHOSEN], out)


def _of_statistics(statistics: torch.Tensor, out: torch.Tensor) -> list[str]:
    """(3, parts, C, 4) of (3, H, W, C)."""
    mean, _, count, _ = statistics.double().unbind(-1)
    whole = (mean * count).sum(1) / count.sum(1)
    off = (whole - out.double().mean((1, 2))).abs().max().item()
    return [] if off <= 2e-3 else [f"means of channels are off by {off}"]


def rows(kind: str, gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Rows of an x that is some channels of a much wider image; of "3x3" also those of the output,
    which takes the place of such a shortcut.
    """
    problem = ConvProblem(kind, 1, 132, 16, 32, 32)
    if kind == "3x3":
        problem = ConvProblem(kind, 1, 132, 16, 32, 128, "float16", True, "conv", 160, False, True)
    few = CONVS[kind].make_inputs(problem, CPU, 5)
    step = MOST_ROW_VALUES // 16
    strides = (132 * 16 * step, 16 * step, step, 1)
    inputs = few._replace(x=spread(few.x, strides))
    wide = None
    if few.out is not None and few.shortcut is not None:
        wide = spread(few.shortcut, strides)
        inputs = inputs._replace(shortcut=wide, out=wide[..., : problem.out_channels])
    out = _made(launch_on(gfx, kernels_dir), problem, inputs, [inputs.x, inputs.norm, wide])
    return _faults(few, problem, out)


ALL: dict[str, Callable[..., list[str]]] = {
    f"{what.__name__} of a {kind} convolution": partial(what, kind)
    for kind in CONVS
    for what in (images, rows)
}
