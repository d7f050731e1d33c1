"""Hosts for the speed test's tests, and documents as a GPU's owner would send them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.engine.session import DEFAULT
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_job import Attention, Busy, Cancelled, HostCall, Picture, PictureWish
from lib_rocm_sd.lab.speed_result import Document, Pair
from tests.waiting import POLL_S, WAIT_S


class Side:
    """A host on the CPU that does what a test sets."""

    session = DEFAULT

    def __init__(self, directory: Path | None = None) -> None:
        self.device = torch.device("cpu")
        self.directory = directory
        self.reason = ""
        self.generating = False
        self.held = False
        self.methods: dict[str, Attention] = {}
        self.module: Any = None
        self.denoiser: HostCall | None = None
        self.upscaling: HostCall | None = None
        self.images: list[tuple[int, int, bool, bool]] = []
        self.fails: Callable[[bool, int], None] = lambda enabled, size: None
        self.image_may_end = threading.Event()
        self.image_may_end.set()

    def busy(self) -> str:
        return self.reason

    def queue(self) -> AbstractContextManager[Any]:
        return self._queue()

    @contextmanager
    def _queue(self) -> Iterator[None]:
        if self.generating:
            raise Busy("a picture is being made")
        self.held = True
        try:
            yield
        finally:
            self.held = False

    def attention_methods(self) -> dict[str, Attention]:
        return self.methods

    def vae(self) -> Any:
        return self.module

    def unet(self) -> HostCall | None:
        return self.denoiser

    def upscaler(self) -> HostCall | None:
        return self.upscaling

    def image(self, wish: PictureWish) -> Picture:
        from PIL import Image

        self.images.append((wish.steps, wish.size, wish.enabled, wish.unet))
        self.fails(wish.enabled, wish.size)
        while not self.image_may_end.wait(POLL_S):
            if wish.cancelled():
                raise Cancelled("cancelled")
        wish.progress(1.0)
        colour = (100, 100, 103 if wish.enabled else 100)
        image = Image.new("RGB", (wish.size, wish.size), colour)
        image.info["parameters"] = "a secret prompt"
        return Picture(image, (2.0 if wish.enabled else 4.0) - wish.unet, 5.0, math.nan)

    def output_directory(self) -> Path | None:
        return self.directory


class Gate:
    """An attention that waits in its call until it is let through."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        self.open.wait(WAIT_S)
        return torch.zeros(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def document(card: str = "Radeon RX 7900 XTX", times: float = 1.0, **facts: Any) -> Document:
    """A complete result of `card`, all its times multiplied."""
    machine = {"card": card, "gfx": "gfx1100", "backend": "hip", "os": "Linux", "torch": "2.9.0"}
    rows = []
    for test, case, ours, usual in (
        ("attention", "SD1.5 512x512 self", "rocm_sd", "SDP"),
        ("vae", "decode 512x512", "rocm_sd", "eager (the module itself)"),
        ("step", "a step, 512x512, batch 2", "rocm_sd", "extension off"),
        ("upscaler", "512x512 upscaled", "rocm_sd", "extension off"),
        ("image", "512x512, 20 steps", "extension on", "extension off"),
    ):
        unit = "s" if test == "image" else "ms"
        for method, median in ((ours, 2.0 * times), (usual, 3.0 * times)):
            rows.append(Row(test, case, method, unit, median, median, median, 5, 100.0, 1e-4))
    pairs = [Pair("512x512, 20 steps", "a-off.png", "a-on.png", "a-difference.png", 3, 0.1)]
    return Document(
        {**machine, **facts},
        {"what": ["vae"], "preset": "standard", "sizes": []},
        rows,
        pairs,
        ["a note"],
        True,
    )
