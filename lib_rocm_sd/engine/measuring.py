"""Performance's measurements: made before a plan is, without the engine's lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.engine import measure, selftest
from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.engine.planner import Planner
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.base import Op, Variant

PREPARE_S = 20.0
"""How long further configs of one problem may be compiled and self-tested."""


class Measurer:
    """Times what a planner knows no times of. `lock` is the engine's; it is held for one self-test
    at a time, and not while a GPU is being timed.
    """

    def __init__(self, planner: Planner, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._planner = planner
        self._lock: Any = lock
        self._one = threading.Lock()

    def measured(
        self, session: Session, op: Op[Any, Any], problem: Any, device: torch.device
    ) -> bool:
        """True if all times of `problem` are known now that can be had.

        False where this was interrupted, or where another thread measures: it is not waited for.
        """
        like = op.measured_as(problem)
        if is_recording(device):
            return False
        if not self._missing(session, op, like, device):
            return True
        if not self._one.acquire(blocking=False):
            return False
        try:
            missing = self._missing(session, op, like, device)
            return not missing or self._measure(session, op, like, device, missing)
        finally:
            self._one.release()

    def _missing(
        self, session: Session, op: Op[Any, Any], problem: Any, device: torch.device
    ) -> list[Variant[Any, Any]]:
        """The variants that could run `problem`, and were neither timed nor tried in vain."""
        with self._lock:
            known = self._planner.known.of(session, op, problem, device)
            return [
                variant
                for variant in op.every
                if variant.name not in known
                and not variant.last_resort
                and not self._planner.known.was_tried(op, variant, problem, device)
                and not self._planner.refusals(op, variant, problem, device)
            ]

    def _measure(
        self,
        session: Session,
        op: Op[Any, Any],
        problem: Any,
        device: torch.device,
        variants: Sequence[Variant[Any, Any]],
    ) -> bool:
        waits = self._planner.waits
        contenders = self._contenders(session, op, problem, device, variants)
        if contenders is None:
            return False
        if self._planner.waits != waits:
            return True  # measured when `renew` has forgotten the plan that is made now
        session.progress(f"measuring {op.title.lower()}, once: {problem}")
        try:
            times, failures = measure.measure(
                op, problem, device, contenders, interrupt=session.interrupt
            )
        except measure.InterruptedMeasurement:
            return False
        except (RuntimeError, MemoryError) as error:
            if not selftest.is_out_of_memory(error):
                raise
            session.report.event(f"{op.name}: too little memory to measure {problem}")
            times, failures = {}, []
        with self._lock:
            for contender, failure in failures:
                self._failed(session, op, problem, device, contender, failure)
            self._planner.known.note(op, problem, device, times, variants)
        return True

    def _failed(
        self,
        session: Session,
        op: Op[Any, Any],
        problem: Any,
        device: torch.device,
        contender: measure.Contender,
        failure: Exception,
    ) -> None:
        variant, reason = contender.variant, selftest.describe(failure)
        if not selftest.is_out_of_memory(failure):
            self._planner.quarantine(op, variant, contender.config, problem, device, reason)
        why = f"measuring {problem} failed: {reason}"
        self._planner.tell(session, op, variant, device, why)

    def _contenders(
        self,
        session: Session,
        op: Op[Any, Any],
        problem: Any,
        device: torch.device,
        variants: Sequence[Variant[Any, Any]],
    ) -> list[measure.Contender] | None:
        """Every verified config; further ones than the first only within PREPARE_S. None where
        this was interrupted.
        """
        found = []
        arch, end = self._planner.identify(device).arch, time.monotonic() + PREPARE_S
        for variant in variants:
            configs = variant.configs(arch, problem)
            for place, config in enumerate(configs):
                if session.interrupt():
                    return None
                if place and time.monotonic() > end:
                    break
                session.progress(f"testing {op.title.lower()}, {place + 1} of {len(configs)}")
                with self._lock:
                    if self._planner.verify(session, op, variant, config, problem, device):
                        continue
                    launch = self._planner.launch(variant, device)
                found.append(measure.Contender(variant, config, launch))
        return found
