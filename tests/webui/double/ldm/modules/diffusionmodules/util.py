"""Double of ldm/modules/diffusionmodules/util.py: the GroupNorm of its UNets, and their times.

The surface was read in Stability-AI/stablediffusion cf1d67a.
"""

import math

import torch
from torch import nn


class GroupNorm32(nn.GroupNorm):
    """The real one gives float32 to torch's, which on a CPU refuses weights of another dtype."""


def timestep_embedding(timesteps, dim, max_period=10000, repeat_only=False):
    half = dim // 2
    rates = torch.exp(torch.arange(half, device=timesteps.device) * (-math.log(max_period) / half))
    angles = timesteps[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
