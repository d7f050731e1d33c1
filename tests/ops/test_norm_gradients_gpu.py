"""Both norms' gradients by kernels on a real GPU: every case, through the engine, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from tests.ops.gradients import displaced, faults, same
from tests.ops.running import compute
from tests.ops.toy_op import User

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
NORMS = (LAYER_NORM_BACKWARD, GROUP_NORM_BACKWARD)
EVERY = [(op, p) for op in NORMS for p in (*op.cases, *(problem for _, problem in op.usual))]
DISPLACED = [(op, p) for op in NORMS for p in (op.cases[1], op.usual[0][1])]


def named(item: Any) -> str:
    return str(getattr(item, "name", item))


def run(op: Any, launch: Launch, inputs: Any) -> Any:
    (config,) = op.variants[0].configs(identify(DEVICE).arch, op.problem_of(inputs))
    with torch.no_grad():
        return compute(op, op.variants[0], launch, config, inputs)


@pytest.mark.parametrize(("op", "problem"), EVERY, ids=named)
def test_every_case_is_right_and_repeats_to_the_bit(launch: Launch, op: Any, problem: Any) -> None:
    inputs = op.make_inputs(problem, DEVICE, 3)
    made = run(op, launch, inputs)
    assert faults(op, made, inputs) == []
    assert all(same(run(op, launch, inputs), made) for _ in range(3))


@pytest.mark.parametrize(("op", "problem"), DISPLACED, ids=named)
def test_misaligned_tensors(launch: Launch, op: Any, problem: Any) -> None:
    inputs = displaced(op.make_inputs(problem, DEVICE, 3))
    assert faults(op, run(op, launch, inputs), inputs) == []


@pytest.mark.parametrize("op", NORMS, ids=named)
def test_the_engine_runs_ours(op: Any) -> None:
    user = User(Engine())
    inputs = op.make_inputs(op.usual[0][1], DEVICE, 3)
    with torch.no_grad():
        assert faults(op, user.run(op, inputs), inputs) == []
    (row,) = user.session.report.snapshot()["rows"]
    assert row["variant"] == "rocm_sd"
