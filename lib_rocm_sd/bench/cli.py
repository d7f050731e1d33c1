"""`python -m lib_rocm_sd bench OP`: every way to run an op's usual problems, in one run."""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import __version__
from lib_rocm_sd.bench import group_norm
from lib_rocm_sd.bench.attention import Row, measure
from lib_rocm_sd.bench.vae import command as vae
from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.ops.attention import ATTENTION, ODD, AttentionProblem
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.planner import default_launcher
from lib_rocm_sd.speedtest import command as speed

RUNS = 50
OPS = ("attention", "group_norm", "vae", "speed")
"""`speed`: the speed test that the WebUI's tab runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("op", choices=OPS, help="what to time")
    parser.add_argument("--device", help="a torch device; default: the GPU, else the CPU")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument(
        "--runs", type=int, help=f"timed calls per row (default {RUNS}, of vae {vae.RUNS})"
    )
    parser.add_argument("--small", action="store_true", help="the small odd shapes only: seconds")
    parser.add_argument("--json", metavar="FILE", help="also write the result here")
    vae.add_arguments(parser.add_argument_group("vae"))
    speed.add_arguments(parser.add_argument_group("speed"))


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, write JSON. 1 when a variant of ours was wrong, 2 on bad options."""
    if args.runs is not None and args.runs < 1:
        print("--runs must be at least 1", file=sys.stderr)
        return 2
    if args.op == "speed":
        return speed.run(args)
    if args.op != "vae":
        args.runs = args.runs or RUNS
    device = torch.device(args.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    info = identify(device)
    launch = default_launcher(device, info.arch) if info.arch and not info.reasons else None
    machine = _machine(device, info, vae.runs(args) if args.op == "vae" else args.runs)
    if args.op == "group_norm":
        return _group_norm(args, device, info, launch, machine)
    if args.op == "vae":
        return vae.run(args, device, {**machine, "dtype": args.dtype}, _heading)
    rows: list[Row] = []
    for label, problem in _problems(args):
        print(f"{label}: {problem}", file=sys.stderr, flush=True)
        rows += measure(label, problem, device, info, launch, args.runs)
    print(render(machine, rows))
    _write(args.json, machine, [_plain(row) for row in rows])
    return int(any(row.reason.startswith("wrong") and row.variant == "rocm_sd" for row in rows))


def _group_norm(
    args: argparse.Namespace,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    machine: dict[str, Any],
) -> int:
    rows: list[group_norm.Row] = []
    for label, problem in group_norm.problems(args.small, args.dtype):
        print(f"{label}: {problem}", file=sys.stderr, flush=True)
        rows += group_norm.measure(label, problem, device, info, launch, args.runs)
    print(group_norm.render(_heading(machine), rows))
    _write(args.json, machine, [group_norm.as_json(row) for row in rows])
    return int(any(row.reason.startswith("wrong") and row.way == "rocm_sd" for row in rows))


def _write(path: str | None, machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if path:
        document = {"machine": machine, "rows": rows}
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _problems(args: argparse.Namespace) -> list[tuple[str, AttentionProblem]]:
    if args.small:
        return [(f"odd {number}", problem) for number, problem in enumerate(ODD, 1)]
    return [(label, replace(problem, dtype=args.dtype)) for label, problem in ATTENTION.usual]


def _machine(device: torch.device, info: DeviceInfo, runs: int) -> dict[str, Any]:
    return {
        "device": info.name,
        "backend": info.backend,
        "gfx": info.gfx,
        "not_ours": list(info.reasons),
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "os": platform.system(),
        "python": platform.python_version(),
        "rocm_sd": __version__,
        "runs": runs,
        "timing": "device events" if device.type == "cuda" else "perf_counter",
    }


def _plain(row: Row) -> dict[str, Any]:
    """The row as JSON has it: what was not measured is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(row).items()
    }


def render(machine: dict[str, Any], rows: list[Row]) -> str:
    """The table that a person reads; the fastest row of each problem is marked with *."""
    lines = [
        _heading(machine),
        f"{'problem':<40} {'variant':<18} {'us':>10} {'p10..p90':>19} {'TFLOP/s':>8} {'error':>8} "
        f"{'extra MiB':>9}",
    ]
    for label in dict.fromkeys(row.label for row in rows):
        group = [row for row in rows if row.label == label]
        best = min((row.median_us for row in group if not row.reason), default=math.nan)
        lines += [_line(row, row.median_us == best) for row in group]
    return "\n".join(lines)


def _heading(machine: dict[str, Any]) -> str:
    return (
        f"{machine['device']} ({machine['gfx'] or machine['backend']}), torch {machine['torch']}, "
        f"median of {machine['runs']} calls, {machine['timing']}"
    )


def _line(row: Row, best: bool) -> str:
    p = row.problem
    shape = f"{p['batch']}x{p['heads']}x{p['seq_q']}x{p['seq_k']}x{p['head_dim']} {p['dtype']}"
    if row.reason:
        return f"{shape:<40} {row.variant:<18} not run: {row.reason}"
    extra = "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:9.1f}"
    spread = f"{row.p10_us:.0f}..{row.p90_us:.0f}"
    tiles = "" if row.config is None else " " + _tiles(row.config)
    return (
        f"{shape:<40} {row.variant:<18} {row.median_us:>10.1f} {spread:>19} {row.tflops:>8.1f} "
        f"{row.error:>8.1e} {extra:>9}{' *' if best else '  '}{tiles}"
    )


def _tiles(config: dict[str, Any]) -> str:
    return ",".join(f"{name}={int(value)}" for name, value in config.items())
