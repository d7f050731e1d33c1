"""Double of sgm/models/autoencoder.py.

The surface was read in Stability-AI/generative-models 45c443b.
"""

from ldm.models import autoencoder

from sgm.modules.diffusionmodules import model


class AutoencoderKL(autoencoder.AutoencoderKL):
    def __init__(self, embed_dim, **kwargs):
        super().__init__(kwargs["ddconfig"], embed_dim, coders=model)

    def decode(self, z, **decoder_kwargs):
        return self.decoder(self.post_quant_conv(z), **decoder_kwargs)


class AutoencoderKLInferenceWrapper(AutoencoderKL):
    def encode(self, x):
        return super().encode(x).sample()
