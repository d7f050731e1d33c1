"""torch's attention function inside `served`: what is ours, what stays torch's, for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from lib_rocm_sd.engine import selftest
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import attention as sdpa
from lib_rocm_sd.hosts import gate
from lib_rocm_sd.hosts.attention import served
from lib_rocm_sd.ops.attention.kernel import AttentionParams
from lib_rocm_sd.report import Report
from tests.comfyui.play import CARD
from tests.hosts.play import Card, card
from tests.ops.launches import Launches

__all__ = ["card"]

attend: Any = F.scaled_dot_product_attention


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)).to(dtype)


def inputs(heads_k: int = 4, head_dim: int = 16) -> list[torch.Tensor]:
    """q (2, 4, 9, D), k and v (2, heads_k, 7, D), as views of (B, S, H*D)."""
    shapes = ((9, 4), (7, heads_k), (7, heads_k))
    return [
        draw(2, rows, heads * head_dim, seed=seed).unflatten(2, (heads, -1)).transpose(1, 2)
        for seed, (rows, heads) in enumerate(shapes)
    ]


def events(session: Session) -> str:
    return "\n".join(session.report.snapshot()["events"])


@pytest.fixture
def session() -> Session:
    return Session(report=Report())


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a scale": {"scale": 0.3},
    "a boolean mask": {"attn_mask": draw(2, 1, 9, 7) > -1},
    "a boolean mask of two dimensions": {"attn_mask": draw(9, 7) > -1},
    "an additive mask of all heads": {"attn_mask": draw(2, 4, 9, 7)},
    "an additive mask of three dimensions": {"attn_mask": draw(4, 1, 7)},
}


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("name", CALLS)
def test_it_gives_what_torchs_gives(card: Card, session: Session, name: str, head_dim: int) -> None:
    q, k, v = inputs(head_dim=head_dim)
    expected = attend(q, k, v, **CALLS[name])
    with served(session):
        made = attend(q, k, v, **CALLS[name])
    assert len(card.seen) == 1 and not events(session)
    assert made.shape == expected.shape and made.dtype == expected.dtype
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)


def test_keywords_and_views(card: Card, session: Session) -> None:
    q, k, v = inputs()
    with served(session):
        attend(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0)
    (seen, asked_by), *_ = card.seen
    assert [t.data_ptr() for t in (seen.q, seen.k, seen.v)] == [t.data_ptr() for t in (q, k, v)]
    assert seen.q.shape == (2, 9, 4, 16) and asked_by is session


@pytest.mark.parametrize("heads_k", [1, 2])
def test_fewer_heads_of_keys(card: Card, session: Session, heads_k: int) -> None:
    q, k, v = inputs(heads_k)
    expected = attend(q, k, v, enable_gqa=True)
    with served(session):
        made = attend(q, k, v, enable_gqa=True)
    assert len(card.seen) == 1
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)


class Marked(torch.Tensor):
    """A kind of tensor of somebody's own."""


def _wanting(index: int) -> Callable[[], Any]:
    def call() -> Any:
        given = [*inputs(), draw(2, 1, 9, 7)]
        given[index].requires_grad_(True)
        return attend(*given)

    return call


def _traced() -> Any:
    q, k, v = inputs()
    return torch.jit.trace(lambda x: attend(x, k, v), (q,))(q)


TORCHS: dict[str, tuple[Callable[[], Any], str]] = {
    "causal": (
        lambda: attend(*inputs(), is_causal=True),
        "a causal mask is asked for",
    ),
    "three dimensions": (
        lambda: attend(*(t[0] for t in inputs())),
        "q, k and v are not (batch, heads, seq, head_dim)",
    ),
    "wider values": (
        lambda: attend(*inputs()[:2], draw(2, 4, 7, 24)),
        "k and v must have one shape",
    ),
    "one batch for all": (
        lambda: attend(inputs()[0], *(t[:1] for t in inputs()[1:])),
        "q and k must agree in all but seq",
    ),
    "double": (
        lambda: attend(*(t.double() for t in inputs())),
        "it is in float64",
    ),
    "gradients of q": (_wanting(0), "gradients are wanted"),
    "gradients of v": (_wanting(2), "gradients are wanted"),
    "gradients of the mask": (_wanting(3), "gradients are wanted"),
    "a subclass": (
        lambda: attend(*(t.as_subclass(Marked) for t in inputs())).as_subclass(torch.Tensor),
        "an input is no plain tensor",
    ),
    "vmap": (
        lambda: torch.vmap(attend)(*(t[None] for t in inputs())),
        "torch.func transforms it",
    ),
    "tangents": (lambda: _with_tangents(attend), "tangents are wanted"),
    "a trace": (_traced, "torch.jit traces it"),
}


def _with_tangents(call: Any) -> torch.Tensor:
    """The tangent of what a call gives; by the math backend, the only one that has one."""
    q, k, v = inputs()
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        made = call(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        tangent: torch.Tensor = forward_ad.unpack_dual(made).tangent
        return tangent.clone()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TORCHS)
def test_what_stays_torchs(card: Card, session: Session, name: str) -> None:
    call, why = TORCHS[name]
    expected = call()
    with served(session):
        made = call()
    assert torch.equal(made, expected)
    assert made.requires_grad == expected.requires_grad
    assert why in events(session)
    assert not card.seen or name == "a trace"  # the traced function itself runs afterwards


def test_dropout_is_torchs(card: Card, session: Session) -> None:
    with served(session):
        attend(*inputs(), dropout_p=0.5)
    assert not card.seen and "dropout is asked for" in events(session)


def test_what_autocast_computes_in_another_dtype_is_torchs(
    card: Card, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda: True)
    for dtype, calls in ((torch.float16, 0), (torch.float32, 1)):
        monkeypatch.setattr(sdpa, "_autocast_dtype", lambda dtype=dtype: dtype)
        with served(session):
            attend(*inputs())
        assert len(card.seen) == calls
    assert "autocast asks for another dtype" in events(session)


@pytest.mark.parametrize(
    "error", [KeyError("x"), torch.cuda.OutOfMemoryError("HIP out of memory")], ids=repr
)
def test_an_error_of_ours_costs_nothing(card: Card, session: Session, error: Exception) -> None:
    expected = attend(*inputs())
    card.fails = error
    with served(session):
        assert torch.equal(attend(*inputs()), expected)
    assert "ours failed: " in events(session)


def test_a_callers_mistake_is_torchs_error(card: Card, session: Session) -> None:
    q, k, v = inputs()
    with served(session), pytest.raises(RuntimeError, match="(?i)size|shape"):
        attend(q, k[..., :8], v)


# --- for how long, and for whom


def test_only_inside(card: Card, session: Session) -> None:
    theirs = F.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), served(session):
        assert F.scaled_dot_product_attention is theirs
        assert sdpa.is_serving()
        raise ZeroDivisionError
    assert not sdpa.is_serving()
    attend(*inputs())
    assert not card.seen


def test_the_innermost_session_counts(card: Card, session: Session) -> None:
    inner = Session(report=Report())
    with served(session):
        with served(inner):
            attend(*inputs())
        attend(*inputs())
    assert [who for _, who in card.seen] == [inner, session]


def test_other_threads_are_left_alone(card: Card, session: Session) -> None:
    with served(session):
        thread = threading.Thread(target=lambda: attend(*inputs()))
        thread.start()
        thread.join()
    assert not card.seen


def test_what_is_compiled_is_traced_through_torchs(card: Card, session: Session) -> None:
    graphs = []

    def keep(graph: Any, example: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    def attending(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x + 1, x, x)

    torch._dynamo.reset()
    with served(session), torch.no_grad():
        torch.compile(attending, backend=keep, fullgraph=True)(inputs()[0])
    assert any(sdpa.SDPA in targets for targets in graphs)


# --- with an engine


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What the engine of a card launches, which computes nothing; self-tests are passed."""
    made = Launches()
    engine = Engine(identify=lambda device: CARD, launcher=lambda device, arch: made)
    monkeypatch.setattr(selftest, "check", lambda *words: selftest.Check(0.0, 1.0))
    monkeypatch.setattr(sdpa, "identify", lambda device: CARD)
    monkeypatch.setattr(sdpa, "engine", engine)
    monkeypatch.setattr(gate, "begin", lambda: None)
    return made


@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_our_kernel_reads_the_tensors_as_they_lie(
    launches: Launches, session: Session, head_dim: int
) -> None:
    q, k, v = (t.half() for t in inputs(head_dim=head_dim))
    with served(session):
        made = attend(q, k, v)
    assert made.shape == (2, 4, 9, head_dim)
    assert made.transpose(1, 2).is_contiguous(), "as (B, S, H*D), which models ask for next"
    params = AttentionParams.from_buffer_copy(launches.seen[-1][3])
    assert list(params.q_stride) == [q.stride(0), q.stride(2), q.stride(1)]


def test_a_head_that_no_kernel_takes_is_torchs(launches: Launches, session: Session) -> None:
    q, k, v = (t.half() for t in inputs(head_dim=20))
    with served(session):
        made = attend(q, k, v)
    assert torch.equal(made, attend(q, k, v))
    assert "20" in events(session) and not launches.seen


def test_nothing_is_begun_on_the_cpu(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "begin", lambda: 1 // 0)
    with served(session, wait=True) as mode:
        made = attend(*inputs())
    assert mode.session.patient
    assert torch.equal(made, attend(*inputs()))
    assert "no GPU: this is the CPU" in events(session)
