"""What is kept of a convolution's weights between two calls of its operator."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from lib_rocm_sd.engine.memory import version_of
from lib_rocm_sd.graphs.device import stream_of
from lib_rocm_sd.ops.conv.weights import ConvWeights


@dataclass(frozen=True)
class _Kept:
    """`made` is without the weight itself, which would otherwise never be freed."""

    weight: ref[torch.Tensor]
    bias: ref[torch.Tensor] | None
    facts: tuple[Any, ...]
    made: ConvWeights


class KeptWeights:
    """ConvWeights of tensors that are given again and again, which are read as they lie.

    Kept are the bias in float32, and a copy of weights that are not channels-last, as long as the
    weight tensor lives. Writing through `.data` is the one change that is not seen, for torch does
    not count it. Threads may share it.

    On a stream other than the first nothing is kept or read: graphs are recorded there. What is
    made for one lies in its memory and has no values before a replay; what was kept before would be
    read by each replay, whatever has become of the weights. Inductor's fail if anything of their
    warm-up is kept (torch/_inductor/cudagraph_trees.py, check_memory_pool).
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> ConvWeights:
        if not on_first_stream(weight):
            return ConvWeights(weight, bias, in_rows=True)
        facts = _facts(weight), None if bias is None else _facts(bias)
        known = self._kept.get(id(weight))
        if known is None or known.facts != facts or not _same(known, weight, bias):
            made = ConvWeights(weight, bias, in_rows=True)
            if any(counted is None for counted in facts[0]) or weight.is_inference():
                return made
            known = self._keep(weight, bias, facts, made)
        own = copy.copy(known.made)
        own.weight = weight
        return own

    def _keep(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        facts: tuple[Any, ...],
        made: ConvWeights,
    ) -> _Kept:
        number, kept = id(weight), copy.copy(made)
        del kept.weight
        gone = ref(weight, lambda _: self._kept.pop(number, None))
        known = _Kept(gone, None if bias is None else ref(bias), facts, kept)
        self._kept[number] = known
        return known


def on_first_stream(tensor: torch.Tensor) -> bool:
    """Whether work on this tensor is launched on its device's default stream; on a CPU it is."""
    return not tensor.is_cuda or stream_of(tensor.device) == 0


def _same(known: _Kept, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """That they are the tensors themselves."""
    mine = None if known.bias is None else known.bias()
    return known.weight() is weight and mine is bias


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes where the tensor does. An inference tensor counts no versions."""
    return version_of(tensor), tensor.data_ptr(), tensor.dtype, tensor.device, tensor.stride()
