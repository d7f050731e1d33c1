"""Flux's blocks in Forge's double: whose they are in pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import FakeGpu
from forge_help import distance, same
from test_forge_moves import in_parts
from test_forge_unet import patcher_of
from unet_help import AUTO, WITHOUT, session_of

pytestmark = pytest.mark.parametrize("forge", ["forge"], indirect=True)
ALL = {"joint transformer block": (2, 2), "single transformer block": (3, 3)}
NEAR = {torch.bfloat16: 0.15, torch.float16: 0.02}


def counts(webui: Any) -> dict[str, tuple[int, int]]:
    return {row.kind: (row.ours, row.total) for row in session_of(webui).look()}


@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_on_and_off(forge: Any, gpu: FakeGpu, dtype: torch.dtype) -> None:
    gpu.norms = True
    whole = {"flux": True}
    expected = forge(dtype, extension=False, whole=dict(whole)).txt2img()
    webui = forge(dtype, gpu=gpu, whole=dict(whole))
    assert same(webui.txt2img(False), expected)
    on = webui.txt2img(*AUTO)
    assert counts(webui) == ALL
    assert 0 < distance(on, expected) < NEAR[dtype]
    webui.txt2img(*WITHOUT)
    assert same(webui.txt2img(False), expected)
    assert not webui.errors_reported and not webui.errors.recorded


def test_of_a_model_that_is_loaded_in_parts_only_what_is_brought_is_forges(
    forge: Any, gpu: FakeGpu
) -> None:
    gpu.norms = True
    webui = forge(gpu=gpu, whole={"flux": True})
    plain, whole = webui.txt2img(False, steps=1), webui.txt2img(*AUTO, steps=1)
    with in_parts(forge, patcher_of(webui)):
        on = webui.txt2img(*AUTO, steps=1)
        rows = session_of(webui).look()
        assert counts(webui) == ALL and sum(sum(row.partly.values()) for row in rows)
        assert 0 < distance(on, plain) < NEAR[torch.bfloat16]
        assert same(webui.txt2img(False, steps=1), plain)
    assert same(webui.txt2img(*AUTO, steps=1), whole)
    assert not any(row.partly for row in session_of(webui).look())
    assert same(webui.txt2img(False, steps=1), plain) and not webui.errors_reported


def test_packed_weights_are_forges(forge: Any, gpu: FakeGpu) -> None:
    gpu.norms = True
    webui = forge(gpu=gpu, whole={"flux": True, "packed": True})
    webui.txt2img(*AUTO)
    assert {kind: ours for kind, (ours, _) in counts(webui).items()} == dict.fromkeys(ALL, 0)
    why = [reason for row in session_of(webui).look() for reason in row.left]
    assert why and all("quantised weights" in each for each in why)
