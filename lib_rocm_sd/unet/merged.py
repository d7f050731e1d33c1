"""Layers that stand for a layer and its low-rank adapters: W + sum of scale * B A in one weight.

The copy is ours alone, in the weight's dtype, computed in float32 and rounded once. It is made when
it is first needed, written anew in place once one of its factors is another, and freed with what
was read of the block. A DoRA adapter makes f (M + scale B A) of what those before it made of W, M:
f is its magnitude divided by the norms of the rows of W + scale B A. Read in PEFT 0.21.2,
tuners/lora: layer.py, variants.py, dora.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import inf
from operator import attrgetter, getitem, itemgetter
from typing import Any, ClassVar

import torch
from torch import nn

from lib_rocm_sd.engine.memory import version_of
from lib_rocm_sd.engine.selftest import is_out_of_memory


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter of a layer: its name, its two layers, and for DoRA the module that has the
    magnitude of each row. `attributes` of PEFT's layer have its scale, in a dict by name.
    """

    name: str
    down: nn.Module
    up: nn.Module
    attributes: Mapping[str, Any]
    magnitude: nn.Module | None = None

    def modules(self) -> list[nn.Module]:
        return [each for each in (self.down, self.up, self.magnitude) if each is not None]


class Merged(nn.Module):
    """`base` with the weight that its `adapters` make of it. Until `renew` has made that, and where
    it cannot be, the weight is that of `base`, which is never written to.
    """

    base: Callable[[], nn.Module]
    adapters: Sequence[Adapter]
    changes: ClassVar[int] = 0
    """How often a copy was made or forgotten."""

    def _stand_for(self, base: nn.Module, adapters: Sequence[Adapter]) -> None:
        self.base, self.adapters = (lambda: base), adapters  # in no dict of children
        modules = (base, *(each for adapter in adapters for each in adapter.modules()))
        self.read_in = [each._parameters for each in modules]
        self._copy: nn.Parameter | None = None
        self._kept: list[torch.Tensor] = []
        self.facts: list[Any] = []
        self.scales: list[Any] = []
        self._parameters.update({key: base._parameters.get(key) for key in ("weight", "bias")})

    def missing_bytes(self) -> int:
        """How much memory `renew` will take."""
        weight: Any = self.base()._parameters["weight"]
        return 0 if self._fits(weight) else sum(each.nbytes for each in self._tensors())

    @property
    def copy_bytes(self) -> int:
        """What the copy and the values that its adapters had take."""
        made = () if self._copy is None else (self._copy, *self._kept)
        return sum(each.nbytes for each in made)

    def forget(self) -> None:
        """The copy is to be made anew."""
        if self.facts:
            Merged.changes += 1
        self.facts, self.scales = [], []

    def is_stale(self) -> bool:
        """Whether a factor, or where it lies, is another than when the copy was made. Scales count
        with six digits: diffusers multiplies and divides them in each call, which may leave another
        last bit.
        """
        self._parameters["bias"] = self.read_in[0].get("bias")
        scales = self._scales_now()
        if self.facts != self._facts_now() or _rounded(self.scales) != _rounded(scales):
            return True
        self.scales = scales
        return False

    def obstacle(self) -> str:
        """Why the copy cannot be made of the factors as they are now."""
        weight, *factors = self._tensors()
        scales = self._scales_now()
        if any(each is None for each in (weight, *factors, *scales)):
            return "an adapter was taken away"
        if not all(isinstance(scale, (int, float)) for scale in scales):
            return "the scale of an adapter is no number"
        if any(version_of(each) is None for each in (weight, *factors)):
            return "weights of an adapter or its layer were made in inference mode"
        if any(each.device != weight.device or each.device.type == "meta" for each in factors):
            return "an adapter lies on another device than its layer"
        return ""

    def renew(self) -> None:
        """Make the copy of the factors as they are now."""
        weight: Any = self.base()._parameters["weight"]
        facts, scales = self._facts_now(), self._scales_now()
        self._parameters["bias"] = self.read_in[0].get("bias")
        self.forget()  # if this is interrupted, it is a copy of neither
        with torch.inference_mode(False), torch.no_grad():
            values = _merged(weight.detach(), self.adapters).to(weight.dtype).view(weight.shape)
            if self._copy is not None and self._fits(weight):
                self._copy.copy_(values)
            else:
                self._copy = self._parameters["weight"] = None
                images = values.ndim == 4 and values.shape[2:] != (1, 1)
                lie = torch.channels_last if images else torch.contiguous_format
                self._copy = nn.Parameter(values.contiguous(memory_format=lie), False)
                self._parameters["weight"] = self._copy
            self._kept = [each.detach().clone() for each in self._tensors()[1:]]
        self.facts, self.scales = facts, scales
        Merged.changes += 1

    def drop(self) -> None:
        """Free the copy: the weight is that of `base` again."""
        self._copy, self._kept = None, []
        self.forget()
        self._parameters["weight"] = self.base()._parameters["weight"]

    def _fits(self, weight: torch.Tensor) -> bool:
        copy = self._copy
        return copy is not None and (copy.shape, copy.dtype, copy.device) == (
            *(weight.shape, weight.dtype),
            weight.device,
        )

    def _tensors(self) -> list[Any]:
        return [each.get("weight") for each in self.read_in]

    def _facts_now(self) -> list[Any]:
        """Identity, version, address and dtype of each weight that is read."""
        return [
            each is not None and (id(each), version_of(each), each.data_ptr(), each.dtype)
            for each in self._tensors()
        ]

    def _scales_now(self) -> list[Any]:
        return [each.attributes["scaling"].get(each.name) for each in self.adapters]


class MergedLinear(Merged, nn.Linear):
    def __init__(self, base: nn.Linear, adapters: Sequence[Adapter]) -> None:
        nn.Linear.__init__(self, base.in_features, base.out_features, False, device="meta")
        self._stand_for(base, adapters)


class MergedConv2d(Merged, nn.Conv2d):
    """Stands for a convolution without groups or dilation."""

    def __init__(self, base: nn.Conv2d, adapters: Sequence[Adapter]) -> None:
        options: Any = {key: getattr(base, key) for key in ("kernel_size", "stride", "padding")}
        channels = base.in_channels, base.out_channels
        nn.Conv2d.__init__(self, *channels, bias=False, device="meta", **options)
        self._stand_for(base, adapters)


def look(layers: Sequence[Merged]) -> None:
    """Have copies made anew whose adapters have other values, also where torch does not count the
    write: PEFT's hot swap writes through `.data`. Waits for the device once. All are made anew
    where there is no memory to look.
    """
    now = [factor.detach() for each in layers for factor in each._tensors()[1:]]
    if not now:
        return
    try:
        with torch.inference_mode(False), torch.no_grad():
            apart = torch._foreach_sub(now, [kept for each in layers for kept in each._kept])
            norms = torch.stack(torch._foreach_norm(apart)).tolist()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        norms = [inf] * len(now)
    for each in layers:
        count = len(each._kept)
        if any(norm != 0 for norm in norms[:count]):  # also where one is no number
            each.forget()
        norms = norms[count:]


_version, _address = attrgetter("_version"), torch.Tensor.data_ptr
_dtype, _scales = attrgetter("dtype"), itemgetter("scaling")


class MergedLayers:
    """Those among `leaves` that are merged: which of them are stale is asked before each call of
    each block. So no line of Python runs for each factor while nothing has changed.
    """

    def __init__(self, leaves: Iterable[nn.Module]) -> None:
        self.layers = tuple(leaf for leaf in leaves if isinstance(leaf, Merged))
        self._read_in = [own for layer in self.layers for own in layer.read_in]
        self._of_bases = [layer.read_in[0] for layer in self.layers]
        adapters = [adapter for layer in self.layers for adapter in layer.adapters]
        self._with_scales = [each.attributes for each in adapters]
        self._names = [each.name for each in adapters]
        self._then: Any = None
        self._changes: int | None = None

    def stale(self, looked: bool = False) -> list[Merged]:
        """`looked`: all copies were asked in this call of the model, and those forgotten whose
        adapters make something else. So no adapter is fetched from memory.
        """
        if looked:
            if self._changes == Merged.changes:
                return []
            found = [each for each in self.layers if not each.facts]
            self._changes = None if found else Merged.changes
            return found
        now = self._now()
        if now is not None and now == self._then:
            return []
        found = [each for each in self.layers if each.is_stale()]
        self._then = None if found else now
        return found

    def _now(self) -> Any:
        """Scales and facts of all weights; None where one is gone, a scale is no number, or a
        weight counts no changes.
        """
        biases = list(map(id, map(dict.get, self._of_bases, repeat("bias"))))
        own: Any = list(map(dict.get, self._read_in, repeat("weight")))
        each_of: Any = (id, _version, _address, _dtype)
        try:
            scales = list(map(getitem, map(_scales, self._with_scales), self._names))
            facts = [list(map(of, own)) for of in each_of]
        except (AttributeError, LookupError, RuntimeError, TypeError):
            return None
        if not {*map(type, scales)} <= {int, float}:
            return None
        return Merged.changes, biases, scales, facts


def _rounded(scales: Sequence[Any]) -> list[Any]:
    """What is no number may be written in place, and so equals nothing."""
    return [f"{s:.6g}" if isinstance(s, (int, float)) else object() for s in scales]


def hosts_weight(leaf: nn.Module) -> Any:
    """The host's own weight of what is read as `leaf`."""
    return (leaf.base() if isinstance(leaf, Merged) else leaf)._parameters["weight"]


def _merged(weight: torch.Tensor, adapters: Sequence[Adapter]) -> torch.Tensor:
    """(rows, all else) in float32."""
    own = weight.float().flatten(1)
    made = own
    for adapter in adapters:
        read: list[Any] = [each._parameters["weight"] for each in adapter.modules()]
        tensors = [each.detach().float() for each in read]
        down, up = (each.flatten(1) for each in tensors[:2])
        scale = float(adapter.attributes["scaling"][adapter.name])
        made = torch.addmm(made, up, down, alpha=scale)
        if adapter.magnitude is not None:
            norms = torch.addmm(own, up, down, alpha=scale).norm(dim=1, keepdim=True)
            made = made * (tensors[2].view(-1, 1) / norms)
    return made
