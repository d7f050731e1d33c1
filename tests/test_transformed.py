"""Functions under torch.func and in forward mode: computed by torch, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from lib_rocm_sd import functional
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.conv.inputs import NextNorm
from lib_rocm_sd.ops.conv.weights import ConvWeights
from tests.following import PLAIN, Card, card, ran, session, told

__all__ = ["card", "session"]

Function = Callable[..., torch.Tensor]
MASK = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
WEIGHT, BIAS = torch.randn(24, 16, 3, 3) / 12, torch.randn(24)
PACKED = ConvWeights(WEIGHT, BIAS)
ROWS = {t.dtype: ConvWeights(t, BIAS, in_rows=True) for t in (WEIGHT, WEIGHT.double())}


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.attention(q, k, v, MASK)


def attended_backward(*given: torch.Tensor) -> torch.Tensor:
    q, k, v, output, grad = given
    lse = torch.zeros((2, 2, 3), dtype=q.dtype)  # the formula, which is taken, makes its own
    found = functional.attention_backward(q, k, v, output, grad, lse, MASK)
    return flattened(found)


def convolved(x: torch.Tensor, gamma: torch.Tensor, in_rows: bool = True) -> torch.Tensor:
    weights, following = ROWS[x.dtype] if in_rows else PACKED, NextNorm(gamma, gamma, 4, 1e-5)
    y, norm = functional.conv("3x3", x, weights, next_norm=following)
    assert norm is not None
    return torch.cat((y.flatten(), norm.flatten()))


def of_group(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    norm = functional.group_norm_of(x, gamma, gamma, 4, 1e-5)
    return functional.group_norm_apply(x, norm, True)


def group_normed(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """Of an image in channels-last."""
    return functional.group_norm_silu(x.permute(0, 3, 1, 2), gamma, gamma, 4)


def group_normed_backward(grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return flattened(functional.group_norm_silu_backward(grad, x, gamma, gamma, 4))


def layer_normed_backward(grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return flattened(functional.layer_norm_backward(grad, x, gamma))


def flattened(found: Iterable[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in found if each is not None])


def layer_normed(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    made = functional.layer_norm(x, gamma, gamma)
    assert isinstance(made, torch.Tensor)
    return made


def added(x: torch.Tensor, other: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return torch.cat(functional.layer_norm(x, gamma, gamma, added=other))  # type: ignore[arg-type]


Q, K = (2, 3, 2, 8), (2, 3, 2, 8)
CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "attention": (attended, (Q, K, K)),
    "attention of no keys": (functional.attention, (Q, (2, 0, 2, 8), (2, 0, 2, 8))),
    "attention_backward": (attended_backward, (Q, K, K, (2, 3, 16), (2, 3, 16))),
    "conv": (convolved, ((1, 4, 5, 16), (24,))),
    "conv, packed": (partial(convolved, in_rows=False), ((1, 4, 5, 16), (24,))),
    "group_norm_silu": (
        lambda x, gamma: functional.group_norm_silu(x, gamma, gamma, 4),
        ((2, 16, 3, 4), (16,)),
    ),
    "group_norm_silu, channels last": (group_normed, ((2, 3, 4, 16), (16,))),
    "group_norm_silu_backward": (group_normed_backward, ((2, 16, 3, 4), (2, 16, 3, 4), (16,))),
    "layer_norm_backward": (layer_normed_backward, ((5, 16), (5, 16), (16,))),
    "group_norm_of": (of_group, ((2, 3, 4, 16), (16,))),
    "layer_norm": (layer_normed, ((5, 16), (16,))),
    "layer_norm, added": (added, ((5, 16), (5, 16), (16,))),
    "linear": (functional.linear, ((5, 16), (24, 16), (24,))),
    "GEGLU": (partial(functional.linear, gate=True), ((5, 16), (24, 16), (24,))),
}


def drawn(name: str, *lead: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cpu").manual_seed(0)
    _, shapes = CASES[name]
    return tuple(torch.randn((*lead, *shape), generator=generator) for shape in shapes)


def mapped(call: Function, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.func.vmap(call, randomness="different")(*given)


def tangent(call: Function, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with forward_ad.dual_level():
        made = call(*(forward_ad.make_dual(t, t.cos()) for t in given))
        found = forward_ad.unpack_dual(made).tangent
    assert found is not None
    return found


def derived(call: Function, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    found: torch.Tensor = torch.func.jvp(call, given, tuple(t.cos() for t in given))[1]
    return found


def differences(call: Function, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """In float64, of which the torch variants know no more than of float32."""
    step = 1e-6
    ahead, behind = (call(*(t + way * t.cos() for t in given)) for way in (step, -step))
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize("name", CASES)
def test_vmap(name: str) -> None:
    call, given = CASES[name][0], drawn(name, 3)
    made = mapped(call, given)
    one_by_one = torch.stack([call(*each) for each in zip(*given, strict=True)])
    torch.testing.assert_close(made, one_by_one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("way", [tangent, derived])
@pytest.mark.parametrize("name", [name for name in CASES if "no keys" not in name])
def test_forward_mode(name: str, way: Any) -> None:
    call, given = CASES[name][0], tuple(t.double() for t in drawn(name))
    torch.testing.assert_close(way(call, given), differences(call, given), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_torch_func_once_and_twice(name: str) -> None:
    call, given = CASES[name][0], tuple(t.double() for t in drawn(name))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return call(x, *given[1:]).square().sum()

    along = given[0].cos()
    first = torch.func.grad(loss)(given[0])
    step = 1e-6 * along
    slope = (loss(given[0] + step) - loss(given[0] - step)) / 2e-6
    torch.testing.assert_close((first * along).sum(), slope, atol=1e-5, rtol=1e-5)
    second = torch.func.grad(lambda x: (torch.func.grad(loss)(x) * along).sum())(given[0])
    assert second.isfinite().all()


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("way", [mapped, tangent, derived])
def test_a_card_plans_and_bars_nothing(
    card: Card, session: Session, way: Any, wanted: bool
) -> None:
    """Neither before a first call nor after one."""
    given = drawn("attention", *([3] if way is mapped else []))
    call = partial(functional.attention, session=session)
    q, k, v = (t[0] if way is mapped else t for t in given)
    for before in (0, 1):
        assert way(call, tuple(t.requires_grad_(wanted) for t in given)).isfinite().all()
        assert ran(session)[PLAIN] == before
        with torch.no_grad():
            made = call(q, k, v)
        assert made.isfinite().all() and ran(session)[PLAIN] == before + 1
    assert not told(session)


def test_dual_tensors_are_followed_backwards_too(card: Card, session: Session) -> None:
    given = [t.requires_grad_() for t in drawn("attention")]
    with forward_ad.dual_level():
        q, k, v = (forward_ad.make_dual(t, t.cos()) for t in given)
        made = functional.attention(q, k, v, session=session)
        assert forward_ad.unpack_dual(made).tangent is not None
        made.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in given)
