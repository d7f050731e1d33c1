"""What the tables of several benchmarks have in common: the figures of a row, as text and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.selftest import FAILURES, describe
from lib_rocm_sd.engine.timing import timed
from lib_rocm_sd.ops.base import Launch, Variant
from lib_rocm_sd.report import flattened

WARM_UP = 3
Timer = Callable[[Callable[[int], None], int, torch.device], list[float]]


@dataclass(frozen=True)
class TimedRow:
    """One way to run one problem. Times in µs; `error` is max |out - float64| / max |float64|.

    `reason` is set instead of figures where it did not run or was not right.
    """

    label: str
    problem: str
    way: str
    config: dict[str, Any] | None = None
    median_us: float = math.nan
    p10_us: float = math.nan
    p90_us: float = math.nan
    error: float = math.nan
    reason: str = ""


Row = TypeVar("Row", bound=TimedRow)


def figured(
    row: Row, error_of: Callable[[], float], tolerance: float, timed_row: Callable[[], Row]
) -> Row:
    """What `timed_row` gives, with its error; or `row` with the reason why not."""
    try:
        error = error_of()
        if not error <= tolerance:
            return replace(row, error=error, reason=f"wrong: error {error:.1e}")
        return replace(timed_row(), error=error)
    except FAILURES as failure:
        return replace(row, reason=describe(failure))


def refusals_of(
    variant: Variant[Any, Any], problem: Any, info: DeviceInfo, launch: Launch | None
) -> list[str]:
    """Why a variant cannot be timed: what it says itself, or, of ours, that nothing launches it."""
    found = variant.refusals(info.arch, problem)
    return list(info.reasons) if not found and variant.ours and launch is None else found


def spread(
    once: Callable[[int], None], runs: int, device: torch.device, timer: Timer = timed
) -> dict[str, float]:
    """The fields median_us, p10_us and p90_us of a row, after a few calls that do not count."""
    timed(once, WARM_UP, device)
    times = sorted(timer(once, runs, device))
    return {
        "median_us": statistics.median(times),
        "p10_us": times[len(times) // 10],
        "p90_us": times[len(times) * 9 // 10],
    }


def is_named(words: Sequence[str] | None, text: str) -> bool:
    """Whether a word of --case is in a case's name or shape; True where there are no words."""
    return not words or any(word.lower() in text.lower() for word in words)


def none_named(words: Sequence[str] | None) -> str:
    """What is said where no case is left."""
    return f"--case: no case has {' or '.join(words or ())} in its name or shape"


def tiles(row: Any) -> str:
    """The config of a row; empty where it has none."""
    fields = {} if row.config is None else flattened(row.config)
    return ",".join(f"{name}={value}" for name, value in fields.items())


def as_json(row: Any) -> dict[str, Any]:
    """The row as JSON has it: what was not measured is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(row).items()
    }
