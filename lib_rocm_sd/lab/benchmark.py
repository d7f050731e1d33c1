"""What all benchmarks of the command have in common: rows are measured, written as they come, and
shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lib_rocm_sd.checks import told
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.lab.rows import Columns, Result, Row, is_wrong, read
from lib_rocm_sd.ops.base import Launch, Variant


class Setting(NamedTuple):
    """Where a benchmark measures, and how often."""

    device: torch.device
    info: DeviceInfo
    launch: Launch | None
    runs: int

    def refusals(self, variant: Variant[Any, Any], problem: Any) -> list[str]:
        """Why a variant cannot be timed: what it says itself, or, of ours, that nothing launches
        it.
        """
        refusals = variant.refusals(self.info.arch, problem)
        lacks_launch = variant.ours and self.launch is None
        if refusals or not lacks_launch:
            return refusals
        return list(self.info.reasons) or ["there is no launcher"]


@dataclass
class Benchmark:
    """`rows(args, setting)` measures what the options ask for; it raises UsageError before anything
    is measured. `render(heading, rows)`: as text. `runs`: timed calls of a row, and with --quick.
    `line` tells a row as it comes. `is_wrong`: whether ours was wrong. `draw(rows, device)`: SVG.
    """

    columns: Columns
    rows: Callable[[argparse.Namespace, Setting], Iterator[Row]]
    render: Callable[[str, Sequence[Row]], str]
    runs: tuple[int, int] = (50, 10)
    line: Callable[[Row], str] | None = None
    is_wrong: Callable[[Result], bool] = lambda result: is_wrong(result.rows)
    draw: Callable[[Sequence[Row], str], str] | None = None


def run(
    bench: Benchmark,
    args: argparse.Namespace,
    setting: Setting,
    machine: dict[str, Any],
    heading: Callable[[dict[str, Any]], str],
) -> int:
    """Measure, or take the rows of a result; print, write, draw. 1 if ours was wrong, 2 where there
    is no such result, 130 if interrupted.
    """
    status = 0
    if args.source:
        try:
            result = read(Path(args.source), bench.columns, f"no result of `bench {args.op}`")
        except (OSError, ValueError) as error:
            print(f"--from {told(args.source, error)}", file=sys.stderr)
            return 2
    else:
        rows = bench.rows(args, setting)
        result = Result(bench.columns, machine, args.json)
        status = result.collect(rows, bench.line)
    print(bench.render(heading(result.machine), result.rows))
    wrong = bench.is_wrong(result)
    if args.plot and bench.draw is not None:
        name = str(result.machine.get("device", ""))
        Path(args.plot).write_text(bench.draw(result.rows, name), encoding="utf-8")
    return status or int(wrong)
