"""The tables of `bench`: an op's problems by every way, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.commands.bench import TABLES
from lib_rocm_sd.lab import gradients, tables
from lib_rocm_sd.lab.benchmark import Setting
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.layer_norm import kernel as layer_norm_kernel
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem
from tests.ops.toy_op import CPU, GFX1100
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

ATTENTION = AttentionProblem(1, 1, 17, 15, 40)
IMAGE = GroupNormProblem(1, 16, 3, 5, "float16", True, True, 4)
TOKENS = LayerNormProblem((3, 5, 40), added=True)
LAYER = LinearProblem(5, 40, (24,), residual=True, in_place=True)
TOKENS_BACKWARD = LayerNormBackwardProblem((3, 5, 40), added=True)
IMAGE_BACKWARD = GroupNormBackwardProblem(2, 16, 5, 7, groups=4, silu=True)


def measured(op: str, problem: Any, launch: Any, runs: int = 1) -> list[Row]:
    ways: Any = TABLES[op].rows
    rows: list[Row] = ways.measure("odd", problem, Setting(CPU, GFX1100, launch, runs))
    return rows


def by_shim(op: str, problem: Any) -> list[Row]:
    assert GFX1100.arch is not None
    launch = ShimLaunch(GFX1100.arch)
    with launch.knows():
        return measured(op, problem, launch)


in_shim = pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))


# -- the command


@pytest.mark.parametrize(
    ("op", "ways", "figures"),
    [
        ("attention_backward", {"sdpa"}, ("backward_us", "tflops")),
        ("group_norm", {"copy", "torch"}, ("of_copy",)),
        ("layer_norm", {"copy", "torch"}, ("of_copy",)),
        ("linear", {"torch"}, ("tflops",)),
        ("norm_gradients", {"copy", "torch"}, ("of_copy",)),
    ],
)
def test_the_command_prints_a_table_and_writes_json(
    op: str,
    ways: set[str],
    figures: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "result.json"
    command = ["bench", op, "--small", "--runs", "1", "--device", "cpu"]
    assert __main__.main([*command, "--json", str(file)]) == 0
    said = [line.split("not run: ") for line in capsys.readouterr().out.splitlines()]
    assert any(row[0].split()[-1:] == ["rocm_sd"] and "no supported GPU" in row[-1] for row in said)
    rows = [
        row for row in json.loads(file.read_text(encoding="utf-8"))["rows"] if not row["reason"]
    ]
    assert {row["way"] for row in rows} == ways
    assert all(row[name] > 0 for row in rows for name in ("median_us", *figures))
    assert all(row["error"] < 0.06 for row in rows if row["way"] != "copy")


COMMAND = ("bench", "layer_norm", "--small", "--runs", "1", "--device", "cpu")


def written(file: Path) -> tuple[bool, set[str]]:
    document = json.loads(file.read_text(encoding="utf-8"))
    return document["complete"], {row["label"] for row in document["rows"]}


def test_only_the_cases_that_are_named(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert __main__.main([*COMMAND, "--case", "ODD 2", "--json", str(file)]) == 0
    assert written(file) == (True, {"odd 2"})


def test_a_case_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([*COMMAND, "--case", "nonsense"]) == 2
    assert "no case has nonsense in its name or shape" in capsys.readouterr().err


@pytest.mark.parametrize("op", ["call", "door", "vae", "speed", "distributed"])
def test_without_cases_none_can_be_named(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["bench", op, "--case", "SDXL"]) == 2
    assert f"--case: {op} has no cases" in capsys.readouterr().err


def test_an_interrupted_run_leaves_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    rows: Any = TABLES["layer_norm"].rows
    measure = rows.measure

    def once(label: str, *more: Any) -> list[Any]:
        if label == "odd 2":
            assert written(file) == (False, {"odd 1"}), "before the next one is measured"
            raise KeyboardInterrupt
        measured: list[Any] = measure(label, *more)
        return measured

    monkeypatch.setattr(rows, "measure", once)
    assert __main__.main([*COMMAND, "--json", str(file)]) == 130
    assert written(file) == (False, {"odd 1"})
    said = capsys.readouterr()
    assert "interrupted" in said.err and "1x8 float16" in said.out


# -- problems


@pytest.mark.parametrize(
    ("op", "usual", "times"),
    [
        ("attention_backward", ATTENTION_BACKWARD.usual, 1),
        ("group_norm", GROUP_NORM_SILU.usual, 2),  # in both memory formats
        ("layer_norm", LAYER_NORM.usual, 1),
        ("linear", LINEAR.usual, 1),
    ],
)
def test_the_usual_problems_are_the_ops_in_the_dtype_that_is_asked_for(
    op: str, usual: Any, times: int
) -> None:
    rows: Any = TABLES[op].rows
    problems = rows.problems(False, "bfloat16")
    assert [label for label, _ in problems[::times]] == [label for label, _ in usual]
    assert len({problem for _, problem in problems}) == len(problems) == times * len(usual)
    assert {problem.dtype for _, problem in problems} == {"bfloat16"}
    affine = {getattr(problem, "affine", "none") for _, problem in problems}
    assert affine <= {"bfloat16", "none"}


def test_gradients_of_norms_come_trained_and_frozen() -> None:
    rows: Any = TABLES["norm_gradients"].rows
    usual = rows.problems(False, "bfloat16")
    assert len({problem for _, problem in usual}) == len(usual)
    assert {(p.dtype, p.affine) for _, p in usual} == {("bfloat16", "bfloat16")}
    for kind in (LayerNormBackwardProblem, GroupNormBackwardProblem):
        assert {p.wanted for _, p in usual if isinstance(p, kind)} == {True, False}


def test_operations_of_a_layer() -> None:
    assert tables.operations(LinearProblem(2, 8, (16,), gate=True)) == 2 * 2 * 8 * 32


# -- rows


def test_bytes_are_those_that_must_be_moved() -> None:
    for added, times in ((False, 1), (True, 2)):
        copy, *_, torchs = measured("layer_norm", replace(TOKENS, added=added), None, 3)
        bytes_of = [row.gigabytes_per_s * row.median for row in (copy, torchs)]
        assert bytes_of[1] == pytest.approx(times * bytes_of[0])
        assert torchs.of_copy == pytest.approx(torchs.median / copy.median / times)


GRADIENTS = tuple(torch.zeros(1, seq, 1, 40) for seq in (17, 15, 15))


@pytest.mark.parametrize(
    ("op", "problem", "ours", "run", "least"),
    [
        ("attention_backward", ATTENTION, ATTENTION_BACKWARD, lambda call: GRADIENTS, 1),
        ("group_norm", IMAGE, GROUP_NORM_SILU, lambda call: torch.zeros_like(call.inputs.x), 4),
        (
            *("layer_norm", TOKENS, LAYER_NORM),
            lambda call: (torch.zeros_like(call.inputs.x), call.inputs.x + call.inputs.added),
            len(layer_norm_kernel.CONFIGS),
        ),
        ("linear", LAYER, LINEAR, lambda call: torch.zeros(5, 24), 4),
    ],
)
def test_what_is_wrong_is_not_timed(
    op: str,
    problem: Any,
    ours: Any,
    run: Callable[[Any], Any],
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(ours.variants[0]), "run", lambda self, call: run(call))
    monkeypatch.setattr(
        "lib_rocm_sd.ops.attention.ours.MatrixAttention.run",
        lambda self, call: torch.zeros(1, 17, 40).half(),
    )
    rows = [row for row in measured(op, problem, lambda *a, **k: None) if row.way == "rocm_sd"]
    assert len(rows) >= least and all(row.reason == "wrong: error 1.0e+00" for row in rows)


@in_shim
@pytest.mark.parametrize(
    ("op", "problem", "ways", "told"),
    [
        (
            *("group_norm", IMAGE),
            "copy,rocm_sd,rocm_sd,  statistics,  finalize,  apply,rocm_sd,rocm_sd,torch,triton",
            "finalize",
        ),
        (
            *("layer_norm", TOKENS),
            ",".join(["copy", *["rocm_sd"] * len(layer_norm_kernel.CONFIGS), "torch"]),
            "threads=128",
        ),
        ("norm_gradients", TOKENS_BACKWARD, "copy,torch,rocm_sd,  backward", "  backward"),
        ("norm_gradients", IMAGE_BACKWARD, "copy,torch,rocm_sd,  backward", "  backward"),
    ],
    ids=str,
)
def test_ours_is_timed_beside_a_copy(op: str, problem: Any, ways: str, told: str) -> None:
    """Of gradients the backward pass by the kernels; both passes by the engine, without a GPU."""
    rows = by_shim(op, problem)
    assert ",".join(row.way for row in rows) == ways
    if rows[-1].way == "triton":
        assert rows.pop().reason == "no supported GPU"
    assert all(row.reason == "" and row.gigabytes_per_s > 0 for row in rows)
    assert told in TABLES[op].render("heading", rows)


@in_shim
def test_ours_and_torchs_are_timed_although_the_residual_is_written_over() -> None:
    *rows, tunable = by_shim("linear", LAYER)
    assert (tunable.way, tunable.reason) == ("torch tunable", "no supported GPU")
    assert {row.way for row in rows} == {"rocm_sd", "torch + rocm_sd", "torch"}
    told = {row.reason for row in rows if row.way == "torch + rocm_sd"}
    assert told == {"there is no gate (GEGLU), which it is for"}
    timed = [row for row in rows if row.way != "torch + rocm_sd"]
    assert all(row.reason == "" and row.tflops > 0 for row in timed)
    assert "torch" in TABLES["linear"].render("heading", rows)


@in_shim
def test_ours_is_timed_beside_torchs_attention() -> None:
    rows = by_shim("attention_backward", ATTENTION)
    first, *others = [row for row in rows if not row.reason]
    assert first.way == "rocm_sd" and first.config is not None and others
    text = TABLES["attention_backward"].render("a card", rows)
    assert "odd: B1 H1 Sq17 Sk15 D40 float16" in text and "queries.waves=4" in text
    assert f"{first.median / others[0].median:.2f}" in text


# -- gradients


@pytest.mark.parametrize("problem", [TOKENS_BACKWARD, IMAGE_BACKWARD], ids=str)
def test_our_operators_find_what_torch_finds(problem: Any) -> None:
    inputs = gradients.op_of(problem).make_inputs(problem, CPU, 1)
    ours, torchs = (
        gradients.passes(results)(inputs) for results in (gradients.operators, gradients.torchs)
    )
    assert len(ours) == len(torchs) == 3
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_flash_is_timed_as_it_is_and_with_the_same_bits() -> None:
    def switches() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )

    asked: list[tuple[bool, bool, bool]] = []
    before = switches()

    def followed(inputs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        given = [torch.ones(2, requires_grad=True) for _ in range(3)]
        output = sum(given, torch.zeros(2))
        output.register_hook(lambda grad: asked.append(switches()))
        return given, output

    row = Row(way=gradients.FLASH)
    ways = list(gradients.torchs_ways(row, followed))
    assert [way.row.way for way in ways] == ["sdpa flash", "sdpa flash, same bits"]
    for way in ways:
        inputs: Any = SimpleNamespace(grad=torch.ones(2))
        way.both(inputs)
        way.backward(inputs)()
    assert asked == [before, before, (True, False, False), (True, False, False)]
    assert switches() == before
    other = replace(row, way="sdpa")
    assert len(list(gradients.torchs_ways(other, followed))) == 1
