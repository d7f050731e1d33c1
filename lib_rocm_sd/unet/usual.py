"""What Stable Diffusion's UNets ask of the ops, by their widths alone: before there is a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, STATISTICS
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
)
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import problem_of_layer
from lib_rocm_sd.unet_step import STEPS, Conv, GroupNorm, Layer, LayerNorm, Linear

Work = list[tuple[Op[Any, Any], Any]]
DTYPE = "float16"
GROUPS = 32


def work(steps: Iterable[Iterable[Layer]] = STEPS) -> Work:
    """Ops, and problems of theirs, each once. Attention's are attention's own."""
    layers = dict.fromkeys(layer for step in steps for layer in step)
    return [asked for layer in layers for asked in _asked(layer)]


def _asked(layer: Layer) -> Iterator[tuple[Op[Any, Any], Any]]:
    if isinstance(layer, LayerNorm):
        for added in (False, True):
            yield LAYER_NORM, LayerNormProblem((layer.rows, layer.channels), DTYPE, added, DTYPE)
    elif isinstance(layer, Linear):
        yield LINEAR, replace(problem_of_layer(layer), in_place=False)  # blocks make a new tensor
    elif isinstance(layer, Conv) and layer.norm:  # the convolution itself is torch's: compute.py
        yield APPLY, ApplyProblem(*_image(layer, layer.in_channels), silu=True)
    elif isinstance(layer, GroupNorm):
        sizes = _image(layer, layer.channels)
        if layer.applied:
            yield GROUP_NORM_SILU, GroupNormProblem(*sizes, DTYPE, True, False, GROUPS, DTYPE)
        else:
            image = ImageProblem(*sizes)
            yield STATISTICS, image
            yield FINALIZE, _finalize(image)


def _image(layer: Conv | GroupNorm, channels: int) -> tuple[int, int, int, int]:
    return layer.batch, channels, layer.height, layer.width


def _finalize(image: ImageProblem) -> FinalizeProblem:
    return FinalizeProblem(image.batch, image.parts, image.channels, GROUPS, affine=DTYPE)
