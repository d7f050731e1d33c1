"""`python -m lib_rocm_sd bench OP`: every way to run an op's usual problems, in one run."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import __version__
from lib_rocm_sd.bench import call, group_norm
from lib_rocm_sd.bench.attention import command as attention
from lib_rocm_sd.bench.vae import command as vae
from lib_rocm_sd.commands import speed
from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.engine.planner import default_launcher
from lib_rocm_sd.ops.base import Launch

RUNS = attention.RUNS
OPS = ("attention", "call", "group_norm", "vae", "speed")
"""`call`: what attention costs the CPU; `speed`: the speed test that the WebUI's tab runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("op", choices=OPS, help="what to time")
    parser.add_argument("--device", help="a torch device; default: the GPU, else the CPU")
    parser.add_argument(
        "--dtype",
        choices=attention.DTYPES,
        action="append",
        help="default float16; attention takes several, and both if none is named",
    )
    parser.add_argument(
        "--runs",
        type=int,
        help=f"timed calls per row (default {RUNS}, of vae {vae.RUNS}, of call {call.CALLS})",
    )
    parser.add_argument("--quick", action="store_true", help="less of it, and fewer runs")
    parser.add_argument("--small", action="store_true", help="the small odd shapes only: seconds")
    parser.add_argument("--json", metavar="FILE", help="also write the result here")
    parser.add_argument("--plot", metavar="FILE", help="of attention and vae: draw it as SVG")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="of attention and vae: take the rows of this result, measure none",
    )
    attention.add_arguments(parser.add_argument_group("attention"))
    vae.add_arguments(parser.add_argument_group("vae"))
    speed.add_arguments(parser.add_argument_group("speed"))


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, write JSON. 1 when a variant of ours was wrong, 2 on bad options."""
    if args.runs is not None and args.runs < 1:
        print("--runs must be at least 1", file=sys.stderr)
        return 2
    if args.op == "speed":
        return speed.run(args)
    if args.op != "attention":
        args.dtype = (args.dtype or attention.DTYPES)[0]
    device = torch.device(args.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    info = identify(device)
    launch = default_launcher(device, info.arch) if info.arch and not info.reasons else None
    machine = _machine(device, info, _runs(args))
    if args.op == "call":
        return call.run(args, device, machine, _heading(machine))
    if args.op == "group_norm":
        return _group_norm(args, device, info, launch, machine)
    if args.op == "vae":
        return vae.run(args, device, {**machine, "dtype": args.dtype}, _heading)
    return attention.run(args, device, info, launch, machine, _heading)


def _runs(args: argparse.Namespace) -> int:
    """Timed calls of a row, at most."""
    if args.op == "vae":
        return vae.runs(args)
    if args.op == "call":
        return call.runs(args)
    args.runs = args.runs or (attention.QUICK_RUNS if args.quick else RUNS)
    return int(args.runs)


def _group_norm(
    args: argparse.Namespace,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    machine: dict[str, Any],
) -> int:
    rows: list[group_norm.NormRow] = []
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


def _heading(machine: dict[str, Any]) -> str:
    return (
        f"{machine['device']} ({machine['gfx'] or machine['backend']}), torch {machine['torch']}, "
        f"median of {machine['runs']} calls, {machine['timing']}"
    )
