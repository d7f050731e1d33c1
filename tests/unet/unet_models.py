"""Small random UNets of every kind that is read, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the models' classes
from tests import doubles

KEYS_DIM = 48


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights at which each block changes its input by about its size; at rest."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, tensor in module.named_parameters():
        drawn = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            drawn *= tensor[0].numel() ** -0.5
        elif name.endswith("bias"):
            drawn *= 0.1
        else:
            drawn = 1 + 0.2 * drawn
        tensor.data.copy_(drawn)
    return module.eval().requires_grad_(False)


SMALL: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": KEYS_DIM,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "sample_size": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "SD 1.5": {},
    "SD 2": {"use_linear_projection": True, "attention_head_dim": (2, 4)},
    "SDXL": {
        "use_linear_projection": True,
        "attention_head_dim": (2, 4),
        "transformer_layers_per_block": (1, 2),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
    },
    "inpainting": {"in_channels": 9},
    "x4 upscaler": {"only_cross_attention": True},
    "Kandinsky": {
        "resnet_time_scale_shift": "scale_shift",
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "attention_head_dim": 8,
    },
}
"""diffusers' UNets by name: what differs from SMALL."""


def diffusers_unet(name: str = "SD 1.5", **more: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return fill(UNet2DConditionModel(**{**SMALL, **CONFIGS[name], **more}))


def ldm_unet(depth: int = 1, **more: Any) -> Any:
    sizes = {"heads": 4, "d_head": 8, "context_dim": KEYS_DIM}
    unet = doubles.module_of(doubles.UNET).UNetModel
    return fill(unet(depth=depth, depth_middle=depth, **sizes, **more))


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))


def diffusers_inputs(
    name: str = "SD 1.5",
    batch: int = 2,
    height: int = 8,
    width: int = 8,
    tokens: int = 77,
    seed: int = 0,
) -> dict[str, Any]:
    """What a step gives to diffusers' UNet, in float32."""
    channels = CONFIGS[name].get("in_channels", 4)
    made: dict[str, Any] = {
        "sample": draw(batch, channels, height, width, seed=seed),
        "timestep": torch.tensor(500 + seed),
        "encoder_hidden_states": draw(batch, tokens, KEYS_DIM, seed=seed + 100),
    }
    if name == "SDXL":
        made["added_cond_kwargs"] = {
            "text_embeds": draw(batch, 16, seed=seed + 200),
            "time_ids": torch.full((batch, 6), 512.0),
        }
    return made


def ldm_inputs(
    batch: int = 2,
    height: int = 8,
    width: int = 8,
    tokens: int = 77,
    channels: int = 4,
    seed: int = 0,
) -> dict[str, Any]:
    """What a step gives to ldm's UNet, in float32."""
    return {
        "x": draw(batch, channels, height, width, seed=seed),
        "timesteps": torch.full((batch,), 500.0 + seed),
        "context": draw(batch, tokens, KEYS_DIM, seed=seed + 100),
    }


def in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """The same with all images and tokens in `dtype`."""
    if isinstance(inputs, dict):
        return {key: in_dtype(value, dtype) for key, value in inputs.items()}
    if isinstance(inputs, torch.Tensor) and inputs.ndim > 1:
        return inputs.to(dtype)
    return inputs


def batched(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The inputs of some steps as one step's: batches in a row, a time for each image."""
    made: dict[str, Any] = {}
    for name, first in steps[0].items():
        every = [step[name] for step in steps]
        if isinstance(first, dict):
            made[name] = batched(every)
        elif first.ndim == 0:
            made[name] = torch.stack(every).repeat_interleave(len(steps[0]["sample"]))
        else:
            made[name] = torch.cat(every)
    return made


def step(unet: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """One step of either family's UNet."""
    with torch.no_grad():
        made: Any = unet(**inputs)
    result: torch.Tensor = getattr(made, "sample", made)
    return result


def errors(result: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """The largest error and the root of the mean square, of max |exact|."""
    difference = (result.double() - exact.double()).abs()
    scale = exact.double().abs().max()
    return float(difference.max() / scale), float(difference.square().mean().sqrt() / scale)
