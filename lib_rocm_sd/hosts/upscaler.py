"""An upscaling network of ours in a host, which gives it whole pictures.

Hosts cut pictures into tiles, since their own network takes more memory the larger a picture is.
Ours makes bands by itself, without seams. What ours cannot compute goes back to the host, which
begins again with its own tiles.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.modules.stand_in import (
    COMPILED,
    StandIn,
    UnknownModuleError,
    brief,
    is_compiled,
)
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.upscaler.program import Upscaler
from lib_rocm_sd.vae.bands import Interrupted, Overflow
from lib_rocm_sd.vae.policy import FREE_SHARE, host_available_bytes

Shape = Sequence[int]
PIXEL_BYTES = 36
"""Main memory that a host takes for each pixel of a result that it is given as a whole: three
colours, three times in float32.
"""


class LeftError(Exception):
    """The host has to upscale a picture; the message says why."""


class UpscalerStandIn(StandIn):
    """Stands in for the forward of a network within `whole`. The network's own is not called there:
    the host knows how.
    """

    passed_on = (MemoryError, Interrupted)

    def __init__(self, network: nn.Module, session: Session) -> None:
        super().__init__(network)
        self.program = Upscaler(network)
        self._session, self._watched = session, dict[str, Any]()
        self._why = "it is not called with one picture"

    def begin(self, session: Session, **watched: Any) -> None:
        """A picture is to be made for `session`; `watched` as in `whole`."""
        self._session, self._watched = session, watched

    @property
    def manner(self) -> str:
        """How the last picture was made, for people."""
        plan = self.program.last_plan
        return "whole picture" if plan is None or plan.whole else "bands"

    def needed_bytes(self, shape: Shape, device: torch.device) -> int:
        """Device memory that has to be free for a picture (C, H, W) to be made at once. Kernels are
        compiled and tested now where they were not. LeftError where ours cannot make it.
        """
        (height, width), session = shape[-2:], self._session
        try:
            why = self._against(shape, device)
            if why:
                raise LeftError(why)
            plan = self.program.prepare(
                height, width, self.program.dtype, device, session=session, mode="whole"
            )
        except UnknownModuleError as error:
            raise LeftError("; ".join(brief(error.reasons))) from None
        return int(plan.peak_bytes / (session.policy.workspace_share or FREE_SHARE))

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        one = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        return args[0] if one else None

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        return super().refusal(*args) or self._against(args[0].shape, args[0].device)

    def _against(self, shape: Shape, device: torch.device) -> str:
        """Why not all convolutions would be ours. Torch's, in half precision and of the whole
        picture, are what the host avoids on many cards. A gate is asked before anything is
        compiled.
        """
        why = engine.usable(device, CONVS["3x3"], self._session)
        if why:
            return "; ".join(why)
        sides = [side * self.program.scale for side in shape[-2:]]
        needed, there = PIXEL_BYTES * math.prod(sides), host_available_bytes()
        if needed > there:
            return (
                f"a result of {sides[1]} x {sides[0]} as a whole takes {needed >> 20} MiB of main "
                f"memory, of which {there >> 20} MiB may be taken"
            )
        work = self.program.work(*shape[-2:])
        taken = self.program.network.in_channels
        if [*shape[-3:-2]] != [taken]:
            return f"a picture of shape {tuple(shape)} does not have the network's {taken} channels"
        for op, problem in {op.test_problems(each): (op, each) for op, each in work}.values():
            why = engine.usable(device, op, self._session, problem)
            if why:
                return f"{problem}: {'; '.join(why)}"
        return ""

    def serve(self, asked: torch.Tensor) -> torch.Tensor:
        """What the network gives for one picture (N, C, H, W)."""
        return self.program(asked, session=self._session, **self._watched)

    def failed(self, error: Exception) -> str:
        why = str(error) if isinstance(error, Overflow) else trouble.once(error)
        return f"ours failed: {why}"

    def tell(self, why: str) -> None:
        self._why = why

    def theirs(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_put_in:
            raise LeftError(self._why)
        return super().theirs(*args, **kwargs)


_kept: WeakKeyDictionary[Any, UpscalerStandIn] = WeakKeyDictionary()
"""By descriptor. A host may keep a model: what was read of it, its plans, and its packed weights
where these do not move, are the next picture's too.
"""


@contextmanager
def whole(model: Any, session: Session, **watched: Any) -> Iterator[UpscalerStandIn]:
    """Within it the network of a spandrel descriptor, which a host calls with whole pictures, is
    ours. `watched`: `progress` and `interrupt` of Upscaler.

    Raises LeftError where it cannot be, also for want of memory; Interrupted.
    """
    network = getattr(model, "model", None)
    if not isinstance(network, nn.Module) or not isinstance(model, Hashable):
        raise LeftError("it is no network that spandrel has loaded")
    if is_compiled(network):
        raise LeftError(COMPILED)
    stand_in = _kept.get(model)
    if stand_in is None or stand_in.module is not network:
        stand_in = _kept[model] = UpscalerStandIn(network, session)
    stand_in.begin(session, **watched)
    other = stand_in.put_in()
    if other:
        raise LeftError(f"another extension has replaced its forward ({other})")
    try:
        yield stand_in
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise LeftError(f"there is too little memory ({trouble.once(error)})") from None
    finally:
        stand_in.take_out()
        if stand_in.program.is_stale:  # the host has moved the network
            stand_in.program.release()
