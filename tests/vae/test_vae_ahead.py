"""What is compiled ahead is all that a decode or an encode launches."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.attention import inputs as attention_inputs
from lib_rocm_sd.ops.base import Call, KernelSpec, Op
from lib_rocm_sd.ops.conv import inputs as conv_inputs
from lib_rocm_sd.ops.group_norm import inputs as norm_inputs
from lib_rocm_sd.shipped import part_specs
from lib_rocm_sd.vae.bands import Run, run_plan
from lib_rocm_sd.vae.plan import BandPlan, BandPlanner
from lib_rocm_sd.vae.policy import Plans
from lib_rocm_sd.vae.steps import Recipe
from lib_rocm_sd.vae.weights import Scales, prepare
from tests.vae import vae_models

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"decoder": (128, 128), "encoder": (1024, 1024)}


class _Calls:
    """Stands in for the engine's `run`: notes each problem, and gives what torch's variant gives
    for tensors without memory.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, Any], Op[Any, Any]] = {}

    def __call__(self, op: Op[Any, Any], inputs: Any, session: Session) -> Any:
        problem = op.problem_of(inputs)
        self.found[op.name, problem] = op
        if op.name == "attention":
            return inputs[0].new_empty(op.output_shape(problem))
        return next(v for v in op.variants if not v.ours).run(Call(problem, inputs))

    def specs(self, arch: Arch) -> set[KernelSpec]:
        """What our variants launch for these problems, and for their self-tests."""
        found: set[KernelSpec] = set()
        for (_, problem), op in self.found.items():
            ours = next(v for v in op.variants if v.ours)
            assert not ours.refusals(arch, problem)
            for each in (problem, *op.test_problems(problem)):
                found |= set(ours.specs(arch, each, ours.configs(arch, each)[0]))
        return found


def launched(recipe: Recipe, plans: list[BandPlan], planner: BandPlanner, shape: Any) -> _Calls:
    """The problems of some plans, run on the meta device in fp16."""
    calls = _Calls()
    ready = prepare(recipe, Scales())
    meta, dtype = torch.device("meta"), torch.float16
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(engine, "run", calls)
        for module in (attention_inputs, conv_inputs, norm_inputs):  # which refuse meta tensors
            patch.setattr(module, "tensor_errors", lambda **tensors: [])
        for plan in plans:
            last = planner.chain.sizes[-1]
            sizes = (1, recipe.out_channels, last.height, last.width)
            output = partial(torch.empty, sizes, dtype=dtype, device=meta)
            run = Run(planner.chain, ready, dtype, meta)
            run_plan(run, plan, torch.empty(shape, dtype=dtype, device=meta), output)
    return calls


@pytest.mark.parametrize("latent", [4, 16])
@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_all_that_is_launched_is_compiled_ahead(role: str, latent: int) -> None:
    recipe = vae_models.standard(role, latent)
    planner = Plans(recipe, torch.float16, vae_models.way).planner((1, *SIZES[role]))
    smallest = planner.smallest(0)
    assert not smallest.whole
    calls = launched(
        recipe, [planner.whole(), smallest], planner, (1, recipe.in_channels, *SIZES[role])
    )
    assert len(calls.found) > 20
    for arch in table().values():
        missing = calls.specs(arch) - set(part_specs("vae", arch))
        assert not missing, arch.gfx


def test_the_list_has_no_entry_twice_and_one_half_type() -> None:
    for arch in table().values():
        specs = part_specs("vae", arch)
        assert len(specs) == len(set(specs))
        assert all(dict(spec.defines).get("BF16_HALVES", 0) == 0 for spec in specs)


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; from lib_rocm_sd.arch import table; from lib_rocm_sd.shipped import shipped; "
        "shipped(table()['gfx1100']); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=600)
    assert done.returncode == 0
