"""GroupNorm's gradients by kernels on a real GPU: every case, through the engine, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import ODD, USUAL
from lib_rocm_sd.runtime import launcher
from tests.ops.gradients import displaced, faults, same
from tests.ops.running import compute
from tests.ops.toy_op import User

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
OP = GROUP_NORM_BACKWARD


@pytest.fixture(scope="module")
def launch() -> Launch:
    arch = identify(DEVICE).arch
    assert arch is not None
    return launcher.launcher_for(DEVICE, arch)


def run(launch: Launch, inputs: Any) -> Any:
    (config,) = OP.variants[0].configs(identify(DEVICE).arch, OP.problem_of(inputs))
    with torch.no_grad():
        return compute(OP, OP.variants[0], launch, config, inputs)


@pytest.mark.parametrize("problem", [*ODD, *(problem for _, problem in USUAL)], ids=str)
def test_every_case_is_right_and_repeats_to_the_bit(launch: Launch, problem: Any) -> None:
    inputs = OP.make_inputs(problem, DEVICE, 3)
    made = run(launch, inputs)
    assert faults(OP, made, inputs) == []
    assert all(same(run(launch, inputs), made) for _ in range(3))


@pytest.mark.parametrize("problem", [ODD[1], USUAL[0][1]], ids=str)
def test_misaligned_tensors(launch: Launch, problem: Any) -> None:
    inputs = displaced(OP.make_inputs(problem, DEVICE, 3))
    assert faults(OP, run(launch, inputs), inputs) == []


def test_the_engine_runs_ours() -> None:
    user = User(Engine())
    inputs = OP.make_inputs(USUAL[0][1], DEVICE, 3)
    with torch.no_grad():
        assert faults(OP, user.run(OP, inputs), inputs) == []
    (row,) = user.session.report.snapshot()["rows"]
    assert row["variant"] == "rocm_sd"
