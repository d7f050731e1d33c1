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
from lib_rocm_sd.modules.compared import difference, epsilon, is_wanted, norms, without_search
from lib_rocm_sd.modules.stand_in import StandIn
from lib_rocm_sd.vae.program import Program

EVERY = 16
"""One of so many images is compared, beginning with the second."""
LATENTS, PIXELS = 16, 128
"""Sides of the corner of what a decoder and an encoder are given: a few milliseconds' work."""


class CheckedStandIn(StandIn):
    """Stands in for the forward of a decoder or encoder, as `role` says."""

    role: str
    program: Program

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

    def renew(self) -> None:
        """Read the module anew, and its weights."""
        self.program.release()
        self.program.refresh()

    def used(self, made: Any, asked: torch.Tensor, theirs: Callable[[], Any]) -> Any:
        """Ours, unless it was compared and is not the host's; then the next is compared, too."""
        self._images += 1
        how = self._compared(asked) if self._images % EVERY == 2 and self.compares else ""
        if not how:
            return made
        self._images = 1
        self.renew()
        self.tell(f"a corner of the image {how}: the host's own is used")
        return theirs()

    def _compared(self, image: torch.Tensor) -> str:
        """How a corner of it is not the host's; empty where it is."""
        side = LATENTS if self.role == "decoder" else PIXELS
        part, plan = image[:1, :, :side, :side].contiguous(), self.program.last_plan
        try:
            with torch.no_grad(), without_search():
                right, ours = self.theirs(part), self.again(part)
            apart, added, whole = norms(ours, right, part).tolist()
        except Exception as error:
            if is_out_of_memory(error):
                return ""
            return f"could not be compared ({type(error).__name__}: {error})"
        finally:
            self.program.last_plan = plan
        return difference(apart, added, whole, epsilon(ours, right))
