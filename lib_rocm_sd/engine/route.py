"""A plan made callable, and what takes a plan's place where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lib_rocm_sd.engine.gating import Asked, Gatekeeper
from lib_rocm_sd.engine.memory import is_recording, synchronize
from lib_rocm_sd.engine.planner import VariantPlan
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.ops.base import Call, Launch, Op, Run, Variant
from lib_rocm_sd.ops.keys import tensors_of
from lib_rocm_sd.report import UsedRow


class Route:
    """All that one call needs, found by one dict lookup. `lasts`: not for one call only, as during
    a graph capture.
    """

    __slots__ = ("config", "device", "lasts", "launch", "plan", "problem", "row", "run")

    def __init__(
        self,
        run: Run,
        row: UsedRow,
        problem: Any,
        device: torch.device,
        plan: VariantPlan | None = None,
        launch: Launch | None = None,
    ) -> None:
        self.run = run
        self.row = row
        self.problem = problem
        self.device = device
        self.plan = plan
        self.launch = launch
        self.config = plan.config if plan else None
        self.lasts = False

    @property
    def is_ours(self) -> bool:
        """Whether it leads to a kernel of ours."""
        return self.plan is not None and self.plan.variant.ours

    def asked(self, op: Op[Any, Any]) -> Asked:
        """The class that it launches, of one that has a plan."""
        assert self.plan is not None
        where = (self.config, self.problem, self.device, self.launch)
        return Asked(op, self.plan.variant, *where)

    def runs(self, asked: Asked) -> bool:
        """Whether that is what it leads to."""
        choice = (asked.variant, asked.config)
        return self.plan is not None and (self.plan.variant, self.config) == choice


def watched(route: Route, gate: Gatekeeper, op: Op[Any, Any]) -> Run:
    """The route's `run`, to stand in its place until its first launch has come to an end."""
    run, asked = route.run, route.asked(op)

    def first(call: Call[Any, Any]) -> Any:
        if is_recording(route.device):
            return run(call)
        watch = gate.launching(asked, "call")
        if watch is None:
            output = run(call)
        else:
            with watch, _restored(call.inputs):
                output = run(call)
                if route.device.type == "cuda":
                    synchronize(route.device)
        route.run = run
        return output

    return first


@contextmanager
def _restored(inputs: Any) -> Iterator[None]:
    """What is computed in place is as before if it fails, for another variant is tried then."""
    out = getattr(inputs, "out", None)
    if not isinstance(out, torch.Tensor):
        yield
        return
    copy = out.clone()
    try:
        yield
    except Exception:
        out.copy_(copy)
        raise


doors: dict[str, Callable[[Any], Any]] = {}
"""By the name of an op, what calls it as an operator of torch's, with the op's inputs; None is what
it gives where the operator does not do that. Filled where torch_ops/ is imported.
"""


def traced(op: Op[Any, Any], inputs: Any) -> Any:
    """Under torch.compile: the operator of the op, which its graphs keep whole, else torch calls.

    A caller's mistake is the ValueError that it always is, of which a full graph names the text.
    """
    op.problem_of(inputs)
    door = doors.get(op.name)
    result = None if door is None else door(inputs)
    return by_torch(op, inputs) if result is None else result


def by_torch(op: Op[Any, Any], inputs: Any) -> Any:
    """By the first variant made of torch calls, which can be traced and differentiated."""
    return _by_first(op, inputs, [variant for variant in op.variants if not variant.ours])


def by_formula(op: Op[Any, Any], inputs: Any) -> Any:
    """The same, for what torch.func transforms, and for derivatives of any order and mode: not all
    of torch's fused operators have them. Nothing is planned, tested or counted.
    """
    if not all(tensor.numel() for tensor in tensors_of(inputs)):
        return zeros(op)(Call(op.problem_of(inputs), inputs))
    variants = [variant for variant in op.variants if not variant.ours]
    return _by_first(op, inputs, sorted(variants, key=lambda variant: not variant.derives))


def _by_first(op: Op[Any, Any], inputs: Any, variants: Sequence[Variant[Any, Any]]) -> Any:
    problem = op.problem_of(inputs)
    for variant in variants:
        if not variant.refusals(None, problem):
            return variant.run(Call(problem, inputs, None, variant.configs(None, problem)[0]))
    raise NotSupportedError(problem, {})


def zeros(op: Op[Any, Any]) -> Run:
    """Runs an op whose input has no elements."""

    def run(call: Call[Any, Any]) -> Any:
        results = op.empty(call.problem, call.inputs)
        for tensor in tensors_of((results,)):
            tensor.zero_()
        return results

    return run
