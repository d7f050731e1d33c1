"""Sizes at the edges of tiles, executed as machine code: boundaries.py has their list."""

from __future__ import annotations

import pytest

from lib_rocm_sd.ops.base import KernelSpec
from tests import executed
from tests.verify.amdgpu import boundaries, coverage, edges, gradients
from tests.verify.amdgpu.boundaries import GPUS
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.judge import execute
from tests.verify.amdgpu.launch import missing


def kernel_of(case: Case) -> tuple[str, str, KernelSpec]:
    """What cases have in common that are executed again on the same day."""
    if case.op not in gradients.OPS:
        return coverage.kernel_of(case)
    return case.gfx, case.compiled_by, min(gradients.specs_of(case), key=repr)


CASES = [case for gfx in GPUS for make in edges.ALL.values() for case in make(gfx)]


@executed.known(by="clang", together=kernel_of, once=True)
@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.gfx}-{case.op}-{place}" for place, case in enumerate(CASES)]
)
def test_machine_code_is_right_at_the_edges_of_tiles(case: Case) -> None:
    reason = missing(case.gfx, case.compiled_by)
    if reason:
        pytest.skip(reason)
    faults = execute(case).faults
    assert not faults, f"{case}: {'; '.join(faults)}"


@pytest.mark.parametrize("gfx", GPUS)
def test_every_edge_and_count_is_executed(gfx: str) -> None:
    """Each rest of 0, 1 and -1 and each count of 1, 2 and more that some problem has."""
    assert not boundaries.missing(gfx)


def test_what_no_case_has_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of one query beyond a tile, three images with an embedding, and SD's 640 channels
    in 32 groups: none of them was executed before.
    """
    monkeypatch.setattr(edges, "ALL", {})
    found = boundaries.missing("gfx1100")
    for each in (
        "attention backward, queries beside own keys ahead by 32: +1",
        "conv, batch, embedding True: 3+",
        "whole group norm, channels of a group: 20",
    ):
        assert each in found
