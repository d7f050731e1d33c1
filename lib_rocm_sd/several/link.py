"""The parent's end of a replica's process: lines of JSON there and back, its words to our log.

Nothing here waits longer than it is told to. No message is longer than what a pipe holds: what is
large goes through shared memory.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Any, BinaryIO, cast

from lib_rocm_sd import arch, console
from lib_rocm_sd.runtime import process

log = console.Log()
GONE_S = 5.0
START_S = 20.0
"""How long the operating system may take to start a process."""
WORDS = 20
"""Lines of a process that are kept, to say how it ended."""
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); sys.path += sys.argv[2:]; "
    "from lib_rocm_sd.several.child import main; raise SystemExit(main())"
)


class LostError(Exception):
    """The process has ended, or does not answer; the message says how."""


class Link:
    """One process. It ends with this one, however this one ends: by its input, and on Linux by the
    kernel. Raises OSError where it cannot be started.

    Each line that it prints goes to the log, under `name`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._words: deque[str] = deque(maxlen=WORDS)
        self._error: OSError | None = None
        started = threading.Event()
        for work in (self._keep, self._listen):
            threading.Thread(
                target=work, args=(started,), name="rocm_sd replica", daemon=True
            ).start()
        if not started.wait(START_S):
            self._error = OSError("its process does not start")
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        return -1 if self._process is None else self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Raises LostError where the process has ended."""
        try:
            stream = cast("BinaryIO", self._the_process().stdin)
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()
        except (OSError, ValueError):
            raise LostError(self.ending()) from None

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next answer. Raises LostError at the process's end, TimeoutError at the limit."""
        try:
            answer = self._answers.get(timeout=max(limit_s, 0.0))
        except queue.Empty:
            raise TimeoutError from None
        if answer is None:
            self._answers.put(None)
            raise LostError(self.ending())
        return answer

    def ready(self) -> dict[str, Any] | None:
        """The next answer if it is there; None if it is not. Raises LostError."""
        try:
            return self.receive(0.0)
        except TimeoutError:
            return None

    def ending(self) -> str:
        """How it ended, in a few words."""
        with suppress(subprocess.TimeoutExpired):
            self._the_process().wait(GONE_S)
        status = self._the_process().returncode
        if status is None:
            return "its process does not answer and does not end"
        last = f": {self._words[-1]}" if self._words else ""
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"its process ended {how}{last}"

    def end(self) -> None:
        """Let it end by itself, and end it where it does not; returns at once."""
        running = self._the_process()
        with suppress(OSError, ValueError):
            cast("BinaryIO", running.stdin).close()
        threading.Thread(target=self._end, name="rocm_sd replica", daemon=True).start()

    def kill(self) -> None:
        """End it now."""
        process.kill(self._the_process())

    def _end(self) -> None:
        try:
            self._the_process().wait(GONE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _the_process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _keep(self, started: threading.Event) -> None:
        """Starts it, since it ends with the thread that does, and reads its answers."""
        try:
            self._process = process.spawn(
                command(), subprocess.PIPE, subprocess.PIPE, subprocess.PIPE
            )
        except OSError as error:
            self._error = error
            return
        finally:
            started.set()
        stream = cast("BinaryIO", self._process.stdout)
        with suppress(ValueError, OSError):
            for line in stream:
                self._answers.put(json.loads(line))
        self._answers.put(None)
        stream.close()

    def _listen(self, started: threading.Event) -> None:
        started.wait(START_S)
        if self._process is None:
            return
        stream = cast("BinaryIO", self._process.stderr)
        with suppress(ValueError, OSError):
            for line in stream:
                text = line.decode("utf-8", errors="replace").rstrip()
                if text:
                    self._words.append(text)
                    log.info("%s: %s", self._name, text)
        stream.close()


def command() -> list[str]:
    """This interpreter with the packages of here, and nothing of the program that it runs."""
    caches = [] if sys.pycache_prefix is None else ["-X", f"pycache_prefix={sys.pycache_prefix}"]
    writes = ["-B"] if sys.dont_write_bytecode else []
    places = [str(arch.PACKAGE.parent), *(place for place in sys.path if place)]
    return [sys.executable, "-I", *caches, *writes, "-c", _START, *places]
