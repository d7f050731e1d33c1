"""The parameters of a network's steps, ready to be multiplied.

All images between the picture and the result may carry a factor, a power of two, where all steps
leave it as it is: biases have it too, the first convolutions put it in, the last takes it out. So
fp16 holds what would overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lib_rocm_sd.ops.conv.problem import Epilogue
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.upscaler.steps import ConvStep, Network, NormStep, WindowStep
from lib_rocm_sd.upscaler.windows import ReadyNorm, ReadyWindows

SCALES = (1.0, 2.0**-5, 2.0**-10, 2.0**-15)
"""Tried in order where fp16 overflows."""


@dataclass(frozen=True, eq=False)
class ReadyConv:
    """A ConvStep with its weights; of a 1x1 one, which has no epilogue, weight (Co, Ci) and bias
    (Co).
    """

    step: ConvStep
    weights: ConvWeights | tuple[torch.Tensor, torch.Tensor | None]
    epilogue: Epilogue | None


Ready = ReadyConv | ReadyNorm | ReadyWindows


def prepare(network: Network, scale: float, dtype: torch.dtype) -> dict[int, Ready]:
    """What steps use, by the images that they make, which are multiplied by `scale`."""
    factors, ready = [1.0, *[scale] * (len(network.steps) - 1), 1.0], dict[int, Ready]()
    for image, step in enumerate(network.steps, 1):
        if isinstance(step, ConvStep):
            ready[image] = _ready(network, step, factors[step.reads[0]], factors[image], dtype)
        elif isinstance(step, NormStep):
            ready[image] = ReadyNorm.of(step.norm, dtype)
        elif isinstance(step, WindowStep):
            ready[image] = ReadyWindows.of(step, dtype)
    return ready


def _ready(
    network: Network, step: ConvStep, before: float, after: float, dtype: torch.dtype
) -> ReadyConv:
    """`before`, `after`: what the images are multiplied by that it reads and makes."""
    weight, bias = step.layer.tensors()
    wide = torch.promote_types(dtype, torch.float32)
    weight = weight.detach().to(wide) * (after / before)
    weight = _padded(weight, [network.channels[image] for image in step.reads])
    if bias is not None:
        bias = F.pad(bias.detach().to(wide) * after, (0, weight.shape[0] - bias.shape[0]))
    if step.kind == "1x1":
        matrix = weight.flatten(1).to(dtype), None if bias is None else bias.to(dtype)
        return ReadyConv(step, matrix, None)
    slopes = None
    if isinstance(step.slope, nn.PReLU):
        channels = step.layer.out_channels
        slopes = F.pad(step.slope.weight.detach().to(wide).expand(channels), (0, -channels % 16))
    # Those of an upsampling one are added up before they are rounded.
    weight = weight if step.kind == "upsample" else weight.to(dtype)
    slope = 0.0 if isinstance(step.slope, nn.PReLU) else step.slope
    epilogue = Epilogue(step.activation, slope, *(each.scale for each in step.residuals))
    return ReadyConv(step, ConvWeights(weight, bias, slopes=slopes), epilogue)


def _padded(weight: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """(Co, Ci, k, k) with zeros for the channels that images, of `parts` channels each, have only
    in memory.
    """
    columns = [F.pad(w, (0, 0, 0, 0, 0, -w.shape[1] % 16)) for w in weight.split(list(parts), 1)]
    return F.pad(torch.cat(columns, 1), (0, 0, 0, 0, 0, 0, 0, -weight.shape[0] % 16))
