"""Stable Video Diffusion's UNet in diffusers: its blocks over frames."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.graph_tape import recording_cpu
from tests.unet import unet_models as models

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.diffusers import pipeline as host
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.takeover import take_over

BF16, FRAMES = torch.bfloat16, 3
CONFIG: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    "num_attention_heads": (2, 4),
    "cross_attention_dim": models.KEYS_DIM,
    "layers_per_block": 1,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 24,
}


@pytest.fixture
def unet() -> Any:
    return models.fill(diffusers.UNetSpatioTemporalConditionModel(**CONFIG)).to(BF16)


def inputs(keys: int = 1, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Two videos of 3 frames."""
    given = {
        "sample": models.draw(2, FRAMES, 8, 6, 10),
        "encoder_hidden_states": models.draw(2, keys, models.KEYS_DIM, seed=2),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]] * 2),
    }
    return {"timestep": torch.tensor(5), **models.in_dtype(given, dtype)}


@pytest.mark.parametrize("keys", [1, 5])
def test_blocks_over_frames_are_ours(unet: Any, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing attends to a picture's one key: its value is what that would give."""
    given, attention, places = inputs(keys), compute.attention, []

    def noted(calls: Any, place: str, *tensors: Any) -> torch.Tensor:
        places.append(place.partition(" ")[0])
        return attention(calls, place, *tensors)

    monkeypatch.setattr(compute, "attention", noted)
    theirs = models.step(unet, given)
    exact = models.step(copy.deepcopy(unet).double(), models.in_dtype(given, torch.float64))
    with host.patched(SimpleNamespace(unet=unet), unet=True) as patch:
        for _ in range(2):
            places.clear()
            ours = models.step(unet, given)
        assert sorted(places) == ["cross"] * 8 * (keys > 1) + ["own"] * 8
        rows = patch.unet.rows()
        totals = {row.kind: row.total for row in rows}
        counted = ("residual block over frames", "transformer", "transformer block")
        assert [totals[kind] for kind in counted] == [8, 4, 8]
        assert all(row.ours == row.total and not row.partly for row in rows)
    assert models.errors(ours, exact)[1] <= 1.2 * models.errors(theirs, exact)[1]
    assert not torch.equal(ours, theirs)
    assert torch.equal(models.step(unet, given), theirs)
    assert not any("forward" in vars(module) for module in unet.modules())


def left(patch: Any, kind: str) -> Any:
    (row,) = (row for row in patch.unet.rows() if row.kind == kind)
    return row.left


def test_a_block_over_frames_alone(unet: Any) -> None:
    """Its result is as near to float64 as the host's; what is not as it was read is left."""
    kind = "transformer block"
    block = unet.down_blocks[0].attentions[0].temporal_transformer_blocks[0]
    x = models.draw(2 * FRAMES, 35, 32).to(BF16)
    context = models.draw(70, 3, models.KEYS_DIM, seed=2).to(BF16)
    exact = copy.deepcopy(block).double()(x.double(), FRAMES, context.double())
    with torch.no_grad():
        theirs, before = block(x, FRAMES, context), x.clone()
        with host.patched(SimpleNamespace(unet=unet), unet=True) as patch:
            ours = block(x, FRAMES, context)
            assert torch.equal(x, before) and not torch.equal(ours, theirs)
            assert models.errors(ours, exact)[0] <= 2 * models.errors(theirs, exact)[0]
            with pytest.raises(RuntimeError, match="invalid for input"):  # the host's own
                block(x, 4, context)
            block.set_chunk_feed_forward(1)
            block(x, FRAMES, context)
            assert left(patch, kind) == {"block._chunk_size is 1": 1}
            block.set_chunk_feed_forward(None)
            hook = block.ff_in.net[2].register_forward_hook(lambda *_: None)
            block(x, FRAMES, context)
            assert left(patch, kind) == {"ff_in.net.2 has forward hooks": 1}
            hook.remove()
            hook = block.ff.register_forward_hook(lambda *_: None)  # it is called as it is
            partly = block(x, FRAMES, context)
            assert partly.shape == theirs.shape and not left(patch, kind)
            assert models.errors(partly, exact)[0] <= 2 * models.errors(theirs, exact)[0]
            hook.remove()
            assert torch.equal(block(x, FRAMES, context), ours) and not left(patch, kind)
        assert torch.equal(block(x, FRAMES, context), theirs)


def test_a_residual_block_over_frames_alone(unet: Any) -> None:
    """Its result is as near to float64 as the host's, also where a frame stands still."""
    kind = "residual block over frames"
    block = unet.up_blocks[1].resnets[0]
    weight = block.temporal_res_block.conv1.weight
    x = models.draw(2 * FRAMES, 96, 5, 7).to(BF16)
    emb, still = models.draw(2 * FRAMES, 128, seed=2).to(BF16), torch.zeros(2, FRAMES, dtype=BF16)
    still[1, 1] = 1
    exact = copy.deepcopy(block).double()(x.double(), emb.double(), still.double())
    with torch.no_grad():
        theirs, before = block(x, emb, still), x.clone()
        with host.patched(SimpleNamespace(unet=unet), unet=True) as patch:
            ours = block(x, emb, still)
            assert torch.equal(x, before) and not torch.equal(ours, theirs)
            assert models.errors(ours, exact)[0] <= 2 * models.errors(theirs, exact)[0]
            assert all(tap.is_contiguous() for tap in weight.flatten(2).unbind(2))
            assert torch.equal(ours[4], block.spatial_res_block(x, emb)[4]) and not left(
                patch, kind
            )
            mix = block.time_mixer.mix_factor.clone()
            block.time_mixer.mix_factor.add_(2)
            assert models.errors(block(x, emb, still), theirs)[0] > 0.05
            block.time_mixer.mix_factor.copy_(mix)
            seen = []
            hook = block.spatial_res_block.register_forward_hook(lambda *_: seen.append(1))
            assert torch.equal(block(x, emb, still), ours) and seen == [1]
            hook.remove()
            alone = block(x[:1], emb[:1], still[:1, :1])
            assert models.errors(alone, exact[:1])[0] > 0.05
            block.temporal_res_block.conv2.register_forward_hook(lambda *_: None)
            block(x, emb, still)
            assert left(patch, kind) == {"temporal_res_block.conv2 has forward hooks": 1}
        assert weight.is_contiguous() and torch.equal(block(x, emb, still), theirs)


def test_a_transformer_over_frames_alone(unet: Any) -> None:
    """As a residual block; blocks and modules within are called, whoever has their forwards."""
    transformer, seen = unet.up_blocks[1].attentions[0], []
    x = models.draw(2 * FRAMES, 32, 5, 7).to(BF16)
    context, still = models.draw(6, 2, models.KEYS_DIM, seed=2).to(BF16), torch.zeros(2, FRAMES)
    still[1, 1] = 1
    exact = copy.deepcopy(transformer).double()(x.double(), context.double(), still).sample
    with torch.no_grad():
        (theirs,), before = transformer(x, context, still, return_dict=False), x.clone()
        with host.patched(SimpleNamespace(unet=unet), unet=True) as patch:
            ours = transformer(x, context, still).sample
            assert torch.equal(x, before) and not torch.equal(ours, theirs)
            assert models.errors(ours, exact)[0] <= 2 * models.errors(theirs, exact)[0]
            over = transformer.temporal_transformer_blocks[0]
            hooks = [
                module.register_forward_hook(lambda *_: seen.append(1))
                for module in (over, transformer.time_pos_embed)
            ]
            assert torch.equal(transformer(x, context, still).sample, ours) and seen == [1, 1]
            for hook in hooks:
                hook.remove()
            over.forward = lambda h, **_: torch.zeros_like(h)
            (replaced,) = transformer(x, context, still, return_dict=False)
            assert models.errors(replaced, exact)[0] > 0.05 and not left(patch, "transformer")
            del over.forward
            transformer.time_mixer.switch_spatial_to_temporal_mix = True
            transformer(x, context, still)
            why = "time_mixer.switch_spatial_to_temporal_mix is True"
            assert left(patch, "transformer") == {why: 1}
            transformer.time_mixer.switch_spatial_to_temporal_mix = False
        assert torch.equal(transformer(x, context, still).sample, theirs)


def test_a_recorded_step_of_a_video(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        {**inputs(), "sample": models.draw(2, FRAMES, 8, 6, 10, seed=n).to(BF16)} for n in range(4)
    ]
    taken = take_over(unet, Session.of("Auto", report=Report()))
    launched = [models.step(unet, each).clone() for each in given]
    taken.give_back()
    desk = recording_cpu(monkeypatch, baked=True)
    taken = take_over(unet, Session.of("Auto", report=Report()))
    recorded = [models.step(unet, each).clone() for each in given]
    assert all(map(torch.equal, recorded, launched))
    assert desk.recorded and desk.replayed >= desk.recorded
    assert all(row.ours == row.total and not row.partly for row in taken.report())
    taken.give_back()
