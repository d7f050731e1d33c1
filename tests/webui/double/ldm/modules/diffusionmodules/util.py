"""Double of ldm/modules/diffusionmodules/util.py: the GroupNorm of its UNets.

The surface was read in Stability-AI/stablediffusion cf1d67a.
"""

from torch import nn


class GroupNorm32(nn.GroupNorm):
    """The real one gives float32 to torch's, which on a CPU refuses weights of another dtype."""
