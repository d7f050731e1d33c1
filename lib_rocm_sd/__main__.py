"""python -m lib_rocm_sd doctor | compile | inspect | capture | replay | bench | profile | demo |
tune | suite | results | scaling.

A command's module is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from lib_rocm_sd import console
from lib_rocm_sd.checks import UsageError

INTERRUPTED = 130

COMMANDS = {
    "doctor": "what this machine has, what would run on it, and why not more",
    "compile": "compile the kernels ahead, also for GPUs that are not here",
    "inspect": "registers, spills, LDS and occupancy of the compiled kernels",
    "capture": "run a host, and keep calls of our ops in a file",
    "replay": "captured calls through every variant, against float64",
    "bench": "measure the kernels on this machine's GPU",
    "profile": "where a picture's time goes, by kind of work and by part of the model",
    "demo": "the same pictures without and with the kernels, side by side",
    "tune": "which configs run first; measure them on this GPU, and export that as a contribution",
    "suite": "whole pictures by every way: time, memory, energy and quality, in one run",
    "results": "results of owners of cards as a table; of the suite: merge, check, page",
    "scaling": "what several cards would take, by a model; a farm of them, simulated",
}
"""Each is a module of lib_rocm_sd.commands with `add_arguments(parser)` and `main(args)`, which
gives the exit status.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. 2 is bad usage, which is said in a line."""
    console.escape()
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m lib_rocm_sd", description="HIP kernels for Stable Diffusion"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = next((word for word in words if word in COMMANDS), None)
    modules: dict[str, Any] = {}
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            try:
                modules[name] = importlib.import_module(f"lib_rocm_sd.commands.{name}")
            except ModuleNotFoundError as error:
                return _lacks(name, error)
            modules[name].add_arguments(command)
    args = parser.parse_args(words)
    try:
        status = int(modules[args.command].main(args))
        print(end="", flush=True)
    except ModuleNotFoundError as error:
        return _lacks(args.command, error)
    except UsageError as error:
        print(f"{args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `… | head`: whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _lacks(command: str, error: ModuleNotFoundError) -> int:
    """Say which package is not installed; one of our own is a fault of ours."""
    if (error.name or "").split(".")[0] in ("", "lib_rocm_sd"):
        raise error
    print(f"{command}: this needs {error.name}, which is not installed", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
