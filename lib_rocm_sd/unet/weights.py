"""Weights of a UNet, once: laid anew in place while ours runs, and given back.

Parameters keep their shapes and values, and there is no second copy of them. A convolution's memory
becomes that of channels-last images, which is what convolutions of such images read. Linear layers
of the same rows, as to_q, to_k and to_v, come to lie one after another: a library then makes one
product of them where it would make three (ops/linear/torch.py).

Tensors that share a parameter's memory keep doing so: nothing is laid anew while somebody else has
such a tensor, and a `state_dict` gets parameters that lie as they did before ours ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from threading import RLock
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from lib_rocm_sd.engine.memory import (
    free_bytes,
    holders,
    is_recording,
    is_shared,
    sizes,
    version_of,
)
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.linear.torch import as_one
from lib_rocm_sd.policy import AUTO, MEMORY
from lib_rocm_sd.unet.merged import Merged, MergedLayers, hosts_weight, look

_Fact = tuple[Any, ...]
_COPIES = "copies of the weights with their adapters"
PLAIN = (torch.Tensor, nn.Parameter)
PAUSE_S, LOOK_STEPS = 0.003, 8
"""A sampler takes less from step to step, and whoever changes all adapters of a UNet takes longer.
A look waits for the device.
"""
HELD = "its weights are also held elsewhere, as by a state_dict that is kept"


@dataclass(frozen=True)
class _Laid:
    """A parameter that was laid anew, and the strides that it had. `beside`: the layers whose
    weights were laid in one memory, which is `memory`; a convolution's is its own.
    """

    parameter: ref[torch.Tensor]
    strides: tuple[int, ...]
    beside: tuple[ref[nn.Module], ...]
    memory: tuple[int, int, int] | None
    remove_hook: Callable[[], None]

    def lies_so(self, weight: torch.Tensor) -> bool:
        if weight is not self.parameter() or weight.device.type == "meta":
            return False
        if self.memory is None:
            return _lies_laid(weight)
        return _memory(weight) == self.memory

    def is_alone(self, weight: torch.Tensor) -> bool:
        """Whether nobody but these layers has a tensor in its memory."""
        layers = (known() for known in self.beside)
        both = (layer._parameters.get("weight") for layer in layers if layer is not None)
        memory = _memory(weight)
        return holders(weight) <= sum(each is not None and _memory(each) == memory for each in both)


class LiveWeights(ConvWeights):
    """A host's convolution: the weight as it lies, and a copy of the bias in float32, to which the
    shortcut's is added. `renew` makes the copy: in each step, since a write through `.data` is
    nowhere to be seen.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, shortcut: torch.Tensor | None
    ) -> None:
        super().__init__(weight, bias, None, shortcut, in_rows=True)
        self.biases = [each for each in (bias, shortcut) if each is not None]
        self.reads = id(bias), id(shortcut), weight.device
        with torch.inference_mode(False):  # else it could not be written to outside of it
            whole = weight.new_zeros(-(-len(weight) // 16) * 16, dtype=torch.float32)
            self.bias = whole[: len(weight)]
            self.copies = [self.bias, torch.empty_like(self.bias)][: len(self.biases)]
        self._on(weight.device)["padded bias"] = whole
        self.versions: list[int | None] = []

    @property  # type: ignore[override]
    def weight(self) -> Any:
        """Not held: what takes its place may lie in its memory, and that is to be nobody else's."""
        return self._weight()

    @weight.setter
    def weight(self, weight: torch.Tensor) -> None:
        self._weight = ref(weight)

    def plain(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        weight, shortcut = self._weights(like)
        return weight, self.bias.to(like), shortcut


def renew(made: Iterable[LiveWeights]) -> None:
    """Copy the biases of all of these, by few launches where torch can."""
    made = [each for each in made if each.biases]
    for each in made:  # before they are read
        each.versions = list(map(version_of, each.biases))
    both = [each.copies for each in made if len(each.copies) > 1]
    with torch.no_grad():
        if made:
            _copy(
                [c for each in made for c in each.copies], [b for each in made for b in each.biases]
            )
        if both:
            torch._foreach_add_([own for own, _ in both], [added for _, added in both])


def _copy_each(into: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    for target, tensor in zip(into, given, strict=True):
        target.copy_(tensor)


_copy: Callable[..., None] = getattr(torch, "_foreach_copy_", _copy_each)


class UnetWeights:
    """The weights of one UNet, laid to be computed with. `told`: see Hook.tells.

    `lock` is held by who computes with them: a `state_dict` that another thread asks for waits.
    """

    def __init__(self, told: bool = False) -> None:
        self._told = told
        self.lock = RLock()
        self._laid: WeakKeyDictionary[nn.Module, _Laid] = WeakKeyDictionary()
        self._made: dict[tuple[nn.Module, bool], LiveWeights] = {}
        self._asked: set[tuple[nn.Module, bool]] = set()
        self._merged: WeakSet[Merged] = WeakSet()
        self._every, self._changes = MergedLayers(()), 0  # these, after so many changes
        self._is_ours: Callable[[], bool] = _never
        self._looked = False
        self._met: set[int] | None = set()  # None: a step has begun
        self._merged_s, self._steps = 0.0, 0

    def of(
        self, conv: nn.Conv2d, shortcut: nn.Conv2d | None = None, bare: bool = False
    ) -> ConvWeights:
        """Weight and bias of a 3x3 convolution that is laid; the bias of the 1x1 `shortcut` is
        added to it. `bare`: without its bias, which comes with the time embedding.

        The same object while these are the same tensors. Who asks again is in another step.
        """
        key, known = (conv, bare), self._made.get((conv, bare))
        own: dict[str, Any] = conv._parameters
        weight, bias = own["weight"], None if bare else own.get("bias")
        added = None if shortcut is None else shortcut._parameters.get("bias")
        reads = id(bias), id(added), weight.device
        if known is None or known.weight is not weight or known.reads != reads:
            known = self._made[key] = LiveWeights(weight, bias, added)
            renew((known,))
        elif key in self._asked:
            self._asked.clear()
            renew(self._made.values())
        elif known.versions != list(map(version_of, known.biases)):
            renew((known,))
        self._asked.add(key)
        return known

    def merge(self, merged: MergedLayers, session: Session, of_block: bool = True) -> str:
        """Make the copies of these that are not what their adapters make now; or why that must not
        be. `of_block`: a block is called with them. One that is called again is in another step;
        the values of all adapters are looked at then if the host had time to write some, and in
        each LOOK_STEPS. Copies of a whole UNet take at most half of the memory that would be free
        without them.
        """
        before_s, self._merged_s = self._merged_s, perf_counter()
        layers, values = merged.layers, False
        if not layers:
            return ""
        paused = self._merged_s - before_s > PAUSE_S
        if paused:
            self._looked = False  # torch's hooks are not told of a call that Ctrl-C ends
        first = id(layers[0])
        begins = self._met is None or first in self._met
        if begins and not is_recording(hosts_weight(layers[0]).device):
            self._met, self._looked = set(), False  # in another step
            self._steps += 1
            values = paused or not self._steps % LOOK_STEPS
        if of_block and self._met is not None:
            self._met.add(first)
        if values or not self._looked:
            self._look(values)
        stale = merged.stale(self._looked)
        if not stale:
            return ""
        device = stale[0].base()._parameters["weight"].device  # type: ignore[union-attr]
        why = next(filter(None, (each.obstacle() for each in stale)), "")
        if is_recording(device):
            why = "weights with an adapter cannot be made amid a graph"
        missing = 0 if why else sum(each.missing_bytes() for each in stale)
        if missing:
            why = _no_memory(session, device, missing, self._copied_bytes)
        try:
            with self.lock:
                for each in stale if not why else ():
                    each.renew()
                    self._merged.add(each)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = f"{_COPIES} ran out of memory"
        if why:
            for each in stale:
                each.drop()
                self._merged.discard(each)
        return why

    def _look(self, values: bool) -> None:
        """Forget all copies that are not what their adapters make now, where that is to hold until
        the model's call ends, or for their `values`.
        """
        self._looked = self._is_ours()
        if not self._looked:
            self._is_ours = _never
            if not values:
                return
        if self._changes != Merged.changes:
            self._every = MergedLayers(each for each in self._merged if each.facts)
            self._changes = Merged.changes
        for each in self._every.stale():
            each.forget()
        if values:
            look([each for each in self._every.layers if each.facts])

    def step_begins(self, is_ours: Callable[[], bool] | None = None) -> None:
        """Have whoever asks first renew what a step renews once. `is_ours()`: whether the model
        runs nobody's code that could write to adapters until `host_runs`.
        """
        self._asked, self._met = set(self._made), None
        self._is_ours, self._looked = is_ours or _never, False

    def host_runs(self) -> None:
        """Adapters may be written to from now on: they are looked at before each block."""
        self._is_ours, self._looked = _never, False

    def reread(self) -> None:
        """Other layers may be merged than before: hold none."""
        self._every, self._changes = MergedLayers(()), -1

    def lay(self, convs: Iterable[nn.Module]) -> None:
        """Lay these convolutions anew where that was not done.

        UnknownModuleError where that must not be: amid another's graph, whose replay would do it
        again, or where a tensor of somebody else's would no longer be the weight.
        """
        for conv in convs:
            weight: Any = conv._parameters["weight"]  # as conv.weight, in a quarter of the time
            if not _lies_laid(weight):
                if is_recording(weight.device):
                    raise UnknownModuleError(("its weights cannot be laid anew amid a graph",))
                if holders(weight) > 1:
                    raise UnknownModuleError((HELD,))
                with torch.inference_mode(weight.is_inference()), torch.no_grad():
                    self._keep(conv, (ref(conv),), None)
                    data = _read_here(weight.data)
                    weight.data = _laid_anew(data)

    def join(self, layers: Sequence[nn.Linear]) -> bool:
        """Lay their weights one after another where they are not and may be; whether it was done.

        A host that moves or replaces one parts them, until a block meets them as they lie then.
        """
        weights = [layer.weight for layer in layers]
        if len(layers) < 2 or as_one(weights) is not None:
            return False
        if any(layer.bias is not None for layer in layers):
            return False
        if not _alike(weights, self._told) or not all(map(self._is_free, layers)):
            return False
        if is_recording(weights[0].device):
            return False
        with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
            joint = torch.cat([_read_here(weight.data) for weight in weights])
            memory = _memory(joint)
            parts = joint.split([len(weight) for weight in weights])
            for layer, weight, part in zip(layers, weights, parts, strict=True):
                self._keep(layer, tuple(map(ref, layers)), memory)
                weight.data = part
        return True

    def _is_free(self, layer: nn.Linear) -> bool:
        """Whether its weight's memory is its own, or what we joined, and nobody else's."""
        known, weight = self._laid.get(layer), layer.weight
        if known is not None and known.lies_so(weight):
            return known.is_alone(weight)
        return not is_shared(weight) and holders(weight) == 1

    @property
    def extra_bytes(self) -> int:
        """What is kept beside the parameters."""
        return self._copied_bytes + sum(
            made.bias.untyped_storage().nbytes() for made in self._made.values()
        )

    @property
    def _copied_bytes(self) -> int:
        return sum(each.copy_bytes for each in self._merged)

    def forget(self) -> None:
        """Give back what was made of parameters; the next call makes it again."""
        self._made.clear()

    def give_back(self) -> None:
        """Leave every parameter with the strides that it had. One that another has laid otherwise
        meanwhile stays as it is.
        """
        self._made.clear()
        self.reread()
        self.leave(list(self._laid))

    def leave(self, leaves: Iterable[nn.Module]) -> None:
        """As `give_back`, for those among `leaves`: they are the host's for now."""
        with self.lock:
            for leaf in leaves:
                laid = self._laid.get(leaf)
                if laid is not None:
                    laid.remove_hook()
                    _unlay(laid)
                    del self._laid[leaf]
                for bare in (False, True):
                    self._made.pop((leaf, bare), None)

    def read(self, leaf: nn.Module) -> None:
        """Let its weight lie as it did, for a reader, until the next call of its block; unless
        somebody else has a tensor of it, which is to remain the weight.
        """
        with self.lock:
            laid = self._laid.get(leaf)
            weight = None if laid is None else laid.parameter()
            if laid is not None and weight is not None and laid.is_alone(weight):
                _unlay(laid)

    def _keep(self, leaf: Any, beside: tuple[ref[nn.Module], ...], memory: Any) -> None:
        """Remember how its weight lies now, which is how a `state_dict` is to have it."""
        known = self._laid.pop(leaf, None)
        if known is not None:
            known.remove_hook()
        handle = leaf.register_state_dict_pre_hook(_before_state_dict)
        _laid_by[leaf] = ref(self)
        weight = leaf.weight
        self._laid[leaf] = _Laid(ref(weight), weight.stride(), beside, memory, handle.remove)


def is_laid(leaf: nn.Module) -> bool:
    """Whether it is a convolution whose weight is laid anew: not 1x1."""
    return isinstance(leaf, nn.Conv2d | nn.Conv3d) and set(leaf.kernel_size) != {1}


def _lies_laid(weight: torch.Tensor) -> bool:
    if weight.ndim == 5:
        return weight.movedim(2, 0).is_contiguous()
    return weight.is_contiguous(memory_format=torch.channels_last)


def _laid_anew(data: torch.Tensor) -> torch.Tensor:
    """A convolution's weight as ours reads it: over frames, one matrix (Co, Ci) after another."""
    if data.ndim == 5:
        return data.movedim(2, 0).contiguous().movedim(0, 2)
    return data.contiguous(memory_format=torch.channels_last)


def _never() -> bool:
    return False


def _no_memory(session: Session, device: torch.device, missing: int, held: int) -> str:
    if session.level == MEMORY.name:
        return f"{_COPIES} take memory, and the level is {session.level}"
    free = free_bytes(device, session.headroom_bytes)
    share = AUTO.workspace_share or 1.0
    if held + missing > share * (free + held):
        return f"{_COPIES} take {missing >> 20} MiB more, and {free >> 20} MiB are free"
    return ""


def obstacles(parameter: torch.Tensor, told: bool = False) -> list[str]:
    """Why a weight cannot be laid anew in place. `told`: see Hook.tells."""
    found = []
    if version_of(parameter) is None and not told:
        found.append("its weights were made in inference mode")
    if is_shared(parameter):
        found.append("its weights share their memory with others")
    return found


def _alike(weights: Sequence[torch.Tensor], told: bool) -> bool:
    """Whether they are plain tensors that differ in columns only, and no host's pinned memory."""
    first = weights[0]
    if len({*map(id, weights)}) < len(weights) or (version_of(first) is None and not told):
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


def _unlay(laid: _Laid) -> None:
    """Also of a parameter that has another name, or another place, by now."""
    weight = laid.parameter()
    if weight is not None and laid.lies_so(weight):
        restride(weight, laid.strides)


def _memory(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Which storage it lies in."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.data_ptr(), storage.nbytes()


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
    memory stays its own: hosts register it. It is left as it is where somebody else has a tensor in
    it, as hosts do that offload: theirs would have other values then.
    """
    if parameter.device.type == "cpu" and parameter.is_pinned() and holders(parameter) > 1:
        return
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        data = _read_here(parameter.data)
        if data.device.type == "cpu" and data.is_pinned():
            parameter.data = data.as_strided(data.shape, strides).copy_(data.clone())
            return
        again = torch.empty_strided(data.shape, strides, dtype=data.dtype, device=data.device)
        parameter.data = again.copy_(data)


_laid_by: WeakKeyDictionary[nn.Module, ref[UnetWeights]] = WeakKeyDictionary()


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Let a reader have the parameter itself, contiguous and alone in its memory: some writers of
    files take nothing else, and others leave out all but the first that lies in one memory. It is
    laid anew by the next call of its block, once nobody holds what was read.

    A weight that somebody has a tensor of, or for whose move there is no memory, stays as it is.
    """
    found = _laid_by.get(module)
    weights = None if found is None else found()
    if weights is not None:
        try:
            weights.read(module)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise


Slots = tuple[Sequence[dict[str, Any]], Sequence[str]]
"""Where modules have their parameters: in which dict, and by which name."""


def slots_of(leaves: Iterable[nn.Module]) -> Slots:
    """Slots of all parameters of `leaves`, and of weights and biases that they may get."""
    every = [
        (leaf._parameters, name)
        for leaf in leaves
        for name in dict.fromkeys(("weight", "bias", *leaf._parameters))
    ]
    return [own for own, _ in every], tuple(name for _, name in every)


_NOTHING = torch.empty(0)
_addresses, _dtypes = torch.Tensor.data_ptr, attrgetter("dtype")
_is_dense = torch.Tensor.is_contiguous


def laid(slots: Slots) -> tuple[Any, ...]:
    """How the parameters lie: equal as long as none was moved, replaced, turned or made another
    dtype. One that was turned may lie where another has been.

    Asked before each call of each block, so no line of Python runs for each of them.
    """
    dicts, names = slots
    own = [_NOTHING if p is None else p for p in map(dict.get, dicts, names)]
    return (*map(_addresses, own), *map(_dtypes, own), *map(_is_dense, own))


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
