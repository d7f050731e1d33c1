"""The journal, read by the process after the one that died."""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib_rocm_sd.trials.journal import Journal

ROOT = Path(__file__).parents[2]
DIES = """
import ctypes, os, signal, sys
from pathlib import Path
from lib_rocm_sd.trials.journal import Journal
journal = Journal(Path(sys.argv[1]))
with journal.trying("good", "attention D64", "Card"):
    pass
with journal.trying("bad", "attention D80", "Card"):
    {how}
"""
WAYS = {
    "SIGSEGV": ("ctypes.string_at(0)", "Segmentation fault"),
    "abort": ("os.abort()", "Aborted"),
    "kill -9": ("os.kill(os.getpid(), signal.SIGKILL)", ""),
    "_exit": ("os._exit(0)", ""),
}


@pytest.fixture
def no_handler() -> Iterator[None]:
    """pytest has faulthandler at work."""
    before = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    faulthandler.disable()
    if before:
        faulthandler.enable()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("way", WAYS)
def test_what_died_is_found_once_with_its_signal(tmp_path: Path, way: str) -> None:
    how, signal = WAYS[way]
    program = [sys.executable, "-c", DIES.format(how=how), str(tmp_path)]
    subprocess.run(program, cwd=ROOT, check=False, capture_output=True, timeout=600)
    (line,) = Journal(tmp_path).open_lines()
    assert (line.key, line.subject, line.device) == ("bad", "attention D80", "Card")
    assert signal in line.evidence
    assert bool(line.evidence) == bool(signal)
    assert Journal(tmp_path).open_lines() == []


def test_a_line_of_a_process_that_lives_is_left_alone(tmp_path: Path) -> None:
    text = DIES.format(how="print('here', flush=True); sys.stdin.read()")
    program = [sys.executable, "-c", text, str(tmp_path)]
    with subprocess.Popen(
        program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"here"
        assert Journal(tmp_path).open_lines() == []
        assert len(list(tmp_path.iterdir())) == 1
        process.kill()
        process.wait(600)
    assert [line.key for line in Journal(tmp_path).open_lines()] == ["bad"]


def test_success_and_errors_strike_the_line(tmp_path: Path, no_handler: None) -> None:
    journal = Journal(tmp_path)
    with journal.trying("a", "s", "d"):
        (path,) = tmp_path.iterdir()
        assert json.loads(path.read_text().splitlines()[0])["subject"] == "s"
        assert faulthandler.is_enabled()
        with journal.trying("b", "s", "d"):
            assert len(list(tmp_path.iterdir())) == 2
    assert not faulthandler.is_enabled()
    with pytest.raises(RuntimeError, match="no"), journal.trying("a", "s", "d"):
        raise RuntimeError("no")
    assert list(tmp_path.iterdir()) == []


def test_a_hosts_faulthandler_is_left_alone(tmp_path: Path, no_handler: None) -> None:
    with (tmp_path / "hosts").open("w") as hosts:
        faulthandler.enable(hosts)
        with Journal(tmp_path).trying("a", "s", "d"):
            pass
        assert faulthandler.is_enabled()
        faulthandler.disable()


def test_without_a_folder_there_is_no_journal_and_no_error(tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    with Journal(nowhere).trying("a", "s", "d"):
        pass
    assert Journal(nowhere).open_lines() == []


def test_foreign_files_are_no_lines(tmp_path: Path) -> None:
    (tmp_path / "k-1-ab.trying").write_text("[]\n")
    (tmp_path / "other").write_text("x")
    assert Journal(tmp_path).open_lines() == []
