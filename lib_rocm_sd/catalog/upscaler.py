"""Upscalers of ESRGAN's family, by their widths alone; no torch.

Each convolution has an epilogue: an activation, or a sum with what is added to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from lib_rocm_sd.catalog.vae import Layer, Walk
from lib_rocm_sd.ops.base import Op, Work
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem

CHANNELS, GROWTH, RRDB_BLOCKS, COMPACT_LAYERS = 64, 32, 23, 32
"""ESRGAN's and Real-ESRGAN's RRDBNet x4; SRVGGNetCompact of realesr-general and animevideo."""
NARROW, SPAN_CHANNELS, SPAN_BLOCKS = 32, 48, 6
"""ESRGAN's light networks; SPAN."""
COMPACT_FEATURES = ((CHANNELS, "prelu"), (CHANNELS, "leaky relu"), (48, "prelu"), (24, "prelu"))
"""Channels and activations of compact networks; ReLU is a leaky one of slope 0."""
SCALE, COLOURS = 4, 3
SIDE = 512
"""Rows and columns of the picture whose problems are tried."""


def rrdb(
    height: int,
    width: int,
    blocks: int = RRDB_BLOCKS,
    channels: int = CHANNELS,
    plus: bool = False,
) -> list[Layer]:
    """What RRDBNet x4 launches for a picture of `height` x `width`, whole. `plus`: ESRGAN+, whose
    dense blocks have two shortcuts more, one by a 1x1 convolution, which is no layer here.
    """
    walk = _Walk(height, width)
    walk.layer("conv_first", COLOURS, channels)
    for block in range(blocks):
        for dense in (1, 2, 3):
            name = f"body.{block}.rdb{dense}"
            for number in range(4):
                taken, added = channels + number * GROWTH, plus and number % 2 == 1
                walk.layer(f"{name}.conv{number + 1}", taken, GROWTH, "leaky relu", shortcut=added)
            walk.layer(f"{name}.conv5", channels + 4 * GROWTH, channels, shortcut=True)
    walk.layer("conv_body", channels, channels, shortcut=True)
    for number in (1, 2):
        walk.layer(f"conv_up{number}", channels, channels, "leaky relu", "upsample")
    walk.layer("conv_hr", channels, channels, "leaky relu")
    walk.layer("conv_last", channels, COLOURS)
    return walk.layers


def compact(
    height: int,
    width: int,
    layers: int = COMPACT_LAYERS,
    channels: int = CHANNELS,
    activation: str = "prelu",
    scale: int = SCALE,
) -> list[Layer]:
    """What SRVGGNetCompact launches for a picture of `height` x `width`, whole."""
    walk = _Walk(height, width)
    walk.layer("body.0", COLOURS, channels, activation)
    for number in range(layers):
        walk.layer(f"body.{2 * number + 2}", channels, channels, activation)
    walk.layer(f"body.{2 * layers + 2}", channels, COLOURS * scale**2)
    return walk.layers


def span(height: int, width: int, scale: int = SCALE) -> list[Layer]:
    """What SPAN launches for a picture of `height` x `width`, whole, but for a 1x1 convolution."""
    walk, channels = _Walk(height, width), SPAN_CHANNELS
    walk.layer("conv_1", COLOURS, channels)
    for block in range(1, SPAN_BLOCKS + 1):
        walk.layer(f"block_{block}.c1_r", channels, channels, "silu")
        walk.layer(f"block_{block}.c2_r", channels, channels, "silu")
        walk.layer(f"block_{block}.c3_r", channels, channels, "gate", shortcut=True)
    walk.layer("conv_2", channels, channels)
    walk.layer("upsampler.0", channels, COLOURS * scale**2)
    return walk.layers


class _Walk(Walk):
    def layer(
        self,
        name: str,
        taken: int,
        out: int,
        activation: str = "none",
        kind: str = "3x3",
        shortcut: bool = False,
    ) -> None:
        out = -(-out // 16) * 16  # as stored
        added: dict[str, Any] = {"shortcut": "identity", "shortcut_channels": out}
        how = {"epilogue": activation, **(added if shortcut else {})}
        self.conv(name, taken, out, kind, statistics=False, **how)


def work() -> Work:
    """What all ask, each class once."""
    return list({(op.name, op.test_problems(p)): (op, p) for op, p in _asked()}.values())


def _asked() -> Iterator[tuple[Op[Any, Any], Any]]:
    networks = [
        rrdb(SIDE, SIDE, 1),
        rrdb(SIDE, SIDE, 1, plus=True),
        rrdb(SIDE, SIDE, 1, NARROW),
        *(compact(SIDE, SIDE, 1, *kind, s) for kind in COMPACT_FEATURES for s in (SCALE, 2)),
        *(span(SIDE, SIDE, s) for s in (SCALE, 2)),
    ]
    for layer in chain.from_iterable(networks):
        assert isinstance(layer.problem, ConvProblem)
        yield CONVS[layer.problem.kind], layer.problem
