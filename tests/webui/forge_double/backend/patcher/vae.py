"""Double of backend/patcher/vae.py: memory is asked for, and in short of it tiles are decoded.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
The real one blends three kinds of tiles; these are of one kind, and meet without an overlap.
"""

import torch

from backend import memory_management
from backend.patcher.base import ModelPatcher


class VAE:
    def __init__(self, model=None, device=None, dtype=None, no_init=False):
        if no_init:
            return
        size = memory_management.dtype_size
        self.memory_used_encode = lambda shape, dtype: 1767 * shape[2] * shape[3] * size(dtype)
        self.memory_used_decode = lambda shape, dtype: 2178 * shape[2] * shape[3] * 64 * size(dtype)
        self.downscale_ratio = 2 ** (len(model.config.down_block_types) - 1)
        self.latent_channels = model.config.latent_channels
        self.first_stage_model = model.eval()
        self.device = device or memory_management.vae_device()
        self.vae_dtype = dtype or memory_management.vae_dtype()
        self.first_stage_model.to(self.vae_dtype)
        self.output_device = memory_management.intermediate_device()
        self.patcher = ModelPatcher(
            model, self.device, offload_device=memory_management.vae_offload_device()
        )

    def clone(self):
        n = VAE(no_init=True)
        n.__dict__.update(vars(self))
        return n

    def decode_tiled_(self, samples, tile_x=64, tile_y=64, overlap=16):
        rows = [
            torch.cat([self._decoded(tile) for tile in row.split(tile_x, 3)], 3)
            for row in samples.split(tile_y, 2)
        ]
        return torch.cat(rows, 2)

    def decode_inner(self, samples_in):
        try:
            memory_used = self.memory_used_decode(samples_in.shape, self.vae_dtype)
            memory_management.load_models_gpu([self.patcher], memory_required=memory_used)
            free_memory = memory_management.get_free_memory(self.device)
            batch_number = max(1, int(free_memory / memory_used))
            pixels = torch.cat([self._decoded(part) for part in samples_in.split(batch_number)])
        except memory_management.OOM_EXCEPTION:
            pixels = self.decode_tiled_(samples_in)
        return pixels.to(self.output_device).movedim(1, -1)

    def decode(self, samples_in):
        wrapper = self.patcher.model_options.get("model_vae_decode_wrapper", None)
        if wrapper is None:
            return self.decode_inner(samples_in)
        return wrapper(self.decode_inner, samples_in)

    def encode(self, pixel_samples):
        pixels = 2.0 * pixel_samples.movedim(-1, 1) - 1.0
        memory_used = self.memory_used_encode(pixels.shape, self.vae_dtype)
        memory_management.load_models_gpu([self.patcher], memory_required=memory_used)
        made = self.first_stage_model.encode(pixels.to(self.vae_dtype))
        return made.to(self.output_device).float()

    def _decoded(self, samples):
        made = self.first_stage_model.decode(samples.to(self.vae_dtype).to(self.device))
        return torch.clamp((made.to(self.output_device).float() + 1.0) / 2.0, min=0.0, max=1.0)
