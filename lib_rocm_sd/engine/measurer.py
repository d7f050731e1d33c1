"""When times are measured: before a problem's first call, or between two pictures."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lib_rocm_sd.engine import measure
from lib_rocm_sd.engine.gating import Asked
from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.engine.planner import Planner
from lib_rocm_sd.engine.selftest import describe, is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.ops.base import Op, Variant

PREPARE_S = 20.0
"""How long further configs of one problem may be compiled and self-tested before a first call."""
MOMENT_S = 1.0
"""How long a host measures between two pictures."""
LEAST_S = MOMENT_S / 2
"""With less left of a moment, what is tested by then is timed in the next one."""


@dataclass(eq=False)
class Waiting:
    """A problem that waits for a moment between two pictures. `plans`: who made which plans
    without its times. `times`: of configs that were timed in an earlier moment.
    """

    op: Op[Any, Any]
    problem: Any
    device: torch.device
    plans: dict[tuple[Session, Any], None] = field(default_factory=dict)
    times: measure.Times = field(default_factory=dict)


class Measurer:
    """Times what a planner knows no times of. `lock` is the engine's; it is held for one self-test
    at a time, and not while a GPU is being timed.
    """

    def __init__(self, planner: Planner, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._planner = planner
        self._lock: Any = lock
        self._one = threading.Lock()
        self.waiting: dict[Any, Waiting] = {}
        """What was put off, the first to be measured first."""
        self.at_once = False
        """Nothing is put off."""

    def measured(
        self, session: Session, op: Op[Any, Any], problem: Any, device: torch.device
    ) -> bool:
        """True if a plan of `problem` may be kept: all its times are known that can be had, or are
        put off.

        False where this was interrupted, or where another thread measures: it is not waited for.
        """
        like = op.measured_as(problem)
        if is_recording(device):
            return False
        if not self._missing(session, op, like, device):
            return True
        if session.later() and not self.at_once:
            with self._lock:
                entry = Waiting(op, like, device)
                entry = self.waiting.setdefault((op.name, like, device), entry)
                entry.plans[session, problem] = None
            return True
        if not self._one.acquire(blocking=False):
            return False
        try:
            missing = self._missing(session, op, like, device)
            return not missing or self._measure(session, Waiting(op, like, device), missing)
        finally:
            self._one.release()

    def next(self, seconds: float, interrupt: Callable[[], bool]) -> bool:
        """Go on, for about `seconds`, with the problem that has waited longest. What is not
        finished waits on. True if plans that were made without its times are others now.
        """
        with self._one:
            with self._lock:
                if not self.waiting:
                    return False
                key, entry = next(iter(self.waiting.items()))
                first, _ = next(iter(entry.plans))
            end = measure.perf_counter() + seconds
            session = replace(first, progress=lambda message: None, interrupt=interrupt)
            finished = True
            try:
                missing = self._missing(session, entry.op, entry.problem, entry.device)
                before = self._choices(entry)
                finished = not missing or self._measure(session, entry, missing, end)
                return finished and (not missing or self._choices(entry) != before)
            finally:
                if finished:
                    with self._lock:
                        self.waiting.pop(key, None)

    def _choices(self, entry: Waiting) -> list[tuple[Any, Any]]:
        """What runs the problems for which `entry` waits, as far as that hangs on no tensors."""
        choices: list[tuple[Any, Any]] = []
        with self._lock:
            for session, problem in entry.plans:
                try:
                    plan = self._planner.plan(session, entry.op, problem, entry.device)
                    choices.append((plan.variant, plan.config))
                except (NotSupportedError, RuntimeError, MemoryError) as error:
                    if not (isinstance(error, NotSupportedError) or is_out_of_memory(error)):
                        raise
                    choices.append((None, None))
        return choices

    def _missing(
        self, session: Session, op: Op[Any, Any], problem: Any, device: torch.device
    ) -> list[Variant[Any, Any]]:
        """The variants that could run `problem`, and were neither timed nor tried in vain."""
        with self._lock:
            times = self._planner.known.of(session, op, problem, device)
            return [
                variant
                for variant in op.every
                if variant.name not in times
                and not variant.last_resort
                and not self._planner.known.was_tried(op, variant, problem, device)
                and not self._planner.refusals(Asked(op, variant, None, problem, device))
            ]

    def _measure(
        self,
        session: Session,
        entry: Waiting,
        variants: Sequence[Variant[Any, Any]],
        end: float = math.inf,
    ) -> bool:
        """Whether it was finished."""
        op, problem, device = entry.op, entry.problem, entry.device
        waits = self._planner.waits
        contenders = self._contenders(session, entry, variants, end)
        if contenders is None:
            return False
        if self._planner.waits != waits:
            return True  # measured when `renew` has forgotten the plan that is made now
        left_s = end - measure.perf_counter()
        if left_s < LEAST_S:
            return False
        session.progress(f"measuring {op.title.lower()}, once: {problem}")
        try:
            _, failures = measure.measure(
                *(op, problem, device, contenders, min(measure.BUDGET_S, left_s)),
                interrupt=session.interrupt,
                times=entry.times,
                until=end,
            )
        except measure.InterruptedMeasurement:
            return False
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            session.report.event(f"{op.name}: too little memory to measure {problem}")
            entry.times, failures = {}, []
        with self._lock:
            for contender, failure in failures:
                asked = Asked(op, contender.variant, contender.config, problem, device)
                reason = describe(failure)
                if not is_out_of_memory(failure):
                    self._planner.quarantine(asked, reason)
                self._planner.tell(session, asked, f"measuring {problem} failed: {reason}")
            self._planner.known.note(op, problem, device, entry.times, variants)
        return True

    def _contenders(
        self,
        session: Session,
        entry: Waiting,
        variants: Sequence[Variant[Any, Any]],
        until: float,
    ) -> list[measure.Contender] | None:
        """Every verified config; further ones than the first only within PREPARE_S. None where
        this was interrupted, or goes on after `until`.
        """
        contenders = []
        op, problem, device = entry.op, entry.problem, entry.device
        arch, end = self._planner.identify(device).arch, measure.perf_counter() + PREPARE_S
        for variant in variants:
            configs = variant.configs(arch, problem)
            for place, config in enumerate(configs):
                if session.interrupt() or measure.perf_counter() >= until:
                    return None
                if place and measure.perf_counter() > end:
                    break
                session.progress(f"testing {op.title.lower()}, {place + 1} of {len(configs)}")
                with self._lock:
                    asked = Asked(op, variant, config, problem, device)
                    if self._planner.verify(session, asked):
                        continue
                    launch = self._planner.launch(variant, device)
                contenders.append(measure.Contender(variant, config, launch))
        return contenders
