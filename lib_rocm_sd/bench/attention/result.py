"""What the benchmark of attention found, as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

OURS, SDPA, FLASH = "rocm_sd", "sdpa", "sdpa flash"
"""Names of the variants that ratios are given of."""


@dataclass(frozen=True)
class AttentionRow:
    """One variant on one problem. Times in µs.

    `median_us`, `p10_us`, `p90_us`: of the device, which found the next call queued. `waiting_us`:
    the median where it had to wait for each call, so the CPU's time where that is longer; only of
    short calls. `error` is max |out - float64| / max |float64| over `checked_rows` rows of the
    output. `extra_bytes` is the most device memory held during a call beyond inputs and output.
    What was not measured is NaN or None. `reason` is set instead of figures where the variant did
    not run or was not right.
    """

    label: str
    problem: dict[str, Any]
    variant: str
    config: dict[str, Any] | None = None
    median_us: float = math.nan
    p10_us: float = math.nan
    p90_us: float = math.nan
    runs: int = 0
    waiting_us: float = math.nan
    tflops: float = math.nan
    error: float = math.nan
    checked_rows: int = 0
    extra_bytes: int | None = None
    reason: str = ""

    @property
    def case(self) -> tuple[str, str]:
        """What rows that are compared with each other have in common."""
        return self.label, json.dumps(self.problem, sort_keys=True)

    @property
    def shape(self) -> str:
        """Batch, heads, queries, keys and head_dim, and the dtype."""
        p = self.problem
        sizes = (p[name] for name in ("batch", "heads", "seq_q", "seq_k", "head_dim"))
        return f"{'x'.join(map(str, sizes))} {p['dtype']}"


@dataclass
class AttentionRun:
    """A run. `complete`: to its end. Written to `file`, if any, whenever a case is done."""

    machine: dict[str, Any]
    file: Path | None = None
    rows: list[AttentionRow] = field(default_factory=list)
    complete: bool = False

    def write(self) -> None:
        """OSError where that cannot be."""
        if self.file is None:
            return
        content = {
            "machine": self.machine,
            "complete": self.complete,
            "rows": [plain(asdict(row)) for row in self.rows],
        }
        self.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: NaN and infinity are null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def read(file: Path) -> AttentionRun:
    """A document that was written before. OSError, or ValueError where it is not one."""
    content = json.loads(file.read_text(encoding="utf-8"))
    known = {item.name for item in fields(AttentionRow)}
    try:
        rows = [
            AttentionRow(
                **{name: _value(name, value) for name, value in row.items() if name in known}
            )
            for row in content["rows"]
        ]
        return AttentionRun(
            dict(content["machine"]), None, rows, bool(content.get("complete", True))
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is no result of bench attention: {error!r}") from error


def _value(name: str, value: Any) -> Any:
    """NaN for what JSON has no number for."""
    floats = (*(f"{kind}_us" for kind in ("median", "p10", "p90", "waiting")), "tflops", "error")
    return math.nan if value is None and name in floats else value
