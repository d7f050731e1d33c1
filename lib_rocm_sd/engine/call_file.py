"""Calls of ops in a file: what was given and what came out. Written in a host, read anywhere.

The file is safetensors, so that nothing in it is executed: tensors, and JSON that says how they
make up the calls. A tensor is kept as the memory from its first element to its last, so it has its
strides again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import __version__
from lib_rocm_sd.engine.memory import span
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.report import report

VARIABLE = "ROCM_SD_CAPTURE"
"""JSON, as `Wish` has it; set by `python -m lib_rocm_sd capture`."""
FORMAT = 1
MOST_BYTES = 2 << 30
"""Most bytes in a file; further calls are not kept."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_OURS = "lib_rocm_sd.ops."
"""Only classes from there are named in a file, or made of one."""


class CallFileError(ValueError):
    """A file holds no calls; the message says why."""


@dataclasses.dataclass(frozen=True)
class Wish:
    """Which calls to keep in `file`: so many of `op`, and of the UNet's block of this name or in
    it, after the first `skip`. Empty: of all ops, wherever they are made.
    """

    file: str
    op: str = ""
    block: str = ""
    calls: int = 16
    skip: int = 0


@dataclasses.dataclass(frozen=True)
class CapturedCall:
    """One call. `how`: in which block, and by which variant, config and device it was computed.
    `inputs(device)` and
    `output(device)` make its tensors anew each time.
    """

    op: str
    problem: str
    how: Mapping[str, str]
    inputs: Callable[[torch.device], Any]
    output: Callable[[torch.device], Any]


class Capture:
    """Keeps calls as they are made. Threads may share it. The file is complete after each call."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self._lock = threading.Lock()
        self._amid = threading.local()
        self._seen = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._rows: list[dict[str, Any]] = []
        self.why = ""
        """Why no more calls are kept."""

    def within(self, block: str, run: Callable[[], Any]) -> Any:
        """Run what computes a block of this name."""
        self._amid.block = block
        try:
            return run()
        finally:
            self._amid.block = ""

    @property
    def _block(self) -> str:
        """Name of the block that this thread computes; empty outside of any."""
        return getattr(self._amid, "block", "")

    def begins(self, op: Op[Any, Any], inputs: Any, route: Any) -> Callable[[Any], None] | None:
        """What is to be told of the output, of a call that is kept: it may write to its inputs."""
        if self.why or not self._takes(op):
            return None
        tensors: dict[str, torch.Tensor] = {}
        try:
            given = _Writer(tensors).put(inputs)
        except (RuntimeError, MemoryError) as error:
            self._stop(str(error))
            return None
        how = {
            "block": self._block,
            "variant": route.plan.variant.name if route.plan else "",
            "config": str(route.config),
            "device": str(route.device),
            "name": _name(route.device),
        }
        row = {"op": op.name, "problem": str(op.problem_of(inputs)), "how": how, "inputs": given}
        return partial(self._ends, row, tensors)

    def _ends(self, row: dict[str, Any], tensors: dict[str, torch.Tensor], output: Any) -> None:
        try:
            row["output"] = _Writer(tensors).put(output)
            self._keep(row, tensors)
        except (RuntimeError, MemoryError, OSError) as error:
            self._stop(str(error))

    def _stop(self, why: str) -> None:
        """Keep no more calls; the host's picture goes on."""
        self.why = why
        report.event(f"{Path(self.wish.file).name} has {len(self._rows)} calls: {why}")

    def _keep(self, row: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        with self._lock:
            number = len(self._rows)
            named = {f"{number}.{name}": tensor for name, tensor in tensors.items()}
            if self.why:
                return  # another thread's was the last
            if sum(t.nbytes for t in (*self._tensors.values(), *named.values())) > MOST_BYTES:
                self._stop(f"more would take more than {MOST_BYTES >> 30} GiB")
                return
            self._tensors |= named
            self._rows.append({**row, "number": number})
            self._write()
            if len(self._rows) >= self.wish.calls:
                self._stop("all that were asked for")

    def _takes(self, op: Op[Any, Any]) -> bool:
        if self.wish.op and self.wish.op not in (op.name, op.family):
            return False
        if self.wish.block and not f"{self._block}.".startswith(f"{self.wish.block}."):
            return False
        with self._lock:
            self._seen += 1
            return self._seen > self.wish.skip

    def _write(self) -> None:
        from safetensors.torch import save_file

        about = {"format": FORMAT, "version": __version__, "torch": torch.__version__}
        text = json.dumps({**about, "calls": self._rows})
        path = Path(self.wish.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(self._tensors, str(unfinished), {"rocm_sd": text})
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def from_environment() -> Capture | None:
    """What the variable asks for."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return Capture(Wish(**json.loads(text)))
    except (TypeError, ValueError) as error:
        report.event(f"{VARIABLE} is none of ours, and nothing is captured: {error}")
        return None


def read(path: Path) -> Iterator[CapturedCall]:
    """The calls in a file, in order. Raises CallFileError, OSError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            about = json.loads((file.metadata() or {}).get("rocm_sd", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise CallFileError(f"{path.name} is no file of captured calls: {error}") from None
    if about.get("format") != FORMAT:
        file_format = about.get("format", "none")
        raise CallFileError(f"{path.name} has format {file_format}, this version reads {FORMAT}")
    for row in about["calls"]:
        first = f"{row['number']}."
        own = {name.removeprefix(first): t for name, t in tensors.items() if name.startswith(first)}
        reader = _Reader(own)
        yield CapturedCall(
            row["op"],
            row["problem"],
            row["how"],
            reader.maker(row["inputs"]),
            reader.maker(row["output"]),
        )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


class _Writer:
    """Turns inputs or outputs into JSON, and puts their tensors `into` a dict, by number."""

    def __init__(self, into: dict[str, torch.Tensor]) -> None:
        self._into = into
        self._known: dict[Any, str] = {}

    def put(self, item: Any) -> Any:
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, torch.Tensor):
            return self._tensor(item)
        if isinstance(item, torch.dtype):
            return {"dtype": DTYPE_NAMES[item]}
        if isinstance(item, ConvWeights):
            bias = item.bias if item.has_bias else None
            kept: dict[str, Any] = {"weight": item.weight, "bias": bias}
            kept |= {"shortcut_weight": item.shortcut_weight, "in_rows": item.in_rows}
            kept |= {"slopes": item.slopes}
            return {"weights": {name: self.put(each) for name, each in kept.items()}}
        fields = getattr(item, "_fields", None) or _fields(item)
        if fields and type(item).__module__.startswith(_OURS):
            items = {name: self.put(getattr(item, name)) for name in fields}
            return {"class": f"{type(item).__module__}:{type(item).__qualname__}", "items": items}
        if isinstance(item, (tuple, list)):
            return {type(item).__name__: [self.put(each) for each in item]}
        return None  # a function, such as what finishes a norm: the variant's own does it

    def _tensor(self, tensor: torch.Tensor) -> Any:
        """Two that lie in the same place stay one."""
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        name = self._known.get(place)
        if name is None:
            name = self._known[place] = str(len(self._into))
            flat = tensor.detach().as_strided((span(tensor.shape, tensor.stride()),), (1,))
            self._into[name] = flat.to("cpu", copy=True)
        return {"tensor": name, "shape": list(tensor.shape), "stride": list(tensor.stride())}


class _Reader:
    """Makes inputs of JSON and tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def maker(self, item: Any) -> Callable[[torch.device], Any]:
        def make(device: torch.device) -> Any:
            tensors: dict[str, torch.Tensor] = {}
            return self._get(item, device, tensors)

        return make

    def _get(self, item: Any, device: torch.device, made: dict[str, torch.Tensor]) -> Any:
        if not isinstance(item, dict):
            return item
        ((kind, value), *_) = item.items()
        if kind == "tensor":
            if value not in made:
                made[value] = self._tensors[value].to(device, copy=True)
            return made[value].as_strided(item["shape"], item["stride"])
        if kind == "dtype":
            return _DTYPES[value]
        if kind == "weights":
            return ConvWeights(**{n: self._get(each, device, made) for n, each in value.items()})
        if kind == "class":
            items = {n: self._get(each, device, made) for n, each in item["items"].items()}
            return _class(value)(**items)
        each = [self._get(one, device, made) for one in value]
        return tuple(each) if kind == "tuple" else each


def _class(name: str) -> Any:
    module, _, path = name.partition(":")
    if module.startswith(_OURS):
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), path)
    raise CallFileError(f"this version has no {name}")


def _fields(item: Any) -> list[str]:
    is_one = dataclasses.is_dataclass(item) and not isinstance(item, type)
    return [each.name for each in dataclasses.fields(item)] if is_one else []
