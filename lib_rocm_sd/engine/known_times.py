"""What is known of variants' times: measured by this process, or stored by another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine import measure
from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.base import Op, Variant


class KnownTimes:
    """Known times of all ops on all devices. Not thread-safe: the engine holds its lock."""

    def __init__(self, identify: Callable[[torch.device], DeviceInfo]) -> None:
        self._identify = identify
        self._times: dict[Hashable, measure.Times] = {}
        self._tried: set[Hashable] = set()

    def of(
        self, session: Session, op: Op[Any, Any], problem: Any, device: torch.device
    ) -> measure.Times:
        """What is known, or stored, of the variants' times for `problem`."""
        key = (op.name, problem, device)
        if key not in self._times and not is_recording(device):
            self._times[key], reason = measure.load(op, self._identify(device), problem)
            if reason:
                session.report.event(reason)
        return self._times.get(key, {})

    def note(
        self,
        op: Op[Any, Any],
        problem: Any,
        device: torch.device,
        times: measure.Times,
        tried: Sequence[Variant[Any, Any]],
    ) -> None:
        """Keep what was measured, for this process and the next ones. `tried`: also in vain."""
        known = {**self._times.get((op.name, problem, device), {}), **times}
        self._times[op.name, problem, device] = known
        self._tried.update((op.name, variant.name, problem, device) for variant in tried)
        measure.save(op, self._identify(device), problem, known)

    def was_tried(
        self, op: Op[Any, Any], variant: Variant[Any, Any], problem: Any, device: torch.device
    ) -> bool:
        """True if this process has tried to time `variant`."""
        return (op.name, variant.name, problem, device) in self._tried
