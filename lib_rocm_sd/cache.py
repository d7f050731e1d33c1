"""The cache folder: entries written atomically, carrying their own checksum, never read from a
world-writable place.

Nothing here raises because a folder or an entry is bad: an entry that is missing, truncated,
damaged or foreign reads as None, and where no folder can be used entries live in memory for as long
as the process does (`reasons()` says why).
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lib_rocm_sd import arch

Value = TypeVar("Value")

KINDS = ("code", "index", "compilers", "tune", "locks", "verdicts", "tried")
"""The subfolders; whatever else lies in the folder is not ours."""
_MAGIC = b"rocm_sd cache 1\n"
_DIGEST_BYTES = 32
_POLL_S = 0.02
_STALE_S = 3600.0
_PATIENCE_S = 3.0
_LOCKS_OPEN_FILES = sys.platform == "win32"


@dataclass
class _State:
    host: Path | None = None
    resolved: bool = False
    directory: Path | None = None
    readable: list[Path] = field(default_factory=list)
    unwritten: str = ""
    denied: bool = False
    """A file was not to be had for all of one's patience, which no other one gets then."""
    reasons: list[str] = field(default_factory=list)
    memory: dict[tuple[str, str], bytes] = field(default_factory=dict)


_state = _State()


def set_directory(path: Path | str | None) -> None:
    """The host's cache folder; entries go to its subfolder rocm_sd.

    None goes back to the user's own cache folder.
    """
    _state.host = None if path is None else Path(path)
    reset()


def host_directory() -> Path | None:
    """What `set_directory` was given: other processes of the host's go on from there."""
    return _state.host


def reset() -> None:
    """Look for a usable folder again at the next access, and forget what was kept in memory."""
    _state.resolved, _state.directory, _state.unwritten = False, None, ""
    _state.denied = False
    _state.readable.clear()
    _state.reasons.clear()
    _state.memory.clear()


def directory() -> Path | None:
    """The folder that is written, created when missing; where None, `reasons()` says why."""
    if not _state.resolved:
        _state.directory = next((path for path in _candidates() if _usable(path)), None)
        _state.resolved = True
    return _state.directory


def reasons() -> list[str]:
    """Why folders were passed over, and why an entry could not be written."""
    directory()
    return list(_state.reasons)


def unwritten() -> str:
    """Why the first entry that could not be written was not, but is kept in memory only; empty
    where all were.
    """
    return _state.unwritten


def key_of(*parts: str) -> str:
    """The SHA-256 of the parts, each with its length, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def read(kind: str, key: str) -> bytes | None:
    """The entry's data; None when there is none, or when it is truncated, damaged or not ours.

    Looked for in memory, in the folder in use, then in those that can only be read.
    """
    kept = _state.memory.get((kind, key))
    folders = [directory(), *_state.readable]
    found = (_contents(_entry(each, kind, key)) for each in folders if each is not None)
    return kept if kept is not None else next((data for data in found if data is not None), None)


def _contents(path: Path) -> bytes | None:
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with os.fdopen(_patiently(lambda: os.open(path, flags)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or _refusal(status):
                return None
            return _unsealed(file.read())
    except OSError:
        return None


def write(kind: str, key: str, data: bytes) -> None:
    """Store an entry: whole or not at all, also when several processes write it or this one is
    killed.
    """
    path = _path(kind, key)
    if path is None:
        _state.unwritten = _state.unwritten or "; ".join(_state.reasons)
        _state.memory[kind, key] = data
        return
    try:
        _replace(path, _sealed(data))
    except OSError as error:
        _state.unwritten = _state.unwritten or f"cannot write {path}: {error.strerror or error}"
        _note(_state.unwritten)
        _state.memory[kind, key] = data
    else:
        _state.memory.pop((kind, key), None)


def delete(kind: str, key: str) -> None:
    """Forget an entry."""
    _state.memory.pop((kind, key), None)
    path = _path(kind, key)
    if path is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def keys(kind: str) -> list[str]:
    """Sorted keys of all entries of a kind, in the writable folder or in memory."""
    stored = (path.name for path, _ in _files((kind,)) if not path.name.startswith("."))
    return sorted({*stored, *(key for each, key in _state.memory if each == kind)})


def size_bytes() -> int:
    """Bytes that all entries take on the disk."""
    return sum(size for _, size in _files(KINDS))


def clear(kinds: Iterable[str] = KINDS) -> int:
    """Delete every entry of these kinds; the bytes that were freed. `reasons()` names what stays.

    What a process has loaded, it keeps.
    """
    wanted, freed = tuple(kinds), 0
    for kind, key in list(_state.memory):
        if kind in wanted:
            del _state.memory[kind, key]
    for path, size in list(_files(wanted)):
        try:
            path.unlink(missing_ok=True)
            freed += size
        except OSError as error:
            _note(f"cannot delete {path}: {error.strerror or error}")
    return freed


def _files(kinds: Iterable[str]) -> Iterator[tuple[Path, int]]:
    """The regular files in the kinds' subfolders, with their sizes; links are not followed."""
    folder = directory()
    if folder is None:
        return
    for kind in kinds:
        with suppress(OSError):
            for path in sorted((folder / kind).rglob("*")):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield path, status.st_size


@contextmanager
def lock(key: str, limit_s: float) -> Iterator[bool | None]:
    """Hold the entry's lock, so that two processes do not do the same work; True when it was got,
    None where files cannot be locked.

    The operating system frees the lock when its holder dies. After `limit_s`, or where files cannot
    be locked, the caller goes on without it: entries are written atomically, so at worst the work
    is done twice.
    """
    path = _path("locks", key, ".lock")
    file = None if path is None else _opened_lock(path)
    if path is None or file is None:
        yield None
        return
    try:
        got = _acquired(file, time.monotonic() + limit_s)
        try:
            yield got
        finally:
            if got:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _candidates() -> list[Path]:
    asked = os.environ.get("ROCM_SD_CACHE_DIR")
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    wanted = [Path(asked) if asked else Path(base or "~/.cache", "rocm_sd")]
    if _state.host is not None and not asked:
        wanted.insert(0, _state.host / "rocm_sd")
    found = []
    for path in wanted:
        try:
            found.append(path.expanduser().absolute())
        except (RuntimeError, OSError) as error:  # nobody's home, or the current folder is gone
            _note(f"{path} is not used: {error}")
    return found


def _usable(path: Path) -> bool:
    safe = False
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (path, *path.resolve().parents):
            refusal = _refusal(folder.stat(), ancestor=folder is not path)
            if refusal:
                _note(f"{path} is not used: {folder} {refusal}")
                return False
        safe = True
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError as error:
        _note(f"{path} cannot be written: {error.strerror or error}")
        if safe:
            _state.readable.append(path)
        return False


def _refusal(status: os.stat_result, ancestor: bool = False) -> str:
    """Why something with this status may hold what others put there, hence code that is not ours;
    empty when it is safe.
    """
    if sys.platform == "win32":  # access lists, not mode bits; LOCALAPPDATA is the user's own
        return ""
    if status.st_mode & stat.S_IWOTH and not (ancestor and status.st_mode & stat.S_ISVTX):
        return "can be written by every user of this machine"
    if ancestor or status.st_uid in _trusted_owners():
        return ""
    return f"belongs to another user (uid {status.st_uid})"


def _trusted_owners() -> set[int]:
    """Ourselves, root, and whoever owns the kernels' source, which this process compiles and runs
    anyway.
    """
    if sys.platform == "win32":
        return set()
    return {os.geteuid(), 0, arch.KERNELS_DIR.stat().st_uid}


def _path(kind: str, key: str, suffix: str = "") -> Path | None:
    folder = directory()
    return None if folder is None else _entry(folder, kind, key, suffix)


def _entry(folder: Path, kind: str, key: str, suffix: str = "") -> Path:
    return folder / kind / f"{key}{suffix or ('.co' if kind == 'code' else '')}"


def _sealed(data: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(data).digest() + data


def _unsealed(content: bytes) -> bytes | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    data = content[start:]
    whole = (
        content.startswith(_MAGIC) and content[len(_MAGIC) : start] == hashlib.sha256(data).digest()
    )
    return data if whole else None


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        _patiently(lambda: temporary.replace(path))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    for stale in path.parent.glob(f".{path.name}.*"):  # left by a process that was killed
        with suppress(OSError):
            if stale.stat().st_mtime < time.time() - _STALE_S:
                stale.unlink()


def _patiently(act: Callable[[], Value]) -> Value:
    """What `act` gives, tried again while another program may have the file: on Windows none can be
    replaced that is open, and a virus scanner opens what is new for up to some seconds.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return act()
        except PermissionError:
            if not _LOCKS_OPEN_FILES or _state.unwritten or _state.denied:
                raise
            if time.monotonic() >= deadline:
                _state.denied = True
                raise
            time.sleep(_POLL_S)


def _opened_lock(path: Path) -> int | None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None


def _acquired(file: int, deadline: float) -> bool | None:
    while True:
        try:
            lock_file(file)
        except (BlockingIOError, PermissionError):  # held by another; Windows says the latter
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks
            return None
        else:
            return True


def lock_file(file: int, at: int = 0) -> None:
    """Lock an open file, on Windows its byte `at`, until it is closed or this process ends. Raises
    BlockingIOError or PermissionError where another process holds it.
    """
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, at, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _note(reason: str) -> None:
    if reason not in _state.reasons:
        _state.reasons.append(reason)
