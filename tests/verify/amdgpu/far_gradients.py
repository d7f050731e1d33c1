"""Gradients of norms, of rows and images that reach beyond 2 and 4 GiB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig
from lib_rocm_sd.ops.group_norm_backward import ours as group_norm
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.layer_norm.kernel import LayerNormConfig, tiling
from lib_rocm_sd.ops.layer_norm_backward import kernel
from lib_rocm_sd.ops.layer_norm_backward.kernel import LayerNormBackwardParams
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.ours import launch_backward
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from tests.ops.gradients import draw, faults
from tests.verify.amdgpu.far_attention import launch_on
from tests.verify.amdgpu.far_conv import among, of_images
from tests.verify.amdgpu.far_layer_norm import _of_group
from tests.verify.amdgpu.sparse import sparse

CONFIG = GroupNormConfig(256, 4)


def rows(channels: int, gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """So many that the first, one in the middle and the last are further apart than 2^32 values."""
    count, config = (1 << 33) // channels + 3, LayerNormConfig(128)
    chosen = [0, count // 2, count - 1]
    problem = LayerNormBackwardProblem((3, channels), added=True, wanted=False)
    few = draw(LAYER_NORM_BACKWARD, problem)
    names = ("grad", "x", "added", "sum_grad")
    far = {name: among(count, chosen, getattr(few, name)) for name in names}
    teams = config.threads // tiling(channels, config).lanes
    # The other rows of these work-groups hold zeros; what is made of them is shown, too.
    whole = sorted({row for at in chosen for row in _of_group(at, teams, count)})
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=lambda entry, grid: sorted({row // teams for row in chosen}),
        shown=lambda made: [made[row] for row in whole],
    )
    with torch.no_grad(), launch.knows(few.gamma, *(t[row] for t in far.values() for row in whole)):
        posed = replace(problem, shape=(count, channels))
        made, *_ = launch_backward(Call(posed, few._replace(**far), launch, config))
        return faults(LAYER_NORM_BACKWARD, (made[chosen], None, None), few)


def parts(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Of the last rows. There are more parts than a launch has, which are all of 64 rows."""
    channels, each = 328, 64
    count = (1 << 32) // channels // each * each + each
    few = draw(LAYER_NORM_BACKWARD, LayerNormBackwardProblem((each, channels)))
    cut = kernel.parts_tiling(each, channels)
    grad, x = (sparse((count, channels), torch.float16) for _ in range(2))
    moments, made = sparse((count, 2), torch.float32), torch.zeros(count // each, channels, 2)
    grad[-each:], x[-each:] = few.grad, few.x
    variance, mean = torch.var_mean(few.x.double(), -1, correction=0)
    moments[-each:] = torch.stack((mean, (variance + few.eps).rsqrt()), -1).float()
    addresses = (grad.data_ptr(), x.data_ptr(), *(0,) * 4, moments.data_ptr(), made.data_ptr())
    params = LayerNormBackwardParams(
        *(*addresses, count, channels, 0, 0, each, cut.width, cut.column_blocks, 1, 0.0, 0.0)
    )
    grid = made.shape[0] * cut.column_blocks
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=lambda entry, grid: [grid - 1 - block for block in range(cut.column_blocks)],
    )
    with launch.knows(made, *(t[-each:] for t in (grad, x, moments))):
        spec = kernel.parts_spec("float16", False, 8)
        launch(spec, grid, kernel.PART_THREADS, params, torch.device("cpu"))
    exact = LAYER_NORM_BACKWARD.reference(few)[1:]
    return [
        fault
        for place, name in enumerate(("gamma", "beta"))
        for fault in _off(name, made[-1, :, place], exact[place], 2e-6)
    ]


def _off(what: str, made: torch.Tensor, exact: torch.Tensor, allowed: float) -> list[str]:
    off = (made.double() - exact.double()).abs().max().item()
    return [] if off <= allowed * exact.abs().max().item() else [f"{what} off by {off}"]


def _norm_of(inputs: Any) -> torch.Tensor:
    """Scale and shift (N, C, 2) of a few images, in float32."""
    values = inputs.x.double().contiguous().unflatten(1, (inputs.groups, -1)).flatten(2)
    variance, mean = torch.var_mean(values, -1, correction=0)
    scale = (variance + inputs.eps).rsqrt()
    each = inputs.x.shape[1] // inputs.groups
    both = torch.stack((scale, -mean * scale), -1).repeat_interleave(each, 1)
    return both.float()


def images(
    channels_last: bool, height: int, width: int, gfx: str, kernels_dir: Path = KERNELS_DIR
) -> list[str]:
    """Many small ones. Channels-last, there are also more channels of all than 2^32."""
    channels, count = (512, (1 << 23) + 3) if channels_last else (64, (1 << 22) + 3)
    chosen = [0, count // 2, count - 1]
    fields = (channels, height, width, "float16", channels_last, True, 1, "float16", False)
    few = draw(GROUP_NORM_BACKWARD, GroupNormBackwardProblem(3, *fields))
    order = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    back = (0, 3, 1, 2) if channels_last else order
    x, grad = (among(count, chosen, t.permute(order)).permute(back) for t in (few.x, few.grad))
    norm = among(count, chosen, _norm_of(few))
    problem, inputs = GroupNormBackwardProblem(count, *fields), few._replace(x=x, grad=grad)
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=partial(of_images, count=count, chosen=chosen),
        shown=lambda made: [made[each] for each in chosen],
    )
    shown = [t[each] for t in (x, grad, norm) for each in chosen]
    with torch.no_grad(), launch.knows(few.gamma, few.beta, *shown):
        totals, factors = group_norm.launch_sums(launch, CONFIG, problem, inputs, norm)
        made = group_norm.launch_apply(launch, CONFIG, problem, inputs, factors)
        found = faults(GROUP_NORM_BACKWARD, (made[chosen], None, None), few)
    exact = GROUP_NORM_BACKWARD.reference(few._replace(affine=True))
    sums = totals[chosen].double().sum(0)
    return (
        found + _off("gamma", sums[:, 0], exact[1], 1e-5) + _off("beta", sums[:, 1], exact[2], 1e-5)
    )


def pixels(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """The last ones of an image, channels-last, with factors that are given."""
    channels, width = 64, 1 << 13
    height = (1 << 32) // (channels * width) + 1
    fields = (channels, height, width, "float16", True, False, 4, "none", False)
    problem = GroupNormBackwardProblem(1, *fields)
    last = slice(-512, None)
    few = [torch.randn(512, channels, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    x, grad = (sparse((height * width, channels), torch.float16) for _ in few)
    x[last], grad[last] = (t.half() for t in few)
    factors = torch.randn(1, channels, 4, generator=torch.Generator().manual_seed(3))
    flat, image = (1, height, width, channels), (0, 3, 1, 2)
    inputs = draw(GROUP_NORM_BACKWARD, replace(problem, height=1, width=1))
    inputs = inputs._replace(x=x.view(flat).permute(image), grad=grad.view(flat).permute(image))
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=lambda entry, grid: [grid - 1],
        shown=lambda made: [made.permute(0, 2, 3, 1).flatten(0, 2)[last]],
    )
    with torch.no_grad(), launch.knows(x[last], grad[last], factors):
        made = group_norm.launch_apply(launch, CONFIG, problem, inputs, factors)
    of = factors[0].double().unbind(-1)
    exact = grad[last].double() * of[0] + x[last].double() * of[2] + of[3]
    here = slice(-128, None)
    return _off("pixels", made.permute(0, 2, 3, 1).flatten(0, 2)[here], exact[here], 1e-3)


ALL: dict[str, Callable[..., list[str]]] = {
    "rows of a layer norm's gradients": partial(rows, 320),
    "rows of a layer norm's gradients read thrice": partial(rows, 323),
    "parts of a layer norm's gradients": parts,
    "images of a norm's gradients, channels last": partial(images, True, 1, 3),
    "images of a norm's gradients, channels first": partial(images, False, 5, 5),
    "images of a norm's gradients, eights of pixels": partial(images, False, 2, 16),
    "pixels of a norm's gradients": pixels,
}
