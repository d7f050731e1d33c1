"""The transformers of Stable Diffusion 3 and 3.5 medium, by their widths alone; no torch.

Layers are those that lib_rocm_sd/dit launches. A test holds them against what it asks for in
diffusers' own models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.catalog.unet import BATCH, DTYPE, FACTOR, Layer
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Op, Work
from lib_rocm_sd.ops.layer_norm.heads import HeadsProblem
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedProblem
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM_MODULATED, RMS_NORM_HEADS
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem

PATCH = 2
"""Pixels of a latent's side that make a token."""
WORDS, FEW_WORDS = 333, 154
"""Tokens of a prompt: 77 of CLIP and 256 of T5, or as many of both."""


@dataclass(frozen=True)
class Transformer:
    """`blocks`: of two streams, of which the last makes no more of the prompt's. `alone`: so many
    of them attend to the picture by itself, too. `normed`: queries and keys have an RMSNorm.
    """

    name: str
    channels: int
    heads: int
    blocks: int
    alone: int = 0
    normed: bool = False


SD3 = Transformer("SD3", 1536, 24, 24)
SD35 = Transformer("SD3.5 medium", 1536, 24, 24, 13, True)


def step(
    model: Transformer, width: int, height: int, batch: int = BATCH, words: int = WORDS
) -> tuple[Layer, ...]:
    """All layers of the blocks for a picture of `width` x `height` pixels, in order. ValueError for
    a size without whole tokens.
    """
    side = FACTOR * PATCH
    if width % side or height % side or not width or not height:
        raise ValueError(f"{width}x{height} is no multiple of {side} for {model.name}")
    tokens = width * height // side**2
    walk = _Walk(model, f"{model.name} {width}x{height}", batch, tokens, words)
    for number in range(model.blocks):
        walk.block(number < model.alone, number == model.blocks - 1)
    return tuple(walk.layers)


class _Walk:
    def __init__(self, model: Transformer, title: str, batch: int, tokens: int, words: int) -> None:
        self.model, self.title = model, title
        self.batch, self.tokens, self.words = batch, tokens, words
        self.layers: list[Layer] = []

    def block(self, alone: bool, ends: bool) -> None:
        model, tokens, words = self.model, self.tokens, self.words
        rows = ((9 if alone else 6) * model.channels, (2 if ends else 6) * model.channels)
        self.linear("modulation", 1, model.channels, rows)
        self.projected("picture", tokens)
        self.projected("prompt", words)
        self.attended(tokens, words)
        if alone:
            self.projected("picture alone", tokens)
            self.attended(tokens, 0)
            self.linear("picture alone, out", tokens)
        if not ends:
            self.linear("prompt, out", words)
        self.linear("picture, out", tokens)
        self.fed("picture", tokens)
        if not ends:
            self.fed("prompt", words)

    def add(self, problem: AttentionProblem | HeadsProblem | ModulatedProblem) -> None:
        self.layers.append(Layer(problem))

    def projected(self, name: str, tokens: int) -> None:
        self.norm(tokens, False)
        self.linear(f"{name}, q k v", tokens, columns=(self.model.channels,) * 3)

    def attended(self, tokens: int, words: int) -> None:
        model, both = self.model, tokens + words
        head_dim = model.channels // model.heads
        normed = (model.normed, model.normed, *(model.normed and words > 0,) * 2)
        if words or model.normed:
            self.add(HeadsProblem(self.batch, tokens, words, model.heads, head_dim, DTYPE, normed))
        self.add(AttentionProblem(self.batch, model.heads, both, both, head_dim, DTYPE))

    def fed(self, name: str, tokens: int) -> None:
        self.norm(tokens, True)
        wide = 4 * self.model.channels
        self.linear(f"{name}, feed-forward in", tokens, columns=(wide,))
        self.linear(f"{name}, feed-forward out", tokens, wide)

    def norm(self, tokens: int, added: bool) -> None:
        self.add(ModulatedProblem((self.batch, tokens, self.model.channels), DTYPE, added, DTYPE))

    def linear(self, name: str, tokens: int, k: int = 0, columns: tuple[int, ...] = ()) -> None:
        channels = self.model.channels
        problem = LinearProblem(self.batch * tokens, k or channels, columns or (channels,), DTYPE)
        self.layers.append(Layer(problem, f"{self.title}, {name}"))


MODELS = (SD3, SD35)
SIDE = 1024
"""Rows and columns of the picture whose problems are tried: other sizes launch the same kernels."""
_OPS: dict[type, Op[Any, Any]] = {
    LinearProblem: LINEAR,
    ModulatedProblem: LAYER_NORM_MODULATED,
    HeadsProblem: RMS_NORM_HEADS,
}


def work() -> Work:
    """What the blocks ask, each once; attention's are attention's own."""
    steps = (
        step(model, SIDE, SIDE, words=words) for model in MODELS for words in (WORDS, FEW_WORDS)
    )
    problems = dict.fromkeys(layer.problem for layers in steps for layer in layers)
    return [(_OPS[type(each)], each) for each in problems if type(each) in _OPS]
