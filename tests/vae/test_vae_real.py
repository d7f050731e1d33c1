"""The little model's VAE, which has real weights: whole and in bands, in single and in half."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.hosts.read.vae import read
from lib_rocm_sd.vae.plan import BandPlan, Leg
from lib_rocm_sd.vae.program import Program
from tests.vae.vae_models import error, fixed, legs_of, needs_half, own

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny-sd" / "vae"


@lru_cache(maxsize=1)
def vae() -> Any:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    return diffusers.AutoencoderKL.from_pretrained(FOLDER).eval()


def coder(role: str, dtype: torch.dtype) -> nn.Module:
    module: nn.Module = getattr(vae(), role).to(dtype)
    return module


def picture(size: int = 128) -> torch.Tensor:
    """A blue disc and a red bar on a gradient, as the model was trained on: (1, 3, size, size)."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    image = torch.stack((0.5 + 0.2 * x, 0.6 + 0.1 * y, 0.5 + 0.0 * x))
    image[:, (x + 0.3) ** 2 + (y + 0.2) ** 2 < 0.15] = torch.tensor([0.1, 0.2, 0.9])[:, None]
    image[:, (x > 0.3) & (x < 0.6)] = torch.tensor([0.8, 0.1, 0.1])[:, None]
    return image[None] * 2 - 1


@lru_cache(maxsize=1)
def latent() -> torch.Tensor:
    mean = own(coder("encoder", torch.float32), picture())
    return own(vae().quant_conv.float(), mean)[:, :4]


def pixels(image: torch.Tensor) -> torch.Tensor:
    return ((image.float() / 2 + 0.5).clamp(0, 1) * 255).round()


@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_single_precision_is_torchs(role: str) -> None:
    x = latent() if role == "decoder" else picture()
    module = coder(role, torch.float32)
    assert error(Program(module)(x), own(module, x)) < 1e-5


@needs_half
@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_half_is_no_worse_than_torchs(role: str) -> None:
    x = (latent() if role == "decoder" else picture()).half()
    ours, theirs = Program(coder(role, torch.float16))(x), own(coder(role, torch.float16), x)
    exact = own(coder(role, torch.float64), x.double())
    assert error(ours, exact) <= 2 * error(theirs, exact)


@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_half_is_as_close_to_single_as_torchs_is(role: str) -> None:
    """On average, which is less a matter of luck than the largest difference is."""
    x = latent() if role == "decoder" else picture()
    exact = own(coder(role, torch.float32), x)
    module = coder(role, torch.bfloat16)
    ours, theirs = Program(module)(x.bfloat16()), own(module, x.bfloat16())
    vae.cache_clear()  # the weights were rounded
    gaps = [float((made.float() - exact).abs().mean()) for made in (ours, theirs)]
    assert 0 < gaps[0] <= 1.1 * gaps[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_user_calls_banded_is_the_whole_frame(dtype: torch.dtype) -> None:
    x, program = latent().to(dtype), Program(coder("decoder", dtype))
    pictures, plans = [], []
    for mode in ("whole", "banded"):
        pictures.append(pixels(program(x, mode=mode)))
        plans.append(program.last_plan)
    vae.cache_clear()
    assert [plan is not None and plan.whole for plan in plans] == [True, False]
    difference = (pictures[1] - pictures[0]).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() <= 1e-4


@needs_half
def test_bands_make_the_same_picture() -> None:
    """After rounding to bytes: at most 1 apart, on at most one value in ten thousand."""
    x = latent()
    for dtype in (torch.float32, torch.float16):
        module = coder("decoder", dtype)
        whole = pixels(Program(module)(x.to(dtype)))
        again = BandPlan((Leg(0, 6, None, "host"), Leg(6, 14, 64, "output")), 0, 0, 0.0, 1)
        assert len(read(module).steps) > 14
        again = BandPlan(
            (*again.legs[:1], Leg(6, len(read(module).steps), 16, "output")), 0, 0, 0.0, 1
        )
        for plan in (
            legs_of(module, 16, "device", "host"),
            legs_of(module, 64, "host", None),
            again,
        ):
            difference = (pixels(fixed(module, plan)(x.to(dtype))) - whole).abs()
            assert difference.max() <= 1
            assert (difference > 0).float().mean() <= 1e-4, (dtype, plan)
