"""The journal: a file for each launch that is being tried in a host's process.

It is written to the disk before the first launch of a class and removed after the first success.
What a later start finds was left by a process that ended there. While it stands, a fatal signal is
written into it, unless the host has Python's faulthandler at work already. Needs no torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib_rocm_sd import cache

FOLDER = "journal"
_SUFFIX = ".trying"
_LOCKED_AT = 1 << 30
"""The byte that is locked: far behind the text, which Windows lets nobody read where it is."""


@dataclass(frozen=True)
class OpenLine:
    """A launch that a process did not come back from. `evidence`: of a fatal signal, else empty."""

    key: str
    subject: str
    device: str
    evidence: str


class Journal:
    """Journal of one process. Thread-safe. A folder that cannot be written costs only the journal.

    `folder`: the cache's where None.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._signals = 0

    @contextmanager
    def trying(self, key: str, subject: str, device: str) -> Iterator[None]:
        """Around a launch and the synchronisation after it. An exception strikes the line too."""
        path = self._path(key)
        file = None if path is None else _opened(path, subject, device)
        if path is None or file is None:
            yield
            return
        mine = self._watch(file)
        try:
            yield
        finally:
            self._unwatch(mine)
            if sys.platform == "win32":  # there an open file cannot be removed
                os.close(file)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            if sys.platform != "win32":
                os.close(file)

    def open_lines(self) -> list[OpenLine]:
        """What processes that are gone have left, each once: the files are removed."""
        folder = self._place()
        lines: list[OpenLine] = []
        if folder is not None:
            with suppress(OSError):
                for path in sorted(folder.glob(f"*{_SUFFIX}")):
                    lines += _taken(path)
        return lines

    def _place(self) -> Path | None:
        if self._folder is not None:
            return self._folder
        folder = cache.directory()
        return None if folder is None else folder / FOLDER

    def _path(self, key: str) -> Path | None:
        folder = self._place()
        if folder is None:
            return None
        return folder / f"{key}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"

    def _watch(self, file: int) -> bool:
        """Let fatal signals be written into the file; False where others see to them."""
        with self._lock:
            if self._signals or faulthandler.is_enabled():
                return False
            with suppress(RuntimeError, ValueError, OSError):
                faulthandler.enable(file, all_threads=False)
                self._signals = 1
            return bool(self._signals)

    def _unwatch(self, mine: bool) -> None:
        if mine:
            with self._lock:
                faulthandler.disable()
                self._signals = 0


def _opened(path: Path, subject: str, device: str) -> int | None:
    """The file of an open line, on the disk and locked as long as this process lives."""
    text = json.dumps({"subject": subject, "device": device, "pid": os.getpid()}) + "\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError:
        return None
    try:
        os.write(file, text.encode())
        os.fsync(file)
    except OSError:
        os.close(file)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # a file system without locks
        cache.lock_file(file, _LOCKED_AT)
    return file


def _taken(path: Path) -> list[OpenLine]:
    """The line of a process that is gone, its file removed; none where it lives, or is damaged."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return []
    try:
        try:
            cache.lock_file(file, _LOCKED_AT)
        except (BlockingIOError, PermissionError):
            return []
        except OSError:
            if _runs(path):
                return []
        os.lseek(file, 0, os.SEEK_SET)
        text = os.read(file, 1 << 16).decode("utf-8", errors="replace")
    finally:
        os.close(file)
    with suppress(OSError):
        path.unlink(missing_ok=True)
    head, _, rest = text.partition("\n")
    try:
        row: dict[str, Any] = json.loads(head)
        subject, device = str(row["subject"]), str(row["device"])
    except (ValueError, KeyError, TypeError):
        return []
    return [OpenLine(path.name.split("-")[0], subject, device, _evidence(rest))]


def _evidence(text: str) -> str:
    """The first line that faulthandler has written."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if line.startswith(("Fatal", "Windows fatal"))), "")


def _runs(path: Path) -> bool:
    """Whether the process may still live, where locks do not tell."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(int(path.name.split("-")[1]), 0)
    except (ProcessLookupError, ValueError, IndexError):
        return False
    except OSError:
        return True
    return True
