"""Memory that stays where it is, for graphs read and write the addresses of their recording.

What a program is given is read where it lies, if it always lies there: what another recorded
program has made, and what was seen there often. Else it is copied into a slot. What a program makes
lies in a `Result`, which is lent to whom asked: it is not written to as long as anybody holds it.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib_rocm_sd.engine.memory import span, storage_uses

ALIGNMENT = 256
LENT, OWN, COPIED = "lent", "own", "copied"
_aten = torch.ops.aten


class Layout(NamedTuple):
    """How a tensor lies."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, like: torch.Tensor) -> Layout:
        """That of `like`, or where it is expanded, of a copy."""
        return cls(like.shape, _strides(like), like.dtype)


class Slot:
    """Memory that stays, as one shape, for what programs are given under one name."""

    __slots__ = ("__weakref__", "_at", "_source", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._source: Any = None
        self._at = (0, 0)

    def fill(self, given: torch.Tensor, buffer: Buffer) -> bool:
        """Copy `given`, unless it was the last one and has not changed; whether it was copied."""
        counted = not given.is_inference()
        known = counted and buffer.holds is self and self._source() is given
        if known and self._at == (given._version, given.data_ptr()):
            return False
        buffer.holds = None
        self.tensor.copy_(given)
        if counted:
            self._source, self._at = ref(given), (given._version, given.data_ptr())
            buffer.holds = self
        return True


class Buffer:
    """Bytes that slots of one name share, as long as somebody reads them. `holds`: whose values are
    in it, if that is known.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # else it could not be written to outside of it
            self.memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self.holds: Slot | None = None
        self._slots: WeakValueDictionary[Layout, Slot] = WeakValueDictionary()

    def slot(self, like: torch.Tensor) -> Slot:
        """With the shape, strides and dtype of `like`."""
        layout = Layout.of(like)
        slot = self._slots.get(layout)
        if slot is None:
            with torch.inference_mode(False):
                flat = self.memory[: span_bytes(like)].view(like.dtype)
                slot = Slot(flat.as_strided(layout.shape, layout.strides))
            self._slots[layout] = slot
        return slot


class Read:
    """How a recording reads one tensor that its program is given. `steady`: how often in a row one
    was copied from the same address.
    """

    __slots__ = ("_from", "steady")

    def __init__(self) -> None:
        self._from = self.steady = 0

    def takes(self, given: torch.Tensor) -> bool:
        """Put `given` where it is read, if need be; False where that cannot be."""
        raise NotImplementedError

    def _copied(self, given: torch.Tensor) -> None:
        at = given.data_ptr()
        self._from, self.steady = at, self.steady + 1 if at == self._from else 0


class Copied(Read):
    """It is copied into a slot."""

    __slots__ = ("_buffer", "_may_settle", "_slot")

    def __init__(self, slot: Slot, buffer: Buffer, may_settle: bool) -> None:
        super().__init__()
        self._slot, self._buffer, self._may_settle = slot, buffer, may_settle

    def takes(self, given: torch.Tensor) -> bool:
        if self._slot.fill(given, self._buffer) and self._may_settle:
            self._copied(given)
        return True


class Settled(Read):
    """It is read where it lies, in somebody else's memory: whoever gives a tensor in this place
    gives the one to be read.
    """

    __slots__ = ("_at", "_strides")

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self._at, self._strides = given.data_ptr(), given.stride()

    def takes(self, given: torch.Tensor) -> bool:
        return given.data_ptr() == self._at and given.stride() == self._strides


class Result:
    """Memory for what programs make, one of them at a time. `use`: LENT, by several of them; lent,
    but by its OWN program only; or COPIED for who asked. `lender`: who made what is in it.
    """

    def __init__(self, n_bytes: int, device: torch.device, use: str) -> None:
        self.n_bytes, self.use = n_bytes, use
        self.lender: object = None
        with torch.inference_mode(False):
            # Kept: while it is there, torch counts what else shares its memory in one place.
            self._bytes = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self._storage = self._bytes.untyped_storage()
        self._key, self._at = self._storage._cdata, self._storage.data_ptr()
        self._whole: dict[tuple[Layout, int], torch.Tensor] = {}
        self._idle = (
            0 if storage_uses is None else storage_uses(self._key),
            sys.getrefcount(self._storage),
        )

    @property
    def is_held(self) -> bool:
        """Whether anybody still has a tensor in it; where this torch does not tell: True."""
        if storage_uses is None or sys.getrefcount(self._storage) > self._idle[1]:
            return True
        return storage_uses(self._key) > self._idle[0] + len(self._whole)

    @property
    def is_whole(self) -> bool:
        """False once somebody has resized what was lent: it lies elsewhere now."""
        return self._storage.data_ptr() == self._at and self._storage.nbytes() == self.n_bytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in it."""
        return tensor.untyped_storage()._cdata == self._key

    def whole(self, layout: Layout, at: int | None = None) -> torch.Tensor:
        """What is in it, from its beginning or from the address `at` on. Others get its `.data`: a
        tensor that knows of no other in the same memory.
        """
        first = 0 if at is None else (at - self._at) // layout.dtype.itemsize
        view = self._whole.get((layout, first))
        if view is None:
            with torch.inference_mode(False):
                made = torch.empty(0, dtype=layout.dtype, device=self._bytes.device)
                view = made.set_(self._storage, first, layout.shape, layout.strides)  # type: ignore[call-overload]
            self._whole[layout, first] = view
        return view

    def tensor(self, layout: Layout) -> torch.Tensor:
        """What is in it, for who may keep it."""
        return self.whole(layout).data


class Direct(Read):
    """It is read where it lies, in `result`. What lies elsewhere for once is copied there."""

    __slots__ = ("_at", "_layout", "_strides", "result")

    def __init__(self, result: Result, given: torch.Tensor) -> None:
        super().__init__()
        self.result, self._layout = result, Layout.of(given)
        self._at, self._strides = given.data_ptr(), given.stride()

    @staticmethod
    def suits(given: torch.Tensor) -> bool:
        """False for a tensor whose elements share memory."""
        return 0 not in given.stride()

    def takes(self, given: torch.Tensor) -> bool:
        """False where it lies elsewhere, and somebody holds what is in its place."""
        if given.data_ptr() == self._at and given.stride() == self._strides:
            return True
        if self.result.is_held or not self.result.is_whole:
            return False
        self.result.whole(self._layout, self._at).copy_(given)
        self._copied(given)
        return True


class Into(TorchDispatchMode):
    """What is computed inside makes its result in `target`, if it asks for memory of that size or
    adds up as many values last; whoever looks has to compare addresses.
    """

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        pixels = target.permute(0, 2, 3, 1) if target.ndim == 4 else target
        dense = (each for each in (target, pixels) if each.is_contiguous())
        self._target: torch.Tensor | None = next(dense, None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Newer torch would load all of torch.compile at the first recording: four seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.new_empty.default and not any(kwargs.values()):
            here = self._taken(args[0], args[1])
            if here is not None:
                return here
        if func is _aten.add.Tensor and not kwargs and _alike(*args):
            here = self._taken(args[0], args[0].shape)
            if here is not None:
                return _aten.add.out(*args, out=here)
        return func(*args, **kwargs)

    def _taken(self, like: torch.Tensor, shape: Any) -> torch.Tensor | None:
        """The target as `shape`, once."""
        target = self._target
        if target is None or like.dtype != target.dtype or like.device != target.device:
            return None
        if torch.Size(shape).numel() != target.numel():
            return None
        self._target = None
        return target.view(shape)


def _alike(*tensors: Any) -> bool:
    """Whether both are dense tensors of one shape and dtype."""
    if len(tensors) != 2 or not all(isinstance(each, torch.Tensor) for each in tensors):
        return False
    a, b = tensors
    return a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous()


def span_bytes(like: torch.Tensor) -> int:
    """From the first element to the last, rounded up."""
    n_bytes = span(like.shape, _strides(like)) * like.element_size()
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _strides(like: torch.Tensor) -> tuple[int, ...]:
    """Those of `like`, or where it is expanded, of a copy."""
    expanded = 0 in like.stride()
    return torch.empty(like.shape, device="meta").stride() if expanded else like.stride()
