"""Attention's gradients as an op: mistakes, refusals, torch's ways, the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd import functional
from lib_rocm_sd.arch import amd_table, table
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.selftest import check
from lib_rocm_sd.ops.attention import inputs as attention_inputs
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import kernel
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.attention_backward.problem import ODD
from lib_rocm_sd.ops.attention_backward.torch import (
    FormulaBackward,
    SdpaBackward,
    SlicedBackward,
)
from tests.ops.attention_backward.judge import drawn, faults, torchs_own
from tests.ops.running import compute
from tests.ops.toy_op import CPU, User
from tests.vae.vae_models import needs_half

PROBLEM = AttentionProblem(1, 2, 9, 13, 16, "float64")
ROW = table()["gfx1100"]


def inputs(problem: AttentionProblem = PROBLEM) -> AttentionBackwardInputs:
    return ATTENTION_BACKWARD.make_inputs(problem, CPU, 1)


@pytest.mark.parametrize("mask", ["none", "bool", "float64"])
@pytest.mark.parametrize("variant", [FormulaBackward(), SdpaBackward(), SlicedBackward()])
def test_torchs_ways_agree_with_autograd_through_the_formula(variant: Any, mask: str) -> None:
    given = inputs(replace(PROBLEM, mask=mask))
    q, k, v = (t.clone().requires_grad_() for t in given[:3])
    out = attention_inputs.AttentionInputs(q, k, v, given.mask, given.scale)
    exact = torch.autograd.grad(functional.attention(*out), (q, k, v), given.grad)
    made = compute(ATTENTION_BACKWARD, variant, None, None, given)
    for ours, right in zip(made, exact, strict=True):
        assert ours.dtype == right.dtype and torch.allclose(ours, right, atol=1e-12)


def test_slices_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lib_rocm_sd.ops.attention.torch.SLICE_BYTES", 13 * 2 * 4 * 4)
    given = inputs(replace(PROBLEM, batch=2, mask="float64"))
    assert SlicedBackward().workspace(PROBLEM) < FormulaBackward().workspace(PROBLEM) * 100
    made = compute(ATTENTION_BACKWARD, SlicedBackward(), None, None, given)
    for ours, right in zip(made, ATTENTION_BACKWARD.reference(given), strict=True):
        assert torch.allclose(ours, right, atol=1e-12)


def test_what_was_made_in_inference_mode_has_gradients_too() -> None:
    with torch.inference_mode():
        given = inputs(replace(PROBLEM, mask="float64"))
        made = compute(ATTENTION_BACKWARD, SdpaBackward(), None, None, given)
    for ours, right in zip(made, ATTENTION_BACKWARD.reference(given), strict=True):
        assert torch.allclose(ours, right, atol=1e-12)


@needs_half
@pytest.mark.parametrize("problem", ODD, ids=str)
def test_every_way_of_torchs_passes_the_self_test(problem: AttentionProblem) -> None:
    for variant in ATTENTION_BACKWARD.variants[1:]:
        found = check(ATTENTION_BACKWARD, variant, None, None, problem, CPU)
        assert found.reason == "", variant.name


@needs_half
def test_the_judge_tells_right_from_wrong() -> None:
    given = drawn(AttentionProblem(1, 2, 33, 77, 40))
    right = torchs_own(given)
    assert faults(right, given) == []
    for place in range(3):
        wrong = list(right)
        wrong[place] = wrong[place] * 1.01
        found = faults((wrong[0], wrong[1], wrong[2]), given)
        assert found and all(said.startswith("qkv"[place]) for said in found)


# -- mistakes and refusals


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grad": torch.zeros(1, 9, 16).double()}, "must be .batch, seq_q, heads . head_dim"),
        ({"output": torch.zeros(1, 9, 2, 16).double()}, "must be .batch, seq_q, heads . head_dim"),
        ({"grad": torch.zeros(1, 9, 32)}, "one dtype"),
        ({"grad": None}, "grad must be a tensor, not NoneType"),
        ({"lse": torch.zeros(1, 9, 2).double()}, "lse must be torch.float64 .batch, heads, seq_q"),
        ({"lse": torch.zeros(1, 2, 9)}, "lse must be torch.float64 .batch, heads, seq_q"),
        ({"k": torch.zeros(1, 13, 2, 8).double()}, "k and v must have one shape"),
    ],
)
def test_a_mistake_is_told_with_shapes(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ATTENTION_BACKWARD.problem_of(inputs()._replace(**change))


def test_what_the_kernel_does_not_take_is_refused_with_reasons() -> None:
    ours, plain = MatrixBackward(), AttentionProblem(1, 2, 9, 13, 64)
    assert ours.refusals(None, plain) == ["no supported GPU"]
    assert ours.refusals(ROW, plain) == []
    for changed, said in (
        ({"head_dim": 20}, "head_dim 20 is not a multiple of 8"),
        ({"head_dim": 512}, "head_dim 512 is more than 256"),
        ({"dtype": "float32"}, "float32"),
        ({"mask": "float64"}, "a float64 mask"),
        ({"seq_q": (1 << 30) + 1}, "more than 2^30"),
        ({"batch": 1 << 27}, "work-items are more than one launch may have"),
    ):
        reasons = ours.refusals(ROW, replace(plain, **changed))
        assert any(said in reason for reason in reasons), (changed, reasons)
    half = replace(plain, head_dim=256, dtype="bfloat16")
    assert "spills registers on RDNA2" in ours.refusals(table()["gfx1030"], half)[0]
    assert ours.refusals(ROW, half) == []
    given = inputs()
    turned = given._replace(q=given.q.mT.contiguous().mT)
    assert ours.input_refusals(turned) == ["the last stride of q is not 1"]
    with torch.enable_grad():
        followed = given._replace(grad=given.grad.clone().requires_grad_())
        assert ours.input_refusals(followed)[0].startswith("gradients are wanted")


def test_what_has_its_gradient_wanted_has_another_key() -> None:
    given = inputs()
    followed = given._replace(grad=given.grad.clone().requires_grad_())
    keys = {ATTENTION_BACKWARD.key_of(each) for each in (given, followed)}
    wide = given._replace(output=torch.zeros(1, 9, 33).double()[..., :-1])
    assert len({*keys, ATTENTION_BACKWARD.key_of(wide)}) == 3


# -- the engine and the kernels that are compiled


def test_the_engine_gives_three_gradients() -> None:
    engine = User(Engine(), "Auto")
    given = inputs()
    made = engine.run(ATTENTION_BACKWARD, given)
    for ours, right in zip(made, ATTENTION_BACKWARD.reference(given), strict=True):
        assert torch.allclose(ours, right, atol=1e-12)
    (row,) = engine.session.report.snapshot()["rows"]
    assert row["variant"] == "sdpa"


def test_of_nothing_the_gradients_are_zeros() -> None:
    q, k = torch.zeros(2, 0, 2, 8), torch.ones(2, 3, 2, 8)
    made = functional.attention_backward(
        *(q, k, k, torch.zeros(2, 0, 16), torch.zeros(2, 0, 16), torch.zeros(2, 2, 0))
    )
    assert [t.shape for t in made] == [q.shape, k.shape, k.shape]
    assert not any(t.any() for t in made)


@pytest.mark.parametrize("gfx", amd_table())
def test_each_gpu_has_its_kernels_and_each_pass_of_them_fits(gfx: str) -> None:
    row = table()[gfx]
    shipped = kernel.shipped_specs(row)
    assert len(shipped) == len(set(shipped))
    assert {*shipped} >= {*kernel.searched_specs(row)[:2]}
    for head_dim in kernel.SHIPPED_HEAD_DIMS:
        first = attention_kernel.ordered(row, "float16", head_dim)[0]
        assert attention_kernel.spec("float16", head_dim, "none", first, lse=True) in shipped
    for head_dim in range(8, 257, 8):
        for config in kernel.configs(row, head_dim):
            assert config.wave_size == row.wave_size
            assert max(config.block(name) for name in kernel.PASSES) <= 256


def test_a_spec_that_does_not_exist() -> None:
    config = kernel.configs(ROW, 64)[0]
    with pytest.raises(ValueError, match="dtype float32 is not one of"):
        kernel.spec("float32", 64, "none", "keys", config)
    with pytest.raises(ValueError, match="head_dim 12 is not a multiple of 8"):
        kernel.spec("float16", 12, "none", "keys", config)
