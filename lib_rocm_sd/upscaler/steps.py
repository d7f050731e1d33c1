"""What an upscaler's network does, as a flat list of steps over numbered images.

Image 0 is the picture as the network reads it; step i makes image i + 1. Images are channels-last
and have `padded` channels in memory, the rest zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

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
    before the `residuals`, up to two, which are added one after the other. A 1x1 has neither.
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
    def growth(self) -> int:
        """Rows of output for a row of input."""
        return 2 if self.kind == "upsample" else 1

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
class EnlargeStep:
    """Each pixel of an image `growth` times in both directions."""

    name: str
    image: int
    growth: int

    @property
    def uses(self) -> tuple[int, ...]:
        return (self.image,)

    def needs(self, rows: Rows, height: int) -> Rows:
        return rows[0] // self.growth, -(-rows[1] // self.growth)

    def makes(self, rows: Rows) -> Rows:
        first, last = self.needs(rows, 0)
        return first * self.growth, last * self.growth

    def flops(self, pixels: int) -> int:
        return 0


Step = ConvStep | EnlargeStep


@dataclass(frozen=True)
class Entry:
    """How a picture (N, C, H, W) becomes image 0: (x - mean) * span in float32, `unshuffle` x
    `unshuffle` pixels to one pixel's channels. `reflects`: to a multiple of that first.
    """

    channels: int
    unshuffle: int = 1
    reflects: bool = False
    mean: tuple[float, ...] = ()
    span: float = 1.0


@dataclass(frozen=True)
class Exit:
    """How the last image becomes a picture: `shuffle` x `shuffle` pixels from one pixel's channels,
    then, with `base`, the nearest pixel of what came in is added.
    """

    channels: int
    shuffle: int = 1
    base: bool = False


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
        convs = [step for step in self.steps if isinstance(step, ConvStep)]
        slopes = [step.slope for step in convs if isinstance(step.slope, nn.PReLU)]
        return [*(leaf for step in convs for leaf in step.layer.leaves), *slopes]

    @cached_property
    def channels(self) -> tuple[int, ...]:
        """Channels of each image, without padding."""
        counts = [self.entry.channels * self.entry.unshuffle**2]
        for step in self.steps:
            same = counts[step.uses[0]]
            counts.append(step.layer.out_channels if isinstance(step, ConvStep) else same)
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
        linear = all(step.activation not in ("silu", "gate") for step in convs)
        enters = all(isinstance(s, ConvStep) and s.uses == (0,) for s in self.steps if 0 in s.uses)
        leaves = bool(convs) and self.steps[-1] is convs[-1] and not convs[-1].residuals
        return linear and enters and leaves

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
