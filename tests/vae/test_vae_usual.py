"""What is tried before there is a model is what a model asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd.arch import table
from lib_rocm_sd.catalog import vae as catalog
from lib_rocm_sd.hosts.read import vae_frames
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.ops.base import Work
from lib_rocm_sd.ops.layer_norm.rms import RmsProblem
from lib_rocm_sd.shipped import AT_START, QWEN_PART, part_specs, shipped
from lib_rocm_sd.vae import readiness
from lib_rocm_sd.vae.policy import Plans
from lib_rocm_sd.vae.steps import AttentionStep, Recipe
from lib_rocm_sd.vae.trace import chain, rms_problem, whole_problem
from tests.vae import vae_models

SIZES = {"decoder": (128, 128), "encoder": (1024, 1024)}


def classes(work: Work) -> set[tuple[str, Any]]:
    """Ops, and the problems that name classes."""
    return {(op.name, op.test_problems(problem)[0]) for op, problem in work}


@pytest.mark.parametrize("role", SIZES)
def test_every_class_of_a_real_model_is_among_the_usual_ones(role: str) -> None:
    recipe = vae_models.standard(role)
    planner = Plans(recipe, torch.float16, vae_models.way).planner((1, *SIZES[role]))
    plans = [planner.whole(), planner.smallest(0)]
    asked = [item for plan in plans for item in readiness.of_plan(planner.chain, plan)]
    assert len(classes(asked)) > 10
    assert classes(asked) <= classes(catalog.work())


def qwen(role: str) -> Recipe:
    """That of diffusers' own with its real channels, on no device."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    with torch.device("meta"):
        module = getattr(diffusers.AutoencoderKLQwenImage(), role).bfloat16()
    found = Findings(vae_frames.FAMILIES[0])
    reader = vae_frames.WanDiffusers(found, role)
    reader.coder(module)
    assert not found.reasons
    return Recipe(role, tuple(reader.steps), is_over_time=True)


@pytest.mark.parametrize("role", SIZES)
def test_layers_over_time_are_those_of_a_real_model(role: str) -> None:
    """In order; and each class that whole frames and bands ask."""
    recipe, (height, width) = qwen(role), SIZES[role]
    trace = chain(recipe, 1, height, width, torch.bfloat16)
    asked: list[object] = []
    for image, step in enumerate(recipe.steps, 1):
        rms = [] if step.rms is None else [rms_problem(trace, image, trace.sizes[image - 1].height)]
        if isinstance(step, AttentionStep):
            asked.append((rms[0].channels, step.head_dim))
        else:
            asked += [*rms, whole_problem(trace, image, in_place=False)]
    listed = getattr(catalog, f"qwen_{role}")(height, width)
    assert asked == [
        (each.channels, catalog.QWEN_HEAD_DIM)
        if each.channels
        else each.problem
        if isinstance(each.problem, RmsProblem)
        else replace(each.problem, in_place=False)
        for each in listed
    ]
    planner = Plans(recipe, torch.bfloat16, vae_models.way).planner((1, height, width))
    plans = [planner.whole(), planner.smallest(0)]
    work = [item for plan in plans for item in readiness.of_plan(planner.chain, plan)]
    assert classes(work) <= classes(catalog.qwen_work())
    assert {"rms norm"} < {op.name for op, _ in work}


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx942", "gfx90a"])
def test_only_a_vae_over_time_has_its_kernels_compiled(gfx: str) -> None:
    own = set(part_specs(QWEN_PART, table()[gfx]))
    norms = {spec for spec in own if spec.source == "layer_norm.hip"}
    assert {dict(spec.defines)["RMS"] for spec in norms} == {1, 2}
    assert not norms & shipped(table()[gfx], AT_START).keys()
    assert {dict(spec.defines)["BF16_HALVES"] for spec in own} == {1}
