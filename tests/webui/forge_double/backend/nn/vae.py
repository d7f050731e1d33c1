"""Double of backend/nn/vae.py: ldm's, but for attention, which is of one function.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

from pathlib import Path
from types import SimpleNamespace

import ldm.modules.diffusionmodules.model
from ldm.modules.distributions.distributions import DiagonalGaussianDistribution
from torch import nn

from backend.attention import attention_function_single_head_spatial

_source = Path(ldm.modules.diffusionmodules.model.__file__)
exec(compile(_source.read_text(encoding="utf-8"), __file__, "exec"))
Normalize, Encoder, Decoder = (globals()[name] for name in ("Normalize", "Encoder", "Decoder"))


class AttnBlock(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.in_channels = in_channels
        self.norm = Normalize(in_channels)
        self.q, self.k, self.v, self.proj_out = (
            nn.Conv2d(in_channels, in_channels, kernel_size=1) for _ in range(4)
        )

    def forward(self, x):
        h = self.norm(x)
        h = attention_function_single_head_spatial(self.q(h), self.k(h), self.v(h))
        return x + self.proj_out(h)


class IntegratedAutoencoderKL(nn.Module):
    def __init__(
        self,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(64,),
        layers_per_block=1,
        act_fn="silu",
        latent_channels=4,
        norm_num_groups=32,
        sample_size=32,
        scaling_factor=0.18215,
        shift_factor=0.0,
        latents_mean=None,
        latents_std=None,
        force_upcast=True,
        use_quant_conv=True,
        use_post_quant_conv=True,
    ):
        super().__init__()
        self._config = SimpleNamespace(
            down_block_types=down_block_types, latent_channels=latent_channels
        )
        first = block_out_channels[0]
        config = {
            "double_z": True,
            "z_channels": latent_channels,
            "resolution": 256,
            "in_channels": in_channels,
            "out_ch": out_channels,
            "ch": first,
            "ch_mult": [width // first for width in block_out_channels],
            "num_res_blocks": layers_per_block,
            "attn_resolutions": [],
            "dropout": 0.0,
        }
        self.encoder, self.decoder = Encoder(**config), Decoder(**config)
        self.quant_conv = nn.Conv2d(2 * latent_channels, 2 * latent_channels, 1)
        self.post_quant_conv = nn.Conv2d(latent_channels, latent_channels, 1)
        self.scaling_factor, self.shift_factor = scaling_factor, shift_factor

    @property
    def config(self):
        return self._config

    def encode(self, x, regulation=None):
        posterior = DiagonalGaussianDistribution(self.quant_conv(self.encoder(x)))
        return posterior.sample() if regulation is None else regulation(posterior)

    def decode(self, z):
        return self.decoder(self.post_quant_conv(z))

    def process_in(self, latent):
        return (latent - self.shift_factor) * self.scaling_factor

    def process_out(self, latent):
        return (latent / self.scaling_factor) + self.shift_factor
