"""Attention through the engine, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, Op
from tests.ops.toy_op import CPU, GFX1100, engine_of
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch


class Garbage(MatrixAttention):
    """Right everywhere but at head_dim 512, as some torch builds are on gfx11."""

    name = "garbage"
    ours = False
    preference = 99

    def refusals(self, arch: Any, problem: Any) -> list[str]:
        return []

    def configs(self, arch: Any, problem: Any) -> tuple[Any]:
        return (None,)

    def run(self, call: Call[Any, Any]) -> torch.Tensor:
        inputs = call.inputs
        right = reference(inputs).to(inputs.q.dtype)
        return right if call.problem.head_dim != 512 else right.roll(1, 1)


def attention_with(*variants: Any) -> Op[AttentionProblem, AttentionInputs]:
    return replace(ATTENTION, variants=(*variants, *ATTENTION.variants))


@pytest.mark.parametrize(("head_dim", "runs"), [(64, "garbage"), (512, "sdpa")])
def test_a_variant_with_garbage_at_head_dim_512_is_used_elsewhere_only(
    head_dim: int, runs: str
) -> None:
    engine, report = engine_of()
    q, k, v = (torch.randn(1, 9, 1, head_dim, dtype=torch.bfloat16) for _ in range(3))
    output = engine.run(attention_with(Garbage()), AttentionInputs(q, k, v))
    assert report.snapshot()["rows"][0]["variant"] == runs
    expected = reference(AttentionInputs(q, k, v))
    assert (output.double() - expected).abs().max() < 2e-2 * expected.abs().max()


@pytest.mark.parametrize("level", ["Auto", "Performance", "Memory"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", ["none", "bool", "float32"])
@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_attention_on_the_cpu_is_right_at_every_level(
    level: str, dtype: torch.dtype, mask: str
) -> None:
    engine, _ = engine_of()
    engine.set_level(level)
    name = str(dtype).removeprefix("torch.")
    problem = AttentionProblem(2, 2, 33, 77, 40, name, mask)
    inputs = ATTENTION.make_inputs(problem, CPU, 1)
    expected = reference(inputs)
    error = (engine.run(ATTENTION, inputs).double() - expected).abs().max() / expected.abs().max()
    assert error <= ATTENTION.tolerance(problem)


@pytest.mark.parametrize("shapes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_attention_without_elements_is_zeros(shapes: tuple[int, int, int]) -> None:
    engine, _ = engine_of()
    batch, seq_q, seq_k = shapes
    q, k = torch.ones(batch, seq_q, 2, 8), torch.ones(batch, seq_k, 2, 8)
    output = engine.run(ATTENTION, AttentionInputs(q, k, k))
    assert output.shape == (batch, seq_q, 16)
    assert not output.any()


def test_attention_names_the_shapes_of_a_callers_mistake() -> None:
    engine, _ = engine_of()
    with pytest.raises(ValueError, match=r"\(1, 3, 2, 16\)"):
        engine.run(
            ATTENTION,
            AttentionInputs(
                torch.ones(1, 3, 2, 8), torch.ones(1, 3, 2, 16), torch.ones(1, 3, 2, 16)
            ),
        )


def test_attention_with_gradients_or_a_last_stride_other_than_1_is_not_for_our_kernel() -> None:
    engine, report = engine_of(GFX1100)
    ours = FakeKernel()
    op = replace(ATTENTION, variants=(ours, *ATTENTION.variants[1:]))
    q = torch.randn(1, 9, 2, 8, dtype=torch.bfloat16)
    engine.run(op, AttentionInputs(q, q, q))
    engine.run(op, AttentionInputs(q.clone().requires_grad_(), q, q)).sum().backward()
    turned = q.transpose(1, 3).contiguous().transpose(1, 3)
    engine.run(op, AttentionInputs(turned, q, q))
    with torch.no_grad():
        engine.run(op, AttentionInputs(q.clone().requires_grad_(), q, q))
    calls = {row["variant"]: row["calls"] for row in report.snapshot()["rows"]}
    assert calls == {"rocm_sd": 2, "sdpa": 2}


class FakeKernel(MatrixAttention):
    """Our variant with the reference in place of the launch."""

    def run(self, call: Call[Any, Any]) -> torch.Tensor:
        inputs = call.inputs
        return reference(inputs).to(inputs.q.dtype)


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
def test_our_kernels_source_is_tested_and_run_by_the_engine() -> None:
    """All of the way but the GPU: gfx1100's kernel, under the shim, behind the engine."""
    assert GFX1100.arch is not None
    launch = ShimLaunch(GFX1100.arch)
    engine, report = engine_of(GFX1100, launcher=lambda device, arch: launch)
    problem = AttentionProblem(1, 2, 5, 9, 40, "float16", "bool")
    with launch.knows():
        inputs = ATTENTION.make_inputs(problem, CPU, 1)
        output = engine.run(ATTENTION, inputs)
    assert report.summary() == "attention: rocm_sd"
    assert report.snapshot()["events"] == []
    expected = reference(inputs)
    assert (output.double() - expected).abs().max() <= 2e-3 * expected.abs().max()
