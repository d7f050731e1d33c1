"""`python -m lib_rocm_sd bench unet` on the CPU with a UNet of few channels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd import __main__, first_trials
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.lab import models
from lib_rocm_sd.lab import unet as bench
from lib_rocm_sd.lab.models import Runner, Way, eager
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.unet import Attended
from lib_rocm_sd.torch_ops import KEEPS_WHOLE

pytest.importorskip("diffusers", reason="diffusers is a dev extra")
CPU = torch.device("cpu")
TINY = ["bench", "unet", "--small", "--device", "cpu", "--dtype", "bfloat16", "--runs", "1"]


@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "u.json"
    chosen = ["auto", "own", "eager", "channels-last"]
    assert __main__.main([*TINY, "--json", str(file), "--ways", *chosen]) == 0
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["complete"] is True and document["machine"]["dtype"] == "bfloat16"
    rows = {row["way"]: row for row in document["rows"]}
    names = {way.key: way.name for way in bench.WAYS}
    assert list(rows) == [names[key] for key in chosen]
    for row in rows.values():
        assert row["case"] == "small 128x128" and not row["reason"]
        assert row["wall_ms"] > 0 and row["first_ms"] > 0 and row["gpu_ms"] is None
    ours, theirs = rows["rocm_sd Auto"], rows["eager"]
    assert any("residual block: " in note for note in ours["told"]) and not theirs["told"]
    assert 0 < ours["error"] <= theirs["error"] and 0 < ours["rms"] <= theirs["rms"]
    assert "rocm_sd Auto" in capsys.readouterr().out


def test_ways_of_a_vae_are_no_ways_of_a_unet(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([*TINY, "--ways", "per-tile-norm"]) == 2
    assert "no way is left" in capsys.readouterr().err


@pytest.fixture(scope="module")
def unet() -> models.Unet:
    return models.unet("small", CPU, torch.bfloat16)


CASE = models.SMALL_CASES[0]


def test_a_way_leaves_the_unet_as_it_was(unet: models.Unet) -> None:
    def facts() -> list[Any]:
        named = unet.module.named_parameters()
        return [(name, p.stride(), p.dtype, float(p.float().sum())) for name, p in named]

    before = facts()
    args, kwargs = unet.arguments(128, 128)
    for way in bench.WAYS:
        if not way.slow:
            with torch.no_grad(), way.make(unet) as runner:
                assert runner.call(*args, **kwargs)[0].shape == (2, 4, 16, 16)
        assert facts() == before, way.name
    assert bench.exact(unet, CASE) is not None and facts() == before


def test_numbers_of_ours_that_are_none_are_wrong(
    unet: models.Unet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def spoiled(unet: models.Unet) -> Iterator[Runner]:
        yield Runner(lambda x, *_, **__: (x * torch.nan,))

    monkeypatch.setattr(bench, "WAYS", (Way("auto", "rocm_sd Auto", spoiled),))
    assert __main__.main([*TINY, "--ways", "auto"]) == 1
    assert "wrong: the output has NaN" in capsys.readouterr().out


def is_gated() -> bool:
    return engine.gate is not None


def test_auto_launches_what_a_start_has_tried_and_nothing_else(
    unet: models.Unet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(first_trials, "places", lambda: ["the card"])
    monkeypatch.setattr(first_trials, "try_all", lambda here, *_: tried.append(here))
    monkeypatch.setattr(engine, "launcher", lambda device: object())
    with bench.tried_ahead(unet.device):
        assert is_gated()
    assert not is_gated() and tried == ["the card"]
    monkeypatch.setattr(engine, "launcher", lambda device: None)
    with bench.tried_ahead(unet.device):
        assert not is_gated()
    assert tried == ["the card"]


def test_what_fails_is_a_rows_reason(unet: models.Unet) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("too much")

    way = Way("auto", "rocm_sd Auto", eager)
    row = bench.measure(unet, CASE, way, Runner(fails), 1, None)
    assert row.reason.startswith("out of memory") and "not measured" in bench.TEXT.line(row)


def test_a_result_that_is_interrupted_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows(*_: Any) -> Iterator[Row]:
        yield Row(case="small 128x128", way="eager", reason="a try")
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.BENCHMARK, "rows", rows)
    file = tmp_path / "u.json"
    assert __main__.main([*TINY, "--json", str(file)]) == 130
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["complete"] is False and len(document["rows"]) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_with_ours_has_ours_in_one_graph_for_all_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `compiled-ours` is made, with a backend in Inductor's place, which takes minutes here; of
    the least UNet that has both attentions.
    """
    if not KEEPS_WHOLE:
        pytest.skip("torch before 2.4 is not given the operators")
    one_level = {
        "block_out_channels": (32,),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D",),
        "mid_block_type": None,
        "up_block_types": ("UpBlock2D",),
    }
    monkeypatch.setitem(models.CONFIGS, "least", models.CONFIGS["small"] | one_level)
    unet = models.unet("least", CPU, torch.bfloat16)
    ours, graphs = torch.ops.rocm_sd.attention.default, []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    def compile_once(module: Any, **given: Any) -> Any:
        assert given == {"mode": "default", "dynamic": False}
        return whole(module, backend=backend, fullgraph=True, dynamic=True)

    module: Any = unet.module
    whole, before = torch.compile, dict(module.attn_processors)
    monkeypatch.setattr(torch, "compile", compile_once)
    way = next(way for way in bench.WAYS if way.key == "compiled-ours")
    with torch.no_grad():
        calls = [unet.arguments(*size) for size in ((64, 96), (96, 64))]
        right = [unet.module(*args, **kwargs)[0] for args, kwargs in calls]
        with way.make(unet) as runner:
            made = [runner.call(*args, **kwargs)[0] for args, kwargs in calls]
            assert any("attention" in line for line in runner.told())
    assert module.attn_processors == before
    count = len(before)
    assert count and all(found.count(ours) == count for found in graphs)
    assert len(graphs) == 1  # sizes equal in the first call would count as always equal
    for x, y in zip(made, right, strict=True):
        assert torch.allclose(x, y, atol=0.03 * float(y.abs().max()))


def test_what_compiles_says_of_masks(unet: models.Unet) -> None:
    with pytest.raises(ValueError, match="a UNet's step has none"):
        Attended()(None, torch.ones(1, 2, 3), attention_mask=torch.ones(1))
