"""Weights of a UNet, once: laid anew in place while ours runs, and given back.

Parameters keep their shapes and values, and there is no second copy of them. A convolution's memory
becomes that of channels-last images, which is what convolutions of such images read. Linear layers
of the same rows, as to_q, to_k and to_v, come to lie one after another: a library then makes one
product of them where it would make three (ops/linear/torch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from lib_rocm_sd.engine.memory import is_recording, is_shared, sizes
from lib_rocm_sd.modules.findings import UnknownModuleError
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.linear.joint import as_one

_Fact = tuple[Any, ...]
PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True)
class _Laid:
    """A parameter that was laid anew: what its strides were, what tells that it still lies so, and
    how its hook is removed.
    """

    parameter: ref[torch.Tensor]
    strides: tuple[int, ...]
    lies_so: Callable[[torch.Tensor], bool]
    remove_hook: Callable[[], None]


@dataclass(frozen=True)
class _Made:
    facts: tuple[Any, ...]
    weights: ConvWeights


class UnetWeights:
    """The weights of one UNet, laid to be computed with. `told`: see Hook.tells."""

    def __init__(self, told: bool = False) -> None:
        self._told = told
        self._laid: WeakKeyDictionary[nn.Module, _Laid] = WeakKeyDictionary()
        self._made: dict[tuple[nn.Module, bool], _Made] = {}

    def of(
        self, conv: nn.Conv2d, shortcut: nn.Conv2d | None = None, bare: bool = False
    ) -> ConvWeights:
        """Weight and bias of a 3x3 convolution; the bias of the 1x1 `shortcut` is added to it.
        `bare`: without its bias, which comes with the time embedding.

        The same object while neither has changed. What it has beside the parameters themselves is
        that bias, in float32 and in their dtype: a parameter that is moved takes its memory along.
        """
        known = self._made.get((conv, bare))
        if known is not None and known.facts == self._facts(conv, shortcut, bare):
            return known.weights
        self.lay((conv,))
        facts = self._facts(conv, shortcut, bare)  # before what they are about is read
        own = None if bare else conv.bias
        added = None if shortcut is None else shortcut.bias
        made = ConvWeights(conv.weight, own, None, added, in_rows=True)
        self._made[conv, bare] = _Made(facts, made)
        return made

    def _facts(self, conv: nn.Conv2d, shortcut: nn.Conv2d | None, bare: bool) -> tuple[Any, ...]:
        """Equal as long as nothing of what `of` reads has changed, nor how the weight lies."""
        own, told = conv._parameters, self._told
        weight: Any = own["weight"]
        bias = () if bare else fact(own.get("bias"), told)
        added = () if shortcut is None else fact(shortcut._parameters.get("bias"), told)
        return fact(weight, told), weight.stride(), bias, added

    def lay(self, leaves: Iterable[nn.Module]) -> bool:
        """Lay the convolutions among them anew where that was not done; whether any was.

        UnknownModuleError amid another's graph, whose replay would do it again.
        """
        laid = False
        for leaf in leaves:
            if not isinstance(leaf, nn.Conv2d) or leaf.kernel_size == (1, 1):
                continue
            if not _is_channels_last(leaf.weight):
                if is_recording(leaf.weight.device):
                    raise UnknownModuleError(("its weights cannot be laid anew amid a graph",))
                self._lay(leaf)
                laid = True
        return laid

    def join(self, layers: Sequence[nn.Linear]) -> bool:
        """Lay their weights one after another where they are not and may be; whether it was done.

        A host that moves or replaces one parts them, until a block meets them as they lie then.
        """
        weights = [layer.weight for layer in layers]
        if any(layer.bias is not None for layer in layers) or as_one(weights) is not None:
            return False
        if not _alike(weights, self._told) or not all(map(self._is_free, layers)):
            return False
        if is_recording(weights[0].device):
            return False
        with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
            joint = torch.cat([_read_here(weight.data) for weight in weights])
            lies_so = partial(_is_in, _memory(joint))
            parts = joint.split([len(weight) for weight in weights])
            for layer, weight, part in zip(layers, weights, parts, strict=True):
                self._keep(layer, lies_so)
                weight.data = part
        return True

    def _is_free(self, layer: nn.Linear) -> bool:
        """Whether its weight's memory is its own, or what we joined."""
        known = self._laid.get(layer)
        ours = known is not None and known.lies_so(layer.weight)
        return ours or not is_shared(layer.weight)

    @property
    def extra_bytes(self) -> int:
        """What is kept beside the parameters."""
        kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._kept()}
        return sum(kept.values())

    def _kept(self) -> list[torch.Tensor]:
        theirs = {
            parameter.untyped_storage()._cdata
            for conv, _ in self._made
            for parameter in conv.parameters()
        }
        made = [item for known in self._made.values() for item in _tensors_of(known.weights)]
        return [item for item in made if item.untyped_storage()._cdata not in theirs]

    def forget(self) -> None:
        """Give back what was made of parameters; the next call makes it again."""
        self._made.clear()

    def give_back(self) -> None:
        """Leave every parameter with the strides that it had. One that was replaced meanwhile, or
        laid otherwise by another, stays as it is.
        """
        self._made.clear()
        self.leave(list(self._laid))

    def leave(self, leaves: Iterable[nn.Module]) -> None:
        """As `give_back`, for those among `leaves`: they are the host's for now."""
        for leaf in leaves:
            laid = self._laid.get(leaf)
            if laid is not None:
                _unlay(leaf, laid)
                del self._laid[leaf]
                for bare in (False, True):
                    self._made.pop((cast(nn.Conv2d, leaf), bare), None)

    def _lay(self, conv: nn.Conv2d) -> None:
        weight = conv.weight
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            self._keep(conv, _is_channels_last)
            data = _read_here(weight.data)
            weight.data = data.contiguous(memory_format=torch.channels_last)

    def _keep(self, leaf: Any, lies_so: Callable[[torch.Tensor], bool]) -> None:
        """Remember how its weight lies now, which is how a `state_dict` is to have it."""
        known = self._laid.pop(leaf, None)
        if known is not None:
            known.remove_hook()
        handle = leaf._register_state_dict_hook(_for_files)
        weight = leaf.weight
        self._laid[leaf] = _Laid(ref(weight), weight.stride(), lies_so, handle.remove)


def obstacles(parameter: torch.Tensor, told: bool = False) -> list[str]:
    """Why a weight cannot be laid anew in place. `told`: see Hook.tells."""
    found = []
    if parameter.is_inference() and not told:
        found.append("its weights were made in inference mode")
    if is_shared(parameter):
        found.append("its weights share their memory with others")
    return found


def _alike(weights: Sequence[torch.Tensor], told: bool) -> bool:
    """Whether they are plain tensors that differ in columns only, and no host's pinned memory."""
    first = weights[0]
    if len({*map(id, weights)}) < len(weights) or (first.is_inference() and not told):
        return False
    return all(
        type(weight) in PLAIN
        and (weight.dtype, weight.device) == (first.dtype, first.device)
        and (weight.ndim, weight.shape[1:]) == (2, first.shape[1:])
        and weight.is_inference() == first.is_inference()
        and weight.is_contiguous()
        and weight.device.type != "meta"
        and not (weight.device.type == "cpu" and weight.is_pinned())
        for weight in weights
    )


def _unlay(leaf: nn.Module, laid: _Laid) -> None:
    laid.remove_hook()
    parameter = laid.parameter()
    current = leaf._parameters.get("weight")
    if current is not None and parameter is current and laid.lies_so(current):
        restride(current, laid.strides)


def _is_channels_last(weight: torch.Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last)


def _memory(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Which storage it lies in."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.data_ptr(), storage.nbytes()


def _is_in(memory: tuple[int, int, int], weight: torch.Tensor) -> bool:
    return weight.device.type != "meta" and _memory(weight) == memory


def _read_here(data: torch.Tensor) -> torch.Tensor:
    """The same; its memory is not another's before the current stream has read it."""
    if data.is_cuda:
        data.record_stream(torch.cuda.current_stream(data.device))
    return data


def is_joined(weight: torch.Tensor) -> bool:
    """Whether its memory has room for three of it, as that of q, k and v of a self-attention."""
    whole, values = sizes(weight)
    return values > 0 and whole == 3 * values


def restride(parameter: torch.Tensor, strides: Sequence[int]) -> None:
    """Lay a parameter anew in place: its values stay, and whether it is an inference tensor. Pinned
    memory stays its own: hosts register it.
    """
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        data = parameter.data
        if data.device.type == "cpu" and data.is_pinned():
            parameter.data = data.as_strided(data.shape, strides).copy_(data.clone())
            return
        again = torch.empty_strided(data.shape, strides, dtype=data.dtype, device=data.device)
        parameter.data = again.copy_(data)


def _for_files(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state_dict has a copy that is contiguous and alone in its memory: some writers of files
    take nothing else, and others leave out all but the first that lies in one memory.
    """
    key = f"{prefix}weight"
    weight = state.get(key)
    if isinstance(weight, torch.Tensor) and not isinstance(weight, nn.Parameter):
        alone = weight.clone() if is_shared(weight) else weight
        state[key] = alone.contiguous()


Slots = tuple[Sequence[dict[str, Any]], Sequence[str]]
"""Where modules have their parameters: in which dict, and by which name."""


def slots_of(leaves: Iterable[nn.Module]) -> Slots:
    """Of all weights and biases that there are."""
    names = ("weight", "bias")
    dicts = [leaf._parameters for leaf in leaves for _ in names]
    return dicts, names * (len(dicts) // len(names))


_NOTHING = torch.empty(0)
_addresses, _dtypes = torch.Tensor.data_ptr, attrgetter("dtype")


def laid(slots: Slots) -> tuple[Any, ...]:
    """How the parameters lie: equal as long as none was moved, replaced or made another dtype.

    Asked before each call of each block, so no line of Python runs for each of them.
    """
    dicts, names = slots
    own = [_NOTHING if p is None else p for p in map(dict.get, dicts, names)]
    return (*map(_addresses, own), *map(_dtypes, own))


def fact(tensor: torch.Tensor | None, told: bool = False) -> _Fact:
    """Two are equal only if the tensor is the same and has not changed: if it is an inference
    tensor, as far as is `told` (see Hook.tells).
    """
    if tensor is None:
        return ()
    version = version_of(tensor)
    if version is None and not told:
        return (object(),)
    return (id(tensor), version, tensor.data_ptr(), tensor.dtype)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often it was changed; None for an inference tensor, which does not count it."""
    return None if tensor.is_inference() else tensor._version


def _tensors_of(weights: ConvWeights) -> list[torch.Tensor]:
    made = [item for items in weights._made.values() for item in items.values()]
    flat = [part for item in made for part in (item if isinstance(item, tuple) else (item,))]
    return [item for item in (*flat, weights.bias) if isinstance(item, torch.Tensor)]
