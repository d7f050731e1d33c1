"""The model's figures are those of docs/results, its formulas have the limits that they must."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.catalog.vae import decoder
from lib_rocm_sd.lab import scaling as model
from lib_rocm_sd.lab.scaling import LINKS, STEPS, Link, Step
from lib_rocm_sd.ops.conv.problem import ConvProblem

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
NO_COST = Link("none", math.inf, 0.0, "")
IDEAL = Step("ideal", 100.0, 0.0, 1, 0.0, 1, 1, 1, 1000, 1000, 1000, 64)


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return found


def test_figures_are_those_of_the_files() -> None:
    unet = {(row["case"], row["way"]): row for row in rows("unet-h200.json")}
    for step in STEPS[:4]:
        case, way = step.name.split(", ")
        row = unet[case, "rocm_sd Auto" if way == "blocks" else way]
        assert step.device_ms == pytest.approx(row["gpu_ms"], rel=1e-3)
        assert step.submit_ms == pytest.approx(row["submit_ms"], rel=1e-3)
        assert step.launches == row["launches"]
    vae = {
        row["size"]: row
        for row in rows("vae-h200.json")
        if row["way"] == "rocm_sd Auto" and row["role"] == "decoder"
    }
    for size, ms in model.VAE_MS.items():
        assert ms == pytest.approx(vae[size]["median_ms"], rel=1e-3)
    webui = {row["case"]: row for row in rows("webui-unet-h200.json") if row["way"] == "UNet Auto"}
    for picture, case in zip(model.PICTURES, ("512", "512x4", "1024"), strict=True):
        assert picture.seconds == pytest.approx(webui[case]["picture_s"], rel=1e-3)
        vae_ms = model.VAE_MS[1024 if case == "1024" else 512] * (4 if case == "512x4" else 1)
        assert picture.vae_s * 1e3 == pytest.approx(vae_ms)
        assert picture.step_s == pytest.approx(1 / webui[case]["it_s"], rel=1e-3)
    one, four = (1 / webui[case]["it_s"] for case in ("512", "512x4"))
    each = (four - one) / 3
    assert pytest.approx((one - each) / one, abs=0.01) == model.SD15_FIXED
    assert pytest.approx(2 / 1.83 - 1, abs=0.001) == model.SDXL_FIXED


@pytest.mark.parametrize("way", ["blocks", "eager"])
def test_a_larger_step_is_scaled_from_what_was_measured(way: str) -> None:
    found = {
        row["label"]: row["median_us"] / 1e3
        for row in rows("attention-h200.json")
        if row["variant"] == "sdpa" and row["label"].startswith("SDXL") and "self" in row["label"]
    }
    attention = (
        10 * found["SDXL 1024x1024, self, 64x64"] + 60 * found["SDXL 1024x1024, self, 32x32"]
    )
    small, large = (model.by_name(f"SDXL {size}x{size}, {way}") for size in (1024, 2048))
    wanted = 16 * attention + 4 * (small.device_ms - attention)
    assert large.device_ms == pytest.approx(wanted, rel=1e-3)


class Counted:
    """A group of two that exchanges nothing, and counts."""

    rank, size, weights = 0, 2, (1.0, 1.0)

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def named(self, size: object) -> AbstractContextManager[None]:
        return nullcontext()

    def _note(self, kind: str, *tensors: torch.Tensor) -> None:
        self.calls[kind] += 1
        self.sent[kind] += sum(one.numel() * one.element_size() for one in tensors)

    def concatenate(self, own: torch.Tensor, sizes: list[int], dim: int) -> torch.Tensor:
        self._note("image", own)
        return own.new_empty([*own.shape[:dim], sum(sizes), *own.shape[dim + 1 :]])

    def start_parts(self, own: torch.Tensor, sizes: list[int], dim: int) -> Any:
        self._note("norms" if own.ndim == 4 else "keys", own)
        shapes = [[*own.shape[:dim], size, *own.shape[dim + 1 :]] for size in sizes]
        return Done([own.new_empty(shape) for shape in shapes])

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        return [own, own]

    def start_gather(self, own: torch.Tensor) -> Any:
        return Done([torch.zeros(1, dtype=torch.int64)] * 2)

    def start_swap(self, sent: Any, received: Any) -> Any:
        self._note("edges", *sent.values())
        return Done(received)


class Done:
    def __init__(self, made: Any) -> None:
        self.made = made

    def wait(self) -> Any:
        return self.made


@pytest.mark.parametrize(("name", "size"), [("SD 1.5", 512), ("SDXL", 1024)])
def test_exchanges_are_those_that_rows_of_a_unet_make(name: str, size: int) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from lib_rocm_sd.hosts.diffusers.patch import patch_parallel
    from lib_rocm_sd.lab import models

    with torch.device("meta"):
        from diffusers import UNet2DConditionModel  # type: ignore[attr-defined]

        unet = UNet2DConditionModel(**models.CONFIGS[name]).half()
        image = torch.empty(2, 4, size // 8, size // 8, dtype=torch.float16)
        prompt = torch.empty(2, 77, models.CONFIGS[name]["cross_attention_dim"]).half()
        added = {"text_embeds": torch.empty(2, 1280).half(), "time_ids": torch.empty(2, 6)}
    group: Any = Counted()
    with torch.no_grad(), patch_parallel(unet, group) as parallel:
        parallel._agreement.note = lambda *_: None  # type: ignore[method-assign]
        unet(image, 501, prompt, added_cond_kwargs=added)
    step = model.by_name(f"{name} {size}x{size}, eager")
    for kind in ("edges", "norms", "keys"):
        assert group.calls[kind] == getattr(step, kind)
    assert group.sent["edges"] == step.edge_bytes
    assert group.sent["keys"] == step.key_bytes
    assert group.sent["norms"] == pytest.approx(step.norms * model.NORM_BYTES, rel=0.3)
    assert 2 * group.sent["image"] == 2 * step.image_bytes


def test_a_decoder_has_so_many_convolutions() -> None:
    steps = [each for each in decoder(64, 64) if isinstance(each.problem, ConvProblem)]
    assert len(steps) == sum(count for count, _, _ in model.VAE_CONVOLUTIONS)


def test_the_two_card_runs_are_near() -> None:
    (first, fitted_ms), (second, model_ms) = model.checked(LINKS[0])
    assert fitted_ms == pytest.approx(first.two_ms)
    assert 0 < abs(model_ms / second.two_ms - 1) < 0.1


def test_without_costs_cards_share_the_work() -> None:
    for cards in (2, 4, 8, 16, 32):
        assert model.patches(IDEAL, cards, NO_COST).speedup == pytest.approx(cards)
        found = model.vae(4096, cards, NO_COST)
        assert found.speedup == pytest.approx(cards)
    assert model.guidance(IDEAL, NO_COST).speedup == pytest.approx(2)
    assert model.patches(IDEAL, 3, NO_COST).speedup == pytest.approx(64 / 22)


def test_stages_are_as_fast_as_the_slowest() -> None:
    for picture in model.PICTURES:
        assert model.batch(picture, 8).speedup == pytest.approx(8)
        steps_s = picture.steps * picture.step_s
        assert model.stages(picture, 3).ms == pytest.approx(steps_s * 1e3)
        assert model.stages(picture, 2).ms == pytest.approx((picture.seconds - picture.vae_s) * 1e3)
        limit = max(picture.rest_s - picture.vae_s, picture.vae_s)
        assert model.stages(picture, 1000).ms == pytest.approx(limit * 1e3)


def test_what_hinders_hinders() -> None:
    assert model.guidance(replace(IDEAL, submit_ms=100.0), NO_COST).speedup == pytest.approx(1)
    assert model.guidance(replace(IDEAL, fixed_share=1.0), NO_COST).speedup == pytest.approx(1)
    assert model.guidance(IDEAL, NO_COST, 50.0).speedup == pytest.approx(1)
    slow = Link("slow", 1.0, 1000.0, "")
    # Three exchanges of 1 ms, and bytes: edges, twice what keys a rank has, a rank's statistics.
    bytes_ms = (1000 + 1000 + model.NORM_BYTES) / 1e6
    assert model.patches(IDEAL, 2, slow).ms == pytest.approx(50 + 3 + bytes_ms)
    assert "64 rows" in model.patches(IDEAL, 64, NO_COST).why
    assert math.isnan(model.vae(512, 8, NO_COST).ms)


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
def test_no_split_is_faster_than_its_cards(link: Link) -> None:
    for step in STEPS:
        assert model.guidance(step, link).speedup <= 2
        assert not any(model.patches(step, n, link).speedup > n for n in model.CARDS)
    for size in model.VAE_MS:
        assert not any(model.vae(size, n, link).speedup > n for n in model.CARDS)
