"""Whole pipelines of several families: what of their attention is ours, and that all goes back."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from tests.hosts.play import Card, card

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers.models import attention_processor as theirs

from lib_rocm_sd import functional
from lib_rocm_sd.hosts.diffusers import patched, switched_on
from lib_rocm_sd.hosts.diffusers import pipeline as host
from lib_rocm_sd.hosts.diffusers.components import ServedForward
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from tests.hosts import tiny_pipelines as tiny

__all__ = ["card"]

ATTENTIONS = {"SD 1.5": 8, "SDXL": 8, "SD 3.5": 3, "Flux": 2, "Wan": 8}
"""Calls of attention in a step, without the VAE's; Wan's model is called twice in it."""
SERVED = ("SD 3.5", "Flux", "Wan")
"""Those whose processors stay."""


def session() -> Session:
    return Session(report=Report())


def models_of(pipeline: Any) -> list[nn.Module]:
    return [part for part in pipeline.components.values() if isinstance(part, nn.Module)]


def state_of(pipeline: Any) -> list[Any]:
    """All that hangs on a pipeline's modules and processors, by identity."""
    found: list[Any] = []
    for model in models_of(pipeline):
        for name, module in model.named_modules():
            found.append((name, {key: id(value) for key, value in vars(module).items()}))
            processor = getattr(module, "processor", None)
            found.append((type(processor), id(processor), dict(getattr(processor, "__dict__", {}))))
    return found


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch, card: Card) -> Card:
    """Ours in float64, both ways: by the door, and as torch's function."""

    class Door:
        conv = functional.conv

        def attention(self, *words: Any) -> torch.Tensor:
            inputs = AttentionInputs(*words[:5])
            card.seen.append((inputs, words[5]))
            return reference(inputs).to(inputs.q.dtype)

    monkeypatch.setattr(host, "functional", Door())
    return card


# --- pictures


@pytest.mark.parametrize("name", tiny.MAKERS)
def test_pictures_agree_and_all_goes_back(exact: Card, name: str) -> None:
    pipeline, mine = tiny.made(name), session()
    theirs_made = tiny.asked(name, pipeline)
    before = state_of(pipeline)  # a first picture leaves caches of diffusers' own
    with patched(pipeline, session=mine) as patch:
        made = tiny.asked(name, pipeline)
    assert len(exact.seen) == 2 * ATTENTIONS[name]
    assert {who for _, who in exact.seen} == {mine}
    assert (patch.served > 0) == (name in SERVED) and not patch.left_alone
    assert 0 < float((made - theirs_made).abs().max()) < 1e-4 * float(theirs_made.abs().max())
    assert state_of(pipeline) == before
    assert torch.equal(tiny.asked(name, pipeline), theirs_made)


def test_head_sizes_are_the_models(exact: Card) -> None:
    for name, sizes in {"SD 1.5": {40, 80}, "SD 3.5": {64}, "Flux": {128}, "Wan": {128}}.items():
        pipeline = tiny.made(name)
        exact.seen.clear()
        with patched(pipeline, vae=False, session=session()):
            tiny.asked(name, pipeline, steps=1)
        found = {inputs.q.shape[3] for inputs, _ in exact.seen}
        assert found - {16} == sizes, "16: the little VAE's"


def test_a_mask_reaches_ours(exact: Card) -> None:
    """Qwen-Image's, of which tokens of the prompt there are."""
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=128,
        num_attention_heads=1,
        joint_attention_dim=32,
        axes_dims_rope=(16, 56, 56),
    ).eval()
    torch.manual_seed(0)
    mask = torch.ones(1, 7, dtype=torch.bool)
    mask[:, 4:] = False
    given: dict[str, Any] = {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 7, 32),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.ones(1),
        "img_shapes": [(1, 4, 4)],
        "return_dict": False,
    }
    if "txt_seq_lens" in inspect.signature(model.forward).parameters:  # before 0.37
        given["txt_seq_lens"] = [7]
    with torch.no_grad():
        (expected,) = model(**given)
        with patched(Holder(model), session=session()) as patch:
            (made,) = model(**given)
    assert patch.served == 1
    (inputs, _), *_ = exact.seen
    assert inputs.mask is not None and inputs.mask.dtype == torch.bool
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED)
def test_our_kernel_makes_the_same_pictures(name: str) -> None:
    """In bf16, where a model's own rounding is far coarser than the difference of two kernels."""
    pipeline, mine = tiny.made(name, torch.bfloat16).to("cuda"), session()
    plain = tiny.asked(name, pipeline).float()
    with patched(pipeline, vae=False, session=mine, wait=True) as patch:
        made = tiny.asked(name, pipeline).float()
    rows = [row for row in mine.report.snapshot()["rows"] if row["op"] == "attention"]
    assert {row["variant"] for row in rows if " D16 " not in row["problem"]} == {"rocm_sd"}
    assert sum(row["calls"] for row in rows) >= 2 * ATTENTIONS[name] and patch.served
    assert float((made - plain).abs().mean()) < 0.05 * float(plain.std())


# --- for how long


class Holder:
    """All that `patched` asks of a pipeline."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer


@pytest.fixture
def flux() -> Any:
    made = tiny.made("Flux")
    tiny.asked("Flux", made, steps=1)
    return made


def test_after_an_error(flux: Any) -> None:
    before = state_of(flux)
    with pytest.raises(ZeroDivisionError), patched(flux):
        raise ZeroDivisionError
    assert state_of(flux) == before


def test_an_error_of_the_vae_leaves_nothing(flux: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_of(flux)
    monkeypatch.setattr(host, "patched_vae", lambda *words: 1 // 0)
    with pytest.raises(ZeroDivisionError), patched(flux):
        raise AssertionError
    assert state_of(flux) == before


def test_inside_another(exact: Card, flux: Any) -> None:
    before, outer = state_of(flux), session()
    with patched(flux, session=outer):
        during = state_of(flux)
        with patched(flux, session=session()) as inner:
            assert (inner.replaced, inner.served, inner.left_alone) == (0, 0, {})
            tiny.asked("Flux", flux, steps=1)
        assert state_of(flux) == during
    assert state_of(flux) == before
    assert {who for _, who in exact.seen} == {outer}


def test_two_pipelines_that_share_a_transformer(exact: Card, flux: Any) -> None:
    other = diffusers.FluxImg2ImgPipeline(**flux.components)
    before = state_of(flux)
    first, second = switched_on(flux), switched_on(other)
    assert (first.patch.served, second.patch.served) == (2, 0)
    second.off()
    tiny.asked("Flux", flux, steps=1)
    assert exact.seen
    first.off()
    first.off()
    assert state_of(flux) == before

    first, second = switched_on(flux), switched_on(other)
    first.off()
    assert state_of(flux) == before
    second.off()
    assert state_of(flux) == before


def test_two_pipelines_have_their_own_sessions(exact: Card) -> None:
    sessions = {name: session() for name in ("Flux", "Wan")}
    pipelines = {name: tiny.made(name) for name in sessions}
    switches = [switched_on(pipelines[name], session=sessions[name]) for name in sessions]
    for name in sessions:
        exact.seen.clear()
        tiny.asked(name, pipelines[name], steps=1)
        assert {who for _, who in exact.seen} == {sessions[name]}
    for switch in switches:
        switch.off()
    for pipeline in pipelines.values():
        assert not any("forward" in vars(module) for module in pipeline.transformer.modules())


def test_a_copy_has_nothing_of_ours(flux: Any) -> None:
    with patched(flux):
        copied = copy.deepcopy(flux.transformer)
        loaded = pickle.loads(pickle.dumps(flux.transformer))
    for model in (copied, loaded):
        for module in model.modules():
            assert not isinstance(vars(module).get("forward"), ServedForward)
            assert not isinstance(getattr(module, "processor", None), host.EngineAttnProcessor)
        found = [m for m in model.modules() if hasattr(m, "processor")]
        assert all(module.forward.__self__ is module for module in found)


def hooked(module: Any) -> Any:
    """As accelerate's add_hook_to_module does it; gives what stands in the forward's place."""
    module._old_forward = module.forward
    module._hf_hook = object()
    module.forward = lambda *args, **kwargs: module._old_forward(*args, **kwargs)
    return module.forward


def test_offloading_hooks_stay(exact: Card, flux: Any) -> None:
    """The whole model's, as enable_model_cpu_offload sets it, and one on an attention."""
    attention = flux.transformer.transformer_blocks[0].attn
    hooks = hooked(flux.transformer), hooked(attention)
    theirs_made = tiny.asked("Flux", flux)
    with patched(flux):
        made = tiny.asked("Flux", flux)
    assert len(exact.seen) == 4
    assert float((made - theirs_made).abs().max()) < 1e-4
    assert (flux.transformer.forward, attention.forward) == hooks


def test_a_hook_set_meanwhile_stays_and_nothing_of_ours_serves(exact: Card, flux: Any) -> None:
    attention = flux.transformer.transformer_blocks[0].attn
    with patched(flux):
        hook = hooked(attention)
    assert attention.forward is hook
    tiny.asked("Flux", flux, steps=1)
    assert not exact.seen


# --- what is left alone


@pytest.mark.parametrize("whole", [True, False], ids=["torch.compile(model)", "model.compile()"])
@pytest.mark.parametrize("name", ["Flux", "SD 1.5"])
def test_what_is_compiled_is_left_alone(name: str, whole: bool) -> None:
    pipeline, mine = tiny.made(name), session()
    part = "unet" if name == "SD 1.5" else "transformer"
    model = getattr(pipeline, part)
    count = sum(hasattr(module, "processor") for module in model.modules())
    if whole:
        setattr(pipeline, part, torch.compile(model))
    else:
        model.compile()
    before = state_of(pipeline)
    with patched(pipeline, session=mine, vae=False, unet=True) as patch:
        during = state_of(pipeline)[: len(list(model.modules()))]
        assert patch.unet.takeover is None
    assert sum(patch.left_alone.values()) == count
    assert all("it is compiled by torch.compile" in kind for kind in patch.left_alone)
    assert len(during) and state_of(pipeline) == before
    told = "\n".join(mine.report.snapshot()["events"])
    assert "the UNet is left alone: it is compiled" in told


def test_one_compiled_block_is_left_alone(flux: Any) -> None:
    flux.transformer.transformer_blocks[0].compile()
    flux.vae.decoder.mid_block.compile()
    with patched(flux, session=session()) as patch:
        assert patch.served == 1 and sum(patch.left_alone.values()) == 2
        assert patch.vae.left_alone == {"decoder": ("it is compiled by torch.compile",)}


def test_another_attention_backend_is_the_users_choice(exact: Card, flux: Any) -> None:
    attention = flux.transformer.transformer_blocks[0].attn
    attention.set_attention_backend("_native_math")
    with patched(flux, session=session()) as patch:
        tiny.asked("Flux", flux, steps=1)
    assert patch.left_alone == {"FluxAttnProcessor with the backend _native_math": 1}
    assert patch.served == 1 and len(exact.seen) == 1


class Foreign(theirs.JointAttnProcessor2_0):
    """May do anything."""


def test_a_foreign_processor_is_left_alone() -> None:
    pipeline = tiny.made("SD 3.5")
    attention = pipeline.transformer.transformer_blocks[0].attn
    attention.set_processor(Foreign())
    with patched(pipeline, session=session()) as patch:
        assert patch.left_alone == {"Foreign": 1} and patch.served == 2


# --- other processors of diffusers


def test_fused_projections_are_served(exact: Card) -> None:
    pipeline = tiny.made("SDXL")
    pipeline.fuse_qkv_projections()
    theirs_made = tiny.asked("SDXL", pipeline)
    with patched(pipeline, session=session()) as patch:
        made = tiny.asked("SDXL", pipeline)
    assert patch.served and not patch.left_alone
    assert 0 < float((made - theirs_made).abs().max()) < 1e-4


def test_an_ip_adapters_processors_keep_their_place_and_weights(exact: Card) -> None:
    unet = tiny.made("SD 1.5").unet
    adapters = []
    for name, module in unet.named_modules():
        if name.endswith("attn2"):
            adapter = theirs.IPAdapterAttnProcessor2_0(module.to_q.in_features, 32, num_tokens=(4,))
            module.set_processor(adapter.eval())
            adapters.append((module, adapter))
    torch.manual_seed(0)
    text, image = torch.randn(1, 7, 32), [torch.randn(1, 1, 4, 32)]

    def run() -> torch.Tensor:
        module, _ = adapters[0]
        x = torch.randn(1, 9, module.to_q.in_features, generator=torch.manual_seed(0))
        with torch.no_grad():
            made: torch.Tensor = module(x, encoder_hidden_states=(text, image))
        return made

    expected = run()
    with patched(Unet(unet), session=session()) as patch:
        assert all(module.processor is adapter for module, adapter in adapters)
        made = run()
    assert patch.served == len(adapters)
    assert len(exact.seen) == 2, "to the text and to the picture"
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)


class Unet:
    def __init__(self, unet: Any) -> None:
        self.unet = unet
