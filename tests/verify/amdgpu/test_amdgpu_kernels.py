"""Our kernels' machine code, executed for each family of AMD GPUs, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.problem import ConvProblem
from tests import executed, noted
from tests.verify.amdgpu import cases, coverage, executor
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.coverage import kernel_of
from tests.verify.amdgpu.judge import execute
from tests.verify.amdgpu.launch import missing

GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942", "gfx90a")
"""Each executed in full. gfx1151 differs from gfx1100 only in how instructions are scheduled."""
SIMILAR = ("gfx1151",)
NEWER = ("gfx950",)
"""Executed in full, as ziglang's clang compiles them: LLVM 19 does not know them."""


def check(case: Case) -> None:
    reason = missing(case.gfx, case.compiled_by)
    if reason:
        pytest.skip(reason)
    found = execute(case)
    assert not found.faults, f"{found.case}: {'; '.join(found.faults)}"
    assert found.lane_instructions > 0
    coverage.keep(found)


def named(found: list[Case]) -> pytest.MarkDecorator:
    """A test for each, known by its gfx, op and place among them."""
    names = [f"{case.gfx}-{case.op}-{place}" for place, case in enumerate(found)]
    return pytest.mark.parametrize("case", found, ids=names)


def by_clang(gfx: str, step: int = 1) -> list[Case]:
    return [case for make in cases.ALL.values() for case in list(make(gfx))[::step]]


@executed.known(by="clang", together=kernel_of, once=True)
@named([case for gfx in GPUS for case in by_clang(gfx)])
def test_machine_code_is_right(case: Case) -> None:
    check(case)


@executed.known(by="clang", together=kernel_of, once=True)
@named([case for gfx in SIMILAR for case in by_clang(gfx, 3)])
def test_machine_code_of_a_similar_gpu_is_right(case: Case) -> None:
    check(case)


def by_ziglang(gfx: str) -> list[Case]:
    """Some of each op."""
    chosen = [case for make in cases.ALL.values() for case in list(make(gfx))[1::9]]
    return [replace(case, compiled_by="ziglang") for case in chosen]


@executed.known(by="ziglang", together=kernel_of, once=True)
@named([case for gfx in GPUS for case in by_ziglang(gfx)])
def test_machine_code_of_another_compiler_is_right(case: Case) -> None:
    """By the clang inside ziglang, which is another than the one in PATH."""
    check(case)


@executed.known(by="ziglang", once=True)
def test_registers_that_are_copied_unwritten_are_written_before_their_use() -> None:
    """Where ziglang's clang takes the loop for one that may have no turn."""
    prelu = ConvProblem("3x3", 1, 9, 18, 16, 24, epilogue="prelu")
    check(Case("gfx1030", "conv", prelu, 1, "band", compiled_by="ziglang", values="large"))


@executed.known(by="ziglang", together=kernel_of, once=True)
@named([replace(case, compiled_by="ziglang") for gfx in NEWER for case in by_clang(gfx)])
def test_machine_code_of_a_newer_gpu_is_right(case: Case) -> None:
    check(case)


def shipped() -> Iterator[Any]:
    """Each kernel that is compiled ahead or searched, of each GPU."""
    for gfx in GPUS:
        specs = sorted(cases.shipped_specs(gfx), key=repr)
        for place, spec in enumerate(specs):
            yield pytest.param(gfx, spec, id=f"{gfx}-{spec.entry}-{place}")


def spec_parts(codes: noted.Codes, gfx: str, spec: KernelSpec) -> object:
    """What decides about how much of a kernel is executed."""
    arch = by_gfx(gfx)
    assert arch is not None
    launching = noted.plain(coverage.launching(gfx, spec))
    return codes.of(spec, arch), executor.VERSION, noted.plain(coverage.UNREACHABLE), launching


def spec_turn(gfx: str, spec: KernelSpec) -> object:
    """With the cases that launch it."""
    return gfx, "clang", spec


@executed.known(by="clang", parts=spec_parts, together=spec_turn)
@pytest.mark.parametrize(("gfx", "spec"), list(shipped()))
def test_nearly_all_of_a_shipped_kernel_is_executed(gfx: str, spec: KernelSpec) -> None:
    """By all cases together, which have been right: see coverage.py."""
    reason = missing(gfx)
    if reason:
        pytest.skip(reason)
    found = coverage.of_kernel(gfx, spec)
    rest = "\n".join(found.rest())
    assert found.share >= coverage.LEAST, f"{found}\n{rest}"
