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
    def barred(self) -> str:
        """Why it must not be launched; empty where it may be, and where it is still to be tried."""
        return "" if self.refusal is None or self.refusal.waits else self.refusal.reason


Wanted = tuple[Place, Subject, bool]
"""A class to be tried on a card; True: also after a fault of another."""


class Queue:
    """Classes waiting to be tried. Not thread-safe."""

    def __init__(self) -> None:
        self._items: list[Wanted] = []

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, place: Place, subject: Subject, force: bool) -> None:
        self._items.append((place, subject, force))

    def take(self) -> list[Wanted]:
        """The first, and all that can be tried with it."""
        place, _, force = self._items[0]
        taken = [item for item in self._items if (item[0], item[2]) == (place, force)]
        self._items = [item for item in self._items if item not in taken]
        return taken

    def clear(self) -> None:
        self._items.clear()
