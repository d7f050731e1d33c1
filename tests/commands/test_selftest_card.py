"""The self-test of a whole card: what it runs, what it writes, and what it keeps to itself."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd import __main__ as command
from lib_rocm_sd import arch, device
from lib_rocm_sd.commands import selftest as selftest_card
from lib_rocm_sd.commands import selftest_cases
from lib_rocm_sd.engine import planner, selftest
from lib_rocm_sd.errors import CompileError, LaunchError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.registry import FAMILIES
from lib_rocm_sd.runtime import build
from lib_rocm_sd.runtime.build import CodeObject
from lib_rocm_sd.shipped import AT_START, SD3_PART, shipped
from lib_rocm_sd.trials.subject import Subject
from lib_rocm_sd.trials.verdicts import Verdict, without_folders
from tests.ops import toy_op
from tests.ops.conv import unet_layers
from tests.ops.toy_op import GFX1100, Doubler, Doubling, Tile
from tests.vae.vae_models import needs_half

CPU = torch.device("cpu")
SPEC = KernelSpec("toy.hip", "toy", ())
MINE = "/home/somebody/.cache/rocm_sd/toy.co"


def toy(name: str, work: Callable[[Any], Any] = lambda x: x * 2, rows: int = 5) -> Subject:
    variant = Doubler(name, ours=True, work=work)
    op = toy_op.op_of(variant)
    return Subject(op, variant, Tile(16), Doubling(rows, 8), (SPEC,))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine whose one GPU is a gfx1100 that has these cases and this launcher."""

    def have(*cases: Subject, launcher: Callable[..., Any] = lambda place, row: object()) -> None:
        monkeypatch.setattr(device, "identify", lambda place: GFX1100)
        monkeypatch.setattr("lib_rocm_sd.lab.sensors.identify", lambda place: GFX1100)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(selftest_cases, "cases", lambda row: list(cases))
        monkeypatch.setattr(planner, "default_launcher", launcher)
        monkeypatch.setattr(build, "build", lambda spec, row: CodeObject(b"", "clang", False, 1.25))
        monkeypatch.setattr(build, "build_all", lambda specs, row: None)
        monkeypatch.setattr(build, "is_cached", lambda spec, row: False)

    return have


def run(path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    status = command.main(["doctor", "--self-test", "--out", str(path), *more])
    return status, json.loads(path.read_text(encoding="utf-8"))


def test_all_passed(card: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card(toy("first"), toy("second", rows=7))
    status, document = run(tmp_path / "result.json")
    assert status == 0
    assert document["format"] == selftest_card.FORMAT
    assert (document["passed"], document["failed"], document["complete"]) == (2, 0, True)
    assert document["running"] is None
    assert document["machine"]["card"] == GFX1100.name
    assert document["machine"]["gfx"] == "gfx1100"
    assert {"driver", "rocm", "torch", "os"} <= set(document["machine"])
    first, second = document["rows"]
    assert first["variant"] == "first" and second["variant"] == "second"
    assert first["passed"] and first["error"] <= first["tolerance"]
    assert first["compilers"] == ["clang"] and first["compile_seconds"] == 1.25
    assert first["config"] == {"size": 16} and first["seconds"] >= 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{GFX1100.name} (gfx1100): 2 cases; this may take some minutes."
    assert said[1] == "compiling: 0 of 1 kernels are done"
    assert said[2].startswith("   1 of 2  ") and "allowed  " in said[2]
    assert any(line.startswith("2 of 2 cases passed on ") for line in said)
    assert not list(tmp_path.glob("*.part"))


def fails(error: BaseException) -> Callable[[Any], Any]:
    def work(x: Any) -> Any:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda x: x * 2.5, "wrong by 0.25"),
        (lambda x: x * float("nan"), "NaN or infinity"),
        (fails(LaunchError(f"hipModuleLaunchKernel: cannot open {MINE}")), "cannot open PATH"),
        (fails(RuntimeError("HIP error: out of memory")), "out of memory"),
        (fails(MemoryError()), "MemoryError"),
    ],
)
def test_a_failure_is_told_and_the_test_goes_on(
    card: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], work: Any, said: str
) -> None:
    card(toy("bad", work), toy("good"))
    status, document = run(tmp_path / "result.json")
    assert status == 1
    assert (document["passed"], document["failed"]) == (1, 1)
    bad, good = document["rows"]
    assert said in bad["reason"] and not bad["passed"] and good["passed"]
    assert "somebody" not in json.dumps(document)
    told = capsys.readouterr().out
    assert "1 of 2 cases passed" in told and "FAILED  " in told and "somebody" not in told


def test_what_does_not_compile(card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card(toy("any"))

    def fail(spec: KernelSpec, row: arch.Arch) -> CodeObject:
        raise CompileError("clang", f"no {MINE}")

    monkeypatch.setattr(build, "build", fail)
    status, document = run(tmp_path / "result.json")
    (row,) = document["rows"]
    assert status == 1 and row["error"] is None
    assert row["reason"].startswith("does not compile: CompileError: ")
    assert "somebody" not in row["reason"]


def test_no_driver(card: Any, tmp_path: Path) -> None:
    def launcher(place: Any, row: arch.Arch) -> Any:
        raise LaunchError("no HIP runtime is loaded or can be: []")

    card(toy("any"), launcher=launcher)
    status, document = run(tmp_path / "result.json")
    assert status == 1
    assert document["rows"][0]["reason"].startswith("LaunchError: no HIP runtime")


def test_where_the_machine_stops_the_file_says_at_which(card: Any, tmp_path: Path) -> None:
    card(toy("good"), toy("stops", fails(KeyboardInterrupt())))
    status, document = run(tmp_path / "result.json")
    assert status == command.INTERRUPTED
    assert not document["complete"]
    assert len(document["rows"]) == 1
    assert ", stops: Doubling" in document["running"]


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status = command.main(["doctor", "--self-test", "--out", str(tmp_path / "result.json")])
    assert status == 2
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "The self-test was not run: no GPU: this is the CPU."
    assert not list(tmp_path.iterdir())


def test_what_zluda_is_good_for_is_waited_for(
    card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process has no answer yet, and would refuse the card."""
    waited: list[Any] = []
    card(toy("any"))
    monkeypatch.setattr("lib_rocm_sd.trials.zluda.settle", waited.append)
    assert run(tmp_path / "result.json")[0] == 0
    assert waited == [[CPU]]


def test_a_number_that_no_gpu_has(card: Any, tmp_path: Path) -> None:
    card(toy("any"))
    out = str(tmp_path / "result.json")
    assert command.main(["doctor", "--self-test", "--gpu", "3", "--out", out]) == 2


def test_a_file_that_cannot_be_written(
    card: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card(toy("any"))
    out = str(tmp_path / "no" / "result.json")
    assert command.main(["doctor", "--self-test", "--out", out]) == 2
    assert "The self-test was not run: --out: there is no folder" in capsys.readouterr().out


def test_json_goes_to_stdout_and_progress_to_stderr(
    card: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card(toy("any"))
    _, document = run(tmp_path / "result.json", "--json")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == document
    assert "1 of 1" in captured.err


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*map(str, value), *strings(list(value.values()))]
    if isinstance(value, list):
        return [text for each in value for text in strings(each)]
    return [value] if isinstance(value, str) else []


def test_the_file_has_no_folder_no_user_and_no_computer(
    card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a compiler is called, an error says and the environment has."""
    for name, value in (("HOME", "/home/somebody"), ("USER", "somebody"), ("PROMPT", "somebody")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "node", lambda: "somebody-pc")
    monkeypatch.setattr(sys, "argv", ["launch.py", "--ckpt", "/models/somebody.safetensors"])
    card(toy("bad", fails(LaunchError(f"{MINE}: not found"))), toy("good"))
    made = CodeObject(b"", r"clang (C:\Users\somebody\clang.exe)", False, 1.25)
    monkeypatch.setattr(build, "build", lambda spec, row: made)
    status, document = run(tmp_path / "result.json")
    assert status == 1 and document["rows"][1]["compilers"] == ["clang (PATH)"]
    said = strings(document)
    assert len(said) > 20
    assert [text for text in said if "somebody" in text or without_folders(text) != text] == []


def test_who_follows_it_is_told_each_step(card: Any, tmp_path: Path, capsys: Any) -> None:
    card(toy("first"), toy("second", rows=7))
    steps: list[tuple[str, int, int]] = []
    told = lambda *step: steps.append(step)  # noqa: E731
    assert selftest_card.main(tmp_path / "result.json", None, False, told) == 0
    assert steps == [
        ("compiling kernels", 0, 1), ("testing doubling", 1, 2), ("testing doubling", 2, 2),
    ]  # fmt: skip
    captured = capsys.readouterr()
    assert captured.out == "" and "2 of 2 cases passed" in captured.err


@pytest.mark.parametrize(
    "text",
    [
        "open(/home/somebody/x y/a.co) failed",
        r"C:\Users\somebody\AppData\a.dll is missing",
        "~/somebody/venv/lib/libamdhip64.so: cannot open",
        "lld: error: '/tmp/somebody/x.o'",
    ],
)
def test_no_folder_is_kept(text: str) -> None:
    assert "somebody" not in selftest_card._clean(text)


def test_shapes_and_ratios_are_kept() -> None:
    text = "conv 3x3: wrong by 0.1, the tolerance is 0.002 (N1 8/16)"
    assert selftest_card._clean(text) == text


# -- what is run


@pytest.mark.parametrize("gfx", arch.amd_table())
def test_every_kernel_of_the_search_space_is_among_the_cases(gfx: str) -> None:
    row = arch.table()[gfx]
    reached = {spec for case in selftest_cases.cases(row) for spec in case.specs}
    for family in FAMILIES.values():
        module = family.kernel
        missing = {*module.shipped_specs(row), *module.searched_specs(row)} - reached
        assert not missing
    assert {
        *unet_layers.searched(row),
        conv_kernel.sum_spec("float16"),
        *shipped(row, (*AT_START, SD3_PART)),
    } <= reached


def test_an_op_of_which_nothing_is_said_has_what_vouches_for_its_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = replace(LAYER_NORM, name="a new op")
    monkeypatch.setattr(selftest_cases, "ops", lambda: (new, LAYER_NORM))
    row = arch.table()["gfx1100"]
    every = {(case.problem, case.config) for case in selftest_cases.cases(row) if case.op is new}
    assert {problem for problem, _ in every} == {
        each for problem in new.cases for each in new.test_problems(problem)
    }
    specs = {spec for case in selftest_cases.cases(row) if case.op is new for spec in case.specs}
    assert specs


def test_each_case_is_there_once_and_small() -> None:
    row = arch.table()["gfx1100"]
    cases = selftest_cases.cases(row)
    keys = [(case.op.name, case.variant.name, case.config, case.problem) for case in cases]
    assert len(set(keys)) == len(keys) > 200
    for case in cases:
        assert case.specs and case.op.tolerance(case.problem) < 0.05
        shape = case.op.output_shape(case.problem)
        assert 0 < torch.Size(shape).numel() < 4_000_000


@needs_half
@pytest.mark.parametrize("place", range(12))
def test_torchs_own_passes_the_cases(place: int) -> None:
    """So the problems are sound: inputs, float64, tolerance. One of four problems."""
    row = arch.table()["gfx1100"]
    wanted = {(case.op.name, case.problem): case for case in selftest_cases.cases(row)}
    for case in list(wanted.values())[place::48]:
        other = case.op.variants[-1]
        why = other.refusals(None, case.problem)
        if not why:
            config = other.configs(None, case.problem)[0]
            check = selftest.check(case.op, other, config, None, case.problem, CPU)
            assert not check.reason


def test_a_case_that_its_variant_refuses_is_left_out() -> None:
    row = replace(arch.table()["gfx1100"])
    for case in selftest_cases.cases(row):
        assert not case.variant.refusals(row, case.problem)


# --- trials


@pytest.mark.parametrize(("outcome", "cases_run"), [("faulted", 0), ("wrong", 1), ("passed", 1)])
def test_trials_come_first_and_after_a_fault_nothing_runs_here(
    card: Any, outcome: str, cases_run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the trials themselves do is in tests/trials."""
    made = Verdict("attention, rocm_sd: a class", outcome, f"in {MINE}", 1e-4, 1e-3)

    def running() -> str:
        return str(json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["running"])

    def again(here: Any, say: Any, told: Any, listed: Any) -> list[Verdict]:
        assert len(listed) > 200
        assert running() == str(listed[0]), "where the machine stops, it was at this one"
        told([made.as_dict()])
        assert running() == str(listed[1])
        return [made]

    card(toy("rocm_sd"))
    monkeypatch.setattr("lib_rocm_sd.trials.place.of", lambda place, launch: object())
    monkeypatch.setattr("lib_rocm_sd.commands.selftest.try_again", again)
    code, document = run(tmp_path / "out.json")
    assert code == (selftest_card.PASSED if outcome == "passed" else selftest_card.FAILED)
    assert [row["outcome"] for row in document["verdicts"]] == [outcome]
    assert len(document["rows"]) == cases_run
    assert document["complete"] and document["running"] is None
