"""Pictures of a Forge with this extension, without it, and with it off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FakeGpu
from forge_help import distance, same
from PIL import Image

FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batches": {"batch_size": 2, "n_iter": 2},
    "hires": {"enable_hr": True},
    "refiner": {"refiner_checkpoint": "model-7", "steps": 4},
}


@pytest.mark.parametrize("case", FIELDS)
def test_on_and_off(forge: Any, gpu: FakeGpu, case: str) -> None:
    gpu.convs = True
    expected = forge(extension=False).txt2img(**FIELDS[case])
    theirs = forge.bindings()
    webui = forge(gpu=gpu)
    tested = len(gpu.seen)

    assert same(webui.txt2img(False, **FIELDS[case]), expected)
    assert len(gpu.seen) == tested

    on = webui.txt2img(True, **FIELDS[case])
    assert len(gpu.seen) >= tested + 6
    assert 'ROCm SD: "Auto, attention: rocm_sd"' in on.info
    assert 'ROCm SD VAE: "Auto, whole frame, conv: torch"' in on.info
    assert "ROCm SD UNet: off" in on.info
    assert 0 < distance(on, expected) < 0.05

    used = len(gpu.seen)
    off = webui.txt2img(False, **FIELDS[case])
    assert same(off, expected) and "ROCm SD: off" in off.info
    assert len(gpu.seen) == used
    assert not webui.errors_reported and not webui.errors.recorded
    assert forge.bindings().keys() == theirs.keys()
