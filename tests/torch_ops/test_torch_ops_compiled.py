"""torch.compile: operators stay whole in one graph, for all sizes; mistakes are told.

A transformer block of diffusers is the example of docs/pytorch.md, see test_pytorch_md.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd import functional, torch_ops
from lib_rocm_sd.ops.conv.inputs import NextNorm
from lib_rocm_sd.ops.conv.problem import Band
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.torch_ops import table
from tests.ops.toy_op import GFX1100

if not torch_ops.KEEPS_WHOLE:
    pytest.skip("this torch is not given the operators (before 2.4)", allow_module_level=True)
try:
    from torch._dynamo.backends.debugging import aot_eager
except ImportError as error:
    pytest.skip(f"torch.compile cannot be used here: {error}", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


class Compiled:
    """`function` compiled in one graph for all sizes, and the graphs that were made."""

    def __init__(self, function: Any, **options: Any) -> None:
        torch._dynamo.reset()
        self.graphs: list[list[str]] = []
        given = {"fullgraph": True, "dynamic": True, **options}
        self._function = torch.compile(function, backend=self._backend, **given)

    def _backend(self, graph: Any, inputs: Any) -> Any:
        named = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        self.graphs.append([name.split(".")[1] for name in named if name.startswith("rocm_sd.")])
        return aot_eager(graph, inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def kept(self) -> list[str]:
        """The operators in a graph; torch may have begun it twice, for numbers that it takes as
        fixed.
        """
        first = self.graphs[0]
        assert all(names == first for names in self.graphs) and len(self.graphs) <= 2
        return first


class Every(nn.Module):
    """All that functional.py has an operator for, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(24, 16, 3, 3).to(memory_format=torch.channels_last)
        self.conv = ConvWeights(weight, torch.randn(24), in_rows=True)
        self.matrix, self.affine = torch.randn(32, 24) / 5, torch.randn(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gamma = self.affine
        norm = functional.group_norm_of(x, None, None, 4, 1e-5)
        following = NextNorm(gamma, gamma, 4, 1e-5)
        y, next_norm = functional.conv("3x3", x, self.conv, norm, next_norm=following)
        y, _ = functional.conv("3x3", y[..., :16], self.conv)
        y = functional.group_norm_silu(y.permute(0, 3, 1, 2), gamma, gamma, 4)
        tokens = y.permute(0, 2, 3, 1).flatten(1, 2)
        normed: Any = functional.layer_norm(tokens, gamma, gamma)
        normed, total = functional.layer_norm(normed, None, None, added=tokens)
        gated = functional.linear(normed, self.matrix, gate=True)
        joint = functional.linear(total, [self.matrix] * 3).unflatten(2, (3, 4, 8))
        mask = torch.ones(joint.shape[1], dtype=torch.bool)
        q, k, v = joint.unbind(2)
        mixed = functional.attention(q, k, v, mask)
        assert next_norm is not None
        return torch.cat((gated, mixed), 2).mean() + next_norm.mean()


CALLS = [
    *("group_norm_of", "conv_and_norm", "conv", "group_norm_silu", "layer_norm"),
    *("layer_norm_added", "linear", "linear", "attention"),
]


def test_one_graph_has_every_operator_for_all_sizes() -> None:
    every = Every()
    compiled = Compiled(every)
    made = []
    for shape in ((2, 6, 5, 16), (3, 8, 7, 16)):
        x = torch.randn(shape)
        assert torch.allclose(compiled(x), every(x), atol=1e-6)
        made.append(len(compiled.graphs))
    assert compiled.kept == CALLS
    assert made[1] == made[0], "the second size is another graph"


def test_gradients_go_through_it() -> None:
    weight = torch.randn(32, 16) / 4

    def call(x: torch.Tensor) -> torch.Tensor:
        heads = functional.linear(x, weight, gate=True).unflatten(2, (2, 8))
        return functional.attention(heads, heads, heads).square().mean()

    x = torch.randn(2, 5, 16, requires_grad=True)
    compiled = Compiled(call)
    (found,) = torch.autograd.grad(compiled(x), x)
    (right,) = torch.autograd.grad(call(x), x)
    assert torch.allclose(found, right, atol=1e-7)
    assert compiled.kept == ["linear", "attention"]


def test_the_log_sum_exp_is_kept_for_gradients_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a card's kernels may make them: the operator that leaves it is in the graph then."""
    asked: list[torch.device] = []

    def identified(device: torch.device) -> Any:
        asked.append(device)
        return GFX1100

    monkeypatch.setattr(table, "identify", identified)

    def call(x: torch.Tensor) -> torch.Tensor:
        return functional.attention(x, x, x).float().square().mean()

    def gradient(of: Any, x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (made,) = torch.autograd.grad(of(leaf), leaf)
        return made.double()

    torch.manual_seed(0)
    compiled = Compiled(call)
    for tokens in (5, 9):
        x = torch.randn(2, tokens, 2, 40).bfloat16()
        right = gradient(call, x.double())
        ours, torchs = (gradient(of, x) - right for of in (compiled, call))
        assert ours.norm() <= 2 * torchs.norm() and ours.abs().max() <= 2 * torchs.abs().max()
    assert compiled.kept == ["attention"] and asked


def test_what_operators_do_not_do_is_torchs_own() -> None:
    """Bands, packed weights, an output that is written over."""
    every, packed = Every(), ConvWeights(torch.randn(24, 16, 3, 3))

    def call(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        band, _ = functional.conv("3x3", x, every.conv, band=Band(1, 2))
        whole, _ = functional.conv("3x3", x, packed)
        return band, whole, functional.linear(whole.flatten(0, 2), every.matrix, None, out, out=out)

    x, out = torch.randn(1, 6, 5, 16), torch.randn(30, 32)
    right = call(x, out.clone())
    compiled = Compiled(call, fullgraph=False)
    made = compiled(x, out)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(made, right, strict=True))
    assert made[2].data_ptr() == out.data_ptr()
    assert {name for names in compiled.graphs for name in names} <= {"linear"}


def test_a_mistake_is_told_as_without_it() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        return functional.attention(q, q[..., :4], q)

    told = r"k and v must have one shape.*q \(1, 3, 2, 8\) torch.float32 cpu, k \(1, 3, 2, 4\)"
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match=told):
        Compiled(call, fullgraph=False)(q)
    with pytest.raises(RuntimeError, match="k and v must have one shape.*torch.float32 cpu"):
        Compiled(call, dynamic=False)(q)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_operators_mistake_is_torchs_error_with_our_text(fullgraph: bool, dynamic: bool) -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.rocm_sd.attention(q, q[..., :4], q)
        return made

    with pytest.raises(RuntimeError, match="k and v must have one shape"):
        Compiled(call, fullgraph=fullgraph, dynamic=dynamic)(torch.randn(1, 3, 2, 8))


def test_a_unet_of_diffusers_is_one_graph() -> None:
    """The least that has both attentions. Blocks of ours stand aside while it is traced."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from diffusers import UNet2DConditionModel

    from lib_rocm_sd.hosts.diffusers import patched

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(16,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("UpBlock2D",),
        mid_block_type=None,
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=4,
    )
    unet.eval().requires_grad_(False).to(torch.bfloat16)
    compiled = Compiled(unet)
    x, text = (torch.randn(size).bfloat16() for size in ((2, 4, 8, 8), (2, 7, 8)))
    with patched(SimpleNamespace(unet=unet), vae=False), torch.no_grad():
        right = unet(x, torch.tensor(3), text).sample
    with patched(SimpleNamespace(unet=unet), vae=False, unet=True) as patch, torch.no_grad():
        assert all(row.ours == row.total for row in patch.unet.rows())
        made = compiled(x, torch.tensor(3), text).sample
        assert torch.allclose(made, right, atol=0.01 * float(right.abs().max()))
    assert compiled.kept == ["attention", "attention"]


def test_gradients_of_norms_stay_whole() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    graphs: list[str] = []

    def noted(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    def norms(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        normed, total = functional.layer_norm(x, gamma, None, added=x)
        image = functional.group_norm_silu(normed[..., None], gamma, gamma, 2)
        made = functional.layer_norm(image[..., 0] + total, None, None)
        assert isinstance(made, torch.Tensor)
        return made.square().sum()

    torch._dynamo.reset()
    given = [torch.randn(shape, requires_grad=True) for shape in ((2, 8, 8), (8,))]
    backend = aot_autograd(fw_compiler=noted, bw_compiler=noted)
    compiled = torch.compile(norms, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(*given), given)
    forward, backward = graphs
    for name in ("layer_norm", "layer_norm_added", "group_norm_silu"):
        assert f"rocm_sd.{name}.default" in forward
        assert f"rocm_sd.{name}_backward.default" in backward
    for mine, right in zip(found, torch.autograd.grad(norms(*given), given), strict=True):
        assert torch.allclose(mine, right, atol=1e-4)
