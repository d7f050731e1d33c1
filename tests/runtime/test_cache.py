"""The cache folder: damage, other users, no folder at all, several processes at once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import cache
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
KEY = cache.key_of("a key")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="mode bits are POSIX's")


def entry(folder: Path) -> Path:
    """The file behind KEY."""
    return folder / "code" / f"{KEY}.co"


def started(script: str, folder: Path) -> subprocess.Popen[str]:
    """A Python process on the same cache folder."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "ROCM_SD_CACHE_DIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_was_written_is_read(fresh_cache: Path) -> None:
    assert cache.read("code", KEY) is None
    cache.write("code", KEY, b"data\0more")
    assert cache.read("code", KEY) == b"data\0more"
    assert cache.read("index", KEY) is None
    assert entry(fresh_cache).is_file()
    cache.delete("code", KEY)
    assert cache.read("code", KEY) is None


def test_an_empty_entry_is_an_entry(fresh_cache: Path) -> None:
    cache.write("code", KEY, b"")
    assert cache.read("code", KEY) == b""


def test_keys_keep_their_parts_apart() -> None:
    assert cache.key_of("ab", "c") != cache.key_of("a", "bc") != cache.key_of("abc")


def test_a_truncated_entry_reads_as_none(fresh_cache: Path) -> None:
    cache.write("code", KEY, b"0123456789")
    whole = entry(fresh_cache).read_bytes()
    for length in range(len(whole)):
        entry(fresh_cache).write_bytes(whole[:length])
        assert cache.read("code", KEY) is None, length


def test_a_flipped_bit_anywhere_reads_as_none(fresh_cache: Path) -> None:
    cache.write("code", KEY, b"0123456789")
    whole = entry(fresh_cache).read_bytes()
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        entry(fresh_cache).write_bytes(damaged)
        assert cache.read("code", KEY) is None, at


def test_a_foreign_file_reads_as_none_and_is_replaced(fresh_cache: Path) -> None:
    cache.write("code", KEY, b"ours")
    entry(fresh_cache).write_bytes(b"\x7fELF of somebody else")
    assert cache.read("code", KEY) is None
    cache.write("code", KEY, b"ours again")
    assert cache.read("code", KEY) == b"ours again"


@posix_only
def test_a_folder_that_everybody_can_write_is_not_used(fresh_cache: Path) -> None:
    fresh_cache.mkdir()
    fresh_cache.chmod(0o777)
    assert cache.directory() is None
    assert any("every user of this machine" in reason for reason in cache.reasons())
    cache.write("code", KEY, b"kept in memory")
    assert cache.read("code", KEY) == b"kept in memory"
    assert list(fresh_cache.iterdir()) == []


@posix_only
def test_neither_is_a_folder_inside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", str(open_folder / "inner"))
    cache.reset()
    assert cache.directory() is None
    open_folder.chmod(0o1777)  # as /tmp: others cannot rename what is ours
    cache.reset()
    assert cache.directory() == open_folder / "inner"
    monkeypatch.undo()
    cache.reset()


@posix_only
def test_an_entry_that_everybody_can_write_is_not_read(fresh_cache: Path) -> None:
    cache.write("code", KEY, b"data")
    entry(fresh_cache).chmod(0o666)
    assert cache.read("code", KEY) is None


@posix_only
def test_another_users_folder_is_not_used(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_cache.mkdir()
    monkeypatch.setattr(cache, "_trusted_owners", lambda: {os.geteuid() + 1})
    assert cache.directory() is None
    assert any("belongs to another user" in reason for reason in cache.reasons())


def test_no_writable_folder_means_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    cache.reset()
    cache.write("code", KEY, b"data")
    assert cache.read("code", KEY) == b"data"
    assert any("cannot be written" in reason for reason in cache.reasons())
    assert "cannot be written" in cache.unwritten()
    with cache.lock(KEY, 1.0) as got:
        assert not got
    monkeypatch.undo()
    cache.reset()


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A user of a container: no HOME, and no line in the list of users."""
    pwd = pytest.importorskip("pwd")

    def unknown(_: object) -> object:
        raise KeyError("uid not found: 1000")

    for name in ("HOME", "XDG_CACHE_HOME", "ROCM_SD_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    cache.reset()
    yield monkeypatch
    monkeypatch.undo()
    cache.reset()


@pytest.mark.parametrize("asked", ["", "~nosuchuser/x", "~/x"])
def test_no_home_means_memory(homeless: pytest.MonkeyPatch, asked: str) -> None:
    if asked:
        homeless.setenv("ROCM_SD_CACHE_DIR", asked)
    cache.write("code", KEY, b"data")
    assert cache.directory() is None
    assert cache.read("code", KEY) == b"data"
    (reason,) = cache.reasons()
    assert reason.startswith(f"{asked or '~/.cache/rocm_sd'} is not used: ")
    assert cache.unwritten() == reason


def test_the_hosts_folder_serves_who_has_no_home(
    homeless: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache.set_directory(tmp_path)
    cache.write("code", KEY, b"data")
    assert (cache.directory(), cache.unwritten()) == (tmp_path / "rocm_sd", "")
    cache.set_directory(None)


@posix_only
def test_a_relative_folder_below_one_that_is_gone_means_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", "here")
    cache.reset()
    assert cache.directory() is None
    assert "here is not used: " in cache.reasons()[0]
    monkeypatch.undo()
    cache.reset()


def test_a_full_disk_means_memory(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "_replace", full)
    cache.write("code", KEY, b"data")
    assert cache.read("code", KEY) == b"data"
    assert any("No space left" in reason for reason in cache.reasons())
    assert "No space left" in cache.unwritten()
    cache.reset()
    assert cache.unwritten() == ""


@pytest.mark.parametrize("refusals", [3, 1000])
def test_a_file_that_a_virus_scanner_has_open_is_waited_for(
    refusals: int, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, a file cannot be replaced meanwhile: for some seconds, and then once only."""
    clock, replace, asked = [0.0], Path.replace, [0]

    def refused(path: Path, target: Path) -> Path:
        asked[0] += 1
        if asked[0] <= refusals:
            raise PermissionError(errno.EACCES, "Access is denied")
        return replace(path, target)

    monkeypatch.setattr(cache, "_LOCKS_OPEN_FILES", True)
    monkeypatch.setattr(Path, "replace", refused)
    monkeypatch.setattr(cache.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(cache.time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    cache.write("code", KEY, b"data")
    stored = (fresh_cache / "code" / f"{KEY}.co").exists()
    assert (stored, bool(cache.unwritten())) == ((True, False) if refusals == 3 else (False, True))
    assert cache.read("code", KEY) == b"data"
    before = clock[0]
    cache.write("code", "b" * 64, b"more")
    assert clock[0] == before  # not waited for again


def test_the_hosts_folder_comes_before_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROCM_SD_CACHE_DIR", raising=False)
    cache.set_directory(tmp_path)
    assert cache.directory() == tmp_path / "rocm_sd"
    (tmp_path / "file").write_text("")
    cache.set_directory(tmp_path / "file")
    users = cache.directory()
    assert users is not None and users.name == "rocm_sd" and tmp_path not in users.parents
    assert any(str(tmp_path / "file") in reason for reason in cache.reasons())
    cache.set_directory(None)


def test_a_write_leaves_nothing_else_behind(fresh_cache: Path) -> None:
    stale = fresh_cache / "code" / f".{KEY}.co.abandoned"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half")
    os.utime(stale, (1, 1))
    cache.write("code", KEY, b"data")
    assert [path.name for path in (fresh_cache / "code").iterdir()] == [f"{KEY}.co"]


def test_writers_and_readers_at_once_see_whole_entries(fresh_cache: Path) -> None:
    script = f"""
from lib_rocm_sd import cache
import sys
for number in range(150):
    cache.write("code", {KEY!r}, bytes([number]) * 70000)
    data = cache.read("code", {KEY!r})
    assert data is not None and len(data) == 70000 and len(set(data)) == 1, number
"""
    processes = [started(script, fresh_cache) for _ in range(3)]
    for process in processes:
        process.communicate(timeout=WAIT_S)
    assert [process.returncode for process in processes] == [0, 0, 0]


def test_a_lock_is_held_by_one(fresh_cache: Path) -> None:
    with cache.lock(KEY, 60.0) as first, cache.lock(KEY, 0.0) as second:
        assert first and not second
    with cache.lock(KEY, 0.0) as again:
        assert again


@posix_only
def test_the_lock_of_a_killed_process_is_free_at_once(fresh_cache: Path) -> None:
    script = f"""
import time
from lib_rocm_sd import cache
with cache.lock({KEY!r}, 60.0) as got:
    print(got, flush=True)
    time.sleep(3600)
"""
    process = started(script, fresh_cache)
    assert process.stdout is not None and process.stdout.readline() == "True\n"
    with cache.lock(KEY, 0.0) as got:
        assert not got
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)
    process.stdout.close()
    with cache.lock(KEY, 0.0) as got:
        assert got


def test_size_and_clear(fresh_cache: Path) -> None:
    assert cache.size_bytes() == 0
    cache.write("code", KEY, b"x" * 1000)
    cache.write("index", KEY, b"{}")
    cache.write("tune", "gfx1100/attention.json", b"{}")
    mine = fresh_cache / "mine.txt"
    mine.write_text("not an entry", encoding="utf-8")
    whole = cache.size_bytes()
    assert whole > 1000
    freed = cache.clear(("code", "index"))
    assert 1000 < freed < whole
    assert cache.read("code", KEY) is None and cache.read("index", KEY) is None
    assert cache.read("tune", "gfx1100/attention.json") == b"{}"
    assert cache.clear() == whole - freed
    assert cache.size_bytes() == 0
    assert mine.is_file()


def test_clear_follows_no_links(fresh_cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept", encoding="utf-8")
    cache.write("code", KEY, b"x")
    try:
        (fresh_cache / "code" / "link").symlink_to(elsewhere, target_is_directory=True)
        (fresh_cache / "code" / "file").symlink_to(elsewhere / "precious")
    except OSError:
        pytest.skip("links cannot be made here")
    cache.clear()
    assert (elsewhere / "precious").is_file()


def test_clear_without_a_folder(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_candidates", list)
    cache.reset()
    cache.write("code", KEY, b"x")
    assert cache.read("code", KEY) == b"x"
    assert cache.clear() == 0
    assert cache.read("code", KEY) is None
    cache.reset()


def unwritable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Nothing new can be made in `folder`, which mode bits do not tell root."""
    make = tempfile.TemporaryFile

    def refuse(*words: Any, dir: Path, **more: Any) -> Any:
        if dir == folder:
            raise OSError(errno.EROFS, "Read-only file system")
        return make(*words, dir=dir, **more)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    cache.reset()


def test_a_filled_folder_that_cannot_be_written_is_read(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("code", KEY, b"data")
    unwritable(monkeypatch, fresh_cache)
    assert cache.directory() is None and "Read-only" in cache.reasons()[0]
    assert cache.read("code", KEY) == b"data"
    cache.write("code", KEY, b"newer")
    assert cache.read("code", KEY) == b"newer"
    cache.reset()
    assert cache.read("code", KEY) == b"data"


def test_the_hosts_full_folder_is_read_beside_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.set_directory(tmp_path / "host")
    cache.write("code", KEY, b"the host's")
    unwritable(monkeypatch, tmp_path / "host" / "rocm_sd")
    try:
        assert cache.directory() not in (None, tmp_path / "host" / "rocm_sd")
        assert cache.read("code", KEY) == b"the host's"
        cache.write("code", KEY, b"the user's")
        assert cache.read("code", KEY) == b"the user's"
        cache.delete("code", KEY)
    finally:
        cache.set_directory(None)


@posix_only
def test_another_users_folder_is_not_even_read(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("code", KEY, b"data")
    fresh_cache.chmod(0o777)
    unwritable(monkeypatch, fresh_cache)
    assert cache.read("code", KEY) is None


@posix_only
def test_a_pipe_in_an_entrys_place_is_not_waited_for(fresh_cache: Path) -> None:
    cache.write("code", KEY, b"data")
    entry(fresh_cache).unlink()
    os.mkfifo(entry(fresh_cache), 0o600)
    script = f"from lib_rocm_sd import cache; print(cache.read('code', {KEY!r}))"
    process = started(script, fresh_cache)
    try:
        assert process.communicate(timeout=WAIT_S)[0] == "None\n"
    finally:
        process.kill()
    cache.write("code", KEY, b"again")
    assert cache.read("code", KEY) == b"again"
