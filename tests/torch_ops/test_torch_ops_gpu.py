"""The operators on a real GPU: torch's own checks over every case, and Inductor's graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd import functional, torch_ops
from lib_rocm_sd.engine.session import DEFAULT
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.inputs import NextNorm
from lib_rocm_sd.ops.conv.weights import ConvWeights
from tests.torch_ops.operators import call_of, every_case

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
PARTS = 8
EVERY = list(every_case())


@pytest.mark.skipif(
    not hasattr(torch.library, "opcheck"), reason="this torch has no opcheck (before 2.4)"
)
@pytest.mark.parametrize("part", range(PARTS))
def test_torchs_own_checks_pass_for_every_case(part: int) -> None:
    wrong = {}
    for op, problem in EVERY[part::PARTS]:
        found = _checked(op, problem)
        if set(found.values()) != {"SUCCESS"}:
            wrong[f"{op.name}: {problem}"] = found
        torch.cuda.empty_cache()
    assert wrong == {}


def _checked(op: Op[Any, Any], problem: Any) -> dict[str, str]:
    with torch.no_grad():
        operator, arguments, _ = call_of(op, problem, device=DEVICE)
        found: dict[str, str] = torch.library.opcheck(operator, arguments, raise_exception=False)
    return found


class Block(nn.Module):
    """A residual block and a transformer's, made of the operators."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> torch.Tensor:
            fan = max(1, torch.Size(shape[1:]).numel())
            return (torch.randn(shape, generator=generator) * fan**-0.5).half().to(DEVICE)

        weight = drawn(channels, channels, 3, 3).to(memory_format=torch.channels_last)
        self.conv = ConvWeights(weight, drawn(channels), in_rows=True)
        self.qkv = [nn.Parameter(drawn(channels, channels)) for _ in range(3)]
        self.gated = nn.Parameter(drawn(2 * channels, channels))
        self.affine = drawn(channels)
        self.heads = channels // 40
        for index, weight in enumerate((*self.qkv, self.gated)):
            self.register_parameter(f"weight_{index}", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, H, W, C)."""
        gamma = self.affine
        norm = functional.group_norm_of(x, gamma, gamma, 32, 1e-5)
        following = NextNorm(gamma, gamma, 32, 1e-5)
        y, _ = functional.conv("3x3", x, self.conv, norm, next_norm=following)
        tokens = y.flatten(1, 2)
        normed: Any = functional.layer_norm(tokens, gamma, gamma)
        joint = functional.linear(normed, self.qkv).unflatten(2, (3, self.heads, 40))
        mixed = functional.attention(*joint.unbind(2))
        return functional.linear(mixed, self.gated, residual=tokens, gate=True)


@pytest.fixture
def skipped() -> Iterator[Any]:
    """How many graphs Inductor has given up."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["inductor"]["cudagraph_skips"]
    torch._dynamo.reset()


def calls() -> int:
    """Of all ops, that Python made."""
    return sum(row["calls"] for row in DEFAULT.report.snapshot()["rows"])


def near(made: torch.Tensor, right: torch.Tensor) -> bool:
    return float((made - right).abs().max()) <= 4e-3 * float(right.abs().max())


@pytest.mark.skipif(not torch_ops.KEEPS_WHOLE, reason="this torch is not given the operators")
def test_the_graphs_of_inductor_hold_ours(skipped: Any) -> None:
    """After a warm-up and the capture no call goes through Python, and new values count."""
    block = Block(320)
    inputs = [torch.randn(2, 16, 16, 320, device=DEVICE).half() for _ in range(6)]
    with torch.no_grad():
        right = [block(x) for x in inputs]
        compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
        made = [compiled(x).clone() for x in inputs[:4]]
        before = calls()
        made += [compiled(x).clone() for x in inputs[4:]]
        assert calls() == before
    assert skipped() == 0
    assert all(near(*pair) for pair in zip(made, right, strict=True))


@pytest.mark.skipif(not torch_ops.KEEPS_WHOLE, reason="this torch is not given the operators")
def test_gradients_within_the_graphs_of_inductor(skipped: Any) -> None:
    """All of torch's first: eager gradients between two steps are not for Inductor's graphs."""
    block = Block(320)
    compiled = torch.compile(block, mode="reduce-overhead")
    inputs = [torch.randn(2, 16, 16, 320, device=DEVICE).half() for _ in range(5)]

    def gradient(call: Any, x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (call(leaf).float().square().sum() * 0.01).backward()
        assert leaf.grad is not None
        return leaf.grad.float()

    right = [gradient(block, x) for x in inputs]
    made = [gradient(compiled, x) for x in inputs]
    assert all(near(*pair) for pair in zip(made, right, strict=True))
    assert skipped() == 0


def test_a_graph_of_ones_own_reads_the_weights() -> None:
    """Not what an eager call before kept of them: a copy in channels-last, a bias in float32."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 9).half().to(DEVICE)

    x, weight, bias = drawn(1, 16, 16, 32), drawn(32, 32, 3, 3), drawn(32)
    with torch.no_grad():
        first = torch.ops.rocm_sd.conv(x, weight, bias)
        side, graph = torch.cuda.Stream(DEVICE), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(side):
            torch.ops.rocm_sd.conv(x, weight, bias)
        torch.cuda.synchronize(DEVICE)
        with torch.cuda.graph(graph):
            made = torch.ops.rocm_sd.conv(x, weight, bias)
        weight.mul_(2)
        bias.add_(1)
        graph.replay()
        right = torch.ops.rocm_sd.conv(x, weight, bias)
    assert near(made.float(), right.float()) and not near(first.float(), right.float())
