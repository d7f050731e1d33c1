"""Prints the documents' tables of measured times from their result files.

`--write` puts them into README.md and docs/verification.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
VERIFICATION = ROOT / "docs" / "verification.md"
RESULTS = ROOT / "docs" / "results"
OURS, DOGGETTX = "rocm_sd", "Doggettx-like"
LEFT_OUT = (
    "SD1.5 512x512, text, 32x32",
    "SD1.5 512x512, text, 16x16",
    "SD1.5 1024x1024, text",
    "SD1.5 1024x1024, text, 64x64",
    "SD1.5 1024x1024, text, 32x32",
    "SDXL 1024x1024, text, 32x32",
)
"""Of the cases: text layers like others in the table. The result file has them."""

SUMMARY = {
    "Self-attention, SD 1.5 at 512 x 512": "SD1.5 512x512, self, 64x64 latent",
    "Self-attention, SDXL at 1024 x 1024": "SDXL 1024x1024, self, 64x64",
}
"""README's few cases of attention, by their titles there: one that gains and one that loses."""
STEP, WITHOUT, WITH = "A WebUI step by graphs, SD 1.5, 512 x 512", "not installed", "UNet Auto"
SUMMARY_SIZE = 1024
"""Sides of the picture that README's rows of the VAE decode."""


def _rows(name: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return [dict(row) for row in rows]


def figures() -> str:
    """What README shows: a few cases by torch (eager for the VAE) and by ours, as Markdown."""
    lines = ["| Problem | torch | this extension |", f"|{'---|' * 3}"]
    times: dict[tuple[str, str], float] = {}
    for row in _half_precision():
        times.setdefault((row["label"], row["variant"]), row["median_us"])
    for title, label in SUMMARY.items():
        both = (f"{_time(times[label, variant])} µs" for variant in ("sdpa", OURS))
        lines.append(f"| {title} | {' | '.join(both)} |")
    steps = {row["way"]: row for row in _rows("webui-unet-h200.json") if row["case"] == "512"}
    without, ours = (
        f"{1000 / steps[way]['it_s']:.1f} ms" for way in ("not installed", "UNet Auto")
    )
    lines.append(f"| {STEP} | {without} | {ours} |")
    ways = {
        row["way"]: row
        for row in _rows("vae-h200.json")
        if row.get("role", "decoder") == "decoder" and row["size"] == SUMMARY_SIZE
    }
    for level in ("Auto", "Memory"):
        title = f"VAE decode of {SUMMARY_SIZE} x {SUMMARY_SIZE}, {level}"
        lines.append(f"| {title} | {_cell(ways['eager'])} | {_cell(ways[f'rocm_sd {level}'])} |")
    return "\n".join(lines)


def _half_precision() -> list[dict[str, Any]]:
    rows = _rows("attention-h200.json")
    return [row for row in rows if row["problem"]["dtype"] == "float16"]


def attention() -> str:
    """Ours as Auto runs it, beside torch's own and a WebUI's, in half precision, as Markdown."""
    rows = _half_precision()
    lines = [
        "| Problem | B x H x Sq x Sk x D | this kernel, µs | torch SDPA | its flash backend "
        "| Doggettx-like | time over SDPA's | over flash's | error | SDPA's |",
        f"|{'---|' * 10}",
    ]
    for label in dict.fromkeys(row["label"] for row in rows):
        if label not in LEFT_OUT:
            lines.append(_attention_line(label, [row for row in rows if row["label"] == label]))
    return "\n".join(lines)


def _attention_line(label: str, rows: list[dict[str, Any]]) -> str:
    """Of a variant's rows the first, of ours what Auto takes; an empty cell is not measured."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["variant"], row)
    p = rows[0]["problem"]
    shape = "x".join(str(p[name]) for name in ("batch", "heads", "seq_q", "seq_k", "head_dim"))
    ours, sdpa, flash, doggettx = (
        first.get(name, {}).get("median_us") for name in (OURS, "sdpa", "sdpa flash", DOGGETTX)
    )
    cells = [label, shape, *map(_time, (ours, sdpa, flash, doggettx))]
    cells += [f"{ours / other:.2f}" if ours and other else "" for other in (sdpa, flash)]
    errors = (first.get(name, {}).get("error") for name in (OURS, "sdpa"))
    cells += ["" if error is None else f"{error:.1e}" for error in errors]
    return f"| {' | '.join(cells)} |"


def _time(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us:.{1 if time_us < 100 else 0}f}"


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


def unet_networks() -> str:
    """By what stands around a UNet: errors of ours over the WebUI's, from least to most."""
    rows = _rows("unet-networks-cpu.json")
    lines = [
        "| What | rows | blocks taken over | rms error over the WebUI's | largest error over its "
        "| apart, at most |",
        f"|{'---|' * 6}",
    ]
    for what in dict.fromkeys(row["what"] for row in rows):
        found = [row for row in rows if row["what"] == what]
        both = [row for row in found if row["ours"] and row["webui"]]
        cells = [_span([row["ours"][i] / row["webui"][i] for row in both]) for i in (1, 0)]
        apart = max(row["apart"] for row in found)
        raised = sum("raised" in row for row in found)
        count = f"{len(found)}, in {raised} both raise" if raised else str(len(found))
        taken = _span([_taken(row["blocks"]) for row in found if row["blocks"]])
        lines.append(f"| {what} | {count} | {taken} | {' | '.join(cells)} | {apart:.1e} |")
    return "\n".join(lines)


def _taken(blocks: str) -> float:
    """The share of "22/22, 16/16"."""
    ours, total = zip(*(map(int, item.split("/")) for item in blocks.split(", ")), strict=True)
    return sum(ours) / sum(total)


def _span(values: list[float]) -> str:
    if not values:
        return ""
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


TABLES: dict[str, Callable[[], str]] = {
    "figures": figures,
    "attention": attention,
    "vae": vae,
    "unet networks": unet_networks,
}
PLACES = {README: ("figures",), VERIFICATION: ("unet networks", "attention", "vae")}
"""Which document has which tables."""


def markers(name: str) -> tuple[str, str]:
    """What stands before and after a table in its document."""
    begin = f"<!-- {name}: written by `python tools/results_table.py --write` -->"
    return begin, f"<!-- end of {name} -->"


def renewed(document: Path) -> str:
    """A document's text with its tables renewed. Raises ValueError where a marker is missing."""
    text = document.read_text(encoding="utf-8")
    for name in PLACES[document]:
        begin, end = markers(name)
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{TABLES[name]()}\n{end}{after}"
    return text


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        for path in PLACES:
            path.write_text(renewed(path), encoding="utf-8")
    else:
        sys.stdout.write("\n\n".join(table() for table in TABLES.values()) + "\n")
