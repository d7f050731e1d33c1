"""Why a host's module cannot be run by ours, or what one of its own has raised."""

from __future__ import annotations

from collections.abc import Iterable

MOST_ALIKE = 2
"""Layers that are named one by one where the same is said of them."""


class UnknownModuleError(ValueError):
    """The module has a structure that is not known; `reasons` say what."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__(f"this module cannot be run: {'; '.join(reasons)}")
        self.reasons = reasons


class TheirsError(Exception):
    """A module of the host raised `error` when it was called amid a block of ours."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def brief(reasons: Iterable[str]) -> list[str]:
    """Reasons for people: what is said of many layers is said once, of the first."""
    alike: dict[str, list[str]] = {}
    for reason in reasons:
        name, _, what = reason.partition(" ")
        alike.setdefault(what, []).append(name)
    found = []
    for what, names in alike.items():
        if len(names) <= MOST_ALIKE:
            found += [f"{name} {what}".strip() for name in names]
        else:
            found.append(f"{names[0]} and {len(names) - 1} others: {what}")
    return found
