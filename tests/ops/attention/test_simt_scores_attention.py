"""Attention through a score matrix; its kernel's source executed on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import ScoresAttention, held_of
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests import executed
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.amdgpu.launch import CodeLaunch, missing
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

PROBLEM = AttentionProblem(1, 1, 70, 131, 512, "float16", "none")


def run_shim(
    problem: AttentionProblem, inputs: tuple[Any, ...], sanitize: str | None = None
) -> torch.Tensor:
    arch = by_gfx("gfx1100")
    assert arch is not None
    launch = ShimLaunch(arch, 1, sanitize)
    q, k, v, _, scale = inputs
    with launch.knows(q, k, v):
        return compute(
            ATTENTION, ScoresAttention(), launch, None, AttentionInputs(q, k, v, None, scale)
        )


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        replace(PROBLEM, seq_q=3, seq_k=4100),
        replace(PROBLEM, batch=2, heads=2, seq_q=9, seq_k=128),
        replace(PROBLEM, dtype="bfloat16"),
    ],
    ids=str,
)
def test_weights_of_scores_give_attention(problem: AttentionProblem) -> None:
    inputs = ATTENTION.make_inputs(problem, torch.device("cpu"), 3)
    exact = reference(inputs)
    output = run_shim(problem, inputs)
    q, k, v = (t.float().transpose(1, 2) for t in inputs[:3])
    wide = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    rounded = wide.transpose(1, 2).flatten(2).to(output.dtype)

    def error(y: torch.Tensor) -> float:
        return (y.double() - exact).abs().max().item()

    assert error(output) <= 2 * error(rounded)


def test_more_queries_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lib_rocm_sd.ops.attention.ours.SLICE_BYTES", 1)
    inputs = ATTENTION.make_inputs(PROBLEM, torch.device("cpu"), 3)
    assert ScoresAttention.slice_rows(PROBLEM) == 64
    whole = reference(inputs)
    assert (run_shim(PROBLEM, inputs).double() - whole).abs().max() < 2e-3 * whole.abs().max()


def test_a_negative_scale_and_no_access_outside() -> None:
    q, k, v, _, _ = ATTENTION.make_inputs(PROBLEM, torch.device("cpu"), 3)
    inputs = AttentionInputs(q, k, v, None, -0.3)
    exact = reference(inputs)
    output = run_shim(PROBLEM, inputs, sanitize="address,undefined")
    assert (output.double() - exact).abs().max() < 2e-3 * exact.abs().max()


def one_key_has_all_the_weight(
    problem: AttentionProblem, scale: float
) -> tuple[AttentionInputs, torch.Tensor]:
    """Inputs with scores of about 2^29, and some of 2^31, and what is right: rows of v."""
    q, k, v, _, _ = ATTENTION.make_inputs(problem, torch.device("cpu"), 3)
    q, k = q * 4096, k * 4096
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale
    top = scores.topk(2, -1).values
    assert (top[..., 0] > 2**29).all() and (top[..., 0] - top[..., 1] > 2**12).all()
    return AttentionInputs(q, k, v, None, scale), v[0, scores[0, 0].argmax(-1), 0][None]


@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("seq_k", [131, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_so_large_that_one_key_has_all_the_weight(
    dtype: str, seq_k: int, scale: float
) -> None:
    problem = replace(PROBLEM, dtype=dtype, seq_q=5, seq_k=seq_k)
    inputs, rows = one_key_has_all_the_weight(problem, scale)
    assert torch.equal(run_shim(problem, inputs), rows)


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201", "gfx942"])
def test_machine_code_takes_scores_so_large(gfx: str) -> None:
    if reason := missing(gfx):
        pytest.skip(reason)
    arch = by_gfx(gfx)
    assert arch is not None
    problem = replace(PROBLEM, seq_q=5, seq_k=128)
    inputs, rows = one_key_has_all_the_weight(problem, -1.0)
    launch = CodeLaunch(arch)
    with launch.knows(*inputs[:3]):
        output = compute(ATTENTION, ScoresAttention(), launch, None, inputs)
    assert torch.equal(output, rows)


def test_nan_stays_in_its_row() -> None:
    q, k, v, _, _ = ATTENTION.make_inputs(PROBLEM, torch.device("cpu"), 3)
    q = q.clone()
    q[0, 5, 0, 3] = math.nan
    output = run_shim(PROBLEM, (q, k, v, None, None), sanitize="thread")
    assert output[0, 5].isnan().all()
    assert output[0, :5].isfinite().all() and output[0, 6:].isfinite().all()


def test_refusals_say_why() -> None:
    arch, variant = by_gfx("gfx1100"), ScoresAttention()
    assert variant.refusals(None, PROBLEM) == ["no supported GPU"]
    assert "faster up to 256" in variant.refusals(arch, replace(PROBLEM, head_dim=64))[0]
    assert "mask" in variant.refusals(arch, replace(PROBLEM, mask="bool"))[0]


def test_rows_are_held_where_they_fit() -> None:
    assert [held_of(keys) for keys in (4, 4096, 4100, 16384, 65536)] == [1, 1, 2, 4, 16]
    assert held_of(131) == held_of(65540) == 0
