"""A real WebUI as a process of its own, for the tools that look at it from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 600.0
READY = ("Startup time:", "Model loaded in")
"""What the WebUI prints when it may be asked, and when the checkpoint is loaded.

It fails to start if it is asked before the first of them.
"""


@dataclass(frozen=True)
class Running:
    """One that answers at `address`, whose console is the file `log`."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    @property
    def said(self) -> str:
        """Its console so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def started(
    python: str,
    launcher: Path,
    data: Path,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    ready: Sequence[str] = READY,
) -> Iterator[Running]:
    """One that runs as long as the `with` lasts, with its data in the folder `data`.

    Raises RuntimeError with what it said if it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, str(launcher), "--skip-prepare-environment", "--no-download-sd-model"]
    command += ["--port", str(port), "--data-dir", str(data), *flags]
    log = data / "console.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=launcher.parent,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={"ROCM_SD_COMPARE_SPEED": "0", **os.environ, **(environment or {})},
        )
    running = Running(process, f"http://127.0.0.1:{port}/", log)
    try:
        _wait(running, ready)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(running: Running, ready: Sequence[str]) -> None:
    end = time.monotonic() + START_LIMIT_S
    while not all(line in running.said for line in ready):
        if running.process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the WebUI did not start:\n{running.said}")
        time.sleep(0.1)
