"""The tool that compares ours with a real WebUI's UNet: its files, its judgement, its autocast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from tests.unet import unet_models
from tools.unet_networks import files
from tools.unet_networks.__main__ import line
from tools.unet_networks.autocast import as_on_a_gpu
from tools.unet_networks.compare import Row, digest
from tools.unet_networks.models import leaves

RIGHT = Row("SD 1.5", "LoHa", "added", (1e-3, 1e-4), (2e-3, 2e-4), 2e-3, 0.5, True, "22/22")


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"ours": (2.1e-3, 1e-4)}, True),
        ({"ours": (2.6e-3, 1e-4)}, False),
        ({"ours": (1e-3, 2.1e-4)}, False),
        ({"weights": False}, False),
        ({"ours": None, "webui": None}, False),
        ({"ours": None, "webui": None, "apart": 0.0}, True),
        ({"ours": None, "webui": None, "most_apart": 3e-3}, True),
        ({"ours": None, "webui": None, "most_apart": 1e-3}, False),
        ({"ours": None, "webui": None, "apart": float("inf")}, False),
        ({"ours": (float("nan"), 1e-4)}, False),
    ],
    ids=str,
)
def test_what_is_right(change: dict[str, Any], right: bool) -> None:
    row = replace(RIGHT, **change)
    assert row.right is right
    assert line(row).startswith("right" if right else "WRONG")


NAMES = {
    "input_blocks.0.0": "conv_in",
    "input_blocks.1.0.in_layers.2": "down_blocks_0_resnets_0_conv1",
    "input_blocks.3.0.op": "down_blocks_0_downsamplers_0_conv",
    "input_blocks.5.1.transformer_blocks.0.attn1.to_q": (
        "down_blocks_1_attentions_1_transformer_blocks_0_attn1_to_q"
    ),
    "input_blocks.4.0.skip_connection": "down_blocks_1_resnets_0_conv_shortcut",
    "middle_block.0.out_layers.3": "mid_block_resnets_0_conv2",
    "middle_block.1.proj_in": "mid_block_attentions_0_proj_in",
    "middle_block.2.emb_layers.1": "mid_block_resnets_1_time_emb_proj",
    "output_blocks.2.1.conv": "up_blocks_0_upsamplers_0_conv",
    "output_blocks.5.2.conv": "up_blocks_1_upsamplers_0_conv",
    "output_blocks.11.1.norm": "up_blocks_3_attentions_2_norm",
    "out.0": "out_0",
}


@pytest.mark.parametrize(("name", "key"), NAMES.items(), ids=str)
def test_layers_have_the_names_of_files_for_sd_1(tmp_path: Path, name: str, key: str) -> None:
    kind = files.Kind("any", lambda name, leaf: True, files.KINDS[0].tensors)
    path = tmp_path / "made.safetensors"
    assert files.write(path, kind, {name: nn.Linear(8, 8)}, True, 0) == 1
    assert {item.partition(".")[0] for item in load_file(path)} == {f"lora_unet_{key}"}


@pytest.mark.parametrize("kind", files.KINDS, ids=lambda kind: kind.title)
def test_each_kind_changes_something(tmp_path: Path, kind: files.Kind) -> None:
    found = leaves(unet_models.ldm_unet())
    path = tmp_path / "made.safetensors"
    changed = files.write(path, kind, found, False, 0)
    assert 0 < changed <= len(found)
    state = load_file(path)
    assert len({name.partition(".")[0] for name in state}) == changed
    assert all(tensor.isfinite().all() and tensor.any() for tensor in state.values() if tensor.ndim)


def test_a_digest_sees_values_and_not_how_they_lie() -> None:
    conv = nn.Conv2d(4, 8, 3)
    before = digest(conv)
    conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert digest(conv) == before
    conv.weight.data[0, 0, 0, 0] += 1
    assert digest(conv) != before


def test_norms_are_computed_in_float32_as_by_cudas_autocast() -> None:
    x, layer = torch.ones(2, 8, dtype=torch.bfloat16), nn.Linear(8, 8)
    with as_on_a_gpu(torch.bfloat16):
        assert F.layer_norm(x, (8,)).dtype == torch.float32
        assert x.softmax(-1).dtype == torch.float32
        assert layer(x.float()).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert F.layer_norm(x, (8,)).dtype == torch.bfloat16
    with as_on_a_gpu(torch.bfloat16, enabled=False):
        assert F.layer_norm(x, (8,)).dtype == torch.bfloat16
