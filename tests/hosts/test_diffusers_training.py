"""A LoRA and a text embedding trained on the little model's UNet inside `patched`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.commands.little_model import MODEL
from lib_rocm_sd.engine.session import Session
from tests.following import BACKWARD, FORWARD, PLAIN, Card, card, ran, session, told

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from lib_rocm_sd.hosts.diffusers import patched
from tests.torch_ops.training import STEPS, TEXT, curve, drawn

__all__ = ["card", "session"]

ATTENTIONS = 14
"""Of the little model's UNet."""


@pytest.fixture(scope="module")
def unet() -> Any:
    """The little model's, in float32."""
    kind = diffusers.UNet2DConditionModel
    return kind.from_pretrained(str(MODEL / "unet"), local_files_only=True, low_cpu_mem_usage=False)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpointed"])
def test_a_lora_learns_as_by_torch(
    unet: Any, card: Card, session: Session, checkpoints: bool
) -> None:
    """diffusers' checkpoints, not reentrant, need the model in training mode."""
    theirs = curve(unet, ours=False, norms=False)
    if checkpoints:
        unet.enable_gradient_checkpointing()
    unet.train(checkpoints)
    try:
        with patched(SimpleNamespace(unet=unet), vae=False, session=session) as patch:
            mine = curve(unet, ours=False, norms=False)
    finally:
        unet.eval().disable_gradient_checkpointing()
    assert patch.replaced == ATTENTIONS and theirs[-1] < 0.9 * theirs[2]
    assert mine == pytest.approx(theirs, rel=2e-4)
    found = ran(session)
    assert set(found) == {FORWARD, BACKWARD} and not told(session)
    assert found[BACKWARD] == STEPS * ATTENTIONS
    assert found[FORWARD] == STEPS * ATTENTIONS * (1 + checkpoints)


def embedding(unet: Any, text: torch.Tensor) -> torch.Tensor:
    """The gradient of a prompt's embedding, as textual inversion asks for it."""
    given = text.clone().requires_grad_()
    x = drawn(3, 2, unet.config.in_channels, 16, 16).to(text.dtype)
    unet(x, 500, encoder_hidden_states=given).sample.float().square().mean().backward()
    assert given.grad is not None
    return given.grad.float()


def test_a_text_embedding_with_the_unets_blocks_taken_over(
    unet: Any, card: Card, session: Session
) -> None:
    """Blocks of ours leave a call with gradients to diffusers' own, in which attention is ours."""
    unet.requires_grad_(False)
    text = drawn(5, 2, TEXT, unet.config.cross_attention_dim)
    exact = embedding(unet, text)
    unet.to(torch.bfloat16)
    try:
        half = embedding(unet, text.bfloat16())
        with patched(SimpleNamespace(unet=unet), vae=False, unet=True, session=session) as patch:
            ours = embedding(unet, text.bfloat16())
            blocks = sum(row.ours for row in patch.unet.rows())
    finally:
        unet.float()
    found = ran(session)
    attention = {key: count for key, count in found.items() if key[0].startswith("attention")}
    # the first self-attention comes before any text
    followed = {FORWARD: ATTENTIONS - 1, BACKWARD: ATTENTIONS - 1}
    assert blocks > 20 and attention == {PLAIN: 1, **followed}
    assert "gradients are wanted" in told(session)
    noise, off = ((each - exact).abs().max() for each in (half, ours))
    assert off <= 2 * noise


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpointed"])
def test_on_a_gpu_a_lora_learns_as_by_torch_within_noise(
    unet: Any, session: Session, checkpoints: bool
) -> None:
    """The noise is what torch's losses in bfloat16 differ from those in float32."""
    unet.to("cuda:0")
    try:
        exact = curve(unet, ours=False, norms=False)
        unet.to(torch.bfloat16)
        theirs = curve(unet, ours=False, norms=False)
        if checkpoints:
            unet.enable_gradient_checkpointing()
        unet.train(checkpoints)
        pipeline = SimpleNamespace(unet=unet)
        with patched(pipeline, vae=False, session=session, wait=True):
            mine = curve(unet, ours=False, norms=False)
    finally:
        unet.eval().disable_gradient_checkpointing()
        unet.to("cpu", torch.float32)
    noise, off = (
        max(abs(a - b) for a, b in zip(each, exact, strict=True)) for each in (theirs, mine)
    )
    assert mine[-1] < 0.9 * mine[2] and off <= 2 * noise + 0.01 * max(exact)
    assert ran(session.patiently()) == {
        FORWARD: STEPS * ATTENTIONS * (1 + checkpoints),
        BACKWARD: STEPS * ATTENTIONS,
    }
