"""UNets of the WebUI's own configs with few channels, random weights, and what a step is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.unet.unet_models import draw, fill
from tests.webui.inside import real_parts
from tools.unet_networks.webui import WebUI

LDM = "repositories/stable-diffusion-stability-ai/configs/stable-diffusion"
SGM = "repositories/generative-models/configs/inference"
CHANNELS = 32
SHALLOW = "SDXL with 17 transformer blocks"
"""For what takes long. There are 70 of them otherwise."""
TOKENS_WIDE = 64
VECTOR = 48


@dataclass(frozen=True)
class Family:
    """A UNet by its config in a checkout; `more`: what differs from it beside the widths."""

    config: str
    heads: dict[str, int] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "SD 1.5": Family("configs/v1-inference.yaml"),
    "SD 1.5 inpainting": Family("configs/v1-inpainting-inference.yaml"),
    "instruct-pix2pix": Family("configs/instruct-pix2pix.yaml"),
    "SD 2": Family(f"{LDM}/v2-inference.yaml", heads={"num_head_channels": 8}),
    "SD 2 v": Family(f"{LDM}/v2-inference-v.yaml", heads={"num_head_channels": 8}),
    "SDXL": Family(f"{SGM}/sd_xl_base.yaml", heads={"num_head_channels": 8}),
    SHALLOW: Family(
        f"{SGM}/sd_xl_base.yaml",
        heads={"num_head_channels": 8},
        more={"transformer_depth": [1, 1, 2]},
    ),
    "SDXL inpainting": Family("configs/sd_xl_inpaint.yaml", heads={"num_head_channels": 8}),
    "SDXL refiner": Family(
        f"{SGM}/sd_xl_refiner.yaml",
        heads={"num_head_channels": 8},
        more={"context_dim": [TOKENS_WIDE] * 4},
    ),
}


@dataclass(frozen=True)
class Model:
    """The WebUI's object for a checkpoint, whose UNet alone is more than a stub."""

    family: str
    whole: Any

    @property
    def unet(self) -> Any:
        return self.whole.model.diffusion_model

    @property
    def channels(self) -> int:
        return int(self.unet.in_channels)


def make(webui: WebUI, family: str, dtype: torch.dtype = torch.float16, seed: int = 0) -> Model:
    """Make it the WebUI's loaded checkpoint, in `dtype`."""
    chosen = FAMILIES[family]
    config = _config(webui.checkout / chosen.config, chosen)
    util = webui.module(f"{config['target'].partition('.')[0].replace('modules', 'ldm')}.util")
    whole: Any = util.instantiate_from_config(config)
    models = webui.module("modules.sd_models")
    models.set_model_type(whole, whole.state_dict())
    whole.is_sdxl_inpaint = family == "SDXL inpainting"
    whole.lowvram = False
    unet: Any = fill(whole.model.diffusion_model, seed)
    unet.to(dtype)
    unet.dtype = dtype
    webui.devices.dtype = webui.devices.dtype_unet = dtype
    webui.use(whole)
    return Model(family, whole)


def _config(path: Path, family: Family) -> dict[str, Any]:
    """The config with narrow layers, a tiny VAE and no text encoder of its own."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_container(OmegaConf.load(path).model)
    params = config["params"]
    ldm = "unet_config" in params
    unet = params["unet_config" if ldm else "network_config"]["params"]
    narrow = {"model_channels": CHANNELS, "context_dim": TOKENS_WIDE}
    unet.update({**narrow, "use_checkpoint": False, **family.heads, **family.more})
    unet.pop("use_fp16", None)
    params["first_stage_config"]["params"] = real_parts.AUTOENCODER
    if ldm:
        params["cond_stage_config"] = {"target": "torch.nn.Identity"}
    else:
        unet["adm_in_channels"] = VECTOR
        params["conditioner_config"]["params"] = {"emb_models": []}
    return dict(config)


@dataclass(frozen=True)
class Size:
    """Of a step: images, height and width of the latent, tokens of the prompt."""

    batch: int = 2
    height: int = 16
    width: int = 16
    tokens: int = 77

    def __str__(self) -> str:
        pixels = f"{8 * self.width}x{8 * self.height}"
        return f"{pixels}, batch {self.batch}, {self.tokens} tokens"


def inputs(model: Model, size: Size, seed: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """x, t and cond for `apply_model`, as a sampler of the WebUI gives them."""
    shape = (size.batch, 4, size.height, size.width)
    more = model.channels - 4
    context = draw(size.batch, size.tokens, TOKENS_WIDE, seed=seed + 100)
    t = torch.full((size.batch,), 400.0 + 100 * seed)
    beside = draw(size.batch, max(more, 1), *shape[2:], seed=seed + 300)
    cond: dict[str, Any]
    if model.whole.is_sdxl:
        cond = {"crossattn": context, "vector": draw(size.batch, VECTOR, seed=seed + 200)}
        cond |= {"c_concat": [beside]} if more else {}
    else:
        cond = {"c_crossattn": [context], "c_concat": [beside] if more else []}
    return draw(*shape, seed=seed), t, cond


def leaves(unet: nn.Module) -> dict[str, nn.Module]:
    """Layers that a network can change, by name."""
    kinds = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)
    return {name: module for name, module in unet.named_modules() if isinstance(module, kinds)}
