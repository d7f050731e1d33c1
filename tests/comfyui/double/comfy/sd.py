"""Double of comfy/sd.py (Comfy-Org/ComfyUI a125cd84): a VAE, with tiles in reserve."""

import torch
from comfy import model_management
from comfy.ldm.models.autoencoder import AutoencoderKL

CONFIG = {"ch": 16, "ch_mult": (1, 2, 2), "num_res_blocks": 1, "z_channels": 4, "in_channels": 3}
CONFIG |= {"out_ch": 3, "resolution": 256, "attn_resolutions": []}
"""One level less than the real one has: a latent's pixel is 4 of the picture's."""


class VAE:
    def __init__(self, sd=None, device=None, config=None, dtype=None, metadata=None):
        self.memory_used_encode = lambda shape, dtype: (
            1767 * shape[2] * shape[3] * model_management.dtype_size(dtype)
        )
        self.memory_used_decode = lambda shape, dtype: (
            2178 * shape[2] * shape[3] * 64 * model_management.dtype_size(dtype)
        )
        if sd is None:
            self.first_stage_model = None
            return
        self.first_stage_model = AutoencoderKL(ddconfig=CONFIG, embed_dim=4).eval()
        self.first_stage_model.load_state_dict(sd)
        self.device = device or torch.device("cpu")
        self.vae_dtype = dtype or torch.float32
        self.first_stage_model.to(self.vae_dtype)
        self.patcher = object()

    def throw_exception_if_invalid(self):
        if self.first_stage_model is None:
            raise RuntimeError("there is no VAE")

    def decode(self, samples_in, vae_options={}):  # noqa: B006
        self.throw_exception_if_invalid()
        memory = self.memory_used_decode(samples_in.shape, self.vae_dtype)
        model_management.load_models_gpu([self.patcher], memory_required=memory)
        try:
            samples = samples_in.to(self.vae_dtype)
            made = self.first_stage_model.decode(samples, **vae_options).float()
        except model_management.OOM_EXCEPTION:
            made = self.decode_tiled_(samples_in)
        return ((made + 1) / 2).clamp(0, 1).movedim(1, -1)

    def decode_tiled_(self, samples, tile_x=64, tile_y=64, overlap=16):
        tiles = samples.to(self.vae_dtype).tensor_split(2, dim=2)
        return torch.cat([self.first_stage_model.decode(t) for t in tiles], dim=2).float()

    def encode(self, pixel_samples):
        self.throw_exception_if_invalid()
        pixels = pixel_samples.movedim(-1, 1) * 2 - 1
        memory = self.memory_used_encode(pixels.shape, self.vae_dtype)
        model_management.load_models_gpu([self.patcher], memory_required=memory)
        return self.first_stage_model.encode(pixels.to(self.vae_dtype)).float()

    def get_sd(self):
        return self.first_stage_model.state_dict()
