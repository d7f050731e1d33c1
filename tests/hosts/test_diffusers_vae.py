"""Diffusers' VAE as our program: what it gives, when it steps aside, that it leaves no trace."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from lib_rocm_sd import report
from tests.vae.vae_models import error

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from lib_rocm_sd.commands import little_model
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts.diffusers import pipeline as host
from lib_rocm_sd.hosts.diffusers import vae as diffusers_vae
from lib_rocm_sd.vae.program import Program


class Pipeline:
    """All that `patched` asks of a pipeline."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """With the little model's VAE, its weights wanting no gradients; no events yet."""
    vae = diffusers.AutoencoderKL.from_pretrained(
        little_model.MODEL / "vae", low_cpu_mem_usage=False
    )
    monkeypatch.setattr(report.report, "_events", {})
    return Pipeline(vae.eval().requires_grad_(False))


def latent(size: int = 8) -> torch.Tensor:
    return torch.randn((1, 4, size, size), generator=torch.Generator("cpu").manual_seed(0))


def image(size: int = 32) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand((1, 3, size, size), generator=generator) * 2 - 1


def forwards(pipeline: Pipeline) -> list[Any]:
    parts = (pipeline.vae.decoder, pipeline.vae.encoder)
    return [part.__dict__.get("forward") for part in parts]


def events() -> str:
    return "\n".join(report.snapshot()["events"])


def test_a_forward_of_ours_that_was_put_back_afterwards_is_no_obstacle(pipeline: Pipeline) -> None:
    decoder = pipeline.vae.decoder
    with host.patched(pipeline):
        kept = decoder.forward
    decoder.forward = kept  # as an extension does that has stored it
    expected = pipeline.vae.decode(latent()).sample
    with host.patched(pipeline):
        assert decoder.forward is not kept
        assert error(pipeline.vae.decode(latent()).sample, expected) < 1e-3
    assert forwards(pipeline) == [None, None]


def test_decode_and_encode_give_what_they_gave(pipeline: Pipeline) -> None:
    vae = pipeline.vae
    decoded, encoded = vae.decode(latent()).sample, vae.encode(image()).latent_dist.mean
    report.begin()
    with host.patched(pipeline) as patch:
        assert set(patch.vae.programs) == {"decoder", "encoder"}
        assert not patch.vae.left_alone
        assert error(vae.decode(latent()).sample, decoded) < 1e-5
        assert error(vae.encode(image()).latent_dist.mean, encoded) < 1e-5
        assert vae.decode(latent(), return_dict=False)[0].shape == (1, 3, 32, 32)
    ran = {row["op"] for row in report.snapshot()["rows"]}
    assert {"conv 3x3", "conv 3x3 stride 2", "conv upsample", "attention"} <= ran
    assert not events()


def test_nothing_remains(pipeline: Pipeline) -> None:
    before = pipeline.vae.decode(latent()).sample
    with host.patched(pipeline):
        assert all(isinstance(item, diffusers_vae.VaeStandIn) for item in forwards(pipeline))
    assert forwards(pipeline) == [None, None]
    with pytest.raises(ZeroDivisionError), host.patched(pipeline):
        raise ZeroDivisionError
    assert forwards(pipeline) == [None, None]
    assert torch.equal(pipeline.vae.decode(latent()).sample, before)


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, True),
        ({"vae": "auto"}, True),
        ({"vae": "whole"}, True),
        ({"vae": "banded"}, False),
        ({"budget_bytes": 1 << 20}, False),
    ],
    ids=str,
)
def test_whole_or_in_bands_the_picture_is_the_same(
    pipeline: Pipeline, options: dict[str, Any], whole: bool
) -> None:
    decoded = pipeline.vae.decode(latent(32)).sample
    with host.patched(pipeline, **options) as patch:
        ours = pipeline.vae.decode(latent(32)).sample
        plan = patch.vae.programs["decoder"].last_plan
    assert plan is not None
    assert plan.whole is whole
    assert error(ours, decoded) < 1e-5


def test_it_can_be_left_alone(pipeline: Pipeline) -> None:
    with host.patched(pipeline, vae=False) as patch:
        assert forwards(pipeline) == [None, None]
        assert not patch.vae.programs
        assert patch.replaced == 2


@pytest.mark.parametrize(
    "options", [{"vae": "fast"}, {"vae": 1}, {"vae": None}, {"budget_bytes": -1}], ids=str
)
def test_nonsense_is_refused_and_changes_nothing(
    pipeline: Pipeline, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="has to be True|memory budget"):
        host.patched(pipeline, **options).__enter__()
    assert forwards(pipeline) == [None, None]


def test_patched_twice_is_patched_once(pipeline: Pipeline) -> None:
    with host.patched(pipeline):
        outer = forwards(pipeline)
        with host.patched(pipeline, vae="banded") as inner:
            assert (dict(inner.vae.programs), dict(inner.vae.left_alone)) == ({}, {})
            assert forwards(pipeline) == outer
        assert forwards(pipeline) == outer
    assert forwards(pipeline) == [None, None]


def test_a_forward_set_meanwhile_stays(pipeline: Pipeline) -> None:
    newer = pipeline.vae.decoder.forward
    with host.patched(pipeline):
        pipeline.vae.decoder.forward = newer
    assert forwards(pipeline) == [newer, None]


def test_a_copy_made_meanwhile_is_diffusers_own(pipeline: Pipeline) -> None:
    decoded = pipeline.vae.decode(latent()).sample
    mid = "decoder.mid_block.attentions.0"
    own = type(pipeline.vae.get_submodule(mid).processor)
    with host.patched(pipeline) as patch:
        copies = [copy.deepcopy(pipeline.vae), pickle.loads(pickle.dumps(pipeline.vae))]
        for other in copies:
            assert torch.equal(other.decode(latent()).sample, decoded)
            assert type(other.get_submodule(mid).processor) is own
        assert patch.vae.programs["decoder"].last_plan is None


def test_a_forward_that_was_kept_is_diffusers_own(pipeline: Pipeline) -> None:
    decoded = pipeline.vae.decode(latent()).sample
    z = pipeline.vae.post_quant_conv(latent())
    with host.patched(pipeline):
        kept = pipeline.vae.decoder.forward
    assert torch.equal(kept(z), decoded)


@pytest.mark.parametrize("offloaded", [False, True])
def test_an_offloaded_vae_keeps_nothing_on_the_gpu(pipeline: Pipeline, offloaded: bool) -> None:
    """As enable_model_cpu_offload does it: the VAE has a hook that moves it."""
    pipeline.vae._hf_hook = object() if offloaded else None
    with host.patched(pipeline) as patch:
        pipeline.vae.decode(latent())
        assert bool(patch.vae.programs["decoder"]._ready) is not offloaded


# --- when it steps aside


@pytest.mark.parametrize("way", ["tiling", "slicing"])
def test_diffusers_own_tiling_is_left_alone(pipeline: Pipeline, way: str) -> None:
    getattr(pipeline.vae, f"enable_{way}")()
    with host.patched(pipeline) as patch:
        assert forwards(pipeline) == [None, None]
        assert not patch.vae.programs
    assert all(f"{way} is switched on" in why[0] for why in patch.vae.left_alone.values())
    assert f"decoder is left alone: {way} is switched on; vae.disable_{way}()" in events()


@pytest.mark.parametrize("way", ["tiling", "slicing"])
def test_tiling_switched_on_meanwhile_is_torchs(pipeline: Pipeline, way: str) -> None:
    vae, size = pipeline.vae, 48
    z = latent(size).expand(2, 4, size, size)
    getattr(vae, f"enable_{way}")()
    own = vae.decode(z).sample
    getattr(vae, f"disable_{way}")()
    with host.patched(pipeline) as patch:
        getattr(vae, f"enable_{way}")()
        assert torch.equal(vae.decode(z).sample, own)
        assert patch.vae.programs["decoder"].last_plan is None
        assert f"decoder ran on torch's own code: {way} is switched on" in events()
        getattr(vae, f"disable_{way}")()
        vae.decode(latent())
        assert patch.vae.programs["decoder"].last_plan is not None


def test_an_unknown_structure_is_left_alone_with_the_reason(pipeline: Pipeline) -> None:
    theirs = pipeline.vae.decoder.forward

    def forward(sample: Any, *more: Any) -> Any:
        return theirs(sample, *more) * 2

    pipeline.vae.decoder.forward = forward
    doubled = pipeline.vae.decode(latent()).sample
    with host.patched(pipeline) as patch:
        assert forwards(pipeline)[0] is forward
        assert torch.equal(pipeline.vae.decode(latent()).sample, doubled)
    assert list(patch.vae.programs) == ["encoder"]
    why = "decoder.forward has been replaced (forward of test_diffusers_vae.py)"
    assert patch.vae.left_alone == {"decoder": (why,)}
    assert f"decoder is left alone: {why}" in events()
    assert forwards(pipeline)[0] is forward


def test_a_structure_that_changes_meanwhile_is_torchs(pipeline: Pipeline) -> None:
    with host.patched(pipeline):
        pipeline.vae.decoder.conv_act = torch.nn.ReLU()
        ours = pipeline.vae.decode(latent()).sample
    assert torch.equal(ours, pipeline.vae.decode(latent()).sample)
    assert "decoder ran on torch's own code: conv_act is a ReLU, not SiLU" in events()


@pytest.mark.parametrize("where", ["latent", "weights"])
def test_gradients_are_torchs(pipeline: Pipeline, where: str) -> None:
    z = latent()
    (z if where == "latent" else pipeline.vae).requires_grad_(True)
    with host.patched(pipeline):
        pipeline.vae.decode(z).sample.sum().backward()
    wanted = z if where == "latent" else pipeline.vae.decoder.conv_in.weight
    assert wanted.grad is not None and wanted.grad.abs().sum() > 0
    assert "gradients are wanted" in events()
    with host.patched(pipeline) as patch, torch.no_grad():
        pipeline.vae.decode(z)
        assert patch.vae.programs["decoder"].last_plan is not None


@pytest.mark.parametrize(
    ("where", "dtype", "kernels", "why"),
    [
        ("cpu", torch.float32, ["no GPU"], ""),
        ("meta", torch.float32, [], "it is in float32"),
        ("meta", torch.float16, [], ""),
        ("meta", torch.float16, ["no compiler", "none at all"], "no compiler; none at all"),
    ],
    ids=str,
)
def test_on_a_gpu_the_kernels_and_a_half_dtype_are_needed(
    monkeypatch: pytest.MonkeyPatch, where: str, dtype: torch.dtype, kernels: list[str], why: str
) -> None:
    monkeypatch.setattr(engine, "usable", lambda device, op, session: kernels)
    found = diffusers_vae.unsuited(torch.empty(1, dtype=dtype, device=where))
    assert found == why or (why and found.startswith(why))


@pytest.mark.parametrize(
    ("options", "ours"),
    [({}, False), ({"vae": "banded"}, True), ({"budget_bytes": 1 << 20}, True)],
    ids=str,
)
def test_bands_and_a_budget_are_heeded_all_the_same(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], ours: bool
) -> None:
    monkeypatch.setattr(diffusers_vae, "unsuited", lambda weight, session: "it is slower")
    with host.patched(pipeline, **options) as patch:
        pipeline.vae.decode(latent(32))
        assert (patch.vae.programs["decoder"].last_plan is not None) is ours
    assert ("torch's own code: it is slower" in events()) is not ours


def test_more_than_an_image_is_torchs(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def forward(self: Any, sample: Any, latent_embeds: Any = None) -> Any:
        seen.append(latent_embeds)
        return sample

    monkeypatch.setattr(type(pipeline.vae.decoder), "forward", forward)
    forward.__module__ = type(pipeline.vae.decoder).__module__
    with host.patched(pipeline):
        pipeline.vae.decoder(latent(), latent_embeds=latent())
        assert len(seen) == 1
        pipeline.vae.decoder(latent(), None)
        assert len(seen) == 1
    assert "it was given more than an image" in events()


@pytest.mark.parametrize(
    ("trouble", "raised"),
    [
        (RuntimeError("no such kernel"), None),
        (KeyError("x"), None),
        (torch.cuda.OutOfMemoryError("HIP out of memory"), RuntimeError),
        (ValueError("a caller's mistake"), ValueError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_our_failure_costs_no_picture(
    pipeline: Pipeline,
    monkeypatch: pytest.MonkeyPatch,
    trouble: BaseException,
    raised: type[BaseException] | None,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise trouble

    decoded = pipeline.vae.decode(latent()).sample
    monkeypatch.setattr(Program, "__call__", fail)
    with host.patched(pipeline):
        if raised is not None:
            with pytest.raises(raised):
                pipeline.vae.decode(latent())
            return
        assert torch.equal(pipeline.vae.decode(latent()).sample, decoded)
    assert "our program failed: " in events()


def test_other_weights_are_seen(pipeline: Pipeline) -> None:
    with host.patched(pipeline):
        pipeline.vae.decode(latent())
        with torch.no_grad():
            pipeline.vae.decoder.conv_out.bias.add_(1)
        ours = pipeline.vae.decode(latent()).sample
    assert error(ours, pipeline.vae.decode(latent()).sample) < 1e-5


def test_a_pipeline_with_another_kind_of_vae_is_no_error() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = torch.nn.Linear(1, 1)

    with host.patched(Pipeline(Odd())) as patch:
        assert set(patch.vae.left_alone) == {"decoder"}
    with host.patched(Pipeline(None)) as patch:
        assert not patch.vae.left_alone
