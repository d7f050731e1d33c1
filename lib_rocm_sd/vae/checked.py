"""A VAE's decoder or encoder of ours beside the host's own: now and then a corner of an image is
computed by both. What is packed of weights shows no write through `.data`, and not all that decides
what the host would compute can be watched (modules/watch.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.modules.compared import difference, is_wanted, norms, without_search
from lib_rocm_sd.modules.stand_in import StandIn

EVERY = 16
"""Of so many images one is compared, the second first."""
LATENTS, PIXELS = 16, 128
"""Sides of the corner of what a decoder and an encoder are given: a few milliseconds' work."""


class CheckedStandIn(StandIn):
    """Stands in for the forward of a decoder or encoder, as `role` says."""

    role: str

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._images = 0

    @property
    def compares(self) -> bool:
        """Whether images are compared at all."""
        return is_wanted()

    @abstractmethod
    def again(self, part: torch.Tensor) -> torch.Tensor:
        """What ours makes of a part (1, C, H, W) of an image, beside what the host asked for."""

    @abstractmethod
    def renew(self) -> None:
        """Read the module anew, and its weights."""

    def used(self, made: Any, asked: torch.Tensor, theirs: Callable[[], Any]) -> Any:
        """Ours, unless it was compared and is not the host's; then the next is compared, too."""
        self._images += 1
        how = self._compared(asked) if self._images % EVERY == 2 and self.compares else ""
        if not how:
            return made
        self._images = 1
        self.renew()
        self.tell(f"a corner of the image {how} from the host's own")
        return theirs()

    def _compared(self, image: torch.Tensor) -> str:
        side = LATENTS if self.role == "decoder" else PIXELS
        part = image[:1, :, :side, :side].contiguous()
        try:
            with torch.no_grad(), without_search():
                right, ours = self.theirs(part), self.again(part)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return ""
        apart, added, whole = norms(ours, right, part).tolist()
        return difference(apart, added, whole, torch.finfo(right.dtype).eps)
