"""Upscalers of ESRGAN's family, and SwinIR, by their widths alone; no torch.

Each convolution has an epilogue: an activation, or a sum with what is added to it. 1x1 ones are
linear layers, and left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

from lib_rocm_sd.catalog.unet import Layer as OtherLayer
from lib_rocm_sd.catalog.vae import Layer, Walk
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Op, Work
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem

CHANNELS, GROWTH, RRDB_BLOCKS, COMPACT_LAYERS = 64, 32, 23, 32
"""ESRGAN's and Real-ESRGAN's RRDBNet x4; SRVGGNetCompact of realesr-general and animevideo."""
NARROW, SPAN_CHANNELS, SPAN_BLOCKS = 32, 48, 6
"""ESRGAN's light networks; SPAN."""
COMPACT_FEATURES = ((CHANNELS, "prelu"), (CHANNELS, "leaky relu"), (48, "prelu"), (24, "prelu"))
"""Channels and activations of compact networks; ReLU is a leaky one of slope 0."""
WINDOW, SWIN_BLOCKS, TAIL = 8, 6, 64
"""SwinIR's: pixels of a window's side, blocks of a group, channels behind the groups."""
SCALE, COLOURS = 4, 3
DTYPE, WIDE = "float16", "float32"
"""Values have the first, a norm's weights and what is added to scores the second."""
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
    dense blocks have two shortcuts more, one by a 1x1 convolution.
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
    """What SPAN launches for a picture of `height` x `width`, whole."""
    walk, channels = _Walk(height, width), SPAN_CHANNELS
    walk.layer("conv_1", COLOURS, channels)
    for block in range(1, SPAN_BLOCKS + 1):
        walk.layer(f"block_{block}.c1_r", channels, channels, "silu")
        walk.layer(f"block_{block}.c2_r", channels, channels, "silu")
        walk.layer(f"block_{block}.c3_r", channels, channels, "gate", shortcut=True)
    walk.layer("conv_2", channels, channels)
    walk.layer("upsampler.0", channels, COLOURS * scale**2)
    return walk.layers


def swinir(
    height: int, width: int, large: bool = False, groups: int = 0
) -> list[Layer | OtherLayer]:
    """What SwinIR x4 launches for a picture of whole windows, `height` x `width`, whole: medium
    with 6 groups and pixel shuffles, or `large` with 9, which end in three convolutions, and
    nearest neighbours. What is no convolution comes last.
    """
    walk, channels, heads = _Walk(height, width), *((240, 8) if large else (180, 6))
    walk.layer("conv_first", COLOURS, channels)
    walk.normed(channels)
    for group in range(groups or (9 if large else 6)):
        walk.windows(channels, heads)
        walk.ended(f"layers.{group}.conv", channels, large)
    walk.normed(channels)
    walk.ended("conv_after_body", channels, large)
    walk.layer("conv_before_upsample.0", channels, TAIL, "leaky relu")
    for number in (1, 2):
        if large:
            walk.layer(f"conv_up{number}", TAIL, TAIL, "leaky relu", "upsample")
        else:
            walk.layer(f"upsample.{2 * number - 2}", TAIL, 4 * TAIL)
            walk.size = (2 * walk.size[0], 2 * walk.size[1])
    if large:
        walk.layer("conv_hr", TAIL, TAIL, "leaky relu")
    walk.layer("conv_last", TAIL, COLOURS)
    return [*walk.layers, *walk.others]


class _Walk(Walk):
    def __init__(self, height: int, width: int) -> None:
        super().__init__(height, width)
        self.others: list[OtherLayer] = []

    def layer(
        self,
        name: str,
        taken: int,
        out: int,
        activation: str = "none",
        kind: str = "3x3",
        shortcut: bool = False,
    ) -> None:
        out = _padded(out)
        added: dict[str, Any] = {"shortcut": "identity", "shortcut_channels": out}
        how = {"epilogue": activation, **(added if shortcut else {})}
        self.conv(name, taken, out, kind, statistics=False, **how)

    def ended(self, name: str, channels: int, three: bool) -> None:
        """A group's end: a convolution, or three, of which the second is a 1x1 one."""
        taken = channels // 4 if three else channels
        if three:
            self.layer(f"{name}.0", channels, taken, "leaky relu")
        self.layer(f"{name}.4" if three else name, taken, channels, shortcut=True)

    def normed(self, channels: int) -> None:
        shape = (math.prod(self.size), channels)
        self.others.append(OtherLayer(LayerNormProblem(shape, DTYPE, False, WIDE)))

    def linear(self, pixels: int, k: int, columns: int, **added: bool) -> None:
        self.others.append(OtherLayer(LinearProblem(pixels, k, (columns,), DTYPE, **added)))

    def windows(self, channels: int, heads: int) -> None:
        """A group's blocks. Of a shifted one, windows at two edges have masks of their own."""
        pixels, stored, hidden = math.prod(self.size), _padded(channels), _padded(2 * channels)
        head, queries = _padded(channels // heads), WINDOW**2
        added = {"residual": True, "in_place": True}
        for block in range(SWIN_BLOCKS):
            edge = block % 2
            down, across = (side // WINDOW - edge for side in self.size)
            self.normed(channels)
            self.linear(pixels, stored, 3 * heads * head)
            for count in filter(None, (down * across, down * edge, edge * across, edge)):
                asked = AttentionProblem(count, heads, queries, queries, head, DTYPE, WIDE)
                self.others.append(OtherLayer(asked))
                self.linear(count * queries, heads * head, stored, **added)
            self.normed(channels)
            self.linear(pixels, stored, hidden)
            self.linear(pixels, hidden, stored, **added)


def _padded(channels: int) -> int:
    """As stored."""
    return -(-channels // 16) * 16


def work() -> Work:
    """What those of ESRGAN's family ask, each class once."""
    networks = [
        rrdb(SIDE, SIDE, 1),
        rrdb(SIDE, SIDE, 1, plus=True),
        rrdb(SIDE, SIDE, 1, NARROW),
        *(compact(SIDE, SIDE, 1, *kind, s) for kind in COMPACT_FEATURES for s in (SCALE, 2)),
        *(span(SIDE, SIDE, s) for s in (SCALE, 2)),
    ]
    return _classes(networks)


def swinir_work() -> Work:
    """What SwinIR asks, each class once."""
    return _classes(swinir(SIDE, SIDE, large, 1) for large in (False, True))


_OPS: dict[type, Op[Any, Any]] = {
    AttentionProblem: ATTENTION,
    LayerNormProblem: LAYER_NORM,
    LinearProblem: LINEAR,
}


def op_of(problem: Any) -> Op[Any, Any]:
    """Whose problem a layer's is."""
    return CONVS[problem.kind] if isinstance(problem, ConvProblem) else _OPS[type(problem)]


def _classes(networks: Iterable[Iterable[Layer | OtherLayer]]) -> Work:
    problems = (layer.problem for layer in chain.from_iterable(networks))
    asked = ((op_of(problem), problem) for problem in problems)
    return list({(op.name, op.test_problems(p)): (op, p) for op, p in asked}.values())
