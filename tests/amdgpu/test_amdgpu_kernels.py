"""Our kernels' machine code, executed for each family of AMD GPUs, against float64."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests import executed
from tests.amdgpu import cases
from tests.amdgpu.judge import Case, execute, specs_of
from tests.amdgpu.launch import missing

GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942", "gfx90a")
"""Each executed in full. gfx1151 differs from gfx1100 only in how instructions are scheduled."""
SIMILAR = ("gfx1151",)
OPS = ("attention", "conv", "group_norm")
LAUNCHED_BY = {
    "attention": ("attention",),
    "softmax": ("attention",),
    "conv": ("conv", "group_norm"),
    "finish": ("conv", "group_norm"),
}
"""Packages of lib_rocm_sd.ops; group_norm where nothing is said."""


def parts(case: Case) -> tuple[str, tuple[object, ...]]:
    """What decides about a case."""
    try:
        decoder = version("tinygrad")
    except PackageNotFoundError:
        decoder = ""
    specs = sorted(specs_of(case), key=repr)
    sources = [(spec, executed.kernel(spec.source)) for spec in specs]
    others = set(OPS) - {*LAUNCHED_BY.get(case.op, ("group_norm",))}
    without = tuple(sorted(f"lib_rocm_sd.ops.{name}" for name in others))
    python = executed.python("tests.amdgpu.judge", without=without)
    made = (case, case.arch, python, decoder, *sources)
    return f"{case.gfx} {case.op}", made


def check(case: Case) -> None:
    reason = missing(case.gfx, case.compiled_by)
    if reason:
        pytest.skip(reason)
    found = execute(case)
    assert not found.faults, f"{found.case}: {'; '.join(found.faults)}"
    assert found.lane_instructions > 0


def named(found: list[Case]) -> pytest.MarkDecorator:
    """A test for each, known by its gfx, op and place among them."""
    names = [f"{case.gfx}-{case.op}-{place}" for place, case in enumerate(found)]
    return pytest.mark.parametrize("case", found, ids=names)


def by_clang(gfx: str, step: int = 1) -> list[Case]:
    return [case for make in cases.ALL.values() for case in list(make(gfx))[::step]]


@executed.known(by="clang", parts=parts)
@named([case for gfx in GPUS for case in by_clang(gfx)])
def test_machine_code_is_right(case: Case) -> None:
    check(case)


@executed.known(by="clang", parts=parts)
@named([case for gfx in SIMILAR for case in by_clang(gfx, 3)])
def test_machine_code_of_a_similar_gpu_is_right(case: Case) -> None:
    check(case)


def by_ziglang(gfx: str) -> list[Case]:
    """Some of each op."""
    chosen = [case for make in cases.ALL.values() for case in list(make(gfx))[1::9]]
    return [replace(case, compiled_by="ziglang") for case in chosen]


@executed.known(by="ziglang", parts=parts)
@named([case for gfx in GPUS for case in by_ziglang(gfx)])
def test_machine_code_of_another_compiler_is_right(case: Case) -> None:
    """By the clang inside ziglang, which is another than the one in PATH."""
    check(case)


@pytest.mark.parametrize("gfx", GPUS)
def test_every_kernel_that_is_shipped_or_searched_is_executed(gfx: str) -> None:
    executed = {
        spec for make in cases.ALL.values() for case in make(gfx) for spec in specs_of(case)
    }
    assert not cases.shipped_specs(gfx) - executed
