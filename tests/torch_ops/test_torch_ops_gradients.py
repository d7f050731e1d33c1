"""Gradients of the operators: by differences in float64, in half beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import torch_ops
from lib_rocm_sd.engine.engine import Engine, engine
from lib_rocm_sd.ops.attention.formula import attend
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.group_norm_backward.torch import TorchGroupNormBackward
from lib_rocm_sd.ops.layer_norm_backward.torch import TorchLayerNormBackward
from lib_rocm_sd.torch_ops import register
from tests.vae.vae_models import needs_half

F64 = torch.float64
ROCM: Any = torch.ops.rocm_sd


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64).requires_grad_()


def image(*shape: int) -> torch.Tensor:
    return drawn(*shape).detach().to(memory_format=torch.channels_last).requires_grad_()


FORMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "attention": (
        ROCM.attention,
        (drawn(1, 3, 2, 4), drawn(1, 2, 2, 4), drawn(1, 2, 2, 4, seed=1)),
    ),
    "attention, added mask": (
        lambda q, k, mask: ROCM.attention(q, k, k, mask, 0.7),
        (drawn(1, 3, 1, 2), drawn(1, 2, 1, 2), drawn(3, 2)),
    ),
    "attention, a tensor given thrice": (lambda q: ROCM.attention(q, q, q), (drawn(1, 3, 1, 2),)),
    "attention_and_lse": (
        ROCM.attention_and_lse,
        (drawn(1, 3, 1, 2), drawn(1, 2, 1, 2), drawn(1, 2, 1, 2, seed=1)),
    ),
    "attention_backward": (
        lambda q, k, v, grad: ROCM.attention_backward(
            *(q, k, v, torch.zeros_like(grad), grad, grad.new_zeros(1, 1, 3))
        ),
        (drawn(1, 3, 1, 2), drawn(1, 2, 1, 2), drawn(1, 2, 1, 2, seed=1), drawn(1, 3, 2)),
    ),
    "layer_norm": (ROCM.layer_norm, (drawn(3, 5), drawn(5), drawn(5, seed=1))),
    "layer_norm_added": (
        ROCM.layer_norm_added,
        (drawn(2, 4), drawn(2, 4, seed=1), drawn(4), drawn(4, seed=1)),
    ),
    "linear": (ROCM.linear, (drawn(2, 3, 4), drawn(5, 4), drawn(5), drawn(2, 3, 5))),
    "linear, gate": (
        lambda x, w, b: ROCM.linear(x, w, b, None, True),
        (drawn(3, 4), drawn(6, 4), drawn(6)),
    ),
    "linear, three weights": (
        lambda x, a, b, c, d: ROCM.linear(x, a, None, None, False, b, d, c),
        (drawn(2, 3), drawn(2, 3), drawn(3, 3), drawn(1, 3), drawn(3)),
    ),
    "group_norm_silu": (
        lambda x, g, b: ROCM.group_norm_silu(x, g, b, 2),
        (drawn(2, 4, 2, 3), drawn(4), drawn(4, seed=1)),
    ),
    "group_norm_silu, channels last": (
        lambda x: ROCM.group_norm_silu(x, None, None, 2),
        (image(1, 4, 2, 3),),
    ),
    "group_norm_of": (
        lambda x, g, b: ROCM.group_norm_of(x, g, b, 2),
        (drawn(2, 2, 3, 4), drawn(4), drawn(4, seed=1)),
    ),
    "layer_norm_backward": (
        lambda g, x, w: ROCM.layer_norm_backward(g, x, w),
        (drawn(3, 5), drawn(3, 5, seed=1), drawn(5)),
    ),
    "layer_norm_added_backward": (
        lambda g, s, x, a: ROCM.layer_norm_added_backward(g, s, x, a, None, affine=False)[0],
        tuple(drawn(2, 4, seed=seed) for seed in range(4)),
    ),
    "group_norm_silu_backward": (
        lambda g, x, w, b: ROCM.group_norm_silu_backward(g, x, w, b, 2),
        (drawn(2, 4, 2, 3), drawn(2, 4, 2, 3, seed=1), drawn(4), drawn(4, seed=1)),
    ),
    "group_norm_silu_backward, without SiLU": (
        lambda g, x: ROCM.group_norm_silu_backward(g, x, None, None, 2, 1e-5, False, False)[0],
        (image(1, 4, 2, 3), drawn(1, 4, 2, 3, seed=1)),
    ),
    "conv": (
        # Differences are made by writing to .data, of which what is kept of a bias knows nothing.
        lambda x, w, b, n, s, t, e: ROCM.conv(x, w, b.clone(), "3x3", n, s, t, e),
        (
            *(drawn(1, 3, 2, 2), drawn(3, 2, 3, 3), drawn(3), drawn(1, 2, 2)),
            *(drawn(1, 3, 2, 1), drawn(3, 1), drawn(1, 3)),
        ),
    ),
    "conv, upsample": (
        lambda x, w: ROCM.conv(x, w, None, "upsample"),
        (drawn(1, 2, 2, 2), drawn(2, 2, 3, 3)),
    ),
    "conv_and_norm": (
        lambda x, w, g, b: ROCM.conv_and_norm(x, w, None, g, b, 2, kind="3x3 stride 2"),
        (drawn(1, 5, 5, 2), drawn(4, 2, 3, 3), drawn(4), drawn(4, seed=1)),
    ),
}


def test_every_operator_has_a_form_here() -> None:
    assert {name.partition(",")[0] for name in FORMS} == {row.name for row in torch_ops.OPS}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_differences(name: str) -> None:
    call, inputs = FORMS[name]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True, check_forward_ad=True)


@pytest.mark.parametrize("name", FORMS)
def test_torch_func_has_the_same_gradients(name: str) -> None:
    call, inputs = FORMS[name]

    def loss(*given: torch.Tensor) -> torch.Tensor:
        made = call(*given)
        every = (made,) if isinstance(made, torch.Tensor) else made
        return torch.cat([each.sin().flatten() for each in every]).sum()

    found = torch.func.grad(loss, tuple(range(len(inputs))))(*inputs)
    for one, other in zip(found, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_tangents_bar_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, of which torch's fused attention on the CPU has none."""
    made = Engine()
    monkeypatch.setattr(register, "engine", made)
    q = drawn(1, 7, 3, 4).detach().float()
    problem = ATTENTION.problem_of(AttentionInputs(q, q, q))
    for _ in range(2):
        tangent = torch.func.jvp(lambda x: ROCM.attention(x, x, x), (q,), (q.cos(),))[1]
        assert tangent.abs().max() > 0
        ROCM.attention(q, q, q)
        assert made.plan(problem, q.device).variant.name == "sdpa"


@pytest.mark.parametrize(
    "name", ["linear, gate", "layer_norm", "layer_norm_added", "group_norm_silu"]
)
def test_gradients_have_gradients(name: str) -> None:
    call, inputs = FORMS[name]
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_gradients_of_attention_have_gradients(dtype: torch.dtype, kind: str) -> None:
    """Those of the formula, for torch's fused operators have none."""
    q, k, v = (
        drawn(2, 5, 2, 8, seed=seed).to(dtype).detach().requires_grad_() for seed in (0, 1, 2)
    )
    keep = torch.arange(25).view(5, 5) % 4 < torch.arange(5)[:, None]
    bias = torch.zeros(5, 5, dtype=dtype).masked_fill_(~keep, -torch.inf)
    mask = {"none": None, "bool": keep, "additive": bias}[kind]

    def both(made: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(made.sin().sum(), (q, k, v), create_graph=True)
        loss = torch.cat([each.flatten() for each in first]).square().sum()
        return (*first, *torch.autograd.grad(loss, (q, k, v)))

    by_heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    right = attend(*by_heads, mask, 8**-0.5).transpose(1, 2).flatten(2)
    for mine, true in zip(both(ROCM.attention(q, k, v, mask)), both(right), strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_on_the_meta_device_gradients_have_shapes(name: str, autocast: bool) -> None:
    call, inputs = FORMS[name]
    given = [t.detach().float().to("meta").requires_grad_() for t in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        made = call(*given)
        made = [made] if isinstance(made, torch.Tensor) else made
        found = torch.autograd.grad(sum(each.sum() for each in made), given)
    for one, other in zip(found, given, strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def test_only_what_is_wanted_is_computed() -> None:
    x, weight = drawn(3, 4), drawn(5, 4).detach()
    made = ROCM.linear(x, weight)
    made.sum().backward()
    assert x.grad is not None and weight.grad is None
    assert not ROCM.linear(x.detach(), weight).requires_grad


def test_of_norms_only_what_is_wanted_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LoRA's norms are frozen: nothing is added up for gamma and beta."""
    asked: list[bool] = []
    for variant in (TorchLayerNormBackward, TorchGroupNormBackward):
        run = variant.run

        def noted(self: Any, call: Call[Any, Any], run: Any = run) -> Any:
            asked.append(call.problem.wanted)
            return run(self, call)

        monkeypatch.setattr(variant, "run", noted)
    engine.reset()
    for trained in (False, True):
        x, gamma = drawn(3, 4), drawn(4).requires_grad_(trained)
        both = ROCM.layer_norm_added(x, x.detach(), gamma, gamma.detach())
        made = ROCM.group_norm_silu(both[0][..., None, None], None, gamma, 2)
        found = torch.autograd.grad(made.sum() + both[1].sum(), [x, gamma][: 1 + trained])
        assert all(each.abs().max() > 0 for each in found)
    engine.reset()
    assert asked[:2] == [False, False] and asked[-2:] == [True, True]


def test_a_result_that_is_not_used_has_no_part_in_gradients() -> None:
    x, added = drawn(2, 4), drawn(2, 4, seed=1)
    norm, total = ROCM.layer_norm_added(x, added, None, None)
    for made, right in ((norm, F.layer_norm(x + added, (4,))), (total, x + added)):
        weight = drawn(2, 4, seed=2)
        found = torch.autograd.grad(made, (x, added), weight, retain_graph=True)
        expected = torch.autograd.grad(right, (x, added), weight)
        assert all(torch.allclose(*pair) for pair in zip(found, expected, strict=True))


def test_gamma_and_beta_of_two_dtypes_have_gradients_in_these() -> None:
    x, gamma, beta = drawn(3, 8), drawn(8).detach().float(), drawn(8).detach()
    gamma.requires_grad_(), beta.requires_grad_()
    for call in (
        lambda: ROCM.layer_norm(x, gamma, beta),
        lambda: ROCM.group_norm_silu(x[..., None, None], gamma, beta, 2),
    ):
        found = torch.autograd.grad(call().sum(), (gamma, beta))
        assert [each.dtype for each in found] == [torch.float32, F64]


def test_a_kernel_that_knows_no_gradients_computes_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked without grad mode, since the operator's own gradients follow."""
    asked: list[bool] = []

    def refusals(self: Any, inputs: Any) -> list[str]:
        asked.append(torch.is_grad_enabled())
        return []

    monkeypatch.setattr(MatrixAttention, "input_refusals", refusals)
    q = drawn(1, 7, 3, 4)
    assert ROCM.attention(q, q, q).requires_grad
    assert asked == [False]


def _group_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, 4, gamma, beta))


def _geglu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    value, gate = F.linear(x, weight, bias).chunk(2, -1)
    return value * F.gelu(gate)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


BESIDE: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "attention": (ROCM.attention, _sdpa, ((2, 33, 2, 40), (2, 77, 2, 40), (2, 77, 2, 40))),
    "layer_norm": (
        lambda x, g, b: ROCM.layer_norm(x, g, b),
        lambda x, g, b: F.layer_norm(x, x.shape[-1:], g, b),
        ((64, 320), (320,), (320,)),
    ),
    "group_norm_silu": (
        lambda x, g, b: ROCM.group_norm_silu(x, g, b, 4),
        _group_norm,
        ((2, 32, 9, 7), (32,), (32,)),
    ),
    "linear": (
        lambda x, w, b: ROCM.linear(x, w, b, None, True),
        _geglu,
        ((64, 80), (96, 80), (96,)),
    ),
}


@needs_half
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BESIDE)
def test_in_half_they_err_no_more_than_twice_as_torch(name: str, dtype: torch.dtype) -> None:
    ours, theirs, shapes = BESIDE[name]
    inputs = [drawn(*shape, seed=place) for place, shape in enumerate(shapes)]
    halves = [item.detach().to(dtype).requires_grad_() for item in inputs]
    exact = [item.detach().double().requires_grad_() for item in halves]
    grad = drawn(*theirs(*exact).shape, seed=9).detach().to(dtype)
    right = torch.autograd.grad(theirs(*exact), exact, grad.double())
    found = torch.autograd.grad(ours(*halves), halves, grad)
    beside = torch.autograd.grad(theirs(*halves), halves, grad)
    for mine, other, true in zip(found, beside, right, strict=True):
        assert mine.dtype == dtype
        errors = [float((item.double() - true).abs().max()) for item in (mine, other)]
        assert errors[0] <= 2 * errors[1] + 1e-9
