"""What is asked of the blocks of every diffusion transformer, whoever wrote it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over
from tests.graph_tape import Desk, recording_cpu

M = TypeVar("M", bound=nn.Module)
Step = Callable[[Any, int], torch.Tensor]
"""The result of a transformer for the inputs of a number."""


def filled(made: M) -> M:
    """A new transformer, whose modulations and norms do next to nothing, with some of each."""
    made.eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    return made


def copied(drawn: nn.Module, dtype: torch.dtype) -> Any:
    """Diffusers warns of the layers that it would keep in float32."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    return copy.deepcopy(drawn).to(dtype)


def taken_over(transformer: Any) -> UnetTakeover:
    return take_over(transformer, Session.of("Auto", report=Report()))


def check_blocks(
    transformer: Any,
    step: Step,
    check_report: Callable[[UnetTakeover], None],
    change: Callable[[Any], None] = lambda transformer: None,
) -> None:
    """After `change`, blocks are ours, at most twice as far from float64 as the host's, and given
    back.
    """
    exact = copy.deepcopy(transformer).double()
    right = [step(exact, turn) for turn in (1, 2)]
    change(transformer)
    before = [vars(module).copy() for module in transformer.modules()]
    hosts = [step(transformer, turn) for turn in (1, 2)]
    taken = taken_over(transformer)
    ours = [step(transformer, turn) for turn in (1, 2)]
    check_report(taken)
    assert not torch.equal(ours[0], hosts[0])
    largest, hosts_largest = (
        max((a - b).abs().max().item() for a, b in zip(made, right, strict=True))
        for made in (ours, hosts)
    )
    assert largest <= 2 * hosts_largest
    taken.give_back()
    assert [vars(module) for module in transformer.modules()] == before
    assert all(map(torch.equal, [step(transformer, turn) for turn in (1, 2)], hosts))


def check_adapters(drawn: nn.Module, step: Step, layers: Sequence[str], **options: Any) -> None:
    """With an adapter of PEFT at these layers, blocks are ours and at most twice as far from
    float64 as the host's; and the adapter counts while it is on. `options` of its LoraConfig.
    """
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    transformer = copied(drawn, torch.float32)
    given = {"r": 4, "lora_alpha": 4, "init_lora_weights": False, **options}
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=list(layers), **given), transformer)
    transformer = transformer.bfloat16().eval().requires_grad_(False)
    exact = step(copy.deepcopy(transformer).double(), 1)
    bound = 2 * (step(transformer, 1) - exact).abs().max()
    taken = taken_over(transformer)
    assert (step(transformer, 1) - exact).abs().max() <= bound
    for module in transformer.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.enable_adapters(False)
    assert (step(transformer, 1) - exact).abs().max() > 2 * bound
    assert all(row.ours == row.total and not row.partly for row in taken.report())


def check_recorded(
    transformer: Any, step: Step, monkeypatch: pytest.MonkeyPatch
) -> tuple[Desk, UnetTakeover]:
    """Recorded steps are the launched ones; by which desk, and what was taken over."""
    taken = taken_over(transformer)
    launched = [step(transformer, turn) for turn in range(4)]
    taken.give_back()
    desk = recording_cpu(monkeypatch, baked=True)
    taken = taken_over(transformer)
    assert all(map(torch.equal, [step(transformer, turn) for turn in range(4)], launched))
    return desk, taken


def masks_seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """What the blocks give attention for a mask from now on."""
    seen: list[torch.Tensor | None] = []
    attention = compute.attention

    def noting(*given: Any) -> torch.Tensor:
        seen.append(given[5])
        return attention(*given)

    monkeypatch.setattr(compute, "attention", noting)
    return seen


def ours_within_patched(transformer: Any) -> dict[str, int]:
    """How many blocks of each kind `patched` makes ours in a pipeline, and gives back."""
    from lib_rocm_sd.hosts import diffusers as host

    pipeline = SimpleNamespace(transformer=transformer, components={"transformer": transformer})
    session = Session.of("Auto", report=Report())
    with host.patched(pipeline, vae=False, unet=True, session=session) as patch:
        rows = {row.kind: row.ours for row in patch.unet.rows()}
    assert not any("forward" in vars(module) for module in transformer.modules())
    return rows
