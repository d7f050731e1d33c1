"""The parameters of a recipe's steps, ready to be multiplied; and whether they are still the same.

Images in memory between two steps may carry a factor, a power of two: convolutions that read a
normalised image have it in their weights, those that read an image as it is find it there, and a
GroupNorm takes it out again (its eps is scaled by the square), as an RMSNorm does. So fp16 holds
what would overflow.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lib_rocm_sd.engine.memory import version_of
from lib_rocm_sd.ops.conv.inputs import NextNorm
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.vae.steps import AttentionStep, ConvStep, Recipe, Step


class ReadyRms(NamedTuple):
    """An RMSNorm's gamma (C), and the least mean of a pixel's squares."""

    gamma: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class ReadyConv:
    """A ConvStep with its weights. `next_norm`: the GroupNorm that reads its output, if any."""

    step: ConvStep
    weights: ConvWeights
    next_norm: NextNorm | None
    rms: ReadyRms | None = None


@dataclass(frozen=True, eq=False)
class ReadyAttention:
    """An AttentionStep with weight (C, C) and bias (C) of q, k, v and out."""

    step: AttentionStep
    q: tuple[torch.Tensor, torch.Tensor | None]
    k: tuple[torch.Tensor, torch.Tensor | None]
    v: tuple[torch.Tensor, torch.Tensor | None]
    out: tuple[torch.Tensor, torch.Tensor | None]
    next_norm: NextNorm | None
    rms: ReadyRms | None = None


Ready = ReadyConv | ReadyAttention


@dataclass(frozen=True)
class Scales:
    """What images in memory are multiplied by, powers of two.

    `stream`: the images that blocks add to. `hidden`: those within a residual block. Input and
    output have 1.
    """

    stream: float = 1.0
    hidden: float = 1.0


def prepare(recipe: Recipe, scales: Scales) -> tuple[Ready, ...]:
    """The steps ready to run, the images between them multiplied by `scales`."""
    steps = recipe.steps
    factors = [scales.hidden if step.residual else scales.stream for step in steps]
    factors = [1.0, *factors[1:], 1.0]
    return tuple(_prepare(steps, index, factors) for index in range(len(steps)))


def _prepare(steps: Sequence[Step], index: int, factors: Sequence[float]) -> Ready:
    step, scale = steps[index], factors[index + 1]
    following = None if index == len(steps) - 1 else steps[index + 1].norm
    next_norm = None
    if following is not None:
        wide = torch.promote_types(following.weight.dtype, torch.float32)
        gamma, beta = (tensor.detach().to(wide) for tensor in (following.weight, following.bias))
        next_norm = NextNorm(gamma, beta, following.num_groups, following.eps * scale * scale)
    rms = None if step.rms is None else _rms(step.rms, factors[index])
    if isinstance(step, AttentionStep):
        q, k, v = (_matrix(layer, 1.0, 1.0) for layer in (step.q, step.k, step.v))
        if step.q is step.k:
            weights, biases = q[0].chunk(3), (None,) * 3 if q[1] is None else q[1].chunk(3)
            q, k, v = zip(weights, biases, strict=True)
        out = _matrix(step.out, scale, scale)
        more = step.head_dim - step.in_channels // step.heads
        if more:
            q, k, v = (_with_zeros(layer, more) for layer in (q, k, v))
            out = (F.pad(out[0], (0, more)), out[1])
        return ReadyAttention(step, q, k, v, out, next_norm, rms)
    before = factors[index] if step.norm is None and rms is None else 1.0
    through: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if step.shortcut is not None:
        through = _matrix(step.shortcut, scale / factors[index - 1], scale)
    weight, bias = _scaled(step.conv.weight, scale / before), _scaled(step.conv.bias, scale)
    assert weight is not None
    weight = weight[:, :, -1] if weight.ndim == 5 else weight
    return ReadyConv(step, ConvWeights(weight, bias, *through), next_norm, rms)


def _with_zeros(
    layer: tuple[torch.Tensor, torch.Tensor | None], more: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer that makes so many zeros more."""
    weight, bias = layer
    return F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))


def _rms(module: Any, scale: float) -> ReadyRms:
    """That of images multiplied by `scale`. The module divides by a length, of 1e-12 at least as in
    torch.nn.functional.normalize, and multiplies by sqrt(C).
    """
    gamma = module.gamma.detach().flatten()
    return ReadyRms(gamma, (1e-12 * scale) ** 2 / gamma.numel())


def _matrix(
    layer: Any, scale: float, bias_scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight (Co, Ci) and bias of a Linear or a 1x1 convolution, multiplied."""
    weight = _scaled(layer.weight, scale)
    assert weight is not None
    return weight.flatten(1), _scaled(layer.bias, bias_scale)


def _scaled(tensor: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    """`tensor * factor`, itself where there is nothing to do."""
    if tensor is None:
        return None
    return tensor.detach() if factor == 1.0 else tensor.detach() * factor


class Signature:
    """What the parameters of `leaves` were when it was made; equal while they are the same.

    A parameter is known by its storage, its place in it, dtype, device and version counter. Writing
    through `.data` is the one change that torch does not count. Storages are held weakly: their
    memory may be freed, their identity is not given away again.
    """

    def __init__(self, leaves: Sequence[nn.Module]) -> None:
        self._leaves = leaves
        parameters = _parameters(self._leaves)
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in parameters]
        self._facts = [_facts(tensor) for tensor in parameters]
        self._counted = all(fact[-1] is not None for fact in self._facts)
        self._first_facts = self._first() if self._counted else []

    def matches(self, known: bool = False) -> bool:
        """True if nothing has changed since.

        An inference tensor counts no versions: it is taken as changed, unless as `known`.
        """
        facts = [_facts(tensor) for tensor in _parameters(self._leaves)]
        return facts == self._facts and (known or self._counted)

    def seems_to_match(self) -> bool:
        """False only if `matches()` is; True where that is to be seen at first sight."""
        if not self._counted:
            return False
        try:
            return self._first() == self._first_facts
        except RuntimeError:
            return False  # an inference tensor among them

    def _first(self) -> list[tuple[int, int]]:
        return [(tensor._version, tensor.data_ptr()) for tensor in _parameters(self._leaves)]


def _parameters(leaves: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Those of each leaf itself, read from the module now."""
    every = [tensor for leaf in leaves for tensor in leaf._parameters.values()]
    return [tensor for tensor in every if tensor is not None]


def all_finite(leaves: Sequence[nn.Module]) -> bool:
    """True if no parameter of `leaves` has NaN or infinity. Waits for the device."""
    return all(bool(tensor.isfinite().all()) for tensor in _parameters(leaves))


def _facts(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return (
        tensor.untyped_storage()._cdata,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        version_of(tensor),
    )
