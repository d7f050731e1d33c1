"""What `install.py test` leaves out, and `install.py test --sweeps`, `--all` and CI have.

A sweep is one assertion for many cases. A default run keeps its first case, its last, every tenth,
and of the others each that shows a value which recurs and that none before has shown: a GPU, an op,
a dtype, a mask, an odd size. Of `LONG`, nothing: each names a test of a default run that finds
mistakes of the same kind. Tests that are named (a file, `::`, `-k`) run with all their cases.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
EVERY = 10
FILE = Path(__file__).with_suffix(".json")
_CONTENT = json.loads(FILE.read_text(encoding="utf-8"))
SWEEPS = {f"{file}::{name}" for file, names in _CONTENT["sweeps"].items() for name in names}
"""Those that cost most. Where each case is another kind of mistake or refusal, none is left out, so
such a test is not listed.
"""
LONG: dict[str, str] = _CONTENT["long"]
"""Files, tests and cases that take seconds, and what a default run has in their place."""
VARIABLE = "ROCM_SD_THINNED"
"""Set in a default run, for those of `LONG` that another process runs: webui/inside_run.py."""


def some(cases: Sequence[Case]) -> Sequence[Case]:
    """Every seventh case of a loop within a test in a default run, else all."""
    return cases[::7] if os.environ.get(VARIABLE) else cases


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """What a default run keeps and what it leaves out, each in the order of `items`."""
    cases: dict[str, list[pytest.Item]] = {}
    left = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if not LONG.keys().isdisjoint((item.nodeid, name, name.partition("::")[0])):
            left.add(item.nodeid)
        elif name in SWEEPS:
            cases.setdefault(name, []).append(item)
    for sweep in cases.values():
        left |= {case.nodeid for case in sweep} - {case.nodeid for case in representatives(sweep)}
    sides: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for item in items:
        sides[item.nodeid in left].append(item)
    return sides


def representatives(sweep: Sequence[Any]) -> list[Any]:
    """The cases of a sweep that a default run keeps."""
    shown = [set(_values("", case.callspec.params)) for case in sweep]
    count = Counter(value for values in shown for value in values)
    recurring = {value for value, times in count.items() if times > 1}
    kept = {*range(0, len(sweep), EVERY), len(sweep) - 1}
    seen = set().union(*(shown[place] for place in kept))
    for place, values in enumerate(shown):
        if values & recurring - seen:
            kept.add(place)
            seen |= values
    return [case for place, case in enumerate(sweep) if place in kept]


def _values(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The plain values of a parameter and of what it consists of, each with its name."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _values(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _values(f"{name}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _values(name, each)
    elif " at 0x" not in (text := repr(value)):
        yield name, text
