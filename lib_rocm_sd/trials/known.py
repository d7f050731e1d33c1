"""What a gate knows: of each class that it was asked about, and of its own work."""

from __future__ import annotations

from dataclasses import dataclass

from lib_rocm_sd.engine.gating import Refusal
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.subject import Subject


@dataclass(frozen=True)
class GateState:
    """`done` of `total` classes were tried; `subject` is the one in work, empty if none.

    `refused`: classes that must not be launched, in words, with the reason of each. `halted`: why
    nothing more is tried by itself, empty where it is.
    """

    running: bool = False
    done: int = 0
    total: int = 0
    subject: str = ""
    refused: tuple[tuple[str, str], ...] = ()
    halted: str = ""


@dataclass(frozen=True)
class Known:
    """A class on a card. `key`: of its verdict; empty where it does not compile yet."""

    subject: Subject
    place: Place
    key: str
    refusal: Refusal | None

    @property
    def waits(self) -> bool:
        """It is still to be tried."""
        return self.refusal is not None and self.refusal.waits

    @property
    def is_barred(self) -> bool:
        """It must not be launched."""
        return self.refusal is not None and not self.refusal.waits
