"""Attention within windows, as Swin's blocks have it, of channels-last images.

A window is 64 queries and keys, and windows are the batch of one call of attention. Its pixels must
lie one after the other for that, so all pixels are gathered into the order of windows; the blocks'
other layers do not ask for any order. Unshifted and shifted blocks alternate, so each block costs
one gather, a read and a write of the image, and the step one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.functional import attention, layer_norm, linear
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.upscaler.steps import Norm, NormStep, WindowBlock, WindowStep, padded
from lib_rocm_sd.vae.steps import Rows

if TYPE_CHECKING:
    from lib_rocm_sd.upscaler.trace import Action, Chain, Trace

MASKED = -100.0
"""What Swin adds where a query and a key are neighbours only since the picture was rolled."""
_INDEX_BYTES = 64
"""A pixel's places in two orders, their inverses and what makes them, 8 bytes each."""


@dataclass(frozen=True, eq=False)
class ReadyNorm:
    """A LayerNorm's gamma and beta (C), in float32 or wider."""

    gamma: torch.Tensor
    beta: torch.Tensor | None
    eps: float

    @classmethod
    def of(cls, norm: Norm, dtype: torch.dtype) -> ReadyNorm:
        wide, beta = torch.promote_types(dtype, torch.float32), norm.layer.bias
        made = None if beta is None else beta.detach().to(wide)
        return cls(norm.layer.weight.detach().to(wide), made, norm.eps)

    def __call__(self, x: torch.Tensor, session: Session) -> torch.Tensor:
        """x (.., C padded) normalised over C channels; the rest are zeros."""
        channels = self.gamma.shape[0]
        y = layer_norm(x[..., :channels], self.gamma, self.beta, self.eps, session=session)
        assert isinstance(y, torch.Tensor)
        beyond = x.shape[-1] - channels
        return F.pad(y, (0, beyond)) if beyond else y


Layer = tuple[torch.Tensor, torch.Tensor]
"""Weight (columns, k) and bias (columns), each padded."""


@dataclass(frozen=True, eq=False)
class _ReadyBlock:
    """`biases`: (1, heads, queries, keys) for windows within the picture, then for those that were
    rolled in from its right edge, from its bottom, and from both.
    """

    block: WindowBlock
    norms: tuple[ReadyNorm, ReadyNorm]
    qkv: Layer
    proj: Layer
    fc1: Layer
    fc2: Layer
    biases: tuple[torch.Tensor, ...]

    def attended(self, rows: torch.Tensor, counts: list[int], session: Session) -> None:
        """Add attention to `rows` (pixels, C): `counts` windows have each of the biases."""
        block, queries = self.block, self.biases[0].shape[-1]
        qkv = linear(self.norms[0](rows, session), *self.qkv, session=session)
        qkv = qkv.view(-1, queries, 3, block.heads, qkv.shape[1] // (3 * block.heads))
        parts = rows.view(-1, queries, rows.shape[1]).split(counts)
        for part, of_part, bias in zip(parts, qkv.split(counts), self.biases, strict=True):
            if len(part):
                query, key, value = of_part.unbind(2)
                made = attention(query, key, value, bias, block.scale, session)
                linear(made, *self.proj, residual=part, out=part, session=session)

    def enlarged(self, rows: torch.Tensor, session: Session) -> None:
        """Add what the two layers after attention make of `rows` (pixels, C)."""
        hidden = F.gelu(linear(self.norms[1](rows, session), *self.fc1, session=session))
        linear(hidden, *self.fc2, residual=rows, out=rows, session=session)


@dataclass(frozen=True, eq=False)
class ReadyWindows:
    """A WindowStep with its weights."""

    window: int
    blocks: tuple[_ReadyBlock, ...]

    @classmethod
    def of(cls, step: WindowStep, dtype: torch.dtype) -> ReadyWindows:
        return cls(step.window, tuple(_ready(block, step.window, dtype) for block in step.blocks))

    def transformed(self, x: torch.Tensor, session: Session) -> torch.Tensor:
        """x (N, H, W, C) after all blocks; H and W are multiples of the window."""
        orders = {
            block.block.shift: _order(x.shape, self.window, block.block.shift, x.device)
            for block in self.blocks
        }
        back = {shift: _inverse(order) for shift, (order, _) in orders.items()}
        rows, at = x.reshape(-1, x.shape[3]), None
        for block in self.blocks:
            shift = block.block.shift
            (index, counts), before = orders[shift], at
            if before != shift:
                rows = rows.index_select(0, index if before is None else back[before][index])
            at = shift
            block.attended(rows, counts, session)
            block.enlarged(rows, session)
        return rows.index_select(0, back[at]).view(x.shape) if at is not None else x


def _order(
    shape: torch.Size, window: int, shift: int, device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    """The pixels of an image (N, H, W, C) window by window, and how many windows there are of each
    of a block's biases.
    """
    batch, height, width, _ = shape
    pixels = torch.arange(batch * height * width, device=device).view(batch, height, width)
    pixels = pixels.roll((-shift, -shift), (1, 2))
    tiles = pixels.unflatten(1, (-1, window)).unflatten(3, (-1, window)).transpose(2, 3)
    down, across = _inner(height, window, shift), _inner(width, window, shift)
    parts = (
        tiles[:, :down, :across],
        tiles[:, :down, across:],
        tiles[:, down:, :across],
        tiles[:, down:, across:],
    )
    return torch.cat([part.reshape(-1) for part in parts]), [p.numel() // window**2 for p in parts]


def _inner(side: int, window: int, shift: int) -> int:
    """Windows in a row, or above each other, within a picture before it is rolled."""
    return side // window - bool(shift)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _head(block: WindowBlock) -> int:
    """head_dim in memory, zeros beyond the block's own: our attention takes multiples of 8."""
    return padded(block.proj.in_features // block.heads)


def _ready(block: WindowBlock, window: int, dtype: torch.dtype) -> _ReadyBlock:
    norms = [ReadyNorm.of(norm, dtype) for norm in block.norms]
    channels, heads = block.proj.in_features, block.heads
    beyond = _head(block) - channels // heads
    weight = block.qkv.weight.detach().unflatten(0, (3 * heads, -1))
    weight = F.pad(weight, (0, 0, 0, beyond)).flatten(0, 1)
    bias: torch.Tensor | None = block.qkv.bias
    if bias is not None:
        bias = F.pad(bias.detach().unflatten(0, (3 * heads, -1)), (0, beyond)).flatten()
    mixed = F.pad(block.proj.weight.detach().unflatten(1, (heads, -1)), (0, beyond)).flatten(1)
    return _ReadyBlock(
        block,
        (norms[0], norms[1]),
        _layer(weight, bias, dtype),
        _layer(mixed, block.proj.bias, dtype),
        _layer(block.fc1.weight, block.fc1.bias, dtype),
        _layer(block.fc2.weight, block.fc2.bias, dtype),
        tuple(_biases(block, window, torch.promote_types(dtype, torch.float32))),
    )


def _layer(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Layer:
    """As `dtype`, both sides whole tiles."""
    made = F.pad(weight.detach(), (0, -weight.shape[1] % 16, 0, -weight.shape[0] % 16)).to(dtype)
    if bias is None:
        return made, made.new_zeros(made.shape[0])
    return made, F.pad(bias.detach(), (0, -weight.shape[0] % 16)).to(dtype)


def _biases(block: WindowBlock, window: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    table, index = (
        block.position.relative_position_bias_table,
        block.position.relative_position_index,
    )
    assert isinstance(table, torch.Tensor) and isinstance(index, torch.Tensor)
    bias = table.detach()[index].permute(2, 0, 1)[None].to(dtype)
    rolled = (torch.arange(window, device=bias.device) >= window - block.shift).to(dtype)
    for bottom, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
        side = (2 * bottom * rolled[:, None] + right * rolled).flatten()
        yield (bias + MASKED * (side[:, None] != side)).contiguous()


# What a step takes and asks for, known before it is run.


def work(chain: Chain, trace: Trace) -> dict[Any, Op[Any, Any]]:
    """The problems that norms and windows of a trace pose, each with its op."""
    made = dict[Any, Op[Any, Any]]()
    for action in trace.actions:
        step = chain.network.steps[action.image - 1]
        if action.source is not None and isinstance(step, (NormStep, WindowStep)):
            made |= _work_of(chain, step, action.source)
    return made


def _work_of(chain: Chain, step: NormStep | WindowStep, rows: Rows) -> dict[Any, Op[Any, Any]]:
    dtype, pixels = DTYPE_NAMES[chain.dtype], chain.pixels(step.image, rows)
    wide = DTYPE_NAMES[torch.promote_types(chain.dtype, torch.float32)]
    count, stored = chain.network.channels[step.image], chain.channels(step.image)
    norm = LayerNormProblem((pixels, count), dtype, False, wide)
    made: dict[Any, Op[Any, Any]] = {norm: LAYER_NORM}
    if isinstance(step, NormStep):
        return made
    height, width = rows[1] - rows[0], chain.width * chain.network.growth[step.image]
    added: dict[str, Any] = {"residual": True, "in_place": True}
    for block in step.blocks:
        head, heads, hidden = _head(block), block.heads, padded(block.fc1.out_features)
        down, across = (_inner(side, step.window, block.shift) for side in (height, width))
        queries, edge = step.window**2, bool(block.shift)
        made[LinearProblem(pixels, stored, (3 * heads * head,), dtype)] = LINEAR
        made[LinearProblem(pixels, stored, (hidden,), dtype)] = LINEAR
        made[LinearProblem(pixels, hidden, (stored,), dtype, **added)] = LINEAR
        for windows in (down * across, down * edge, edge * across, edge * edge):
            if windows:
                batch = chain.batch * windows
                asked = AttentionProblem(batch, heads, queries, queries, head, dtype, wide)
                made[asked] = ATTENTION
                mixed = LinearProblem(batch * queries, heads * head, (stored,), dtype, **added)
                made[mixed] = LINEAR
    return made


def workspace_bytes(chain: Chain, step: WindowStep, action: Action) -> int:
    """Bytes beside the image that an action reads and the one that it makes."""
    assert action.source is not None
    most, stored = 3.0, chain.channels(step.image)
    for block in step.blocks:
        hidden = padded(block.fc1.out_features) / stored
        mixed = block.heads * _head(block) / stored
        most = max(most, 1 + 4 * mixed, 2 + hidden, 1 + 2 * hidden)
    pixels = chain.pixels(step.image, action.source)
    return int(most * chain.image_bytes(step.image, action.source)) + _INDEX_BYTES * pixels
