"""Run a compiler in its own process: a time limit that holds, a crash that stays outside, and
nothing left behind, however this process ends.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from lib_rocm_sd import arch

_LOG_LIMIT_BYTES = 1 << 20
_CREATION_FLAGS = getattr(subprocess, "CREATE_NO_WINDOW", 0)
_BELOW_NORMAL = getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0)
_NICENESS = 10
_FOLDER = re.compile(r"rocm_sd_(\d+)_")
_STALE_S = 86400.0
_HEARD_S = 0.25
"""How late a line may be heard."""
_NOT_STARTED = "could not be started: "
# Lets Linux's kernel end the command with the thread that started it (PR_SET_PDEATHSIG, SIGKILL).
# A preexec_fn could do it without a Python between, but is not safe beside other threads.
_PLACES = (
    "import json, sys; places = json.loads(sys.argv.pop(1)); sys.path.insert(0, places[0]); "
    "sys.path += places[1:]; "
)
_BOUND = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit("{_NOT_STARTED}" + str(error))
"""

_thread = threading.local()


@dataclass(frozen=True)
class Finished:
    """How a process ended.

    `trouble` is empty for exit status 0; `output` is what it printed, both streams together;
    `hung` says that it was ended at its time limit.
    """

    trouble: str
    output: str
    seconds: float
    hung: bool = False


@dataclass
class Group:
    """Processes that some threads start, to be ended together; `polite`: at low priority."""

    polite: bool = True
    ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _members: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def join(self) -> None:
        """What this thread runs from now on belongs here. The thread keeps its priority."""
        _thread.group = self
        if (
            self.polite and sys.platform == "linux"
        ):  # there it is the thread's own, and its children inherit it
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

    def end(self) -> None:
        """End all that runs; nothing more is started."""
        with self._lock:
            self.ended = True
            members = list(self._members)
        for process in members:
            if process.returncode is None:
                kill(process)

    def _add(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._members.add(process)
            ended = self.ended
        if ended:
            kill(process)

    def _remove(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._members.discard(process)


def group() -> Group | None:
    """The one that this thread has joined."""
    return getattr(_thread, "group", None)


def time_limit_s() -> float:
    """How long one compilation may take: ROCM_SD_COMPILE_TIME_LIMIT_S, else ten minutes."""
    try:
        return float(os.environ["ROCM_SD_COMPILE_TIME_LIMIT_S"])
    except (KeyError, ValueError):
        return 600.0


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for one compilation, gone afterwards. Raises OSError where none can be made.

    Where this process is killed meanwhile, or a virus scanner has a file of it open, which Windows
    then does not remove, a later one that compiles removes it.
    """
    _sweep(Path(tempfile.gettempdir()))
    prefix = f"rocm_sd_{os.getpid()}_"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@lru_cache(maxsize=1)
def _sweep(place: Path) -> None:
    """Remove the work folders of processes that are gone, once."""
    with suppress(OSError):
        for folder in place.iterdir():
            owner = _FOLDER.match(folder.name)
            if owner and not _lives(int(owner.group(1)), folder):
                shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int, folder: Path) -> bool:
    """Whether the folder may still be in use."""
    try:
        status = folder.lstat()
        if sys.platform == "win32":  # os.kill would end the process there
            return time.time() - status.st_mtime < _STALE_S
        if status.st_uid != os.geteuid():
            return True
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def run(
    command: Sequence[str | Path],
    limit_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    heard: Callable[[str], object] | None = None,
) -> Finished:
    """Run `command` for at most `limit_s` seconds; past that it and what it started are ended.

    Never raises OSError. Of the output no more than _LOG_LIMIT_BYTES are kept. On Linux it ends
    also when this process is killed. `heard` gets each whole line of it while the command runs.

    Output goes through a file, so a grandchild that keeps a pipe open cannot hold us up.
    """
    start = time.monotonic()
    joined = group()
    if joined is not None and joined.ended:
        return Finished("was not started: the program ends", "", 0.0)
    try:
        with _output_file(apart=heard is not None) as (output, reader):
            process = spawn(command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, env=env)
            listen = None if heard is None else partial(_hear, reader, heard)
            trouble, hung = _wait_in(joined, process, limit_s, listen)
            reader.seek(0)
            text = reader.read(_LOG_LIMIT_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        return Finished(f"{_NOT_STARTED}{error}", "", time.monotonic() - start)
    if trouble and text.startswith(_NOT_STARTED):
        trouble, text = text.strip(), ""
    return Finished(trouble, text, time.monotonic() - start, hung)


def with_packages(start: str, *words: str) -> list[str]:
    """This interpreter with the packages of here, and nothing of the program that it runs. `start`
    is its code, which has json and sys, with `words` in sys.argv[1:].
    """
    caches = [] if sys.pycache_prefix is None else ["-X", f"pycache_prefix={sys.pycache_prefix}"]
    writes = ["-B"] if sys.dont_write_bytecode else []
    places = json.dumps([str(arch.PACKAGE.parent), *(place for place in sys.path if place)])
    return [sys.executable, "-I", *caches, *writes, "-c", _PLACES + start, places, *words]


def spawn(
    command: Sequence[str | Path],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, without a window. On Linux it ends also when the
    thread that starts it does. Raises OSError, on Linux where no interpreter can be started.
    """
    joined = group()
    return subprocess.Popen(
        [*_bound(), *map(str, command)],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        env=None if env is None else {**os.environ, **env},
        start_new_session=sys.platform != "win32",
        creationflags=_CREATION_FLAGS | (_BELOW_NORMAL if joined and joined.polite else 0),
    )


class Answers:
    """What a process says in lines of JSON. One thread reads, others wait."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read(self, stream: BinaryIO) -> None:
        """Until it ends; it is closed then."""
        with suppress(ValueError, OSError):
            for line in stream:
                self._lines.put(json.loads(line))
        self._lines.put(None)
        stream.close()

    def next(self, limit_s: float) -> dict[str, Any] | None:
        """The next; None, and again, where the process has ended. Raises TimeoutError."""
        try:
            answer = self._lines.get(timeout=max(limit_s, 0.0))
        except queue.Empty:
            raise TimeoutError from None
        if answer is None:
            self._lines.put(None)
        return answer


def _bound() -> list[str]:
    """What a command begins with, so that it ends with this process."""
    if sys.platform != "linux" or not sys.executable:
        return []
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid())]


@contextmanager
def _output_file(apart: bool) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """What a command writes to, and where it is read. `apart`: while it runs, too; the handle that
    it is given, which has its place in the file, is not read from then.
    """
    if not apart:
        with tempfile.TemporaryFile() as file:
            yield file, file
        return
    with (
        work_folder() as folder,
        (folder / "output").open("wb") as output,
        (folder / "output").open("rb") as reader,
    ):
        yield output, reader


def _hear(reader: BinaryIO, heard: Callable[[str], object]) -> None:
    """Pass on the lines that are whole by now."""
    while (line := reader.readline()).endswith(b"\n"):
        heard(line.decode("utf-8", errors="replace").rstrip())
    reader.seek(-len(line), os.SEEK_CUR)


def _wait_in(
    group: Group | None,
    process: subprocess.Popen[bytes],
    limit_s: float,
    listen: Callable[[], None] | None,
) -> tuple[str, bool]:
    if group is None:
        return _wait(process, limit_s, listen)
    group._add(process)
    try:
        return _wait(process, limit_s, listen)
    finally:
        group._remove(process)


def _wait(
    process: subprocess.Popen[bytes], limit_s: float, listen: Callable[[], None] | None
) -> tuple[str, bool]:
    """Its trouble, and whether it was ended at the limit. `listen` is called now and then."""
    end = time.monotonic() + limit_s
    try:
        while listen is not None and end - time.monotonic() > _HEARD_S:
            with suppress(subprocess.TimeoutExpired):
                return _trouble(process.wait(_HEARD_S)), False
            listen()
        return _trouble(process.wait(max(end - time.monotonic(), 0.0))), False
    except subprocess.TimeoutExpired:
        _end(process)
        return f"took longer than {limit_s:g} s and was ended", True
    except BaseException:
        _end(process)
        raise


def _trouble(status: int) -> str:
    if status < 0:
        with suppress(ValueError):
            return f"crashed ({signal.Signals(-status).name})"
    if status > 0xFF:  # a Windows exception code such as 0xC0000005
        return f"crashed (0x{status & 0xFFFFFFFF:08X})"
    return f"failed (exit status {status})" if status else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    kill(process)
    process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """End it and what it started; returns before they are gone."""
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
