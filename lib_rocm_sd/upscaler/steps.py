"""What an upscaler's network does, as a flat list of steps over numbered images.

Image 0 is the picture as the network reads it; step i makes image i + 1. Images are channels-last
and have `padded` channels in memory, the rest zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from lib_rocm_sd.vae.steps import Rows, made_rows, needed_rows

Slope = float | nn.PReLU
"""What a leaky ReLU multiplies negative values by, or where each channel's factor is learnt."""


def padded(channels: int) -> int:
    """Channels in memory, whole tiles of 16."""
    return -(-channels // 16) * 16


@dataclass(frozen=True)
class Layer:
    """A convolution's weight (Co, Ci, k, k) and bias (Co), which `tensors()` gives.

    `leaves`: the modules whose parameters these are made from.
    """

    leaves: tuple[nn.Module, ...]
    tensors: Callable[[], tuple[torch.Tensor, torch.Tensor | None]] = field(compare=False)
    in_channels: int
    out_channels: int


@dataclass(frozen=True)
class Residual:
    """y becomes scale * y + image."""

    image: int
    scale: float


@dataclass(frozen=True)
class ConvStep:
    """A convolution of the images `reads`, whose channels lie side by side.

    `kind`: 3x3, 1x1, or upsample: nearest x2, then 3x3. `activation`: one of conv's ACTIVATIONS,
    before the `residuals`, up to two, which are added one after the other. A 1x1 has no residuals,
    and no activation but a leaky ReLU.
    """

    name: str
    reads: tuple[int, ...]
    layer: Layer
    kind: str = "3x3"
    activation: str = "none"
    slope: Slope = 0.0
    residuals: tuple[Residual, ...] = ()

    @property
    def uses(self) -> tuple[int, ...]:
        return (*self.reads, *(residual.image for residual in self.residuals))

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters it uses."""
        slopes = (self.slope,) if isinstance(self.slope, nn.PReLU) else ()
        return (*self.layer.leaves, *slopes)

    @property
    def growth(self) -> int:
        """Rows of output for a row of input."""
        return 2 if self.kind == "upsample" else 1

    @property
    def halo(self) -> int:
        """Rows of input above and below that a row of output depends on."""
        return 0 if self.kind == "1x1" else 1

    def made_channels(self, taken: int) -> int:
        """Channels of the output for those of the first image that it uses."""
        return self.layer.out_channels

    def needs(self, rows: Rows, height: int) -> Rows:
        """The rows of `reads`, which have `height`, that output `rows` depend on."""
        return rows if self.kind == "1x1" else needed_rows(self.kind, rows, height)

    def makes(self, rows: Rows) -> Rows:
        """The rows that are made where `rows` are wanted."""
        return made_rows(self.kind, rows)

    def flops(self, pixels: int) -> int:
        """Multiplications and additions for so many pixels of output."""
        taps = {"3x3": 9, "1x1": 1, "upsample": 4}[self.kind]
        return 2 * pixels * taps * self.layer.in_channels * self.layer.out_channels


@dataclass(frozen=True)
class _OfOne:
    """A step that reads the same rows of one image, and makes as many."""

    name: str
    image: int

    growth: ClassVar[int] = 1
    halo: ClassVar[int] = 0
    leaves: ClassVar[tuple[nn.Module, ...]] = ()

    @property
    def uses(self) -> tuple[int, ...]:
        return (self.image,)

    def made_channels(self, taken: int) -> int:
        return taken

    def needs(self, rows: Rows, height: int) -> Rows:
        return rows

    def makes(self, rows: Rows) -> Rows:
        return rows

    def flops(self, pixels: int) -> int:
        return 0


@dataclass(frozen=True)
class EnlargeStep(_OfOne):
    """Each pixel of an image `growth` times in both directions; where it `shuffles`, these pixels
    are one pixel's channels, as in PixelShuffle.
    """

    growth: int  # type: ignore[misc]
    shuffles: bool = False

    def made_channels(self, taken: int) -> int:
        return taken // self.growth**2 if self.shuffles else taken

    def needs(self, rows: Rows, height: int) -> Rows:
        return rows[0] // self.growth, -(-rows[1] // self.growth)

    def makes(self, rows: Rows) -> Rows:
        first, last = self.needs(rows, 0)
        return first * self.growth, last * self.growth


@dataclass(frozen=True)
class Norm:
    """A LayerNorm over channels."""

    layer: nn.LayerNorm
    eps: float


@dataclass(frozen=True)
class NormStep(_OfOne):
    """A LayerNorm of each pixel's channels."""

    norm: Norm

    @property
    def leaves(self) -> tuple[nn.Module, ...]:  # type: ignore[override]
        return (self.norm.layer,)


@dataclass(frozen=True)
class WindowBlock:
    """Swin's block: x += proj(attention(norm(x))) within each window, x += fc2(gelu(fc1(norm(x)))).

    The picture is rolled by `shift` pixels up and left first. `position`: the module that has
    `relative_position_bias_table` (positions, heads) and `relative_position_index` (queries, keys).
    """

    shift: int
    heads: int
    scale: float
    norms: tuple[Norm, Norm]
    position: nn.Module
    qkv: nn.Linear
    proj: nn.Linear
    fc1: nn.Linear
    fc2: nn.Linear

    @property
    def leaves(self) -> tuple[nn.Module, ...]:
        linears = (self.qkv, self.proj, self.fc1, self.fc2)
        return (*(norm.layer for norm in self.norms), self.position, *linears)


@dataclass(frozen=True)
class WindowStep(_OfOne):
    """Blocks of attention within windows of `window` x `window` pixels, one after the other."""

    window: int
    blocks: tuple[WindowBlock, ...]

    @property
    def leaves(self) -> tuple[nn.Module, ...]:  # type: ignore[override]
        return tuple(leaf for block in self.blocks for leaf in block.leaves)

    @property
    def halo(self) -> int:  # type: ignore[override]
        far = 100 * self.window * len(self.blocks)
        return far - self.needs((far, far + self.window), 2 * far)[0]

    def needs(self, rows: Rows, height: int) -> Rows:
        """Whole windows. Beyond the picture's edges there is nothing: pixels that are rolled from
        one edge to the other are masked there.
        """
        first, last = rows
        for shift in (*(block.shift for block in reversed(self.blocks)), 0):
            first = max(first - (first - shift) % self.window, 0)
            last = min(last + (shift - last) % self.window, height)
        return first, last

    def flops(self, pixels: int) -> int:
        each = 0
        for block in self.blocks:
            channels = block.proj.in_features
            each += 4 * channels * channels + 2 * channels * block.fc1.out_features
            each += 2 * self.window**2 * channels
        return 2 * pixels * each


Step = ConvStep | EnlargeStep | NormStep | WindowStep


@dataclass(frozen=True)
class Entry:
    """How a picture (N, C, H, W) becomes image 0: (x - mean) * span in float32, `unshuffle` x
    `unshuffle` pixels to one pixel's channels. `reflects`: first to a multiple of that, or of
    `window`.
    """

    channels: int
    unshuffle: int = 1
    reflects: bool = False
    mean: tuple[float, ...] = ()
    span: float = 1.0
    window: int = 1

    @property
    def multiple(self) -> int:
        """The picture's sides are enlarged to whole multiples of this."""
        return math.lcm(self.unshuffle, self.window)


@dataclass(frozen=True)
class Exit:
    """How the last image becomes a picture: `shuffle` x `shuffle` pixels from one pixel's channels,
    then, with `base`, the nearest pixel of what came in is added; or, with a `mean`, it becomes
    x / span + mean in float32.
    """

    channels: int
    shuffle: int = 1
    base: bool = False
    mean: tuple[float, ...] = ()
    span: float = 1.0


@dataclass(frozen=True, eq=False)
class Network:
    """What was read of a module: its steps, or the `reasons` why there are none."""

    steps: tuple[Step, ...] = ()
    entry: Entry = Entry(0)
    exit: Exit = Exit(0)
    reasons: tuple[str, ...] = ()

    @cached_property
    def leaves(self) -> list[nn.Module]:
        """The modules whose parameters the steps use."""
        return [leaf for step in self.steps for leaf in step.leaves]

    @cached_property
    def channels(self) -> tuple[int, ...]:
        """Channels of each image, without padding."""
        counts = [self.entry.channels * self.entry.unshuffle**2]
        for step in self.steps:
            counts.append(step.made_channels(counts[step.uses[0]]))
        return tuple(counts)

    @cached_property
    def growth(self) -> tuple[int, ...]:
        """Rows of each image for a row of image 0."""
        factors = [1]
        for step in self.steps:
            factors.append(factors[step.uses[0]] * step.growth)
        return tuple(factors)

    @property
    def scale(self) -> int:
        """Sides of the result for one of the picture."""
        return self.growth[-1] * self.exit.shuffle // self.entry.unshuffle

    @cached_property
    def last_uses(self) -> dict[int, int]:
        """By image, the one whose step uses it last."""
        steps = enumerate(self.steps, 1)
        return {used: image for image, step in steps for used in step.uses}

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Images that lie side by side in one buffer, since a step reads them so."""
        several = {step.reads for step in self.steps if isinstance(step, ConvStep)}
        several = {reads for reads in several if len(reads) > 1}
        return tuple(
            reads
            for reads in several
            if not any(reads == other[: len(reads)] for other in several - {reads})
        )

    @property
    def is_homogeneous(self) -> bool:
        """True if all images between the first and the last can be multiplied by one factor, which
        the first convolutions put in and the last takes out.
        """
        convs = [step for step in self.steps if isinstance(step, ConvStep)]
        normed = any(isinstance(step, (NormStep, WindowStep)) for step in self.steps)
        linear = not normed and all(step.activation not in ("silu", "gate") for step in convs)
        enters = all(isinstance(s, ConvStep) and s.uses == (0,) for s in self.steps if 0 in s.uses)
        leaves = bool(convs) and self.steps[-1] is convs[-1] and not convs[-1].residuals
        return linear and enters and leaves

    @property
    def has_windows(self) -> bool:
        """Whether any step is attention in windows, which has kernels of its own."""
        return any(isinstance(step, WindowStep) for step in self.steps)

    @property
    def role(self) -> str:
        return "upscaler"

    @property
    def in_channels(self) -> int:
        """Channels of the picture."""
        return self.entry.channels

    def layout(self) -> list[object]:
        """Equal for networks that do the same with the same modules."""
        return [self.entry, self.exit, *self.steps]


_readers: list[Callable[[nn.Module], Network]] = []


def register(reader: Callable[[nn.Module], Network]) -> None:
    """Let `reader` read modules: hosts/read does so when it is imported."""
    _readers[:] = [reader]


def read(module: nn.Module) -> Network:
    """What a host's network does. RuntimeError where nobody can read one."""
    if not _readers:
        raise RuntimeError("no upscaler can be read: lib_rocm_sd.hosts.read was not imported")
    return _readers[0](module)
