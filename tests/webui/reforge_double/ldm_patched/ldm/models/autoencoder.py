"""Double of ldm_patched/ldm/models/autoencoder.py.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
"""

from ldm.modules.distributions.distributions import DiagonalGaussianDistribution
from torch import nn

from ldm_patched.ldm.modules.diffusionmodules import model
from ldm_patched.modules.ops import disable_weight_init as ops


class AutoencoderKL(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        config, embed_dim = kwargs["ddconfig"], kwargs["embed_dim"]
        before = {name: getattr(nn, name) for name in ("Conv2d", "GroupNorm")}
        try:
            for name in before:
                setattr(nn, name, getattr(ops, name))
            self.encoder, self.decoder = model.Encoder(**config), model.Decoder(**config)
        finally:
            for name, kind in before.items():
                setattr(nn, name, kind)
        z = config["z_channels"]
        self.quant_conv = ops.Conv2d(2 * z, 2 * embed_dim, 1)
        self.post_quant_conv = ops.Conv2d(embed_dim, z, 1)

    def encode(self, x, return_reg_log=False):
        return DiagonalGaussianDistribution(self.quant_conv(self.encoder(x))).sample()

    def decode(self, z, **decoder_kwargs):
        return self.decoder(self.post_quant_conv(z))
