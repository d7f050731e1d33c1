"""Run a compiler in its own process: a time limit that holds, a crash that stays outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_LOG_LIMIT_BYTES = 1 << 20
_CREATION_FLAGS = getattr(subprocess, "CREATE_NO_WINDOW", 0)
_BELOW_NORMAL = getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0)
_NICENESS = 10

_thread = threading.local()


@dataclass(frozen=True)
class Finished:
    """How a process ended.

    `trouble` is empty for exit status 0; `output` is what it printed, both streams together.
    """

    trouble: str
    output: str
    seconds: float


@dataclass
class Group:
    """Processes that some threads start, at low priority, to be ended together."""

    ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _members: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def join(self) -> None:
        """What this thread runs from now on belongs here. The thread keeps its low priority."""
        _thread.group = self
        if sys.platform == "linux":  # there it is the thread's own, and its children inherit it
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

    def end(self) -> None:
        """End all that runs; nothing more is started."""
        with self._lock:
            self.ended = True
            members = list(self._members)
        for process in members:
            if process.returncode is None:
                _kill(process)

    def _add(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._members.add(process)
            ended = self.ended
        if ended:
            _kill(process)

    def _remove(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._members.discard(process)


def time_limit_s() -> float:
    """How long one compilation may take: ROCM_SD_COMPILE_TIME_LIMIT_S, else ten minutes."""
    try:
        return float(os.environ["ROCM_SD_COMPILE_TIME_LIMIT_S"])
    except (KeyError, ValueError):
        return 600.0


def run(
    command: Sequence[str | Path],
    limit_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    output_limit_bytes: int = _LOG_LIMIT_BYTES,
) -> Finished:
    """Run `command` for at most `limit_s` seconds; past that it and what it started are ended.

    Never raises OSError. Of the output no more than `output_limit_bytes` are kept.

    Output goes through a file, so a grandchild that keeps a pipe open cannot hold us up.
    """
    start = time.monotonic()
    group: Group | None = getattr(_thread, "group", None)
    if group is not None and group.ended:
        return Finished("was not started: the program ends", "", 0.0)
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=None if env is None else {**os.environ, **env},
                start_new_session=sys.platform != "win32",
                creationflags=_CREATION_FLAGS | (_BELOW_NORMAL if group else 0),
            )
        except (OSError, ValueError) as error:
            return Finished(f"could not be started: {error}", "", time.monotonic() - start)
        trouble = _wait_in(group, process, limit_s)
        output.seek(0)
        text = output.read(output_limit_bytes).decode("utf-8", errors="replace")
    return Finished(trouble, text, time.monotonic() - start)


def _wait_in(group: Group | None, process: subprocess.Popen[bytes], limit_s: float) -> str:
    if group is None:
        return _wait(process, limit_s)
    group._add(process)
    try:
        return _wait(process, limit_s)
    finally:
        group._remove(process)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"took longer than {limit_s:g} s and was ended"
    except BaseException:
        _end(process)
        raise
    if status < 0:
        with suppress(ValueError):
            return f"crashed ({signal.Signals(-status).name})"
    if status > 0xFF:  # a Windows exception code such as 0xC0000005
        return f"crashed (0x{status & 0xFFFFFFFF:08X})"
    return f"failed (exit status {status})" if status else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                ["taskkill", "/F", "/T", "/PID", str(process.pid)],
                capture_output=True,
                timeout=10,
                check=False,
            )
        with suppress(OSError):
            process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
