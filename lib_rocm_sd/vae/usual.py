"""What Stable Diffusion's VAEs ask of the ops, by their widths alone: before there is a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.vae import problems
from lib_rocm_sd.vae.problems import Work
from lib_rocm_sd.vae.steps import AttentionStep, ConvStep, Recipe, Step
from lib_rocm_sd.vae.trace import chain

WIDTHS = (128, 256, 512, 512)
"""Channels of the levels of SD1.5's and SDXL's VAE, the largest image first."""
_GROUPS, _EPS = 32, 1e-6


def work(dtype: torch.dtype = torch.float16) -> Work:
    """Problems of decoder and encoder, whole frames and bands: each class at least once."""
    found: dict[tuple[str, Any], tuple[Any, Any]] = {}
    for recipe, side in ((_decoder(), 64), (_encoder(), 512)):
        for op, problem in problems.of_whole(chain(recipe, 1, side, side, dtype)):
            for each in _forms(problem):
                found.setdefault((op.name, op.test_problems(each)), (op, each))
    return list(found.values())


def _forms(problem: Any) -> Iterator[Any]:
    """Yield the problem and, for a convolution, its other forms: without statistics for bands that
    are made again, and with the output over the shortcut (where that is wide enough) or beside it.
    """
    yield problem
    if isinstance(problem, ConvProblem):
        if problem.statistics:
            yield replace(problem, statistics=False)
        if problem.shortcut != "none" and problem.out_channels <= problem.shortcut_channels:
            for statistics in {problem.statistics, False}:
                yield replace(problem, in_place=not problem.in_place, statistics=statistics)


def _conv(taken: int, out: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(taken, out, size, stride, device="meta")


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(_GROUPS, channels, _EPS, device="meta")


def _block(taken: int, out: int) -> list[Step]:
    shortcut = None if taken == out else _conv(taken, out, 1)
    return [
        ConvStep("conv1", "3x3", _conv(taken, out), _norm(taken)),
        ConvStep("conv2", "3x3", _conv(out, out), _norm(out), True, shortcut),
    ]


def _middle(channels: int) -> list[Step]:
    q, k, v, out = (_conv(channels, channels, 1) for _ in range(4))
    attention = AttentionStep("attention", _norm(channels), q, k, v, out)
    return [*_block(channels, channels), attention, *_block(channels, channels)]


def _decoder() -> Recipe:
    made: list[Step] = [ConvStep("conv_in", "3x3", _conv(4, WIDTHS[-1])), *_middle(WIDTHS[-1])]
    channels = WIDTHS[-1]
    for level, out in reversed(list(enumerate(WIDTHS))):
        for _ in range(3):
            made += _block(channels, out)
            channels = out
        if level:
            made.append(ConvStep("upsample", "upsample", _conv(out, out)))
    made.append(ConvStep("conv_out", "3x3", _conv(channels, 3), _norm(channels)))
    return Recipe("decoder", tuple(made))


def _encoder() -> Recipe:
    made: list[Step] = [ConvStep("conv_in", "3x3", _conv(3, WIDTHS[0]))]
    channels = WIDTHS[0]
    for level, out in enumerate(WIDTHS):
        for _ in range(2):
            made += _block(channels, out)
            channels = out
        if level < len(WIDTHS) - 1:
            made.append(ConvStep("downsample", "3x3 stride 2", _conv(out, out, stride=2)))
    made += _middle(channels)
    made.append(ConvStep("conv_out", "3x3", _conv(channels, 8), _norm(channels)))
    return Recipe("encoder", tuple(made))
