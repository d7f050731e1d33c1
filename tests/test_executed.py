"""The ledger: what is executed again, what is not, and what is written."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import install
from tests import compiled, executed
from tests.executed import Code, Entry, merged

A, B, C = (Entry("clang 19.1.7", "tests/x.py::test_y", f"{number:012x}") for number in range(3))
CODE, LATER = (Code("clang 19.1.7", "gfx1100 linear", each * 12, "c" * 12) for each in "ab")
OTHER = Entry("clang 22.1.0", "tests/x.py::test_y", "f" * 12)


def test_what_is_written_is_read_again_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "executed.json"
    executed.write([B, OTHER, A, B], [CODE, LATER], path)
    assert executed.read(path) == {A, B, OTHER}
    assert executed.read_codes(path) == {CODE, LATER}
    text = path.read_text(encoding="utf-8")
    assert f'"{A.test}": "{A.key} {B.key}"' in text  # one line for each test and compiler
    assert f'"{CODE.kernel}": "{CODE.source}:{CODE.code} {LATER.source}:{LATER.code}"' in text
    executed.write([OTHER, A, B], [LATER, CODE], path)
    assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [None, "", "[]", "{}", '{"right": 3}', '{"right": {"clang 19.1.7": 3}}']
    + ['{"right": {"clang": {"a": 1}}, "codes": {"clang": {"a": "b"}}}'],
)
def test_a_missing_or_damaged_file_knows_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "executed.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert not executed.read(path)
    assert not executed.read_codes(path)


def test_the_file_is_small_and_of_this_form() -> None:
    assert executed.FILE.stat().st_size < 345_000
    assert json.loads(executed.FILE.read_text(encoding="utf-8"))["about"] == executed.ABOUT


def test_a_whole_run_forgets_what_is_no_more_a_part_keeps_it() -> None:
    assert merged([A, B], [B, C], [C], [], whole=True) == {B, C}
    assert merged([A, B], [B, C], [C], [], whole=False) == {A, B, C}


def test_a_wrong_one_is_forgotten_and_another_compilers_stays() -> None:
    assert merged([A, B, OTHER], [A, B], [B], [A], whole=True) == {B, OTHER}


# -- keys ------------------------------------------------------------------------------------------


def test_machine_code_does_not_hang_on_comments(tmp_path: Path) -> None:
    path = tmp_path / "a.hip"
    path.write_text('int a; // x\n/* b\n c */ asm("//s");\n\n', encoding="utf-8")
    assert compiled.text_of(path) == 'int a;\nasm("//s");'


# -- install.py test -----------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for Python is a shell script")
@pytest.mark.parametrize(("failing", "status"), [("none", 0), ("mypy", 3), ("ruff", 3)])
def test_types_are_checked_beside_pytest_and_shown_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], failing: str, status: int
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "ran $2 $3"\n[ "$2" != {failing} ] || exit 3\n')
    python.chmod(0o755)
    assert install.test(python, ["--all"]) == status
    said = capfd.readouterr().out
    ran = [line.split()[1] for line in said.splitlines() if line.startswith("ran ")]
    assert ran == ["ruff", "ruff", "pytest", "mypy"]
    assert "== mypy\nran mypy" in said and re.search(r"--workers \d --all\n", said)
