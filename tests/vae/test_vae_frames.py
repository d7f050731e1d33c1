"""Wan's and Qwen-Image's VAE, whose convolutions run over time, for a single picture: as the real
classes of diffusers compute it. A video stays theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd import report
from lib_rocm_sd.hosts.diffusers.vae import patched_vae
from lib_rocm_sd.hosts.read.vae import read
from lib_rocm_sd.ops.layer_norm import rms
from lib_rocm_sd.vae import plan
from lib_rocm_sd.vae.plan import BandPlanner
from lib_rocm_sd.vae.program import SCALES, Program
from lib_rocm_sd.vae.trace import chain
from tests.vae.vae_models import error, fill, fixed, needs_half, own, torchs

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
CLASSES = ("AutoencoderKLQwenImage", "AutoencoderKLWan")


def vae(name: str = CLASSES[0], width: int = 16, **settings: Any) -> Any:
    """A small random one."""
    made = getattr(diffusers, name, None)
    if made is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    model = made(base_dim=width, z_dim=16, dim_mult=[1, 2], num_res_blocks=1, **settings)
    for key, tensor in fill(model).named_parameters():
        if key.endswith("gamma"):
            tensor.data += 1
    return model.requires_grad_(False)


def picture(role: str, height: int = 7, width: int = 5, frames: int = 1) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    channels, factor = (16, 1) if role == "decoder" else (3, 2)
    size = (2 if frames == 1 else 1, channels, frames, height * factor, width * factor)
    return torch.randn(size, generator=generator)


def by_ours(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Program(module)(x.squeeze(2)).unsqueeze(2)


@pytest.mark.parametrize("role", ["decoder", "encoder"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_picture_is_the_hosts(name: str, role: str) -> None:
    module = getattr(vae(name, temperal_downsample=[True]), role).double()
    x = picture(role).double()
    first = module(x, feat_cache=[None] * 64, feat_idx=[0])
    assert error(by_ours(module, x), first) < 1e-7  # theirs enlarges in float32
    assert torch.equal(first, own(module, x))


@needs_half
@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_half_is_no_worse_than_the_hosts(role: str) -> None:
    module, x = getattr(vae(), role), picture(role)
    exact = own(module, x)
    module = module.half()
    assert error(by_ours(module, x.half()), exact) <= error(own(module, x.half()), exact)


@needs_half
def test_what_overflows_half_is_made_with_smaller_values() -> None:
    decoder, x = vae().decoder, picture("decoder")
    decoder.conv_in.weight.data *= 1e5
    exact = own(decoder, x)
    program = Program(decoder.half())
    made = program(x.half().squeeze(2)).unsqueeze(2)
    assert not own(decoder, x.half()).isfinite().all()
    assert error(made, exact) < 0.02
    assert program.scales != SCALES[0]


def test_bands_have_the_whole_pictures_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_ROWS", 8)
    monkeypatch.setattr(rms, "CHUNK_BYTES", 4096)
    decoder = vae().decoder.double()
    x = picture("decoder", 23, 7)[:1].double()
    planner = BandPlanner(chain(read(decoder), 1, 23, 7, x.dtype), torchs)
    smallest = planner.smallest(1 << 40)
    assert not smallest.whole
    assert smallest.peak_bytes < planner.whole().peak_bytes
    assert error(fixed(decoder, smallest)(x.squeeze(2)), Program(decoder)(x.squeeze(2))) < 1e-12


def test_384_channels_are_attended_to_with_zeros_up_to_a_head_size_of_the_kernel() -> None:
    decoder = vae(width=192).decoder
    step = next(step for step in read(decoder).steps if step.name.startswith("mid_block.att"))
    assert (step.in_channels, step.head_dim) == (384, 512)  # type: ignore[union-attr]
    x = picture("decoder", 3, 5)
    assert error(by_ours(decoder, x), own(decoder, x)) < 1e-5


def test_what_is_not_known_is_a_reason() -> None:
    decoder = vae().decoder
    decoder.norm_out.bias = 0.5
    decoder.conv_out._padding = (1, 1, 1, 1, 1, 1)
    decoder.up_blocks[0].upsamplers[0].mode = "none"
    reasons = "; ".join(read(decoder).reasons)
    for reason in ("norm_out has a bias", "conv_out._padding is", "upsamplers.0.mode is none"):
        assert reason in reasons


def test_a_gain_that_changes_is_seen() -> None:
    decoder, x = vae().decoder, picture("decoder")
    program = Program(decoder)
    program(x.squeeze(2))
    decoder.norm_out.gamma.mul_(2)
    assert error(program(x.squeeze(2)).unsqueeze(2), own(decoder, x)) < 1e-5


@pytest.mark.parametrize("name", CLASSES)
def test_diffusers_pictures_are_ours_and_its_videos_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.report, "_events", {})
    model = vae(name, temperal_downsample=[True])
    latent, video = picture("decoder"), picture("decoder", frames=3)
    pixels, film = picture("encoder"), picture("encoder", frames=5)

    def everything() -> list[torch.Tensor]:
        with torch.no_grad():
            decoded = [model.decode(each).sample for each in (latent, video)]
            return decoded + [model.encode(each).latent_dist.mean for each in (pixels, film)]

    before = everything()
    with patched_vae(model, "auto", None) as patch:
        inside = everything()
        assert patch.left_alone == {}
        assert all(program.last_plan is not None for program in patch.programs.values())
    for index, (one, other) in enumerate(zip(inside, before, strict=True)):
        if index % 2:
            assert torch.equal(one, other)
        else:
            assert 0 < error(one, other) < 1e-5
    assert all(torch.equal(*pair) for pair in zip(everything(), before, strict=True))
    assert "it is given a video" in "\n".join(report.snapshot()["events"])


def frame_by_frame(model: Any, video: torch.Tensor) -> torch.Tensor:
    cache = [None] * 64
    frames = [frame.contiguous() for frame in video.split(1, dim=2)]
    return torch.cat([model.decoder(each, feat_cache=cache, feat_idx=[0]) for each in frames], 2)


def streamed(model: Any, video: torch.Tensor) -> torch.Tensor:
    """A call a frame, with a cache that somebody keeps."""
    model.clear_cache()
    model.clear_cache = lambda: None
    try:
        return torch.cat([model.decode(each).sample for each in video.split(1, dim=2)], 2)
    finally:
        del model.clear_cache


def still(model: Any, video: torch.Tensor) -> torch.Tensor:
    frames: torch.Tensor = video[:, :3, :1].expand(-1, -1, 5, -1, -1)
    made: torch.Tensor = model.encode(frames).latent_dist.mean
    return made


def in_tiles(model: Any, video: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model.tiled_decode(video).sample
    return made


@pytest.mark.parametrize("way", [frame_by_frame, streamed, still, in_tiles])
def test_a_video_is_the_hosts_whoever_goes_through_its_frames(
    way: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    model, video = vae(temperal_downsample=[True]), picture("decoder", 6, 8, frames=3)
    right = way(model, video)
    with patched_vae(model, "auto", None):
        assert torch.equal(way(model, video), right)
    assert not {"_decode", "_encode"} & vars(model).keys()


def test_a_picture_of_a_batch_and_a_copy_of_the_vae() -> None:
    model, latents = vae(), picture("decoder")
    right = model.decode(latents[1:]).sample
    with patched_vae(model, "auto", None) as patch:
        made, other = model.decode(latents[1:]).sample, copy.deepcopy(model)
        assert patch.programs["decoder"].last_plan is not None
        model.decoder.conv_in.weight.zero_()
        assert torch.equal(other.decode(latents[1:]).sample, right)
    assert 0 < error(made, right) < 1e-5


def test_after_a_change_is_undone_pictures_are_ours_again() -> None:
    model, latent = vae(), picture("decoder")
    with patched_vae(model, "auto", None) as patch:
        hook = model.decoder.conv_in.register_forward_hook(lambda *_: None)
        model.decode(latent)
        program = patch.programs["decoder"]
        assert "conv_in has forward hooks" in program.reasons
        hook.remove()
        program.last_plan = None
        model.decode(latent)
        assert program.last_plan is not None
