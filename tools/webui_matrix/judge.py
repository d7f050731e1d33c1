"""What becomes of a scenario's pictures: how far apart they are, and what that means."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from tools.webui_client import Made

FLOOR_MAX = 2
FLOOR_MEAN = 0.1
"""Of 255: what our arithmetic may differ by where another of the host's own differs by less."""
SHARE = 4.0
"""The floor of the mean is at most this part of the effect: a lost effect is above it."""
LEAST_EFFECT = 0.02
OURS = "lib_rocm_sd"
TRACEBACK = "Traceback (most recent call last):"

RIGHT, WRONG, FAILED, SKIPPED = "right", "WRONG", "FAILED", "skipped"
NOT_OURS, NO_EFFECT, UNSTEADY = "right, nothing is ours", "NO EFFECT", "UNSTEADY"
BAD = (WRONG, FAILED, NO_EFFECT, UNSTEADY)


@dataclass(frozen=True)
class Apart:
    """Largest and mean difference of two answers' pixels, of 255; whether the bytes are the same.

    Another number of pictures, or another size, is as far as can be.
    """

    max: int = 0
    mean: float = 0.0
    same: bool = True

    def __str__(self) -> str:
        return "same" if self.same else f"{self.max}/{self.mean:.3f}"


FAR = Apart(255, 255.0, False)


def apart(made: Made, other: Made, first: bool = False) -> Apart:
    """Of all pictures, or of the `first` of each alone."""
    if made.files == other.files:
        return Apart()
    pairs = list(zip(made.frames, other.frames, strict=False))[: 1 if first else None]
    if not first and len(made.frames) != len(other.frames):
        return FAR
    if any(mine.shape != its.shape for mine, its in pairs):
        return FAR
    far = [abs(mine - its) for mine, its in pairs]
    largest = max(int(each.max()) for each in far)
    return Apart(largest, round(max(float(each.mean()) for each in far), 4), False)


def farthest(found: list[Apart]) -> Apart:
    return max(found, key=lambda each: (each.mean, each.max, not each.same), default=Apart())


@dataclass
class Found:
    """Of one scenario; `off` and `on` are our script's states.

    `repeats`: two pictures with ours off, one after the other, have the same bytes.
    """

    on_off: Apart = field(default_factory=Apart)
    off_again: Apart = field(default_factory=Apart)
    repeats: bool = True
    effect: Apart = FAR
    yardstick: Apart = field(default_factory=Apart)
    residue: dict[str, Apart] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=lambda: {"off": [], "on": []})
    tracebacks: list[str] = field(default_factory=list)
    ours: bool = True

    def bound(self) -> tuple[float, float]:
        """What an "on" may differ from an "off" by: max and mean."""
        floor = min(FLOOR_MEAN, self.effect.mean / SHARE)
        return max(FLOOR_MAX, 2 * self.yardstick.max), max(floor, 2 * self.yardstick.mean)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict(found: Found) -> tuple[str, list[str]]:
    """One of the words above, and why it is not "right"."""
    off, on = found.errors["off"], found.errors["on"]
    if off:
        return FAILED, [f"without ours: {text}" for text in off]
    why = [f"fails with ours on: {text}" for text in on]
    most, mean = found.bound()
    if not found.off_again.same and found.repeats:
        why.append(f"off after on is another picture, by {found.off_again}")
    if found.repeats and (found.on_off.max > most or found.on_off.mean > mean):
        why.append(f"on is {found.on_off} from off, more than {most:g}/{mean:.3f}")
    for state, left in found.residue.items():
        if not left.same:
            why.append(f"the plain picture with ours {state} is another one afterwards, by {left}")
    why += [f"a traceback of ours: {text}" for text in found.tracebacks]
    if why:
        return WRONG, why
    if not found.repeats:
        return UNSTEADY, [f"the same request again is {found.off_again} apart, without ours"]
    if found.effect.mean < LEAST_EFFECT or found.effect.mean <= mean:
        return NO_EFFECT, [f"{found.effect}: losing it would not be seen"]
    return (RIGHT if found.ours else NOT_OURS), []


def tracebacks_of_ours(console: str) -> list[str]:
    """The last line of each traceback that goes through our code, with the last file of ours."""
    found: list[str] = []
    for part in console.split(TRACEBACK)[1:]:
        lines = [line for line in part.split("\n")[1:] if line.strip()]
        margin = _indent(lines[0]) - 2 if lines else 0
        length = next((at for at, line in enumerate(lines) if _indent(line) <= margin), len(lines))
        ours = [line.strip() for line in lines[:length] if OURS in line]
        if ours:
            found.append(f"{(lines + ['?'])[length].strip()[:200]} <- {ours[-1][:160]}")
    return list(dict.fromkeys(found))


def _indent(line: str) -> int:
    return len(re.match(r"\s*", line).group())  # type: ignore[union-attr]
