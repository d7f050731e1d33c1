"""The steps of a picture that the WebUI makes: how fast they are, how far it is, when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.lab.speed_job import Cancelled


class Steps:
    """Within it, each call of the model's UNet is noted; one that begins after a cancel raises."""

    def __init__(
        self,
        model: Any,
        steps: int,
        device: torch.device,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._unet = host.unet_of(model)
        self._steps = steps
        self._device = device
        self._progress = progress
        self._cancelled = cancelled
        self._marks: list[Any] = []
        self._hook: Any = None

    def __enter__(self) -> Steps:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._unet is not None:
            self._hook = self._unet.register_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _note(self, *_: Any) -> None:
        if self._cancelled():
            raise Cancelled("cancelled")
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self._device))
            self._marks.append(mark)
        else:
            self._marks.append(time.perf_counter())
        step = getattr(host.attribute("modules.shared", "state"), "sampling_step", 0)
        self._progress(min(step / (self._steps + 1), 1.0))

    def per_second(self) -> float:
        """Steps a second between the first and the last call; a step may be several calls.

        NaN where that cannot be told.
        """
        calls = len(self._marks)
        if calls < 2:
            return math.nan
        first, last = self._marks[0], self._marks[-1]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            past_s = first.elapsed_time(last) / 1000
        else:
            past_s = last - first
        return (calls - 1) * self._steps / calls / past_s if past_s > 0 else math.nan

    def peak_mib(self) -> float:
        """The most device memory so far; NaN where the device cannot tell."""
        if self._device.type != "cuda":
            return math.nan
        return torch.cuda.max_memory_allocated(self._device) / 2**20
