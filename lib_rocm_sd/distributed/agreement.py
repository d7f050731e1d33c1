"""Whether all ranks were given the same: a picture put together of two is none.

Each rank has its own noise where a pipeline is called without a generator, and nothing would tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.distributed.group import Group, Waiting


class Agreement:
    """Compares sums of bits, of which the device is never waited for: it tells a call late."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._under_way: list[tuple[torch.Tensor, Any]] = []

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to compare these with the other ranks'. Raises ValueError for earlier ones."""
        self.look()
        own = torch.stack([_bits(tensor) for tensor in tensors])
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
            if bool((found != found[:1]).any()):
                self._under_way.clear()
                raise ValueError(
                    "the ranks were given different images or prompts: call the pipeline with the "
                    "same arguments and a generator of the same seed on each"
                )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A number that is the same for the same bits, and hardly for others."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    flat = flat[: flat.numel() // 2 * 2].view(torch.int16).to(torch.int64)
    places = torch.arange(1, flat.numel() + 1, device=flat.device)
    return (flat * (places % 8191 + 1)).sum()


def _to_host(gathered: Waiting) -> tuple[torch.Tensor, Any]:
    """(ranks, tensors), there when the event has come."""
    found = torch.stack(gathered.wait())
    if found.device.type != "cuda":
        return found, None
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    host.copy_(found, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
