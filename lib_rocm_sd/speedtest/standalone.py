"""A speed test without a WebUI: attention and VAE as the benchmarks have them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.bench.vae import coders
from lib_rocm_sd.speedtest.presets import half
from lib_rocm_sd.speedtest.side import Attention, Picture


class Standalone:
    """A HostSide for the command line and the demo's page."""

    def __init__(self, device: torch.device | None = None, directory: Path | None = None) -> None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(kind) if device is None else device
        self._directory = directory

    @property
    def device(self) -> torch.device:
        return self._device

    def busy(self) -> str:
        return ""

    def queue(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def attention_methods(self) -> dict[str, Attention]:
        return {}

    def vae(self) -> Any:
        try:
            small = self.device.type == "cpu"
            return coders.coder("decoder", self.device, half(self.device), small).module
        except ImportError as error:
            raise ValueError(f"the VAE needs {error.name}, which is not installed") from error

    def image(
        self,
        steps: int,
        size: int,
        enabled: bool,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> Picture:
        raise ValueError("not yet")

    def output_directory(self) -> Path | None:
        return self._directory
