"""A whole upscaler by the kernels' source on the CPU: bands are the whole picture, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.lab.upscaler_models import RRDBNet, SRVGGNetCompact, settle
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.upscaler import run
from lib_rocm_sd.upscaler.plan import Planner
from lib_rocm_sd.upscaler.program import Upscaler, chain_of
from lib_rocm_sd.vae.plan import BandPlan
from tests import executed
from tests.ops.running import compute
from tests.upscaler.networks import own
from tests.vae.vae_models import needs_half, way
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    needs_half,
    executed.known(by="shim"),
]
GFX = "gfx1100"


class ShimCalls:
    """Each convolution by our kernel, as it is launched where nothing was measured."""

    def __init__(self, launch: ShimLaunch) -> None:
        self._launch = launch

    def run(self, place: str, op: Op[Any, Any], inputs: Any) -> Any:
        problem, variant = op.problem_of(inputs), MatrixConv(op.name.removeprefix("conv "))
        assert not variant.refusals(self._launch.arch, problem)
        config = variant.configs(self._launch.arch, problem)[0]
        return compute(op, variant, self._launch, config, inputs)


@pytest.mark.parametrize(
    "make",
    [lambda: RRDBNet(4, 16, 1), lambda: SRVGGNetCompact(2, 24, 2)],
    ids=["x4", "compact"],
)
def test_bands_are_the_whole_pictures_bits(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, arch = settle(make()), by_gfx(GFX)
    assert arch is not None
    x = torch.rand(1, 3, 7, 5, generator=torch.Generator().manual_seed(0))
    launch, upscaler = ShimLaunch(arch), Upscaler(module)
    monkeypatch.setattr(run, "begin", lambda session, routes: ShimCalls(launch))
    results = []
    for rows in (None, 4):

        def planned(size: tuple[int, int, int], *rest: Any, rows: int | None = rows) -> Any:
            planner = Planner(chain_of(upscaler.network, size, torch.float16), way)
            return (planner.whole() if rows is None else in_rows(planner, rows)), planner.chain

        monkeypatch.setattr(upscaler, "_planned", planned)
        with launch.knows():
            results.append(upscaler(x))
        upscaler.release()  # a launch knows the weights that were packed within
    whole, banded = results
    assert torch.equal(whole, banded)
    right = own(module, x)
    half = own(module.half(), x.half()).float()
    assert (whole - right).norm() <= 1.1 * (half - right).norm()


def in_rows(planner: Planner, rows: int) -> BandPlan:
    """All legs in bands of `rows` of the smallest image."""
    plan, growth = planner._plan("device", 0), planner.chain.network.growth
    legs = [replace(leg, rows=rows * growth[leg.stop]) for leg in plan.legs]
    return replace(plan, legs=tuple(legs))
