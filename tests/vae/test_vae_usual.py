"""What is tried before there is a model is what a model asks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd.catalog import vae as catalog
from lib_rocm_sd.ops.base import Work
from lib_rocm_sd.vae import readiness
from lib_rocm_sd.vae.policy import Plans
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
