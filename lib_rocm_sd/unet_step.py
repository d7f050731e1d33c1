"""What one step of a UNet of Stable Diffusion computes, by the UNet's widths alone. Needs no torch.

Layers are those that the blocks of lib_rocm_sd/unet launch: what they fuse is one layer. Kernels
that are compiled ahead, estimates and benchmarks read this. A test holds it against the modules of
real UNets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

FACTOR = 8
"""Pixels of a picture per pixel of the image that a UNet is given."""
BATCH = 2
"""The prompt and the negative prompt."""
TOKENS = 77
MOST_TOLD = 3
MOST_WEIGHTS = 144
"""On one input, in one launch of linear.hip."""
MOST_PROMPT_BYTES = 64 << 20
"""Keys and values of a prompt for all blocks at once. Longer ones are made block by block."""


@dataclass(frozen=True)
class Unet:
    """By level, the largest image first: channels, transformer blocks after each residual block,
    heads. `middle`: transformer blocks. `context`: values of a token. `pooled`: of what is added to
    the time embedding, 0 where nothing is.
    """

    name: str
    channels: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    middle: int
    context: int
    pooled: int = 0
    linear_projections: bool = False
    residual_blocks: int = 2
    latent: int = 4


SD15 = Unet("SD1.5", (320, 640, 1280, 1280), (1, 1, 1, 0), (8, 8, 8, 8), 1, 768)
SDXL = Unet("SDXL", (320, 640, 1280), (0, 2, 10), (5, 10, 20), 10, 2048, 2816, True)


@dataclass(frozen=True)
class Conv:
    """A 3x3 convolution of (batch, height, width, in_channels); its kind, and what is fused in it,
    as ConvProblem has them.
    """

    batch: int
    height: int
    width: int
    in_channels: int
    out_channels: int
    kind: str = "3x3"
    norm: bool = False
    shortcut: str = "none"
    shortcut_channels: int = 0
    statistics: bool = False
    embedding: bool = False

    @property
    def out_size(self) -> tuple[int, int]:
        """Rows and columns of the output."""
        if self.kind == "upsample":
            return 2 * self.height, 2 * self.width
        step = 2 if "stride 2" in self.kind else 1
        return -(-self.height // step), -(-self.width // step)

    @property
    def in_values(self) -> int:
        """Number of values in the input."""
        return self.batch * self.height * self.width * self.in_channels

    @property
    def out_values(self) -> int:
        """Number of values in the output."""
        rows, columns = self.out_size
        return self.batch * rows * columns * self.out_channels

    @property
    def flops(self) -> int:
        """FLOPs of the direct convolution, on the enlarged image where it upsamples."""
        extra = self.shortcut_channels if self.shortcut == "conv" else 0
        return 2 * self.out_values * (9 * self.in_channels + extra)

    def __str__(self) -> str:
        size = f"{self.in_channels} -> {self.out_channels}, {self.height}x{self.width}"
        extra = {"none": "", "identity": " + shortcut", "conv": f" + 1x1 {self.shortcut_channels}"}
        return f"{self.kind} {size}{extra[self.shortcut]}"


@dataclass(frozen=True)
class Linear:
    """(rows, k) by weights that make `columns` each; `gate`: GEGLU, by a weight of twice as many
    rows. `residual`: what comes out is added to another tensor. `pointwise`: the model has a 1x1
    convolution. Two with the same figures are equal, whatever they are called.
    """

    name: str = field(compare=False)
    rows: int
    k: int
    columns: tuple[int, ...]
    bias: bool = True
    residual: bool = False
    gate: bool = False
    pointwise: bool = field(default=False, compare=False)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.k * sum(self.columns) * (1 + self.gate)

    def __str__(self) -> str:
        made = told(self.columns)
        return f"linear {self.rows} x {self.k} -> {made}{' GEGLU' * self.gate}"


@dataclass(frozen=True)
class Attention:
    """Queries and keys of each head of each image; no mask."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    head_dim: int

    @property
    def flops(self) -> int:
        """FLOPs of the two products."""
        return 4 * self.batch * self.heads * self.seq_q * self.seq_k * self.head_dim

    def __str__(self) -> str:
        size = f"{self.seq_q} x {self.seq_k}, {self.batch}x{self.heads} heads of {self.head_dim}"
        return f"attention {size}"


@dataclass(frozen=True)
class GroupNorm:
    """GroupNorm of (batch, height, width, channels). Unless `applied`, only its scale and shift are
    made, and the convolution that follows applies them.
    """

    batch: int
    height: int
    width: int
    channels: int
    applied: bool

    @property
    def values(self) -> int:
        """Number of values in the image."""
        return self.batch * self.height * self.width * self.channels

    def __str__(self) -> str:
        what = "" if self.applied else " statistics"
        return f"group norm{what} {self.channels}, {self.height}x{self.width}"


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm of (rows, channels)."""

    rows: int
    channels: int

    @property
    def values(self) -> int:
        """Number of values in all tokens."""
        return self.rows * self.channels

    def __str__(self) -> str:
        return f"layer norm {self.rows} x {self.channels}"


@dataclass(frozen=True)
class Join:
    """The host puts an image and one of the way down side by side: (batch, height, width, channels)
    in all.
    """

    batch: int
    height: int
    width: int
    channels: int

    @property
    def values(self) -> int:
        """Number of values in both together."""
        return self.batch * self.height * self.width * self.channels

    def __str__(self) -> str:
        return f"concatenation {self.channels}, {self.height}x{self.width}"


Layer = Conv | Linear | Attention | GroupNorm | LayerNorm | Join


def step(
    unet: Unet, width: int, height: int, batch: int = BATCH, tokens: int = TOKENS
) -> tuple[Layer, ...]:
    """All layers of a picture of `width` x `height` pixels, in order. ValueError for a size that
    cannot be halved as often as the UNet does.
    """
    whole = FACTOR << len(unet.channels) - 1
    if width % whole or height % whole or not width or not height:
        raise ValueError(f"{width}x{height} is no multiple of {whole} for {unet.name}")
    made = _Maker(unet, width, height, batch, tokens)
    made.down()
    made.middle()
    made.up()
    return (*embeddings(unet, batch), *prompts(unet, batch, tokens), *made.layers)


class _Maker:
    """`size` and `channels` are those of the image at hand; `kept`: channels of those that the way
    up takes again.
    """

    def __init__(self, unet: Unet, width: int, height: int, batch: int, tokens: int) -> None:
        self.unet, self.batch, self.tokens = unet, batch, tokens
        self.size = (height // FACTOR, width // FACTOR)
        self.title = f"{unet.name} {width}x{height}"
        self.channels = unet.latent
        self.kept: list[int] = []
        self.layers: list[Layer] = []

    def down(self) -> None:
        self.conv(self.unet.channels[0])
        self.kept.append(self.channels)
        last = len(self.unet.channels) - 1
        for level, channels in enumerate(self.unet.channels):
            for _ in range(self.unet.residual_blocks):
                self.residual(channels)
                self.transformer(level, self.unet.depths[level])
                self.kept.append(self.channels)
            if level < last:
                self.conv(channels, kind="3x3 stride 2 padded")
                self.kept.append(self.channels)

    def middle(self) -> None:
        level = len(self.unet.channels) - 1
        self.residual(self.channels)
        self.transformer(level, self.unet.middle)
        self.residual(self.channels)

    def up(self) -> None:
        for level, channels in reversed(list(enumerate(self.unet.channels))):
            for _ in range(self.unet.residual_blocks + 1):
                self.channels += self.kept.pop()
                self.layers.append(Join(self.batch, *self.size, self.channels))
                self.residual(channels)
                self.transformer(level, self.unet.depths[level])
            if level:
                self.conv(channels, kind="upsample")
        self.group_norm(applied=False)
        self.conv(self.unet.latent, norm=True)

    def conv(self, out: int, **fused: bool | int | str) -> None:
        made = Conv(self.batch, *self.size, self.channels, out, **fused)  # type: ignore[arg-type]
        self.layers.append(made)
        self.size, self.channels = made.out_size, out

    def residual(self, out: int) -> None:
        taken = self.channels
        shortcut = "identity" if taken == out else "conv"
        self.group_norm(applied=False)
        self.conv(out, norm=True, statistics=True, embedding=True)
        self.conv(out, norm=True, shortcut=shortcut, shortcut_channels=taken)

    def group_norm(self, applied: bool) -> None:
        self.layers.append(GroupNorm(self.batch, *self.size, self.channels, applied))

    def transformer(self, level: int, depth: int) -> None:
        if not depth:
            return
        pointwise, same = not self.unet.linear_projections, (self.channels,)
        self.group_norm(applied=True)
        self.linear("projection in", same, pointwise=pointwise)
        for _ in range(depth):
            self.block(self.unet.heads[level])
        self.linear("projection out", same, residual=True, pointwise=pointwise)

    def block(self, heads: int) -> None:
        same, text = (self.channels,), self.batch * self.tokens
        pixels = self.size[0] * self.size[1]
        self.layer_norm()
        self.linear("q k v", same * 3, bias=False)
        self.attention(heads, pixels, pixels)
        self.layer_norm()
        self.linear("q of the text", same, bias=False)
        if not joint_prompt(self.unet, text):
            self.linear("k v of the text", same * 2, text, self.unet.context, bias=False)
        self.attention(heads, pixels, self.tokens)
        self.layer_norm()
        self.linear("GEGLU", (4 * self.channels,), gate=True)
        self.linear("feed-forward out", same, k=4 * self.channels, residual=True)

    def attention(self, heads: int, queries: int, keys: int) -> None:
        """With the layer that makes of it what is added: there by our kernel, and where a library
        computes it by the LayerNorm that follows (unet/compute.py).
        """
        head_dim = self.channels // heads
        self.layers.append(Attention(self.batch, heads, queries, keys, head_dim))
        self.linear("attention out", (self.channels,), residual=True)

    def layer_norm(self) -> None:
        self.layers.append(LayerNorm(self.batch * self.size[0] * self.size[1], self.channels))

    def linear(
        self, name: str, columns: tuple[int, ...], rows: int = 0, k: int = 0, **fused: bool
    ) -> None:
        """Add a linear layer over the image's pixels, unless `rows` and `k` say otherwise."""
        height, width = self.size
        rows, k = rows or self.batch * height * width, k or self.channels
        title = f"{self.title}, {width}x{height}, {name}"
        self.layers.append(Linear(title, rows, k, columns, **fused))


def embeddings(unet: Unet, batch: int = BATCH, middle_last: bool = False) -> list[Linear]:
    """Linear layers of the time embedding, and of what residual blocks make of it, some in one
    launch.

    `middle_last`: among a UNet's modules the middle comes after the way up, as in diffusers.
    """
    whole = 4 * unet.channels[0]
    sizes: list[tuple[int, tuple[int, ...]]] = [(unet.channels[0], (whole,)), (whole, (whole,))]
    if unet.pooled:
        sizes += [(unet.pooled, (whole,)), (whole, (whole,))]
    timed = _residual_blocks(unet, middle_last)
    for at in range(0, len(timed), MOST_WEIGHTS):
        sizes.append((whole, timed[at : at + MOST_WEIGHTS]))
    return [
        Linear(f"{unet.name}, time embedding {k} to {told(made)}", batch, k, made)
        for k, made in sizes
    ]


def prompts(
    unet: Unet, batch: int = BATCH, tokens: int = TOKENS, middle_last: bool = False
) -> list[Linear]:
    """Keys and values of the prompt for all transformer blocks, if by one launch."""
    rows = batch * tokens
    if not joint_prompt(unet, rows):
        return []
    made = tuple(each for each in _transformer_blocks(unet, middle_last) for _ in ("k", "v"))
    return [Linear(f"{unet.name}, k v of the text", rows, unet.context, made, bias=False)]


def joint_prompt(unet: Unet, rows: int) -> bool:
    """Whether they are made by one launch."""
    made = _transformer_blocks(unet)
    small = 4 * rows * sum(made) <= MOST_PROMPT_BYTES
    return 2 < 2 * len(made) <= MOST_WEIGHTS and small


def _transformer_blocks(unet: Unet, middle_last: bool = False) -> tuple[int, ...]:
    """Their channels, in the order of the modules."""
    levels = [*zip(unet.channels, unet.depths, strict=True)]
    down = [c for c, depth in levels for _ in range(unet.residual_blocks * depth)]
    up = [c for c, depth in levels[::-1] for _ in range((unet.residual_blocks + 1) * depth)]
    middle = [unet.channels[-1]] * unet.middle
    return (*down, *up, *middle) if middle_last else (*down, *middle, *up)


def _residual_blocks(unet: Unet, middle_last: bool) -> tuple[int, ...]:
    """Their channels, in the order of the modules."""
    down = [c for c in unet.channels for _ in range(unet.residual_blocks)]
    up = [c for c in reversed(unet.channels) for _ in range(unet.residual_blocks + 1)]
    middle = [unet.channels[-1]] * 2
    return (*down, *up, *middle) if middle_last else (*down, *middle, *up)


def told(columns: Iterable[int]) -> str:
    """Columns side by side; more than three alike in a row are counted."""
    parts = []
    for count, alike in groupby(columns):
        times = len([*alike])
        parts += [f"{times} x {count}"] if times > MOST_TOLD else [str(count)] * times
    return "+".join(parts)


STEPS = (step(SD15, 512, 512), step(SDXL, 1024, 1024))
"""What most users of Stable Diffusion have computed."""
OTHER_STEPS = (
    step(SD15, 384, 512, batch=1),
    step(SD15, 512, 640, batch=4),
    step(SD15, 512, 512, batch=3),
    step(SD15, 512, 896),
)
"""Steps in which some layers take other kernels. With these, all usual sizes and batches of both
UNets need only kernels that are listed: a test checks that.
"""
