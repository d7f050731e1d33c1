"""The machine code of norms' gradients, executed on the CPU; mistakes that it must show."""

from __future__ import annotations

import pytest

from lib_rocm_sd.ops.base import KernelSpec
from tests import executed
from tests.verify import simt
from tests.verify.amdgpu import coverage, gradients
from tests.verify.amdgpu.gradients import GROUP, KERNELS, LAYER
from tests.verify.amdgpu.judge import execute
from tests.verify.amdgpu.launch import missing

GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942")


@pytest.fixture(autouse=True)
def compilers(gfx: str) -> None:
    reason = missing(gfx)
    if reason:
        pytest.skip(reason)


@executed.known(by="clang")
@pytest.mark.parametrize("op", gradients.ALL)
@pytest.mark.parametrize("gfx", GPUS)
def test_machine_code_is_right(gfx: str, op: str) -> None:
    """And nearly all of each kernel that is compiled ahead in float16 is executed."""
    reached: dict[KernelSpec, frozenset[int]] = {}
    for case in gradients.ALL[op](gfx):
        found = execute(case)
        assert not found.faults, f"{case}: {'; '.join(found.faults)}"
        for spec, here in found.reached.items():
            reached[spec] = reached.get(spec, frozenset()) | here
    for spec in KERNELS[op].searched_specs(case.arch):
        if op == GROUP and spec.source == "norm_gradients.hip":
            continue  # which adds few parts there: LayerNorm's cases have both
        share = coverage._covered(gfx, spec, reached[spec])
        assert share.share >= coverage.LEAST, "\n".join([str(share), *share.rest()])


PLANTED = {
    LAYER: ("layer_norm_backward.hip", "level = sums[0] * p.share", "level = 0.0f"),
    GROUP: ("group_norm_backward.hip", "fma_f32(z, 1.0f - s, 1.0f)", "1.0f"),
    "sums": (
        "norm_gradients.hip",
        "p.pairs + channel * 2, row,",
        "p.pairs + channel * 2, 1 + row,",
    ),
}


@executed.known(by="clang")
@pytest.mark.parametrize(("op", "mistake"), [(LAYER, LAYER), (GROUP, GROUP), (LAYER, "sums")])
@pytest.mark.parametrize("gfx", GPUS)
def test_a_planted_mistake_is_seen(gfx: str, op: str, mistake: str) -> None:
    case = next(gradients.ALL[op](gfx))
    assert not execute(case).faults
    (said,) = {" ".join(execute(case, simt.planted(*PLANTED[mistake])).faults)}
    assert "torch's own" in said
