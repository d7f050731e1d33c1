"""A speed test without a WebUI: attention, VAE and UNet as the benchmarks have them, and the little
model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.commands import little_model
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import DEFAULT
from lib_rocm_sd.hosts.diffusers.pipeline import patched
from lib_rocm_sd.lab import models
from lib_rocm_sd.lab.speed_job import (
    PROMPT,
    SEED,
    HostCall,
    HostSide,
    Picture,
    PictureWish,
    Steps,
    half,
)
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.unet.takeover import take_over


class Standalone(HostSide):
    """A HostSide for the command line and the demo's page. What is loaded stays loaded."""

    session = DEFAULT

    def __init__(self, device: torch.device | None = None, directory: Path | None = None) -> None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(kind) if device is None else device
        self._directory = directory

    @property
    def device(self) -> torch.device:
        return self._device

    def output_directory(self) -> Path | None:
        return self._directory

    def vae(self) -> Any:
        """Stable Diffusion's decoder with random weights; of few channels on a CPU."""
        return self._coder.module

    @cached_property
    def _coder(self) -> models.Coder:
        small = self.device.type == "cpu"
        return models.coder("decoder", self.device, half(self.device), small)

    def unet(self) -> HostCall:
        """Stable Diffusion 1.5's with random weights; a small one on a CPU."""
        unet = self._unet
        return HostCall(
            unet.module,
            lambda size: unet.arguments(size, size),
            nullcontext,
            lambda: _ours(unet.module, self.device),
            str(unet.dtype).removeprefix("torch."),
            "random weights",
        )

    @cached_property
    def _unet(self) -> models.Unet:
        name = "small" if self.device.type == "cpu" else "SD 1.5"
        return models.unet(name, self.device, half(self.device))

    @cached_property
    def _pipeline(self) -> Any:
        if not (little_model.MODEL / "model_index.json").is_file():
            raise ValueError("the little model is missing")
        return little_model.load(little_model.MODEL, half(self.device)).to(self.device)

    def image(self, wish: PictureWish) -> Picture:
        """By the little model of this repository."""
        pipeline, device = self._pipeline, self.device
        if wish.unet:
            _check_blocks(device)
        steps = Steps(wish, device)

        def after(_: Any, step: int, time_step: Any, values: dict[str, Any]) -> dict[str, Any]:
            steps.note(step + 1)
            return values

        begin = time.perf_counter()
        options: dict[str, Any] = {"unet": wish.unet, "wait": True, "compare": False}
        patch = patched(pipeline, **options) if wish.enabled else nullcontext()
        with patch:
            image = pipeline(
                PROMPT,
                num_inference_steps=wish.steps,
                guidance_scale=little_model.GUIDANCE,
                height=wish.size,
                width=wish.size,
                generator=torch.Generator("cpu").manual_seed(SEED),
                callback_on_step_end=after,
            ).images[0]
        seconds = time.perf_counter() - begin
        return Picture(image, seconds, steps.per_second(), steps.peak_mib())


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
