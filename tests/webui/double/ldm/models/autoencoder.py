"""Double of ldm/models/autoencoder.py.

The surface was read in Stability-AI/stablediffusion cf1d67a.
"""

from torch import nn

from ldm.modules.diffusionmodules import model
from ldm.modules.distributions.distributions import DiagonalGaussianDistribution


class AutoencoderKL(nn.Module):
    """`dtype` and `device` are of Lightning's module there. `coders`: the module of the classes."""

    def __init__(self, ddconfig, embed_dim, coders=model):
        super().__init__()
        self.encoder = coders.Encoder(**ddconfig)
        self.decoder = coders.Decoder(**ddconfig)
        z = ddconfig["z_channels"]
        self.quant_conv = nn.Conv2d(2 * z, 2 * embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(embed_dim, z, 1)

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    @property
    def device(self):
        return next(self.parameters()).device

    def encode(self, x):
        return DiagonalGaussianDistribution(self.quant_conv(self.encoder(x)))

    def decode(self, z):
        return self.decoder(self.post_quant_conv(z))
