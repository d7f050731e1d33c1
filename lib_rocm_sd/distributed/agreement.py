"""Whether all ranks were given the same: a picture put together of two is none.

Each rank has its own noise where a pipeline is called without a generator, and nothing would tell.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from lib_rocm_sd.distributed.group import Group, Waiting

LINES = 4
APART = 0.05
"""Lengths along random lines, of tensors of length 1. Other noise is some 1.4 apart on each; what
unlike cards round differently, a thousandth."""


class Agreement:
    """Compares tensors roughly. The device is never waited for, so it tells a call late."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._under_way: list[tuple[torch.Tensor, Any]] = []

    def note(self, *tensors: Any) -> None:
        """Begin to compare these with the other ranks', as far as they are tensors.

        Raises ValueError for earlier ones.
        """
        self.look()
        own = torch.stack([lengths(each) for each in tensors if isinstance(each, torch.Tensor)])
        self._under_way.append(_to_host(self._group.start_gather(own)))

    def look(self, to_the_end: bool = False) -> None:
        """Raises ValueError where ranks had different tensors; `to_the_end` waits for all."""
        while self._under_way:
            found, event = self._under_way[0]
            if event is not None and not to_the_end and not event.query():
                return
            if event is not None:
                event.synchronize()
            self._under_way.pop(0)
            if differ(found):
                self._under_way.clear()
                raise ValueError(
                    "the ranks were given different images or prompts: call the pipeline with the "
                    "same arguments and a generator of the same seed on each"
                )


def lengths(tensor: torch.Tensor) -> torch.Tensor:
    """(LINES): how far the tensor, brought to length 1, goes along random lines."""
    flat = tensor.detach().flatten().float()
    made = _lines(flat.numel(), flat.device) @ flat
    return made / torch.linalg.vector_norm(flat).clamp_min(1e-30)


def differ(found: torch.Tensor) -> bool:
    """Whether ranks' lengths (ranks, tensors, LINES) are too far apart to be of the same."""
    return bool(((found - found[:1]).abs() > APART).any())


@lru_cache(maxsize=8)
def _lines(count: int, device: torch.device) -> torch.Tensor:
    """(LINES, count) of 1 and -1, the same on every rank."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(0, 2, (LINES, count), generator=generator)
    return (drawn * 2 - 1).to(device, torch.float32)


def _to_host(gathered: Waiting) -> tuple[torch.Tensor, Any]:
    """(ranks, tensors, LINES), there when the event has come."""
    found = torch.stack(gathered.wait())
    if found.device.type != "cuda":
        return found, None
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    host.copy_(found, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(found.device))
    return host, event
