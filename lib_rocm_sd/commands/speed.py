"""`python -m lib_rocm_sd bench speed`: the speed test without a WebUI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from lib_rocm_sd.demo.standalone import Standalone
from lib_rocm_sd.lab import speed_result, speed_text
from lib_rocm_sd.lab.speed_result import PRESETS, WHAT, Request, parse
from lib_rocm_sd.lab.speed_session import SpeedSession

POLL_S = 0.2
OUT = Path("outputs") / "speedtest"


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """The options of `bench speed` alone; --sizes and --device are shared."""
    add = parser.add_argument
    add("--what", nargs="+", choices=WHAT, default=list(WHAT), help="default: all of them")
    add("--preset", choices=PRESETS, help="default: quick, with --sizes custom")
    add("--out", type=Path, default=OUT, metavar="DIR", help="for the result (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run it, print the result as Markdown. 1 if it failed, 2 on bad options, 130 interrupted."""
    try:
        request = _request(args)
        device = torch.device(args.device) if args.device else None
        torch.empty(0, device=device)
    except (ValueError, RuntimeError, AssertionError) as error:
        print(f"bench speed: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    session = SpeedSession()
    ident = session.start(request, Standalone(device, args.out))
    try:
        _watch(session)
    except KeyboardInterrupt:
        session.cancel()
        session.wait()
    document = session.result(ident)
    assert document is not None
    print(speed_text.to_markdown(speed_result.of(document)))
    progress = session.progress()
    print(f"bench speed: {progress.text}; see {args.out}", file=sys.stderr)
    return {"done": 0, "cancelled": 130}.get(progress.state, 1)


def _request(args: argparse.Namespace) -> Request:
    preset = args.preset or ("custom" if args.sizes else "quick")
    return parse({"what": args.what, "preset": preset, "sizes": args.sizes or []})


def _watch(session: SpeedSession) -> None:
    """A line on stderr whenever something else is done."""
    told = ""
    while not session.wait(POLL_S):
        progress = session.progress()
        if progress.text != told:
            told = progress.text
            print(f"{progress.fraction:4.0%} {told}", file=sys.stderr, flush=True)
