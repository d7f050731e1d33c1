"""Double of sgm/modules/diffusionmodules/openaimodel.py: a UNet of sgm's classes.

The surface was read in Stability-AI/generative-models 45c443b.
`th` is the name through which the WebUI swaps torch.
"""

import torch as th
from ldm.modules.diffusionmodules import openaimodel as ldm

from sgm.modules.attention import SpatialTransformer

__all__ = ["th"]


class TimestepEmbedSequential(ldm.TimestepEmbedSequential):
    pass


class Upsample(ldm.Upsample):
    pass


class Downsample(ldm.Downsample):
    pass


class ResBlock(ldm.ResBlock):
    pass


class UNetModel(ldm.UNetModel):
    _SEQUENTIAL, _RES, _TRANSFORMER = TimestepEmbedSequential, ResBlock, SpatialTransformer
    _UP, _DOWN = Upsample, Downsample
