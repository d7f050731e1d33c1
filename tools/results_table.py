"""Prints README's tables of measured times from their result files.

`--write` puts them into README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results"
OURS = "rocm_sd"


def _rows(name: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return [dict(row) for row in rows]


def attention() -> str:
    """Ours as Auto runs it (the first config), beside torch's, as Markdown."""
    rows = _rows("attention-h200.json")
    lines = [
        "| Problem | B x H x Sq x Sk x D | this kernel, µs | torch SDPA, µs | slices, µs | error "
        "| SDPA's error |",
        "|---|---|---|---|---|---|---|",
    ]
    for label in dict.fromkeys(row["label"] for row in rows):
        first: dict[str, Any] = {}
        for row in rows:
            if row["label"] == label:
                first.setdefault(row["variant"], row)
        ours, sdpa, sliced = (first[name] for name in (OURS, "sdpa", "sliced"))
        p = ours["problem"]
        shape = "x".join(str(p[name]) for name in ("batch", "heads", "seq_q", "seq_k", "head_dim"))
        times = " | ".join(f"{row['median_us']:.0f}" for row in (ours, sdpa, sliced))
        errors = " | ".join(f"{row['error']:.1e}" for row in (ours, sdpa))
        lines.append(f"| {label} | {shape} | {times} | {errors} |")
    return "\n".join(lines)


def vae() -> str:
    """A table per role: a line per way, a column per size with its time and memory."""
    rows = _rows("vae-h200.json")
    roles = dict.fromkeys(row.get("role", "decoder") for row in rows)
    tables = (
        _vae_table(role, [row for row in rows if row.get("role", "decoder") == role])
        for role in roles
    )
    return "\n\n".join(tables)


def _vae_table(role: str, rows: list[dict[str, Any]]) -> str:
    sizes = sorted({row["size"] for row in rows})
    ways = dict.fromkeys(row["way"] for row in rows)
    errors_at = max(
        (row["size"] for row in rows if row.get("error") is not None and row["size"] <= 1024),
        default=0,
    )
    titles = [f"{size} x {size}" for size in sizes]
    heads = [role.capitalize(), *titles, f"error at {errors_at}"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for way in ways:
        of_way = {row["size"]: row for row in rows if row["way"] == way}
        cells = [_cell(of_way.get(size, {})) for size in sizes]
        error = of_way.get(errors_at, {}).get("error")
        cells.append("" if error is None else f"{error:.1e}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    """Time and peak memory; what there is not says so in a word."""
    if row.get("reason"):
        return "out of memory" if row["reason"].startswith("out of memory") else "not measured"
    if row.get("median_ms") is None:
        return ""
    peak = "" if row.get("peak_mib") is None else f", {row['peak_mib']:.0f} MiB"
    return f"{row['median_ms']:.{1 if row['median_ms'] < 100 else 0}f} ms{peak}"


TABLES: dict[str, Callable[[], str]] = {"attention": attention, "vae": vae}


def markers(name: str) -> tuple[str, str]:
    """What stands before and after a table in README.md."""
    begin = f"<!-- {name}: written by `python tools/results_table.py --write` -->"
    return begin, f"<!-- end of {name} -->"


def with_table(readme: str) -> str:
    """README.md's text with its tables renewed. Raises ValueError where a marker is missing."""
    for name, table in TABLES.items():
        begin, end = markers(name)
        before, rest = readme.split(begin)
        _, after = rest.split(end)
        readme = f"{before}{begin}\n{table()}\n{end}{after}"
    return readme


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write("\n\n".join(table() for table in TABLES.values()) + "\n")
