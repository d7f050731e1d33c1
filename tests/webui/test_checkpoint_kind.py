"""Which UNet a checkpoint has is known before it is loaded: what it needs is compiled first."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from lib_rocm_sd import console
from lib_rocm_sd.hosts.webui import background, host

NAMES = {
    "SDXL": "conditioner.embedders.1.model.ln_final.weight",
    "SD3": "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight",
    "SD1.5": "cond_stage_model.transformer.text_model.final_layer_norm.weight",
    "": "cond_stage_model.model.ln_final.weight",  # SD 2
}


def checkpoint(folder: Path, weight: str) -> Path:
    head = json.dumps({weight: {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    path = folder / f"{weight}.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(2))
    return path


def of_webui(monkeypatch: pytest.MonkeyPatch, **known: Any) -> None:
    """`known`: by the attribute's name."""
    monkeypatch.setattr(
        host, "attribute", lambda module, name, *more: known.get((more or (name,))[-1])
    )


@pytest.mark.parametrize("kind", NAMES)
def test_the_chosen_checkpoints_file_tells(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, NAMES[kind])
    chosen = SimpleNamespace(sd_model_checkpoint="one [1234]")
    asked: list[str] = []

    def match(title: str) -> Any:
        asked.append(title)
        return SimpleNamespace(filename=str(path))

    of_webui(monkeypatch, opts=chosen, get_closet_checkpoint_match=match)
    assert host.checkpoint_kind() == kind
    assert asked == ["one [1234]"]
    own = (f"unet {kind}",)
    assert background.unet_parts() == (own if kind else ("unet SD1.5", "unet SDXL"))


def test_the_loaded_model_tells_and_what_cannot_be_read_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = (({"is_sdxl": True}, "SDXL"), ({"is_sd1": True}, "SD1.5"), ({"is_sd3": True}, "SD3"))
    for flags, kind in (*known, ({}, "")):
        of_webui(monkeypatch, sd_model=SimpleNamespace(**flags))
        assert host.checkpoint_kind() == kind
    for path in (tmp_path / "none.safetensors", tmp_path / "old.ckpt"):
        of_webui(monkeypatch, checkpoints_list={"a": SimpleNamespace(filename=str(path))})
        assert host.checkpoint_kind() == ""
    of_webui(monkeypatch)
    assert host.checkpoint_kind() == ""
    info = SimpleNamespace(filename=str(checkpoint(tmp_path, NAMES["SDXL"])))
    for model, kind in (
        (SimpleNamespace(), "SDXL"),
        (SimpleNamespace(sd_checkpoint_info=info), ""),
    ):
        of_webui(monkeypatch, sd_model=model, checkpoints_list={"a": info})
        assert host.checkpoint_kind() == kind  # a Forge's model before the first, or SD 2


def test_a_time_to_come_is_told_roughly() -> None:
    assert [console.rounded(seconds) for seconds in (0.2, 27.0, 61.0)] == ["5 s", "30 s", "2 min"]


@pytest.mark.parametrize(
    ("op_name", "part"),
    [
        ("attention", "attention"),
        ("conv 3x3", "vae"),
        *((name, "unet SDXL") for name in ("linear", "layer norm", "layer norm biased")),
        *((name, "unet SDXL") for name in ("layer norm modulated", "rms norm of heads")),
    ],
)
def test_an_op_waits_for_the_part_whose_kernels_it_launches(
    op_name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_webui(monkeypatch, sd_model=SimpleNamespace(is_sdxl=True))
    monkeypatch.setattr(background, "refusal", "for {}".format)
    assert background.pending(op_name) == f"for {part}"
