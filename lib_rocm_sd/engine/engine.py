"""The engine: runs each call by the variant planned for it, and falls back, with a reason."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from lib_rocm_sd import device as devices
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine import call_file, selftest
from lib_rocm_sd.engine.call_file import Capture
from lib_rocm_sd.engine.gating import Asked, Gatekeeper
from lib_rocm_sd.engine.measurer import MOMENT_S, Measurer
from lib_rocm_sd.engine.memory import LatelyFree, is_recording, with_index
from lib_rocm_sd.engine.planner import Planner, TestKey, VariantPlan, default_launcher
from lib_rocm_sd.engine.route import Route, by_formula, traced, watched, zeros
from lib_rocm_sd.engine.selftest import Check
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.base import Call, Launch, Op
from lib_rocm_sd.ops.keys import tensors_of

_T = TypeVar("_T")
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
"""True while torch.compile traces. A torch that cannot tell breaks its graph here instead."""
innermost_transform: Callable[[], Any] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None
)
MOST_WAITS, WAIT_S = 8, 600.0
"""A config that is refused is followed by another one, which is tried next."""
MOST_ROUTES = 4096
"""Kept at a time; who calls with ever other shapes and strides begins anew."""


class Engine:
    """Runs ops. One per process, `engine`; others exist in tests.

    Thread-safe: the first use of anything happens under a lock, later calls take none.
    """

    def __init__(
        self,
        *,
        identify: Callable[[torch.device], DeviceInfo] = devices.identify,
        launcher: Callable[[torch.device, Arch], Launch] = default_launcher,
        free: Callable[[torch.device, int], int] | None = None,
    ) -> None:
        self._new_planner = lambda: Planner(identify, launcher, free or LatelyFree())
        self._lock = threading.RLock()
        self.pending: Callable[[str], str] = lambda op_name: ""
        """Says why the kernels of an op, by its name, have to be waited for; empty if not. For a
        host that has them compiled in the background."""
        self._gate: Gatekeeper | None = None
        self.renewals = 0
        """How often plans were made anew: who keeps what a plan said compares it."""
        self.capture: Capture | None = None
        """Keeps calls in a file (call_file.py)."""
        self.drops = 0
        """How often routes were dropped: who keeps one compares it."""
        self.reset()

    def reset(self) -> None:
        """Forget every plan, self-test, quarantine and measurement of this process."""
        with self._lock:
            self._planner = self._new_planner()
            self._planner.gate = self._gate
            self._measurer = Measurer(self._planner, self._lock)
            self._routes: dict[Hashable, Route] = {}
            self.drops += 1
            self._known: dict[Hashable, tuple[int, list[str], bool]] = {}

    @property
    def gate(self) -> Gatekeeper | None:
        """Says which kernel classes may be launched in this process, see gating.py; without one,
        which is how it begins, all that pass their self-test here. Hosts set it.
        """
        return self._gate

    @gate.setter
    def gate(self, gate: Gatekeeper | None) -> None:
        with self._lock:
            self._gate = self._planner.gate = gate
        self.renew()

    def renew(self) -> None:
        """Plan anew what is called from now on: the gate answers otherwise than before."""
        with self._lock:
            self._drop_routes()
            self._planner.changes += 1
            self.renewals += 1

    @property
    def unmeasured(self) -> int:
        """How many problems wait to be measured between two pictures."""
        return len(self._measurer.waiting)

    def measure_next(self, seconds: float = MOMENT_S, interrupt: Callable[[], bool] = bool) -> None:
        """Measure one of them, between two pictures, in about `seconds`. What is not finished by
        then, or interrupted, goes on next time. What was planned without its times is planned anew.
        """
        if self._measurer.next(seconds, interrupt):
            self.renew()

    @contextmanager
    def measuring_at_once(self, interrupt: Callable[[], bool] = bool) -> Iterator[None]:
        """Within it nothing waits to be measured; what has waited is measured first."""
        measurer, before = self._measurer, self._measurer.at_once
        measurer.at_once = True
        try:
            while self.unmeasured and not interrupt():
                self.measure_next(interrupt=interrupt)
            yield
        finally:
            measurer.at_once = before

    def passed(self, device: torch.device) -> list[TestKey]:
        """Self-tests that this process has passed on `device`."""
        with self._lock:
            return self._planner.passed(with_index(device))

    def trust(self, passed: Iterable[TestKey]) -> None:
        """Leave out self-tests that another process has passed on a card of this process's kind.
        Who says so compares results.
        """
        with self._lock:
            self._planner.trust(passed)

    def run(self, op: Op[Any, Any], inputs: Any, session: Session = DEFAULT) -> Any:
        """Compute `op` on its inputs by the variant planned for them; plan if needed."""
        if is_compiling():
            return traced(op, inputs)
        if innermost_transform() is not None or forward_ad._current_level >= 0:
            return by_formula(op, inputs)
        try:
            route = self._routes[op.name, session, op.key_of(inputs)]
        except (AttributeError, KeyError, RuntimeError, TypeError):
            route = self.route(op, inputs, session)
        return self.follow(route, op, inputs, session)

    def route(self, op: Op[Any, Any], inputs: Any, session: Session = DEFAULT) -> Route:
        """What `run` takes for these inputs; planned if needed. If it `lasts`, it is what `follow`
        takes for all inputs of the same key while `drops` is the same.
        """
        key = self._key(op, inputs, session)
        return self._routes.get(key) or self._prepare(op, key, inputs, session)

    def follow(self, route: Route, op: Op[Any, Any], inputs: Any, session: Session) -> Any:
        """`run`, without looking at the inputs."""
        keep = None if self.capture is None else self.capture.begins(op, inputs, route)
        try:
            output = route.run(Call(route.problem, inputs, route.launch, route.config))
        except (RuntimeError, OSError) as error:
            key = self._key(op, inputs, session)
            return self._recover(op, key, inputs, session, route, error)
        route.row.calls += 1
        if keep is not None:
            keep(output)
        return output

    def _key(self, op: Op[Any, Any], inputs: Any, session: Session) -> Hashable:
        try:
            return op.name, session, op.key_of(inputs)
        except (AttributeError, RuntimeError, TypeError):
            op.problem_of(inputs)  # a caller's mistake, in words
            raise

    def _drop_routes(self) -> None:
        self._routes = {}
        self.drops += 1

    def plan(
        self,
        problem: Any,
        device: torch.device,
        op: Op[Any, Any] = ATTENTION,
        session: Session = DEFAULT,
    ) -> VariantPlan:
        """What would run `problem` on `device`; tests, and measures, what was never used.

        Raises NotSupportedError when every variant refuses or failed.
        """
        device = with_index(device)
        if session.measures:
            self._measurer.measured(session, op, problem, device)

        def plan() -> VariantPlan:
            with self._lock:
                return self._planner.plan(session, op, problem, device)

        return self._awaited(session, plan)

    def refused(
        self, op: Op[Any, Any], problem: Any, device: torch.device, session: Session = DEFAULT
    ) -> list[str]:
        """Why a plan of `problem` leads to no kernel of ours; empty where it does, and where the
        gate has not decided yet. As `plan` does, it tests what was never used.
        """
        waits_before, plan = self._planner.waits, self.plan(problem, device, op, session)
        if plan.variant.ours or self._planner.waits != waits_before:
            return []
        first = next(variant.name for variant in op.variants if variant.ours)
        return plan.refusals[first] or [plan.why]

    def usable(
        self,
        device: torch.device,
        op: Op[Any, Any] = ATTENTION,
        session: Session = DEFAULT,
        problem: Any = None,
    ) -> list[str]:
        """Why our own kernels cannot serve on `device`; empty: compiled, launched and found right.

        Decided by `problem`, by default the first of the op's usual ones, for `known`. It compiles
        and tests at the first use; what is `pending` is the reason instead.
        """
        pending = self.pending(op.name)
        if pending:
            return [pending]
        device = with_index(device)

        def ask() -> list[str]:
            with self._lock:
                waits_before = self._planner.waits
                reasons = self._unusable(op, device, session, problem or op.usual[0][1])
                waits = bool(reasons) and self._planner.waits != waits_before
                if problem is None:
                    self._known[op.name, device] = (self._planner.changes, reasons, waits)
            return list(reasons)

        return self._awaited(session, ask)

    def known(self, device: torch.device, op: Op[Any, Any] = ATTENTION) -> list[str] | None:
        """What `usable` said and would say again; None where it has to be asked.

        Waits for nothing: neither for a compiler nor for a thread that plans or measures.
        """
        pending = self.pending(op.name)
        if pending:
            return [pending]
        answer = self._known.get((op.name, with_index(device)))
        return list(answer[1]) if answer and answer[0] == self._planner.changes else None

    def waits(self, device: torch.device, op: Op[Any, Any] = ATTENTION) -> bool:
        """Whether the gate has not decided yet on what `usable` gave reasons against."""
        answer = self._known.get((op.name, with_index(device)))
        return answer is not None and answer[2]

    def launcher(self, device: torch.device) -> Launch | None:
        """What launches our kernels on `device`; None where they cannot be."""
        device = with_index(device)
        with self._lock:
            if self._planner.identify(device).reasons:
                return None
            return self._planner.launcher_of(device)[0]

    def _unusable(
        self, op: Op[Any, Any], device: torch.device, session: Session, problem: Any
    ) -> list[str]:
        reasons: list[str] = []
        for variant in (variant for variant in op.variants if variant.ours):
            kind = Asked(op, variant, None, problem, device)
            why = self._planner.refusals(kind)
            reasons += why
            for asked in () if why else self._planner.defaults(kind):
                failed = self._planner.verify(session, asked)
                if not failed:
                    return []
                reasons += failed
        return list(dict.fromkeys(reasons)) or [f"there is no kernel for {op.name}"]

    def status_line(
        self,
        device: torch.device,
        otherwise: str = "all else works as before",
        op: Op[Any, Any] = ATTENTION,
    ) -> str:
        """One sentence: attention runs on our kernel, or why it does not. Compiles and tests."""
        info = self._planner.identify(with_index(device))
        if info.reasons:
            return f"not active: {_short(info)}; {otherwise}"
        pending = self.pending(op.name)
        if pending:
            return f"not active: {pending}; {otherwise}"
        why = self.usable(device, op)
        if self.waits(device, op):
            return f"not active: the kernel for {info.gfx} {why[0]}; {otherwise}"
        if why:
            return f"not active: the kernel for {info.gfx} cannot be used: {why[0]}; {otherwise}"
        notes = f"; {'; '.join(info.notes)}" if info.notes else ""
        return f"attention runs on our kernel ({info.gfx}){notes}"

    def checks(
        self,
        problem: Any,
        device: torch.device,
        op: Op[Any, Any] = ATTENTION,
        session: Session = DEFAULT,
    ) -> dict[str, Check]:
        """The worst self-test of each variant that does not refuse `problem`, by name."""
        device = with_index(device)
        with self._lock:
            by_variant: dict[str, Check] = {}
            for variant in op.variants:
                asked = Asked(op, variant, None, problem, device)
                if not self._planner.refusals(asked):
                    asked = self._planner.defaults(asked)[0]
                    by_variant[variant.name] = self._planner.worst_check(session, asked)
            return by_variant

    def _prepare(self, op: Op[Any, Any], key: Hashable, inputs: Any, session: Session) -> Route:
        """The route of `key`: planned, and kept unless it is a makeshift: during a graph capture,
        or where what Performance ranks by could not be measured now.
        """
        problem, tensors = op.problem_of(inputs), tensors_of(inputs)
        device, empty = tensors[0].device, any(not tensor.numel() for tensor in tensors)
        lasting = not is_recording(device)
        if session.measures and not empty:
            lasting = self._measurer.measured(session, op, problem, device)

        def prepare() -> Route:
            with self._lock:
                route = self._routes.get(key)
                if route is None:
                    route = self._route(op, problem, inputs, session, device, empty)
                    if lasting:
                        if len(self._routes) >= MOST_ROUTES:
                            self._routes = {}
                        self._routes[key] = route
                        route.lasts = True
                return route

        return self._awaited(session, prepare)

    def _awaited(self, session: Session, ask: Callable[[], _T]) -> _T:
        """What `ask` gives; for a patient session when the gate keeps nothing waiting any more."""
        for _ in range(MOST_WAITS if session.patient else 0):
            waits, answer = self._planner.waits, ask()
            if self._gate is None or self._planner.waits == waits:
                return answer
            session.progress("waiting until new kernels were tried in a process of their own")
            self._gate.wait(WAIT_S)
            self.renew()
        return ask()

    def _route(
        self,
        op: Op[Any, Any],
        problem: Any,
        inputs: Any,
        session: Session,
        device: torch.device,
        empty: bool,
    ) -> Route:
        report, info = session.report, self._planner.identify(device)
        report.describe(f"{info.name} ({info.gfx or info.backend})", session.level)
        if empty:
            row = report.row(session.part, op, problem, "zeros", None, "an input has no elements")
            return Route(zeros(op), row, problem, device)
        plan = self._planner.plan(
            session, op, problem, device, lambda variant: variant.input_refusals(inputs)
        )
        variant = plan.variant
        row = report.row(
            session.part, op, problem, variant.name, plan.config, plan.why, plan.refusals
        )
        launch = self._planner.launch(variant, device)
        run = variant.bound(Call(problem, inputs, launch, plan.config))
        route = Route(run, row, problem, device, plan, launch)
        if self._gate is not None and variant.ours:
            route.run = watched(route, self._gate, op)
        return route

    def _recover(
        self,
        op: Op[Any, Any],
        key: Hashable,
        inputs: Any,
        session: Session,
        route: Route,
        error: RuntimeError | OSError,
    ) -> Any:
        """Finish a call whose variant failed: quarantine it, go on with the next one.

        A variant stays barred only where another one then did the work. Else the fault is the
        call's or the device's, and the first error is raised; "out of memory", a caller's mistake
        and an interruption are raised as they are.
        """
        first, failed = error, []
        try:
            while route.plan is not None and not selftest.is_out_of_memory(error):
                asked, reason = route.asked(op), f"failed: {selftest.describe(error)}"
                with self._lock:
                    failed.append((asked, reason, self._planner.quarantine(asked, reason)))
                    if self._gate is not None and asked.variant.ours:
                        self._gate.failed(asked, reason)
                    self._drop_routes()
                route = self._next_route(op, key, inputs, session, first)
                if any(route.runs(asked) for asked, _, _ in failed):
                    raise first  # a graph capture takes torch's own, whether barred or not
                try:
                    output = route.run(Call(route.problem, inputs, route.launch, route.config))
                except (RuntimeError, OSError) as again:
                    error = again
                    continue
                for asked, reason, _ in failed:
                    self._planner.tell(session, asked, reason)
                route.row.calls += 1
                failed.clear()
                return output
            raise error
        finally:
            if failed:
                with self._lock:
                    self._drop_routes()
                    for *_, barred in failed:
                        self._planner.pardon(barred)

    def _next_route(
        self, op: Op[Any, Any], key: Hashable, inputs: Any, session: Session, first: BaseException
    ) -> Route:
        """What is left after a failure. Raises `first` where nothing is, or not even a plan can be
        made: after some faults every call of the driver fails.
        """
        try:
            return self._prepare(op, key, inputs, session)
        except (RuntimeError, OSError) as error:
            if selftest.is_out_of_memory(error):
                raise
            raise first from None


def _short(info: DeviceInfo) -> str:
    """Why a device is not supported, for people who never heard of gfx ids."""
    if info.backend == "cpu":
        return "no supported GPU (this is the CPU)"
    return "; ".join(info.reasons)


engine = Engine()
"""The engine of the process."""
engine.capture = call_file.from_environment()
