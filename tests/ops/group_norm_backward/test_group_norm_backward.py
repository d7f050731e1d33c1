"""GroupNorm's gradients on the CPU: through the engine, against float64; how they are compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import arch, functional
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops.group_norm import whole
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig, NormForm
from lib_rocm_sd.ops.group_norm_backward import kernel
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import ODD, USUAL, GroupNormBackwardProblem
from lib_rocm_sd.shipped import AT_START, shipped
from tests import executed
from tests.ops.conv.test_conv_resources import ONE_OF_EACH
from tests.ops.gradients import draw, faults
from tests.ops.linear.test_linear_resources import check
from tests.ops.toy_op import GFX1100, engine_of
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

OP = GROUP_NORM_BACKWARD
OURS = OP.variants[0]
ROW = arch.table()["gfx1100"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("problem", ODD, ids=str)
def test_it_is_right_on_the_cpu(problem: GroupNormBackwardProblem, dtype: str) -> None:
    problem = replace(problem, dtype=dtype)
    inputs = draw(OP, problem)
    assert OP.problem_of(inputs) == problem
    made, exact = functional.group_norm_silu_backward(*inputs), OP.reference(inputs)
    assert made[0].dtype == inputs.x.dtype and made[0].stride() == inputs.x.stride()
    for mine, right in zip(made, exact, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            assert relative_error(mine, right) <= OP.tolerance(problem)


@pytest.mark.parametrize("silu", [True, False])
def test_the_reference_is_what_autograd_finds(silu: bool) -> None:
    problem = GroupNormBackwardProblem(2, 6, 3, 5, "float64", True, silu, 3, "float64")
    inputs = draw(OP, problem)
    given = [t.clone().requires_grad_() for t in (inputs.x, inputs.gamma, inputs.beta)]
    made = F.group_norm(given[0], 3, given[1], given[2], inputs.eps)
    found = torch.autograd.grad(F.silu(made) if silu else made, given, inputs.grad)
    for mine, right in zip(OP.reference(inputs), found, strict=True):
        assert relative_error(mine, right) < 1e-13


def test_without_elements() -> None:
    x = torch.ones(0, 8, 2, 2)
    made, gamma, beta = functional.group_norm_silu_backward(x, x, torch.ones(8), None, 4)
    assert made.shape == x.shape and gamma is not None and beta is not None
    assert gamma.tolist() == beta.tolist() == [0.0] * 8


def test_a_callers_mistake_is_named_with_the_shapes() -> None:
    x = torch.ones(2, 8, 3, 3)
    call = functional.group_norm_silu_backward
    with pytest.raises(ValueError, match=r"grad must have the shape of x: grad \(1, 8, 3, 3\)"):
        call(x[:1], x, None, None, 4)
    with pytest.raises(ValueError, match="grad must have the dtype of x"):
        call(x.half(), x, None, None, 4)
    with pytest.raises(ValueError, match="8 channels do not divide into 3 groups"):
        call(x, x, None, None, 3)


def test_what_our_kernel_refuses_is_said() -> None:
    problem = USUAL[0][1]
    assert OURS.refusals(ROW, problem) == []
    assert OURS.refusals(None, problem) == ["no supported GPU"]
    wide = replace(problem, dtype="float32", affine="float64")
    assert OURS.refusals(ROW, wide) == [
        "float32: the kernel takes fp16 and bf16",
        "gamma in float64",
    ]
    inputs = draw(OP, ODD[0])
    inputs.gamma.requires_grad_()
    assert "gradients are wanted" in str(OURS.input_refusals(inputs))


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@pytest.mark.parametrize("last", [True, False])
def test_our_kernels_source_is_tested_and_run_by_the_engine(last: bool) -> None:
    """All of the way but the GPU: gfx1100's kernels, under the shim, behind the engine."""
    launch = ShimLaunch(ROW)
    engine, report = engine_of(GFX1100, launcher=lambda device, row: launch)
    with torch.no_grad(), launch.knows():
        inputs = draw(OP, GroupNormBackwardProblem(1, 16, 5, 7, "float16", last, True, 4))
        assert faults(OP, engine.run(OP, inputs), inputs) == []
    (row,) = report.snapshot()["rows"]
    assert (row["variant"], row["calls"]) == ("rocm_sd", 1)
    assert report.snapshot()["events"] == []


def test_channels_first_every_part_begins_at_a_multiple_of_eight_pixels() -> None:
    form, config = NormForm("float16", False, 8), GroupNormConfig(256, 4)
    for pixels in (1, 63, 4096, 1 << 14, (1 << 20) + 3):
        for sums in (True, False):
            cut = kernel.tiling(2, 320, pixels, form, config, sums)
            assert cut.part_pixels % 8 == 0 and cut.units == 640 * cut.parts
            assert (cut.parts - 1) * cut.part_pixels < pixels <= cut.parts * cut.part_pixels


def test_test_problems_are_of_the_class() -> None:
    for _, problem in USUAL:
        (config,) = OURS.configs(ROW, problem)
        for test in OP.test_problems(problem):
            if config.whole is not None:
                width = whole.tiling(test.channels, test.groups, test.form.vector).width
                assert test.pixels <= config.whole.pixels(width)
            same = (test.channels, test.dtype, test.channels_last, test.groups, test.affine)
            p = problem
            assert same == (p.channels, p.dtype, p.channels_last, p.groups, p.affine)


def test_what_training_launches_is_listed_and_compiled_by_no_install() -> None:
    listed, ahead = set(kernel.shipped_specs(ROW)), set(shipped(ROW, AT_START))
    for _, problem in USUAL:
        (config,) = OURS.configs(ROW, problem)
        norm = set(kernel.norm_specs(problem.form, config))
        assert set(OURS.specs(ROW, problem, config)) - norm <= listed
    assert not listed & ahead


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_the_kernels_compile_without_spills(gfx: str) -> None:
    """All that is listed, and gamma in float32."""
    row = arch.table()[gfx]
    form, config = NormForm("bfloat16", True, 8), GroupNormConfig(256, 4)
    wide = kernel.sums_spec(form, True, "float32", config)
    check(row, [*kernel.shipped_specs(row), wide])
