"""The re-implemented attention methods are right, in one piece and in many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.lab import methods
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import ODD, AttentionProblem
from lib_rocm_sd.ops.base import Call, Variant

CPU = torch.device("cpu")
PROBLEMS = [problem for problem in ODD if problem.mask == "none"]
PROBLEMS += [AttentionProblem(2, 2, 1500, 77, 40), AttentionProblem(1, 1, 1030, 1030, 8, "float32")]


@pytest.mark.parametrize("free_bytes", [1 << 40, 1 << 20, 1], ids=["much", "little", "none"])
@pytest.mark.parametrize("method", methods.METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_against_float64(
    problem: AttentionProblem,
    method: Variant[AttentionProblem, AttentionInputs],
    free_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(methods, "free_bytes", lambda device: free_bytes)
    inputs = ATTENTION.make_inputs(problem, CPU, 1)
    out = method.run(Call(problem, inputs))
    assert out.shape == ATTENTION.output_shape(problem) and out.dtype == inputs[0].dtype
    most = methods.ALLOWANCE * ATTENTION.tolerance(problem)
    assert relative_error(out, reference(inputs)) <= most


def test_large_scores_in_chunks_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "free_bytes", lambda device: 1)
    problem = AttentionProblem(1, 2, 64, 100, 16, "float32")
    inputs = ATTENTION.make_inputs(problem, CPU, 2)
    inputs = inputs._replace(k=inputs.k * torch.linspace(-40, 40, 100)[None, :, None, None])
    out = methods.SubQuadraticLike().run(Call(problem, inputs))
    assert relative_error(out, reference(inputs)) < 1e-4


def test_less_memory_means_more_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = torch.bmm

    def bmm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(a.shape[1])
        return real(a, b, **options)

    monkeypatch.setattr(torch, "bmm", bmm)
    problem = AttentionProblem(1, 1, 64, 64, 8, "float32")
    inputs = ATTENTION.make_inputs(problem, CPU, 3)
    for free, rows in ((1 << 40, 64), (3 * 64 * 64 * 4 // 4, 16), (1, 1)):
        monkeypatch.setattr(methods, "free_bytes", lambda device, free=free: free)
        calls.clear()
        methods.DoggettxLike().run(Call(problem, inputs))
        assert set(calls) == {rows} and len(calls) == 2 * 64 // rows


def test_masks_are_refused() -> None:
    problem = AttentionProblem(1, 1, 8, 8, 8, "float16", "bool")
    assert methods.DoggettxLike().refusals(None, problem) != []
