"""Models of Stable Diffusion's shapes with random weights, as diffusers builds them: UNets with the
calls that a sampler makes of them, the VAE's decoder and encoder with their inputs. And the ways to
run such a module beside ours, and what they do to it, and undo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.catalog import unet as catalog
from lib_rocm_sd.catalog.unet import BATCH, FACTOR, TOKENS
from lib_rocm_sd.catalog.vae import WIDTHS
from lib_rocm_sd.ops.base import Variant

_CROSS_DOWN, _DOWN = "CrossAttnDownBlock2D", "DownBlock2D"
_CROSS_UP, _UP = "CrossAttnUpBlock2D", "UpBlock2D"


def _config(widths: catalog.Unet) -> dict[str, Any]:
    """As diffusers has it."""
    depths = widths.depths
    return {
        "block_out_channels": widths.channels,
        "down_block_types": tuple(_CROSS_DOWN if depth else _DOWN for depth in depths),
        "up_block_types": tuple(_CROSS_UP if depth else _UP for depth in depths[::-1]),
        "transformer_layers_per_block": tuple(max(depth, 1) for depth in depths),
        "attention_head_dim": widths.heads,
        "cross_attention_dim": widths.context,
        "use_linear_projection": widths.linear_projections,
    }


_ADDED: dict[str, Any] = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": catalog.SDXL.pooled,
}
_SMALL: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "down_block_types": (_CROSS_DOWN, _DOWN),
    "up_block_types": (_UP, _CROSS_UP),
    "attention_head_dim": 2,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
}
CONFIGS = {
    "SD 1.5": _config(catalog.SD15),
    "SDXL": _config(catalog.SDXL) | _ADDED,
    "small": _SMALL,
}


@dataclass(frozen=True)
class Case:
    """One UNet at one size of pictures, in pixels."""

    model: str
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.model} {self.width}x{self.height}"


CASES = (
    Case("SD 1.5", 512, 512),
    Case("SD 1.5", 768, 512),
    Case("SDXL", 1024, 1024),
    Case("SDXL", 832, 1216),
)
SMALL_CASES = (Case("small", 128, 128),)


@dataclass(frozen=True)
class Unet:
    """A module and what makes the arguments of a call: `arguments(width, height)`, in pixels."""

    module: nn.Module
    device: torch.device
    dtype: torch.dtype
    arguments: Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]


def unet(model: str, device: torch.device, dtype: torch.dtype, seed: int = 1) -> Unet:
    """The UNet of a name in CONFIGS, with weights whose results stay near 1."""
    from diffusers import UNet2DConditionModel  # type: ignore[attr-defined]

    config = CONFIGS[model]
    with torch.device("meta"):
        module = UNet2DConditionModel(**config)
    module = module.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for child in module.modules():
        fill(child, generator)

    def arguments(width: int, height: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seeded = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=seeded, device=device, dtype=dtype)

        latents = draw(BATCH, 4, height // FACTOR, width // FACTOR)
        step = torch.tensor(501, device=device)
        options: dict[str, Any] = {"return_dict": False}
        if "addition_embed_type" in config:
            times = torch.tensor([[height, width, 0, 0, height, width]] * BATCH, device=device)
            options["added_cond_kwargs"] = {"text_embeds": draw(BATCH, 1280), "time_ids": times}
        return (latents, step, draw(BATCH, TOKENS, config["cross_attention_dim"])), options

    return Unet(module, device, dtype, arguments)


def fill(module: nn.Module, generator: torch.Generator) -> None:
    """A module's own weights, not its children's, by the share of their inputs; norms that change
    nothing; small biases.
    """
    is_norm = isinstance(module, (nn.GroupNorm, nn.LayerNorm))
    for name, parameter in module.named_parameters(recurse=False):
        if is_norm or (name == "weight" and parameter.ndim == 1):  # RMSNorm is of many classes
            parameter.fill_(float(name == "weight"))
        elif parameter.ndim > 1:
            share = math.prod(parameter.shape[1:]) ** -0.5
            parameter.normal_(0, 0.7 * share, generator=generator)
        else:
            parameter.normal_(0, 0.02, generator=generator)


SMALL_WIDTHS = (32, 32, 64, 64)
ROLES = ("decoder", "encoder")


@dataclass(frozen=True)
class Coder:
    """One of `ROLES`. `small`: of few channels, for a try in seconds."""

    role: str
    module: nn.Module
    device: torch.device
    dtype: torch.dtype
    small: bool = False

    @property
    def scale(self) -> tuple[int, int]:
        """Output size over input size, as a fraction."""
        return (FACTOR, 1) if self.role == "decoder" else (1, FACTOR)

    def random_input(self, height: int, width: int) -> torch.Tensor:
        """The latent of, or the image with, `height` x `width` pixels, drawn from their number."""
        generator = torch.Generator("cpu").manual_seed(height * 65537 + width)
        channels, divisor = (4, FACTOR) if self.role == "decoder" else (3, 1)
        shape = (1, channels, height // divisor, width // divisor)
        values = torch.randn(shape, generator=generator)
        values = values if self.role == "decoder" else values.mul_(0.4).clamp_(-1, 1)
        return values.to(self.device, self.dtype)


def autoencoder(device: torch.device, dtype: torch.dtype, small: bool = False) -> Any:
    """Stable Diffusion's VAE, seeded. Needs diffusers."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=SMALL_WIDTHS if small else WIDTHS,
        layers_per_block=1 if small else 2,
        norm_num_groups=8 if small else 32,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    return vae.to(device, dtype).eval().requires_grad_(False)


def coder(role: str, device: torch.device, dtype: torch.dtype, small: bool = False) -> Coder:
    """A part of `autoencoder`."""
    module: nn.Module = getattr(autoencoder(device, dtype, small), role)
    return Coder(role, module, device, dtype, small)


# -- ways -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runner:
    """A way made ready: `call` is a run, `told` what ran and why other parts were not ours.

    Of a VAE, `plan` describes the last run. `whole`: the whole frame at the same level, if the last
    run was in bands.
    """

    call: Callable[..., Any]
    told: Callable[[], list[str]] = list
    plan: Callable[[], str] = str
    whole: Callable[[], Callable[[torch.Tensor], torch.Tensor] | None] = lambda: None


@dataclass(frozen=True)
class Way:
    """`key`: its name on the command line; `name`: in tables and results. `make` takes what has the
    `module`. `slow`: it compiles for a minute or more.

    Of a VAE, `most`: pixels a side up to which a decoder is measured without being asked for more;
    `level`: of ours.
    """

    key: str
    name: str
    make: Callable[[Any], AbstractContextManager[Runner]]
    slow: bool = False
    most: int = 0
    level: str = ""


@contextmanager
def refused(variants: Iterable[Variant[Any, Any]], why: str) -> Iterator[None]:
    """Within this, each of these refuses whatever is planned."""
    excluded = list(variants)

    def refusals(arch: Any, problem: Any) -> list[str]:
        return [why]

    try:
        for variant in excluded:
            variant.refusals = refusals  # type: ignore[method-assign]
        yield
    finally:
        for variant in excluded:
            del variant.refusals


@contextmanager
def eager(model: Any) -> Iterator[Runner]:
    """The module itself on NCHW, as the WebUI runs it, but with torch's own attention."""
    yield Runner(model.module)


@contextmanager
def channels_last(model: Any) -> Iterator[Runner]:
    """The module in channels-last; put back afterwards."""
    with _in_channels_last(model.module):
        yield Runner(_given_last(model.module))


@contextmanager
def compiled(model: Any, **options: Any) -> Iterator[Runner]:
    """The module by torch.compile in channels-last, anew for each size."""
    torch._dynamo.reset()
    with _in_channels_last(model.module):
        function = torch.compile(model.module, **options, dynamic=False)
        try:
            yield Runner(_given_last(function))
        finally:
            torch._dynamo.reset()


@contextmanager
def _in_channels_last(module: Any) -> Iterator[None]:
    try:
        module.to(memory_format=torch.channels_last)
        yield
    finally:
        module.to(memory_format=torch.contiguous_format)


def _given_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same of an image that is brought into channels-last memory first."""

    def call(image: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(image.contiguous(memory_format=torch.channels_last), *args, **kwargs)

    return call
