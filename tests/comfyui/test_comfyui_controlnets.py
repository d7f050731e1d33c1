"""ControlNets' blocks: ours in the steps of one clone, ComfyUI's to the bit in all others."""

from __future__ import annotations

import gc
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts.comfyui import controlnets, status
from lib_rocm_sd.hosts.comfyui.host import tally
from tests.comfyui import unet_steps
from tests.comfyui.unet_steps import BF16, SIGMAS, counts, near, with_ours
from tests.unet.unet_models import draw

BLOCKS = 11
"""The double's: five with weights of their own, two of a transformer, four results."""


class Control:
    """As comfy.controlnet.ControlNet is asked for what it adds."""

    def __init__(self, comfy: Any, previous: Any = None) -> None:
        self.extension = comfy.extension
        kind = importlib.import_module("comfy.cldm.cldm").ControlNet
        torch.manual_seed(3)
        with torch.inference_mode():
            self.control_model = kind(dtype=BF16)
        self.previous_controlnet = previous
        self.hint = draw(2, 4, 8, 8, seed=7).to(BF16)

    def get_control(self, x: torch.Tensor, t: Any, context: Any) -> list[torch.Tensor]:
        before = None
        if self.previous_controlnet is not None:
            before = self.previous_controlnet.get_control(x, t, context)
        made = self.control_model(x.to(BF16), self.hint, t, context)["output"][::-1]
        for each in made:
            each *= 0.8
        return made if before is None else [a + b for a, b in zip(made, before, strict=True)]


@torch.inference_mode()
def step(comfy: Any, model: Any, control: Any) -> torch.Tensor:
    """As comfy.samplers.calc_cond_batch makes one."""
    options = model.model_options["transformer_options"] | {"sample_sigmas": SIGMAS}

    def calc(base: Any, conds: Any, x: Any, t: Any, model_options: Any) -> torch.Tensor:
        added = conds[0][0]["control"].get_control(x, t, unet_steps.CONTEXT)
        made: torch.Tensor = unet_steps.step(model, x, control=added)
        return made

    kind = comfy.extension.WrappersMP.CALC_COND_BATCH
    wrappers = comfy.extension.get_all_wrappers(kind, options)
    executor = comfy.extension.WrapperExecutor.new_executor(calc, wrappers)
    made: torch.Tensor = executor.execute(
        *(model.model, [[{"control": control}], None], unet_steps.X, unet_steps.TIMES),
        {"transformer_options": options},
    )
    return made


@pytest.fixture
def model(comfy: Any) -> Any:
    return unet_steps.model_of(comfy)


def forwards(control: Control) -> list[Any]:
    return [each for each in control.control_model.modules() if "forward" in vars(each)]


def strides(control: Control) -> list[Any]:
    return [each.stride() for each in control.control_model.parameters()]


def test_all_blocks_are_ours_in_the_clones_steps(comfy: Any, model: Any, blocks: None) -> None:
    control = Control(comfy, previous=Control(comfy))
    theirs, before = step(comfy, model, control), strides(control)
    clone = with_ours(model)
    for _ in range(2):
        assert near(step(comfy, clone, control), theirs)
        rows = controlnets.rows()
        assert sum(row.ours for row in rows) == sum(row.total for row in rows) == 2 * BLOCKS
        assert tally.ours["ControlNet"] == 2 and counts() == unet_steps.TOTALS
        assert "ControlNet: 22 of 22 are ours" in status.text()
        tally.clear()
        assert strides(control) != before
        assert torch.equal(step(comfy, model, control), theirs)
        assert strides(control) == before and not forwards(control)
    assert not tally.left


def test_beside_another_model_it_is_comfyuis(comfy: Any, model: Any, blocks: None) -> None:
    """Also where the UNet of the model that is ours was called last."""
    control = Control(comfy)
    other = unet_steps.model_of(comfy)
    theirs = step(comfy, other, control)
    step(comfy, with_ours(model), control)
    assert torch.equal(step(comfy, other, control), theirs)
    assert not forwards(control)


def test_models_of_other_kinds_are_left_alone(comfy: Any, model: Any, blocks: None) -> None:
    control = Control(comfy)
    adapter = SimpleNamespace(control_model=torch.nn.Linear(2, 2), get_control=control.get_control)
    step(comfy, with_ours(model), adapter)
    assert not forwards(control) and not tally.ours["ControlNet"] and not tally.left


def test_what_fails_in_it_is_comfyuis(
    comfy: Any, model: Any, blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(conds: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(controlnets, "_found_in", fails)
    control = Control(comfy)
    made = step(comfy, with_ours(model), control)
    assert made.isfinite().all() and not forwards(control)
    assert "planted" in str(tally.left)


def test_none_is_kept(comfy: Any, model: Any, blocks: None) -> None:
    clone = with_ours(model)
    step(comfy, clone, Control(comfy))
    gc.collect()
    assert not controlnets.rows()
