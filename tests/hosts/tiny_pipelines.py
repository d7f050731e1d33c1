"""Pipelines of diffusers with few layers and random weights, made from configs: nothing is loaded.

They have no text encoders: prompts are given as embeddings. Head sizes are the real models'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch

SIDE = 32
"""Of the pictures, in pixels."""
TOKENS = 7


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(len(shape)))


def _vae(channels: int) -> Any:
    return diffusers.AutoencoderKL(
        latent_channels=channels,
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        shift_factor=0.1,
        scaling_factor=1.5,
    )


def _unet(**options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(80, 160),
        layers_per_block=1,
        cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        sample_size=SIDE // 2,
        attention_head_dim=2,
        norm_num_groups=8,
        **options,
    )


def sd15() -> Any:
    """Heads of 40."""
    return diffusers.StableDiffusionPipeline(
        vae=_vae(4),
        text_encoder=None,
        tokenizer=None,
        unet=_unet(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> Any:
    """With a pooled prompt and the sizes as a second condition."""
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(4),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        unet=_unet(
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 16,
            use_linear_projection=True,
        ),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        add_watermarker=False,
    )


def sdxl_of_prompts(tokenizer: Any) -> Any:
    """The same with two text encoders, of what the tokenizer makes of a prompt."""
    import transformers

    words = transformers.CLIPTextConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        projection_dim=16,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return diffusers.StableDiffusionXLPipeline(
        **sdxl().components
        | {"tokenizer": tokenizer, "tokenizer_2": tokenizer}
        | {"text_encoder": transformers.CLIPTextModel(words)}
        | {"text_encoder_2": transformers.CLIPTextModelWithProjection(words)},
        add_watermarker=False,
    )


def sd3() -> Any:
    """SD 3.5: normalised queries and keys, heads of 64, a block with a second attention."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=SIDE // 2,
        in_channels=16,
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=128,
        pooled_projection_dim=16,
        out_channels=16,
        pos_embed_max_size=32,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(16),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def flux() -> Any:
    """Heads of 128, a joint and a single block."""
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=128,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(16, 56, 56),
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(4),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )


def wan() -> Any:
    """A video: self-attention over all frames, then attention to the text; heads of 128."""
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=1,
        attention_head_dim=128,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


MAKERS: Mapping[str, Callable[[], Any]] = {
    "SD 1.5": sd15,
    "SDXL": sdxl,
    "SD 3.5": sd3,
    "Flux": flux,
    "Wan": wan,
}
TRANSFORMERS = ("SD 3.5", "Flux", "Wan")
POOLED = ("SDXL", "SD 3.5", "Flux")
GUIDED = ("SD 1.5", "SDXL", "SD 3.5", "Wan")
"""Those that are asked with and without the prompt."""


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline `name` of MAKERS, quiet."""
    diffusers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    pipeline = MAKERS[name]()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(dtype)


def asked(name: str, pipeline: Any, steps: int = 2) -> torch.Tensor:
    """What the pipeline makes of a prompt: a picture, of Wan the latent of one."""
    model = getattr(pipeline, "transformer", None) or pipeline.unet
    given = prompt_of(name, model.dtype, steps)
    result = pipeline(**{key: _on(model.device, value) for key, value in given.items()})
    found: torch.Tensor = result.frames if name == "Wan" else result.images
    return found


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def prompt_of(name: str, dtype: torch.dtype, steps: int = 2) -> dict[str, Any]:
    """What the pipeline is asked for, always the same."""
    given: dict[str, Any] = {"prompt_embeds": _draw(1, TOKENS, 32).to(dtype)}
    if name in GUIDED:
        given["negative_prompt_embeds"] = _draw(1, TOKENS, 32).to(dtype) * 0.5
    if name in POOLED:
        given["pooled_prompt_embeds"] = _draw(1, 16).to(dtype)
        if name in GUIDED:
            given["negative_pooled_prompt_embeds"] = given["pooled_prompt_embeds"] * 0.5
    if name == "Wan":
        given["num_frames"] = 5
    return {
        **given,
        "output_type": "latent" if name == "Wan" else "pt",
        "height": SIDE,
        "width": SIDE,
        "num_inference_steps": steps,
        "generator": torch.Generator("cpu").manual_seed(0),
    }
