"""GroupNorm and its steps on the CPU: through the engine, against float64; what is compiled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import arch, functional
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.group_norm import formula as group_norm_formula
from lib_rocm_sd.ops.group_norm import kernel
from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
    NormInputs,
)
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, NORM, STATISTICS
from lib_rocm_sd.ops.group_norm.ours import KernelGroupNorm
from lib_rocm_sd.ops.group_norm.problem import ODD, USUAL, FinalizeProblem, GroupNormProblem
from lib_rocm_sd.runtime import build, codeobject
from tests import executed
from tests.ops.toy_op import CPU, GFX1100, engine_of
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

OPS: tuple[Any, ...] = (STATISTICS, FINALIZE, APPLY, GROUP_NORM_SILU, NORM)


def relative_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    return ((output.double() - exact).abs().max() / exact.abs().max()).item()


def steps(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The three functions one after the other, on (N, C, H, W)."""
    gamma, beta, groups, eps, silu = rest
    image = x.permute(0, 2, 3, 1)
    norm = functional.group_norm_of(image, gamma, beta, groups, eps)
    return functional.group_norm_apply(image, norm, silu).permute(0, 3, 1, 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("problem", ODD, ids=str)
def test_the_op_and_the_steps_are_right_on_the_cpu(problem: GroupNormProblem, dtype: str) -> None:
    problem = replace(problem, dtype=dtype)
    inputs = GROUP_NORM_SILU.make_inputs(problem, CPU, 1)
    assert GROUP_NORM_SILU.problem_of(inputs) == problem
    exact = GROUP_NORM_SILU.reference(inputs)
    for way in (functional.group_norm_silu, steps):
        output = way(*inputs[:6])
        assert output.dtype == inputs[0].dtype and output.stride() == inputs[0].stride()
        assert relative_error(output, exact) <= GROUP_NORM_SILU.tolerance(problem)


def test_the_reference_is_torchs_formula() -> None:
    inputs = GROUP_NORM_SILU.make_inputs(replace(ODD[2], dtype="float64"), CPU, 1)
    x, gamma, beta, groups, eps = inputs[:5]
    assert gamma is not None and beta is not None
    expected = F.silu(F.group_norm(x, groups, gamma.double(), beta.double(), eps))
    assert relative_error(GROUP_NORM_SILU.reference(inputs), expected) < 1e-14


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [("float32", 1000.0, 0.1), ("bfloat16", 1000.0, 20.0), ("float16", 60.0, 0.1)],
)
def test_a_mean_far_from_zero(dtype: str, mean: float, std: float) -> None:
    """No worse than twice torch's own error, whichever way it is computed."""
    x = torch.randn((2, 32, 65, 67), generator=torch.Generator().manual_seed(1)) * std + mean
    x = x.to(getattr(torch, dtype))
    exact = GROUP_NORM_SILU.reference(GroupNormInputs(x, None, None, 8, 1e-6, False))
    torchs_own = relative_error(F.group_norm(x.float(), 8, eps=1e-6).to(x.dtype), exact)
    assert relative_error(steps(x, None, None, 8, 1e-6, False), exact) <= 2 * torchs_own
    statistics = functional.group_norm_statistics(x.permute(0, 2, 3, 1).contiguous()).double()
    count, total = statistics[..., 2:3], statistics[..., 2:3].sum(1, keepdim=True)
    merged = (statistics[..., :1] * count / total).sum(1, keepdim=True)
    spread = statistics[..., 1:2] + count * (statistics[..., :1] - merged).square()
    variance = (spread / total).sum(1)[..., 0]
    expected = x.double().var((2, 3), correction=0)
    assert ((variance - expected).abs() / expected).max() < 1e-4


def test_bands_of_an_image_have_the_statistics_of_the_whole() -> None:
    x = torch.randn(2, 65, 33, 48, dtype=torch.float64) + 5
    gamma, beta = torch.randn(48), torch.randn(48)
    whole = functional.group_norm_of(x, gamma, beta, 16, 1e-6)
    bands = [functional.group_norm_statistics(band.contiguous()) for band in x.split(16, 1)]
    norm = functional.group_norm_finalize(torch.cat(bands, 1), gamma, beta, 16, 1e-6)
    assert whole.dtype == torch.float64 and (whole - norm).abs().max() < 1e-12


def test_statistics_have_the_shape_that_is_agreed() -> None:
    x = torch.randn(2, 40, 50, 24).half()
    found = functional.group_norm_statistics(x)
    assert found.dtype == torch.float32 and found.shape[0] == 2 and found.shape[2:] == (24, 4)
    assert found.shape[1] > 1 and (found[..., 2].sum(1) == 2000).all()
    assert not found[..., 3].any()


def test_channels_beyond_gammas_and_parts_without_pixels_weigh_nothing() -> None:
    x = torch.randn(1, 9, 9, 24)
    statistics, gamma, beta = functional.group_norm_statistics(x), torch.randn(24), torch.randn(24)
    expected = functional.group_norm_finalize(statistics, gamma, beta, 8, 1e-6)
    more = F.pad(F.pad(statistics, (0, 0, 0, 8), value=math.nan), (0, 0, 0, 0, 0, 1))
    assert torch.equal(functional.group_norm_finalize(more, gamma, beta, 8, 1e-6), expected)


@pytest.mark.parametrize("shape", [(0, 8, 3, 3), (2, 8, 0, 3), (2, 0, 3, 3)])
def test_without_elements(shape: tuple[int, int, int, int]) -> None:
    x = torch.ones(shape).half()
    affine = torch.ones(shape[1]), torch.zeros(shape[1])
    assert functional.group_norm_silu(x, *affine, 4).shape == shape
    image = x.permute(0, 2, 3, 1)
    statistics = functional.group_norm_statistics(image)
    assert statistics.shape == (shape[0], 0, shape[1], 4) and statistics.dtype == torch.float32
    norm = functional.group_norm_finalize(statistics, *affine, 4, 1e-6)
    assert norm.shape == (shape[0], shape[1], 2)
    assert functional.group_norm_apply(image, norm, True).shape == image.shape


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_reach_their_group_and_no_other(value: float) -> None:
    x = torch.randn(2, 8, 5, 5)
    x[1, 3, 2, 2] = value
    for way in (functional.group_norm_silu, steps):
        lost = way(x, None, None, 4, 1e-6, True).isnan()
        assert lost[1, 2:4].all() and lost.sum() == 50


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda x: functional.group_norm_silu(x, None, None, 3), "8 channels do not divide into 3"),
        (lambda x: functional.group_norm_silu(x, None, None, 0), "0 groups"),
        (lambda x: functional.group_norm_silu(x, torch.ones(7), None, 4), "gamma must have 8"),
        (lambda x: functional.group_norm_silu(x[0], None, None, 4), r"N, C, H, W.*\(8, 4, 8\)"),
        (lambda x: functional.group_norm_silu(x.int(), None, None, 4), "int32"),
        (lambda x: functional.group_norm_statistics(x[0]), "N, H, W, C"),
        (
            lambda x: functional.group_norm_apply(x, torch.ones(2, 4, 2), True),
            r"norm must be.*\(2, 4, 2\)",
        ),
        (lambda x: functional.group_norm_finalize(x, None, None, 4, 1e-6), "statistics must be"),
        (
            lambda x: functional.group_norm_finalize(
                torch.ones(1, 1, 4, 4), torch.ones(8), None, 4, 1e-6
            ),
            "more channels",
        ),
        (
            lambda x: functional.group_norm_finalize(
                torch.ones(1, 1, 4, 4).half(), None, None, 4, 1e-6
            ),
            "float16",
        ),
    ],
)
def test_a_callers_mistake_is_named_with_the_shapes(call: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        call(torch.ones(2, 8, 4, 8))


def test_gradients_flow_through_torchs_variant() -> None:
    x = torch.randn(1, 8, 4, 4, requires_grad=True)
    functional.group_norm_silu(x, None, None, 2).sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0
    engine, report = engine_of(GFX1100)
    inputs = GroupNormInputs(x.half(), None, None, 2, 1e-6, True)
    engine.run(GROUP_NORM_SILU, inputs).float().sum().backward()
    (row,) = report.snapshot()["rows"]
    assert row["variant"] == "torch"
    assert "gradients are wanted, the kernel is forward only" in str(row)


def test_what_our_kernel_refuses_is_said() -> None:
    ours, row = KernelGroupNorm(), GFX1100.arch
    problem = USUAL[0][1]
    assert ours.refusals(row, problem) == []
    assert ours.refusals(None, problem) == ["no supported GPU"]
    (reason,) = ours.refusals(row, replace(problem, dtype="float32"))
    assert reason == "float32: the kernel takes fp16 and bf16"
    assert "pixels" in str(ours.refusals(row, replace(problem, height=1 << 16, width=1 << 15)))
    assert "gamma in float64" in ours.refusals(row, replace(problem, affine="float64"))
    assert "work-items" in str(ours.refusals(row, replace(problem, batch=1 << 22)))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_variant_passes_the_self_tests_on_the_cpu(op: Any) -> None:
    engine, _ = engine_of()
    checks = engine.checks(op.usual[0][1], CPU, op)
    assert list(checks) == ["torch"]
    assert all(check.reason == "" for check in checks.values())


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@pytest.mark.parametrize("channels_last", [True, False])
def test_our_kernels_source_is_tested_and_run_by_the_engine(channels_last: bool) -> None:
    """All of the way but the GPU: gfx1100's kernels, under the shim, behind the engine."""
    assert GFX1100.arch is not None
    launch = ShimLaunch(GFX1100.arch)
    engine, report = engine_of(GFX1100, launcher=lambda device, row: launch)
    problem = GroupNormProblem(1, 16, 7, 9, "float16", channels_last, True, 4)
    with launch.knows():
        inputs = GROUP_NORM_SILU.make_inputs(problem, CPU, 1)
        x, gamma, beta, groups, eps, silu, _ = inputs
        output = engine.run(GROUP_NORM_SILU, inputs)
        statistics = engine.run(STATISTICS, ImageInputs(x))
        norm = engine.run(FINALIZE, FinalizeInputs(statistics, gamma, beta, groups, eps))
        stepwise = engine.run(APPLY, ApplyInputs(x, norm, silu))
        of_image = engine.run(NORM, NormInputs(x, gamma, beta, groups, eps))
    rows = report.snapshot()["rows"]
    assert len(rows) == 5 and {row["variant"] for row in rows} == {"rocm_sd"}
    assert report.snapshot()["events"] == []
    exact = GROUP_NORM_SILU.reference(inputs)
    for made in (output, stepwise):
        assert relative_error(made, exact) <= GROUP_NORM_SILU.tolerance(problem)
    assert relative_error(of_image, norm.double()) <= 2e-5


CASES = [problem for _, problem in USUAL] + list(ODD)


@pytest.mark.parametrize("problem", CASES, ids=str)
def test_the_work_groups_of_a_pass_cover_the_image_once(problem: GroupNormProblem) -> None:
    form, p = problem.form, problem
    for config in kernel.configs(arch.table()["gfx1100"]):
        for statistics in (True, False):
            t = kernel.tiling(p.batch, p.channels, p.pixels, form, config, statistics)
            assert (t.parts - 1) * t.part_pixels < p.pixels <= t.parts * t.part_pixels
            assert t.parts == p.parts or not statistics
            assert 0 < t.width <= config.threads
            if p.channels_last:
                vectors = -(-p.channels // form.vector)
                assert (t.column_blocks - 1) * t.width < vectors <= t.column_blocks * t.width
                assert t.grid == p.batch * t.parts * t.column_blocks
            else:
                assert config.threads % t.width == 0
                assert t.units == p.batch * p.channels * t.parts
                assert 0 <= t.grid * (config.threads // t.width) - t.units < config.threads
    assert p.parts * p.channels * 16 <= max(p.channels * 16, p.channels * p.pixels * 2 // 8)


@pytest.mark.parametrize("pixels", [1, 127, 4096, 1 << 20, (1 << 31) - 1])
@pytest.mark.parametrize("channels_last", [True, False])
def test_parts_are_never_too_large_to_count(channels_last: bool, pixels: int) -> None:
    form = kernel.form_of("float16", 128, channels_last)
    for batch in (1, 500):
        each = kernel.part_pixels(batch, 128, pixels, form)
        assert 0 < each <= kernel.MOST_PIXELS
        assert (kernel.parts_of(batch, 128, pixels, form) - 1) * each < pixels


def test_many_parts_are_merged_first() -> None:
    assert kernel.merged_parts(1024, 4) == 1024
    for parts, group in ((100_000, 4), (65536, 16), (9, 1280), (3, 10_000)):
        fewer = kernel.merged_parts(parts, group)
        assert 1 <= fewer < parts and fewer * group <= max(group, kernel.DIRECT_ENTRIES)
    engine, _ = engine_of()
    first, many = FINALIZE.test_problems(FinalizeProblem(1, 4, 128, 32))
    assert kernel.merged_parts(first.parts, 4) == first.parts
    assert kernel.merged_parts(many.parts, 4) < many.parts


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx942"])
def test_the_kernels_compile_without_spills(gfx: str) -> None:
    """What is shipped for bfloat16, which takes the most registers, and the other configs."""
    row = arch.table()[gfx]
    shipped = kernel.shipped_specs(row)
    specs = [spec for spec in shipped if dict(spec.defines).get("BF16_HALVES") != 0]
    for config in kernel.configs(row)[1:]:
        specs += kernel.specs(kernel.form_of("bfloat16", 128, True), True, config)[::3]
    for spec in specs:
        try:
            code = build.build(spec, row).code
        except CompileError as error:
            pytest.skip(f"no compiler for {gfx}: {error}")
        (found,) = codeobject.resources(code)
        assert found.name == spec.entry and found.wave_size == row.wave_size
        assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (0, 0, 0)
        assert found.lds_bytes <= 65536
        assert codeobject.waves_per_simd(row, found, found.max_block) >= 2


def test_a_norm_from_the_torch_variant_is_the_reference() -> None:
    inputs = FINALIZE.make_inputs(FinalizeProblem(2, 5, 30, 3, "float64", "none"), CPU, 1)
    exact = group_norm_formula.reference_norm(*inputs)
    assert torch.equal(functional.group_norm_finalize(*inputs), exact)
