"""A VAE's decoder or encoder as our program, while a VAE of ours is decoding or encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import gate, trouble
from lib_rocm_sd.hosts.comfyui import host
from lib_rocm_sd.hosts.comfyui.tally import tally
from lib_rocm_sd.modules.unknown import brief
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.vae.bands import Interrupted
from lib_rocm_sd.vae.checked import CheckedStandIn
from lib_rocm_sd.vae.estimate import needed_bytes
from lib_rocm_sd.vae.policy import shortfall
from lib_rocm_sd.vae.program import PARTS, Program


@dataclass(frozen=True)
class VaeWish:
    """What a node asks of a VAE. `mode`: "auto" or "banded" of vae.policy; `roles`: of PARTS, those
    that may be ours. Copies of a VAE share it, and with it the session's plans.
    """

    session: Session
    mode: str = "auto"
    budget_bytes: int | None = None
    roles: tuple[str, ...] = tuple(PARTS)

    def __deepcopy__(self, memo: dict[int, Any]) -> VaeWish:
        return self


class Coder(CheckedStandIn):
    """Stands in for a decoder or encoder, as `role` says, from `begin` to `end`."""

    passed_on = (MemoryError, Interrupted, host.Cancelled)

    def __init__(self, module: nn.Module, role: str) -> None:
        super().__init__(module)
        self.role = role
        self.program = Program(module)
        self._wish: VaeWish | None = None
        self.was_left = False
        """Whether the last image was ComfyUI's. So may be the next: how the weights are loaded is
        known only after memory was made free for it.
        """

    def begin(self, wish: VaeWish) -> None:
        """Serve the module's calls from now on, unless another does."""
        self._wish = wish
        other = self.put_in()
        if other:
            self.tell(f"its forward has been replaced ({other})")

    def end(self) -> None:
        """Leave the module as it was, and the device without anything of ours."""
        self.take_out()
        self.program.release()

    def unfit(self, dtype: torch.dtype, device: torch.device) -> str:
        """Why ours cannot run here with weights of this dtype; empty where it can.

        `device`: of the image. Weights that are brought in each call lie elsewhere, perhaps in
        another dtype, and what is said of them is said first.
        """
        why = list(identify(device).reasons)
        if not why and (self.program.reasons or dtype not in HALVES):
            why = brief(self.program.refresh())
        if not why and dtype not in HALVES:
            name = str(dtype).removeprefix("torch.")
            why = [f"its weights are {name}; with --fp16-vae it can be ours, and does not overflow"]
        return "; ".join(why or usable(device))

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        """One image."""
        return args[0] if len(args) == 1 and not kwargs else None

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        image = args[0]
        if not isinstance(image, torch.Tensor) or image.ndim != 4:
            return "it is not given one (N, C, H, W)"
        weight = next(self.module.parameters())
        return super().refusal(image) or self.unfit(weight.dtype, image.device)

    def again(self, part: torch.Tensor) -> torch.Tensor:
        assert self._wish is not None
        return self.program(part, session=self._wish.session)

    def serve(self, asked: torch.Tensor) -> torch.Tensor:
        """What the module gives for one image (N, C, H, W)."""
        assert self._wish is not None
        wish = self._wish
        made = self.program(
            asked,
            session=wish.session,
            mode=wish.mode,
            budget_bytes=wish.budget_bytes,
            progress=host.progress_bar(),
            interrupt=host.interrupted,
        )
        self.was_left = False
        tally.served(PARTS[self.role])
        self._note(wish)
        return made

    def _note(self, wish: VaeWish) -> None:
        """Say so where the budget was not enough."""
        plan = self.program.last_plan
        message = "" if plan is None else shortfall(self.role, plan, wish.budget_bytes)
        if message:
            wish.session.report.event(message)

    def failed(self, error: Exception) -> str:
        return f"ours failed: {trouble.once(error)}"

    def tell(self, why: str) -> None:
        self.was_left = True
        tally.leave(PARTS[self.role], why)

    def needed_bytes(
        self, height: int, width: int, dtype: torch.dtype, device: torch.device, wish: VaeWish
    ) -> int:
        """Device memory that has to be free for an image to be made as the wish says.

        Kernels are compiled and tested now where they were not. Raises as Program.prepare does.
        """
        return needed_bytes(
            *(self.program, self.module, height, width, dtype, device),
            session=wish.session,
            mode=wish.mode,
            budget_bytes=wish.budget_bytes,
        )


def usable(device: torch.device) -> list[str]:
    """Why our kernels cannot run a VAE on a device; starts to compile and try at the first use."""
    if engine.gate is None and not identify(device).reasons:
        gate.begin(host.say)
    return engine.usable(device, CONVS["3x3"])
