"""AMD's loops of attention.hip as an NVIDIA card runs them for the benchmark and its tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lib_rocm_sd.arch import KERNELS_DIR, Arch, table
from lib_rocm_sd.lab.methods import AmdLoops
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, KernelSpec, Launch
from tests.ops.attention.judge import numbers
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

CARD = table()["sm_90"]
PROBLEM = AttentionProblem(1, 2, 37, 77, 64)
shim = pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))


def faults(
    variant: MatrixAttention, problem: AttentionProblem, config: int, kernels_dir: Path
) -> list[str]:
    """What is wrong with this config's result under the shim."""
    launch = ShimLaunch(CARD, kernels_dir=kernels_dir)
    inputs = ATTENTION.make_inputs(problem, torch.device("cpu"), 3)
    with launch.knows(*inputs[:3]):
        chosen = variant.configs(CARD, problem)[config]
        output = compute(ATTENTION, variant, launch, chosen, inputs)
    return numbers(output, *inputs).faults(True)


@shim
@pytest.mark.parametrize(
    ("head_dim", "config"), [(40, 0), (64, 3), (72, 3), (128, 1), (160, 1), (256, 0), (512, 0)]
)
def test_they_are_right_on_nvidias_unit(head_dim: int, config: int) -> None:
    problem = AttentionProblem(1, 1, 37, 77, head_dim)
    assert faults(AmdLoops(), problem, config, KERNELS_DIR) == []


@shim
def test_they_copy_nothing_past_registers() -> None:
    copy = "{ simt::copy_async(lds, global, wanted); }"
    without = simt.planted("common/platform.h", copy, "{}")
    assert faults(AmdLoops(), PROBLEM, 0, without) == []
    assert faults(MatrixAttention(), PROBLEM, 0, without) != []


@pytest.mark.parametrize("gfx", [None, "gfx1100"])
def test_they_are_no_variant_for_others(gfx: str | None) -> None:
    arch: Arch | None = table()[gfx] if gfx else None
    assert AmdLoops().refusals(arch, PROBLEM)
    assert not AmdLoops().refusals(CARD, PROBLEM)


def test_their_tiles_are_an_amd_cards() -> None:
    chosen = AmdLoops().configs(CARD, PROBLEM)
    assert chosen == MatrixAttention().configs(table()["gfx1100"], PROBLEM)
    (spec,) = AmdLoops().specs(CARD, PROBLEM, chosen[0])
    assert dict(spec.defines)["AMD_LOOPS"] == 1


def test_a_bound_call_runs_them_too() -> None:
    prepared: list[KernelSpec] = []

    class Launcher:
        def prepare(self, spec: KernelSpec, *_: Any) -> Callable[[], None]:
            prepared.append(spec)
            return lambda: None

    variant, launch = AmdLoops(), cast("Launch", Launcher())
    config = variant.configs(CARD, PROBLEM)[0]
    inputs = ATTENTION.make_inputs(PROBLEM, torch.device("cpu"), 3)
    call = Call(PROBLEM, inputs, launch, config)
    variant.bound(call)(call)
    assert dict(prepared[0].defines)["AMD_LOOPS"] == 1
    assert prepared == list(variant.specs(CARD, PROBLEM, config))
