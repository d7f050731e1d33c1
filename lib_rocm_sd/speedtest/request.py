"""What a speed test is asked to do. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WHAT = ("attention", "vae", "step", "image")
PRESETS = ("quick", "standard", "custom")
LEAST_SIZE, MOST_SIZE, STEP = 64, 8192, 8
MOST_SIZES = 8
SHOWN = 40
"""Characters of a wrong value that a message repeats."""


@dataclass(frozen=True)
class Request:
    """`what`: parts of WHAT. `sizes`: a side of the picture in pixels each, with "custom" only."""

    what: tuple[str, ...] = WHAT
    preset: str = "quick"
    sizes: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; `parse` takes it back."""
        return {"what": list(self.what), "preset": self.preset, "sizes": list(self.sizes)}


def parse(mapping: object) -> Request:
    """The request that JSON or a form's fields describe; what is left out has its default.

    Raises ValueError, in words for people, for anything else.
    """
    if not isinstance(mapping, Mapping):
        raise ValueError("a speed test is asked for with an object")  # noqa: TRY004
    unknown = [key for key in mapping if key not in ("what", "preset", "sizes")]
    if unknown:
        raise ValueError(f"unknown: {shown(unknown[0])}; known are what, preset and sizes")
    preset = mapping.get("preset", "quick")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"preset is {shown(preset)}: it has to be one of {', '.join(PRESETS)}")
    what = _what(mapping.get("what", WHAT))
    sizes = _sizes(mapping.get("sizes", ()))
    if preset == "custom" and not sizes:
        raise ValueError("with the preset custom, sizes has to name at least one")
    if preset != "custom" and sizes:
        raise ValueError("sizes is for the preset custom only")
    return Request(what, preset, sizes)


def _what(given: object) -> tuple[str, ...]:
    parts = _list(given, "what")
    for part in parts:
        if not isinstance(part, str) or part not in WHAT:
            raise ValueError(f"what has {shown(part)}: it is made of {', '.join(WHAT)}")
    if not parts:
        raise ValueError(f"what is empty: choose at least one of {', '.join(WHAT)}")
    return tuple(part for part in WHAT if part in parts)


def _sizes(given: object) -> tuple[int, ...]:
    sizes = _list(given, "sizes")
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"{len(sizes)} sizes are too many: at most {MOST_SIZES}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            text = f"a size is {shown(size)}: it has to be a whole number of pixels"
            raise ValueError(text)  # noqa: TRY004
        if not LEAST_SIZE <= size <= MOST_SIZE:
            limits = f"{LEAST_SIZE} to {MOST_SIZE}"
            raise ValueError(f"a size is {shown(size)}: it has to be from {limits} pixels")
        if size % STEP:
            raise ValueError(f"a size is {size}: it has to be a multiple of {STEP}")
    return tuple(sorted(set(sizes)))


def _list(given: object, name: str) -> list[Any]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise ValueError(f"{name} is {shown(given)}: it has to be a list")  # noqa: TRY004
    return list(given)


def shown(value: object) -> str:
    """A value from outside as a message may repeat it: short, on one line."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        return "a number with very many digits"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
