"""`python -m lib_rocm_sd bench attention`: every way to run what Stable Diffusion asks for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import checks
from lib_rocm_sd.bench.attention import plot, result, text
from lib_rocm_sd.bench.attention.measure import ALL, AttentionEffort, measure
from lib_rocm_sd.bench.attention.result import OURS, AttentionRun
from lib_rocm_sd.bench.progress import Countdown, say
from lib_rocm_sd.bench.rows import is_named, none_named
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.ops.attention.cases import CASES, ODD, Case
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec, Launch

RUNS, QUICK_RUNS = 50, 10
ROW_S, QUICK_ROW_S = 0.6, 0.1
QUICK_CPU_FLOPS = 2e9
"""Larger problems take minutes on a CPU: --quick leaves them out there."""
CASE_FLOPS = {"cuda": 1e13, "cpu": 1e8}
"""What a case takes beside its arithmetic, as arithmetic: for the estimate of the time left."""
DTYPES = ("float16", "bfloat16")

Problems = list[tuple[str, AttentionProblem]]


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """The options of `bench attention` alone."""
    add = parser.add_argument
    add("--variant", action="append", metavar="TEXT", help="only variants with this in their name")
    add("--configs", action="store_true", help="every config of ours, not only what Auto takes")


def run(
    args: argparse.Namespace,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    machine: dict[str, Any],
    heading: Callable[[dict[str, Any]], str],
) -> int:
    """Measure, print, write. 1 if ours was wrong, 2 on bad options."""
    refusal = _refusal(args, device)
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    document = AttentionRun(machine, Path(args.json) if args.json else None)
    if args.source:
        try:
            document = result.read(Path(args.source))
        except (OSError, ValueError) as error:
            print(f"--from {checks.told(args.source, error)}", file=sys.stderr)
            return 2
    else:
        _measured(args, device, info, launch, document)
    rows = document.rows
    print(text.render(heading(document.machine), rows))
    if args.plot:
        name = str(document.machine.get("device", ""))
        Path(args.plot).write_text(plot.draw(rows, name), encoding="utf-8")
    return int(any(row.reason.startswith("wrong") and row.variant == OURS for row in rows))


def _refusal(args: argparse.Namespace, device: torch.device) -> str:
    """Why these options cannot be followed; empty if they can."""
    if not args.source and not problems(args, device):
        return none_named(args.case)
    if not any(_effort(args).wants(variant.name) for variant in ALL):
        names = ", ".join(variant.name for variant in ALL)
        return f"--variant: none of {names} has {' or '.join(args.variant)} in its name"
    return ""


def problems(args: argparse.Namespace, device: torch.device) -> Problems:
    """Label and problem of what is asked for, one dtype after the other."""
    if args.small:
        found = [(f"odd {number}", problem) for number, problem in enumerate(ODD, 1)]
    else:
        found = [
            (case.name, replace(case.problem, dtype=dtype))
            for dtype in dict.fromkeys(args.dtype or DTYPES[: 1 if args.quick else None])
            for case in CASES
            if args.case or not args.quick or _quick(case, device)
        ]
    return [
        (label, problem) for label, problem in found if is_named(args.case, f"{label} {problem}")
    ]


def _quick(case: Case, device: torch.device) -> bool:
    """Whether a case is measured with --quick, unless --case names it."""
    return case.usual and (device.type != "cpu" or case.problem.flops <= QUICK_CPU_FLOPS)


def _effort(args: argparse.Namespace) -> AttentionEffort:
    row_s = QUICK_ROW_S if args.quick else ROW_S
    return AttentionEffort(args.runs, row_s, args.configs, tuple(args.variant or ()))


def _measured(
    args: argparse.Namespace,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    document: AttentionRun,
) -> None:
    chosen, effort = problems(args, device), _effort(args)
    _compile(chosen, info, launch, effort)
    besides = CASE_FLOPS["cuda" if device.type == "cuda" else "cpu"]
    progress = Countdown([besides + problem.flops for _, problem in chosen])
    for label, problem in chosen:
        progress.next(f"{label}: {problem}")
        document.rows += measure(label, problem, device, info, launch, effort)
        document.write()
    document.complete = True
    document.write()


def _compile(
    chosen: Problems, info: DeviceInfo, launch: Launch | None, effort: AttentionEffort
) -> None:
    """All kernels at once, several at a time; a failure is told by the launch."""
    build = getattr(launch, "build", None)
    if build is None or info.arch is None:
        return
    specs: dict[KernelSpec, None] = {}
    for _, problem in chosen:
        for variant in ALL:
            if not variant.ours or variant.refusals(info.arch, problem):
                continue
            if not effort.wants(variant.name):
                continue
            configs = variant.configs(info.arch, problem)
            for config in configs if effort.every_config else configs[:1]:
                specs.update(dict.fromkeys(variant.specs(info.arch, problem, config)))
    say(f"{len(specs)} kernels are needed; what is not compiled yet is compiled now")
    build(list(specs))
