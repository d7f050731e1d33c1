"""The GroupNorm of one launch on a real GPU: every config, a UNet's images, many images.

Bound calls of all steps on several streams, and in a graph.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.device import identify
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.group_norm import whole
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs, NormInputs
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, NORM, STATISTICS
from lib_rocm_sd.ops.group_norm.ours import KernelGroupNorm, KernelNorm
from lib_rocm_sd.ops.group_norm.problem import (
    ADDED,
    ODD,
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
)
from lib_rocm_sd.ops.group_norm.torch import TorchGroupNorm
from tests.ops.running import bind, compute, error

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
UNETS = tuple(
    GroupNormProblem(2, channels, side, side, dtype, silu=True, affine=dtype)
    for dtype in ("float16", "bfloat16")
    for channels, side in (
        *((1280, 8), (2560, 8), (640, 16), (1280, 16), (1920, 16), (2560, 16)),
        *((320, 32), (640, 32), (960, 32), (1280, 32), (1920, 32), (2560, 32)),
        *((320, 64), (960, 64), (640, 64)),
    )
)


def arch() -> Arch:
    found = identify(DEVICE).arch
    assert found is not None
    return found


def allowed(exact: torch.Tensor, inputs: Any) -> float:
    """Twice the error that torch makes with the same inputs on the CPU."""
    on_cpu: list[Any] = [item.cpu() if isinstance(item, torch.Tensor) else item for item in inputs]
    theirs = compute(GROUP_NORM_SILU, TorchGroupNorm(), None, None, GroupNormInputs(*on_cpu))
    return 2 * error(theirs, exact) + 1e-6


def check(launch: Launch, config: Any, problem: GroupNormProblem) -> None:
    inputs = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    exact = GROUP_NORM_SILU.reference(inputs)
    output = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, config, inputs)
    assert output.stride() == inputs.x.stride()
    assert error(output, exact) <= allowed(exact, inputs)
    of_norm = NormInputs(*inputs[:5])
    exact = NORM.reference(of_norm)
    norm = compute(NORM, KernelNorm(), launch, config, of_norm)
    assert error(norm, exact) <= 1e-5 * exact.abs().max().item()


@pytest.mark.parametrize("problem", [*UNETS, *ODD, *ADDED], ids=str)
def test_images_of_a_unet(launch: Launch, problem: GroupNormProblem) -> None:
    for config in KernelGroupNorm().configs(arch(), problem):
        check(launch, config, problem)


@pytest.mark.parametrize("config", whole.CONFIGS, ids=str)
def test_every_config_full(launch: Launch, config: whole.WholeConfig) -> None:
    if not whole.fits(arch(), config, 8):
        pytest.skip("this GPU has not enough registers for it")
    for channels, groups in ((320, 32), (96, 3), (88, 11), (24, 8)):
        width = whole.tiling(channels, groups, 8).width
        for pixels in (config.pixels(width), config.pixels(width) - 5, 3):
            check(launch, config, GroupNormProblem(2, channels, 1, pixels, groups=groups))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_stay_in_their_group(launch: Launch, value: float) -> None:
    problem = GroupNormProblem(2, 320, 32, 32, silu=True)
    inputs = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    inputs.x[1, 17, 20, 3] = value
    config = KernelGroupNorm().configs(arch(), problem)[0]
    lost = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, config, inputs).isnan()
    assert lost[1, 10:20].all() and lost.sum().item() == 10 * 32 * 32


def test_indices_beyond_two_to_the_31(launch: Launch) -> None:
    """2.4e9 values; only the last image is not constant."""
    batch, channels, side = 1800, 1280, 32
    need = 2 * batch * channels * side * side * 2 + (4 << 30)
    if torch.cuda.mem_get_info(DEVICE)[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free device memory")
    x = torch.ones((batch, side, side, channels), dtype=torch.float16, device=DEVICE)
    problem = GroupNormProblem(1, channels, side, side, silu=True)
    last = GROUP_NORM_SILU.make_inputs(problem, DEVICE, 3)
    every = last._replace(x=x.permute(0, 3, 1, 2))
    every.x[-1:].copy_(last.x)
    config = KernelGroupNorm().configs(arch(), problem)[0]
    assert isinstance(config, whole.WholeConfig)
    output = compute(GROUP_NORM_SILU, KernelGroupNorm(), launch, config, every)
    exact = GROUP_NORM_SILU.reference(last)
    assert error(output[-1:], exact) <= 4e-3 * exact.abs().max().item()
    constant = GROUP_NORM_SILU.reference(last._replace(x=every.x[:1, :, :2, :2]))
    assert error(output[batch // 2, :, -1, -1], constant[0, :, 0, 0]) <= 4e-3


BOUND: tuple[tuple[Any, Any], ...] = (
    (STATISTICS, ImageProblem(2, 320, 64, 64)),
    (FINALIZE, FinalizeProblem(2, 300, 1280, 32)),
    (APPLY, ApplyProblem(2, 320, 64, 64, silu=True)),
    (NORM, NormProblem(2, 320, 64, 64)),
    (NORM, NormProblem(2, 640, 32, 32)),
    (GROUP_NORM_SILU, GroupNormProblem(2, 320, 64, 64, silu=True)),
    (GROUP_NORM_SILU, GroupNormProblem(2, 640, 32, 32, silu=True)),
)


@pytest.mark.parametrize(
    ("op", "problem"), BOUND, ids=lambda item: getattr(item, "name", str(item))
)
def test_bound_calls_on_several_streams(launch: Launch, op: Any, problem: Any) -> None:
    ours = op.variants[0]
    config = ours.configs(arch(), problem)[0]
    drawn = [op.make_inputs(problem, DEVICE, seed) for seed in range(4)]
    expected = [compute(op, ours, launch, config, inputs) for inputs in drawn]
    bound = bind(op, ours, launch, config, drawn[0])
    streams = [torch.cuda.Stream(DEVICE) for _ in drawn]
    torch.cuda.synchronize(DEVICE)
    for _ in range(20):
        made = []
        for stream, inputs in zip(streams, drawn, strict=True):
            with torch.cuda.stream(stream):
                made.append(bound(inputs))
        torch.cuda.synchronize(DEVICE)
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize(
    ("op", "problem"), BOUND, ids=lambda item: getattr(item, "name", str(item))
)
def test_a_bound_call_in_a_graph(launch: Launch, op: Any, problem: Any) -> None:
    ours = op.variants[0]
    config = ours.configs(arch(), problem)[0]
    inputs, others = (op.make_inputs(problem, DEVICE, seed) for seed in (1, 2))
    bound = bind(op, ours, launch, config, inputs)
    bound(inputs)
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = bound(inputs)
    bound(others)
    expected = compute(op, ours, launch, config, others)
    for mine, other in zip(inputs, others, strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(other)
    graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert torch.equal(made, expected)
