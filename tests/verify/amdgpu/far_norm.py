"""GroupNorm of images, and of statistics, that reach beyond 2 and 4 GiB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.group_norm import formula, kernel, whole
from lib_rocm_sd.ops.group_norm import launch as launches
from tests.verify.amdgpu.far_attention import launch_on
from tests.verify.amdgpu.far_conv import among, of_images
from tests.verify.amdgpu.launch import CodeLaunch
from tests.verify.amdgpu.sparse import sparse

CONFIG = kernel.GroupNormConfig(256, 4)


def random(*shape: int) -> torch.Tensor:
    """The same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _launch(gfx: str, kernels_dir: Path, count: int, chosen: Sequence[int]) -> CodeLaunch:
    return launch_on(
        gfx,
        kernels_dir,
        groups=partial(of_images, count=count, chosen=chosen),
        shown=lambda made: [made[each] for each in chosen],
    )


def _off(what: str, made: torch.Tensor, exact: torch.Tensor, allowed: float) -> list[str]:
    off = (made.double() - exact.double()).abs().max().item()
    return [] if off <= allowed * exact.abs().max().item() else [f"{what} off by {off}"]


def moments(*shape: int) -> torch.Tensor:
    """(*shape, 4): statistics of four values."""
    mean, m2 = random(*shape), random(*shape).abs() + 1
    return torch.stack((mean, m2, torch.full(shape, 4.0), torch.zeros(shape)), -1)


def images(channels_last: bool, gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Many small ones. Channels-last, also statistics and norm are more than 2^32; channels first,
    channels begin between two multiples of 16 bytes.
    """
    channels, side = (512, 2) if channels_last else (64, 5)
    count = (1 << 22) + 3  # odd: what is applied goes from the last image to the first
    chosen = [0, count // 2, count - 1]
    few = random(3, channels, side, side).half()
    if channels_last:
        x = among(count, chosen, few.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    else:
        x = among(count, chosen, few)
    norm = among(count, chosen, random(3, channels, 2))
    launch = _launch(gfx, kernels_dir, count, chosen)
    with launch.knows(*(t[each] for t in (x, norm) for each in chosen)):
        statistics = launches.launch_statistics(launch, CONFIG, x)
        out = launches.launch_apply(launch, CONFIG, x, norm, True)
    return [
        *_off("statistics", statistics[chosen], formula.reference_statistics(few), 1e-6),
        *_off("output", out[chosen], formula.reference_apply(few, norm[chosen], True), 1e-3),
    ]


def whole_images(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Many small ones, each made by one work-group, and what is added to them; and their norms, as
    many as values.
    """
    channels, groups = 4096, 1
    count = (1 << 32) // channels + 3
    chosen = [0, count // 2, count - 1]
    few = random(3, channels, 1, 1).half()
    x = among(count, chosen, few.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    gamma, beta, more = random(channels), random(channels), random(3, channels) + 1
    added = sparse((count, channels), torch.float32)
    added[chosen] = more
    launch = _launch(gfx, kernels_dir, count, chosen)
    affine = (gamma, beta, groups, 1e-6)
    with launch.knows(gamma, beta, *(t[each] for t in (x, added) for each in chosen)):
        norm = launches.launch_whole(launch, whole.CONFIGS[2], x, *affine, silu=None)
        out = launches.launch_whole(launch, whole.CONFIGS[2], x, *affine, True, added)
    exact = formula.reference_norm(formula.reference_statistics(few), *affine)
    return [
        *_off("norm", norm[chosen], exact, 2e-6),
        *_off("output", out[chosen], formula.reference(few, *affine, True, more), 1e-3),
    ]


def pixels(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """The last ones of an image, channels-last."""
    channels, width = 64, 1 << 13
    height = (1 << 32) // (channels * width) + 1
    count = height * width
    form = kernel.form_of("float16", channels, True)
    tiling = kernel.tiling(1, channels, count, form, CONFIG, True)
    first = (tiling.parts - 1) * tiling.part_pixels
    x = sparse((1, count, channels), torch.float16)
    x[:, first:] = random(1, count - first, channels).half()
    norm, last = random(1, channels, 2), slice(-512, None)
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=lambda entry, grid: [grid - 1 if entry == "group_norm_statistics" else 0],
        shown=lambda made: [made.permute(0, 2, 3, 1).flatten(1, 2)[:, last]],
    )
    image = x.view(1, height, width, channels).permute(0, 3, 1, 2)
    with launch.knows(x[:, first:], norm):
        statistics = launches.launch_statistics(launch, CONFIG, image)
        out = launches.launch_apply(launch, CONFIG, image, norm, False)
    made = out.permute(0, 2, 3, 1).flatten(1, 2)[:, last]
    exact = formula.moments_of(x[:, None, first:].double())[0, 0]
    applied = formula.reference_apply(x[:, last].mT[..., None], norm, False)[..., 0].mT
    return [
        *_off("statistics", statistics[0, -1], exact, 1e-6),
        *_off("output", made, applied, 1e-3),
    ]


def statistics(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Of many images, from which norms are made, which are as many."""
    channels = 512
    count = (1 << 32) // (channels * 2) + 3
    chosen = [0, count // 2, count - 1]
    few = moments(3, 1, channels)
    placed = among(count, chosen, few)
    gamma, beta = random(channels), random(channels)
    launch = _launch(gfx, kernels_dir, count, chosen)
    with launch.knows(gamma, beta, *(placed[each] for each in chosen)):
        norm = launches.launch_finalize(launch, CONFIG, placed, gamma, beta, 1, 1e-6)
    return _off("norm", norm[chosen], formula.reference_norm(few, gamma, beta, 1, 1e-6), 2e-6)


def parts(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Statistics of an image in very many parts, which are merged."""
    channels, each = 64, 256
    count = (1 << 32) // (channels * 4) + 100
    few = moments(100, channels)
    placed = sparse((1, count, channels, 4), torch.float32)
    placed[0, -100:] = few
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=lambda entry, grid: [grid - 1],
        shown=lambda made: [made[:, -1]],
    )
    with launch.knows(placed[:, -100:]):
        made = launches.launch_merge(launch, CONFIG, placed, channels, each)
    return _off("merged", made[0, -1], _merged(few), 1e-6)


def merged_images(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Statistics of many images in a few parts, which are merged to fewer."""
    channels = 256
    count = (1 << 32) // (channels * 2 * 4) + 3
    chosen = [0, count // 2, count - 1]
    few = moments(3, 4, channels)
    placed = among(count, chosen, few)
    launch = _launch(gfx, kernels_dir, count, chosen)
    with launch.knows(*(placed[each] for each in chosen)):
        made = launches.launch_merge(launch, CONFIG, placed, channels, 2)
    exact = [[_merged(few[n, :2]), _merged(few[n, 2:])] for n in range(3)]
    return _off("merged", made[chosen], torch.stack([torch.stack(each) for each in exact]), 1e-6)


def _merged(statistics: torch.Tensor) -> torch.Tensor:
    """(C, 4) of (parts, C, 4) of as many values each."""
    mean, m2, number, none = statistics.double().unbind(-1)
    whole = mean.mean(0)
    squares = m2.sum(0) + (number * (mean - whole).square()).sum(0)
    return torch.stack((whole, squares, number.sum(0), none.sum(0)), -1)


def finish(phases: bool, gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """What is left to do after a library's convolution of many images. `phases`: of an upsampled
    one, whose four phases lie side by side.
    """
    channels, height, width = 64, 4, 16
    count = (1 << 32) // (channels * height * width) + 3
    chosen = [0, count // 2, count - 1]
    if phases:
        few, shortcut = random(3, height // 2 + 1, width // 2 + 1, 4 * channels).half(), None
        rows, columns = torch.arange(height)[:, None], torch.arange(width)
        corner = few.unflatten(3, (4, channels))
        exact = corner[
            :, rows // 2 + rows % 2, columns // 2 + columns % 2, rows % 2 * 2 + columns % 2
        ]
    else:
        few, added = random(3, height, width, channels).half(), random(3, height, width, channels)
        shortcut = among(count, chosen, added.half())
        exact = few.double() + added.half()
    x = among(count, chosen, few)
    biases = random(3, channels * height * width)
    bias = among(count, chosen, biases)[:, :channels]
    exact = exact.double() + biases[:, None, None, :channels]
    launch = _launch(gfx, kernels_dir, count, chosen)
    shown = [t[each] for t in (x, shortcut, bias) if t is not None for each in chosen]
    with launch.knows(*shown):
        out = x.new_empty((count, height, width, channels))
        made = launches.launch_finish(launch, CONFIG, x, out, bias, shortcut, statistics=not phases)
    found = _off("output", out[chosen], exact, 1e-3)
    if made is not None:
        found += _off("statistics", made[chosen], formula.moments_of(exact), 1e-6)
    return found


ALL: dict[str, Callable[..., list[str]]] = {
    "images of a norm, channels last": partial(images, True),
    "images of a norm, channels first": partial(images, False),
    "images of a whole norm": whole_images,
    "pixels of a norm": pixels,
    "statistics of a norm": statistics,
    "parts of statistics": parts,
    "images of parts of statistics": merged_images,
    "images after a library's convolution": partial(finish, False),
    "images after a library's upsampling": partial(finish, True),
}
