"""A checkpoint of a Forge's own modules, small; and the WebUI's double as a Forge has it."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

WIDTH, TEXT, HEADS, HEAD_DIM = 32, 24, 2, 16
HALF = torch.bfloat16
CPU = torch.device("cpu")
WHOLE: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": WIDTH,
    "num_res_blocks": [1, 1],
    "channel_mult": (1, 2),
    "num_heads": HEADS,
    "use_spatial_transformer": True,
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": TEXT,
}
"""A UNet of two levels, as a Forge makes it; the double's has attention in other places."""


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

    def __init__(self, forge: Any, seed: int) -> None:
        kind, dtype = forge.kind, forge.dtype
        make = _forges if kind == "forge" else _reforges
        unet, vae, self._scale = make(dtype)
        for module in (unet, vae.first_stage_model):
            _fill(module, seed)
            module.to(dtype).eval()
        objects = importlib.import_module("forge_help").Objects
        patcher: Any = SimpleNamespace(model=SimpleNamespace(diffusion_model=unet))
        if forge.whole is not None:
            patcher = _whole(kind, dtype, seed, **forge.whole)
            unet = patcher.model.diffusion_model
        self._whole = forge.whole is not None
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
        if not self._whole:
            return self._unet(x.to(self._dtype), t, context=cond)  # type: ignore[no-any-return]
        patcher = self.forge_objects.unet
        load(patcher)
        options = dict(patcher.model_options["transformer_options"])
        times = torch.full((x.shape[0],), float(torch.as_tensor(t).flatten()[0]))
        made = patcher.model.diffusion_model(
            x.to(self._dtype), times, context=cond.to(self._dtype), transformer_options=options
        )
        return made.to(x)  # type: ignore[no-any-return]

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


def load(patcher: Any) -> None:
    """The LoRAs of a UNet's patcher, and no other's, are in its weights, as before a step."""
    if hasattr(patcher, "refresh_loras"):
        patcher.refresh_loras()
        return
    before = vars(patcher.model).get("loaded_by")
    if before is not patcher:
        memory: Any = importlib.import_module("ldm_patched.modules.model_management")
        if before is not None:
            before.unpatch_model()
        memory.load_models_gpu([patcher])
        vars(patcher.model)["loaded_by"] = patcher


class Objects:
    def __init__(self, unet: Any, clip: Any, vae: Any, clipvision: Any) -> None:
        self.unet, self.clip, self.vae, self.clipvision = unet, clip, vae, clipvision

    def shallow_copy(self) -> Objects:
        return Objects(self.unet, self.clip, self.vae, self.clipvision)


@torch.inference_mode()
def _whole(kind: str, half: torch.dtype, seed: int, packed: bool = False, **storage: Any) -> Any:
    """The patcher of a whole UNet, as a Forge loads it: amid inference mode. `packed`: its linear
    layers have GGUF's weights. `storage`: as the layers are asked for; with `flux`, Flux's.
    """
    flux = {"flux": storage.pop("flux", False)}
    plain = _unet(kind, {"dtype": half, **flux})
    weights = _weights(plain, seed, half)
    if packed:
        plain = _unet(kind, {"dtype": half, "bnb_dtype": "gguf", **flux})
        weights = {name: _packed(plain, name, each) for name, each in weights.items()}
    elif storage:
        plain = _unet(kind, storage)
    plain.load_state_dict(weights)
    plain.load_device = plain.offload_device = plain.initial_device = CPU
    plain.storage_dtype, plain.computation_dtype = half, half
    if kind == "forge":
        patcher: Any = importlib.import_module("backend.patcher.unet")
        memory: Any = importlib.import_module("backend.memory_management")
        if packed and hasattr(memory, "bake_gguf_model"):
            memory.bake_gguf_model(plain)
        return patcher.UnetPatcher.from_model(plain, None, None, k_predictor=object())
    owner = nn.Module()
    owner.diffusion_model = plain
    patchers: Any = importlib.import_module("ldm_patched.modules.model_patcher")
    return patchers.ModelPatcher(owner, CPU, CPU)


def _unet(kind: str, storage: dict[str, Any]) -> Any:
    if kind == "forge":
        operations: Any = importlib.import_module("backend.operations")
        unets: Any = importlib.import_module("backend.nn.unet")
        transformers: Any = importlib.import_module("backend.nn.flux")
        flux = storage.pop("flux", False)
        with operations.using_forge_operations(device=CPU, **storage):
            if flux:
                made = transformers.IntegratedFluxTransformer2DModel(WIDTH, HEADS, TEXT)
                return made.to(storage["dtype"])
            return unets.IntegratedUNet2DConditionModel(**copy.deepcopy(WHOLE))
    models: Any = importlib.import_module("ldm_patched.ldm.modules.diffusionmodules.openaimodel")
    layers: Any = importlib.import_module("ldm_patched.modules.ops")
    cast = storage.get("manual_cast_enabled", False)
    made = models.UNetModel(
        image_size=8,
        **copy.deepcopy(WHOLE),
        dtype=storage["dtype"],
        device=CPU,
        operations=layers.manual_cast if cast else layers.disable_weight_init,
    )
    return made.to(storage["dtype"])


def _weights(module: nn.Module, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A state_dict. Forge's linear layers have parameters only when they were loaded."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for path, layer in module.named_modules():
        own = {name: p.shape for name, p in layer.named_parameters(recurse=False)}
        if own.pop("dummy", None) is not None:
            own = {"weight": torch.Size((layer.out_features, layer.in_features))}
            if path.rpartition(".")[2] not in ("to_q", "to_k", "to_v"):
                own["bias"] = torch.Size((layer.out_features,))
        for name, shape in own.items():
            values = torch.randn(shape, generator=generator)
            values *= shape[1:].numel() ** -0.5 if len(shape) > 1 else 0.1
            is_gain = name == "weight" and len(shape) == 1
            found[f"{path}.{name}"] = (values + is_gain).to(dtype)
    return found


def _packed(unet: nn.Module, name: str, value: torch.Tensor) -> Any:
    """A linear layer's weight as GGUF has it in 8 bits; the double packs it itself."""
    path, _, key = name.rpartition(".")
    is_linear = type(unet.get_submodule(path)).__name__ == "Linear" and key == "weight"
    if not is_linear or value.shape[1] % 32 or importlib.util.find_spec("gguf") is None:
        return value
    gguf: Any = importlib.import_module("gguf")
    kind = gguf.GGMLQuantizationType.Q8_0
    operations: Any = importlib.import_module("backend.operations_gguf")
    data = gguf.quants.quantize(value.float().numpy(), kind)
    tensor = SimpleNamespace(tensor_type=kind, shape=[*reversed(value.shape)], data=data)
    return operations.ParameterGGUF(tensor)


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
        model = Checkpoint(forge, int(name.rsplit("-", 1)[1]))
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
