"""Prints README's table of attention from its result file; `--write` puts it into README.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULT = ROOT / "docs" / "results" / "attention-h200.json"
BEGIN = "<!-- attention: written by `python tools/results_table.py --write` -->"
END = "<!-- end of attention -->"


def table() -> str:
    """Ours as Auto runs it (the first config), beside torch's, as Markdown."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
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
        ours, sdpa, sliced = (first[name] for name in ("rocm_sd", "sdpa", "sliced"))
        p = ours["problem"]
        shape = "x".join(str(p[name]) for name in ("batch", "heads", "seq_q", "seq_k", "head_dim"))
        times = " | ".join(f"{row['median_us']:.0f}" for row in (ours, sdpa, sliced))
        errors = " | ".join(f"{row['error']:.1e}" for row in (ours, sdpa))
        lines.append(f"| {label} | {shape} | {times} | {errors} |")
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """The text of README.md with its table renewed. Raises ValueError where a marker is missing."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(table() + "\n")
