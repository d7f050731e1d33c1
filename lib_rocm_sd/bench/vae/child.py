"""The compiled way in a process of its own, so that it cannot hold up or end the run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import lib_rocm_sd
from lib_rocm_sd.bench.vae.result import VaeRow, read
from lib_rocm_sd.bench.vae.ways import WAYS

NAME = next(way.name for way in WAYS if way.compiled)
POLL_S = 0.5
COMPILERS = ("c++", "g++", "clang++", "cl")
RoleAndSize = tuple[str, int]
"""A role and a size."""


def reasons(device: torch.device) -> list[str]:
    """Why torch.compile cannot be tried; empty if it can."""
    if not hasattr(torch, "compile"):
        return [f"torch {torch.__version__} has no torch.compile"]
    if importlib.util.find_spec("torch._inductor") is None:
        return ["this torch has no inductor"]
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return ["triton is not installed"]
    found = os.environ.get("CXX") or any(shutil.which(name) for name in COMPILERS)
    return [] if device.type != "cpu" or found else ["there is no C++ compiler"]


def measured(
    options: Sequence[str], jobs: Sequence[RoleAndSize], device: torch.device, limit_s: float
) -> Iterator[VaeRow]:
    """The rows of the compiled way for all `jobs`, by `bench vae` with these options.

    Given as they come. What is not there after `limit_s` is a row with that reason.
    """
    why = reasons(device)
    if why:
        yield from (_without(job, "; ".join(why)) for job in jobs)
        return
    missing = list(jobs)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "lib_rocm_sd", "bench", "vae", "--in-process"]
        command += [*options, "--ways", "compiled", "--json", str(file)]
        ended = ""
        for state in watched(command, limit_s, Path(folder) / "log"):
            ended = state
            for row in _rows(file):
                if (row.role, row.size) in missing:
                    missing.remove((row.role, row.size))
                    yield row
    yield from (_without(job, ended) for job in missing)


def _rows(file: Path) -> list[VaeRow]:
    try:
        return read(file)[1]
    except (OSError, ValueError):
        return []


def watched(command: Sequence[str], limit_s: float, log: Path) -> Iterator[str]:
    """Run a command in a process group of its own; "" now and then, at last how it ended."""
    root = Path(lib_rocm_sd.__file__).parent.parent
    end = time.monotonic() + limit_s
    with log.open("wb") as messages:
        child = subprocess.Popen(
            command,
            cwd=root,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            start_new_session=os.name == "posix",
        )
        try:
            while child.poll() is None:
                if time.monotonic() > end:
                    _end(child)
                    yield f"not compiled and timed within {limit_s:.0f} s"
                    return
                time.sleep(POLL_S)
                yield ""
        finally:
            _end(child)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    yield f"its process ended with status {child.returncode}: {(lines or [''])[-1]}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child if it still runs, and its helpers with it."""
    if child.poll() is None:
        if os.name == "posix":
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
        child.wait()


def _without(job: RoleAndSize, reason: str) -> VaeRow:
    return VaeRow(*job, NAME, reason=reason)
