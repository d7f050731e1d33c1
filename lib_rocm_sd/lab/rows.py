"""A measured row, as JSON and as a line of text, and what a run says meanwhile. Needs no torch."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lib_rocm_sd.report import flattened

NAN = math.nan
OURS = "rocm_sd"
"""What the way of our kernels is called."""

SECONDS = "seconds"
QUANTITIES = ("core_mhz", "memory_mhz", "temperature_c", "power_w")
"""What sensors tell of a card."""
TRACE_POINTS = 60
"""The most that a row keeps of each."""


@dataclass(frozen=True)
class Row:
    """One way to run one case: its figures, or the reason why there are none.

    Each kind of result has the fields that its `Columns` name; what was not measured is NaN, None
    or empty. `median`, `p10`, `p90`: of `runs` calls, in `unit`. `error`: max |output - exact| /
    max |exact|. `peak_mib`: the most device memory during a call, over what was held before;
    `kept_mib`: what the way keeps between calls. The comments say what the others are.
    """

    test: str = ""  # the part of the speed test
    case: str = ""
    way: str = ""
    unit: str = "ms"
    median: float = NAN
    p10: float = NAN
    p90: float = NAN
    runs: int = 0
    peak_mib: float = NAN
    error: float = NAN
    reason: str = ""
    note: str = ""
    # of calls of an op
    problem: Any = ""  # in words; of attention, its fields
    config: dict[str, Any] | None = None
    variant: str = ""  # what the engine ran, or would run
    backward_us: float = NAN  # the backward pass alone; `median` is of both
    waiting_us: float = NAN  # the median where each call is waited for, of short calls
    tflops: float = NAN
    gigabytes_per_s: float = NAN
    of_copy: float = NAN  # time over what its bytes take at the speed of a copy
    checked_rows: int = 0  # of the output, compared with float64
    extra_bytes: int | None = None  # the most memory held beyond inputs and output
    # of a card's self-test
    op: str = ""
    compilers: tuple[str, ...] = ()
    compile_seconds: float = 0.0
    tolerance: float = 0.0
    seconds: float = 0.0
    # of models
    role: str = "decoder"
    size: int = 0  # pixels a side
    kept_mib: float = NAN
    first_at: str = ""  # the resolution of the first run, never met before
    first_ms: float = NAN  # the first two runs at a resolution, with kernels prepared by another
    second_ms: float = NAN
    first_ratio: float = NAN
    prepare_s: float = NAN  # the very first run
    compile_s: float = NAN  # what torch.compile took
    ms_per_megapixel: float = NAN
    gpu_ms: float = NAN  # what the device worked
    wall_ms: float = NAN  # of a step among others
    submit_ms: float = NAN  # until the call returns
    of_eager: float = NAN  # time over torch's
    of_plain: float = NAN  # time over that of the same way of the model without what is done to it
    blocks: str = ""  # how many are ours
    launches: int = 0  # kernels and copies
    rms: float = NAN  # root mean square of the difference, over that of the exact values
    shift: float = NAN  # the error of a channel's mean
    reference: str = ""  # what computed the exact values
    steps: float = NAN  # largest difference to our whole frame, in 1/255 of the range
    steps_share: float = NAN  # share of values that differ from it by any
    plan: str = ""
    ran: str = ""  # of ours, the variants of each op
    told: tuple[str, ...] = ()  # what ran, and what was not ours
    # of the suite; `test` is the picture's part
    first: float = NAN  # the first picture, or request, in s
    p95: float = NAN
    p99: float = NAN
    within: float = NAN  # share that kept the limit
    cpu_ms: float = NAN  # of this process, in a step
    power_w: float = NAN
    energy_j: float = NAN  # of a picture
    core_mhz: float = NAN
    temperature_c: float = NAN  # the highest
    slowed: str = ""  # why the card's clock fell
    trace: dict[str, Any] | None = None  # lists of SECONDS and of QUANTITIES over that time
    psnr: float = NAN  # these from the same picture in float32
    ssim: float = NAN
    flip: float = NAN
    largest: float = NAN  # of 255
    seam: float = NAN  # the largest step of the error where the host's tiles begin and end, of 255
    # of several ranks, beside one of them alone
    ranks: int = 0
    one_ms: float = NAN
    sent_mib: float = NAN
    exchanges: float = NAN
    equal: bool | None = None  # to what one rank makes, to the bit


def spread(times: Sequence[float], scale: float = 1.0) -> dict[str, Any]:
    """`median`, `p10`, `p90` and `runs` of a row: of `times`, multiplied by `scale`."""
    ordered, count = sorted(times), len(times)
    median, low, high = statistics.median(ordered), ordered[count // 10], ordered[count * 9 // 10]
    return {"median": median * scale, "p10": low * scale, "p90": high * scale, "runs": count}


@dataclass(frozen=True)
class Columns:
    """What a kind of row has in JSON: names in their order, "name=field" where these differ.

    `needed`: fields without which it is no row of this kind. `letters`: the most that is written of
    a text, where a reader takes no more; None for all of it.
    """

    text: str
    needed: tuple[str, ...] = ("way",)
    letters: int | None = None

    @cached_property
    def fields(self) -> dict[str, str]:
        """The row's field by name in JSON."""
        pairs = (word.partition("=") for word in self.text.split())
        return {name: field or name for name, _, field in pairs}

    def as_json(self, row: Row) -> dict[str, Any]:
        """A row as JSON has it: what was not measured is null."""
        values = {name: getattr(row, field) for name, field in self.fields.items()}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
            elif isinstance(value, str):
                values[name] = value[: self.letters]
        return values

    def row(self, values: Mapping[str, Any]) -> Row:
        """The row of JSON; unknown names are ignored. Raises KeyError, AttributeError."""
        fields = {
            self.fields[name]: value
            for name, value in values.items()
            if name in self.fields and value is not None
        }
        for field in self.needed:
            fields[field]  # noqa: B018 - raises
        return Row(**fields)


class Result:
    """Rows measured so far, in a file (None: nowhere) that is written as they come."""

    def __init__(
        self, columns: Columns, machine: dict[str, Any], path: str | Path | None = None
    ) -> None:
        self.columns = columns
        self.machine = machine
        self.path = Path(path) if path else None
        self.rows: list[Row] = []

    def write(self, **about: Any) -> None:
        """Write all rows at once. `about`: what the document says beside them. Raises OSError."""
        if self.path is None:
            return
        rows = [self.columns.as_json(row) for row in self.rows]
        write_json(self.path, {"machine": self.machine, **about, "rows": rows})

    def end(self, incomplete: str = "") -> None:
        """Write; `incomplete` says why there are not more rows."""
        self.write(complete=not incomplete, incomplete=incomplete)

    def collect(self, rows: Iterable[Row], told: Callable[[Row], str] | None = None) -> int:
        """Keep rows as they come, in the file too, each told in a line. 130 when interrupted, else
        0.
        """
        self.end(GOES_ON)
        try:
            for row in rows:
                if told is not None:
                    say(told(row))
                self.rows.append(row)
                self.end(GOES_ON)
        except KeyboardInterrupt:
            self.end("interrupted")
            print("interrupted: the result has the rows so far", file=sys.stderr)
            return 130
        self.end()
        return 0


GOES_ON = "the run goes on, or was ended from outside"


def write_json(path: str | Path, document: object) -> None:
    """Write a result. Raises OSError."""
    write_whole(Path(path), json.dumps(document, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; what is no plain file, as it comes. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read(path: Path, columns: Columns, refusal: str) -> Result:
    """A result that was written before. OSError, or ValueError with `refusal` where it is none."""
    document = json.loads(path.read_text(encoding="utf-8"))
    try:
        result = Result(columns, dict(document.get("machine", {})))
        result.rows = [columns.row(values) for values in document["rows"]]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{refusal}: {error!r}") from error
    return result


# -- as text --------------------------------------------------------------------------------------


class Column(NamedTuple):
    """`width`: of the cells, negative to the left."""

    head: str
    width: int
    cell: Callable[[Row], str]


def field(head: str, width: int, name: str, form: str = "", none: str = "") -> Column:
    """A field of the row, formatted; `none` where it was not measured."""

    def cell(row: Row) -> str:
        value = getattr(row, name)
        absent = isinstance(value, float) and not math.isfinite(value)
        return none if absent else format(value, form)

    return Column(head, width, cell)


def figure(value: float, form: str = ".2f") -> str:
    """A number, or a dash where there is none."""
    return f"{value:{form}}" if math.isfinite(value) else "-"


def between(width: int, form: str = ".1f") -> Column:
    """The 10th to the 90th percentile."""
    return Column("p10..p90", width, lambda row: f"{row.p10:{form}}..{row.p90:{form}}")


@dataclass(frozen=True)
class TextTable:
    """Rows as aligned lines: `names`, then `figures` or why there are none, then `tail`."""

    names: tuple[Column, ...]
    figures: tuple[Column, ...]
    tail: Callable[[Row], str] = lambda row: ""
    absent: str = "not run"
    indent: str = ""
    head_tail: str = ""

    @property
    def head(self) -> str:
        """The line of heads."""
        heads = [_aligned(each.head, each.width) for each in (*self.names, *self.figures)]
        return self.indent + " ".join(heads) + self.head_tail

    def line(self, row: Row) -> str:
        """The line of a row."""
        cells = [_aligned(each.cell(row), each.width) for each in self.names]
        if row.reason:
            return f"{self.indent}{' '.join(cells)} {self.absent}: {row.reason}"
        cells += [_aligned(each.cell(row), each.width) for each in self.figures]
        return f"{self.indent}{' '.join(cells)}{self.tail(row)}".rstrip()

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Heads and rows."""
        return [self.head, *map(self.line, rows)]

    def under(self, heading: str, rows: Sequence[Row]) -> str:
        """The text of a heading and the rows."""
        return "\n".join([heading, *self.lines(rows)])


def _aligned(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def tiles(row: Row) -> str:
    """The config of a row, after a space; empty where it has none."""
    fields = {} if row.config is None else flattened(row.config)
    return " " + ",".join(f"{name}={value}" for name, value in fields.items())


def is_named(words: Sequence[str] | None, text: str) -> bool:
    """Whether a word of --case is in a case's name or shape; True where there are no words."""
    return not words or any(word.lower() in text.lower() for word in words)


def is_wrong(rows: Sequence[Row]) -> bool:
    """Whether ours was wrong anywhere."""
    return any(row.reason.startswith("wrong") and row.way.startswith(OURS) for row in rows)


# -- progress -------------------------------------------------------------------------------------


class Countdown:
    """Says which case begins, and about how long the rest takes, once a case is done.

    `work`: how much each case is, in any unit.
    """

    def __init__(self, work: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._clock = clock
        self._done = 0
        self._begin = clock()

    def next(self, text: str) -> None:
        """Say that the next case begins."""
        behind, ahead = sum(self._work[: self._done]), sum(self._work[self._done :])
        remaining = ""
        if behind > 0:
            remaining = f" ({duration((self._clock() - self._begin) / behind * ahead)} left)"
        self._done += 1
        say(f"[{self._done}/{len(self._work)}] {text}{remaining}")


def duration(seconds: float) -> str:
    """About how long, in words."""
    if seconds < 90:
        return f"about {max(round(seconds), 1)} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {round(seconds / 3600)} h"


def say(line: str) -> None:
    """A line of progress on stderr, shown at once: stdout has the result alone."""
    print(line, file=sys.stderr, flush=True)
