"""Training with hosts' attention: its gradients are our kernels', and torch's to rounding."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows
from torch.utils.checkpoint import checkpoint

from lib_rocm_sd import report
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.attention import served
from lib_rocm_sd.hosts.comfyui.attention import Override
from lib_rocm_sd.hosts.webui import session as webuis
from lib_rocm_sd.hosts.webui.attention import Function, calls, packed
from tests.following import BACKWARD, FORWARD, Card, card, ran, session, told

__all__ = ["card", "session"]

HEADS, WIDTH = 4, 64
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def tokens(wanted: str = "qkv", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q (2, 9, 64), k and v (2, 7, 64), and of which a gradient is wanted."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = ((2, 9, WIDTH), (2, 7, WIDTH), (2, 7, WIDTH))
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [t.requires_grad_(name in wanted) for name, t in zip("qkv", made, strict=True)]


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As hosts' own functions call it."""
    q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def by_forge(session: Session) -> Attend:
    owner = SimpleNamespace(stands_aside=False)
    theirs = Function(lambda q, k, v, heads: by_torch(q, k, v), packed, owner)
    return lambda q, k, v: theirs(q, k, v, HEADS)


def by_comfyui(session: Session) -> Attend:
    ours = Override(session)
    return lambda q, k, v: ours(lambda q, k, v, heads: by_torch(q, k, v), q, k, v, HEADS)


def by_served(session: Session) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with served(session):
            return by_torch(q, k, v)

    return attend


HOSTS: dict[str, Callable[[Session], Attend]] = {
    "plain torch": by_served,
    "a Forge": by_forge,
    "ComfyUI": by_comfyui,
}


@pytest.fixture(params=HOSTS)
def attend(request: Any, session: Session, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """A host's attention, which reports to `session`."""
    monkeypatch.setattr(webuis, "current", lambda: session)
    monkeypatch.setattr(calls, "_report", session.report)
    monkeypatch.setattr(report, "report", session.report)
    return HOSTS[request.param](session)


def gradients(made: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor | None]:
    for each in given:
        each.grad = None
    (made * torch.linspace(-1, 1, made.numel()).view(made.shape)).sum().backward()
    return [t.grad for t in given]


def close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("wanted", ["qkv", "q", "kv"])
def test_gradients(card: Card, attend: Attend, session: Session, wanted: str) -> None:
    given = tokens(wanted)
    close(gradients(attend(*given), given), gradients(by_torch(*given), given))
    assert ran(session.of_part("UNet")) == {FORWARD: 1, BACKWARD: 1} and not told(session)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("last", [True, False], ids=["attention last", "amid"])
def test_checkpoints(
    card: Card, attend: Attend, session: Session, reentrant: bool, last: bool
) -> None:
    """A checkpoint that is not reentrant ends its second call by an error of its own, from within
    attention where that is last.
    """

    def region(attend: Attend, *given: torch.Tensor) -> torch.Tensor:
        made = attend(*given)
        return made if last else made.sin()

    given = tokens()
    made = checkpoint(region, attend, *given, use_reentrant=reentrant)
    close(gradients(made, given), gradients(region(by_torch, *given), given))
    assert ran(session)[BACKWARD] == 1 and not told(session)


def test_float64_stays_the_hosts(card: Card, attend: Attend, session: Session) -> None:
    given = tokens(dtype=torch.float64)
    calls.clear()
    close(gradients(attend(*given), given), gradients(by_torch(*given), given))
    assert not ran(session)


def test_a_head_of_20_stays_torchs_and_is_told(card: Card, session: Session) -> None:
    q = torch.randn(1, 2, 9, 20, requires_grad=True)
    with served(session):
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert q.grad is not None and not ran(session)
    why = "gradients are wanted, and head_dim 20 is not a multiple of 8"
    assert why in told(session)
