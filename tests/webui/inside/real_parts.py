"""What a real WebUI is given: packages that say nothing, tiny checkpoints, a text encoder."""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import json
import sys
import types
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

STUBS = {
    *("accelerate", "blendmodes", "cleanfid", "clip", "cv2", "diffusers", "facexlib", "git"),
    *("jsonmerge", "kornia", "olive", "onnx", "onnxruntime", "open_clip", "optimum"),
    *("pillow_avif", "resize_right", "skimage", "spandrel_extra_arches", "timm"),
    *("tomesd", "torchvision"),
}
"""Packages that a WebUI imports at its start and that no generation here comes near."""

WIDTH = 24
"""Of the text encoder's output."""


class _Stub(types.ModuleType):
    """Every name in it is there: a class, or a function that gives an empty list."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "9"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = lambda *args, **kwargs: []  # noqa: E731
        if name[0].isupper():
            made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Puts the stubs before the packages themselves, where these are installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in STUBS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def rows_of(prompts: Sequence[str]) -> torch.Tensor:
    """(B, 77, WIDTH): the same numbers for the same prompt."""
    made = [
        torch.randn((77, WIDTH), generator=torch.Generator().manual_seed(zlib.crc32(p.encode())))
        for p in prompts
    ]
    return torch.stack(made)


class TextEncoder(torch.nn.Module):
    """In place of CLIP, for ldm's LatentDiffusion."""

    def forward(self, prompts: Sequence[str]) -> torch.Tensor:
        return rows_of(prompts)

    encode = forward

    def encode_embedding_init_text(self, init_text: str, nvpt: int) -> torch.Tensor:
        return torch.zeros(nvpt, WIDTH)


def sgm_text_encoder(**params: Any) -> Any:
    """The same for sgm's GeneralConditioner, which asks for a base class of its own."""
    base = sys.modules["sgm.modules.encoders.modules"].AbstractEmbModel
    return type("SgmTextEncoder", (TextEncoder, base), {})()


COMMON = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 64,
    "attention_resolutions": [1],
    "num_res_blocks": 1,
    "channel_mult": [1],
    "use_spatial_transformer": True,
    "transformer_depth": 1,
    "context_dim": WIDTH,
    "legacy": False,
}
AUTOENCODER = {
    "embed_dim": 4,
    "ddconfig": {
        "double_z": True,
        "z_channels": 4,
        "resolution": 64,
        "in_channels": 3,
        "out_ch": 3,
        "ch": 32,
        "ch_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [],
        "dropout": 0.0,
    },
    "lossconfig": {"target": "torch.nn.Identity"},
}


def _part(target: str, **params: Any) -> dict[str, Any]:
    return {"target": target, "params": params}


def _embedder(key: str) -> dict[str, Any]:
    target = "sgm.modules.encoders.modules.ConcatTimestepEmbedderND"
    return {"is_trainable": False, "input_key": key, **_part(target, outdim=8)}


DENOISER = "sgm.modules.diffusionmodules"
CONFIGS = {
    "ldm": _part(
        "ldm.models.diffusion.ddpm.LatentDiffusion",
        linear_start=0.00085,
        linear_end=0.0120,
        timesteps=1000,
        first_stage_key="jpg",
        cond_stage_key="txt",
        image_size=8,
        channels=4,
        conditioning_key="crossattn",
        scale_factor=0.18215,
        use_ema=False,
        unet_config=_part(
            "ldm.modules.diffusionmodules.openaimodel.UNetModel",
            **COMMON,
            image_size=8,
            num_heads=2,
        ),
        first_stage_config=_part("ldm.models.autoencoder.AutoencoderKL", **AUTOENCODER),
        cond_stage_config={"target": "real_parts.TextEncoder"},
    ),
    "sgm": _part(
        "sgm.models.diffusion.DiffusionEngine",
        scale_factor=0.13025,
        disable_first_stage_autocast=True,
        denoiser_config=_part(
            f"{DENOISER}.denoiser.DiscreteDenoiser",
            num_idx=1000,
            weighting_config={"target": f"{DENOISER}.denoiser_weighting.EpsWeighting"},
            scaling_config={"target": f"{DENOISER}.denoiser_scaling.EpsScaling"},
            discretization_config={"target": f"{DENOISER}.discretizer.LegacyDDPMDiscretization"},
        ),
        network_config=_part(
            f"{DENOISER}.openaimodel.UNetModel",
            **COMMON,
            adm_in_channels=48,
            num_classes="sequential",
            num_head_channels=32,
            use_linear_in_transformer=True,
            spatial_transformer_attn_type="softmax-xformers",
        ),
        conditioner_config=_part(
            "sgm.modules.GeneralConditioner",
            emb_models=[
                {
                    "is_trainable": False,
                    "input_key": "txt",
                    "target": "real_parts.sgm_text_encoder",
                },
                *(
                    _embedder(key)
                    for key in (
                        "original_size_as_tuple",
                        "crop_coords_top_left",
                        "target_size_as_tuple",
                    )
                ),
            ],
        ),
        first_stage_config=_part(
            "sgm.models.autoencoder.AutoencoderKLInferenceWrapper", **AUTOENCODER
        ),
    ),
}


def config_of(family: str, whole: bool) -> dict[str, Any]:
    """`whole`: the UNet has a second level, so that it goes down and up."""
    config: dict[str, Any] = copy.deepcopy(CONFIGS[family])
    parts = {"ldm": "unet_config", "sgm": "network_config"}
    if whole:
        config["params"][parts[family]]["params"]["channel_mult"] = [1, 2]
    return config


def write_checkpoint(folder: Path, family: str, seed: int, whole: bool = False) -> Path:
    """model-<seed>.safetensors with its config beside it, from random weights."""
    config = config_of(family, whole)
    instantiate = sys.modules[f"{family}.util"].instantiate_from_config  # type: ignore[attr-defined]
    model = instantiate(config)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, parameter in model.named_parameters():
        scale = 0.35 if parameter.dim() > 1 else 0.1
        values = torch.randn(parameter.shape, generator=generator) * scale
        gain = "first_stage" in name and "norm" in name and name.endswith("weight")
        values = values + 1 if gain else values
        state[name] = values * 0.2 if name.endswith("decoder.conv_out.weight") else values
    path = folder / f"model-{seed}.safetensors"
    save_file(state, path)
    path.with_suffix(".yaml").write_text(json.dumps({"model": config}), encoding="utf-8")
    return path
