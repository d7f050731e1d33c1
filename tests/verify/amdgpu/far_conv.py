"""Convolutions whose images reach beyond 2 and 4 GiB, in bytes and in elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.conv import split
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.layout import MOST_ROW_VALUES
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.weights import ConvWeights
from tests.ops.running import compute
from tests.verify.amdgpu.far_attention import launch_on
from tests.verify.amdgpu.launch import CodeLaunch
from tests.verify.amdgpu.sparse import sparse, spread

CPU = torch.device("cpu")
FAR_COLUMNS = 1024
"""Between two images' embeddings, so that those of many are more than 2^32."""


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
    """Many of them: x, shortcut and output."""
    problem = {
        "3x3": ConvProblem(kind, 3, 8, 16, 16, 16, "float16", True, "conv", 16, True),
        "3x3 stride 2": ConvProblem(kind, 3, 16, 32, 16, 16, statistics=True),
        "3x3 stride 2 padded": ConvProblem(kind, 3, 16, 32, 16, 16, statistics=True),
        "upsample": ConvProblem(kind, 3, 8, 16, 32, 16, statistics=True),
    }[kind]
    return _of_many(problem, (1 << 21) + 3, gfx, kernels_dir)


def images_in_rows(kind: str, gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """The same with weights as they lie."""
    problem = {
        "3x3": ConvProblem(kind, 3, 8, 16, 16, 16, "float16", True, "conv", 16, True, in_rows=True),
        "upsample": ConvProblem(kind, 3, 8, 16, 32, 16, statistics=True, in_rows=True),
    }[kind]
    return _of_many(problem, (1 << 21) + 3, gfx, kernels_dir)


def norms_and_statistics(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Those of even more images, of one row and many channels, and what is added to each image."""
    problem = ConvProblem("3x3", 3, 1, 16, 256, 128, norm=True, statistics=True, embedding=True)
    return _of_many(problem, (1 << 23) + 3, gfx, kernels_dir)


def _of_many(problem: ConvProblem, count: int, gfx: str, kernels_dir: Path) -> list[str]:
    """So many images, of which three are there, at the ends and in the middle."""
    chosen = [0, count // 2, count - 1]
    few = CONVS[problem.kind].make_inputs(problem, CPU, 5)
    rows = None
    if few.embedding is not None:  # read as it lies where there is no bias
        rows = torch.nn.functional.pad(few.embedding.float(), (0, FAR_COLUMNS))
        few = few._replace(
            weights=ConvWeights(few.weights.weight), embedding=rows[:, : problem.out_channels]
        )
    kept: list[torch.Tensor] = []

    def finish(statistics: torch.Tensor, *_: Any) -> torch.Tensor:
        kept.append(statistics)
        return statistics

    names = [name for name in ("x", "norm", "shortcut") if getattr(few, name) is not None]
    placed: dict[str, Any] = {name: among(count, chosen, getattr(few, name)) for name in names}
    if rows is not None:
        placed["embedding"] = among(count, chosen, rows)[:, : problem.out_channels]
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=partial(of_images, count=count, chosen=chosen),
        shown=lambda made: [made[image] for image in chosen],
    )
    shown = [tensor[image] for tensor in placed.values() for image in chosen]
    inputs = few._replace(**placed, finish=finish)
    out = _made(launch, problem, inputs, shown)[chosen]
    return _faults(few, problem, out) + _of_statistics(kept[0][chosen], out)


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


def after_split(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Output and shortcut of conv_sum as channels of a much wider image, and far rows of a bias."""
    generator = torch.Generator().manual_seed(1)
    sums, added, bias = (
        torch.randn(shape, generator=generator)
        for shape in ((3, 2, 48, 16, 32), (3, 48, 16, 32), (3, 32))
    )
    step = MOST_ROW_VALUES // 16
    strides = (48 * 16 * step, 16 * step, step, 1)
    shortcut = out = spread(added.half(), strides)
    rows = spread(bias, (1 << 31, 1))
    exact = sums.double().sum(1) + shortcut.double() + bias.double()[:, None, None]
    launch = launch_on(gfx, kernels_dir)
    with launch.knows(sums, rows, out):
        split.launch_sum(launch, sums, split.Summed(rows, 1 << 31, out, shortcut))
    off = (out.double() - exact).abs().max().item()
    return [] if off <= 1e-2 else [f"the sum is off by {off}"]


ALL: dict[str, Callable[..., list[str]]] = (
    {
        f"{what.__name__} of a {kind} convolution": partial(what, kind)
        for kind in CONVS
        for what in (images, rows)
    }
    | {
        f"images of {kind} with weights as they lie": partial(images_in_rows, kind)
        for kind in ("3x3", "upsample")
    }
    | {
        "norms and statistics of a convolution": norms_and_statistics,
        "pixels after a split convolution": after_split,
    }
)
