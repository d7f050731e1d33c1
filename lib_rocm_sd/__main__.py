"""python -m lib_rocm_sd doctor | compile | inspect | capture | replay | bench | profile | demo |
tune | results | scaling.

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

INTERRUPTED = 130

COMMANDS = {
    "doctor": (
        "lib_rocm_sd.commands.doctor",
        "what this machine has, what would run on it, and why not more",
    ),
    "compile": (
        "lib_rocm_sd.commands.compile",
        "compile the kernels ahead, also for GPUs that are not here",
    ),
    "inspect": (
        "lib_rocm_sd.commands.inspect",
        "registers, spills, LDS and occupancy of the compiled kernels",
    ),
    "capture": (
        "lib_rocm_sd.commands.capture",
        "run a host, and keep calls of our ops in a file",
    ),
    "replay": (
        "lib_rocm_sd.commands.replay",
        "captured calls through every variant, against float64",
    ),
    "bench": ("lib_rocm_sd.commands.bench", "measure the kernels on this machine's GPU"),
    "profile": (
        "lib_rocm_sd.commands.profile",
        "where a picture's time goes, by kind of work and by part of the model",
    ),
    "demo": (
        "lib_rocm_sd.commands.demo",
        "the same pictures without and with the kernels, side by side",
    ),
    "tune": (
        "lib_rocm_sd.commands.tune",
        "which configs run first; measure them on this GPU, and export that as a contribution",
    ),
    "results": (
        "lib_rocm_sd.commands.results",
        "the results of speed tests that owners of cards contributed, as a table",
    ),
    "scaling": (
        "lib_rocm_sd.commands.scaling",
        "what several cards would take, by a model; a farm of them, simulated",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. 2 is bad usage."""
    console.escape()
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m lib_rocm_sd", description="HIP kernels for Stable Diffusion"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = next((word for word in words if word in COMMANDS), None)
    modules: dict[str, Any] = {}
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            try:
                modules[name] = importlib.import_module(module)
            except ModuleNotFoundError as error:
                return _lacks(name, error)
            modules[name].add_arguments(command)
    args = parser.parse_args(words)
    try:
        status = int(modules[args.command].main(args))
        print(end="", flush=True)
    except ModuleNotFoundError as error:
        return _lacks(args.command, error)
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
