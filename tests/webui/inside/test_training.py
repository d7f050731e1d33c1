"""A hypernetwork and a textual inversion trained with our optimizer, as the WebUI trains them.

Read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd: modules/hypernetworks/hypernetwork.py
(train_hypernetwork), modules/textual_inversion/textual_inversion.py (train_embedding),
modules/sd_hijack_checkpoint.py, modules/sd_hijack.py (EmbeddingsWithFixes). Which optimizer
computes there is the WebUI's: modules/textual_inversion/ui.py and modules/hypernetworks/ui.py.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from torch.utils.checkpoint import checkpoint
from unet_help import AUTO, ours, steps_of, unet_of

FORWARD, BACKWARD = ("attention and lse", "rocm_sd"), ("attention backward", "rocm_sd")
PLAIN = ("attention", "rocm_sd")
STEPS = 6
BF16 = torch.bfloat16

pytestmark = pytest.mark.double_only("it trains the double's model")


class Hypernetwork(torch.nn.Module):
    """Two layers for one width of contexts, near to doing nothing at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pair = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
        self.layers = {width: (self.layer(0), self.layer(1))}

    def layer(self, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def apply(x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = x + self.pair[number](x.float()).to(x.dtype)
            return made

        return apply


@contextmanager
def checkpoints(webui: WebUI, reentrant: bool | None) -> Iterator[None]:
    """As sd_hijack_checkpoint.add() and remove() do; None: not at all."""
    if reentrant is None:
        yield
        return
    attention = importlib.import_module("ldm.modules.attention").BasicTransformerBlock
    residual = importlib.import_module("ldm.modules.diffusionmodules.openaimodel").ResBlock
    stored = [(cls, cls.forward) for cls in (attention, residual)]

    def attended(self: Any, x: Any, context: Any = None) -> Any:
        return checkpoint(self._forward, x, context, use_reentrant=reentrant)

    def convolved(self: Any, x: Any, emb: Any) -> Any:
        return checkpoint(self._forward, x, emb, use_reentrant=reentrant)

    attention.forward, residual.forward = attended, convolved
    try:
        yield
    finally:
        for cls, forward in stored:
            cls.forward = forward


def latents(webui: WebUI) -> torch.Tensor:
    drawn = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(2))
    return drawn.to(webui.devices.dtype_unet)


@torch.no_grad()
def target(webui: WebUI) -> torch.Tensor:
    """What the UNet makes of another prompt."""
    model = webui.shared.sd_model
    text = model.get_learned_conditioning(["a square"])
    made: torch.Tensor = model.apply_model(latents(webui), torch.tensor([500.0]), text)
    return made.float()


def trained(
    webui: WebUI, kind: str, aim: torch.Tensor, reentrant: bool | None = None, steps: int = STEPS
) -> tuple[list[float], list[torch.Tensor]]:
    """Loss of each step, and the first one's gradients of what is trained."""
    model, width = webui.shared.sd_model, 24
    hypernetwork, vector = Hypernetwork(width), torch.zeros(2, width, requires_grad=True)
    weights = [vector] if kind == "embedding" else list(hypernetwork.parameters())
    webui.shared.loaded_hypernetworks = [hypernetwork] if kind == "hypernetwork" else []
    optimizer = torch.optim.AdamW(weights, lr=0.05 if kind == "embedding" else 5e-3)
    dtype, losses, first = webui.devices.dtype_unet, [], []
    text = model.get_learned_conditioning(["a circle"])
    with checkpoints(webui, reentrant):
        for _ in range(steps):
            c = text
            if kind == "embedding":  # as EmbeddingsWithFixes does
                c = torch.stack([torch.cat([t[:1], vector.to(dtype), t[3:]]) for t in text])
            made = model.apply_model(latents(webui), torch.tensor([500.0]), c)
            loss = (made.float() - aim).square().mean()
            loss.backward()
            first = first or [weight.grad.clone() for weight in weights]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
    webui.shared.loaded_hypernetworks = []
    return losses, first


def by_torch(webui: WebUI, kind: str, aim: torch.Tensor) -> tuple[list[float], list[torch.Tensor]]:
    """With the attention that the WebUI has after undo_optimizations()."""
    now = webui.forwards
    webui.sd_hijack.undo_optimizations()
    try:
        return trained(webui, kind, aim)
    finally:
        for (_, cls), forward in zip(webui.targets, now, strict=True):
            cls.forward = forward  # type: ignore[attr-defined]


def ran(webui: WebUI) -> dict[tuple[str, str], int]:
    """Attention's calls since the report began, by op and variant."""
    found: Counter[tuple[str, str]] = Counter()
    for row in webui.library("report").report.snapshot()["rows"]:
        if row["op"].startswith("attention"):
            found[row["op"], row["variant"]] += row["calls"]
    return +found


def begin(webui: WebUI) -> None:
    webui.library("report").report.begin()
    webui.library("hosts.webui.attention").calls.clear()


def left_to_host(webui: WebUI) -> int:
    found: int = webui.library("hosts.webui.attention").calls.left.total()
    return found


WAYS = pytest.mark.parametrize(
    "reentrant", [None, True, False], ids=["plain", "reentrant", "not reentrant"]
)


@WAYS
@pytest.mark.parametrize("kind", ["hypernetwork", "embedding"])
def test_it_learns_as_without_us(
    start: Start, gpu: FakeGpu, kind: str, reentrant: bool | None
) -> None:
    webui = start(gpu=gpu, whole=True, ui=False)
    aim = target(webui)
    expected, gradients = by_torch(webui, kind, aim)
    begin(webui)
    losses, found = trained(webui, kind, aim, reentrant)
    assert expected[-1] < 0.98 * expected[0]
    assert losses == pytest.approx(expected, rel=1e-4)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    calls = ran(webui)
    first = PLAIN if reentrant else FORWARD  # such a checkpoint calls first without grad mode
    expected_calls = Counter({FORWARD: STEPS * 6, BACKWARD: STEPS * 6})
    if reentrant is not None:
        expected_calls[first] += STEPS * 6
    assert calls == expected_calls and not left_to_host(webui)


def test_the_vaes_attention_is_the_webuis(start: Start, gpu: FakeGpu) -> None:
    """Its one head of 512 is too wide for the kernel of the gradients."""
    webui = start(gpu=gpu, ui=False)
    begin(webui)
    block = dict(webui.targets)["ldm AttnBlock"](512)
    block(torch.randn(1, 512, 2, 2)).mean().backward()
    assert block.q.weight.grad is not None and left_to_host(webui) == 1
    events = webui.library("report").report.snapshot()["events"]
    assert any("head_dim 512 is more than 256" in event for event in events)


def test_upcast_attention_is_the_webuis(start: Start, gpu: FakeGpu) -> None:
    gpu.floats = False
    webui = start(gpu=gpu, dtype=BF16, whole=True, ui=False)
    webui.shared.opts.upcast_attn = True
    aim = target(webui)
    begin(webui)
    _, found = trained(webui, "embedding", aim, steps=1)
    assert found[0].any() and not ran(webui) and left_to_host(webui) == 6
    events = "\n".join(webui.library("report").report.snapshot()["events"])
    assert "gradients are wanted, and float32: the kernel takes fp16 and bf16" in events


@pytest.mark.parametrize("frozen", [False, True], ids=["as the WebUI has it", "frozen"])
@pytest.mark.parametrize("kind", ["hypernetwork", "embedding"])
def test_the_unets_blocks_step_aside_and_attention_does_not(
    start: Start, gpu: FakeGpu, monkeypatch: Any, kind: str, frozen: bool
) -> None:
    """A hypernetwork's weights are no part of the UNet: if that is frozen, a block learns of them
    when its attention comes back with a gradient.
    """
    gpu.norms = True
    webui = start(gpu=gpu, dtype=BF16, whole=True)
    aim = target(webui)
    _, expected = by_torch(webui, kind, aim)
    webui.txt2img(*AUTO)
    assert ours(webui) > 10
    unet_of(webui).requires_grad_(not frozen)
    served = steps_of(webui, monkeypatch)
    begin(webui)
    _, found = trained(webui, kind, aim, steps=1)
    assert bool(served) is frozen, "those before the first gradient"
    one, other = (torch.cat([t.flatten() for t in each]) for each in (found, expected))
    assert torch.cosine_similarity(one, other, 0) > 0.99
    # frozen, the first self-attention has no gradient: nothing that learns comes before it
    followed = {FORWARD, BACKWARD, *([PLAIN] if frozen else [])}
    assert ran(webui)[BACKWARD] == 6 - frozen and set(ran(webui)) == followed
