"""Training with the operators is training with torch: a LoRA on the little model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd import torch_ops
from lib_rocm_sd.commands.little_model import MODEL
from lib_rocm_sd.engine.session import DEFAULT
from tests.torch_ops.training import curve

NORMS = {"layer norm backward", "group norm backward"}


@pytest.fixture(scope="module")
def unet() -> Any:
    """The little model's, in float32."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    diffusers.utils.logging.set_verbosity_error()
    kind = diffusers.UNet2DConditionModel
    return kind.from_pretrained(str(MODEL / "unet"), local_files_only=True, low_cpu_mem_usage=False)


def calls() -> dict[tuple[str, str], int]:
    """Of the norms' gradients, by op and variant, in the process's own report."""
    rows = DEFAULT.report.snapshot()["rows"]
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["op"] in NORMS:
            key = row["op"], row["variant"]
            found[key] = found.get(key, 0) + row["calls"]
    return found


@pytest.mark.parametrize("norms", [False, True], ids=["frozen norms", "trained norms"])
def test_the_losses_are_torchs(unet: Any, norms: bool) -> None:
    assert torch_ops.OPS
    before = calls()
    theirs, ours = (curve(unet, with_ours, norms) for with_ours in (False, True))
    assert theirs[-1] < 0.9 * theirs[2] and all(loss > 0 for loss in theirs)
    assert ours == pytest.approx(theirs, rel=2e-4)
    after = calls()
    assert {op for op, variant in after if variant == "torch"} == NORMS
    assert all(after[op, "torch"] > before.get((op, "torch"), 0) for op in NORMS)


@pytest.mark.gpu
@pytest.mark.parametrize("norms", [False, True], ids=["frozen norms", "trained norms"])
def test_on_a_gpu_they_are_torchs_within_noise(unet: Any, norms: bool) -> None:
    """The noise is what torch's losses in bfloat16 differ from those in float32."""
    unet.to("cuda:0")
    try:
        exact = curve(unet, False, norms)
        unet.to(torch.bfloat16)
        theirs, ours = (curve(unet, with_ours, norms) for with_ours in (False, True))
    finally:
        unet.to("cpu", torch.float32)
    noise, off = (
        max(abs(a - b) for a, b in zip(each, exact, strict=True)) for each in (theirs, ours)
    )
    assert ours[-1] < 0.9 * ours[2]
    assert off <= 2 * noise + 0.01 * max(exact)
    assert {(op, "rocm_sd") for op in NORMS} <= set(calls())
