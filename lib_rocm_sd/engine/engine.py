"""The engine: runs each call by the variant planned for it, and falls back, with a reason."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from lib_rocm_sd import device as devices
from lib_rocm_sd import policy as policies
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine import selftest
from lib_rocm_sd.engine.planner import (
    LatelyFree,
    Plan,
    Planner,
    default_launcher,
    headroom,
    is_recording,
)
from lib_rocm_sd.engine.selftest import Check
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.base import Launch, Op
from lib_rocm_sd.report import Report, Row
from lib_rocm_sd.report import report as process_report

_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
"""True while torch.compile traces. A torch that cannot tell breaks its graph here instead."""


MOST_ROUTES = 4096
"""Kept at a time; who calls with ever other shapes and strides begins anew."""


class _Route:
    """A plan made callable: all that one call needs, found by one dict lookup."""

    __slots__ = ("config", "device", "launch", "plan", "problem", "row", "run")

    def __init__(
        self,
        run: Callable[..., Any],
        row: Row,
        problem: Any,
        device: torch.device,
        plan: Plan | None = None,
        launch: Launch | None = None,
    ) -> None:
        self.run = run
        self.row = row
        self.problem = problem
        self.device = device
        self.plan = plan
        self.launch = launch
        self.config = plan.config if plan else None


class Engine:
    """Runs ops. One per process, `engine`; others exist in tests.

    Thread-safe: the first use of anything happens under a lock, later calls take none.
    """

    def __init__(
        self,
        *,
        identify: Callable[[torch.device], DeviceInfo] = devices.identify,
        launcher: Callable[[torch.device, Arch], Launch] = default_launcher,
        free: Callable[[torch.device], int] | None = None,
        report: Report = process_report,
    ) -> None:
        self._new_planner = lambda: Planner(identify, launcher, free or LatelyFree(), report)
        self._report = report
        self._lock = threading.RLock()
        self._policy = policies.AUTO
        self.pending: Callable[[str], str] = _nothing_pending
        """Says why the kernels of an op, by its name, have to be waited for; empty if not. For a
        host that has them compiled in the background."""
        self.reset()

    def reset(self) -> None:
        """Forget every plan, self-test, quarantine and measurement of this process."""
        with self._lock:
            self._planner = self._new_planner()
            self._routes: dict[Hashable, _Route] = {}
            self._known: dict[Hashable, tuple[int, list[str]]] = {}

    @property
    def level(self) -> str:
        """Auto, Performance or Memory; setting another plans anew. ValueError for other words."""
        return self._policy.name

    @level.setter
    def level(self, level: str) -> None:
        policy = policies.by_name(level)
        with self._lock:
            if policy is not self._policy:
                self._policy = policy
                self._routes = {}

    def leave_free(self, headroom_bytes: int) -> None:
        """Plan as if so much less device memory were free; what changes it plans anew."""
        with self._lock:
            if headroom.reserved_bytes != headroom_bytes:
                headroom.reserved_bytes = headroom_bytes
                self._routes = {}

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """softmax(scale q k^T + mask) v for q (B, Sq, H, D), k and v (B, Sk, H, D): (B, Sq, H*D).

        Strided views are fine. `mask`: bool (True = attend) or additive, broadcastable to
        (B, H, Sq, Sk). `scale`: default D ** -0.5. Raises ValueError when shapes, dtypes or devices
        do not go together, NotSupportedError when no variant is left; "out of memory" is passed on.
        """
        if mask is not None:
            return self.run(ATTENTION, q, k, v, mask, scale)
        if _is_compiling():
            return _traced(ATTENTION, (q, k, v, None, scale))
        graded = torch.is_grad_enabled()
        key = (
            *(q.shape, k.shape, v.shape),
            *(q.stride(), k.stride(), v.stride()),
            *(q.dtype, k.dtype, v.dtype),
            *(q.device, k.device, v.device),
            graded and (q.requires_grad, k.requires_grad, v.requires_grad),
            scale is None,
        )
        return self._call(ATTENTION, key, (q, k, v, None, scale))

    def run(self, op: Op[Any], *inputs: Any) -> Any:
        """Compute `op` on its inputs by the variant planned for them; plan if needed."""
        if _is_compiling():
            return _traced(op, inputs)
        return self._call(op, _key(op, inputs), inputs)

    def _call(self, op: Op[Any], key: Hashable, inputs: tuple[Any, ...]) -> Any:
        """`key` has all that tells calls apart."""
        route = self._routes.get(key)
        if route is None:
            route = self._prepare(op, key, inputs)
        try:
            output = route.run(route.launch, route.config, *inputs)
        except (RuntimeError, OSError) as error:
            return self._recover(op, key, inputs, route, error)
        route.row.calls += 1
        return output

    def plan(self, problem: Any, device: torch.device, op: Op[Any] | None = None) -> Plan:
        """What would run `problem` (default: of attention) on `device`; tests what was never used.

        Raises NotSupportedError when every variant refuses or failed.
        """
        with self._lock:
            op = op or ATTENTION
            return self._planner.plan(self._policy, op, problem, _with_index(device), {})

    def usable(self, device: torch.device, op: Op[Any] | None = None) -> list[str]:
        """Why our own kernels cannot serve on `device`; empty: compiled, launched and found right.

        Decided by the first of the op's usual problems (default: of attention). It compiles and
        tests at the first use; what is `pending` is the reason instead.
        """
        op = op or ATTENTION
        pending = self.pending(op.name)
        if pending:
            return [pending]
        device = _with_index(device)
        with self._lock:
            found = self._unusable(op, device)
            self._known[op.name, device] = (self._planner.changes, found)
        return list(found)

    def known(self, device: torch.device, op: Op[Any] | None = None) -> list[str] | None:
        """What `usable` said and would say again; None where it has to be asked.

        Waits for nothing: neither for a compiler nor for a thread that plans or measures.
        """
        op = op or ATTENTION
        pending = self.pending(op.name)
        if pending:
            return [pending]
        found = self._known.get((op.name, _with_index(device)))
        return list(found[1]) if found and found[0] == self._planner.changes else None

    def _unusable(self, op: Op[Any], device: torch.device) -> list[str]:
        _, problem = op.usual[0]
        found: list[str] = []
        for variant in (variant for variant in op.variants if variant.ours):
            why = self._planner.refusals(op, variant, problem, device)
            found += why
            for config in () if why else self._planner.defaults(variant, problem, device):
                failed = self._planner.verify(op, variant, config, problem, device)
                if not failed:
                    return []
                found += failed
        return list(dict.fromkeys(found)) or [f"there is no kernel for {op.name}"]

    def status_line(
        self,
        device: torch.device,
        otherwise: str = "the WebUI's own optimizer is used",
        op: Op[Any] | None = None,
    ) -> str:
        """One sentence: attention runs on our kernel, or why it does not. Compiles and tests."""
        info = self._planner.identify(_with_index(device))
        if info.reasons:
            return f"not active: {_short(info)}; {otherwise}"
        pending = self.pending((op or ATTENTION).name)
        if pending:
            return f"not active: {pending}; {otherwise}"
        why = self.usable(device, op)
        if why:
            return f"not active: the kernel for {info.gfx} cannot be used: {why[0]}; {otherwise}"
        notes = f"; {'; '.join(info.notes)}" if info.notes else ""
        return f"attention runs on our kernel ({info.gfx}){notes}"

    def checks(
        self, problem: Any, device: torch.device, op: Op[Any] | None = None
    ) -> dict[str, Check]:
        """The worst self-test of each variant that does not refuse `problem`, by name."""
        op = op or ATTENTION
        device = _with_index(device)
        with self._lock:
            return {
                variant.name: self._planner.worst_check(op, variant, problem, device)
                for variant in op.variants
                if not self._planner.refusals(op, variant, problem, device)
            }

    def _prepare(self, op: Op[Any], key: Hashable, inputs: Sequence[Any]) -> _Route:
        """The route of `key`: planned, and kept unless a graph capture allowed a makeshift only."""
        with self._lock:
            route = self._routes.get(key)
            if route is None:
                route = self._route(op, op.problem_of(*inputs), inputs)
                if not is_recording(route.device):
                    if len(self._routes) >= MOST_ROUTES:
                        self._routes = {}
                    self._routes[key] = route
            return route

    def _route(self, op: Op[Any], problem: Any, inputs: Sequence[Any]) -> _Route:
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        device = tensors[0].device
        info = self._planner.identify(device)
        self._report.describe(f"{info.name} ({info.gfx or info.backend})", self.level)
        if any(tensor.numel() == 0 for tensor in tensors):
            row = self._report.row(op.name, problem, "zeros", None, "an input has no elements")
            return _Route(_zeros(op, problem), row, problem, device)
        extra = {variant.name: variant.input_refusals(*inputs) for variant in op.variants}
        plan = self._planner.plan(self._policy, op, problem, device, extra)
        variant = plan.variant
        row = self._report.row(op.name, problem, variant.name, plan.config, plan.why, plan.refusals)
        launch = self._planner.launch(variant, device)
        run = variant.bound(launch, plan.config, *inputs) if op.by_strides else variant.run
        return _Route(run, row, problem, device, plan, launch)

    def _recover(
        self,
        op: Op[Any],
        key: Hashable,
        inputs: Sequence[Any],
        route: _Route,
        error: RuntimeError | OSError,
    ) -> Any:
        """Finish a call whose variant failed: quarantine it, go on with the next one.

        Where all fail, the fault is the call's or the device's: nothing stays barred, and the first
        error is raised. "Out of memory" is raised at once.
        """
        first, failed = error, []
        while route.plan is not None and not selftest.is_out_of_memory(error):
            variant, reason = route.plan.variant, f"failed: {selftest.describe(error)}"
            with self._lock:
                where = (op, variant, route.config, route.problem, route.device)
                failed.append((variant, reason, self._planner.quarantine(*where, reason)))
                self._routes = {}
            try:
                route = self._prepare(op, key, inputs)
                output = route.run(route.launch, route.config, *inputs)
            except NotSupportedError:
                with self._lock:
                    for _, _, barred in failed:
                        self._planner.pardon(barred)
                raise first from None
            except (RuntimeError, OSError) as again:
                error = again
                continue
            for variant, reason, _ in failed:
                self._planner.tell(op, variant, route.device, reason)
            route.row.calls += 1
            return output
        raise error


def _nothing_pending(op_name: str) -> str:
    return ""


def _key(op: Op[Any], inputs: Sequence[Any]) -> Hashable:
    """All that validation, refusals and plans depend on; not the strides but the last, unless a
    call is bound to them.
    """
    graded = torch.is_grad_enabled()
    parts: list[Any] = [op.name, graded]
    for item in inputs:
        if isinstance(item, torch.Tensor):
            stride = item.stride()
            parts += (item.shape, item.dtype, item.device, stride if op.by_strides else stride[-1:])
            parts.append(graded and item.requires_grad)
        else:
            parts.append(item is None)
    return tuple(parts)


def _traced(op: Op[Any], inputs: Sequence[Any]) -> Any:
    """Under torch.compile: the first variant made of torch calls, which can be traced."""
    problem = op.problem_of(*inputs)
    for variant in op.variants:
        if not variant.ours and not variant.refusals(None, problem):
            return variant.run(None, variant.configs(None, problem)[0], *inputs)
    raise NotSupportedError(problem, {})


def _zeros(op: Op[Any], problem: Any) -> Callable[..., torch.Tensor]:
    shape = op.output_shape(problem)

    def zeros(launch: Any, config: Any, first: torch.Tensor, *rest: Any) -> torch.Tensor:
        return first.new_zeros(shape, dtype=op.output_dtype(problem) if op.output_dtype else None)

    return zeros


def _with_index(device: torch.device) -> torch.device:
    """`device` as tensors name it: cuda without an index is the current one."""
    index: int | None = device.index
    if device.type == "cuda" and index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _short(info: DeviceInfo) -> str:
    """Why a device is not supported, for people who never heard of gfx ids."""
    if info.backend == "cpu":
        return "no supported GPU (this is the CPU)"
    return "; ".join(info.reasons)


engine = Engine()
"""The engine of the process."""
