"""Small upscalers of every kind that is read, for tests: spandrel's where it is installed, else
their doubles or the benchmark's, and those of BasicSR's names.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.lab import upscaler_models

DOUBLE = Path(__file__).parent / "double" / "spandrel.py"


@cache
def _double() -> Any:
    """No module that others could import: hosts have doubles of spandrel's loader."""
    home = "spandrel.architectures.double"
    spec = importlib.util.spec_from_file_location(home, DOUBLE)
    assert spec is not None and spec.loader is not None
    double = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(double)
    return double


@cache
def _class(file: str, name: str) -> Any:
    """spandrel's class of that file, which lies in `arch` or, from 0.4.2 on, in `__arch`."""
    kind, stem = file.split("/")
    for folder in ("__arch", "arch"):
        with suppress(ImportError):
            return getattr(import_module(f"spandrel.architectures.{kind}.{folder}.{stem}"), name)
    return getattr(upscaler_models if name == "SwinIR" else _double(), name)


def rrdb(**settings: Any) -> Any:
    settings = {"num_filters": 16, "num_blocks": 2, **settings}
    return _class("ESRGAN/RRDB", "RRDBNet")(**settings)


def compact(**settings: Any) -> Any:
    settings = {"num_feat": 24, "num_conv": 19, **settings}
    return _class("Compact/SRVGG", "SRVGGNetCompact")(**settings)


def span(**settings: Any) -> Any:
    settings = {"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 20, **settings}
    return _class("SPAN/span", "SPAN")(**{"upscale": 2, "norm": False, **settings})


def swinir(**settings: Any) -> Any:
    """`img_size`: what it has masks for; those of other sizes are float32, which its half run does
    not take.
    """
    sizes = {
        "img_size": (12, 8),
        "window_size": 4,
        "embed_dim": 36,
        "mlp_ratio": 2.0,
        "upscale": 2,
    }
    depths = {"depths": [3, 1], "num_heads": [3, 3], "upsampler": "nearest+conv"}
    return _class("SwinIR/SwinIR", "SwinIR")(**{**sizes, **depths, **settings})


KINDS: dict[str, Callable[[], nn.Module]] = {
    "x4": rrdb,
    "x3": lambda: rrdb(scale=3, num_blocks=1),
    "x2": lambda: rrdb(scale=4, in_nc=12, shuffle_factor=2, num_blocks=1),
    "x1 alpha": lambda: rrdb(scale=1, in_nc=4, out_nc=4, num_blocks=1),
    "grey": lambda: rrdb(in_nc=1, out_nc=1, num_filters=24, num_blocks=1),
    "plus": lambda: rrdb(scale=2, plus=True),
    "compact": compact,
    "compact relu": lambda: compact(upscale=3, act_type="relu", num_conv=3),
    "compact leaky": lambda: compact(upscale=1, act_type="leakyrelu", num_conv=2),
    "span": span,
    "span norm": lambda: span(norm=True, img_range=2.0, feature_channels=16),
    "swinir": lambda: swinir(upscale=4, resi_connection="3conv"),
    "swinir plain": lambda: swinir(patch_norm=False, qkv_bias=False),
    "swinir shuffle": lambda: swinir(upscale=3, upsampler="pixelshuffle"),
    "swinir direct": lambda: swinir(upsampler="pixelshuffledirect", depths=[2], num_heads=[3]),
    "swinir grey": lambda: swinir(
        upscale=1,
        upsampler="",
        in_chans=1,
        img_range=255.0,
        window_size=7,
        img_size=21,
        num_heads=[2, 4],
        embed_dim=32,
    ),
    "basicsr x4": lambda: upscaler_models.RRDBNet(4, 16, 1),
    "basicsr x2": lambda: upscaler_models.RRDBNet(2, 16, 1),
    "basicsr x1": lambda: upscaler_models.RRDBNet(1, 16, 1),
    "basicsr compact": lambda: upscaler_models.SRVGGNetCompact(2, 16, 4),
}


def network(kind: str) -> Any:
    """With random weights."""
    return upscaler_models.settle(KINDS[kind]())


def picture(module: Any, height: int, width: int, batch: int = 1) -> torch.Tensor:
    """Random values from 0 to 1 in the dtype of `module`."""
    generator = torch.Generator("cpu").manual_seed(height * width)
    first = next(m for m in module.modules() if isinstance(m, nn.Conv2d)).in_channels
    shuffle = getattr(module, "shuffle_factor", None) or {2: 2, 1: 4}.get(
        getattr(module, "scale", 0) if hasattr(module, "conv_first") else 0, 1
    )
    shape = (batch, first // shuffle**2, height, width)
    dtype = next(module.parameters()).dtype
    return torch.rand(shape, generator=generator).to(dtype)


def own(module: Any, x: torch.Tensor) -> Any:
    """What the module itself gives. spandrel's descriptor leaves out what was added to odd sides of
    a picture whose pixels become channels.
    """
    with torch.no_grad():
        made = module(x)
    shuffle = getattr(module, "shuffle_factor", None)
    if not shuffle:
        return made
    height, width = (side * module.scale // shuffle for side in x.shape[2:])
    return made[:, :, :height, :width]
