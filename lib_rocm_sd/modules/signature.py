"""Whether weights are still those that something was made of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lib_rocm_sd.engine.memory import version_of


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
    """Weight and bias of each leaf, read from the module now."""
    both = [leaf._parameters.get(key) for leaf in leaves for key in ("weight", "bias")]
    return [tensor for tensor in both if tensor is not None]


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
