"""A row of `bench vae`, and the file in which the rows so far are kept."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lib_rocm_sd.bench.rows import as_json

SCHEMA = 2


@dataclass(frozen=True)
class VaeRow:
    """One way to run one coder at one size; what was not measured is NaN or empty.

    Times in ms, of `runs` runs. `first_ms` and `second_ms`: the first two runs at the resolution
    `first_at`, never met before, with kernels prepared by another one. `compile_s`: what
    torch.compile took. `peak_mib`: the most device memory during a run, over what was held before;
    `kept_mib`: what the way itself keeps between runs. `error`: max |out - exact| / max |exact|,
    where exact is `reference`'s; `shift`: the same of a channel's mean. `steps`: the largest
    difference to our whole frame in 1/255 of the range, `steps_share` the share of values that
    differ by any. `ran`: of ours, the variants of each op. `reason`: why it was not measured.
    `note`: what else is to be known.
    """

    role: str
    size: int
    way: str
    runs: int = 0
    median_ms: float = math.nan
    p10_ms: float = math.nan
    p90_ms: float = math.nan
    ms_per_megapixel: float = math.nan
    first_at: str = ""
    first_ms: float = math.nan
    second_ms: float = math.nan
    first_ratio: float = math.nan
    compile_s: float = math.nan
    peak_mib: float = math.nan
    kept_mib: float = math.nan
    error: float = math.nan
    shift: float = math.nan
    reference: str = ""
    steps: float = math.nan
    steps_share: float = math.nan
    plan: str = ""
    ran: str = ""
    reason: str = ""
    note: str = ""


def from_json(data: dict[str, Any]) -> VaeRow:
    """The row of a result file; what this version does not know is ignored. ValueError if none."""
    known = {field.name for field in fields(VaeRow)}
    values = {key: value for key, value in data.items() if key in known and value is not None}
    try:
        return VaeRow(**{"role": "decoder", **values})
    except TypeError as error:
        raise ValueError(f"no row of `bench vae`: {data}") from error


def ordered(rows: Sequence[VaeRow]) -> list[VaeRow]:
    """By role and size; ways stay as they came."""
    return sorted(rows, key=lambda row: (row.role, row.size))


class VaeRun:
    """What was measured so far, written to `path` (None: nowhere) after each row."""

    def __init__(self, path: Path | None, machine: dict[str, Any]) -> None:
        self.path = path
        self.machine = machine
        self.rows: list[VaeRow] = []
        self.write("the run goes on, or was ended from outside")

    def add(self, row: VaeRow) -> None:
        """Keep a row."""
        self.rows.append(row)
        self.write("the run goes on, or was ended from outside")

    def write(self, incomplete: str = "") -> None:
        """Write all rows at once; `incomplete` says why there are not more."""
        if self.path is None:
            return
        document = {
            "schema": SCHEMA,
            "machine": self.machine,
            "complete": not incomplete,
            "incomplete": incomplete,
            "rows": [as_json(row) for row in ordered(self.rows)],
        }
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)


def read(path: Path) -> tuple[dict[str, Any], list[VaeRow]]:
    """The machine and the rows of a result file. OSError or ValueError where it is none."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise ValueError("no result of `bench vae`")  # noqa: TRY004 - the file's fault
    return document.get("machine", {}), [from_json(row) for row in document["rows"]]
