"""LayerNorm on the CPU: through the engine, against float64; how it is cut and compiled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import arch, functional
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.layer_norm import kernel
from lib_rocm_sd.ops.layer_norm.formula import row_stride
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.ours import KernelLayerNorm, spec_of
from lib_rocm_sd.ops.layer_norm.problem import ODD, USUAL, LayerNormProblem
from lib_rocm_sd.runtime import build, codeobject
from tests import executed
from tests.ops.layer_norm.judge import apart, draw, faults, misaligned, pair_of
from tests.ops.toy_op import CPU, GFX1100, engine_of
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

ROW = arch.table()["gfx1100"]
USUAL_PROBLEM = USUAL[0][1]
X = torch.ones(2, 3, 8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("problem", ODD, ids=str)
def test_it_is_right_on_the_cpu(problem: LayerNormProblem, dtype: str) -> None:
    problem = replace(problem, dtype=dtype)
    inputs = draw(problem)
    assert LAYER_NORM.problem_of(inputs) == problem
    norm, total = pair_of(functional.layer_norm(*inputs))
    exact, exact_total = pair_of(LAYER_NORM.reference(inputs))
    assert (total is not None) == (exact_total is not None) == problem.added
    assert norm.dtype == inputs.x.dtype and norm.is_contiguous()
    assert relative_error(norm, exact) <= LAYER_NORM.tolerance(problem)
    if total is not None and inputs.added is not None:
        assert torch.equal(total, inputs.x + inputs.added)


def test_the_reference_is_torchs_formula() -> None:
    x, gamma, beta, eps, added = draw(replace(ODD[2], dtype="float64", affine="float64"))
    assert added is not None
    expected = F.layer_norm(x + added, x.shape[-1:], gamma, beta, eps)
    norm, total = pair_of(LAYER_NORM.reference(LayerNormInputs(x, gamma, beta, eps, added)))
    assert relative_error(norm, expected) < 1e-14
    assert total is not None and torch.equal(total, x + added)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (3, 0, 8), (0,)])
def test_without_elements(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape).half()
    affine = torch.ones(shape[-1]), torch.zeros(shape[-1])
    assert pair_of(functional.layer_norm(x, *affine))[0].shape == shape
    both = functional.layer_norm(x, *affine, added=x)
    assert isinstance(both, tuple)
    for made in both:
        assert made.shape == shape and made.dtype == x.dtype
    assert both[0] is not both[1]


def test_autocast_changes_no_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            both = functional.layer_norm(X.to(dtype), None, None, added=X.to(dtype))
        assert [made.dtype for made in pair_of(both) if made is not None] == [dtype, dtype]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_spoil_their_row_and_no_other(value: float) -> None:
    x = torch.randn(3, 5, 8)
    x[1, 2, 3] = value
    lost = pair_of(functional.layer_norm(x, None, None))[0].isnan()
    assert lost[1, 2].all() and lost.sum() == 8


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: functional.layer_norm(X, torch.ones(7), None), r"gamma must have 8 .*\(2, 3, 8\)"),
        (lambda: functional.layer_norm(X, None, torch.ones(2, 8)), "beta must have 8 values"),
        (lambda: functional.layer_norm(X, torch.ones(8).int(), None), "gamma of torch.int32"),
        (lambda: functional.layer_norm(X.int(), None, None), "int32"),
        (lambda: functional.layer_norm(X[0, 0, 0], None, None), r"x must be \(..., C\)"),
        (lambda: functional.layer_norm(X, None, None, added=X[:1]), r"shape of x.*\(1, 3, 8\)"),
        (lambda: functional.layer_norm(X, None, None, added=X.half()), "added must have the dtype"),
        (lambda: functional.layer_norm(X.to("meta"), None, None), "meta"),
        (lambda: functional.layer_norm([1.0], None, None), "x must be a tensor, not list"),  # type: ignore[arg-type]
        (lambda: functional.layer_norm(X.to_sparse(), None, None), "not dense"),
    ],
)
def test_a_callers_mistake_is_named_with_the_shapes(call: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        call()


def test_gradients_flow_through_torchs_variant() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    pair_of(functional.layer_norm(x, None, None))[0].square().sum().backward()
    assert x.grad is not None
    engine, report = engine_of(GFX1100)
    gamma = torch.ones(8, requires_grad=True)
    norm = engine.run(LAYER_NORM, LayerNormInputs(x.half().detach(), gamma, None, 1e-6))
    norm.float().sum().backward()
    assert gamma.grad is not None and gamma.grad.abs().max() > 0
    (row,) = report.snapshot()["rows"]
    assert row["variant"] == "torch"
    assert "gradients are wanted, the kernel is forward only" in str(row)


def test_what_our_kernel_refuses_is_said() -> None:
    ours, problem = KernelLayerNorm(), USUAL_PROBLEM
    assert ours.refusals(ROW, problem) == []
    assert ours.refusals(None, problem) == ["no supported GPU"]
    (reason,) = ours.refusals(ROW, replace(problem, dtype="float32"))
    assert reason == "float32: the kernel takes fp16 and bf16"
    assert "gamma in float64" in ours.refusals(ROW, replace(problem, affine="float64"))
    assert "more than the kernel counts" in str(ours.refusals(ROW, LayerNormProblem((1, 1 << 31))))
    most = LayerNormProblem(((1 << 29) - 32, 320))
    assert ours.refusals(ROW, most) == []
    assert "work-items" in str(ours.refusals(ROW, replace(most, shape=(1 << 29, 320))))


def test_calls_that_must_not_share_a_plan_have_other_keys() -> None:
    inputs = draw(LayerNormProblem((4, 6, 16), added=True))
    x, gamma, beta, eps, added = inputs
    assert gamma is not None and beta is not None and added is not None
    others = [
        inputs,
        inputs._replace(x=apart(x, 8)),
        inputs._replace(added=apart(added, 8)),
        inputs._replace(added=None),
        inputs._replace(gamma=None),
        inputs._replace(beta=None),
        inputs._replace(gamma=gamma.float()),
        inputs._replace(beta=beta.float()),
        inputs._replace(beta=beta.repeat(2)[::2]),
        inputs._replace(x=x.flatten(0, 1), added=added.flatten(0, 1)),
        inputs._replace(x=x.bfloat16(), added=added.bfloat16()),
        inputs._replace(gamma=gamma.clone().requires_grad_()),
    ]
    assert len({LAYER_NORM.key_of(each) for each in others}) == len(others)
    again = inputs._replace(x=x.clone(), eps=eps * 2, added=misaligned(added))
    assert LAYER_NORM.key_of(again) == LAYER_NORM.key_of(inputs)


def test_distances_of_rows() -> None:
    x = torch.zeros(4, 6, 16)
    assert row_stride(x) == 16
    assert row_stride(x[:, :, :8]) == 16
    assert row_stride(x[:, ::2]) == 32
    assert row_stride(x[:, 1:]) is None
    assert row_stride(x[:, 0]) == 96
    assert row_stride(x[1:2, 1:2]) == 16
    assert row_stride(x.transpose(0, 1)) is None
    assert row_stride(x[..., ::2]) is None
    assert row_stride(x[..., :1]) == 16
    assert row_stride(x[0, 0]) == 16
    assert row_stride(x[:1, :1].expand(3, 6, 16)) == 0


def test_every_variant_passes_the_self_tests_on_the_cpu() -> None:
    engine, _ = engine_of()
    for added in (True, False):
        checks = engine.checks(replace(USUAL_PROBLEM, added=added), CPU, LAYER_NORM)
        assert list(checks) == ["torch"]
        assert all(check.reason == "" for check in checks.values())


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@pytest.mark.parametrize("added", [True, False])
def test_our_kernels_source_is_tested_and_run_by_the_engine(added: bool) -> None:
    """All of the way but the GPU: gfx1100's kernel, under the shim, behind the engine."""
    launch = ShimLaunch(ROW)
    engine, report = engine_of(GFX1100, launcher=lambda device, row: launch)
    with launch.knows():
        inputs = draw(LayerNormProblem((2, 7, 40), added=added))
        output = engine.run(LAYER_NORM, inputs)
        again = engine.run(LAYER_NORM, inputs)
    (row,) = report.snapshot()["rows"]
    assert (row["variant"], row["calls"]) == ("rocm_sd", 2)
    assert report.snapshot()["events"] == []
    assert faults(output, inputs) == faults(again, inputs) == []


class Preparing:
    """A launch that can prepare one; `prepared` counts how often it did."""

    def __init__(self, launch: ShimLaunch) -> None:
        self.launch = launch
        self.prepared = 0

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)

    def prepare(self, *arguments: Any) -> Any:
        self.prepared += 1
        return lambda: self.launch(*arguments)


@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@pytest.mark.parametrize("added", [True, False])
def test_a_bound_call_takes_other_tensors_of_its_key(added: bool) -> None:
    """Other addresses, alignments and eps; one packet serves calls that follow each other."""
    launch: Any = Preparing(ShimLaunch(ROW))
    ours, config = KernelLayerNorm(), kernel.CONFIGS[0]
    first = draw(LayerNormProblem((2, 9, 40), added=added))
    problem = LAYER_NORM.problem_of(first)
    call = ours.bound(Call(problem, first, launch, config))
    with launch.launch.knows():
        for seed in range(3):
            inputs = draw(problem, seed)
            if seed == 1:
                inputs = inputs._replace(x=misaligned(inputs.x), eps=0.3)
            else:
                inputs = inputs._replace(x=inputs.x.clone())
            assert faults(call(Call(problem, inputs, launch, config)), inputs) == []
    assert launch.prepared == 1


def test_what_has_to_be_copied_first_is_not_bound() -> None:
    launch: Any = Preparing(ShimLaunch(ROW))
    ours, config = KernelLayerNorm(), kernel.CONFIGS[0]
    inputs = draw(LayerNormProblem((2, 9, 40)))
    assert inputs.gamma is not None
    for other in (
        inputs._replace(x=inputs.x[:, 1:]),
        inputs._replace(beta=None),
        inputs._replace(gamma=inputs.gamma.float()),
    ):
        problem = LAYER_NORM.problem_of(other)
        assert ours.bound(Call(problem, other, launch, config)) == ours.run
    problem = LAYER_NORM.problem_of(inputs)
    assert ours.bound(Call(problem, inputs, lambda *a: None, config)) == ours.run


@pytest.mark.parametrize("channels", [1, 7, 8, 40, 320, 640, 768, 1280, 3072, 4096, 6144, 12288])
def test_work_items_of_a_row(channels: int) -> None:
    for config in kernel.CONFIGS:
        t = kernel.tiling(channels, config)
        assert kernel.LEAST_LANES <= t.lanes <= config.threads and not t.lanes & (t.lanes - 1)
        if t.held:
            assert t.held in kernel.HELD
            assert t.lanes * t.held * kernel.VECTOR >= channels
            assert t.lanes == kernel.LEAST_LANES or t.lanes * kernel.HELD[-1] // 2 * 8 < channels
        for rows in (1, 31, 77, 8192):
            teams = t.grid(rows, config) * (config.threads // t.lanes)
            assert rows <= teams < rows + config.threads // t.lanes


@pytest.mark.parametrize(
    ("channels", "lanes", "held"),
    [(320, 8, 5), (640, 16, 5), (768, 16, 6), (1280, 32, 5), (2048, 64, 4), (3072, 64, 6)],
)
def test_rows_that_matter_are_held_and_no_work_item_is_idle(
    channels: int, lanes: int, held: int
) -> None:
    for config in kernel.configs(ROW, channels):
        found = kernel.tiling(channels, config)
        assert (found.lanes, found.held) == (lanes, held)
        assert lanes * held * kernel.VECTOR == channels


def test_configs_hold_rows_where_one_does() -> None:
    assert kernel.configs(ROW, 4096)[0].threads == 128
    for channels in range(8, 12289, 8):
        assert all(kernel.tiling(channels, c).held for c in kernel.configs(ROW, channels))
    for channels in (5, 323, 12296, 100_001):
        assert not any(kernel.tiling(channels, c).held for c in kernel.configs(ROW, channels))


def test_what_is_usual_is_compiled_ahead() -> None:
    """In halves, with gamma and beta of the same."""
    shipped = set(kernel.shipped_specs(ROW))
    for problem in dict.fromkeys(problem for _, problem in USUAL):
        if problem.affine == problem.dtype:
            config = kernel.configs(ROW, problem.channels)[0]
            assert spec_of(problem, config) in shipped


def test_few_sizes_are_measured() -> None:
    problem = USUAL_PROBLEM
    assert LAYER_NORM.measured_as(problem).shape == (8192, 320)
    assert LAYER_NORM.measured_as(replace(problem, shape=(2, 4095, 320))).shape == (8192, 320)
    assert LAYER_NORM.measured_as(replace(problem, shape=(3, 8))).shape == (64, 8)
    assert LAYER_NORM.measured_as(replace(problem, shape=(1 << 20, 8))).shape == (16384, 8)


def test_test_problems_are_of_the_class() -> None:
    for _, problem in USUAL:
        for test in LAYER_NORM.test_problems(problem):
            assert replace(test, shape=problem.shape) == problem
            assert test.channels == problem.channels
            config = kernel.CONFIGS[0]
            assert spec_of(test, config) == spec_of(problem, config)
    assert LAYER_NORM.tolerance(USUAL_PROBLEM) < 0.01


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx90a", "gfx942"])
def test_the_kernels_compile_without_spills(gfx: str) -> None:
    """All that is shipped and searched, and what is compiled when it is needed."""
    row = arch.table()[gfx]
    specs = {*kernel.shipped_specs(row), *kernel.searched_specs(row)}
    for affine in ("none", "float32"):
        for held in (0, kernel.HELD[-1]):
            for added in kernel.ADDED_KINDS:
                specs.add(kernel.spec("bfloat16", added, affine, held, kernel.CONFIGS[0]))
    for spec in sorted(specs, key=repr):
        try:
            code = build.build(spec, row).code
        except CompileError as error:
            pytest.skip(f"no compiler for {gfx}: {error}")
        (found,) = codeobject.resources(code)
        assert found.name == spec.entry and found.wave_size == row.wave_size
        assert (found.vgpr_spills, found.sgpr_spills, found.scratch_bytes) == (0, 0, 0)
        assert found.lds_bytes <= 64
        assert codeobject.waves_per_simd(row, found, found.max_block) >= 2
