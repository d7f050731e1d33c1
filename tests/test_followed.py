"""Attention with gradients by functional.attention: ours, or torch's with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lib_rocm_sd import followed, functional
from lib_rocm_sd.engine.gating import Asked, Refusal
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.attention.formula import attend
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from tests.following import BACKWARD, FORWARD, PLAIN, Card, card, ran, session, told

__all__ = ["card", "session"]

Tensors = tuple[torch.Tensor, ...]


def drawn(
    head_dim: int = 16, dtype: torch.dtype = torch.float32, wanted: str = "qkv"
) -> list[torch.Tensor]:
    """q (2, 9, 4, D), k and v (2, 7, 4, D), and of which a gradient is wanted."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = ((2, 9, 4, head_dim), (2, 7, 4, head_dim), (2, 7, 4, head_dim))
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [t.requires_grad_(name in wanted) for name, t in zip("qkv", made, strict=True)]


def mask_of(kind: str) -> torch.Tensor | None:
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randn((2, 1, 9, 7), generator=generator)
    return {"none": None, "bool": drawn > -1, "additive": drawn}[kind]


def attended(
    session: Session,
    given: Sequence[torch.Tensor],
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    q, k, v = given
    return functional.attention(q, k, v, mask, scale, session)


def exact(given: Sequence[torch.Tensor], mask: torch.Tensor | None = None) -> torch.Tensor:
    """By the formula, which autograd follows."""
    q, k, v = (t.transpose(1, 2) for t in given)
    return attend(q, k, v, mask, q.shape[3] ** -0.5).transpose(1, 2).flatten(2)


def gradients(made: torch.Tensor, given: list[torch.Tensor]) -> Tensors:
    """Of a loss that is not the same for all elements."""
    weights = torch.linspace(-1, 1, made.numel()).view(made.shape).to(made.dtype)
    for each in given:
        each.grad = None
    (made * weights).sum().backward()
    return tuple(t.grad for t in given if t.grad is not None)


def close(found: Tensors, expected: Tensors) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("wanted", ["qkv", "q", "k", "v", "kv"])
def test_gradients_are_ours(card: Card, session: Session, wanted: str, mask: str) -> None:
    given, masked = drawn(wanted=wanted), mask_of(mask)
    made = attended(session, given, masked)
    close(gradients(made, given), gradients(exact(given, masked), given))
    assert ran(session) == {FORWARD: 1, BACKWARD: 1} and not told(session)


def test_a_scale_and_views_of_one_tensor(card: Card, session: Session) -> None:
    whole = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    found, expected = (
        torch.autograd.grad(made.square().sum(), whole)
        for made in (
            attended(session, whole.unbind(2), scale=0.5),
            exact((whole[:, :, 0] * 2.0, *whole.unbind(2)[1:])),  # 0.5 is 2 * 16 ** -0.5
        )
    )
    close(found, expected)
    assert ran(session)[BACKWARD] == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_nothing_is_followed(card: Card, session: Session, mode: Any) -> None:
    given = drawn()
    with mode():
        made = attended(session, given)
    assert not made.requires_grad and ran(session) == {PLAIN: 1}


def test_where_none_is_wanted_nothing_is_followed(card: Card, session: Session) -> None:
    assert torch.is_grad_enabled()
    made = attended(session, drawn(wanted=""))
    assert made.grad_fn is None and ran(session) == {PLAIN: 1}


def test_autocast_has_no_say(card: Card, session: Session) -> None:
    given = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        made = attended(session, given)
        found = gradients(made, given)
    assert made.dtype == torch.float32
    close(found, gradients(exact(given), given))


# --- checkpoints


class CheckpointFunction(torch.autograd.Function):
    """As in Stability-AI/stablediffusion cf1d67a, ldm/modules/diffusionmodules/util.py."""

    @staticmethod
    def forward(ctx: Any, run: Any, length: int, *args: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.inputs, ctx.params = run, list(args[:length]), list(args[length:])
        with torch.no_grad():
            made: torch.Tensor = run(*ctx.inputs)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            made = ctx.run(*(x.view_as(x) for x in inputs))
        found = torch.autograd.grad(made, inputs + ctx.params, grads, allow_unused=True)
        return (None, None, *found)


def checkpointed(way: str, run: Any, *given: torch.Tensor) -> torch.Tensor:
    if way == "ldm":
        made: torch.Tensor = CheckpointFunction.apply(run, len(given), *given)
        return made
    return checkpoint(run, *given, use_reentrant=way == "reentrant")  # type: ignore[no-any-return]


WAYS = ["reentrant", "not reentrant", "ldm"]


def first_call(way: str) -> tuple[str, str]:
    """What runs when a checkpoint calls its function first: two of these ways do so without grad
    mode.
    """
    return FORWARD if way == "not reentrant" else PLAIN


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("last", [True, False], ids=["attention last", "amid"])
def test_checkpoints(card: Card, session: Session, way: str, last: bool) -> None:
    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made = functional.attention(q * 1.5, k, v, session=session)
        return made if last else made.sin() * made

    given = drawn()
    found = gradients(checkpointed(way, region, *given), given)
    plain = exact((given[0] * 1.5, *given[1:]))
    close(found, gradients(plain if last else plain.sin() * plain, given))
    assert ran(session) == Counter((first_call(way), FORWARD, BACKWARD)) and not told(session)


class Gate:
    """Has not decided yet, until `open`; then our kernels may be launched."""

    def __init__(self) -> None:
        self.open = False

    def refusal(self, asked: Asked) -> Refusal | None:
        return None if self.open else Refusal("is being tried", waits=True)

    def vouches(self, asked: Asked) -> bool:
        return True

    def launching(self, asked: Asked, stage: str) -> AbstractContextManager[Any] | None:
        return nullcontext()

    def wait(self, timeout_s: float) -> bool:
        return True

    def failed(self, asked: Asked, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("way", WAYS)
def test_a_trial_may_end_between_a_checkpoints_calls(
    card: Card, session: Session, way: str
) -> None:
    """What was saved in the first call, by torch's operators, is what is saved in the second."""
    gate = card.engine.gate = Gate()
    given = drawn()

    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.attention(q, k, v, session=session).sin()

    made = checkpointed(way, region, *given)
    assert FORWARD not in ran(session)
    gate.open = True
    card.engine.renew()
    close(gradients(made, given), gradients(exact(given).sin(), given))
    first = (first_call(way)[0], "sdpa")
    assert ran(session) == Counter((first, FORWARD, BACKWARD))


def test_while_kernels_wait_torch_computes_and_then_ours(card: Card, session: Session) -> None:
    gate = card.engine.gate = Gate()
    for opened in (False, True):
        gate.open = opened
        card.engine.renew()
        given = drawn()
        made = attended(session, given)
        close(gradients(made, given), gradients(exact(given), given))
        assert (BACKWARD in ran(session)) is opened


# --- what is torch's


class Marked(torch.Tensor):
    """A kind of tensor of somebody's own."""


REFUSED: dict[str, tuple[list[torch.Tensor], str]] = {
    "float64": (drawn(dtype=torch.float64), "float64: the kernel takes fp16 and bf16"),
    "a head of 20": (drawn(20), "head_dim 20 is not a multiple of 8"),
    "a head of 512": (drawn(512), "head_dim 512 is more than 256"),
    "a subclass": ([t.as_subclass(Marked) for t in drawn()], "an input is no plain tensor"),
    "a last stride": (
        [t.detach().mT.contiguous().mT.requires_grad_() for t in drawn()],
        "a last stride of q, k or v is not 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_torchs(card: Card, session: Session, case: str) -> None:
    given, why = REFUSED[case]
    made = attended(session, given)
    close(gradients(made, given), gradients(exact(given), given))
    assert not {FORWARD, BACKWARD} & set(ran(session))
    assert f"gradients are wanted, and {why}" in told(session)


@pytest.mark.parametrize("others", [True, False], ids=["of all", "of the mask alone"])
def test_a_masks_gradient_is_torchs(card: Card, session: Session, others: bool) -> None:
    given, mask = drawn(wanted="qkv" if others else ""), torch.zeros(9, 7, requires_grad=True)
    made = attended(session, given, mask)
    every = [*given, mask]
    close(gradients(made, every), gradients(exact(given, mask), every))
    assert not {FORWARD, BACKWARD} & set(ran(session))
    assert "the mask's own gradient is wanted" in told(session)


def test_without_keys_all_is_zero(card: Card, session: Session) -> None:
    q, k, v = drawn()
    made = functional.attention(q, k[:, :0], v[:, :0], session=session)
    made.sum().backward()
    assert not made.any() and not any(t.grad.any() for t in (q, k, v))  # type: ignore[union-attr]
    assert set(ran(session)) == {("attention and lse", "zeros"), ("attention backward", "zeros")}


def assert_torchs(session: Session, why: str) -> None:
    given = drawn()
    made = attended(session, given)
    close(gradients(made, given), gradients(exact(given), given))
    assert ran(session) == {("attention", "sdpa"): 1}
    assert why in told(session)


def test_without_a_card_it_is_torchs(session: Session) -> None:
    assert_torchs(session, "gradients are wanted, and no GPU: this is the CPU")


def test_a_kernel_found_wrong_leaves_all_to_torch(card: Card, session: Session) -> None:
    """No forward of ours then: the gradients would need torch's too."""
    card.spoil = lambda made: made + 1
    assert_torchs(session, "self-test failed")


def test_a_kernel_that_fails_in_the_backward_pass(card: Card, session: Session) -> None:
    given = drawn()
    made = attended(session, given)

    def fails(made: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("launch failed")

    card.spoil = fails
    close(gradients(made, given), gradients(exact(given), given))
    assert BACKWARD not in ran(session) and "launch failed" in told(session)


def test_a_callers_mistake_is_told_with_shapes(card: Card) -> None:
    q, k, v = drawn()
    with pytest.raises(ValueError, match=r"\(2, 7, 4, 8\)"):
        functional.attention(q, k[..., :8], v)


# --- gradients of gradients


def test_second_derivatives_are_the_formulas(card: Card, session: Session) -> None:
    given = drawn()

    def second(made: torch.Tensor) -> Tensors:
        first = torch.autograd.grad(made.square().sum(), given, create_graph=True)
        return torch.autograd.grad(torch.cat([t.flatten() for t in first]).sin().sum(), given)

    close(second(attended(session, given)), second(exact(given)))
    # the second pass comes through the first one's output, of which nothing more is wanted
    assert ran(session) == {FORWARD: 1, BACKWARD: 1}


def test_an_older_torch_is_asked_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "_any_wants", None)
    q, k, v = drawn(wanted="v")
    assert followed.wanted(AttentionInputs(q, k, v))
    assert not followed.wanted((q, k, None, 0.5))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_second_derivatives_of_a_query_without_keys_are_finite(
    card: Card, session: Session, kind: str
) -> None:
    """As torch's own are."""
    given, keep = drawn(), torch.ones(9, 7, dtype=torch.bool)
    keep[4], keep[2, :5] = False, False
    mask = keep if kind == "bool" else torch.zeros(9, 7).masked_fill_(~keep, -torch.inf)

    def torchs() -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in given)
        with sdpa_kernel(SDPBackend.MATH):
            made = scaled_dot_product_attention(q, k, v, mask)
        return made.transpose(1, 2).flatten(2)

    def all_of(made: torch.Tensor) -> Tensors:
        first = torch.autograd.grad(made.sin().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), given)  # type: ignore[arg-type]
        return (*first, *second)

    for made in (attended(session, given, mask), exact(given, mask)):
        close(all_of(made), all_of(torchs()))
