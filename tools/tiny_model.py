"""The little model's modules, its scheduler, and how it is saved in diffusers' layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from tools import tiny_tokenizer

PICTURE = 128
LATENT = 32
TEXT_WIDTH = 96
PIPELINE = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.30.0",
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def autoencoder() -> AutoencoderKL:
    """Pictures (B, 3, 128, 128) to latents (B, 4, 32, 32) and back.

    Groups are wide: normalising few channels over a flat picture erases its colour.
    """
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        sample_size=PICTURE,
        force_upcast=False,
    )


def text_encoder(vocabulary_size: int) -> CLIPTextModel:
    """A CLIP text model; `vocabulary_size` counts the two special tokens, which come last."""
    config = CLIPTextConfig(
        vocab_size=vocabulary_size,
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=tiny_tokenizer.LENGTH,
        projection_dim=TEXT_WIDTH,
        hidden_act="quick_gelu",
        bos_token_id=vocabulary_size - 2,
        eos_token_id=vocabulary_size - 1,
        pad_token_id=vocabulary_size - 1,
    )
    return CLIPTextModel(config)


def unet() -> UNet2DConditionModel:
    """Head dims 40, 80 and 160 at 32x32, 16x16 and 8x8 latents.

    There is one head everywhere: diffusers reads `attention_head_dim` as the number of heads.
    """
    return UNet2DConditionModel(
        sample_size=LATENT,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(40, 80, 160),
        layers_per_block=1,
        attention_head_dim=1,
        cross_attention_dim=TEXT_WIDTH,
        norm_num_groups=4,
    )


def scheduler() -> DDIMScheduler:
    """Velocity prediction, no signal left at the last step: flat backgrounds keep their colour."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
    )


def _half_weights(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    return {
        prefix + name: value.detach().to("cpu", torch.float16).contiguous().clone()
        for name, value in module.state_dict().items()
        if value.is_floating_point()
    }


def save(
    directory: Path,
    words: list[str],
    vae: AutoencoderKL,
    text: CLIPTextModel,
    denoiser: UNet2DConditionModel,
) -> None:
    """Write a float16 StableDiffusionPipeline with the tensor names of Stable Diffusion's files."""
    scheduler().save_pretrained(directory / "scheduler")
    tiny_tokenizer.save(words, directory / "tokenizer")
    for name, module in (("vae", vae), ("unet", denoiser)):
        module.save_config(directory / name)
        save_file(
            _half_weights(module),
            directory / name / "diffusion_pytorch_model.safetensors",
            {"format": "pt"},
        )
    (directory / "text_encoder").mkdir(parents=True, exist_ok=True)
    text.config.architectures = ["CLIPTextModel"]
    text.config.save_pretrained(directory / "text_encoder")
    prefixed = next(iter(text.state_dict())).startswith("text_model.")
    save_file(
        _half_weights(text, "" if prefixed else "text_model."),
        directory / "text_encoder" / "model.safetensors",
        {"format": "pt"},
    )
    (directory / "model_index.json").write_text(
        json.dumps(PIPELINE, indent=2) + "\n", encoding="utf-8"
    )
