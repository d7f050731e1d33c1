"""An op's table: its usual problems by every way, one after the other."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.bench import rows
from lib_rocm_sd.bench.progress import Countdown
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.ops.base import Launch


def run(
    op: Any,
    args: argparse.Namespace,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    machine: dict[str, Any],
    heading: str,
) -> int:
    """Measure, print the table, write JSON after each problem. `op`: a module with `problems`,
    `work`, `measure` and `render`. 1 if ours was wrong, 2 if no case is left, 130 if interrupted.
    """
    chosen = [
        (label, problem)
        for label, problem in op.problems(args.small, args.dtype)
        if rows.is_named(args.case, f"{label} {problem}")
    ]
    if not chosen:
        print(f"bench: {rows.none_named(args.case)}", file=sys.stderr)
        return 2
    found: list[Any] = []
    complete = False
    progress = Countdown([op.work(problem) for _, problem in chosen])
    try:
        for label, problem in chosen:
            progress.next(f"{label}: {problem}")
            found += op.measure(label, problem, device, info, launch, args.runs)
            _write(args.json, machine, found, complete=False)
        complete = True
    except KeyboardInterrupt:
        print("interrupted: the result has the rows so far", file=sys.stderr)
    _write(args.json, machine, found, complete)
    print(op.render(heading, found))
    if not complete:
        return 130
    return int(any(row.reason.startswith("wrong") and row.way == "rocm_sd" for row in found))


def _write(path: str | None, machine: dict[str, Any], found: list[Any], complete: bool) -> None:
    if path:
        shown = [rows.as_json(row) for row in found]
        document = {"machine": machine, "complete": complete, "rows": shown}
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
