"""The GroupNorm kernels on a real GPU: every form and config, large images, large indices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd import functional
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.group_norm import formula as group_norm_formula
from lib_rocm_sd.ops.group_norm import kernel
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
)
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, STATISTICS
from lib_rocm_sd.ops.group_norm.ours import KernelGroupNorm
from lib_rocm_sd.ops.group_norm.problem import ODD, USUAL, FinalizeProblem, GroupNormProblem
from lib_rocm_sd.ops.group_norm.torch import TorchGroupNorm
from tests.ops.running import compute, error
from tests.ops.toy_op import User

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
CPU = torch.device("cpu")


def configs() -> tuple[kernel.GroupNormConfig, ...]:
    arch = identify(DEVICE).arch
    assert arch is not None
    return kernel.configs(arch)


def allowed(exact: torch.Tensor, *inputs: Any) -> float:
    """Twice the error that torch makes with the same inputs on the CPU."""
    on_cpu: list[Any] = [item.cpu() if isinstance(item, torch.Tensor) else item for item in inputs]
    theirs = compute(GROUP_NORM_SILU, TorchGroupNorm(), None, None, GroupNormInputs(*on_cpu))
    return 2 * error(theirs, exact) + 1e-6


@pytest.mark.parametrize("problem", [*ODD, *(problem for _, problem in USUAL[2:])], ids=str)
def test_every_case_and_config(launch: Launch, problem: GroupNormProblem) -> None:
    inputs = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    exact = GROUP_NORM_SILU.reference(inputs)
    most = allowed(exact, *inputs)
    for config in configs():
        output = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, config, inputs)
        assert output.stride() == inputs[0].stride()
        assert error(output, exact) <= most


@pytest.mark.parametrize("channels", [8, 20, 64, 320, 520, 2560])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_channels(launch: Launch, dtype: str, channels_last: bool, channels: int) -> None:
    problem = GroupNormProblem(2, channels, 61, 83, dtype, channels_last, True, channels // 4)
    inputs = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    exact = GROUP_NORM_SILU.reference(inputs)
    output = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, configs()[0], inputs)
    assert error(output, exact) <= allowed(exact, *inputs)


@pytest.mark.parametrize("channels_last", [True, False])
def test_misaligned_views(launch: Launch, channels_last: bool) -> None:
    problem = GroupNormProblem(2, 40, 19, 37, "float16", channels_last, True, 8)
    inputs = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    x = inputs.x
    storage = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype, device=DEVICE)
    view = storage[1:].as_strided(x.shape, x.stride(), 1).copy_(x)
    exact = GROUP_NORM_SILU.reference(inputs)
    moved = inputs._replace(x=view)
    output = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, configs()[0], moved)
    assert error(output, exact) <= allowed(exact, *inputs)


@pytest.mark.parametrize("parts", [1, 7, 1024, 100_001])
def test_many_parts(launch: Launch, parts: int) -> None:
    inputs = FINALIZE.make_inputs(FinalizeProblem(1, parts, 128, 32), DEVICE, 3)
    exact = group_norm_formula.reference_norm(*inputs)
    output = launches.launch_finalize(launch, configs()[0], *inputs)
    assert error(output, exact) <= 1e-5 * exact.abs().max().item()


@pytest.mark.parametrize("channels_last", [True, False])
def test_indices_beyond_two_to_the_31_and_many_work_groups(
    launch: Launch, channels_last: bool
) -> None:
    """2.3e9 values, more than 65,535 work-groups; only the last image is not constant."""
    batch, channels, side = 70, 128, 512
    need = 2 * batch * channels * side * side * 2 + (8 << 30)
    if torch.cuda.mem_get_info(DEVICE)[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free device memory")
    shape = (batch, side, side, channels) if channels_last else (batch, channels, side, side)
    image = torch.ones(shape, dtype=torch.float16, device=DEVICE)
    x = image.permute(0, 3, 1, 2) if channels_last else image
    problem = GroupNormProblem(1, channels, side, side, "float16", channels_last, True)
    last = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    x[-1:].copy_(last.x)
    every = last._replace(x=x)
    output = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, configs()[0], every)
    exact = GROUP_NORM_SILU.reference(last)
    assert error(output[-1:], exact) <= 4e-3 * exact.abs().max().item()
    constant = GROUP_NORM_SILU.reference(last._replace(x=x[:1, :, :2, :2]))
    assert error(output[batch // 2, :, -1, -1], constant[0, :, 0, 0]) <= 4e-3


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(
    ("dtype", "mean", "std"), [("float16", 60.0, 0.1), ("bfloat16", 1000.0, 20.0)]
)
def test_a_mean_far_from_zero(
    launch: Launch, channels_last: bool, dtype: str, mean: float, std: float
) -> None:
    problem = GroupNormProblem(1, 64, 256, 256, dtype, channels_last, False, 16, "none")
    inputs = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    x = inputs.x.float()
    x = ((x - x.mean((2, 3), keepdim=True)) * std + mean).to(inputs.x.dtype)
    inputs = inputs._replace(x=x)
    exact = GROUP_NORM_SILU.reference(inputs)
    output = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, configs()[0], inputs)
    assert error(output, exact) <= allowed(exact, *inputs)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_stay_in_their_group(
    launch: Launch, channels_last: bool, value: float
) -> None:
    problem = GroupNormProblem(2, 40, 33, 65, "float16", channels_last, True, 8)
    inputs = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    inputs[0][1, 7, 20, 3] = value
    lost = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, configs()[0], inputs).isnan()
    assert lost[1, 5:10].all()
    assert lost.sum().item() == 5 * 33 * 65


def test_the_result_is_the_same_every_time(launch: Launch) -> None:
    for channels_last in (True, False):
        problem = replace(USUAL[1][1], channels_last=channels_last)
        inputs = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
        first = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, configs()[0], inputs)
        again = [
            compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, configs()[0], inputs)
            for _ in range(20)
        ]
        assert all(torch.equal(first, output) for output in again)


@pytest.mark.parametrize("level", ["Auto", "Performance", "Memory"])
@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_the_engine_runs_the_kernels_at_every_level(level: str) -> None:
    user = User(Engine(), level)
    report = user.session.report
    problem = GroupNormProblem(1, 64, 40, 40, silu=True)
    inputs = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    x, gamma, beta, groups, eps, silu, _ = inputs
    exact = GROUP_NORM_SILU.reference(inputs)
    statistics = user.run(STATISTICS, ImageInputs(x))
    norm = user.run(FINALIZE, FinalizeInputs(statistics, gamma, beta, groups, eps))
    whole, stepwise = user.run(GROUP_NORM_SILU, inputs), user.run(APPLY, ApplyInputs(x, norm, silu))
    for output in (whole, stepwise):
        assert error(output, exact) <= allowed(exact, *inputs)
    assert report.snapshot()["events"] == []
    if level == "Auto":
        assert {row["variant"] for row in report.snapshot()["rows"]} == {"rocm_sd"}


def test_the_functions_of_the_vae() -> None:
    x = torch.randn(1, 70, 90, 128, device=DEVICE).half()
    gamma, beta = torch.randn(128, device=DEVICE), torch.randn(128, device=DEVICE)
    norm = functional.group_norm_of(x, gamma, beta, 32, 1e-6)
    bands = torch.cat(
        [functional.group_norm_statistics(x[:, i : i + 32].contiguous()) for i in (0, 32, 64)], 1
    )
    assert error(functional.group_norm_finalize(bands, gamma, beta, 32, 1e-6), norm) < 1e-5
    planes = x.permute(0, 3, 1, 2)
    exact = GROUP_NORM_SILU.reference(GroupNormInputs(planes, gamma, beta, 32, 1e-6, True)).permute(
        0, 2, 3, 1
    )
    output = functional.group_norm_apply(x, norm, True)
    assert output.is_contiguous() and error(output, exact) <= 2e-3 * exact.abs().max().item()
