"""Workers that are forked when all is collected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from multiprocessing import get_all_start_methods
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    "fork" not in get_all_start_methods(), reason="Python cannot fork on this system"
)
ONE = """
import os, warnings
import pytest
COLLECTED = os.getpid()

@pytest.fixture(scope="session", autouse=True)
def place(tmp_path_factory):
    yield tmp_path_factory.getbasetemp().name
    print("session ends")

@pytest.fixture(scope="module", autouse=True)
def module():
    yield
    assert not os.environ.get("SPOILS"), "a module's end"

def test_is_another_process(place):
    assert os.getpid() != COLLECTED and place == f"worker{place[-1]}"

def test_warns_and_prints():
    print("what failed said")
    warnings.warn("be warned", stacklevel=1)
    assert os.environ.get("PASSES")
"""
TWO = """
import os, pytest

@pytest.mark.parametrize("case", [1, 2, 3])
def test_one_dies(case):
    if case == 2 and not os.environ.get("PASSES"):
        os._exit(7)
"""


def run(folder: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Pytest's status and output for both files."""
    for name, text in (("one", ONE), ("two", TWO)):
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), "--workers", "2", *options, str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_what_fails_warns_and_dies_is_told(tmp_path: Path) -> None:
    status, output = run(tmp_path)
    assert status == 1
    assert "what failed said" in output and "UserWarning: be warned" in output
    assert "the worker ended in this test, with status 7" in output
    assert re.search(r"2 failed, 3 passed, 1 warning", output), output


def test_all_pass(tmp_path: Path) -> None:
    status, output = run(tmp_path, PASSES="yes")
    assert status == 0 and "5 passed, 1 warning" in output, output


def test_a_fixture_that_fails_at_the_end_of_a_file_is_an_error(tmp_path: Path) -> None:
    status, output = run(tmp_path, PASSES="yes", SPOILS="yes")
    assert status == 1 and "a module's end" in output and "5 passed" in output
    assert "1 error" in output


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    status, output = run(tmp_path, "-x", "-k", "warns")
    assert status == 1 and "stopping after 1 failures" in output
