"""What the catalog lists of SD 3's transformers is what their blocks ask for."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import amd_table
from lib_rocm_sd.calls import Calls
from lib_rocm_sd.catalog.dit import (
    FEW_WORDS,
    MODELS,
    SD3,
    SD35,
    SIDE,
    WORDS,
    Transformer,
    step,
    work,
)
from lib_rocm_sd.catalog.unet import BATCH
from lib_rocm_sd.hosts.read import unet as reading
from lib_rocm_sd.lab import model_cases
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.shipped import AT_START, SD3_PART, UNETS, in_order, label, part_specs, shipped
from lib_rocm_sd.unet.takeover import take_over

diffusers = pytest.importorskip("diffusers", reason="diffusers is a dev extra")
GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942")
CONFIGS = {SD3: model_cases.SD3.config, SD35: model_cases.SD35.config}


def asked(model: Transformer) -> Counter[Any]:
    """Problems of a step of diffusers' transformer with its blocks ours, without memory."""
    with torch.device("meta"):
        transformer = diffusers.SD3Transformer2DModel(**CONFIGS[model]).half().eval()
    transformer.requires_grad_(False)
    found: Counter[Any] = Counter()

    def run(calls: Calls, place: str, op: Op[Any, Any], inputs: Any) -> Any:
        problem = op.problem_of(inputs)
        found[problem] += 1
        return op.empty(problem, inputs)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16, device="meta")

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Calls, "run", run)
        patch.setattr(reading, "_check_parameters", lambda *given: None)
        taken = take_over(transformer)
        for title, module in list(sys.modules.items()):  # ops refuse tensors without memory
            if title.startswith("lib_rocm_sd.ops.") and hasattr(module, "tensor_errors"):
                patch.setattr(module, "tensor_errors", lambda **tensors: [])
        time = torch.empty(BATCH, device="meta")
        side = SIDE // 8
        transformer(
            drawn(BATCH, 16, side, side), drawn(BATCH, WORDS, 4096), drawn(BATCH, 2048), time
        )
        (row,) = taken.report()
        assert row.ours == row.total == model.blocks, row
        taken.give_back()
    return found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_layers_are_those_of_the_model(model: Transformer) -> None:
    assert asked(model) == Counter(layer.problem for layer in step(model, SIDE, SIDE))


USUAL = {
    layer.problem
    for model, size in product(MODELS, ((1024, 1024), (512, 512), (1344, 768)))
    for batch, words in product((1, 2, 4), (FEW_WORDS, WORDS))
    for layer in step(replace(model, blocks=2, alone=model.alone and 1), *size, batch, words)
}
"""Problems of usual sizes."""


@pytest.mark.parametrize("gfx", GPUS)
def test_no_usual_size_has_a_kernel_that_is_not_compiled_ahead(gfx: str) -> None:
    arch = amd_table()[gfx]
    compiled = {*shipped(arch, in_order(SD3.name))}
    ops = {type(problem): op for op, problem in work()}
    for problem in USUAL:
        op = ops.get(type(problem))
        for _, _, specs in op.ours(arch, problem) if op else ():
            assert compiled.issuperset(specs), problem


@pytest.mark.parametrize("gfx", GPUS)
def test_only_such_a_checkpoint_has_them_compiled_at_a_start(gfx: str) -> None:
    arch = amd_table()[gfx]
    own = set(part_specs(SD3_PART, arch))
    names = {label(spec) for spec in own}
    assert {f"layer_norm, modulated{more}, float16" for more in ("", ", gated")} < names
    assert own - {*shipped(arch, AT_START)} >= {
        spec for spec in own if spec.source == "rms_norm.hip" or "MODULATED" in dict(spec.defines)
    }
    for model in ("SD1.5", "SDXL", "another"):
        assert SD3_PART not in in_order(model)
    assert in_order(SD3.name)[1] == SD3_PART and {*UNETS} < {*in_order(SD3.name)}
    parts = shipped(arch, in_order(SD3.name))
    assert own <= parts.keys() and {*shipped(arch, AT_START)} <= parts.keys()
    alike = {dict(spec.defines)["BF16_HALVES"] for spec in own}
    assert alike == {0}


def test_a_modulation_is_a_class_of_its_own() -> None:
    """It has two weights."""
    classes = {op.test_problems(problem)[0] for op, problem in work()}
    assert {len(each.columns) for each in classes if hasattr(each, "columns")} == {1, 2, 3}


def test_a_size_without_whole_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="1000x1024 is no multiple of 16"):
        step(SD3, 1000, 1024)
