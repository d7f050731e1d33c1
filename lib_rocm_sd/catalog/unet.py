"""The UNets of Stable Diffusion 1.5 and XL, by their widths alone; no torch.

Layers are those that the blocks of lib_rocm_sd/unet launch: what they fuse is one layer. A test
holds them against the modules of real UNets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Op, Work
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm import whole
from lib_rocm_sd.ops.group_norm.op import FINALIZE, GROUP_NORM_SILU, NORM
from lib_rocm_sd.ops.group_norm.problem import FinalizeProblem, GroupNormProblem, NormProblem
from lib_rocm_sd.ops.layer_norm.biased import BiasedProblem
from lib_rocm_sd.ops.layer_norm.heads import HeadsProblem
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM, LAYER_NORM_BIASED
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import MOST_WEIGHTS, LinearProblem, told

FACTOR = 8
"""Pixels of a picture per pixel of the image that a UNet is given."""
BATCH = 2
"""The prompt and the negative prompt."""
TOKENS = 77
MOST_PROMPT_BYTES = 64 << 20
"""Keys and values of a prompt for all blocks at once. Longer ones are made block by block."""
DTYPE = "float16"
GROUPS = 32
"""Groups of every GroupNorm in these UNets."""


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
class Join:
    """The host puts an image and one of the way down side by side: (batch, height, width, channels)
    in all.
    """

    batch: int
    height: int
    width: int
    channels: int


Problem = (
    ConvProblem
    | LinearProblem
    | AttentionProblem
    | GroupNormProblem
    | NormProblem
    | LayerNormProblem
    | HeadsProblem
    | Join
)


@dataclass(frozen=True)
class Layer:
    """What a step computes at once; `name` in tables. `pointwise`: the model has a 1x1 convolution.
    Two with the same problem are equal, whatever they are called.
    """

    problem: Problem
    name: str = field(default="", compare=False)
    pointwise: bool = field(default=False, compare=False)


def step(
    unet: Unet, width: int, height: int, batch: int = BATCH, tokens: int = TOKENS
) -> tuple[Layer, ...]:
    """All layers of a picture of `width` x `height` pixels, in order. ValueError for a size that
    cannot be halved as often as the UNet does.
    """
    whole_size = FACTOR << len(unet.channels) - 1
    if width % whole_size or height % whole_size or not width or not height:
        raise ValueError(f"{width}x{height} is no multiple of {whole_size} for {unet.name}")
    walk = _Walk(unet, width, height, batch, tokens)
    walk.down()
    walk.middle()
    walk.up()
    return (*embeddings(unet, batch), *prompts(unet, batch, tokens), *walk.layers)


class _Walk:
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
                self.add(Join(self.batch, *self.size, self.channels))
                self.residual(channels)
                self.transformer(level, self.unet.depths[level])
            if level:
                self.conv(channels, kind="upsample")
        self.add(self.norm())
        self.conv(self.unet.latent, norm=True)

    def add(self, problem: Problem) -> None:
        self.layers.append(Layer(problem))

    def conv(self, out: int, kind: str = "3x3", **fused: Any) -> None:
        sizes = (self.batch, *self.size, self.channels, out, DTYPE)
        problem = ConvProblem(kind, *sizes, in_rows=True, **fused)
        self.add(problem)
        self.size, self.channels = problem.out_size, out

    def residual(self, out: int) -> None:
        channels = self.channels
        shortcut = "identity" if channels == out else "conv"
        self.add(self.norm())
        self.conv(out, norm=True, statistics=True, embedding=True)
        self.conv(out, norm=True, shortcut=shortcut, shortcut_channels=channels)

    def norm(self) -> NormProblem:
        """Only scale and shift are made; the convolution that follows applies them."""
        return NormProblem(self.batch, self.channels, *self.size, DTYPE, True, GROUPS, DTYPE)

    def transformer(self, level: int, depth: int) -> None:
        if not depth:
            return
        pointwise, same = not self.unet.linear_projections, (self.channels,)
        image = (self.batch, self.channels, *self.size)
        self.add(GroupNormProblem(*image, DTYPE, True, False, GROUPS, DTYPE))
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
        self.add(AttentionProblem(self.batch, heads, queries, keys, head_dim, DTYPE))
        self.linear("attention out", (self.channels,), residual=True)

    def layer_norm(self) -> None:
        rows = self.batch * self.size[0] * self.size[1]
        self.add(LayerNormProblem((rows, self.channels), DTYPE, False, DTYPE))

    def linear(
        self,
        name: str,
        columns: tuple[int, ...],
        rows: int = 0,
        k: int = 0,
        pointwise: bool = False,
        **fused: bool,
    ) -> None:
        """Add a linear layer over the image's pixels, unless `rows` and `k` say otherwise; what is
        added to is written over.
        """
        height, width = self.size
        rows, k = rows or self.batch * height * width, k or self.channels
        title = f"{self.title}, {width}x{height}, {name}"
        in_place = fused.get("residual", False)
        problem = LinearProblem(rows, k, columns, DTYPE, in_place=in_place, **fused)
        self.layers.append(Layer(problem, title, pointwise))


def embeddings(unet: Unet, batch: int = BATCH, middle_last: bool = False) -> list[Layer]:
    """Linear layers of the time embedding, and of what residual blocks make of it, some in one
    launch.

    `middle_last`: among a UNet's modules the middle comes after the way up, as in diffusers.
    """
    whole_size = 4 * unet.channels[0]
    sizes: list[tuple[int, tuple[int, ...]]]
    sizes = [(unet.channels[0], (whole_size,)), (whole_size, (whole_size,))]
    if unet.pooled:
        sizes += [(unet.pooled, (whole_size,)), (whole_size, (whole_size,))]
    down = [c for c in unet.channels for _ in range(unet.residual_blocks)]
    up = [c for c in reversed(unet.channels) for _ in range(unet.residual_blocks + 1)]
    layers = _in_order(down, [unet.channels[-1]] * 2, up, middle_last)
    for at in range(0, len(layers), MOST_WEIGHTS):
        sizes.append((whole_size, layers[at : at + MOST_WEIGHTS]))
    return [
        Layer(
            LinearProblem(batch, k, columns, DTYPE),
            f"{unet.name}, time embedding {k} to {told(columns)}",
        )
        for k, columns in sizes
    ]


def prompts(
    unet: Unet, batch: int = BATCH, tokens: int = TOKENS, middle_last: bool = False
) -> list[Layer]:
    """Keys and values of the prompt for all transformer blocks, if by one launch."""
    rows = batch * tokens
    if not joint_prompt(unet, rows):
        return []
    columns = tuple(each for each in _transformer_blocks(unet, middle_last) for _ in ("k", "v"))
    problem = LinearProblem(rows, unet.context, columns, DTYPE, bias=False)
    return [Layer(problem, f"{unet.name}, k v of the text")]


def joint_prompt(unet: Unet, rows: int) -> bool:
    """Whether they are made by one launch."""
    columns = _transformer_blocks(unet)
    small = 4 * rows * sum(columns) <= MOST_PROMPT_BYTES
    return 2 < 2 * len(columns) <= MOST_WEIGHTS and small


def _transformer_blocks(unet: Unet, middle_last: bool = False) -> tuple[int, ...]:
    """Their channels, in the order of the modules."""
    levels = [*zip(unet.channels, unet.depths, strict=True)]
    down = [c for c, depth in levels for _ in range(unet.residual_blocks * depth)]
    up = [c for c, depth in levels[::-1] for _ in range((unet.residual_blocks + 1) * depth)]
    return _in_order(down, [unet.channels[-1]] * unet.middle, up, middle_last)


def _in_order(
    down: list[int], middle: list[int], up: list[int], middle_last: bool
) -> tuple[int, ...]:
    return (*down, *up, *middle) if middle_last else (*down, *middle, *up)


UNETS = (SD15, SDXL)
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


def problems(
    steps: Iterable[Iterable[Layer]] = STEPS, unets: Iterable[Unet] = UNETS
) -> list[Problem]:
    """The problems of all steps, each once, what is there most often first; and what diffusers has
    otherwise, in these UNets: a norm apart from the last convolution, residual blocks in another
    order.
    """
    count = Counter(layer.problem for layers in steps for layer in layers)
    convs = [p for p in count if isinstance(p, ConvProblem) and p.norm]
    last = [p for p in convs if not (p.embedding or p.shortcut_channels)]  # not a residual block's
    count.update([replace(p, norm=False) for p in last])
    for unet in unets:
        for layer in (*embeddings(unet, middle_last=True), *prompts(unet, middle_last=True)):
            count[layer.problem] += 1
    return [problem for problem, _ in count.most_common()]


def work(
    *lists: Iterable[Iterable[Layer]], arch: Arch | None = None, unets: Iterable[Unet] = UNETS
) -> Work:
    """What the blocks ask, each once: of one list of steps after the other, or of all usual sizes,
    what is asked most often first. Attention's are attention's own. `arch`: with what is asked on
    that GPU alone. `unets`: see `problems`.
    """
    unets = tuple(unets)
    each = (p for steps in lists or (STEPS, OTHER_STEPS) for p in problems(steps, unets))
    every = (asked for problem in each for asked in asked_by(problem, arch))
    return list({(op.name, problem): (op, problem) for op, problem in every}.values())


def asked_by(problem: Problem, arch: Arch | None = None) -> Iterator[tuple[Op[Any, Any], Any]]:
    """What is asked for one layer."""
    if isinstance(problem, LayerNormProblem):
        for added in (False, True):
            yield LAYER_NORM, replace(problem, added=added)
        for keeps in (False, True):
            yield LAYER_NORM_BIASED, BiasedProblem(problem.shape, DTYPE, False, DTYPE, keeps)
    elif isinstance(problem, LinearProblem):
        yield LINEAR, replace(problem, in_place=False)
        if problem.residual:  # what a library's product is added to, without its bias
            yield LINEAR, replace(problem, in_place=True, bias=False)
    elif isinstance(problem, GroupNormProblem):
        yield GROUP_NORM_SILU, problem
    elif isinstance(problem, NormProblem):
        yield NORM, problem
    elif isinstance(problem, ConvProblem):
        yield CONVS[problem.kind], problem
        if problem.statistics:  # of which the variant makes as many parts as it likes
            sizes = (problem.batch, problem.out_size[0], problem.out_channels)
            yield FINALIZE, FinalizeProblem(*sizes, GROUPS, affine=DTYPE)
        if arch is not None and arch.has_fast_libraries and problem.norm:
            yield from _by_library(problem, arch)


def _by_library(p: ConvProblem, arch: Arch) -> Iterator[tuple[Op[Any, Any], Any]]:
    """What a residual block asks for where a library convolves: see compute.is_librarys."""
    height, width = p.out_size
    if not whole.configs(arch, p.in_channels, height * width, GROUPS, 8):
        return
    yield CONVS[p.kind], replace(p, norm=False, statistics=False, embedding=False)
    sizes = (height, width, DTYPE, True, True, GROUPS, DTYPE)
    if p.embedding:  # the block's first: a norm before it, one after it
        yield GROUP_NORM_SILU, GroupNormProblem(p.batch, p.in_channels, *sizes)
        if whole.configs(arch, p.out_channels, height * width, GROUPS, 8):
            second = GroupNormProblem(p.batch, p.out_channels, *sizes, added=True)
            yield GROUP_NORM_SILU, second
