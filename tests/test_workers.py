"""Workers: each test is run and told once, by files; one that dies fails, and the rest goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PASSES = """
import os, pathlib, warnings, pytest
PIDS = set()

@pytest.mark.parametrize("number", range(3))
def test_file(number, tmp_path):
    warnings.warn(f"warned {number}")
    PIDS.add(os.getpid())
    assert len(PIDS) == 1 and tmp_path.parent.name.startswith("worker")
    print("not told")
    with pathlib.Path(os.environ["RAN"]).open("a") as file:
        print(__name__, number, file=file)

@pytest.mark.skip(reason="of no use")
def test_skipped(): pass
"""
ENDS = """
import os
def test_before(): pass
def test_dies(): os._exit(7)
def test_after():
    print("told")
    assert 1 == 2
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def run(folder: Path, *options: str) -> tuple[int, str]:
    for name, text in (("a", PASSES), ("b", PASSES), ("c", ENDS)):
        Path(folder, f"test_{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "tests.conftest"]
    command += ["-p", "no:cacheprovider", "--workers", "2", "--rootdir", str(folder)]
    done = subprocess.run(
        [*command, str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "RAN": str(folder / "ran.txt")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_each_test_is_run_and_told_once(tmp_path: Path) -> None:
    status, said = run(tmp_path)
    assert status == 1, said
    ran = (tmp_path / "ran.txt").read_text().splitlines()
    assert sorted(ran) == [f"test_{name} {number}" for name in "ab" for number in range(3)]
    assert "2 failed, 7 passed, 2 skipped, " in said and said.count("UserWarning: warned") == 6
    assert "test_dies" in said and "the worker that ran it ended with 7" in said
    assert "assert 1 == 2" in said and "\ntold\n" in said and "not told" not in said
    assert said.count(": of no use") == 2


def test_the_first_failure_can_be_the_last(tmp_path: Path) -> None:
    status, said = run(tmp_path, "-x", "-k", "test_c")
    assert status == 1 and "1 failed, 1 passed" in said, said
    assert "stopping after 1 failures" in said
