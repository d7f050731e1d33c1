"""Little models of true structure with random weights, and what a step of each is given."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.unet.unet_models import SMALL, draw, fill, in_dtype

BATCH, TOKENS, PROMPT = 2, 77, 96
_SD15: dict[str, Any] = {
    "block_out_channels": (32, 64, 128, 128),
    "layers_per_block": 2,
    "cross_attention_dim": PROMPT,
    "attention_head_dim": 4,
    "norm_num_groups": 16,
    "sample_size": 16,
}
_FEW: dict[str, Any] = {
    **SMALL,
    "cross_attention_dim": PROMPT,
    "norm_num_groups": 16,
    "mid_block_type": None,
}
_SDXL: dict[str, Any] = {
    "block_out_channels": (32, 64, 128),
    "layers_per_block": 2,
    "cross_attention_dim": PROMPT,
    "attention_head_dim": (1, 2, 4),
    "norm_num_groups": 16,
    "transformer_layers_per_block": (1, 2, 4),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 16,
    "sample_size": 16,
}
_UPSCALER: dict[str, Any] = {
    "in_channels": 7,
    "num_class_embeds": 1000,
    "only_cross_attention": (True, True, True, False),
    "down_block_types": ("DownBlock2D", *("CrossAttnDownBlock2D",) * 3),
    "up_block_types": (*("CrossAttnUpBlock2D",) * 3, "UpBlock2D"),
    "use_linear_projection": True,
}
_KANDINSKY: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 8,
    "block_out_channels": (64, 128),
    "layers_per_block": 1,
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "cross_attention_dim": PROMPT,
    "encoder_hid_dim": 32,
    "encoder_hid_dim_type": "image_proj",
    "addition_embed_type": "image",
    "attention_head_dim": 16,
    "resnet_time_scale_shift": "scale_shift",
    "sample_size": 8,
}
_CODER: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}


@dataclass(frozen=True)
class Model:
    """`make` gives a model, which is the part `part` of a pipeline; `ask` what a step is given, and
    `call` is a step.
    """

    name: str
    make: Callable[[], Any]
    ask: Callable[[int], dict[str, Any]]
    part: str = "unet"
    call: Callable[[Any, dict[str, Any]], Any] = lambda model, given: model(**given)


def _unet(config: dict[str, Any], **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(**{**config, **more})

    return make


def _of(name: str, **config: Any) -> Callable[[], Any]:
    """A model of diffusers' class `name`."""

    def make() -> Any:
        import diffusers

        return getattr(diffusers, name)(**config)

    return make


def _asked(
    height: int = 16, width: int = 0, channels: int = 4, **more: Any
) -> Callable[[int], dict[str, Any]]:
    def ask(seed: int) -> dict[str, Any]:
        return {
            "sample": draw(BATCH, channels, height, width or height, seed=seed),
            "timestep": torch.tensor(500 + seed),
            "encoder_hidden_states": draw(BATCH, TOKENS, PROMPT, seed=seed + 100),
            **more,
        }

    return ask


def _asked_sdxl(seed: int) -> dict[str, Any]:
    times = torch.full((BATCH, 6), 512.0)
    return _asked(
        added_cond_kwargs={"text_embeds": draw(BATCH, 16, seed=seed + 200), "time_ids": times}
    )(seed)


def _asked_kandinsky(seed: int) -> dict[str, Any]:
    images = {"image_embeds": draw(BATCH, 32, seed=seed + 200)}
    return {**_asked(8)(seed), "encoder_hidden_states": None, "added_cond_kwargs": images}


def _asked_sd3(seed: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(BATCH, 4, 16, 16, seed=seed),
        "timestep": torch.tensor([500.0 + seed] * BATCH),
        "encoder_hidden_states": draw(BATCH, TOKENS, 32, seed=seed + 100),
        "pooled_projections": draw(BATCH, 16, seed=seed + 200),
    }


def _asked_pixart(seed: int) -> dict[str, Any]:
    asked = _asked_sd3(seed)
    del asked["pooled_projections"]
    unknown = {"resolution": None, "aspect_ratio": None}
    return {**asked, "timestep": torch.tensor([500 + seed] * BATCH), "added_cond_kwargs": unknown}


def _latent(seed: int) -> dict[str, Any]:
    return {"z": draw(BATCH, 4, 16, 16, seed=seed)}


def _masked(seed: int) -> dict[str, Any]:
    picture = {"image": draw(BATCH, 3, 32, 32, seed=seed + 1), "mask": torch.ones(BATCH, 1, 32, 32)}
    picture["mask"][..., :16] = 0
    return {**_latent(seed), **picture}


def _decode(model: Any, given: dict[str, Any]) -> Any:
    return model.decode(**given)


def _tiny(model: Any, given: dict[str, Any]) -> Any:
    return model.decode(given["z"])


_SD3 = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
_SD3 |= {"attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 32}
_SD3 |= {"caption_projection_dim": 128, "pooled_projection_dim": 16, "pos_embed_max_size": 16}
_PIXART = {"sample_size": 16, "in_channels": 4, "out_channels": 8, "num_layers": 2}
_PIXART |= {"attention_head_dim": 32, "num_attention_heads": 4, "cross_attention_dim": 128}
_PIXART |= {"caption_channels": 32}
_PLAIN = {"block_out_channels": (32, 64)}
_ASYMMETRIC = {"down_block_out_channels": (32, 64), "layers_per_down_block": 1}
_ASYMMETRIC |= {"up_block_out_channels": (32, 64), "layers_per_up_block": 1}
_TINY = {"encoder_block_out_channels": (32, 32), "decoder_block_out_channels": (32, 32)}
_TINY |= {"num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)}
FEW = Model("few blocks", _unet(_FEW), _asked(8))
"""With one block of each kind, where changes are tried."""
SD15 = Model("SD 1.5", _unet(_SD15), _asked())
SDXL = Model("SDXL", _unet(_SDXL), _asked_sdxl)
OTHERS = (
    Model("inpainting", _unet(_SD15, in_channels=9), _asked(channels=9)),
    Model(
        "x4 upscaler",
        _unet(_SD15, **_UPSCALER),
        _asked(channels=7, class_labels=torch.tensor([20] * BATCH)),
    ),
    Model("GLIGEN", _unet(_FEW, attention_type="gated"), _asked(8)),
    Model("Kandinsky 2.2", _unet(_KANDINSKY), _asked_kandinsky),
    Model("SD 3", _of("SD3Transformer2DModel", **_SD3), _asked_sd3, "transformer"),
    Model("PixArt", _of("PixArtTransformer2DModel", **_PIXART), _asked_pixart, "transformer"),
    Model("VAE", _of("AutoencoderKL", **_CODER, **_PLAIN), _latent, "vae", _decode),
    Model(
        "asymmetric VAE",
        _of("AsymmetricAutoencoderKL", **_CODER, **_ASYMMETRIC),
        _masked,
        "vae",
        _decode,
    ),
    Model("tiny VAE", _of("AutoencoderTiny", **_TINY), _latent, "vae", _tiny),
)
MODELS = (FEW, SD15, SDXL, *OTHERS)


def at(height: int, width: int) -> Model:
    """SD 1.5 asked for another size."""
    return replace(SD15, name=f"SD 1.5 at {height}x{width}", ask=_asked(height, width))


@dataclass
class Scene:
    """A model in a pipeline, and whatever changes have done to what its steps are given.

    `notes` are a change's own findings.
    """

    model: Model
    dtype: torch.dtype
    device: torch.device
    asks: list[Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unet: Any = _copy(self.model).to(self.device, self.dtype)
        self.pipeline = _pipeline(self.model.part, self.unet)

    def step(self, seed: int) -> torch.Tensor:
        """What the model makes of inputs that only `seed` decides, in float32."""
        given = self._here(in_dtype(in_dtype(self.model.ask(seed), torch.float16), self.dtype))
        torch.manual_seed(seed)
        with torch.no_grad():
            for ask in self.asks:
                given = ask(given)
            made = self.model.call(self.unet, given)
        made = getattr(made, "sample", made)
        return (made[0] if isinstance(made, tuple) else made).float()

    def _here(self, given: Any) -> Any:
        if isinstance(given, dict):
            return {key: self._here(value) for key, value in given.items()}
        return given.to(self.device) if isinstance(given, torch.Tensor) else given

    def draw(self, *shape: int) -> torch.Tensor:
        """Random values, always the same."""
        return draw(*shape).to(self.device, torch.float16).to(self.dtype)

    def every(self, path: str) -> list[Any]:
        """The modules whose names are `path` or end with it; the model itself has an empty one."""
        found = [module for name, module in self.unet.named_modules() if _ends(name, path)]
        if not found:
            raise LookupError(f"{self.model.name} has no {path}")
        return found

    def first(self, path: str) -> Any:
        return self.every(path)[0]


def _copy(model: Model) -> nn.Module:
    """A model of its own, in a quarter of a deepcopy's time: rows ask for a thousand."""
    text, tensors = _made(model)
    copying = pickle.Unpickler(io.BytesIO(text))
    copying.persistent_load = deepcopy(tensors).__getitem__  # type: ignore[method-assign]
    return copying.load()


@cache
def _made(model: Model) -> tuple[bytes, dict[int, torch.Tensor]]:
    """Its modules, and their tensors by id: values that are the same in float16 and float32."""
    from diffusers.utils import logging

    logging.set_verbosity_error()
    tensors: dict[int, torch.Tensor] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, torch.Tensor):
                return None
            tensors[id(value)] = value
            return id(value)

    text = io.BytesIO()
    Pickler(text).dump(fill(model.make()).half())
    return text.getvalue(), tensors


def _ends(name: str, path: str) -> bool:
    return name == path or (bool(path) and name.endswith(f".{path}"))


def _pipeline(part: str, model: nn.Module) -> Any:
    if part != "unet":
        return SimpleNamespace(**{part: model})
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    names = ("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    absent: dict[str, Any] = dict.fromkeys(names)
    scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
    return StableDiffusionPipeline(
        **absent, unet=model, scheduler=scheduler, requires_safety_checker=False
    )


Change = Callable[[Scene], Iterator[None]]
"""What is done to a scene, in three parts: before ours is on, after a step, and to undo that."""


@dataclass(frozen=True)
class Row:
    """A change of `model`. `changes`: the step differs by it. `needs`: a package that it takes, or
    "cuda". `lies`: weights lie afterwards as they lie by the host alone.
    """

    name: str
    change: Change
    model: Model = FEW
    changes: bool = True
    needs: str = ""
    lies: bool = True
