"""The compiled way's own process, the tilings, the plot and the picture of `bench vae`."""

from __future__ import annotations

import math
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lib_rocm_sd.lab import models, vae, vae_plot, vae_ways
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.vae_ways import WAYS
from tests.clock import Clock
from tests.waiting import POLL_S

CPU = torch.device("cpu")
JOBS = [("decoder", 64), ("encoder", 64)]
SLEEPS = [sys.executable, "-c", "import time; time.sleep(3600)"]


def set_clock(monkeypatch: pytest.MonkeyPatch, goes: Callable[[], bool]) -> None:
    """For who watches a child, time stands still unless `goes`."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        time.sleep(POLL_S)
        if goes():
            clock.turn(seconds)

    monkeypatch.setattr(vae, "time", SimpleNamespace(monotonic=clock, sleep=sleep))


def test_a_child_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, lambda: True)
    said = list(vae.watched(SLEEPS, 3.0, tmp_path / "log"))
    assert said[-1] == "not compiled and timed within 3 s" and not any(said[:-1])


def test_a_childs_last_words_are_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such backend')"]
    *_, last = vae.watched(command, 60, tmp_path / "log")
    assert last == "its process ended with status 1: no such backend"


WRITES = """
import json, sys, time
row = {"role": "decoder", "size": 64, "way": "compiled channels-last", "compile_s": 3.0}
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump({"rows": [row]}, file)
time.sleep(3600)
"""


def test_rows_come_before_the_child_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    own = vae.watched
    monkeypatch.setattr(vae, "why_not_compiled", lambda device: [])

    def watched(command: list[str], limit_s: float, log: Path) -> object:
        assert command[1:5] == ["-m", "lib_rocm_sd", "bench", "vae"]
        assert "--in-process" in command and "--small" in command
        written = Path(command[command.index("--json") + 1])
        set_clock(monkeypatch, lambda: bool(vae.rows_of(written)))
        return own([sys.executable, "-c", WRITES, *command[5:]], limit_s, log)

    monkeypatch.setattr(vae, "watched", watched)
    rows = list(vae.compiled_rows(["--small"], JOBS, CPU, 4))
    assert [(row.role, row.size) for row in rows] == JOBS
    assert rows[0].compile_s == 3.0 and not rows[0].reason
    assert rows[1].reason == "not compiled and timed within 4 s"


def test_without_a_compiler_there_is_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(vae.shutil, "which", lambda name: None)
    assert vae.why_not_compiled(CPU) == ["there is no C++ compiler"]
    rows = list(vae.compiled_rows([], JOBS, CPU, 1))
    assert [row.reason for row in rows] == ["there is no C++ compiler"] * 2
    find = vae.importlib.util.find_spec
    monkeypatch.setattr(
        vae.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    assert vae.why_not_compiled(torch.device("cuda")) == ["triton is not installed"]


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


def test_the_plot_has_a_curve_per_way_and_value() -> None:
    tree = ElementTree.fromstring(vae_plot.draw(rows(), "a <card> & more"))
    space = "{http://www.w3.org/2000/svg}"
    curves = tree.findall(f"{space}polyline")
    assert len(curves) == 2 * len(WAYS)
    assert all(len(curve.attrib["points"].split()) == 2 for curve in curves)
    words = [node.text for node in tree.findall(f"{space}text")]
    assert {way.name for way in WAYS} <= set(words)
    assert "VAE decoder, batch 1, a <card> & more" in words and "4096" not in words


@pytest.mark.parametrize("shown", [[], [Row(size=64, way="eager", runs=1, median=1.0)]])
def test_the_plot_can_do_without_figures(shown: list[Row]) -> None:
    assert all(math.isnan(row.peak_mib) for row in shown)
    assert ElementTree.fromstring(vae_plot.draw(shown, "CPU")).tag.endswith("svg")


def test_the_picture_shows_no_difference_of_bands(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers is a dev extra")
    coder = models.coder("decoder", CPU, torch.float32, small=True)
    latent = models.structured_latent(192, 128)
    whole, bands, *tiles = vae_plot.decoded(coder, latent)
    assert whole.pixels is not None and whole.pixels.shape == (192, 128, 3)
    assert whole.pixels.float().std() > 20
    assert "bands" in bands.detail and bands.pixels is not None and bands.pixels.max() <= 4
    assert [panel.title for panel in tiles] == ["overlap-blend tiling", "per-tile GroupNorm tiling"]
    for panel in tiles:
        assert panel.pixels is not None and panel.pixels.float().mean() > 10
    sheet = vae_plot.sheet("head", [whole, vae_plot.Panel("failed", "why", None)])
    assert sheet.size == (2 * vae_plot.CELL + 3 * vae_plot.GAP, 608)


def test_what_fails_is_an_empty_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers", reason="diffusers is a dev extra")
    coder = models.coder("decoder", CPU, torch.float32, small=True)

    def short(*args: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(vae_ways, "overlap_blend", short)
    panels = vae_plot.decoded(coder, models.structured_latent(64, 64))
    assert [panel.detail for panel in panels if panel.pixels is None] == [
        "out of memory: RuntimeError: out of memory"
    ]
