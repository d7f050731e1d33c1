"""What Stable Diffusion's UNets ask of the ops, by their widths alone: before there is a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.layers import problem_of_layer as conv_problem
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.group_norm import whole
from lib_rocm_sd.ops.group_norm.op import FINALIZE, GROUP_NORM_SILU, NORM
from lib_rocm_sd.ops.group_norm.problem import FinalizeProblem, GroupNormProblem, NormProblem
from lib_rocm_sd.ops.layer_norm.biased import BiasedProblem
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM, LAYER_NORM_BIASED
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import problem_of_layer as linear_problem
from lib_rocm_sd.unet.ahead import DTYPE, GROUPS, launched
from lib_rocm_sd.unet_step import OTHER_STEPS, STEPS, Conv, GroupNorm, Layer, LayerNorm, Linear

Work = list[tuple[Op[Any, Any], Any]]


def work(*lists: Iterable[Iterable[Layer]], arch: Arch | None = None) -> Work:
    """Ops, and problems of theirs, each once: of one list of steps after the other, or of all usual
    sizes, what is asked most often first. Attention's are attention's own. `arch`: with what is
    asked on that GPU alone.
    """
    layers = (layer for steps in lists or (STEPS, OTHER_STEPS) for layer in launched(steps))
    every = (asked for layer in layers for asked in asked_by(layer, arch))
    return list({(op.name, problem): (op, problem) for op, problem in every}.values())


def asked_by(layer: Layer, arch: Arch | None = None) -> Iterator[tuple[Op[Any, Any], Any]]:
    """What is asked for one layer."""
    if isinstance(layer, LayerNorm):
        shape = (layer.rows, layer.channels)
        for added in (False, True):
            yield LAYER_NORM, LayerNormProblem(shape, DTYPE, added, DTYPE)
        for keeps in (False, True):
            yield LAYER_NORM_BIASED, BiasedProblem(shape, DTYPE, False, DTYPE, keeps)
    elif isinstance(layer, Linear):
        problem = replace(linear_problem(layer), in_place=False)
        yield LINEAR, problem
        if layer.residual:  # what a library's product is added to, without its bias
            yield LINEAR, replace(problem, in_place=True, bias=False)
    elif isinstance(layer, GroupNorm):
        sizes = (layer.batch, layer.channels, layer.height, layer.width, DTYPE, True)
        if layer.applied:
            yield GROUP_NORM_SILU, GroupNormProblem(*sizes, False, GROUPS, DTYPE)
        else:
            yield NORM, NormProblem(*sizes, GROUPS, DTYPE)
    elif isinstance(layer, Conv):
        yield CONVS[layer.kind], conv_problem(layer)
        if layer.statistics:  # of which the variant makes as many parts as it likes
            made = (layer.batch, layer.out_size[0], layer.out_channels)
            yield FINALIZE, FinalizeProblem(*made, GROUPS, affine=DTYPE)
        if arch is not None and arch.has_fast_libraries and layer.norm:
            yield from _by_library(layer, arch)


def _by_library(layer: Conv, arch: Arch) -> Iterator[tuple[Op[Any, Any], Any]]:
    """What a residual block asks for where a library convolves: see compute.is_librarys."""
    height, width = layer.out_size
    if not whole.configs(arch, layer.in_channels, height * width, GROUPS, 8):
        return
    yield (
        CONVS[layer.kind],
        replace(conv_problem(layer), norm=False, statistics=False, embedding=False),
    )
    sizes = (height, width, DTYPE, True, True, GROUPS, DTYPE)
    if layer.embedding:  # the block's first: a norm before it, one after it
        yield GROUP_NORM_SILU, GroupNormProblem(layer.batch, layer.in_channels, *sizes)
        if whole.configs(arch, layer.out_channels, height * width, GROUPS, 8):
            yield (
                GROUP_NORM_SILU,
                GroupNormProblem(layer.batch, layer.out_channels, *sizes, added=True),
            )
