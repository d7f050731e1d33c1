"""The tilings and the plot of `bench vae`, and the picture of what tilings change."""

from __future__ import annotations

import importlib
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lib_rocm_sd.lab import models, vae, vae_ways
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.vae_ways import WAYS

CPU = torch.device("cpu")


class Net(nn.Module):
    """3x3, nearest x2, 3x3 or, with `norm`, GroupNorm before each; or the way back."""

    def __init__(self, up: bool, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = up
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm: nn.Module = nn.GroupNorm(4, 8) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        x = F.interpolate(x, scale_factor=2.0) if self.up else F.avg_pool2d(x, 2)
        return self.last(x)


def tiled(kind: str, net: Net, image: torch.Tensor, margin: int = 8) -> torch.Tensor:
    scale = (2, 1) if net.up else (1, 2)
    if kind == "blend":
        return vae_ways.overlap_blend(net, image, scale, 16)
    return vae_ways.per_tile_norm(net, image, scale, 16, margin)


def picture_of(*size: int) -> torch.Tensor:
    ramp = torch.linspace(0, 3, size[1])
    return torch.randn((1, 4, *size), generator=torch.Generator().manual_seed(3)) * (ramp + 0.1)


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("size", [(16, 16), (48, 64), (42, 30), (8, 50)])
def test_per_tile_tiling_with_enough_margin_is_the_whole_without_norms(
    size: tuple[int, int], up: bool
) -> None:
    net, image = Net(up, norm=False), picture_of(*size)
    with torch.no_grad():
        gap = tiled("norm", net, image) - net(image)
        assert gap.abs().max() < 1e-5
        short = (tiled("norm", net, image, margin=0) - net(image)).abs().amax((0, 1))
    if max(size) > 16:
        assert short.max() > 1e-2
    seam = 32 if up else 8
    if size == (48, 64):
        assert short[: seam - 4, : seam - 4].max() < 1e-5


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_blended_tiles_are_the_whole_away_from_seams_without_norms(up: bool) -> None:
    net, image = Net(up, norm=False), picture_of(40, 52)
    with torch.no_grad():
        made, whole = tiled("blend", net, image), net(image)
    gap = (made - whole).abs().amax((0, 1))
    per = 2 if up else 1
    inner = gap[: 10 * per, : 10 * per] if up else gap[:4, :4]
    assert inner.max() < 1e-5
    assert made.shape == whole.shape and gap.max() > 1e-2
    pointwise = nn.Conv2d(4, 3, 1)
    with torch.no_grad():
        same = vae_ways.overlap_blend(pointwise, image, (1, 1), 16) - pointwise(image)
    assert same.abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["blend", "norm"])
def test_tilings_with_norms_shift_colours(kind: str) -> None:
    net, image = Net(True, norm=True), picture_of(40, 64)
    with torch.no_grad():
        gap = tiled(kind, net, image) - net(image)
        assert (gap.abs().amax((0, 1))[:8, :8] > 1e-2).any()
        one = picture_of(16, 16)
        assert (tiled(kind, net, one) - net(one)).abs().max() < 1e-5


def test_blending_skips_tiles_that_the_one_before_covers() -> None:
    seen: list[tuple[int, ...]] = []

    def call(piece: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(piece.shape[2:]))
        return piece

    image = torch.ones(1, 1, 16, 28)
    out = vae_ways.overlap_blend(call, image, (1, 1), 16)
    assert seen == [(16, 16), (16, 16)] and torch.allclose(out, image)


def rows() -> list[Row]:
    made = [
        Row(size=size, way=way.name, runs=5, median=size * 1.5, peak_mib=size * 2.0, error=1e-3)
        for way in WAYS
        for size in (512, 1024)
    ]
    other = [
        Row(role="encoder", size=512, way="eager", runs=5, median=1.0),
        Row(size=4096, way="eager", reason="oom"),
    ]
    return made + other


def test_the_plot_has_a_bar_per_way_and_value() -> None:
    tree = ElementTree.fromstring(vae.draw(rows(), "a <card> & more"))
    space = "{http://www.w3.org/2000/svg}"
    ground, *bars = tree.findall(f"{space}rect")
    assert "white" in ground.attrib["style"] and len(bars) == 2 * 2 * len(WAYS)
    words = [str(node.text) for node in tree.findall(f"{space}text")]
    assert words.count("rocm_sd Memory") == 4 and "1024x1024: peak memory" in words
    assert "VAE, a decode on a <card> & more: less is better" in words
    assert "1536 ms" in words and "2048 MiB" in words
    assert not any("4096" in word for word in words)


@pytest.mark.parametrize("shown", [[], [Row(size=64, way="eager", runs=1, median=1.0)]])
def test_the_plot_can_do_without_figures(shown: list[Row]) -> None:
    assert all(math.isnan(row.peak_mib) for row in shown)
    assert ElementTree.fromstring(vae.draw(shown, "CPU")).tag.endswith("svg")


def picture_tool() -> Any:
    """tools/vae_picture.py, which needs what is installed for development."""
    for package in ("diffusers", "PIL"):
        pytest.importorskip(package, reason=f"{package} is a dev extra")
    return importlib.import_module("tools.vae_picture")


def test_the_picture_shows_no_difference_of_bands() -> None:
    tool = picture_tool()
    coder = models.coder("decoder", CPU, torch.float32, small=True)
    latent = tool.structured_latent(192, 128)
    whole, bands, *tiles = tool.decoded(coder, latent)
    assert whole.pixels is not None and whole.pixels.shape == (192, 128, 3)
    assert whole.pixels.float().std() > 20
    assert "bands" in bands.detail and bands.pixels is not None and bands.pixels.max() <= 4
    assert [panel.title for panel in tiles] == ["overlap-blend tiling", "per-tile GroupNorm tiling"]
    for panel in tiles:
        assert panel.pixels is not None and panel.pixels.float().mean() > 10
    sheet = tool.sheet("head", [whole, tool.Panel("failed", "why", None)])
    assert sheet.size == (2 * tool.CELL + 3 * tool.GAP, 608)


def test_what_fails_is_an_empty_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = picture_tool()
    coder = models.coder("decoder", CPU, torch.float32, small=True)

    def short(*args: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(vae_ways, "overlap_blend", short)
    panels = tool.decoded(coder, tool.structured_latent(64, 64))
    assert [panel.detail for panel in panels if panel.pixels is None] == [
        "out of memory: RuntimeError: out of memory"
    ]


def test_the_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vae.png"
    words = ["--small", "--device", "cpu", "--dtype", "bfloat16", "--out", str(out)]
    assert picture_tool().main(words) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("ours, whole frame: ")
