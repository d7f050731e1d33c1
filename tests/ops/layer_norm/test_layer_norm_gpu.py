"""The LayerNorm kernel on a real GPU: every form and config, awkward places, large indices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd import functional
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.layer_norm import kernel
from lib_rocm_sd.ops.layer_norm.biased import BiasedProblem
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM, LAYER_NORM_BIASED
from lib_rocm_sd.ops.layer_norm.ours import KernelLayerNorm
from lib_rocm_sd.ops.layer_norm.problem import ODD, USUAL, LayerNormProblem
from tests.ops.layer_norm.judge import apart, faults, misaligned, op_of, pair_of, placed
from tests.ops.running import bind, compute
from tests.ops.toy_op import User

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
CASES = [*ODD, *dict.fromkeys(problem for _, problem in USUAL)]


def draw(problem: LayerNormProblem, seed: int = 3) -> Any:
    return op_of(problem).make_inputs(problem, DEVICE, seed)


def made(launch: Launch, inputs: Any, index: int = 0) -> Any:
    op = op_of(inputs)
    return compute(op, op.variants[0], launch, kernel.CONFIGS[index], inputs)


@pytest.mark.parametrize("problem", CASES, ids=str)
def test_every_case_and_config(launch: Launch, problem: LayerNormProblem) -> None:
    for changed in (problem, replace(problem, added=not problem.added)):
        inputs = draw(changed)
        for index in range(len(kernel.CONFIGS)):
            assert faults(made(launch, inputs, index), inputs) == []


@pytest.mark.parametrize("problem", LAYER_NORM_BIASED.cases, ids=str)
def test_every_case_with_biases(launch: Launch, problem: BiasedProblem) -> None:
    for layout in ("plain", "misaligned", "apart"):
        inputs = placed(draw(problem), layout)
        for index in range(len(kernel.CONFIGS)):
            assert faults(made(launch, inputs, index), inputs) == []


@pytest.mark.parametrize("affine", kernel.AFFINE_KINDS)
@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("channels", [8, 24, 200, 323, 2048, 4104, 6152, 12296])
def test_lengths_and_kinds(launch: Launch, channels: int, dtype: str, affine: str) -> None:
    inputs = draw(LayerNormProblem((3, 67, channels), dtype, channels % 3 == 0, affine))
    for layout in ("plain", "misaligned", "apart"):
        for index in range(len(kernel.CONFIGS)):
            there = placed(inputs, layout)
            assert faults(made(launch, there, index), inputs) == []


@pytest.mark.parametrize("channels", [320, 3136, 2051])
@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [("float16", 2000.0, 3.0), ("float16", 60.0, 0.1), ("bfloat16", 1000.0, 20.0)],
)
def test_a_mean_far_from_zero(
    launch: Launch, dtype: str, mean: float, std: float, channels: int
) -> None:
    inputs = draw(LayerNormProblem((257, channels), dtype, affine="none"))
    values = torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(5)) * std + mean
    inputs = inputs._replace(x=values.to(inputs.x.dtype).to(DEVICE))
    assert faults(made(launch, inputs), inputs) == []


@pytest.mark.parametrize("channels", [320, 3136, 2051])
def test_a_constant_row_gives_beta(launch: Launch, channels: int) -> None:
    inputs = draw(LayerNormProblem((9, channels)))
    assert inputs.beta is not None
    output = made(launch, inputs._replace(x=inputs.x.fill_(-2000.0)))
    assert torch.equal(output, inputs.beta.expand(output.shape))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("channels", [320, 3136, 2051])
def test_values_that_are_no_numbers_stay_in_their_row(
    launch: Launch, channels: int, value: float
) -> None:
    inputs = draw(LayerNormProblem((40, channels), added=True))
    inputs.x[17, 5] = value
    norm, total = pair_of(made(launch, inputs))
    assert norm[17].isnan().all() and norm.isnan().sum().item() == channels
    assert total is not None and (~total.isfinite()).sum().item() == 1


@pytest.mark.parametrize("channels", [320, 323])
def test_indices_beyond_two_to_the_31_and_many_work_groups(launch: Launch, channels: int) -> None:
    """More than 2^32 values, and 65,535 work-groups; only the last rows are not constant."""
    rows = (1 << 32) // channels + 5
    need = 4 * rows * channels * 2 + (4 << 30)
    if torch.cuda.mem_get_info(DEVICE)[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free device memory")
    x = torch.ones((rows, channels), dtype=torch.float16, device=DEVICE)
    last = draw(LayerNormProblem((33, channels), added=True))
    assert last.added is not None and last.beta is not None
    added = torch.ones_like(x)
    x[-33:], added[-33:] = last.x, last.added
    norm, total = made(launch, last._replace(x=x, added=added))
    assert faults((norm[-33:], total[-33:]), last) == []
    middle = rows // 2
    assert torch.equal(norm[middle], last.beta) and (total[middle] == 2).all()


def test_the_result_is_the_same_every_time(launch: Launch) -> None:
    for channels in (320, 3136, 2051):
        inputs = draw(LayerNormProblem((2, 1024, channels), added=True))
        first, total = made(launch, inputs)
        for _ in range(20):
            again, again_total = made(launch, inputs)
            assert torch.equal(first, again) and torch.equal(total, again_total)


def test_a_bound_call_takes_other_tensors_of_its_key(launch: Launch) -> None:
    for added in (True, False):
        inputs = draw(LayerNormProblem((2, 77, 768), added=added))
        call = bind(LAYER_NORM, KernelLayerNorm(), launch, kernel.CONFIGS[0], inputs)
        for seed in range(3):
            others = draw(LayerNormProblem((2, 77, 768), added=added), seed)
            if seed == 1:
                others = others._replace(x=misaligned(others.x), eps=0.1)
            assert faults(call(others), others) == []


@pytest.mark.parametrize("level", ["Auto", "Performance", "Memory"])
@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_the_engine_runs_the_kernel_at_every_level(level: str) -> None:
    user = User(Engine(), level)
    for added in (True, False):
        inputs = draw(LayerNormProblem((2, 300, 640), added=added))
        for _ in range(2):
            assert faults(user.run(LAYER_NORM, inputs), inputs) == []
    rows = user.session.report.snapshot()
    assert rows["events"] == []
    if level == "Auto":
        assert {row["variant"] for row in rows["rows"]} == {"rocm_sd"}


def test_the_function() -> None:
    inputs = draw(LayerNormProblem((2, 300, 640), added=True))
    x, gamma, beta, eps, added = inputs
    assert added is not None
    assert faults(functional.layer_norm(x, gamma, beta, eps, added), inputs) == []
    plain = inputs._replace(added=None)
    assert faults(functional.layer_norm(x, gamma, beta, eps), plain) == []
    wide = plain._replace(x=apart(x, 8)[:, 1:])
    assert faults(functional.layer_norm(wide.x, gamma, beta), wide) == []
