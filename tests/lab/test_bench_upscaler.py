"""`python -m lib_rocm_sd bench upscaler` on the CPU with networks of few channels."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lib_rocm_sd import __main__
from lib_rocm_sd.lab import upscaler
from lib_rocm_sd.lab.rows import Result, Row
from lib_rocm_sd.lab.upscaler import AVERAGED, BENCHMARK, FADED, MODELS, WAYS, Tiling, in_tiles
from tests.vae.vae_models import needs_half

TINY = ["bench", "upscaler", "--small", "--device", "cpu", "--runs", "1", "--sizes", "33"]


@needs_half
@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "u.json"
    assert __main__.main([*TINY, "--json", str(file)]) == 0
    document = json.loads(file.read_text(encoding="utf-8"))
    rows = document["rows"]
    assert document["complete"] is True and not any(row["reason"] for row in rows)
    names = [way.name for way in WAYS if not way.slow]
    for case in MODELS:
        assert [row["way"] for row in rows if row["case"] == case] == names
    ours = [row for row in rows if row["way"].startswith("rocm_sd")]
    assert all(row["largest"] <= 1 for row in ours)
    assert [row["equal"] for row in ours if row["plan"].startswith("bands")] == 3 * [True]
    assert all(row["seam"] < 0.5 for row in ours)
    tiles = [row for row in rows if row["way"] == "float32 tiles"]
    assert all(row["seam"] > 1 for row in tiles)
    assert all(row["largest"] > 1 for row in tiles), "a tile does not see its neighbours"
    assert "RRDBNet x4" in capsys.readouterr().out


def test_what_is_compiled_takes_one_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(upscaler, "why_not_compiled", lambda device: [])
    file = tmp_path / "u.json"
    words = [*TINY[:-1], "33", "40", "--ways", "compiled", "--case", "Compact"]
    monkeypatch.setattr(
        upscaler, "WAYS", tuple(replace(way, make=upscaler.as_the_host) for way in WAYS)
    )
    assert __main__.main([*words, "--json", str(file)]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["reason"] for row in rows] == ["", "compiled for 33x33 only: it takes minutes"]


def test_tiles_of_another_size(tmp_path: Path) -> None:
    file = tmp_path / "u.json"
    words = ["--case", "Compact", "--ways", "host", "--tile", "16", "--json", str(file)]
    assert __main__.main([*TINY, *words]) == 0
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert row["plan"] == "float32, tiles of 16, overlap 8" and row["seam"] > 1


@pytest.mark.parametrize(
    "words",
    [
        ["--sizes", "8"],
        ["--sizes", "99999"],
        ["--ways", "memory"],
        ["--tile", "0"],
        ["--tile", "15"],
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str]) -> None:
    assert __main__.main([*TINY[:-2], *words]) == 2


def enlarged(picture: torch.Tensor) -> torch.Tensor:
    return picture.repeat_interleave(4, 2).repeat_interleave(4, 3)


@pytest.mark.parametrize("tiling", [FADED, AVERAGED])
@pytest.mark.parametrize("height, width", [(24, 24), (25, 60), (41, 33)])
def test_tiles_of_what_needs_no_neighbours_are_the_whole(
    tiling: Tiling, height: int, width: int
) -> None:
    picture = torch.randint(0, 256, (1, 3, height, width)) / 255
    assert torch.allclose(tiling.make(enlarged, picture, 24, 8), enlarged(picture), atol=1e-6)


def test_tiles_are_averaged_where_they_overlap() -> None:
    """Tiles of 24 that overlap by 8 begin at 0, 16 and 20 in 44 pixels."""
    calls = iter([0.0, 1.0, 0.4])
    call: Callable[[torch.Tensor], torch.Tensor] = lambda part: torch.full(  # noqa: E731
        (1, 1, 96, 96), next(calls)
    )
    row = AVERAGED.make(call, torch.zeros(1, 1, 24, 44), 24, 8)[0, 0, 0, ::4] * 255
    assert row.unique_consecutive().round().tolist() == [0, 128, 119, 178, 102]
    assert row.diff().nonzero().flatten().add(1).tolist() == AVERAGED.borders(44, 24, 8)


@pytest.mark.parametrize("name", MODELS)
def test_a_networks_picture_is_no_flat_one(name: str) -> None:
    """A step that a tile makes is not seen where all is black or white."""
    module = upscaler.level(upscaler.settle(MODELS[name].small()))
    made = module(torch.rand(1, 3, 17, 24, generator=torch.Generator().manual_seed(3)))
    assert ((made < 0) | (made > 1)).float().mean() < 0.2
    assert abs(made.mean() - 0.5) < 0.1 < made.std()


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_that_is_wrong_is_seen(name: str) -> None:
    """By the 8-bit picture, which alone says that ours is right."""
    module = upscaler.level(upscaler.settle(MODELS[name].small()))
    picture = torch.rand(1, 3, 17, 24, generator=torch.Generator().manual_seed(3))
    right = upscaler._quantised(module(picture))
    for layer in module.modules():
        if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)):
            weight = layer.weight.clone()
            layer.weight.zero_()
            gap = (upscaler._quantised(module(picture)) - right).abs().max()
            assert gap > upscaler.MOST_STEPS, layer
            layer.weight.copy_(weight)


def test_a_seam_is_a_step_of_the_error_at_a_tiles_border() -> None:
    """Tiles of 24 that overlap by 8 begin at 0 and 16 in 40 pixels, four times as large."""
    error = torch.zeros(1, 3, 160, 160)
    seam: Callable[..., float] = lambda of, tile=24: upscaler.seam(  # noqa: E731
        error, lambda length: of.borders(length, tile, 8)
    )
    error[..., 40:] += 1.0  # amid the first tile
    assert seam(FADED) == 0.0 and seam(AVERAGED) == 0.0
    error[:, 1, 96:] += 2 / 255  # where the second is no more faded in, and the first ends
    assert seam(FADED) == pytest.approx(2.0, abs=1e-4) == seam(AVERAGED)
    error[..., 64:] -= 3 / 255  # where it begins
    assert seam(FADED) == pytest.approx(3.0, abs=1e-4) == seam(AVERAGED)
    assert math.isnan(seam(FADED, 40)) and math.isnan(seam(AVERAGED, 40))


def test_tiles_are_faded_over_their_overlap() -> None:
    calls = iter([0.0, 1.0])
    call: Callable[[torch.Tensor], torch.Tensor] = lambda part: torch.full_like(part, next(calls))  # noqa: E731
    row = in_tiles(call, torch.zeros(1, 1, 24, 40), 24, 8)[0, 0, 0]
    assert row[:16].eq(0).all() and row[24:].eq(1).all()
    assert (row[16:24].diff() > 0).all() and row[16] == 0


@pytest.mark.parametrize(
    "fault",
    [
        {"largest": 2.0},
        {"largest": math.nan},
        {"equal": False},
        {"reason": "wrong: the output has NaN"},
    ],
)
def test_a_wrong_picture_of_ours_is_told(fault: dict[str, object]) -> None:
    good = Row(case="x", size=64, way="rocm_sd Auto", largest=1.0, equal=True)
    result = Result(upscaler.COLUMNS, {}, None)
    result.rows = [good, replace(good, way="float32 tiles", largest=9.0)]
    assert not BENCHMARK.is_wrong(result)
    result.rows += [replace(good, largest=math.nan, reason="out of memory")]
    assert not BENCHMARK.is_wrong(result)
    result.rows += [replace(good, **fault)]  # type: ignore[arg-type]
    assert BENCHMARK.is_wrong(result)
