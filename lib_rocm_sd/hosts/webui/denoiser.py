"""The UNet of the loaded checkpoint, called alone as a sampler calls it, for the speed test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.hosts.ui.options import Options
from lib_rocm_sd.hosts.webui import host, several, state, unet
from lib_rocm_sd.hosts.webui import session as a1111_session
from lib_rocm_sd.hosts.webui.method import autocast
from lib_rocm_sd.lab.speed_job import Denoiser
from lib_rocm_sd.ops.dtypes import HALVES

BATCH, TOKENS, FACTOR = 2, 77, 8
"""The prompt and the negative prompt; pixels of a picture per pixel of a latent image."""


def denoiser(model: nn.Module, device: torch.device) -> Denoiser:
    """ValueError with a reason where it is not known how to call `model`."""
    dtype = _dtype(model)

    def arguments(size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _arguments(model, device, dtype, size)

    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            return model(*args, **kwargs)

    arguments(FACTOR)
    return Denoiser(call, arguments, _theirs, ours, str(dtype).removeprefix("torch."))


def _dtype(model: nn.Module) -> torch.dtype:
    """The latents' dtype: a Forge's computation dtype, else the weights' dtype or, where these are
    narrow, the dtype that the WebUI computes in.
    """
    dtype = getattr(model, "computation_dtype", None) or next(model.parameters()).dtype
    if dtype in (torch.float32, *HALVES):
        return dtype
    found = host.attribute("modules.devices", "dtype_unet")
    return found if isinstance(found, torch.dtype) else torch.float16


def _arguments(
    model: Any, device: torch.device, dtype: torch.dtype, size: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one step, from a seed: latents, times, text, and SDXL's vector conditioning."""
    generator = torch.Generator("cpu").manual_seed(size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    named = dict(model.named_modules())
    cross = next((m for name, m in named.items() if name.endswith("attn2")), None)
    if first is None or cross is None:
        raise ValueError("we do not know how to call this checkpoint's UNet")
    side = -(-size // FACTOR)
    times = torch.full((BATCH,), 501.0, device=device, dtype=dtype)
    text = draw(BATCH, TOKENS, _width_of(cross))
    more: dict[str, Any] = {}
    if getattr(model, "num_classes", None) is not None:
        widths = (getattr(m, "in_features", None) for m in model.label_emb.modules())
        width = next((found for found in widths if isinstance(found, int)), None)
        if width is None:
            raise ValueError("we do not know which labels this checkpoint's UNet needs")
        more["y"] = draw(BATCH, width)
    if "transformer_options" in inspect.signature(type(model).forward).parameters:
        more["transformer_options"] = {}  # a Forge writes into it, into the default too
    return (draw(BATCH, first.in_channels, side, side), times), {"context": text, **more}


def _width_of(cross: Any) -> int:
    """Width of the text embedding that this attention reads."""
    width = getattr(getattr(cross, "to_k", None), "in_features", None)
    if isinstance(width, int):
        return width
    raise ValueError("we do not know which text this checkpoint's UNet reads")


@contextmanager
def _theirs() -> Iterator[None]:
    """Within this, the WebUI's own code computes all of a step."""
    optimizer = state.optimizer()
    aside: Callable[[bool], None] = getattr(optimizer, "step_aside", lambda aside: None)
    before = getattr(optimizer, "aside", False)
    several.session.end()
    unet.session.end()
    aside(True)
    try:
        yield
    finally:
        aside(before)


@contextmanager
def ours() -> Iterator[None]:
    """Within this, the blocks are ours as by *UNet* Auto. ValueError where none can be."""
    asked = Options(level=a1111_session.current().level, unet="Auto")
    several.session.end()
    unet.session.begin()
    unet.session.establish(asked)
    try:
        check(asked)
        yield
    finally:
        unet.session.end()


def check(asked: Options) -> None:
    """Raises ValueError with a reason where no block is ours, though `asked` for."""
    rows = unet.session.look()
    if unet.counted(rows)[0]:
        return
    left = [unet.explained(why) for row in rows for why in row.left]
    why = [*unet.why_not(asked), *left, unet.UNKNOWN]
    raise ValueError(f"the UNet's blocks are not ours: {why[0]}")
