"""`torchrun --nproc-per-node 2 -m lib_rocm_sd bench distributed`: ranks beside one of them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib_rocm_sd.bench.progress import say
from lib_rocm_sd.distributed.errors import RankError
from lib_rocm_sd.distributed.group import Group, joined, under_torchrun
from lib_rocm_sd.distributed.measure import FULL, SMALL, Row, measured

RUNS = 7
QUICK_RUNS = 3
LIMIT_S = 600.0
"""One rank may compile and test kernels while the others wait."""
ERROR = 0.02
"""What all ranks give may differ by so much of the largest value from what one gives, in half."""


def run(args: argparse.Namespace, machine: dict[str, Any]) -> int:
    """Measure on all ranks; rank 0 prints and writes. 1 where a result was wrong, 2 on bad use."""
    if not under_torchrun():
        print(
            "bench: start this by torchrun, a process for each GPU: "
            "torchrun --nproc-per-node 2 -m lib_rocm_sd bench distributed --json FILE",
            file=sys.stderr,
        )
        return 2
    try:
        with joined(args.device, limit_s=LIMIT_S) as group:
            return _measure(group, args, machine)
    except (ValueError, RankError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _measure(group: Group, args: argparse.Namespace, machine: dict[str, Any]) -> int:
    small = args.small or group.device.type == "cpu"
    runs = args.runs or (QUICK_RUNS if args.quick or small else RUNS)
    facts = {
        **machine,
        "runs": runs,
        "members": [asdict(member) for member in group.members],
        "timing": "perf_counter between two waits for the device, the slowest rank",
    }
    rows: list[Row] = []
    for row in measured(group, SMALL if small else FULL, runs):
        rows.append(row)
        if group.rank == 0:
            say(line(row))
            if args.json:
                _write(args.json, facts, rows)
    wrong = [row for row in rows if row.error > ERROR]
    if group.rank == 0:
        print("\n".join([f"{len(group.members)} ranks: {group.members[0]} ..", *map(line, rows)]))
        for row in wrong:
            print(f"bench: wrong: {row.test}, {row.case}, {row.way}", file=sys.stderr)
    return int(bool(wrong))


def line(row: Row) -> str:
    """A row as text."""
    beside = ""
    if not math.isnan(row.one_ms):
        same = "same bits" if row.equal else f"differs by {row.error:.1e}"
        beside = f", alone {row.one_ms:.3f} ms: {row.speedup:.2f} times; {same}"
    rate = row.sent_mib * 2**20 / row.ms / 1e6
    sent = f", {row.sent_mib:.2f} MiB sent in {row.exchanges:.0f} exchanges, {rate:.2f} GB/s"
    name = ", ".join(part for part in (row.test, row.case, row.way, row.told) if part)
    return f"{name}: {row.ms:.3f} ms{beside}{sent}"


def _write(path: str, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    found = [
        {key: None if value != value else value for key, value in asdict(row).items()}
        for row in rows
    ]
    document = {"machine": machine, "rows": found}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
