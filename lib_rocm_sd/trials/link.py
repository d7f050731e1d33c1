"""The parent's end of a child: nothing here waits longer than it is told to."""

from __future__ import annotations

import importlib.util
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from lib_rocm_sd import arch
from lib_rocm_sd.runtime import process
from lib_rocm_sd.trials import recording

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); sys.path += sys.argv[2:]; "
    "from lib_rocm_sd.trials.child import main; raise SystemExit(main())"
)
_WORDS_BYTES = 1 << 16
GONE_S = 5.0
"""A killed process that is still there after this waits for the driver, maybe for ever."""


class Link:
    """One child. Raises OSError where it cannot be started."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the link
        try:
            self._process = process.spawn(
                command or _command(), subprocess.PIPE, subprocess.PIPE, self._words
            )
        except BaseException:
            self._words.close()
            raise
        self._answers = process.Answers()
        self._letters: queue.SimpleQueue[tuple[dict[str, Any], list[bytes]] | None] = (
            queue.SimpleQueue()
        )
        stdout = cast("BinaryIO", self._process.stdout)
        for work in (partial(self._answers.read, stdout), self._write):
            threading.Thread(target=work, name="rocm_sd trials", daemon=True).start()

    def send(self, head: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Returns at once."""
        self._letters.put((head, list(blobs)))

    def receive(self, limit_s: float) -> dict[str, Any] | None:
        """The next answer; None where the child has ended. Raises TimeoutError."""
        return self._answers.next(limit_s)

    def end(self) -> None:
        """Let it go: its input ends, and so does it."""
        self._letters.put(None)
        try:
            self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._words.close()

    def kill(self) -> bool:
        """End it now; False where it does not go."""
        process.kill(self._process)
        self._letters.put(None)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_S)
        return self._process.returncode is not None

    def status(self) -> int | None:
        """How it ended; None where it has not, within a few seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(GONE_S)
        return None

    def words(self) -> str:
        """What it wrote to standard error, the end of it."""
        size = self._words.seek(0, 2)
        self._words.seek(max(0, size - _WORDS_BYTES))
        return self._words.read().decode("utf-8", errors="replace")

    def _write(self) -> None:
        stream = cast("BinaryIO", self._process.stdin)
        with suppress(ValueError, OSError):  # it has ended, and the reader says so
            while (letter := self._letters.get()) is not None:
                recording.send(stream, *letter)
        with suppress(OSError):
            stream.close()


def _command() -> list[str]:
    """This interpreter, without what the environment would add, and with the packages of here."""
    spec = importlib.util.find_spec("numpy")
    numpy = str(Path(spec.origin).parents[1]) if spec and spec.origin else ""
    return [sys.executable, "-I", "-c", _START, str(arch.PACKAGE.parent), numpy]
