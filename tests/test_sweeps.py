"""What a default run leaves out: see sweeps.py."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests import ledger, sweeps
from tests.compiled import CHECKOUT
from tests.test_ledger import config
from tests.webui import inside_run
from tests.webui.environments import A1111


def cases(**parameters: list[Any]) -> list[Any]:
    """One for each of the values, which are given by parameter."""
    columns = zip(*parameters.values(), strict=True)
    return [
        SimpleNamespace(callspec=SimpleNamespace(params=dict(zip(parameters, row, strict=True))))
        for row in columns
    ]


def kept(**parameters: list[Any]) -> list[int]:
    sweep = cases(**parameters)
    places = {id(case): place for place, case in enumerate(sweep)}
    return [places[id(case)] for case in sweeps.representatives(sweep)]


def test_the_first_the_last_and_every_tenth_case_stay() -> None:
    assert kept(seed=list(range(25))) == [0, 10, 20, 24]
    assert kept(seed=[1]) == [0]


def test_each_value_that_recurs_is_shown() -> None:
    gpus = ["gfx1030", *["gfx1100"] * 3, *["gfx942"] * 4]
    assert kept(gfx=gpus, seed=list(range(8))) == [0, 1, 7]
    problems = [
        AttentionProblem(1, 1, seq, 64, 40, dtype, mask)
        for seq, dtype, mask in (
            (128, "float16", "none"),
            (127, "float16", "none"),
            (127, "bfloat16", "none"),
            (128, "bfloat16", "bool"),
            (128, "float16", "bool"),
            (128, "float16", "none"),
        )
    ]
    assert kept(problem=problems) == [0, 1, 2, 3, 5]


def test_names_of_another_object_are_no_values() -> None:
    assert kept(make=[object() for _ in range(8)]) == [0, 7]


@pytest.mark.parametrize(("thinned", "kept"), [("", 20), ("1", 3)])
def test_a_loop_has_a_part_of_its_cases(
    monkeypatch: pytest.MonkeyPatch, thinned: str, kept: int
) -> None:
    monkeypatch.setenv(sweeps.VARIABLE, thinned)
    assert len(sweeps.some(range(20))) == kept


def item(nodeid: str, **params: Any) -> Any:
    return SimpleNamespace(nodeid=nodeid, callspec=SimpleNamespace(params=params))


def test_only_what_is_listed_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "SWEEPS", {"tests/a.py::test_sweep"})
    monkeypatch.setattr(sweeps, "LONG", {"tests/a.py::test_long": "", "tests/b.py": ""})
    sweep = [item(f"tests/a.py::test_sweep[{seed}]", seed=seed) for seed in range(3)]
    refusals = [item(f"tests/a.py::test_refusal[{seed}]", seed=seed) for seed in range(3)]
    long = [item("tests/a.py::test_long[x]"), item("tests/b.py::test_y")]
    stay, left = sweeps.split([*long, *sweep, *refusals])  # type: ignore[list-item]
    assert stay == [sweep[0], sweep[2], *refusals] and left == [*long, sweep[1]]


def test_what_is_named_and_what_is_recorded_has_every_case() -> None:
    assert ledger.Ledger(config()).thinned and ledger.Ledger(config("tests/ops")).thinned
    for all_cases in (config("tests/x.py"), config("x::y"), config(keyword="x")):
        assert not ledger.Ledger(all_cases).thinned
    for option in ("all", "record", "sweeps"):
        assert not ledger.Ledger(config(**{option: True})).thinned  # type: ignore[arg-type]


def test_the_lists_name_tests_that_are_there() -> None:
    names = sweeps.SWEEPS | set(sweeps.LONG) | set(sweeps.LONG.values())
    defined: dict[str, set[str]] = {}
    for name in names:
        file, _, test = name.partition("[")[0].partition("::")
        if file not in defined:
            tree = ast.parse(Path(CHECKOUT, file).read_text(encoding="utf-8"))
            defined[file] = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert not test or test in defined[file], name


def test_what_stands_for_a_long_test_is_in_a_default_run() -> None:
    for name, other in sweeps.LONG.items():
        assert other != name and other not in sweeps.LONG, name
        assert (
            other.partition("[")[0] not in sweeps.LONG and other.split("::")[0] not in sweeps.LONG
        )


@pytest.mark.parametrize("thinned", ["", "1"])
def test_processes_of_a_default_run_leave_out_what_is_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, thinned: str
) -> None:
    done = Mock(return_value=SimpleNamespace(returncode=0, stdout=""))
    monkeypatch.setattr(inside_run, "prepare", lambda environment: "")
    monkeypatch.setattr(inside_run.subprocess, "run", done)
    monkeypatch.setattr(
        sweeps, "LONG", {"tests/webui/inside/test_x.py::y[z]": "", "tests/a.py": ""}
    )
    monkeypatch.setenv(sweeps.VARIABLE, thinned)
    inside_run.run_inside("inside", A1111, tmp_path)
    left_out = [word for word in done.call_args.args[0] if word.startswith("--deselect")]
    assert left_out == (["--deselect=test_x.py::y[z]"] if thinned else [])
