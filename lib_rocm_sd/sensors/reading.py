"""One look at a card, and the sum of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reading:
    """None where the card does not tell."""

    power_w: float | None = None
    core_mhz: float | None = None
    memory_mhz: float | None = None


class Source(Protocol):
    """Reads one card. `origin`: where from, in words. A reading may fail as OSError."""

    origin: str

    def read(self) -> Reading:
        """What it tells now."""

    def close(self) -> None:
        """Nothing is read any more."""


@dataclass(frozen=True)
class Quantity:
    """Mean, least and most of several readings."""

    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class Summary:
    """Summary of the readings taken while something ran. `reason` says why there are none.
    `origin`: where the numbers come from.
    """

    readings: int = 0
    power_w: Quantity | None = None
    core_mhz: Quantity | None = None
    memory_mhz: Quantity | None = None
    origin: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"power and clocks: {self.reason}"
        named = (
            ("power", self.power_w, "W"),
            ("core clock", self.core_mhz, "MHz"),
            ("memory clock", self.memory_mhz, "MHz"),
        )
        lines = [
            f"{name:<14} {found.mean:>8.0f} {unit:<3} ({found.least:.0f} to {found.most:.0f})"
            for name, found, unit in named
            if found is not None
        ]
        return "\n".join([*lines, f"{self.readings} readings of {self.origin}"])


def summed(readings: Sequence[Reading], origin: str) -> Summary:
    """Summary of these readings. A quantity that no reading has is left out."""

    def quantity(name: str) -> Quantity | None:
        values = [value for each in readings if (value := getattr(each, name)) is not None]
        if not values:
            return None
        return Quantity(sum(values) / len(values), min(values), max(values))

    power, core, memory = map(quantity, ("power_w", "core_mhz", "memory_mhz"))
    if not (power or core or memory):
        return Summary(origin=origin, reason=f"{origin} tells neither power nor clocks")
    return Summary(len(readings), power, core, memory, origin)
