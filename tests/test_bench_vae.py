"""`bench vae` on the CPU with a decoder of few channels."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lib_rocm_sd.bench import cli, vae
from lib_rocm_sd.engine import engine

diffusers = pytest.importorskip("diffusers", reason="diffusers is a dev extra")


def little(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = diffusers.AutoencoderKL(
        block_out_channels=(32, 32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    decoder: nn.Module = made.decoder
    return decoder.to(device, dtype).eval().requires_grad_(False)


@pytest.mark.usefixtures("fresh_cache", "brief_tuning")
def test_every_way_is_right_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vae, "sd_decoder", little)
    level = engine.level
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    file = tmp_path / "vae.json"
    arguments = ["vae", "--device", "cpu", "--dtype", "bfloat16", "--small", "--runs", "1"]
    try:
        assert cli.main(parser.parse_args([*arguments, "--json", str(file)])) == 0
    finally:
        engine.level = level
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    names = [row["way"] for row in rows]
    assert names[:3] == ["rocm_sd Auto", "rocm_sd Performance", "rocm_sd Memory"]
    assert all(row["size"] == 64 and row["median_ms"] > 0 and not row["reason"] for row in rows)
    eager = next(row["error"] for row in rows if row["way"] == "eager")
    assert all(row["error"] <= 2 * eager for row in rows)
    assert "rocm_sd Memory" in capsys.readouterr().out
