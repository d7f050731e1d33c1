"""Double of ldm/models/diffusion/ddpm.py: what a generation calls.

The surface was read in Stability-AI/stablediffusion cf1d67a.
`family` picks ldm's or sgm's attention classes; the real WebUI has sgm's DiffusionEngine for the
latter.
"""

import contextlib
import importlib
import zlib

import torch
from torch import nn


class FirstStage(nn.Module):
    """The VAE. `dtype` as the WebUI reads it of its first parameter."""

    def __init__(self, model):
        super().__init__()
        self.encoder = model.Encoder(attention=model.AttnBlock)
        self.decoder = model.Decoder(attention=model.AttnBlock)

    @property
    def dtype(self):
        return next(self.parameters()).dtype


class DiffusionWrapper(nn.Module):
    def __init__(self, unet):
        super().__init__()
        self.diffusion_model = unet


class LatentDiffusion(nn.Module):
    def __init__(self, family="ldm", seed=0):
        super().__init__()
        self.family = family
        attention, model = (
            importlib.import_module(f"{family}.modules.{name}")
            for name in ("attention", "diffusionmodules.model")
        )
        openaimodel = importlib.import_module("ldm.modules.diffusionmodules.openaimodel")
        self.model = DiffusionWrapper(openaimodel.UNetModel(attention.BasicTransformerBlock))
        self.first_stage_model = FirstStage(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                scale = 0.35 if parameter.dim() > 1 else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        self.eval()

    @contextlib.contextmanager
    def ema_scope(self, context=None):
        yield

    def get_learned_conditioning(self, prompts):
        """(B, 77, 24): the same numbers for the same prompt; a hypernetwork's size for its layers."""
        dtype = next(self.model.parameters()).dtype
        rows = [
            torch.randn((77, 24), generator=torch.Generator().manual_seed(zlib.crc32(p.encode())))
            for p in prompts
        ]
        return torch.stack(rows).to(dtype)

    def apply_model(self, x_noisy, t, cond, **kwargs):
        return self.model.diffusion_model(x_noisy, t, context=cond, **kwargs)

    def decode_first_stage(self, z, predict_cids=False, force_not_quantize=False):
        return self.first_stage_model.decoder(z)

    def encode_first_stage(self, x):
        return self.first_stage_model.encoder(x)

    def get_first_stage_encoding(self, encoder_posterior):
        return encoder_posterior
