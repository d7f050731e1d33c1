"""The engine on a GPU: our kernel chosen, right, captured into a graph, measured."""

from __future__ import annotations

import pytest
import torch

from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.report import Report
from tests.ops.toy_op import User

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")


def fresh() -> tuple[User, Report, torch.device]:
    user = User(Engine())
    return user, user.session.report, torch.device("cuda", torch.cuda.current_device())


def error_of(output: torch.Tensor, problem: AttentionProblem, seed: int) -> float:
    expected = ATTENTION.reference(ATTENTION.make_inputs(problem, CPU, seed))
    return relative_error(output.cpu(), expected)


@pytest.mark.parametrize("head_dim", [40, 64, 80, 160, 512])
@pytest.mark.parametrize("mask", ["none", "bool"])
def test_our_kernel_runs_and_is_right(head_dim: int, mask: str) -> None:
    engine, report, device = fresh()
    problem = AttentionProblem(2, 3, 205, 77, head_dim, "float16", mask)
    output = engine.run(ATTENTION, ATTENTION.make_inputs(problem, device, 3))
    assert report.summary() == "attention: rocm_sd"
    assert error_of(output, problem, 3) <= ATTENTION.tolerance(problem)


def test_every_self_test_of_the_usual_problems_is_passed() -> None:
    engine, _, device = fresh()
    for _, problem in ATTENTION.usual:
        for name, check in engine.checks(problem, device).items():
            assert not check.reason, f"{name}: {check.reason}"


def test_float32_goes_to_torch() -> None:
    engine, report, device = fresh()
    problem = AttentionProblem(1, 2, 65, 77, 64, "float32")
    engine.run(ATTENTION, ATTENTION.make_inputs(problem, device, 3))
    (row,) = report.snapshot()["rows"]
    assert row["variant"] in ("sdpa", "sliced")
    assert "float32" in row["reasons"]["rocm_sd"][0]


def test_a_captured_graph_replays_our_kernel() -> None:
    engine, _, device = fresh()
    problem = AttentionProblem(1, 2, 65, 77, 64)
    q, k, v, _, _ = ATTENTION.make_inputs(problem, device, 3)
    engine.run(ATTENTION, AttentionInputs(q, k, v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = engine.run(ATTENTION, AttentionInputs(q, k, v))
    others = ATTENTION.make_inputs(problem, device, 4)
    for tensor, other in zip((q, k, v), others[:3], strict=True):
        tensor.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert error_of(output, problem, 4) <= ATTENTION.tolerance(problem)


def test_a_capture_before_any_self_test_uses_torchs_own() -> None:
    engine, report, device = fresh()
    problem = AttentionProblem(1, 2, 65, 77, 64)
    q, k, v, _, _ = ATTENTION.make_inputs(problem, device, 3)
    torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = engine.run(ATTENTION, AttentionInputs(q, k, v))
    graph.replay()
    torch.cuda.synchronize()
    assert report.summary() == "attention: sdpa"
    assert error_of(output, problem, 3) <= ATTENTION.tolerance(problem)


@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_performance_measures_on_the_device() -> None:
    engine, _, device = fresh()
    engine.set_level("Performance")
    plan = engine.plan(AttentionProblem(2, 8, 1024, 1024, 64), device)
    assert plan.variant.name in ("rocm_sd", "sdpa")
    assert "measured" in plan.why


def test_torchs_generator_on_the_device_is_left_alone() -> None:
    engine, _, device = fresh()
    before = torch.cuda.get_rng_state(device)
    engine.set_level("Performance")
    engine.plan(AttentionProblem(1, 1, 64, 64, 64), device)
    assert torch.equal(before, torch.cuda.get_rng_state(device))
