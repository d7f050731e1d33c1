"""A custom node of the tests' own, for a real ComfyUI: models of random weights, without a file.

A UNet with Stable Diffusion 1's widths and two of its levels, and its VAE. With ROCM_SD_PLAY=1 the
CPU plays the card for our nodes.
"""

import importlib.util
import os
import sys
from pathlib import Path

import comfy.ops
import comfy.sd
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel


def _play():
    """ComfyUI's checkout has a folder `tests` too: play.py is loaded by its place."""
    place = Path(__file__).resolve().parents[2] / "play.py"
    sys.path.insert(0, str(place.parents[2]))
    try:
        spec = importlib.util.spec_from_file_location("rocm_sd_play", place)
        sys.modules["rocm_sd_play"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    module.play(setattr)


if os.environ.get("ROCM_SD_PLAY") == "1":
    _play()

VAE = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}
UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 768,
    "num_heads": 8,
    "use_spatial_transformer": True,
    "legacy": False,
    "use_checkpoint": False,
}


def _weights(module, generator):
    made = {}
    for name, tensor in module.state_dict().items():
        share = (tensor.numel() / tensor.shape[0]) ** -0.5 if tensor.ndim > 1 else 0.05
        made[name] = torch.randn(tensor.shape, generator=generator) * share
        if tensor.ndim == 1 and "norm" in name and name.endswith("weight"):
            made[name] += 1
    return made


class TinyModels:
    CATEGORY = "ROCm SD tests"
    RETURN_TYPES = ("MODEL", "CONDITIONING", "VAE")
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"seed": ("INT", {"default": 0})}}

    def run(self, seed):
        generator = torch.Generator("cpu").manual_seed(seed)
        ops = comfy.ops.disable_weight_init
        unet = UNetModel(**UNET, dtype=torch.float32, device="cpu", operations=ops)
        model = comfy.sd.load_diffusion_model_state_dict(_weights(unet, generator))
        vae = comfy.sd.VAE(sd=_weights(AutoencoderKL(ddconfig=VAE, embed_dim=4), generator))
        prompt = torch.randn((1, 77, 768), generator=generator)
        return model, [[prompt, {}]], vae


NODE_CLASS_MAPPINGS = {"TinyModels": TinyModels}
