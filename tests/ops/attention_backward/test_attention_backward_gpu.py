"""The gradients' kernel on a real GPU: every head_dim and config, layouts, masks, training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import torch_ops
from lib_rocm_sd.device import identify
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import kernel
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.attention_backward.problem import ODD, USUAL
from lib_rocm_sd.runtime import launcher
from tests.ops.attention.layouts import on_device
from tests.ops.attention_backward.judge import drawn, faults
from tests.ops.running import compute

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
ROCM: Any = torch.ops.rocm_sd

Run = Callable[..., Grads]


@pytest.fixture(scope="module")
def run() -> Run:
    """Our kernel with the `index`-th config of its search space, no engine between."""
    assert torch_ops.LIBRARY is not None
    arch = identify(DEVICE).arch
    assert arch is not None
    launch = launcher.launcher_for(DEVICE, arch)

    def gradients(inputs: AttentionBackwardInputs, index: int = 0) -> Grads:
        config = kernel.configs(arch, inputs.q.shape[3])[index]
        made: Grads = compute(ATTENTION_BACKWARD, MatrixBackward(), launch, config, inputs)
        return made

    return gradients


def moved(inputs: AttentionBackwardInputs) -> AttentionBackwardInputs:
    """On the GPU, where they lie as they did."""
    q, k, v = (on_device(t, DEVICE) for t in inputs[:3])
    output, grad, lse = (t.to(DEVICE) for t in inputs[3:6])
    mask = None if inputs.mask is None else inputs.mask.to(DEVICE)
    return AttentionBackwardInputs(q, k, v, output, grad, lse, mask, inputs.scale)


@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_and_config(run: Run, head_dim: int, dtype: str) -> None:
    arch = identify(DEVICE).arch
    assert arch is not None
    inputs = moved(drawn(AttentionProblem(2, 3, 113, 203, head_dim, dtype)))
    for index in range(len(kernel.configs(arch, head_dim))):
        assert faults(run(inputs, index), inputs) == [], index


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_the_odd_cases(run: Run, problem: AttentionProblem) -> None:
    inputs = moved(drawn(problem))
    assert faults(run(inputs), inputs) == []


@pytest.mark.parametrize("problem", [problem for _, problem in USUAL[1:4]], ids=str)
def test_usual_cases(run: Run, problem: AttentionProblem) -> None:
    inputs = ATTENTION_BACKWARD.make_inputs(replace(problem, batch=1), DEVICE, 3)
    assert faults(run(inputs), inputs) == []


@pytest.mark.parametrize("layout", ["heads first", "packed", "misaligned", "ragged rows"])
def test_layouts(run: Run, layout: str) -> None:
    inputs = moved(drawn(AttentionProblem(2, 3, 65, 77, 40), layout))
    assert faults(run(inputs), inputs) == []


@pytest.mark.parametrize("mask", ["bool", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [40, 64, 160])
def test_masks(run: Run, head_dim: int, mask: str) -> None:
    inputs = moved(drawn(AttentionProblem(2, 2, 67, 131, head_dim, "float16", mask)))
    assert faults(run(inputs), inputs) == []


def test_more_than_65535_work_groups(run: Run) -> None:
    inputs = ATTENTION_BACKWARD.make_inputs(AttentionProblem(70_001, 1, 3, 5, 8), DEVICE, 7)
    assert faults(run(inputs), inputs) == []


def test_the_bits_are_the_same_every_time(run: Run) -> None:
    inputs = ATTENTION_BACKWARD.make_inputs(AttentionProblem(2, 8, 1024, 1024, 80), DEVICE, 3)
    first = run(inputs)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(inputs), first, strict=True))


def test_a_captured_graph(run: Run) -> None:
    inputs = ATTENTION_BACKWARD.make_inputs(AttentionProblem(1, 2, 64, 64, 64), DEVICE, 3)
    expected = run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs)
    graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [40, 64, 80])
def test_the_operator_errs_no_more_than_twice_as_torch(head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cpu").manual_seed(1)
    shapes = ((2, 333, 2, head_dim), (2, 77, 2, head_dim), (2, 77, 2, head_dim))
    halves = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    given = [t.requires_grad_() for t in halves]
    exact = [t.detach().double().requires_grad_() for t in halves]
    grad = torch.randn((2, 333, 2 * head_dim), generator=generator).to(DEVICE, dtype)
    right = torch.autograd.grad(_sdpa(*exact), exact, grad.double())
    beside = torch.autograd.grad(_sdpa(*given), given, grad)
    found = torch.autograd.grad(ROCM.attention(*given), given, grad)
    for mine, other, true in zip(found, beside, right, strict=True):
        errors = [float((item.double() - true).abs().max()) for item in (mine, other)]
        assert errors[0] <= 2 * errors[1] + 1e-9


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_lora_of_the_little_model_learns_as_with_torchs() -> None:
    """Losses of twenty steps beside float32's: no further off than twice what torch's own are."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from tests.ops.attention_backward.lora import losses

    steps, dtype = 20, torch.bfloat16
    exact = losses(DEVICE, torch.float32, _sdpa, steps)
    theirs = losses(DEVICE, dtype, _sdpa, steps)
    ours = losses(DEVICE, dtype, ROCM.attention, steps)
    off = [max(abs(a - b) for a, b in zip(each, exact, strict=True)) for each in (ours, theirs)]
    assert off[0] <= 2 * off[1] + 1e-3 * exact[0]
    assert ours[-1] < 0.97 * ours[0]
