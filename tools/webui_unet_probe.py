"""A script of the WebUI's, for tools that measure it: time and memory of sampling, decoding, and
upscaling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from modules import images, processing, script_callbacks, sd_samplers_kdiffusion

seen: list[dict[str, Any]] = []
CUDA = torch.cuda.is_available()


def timed(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        if CUDA:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        try:
            return real(*arguments, **named)
        finally:
            if CUDA:
                torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**20 if CUDA else 0.0
            seen.append({"kind": kind, "s": time.perf_counter() - begin, "peak_mib": peak})

    called.__name__ = "probed"
    return called


def take() -> list[dict[str, Any]]:
    """Time and memory of each since the last time."""
    found = list(seen)
    seen.clear()
    return found


def routes(_demo: Any, app: Any) -> None:
    app.add_api_route("/probe/take", take, methods=["GET"])


SAMPLER = sd_samplers_kdiffusion.KDiffusionSampler
if SAMPLER.sample.__name__ != "probed":
    SAMPLER.sample = timed("sample", SAMPLER.sample)
    processing.decode_latent_batch = timed("decode", processing.decode_latent_batch)
    images.resize_image = timed("resize", images.resize_image)
script_callbacks.on_app_started(routes)
