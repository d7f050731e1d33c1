"""Calls of ops captured in one process and replayed in another."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lib_rocm_sd import __main__ as command_line
from lib_rocm_sd.engine import call_file
from lib_rocm_sd.engine.call_file import CallFileError, Capture, Wish
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.keys import tensors_of
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.ops.linear.torch import TorchLinear
from lib_rocm_sd.ops.registry import ops
from tests.compiled import CHECKOUT

CPU = torch.device("cpu")
SMALL = LinearProblem(5, 16, (8,), "float16")
IN_PLACE = LinearProblem(5, 16, (8,), "float16", residual=True, in_place=True)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `captured` keeps calls, for as long as a test lasts."""
    monkeypatch.setattr(engine, "capture", None)
    return tmp_path / "calls.safetensors"


def captured(file: Path, op: Op[Any, Any], problem: Any) -> tuple[Any, Any]:
    """Inputs as they were, and the output, of one call that is kept."""
    engine.capture = Capture(Wish(str(file)))
    inputs = op.make_inputs(problem, CPU, 3)
    before = [tensor.clone() for tensor in tensors_of(inputs)]
    output = engine.run(op, inputs)
    engine.capture = None
    return before, output


def alike(one: Any, other: Any) -> bool:
    """The same bytes, shapes and strides; NaN is NaN."""
    if isinstance(one, torch.Tensor):
        same = one.shape == other.shape and one.stride() == other.stride()
        return (
            same and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if isinstance(one, tuple):
        return all(map(alike, one, other))
    if isinstance(one, ConvWeights):
        return alike((one.weight, one.bias.float()), (other.weight, other.bias.float()))
    if dataclasses.is_dataclass(one):
        return alike(tuple(vars(one).values()), tuple(vars(other).values()))
    return callable(one) or bool(one == other)


@pytest.mark.parametrize("op", list(ops()), ids=lambda op: op.name)
def test_inputs_and_outputs_of_every_op_come_back(file: Path, op: Op[Any, Any]) -> None:
    problem = op.test_problems(op.usual[0][1])[0]
    engine.capture = Capture(Wish(str(file)))
    output = engine.run(op, op.make_inputs(problem, CPU, 3))
    (call,) = call_file.read(file)
    again = call.inputs(CPU)
    assert (call.op, call.problem) == (op.name, str(op.problem_of(again)))
    assert alike(op.make_inputs(problem, CPU, 3), again)
    assert alike(output, call.output(CPU))


def test_what_is_written_in_place_is_kept_from_before(file: Path) -> None:
    before, output = captured(file, LINEAR, IN_PLACE)
    (call,) = call_file.read(file)
    again = call.inputs(CPU)
    assert alike(tuple(before), tuple(tensors_of(again)))
    assert again.out.data_ptr() == again.residual.data_ptr() != call.inputs(CPU).out.data_ptr()
    assert alike(output, call.output(CPU)) and not torch.equal(again.residual, output)


def test_rows_with_gaps_and_one_row_for_all_have_their_strides(file: Path) -> None:
    inputs = LINEAR.make_inputs(SMALL, CPU, 1)
    x = torch.randn(5, 40).half()[:, 8:24]
    engine.capture = Capture(Wish(str(file), calls=2))
    engine.run(LINEAR, inputs._replace(x=x))
    engine.run(LINEAR, inputs._replace(x=x[:1].expand(5, 16)))
    first, second = call_file.read(file)
    assert first.inputs(CPU).x.stride() == (40, 1) and torch.equal(first.inputs(CPU).x, x)
    assert second.inputs(CPU).x.stride() == (0, 1)


def test_calls_are_chosen_by_op_and_number(file: Path) -> None:
    engine.capture = Capture(Wish(str(file), op="linear", calls=2, skip=1))
    for rows in (1, 2, 3, 4):
        engine.run(LINEAR, LINEAR.make_inputs(LinearProblem(rows, 16, (8,), "float16"), CPU, 1))
    assert [call.inputs(CPU).x.shape[0] for call in call_file.read(file)] == [2, 3]
    other = file.with_name("none.safetensors")
    engine.capture = Capture(Wish(str(other), op="attention"))
    engine.run(LINEAR, LINEAR.make_inputs(SMALL, CPU, 1))
    assert list(file.parent.iterdir()) == [file]


def test_a_file_does_not_grow_without_end(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_file, "MOST_BYTES", 100)
    _, output = captured(file, LINEAR, SMALL)
    assert output.shape == (5, 8) and not file.exists()


@pytest.mark.parametrize("what", ["nothing", "text", "other", "later"])
def test_a_file_that_holds_no_calls_is_said(
    file: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "text":
        file.write_text("no tensors")
    if what in ("other", "later"):
        about = {} if what == "other" else {"rocm_sd": json.dumps({"format": 99})}
        save_file({"a": torch.zeros(1)}, str(file), about)
    with pytest.raises((CallFileError, OSError)):
        list(call_file.read(file))
    assert command_line.main(["replay", str(file)]) == 2
    assert "replay: " in capsys.readouterr().err


def test_only_classes_of_ops_are_made_of_a_file(file: Path) -> None:
    for name in ("os:system", "lib_rocm_sd.ops.linear.problem:None1", "lib_rocm_sd.opsx:y"):
        with pytest.raises(CallFileError, match="this version has no"):
            call_file._class(name)


# -- the commands --------------------------------------------------------------------------------


def test_a_wrong_result_is_told_from_a_right_one(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(file, LINEAR, SMALL)
    table = file.with_suffix(".json")
    assert command_line.main(["replay", str(file), "--device", "cpu", "--json", str(table)]) == 0
    rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
    assert rows[0]["by"].startswith("captured: torch, None, CPU")
    assert {row["verdict"] for row in rows} == {"right"} and len(rows) > 1
    with safe_open(str(file), "pt") as opened:
        about = opened.metadata()
    tensors = load_file(str(file))
    wrong = file.with_name("wrong.safetensors")  # Windows replaces no file that is mapped
    save_file({**tensors, (output := max(tensors)): tensors[output] + 1}, str(wrong), about)
    capsys.readouterr()
    assert command_line.main(["replay", str(wrong), "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "WRONG: " in said and "1 wrong" in said


def test_a_variant_that_fails_is_a_row(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*given: Any) -> None:
        raise RuntimeError("an API that this torch lacks")

    captured(file, LINEAR, SMALL)
    engine.checks(SMALL, CPU, LINEAR)  # its self-test is right
    monkeypatch.setattr(TorchLinear, "run", run)
    table = file.with_suffix(".json")
    assert command_line.main(["replay", str(file), "--device", "cpu", "--json", str(table)]) == 1
    assert "an API that this torch lacks" in capsys.readouterr().out
    rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
    assert [row["error"] is None for row in rows] == [False, True]


def test_an_op_that_this_version_lacks_is_said(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(file, LINEAR, SMALL)
    monkeypatch.setattr("lib_rocm_sd.ops.registry.ops", lambda: iter(()))
    assert command_line.main(["replay", str(file)]) == 2
    assert "this version has no op linear" in capsys.readouterr().err


def captured_by_a_host() -> None:
    engine.run(LINEAR, LINEAR.make_inputs(SMALL, CPU, 3))


def test_a_host_is_run_and_its_calls_are_kept(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as hosts are."""
    host = "from tests.engine.test_call_file import *; captured_by_a_host()"
    monkeypatch.chdir(CHECKOUT)
    words = ["capture", "--op", "linear", str(file), "--", sys.executable, "-c", host]
    assert command_line.main(words) == 0
    assert len(list(call_file.read(file))) == 1
    assert "replay" in capsys.readouterr().out
    assert command_line.main(["capture", str(file), "--", sys.executable, "-c", "pass"]) == 1
    assert not file.exists() and "no such call was made" in capsys.readouterr().err


def test_a_device_that_is_not_here_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captured(file, LINEAR, SMALL)
    for device in ("none", "cuda:99"):
        assert command_line.main(["replay", str(file), "--device", device]) == 2
        assert capsys.readouterr().err.startswith("replay: ")


@pytest.mark.parametrize(
    "words", [["--op", "none", "f", "--", "x"], ["f"], ["--calls", "0", "f", "--", "x"]]
)
def test_bad_usage_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["capture", *words]) == 2
    assert "capture: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1", "{", '{"file": "x", "more": 1}'])
def test_a_variable_that_is_none_of_ours_captures_nothing(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(call_file.report, "event", told.append)
    monkeypatch.setenv(call_file.VARIABLE, text)
    assert call_file.from_environment() is None
    assert len(told) == 1 and told[0].startswith(f"{call_file.VARIABLE} is none of ours")


def test_a_folder_that_cannot_be_written_ends_no_call(file: Path) -> None:
    file.write_text("a file")
    engine.capture = Capture(Wish(str(file / "calls.safetensors")))
    made = [engine.run(LINEAR, LINEAR.make_inputs(SMALL, CPU, 1)) for _ in range(2)]
    assert torch.equal(*made) and engine.capture.why
