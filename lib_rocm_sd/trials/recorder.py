"""Runs variants on tensors of the CPU, without a card, and notes what they would have launched.

So a trial launches what is launched later: the same packing of arguments, the same grids.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.ops.base import SEED, Call, KernelSpec, Op, Variant
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.keys import tensors_of
from lib_rocm_sd.trials.recording import Address, Buffer, Output, Recording, Run, Start, runs

CPU = torch.device("cpu")
LARGE_BYTES = 64 << 20
"""Largest buffer kept whole, in bytes; of a larger one in which inputs lie, only what their
elements take. A convolution's weights are none of its tensors: they are kept whole."""


_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


class NeedsTorchError(Exception):
    """Between or after its launches torch computes with what they wrote."""


@dataclass
class _Memory:
    """A storage that is kept alive, and so keeps its address."""

    storage: torch.UntypedStorage
    written: bool
    views: list[torch.Tensor] = field(default_factory=list)
    buffer: int | None = None
    """Its number, once a launch was given it."""

    @property
    def address(self) -> int:
        return int(self.storage.data_ptr())

    def has(self, address: int) -> bool:
        return self.address <= address < self.address + self.storage.nbytes()


class _Recorder(TorchDispatchMode):
    """Knows every storage that appears while it is active, and is a `Launch`."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, _Memory] = {}
        self.buffers: list[Buffer] = []
        self.starts: list[Start] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Newer torch would load all of torch.compile to keep it out: seconds, and much memory."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        allocates = "empty" in func._schema.name
        views = _is_view(func)
        if self.starts and not allocates and not views:
            self._refuse(func, tensors)
        result = func(*args, **kwargs)
        for tensor in tensors:
            self._known(tensor, written=True)
        for tensor in _tensors(result):
            buffer = self._known(tensor, written=not allocates)
            buffer.written |= not (allocates or views)
        return result

    def _refuse(self, func: Any, given: Sequence[torch.Tensor]) -> None:
        for tensor in given:
            memory = self.memory.get(tensor.untyped_storage()._cdata)
            if memory is not None and memory.buffer is not None:
                raise NeedsTorchError(f"{func} uses what was launched on")

    def _known(self, tensor: torch.Tensor, written: bool) -> _Memory:
        storage = tensor.untyped_storage()
        return self.memory.setdefault(storage._cdata, _Memory(storage, written))

    def holds(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are inputs: of their storages what they show is kept."""
        for tensor in tensors:
            self._known(tensor, written=True).views.append(tensor)

    def __call__(
        self,
        spec: KernelSpec,
        grid: int,
        block: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None:
        if grid == 0:
            return
        addresses = tuple(self._addresses(spec, params))
        self.starts.append(Start(spec, grid, block, bytes(params), addresses))

    def _addresses(self, spec: KernelSpec, params: ctypes.Structure) -> Iterator[Address]:
        for name, at, value in _words(params):
            if not value:
                continue
            memory = next((each for each in self.memory.values() if each.has(value)), None)
            if memory is None:
                raise ValueError(f"{spec.entry}: {name} is in no memory that is known here")
            yield Address(at, self.number(memory), value - memory.address)

    def number(self, memory: _Memory) -> int:
        """The buffer that stands for it; its contents are what they are now."""
        if memory.buffer is None:
            memory.buffer = len(self.buffers)
            pieces = tuple(_pieces(memory)) if memory.written else ()
            self.buffers.append(Buffer(memory.storage.nbytes(), pieces))
        return memory.buffer

    def output(self, tensor: torch.Tensor, expected: torch.Tensor) -> Output:
        """Where an output lies. NeedsTorchError where no launch made it."""
        memory = self.memory.get(tensor.untyped_storage()._cdata)
        if memory is None or memory.buffer is None:
            raise NeedsTorchError("torch makes an output")
        exact = expected.double().contiguous()
        return Output(
            memory.buffer,
            int(tensor.storage_offset()) * tensor.element_size(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            DTYPE_NAMES[tensor.dtype],
            ctypes.string_at(exact.data_ptr(), exact.numel() * 8),
        )


def _words(params: ctypes.Structure) -> Iterator[tuple[str, int, int]]:
    """Name, offset and value of each 64-bit word, nested ones included: addresses have 64 bits."""
    for name, kind, *_ in type(params)._fields_:  # type: ignore[misc]
        at, value = getattr(type(params), name).offset, getattr(params, name)
        if kind is ctypes.c_uint64:
            yield name, at, value
        elif isinstance(value, ctypes.Structure):
            yield from ((inner, at + more, word) for inner, more, word in _words(value))
        elif getattr(kind, "_type_", None) is ctypes.c_uint64:
            size = ctypes.sizeof(ctypes.c_uint64)
            yield from ((f"{name}[{n}]", at + n * size, word) for n, word in enumerate(value))


def recordings(
    op: Op[Any, Any], variant: Variant[Any, Any], config: Any, problem: Any
) -> list[Recording]:
    """The trial of the class of `problem`: its test problems, and the op's `trial_inputs`. Of these
    what this process has no address space for is empty: Recording.unmade says why.

    Raises NeedsTorchError; what the variant raises; ValueError where what it gives is no output.
    """
    tests = dict.fromkeys(op.test_problems(problem))
    makers: list[tuple[str, Callable[[], Any]]] = [
        (str(test), partial(op.make_inputs, test, CPU, SEED)) for test in tests
    ]
    references: list[tuple[Any, Any]] = []
    records = [record(op, variant, config, make, name, references) for name, make in makers]
    for name, make in op.trial_inputs(problem):
        try:
            records.append(record(op, variant, config, make, name, references))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            records.append(Recording(name, 0.0, (), (), (), unmade="this process has no memory"))
    return records


def record(
    op: Op[Any, Any],
    variant: Variant[Any, Any],
    config: Any,
    make: Callable[[], Any],
    name: str,
    known: list[tuple[Any, Any]] | None = None,
) -> Recording:
    """What `variant` launches for the inputs that `make` gives. `known`: inputs with their
    references, for float64 takes longest, and inputs that lie elsewhere have the same.
    """
    known = [] if known is None else known
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", enabled=False))
        recorder = _Recorder()
        with recorder:
            inputs = make()
            recorder.holds(tensors_of(inputs))
            posed = op.problem_of(inputs)
            result = variant.run(Call(posed, inputs, recorder, config))
        far = any(buffer.size > LARGE_BYTES for buffer in recorder.buffers)
        exact = [reference for earlier, reference in known if _same(earlier, inputs)]
        exact = exact or [op.reference(inputs)]
        if not far:  # which would stay in memory
            known.append((inputs, exact[0]))
        outputs = _outputs(op, recorder, posed, inputs, result, exact[0])
    return Recording(
        name, op.tolerance(posed), tuple(recorder.buffers), tuple(recorder.starts), outputs, far
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two inputs of an op have the same values, wherever they lie."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype:
            return False
        raw = _RAW[one.element_size()]  # which torch compares several times faster
        return torch.equal(one.view(raw), other.view(raw))
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "__dict__"):
        return _same(_shown(one), _shown(other))
    return bool(one == other)


def _shown(item: Any) -> tuple[Any, ...]:
    return tuple(value for name, value in vars(item).items() if name[0] != "_")


def _outputs(
    op: Op[Any, Any], recorder: _Recorder, problem: Any, inputs: Any, made: Any, reference: Any
) -> tuple[Output, ...]:
    dtype = op.output_dtype(problem) if op.output_dtype else inputs[0].dtype
    pairs = list(zip(made, reference, strict=True)) if isinstance(made, tuple) else []
    pairs = [pair for pair in pairs if pair[1] is not None] or [(made, reference)]
    for place, (tensor, exact) in enumerate(pairs):
        if tensor.shape != exact.shape or (place == 0 and tensor.dtype != dtype):
            actual = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(
                f"{problem}: output is {actual}, expected {tuple(exact.shape)} {dtype}"
            )
    return tuple(recorder.output(tensor, exact) for tensor, exact in pairs)


def _tensors(items: Any) -> Iterator[torch.Tensor]:
    if isinstance(items, torch.Tensor):
        yield items
    elif isinstance(items, dict):
        yield from _tensors(list(items.values()))
    elif isinstance(items, (tuple, list)):
        for item in items:
            yield from _tensors(item)


def _is_view(func: Any) -> bool:
    """True for what only looks at its argument's memory in another way."""
    returned = func._schema.returns
    aliases = [each.alias_info for each in returned]
    return bool(aliases) and all(each is not None and not each.is_write for each in aliases)


def _pieces(memory: _Memory) -> Iterator[tuple[int, bytes]]:
    """The contents: all, or of a large storage what the inputs show of it."""
    size = memory.storage.nbytes()
    if size <= LARGE_BYTES or not memory.views:
        yield 0, ctypes.string_at(memory.address, size)
        return
    for start, count in dict.fromkeys(run for view in memory.views for run in _runs(view)):
        yield start, ctypes.string_at(memory.address + start, count)


def _runs(tensor: torch.Tensor) -> Iterator[Run]:
    size = tensor.element_size()
    return runs(tensor.shape, tensor.stride(), int(tensor.storage_offset()) * size, size)
