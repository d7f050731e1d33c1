"""LayerNorm's gradients on the CPU: through the engine, against float64; how they are compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import arch, functional
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops.layer_norm import kernel as forward
from lib_rocm_sd.ops.layer_norm_backward import kernel
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.problem import ODD, USUAL, LayerNormBackwardProblem
from lib_rocm_sd.shipped import AT_START, shipped
from tests import executed
from tests.ops.conv.test_conv_resources import ONE_OF_EACH
from tests.ops.gradients import draw, faults
from tests.ops.linear.test_linear_resources import check
from tests.ops.toy_op import GFX1100, engine_of
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

OP = LAYER_NORM_BACKWARD
OURS = OP.variants[0]
ROW = arch.table()["gfx1100"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("problem", ODD[:5], ids=str)
def test_it_is_right_on_the_cpu(problem: LayerNormBackwardProblem, dtype: str) -> None:
    problem = replace(problem, dtype=dtype)
    inputs = draw(OP, problem)
    assert OP.problem_of(inputs) == problem
    made, exact = functional.layer_norm_backward(*inputs), OP.reference(inputs)
    assert made[0].dtype == inputs.x.dtype and made[0].is_contiguous()
    for mine, right in zip(made, exact, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            assert relative_error(mine, right) <= OP.tolerance(problem)


@pytest.mark.parametrize("added", [True, False])
def test_the_reference_is_what_autograd_finds(added: bool) -> None:
    problem = LayerNormBackwardProblem((3, 5, 7), "float64", added, "float64")
    inputs = draw(OP, problem)
    x, gamma = (t.clone().requires_grad_() for t in (inputs.x, inputs.gamma))
    beta = torch.zeros_like(gamma).requires_grad_()
    total = x + inputs.added if added else x * 1
    results = [F.layer_norm(total, (7,), gamma, beta, inputs.eps), total]
    grads = [inputs.grad, torch.zeros_like(x) if inputs.sum_grad is None else inputs.sum_grad]
    found = torch.autograd.grad(results, (x, gamma, beta), grads)
    for mine, right in zip(OP.reference(inputs), found, strict=True):
        assert relative_error(mine, right) < 1e-13


def test_without_elements() -> None:
    x = torch.ones(0, 8)
    made, gamma, beta = functional.layer_norm_backward(x, x, torch.ones(8))
    assert made.shape == (0, 8) and gamma is not None and beta is not None
    assert gamma.tolist() == beta.tolist() == [0.0] * 8
    assert functional.layer_norm_backward(x, x, None, affine=False)[1:] == (None, None)


def test_a_callers_mistake_is_named_with_the_shapes() -> None:
    x = torch.ones(2, 3, 8)
    call = functional.layer_norm_backward
    with pytest.raises(ValueError, match=r"grad must have the shape of x: grad \(3, 8\).*float32"):
        call(x[0], x, None)
    with pytest.raises(ValueError, match="grad must have the dtype of x"):
        call(x.half(), x, None)
    with pytest.raises(ValueError, match="added and sum_grad must come together"):
        call(x, x, None, added=x)
    with pytest.raises(ValueError, match="gamma must have 8 values"):
        call(x, x, x)
    with pytest.raises(ValueError, match="grad must be a tensor, not NoneType"):
        call(None, x, None)  # type: ignore[arg-type]


def test_what_our_kernel_refuses_is_said() -> None:
    problem = USUAL[0][1]
    assert OURS.refusals(ROW, problem) == []
    assert OURS.refusals(None, problem) == ["no supported GPU"]
    wide = replace(problem, dtype="float32", affine="float64")
    assert OURS.refusals(ROW, wide) == [
        "float32: the kernel takes fp16 and bf16",
        "gamma in float64",
    ]
    assert "work-items" in str(OURS.refusals(ROW, replace(problem, shape=(1 << 29, 320))))
    inputs = draw(OP, ODD[0])
    inputs.x.requires_grad_()
    assert "gradients are wanted" in str(OURS.input_refusals(inputs))


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
def test_our_kernels_source_is_tested_and_run_by_the_engine() -> None:
    """All of the way but the GPU: gfx1100's kernels, under the shim, behind the engine."""
    launch = ShimLaunch(ROW)
    engine, report = engine_of(GFX1100, launcher=lambda device, row: launch)
    with torch.no_grad(), launch.knows():
        inputs = draw(OP, LayerNormBackwardProblem((2, 7, 40), added=True))
        output = engine.run(OP, inputs)
        assert faults(OP, output, inputs) == []
    (row,) = report.snapshot()["rows"]
    assert (row["variant"], row["calls"]) == ("rocm_sd", 1)
    assert report.snapshot()["events"] == []


@pytest.mark.parametrize("rows", [1, 31, 64, 77, 512, 8192, 1 << 20])
def test_parts_of_rows(rows: int) -> None:
    for channels in (7, 320, 1280, 12301):
        cut = kernel.parts_tiling(rows, channels)
        assert (cut.parts - 1) * cut.part_rows < rows <= cut.parts * cut.part_rows
        assert cut.parts <= kernel.MOST_PARTS and cut.width <= kernel.COLUMNS
        assert cut.width * cut.column_blocks * cut.vector >= channels
        assert cut.parts == 1 or cut.part_rows >= kernel.LEAST_ROWS


def test_what_training_launches_is_listed_and_compiled_by_no_install() -> None:
    listed = set(kernel.shipped_specs(ROW))
    for _, problem in USUAL:
        (config,) = OURS.configs(ROW, problem)
        assert set(OURS.specs(ROW, problem, config)) <= listed
    assert not listed & set(shipped(ROW, AT_START))


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_the_kernels_compile_without_spills(gfx: str) -> None:
    """All that is listed, and what has the most registers of the rest."""
    row = arch.table()[gfx]
    wide = kernel.BackwardForm("bfloat16", True, "float32", forward.HELD[-1])
    long = replace(wide, held=0)
    further = [kernel.input_spec(form, forward.CONFIGS[-1]) for form in (wide, long)]
    check(row, [*kernel.shipped_specs(row), *further, kernel.parts_spec("bfloat16", True, 1)])
