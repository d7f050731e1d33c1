"""Stable Diffusion's VAEs, and Qwen-Image's and Wan's for a single picture, by their widths alone;
no torch.

Tests hold them against the recipes that are read of real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Op, Work
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import STATISTICS_ROWS, ConvProblem
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, STATISTICS
from lib_rocm_sd.ops.group_norm.problem import ApplyProblem, FinalizeProblem, ImageProblem
from lib_rocm_sd.ops.layer_norm.op import RMS_NORM
from lib_rocm_sd.ops.layer_norm.rms import RmsProblem

WIDTHS = (128, 256, 512, 512)
"""Channels of the levels of SD1.5's and SDXL's VAE, the largest image first."""
GROUPS = 32
LARGE = 128 * 128
"""Pixels of the latent of a picture of 1024 x 1024."""
PICTURE = 512
"""Rows and columns of the picture whose problems are tried: with its bands', all classes."""


@dataclass(frozen=True)
class Layer:
    """A convolution, or attention over all pixels with one head: its norm and its four 1x1
    convolutions are in it. Channels as stored.

    `channels`: of the image that attention reads through an RMSNorm, where a head has more.
    """

    name: str
    problem: ConvProblem | AttentionProblem | RmsProblem
    channels: int = 0


def decoder(height: int, width: int) -> list[Layer]:
    """What is launched for a latent of `height` x `width`, whole."""
    walk = Walk(height, width)
    walk.conv("conv_in", 4, WIDTHS[-1])
    channels = WIDTHS[-1]
    walk.middle(channels)
    for level, out in enumerate(reversed(WIDTHS)):
        doubles = level < len(WIDTHS) - 1
        for block in range(3):
            before_doubling = doubles and block == 2  # which reads without a norm
            walk.residual(f"up.{level}.{block}", channels, out, not before_doubling)
            channels = out
        if doubles:
            walk.conv(f"up.{level}.upsample", channels, channels, kind="upsample")
    walk.conv("conv_out", channels, 3, norm=True, statistics=False)
    return walk.layers


def encoder(height: int, width: int) -> list[Layer]:
    """What is launched for an image of `height` x `width`, whole."""
    walk = Walk(height, width)
    walk.conv("conv_in", 3, WIDTHS[0])
    channels = WIDTHS[0]
    for level, out in enumerate(WIDTHS):
        halves = level < len(WIDTHS) - 1
        for block in range(2):
            walk.residual(f"down.{level}.{block}", channels, out, not (halves and block == 1))
            channels = out
        if halves:
            walk.conv(f"down.{level}.downsample", channels, channels, kind="3x3 stride 2")
    walk.middle(channels)
    walk.conv("conv_out", channels, 8, norm=True, statistics=False)
    return walk.layers


QWEN_WIDTHS, QWEN_LATENT, QWEN_DTYPE = (96, 192, 384, 384), 16, "bfloat16"
"""Channels of the levels of Qwen-Image's and Wan 2.1's VAE, the largest image first, and of a
latent; the dtype in which it is run."""
QWEN_HEAD_DIM = 512
"""What attention over 384 channels is filled up to (vae/steps.py)."""


def qwen_decoder(height: int, width: int) -> list[Layer]:
    """What is launched for a single latent of `height` x `width` of a VAE over time, whole."""
    walk = _QwenWalk(height, width)
    channels = QWEN_WIDTHS[-1]
    walk.plain("conv_in", QWEN_LATENT, channels)
    walk.middle(channels)
    for level, out in enumerate(reversed(QWEN_WIDTHS)):
        for block in range(3):
            walk.residual(f"up.{level}.{block}", channels, out)
            channels = out
        if level < len(QWEN_WIDTHS) - 1:
            walk.plain(f"up.{level}.upsample", channels, channels // 2, "upsample")
            channels //= 2
    walk.normed("conv_out", channels, 3)
    return walk.layers


def qwen_encoder(height: int, width: int) -> list[Layer]:
    """What is launched for a single image of `height` x `width` by a VAE over time, whole."""
    walk = _QwenWalk(height, width)
    channels = QWEN_WIDTHS[0]
    walk.plain("conv_in", 3, channels)
    for level, out in enumerate(QWEN_WIDTHS):
        for block in range(2):
            walk.residual(f"down.{level}.{block}", channels, out)
            channels = out
        if level < len(QWEN_WIDTHS) - 1:
            walk.plain(f"down.{level}.downsample", channels, channels, "3x3 stride 2")
    walk.middle(channels)
    walk.normed("conv_out", channels, 2 * QWEN_LATENT)
    return walk.layers


class Walk:
    """Convolutions one after the other, from an image of this size on; inputs as stored."""

    def __init__(self, height: int, width: int) -> None:
        self.size = (height, width)
        self.layers: list[Layer] = []

    def conv(
        self,
        name: str,
        taken: int,
        out: int,
        kind: str = "3x3",
        statistics: bool = True,
        **how: Any,
    ) -> None:
        taken = -(-taken // 16) * 16
        problem = ConvProblem(kind, 1, *self.size, taken, out, statistics=statistics, **how)
        self.layers.append(Layer(name, problem))
        self.size = problem.out_size

    def residual(self, name: str, taken: int, out: int, statistics: bool = True) -> None:
        """Its output is written where the shortcut lay, if that has room."""
        shortcut = "identity" if taken == out else "conv"
        self.conv(f"{name}.conv1", taken, out, norm=True)
        self.conv(
            f"{name}.conv2",
            *(out, out, "3x3", statistics),
            norm=True,
            shortcut=shortcut,
            shortcut_channels=taken,
            in_place=out <= taken,
        )

    def middle(self, channels: int) -> None:
        self.residual("mid.0", channels, channels)
        self.attention(channels)
        self.residual("mid.1", channels, channels)

    def attention(self, channels: int) -> None:
        pixels = self.size[0] * self.size[1]
        self.layers.append(Layer("mid.attention", AttentionProblem(1, 1, pixels, pixels, channels)))


class _QwenWalk(Walk):
    """An RMSNorm of each pixel, and SiLU, come before a convolution."""

    def plain(self, name: str, taken: int, out: int, kind: str = "3x3", **how: Any) -> None:
        self.conv(name, taken, out, kind, statistics=False, dtype=QWEN_DTYPE, **how)

    def normed(self, name: str, taken: int, out: int, **how: Any) -> None:
        self.layers.append(Layer(f"{name}, norm", _rms((*self.size, taken), True)))
        self.plain(name, taken, out, **how)

    def residual(self, name: str, taken: int, out: int, statistics: bool = False) -> None:
        shortcut = "identity" if taken == out else "conv"
        added = {"shortcut": shortcut, "shortcut_channels": taken, "in_place": out <= taken}
        self.normed(f"{name}.conv1", taken, out)
        self.normed(f"{name}.conv2", out, out, **added)

    def attention(self, channels: int) -> None:
        pixels = self.size[0] * self.size[1]
        problem = AttentionProblem(1, 1, pixels, pixels, QWEN_HEAD_DIM, QWEN_DTYPE)
        self.layers.append(Layer("mid.attention", problem, channels))


def _rms(image: tuple[int, ...], silu: bool) -> RmsProblem:
    return RmsProblem((1, *image), QWEN_DTYPE, affine=QWEN_DTYPE, silu=silu)


def work() -> Work:
    """What decoder and encoder ask, whole frames and bands: each class at least once."""
    latent = PICTURE // 8
    large = AttentionProblem(1, 1, LARGE, LARGE, WIDTHS[-1])  # may take another config
    layers = (*decoder(latent, latent), *encoder(PICTURE, PICTURE))
    return [*_classes(layers, latent), (ATTENTION, large)]


def qwen_work() -> Work:
    """The same of Qwen-Image's and Wan's."""
    latent = PICTURE // 8
    large = AttentionProblem(1, 1, LARGE, LARGE, QWEN_HEAD_DIM, QWEN_DTYPE)
    layers = (*qwen_decoder(latent, latent), *qwen_encoder(PICTURE, PICTURE))
    return [*_classes(layers, latent), (ATTENTION, large)]


def _classes(layers: Iterable[Layer], latent: int) -> Work:
    classes: dict[tuple[str, Any], tuple[Op[Any, Any], Any]] = {}
    for layer in layers:
        for op, problem in _asked_by(layer, latent):
            classes.setdefault((op.name, op.test_problems(problem)), (op, problem))
    return list(classes.values())


def _asked_by(layer: Layer, latent: int) -> Iterator[tuple[Op[Any, Any], Any]]:
    problem = layer.problem
    if isinstance(problem, RmsProblem):
        yield RMS_NORM, problem
        return
    if layer.channels:
        yield RMS_NORM, _rms((latent, latent, layer.channels), False)
        yield ATTENTION, problem
        return
    if isinstance(problem, AttentionProblem):
        image = (1, problem.head_dim, latent, latent)
        yield APPLY, ApplyProblem(*image)
        yield ATTENTION, problem
        yield STATISTICS, ImageProblem(*image)
        yield FINALIZE, _finalize(problem.head_dim, latent)
        return
    for form in _forms(problem):
        yield CONVS[problem.kind], form
    if problem.statistics:
        yield FINALIZE, _finalize(problem.out_channels, problem.out_size[0])


def _finalize(channels: int, height: int) -> FinalizeProblem:
    return FinalizeProblem(1, -(-height // STATISTICS_ROWS), channels, GROUPS)


def _forms(problem: ConvProblem) -> Iterator[ConvProblem]:
    """The output beside the shortcut or, where that is wide enough, over it; without statistics for
    bands that are made again.
    """
    for in_place in dict.fromkeys((False, problem.in_place)):
        for statistics in dict.fromkeys((problem.statistics, False)):
            yield replace(problem, in_place=in_place, statistics=statistics)
