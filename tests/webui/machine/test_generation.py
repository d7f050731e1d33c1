"""The WebUI's forwards and pictures, computed by executed AMD machine code, against torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

HALF = torch.float16


@torch.no_grad()
def theirs(webui: Any, module: Any, *args: Any) -> torch.Tensor:
    """What the WebUI computes with its default forwards."""
    now = webui.forwards
    webui.sd_hijack.undo_optimizations()
    try:
        return module(*args)
    finally:
        for (_, cls), forward in zip(webui.targets, now, strict=True):
            cls.forward = forward


def size_of_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    return ((output.double() - exact).abs().max() / exact.abs().max()).item()


def agrees(webui: Any, gpu: Any, module: Any, *args: torch.Tensor) -> None:
    """Ours in half is as near to float64 as theirs in half, and was executed."""
    exact = theirs(webui, copy.deepcopy(module).double(), *(arg.double() for arg in args))
    half, given = module.to(HALF), [arg.to(HALF) for arg in args]
    before = gpu.hip.entries()["attention_forward"]
    with torch.no_grad():
        ours = half(*given)
    assert gpu.hip.entries()["attention_forward"] > before
    assert webui.library("hosts.webui.attention").calls.left.total() == 0
    allowed = 2 * size_of_error(theirs(webui, half, *given), exact)
    assert ours.dtype == HALF and size_of_error(ours, exact) <= max(allowed, 2e-3)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", ["ldm", "sgm"])
def test_forwards(start: Any, gpu: Any, family: str) -> None:
    webui = start(gpu=gpu, ui=False)
    assert webui.is_ours()
    classes = dict(webui.targets)
    torch.manual_seed(3)
    cross = classes[f"{family} CrossAttention"](query_dim=80, context_dim=24, heads=2, dim_head=40)
    agrees(webui, gpu, cross.eval(), normal(3, 50, 80), normal(3, 77, 24))
    torch.manual_seed(4)
    agrees(webui, gpu, classes[f"{family} AttnBlock"](32).eval(), normal(1, 32, 7, 9))
    assert not webui.errors_reported


def test_a_picture(start: Any, gpu: Any) -> None:
    """Attention of every step, then of the whole VAE too, by machine code; then neither."""
    expected = start(extension=False, dtype=HALF).txt2img(steps=2)
    webui = start(gpu=gpu, dtype=HALF)

    only_attention = webui.txt2img(True, "Auto", "Off", steps=2)
    entries = gpu.hip.entries()
    assert entries["attention_forward"] >= 4  # self and cross, two steps
    assert entries["upsample_conv"] == 0

    both = webui.txt2img(True, "Auto", "Auto", steps=2)
    more = gpu.hip.entries() - entries
    assert {"attention_forward", "conv3x3", "upsample_conv", "group_norm_finalize"} <= set(more)
    assert "conv: rocm_sd" in both.info

    for made in (only_attention, both):
        assert not torch.equal(made.decoded[0], expected.decoded[0])
        assert (made.decoded[0] - expected.decoded[0]).abs().max() < 0.02
    before = len(gpu.hip.launches)
    assert torch.equal(webui.txt2img(False, steps=2).decoded[0], expected.decoded[0])
    assert len(gpu.hip.launches) == before
    assert not webui.errors_reported
