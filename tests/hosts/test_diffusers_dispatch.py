"""Ours as an attention backend of diffusers, by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from tests.hosts.play import Card, card

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
dispatch = pytest.importorskip(
    "diffusers.models.attention_dispatch", reason="this diffusers has no attention backends"
)

from lib_rocm_sd.hosts import optional
from lib_rocm_sd.hosts.diffusers import patched, register
from tests.hosts import tiny_pipelines as tiny

__all__ = ["card"]

Registry = dispatch._AttentionBackendRegistry
Names = dispatch.AttentionBackendName


def session() -> Session:
    return Session(report=Report())


@pytest.fixture
def mine() -> Iterator[Session]:
    """Of the registered backend; afterwards diffusers' own is active."""
    made, active = session(), Registry._active_backend
    assert register(made) == ""
    yield made
    Registry._active_backend = active


def call(**options: Any) -> Any:
    q, k, v = (torch.randn(2, rows, 3, 16, generator=torch.manual_seed(rows)) for rows in (9, 7, 7))
    return dispatch.dispatch_attention_fn(q, k, v, **options)


@pytest.mark.parametrize("name", tiny.TRANSFORMERS)
def test_a_model_by_name(card: Card, mine: Session, name: str) -> None:
    pipeline = tiny.made(name)
    theirs = tiny.asked(name, pipeline, steps=1)
    pipeline.transformer.set_attention_backend("rocm_sd")
    made = tiny.asked(name, pipeline, steps=1)
    processors = [m.processor for m in pipeline.transformer.modules() if hasattr(m, "processor")]
    through = [p for p in processors if hasattr(p, "_attention_backend")]
    assert bool(card.seen) == bool(through), "SD 3's processor asks torch itself"
    assert {who for _, who in card.seen} <= {mine}
    torch.testing.assert_close(made, theirs, atol=1e-4, rtol=1e-4)
    card.seen.clear()
    pipeline.transformer.reset_attention_backend()
    Registry._active_backend = Names.NATIVE
    assert torch.equal(tiny.asked(name, pipeline, steps=1), theirs)
    assert not card.seen


def test_the_context_manager(card: Card, mine: Session) -> None:
    expected = call()
    with dispatch.attention_backend("rocm_sd"):
        made = call()
    assert len(card.seen) == 1
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(call(), expected) and len(card.seen) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.rand(2, 1, 1, 7) > 0.3},
        {"attn_mask": torch.rand(2, 3, 9, 7)},
        {"scale": 0.3},
        {"is_causal": True},
    ],
    ids=["bool mask", "float mask", "scale", "causal"],
)
def test_it_means_what_native_means(card: Card, mine: Session, options: dict[str, Any]) -> None:
    made = call(backend=Names("rocm_sd"), **options)
    assert bool(card.seen) != ("is_causal" in options)
    torch.testing.assert_close(made, call(**options), atol=2e-6, rtol=1e-5)


def test_fewer_heads_of_keys(card: Card, mine: Session) -> None:
    q, k = torch.randn(1, 9, 4, 16), torch.randn(1, 7, 2, 16)
    expected = dispatch.dispatch_attention_fn(q, k, k, enable_gqa=True)
    made = dispatch.dispatch_attention_fn(q, k, k, enable_gqa=True, backend=Names("rocm_sd"))
    assert len(card.seen) == 1
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)


def test_the_versions_own_checks_are_made(
    card: Card, mine: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registry, "_checks_enabled", True)
    call(backend=Names("rocm_sd"))
    with pytest.raises(ValueError, match="device|dtype"):
        q = torch.randn(1, 9, 4, 16)
        dispatch.dispatch_attention_fn(q, q.half(), q, backend=Names("rocm_sd"))


def test_the_name_is_a_member_like_the_others(mine: Session) -> None:
    member = Names("rocm_sd")
    assert member is Names["ROCM_SD"] is Names.ROCM_SD is Names(member)
    assert (member.name, member.value, member == "rocm_sd") == ("ROCM_SD", "rocm_sd", True)
    assert member in list(Names) and member in Registry.list_backends()
    assert copy.deepcopy(member) is member is pickle.loads(pickle.dumps(member))
    assert len(Names) == len(Names.__members__) == len(list(Names))
    with pytest.raises(ValueError, match="nothing_such"):
        Names("nothing_such")


def test_registered_again_it_serves_by_the_newer_session(card: Card, mine: Session) -> None:
    count, newer = len(Names), session()
    assert register(newer) == ""
    call(backend=Names("rocm_sd"))
    assert len(Names) == count
    assert {who for _, who in card.seen} == {newer}


def test_inside_patched_its_session_counts(card: Card, mine: Session) -> None:
    pipeline, other = tiny.made("Flux"), session()
    pipeline.transformer.set_attention_backend("rocm_sd")
    with patched(pipeline, session=other) as patch:
        tiny.asked("Flux", pipeline, steps=1)
    assert patch.served == 2
    assert {who for _, who in card.seen} == {other}
    card.seen.clear()
    tiny.asked("Flux", pipeline, steps=1)
    assert {who for _, who in card.seen} == {mine}


def test_a_version_without_such_a_place_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "attribute", lambda *words: None)
    assert "no registry of attention backends" in register()


@pytest.mark.parametrize("missing", ["_backends", "_constraints", "register"])
def test_a_registry_of_another_kind_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delattr(Registry, missing)
    before = list(Names)
    assert "another kind" in register()
    assert list(Names) == before
