"""What a Forge's VAE says that a decode or an encode will take, made true while ours runs it.

Forge moves other models off the GPU until so much is free. Read in
lllyasviel/stable-diffusion-webui-forge dfdcbab6, backend/patcher/vae.py, and
Panchovix/stable-diffusion-webui-reForge 3b56b268, ldm_patched/modules/sd.py: class VAE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lib_rocm_sd import report
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import kinds
from lib_rocm_sd.hosts.webui.coder import CoderStandIn
from lib_rocm_sd.modules.patches import Patch, put, take

NAMES = {"decoder": "memory_used_decode", "encoder": "memory_used_encode"}


class Estimate:
    """Bytes for images of one shape: the VAE's own estimate, or ours if that is less.

    A copy of the VAE that keeps it has the VAE's own where ours does not run.
    """

    def __init__(self, theirs: Callable[[Any, Any], float], coder: CoderStandIn, vae: Any) -> None:
        self._theirs = theirs
        self._coder = coder
        self._device = getattr(vae, "device", None)

    def __call__(self, shape: Any, dtype: Any) -> float:
        theirs = self._theirs(shape, dtype)
        try:
            ours = self._ours(shape, dtype)
        except Exception as error:
            report.event(f"a VAE's memory cannot be foreseen: {trouble.once(error)}")
            return theirs
        return theirs if ours is None else min(theirs, ours)

    def _ours(self, shape: Any, dtype: Any) -> int | None:
        if len(shape) != 4 or not isinstance(self._device, torch.device):
            return None
        return self._coder.needed_bytes(int(shape[2]), int(shape[3]), dtype, self._device)


class Estimates:
    """Those that were put in; for this process's VAE session, which locks."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def put(self, model: Any, coders: Iterable[CoderStandIn]) -> None:
        """Into the VAE of a loaded model, where it has estimates; nothing where they are ours."""
        vae = kinds.vae_of(model)
        for coder in coders:
            name = NAMES[coder.role]
            theirs = getattr(vae, name, None)
            if callable(theirs) and not isinstance(theirs, Estimate):
                self._patches.append(put(vae, name, Estimate(theirs, coder, vae)))

    def take(self) -> None:
        """Give back all."""
        while self._patches:
            take(self._patches.pop())
