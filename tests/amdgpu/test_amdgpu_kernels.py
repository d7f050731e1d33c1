"""Our kernels' machine code, executed for each family of AMD GPUs, against float64.

Cases run in as many processes as there are cores; nothing is kept between runs.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.amdgpu import cases
from tests.amdgpu.launch import missing

GPUS = ("gfx1100", "gfx1201", "gfx942", "gfx90a")
"""Each executed in full. gfx1151 differs from gfx1100 only in how instructions are scheduled."""
SIMILAR = ("gfx1151",)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as made:
        yield made


def check(pool: ProcessPoolExecutor, wanted: list[cases.Case]) -> None:
    reason = missing(wanted[0].gfx, wanted[0].compiled_by)
    if reason:
        pytest.skip(reason)
    outcomes = list(pool.map(cases.execute, wanted))
    wrong = [f"{each.case}: {'; '.join(each.faults)}" for each in outcomes if each.faults]
    assert not wrong, "\n".join(wrong)
    assert all(each.lane_instructions > 0 for each in outcomes)


@pytest.mark.parametrize("op", cases.ALL)
@pytest.mark.parametrize("gfx", GPUS)
def test_machine_code_is_right(pool: ProcessPoolExecutor, gfx: str, op: str) -> None:
    check(pool, list(cases.ALL[op](gfx)))


@pytest.mark.parametrize("op", cases.ALL)
@pytest.mark.parametrize("gfx", SIMILAR)
def test_machine_code_of_a_similar_gpu_is_right(
    pool: ProcessPoolExecutor, gfx: str, op: str
) -> None:
    check(pool, list(cases.ALL[op](gfx))[::3])


@pytest.mark.parametrize("gfx", GPUS)
def test_machine_code_of_another_compiler_is_right(pool: ProcessPoolExecutor, gfx: str) -> None:
    """Some of each, by the clang inside ziglang, which is another than the one in PATH."""
    every = [case for make in cases.ALL.values() for case in list(make(gfx))[1::9]]
    check(pool, [replace(case, compiled_by="ziglang") for case in every])


@pytest.mark.parametrize("gfx", GPUS)
def test_every_kernel_that_is_shipped_or_searched_is_executed(gfx: str) -> None:
    executed = {
        spec for make in cases.ALL.values() for case in make(gfx) for spec in cases.specs_of(case)
    }
    assert not cases.shipped_specs(gfx) - executed
