"""Cases of machine code are known by what a GPU would execute."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.linear.problem import LinearProblem
from tests import executed, ledger, noted
from tests.amdgpu import executor, launch
from tests.amdgpu.case import Case
from tests.amdgpu.coverage import kernel_of
from tests.amdgpu.judge import execute
from tests.executed import Entry
from tests.test_ledger import config

pytestmark = pytest.mark.skipif(bool(launch.missing()), reason=str(launch.missing()))

ATTENTION = Case("gfx1100", "attention", AttentionProblem(1, 2, 35, 67, 40, "float16", "none"))
LINEAR = Case("gfx1030", "linear", LinearProblem(33, 64, (40,), "float16"))
MANY = replace(LINEAR, problem=LinearProblem(33, 64, (40, 24, 8, 16, 8), "float16"))


@pytest.fixture(autouse=True)
def _nothing_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*given: Any) -> None:
        raise AssertionError("executed")

    monkeypatch.setattr(executor, "run", run)


def key_of(case: Case, kernels_dir: Path = KERNELS_DIR) -> str:
    """Of the case's launch alone, whatever it is called."""
    return noted.key_of(noted.Codes([]), "", lambda: execute(case, kernels_dir))


@pytest.mark.parametrize("case", [ATTENTION, LINEAR, MANY], ids=str)
def test_a_key_is_the_same_wherever_tensors_lie(case: Case) -> None:
    keep = [key_of(case)]
    others = [bytearray(1 << 16) for _ in range(50)]
    assert keep[0] and key_of(case) == keep[0], len(others)
    assert launch.noting is None


def changed(case: Case, **what: Any) -> Case:
    return replace(case, problem=replace(case.problem, **what))


@pytest.mark.parametrize(
    "other",
    [
        changed(ATTENTION, seq_k=68),
        changed(ATTENTION, heads=3),
        replace(ATTENTION, scale=-0.3),
        replace(ATTENTION, layout="misaligned"),
        replace(ATTENTION, config=1),
        replace(ATTENTION, schedule=1),
        replace(ATTENTION, gfx="gfx1201"),
    ],
    ids=str,
)
def test_arguments_code_and_order_make_another_key(other: Case) -> None:
    assert key_of(other) not in ("", key_of(ATTENTION))


def test_the_executors_version_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(LINEAR)
    monkeypatch.setattr(executor, "VERSION", executor.VERSION + 1)
    assert key_of(LINEAR) != before


def edited(tmp_path: Path, edit: Callable[[str], str]) -> Path:
    """The kernels, of which linear.hip is edited."""
    kernels_dir = tmp_path / "kernels"
    shutil.copytree(KERNELS_DIR, kernels_dir)
    path = kernels_dir / "linear.hip"
    text = path.read_text(encoding="utf-8")
    assert edit(text) != text
    path.write_text(edit(text), encoding="utf-8")
    return kernels_dir


@pytest.mark.parametrize("where", ["a comment", "a line"])
def test_what_gives_the_same_machine_code_has_the_same_key(tmp_path: Path, where: str) -> None:
    """A comment needs no compiler, another line does."""
    line = {"a comment": "// nothing", "a line": "struct NeverUsed { int x; };"}[where]
    kernels_dir = edited(tmp_path, lambda text: f"{text}\n{line}\n")
    codes = noted.Codes([])
    before = noted.key_of(codes, "", lambda: execute(LINEAR))
    known = codes.taken()
    codes = noted.Codes(known)
    assert noted.key_of(codes, "", lambda: execute(LINEAR, kernels_dir)) == before
    assert (codes.taken() == known) is (where == "a comment")


def test_other_machine_code_has_another_key(tmp_path: Path) -> None:
    kernels_dir = edited(tmp_path, lambda text: text.replace("p.k", "(p.k ^ 8)", 1))
    assert key_of(LINEAR, kernels_dir) not in ("", key_of(LINEAR))


def test_what_fails_before_it_launches_has_no_key() -> None:
    assert noted.key_of(noted.Codes([]), "", lambda: execute(replace(LINEAR, op="none"))) == ""
    assert noted.key_of(noted.Codes([]), "", lambda: None) == ""
    assert noted.key_of(noted.Codes([]), "", lambda: pytest.skip("no compiler")) == ""


# -- in a run ------------------------------------------------------------------------------------


def item(case: Case) -> Any:
    """A test of one case, as pytest has it."""
    mark = executed.known(by="clang", noted=True, together=kernel_of).mark
    return SimpleNamespace(
        path=Path(__file__),
        originalname="test_x",
        callspec=SimpleNamespace(params={"case": case}),
        funcargs={"case": case},
        _fixtureinfo=SimpleNamespace(argnames=("case",)),
        obj=lambda case: execute(case),
        user_properties=[],
        iter_markers=lambda name: iter([mark]),
    )


def test_a_test_ends_where_it_is_known_and_is_told_of_once_it_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executed, "read", frozenset)
    monkeypatch.setattr(executed, "read_codes", frozenset)
    run = ledger.Ledger(config())
    new = item(LINEAR)
    assert run.pytest_pyfunc_call(new) is None
    told = dict(new.user_properties)
    entry = Entry._make(told["executed"])
    assert told["is new"] and entry.test == "tests/test_noted.py::test_x gfx1030 linear"
    assert [code[1] for code in told["codes"]] == ["gfx1030 linear"]
    run.known = frozenset([entry])
    run.day = executed.turn_of(new, entry) + 1
    known = item(LINEAR)
    assert run.pytest_pyfunc_call(known) is True
    assert dict(known.user_properties)["is new"] is False
