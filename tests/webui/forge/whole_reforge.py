"""A small model of a real reForge's, or Classic's, own classes, for whole.py."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import nn

HALF = torch.bfloat16
CPU = torch.device("cpu")
GIVEN = ("ddconfig", "embed_dim")
PARTS = "modules_forge.forge_loader.FakeObject"
"""What reForge has in the place of an A1111 model's own UNet and VAE."""


def load(checkpoints: Any, unet: dict[str, Any]) -> None:
    """The model of the only file becomes the one that is loaded; `checkpoints` is reForge's
    modules.sd_models.
    """
    made, data = _engine(unet), checkpoints.model_data
    made.sd_checkpoint_info = checkpoints.select_checkpoint()
    made.filename = made.sd_model_checkpoint = made.sd_checkpoint_info.filename
    made.sd_model_hash = "0"
    data.loaded_sd_models.insert(0, made)
    data.was_loaded_at_least_once = True
    data.set_sd_model(made)


def _engine(unet: dict[str, Any]) -> Any:
    """As modules_forge/forge_loader.py of reForge 3b56b268 makes one of a checkpoint's file, of
    ldm's model; `unet` are arguments of reForge's UNet.
    """
    given: Any = importlib.import_module("real_parts")
    loader: Any = importlib.import_module("modules_forge.forge_loader")
    util: Any = importlib.import_module("ldm.util")
    config = given.config_of("ldm", whole=False)
    autoencoder = {k: config["params"]["first_stage_config"]["params"][k] for k in GIVEN}
    for name in ("unet_config", "first_stage_config"):
        config["params"][name] = {"target": PARTS}
    made = util.instantiate_from_config(config)
    patcher, vae = _unet(unet), _vae(autoencoder)
    made.forge_objects = loader.ForgeSD(patcher, None, vae, None)
    made.forge_objects_original = made.forge_objects.shallow_copy()
    made.forge_objects_after_applying_lora = made.forge_objects.shallow_copy()
    made.first_stage_model = vae.first_stage_model
    made.model.diffusion_model = patcher.model.diffusion_model
    latents = patcher.model.model_config.latent_format

    @torch.inference_mode()
    def decode_first_stage(x: torch.Tensor) -> torch.Tensor:
        image = vae.decode(latents.process_out(x)).movedim(-1, 1)
        return (image * 2.0 - 1.0).to(x)  # type: ignore[no-any-return]

    made.decode_first_stage = decode_first_stage
    made.ema_scope = lambda *args, **kwargs: contextlib.nullcontext()
    made.is_sd1, made.is_sd2, made.is_sdxl, made.is_sd3 = True, False, False, False
    made.is_sdxl_inpaint = made.is_ssd = made.ztsnr = made.tiling_enabled = False
    made.latent_channels, made.current_lora_hash = 4, str([])
    return made


def _unet(arguments: dict[str, Any]) -> Any:
    models: Any = importlib.import_module("ldm_patched.modules.supported_models")
    patchers: Any = importlib.import_module("modules_forge.unet_patcher")
    config = models.SD15({**arguments, "image_size": 8, "use_checkpoint": False})
    config.unet_config["num_heads"] = arguments["num_heads"]
    config.unet_config["dtype"] = HALF
    made = config.get_model({}, "", device=CPU).eval()
    _fill(made.diffusion_model)
    return patchers.UnetPatcher(made, load_device=CPU, offload_device=CPU)


def _vae(arguments: dict[str, Any]) -> Any:
    autoencoders: Any = importlib.import_module("ldm_patched.ldm.models.autoencoder")
    sd: Any = importlib.import_module("ldm_patched.modules.sd")
    model = autoencoders.AutoencoderKL(**arguments)
    _fill(model)
    return sd.VAE(model.state_dict(), CPU, {"params": arguments}, HALF)


def _fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            values *= parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
            is_gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(values + is_gain)
