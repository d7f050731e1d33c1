"""Diffusers' VAE: its decoder and encoder run as our programs, and go back to torch by themselves
where they cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.selftest import describe, is_out_of_memory
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.vae.program import Program, UnknownModuleError

ROLES = ("decoder", "encoder")
_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


@dataclass(frozen=True)
class VaePatch:
    """Which of ROLES run as our programs, and why the others do not."""

    programs: Mapping[str, Program]
    left_alone: Mapping[str, tuple[str, ...]]


class ProgramForward:
    """The forward of a VAE's decoder or encoder. Calls torch's own where ours cannot serve."""

    def __init__(
        self, vae: Any, role: str, mode: str, budget_bytes: int | None, session: Session = DEFAULT
    ) -> None:
        self.program = Program(getattr(vae, role))
        self._module: torch.nn.Module = getattr(vae, role)
        self._original = self._module.forward
        self._vae, self._role, self._session = vae, role, session
        self._options: dict[str, Any] = {"mode": mode, "budget_bytes": budget_bytes}

    def __call__(self, sample: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """`sample` (N, C, H, W) decoded or encoded. Out of memory and a caller's mistake raise."""
        if _is_compiling():
            return self._theirs(sample, *args, **options)
        why = self._obstacle(sample, (*args, *options.values()))
        if not why:
            try:
                return self.program(sample, session=self._session, **self._options)
            except UnknownModuleError as error:
                why = "; ".join(error.reasons)
            except Exception as error:
                if isinstance(error, ValueError) or is_out_of_memory(error):
                    raise
                why = f"our program failed: {describe(error)}"
        self._session.report.event(
            f"diffusers: the VAE's {self._role} ran on torch's own code: {why}"
        )
        return self._theirs(sample, *args, **options)

    def refusals(self) -> tuple[str, ...]:
        """Why this part of the VAE is left alone; empty if it need not be."""
        own = _own_way(self._vae)
        return (own,) if own else self.program.reasons

    def install(self) -> None:
        """Take the forward's place, on this instance only."""
        self._module.forward = self

    def remove(self) -> None:
        """Give the place back, unless somebody else has taken it meanwhile; and the memory."""
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]
        self.program.release()

    def _theirs(self, *args: Any, **options: Any) -> torch.Tensor:
        made: torch.Tensor = self._original(*args, **options)
        return made

    def _obstacle(self, sample: torch.Tensor, more: tuple[Any, ...]) -> str:
        if any(item is not None for item in more):
            return "it was given more than an image"
        wanted = torch.is_grad_enabled() and (
            sample.requires_grad or any(p.requires_grad for p in self._module.parameters())
        )
        if wanted:
            return "gradients are wanted"
        left_to_us = self._options["mode"] == "auto" and self._options["budget_bytes"] is None
        weight = next(self._module.parameters())
        return _own_way(self._vae) or (unsuited(weight) if left_to_us else "")


def unsuited(weight: torch.Tensor) -> str:
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
    return "; ".join(engine.usable(weight.device, CONVS["3x3"]))


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
    forwards: dict[str, ProgramForward] = {}
    left: dict[str, tuple[str, ...]] = {}
    for role in ROLES:
        module = getattr(vae, role, None)
        if not isinstance(module, torch.nn.Module):
            continue
        if isinstance(module.__dict__.get("forward"), ProgramForward):
            continue  # by an outer `with`
        forward = ProgramForward(vae, role, mode, budget_bytes, session)
        reasons = forward.refusals()
        if reasons:
            left[role] = reasons
            session.report.event(f"diffusers: the VAE's {role} is left alone: {'; '.join(reasons)}")
        else:
            forwards[role] = forward
    try:
        for forward in forwards.values():
            forward.install()
        yield VaePatch({role: forward.program for role, forward in forwards.items()}, left)
    finally:
        for forward in forwards.values():
            forward.remove()
