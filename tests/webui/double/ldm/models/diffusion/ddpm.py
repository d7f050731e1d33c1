"""Double of ldm/models/diffusion/ddpm.py: what a generation calls.

The surface was read in Stability-AI/stablediffusion cf1d67a.
`family` picks ldm's or sgm's classes; the real WebUI has sgm's DiffusionEngine for the latter.
`whole`: with a UNet of all kinds of blocks.
"""

import contextlib
import importlib
import zlib

import torch
from torch import nn


_DDCONFIG = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 64,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 16,
    "ch_mult": (1, 1, 1, 1),
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
}


class DiffusionWrapper(nn.Module):
    def __init__(self, unet):
        super().__init__()
        self.diffusion_model = unet

    def forward(self, x, t, c_concat: list = None, c_crossattn: list = None, c_adm=None):  # noqa: RUF013 - as there
        return self.diffusion_model(x, t, context=torch.cat(c_crossattn, 1))


@contextlib.contextmanager
def _unset():
    """Layers are made without the values that torch would draw for them."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    drawn = [kind.reset_parameters for kind in kinds]
    try:
        for kind in kinds:
            kind.reset_parameters = lambda layer: None
        yield
    finally:
        for kind, draw in zip(kinds, drawn):
            kind.reset_parameters = draw


class LatentDiffusion(nn.Module):
    def __init__(self, family="ldm", seed=0, whole=False):
        super().__init__()
        self.family = family
        with _unset():
            self.model = DiffusionWrapper(_unet(family, whole))
            self.first_stage_model = _first_stage(family)
        self.scale_factor = 0.18215
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                scale = 0.35 if parameter.dim() > 1 else 0.1
                values = torch.randn(parameter.shape, generator=generator) * scale
                is_gain = "first_stage" in name and "norm" in name and name.endswith("weight")
                if whole and name.startswith("model."):  # deeper: neither overflows nor vanishes
                    values *= 1 if parameter.dim() == 1 else parameter[0].numel() ** -0.5 / scale
                    is_gain = parameter.dim() == 1 and name.endswith("weight")
                parameter.copy_(values + 1 if is_gain else values)
            self.first_stage_model.decoder.conv_out.weight *= 0.2
        for parameter in self.first_stage_model.parameters():
            parameter.requires_grad = False
        self.eval()

    @contextlib.contextmanager
    def ema_scope(self, context=None):
        yield

    def get_learned_conditioning(self, c):
        """(B, 77, 24): the same numbers for the same prompt; a hypernetwork's size for its layers."""
        dtype = next(self.model.parameters()).dtype
        rows = [
            torch.randn((77, 24), generator=torch.Generator().manual_seed(zlib.crc32(p.encode())))
            for p in c
        ]
        return torch.stack(rows).to(dtype)

    def apply_model(self, x_noisy, t, cond, return_ids=False):
        return self.model(x_noisy, t, c_crossattn=[cond])

    @torch.no_grad()
    def decode_first_stage(self, z, predict_cids=False, force_not_quantize=False):
        return self.first_stage_model.decode(1.0 / self.scale_factor * z)

    @torch.no_grad()
    def encode_first_stage(self, x):
        return self.first_stage_model.encode(x)

    def get_first_stage_encoding(self, encoder_posterior):
        z = encoder_posterior if self.family == "sgm" else encoder_posterior.sample()
        return self.scale_factor * z


def _unet(family, whole):
    if whole:
        return importlib.import_module(f"{family}.modules.diffusionmodules.openaimodel").UNetModel()
    attention = importlib.import_module(f"{family}.modules.attention")
    openaimodel = importlib.import_module("ldm.modules.diffusionmodules.openaimodel")
    return openaimodel._SmallUNet(attention.BasicTransformerBlock)


def _first_stage(family):
    autoencoder = importlib.import_module(f"{family}.models.autoencoder")
    if family == "sgm":
        return autoencoder.AutoencoderKLInferenceWrapper(embed_dim=4, ddconfig=_DDCONFIG)
    return autoencoder.AutoencoderKL(_DDCONFIG, embed_dim=4)
