"""Processes that end with the one that started them, and the folders that they worked in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lib_rocm_sd.runtime import process
from tests.runtime.processes import LONG_S, noted, sleeper, wait_until_gone
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc and Linux's kernel")

COMPILING = f"""
import sys
from lib_rocm_sd.runtime import process
with process.work_folder() as folder:
    (folder / "kernel.s").write_text("half")
    process.run(sys.argv[1:], {LONG_S})
"""


def started(script: str, temporary: Path, *words: str) -> subprocess.Popen[str]:
    """A Python process whose temporary files lie in `temporary`."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )


@linux_only
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_what_a_killed_process_started_ends_and_its_folder_goes(
    tmp_path: Path, number: str
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    killed = started(COMPILING, temporary, *sleeper(tmp_path / "pid"))
    pid = int(noted(tmp_path / "pid"))
    (left,) = temporary.glob("rocm_sd_*")
    killed.send_signal(signal.Signals[number])
    killed.communicate(timeout=WAIT_S)
    assert wait_until_gone(pid)
    ours = temporary / f"rocm_sd_{os.getpid()}_in_use"
    ours.mkdir()
    (temporary / "rocm_sd_tests_of_somebody").mkdir()
    sweep = "from lib_rocm_sd.runtime import process\nwith process.work_folder(): pass"
    started(sweep, temporary).communicate(timeout=WAIT_S)
    names = {path.name for path in temporary.iterdir()}
    assert left.name not in names
    assert names == {ours.name, "rocm_sd_tests_of_somebody"}


def test_a_program_that_is_not_there_or_no_program(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no program")
    for name in ("none", "file"):
        done = process.run([tmp_path / name], 60)
        assert done.trouble.startswith("could not be started: "), name
        assert (done.output, done.hung) == ("", False)


def test_without_room_for_temporary_files_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    done = process.run([sys.executable, "-c", "pass"], 60)
    assert done.trouble.startswith("could not be started: ")


def test_a_work_folder_that_cannot_be_removed_spoils_no_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on Windows while a virus scanner has a file of it open."""

    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "The process cannot access the file")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch, process.work_folder() as folder:
        file = (folder / "kernel.co").open("wb")
        if sys.platform != "win32":
            patch.setattr(os, "unlink", refused)
    file.close()
    assert folder.exists()


def test_what_a_program_prints_is_heard_while_it_runs(tmp_path: Path) -> None:
    """It waits until its first line was heard; a line that is not whole is not passed on."""
    note = tmp_path / "heard"
    code = (
        "import pathlib, sys, time\nprint('one\\ntw', end='', flush=True)\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nprint('o', flush=True)\n"
        "while pathlib.Path(sys.argv[1]).read_text() != 'one two': time.sleep(0.01)"
    )
    lines: list[str] = []

    def heard(line: str) -> None:
        lines.append(line)
        note.with_suffix(".new").write_text(" ".join(lines))
        note.with_suffix(".new").replace(note)

    done = process.run([sys.executable, "-c", code, note], WAIT_S, heard=heard)
    assert (done.trouble, done.output, lines) == ("", "one\ntwo\n", ["one", "two"])


def test_what_a_program_prints_and_its_arguments_are_its_own() -> None:
    code = "import sys; print(sys.argv[1:], end=''); raise SystemExit(3)"
    done = process.run([sys.executable, "-c", code, "two words", "$HOME", ""], 60)
    assert done.output == "['two words', '$HOME', '']"
    assert (done.trouble, done.hung) == ("failed (exit status 3)", False)
