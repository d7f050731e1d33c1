"""A CPU that plays the card for the nodes: what is ours is computed by formula, or by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.hosts import attention, upscaler
from lib_rocm_sd.hosts.comfyui import unet, vae
from lib_rocm_sd.hosts.read import unet as reader
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.unet import stand_in

CARD = DeviceInfo(0, "AMD Radeon RX 7900 XTX", "hip", "gfx1100", by_gfx("gfx1100"))
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass
class Engine:
    """Attention in float64, so that it cannot be ComfyUI's own result by accident."""

    seen: list[Any] = field(default_factory=list)
    gate: Any = "put there already"
    why_not: tuple[str, ...] = ()
    fails: Exception | None = None

    def route(self, op: Any, inputs: Any, session: Any) -> Any:
        op.problem_of(inputs)
        plan = SimpleNamespace(refusals={"rocm_sd": list(self.why_not)}, why="expected")
        return SimpleNamespace(is_ours=not self.why_not, plan=plan)

    def follow(self, route: Any, op: Any, inputs: Any, session: Any) -> torch.Tensor:
        self.seen.append((inputs, session))
        if self.fails is not None:
            raise self.fails
        return reference(inputs).to(inputs.q.dtype)


def play(put: Callable[[Any, str, Any], Any]) -> Engine:
    """The CPU is a card of ours, for attention by `Engine`, for the VAE and the UNet's blocks by
    torch's operations. `put` sets attributes.
    """
    made = Engine()
    for module in (attention, vae):
        put(module, "identify", lambda device: CARD)
    for module in (attention, vae, reader, stand_in):
        put(module, "HALVES", FLOATS)
    put(unet, "unusable", lambda device: [])
    put(attention, "engine", made)
    put(upscaler, "engine", SimpleNamespace(usable=lambda *asked: []))
    put(vae, "usable", lambda device: [])
    return made
