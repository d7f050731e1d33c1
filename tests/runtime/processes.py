"""Processes that tests wait for: by what they say or do, not by the clock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import POLL_S, wait_until

LONG_S = 3600
"""What is to be ended would take so long."""
_NOTES_ITSELF = f"""
import os, pathlib, sys, time
new = pathlib.Path(sys.argv[1] + ".new")
new.write_text(str(os.getpid()))
new.replace(sys.argv[1])
time.sleep({LONG_S})
"""


def wait_until_gone(pid: int) -> bool:
    """Whether the process `pid` ends; a zombie has ended."""
    return wait_until(lambda: _is_gone(pid))


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def noted(path: Path) -> str:
    """What somebody else writes to `path` in one go, as soon as it is there."""
    wait_until(path.exists)
    return path.read_text(encoding="utf-8")


def sleeper(note: Path) -> list[str]:
    """A command that writes its process's id to `note` in one go, and sleeps."""
    return [sys.executable, "-c", _NOTES_ITSELF, str(note)]


def reach_limits_when(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[], bool]) -> None:
    """Whoever waits for a process for a limited time has waited that long as soon as `hangs` says
    so, and not before.
    """
    wait = subprocess.Popen.wait

    def waited(process: subprocess.Popen[Any], timeout: float | None = None) -> int:
        while timeout is not None:
            try:
                return wait(process, POLL_S)
            except subprocess.TimeoutExpired:
                if hangs():
                    raise subprocess.TimeoutExpired(process.args, timeout) from None
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", waited)
