"""What ran, and why not the others: counters per problem, and events that are told once."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

from lib_rocm_sd import console

log = console.Log()
EVENTS_KEPT = 100
ROWS_KEPT = 1000
"""Beside those that an engine's routes still count in."""


class OpName(Protocol):
    """What an op is called: by programs, by the folder it lies in, by people."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def title(self) -> str: ...


class UsedRow:
    """One way in which one problem was run. `calls`, since `begin`, is counted by the engine."""

    __slots__ = (
        "__weakref__",
        "calls",
        "config",
        "op",
        "part",
        "problem",
        "reasons",
        "variant",
        "why",
    )

    def __init__(self, part: str, op: OpName, problem: Any, variant: str, config: Any) -> None:
        self.part = part
        self.op = op
        self.problem = problem
        self.variant = variant
        self.config = config
        self.why = ""
        self.reasons: Mapping[str, Sequence[str]] = {}
        self.calls = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: part, op with family and title, problem, variant, config, why, reasons (of
        those not used), calls.
        """
        return {
            "part": self.part,
            "op": self.op.name,
            "family": self.op.family,
            "title": self.op.title,
            "problem": str(self.problem),
            "variant": self.variant,
            "config": config_fields(self.config),
            "why": self.why,
            "reasons": {name: list(why) for name, why in self.reasons.items()},
            "calls": self.calls,
        }


def config_fields(config: Any) -> Any:
    """A config as JSON holds it: the fields of a dataclass, anything else unchanged."""
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else config


def flattened(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config's fields by one name each, as in `keys.block`."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": each for inner, each in flattened(value).items()}
        else:
            found[name] = value
    return found


class Report:
    """Counters and events of one engine, for several threads. A call costs one `row.calls += 1`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: WeakValueDictionary[tuple[Any, ...], UsedRow] = WeakValueDictionary()
        self._kept: dict[tuple[Any, ...], UsedRow] = {}
        self._events: dict[str, None] = {}
        self._device = ""
        self._level = ""

    def row(
        self,
        part: str,
        op: OpName,
        problem: Any,
        variant: str,
        config: Any,
        why: str = "",
        reasons: Mapping[str, Sequence[str]] | None = None,
    ) -> UsedRow:
        """The row to count calls in, made when first asked for. `part`: of the model, as the caller
        says; `reasons`: of those not used, read when somebody looks.
        """
        with self._lock:
            key = (part, op.name, problem, variant, config)
            row = self._rows.setdefault(key, UsedRow(part, op, problem, variant, config))
            self._keep(key, row)
            row.why = why
            log.info("%s: %s runs %s (%s)", op.name, variant, problem, why)
            row.reasons = {} if reasons is None else reasons
            return row

    def describe(self, device: str, level: str) -> None:
        """Note the device and the level that the rows are about."""
        self._device, self._level = device, level

    def event(self, message: str) -> None:
        """Log `message` and keep it for the report; a message that was told before is ignored."""
        with self._lock:
            if message in self._events:
                return
            self._events[message] = None
            while len(self._events) > EVENTS_KEPT:
                del self._events[next(iter(self._events))]
        log.warning("%s", message)

    def begin(self) -> None:
        """Start counting anew: a host calls it before each generation. Events stay."""
        with self._lock:
            for row in list(self._rows.values()):
                row.calls = 0

    def clear(self) -> None:
        """Forget everything, events too."""
        with self._lock:
            self._rows.clear()
            self._kept.clear()
            self._events.clear()

    def snapshot(self) -> dict[str, Any]:
        """JSON-able: device, level, rows with at least one call since `begin`, events."""
        with self._lock:
            return {
                "device": self._device,
                "level": self._level,
                "rows": [row.as_dict() for row in self._used()],
                "events": list(self._events),
            }

    def summary(self) -> str:
        """For an infotext: 'attention: rocm_sd, sdpa', the most called first; '' if nothing ran."""
        with self._lock:
            calls: dict[str, dict[str, int]] = {}
            for row in self._used():
                of_op = calls.setdefault(row.op.name, {})
                of_op[row.variant] = of_op.get(row.variant, 0) + row.calls
        parts = (
            f"{op}: {', '.join(sorted(names, key=lambda name: -names[name]))}"
            for op, names in calls.items()
        )
        return "; ".join(parts)

    def text(self) -> str:
        """A table for people: what ran how often, then why the others did not, then events."""
        shot = self.snapshot()
        lines = [f"device {shot['device'] or '(none yet)'}, level {shot['level'] or '(none yet)'}"]
        lines += [
            f"{row['calls']:7d} x  {row['op']} {row['variant']:8s} {row['problem']}  ({row['why']})"
            for row in shot["rows"]
        ]
        refused: dict[str, None] = {}
        for row in shot["rows"]:
            for name, texts in row["reasons"].items():
                refused.update({f"not {name}: {'; '.join(texts)}": None})
        return "\n".join([*lines, *refused, *(f"event: {text}" for text in shot["events"])])

    def _keep(self, key: tuple[Any, ...], row: UsedRow) -> None:
        """Add a row. Beyond ROWS_KEPT, drop the oldest one without calls, else the oldest."""
        self._kept[key] = row
        if len(self._kept) > ROWS_KEPT:
            idle = (known for known, old in self._kept.items() if not old.calls and old is not row)
            oldest = next(iter(self._kept))
            del self._kept[next(idle, oldest)]

    def _used(self) -> list[UsedRow]:
        return [row for row in list(self._rows.values()) if row.calls]


report = Report()
"""The report of the process's engine; the module's functions are its methods."""

begin = report.begin
event = report.event
snapshot = report.snapshot
summary = report.summary
text = report.text
