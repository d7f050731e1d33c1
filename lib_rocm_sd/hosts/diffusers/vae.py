"""Diffusers' VAE: its decoder and encoder run as our programs, and go back to torch by themselves
where they cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.diffusers.components import has_compiled
from lib_rocm_sd.hosts.vae import ROLES, VIDEO, VaeStandIn, VaeWish
from lib_rocm_sd.modules.patches import Patch, put, take
from lib_rocm_sd.modules.stand_in import COMPILED, StandIn
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.vae.program import Program


@dataclass(frozen=True)
class VaePatch:
    """Which of ROLES run as our programs, and why the others do not."""

    programs: Mapping[str, Program]
    left_alone: Mapping[str, tuple[str, ...]]


class DiffusersStandIn(VaeStandIn):
    """Our program in the place of a VAE's decoder or encoder."""

    passed_on: ClassVar[tuple[type[Exception], ...]] = (MemoryError, ValueError)

    def __init__(self, vae: Any, role: str, wish: VaeWish, session: Session) -> None:
        super().__init__(getattr(vae, role), role)
        self.program = Program(self.module)
        self.wish, self._vae, self._session = wish, vae, session
        self._whole: Patch | None = None

    @property
    def session(self) -> Session:
        return self._session

    def obstacles(self) -> tuple[str, ...]:
        """Why this part of the VAE is left alone; empty if it need not be."""
        own = _own_way(self._vae) or (COMPILED if has_compiled(self.module) else "")
        return (own,) if own else self.program.reasons

    def put_in(self) -> str:
        other, name = super().put_in(), f"_{self.role.removesuffix('r')}"
        if self.program.is_over_time and not (other or self._whole) and hasattr(self._vae, name):
            self._whole = put(self._vae, name, WholeCall(self._vae, name, self))
        return other

    def take_out(self) -> None:
        if self._whole is not None:
            take(self._whole)
            self._whole = None
        super().take_out()
        self.program.release()

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else None

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        if self.program.is_over_time:
            if self.frames != 1:
                return VIDEO
        elif any(item is not None for item in (*args[1:], *kwargs.values())):
            return "it was given more than an image"
        left_to_us = self.wish == VaeWish()
        why = super().refusal(args[0]) or _own_way(self._vae)
        weight = next(self.module.parameters())
        return why or (unsuited(weight, self._session) if left_to_us else "")

    def again(self, part: torch.Tensor) -> torch.Tensor:
        return self.serve(part)

    def serve(self, asked: torch.Tensor) -> torch.Tensor:
        """`asked` (N, C, H, W) decoded or encoded. Out of memory and a caller's mistake raise."""
        try:
            return self.run(asked)
        finally:
            if getattr(self._vae, "_hf_hook", None) is not None:
                self.program.release()  # the pipeline takes the VAE off the GPU after each use

    def failed(self, error: Exception) -> str:
        return f"our program failed: {trouble.once(error)}"

    def tell(self, why: str) -> None:
        self._session.report.event(
            f"diffusers: the VAE's {self.role} ran on torch's own code: {why}"
        )


class WholeCall:
    """In the place of `_decode` or `_encode` of a VAE over time, which goes through the frames: it
    tells the decoder's or encoder's stand-in how many there are.
    """

    def __init__(self, vae: Any, name: str, stand_in: DiffusersStandIn) -> None:
        self._vae, self._name, self._stand_in = vae, name, stand_in
        self._theirs = getattr(vae, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._vae, self._name)  # a copy has the method of its class

    def __call__(self, frames: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._stand_in.count_frames(frames, self._theirs, getattr(self._vae, "clear_cache", None))
        try:
            return self._theirs(frames, *args, **kwargs)
        finally:
            self._stand_in.frames = 0


def unsuited(weight: torch.Tensor, session: Session = DEFAULT) -> str:
    """Why a VAE of such weights is faster on torch's own code; empty where ours runs it.

    On the CPU both are torch's.
    """
    if weight.device.type == "cpu":
        return ""
    if weight.dtype == torch.float32:
        return (
            "it is in float32, which is not needed: our program does not overflow in fp16 "
            "(vae.register_to_config(force_upcast=False))"
        )
    return "; ".join(engine.usable(weight.device, CONVS["3x3"], session))


def _own_way(vae: Any) -> str:
    """Which of diffusers' own ways of saving memory is on, and is left alone; empty for none."""
    for name in ("tiling", "slicing"):
        if getattr(vae, f"use_{name}", False):
            return f"{name} is switched on; vae.disable_{name}() leaves it to our program"
    return ""


@contextmanager
def patched_vae(
    vae: Any, mode: str, budget_bytes: int | None, session: Session = DEFAULT
) -> Iterator[VaePatch]:
    """Run the decoder and the encoder of `vae` as our programs inside the `with` block.

    `mode`: one of vae.policy.MODES. On leaving it, each has the forward that it had.
    """
    stand_ins: dict[str, DiffusersStandIn] = {}
    left: dict[str, tuple[str, ...]] = {}
    for role in ROLES:
        module = getattr(vae, role, None)
        if not isinstance(module, torch.nn.Module):
            continue
        current: Any = vars(module).get("forward")
        if isinstance(current, StandIn) and current.is_put_in:
            continue  # by an outer `with`
        stand_in = DiffusersStandIn(vae, role, VaeWish(mode, budget_bytes), session)
        reasons = stand_in.obstacles()
        if reasons:
            left[role] = reasons
            session.report.event(f"diffusers: the VAE's {role} is left alone: {'; '.join(reasons)}")
        else:
            stand_ins[role] = stand_in
    try:
        for stand_in in stand_ins.values():
            stand_in.put_in()
        yield VaePatch({role: item.program for role, item in stand_ins.items()}, left)
    finally:
        for stand_in in stand_ins.values():
            stand_in.take_out()
