"""Whole UNets with our blocks against the host's own, in the same dtype and in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.route import Route
from lib_rocm_sd.hosts.read import unet as read_unet
from lib_rocm_sd.unet import compute, stand_in
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over
from tests.unet import unet_models as models
from tests.vae.vae_models import needs_half

pytest.importorskip("diffusers")

STEPS, IMAGES = 8, 16
"""At least so many of each are compared."""
HALVES = [torch.bfloat16, pytest.param(torch.float16, marks=needs_half)]
FAMILIES = [
    *("SD 1.5", "SD 2", "SDXL", "inpainting", "x4 upscaler", "Kandinsky"),
    *("ldm", "ldm linear", "ldm deep", "ldm 9", "ldm resized"),
]
LDM: dict[str, dict[str, Any]] = {
    "ldm": {},
    "ldm linear": {"linear": True},
    "ldm deep": {"linear": True, "depth": 2},
    "ldm 9": {"in_channels": 9},
    "ldm resized": {"use_scale_shift_norm": True, "resblock_updown": True},
}


def unet_of(family: str) -> Any:
    if family in LDM:
        return models.ldm_unet(**LDM[family])
    return models.diffusers_unet(family)


def inputs_of(family: str, **size: Any) -> dict[str, Any]:
    if family in LDM:
        return models.ldm_inputs(channels=LDM[family].get("in_channels", 4), **size)
    return models.diffusers_inputs(family, **size)


def assert_all_ours(taken: UnetTakeover) -> None:
    rows = taken.report()
    assert rows
    assert [str(row) for row in rows if row.left or row.partly] == []
    assert all(row.ours == row.total for row in rows)


def compared(family: str, dtype: torch.dtype, **size: Any) -> None:
    """Ours is nearer to the same weights' float32 than the host's own, by rms and largest error of
    a step: the mean of some steps', since of so few values one largest is chance.
    """
    half = unet_of(family).to(dtype)
    wide = copy.deepcopy(half).float()
    count = max(STEPS, IMAGES // size.get("batch", 2))
    steps = [models.in_dtype(inputs_of(family, seed=i, **size), dtype) for i in range(count)]
    every = models.batched(steps)
    exact = models.step(wide, models.in_dtype(every, torch.float32)).unflatten(0, (count, -1))
    theirs = models.step(half, every).unflatten(0, (count, -1))
    first = models.step(half, steps[0])
    taken = take_over(half)
    assert_all_ours(taken)
    ours = torch.stack([models.step(half, step) for step in steps])
    assert_all_ours(taken)
    assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
    assert not torch.equal(ours, theirs)
    mine, own = (_mean_errors(made, exact) for made in (ours, theirs))
    print(f"{family} {dtype} {size}: {mine[0] / own[0]:.2f} {mine[1] / own[1]:.2f} of the host's")
    assert mine[0] <= own[0]
    assert mine[1] <= own[1]
    taken.give_back()
    assert torch.equal(models.step(half, steps[0]), first)


def _mean_errors(made: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    found = [models.errors(one, other) for one, other in zip(made, exact, strict=True)]
    return sum(item[0] for item in found) / len(found), sum(item[1] for item in found) / len(found)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_as_near_to_float32_as_the_hosts_own(family: str, dtype: torch.dtype) -> None:
    compared(family, dtype)


SIZES = [
    {"batch": 1, "height": 6, "width": 10, "tokens": 77},
    {"batch": 3, "height": 10, "width": 6, "tokens": 154},
    {"batch": 2, "height": 12, "width": 14, "tokens": 231},
]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size.values())))
@pytest.mark.parametrize("family", ["SD 1.5", "SDXL", "ldm"])
def test_other_sizes(family: str, size: dict[str, Any]) -> None:
    compared(family, torch.bfloat16, **size)


@pytest.mark.parametrize("family", ["SD 1.5", "ldm"])
def test_odd_sizes(family: str) -> None:
    """Halves of odd sizes are rounded up, and the way up resizes outside of the blocks."""
    compared(family, torch.bfloat16, batch=2, height=7, width=9, tokens=78)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_is_the_hosts(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_unet, "HALVES", (dtype,))
    monkeypatch.setattr(stand_in, "HALVES", (dtype,))
    unet, inputs = unet_of(family).to(dtype), models.in_dtype(inputs_of(family), dtype)
    theirs = models.step(unet, inputs)
    taken = take_over(unet)
    assert_all_ours(taken)
    ours = models.step(unet, inputs)
    assert models.errors(ours, theirs)[0] < 5e-6
    assert_all_ours(taken)


def test_images_between_blocks_are_channels_last() -> None:
    unet = models.ldm_unet().to(torch.bfloat16)
    seen: list[torch.Tensor] = []

    def look(module: nn.Module, given: Any, made: torch.Tensor) -> None:
        seen.append(made)

    for part in (*unet.input_blocks, unet.middle_block, *unet.output_blocks):
        part.register_forward_hook(look)
    take_over(unet)
    models.step(unet, models.in_dtype(models.ldm_inputs(), torch.bfloat16))
    assert len(seen) == 9
    assert all(item.is_contiguous(memory_format=torch.channels_last) for item in seen)


@pytest.mark.parametrize("dtype", HALVES)
def test_under_autocast(dtype: torch.dtype) -> None:
    """As the WebUI runs a UNet: ours computes in the images' dtype all the same."""
    unet = models.ldm_unet().to(dtype)
    inputs = models.in_dtype(models.ldm_inputs(), dtype)
    plain = take_over(unet)
    wanted = models.step(unet, inputs)
    with torch.autocast("cpu", dtype=dtype):
        made = models.step(unet, inputs)
    assert models.errors(made, wanted)[0] < 2e-3
    assert_all_ours(plain)


def test_in_inference_mode() -> None:
    unet = models.ldm_unet().to(torch.bfloat16)
    inputs = models.in_dtype(models.ldm_inputs(), torch.bfloat16)
    taken = take_over(unet)
    with torch.inference_mode():
        made = unet(**inputs)
    assert torch.equal(models.step(unet, inputs), made)
    assert not any(parameter.is_inference() for parameter in unet.parameters())
    assert_all_ours(taken)


def test_values_that_are_no_numbers_go_on_as_in_torch() -> None:
    unet = models.ldm_unet().to(torch.bfloat16)
    inputs = models.in_dtype(models.ldm_inputs(), torch.bfloat16)
    inputs["x"][0, 0, 0, 0] = float("nan")
    theirs = models.step(unet, inputs)
    take_over(unet)
    ours = models.step(unet, inputs)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours[0].isnan().all()
    assert ours[1].isfinite().all()


@needs_half
@pytest.mark.parametrize("factor", [1e3, 1e4, 3e4, 6e4])
@pytest.mark.parametrize("place", ["conv", "attention", "feed-forward"])
def test_what_overflows_in_ours_overflows_in_the_hosts(place: str, factor: float) -> None:
    """Some fine-tunes of SDXL overflow in fp16 within blocks. What comes within a hundredth of the
    largest half is for either to lose, by how what came before was rounded.
    """
    unet = models.ldm_unet().to(torch.float16)
    inputs = models.in_dtype(models.ldm_inputs(), torch.float16)
    residual, transformer = unet.middle_block[0], unet.middle_block[1]
    inner = transformer.transformer_blocks[0]
    layer, block = {
        "conv": (residual.out_layers[3], residual),
        "attention": (inner.attn1.to_v, transformer),
        "feed-forward": (inner.ff.net[2], transformer),
    }[place]
    layer.weight.data.mul_(factor)
    made: list[torch.Tensor] = []
    block.register_forward_hook(lambda module, given, output: made.append(output))
    models.step(unet, inputs)
    taken = take_over(unet)
    models.step(unet, inputs)
    assert_all_ours(taken)
    theirs, ours = made
    assert (ours.isfinite() | ~theirs.isfinite() | (theirs.abs() > 0.99 * 65504)).all()
    assert factor < 6e4 or not theirs.isfinite().all(), "else nothing is tested"


@pytest.mark.parametrize("added", ["by the norm", "before it"])
@pytest.mark.parametrize("family", ["SD 1.5", "ldm deep"])
def test_where_a_library_convolves(
    monkeypatch: pytest.MonkeyPatch, family: str, added: str
) -> None:
    """A residual block's norms are made by themselves, the second with what the embedding adds."""
    asked: list[bool] = []

    def taken_apart(*given: Any) -> bool:
        asked.append(True)
        return True

    monkeypatch.setattr(compute, "is_librarys", taken_apart)
    if added == "by the norm":
        monkeypatch.setattr(Route, "is_ours", True)
    compared(family, torch.bfloat16)
    assert asked
