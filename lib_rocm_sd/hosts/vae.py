"""A VAE's decoder or encoder of ours in a host, and the memory that has to be free for it.

Now and then a corner of an image is computed by the host's own, too: what is packed of weights
shows no write through `.data`, and not all that decides what the host would compute can be watched
(modules/watch.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.modules.compared import difference, epsilon, is_wanted, norms, without_search
from lib_rocm_sd.modules.stand_in import StandIn
from lib_rocm_sd.policy import MEMORY
from lib_rocm_sd.vae.policy import FREE_SHARE, shortfall
from lib_rocm_sd.vae.program import PARTS, Program

ROLES = tuple(PARTS)
VIDEO = (
    "it is given a video, or called by code that may give further frames later: each frame depends "
    "on those before it, and ours makes single pictures"
)
EVERY = 16
"""One of so many images is compared, beginning with the second."""
LATENTS, PIXELS = 16, 128
"""Sides of the corner of what a decoder and an encoder are given: a few milliseconds' work."""
ESTIMATES = {"decoder": "memory_used_decode", "encoder": "memory_used_encode"}
"""What the VAEs of ComfyUI and the Forges call their estimates."""


@dataclass(frozen=True)
class VaeWish:
    """What is asked of a VAE. `mode`: one of vae.policy.MODES. `budget_bytes`: device memory that
    an image keeps to; None: by the session's level.
    """

    mode: str = "auto"
    budget_bytes: int | None = None


class VaeStandIn(StandIn):
    """Stands in for the forward of a decoder or encoder, as `role` says."""

    program: Program
    wish: VaeWish

    def __init__(self, module: nn.Module, role: str) -> None:
        super().__init__(module)
        self.role = role
        self.frames = 0
        """Frames in the call of the VAE that is under way, which its decoder is not told."""
        self._images = 0

    @property
    @abstractmethod
    def session(self) -> Session:
        """By which a call is computed now."""

    @property
    def compares(self) -> bool:
        """Whether images are compared at all."""
        return is_wanted()

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        """One image; a frame comes with a cache."""
        plain = len(args) == 1 and (not kwargs or self.program.is_over_time)
        return args[0] if plain else None

    def run(self, image: torch.Tensor, **watched: Callable[..., Any]) -> torch.Tensor:
        """What the module gives for one image (N, C, H, W) or frame (N, C, 1, H, W), as it is
        wished. `watched`: `progress` and `interrupt` of Program.
        """
        wish = self.wish
        return self._made(image, mode=wish.mode, budget_bytes=wish.budget_bytes, **watched)

    def _made(self, image: torch.Tensor, **how: Any) -> torch.Tensor:
        if not self.program.is_over_time:
            return self.program(image, session=self.session, **how)
        return self.program(image.squeeze(2), session=self.session, **how).unsqueeze(2)

    def count_frames(self, image: Any, *functions: Any) -> None:
        """Note how many frames a VAE over time is given, (N, C, T, H, W), by these `functions` of
        it. Others than its authors' may keep the cache for frames of a later call.
        """
        family = type(self.module).__module__
        known = all(getattr(each, "__module__", "") == family for each in functions)
        self.frames = image.shape[2] if known and getattr(image, "ndim", 0) == 5 else 0

    def again(self, part: torch.Tensor) -> torch.Tensor:
        """What ours makes of a part (1, C, .., H, W), beside what the host asked for."""
        return self._made(part)

    def shortage(self) -> str:
        """By how much the last image has missed its budget, for people; empty where it has not."""
        plan = self.program.last_plan
        return "" if plan is None else shortfall(self.role, plan, self.wish.budget_bytes)

    def failed(self, error: Exception) -> str:
        return f"ours failed: {trouble.once(error)}"

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
        part, plan = image[:1, ..., :side, :side].contiguous(), self.program.last_plan
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

    def needed_bytes(
        self,
        height: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        wish: VaeWish,
        session: Session,
    ) -> int:
        """Device memory that has to be free for one image to be made as `wish` says.

        What the whole frame takes, divided by the share of free memory that the level may plan
        with, or what the bands take. Kernels are compiled and tested now where they were not.
        Raises as Program.prepare does.
        """
        level = session.policy
        whole = wish.mode == "auto" and wish.budget_bytes is None and level is not MEMORY
        plan = self.program.prepare(
            *(height, width, dtype, device),
            session=session,
            mode="whole" if whole else wish.mode,
            budget_bytes=wish.budget_bytes,
        )
        packed = sum(tensor.numel() for tensor in self.module.parameters()) * dtype.itemsize
        share = (level.workspace_share or FREE_SHARE) if whole else 1.0
        return packed + int(plan.peak_bytes / share)


class Estimate(ABC):
    """Bytes for images of one shape: `theirs`, the host's own estimate, or ours if that is less.

    The host moves other models off `device` until so much is free.
    """

    def __init__(self, theirs: Callable[[Any, Any], float], device: Any) -> None:
        self.theirs, self._device = theirs, device

    def __call__(self, shape: Any, dtype: Any) -> float:
        theirs, device, ours = self.theirs(shape, dtype), self._device, None
        try:
            single = len(shape) == 4 or (len(shape) == 5 and shape[2] == 1)
            if single and isinstance(device, torch.device):
                ours = self.ours(int(shape[-2]), int(shape[-1]), dtype, device)
        except Exception as error:
            self.tell(f"memory cannot be foreseen: {trouble.once(error)}")
            return theirs
        return theirs if ours is None else min(theirs, ours)

    @abstractmethod
    def ours(self, height: int, width: int, dtype: torch.dtype, device: torch.device) -> int | None:
        """What ours needs; None where ours will not run."""

    @abstractmethod
    def tell(self, why: str) -> None:
        """Say why the host's own estimate is used."""
