"""A checkpoint of a Forge's own modules, small; and the WebUI's double as a Forge has it."""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

WIDTH, TEXT, HEADS, HEAD_DIM = 32, 24, 2, 16
HALF = torch.bfloat16


class Unet(nn.Module):
    """Attention to itself and to the prompt, as in a transformer block of a UNet."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.attn1 = attention(WIDTH, heads=HEADS, dim_head=HEAD_DIM)
        self.attn2 = attention(WIDTH, TEXT, heads=HEADS, dim_head=HEAD_DIM)

    def forward(self, x: torch.Tensor, timesteps: Any, context: Any = None) -> torch.Tensor:
        rows = self.into(x.flatten(2).transpose(1, 2))
        rows = rows + self.attn1(rows)
        rows = rows + self.attn2(rows, context)
        return self.out(rows).transpose(1, 2).reshape(x.shape)


class Checkpoint:
    """What a Forge's process_images calls of its engine, and the double's beside."""

    lowvram = False

    def __init__(self, kind: str, seed: int, dtype: torch.dtype) -> None:
        make = _forges if kind == "forge" else _reforges
        unet, vae, self._scale = make(dtype)
        for module in (unet, vae.first_stage_model):
            _fill(module, seed)
            module.to(dtype).eval()
        objects = importlib.import_module("forge_help").Objects
        patcher = SimpleNamespace(model=SimpleNamespace(diffusion_model=unet))
        self.forge_objects = objects(patcher, None, vae, None)
        self.forge_objects_original = self.forge_objects.shallow_copy()
        self.first_stage_model = vae.first_stage_model if kind == "reforge" else None
        if kind == "reforge":
            self.model = SimpleNamespace(diffusion_model=unet)
        self._unet, self._dtype = unet, dtype

    @contextlib.contextmanager
    def ema_scope(self, context: Any = None) -> Iterator[None]:
        yield

    def get_learned_conditioning(self, prompts: list[str]) -> torch.Tensor:
        seeds = (torch.Generator().manual_seed(zlib.crc32(text.encode())) for text in prompts)
        return torch.stack([torch.randn((77, TEXT), generator=g) for g in seeds]).to(self._dtype)

    @torch.inference_mode()
    def apply_model(self, x: torch.Tensor, t: Any, cond: torch.Tensor) -> torch.Tensor:
        return self._unet(x.to(self._dtype), t, context=cond)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def decode_first_stage(self, x: torch.Tensor) -> torch.Tensor:
        made = self.forge_objects.vae.decode(x / self._scale)
        return (made.movedim(-1, 1) * 2.0 - 1.0).to(x)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def encode_first_stage(self, x: torch.Tensor) -> torch.Tensor:
        made = self.forge_objects.vae.encode(x.movedim(1, -1) * 0.5 + 0.5)
        return (made * self._scale).to(x)  # type: ignore[no-any-return]

    def get_first_stage_encoding(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Objects:
    def __init__(self, unet: Any, clip: Any, vae: Any, clipvision: Any) -> None:
        self.unet, self.clip, self.vae, self.clipvision = unet, clip, vae, clipvision

    def shallow_copy(self) -> Objects:
        return Objects(self.unet, self.clip, self.vae, self.clipvision)


def _forges(dtype: torch.dtype) -> tuple[nn.Module, Any, float]:
    operations: Any = importlib.import_module("backend.operations")
    vae: Any = importlib.import_module("backend.nn.vae")
    patcher: Any = importlib.import_module("backend.patcher.vae")
    unet: Any = importlib.import_module("backend.nn.unet")
    for other in ("flux", "t5"):
        importlib.import_module(f"backend.nn.{other}")
    with operations.using_forge_operations(device=torch.device("cpu"), dtype=dtype):
        model = vae.IntegratedAutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[32] * 4,
            layers_per_block=1,
        )
    made = Unet(unet.CrossAttention)
    return made, patcher.VAE(model=model, dtype=dtype), model.scaling_factor


def _reforges(dtype: torch.dtype) -> tuple[nn.Module, Any, float]:
    attention: Any = importlib.import_module("ldm_patched.ldm.modules.attention")
    autoencoder: Any = importlib.import_module("ldm_patched.ldm.models.autoencoder")
    sd: Any = importlib.import_module("ldm_patched.modules.sd")
    patcher: Any = importlib.import_module("ldm_patched.modules.model_patcher")
    config = {
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
    }
    vae = sd.VAE(no_init=True)
    vae.__dict__.update(
        first_stage_model=autoencoder.AutoencoderKL(ddconfig=config, embed_dim=4),
        memory_used_encode=lambda shape, dtype: 1767 * shape[2] * shape[3] * dtype.itemsize,
        memory_used_decode=lambda shape, dtype: 2178 * shape[2] * shape[3] * 64 * dtype.itemsize,
        process_input=lambda image: image * 2.0 - 1.0,
        process_output=lambda image: torch.clamp((image + 1.0) / 2.0, min=0.0, max=1.0),
        device=torch.device("cpu"),
        output_device=torch.device("cpu"),
        vae_dtype=dtype,
        latent_channels=4,
        downscale_ratio=8,
        upscale_ratio=8,
        latent_dim=2,
        extra_1d_channel=None,
        packed_latent_channels=None,
        latent_scale_factor=1.0,
        latent_shift_factor=0.0,
        latent_bn_running_mean=None,
        latent_bn_running_var=None,
        disable_offload=False,
    )
    cpu = torch.device("cpu")
    vae.patcher = patcher.ModelPatcher(vae.first_stage_model, cpu, cpu)
    return Unet(attention.CrossAttention), vae, 0.18215


def _fill(module: nn.Module, seed: int) -> None:
    """As the double's own checkpoints are filled."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            size = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            is_gain = "norm" in name and name.endswith("weight")
            parameter.copy_(values * size + (1.0 if is_gain else 0.0))


def make_forge(webui: Any, forge: Any) -> None:
    """No optimizers; checkpoints of a Forge's modules; decoding as modules/sd_samplers_common.py
    of lllyasviel/stable-diffusion-webui-forge dfdcbab6 has it.
    """
    del webui.sd_hijack_optimizations.SdOptimization
    for name in ("apply_optimizations", "list_optimizers", "optimizers", "current_optimizer"):
        delattr(webui.sd_hijack, name)
    if forge.kind == "reforge":
        del webui.script_callbacks.on_list_optimizers

    def load_model(checkpoint_info: Any = None, already_loaded_state_dict: Any = None) -> Any:
        name = checkpoint_info or webui.shared.opts.sd_model_checkpoint
        model = Checkpoint(forge.kind, int(name.rsplit("-", 1)[1]), forge.dtype)
        webui.sd_models.loaded["name"] = name
        webui.shared.sd_model = webui.sd_models.model_data.sd_model = model
        webui.script_callbacks.model_loaded_callback(model)
        return model

    def decode_first_stage(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.decode_first_stage(x)  # type: ignore[no-any-return]

    def images_tensor_to_samples(
        image: torch.Tensor, approximation: Any = None, model: Any = None
    ) -> torch.Tensor:
        model = model or webui.shared.sd_model
        return model.encode_first_stage(image * 2 - 1)  # type: ignore[no-any-return]

    def decode_latent_batch(
        model: Any, batch: torch.Tensor, target_device: Any = None, check_for_nans: bool = False
    ) -> Any:
        made = webui.processing.DecodedSamples()
        made.extend(decode_first_stage(model, batch).to(target_device))
        return made

    webui.sd_models.load_model = load_model
    webui.sd_samplers_common.samples_to_images_tensor = (
        lambda sample, approximation=None, model=None: decode_first_stage(
            model or webui.shared.sd_model, sample
        )
    )
    for function in (decode_first_stage, images_tensor_to_samples, decode_latent_batch):
        setattr(webui.processing, function.__name__, function)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.decoded, b.decoded, strict=True))


def distance(a: Any, b: Any) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a.decoded, b.decoded, strict=True))
