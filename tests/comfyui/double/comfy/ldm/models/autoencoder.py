"""Double of comfy/ldm/models/autoencoder.py (Comfy-Org/ComfyUI a125cd84), of other widths."""

import torch
from comfy.ldm.modules.diffusionmodules import model
from comfy.ops import disable_weight_init as ops


class AutoencodingEngine(torch.nn.Module):
    def __init__(self, *args, encoder_config, decoder_config, regularizer_config, **kwargs):
        super().__init__()
        self.encoder = model.Encoder(**encoder_config)
        self.decoder = model.Decoder(**decoder_config)

    def encode(self, x, return_reg_log=False, unregularized=False):
        return self.encoder(x).chunk(2, dim=1)[0]

    def decode(self, z, **kwargs):
        return self.decoder(z, **kwargs)


class AutoencoderKL(AutoencodingEngine):
    def __init__(self, **kwargs):
        config = kwargs["ddconfig"]
        super().__init__(encoder_config=config, decoder_config=config, regularizer_config={})
        self.post_quant_conv = ops.Conv2d(4, 4, 1)
        self.quant_conv = ops.Conv2d(8, 8, 1)

    def encode(self, x, return_reg_log=False):
        return self.quant_conv(self.encoder(x)).chunk(2, dim=1)[0]

    def decode(self, z, **decoder_kwargs):
        return self.decoder(self.post_quant_conv(z), **decoder_kwargs)
