"""What a VAE's encoder or decoder does, as a flat list of steps over numbered images.

Image 0 is the input; step i reads image i and makes image i + 1. A residual step also adds image
i - 1, the one that its block began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Rows = tuple[int, int]
"""First row and the one after the last."""


@dataclass(frozen=True, eq=False)
class ConvStep:
    """A 3x3 convolution of a kind of ops.conv.KINDS.

    `norm`: GroupNorm, then SiLU, while the input is read. `rms`: RMSNorm of each pixel, then SiLU,
    before it. `residual`: image i - 1 is added, through the 1x1 convolution `shortcut` where there
    is one. Of a convolution over time the last tap sees the only frame, the others zeros.
    """

    name: str
    kind: str
    conv: nn.Conv2d | nn.Conv3d
    norm: nn.GroupNorm | None = None
    residual: bool = False
    shortcut: nn.Conv2d | nn.Conv3d | None = None
    rms: Any = None

    @property
    def in_channels(self) -> int:
        return self.conv.in_channels

    @property
    def out_channels(self) -> int:
        return self.conv.out_channels

    @property
    def leaves(self) -> tuple[nn.Module | None, ...]:
        """The modules whose parameters it uses."""
        return (self.norm, self.rms, self.conv, self.shortcut)

    def flops(self, rows: int, columns: int) -> int:
        """Multiplications and additions for this many rows and columns of output."""
        taps = 4 if self.kind == "upsample" else 9
        extra = self.shortcut.in_channels if self.shortcut is not None else 0
        return 2 * rows * columns * self.out_channels * (taps * self.in_channels + extra)


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """x + out(attention(q(n), k(n), v(n))) with n = norm(x), over all pixels of the image.

    `rms` in the place of `norm`: RMSNorm of each pixel. q, k and v may be one layer that makes all.
    """

    name: str
    norm: nn.GroupNorm | None
    q: nn.Module
    k: nn.Module
    v: nn.Module
    out: nn.Module
    heads: int = 1
    rms: Any = None
    residual = False

    @property
    def in_channels(self) -> int:
        return self.rms.gamma.numel() if self.norm is None else self.norm.num_channels

    @property
    def out_channels(self) -> int:
        return self.in_channels

    @property
    def leaves(self) -> tuple[nn.Module | None, ...]:
        """The modules whose parameters it uses."""
        return (self.norm, self.rms, self.q, self.k, self.v, self.out)

    @property
    def head_dim(self) -> int:
        """As attention is asked: zeros fill up to 512 what the kernel has no form for."""
        own = self.in_channels // self.heads
        return 512 if self.heads == 1 and 256 < own < 512 else own

    def flops(self, rows: int, columns: int) -> int:
        """Multiplications and additions for a whole image."""
        pixels, channels = rows * columns, self.in_channels
        return 8 * pixels * channels * channels + 4 * pixels * pixels * channels


Step = ConvStep | AttentionStep


@dataclass(frozen=True, eq=False)
class Recipe:
    """What was read of a module: its steps, or the reasons why there are none. `is_over_time`: it
    takes frames, (N, C, T, H, W), of which we make single ones.
    """

    role: str
    steps: tuple[Step, ...]
    reasons: tuple[str, ...] = ()
    is_over_time: bool = False

    @property
    def in_channels(self) -> int:
        return self.steps[0].in_channels

    @property
    def out_channels(self) -> int:
        return self.steps[-1].out_channels

    @property
    def leaves(self) -> list[nn.Module]:
        """The modules whose parameters its steps use."""
        return [leaf for step in self.steps for leaf in step.leaves if leaf is not None]

    def layout(self) -> list[tuple[object, ...]]:
        """Equal for recipes that do the same with the same modules."""
        return [(s.name, s.leaves, s.residual, getattr(s, "kind", s.leaves)) for s in self.steps]


_readers: list[Callable[[nn.Module], Recipe]] = []


def register(reader: Callable[[nn.Module], Recipe]) -> None:
    """Let `reader` read modules: hosts/read does so when it is imported."""
    _readers[:] = [reader]


def read(module: nn.Module) -> Recipe:
    """What a host's Decoder or Encoder does. RuntimeError where nobody can read one."""
    if not _readers:
        raise RuntimeError("no VAE can be read: lib_rocm_sd.hosts.read was not imported")
    return _readers[0](module)


def needed_rows(kind: str, rows: Rows, height: int) -> Rows:
    """The input rows, of `height`, that output `rows` depend on."""
    first, last = rows
    if kind == "upsample":
        first, last = first // 2, (last + 1) // 2
    if kind == "3x3 stride 2":
        return 2 * first, min(2 * last + 1, height)
    return max(first - 1, 0), min(last + 1, height)


def made_rows(kind: str, rows: Rows) -> Rows:
    """The output rows that are made where `rows` are wanted: upsampling makes them in pairs."""
    if kind == "upsample":
        return rows[0] // 2 * 2, (rows[1] + 1) // 2 * 2
    return rows


def rows_above(kind: str, made: Rows, source: Rows) -> int:
    """Rows of `source` before the one at which the first of `made` lies."""
    if kind == "3x3 stride 2":
        return 0
    return (made[0] // 2 if kind == "upsample" else made[0]) - source[0]
