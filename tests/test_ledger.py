"""The ledger in a run: what is executed, what is said of it, what is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests import compiled, executed, ledger
from tests.executed import Entry
from tests.test_executed import OTHER, A, B, C
from tests.verify.amdgpu import launch
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.coverage import kernel_of
from tests.verify.amdgpu.test_amdgpu_kernels import spec_turn

# -- turns ---------------------------------------------------------------------------------------


def test_each_has_its_turn_within_a_hundred_days() -> None:
    page = (compiled.CHECKOUT / "docs" / "verification.md").read_text(encoding="utf-8")
    assert ledger.ROTATION == 105 and "each entry has its turn within 105 days" in page
    for entry in (A, B, C, OTHER):
        assert (
            sum(
                ledger.due(int(entry.key, 16), day)
                for day in range(740_000, 740_000 + ledger.ROTATION)
            )
            == 1
        )


def test_a_days_share_stays_bounded() -> None:
    assert len(executed.read()) <= ledger.ROTATION * ledger.MOST_A_DAY


def test_what_is_compiled_for_several_is_executed_on_one_day() -> None:
    """Else each of them would compile it on another."""
    case = Case("gfx1100", "attention", AttentionProblem(1, 1, 128, 64, 64, "float16", "none"))
    other = replace(case, problem=replace(case.problem, seq_k=80), layout="packed", values="ties")
    spec = kernel_of(case)[2]
    assert kernel_of(other) == kernel_of(case) == spec_turn("gfx1100", spec)
    assert kernel_of(replace(case, config=1)) != kernel_of(case)
    assert kernel_of(replace(case, gfx="gfx1201")) != kernel_of(case)


# -- choosing and saying -------------------------------------------------------------------------


def config(*words: str, keyword: str = "", **options: bool) -> Any:
    source = pytest.Config.ArgsSource
    chosen = {"all": False, "record": False, "sweeps": False, **options}
    return SimpleNamespace(
        args=words,
        args_source=source.ARGS if words else source.TESTPATHS,
        option=SimpleNamespace(keyword=keyword, markexpr="", collectonly=False),
        getoption=chosen.__getitem__,
    )


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ledger has A and B."""
    path = tmp_path / "executed.json"
    monkeypatch.setattr(ledger, "UNFINISHED", tmp_path / "unfinished.jsonl")
    monkeypatch.setattr(executed, "FILE", path)
    monkeypatch.setattr(executed.read, "__defaults__", (path,))
    monkeypatch.setattr(executed.read_codes, "__defaults__", (path,))
    monkeypatch.setattr(executed.write, "__defaults__", ((), path))
    executed.write([A, B])
    return path


def day_of(entry: Entry) -> int:
    return next(day for day in range(ledger.ROTATION) if ledger.due(int(entry.key, 16), day))


def chosen(found: ledger.Ledger, entry: Entry) -> bool:
    return found.is_executed(entry, int(entry.key, 16))


@pytest.mark.parametrize("sweeps", [False, True])
def test_what_is_new_is_executed_and_with_every_case_what_has_its_turn(
    kept: Path, sweeps: bool
) -> None:
    found = ledger.Ledger(config(sweeps=sweeps))
    found.day = day_of(A)
    assert [chosen(found, each) for each in (A, B, C)] == [sweeps, False, True]


@pytest.mark.parametrize("how", [config("tests/x.py"), config("x::y"), config(keyword="x")])
def test_what_is_named_is_executed(kept: Path, how: Any) -> None:
    found = ledger.Ledger(how)
    assert all(chosen(found, each) for each in (A, B, C)) and not found.whole
    folder = ledger.Ledger(config("tests/ops"))
    folder.day = day_of(A)
    assert not chosen(folder, B)


def report(entry: Entry, outcome: Any = "passed", nodeid: str = "tests/x.py::test_y") -> Any:
    return pytest.TestReport(
        nodeid, ("x", 1, "y"), {}, outcome, None, "call", user_properties=[("executed", entry)]
    )  # type: ignore[arg-type]


def test_an_interrupted_one_goes_on_where_it_was(kept: Path) -> None:
    first = ledger.Ledger(config(all=True))
    first.collected = {A, B, C}
    first.pytest_runtest_logreport(report(A))
    first.pytest_sessionfinish(SimpleNamespace(), pytest.ExitCode.INTERRUPTED)  # type: ignore[arg-type]
    assert executed.read() == {A, B}
    again = ledger.Ledger(config(all=True))
    assert [chosen(again, each) for each in (A, B, C)] == [False, True, True]
    again.collected = {A, B, C}
    again.pytest_runtest_logreport(report(B, "failed"))
    again.pytest_runtest_logreport(report(C))
    again.pytest_sessionfinish(SimpleNamespace(), pytest.ExitCode.TESTS_FAILED)  # type: ignore[arg-type]
    assert executed.read() == {A, C} and not ledger.UNFINISHED.exists()


def test_a_usual_run_writes_nothing_and_record_adds(kept: Path) -> None:
    for record in (False, True):
        found = ledger.Ledger(config(record=record))
        found.collected = {A, B, C}
        found.pytest_runtest_logreport(report(C))
        found.machine["executed"] = 1
        found.pytest_sessionfinish(SimpleNamespace(), pytest.ExitCode.OK)  # type: ignore[arg-type]
        assert executed.read() == ({A, B, C} if record else {A, B})


def test_nothing_is_kept_of_sources_that_changed_meanwhile(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ledger.Ledger(config(all=True))
    found.collected = {A, C}
    found.pytest_runtest_logreport(report(C))
    monkeypatch.setattr(executed, "sources", lambda: "edited")
    found.pytest_sessionfinish(SimpleNamespace(), pytest.ExitCode.OK)  # type: ignore[arg-type]
    assert executed.read() == {A, B} and not ledger.UNFINISHED.exists()
    assert "sources were edited during the run" in "\n".join(found.lines())


def test_a_wrong_claim_is_said_loudly(kept: Path) -> None:
    found = ledger.Ledger(config())
    found.collected = {A, B, C}
    found.pytest_runtest_logreport(report(A, "failed"))
    found.pytest_runtest_logreport(report(C))
    said = "\n".join(found.lines())
    assert "ledger: 2 of 3 known, 0 re-executed today, 1 new" in said
    assert f"LEDGER IS WRONG: {A.test} is known to be right as {A.key}" in said


def test_another_compiler_is_said(kept: Path) -> None:
    found = ledger.Ledger(config())
    found.collected = {OTHER}
    assert "nothing is known of clang 22.1.0, so all is executed" in "\n".join(found.lines())


def test_machine_code_that_was_not_executed_is_said(kept: Path) -> None:
    found = ledger.Ledger(config())
    skipped = report(A, "skipped", "tests/verify/amdgpu/test_x.py::test_y")
    skipped.longrepr = ("x", 1, "no clang with ld.lld")
    found.pytest_runtest_logreport(skipped)
    assert "MACHINE CODE WAS NOT EXECUTED: no clang with ld.lld" in "\n".join(found.lines())
    found.pytest_runtest_logreport(report(A, nodeid="tests/verify/amdgpu/test_x.py::test_y"))
    assert "machine code: 1 tests executed it now" in "\n".join(found.lines())


def enough(floors: dict[str, int]) -> set[Entry]:
    """So many that no floor is missed."""
    gpus, kernels = floors["GPUs"], floors["kernels"]
    tests = [
        *(f"{ledger.CONFIGS}gfx{n % gpus} k{n % kernels}" for n in range(floors["configs"])),
        *(f"{ledger.CASES}gfx0 op" for _ in range(floors["cases"])),
    ]
    return {Entry("clang 19.1.7", test, f"{n:012x}") for n, test in enumerate(tests)}


def status_of(found: ledger.Ledger) -> int:
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    found.pytest_sessionfinish(session, pytest.ExitCode.OK)  # type: ignore[arg-type]
    return int(session.exitstatus)


@pytest.mark.parametrize("sweeps", [False, True])
@pytest.mark.parametrize("what", [None, *ledger.FLOORS])
def test_a_whole_run_that_executed_too_little_fails(
    kept: Path, monkeypatch: pytest.MonkeyPatch, what: str | None, sweeps: bool
) -> None:
    """Known or executed now is the same. `what`: of which there is one too few."""
    monkeypatch.setattr(launch, "missing", lambda: None)
    monkeypatch.setenv(ledger.MUST_EXECUTE, "1")
    floors = ledger.FLOORS if sweeps else ledger.THINNED_FLOORS
    found = ledger.Ledger(config(sweeps=sweeps))
    found.collected = found.right = enough(floors)
    if what is not None:
        monkeypatch.setitem(floors, what, floors[what] + 1)
    assert bool(status_of(found)) is (what is not None)
    assert ("TOO LITTLE MACHINE CODE" in "\n".join(found.lines())) is (what is not None)
    part = ledger.Ledger(config("tests/ops"))
    assert not status_of(part) and not part.too_little()
    monkeypatch.delenv(ledger.MUST_EXECUTE)
    assert not status_of(found)


@pytest.mark.parametrize("absent", ["clang", "tinygrad"])
def test_a_run_without_the_compiler_or_the_decoder_fails(tmp_path: Path, absent: str) -> None:
    """As .ci/run asks for, by pytest itself, of one file as the whole suite."""
    words = {"tinygrad": "import sys\nsys.modules['tinygrad'] = None\n", "clang": ""}
    (tmp_path / "sitecustomize.py").write_text(words[absent], encoding="utf-8")
    environment = {**os.environ, ledger.MUST_EXECUTE: "1", "PYTHONPATH": str(tmp_path)}
    if absent == "clang":
        environment["PATH"] = str(tmp_path)
    command = ["-m", "pytest", "-q", "-o", "testpaths=tests/verify/amdgpu/test_amdgpu_compilers.py"]
    done = subprocess.run(
        [sys.executable, *command, "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")],
        cwd=compiled.CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TOO LITTLE MACHINE CODE WAS EXECUTED: " in done.stdout, done.stdout + done.stderr
    assert "ld.lld" in done.stdout if absent == "clang" else "tinygrad" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
