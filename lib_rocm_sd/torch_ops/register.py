"""An operator of torch's as data, and how it becomes one: schema, computation, shapes, gradients.

`Library.define` and `impl` with an autograd kernel of our own: `torch.library.custom_op` and
`register_autograd` cost the CPU more for each call (`python -m lib_rocm_sd bench door`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.library import Library

from lib_rocm_sd.calls import autocasts, shielded
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.route import by_formula, by_torch
from lib_rocm_sd.engine.session import DEFAULT
from lib_rocm_sd.followed import wanted
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.gradients import is_transformed

Posed = tuple[Op[Any, Any], Any]
"""An op of ops/ and its inputs."""
Results = torch.Tensor | tuple[torch.Tensor, ...]


class BackwardCall(NamedTuple):
    """A backward pass: the op's inputs, the results that the row keeps, of which arguments
    gradients are wanted, and the results' gradients.
    """

    inputs: Any
    results: tuple[torch.Tensor, ...]
    wanted: Sequence[bool]
    grads: Sequence[torch.Tensor]


Backward = Callable[[BackwardCall], "Sequence[torch.Tensor | None] | None"]


_TYPES = {
    **{"Tensor": "Tensor", "torch.Tensor": "Tensor", "Optional": "Tensor?"},
    **{"torch.Tensor | None": "Tensor?", "float | None": "float?"},
    **{name: name for name in ("int", "float", "bool", "str")},
}
"""Annotations, as a schema has them."""


class Fields:
    """Poses an op by those fields of its inputs that are an operator's arguments: all of them, or
    `names`, in their order. An optional one before one that has no default has to be given.
    """

    def __init__(self, op: Op[Any, Any], inputs: Any, *names: str) -> None:
        self._op, self._inputs, self._names = op, inputs, names or inputs._fields
        self._in_order = self._names == inputs._fields[: len(self._names)]
        parameters = inspect.signature(inputs).parameters
        self._others = [name for name in parameters if name not in self._names]
        self._required: list[str] = []
        own: list[inspect.Parameter] = []
        for each in reversed([parameters[name] for name in self._names]):
            if each.default is None and own and own[0].default is each.empty:
                self._required.append(each.name)
                own.insert(0, each.replace(default=each.empty, annotation="Tensor"))
            else:
                own.insert(0, each)
        self.__signature__ = inspect.Signature(own)

    def __call__(self, *arguments: Any) -> Posed:
        if self._in_order:
            return self._op, self._inputs(*arguments)
        return self._op, self._inputs(**dict(zip(self._names, arguments, strict=False)))

    def arguments(self, inputs: Any) -> list[Any] | None:
        """Those that pose `inputs`; None where the operator is not for all that is given there."""
        if any(getattr(inputs, name) is not None for name in self._others):
            return None
        if any(getattr(inputs, name) is None for name in self._required):
            return None
        return [getattr(inputs, name) for name in self._names]


def _dense(made: Any, x: torch.Tensor) -> Results:
    return made.contiguous() if isinstance(made, torch.Tensor) else tuple(map(_contiguous, made))


_contiguous = torch.Tensor.contiguous


@dataclass(frozen=True)
class TorchOp:
    """`rocm_sd::name`, which gives so many `results`.

    `posed(*arguments)`: the op that computes it, and that op's inputs. Its parameters, but those
    that only go by name, are the operator's. `result(made, x)`: what the op made, as the operator
    gives it; x is the first argument. It may hold no memory of an argument.
    `kept(*arguments)`: as `posed`, with what is kept from call to call; None where nothing is.
    `backward(asked)`: the gradients of the first arguments, the others have none; None where
    torch's own operators are to find them. It is given results where the row `keeps` them.
    `followed(*arguments)`: called in the operator's place where gradients are wanted; gives its
    result and what else is kept for `backward`, None where it has nothing more.
    """

    name: str
    posed: Callable[..., Posed]
    results: int = 1
    result: Callable[[Any, torch.Tensor], Results] = _dense
    kept: Callable[..., Posed] | None = None
    backward: Backward | None = None
    keeps: bool = False
    followed: Callable[..., tuple[torch.Tensor, ...] | None] | None = None

    @property
    def schema(self) -> str:
        """Arguments and results in torch's words."""
        arguments = []
        for each in inspect.signature(self.posed).parameters.values():
            if each.kind is not each.KEYWORD_ONLY:
                kind = _TYPES[getattr(each.annotation, "__forward_arg__", each.annotation)]
                text = json.dumps(each.default) if kind == "str" else each.default
                default = "" if each.default is each.empty else f"={text}"
                arguments.append(f"{kind} {each.name}{default}")
        results = ", ".join(["Tensor"] * self.results)
        return f"({', '.join(arguments)}) -> " + (f"({results})" if self.results > 1 else results)


NAMESPACE = "rocm_sd"
KEEPS_WHOLE = hasattr(torch.library, "register_fake")
"""torch 2.4 and newer: only there torch.compile is given the operators."""
_after_autograd: Any = getattr(torch._C, "_after_autograd_keyset", None)
_WITH_KEYSET = (
    "with_keyset" in inspect.signature(Library.impl).parameters and _after_autograd is not None
)
_below_autograd: Any = torch._C._AutoDispatchBelowAutograd


def registered(rows: Sequence[TorchOp], namespace: str = NAMESPACE) -> Library:
    """The library that has an operator for each row. They are there as long as it lives."""
    library = Library(namespace, "DEF")
    for row in rows:
        library.define(row.name + row.schema)
        overload = getattr(getattr(torch.ops, namespace), row.name).default
        for key in ("CPU", "CUDA"):
            library.impl(row.name, _computing(row), key)
        tell = torch.library.register_fake if KEEPS_WHOLE else torch.library.impl_abstract
        tell(f"{namespace}::{row.name}", partial(shapes_of, row), lib=library)
        how = {"with_keyset": True} if _WITH_KEYSET else {}
        library.impl(row.name, _followed(row, overload), "Autograd", **how)
    return library


def _computing(row: TorchOp) -> Callable[..., Results]:
    """By the engine, as functional.py does it."""
    posed, result = row.kept or row.posed, row.result

    def compute(x: torch.Tensor, *others: Any) -> Results:
        op, inputs = posed(x, *others)
        return result(engine.follow(engine.route(op, inputs), op, inputs, DEFAULT), x)

    def apart(x: torch.Tensor, *others: Any) -> Results:
        if not autocasts():
            return compute(x, *others)
        with torch.autocast(x.device.type, enabled=False):
            return compute(x, *others)

    return apart


def shapes_of(row: TorchOp, *arguments: Any) -> Results:
    """Empty results. A caller's mistake is the ValueError that the engine raises; sizes may be
    symbols.
    """
    if all(item.device.type == "meta" for item in arguments if isinstance(item, torch.Tensor)):
        return _on_meta(row, arguments)
    op, inputs = row.posed(*arguments)
    return row.result(op.empty(op.problem_of(inputs), inputs), arguments[0])


def _on_meta(row: TorchOp, arguments: Sequence[Any]) -> Results:
    """By stand-ins on the CPU: an op takes no tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        results = shapes_of(row, *(_moved(item, "cpu") for item in arguments))
    if isinstance(results, torch.Tensor):
        return _moved(results, "meta")
    return tuple(_moved(item, "meta") for item in results)


def _moved(item: Any, device: str) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=device)


def _followed(row: TorchOp, overload: Any) -> Callable[..., Results]:
    """Calls the operator below autograd, and has autograd follow where a gradient is wanted."""
    after = _after_autograd

    def follow(keyset: Any, *arguments: Any) -> Results:
        if is_transformed():
            return _by_formula(row, arguments)
        if torch.is_grad_enabled() and wanted(arguments):
            return _Recomputed.apply(row, overload, *arguments)
        if keyset is not None:
            return overload.redispatch(keyset & after, *arguments)
        with _below_autograd():
            return overload(*arguments)

    return follow if _WITH_KEYSET else partial(follow, None)


def _by_formula(row: TorchOp, arguments: Sequence[Any]) -> Results:
    """For torch.func and for tangents, as Engine.run does it."""
    op, inputs = row.posed(*arguments)
    with shielded(arguments[0].device):
        return row.result(by_formula(op, inputs), arguments[0])


class _Recomputed(torch.autograd.Function):
    """Gradients by the row's `backward`. Else by torch: in the backward pass the call is made again
    by torch's own operators, of which autograd knows the gradients, and nothing but the arguments
    is kept until then.
    """

    @staticmethod
    def forward(ctx: Any, row: TorchOp, overload: Any, *arguments: Any) -> Any:
        is_tensor = [isinstance(item, torch.Tensor) for item in arguments]
        ctx.row = row
        ctx.others = [None if kept else t for t, kept in zip(arguments, is_tensor, strict=True)]
        ctx.is_tensor = is_tensor
        with _below_autograd():
            followed = None if row.followed is None else row.followed(*arguments)
            result, *beside = (overload(*arguments),) if followed is None else followed
        kept = [t for t, is_one in zip(arguments, is_tensor, strict=True) if is_one]
        if row.keeps:
            kept += (result,) if isinstance(result, torch.Tensor) else result
        kept += beside
        ctx.save_for_backward(*kept)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        arguments = [
            next(saved) if kept else other
            for other, kept in zip(ctx.others, ctx.is_tensor, strict=True)
        ]
        wanted = ctx.needs_input_grad[2:]
        if arguments[0].device.type == "meta":
            own = zip(arguments, wanted, strict=True)  # gradients without memory have none
            return None, None, *(torch.empty_like(t) if want else None for t, want in own)
        with shielded(arguments[0].device):
            found = None
            if ctx.row.backward is not None:
                _, inputs = ctx.row.posed(*arguments)
                found = ctx.row.backward(BackwardCall(inputs, tuple(saved), wanted, grads))
            if found is None:
                found = gradients(ctx.row, arguments, wanted, grads)
            return None, None, *found, *[None] * (len(arguments) - len(found))


def gradients(
    row: TorchOp, arguments: Sequence[Any], wanted: Sequence[bool], grads: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of the arguments from those of the results; None where none is wanted.

    With grad mode on, as for second-order gradients, they are differentiable themselves.
    """
    again, own = torch.is_grad_enabled(), list(arguments)
    places = [place for place, want in enumerate(wanted) if want]
    with torch.enable_grad():
        for place in places:  # one tensor may be given twice
            own[place] = own[place].view_as(own[place])
        op, inputs = row.posed(*own)
        result = row.result((by_formula if again else by_torch)(op, inputs), own[0])
    outputs = (result,) if isinstance(result, torch.Tensor) else result
    pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
    chosen = [own[place] for place in places]
    values = torch.autograd.grad(
        *([each[0] for each in pairs], chosen, [each[1] for each in pairs]),
        create_graph=again,
        allow_unused=True,
    )
    every: list[torch.Tensor | None] = [None] * len(own)
    for place, gradient in zip(places, values, strict=True):
        every[place] = gradient
    return every
