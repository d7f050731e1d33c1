"""A suite's result as JSON: its format, reading what strangers send, and whether two compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lib_rocm_sd.lab import speed_result
from lib_rocm_sd.lab.rows import NAN, QUANTITIES, SECONDS, TRACE_POINTS, Columns, Row
from lib_rocm_sd.lab.speed_result import (
    DATE,
    MOST_TEXT,
    checked,
    contents,
    facts_of,
    files,
    loaded,
    reason_of,
)

FORMAT = "rocm_sd suite 1"
COLUMNS = Columns(
    "part=test workload=case way unit median p10 p90 runs first p95 p99 within peak_mib cpu_ms "
    "power_w energy_j core_mhz temperature_c slowed trace psnr ssim flip largest ran note reason",
    ("way", "case", "test", "unit"),
    MOST_TEXT,
)
"""A row's fields. `energy_j`: of a picture. Distances are from the same picture in float32. What a
machine has no sensor for is null. A further field does not change FORMAT's number, since a reader
ignores what it does not know.
"""
PARTS = (
    "picture",
    "text encoder",
    "step",
    "decode",
    "upscale",
    "host",
    "offline",
    "server",
    "CLIP score",
)
UNITS = ("s", "ms", "pictures/s", "score")
PAGE = "Speed test tab:"
"""What workloads of the WebUI's tab begin with."""
MOST_ROWS, MOST = 5000, 1e9
SETTINGS = ("dtype", "model")
"""Facts of a run in which two have to be alike to be compared, beside their workloads."""
SAME_CARD = ("driver", "rocm", "torch", "power_limit_w")
"""Facts of a machine that make a difference on one and the same card."""


@dataclass(frozen=True)
class SuiteDocument:
    """One run. `about`: dtype, model, preset, date, level, kernels. `workloads`: settings by name.
    `machine`: as sensors.machine has it, and `idle_power_w`.
    """

    name: str
    machine: dict[str, Any]
    about: dict[str, Any]
    workloads: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    complete: bool = False

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; `read` takes it back."""
        return {
            "format": FORMAT,
            **self.about,
            "machine": self.machine,
            "workloads": self.workloads,
            "complete": self.complete,
            "rows": [COLUMNS.as_json(row) for row in self.rows],
        }

    @property
    def card(self) -> str:
        return str(self.machine.get("card") or "unknown card")

    def pictures(self) -> Iterator[Row]:
        """The measured rows of whole pictures."""
        return (row for row in self.rows if row.test == "picture" and not row.reason)

    def row(self, part: str, workload: str, way: str) -> Row | None:
        """The measured row of a part of a workload; None where there is none."""
        key = (part, workload, way)
        rows = (row for row in self.rows if (row.test, row.case, row.way) == key)
        return next((row for row in rows if not row.reason), None)


def read(path: Path) -> SuiteDocument:
    """The document in a file, trusting nothing; of the WebUI's speed test, its whole pictures.
    OSError, or ValueError with a reason.
    """
    data = contents(path)
    content = loaded(data)
    if isinstance(content, dict) and content.get("format") == speed_result.FORMAT:
        return _of_speed_test(path.name, speed_result.parse_document(data))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"no result of the suite: format is not {FORMAT!r}")
    about = {
        key: value
        for key, value in content.items()
        if key not in ("format", "machine", "workloads", "complete", "rows")
    }
    if not DATE.fullmatch(str(about.get("date"))):
        raise ValueError("date is not like 2026-01-31T12:00:00Z")
    workloads = checked(content.get("workloads"), "workloads", dict)
    items = checked(content.get("rows"), "rows", list)
    if len(items) > MOST_ROWS:
        raise ValueError(f"{len(items)} rows: at most {MOST_ROWS}")
    return SuiteDocument(
        path.name,
        facts_of(checked(content.get("machine"), "machine", dict)),
        facts_of(about, "the result"),
        {
            checked(name, "a workload"): facts_of(checked(each, "a workload", dict), "a workload")
            for name, each in workloads.items()
        },
        [_row(checked(item, "a row", dict)) for item in items],
        content.get("complete") is True,
    )


def _of_speed_test(name: str, made: speed_result.Document) -> SuiteDocument:
    """The whole pictures of a speed test, of the checkpoint that was loaded."""
    rows = []
    for row in made.rows:
        if row.test == "image" and (row.unit == "s" or row.reason):
            rows.append(replace(row, test="picture", case=f"{PAGE} {row.case}", unit="s"))
        elif row.test == "image":
            step: dict[str, Any] = {
                name: 1000 / (getattr(row, other) or NAN)
                for name, other in (("median", "median"), ("p10", "p90"), ("p90", "p10"))
            }
            rows.append(Row("step", f"{PAGE} {row.case}", row.way, "ms", **step, runs=row.runs))
    about = {"date": made.date, "preset": str(made.request.get("preset")), "model": PAGE}
    cases = dict.fromkeys(row.case for row in rows)
    return SuiteDocument(
        name, made.machine, about, {case: {} for case in cases}, rows, made.complete
    )


_NUMBERS = frozenset(f.name for f in fields(Row) if f.type in ("float", "int"))


def _row(item: Mapping[str, Any]) -> Row:
    for name, value in item.items():
        attribute = COLUMNS.fields.get(name)
        if attribute is None or value is None:
            continue
        if attribute == "trace":
            _check_trace(checked(value, name, dict))
        elif attribute not in _NUMBERS:
            checked(value, name)
        elif not _is_number(value, least := -1 if attribute == "ssim" else 0):
            raise ValueError(f"{name} is no number from {least} to {MOST:g}")
    try:
        row = COLUMNS.row(item)
    except KeyError as error:
        raise ValueError(f"a row has no {error.args[0]}") from None
    if row.test not in PARTS or row.unit not in UNITS:
        raise ValueError("a row's part or unit is not known")
    if not row.reason and not row.median > 0:
        raise ValueError("a row has neither a figure above 0 nor a reason")
    return row


def _is_number(value: object, least: float = 0) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return least <= value <= MOST


def _check_trace(trace: Mapping[str, Any]) -> None:
    columns = [checked(values, "a part of trace", list) for values in trace.values()]
    if not {SECONDS} < {*trace} <= {SECONDS, *QUANTITIES}:
        raise ValueError(f"trace is not made of {SECONDS} and what a card tells")
    lengths = {len(values) for values in columns}
    if len(lengths) != 1 or not 1 <= lengths.pop() <= TRACE_POINTS:
        raise ValueError(f"the parts of trace are not of one length from 1 to {TRACE_POINTS}")
    seconds = trace[SECONDS]
    known = [value for values in columns for value in values if value is not None]
    if None in seconds or not all(map(_is_number, known)):
        raise ValueError(f"trace has what is no number from 0 to {MOST:g}")
    if sorted(seconds) != seconds or not all(any(trace[name]) for name in {*trace} - {SECONDS}):
        raise ValueError(f"trace's {SECONDS} fall, or it has a quantity without a figure")


def gathered(folder: Path) -> tuple[list[SuiteDocument], dict[str, str]]:
    """The documents in a folder, by name, and why other JSON files are none."""
    documents, refused = [], {}
    for path in files(folder, "*.json"):
        try:
            if path.is_symlink():
                raise ValueError("a link, not a file")  # noqa: TRY301 - told as the others are
            documents.append(read(path))
        except (OSError, ValueError) as error:
            refused[path.name] = reason_of(error)
    return documents, refused


# -- comparing ------------------------------------------------------------------------------------


def differences(one: SuiteDocument, other: SuiteDocument) -> list[str]:
    """Why the figures of two runs may not be set beside each other; empty where they may."""
    reasons = [
        f"{name}: {one.about.get(name)} and {other.about.get(name)}"
        for name in SETTINGS
        if one.about.get(name) != other.about.get(name)
    ]
    shared = [name for name in one.workloads if name in other.workloads]
    if not shared:
        reasons.append("no workload is in both")
    for name in shared:
        mine, theirs = one.workloads[name], other.workloads[name]
        reasons += [
            f"{name}, {key}: {mine.get(key)} and {theirs.get(key)}"
            for key in sorted({*mine, *theirs})
            if mine.get(key) != theirs.get(key)
        ]
    if one.card == other.card:
        reasons += [
            f"{name}: {one.machine.get(name)} and {other.machine.get(name)}"
            for name in SAME_CARD
            if one.machine.get(name) != other.machine.get(name)
        ]
    incomplete = [each.name for each in (one, other) if not each.complete]
    return reasons + [f"{name} was not run to its end" for name in incomplete]


def regressions(now: SuiteDocument, before: SuiteDocument) -> list[str]:
    """Pictures of before that take longer now, beyond the spread of both runs, or that this run,
    which has their workload, could not make.
    """
    slower = []
    for old in before.pictures():
        if old.case not in now.workloads:
            continue
        row = now.row("picture", old.case, old.way)
        if row is None:
            failed = (each for each in now.rows if (each.case, each.way) == (old.case, old.way))
            why = next((each.reason for each in failed), "") or "this run has no such way"
            slower.append(f"{old.case}, {old.way}: not measured: {why}")
        elif row.p10 > old.p90:
            change = 100 * (row.median / old.median - 1)
            slower.append(
                f"{row.case}, {row.way}: {row.median:.4g} {row.unit} for {old.median:.4g} "
                f"(+{change:.0f} %; {row.p10:.4g} to {row.p90:.4g} for {old.p10:.4g} to "
                f"{old.p90:.4g})"
            )
    return slower


def merged(documents: Sequence[SuiteDocument]) -> dict[str, Any]:
    """Several runs of one machine and one setting as one document: workloads and ways side by side.

    Raises ValueError where they do not compare, or have the same row twice.
    """
    first, *others = documents
    rows, workloads, seen = [], dict[str, Any](), dict[tuple[str, ...], str]()
    for other in others:
        reasons = [each for each in differences(first, other) if each != "no workload is in both"]
        if other.card != first.card:
            reasons.insert(0, f"card: {first.card} and {other.card}")
        if reasons:
            raise ValueError(f"{first.name} and {other.name}: {'; '.join(reasons)}")
    for document in documents:
        workloads |= document.workloads
        for row in document.rows:
            key = (row.test, row.case, row.way)
            if key in seen:
                raise ValueError(f"{', '.join(key)} is in {seen[key]} and in {document.name}")
            seen[key] = document.name
            rows.append(row)
    return replace(first, workloads=workloads, rows=rows).as_dict()
