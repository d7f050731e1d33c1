"""Stands in for `forward` of a UNet, and has a team compute its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.modules.stand_in import StandIn
from lib_rocm_sd.modules.unknown import UnknownModuleError
from lib_rocm_sd.several.subject import Subject
from lib_rocm_sd.several.team import Call, Team
from lib_rocm_sd.unet.blocks import TheirsError

NAMES = ("x", "timesteps", "context", "y")
"""Names of a UNet's parameters, in ldm and sgm."""


class SeveralStandIn(StandIn):
    """Stands in for the UNet of `subject`. `obstacle()`: why the host wants no call divided now.
    `ready(leaves)`: see Team.compute.
    """

    passed_on = (MemoryError, TheirsError)

    def __init__(
        self,
        subject: Subject,
        team: Team,
        obstacle: Callable[[], str],
        ready: Callable[[list[nn.Module]], str],
    ) -> None:
        super().__init__(subject.module)
        self._subject, self._team = subject, team
        self._obstacle, self._ready = obstacle, ready
        self._barred, self._barred_in = "", -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TheirsError as error:
            raise error.error from None

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        barred = self._barred if self._barred_in == self._team.generation else ""
        return super().refusal(*args, **kwargs) or barred or self._obstacle()

    def serve(self, asked: Any) -> Any:
        args, kwargs = asked
        call = bound(*args, **kwargs)
        subject = self._subject
        return self._team.compute(subject, call, self._part, lambda: self._ready(subject.leaves))

    def _part(self, **given: torch.Tensor) -> Any:
        try:
            return self.theirs(**given)
        except Exception as error:
            raise TheirsError(error) from error

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def failed(self, error: Exception) -> str:
        """Leave all calls to the host until the next pictures."""
        self._barred = f"ours failed: {type(error).__name__}: {error}"
        self._barred_in = self._team.generation
        return self._barred

    def tell(self, why: str) -> None:
        self._team.why, self._team.way = why, ()


def bound(*args: Any, **kwargs: Any) -> Call:
    """A call of a UNet, by the names of its parameters. UnknownModuleError where it cannot be
    divided by rows.
    """
    given = dict(zip(NAMES, args, strict=False)) | kwargs
    given = {name: value for name, value in given.items() if value is not None}
    others = [name for name in given if name not in NAMES]
    if others or len(args) > len(NAMES):
        raise UnknownModuleError((f"the UNet is called with {', '.join(others) or 'more'}",))
    x = given.get("x")
    if not isinstance(x, torch.Tensor) or x.ndim != 4:
        raise UnknownModuleError(("the UNet is called with something else than images",))
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != len(x):
            raise UnknownModuleError((f"{name} has not one row for each image",))
    return Call(given)
