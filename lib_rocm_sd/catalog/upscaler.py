"""Upscalers of ESRGAN's family, by their widths alone; no torch.

Each convolution has an epilogue: an activation, or a sum with what is added to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lib_rocm_sd.catalog.vae import Layer, Walk
from lib_rocm_sd.ops.base import Op, Work
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem

CHANNELS, GROWTH, RRDB_BLOCKS, COMPACT_LAYERS = 64, 32, 23, 32
"""ESRGAN's and Real-ESRGAN's RRDBNet x4; SRVGGNetCompact of realesr-general and animevideo."""
SCALE, COLOURS = 4, 3
SIDE = 512
"""Rows and columns of the picture whose problems are tried."""


def rrdb(height: int, width: int, blocks: int = RRDB_BLOCKS) -> list[Layer]:
    """What RRDBNet x4 launches for a picture of `height` x `width`, whole."""
    walk = _Walk(height, width)
    walk.layer("conv_first", COLOURS, CHANNELS)
    for block in range(blocks):
        for dense in (1, 2, 3):
            name = f"body.{block}.rdb{dense}"
            for number in range(4):
                taken = CHANNELS + number * GROWTH
                walk.layer(f"{name}.conv{number + 1}", taken, GROWTH, "leaky relu")
            walk.layer(f"{name}.conv5", CHANNELS + 4 * GROWTH, CHANNELS, shortcut=True)
    walk.layer("conv_body", CHANNELS, CHANNELS, shortcut=True)
    for number in (1, 2):
        walk.layer(f"conv_up{number}", CHANNELS, CHANNELS, "leaky relu", "upsample")
    walk.layer("conv_hr", CHANNELS, CHANNELS, "leaky relu")
    walk.layer("conv_last", CHANNELS, COLOURS)
    return walk.layers


def compact(height: int, width: int, layers: int = COMPACT_LAYERS) -> list[Layer]:
    """What SRVGGNetCompact x4 launches for a picture of `height` x `width`, whole."""
    walk = _Walk(height, width)
    walk.layer("body.0", COLOURS, CHANNELS, "prelu")
    for number in range(layers):
        walk.layer(f"body.{2 * number + 2}", CHANNELS, CHANNELS, "prelu")
    walk.layer(f"body.{2 * layers + 2}", CHANNELS, COLOURS * SCALE**2)
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
    """What both ask, each class once."""
    return list({(op.name, op.test_problems(p)): (op, p) for op, p in _asked()}.values())


def _asked() -> Iterator[tuple[Op[Any, Any], Any]]:
    for layer in (*rrdb(SIDE, SIDE, 1), *compact(SIDE, SIDE, 1)):
        assert isinstance(layer.problem, ConvProblem)
        yield CONVS[layer.problem.kind], layer.problem
