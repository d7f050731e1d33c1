"""A speed test without a WebUI: attention, VAE and UNet as the benchmarks have them, and the little
model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.commands import little_model
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import DEFAULT
from lib_rocm_sd.lab import models
from lib_rocm_sd.lab.speed_job import PROMPT, SEED, Attention, Cancelled, Denoiser, Picture, half
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.unet.takeover import take_over


class Standalone:
    """A HostSide for the command line and the demo's page. What is loaded stays loaded."""

    def __init__(self, device: torch.device | None = None, directory: Path | None = None) -> None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(kind) if device is None else device
        self._directory = directory
        self._vae: Any = None
        self._pipeline: Any = None
        self._unet: Any = None

    @property
    def device(self) -> torch.device:
        return self._device

    session = DEFAULT

    def busy(self) -> str:
        return ""

    def queue(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def attention_methods(self) -> dict[str, Attention]:
        return {}

    def vae(self) -> Any:
        """Stable Diffusion's decoder with random weights; of few channels on a CPU."""
        if self._vae is None:
            small = self.device.type == "cpu"
            try:
                coder = models.coder("decoder", self.device, half(self.device), small)
            except ImportError as error:
                raise _missing(error) from error
            self._vae = coder.module
        return self._vae

    def unet(self) -> Denoiser:
        """Stable Diffusion 1.5's with random weights; a small one on a CPU."""
        if self._unet is None:
            name = "small" if self.device.type == "cpu" else "SD 1.5"
            try:
                self._unet = models.unet(name, self.device, half(self.device))
            except ImportError as error:
                raise _missing(error) from error
        known = self._unet
        return Denoiser(
            known.module,
            lambda size: known.arguments(size, size),
            nullcontext,
            lambda: _ours(known.module, self.device),
            str(known.dtype).removeprefix("torch."),
            "random weights",
        )

    def image(
        self,
        steps: int,
        size: int,
        enabled: bool,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
        unet: bool = False,
    ) -> Picture:
        """By the little model of this repository."""
        pipeline = self._loaded()
        device = self.device
        if unet:
            _check_blocks(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        marks: list[float] = []

        def after(_: Any, step: int, time_step: Any, values: dict[str, Any]) -> dict[str, Any]:
            if step in (0, steps - 1) and device.type == "cuda":
                torch.cuda.synchronize(device)
            marks.append(time.perf_counter())
            progress((step + 1) / (steps + 1))
            if cancelled():
                raise Cancelled("cancelled")
            return values

        begin = time.perf_counter()
        with _patched(pipeline, unet) if enabled else nullcontext():
            image = pipeline(
                PROMPT,
                num_inference_steps=steps,
                guidance_scale=little_model.GUIDANCE,
                height=size,
                width=size,
                generator=torch.Generator("cpu").manual_seed(SEED),
                callback_on_step_end=after,
            ).images[0]
        seconds = time.perf_counter() - begin
        return Picture(image, seconds, _speed(marks), _peak_mib(device))

    def output_directory(self) -> Path | None:
        return self._directory

    def _loaded(self) -> Any:
        if self._pipeline is None:
            if not (little_model.MODEL / "model_index.json").is_file():
                raise ValueError("the little model is missing")
            try:
                self._pipeline = little_model.load(little_model.MODEL, half(self.device)).to(
                    self.device
                )
            except ImportError as error:
                raise _missing(error) from error
        return self._pipeline


def _patched(pipeline: Any, unet: bool) -> AbstractContextManager[Any]:
    from lib_rocm_sd.hosts.diffusers.pipeline import patched

    return patched(pipeline, unet=unet, wait=True)


def _check_blocks(device: torch.device) -> None:
    """Raises ValueError where our kernels cannot compute a UNet's blocks."""
    why = engine.usable(device, LINEAR)
    if why:
        raise ValueError(why[0])


@contextmanager
def _ours(unet: Any, device: torch.device) -> Iterator[None]:
    _check_blocks(device)
    taken = take_over(unet, DEFAULT.of_part("UNet").patiently())
    try:
        yield
    finally:
        taken.give_back()


def _peak_mib(device: torch.device) -> float:
    if device.type != "cuda":
        return math.nan
    return torch.cuda.max_memory_allocated(device) / 2**20


def _missing(error: ImportError) -> ValueError:
    return ValueError(f"this needs {error.name or 'diffusers'}, which is not installed")


def _speed(marks: list[float]) -> float:
    """Steps per second; the first, which has also what comes before it, does not count."""
    past = marks[-1] - marks[0] if len(marks) > 1 else 0.0
    return (len(marks) - 1) / past if past > 0 else math.nan
