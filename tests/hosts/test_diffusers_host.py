"""Diffusers' pipelines with their attention through the engine; the VAE: test_diffusers_vae.py."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from lib_rocm_sd import report
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from diffusers.models import attention_processor as theirs

from lib_rocm_sd.commands import little_model
from lib_rocm_sd.hosts.diffusers import pipeline as host
from tests.commands.tiny_model import pipeline

__all__ = ["pipeline"]

PROMPT = "a red circle left of a blue square"
STEPS = 6


class Exact:
    """Attention computed in float64, so that it cannot be torch's own result by accident."""

    def __init__(self) -> None:
        self.calls = 0

    def attention(self, q: Any, k: Any, v: Any, mask: Any, scale: Any, session: Session) -> Any:
        self.calls += 1
        return reference(AttentionInputs(q, k, v, mask, scale)).to(q.dtype)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Exact:
    stand_in = Exact()
    monkeypatch.setattr(host, "functional", stand_in)
    return stand_in


def modules_of(pipeline: Any) -> list[Any]:
    return [
        module
        for part in (pipeline.unet, pipeline.vae)
        for module in part.modules()
        if isinstance(module, theirs.Attention)
    ]


def picture(pipeline: Any, steps: int = STEPS) -> np.ndarray[Any, Any]:
    """In 0..1, not rounded."""
    return pipeline(
        PROMPT,
        num_inference_steps=steps,
        guidance_scale=little_model.GUIDANCE,
        latents=little_model.latents(pipeline, seed=0),
        output_type="np",
    ).images[0]


# --- one module at a time


class Holder:
    """All that `patched` asks of a pipeline."""

    def __init__(self, unet: torch.nn.Module) -> None:
        self.unet = unet


def build(processor: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    attn = theirs.Attention(query_dim=64, heads=4, dim_head=16, **options)
    attn.set_processor(processor)
    return attn.eval().requires_grad_(False)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias and residual": {"bias": True, "residual_connection": True, "rescale_output_factor": 1.5},
    "group norm": {"norm_num_groups": 4},
    "unscaled": {"scale_qk": False},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("picture_shaped", [False, True], ids=["tokens", "picture"])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_a_module_computes_what_it_did(name: str, picture_shaped: bool, masked: bool) -> None:
    attn = build(theirs.AttnProcessor(), **OPTIONS[name])
    x = torch.randn(2, 64, 3, 5) if picture_shaped else torch.randn(2, 15, 64)
    mask = torch.randn(2, 1, 15) if masked else None
    expected = attn(x, attention_mask=mask)
    with host.patched(Holder(attn)) as patch:
        assert patch.replaced == 1
        result = attn(x, attention_mask=mask)
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("norm", [None, "layer_norm", "group_norm"])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_text_is_attended_to_as_before(norm: str | None, masked: bool) -> None:
    attn = build(
        theirs.AttnProcessor2_0(),
        cross_attention_dim=32,
        cross_attention_norm=norm,
        cross_attention_norm_num_groups=4,
    )
    x, text = torch.randn(2, 9, 64), torch.randn(2, 7, 32)
    mask = torch.randn(2, 1, 7) if masked else None
    expected = attn(x, encoder_hidden_states=text, attention_mask=mask)
    with host.patched(Holder(attn)):
        result = attn(x, encoder_hidden_states=text, attention_mask=mask)
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=1e-5)


def test_a_spatial_norm_gets_its_embedding() -> None:
    attn = build(theirs.AttnProcessor2_0(), spatial_norm_dim=8)
    x, embedding = torch.randn(1, 64, 4, 4), torch.randn(1, 8, 2, 2)
    expected = attn(x, temb=embedding)
    with host.patched(Holder(attn)):
        result = attn(x, temb=embedding)
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("processor", "dtype"),
    [
        (theirs.AttnProcessor(), torch.float32),
        (theirs.SlicedAttnProcessor(1), torch.float32),
        (theirs.AttnProcessor2_0(), torch.bfloat16),
    ],
    ids=lambda value: getattr(type(value), "__name__", None) if callable(value) else str(value),
)
def test_upcast_attention_is_heeded_where_the_replaced_processor_does(
    monkeypatch: pytest.MonkeyPatch, processor: Any, dtype: torch.dtype
) -> None:
    seen = []

    class Spy(Exact):
        def attention(self, q: Any, k: Any, v: Any, mask: Any, scale: Any, session: Session) -> Any:
            seen.extend([q.dtype, k.dtype, v.dtype])
            return super().attention(q, k, v, mask, scale, session)

    monkeypatch.setattr(host, "functional", Spy())
    attn = build(processor, upcast_attention=True).to(torch.bfloat16)
    with host.patched(Holder(attn)):
        out = attn(torch.randn(1, 5, 64, dtype=torch.bfloat16))
    assert seen == [dtype] * 3
    assert out.dtype == torch.bfloat16


def test_q_k_and_v_are_views(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = build(theirs.AttnProcessor2_0())
    made = []
    for name in ("to_q", "to_k", "to_v"):
        getattr(attn, name).register_forward_hook(lambda *call: made.append(call[-1].data_ptr()))

    class Spy(Exact):
        def attention(self, q: Any, k: Any, v: Any, mask: Any, scale: Any, session: Session) -> Any:
            assert [t.data_ptr() for t in (q, k, v)] == made
            assert [t.shape for t in (q, k, v)] == [(2, 6, 4, 16)] * 3
            return super().attention(q, k, v, mask, scale, session)

    monkeypatch.setattr(host, "functional", Spy())
    with host.patched(Holder(attn)):
        attn(torch.randn(2, 6, 64))
    assert len(made) == 3


# --- which processors, and for how long


def test_every_attention_is_replaced_and_restored_exactly(pipeline: Any) -> None:
    before = [module.processor for module in modules_of(pipeline)]
    with host.patched(pipeline) as patch:
        during = [module.processor for module in modules_of(pipeline)]
    after = [module.processor for module in modules_of(pipeline)]
    assert patch.replaced == len(before) == 16
    assert not patch.left_alone
    assert all(isinstance(item, host.EngineAttnProcessor) for item in during)
    assert all(a is b for a, b in zip(after, before, strict=True))


def test_who_asks_for_a_processors_class_gets_the_hosts(pipeline: Any) -> None:
    """Adapters make another of that class, and set_default_attn_processor knows some by name."""
    (first, *_) = modules_of(pipeline)
    own = type(first.processor)
    with host.patched(pipeline):
        assert type(first.processor.__class__()) is own
        pipeline.unet.set_default_attn_processor()
        assert type(first.processor) is theirs.AttnProcessor


@pytest.mark.parametrize("when", ["before", "while on"])
@pytest.mark.parametrize("name", ["__call__", "scaled_dot_product_attention"])
def test_what_a_processor_runs_is_watched(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, when: str, name: str
) -> None:
    attn = modules_of(pipeline)[0]
    attn.set_processor(theirs.AttnProcessor2_0())
    owner = type(attn.processor) if name == "__call__" else torch.nn.functional
    own = getattr(owner, name)
    x = torch.randn(1, 6, attn.to_q.in_features)

    def change() -> None:
        monkeypatch.setattr(owner, name, lambda *given, **named: 2 * own(*given, **named))

    with host.patched(pipeline):  # it is seen as it is
        plain = attn(x)
    if when == "before":
        change()
    expected = attn(x) if when == "before" else None
    with host.patched(pipeline) as patch:
        if when == "before":
            assert "has been replaced" in next(iter(patch.left_alone))
        else:
            change()
        made = attn(x)
    assert torch.equal(made, attn(x) if expected is None else expected)
    assert not torch.allclose(made, plain)


def test_a_scale_that_the_processor_does_not_read_changes_nothing(pipeline: Any) -> None:
    attn = modules_of(pipeline)[0]
    x = torch.randn(1, 6, attn.to_q.in_features)
    attn.scale *= 2
    expected = attn(x)
    with host.patched(pipeline):
        assert torch.allclose(attn(x), expected, atol=1e-5)


def test_restored_after_an_error(pipeline: Any) -> None:
    before = [module.processor for module in modules_of(pipeline)]
    with pytest.raises(ZeroDivisionError), host.patched(pipeline):
        raise ZeroDivisionError
    after = [module.processor for module in modules_of(pipeline)]
    assert all(a is b for a, b in zip(after, before, strict=True))


def test_a_gate_is_there_and_whether_to_wait_for_it_is_the_callers_choice(pipeline: Any) -> None:
    for wait in (False, True):
        with host.patched(pipeline, wait=wait):
            gate = engine.gate
            assert gate is not None
            processors = [module.processor for module in modules_of(pipeline)]
            assert {processor.session.patient for processor in processors} == {wait}
        with host.patched(pipeline):
            assert engine.gate is gate


def test_patched_twice_is_patched_once(pipeline: Any) -> None:
    before = [module.processor for module in modules_of(pipeline)]
    with host.patched(pipeline):
        outer = [module.processor for module in modules_of(pipeline)]
        with host.patched(pipeline) as inner:
            assert (inner.replaced, inner.left_alone) == (0, {})
        assert all(a.processor is b for a, b in zip(modules_of(pipeline), outer, strict=True))
    assert all(a.processor is b for a, b in zip(modules_of(pipeline), before, strict=True))


def test_a_processor_set_meanwhile_stays() -> None:
    attn = build(theirs.AttnProcessor2_0())
    newer = theirs.AttnProcessor()
    with host.patched(Holder(attn)):
        attn.set_processor(newer)
    assert attn.processor is newer


def test_other_processors_are_left_alone_and_named() -> None:
    class Foreign(theirs.AttnProcessor2_0):
        """A subclass may do anything."""

    foreign = Foreign()
    attn = build(foreign)
    with host.patched(Holder(torch.nn.Sequential(attn, build(theirs.AttnProcessor())))) as patch:
        assert attn.processor is foreign
    assert (patch.replaced, patch.left_alone) == (1, {"Foreign": 1})
    assert any("1 x Foreign" in event for event in report.snapshot()["events"])


@pytest.mark.skipif(
    "qk_norm" not in inspect.signature(theirs.Attention.__init__).parameters,
    reason="this diffusers cannot normalise queries",
)
def test_normalised_queries_keep_their_own_processor() -> None:
    attn = build(theirs.AttnProcessor2_0(), qk_norm="layer_norm")
    processor = attn.processor
    with host.patched(Holder(attn)) as patch:
        assert attn.processor is processor
        assert (patch.replaced, patch.served, patch.left_alone) == (0, 1, {})


def test_a_pipeline_without_a_unet_is_no_error() -> None:
    with host.patched(object()) as patch:
        assert patch.replaced == 0


# --- whole pictures


def test_the_pictures_agree_in_float32(pipeline: Any, exact: Exact) -> None:
    plain = picture(pipeline)
    with host.patched(pipeline):
        ours = picture(pipeline)
    assert exact.calls == STEPS * 14, "the VAE's attention is its program's"
    assert np.abs(ours - plain).max() <= 2 / 255


def test_the_pictures_agree_through_the_real_engine(pipeline: Any) -> None:
    plain = picture(pipeline, steps=3)
    report.begin()
    with host.patched(pipeline):
        ours = picture(pipeline, steps=3)
    rows = [row for row in report.snapshot()["rows"] if row["op"] == "attention"]
    assert sum(row["calls"] for row in rows) == 3 * 14 + 1
    assert {row["problem"].split()[4] for row in rows} == {
        "D40",
        "D64",
        "D80",
        "D160",
    }
    assert np.abs(ours - plain).max() <= 2 / 255


def test_half_precision_differs_no_more_than_half_itself_does(exact: Exact) -> None:
    whole = picture(little_model.load(little_model.MODEL, torch.float32))
    pipeline = little_model.load(little_model.MODEL, torch.bfloat16)
    plain = picture(pipeline)
    with host.patched(pipeline):
        ours = picture(pipeline)
    assert 0 < np.abs(ours - plain).mean() <= np.abs(plain - whole).mean() < 4 / 255


@pytest.mark.gpu
def test_our_kernel_makes_the_same_pictures() -> None:
    device = torch.device("cuda")
    whole = picture(little_model.load(little_model.MODEL, torch.float32).to(device))
    pipeline = little_model.load(little_model.MODEL, torch.float16).to(device)
    plain = picture(pipeline)
    report.begin()
    with host.patched(pipeline, wait=True):
        ours = picture(pipeline)
    assert not engine.usable(device, session=DEFAULT.patiently())
    ran = {(row["op"], row["variant"]) for row in report.snapshot()["rows"]}
    assert {variant for op, variant in ran if op == "attention"} == {"rocm_sd"}
    assert ("conv 3x3", "rocm_sd") in ran
    assert 0 < np.abs(ours - plain).mean() <= np.abs(plain - whole).mean() < 4 / 255
