"""Whole models of diffusers with random weights, and what people do to them: the rows of
`bench models`.

A row more: a `Model` if there is none of its kind, and a `Case`. Configs are those of the published
checkpoints; `small` says what differs in a try on a CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.catalog import dit
from lib_rocm_sd.catalog.unet import BATCH, TOKENS
from lib_rocm_sd.lab.models import CONFIGS, fill

SEED, RANK, IP_TOKENS = 1, 16, 4
IMAGE = 1024
"""Values of a picture that an IP-Adapter is given."""
_LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2", "proj_in", "proj_out"]
LORA_LAYERS = [*_LAYERS, "ff.net.0.proj", "ff.net.2"]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Draw:
    """Random tensors, always the same ones."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Draw:
        return cls(device, dtype, torch.Generator(device).manual_seed(SEED))

    def __call__(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return values.to(self.dtype)

    def lengths(self, tokens: int) -> torch.Tensor:
        """A mask of prompts: for each image as many valid tokens first, the fewest 1."""
        counts = torch.arange(1, BATCH + 1, device=self.device) * tokens // (2 * BATCH)
        return (torch.arange(tokens, device=self.device) < counts[:, None]).to(self.dtype)


@dataclass(frozen=True)
class Model:
    """A model as a pipeline has it, as its attribute `part`. `ask` draws what a step is given, by
    the config and the latent image's height and width; `size` and `small_size` are these.
    """

    kind: str
    """The class in diffusers."""
    config: Config
    small: Config
    ask: Callable[[Draw, Config, tuple[int, int]], dict[str, Any]]
    size: tuple[int, int] = (64, 64)
    small_size: tuple[int, int] = (8, 8)
    part: str = "unet"


Call = Callable[[Mapping[str, Any], dict[str, Any]], torch.Tensor]


def _only_model(parts: Mapping[str, Any], given: dict[str, Any]) -> torch.Tensor:
    (model,) = parts.values()
    output: Any = model(**given, return_dict=False)[0]
    made: torch.Tensor = torch.stack(output) if isinstance(output, list) else output
    return made


@dataclass
class Scene:
    """Models by the names that a pipeline has for them, and a step of theirs."""

    parts: dict[str, Any]
    given: dict[str, Any]
    draw: Draw
    call: Call = _only_model

    def step(self) -> torch.Tensor:
        """What a step gives."""
        return self.call(self.parts, self.given)

    def copy(self) -> Scene:
        """The same with models of its own."""
        return replace(self, parts=deepcopy(self.parts))

    def in_float32(self) -> Scene:
        """The same with models of its own, in float32."""
        parts = {name: deepcopy(model).float() for name, model in self.parts.items()}
        return replace(self, parts=parts, given=_in_float32(self.given))


def _in_float32(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: _in_float32(value) for key, value in given.items()}
    if isinstance(given, list):
        return [_in_float32(value) for value in given]
    floats = isinstance(given, torch.Tensor) and given.is_floating_point()
    return given.float() if floats else given


@dataclass(frozen=True)
class Case:
    """A row: a model, and what is done to it before its steps. `plain`: the row beside which its
    time stands; `more`: what differs from the model's config; `needs`: packages.
    """

    name: str
    model: Model
    change: Callable[[Scene], None] = lambda scene: None
    plain: str = ""
    more: Config = field(default_factory=dict)
    size: tuple[int, int] | None = None
    needs: tuple[str, ...] = ()

    def missing(self) -> str:
        """Why it cannot be made; empty where it can."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"it needs {' and '.join(absent)}: pip install {' '.join(absent)}" if absent else ""

    def scene(self, device: torch.device, dtype: torch.dtype, small: bool) -> Scene:
        """The models with random weights on `device`, changed."""
        model, draw = self.model, Draw.of(device, dtype)
        size = self.size or model.size
        if small:
            size = model.small_size if self.size is None else (12, 8)
        config = {**model.config, **self.more, **(model.small if small else {})}
        inputs = model.ask(draw, config, size)
        scene = Scene({model.part: made(model.kind, config, draw)}, inputs, draw)
        torch.manual_seed(SEED)
        self.change(scene)
        for part in scene.parts.values():
            part.to(device, dtype).eval().requires_grad_(False)
        return scene


def made(kind: str, config: Config, draw: Draw) -> nn.Module:
    """A model of diffusers with random weights."""
    import diffusers

    with torch.device("meta"):
        module: nn.Module = getattr(diffusers, kind)(**config)
    module = module.to(draw.dtype).to_empty(device=draw.device)
    for buffer in module.buffers():
        if buffer.is_floating_point():  # positions
            buffer.uniform_(-1, 1, generator=draw.generator)
    module.requires_grad_(False)
    for child in module.modules():
        fill(child, draw.generator)
    return module


# -- what is done to a model ----------------------------------------------------------------------


def _method(name: str, *args: Any, **kwargs: Any) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        getattr(scene.parts["unet"], name)(*args, **kwargs)

    return change


def add_lora(unet: Any) -> None:
    """Give a UNet an adapter of PEFT with random values, not fused."""
    import peft

    options = peft.LoraConfig(r=RANK, init_lora_weights=False, target_modules=LORA_LAYERS)
    unet.add_adapter(options, "one")


def _lora(scene: Scene) -> None:
    add_lora(scene.parts["unet"])


def _fused_lora(scene: Scene) -> None:
    _lora(scene)
    scene.parts["unet"].fuse_lora()


def _ip_adapter(scene: Scene) -> None:
    """As ip-adapter_sd15 is: a projection of a picture to four tokens, keys and values of them."""
    unet, draw = scene.parts["unet"], scene.draw
    context = unet.config.cross_attention_dim
    state: dict[str, torch.Tensor] = {}
    cross = (name for name in unet.attn_processors if not name.endswith("attn1.processor"))
    for number, name in enumerate(cross):
        width = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        for key in ("k", "v"):
            state[f"{2 * number + 1}.to_{key}_ip.weight"] = draw(width, context) * context**-0.5
    projection = {
        "proj.weight": draw(IP_TOKENS * context, IMAGE) * IMAGE**-0.5,
        "proj.bias": draw(IP_TOKENS * context),
        "norm.weight": draw(context),
        "norm.bias": draw(context),
    }
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": state}])
    scene.given["added_cond_kwargs"] = {"image_embeds": [draw(BATCH, 1, IMAGE)]}


def _masked_prompt(scene: Scene) -> None:
    scene.given["encoder_attention_mask"] = scene.draw.lengths(TOKENS)


def _controlnet(scene: Scene) -> None:
    """A ControlNet of the UNet's own widths, called before it."""
    config, draw = scene.parts["unet"].config, scene.draw
    same = ("block_out_channels", "down_block_types", "cross_attention_dim", "attention_head_dim")
    like = {name: config[name] for name in (*same, "layers_per_block", "norm_num_groups")}
    scene.parts["controlnet"] = made("ControlNetModel", like, draw)
    height, width = scene.given["sample"].shape[2:]
    image = draw(BATCH, 3, 8 * height, 8 * width)

    def call(parts: Mapping[str, Any], given: dict[str, Any]) -> torch.Tensor:
        control = image.to(given["sample"].dtype)
        down, middle = parts["controlnet"](**given, controlnet_cond=control, return_dict=False)
        residuals = {"down_block_additional_residuals": down}
        residuals["mid_block_additional_residual"] = middle
        return _only_model({"unet": parts["unet"]}, {**given, **residuals})

    scene.call = call


# -- the models -----------------------------------------------------------------------------------


def _asked_unet(draw: Draw, config: Config, size: tuple[int, int]) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "sample": draw(BATCH, config.get("in_channels", 4), *size),
        "timestep": torch.tensor(501, device=draw.device),
        "encoder_hidden_states": draw(BATCH, TOKENS, config["cross_attention_dim"]),
    }
    if "num_class_embeds" in config:
        inputs["class_labels"] = torch.tensor([20] * BATCH, device=draw.device)
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config[_TIME]
        sizes = torch.tensor([[1024, 1024, 0, 0, 1024, 1024]] * BATCH, device=draw.device)
        inputs["added_cond_kwargs"] = {"text_embeds": draw(BATCH, pooled), "time_ids": sizes}
    if config.get("addition_embed_type") == "image":
        images = draw(BATCH, config["encoder_hid_dim"])
        inputs |= {"encoder_hidden_states": None, "added_cond_kwargs": {"image_embeds": images}}
    return inputs


def _asked_sd3(draw: Draw, config: Config, size: tuple[int, int]) -> dict[str, Any]:
    return {
        "hidden_states": draw(BATCH, config["in_channels"], *size),
        "timestep": torch.tensor([501.0] * BATCH, device=draw.device),
        "encoder_hidden_states": draw(BATCH, 333, config["joint_attention_dim"]),
        "pooled_projections": draw(BATCH, config["pooled_projection_dim"]),
    }


def _tokens(draw: Draw, config: Config, size: tuple[int, int], batch: int = 1) -> dict[str, Any]:
    """Those of pictures and of prompts of 512 words, with their places, and a time."""
    rows, columns = size[0] // 2, size[1] // 2
    places = torch.zeros(rows, columns, 3, device=draw.device, dtype=draw.dtype)
    places[..., 1] += torch.arange(rows, device=draw.device)[:, None]
    places[..., 2] += torch.arange(columns, device=draw.device)
    return {
        "hidden_states": draw(batch, rows * columns, config["in_channels"]),
        "timestep": torch.tensor([0.5] * batch, device=draw.device, dtype=draw.dtype),
        "encoder_hidden_states": draw(batch, 512, config["joint_attention_dim"]),
        "txt_ids": places.new_zeros(512, 3),
        "img_ids": places.flatten(0, 1),
    }


def _asked_flux(draw: Draw, config: Config, size: tuple[int, int]) -> dict[str, Any]:
    """One picture: its guidance is a number that the model is given."""
    given = _tokens(draw, config, size)
    given["guidance"] = torch.tensor([3.5], device=draw.device, dtype=draw.dtype)
    given["pooled_projections"] = draw(1, config["pooled_projection_dim"])
    return given


def _asked_chroma(draw: Draw, config: Config, size: tuple[int, int]) -> dict[str, Any]:
    """Prompts of two lengths: the mask has the words that count, and all tokens of pictures."""
    given = _tokens(draw, config, size, BATCH)
    pictures = given["hidden_states"].new_ones(given["hidden_states"].shape[:2])
    return {**given, "attention_mask": torch.cat((draw.lengths(512), pictures), 1)}


def _asked_wan(draw: Draw, config: Config, size: tuple[int, int]) -> dict[str, Any]:
    """A video of 17 frames, which are five latent ones."""
    return {
        "hidden_states": draw(1, config["in_channels"], 5, *size),
        "timestep": torch.tensor([501], device=draw.device),
        "encoder_hidden_states": draw(1, 512, config["text_dim"]),
    }


def _asked_zimage(draw: Draw, config: Config, size: tuple[int, int]) -> dict[str, Any]:
    """One picture, which needs no guidance, of a prompt of 100 words."""
    return {
        "x": [draw(config["in_channels"], 1, *size)],
        "t": torch.tensor([0.5], device=draw.device, dtype=draw.dtype),
        "cap_feats": [draw(100, config["cap_feat_dim"])],
    }


def _asked_pixart(draw: Draw, config: Config, size: tuple[int, int]) -> dict[str, Any]:
    tokens = 300 if size[0] > 64 else 120  # Sigma's and Alpha's
    return {
        "hidden_states": draw(BATCH, config["in_channels"], *size),
        "timestep": torch.tensor([501] * BATCH, device=draw.device),
        "encoder_hidden_states": draw(BATCH, tokens, config["caption_channels"]),
        "encoder_attention_mask": draw.lengths(tokens),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


_TIME = "addition_time_embed_dim"
_DOWN, _UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
_SIMPLE_DOWN, _SIMPLE_UP = "SimpleCrossAttnDownBlock2D", "SimpleCrossAttnUpBlock2D"
_SMALL: Config = {
    "block_out_channels": (32, 64),
    "down_block_types": (_DOWN, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", _UP),
    "attention_head_dim": 2,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
_SMALL_XL: Config = {"transformer_layers_per_block": 1}
_SMALL_XL = {**_SMALL, **_SMALL_XL, _TIME: 8, "projection_class_embeddings_input_dim": 64}
_UPSCALER: Config = {
    "in_channels": 7,
    "block_out_channels": (256, 512, 512, 1024),
    "down_block_types": ("DownBlock2D", _DOWN, _DOWN, _DOWN),
    "up_block_types": (_UP, _UP, _UP, "UpBlock2D"),
    "only_cross_attention": (True, True, True, False),
    "attention_head_dim": 8,
    "cross_attention_dim": 1024,
    "num_class_embeds": 1000,
    "use_linear_projection": True,
}
_KANDINSKY: Config = {
    "out_channels": 8,
    "block_out_channels": (384, 768, 1152, 1536),
    "layers_per_block": 3,
    "down_block_types": ("ResnetDownsampleBlock2D", *(_SIMPLE_DOWN,) * 3),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": (*(_SIMPLE_UP,) * 3, "ResnetUpsampleBlock2D"),
    "attention_head_dim": 64,
    "cross_attention_dim": 768,
    "encoder_hid_dim": 1280,
    "encoder_hid_dim_type": "image_proj",
    "addition_embed_type": "image",
    "resnet_time_scale_shift": "scale_shift",
}
_SMALL_KANDINSKY: Config = {
    "block_out_channels": (64, 128),
    "layers_per_block": 1,
    "down_block_types": ("ResnetDownsampleBlock2D", _SIMPLE_DOWN),
    "up_block_types": (_SIMPLE_UP, "ResnetUpsampleBlock2D"),
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "encoder_hid_dim": 32,
}


def _sd3(widths: dit.Transformer, positions: int) -> Config:
    return {
        "sample_size": 128,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": widths.blocks,
        "attention_head_dim": widths.channels // widths.heads,
        "num_attention_heads": widths.heads,
        "joint_attention_dim": 4096,
        "caption_projection_dim": widths.channels,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": positions,
        "dual_attention_layers": tuple(range(widths.alone)),
        "qk_norm": "rms_norm" if widths.normed else None,
    }


_SMALL_SD3: Config = {
    "sample_size": 8,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 16,
}
_FLUX: Config = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
_SMALL_FLUX: Config = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 1,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
}
_CHROMA: Config = {
    "in_channels": 64,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "approximator_hidden_dim": 5120,
    "approximator_layers": 5,
}
_SMALL_CHROMA: Config = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 1,
    "joint_attention_dim": 32,
    "approximator_hidden_dim": 32,
    "approximator_layers": 1,
}
_WAN: Config = {
    "in_channels": 16,
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "text_dim": 4096,
    "ffn_dim": 8960,
}
_SMALL_WAN: Config = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "text_dim": 32,
    "ffn_dim": 80,
}
_ZIMAGE: Config = {"in_channels": 16, "dim": 3840, "n_heads": 30, "cap_feat_dim": 2560}
_SMALL_ZIMAGE: Config = {
    "dim": 128,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": 1,
    "cap_feat_dim": 32,
}
_PIXART: Config = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "attention_head_dim": 72,
    "num_attention_heads": 16,
    "cross_attention_dim": 1152,
    "caption_channels": 4096,
    "use_additional_conditions": False,
}
_SMALL_PIXART: Config = {
    "sample_size": 8,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "cross_attention_dim": 64,
    "caption_channels": 32,
}
UNET = "UNet2DConditionModel"
SD15 = Model(UNET, CONFIGS["SD 1.5"], _SMALL, _asked_unet)
SDXL = Model(UNET, CONFIGS["SDXL"], _SMALL_XL, _asked_unet, (128, 128))
_UPSCALER_SMALL: Config = {**_SMALL, "only_cross_attention": (True, False)}
UPSCALER = Model(UNET, _UPSCALER, _UPSCALER_SMALL, _asked_unet, (128, 128))
KANDINSKY = Model(UNET, _KANDINSKY, _SMALL_KANDINSKY, _asked_unet)
_SD3 = _sd3(dit.SD3, 192)
SD3 = Model("SD3Transformer2DModel", _SD3, _SMALL_SD3, _asked_sd3, (128, 128), part="transformer")
SD35 = replace(SD3, config=_sd3(dit.SD35, 384), small={**_SMALL_SD3, "dual_attention_layers": (0,)})
FLUX = Model(
    "FluxTransformer2DModel", _FLUX, _SMALL_FLUX, _asked_flux, (128, 128), part="transformer"
)
CHROMA = Model(
    "ChromaTransformer2DModel",
    _CHROMA,
    _SMALL_CHROMA,
    _asked_chroma,
    (128, 128),
    part="transformer",
)
WAN = Model("WanTransformer3DModel", _WAN, _SMALL_WAN, _asked_wan, (60, 104), part="transformer")
ZIMAGE = Model(
    "ZImageTransformer2DModel",
    _ZIMAGE,
    _SMALL_ZIMAGE,
    _asked_zimage,
    (128, 128),
    part="transformer",
)
PIXART = Model(
    "PixArtTransformer2DModel", _PIXART, _SMALL_PIXART, _asked_pixart, part="transformer"
)

# -- the rows -------------------------------------------------------------------------------------


def _of_sd15(name: str, change: Callable[[Scene], None] = lambda scene: None, **more: Any) -> Case:
    return Case(f"SD 1.5, {name}", SD15, change, PLAIN, **more)


PLAIN = "SD 1.5"
_FREE = {"s1": 0.9, "s2": 0.2, "b1": 1.5, "b2": 1.6}
_SIX: Config = {"num_layers": 6}
_SIX_DUAL: Config = {**_SIX, "dual_attention_layers": tuple(range(6))}
_FEW_FLUX: Config = {"num_layers": 2, "num_single_layers": 4}
CASES = (
    Case(PLAIN, SD15),
    _of_sd15("768x512", size=(96, 64)),
    _of_sd15("inpainting", more={"in_channels": 9}),
    _of_sd15("FreeU", _method("enable_freeu", **_FREE)),
    _of_sd15("attention slicing", _method("set_attention_slice", "auto")),
    _of_sd15("LoRA", _lora, needs=("peft",)),
    _of_sd15("LoRA, fused", _fused_lora, needs=("peft",)),
    _of_sd15("IP-Adapter", _ip_adapter),
    _of_sd15("mask for the prompt", _masked_prompt),
    _of_sd15("fused projections", _method("fuse_qkv_projections")),
    _of_sd15("ControlNet", _controlnet),
    Case("SDXL", SDXL),
    Case("SDXL, LoRA", SDXL, _lora, "SDXL", needs=("peft",)),
    Case("x4 upscaler", UPSCALER),
    Case("Kandinsky 2.2", KANDINSKY),
    Case("PixArt-Alpha 512x512", PIXART),
    Case("PixArt-Sigma 1024x1024", PIXART, more={"sample_size": 128}, size=(128, 128)),
    Case("SD 3, six blocks", SD3, more=_SIX),
    Case("SD 3", SD3),
    Case("SD 3.5 medium, six blocks", SD35, more=_SIX_DUAL),
    Case("SD 3.5 medium", SD35),
    Case("Flux, 2 double and 4 single blocks", FLUX, more=_FEW_FLUX),
    Case("Chroma, 2 double and 4 single blocks", CHROMA, more=_FEW_FLUX),
    Case("Wan 2.1 1.3B, 832x480, 17 frames, six blocks", WAN, more=_SIX),
    Case("Z-Image, six blocks and four refiners", ZIMAGE, more={"n_layers": 6}),
)
