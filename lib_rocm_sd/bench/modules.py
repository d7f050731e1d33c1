"""What the benchmarks of a host's modules do to them, and undo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lib_rocm_sd.ops.base import Variant


@contextmanager
def refused(variants: Iterable[Variant[Any, Any]], why: str) -> Iterator[None]:
    """Within this, each of these refuses whatever is planned."""
    excluded = list(variants)

    def refusals(arch: Any, problem: Any) -> list[str]:
        return [why]

    try:
        for variant in excluded:
            variant.refusals = refusals  # type: ignore[method-assign]
        yield
    finally:
        for variant in excluded:
            del variant.refusals


@contextmanager
def in_channels_last(module: Any) -> Iterator[None]:
    """Within this, the module's weights lie in channels-last memory."""
    try:
        module.to(memory_format=torch.channels_last)
        yield
    finally:
        module.to(memory_format=torch.contiguous_format)


def last(image: torch.Tensor) -> torch.Tensor:
    """The image in channels-last memory."""
    return image.contiguous(memory_format=torch.channels_last)
