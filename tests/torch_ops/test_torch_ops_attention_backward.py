"""The gradient of the operator `attention` by our kernels, the engine's own way but for the GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import table
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.route import tensors_of
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.torch_ops import register
from lib_rocm_sd.torch_ops import table as operators
from tests.ops.attention_backward.judge import drawn, faults
from tests.ops.toy_op import GFX1100, engine_of
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

pytestmark = pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
ROCM: Any = torch.ops.rocm_sd
PROBLEM = AttentionProblem(1, 2, 33, 45, 40)


class Counting(ShimLaunch):
    """gfx1100 under the shim. `entries`: of what was launched."""

    def __init__(self) -> None:
        super().__init__(table()["gfx1100"])
        self.entries: list[str] = []

    def __call__(
        self,
        spec: KernelSpec,
        grid: int,
        block: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None:
        self.entries.append(spec.entry)
        super().__call__(spec, grid, block, params, device)


class Showing:
    """An engine, of which kernels under the shim may touch what it is given and makes. Within an
    operator of torch's nobody else could show it.
    """

    def __init__(self, engine: Engine, launch: Counting) -> None:
        self.engine = engine
        self.launch = launch

    def route(self, op: Any, inputs: Any) -> Any:
        with self.launch.knows():
            return self.engine.route(op, inputs)

    def follow(self, route: Any, op: Any, inputs: Any, session: Any) -> Any:
        with self.launch.knows(*tensors_of(inputs)):
            return self.engine.follow(route, op, inputs, session)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """What the operators' engine launches by."""
    found = Counting()
    user, _ = engine_of(GFX1100, launcher=lambda device, row: found)
    monkeypatch.setattr(register, "engine", Showing(user.engine, found))
    monkeypatch.setattr(operators, "identify", lambda device: GFX1100)
    return found


def test_the_engine_tests_and_runs_the_kernels(launch: Counting) -> None:
    engine, report = engine_of(GFX1100, launcher=lambda device, row: launch)
    with launch.knows():
        inputs = drawn(PROBLEM)
        made = engine.run(ATTENTION_BACKWARD, inputs)
    (row,) = report.snapshot()["rows"]
    assert (row["variant"], report.snapshot()["events"]) == ("rocm_sd", [])
    assert faults(made, inputs) == []


@pytest.mark.parametrize("mask", ["none", "float32"])
def test_backward_is_ours_and_as_good_as_torchs(launch: Counting, mask: str) -> None:
    given = drawn(AttentionProblem(1, 2, 33, 45, 40, "float16", mask))
    q, k, v = (t.clone().requires_grad_() for t in given[:3])
    output = ROCM.attention(q, k, v, given.mask)
    assert set(launch.entries) == {"attention_forward"}
    of_q, of_k, of_v = torch.autograd.grad(output, (q, k, v), given.grad)
    assert launch.entries[-2:] == ["attention_backward"] * 2
    assert faults((of_q, of_k, of_v), given._replace(output=output.detach())) == []


def test_only_what_is_wanted_is_given(launch: Counting) -> None:
    given = drawn(PROBLEM)
    k = given.k.clone().requires_grad_()
    ROCM.attention(given.q, k, given.v).backward(given.grad)
    assert launch.entries[-1] == "attention_backward"
    assert k.grad is not None and given.q.grad is given.v.grad is None


def test_a_mask_whose_gradient_is_wanted_leaves_it_to_torch(launch: Counting) -> None:
    given = drawn(PROBLEM)
    mask = torch.zeros(33, 45, dtype=torch.float16).requires_grad_()
    q = given.q.clone().requires_grad_()
    output = ROCM.attention(q, given.k, given.v, mask)
    found = torch.autograd.grad(output, (q, mask), given.grad)
    assert launch.entries[-1] == "attention_forward"
    assert found[1].shape == mask.shape and found[1].any()


def test_what_the_kernel_refuses_torch_computes(launch: Counting) -> None:
    given = drawn(AttentionProblem(1, 1, 9, 13, 20))
    q = given.q.clone().requires_grad_()
    output = ROCM.attention(q, given.k, given.v)
    (found,) = torch.autograd.grad(output, q, given.grad)
    assert launch.entries == []
    exact = ATTENTION_BACKWARD.reference(given)[0]
    assert float((found.double() - exact).abs().max()) <= 4e-3 * float(exact.abs().max())
