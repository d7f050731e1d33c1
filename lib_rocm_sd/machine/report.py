"""What is shown of a kernel's machine code: as JSON-able rows, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.machine.analysis import KernelWork
from lib_rocm_sd.machine.rates import ASSUMPTIONS, FAMILIES, Cycles

Row = dict[str, Any]


def rows_of(work: KernelWork) -> tuple[Row, list[Row]]:
    """What is in no loop, and the loops, outer before inner. What is zero, empty or false is left
    out; `parent` is a place in the list.
    """
    loops = []
    for index, loop in enumerate(work.loops):
        row: Row = {"depth": loop.depth}
        row |= {} if loop.parent is None else {"parent": loop.parent}
        row |= {"hot": True} if index == work.hot else {}
        row |= loop.mix.as_dict()
        conditional = loop.conditional.as_dict()
        row |= {"conditional": conditional} if conditional else {}
        loops.append({**row, "estimate": _estimate(loop.cycles) | _usual(loop.usual)})
    return work.straight.as_dict(), loops


def _estimate(cycles: Cycles) -> Row:
    each = {name: value for name, value in asdict(cycles).items() if name != "co_executes"}
    shown = {f"{name}_cycles": round(value) for name, value in each.items() if value}
    bounds = {name: round(value, 3) for name, value in cycles.bounds().items()}
    return {**shown, **bounds, **({"limited_by": cycles.limited_by} if bounds else {})}


def _usual(cycles: Cycles) -> Row:
    bounds = cycles.bounds()
    return {"bound_usual": round(bounds["bound"], 3)} if bounds else {}


LOOP_COLUMNS: tuple[tuple[str, str], ...] = (
    ("matrix", "matrix"),
    ("transc.", "transcendental"),
    ("vector", "vector"),
    ("dual", "dual_pairs"),
    ("scalar", "scalar"),
    ("s.memory", "scalar_memory"),
    ("LDS", "lds"),
    ("LDS bytes", "lds_bytes"),
    ("global", "global"),
    ("global bytes", "global_bytes"),
    ("scratch", "scratch"),
    ("branch", "branch"),
    ("control", "control"),
)
ESTIMATE_COLUMNS: tuple[tuple[str, str], ...] = (
    ("est. bound", "bound"),
    ("est. serial", "bound_serial"),
    ("est. overlapped", "bound_overlapped"),
    ("est. usual", "bound_usual"),
    ("limited by", "limited_by"),
)


def loop_cells(loop: Row, index: int) -> list[object]:
    """One loop as cells under `loop_heads`."""
    counts = [loop.get(name, 0) for _, name in LOOP_COLUMNS]
    estimates = [loop["estimate"].get(name, "") for _, name in ESTIMATE_COLUMNS]
    mark = "hot" if loop.get("hot") else ""
    return [f"{'  ' * (loop['depth'] - 1)}{index}", mark, *counts, *estimates]


def loop_heads() -> list[object]:
    """The heads of the table of loops."""
    columns = (*LOOP_COLUMNS, *ESTIMATE_COLUMNS)
    return ["loop", "", *(head for head, _ in columns)]


def notes(arches: Sequence[Arch]) -> list[str]:
    """What the numbers mean, and where the rates come from."""
    families = dict.fromkeys(arch.family for arch in arches if arch.family in FAMILIES)
    return [
        "Instructions of one wave per pass through a loop, loops inside it apart; bytes of all its"
        " lanes. Both halves of a dual-issue pair count.",
        "Estimates, not measurements:",
        *(f"  {line}" for line in ASSUMPTIONS),
        *(
            f"  {family}: {_rates(family)}; sources {FAMILIES[family].sources}, see"
            " lib_rocm_sd/machine/rates.py"
            for family in families
        ),
    ]


def _rates(family: str) -> str:
    rates = FAMILIES[family]
    matrix = ", ".join(f"{pattern} {cycles}" for pattern, cycles in rates.matrix_cycles)
    return (
        f"cycles per SIMD {matrix}, vector {rates.vector_cycles}, transcendental"
        f" {rates.transcendental_cycles}; bytes per clock and CU: LDS {rates.lds_bytes_per_cycle},"
        f" cache {rates.cache_bytes_per_cycle}"
    )
