"""`python -m lib_rocm_sd bench OP`: every way to run an op's usual problems, in one run."""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import __version__
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands import bench_models, distributed
from lib_rocm_sd.commands.standalone import Standalone
from lib_rocm_sd.commands.support import add_device, check_writable, device_of
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.planner import default_launcher
from lib_rocm_sd.lab import (
    attention,
    benchmark,
    call,
    gradients,
    speed_result,
    speed_text,
    tables,
    unet,
    upscaler,
    vae,
)
from lib_rocm_sd.lab.benchmark import Setting
from lib_rocm_sd.lab.rows import say
from lib_rocm_sd.lab.speed_result import PRESETS, WHAT, parse
from lib_rocm_sd.lab.speed_session import SpeedSession

POLL_S = 0.2
OUT = Path("outputs") / "speedtest"


TABLES = dict(sorted({**tables.TABLES, **gradients.TABLES}.items()))
"""Ops that have a table of their own. `norm_gradients`: both norms forward and backward."""
BENCHMARKS = {
    "attention": attention.BENCHMARK,
    **call.BENCHMARKS,
    **TABLES,
    "models": bench_models.BENCHMARK,
    "unet": unet.BENCHMARK,
    "upscaler": upscaler.BENCHMARK,
    "vae": vae.BENCHMARK,
}
"""`call`: what attention costs the CPU; `door`: what it costs more as an operator of torch's."""
OPS = (*BENCHMARKS, "speed", "distributed")
"""`speed`: the speed test that the WebUI's tab runs; `distributed`: several GPUs, under torchrun.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("op", choices=OPS, help="what to time")
    add_device(parser)
    parser.add_argument(
        "--dtype",
        choices=attention.DTYPES,
        action="append",
        help="default float16; attention takes several, and both if none is named",
    )
    parser.add_argument(
        "--runs",
        type=int,
        help=f"timed calls per row (default {attention.RUNS}, of vae {vae.RUNS}, "
        f"of call, door {call.CALLS})",
    )
    parser.add_argument("--quick", action="store_true", help="less of it, and fewer runs")
    parser.add_argument("--small", action="store_true", help="the small odd shapes only: seconds")
    parser.add_argument(
        "--case",
        action="append",
        metavar="TEXT",
        help="of attention, its gradients, norms, linear, unet, upscaler and models: only cases "
        "with this in name or shape",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result here")
    parser.add_argument("--plot", metavar="FILE", help="of attention and vae: draw it as SVG")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="of attention and vae: take the rows of this result, measure none",
    )
    attention.add_arguments(parser.add_argument_group("attention"))
    vae.add_arguments(parser.add_argument_group("vae"), (*unet.KEYS, *upscaler.KEYS))
    bench_models.add_arguments(parser.add_argument_group("models"))
    tile_help = "pixels a side of the WebUI's tiles (default 192)"
    parser.add_argument_group("upscaler").add_argument("--tile", type=int, help=tile_help)
    add = parser.add_argument_group("speed").add_argument
    add("--what", nargs="+", choices=WHAT, default=list(WHAT), help="default: all of them")
    add("--preset", choices=PRESETS, help="default: quick, with --sizes custom")
    add("--out", type=Path, default=OUT, metavar="DIR", help="for the result (default %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, write JSON. 1 when a variant of ours was wrong, 2 on bad options."""
    if args.runs is not None and args.runs < 1:
        raise UsageError("--runs must be at least 1")
    if args.case and args.op not in ("attention", "unet", "upscaler", "models", *TABLES):
        raise UsageError(f"--case: {args.op} has no cases to choose among")
    check_writable(args, "json", "plot")
    device = device_of(args)
    if args.op == "speed":
        return run_speed(args)
    if args.op == "distributed":
        return distributed.run(args, _versions())
    if args.op != "attention":
        args.dtype = (args.dtype or attention.DTYPES)[0]
    if device.type == "cpu" and not args.device:
        _make_small(args)
    bench, info = BENCHMARKS[args.op], identify(device)
    launch = default_launcher(device, info.arch) if info.arch and not info.reasons else None
    setting = Setting(device, info, launch, args.runs or bench.runs[args.quick])
    machine = {
        "device": info.name,
        "backend": info.backend,
        "gfx": info.gfx,
        "not_ours": list(info.reasons),
        **_versions(),
        "runs": setting.runs,
        "timing": "device events" if device.type == "cuda" else "perf_counter",
        **({"dtype": args.dtype} if args.op in ("unet", "upscaler", "vae", "models") else {}),
    }
    return benchmark.run(bench, args, setting, machine, _heading)


def run_speed(args: argparse.Namespace) -> int:
    """The speed test; prints the result as Markdown. 1 if it failed, 2 on bad options, 130
    interrupted.
    """
    preset = args.preset or ("custom" if args.sizes else "quick")
    try:
        request = parse({"what": args.what, "preset": preset, "sizes": args.sizes or []})
    except ValueError as error:
        print(f"bench speed: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    session = SpeedSession()
    device = torch.device(args.device) if args.device else None
    ident = session.start(request, Standalone(device, args.out))
    told = ""
    try:
        while not session.wait(POLL_S):
            progress = session.progress()
            if progress.text != told:  # something else is done
                told = progress.text
                print(f"{progress.fraction:4.0%} {told}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        session.cancel()
        session.wait()
    document = session.result(ident)
    assert document is not None
    print(speed_text.to_markdown(speed_result.of(document)))
    progress = session.progress()
    print(f"bench speed: {progress.text}; see {args.out}", file=sys.stderr)
    return {"done": 0, "cancelled": 130}.get(progress.state, 1)


def _make_small(args: argparse.Namespace) -> None:
    """Without a GPU, and unless something else is asked for: a try of seconds."""
    if args.source or args.small or args.quick or args.case or args.sizes:
        return
    args.small, args.quick = args.op not in ("call", "door"), True
    if args.op == "vae":
        args.ways, args.roles = args.ways or ["auto", "eager"], args.roles or ["decoder"]
    say(
        f"bench {args.op}: torch has no GPU here, and our kernels need one. This is only a small "
        "try on the CPU, whose figures say nothing of a card. --device cpu measures all of it, "
        "which may take many minutes; --device cpu --quick, less of it."
    )


def _versions() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "os": platform.system(),
        "python": platform.python_version(),
        "rocm_sd": __version__,
    }


def _heading(machine: dict[str, Any]) -> str:
    return (
        f"{machine['device']} ({machine['gfx'] or machine['backend']}), torch {machine['torch']}, "
        f"median of {machine['runs']} calls, {machine['timing']}"
    )
