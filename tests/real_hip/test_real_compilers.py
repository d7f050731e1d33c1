"""What AMD's real comgr and hiprtc, as Debian 12 (LLVM 15) and 13 (LLVM 17) have them, make of our
kernels: read, and executed as other tests do clang's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from lib_rocm_sd.arch import table
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, clang, codeobject, compilers
from lib_rocm_sd.runtime.library_compilers import LibraryCompiler
from tests import compiled
from tests.real_hip import debian
from tests.verify.amdgpu import cases, launch
from tests.verify.amdgpu.errors import UnsupportedError
from tests.verify.amdgpu.judge import execute

TARGETS = (
    ("bookworm", "gfx90a"),
    *(("trixie", gfx) for gfx in ("gfx1100", "gfx942", "gfx90a")),
    *(("bookworm", "gfx1030"), ("trixie", "gfx1030")),
)
"""Those without a matrix unit last: their products take longest to execute, and a default run has
the first case of each op (tests/sweeps.py).
"""
COMPILERS = tuple(debian.FILES)
PRODUCTS = {
    *("attention.hip", "attention_backward.hip"),
    *("conv3x3.hip", "upsample_conv.hip", "linear.hip"),
}
"""Kernels with products by a matrix unit."""
SOURCES = {
    **{"attention": "attention.hip", "attention and lse": "attention.hip"},
    **{"attention backward": "attention_backward.hip", "linear": "linear.hip"},
    **dict.fromkeys(("conv", "conv epilogue", "conv rows"), "conv3x3.hip"),
}
"""The source of each op that has such a product."""
OLD = {"bookworm": 15, "trixie": 17}


def refusal(release: str, gfx: str, source: str) -> str:
    """What a kernel says of an LLVM whose code of it was wrong; empty where it says nothing."""
    if gfx in ("gfx942", "gfx90a") and source in PRODUCTS:
        return "need.* LLVM 1[68] or newer"
    return "needs LLVM 16 or newer" if OLD[release] < 16 and "attention" in source else ""


def compiler(release: str, name: str, folder: Path, patch: pytest.MonkeyPatch) -> LibraryCompiler:
    return LibraryCompiler(name, debian.under(release, folder, patch) / debian.FILES[name])


@pytest.mark.parametrize("name", COMPILERS)
@pytest.mark.parametrize(("release", "gfx"), TARGETS)
def test_its_code_asks_of_a_launch_what_clangs_does(
    release: str,
    gfx: str,
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    if reason := launch.missing(gfx):
        pytest.skip(reason)
    row, made = table()[gfx], compiler(release, name, folder, monkeypatch)
    assert made.refusals(row) == []
    specs = sorted(cases.shipped_specs(gfx), key=repr)
    if not pytestconfig.getoption("--all", default=False):
        place = 2 * TARGETS.index((release, gfx)) + COMPILERS.index(name)
        specs = specs[place * 17 :][:1]
    for spec in specs:
        if said := refusal(release, gfx, spec.source):
            with pytest.raises(CompileError) as caught:
                compiled.code(made, spec, row)
            assert re.search(said, caught.value.log), spec
            continue
        code = compiled.code(made, spec, row)
        assert codeobject.refusals(code, spec.entry, row) == []
        assert read(code) == read(launch.built(spec, row)), spec


def read(code: bytes) -> list[object]:
    """What a launch depends on. Registers are the compiler's own affair."""
    return [
        (each.name, each.lds_bytes, each.kernarg_bytes, each.max_block, each.wave_size)
        for each in codeobject.resources(code)
    ]


def executed() -> Iterator[tuple[str, str, str, str]]:
    """A case of each op, by the two compilers in turn."""
    for place, (release, gfx) in enumerate(TARGETS):
        for turn, op in enumerate(cases.ALL):
            if not refusal(release, gfx, SOURCES.get(op, op)):
                yield release, COMPILERS[(place + turn) % 2], gfx, op


@pytest.mark.parametrize(("release", "name", "gfx", "op"), list(executed()))
def test_what_it_makes_is_right(
    release: str, name: str, gfx: str, op: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := launch.missing(gfx):
        pytest.skip(reason)
    made = compiler(release, name, folder, monkeypatch)
    monkeypatch.setattr(launch, "compiler", lambda name="clang": made)
    every = list(cases.ALL[op](gfx))
    try:
        found = execute(replace(every[len(every) // 2], compiled_by=f"{release} {name}"))
    except UnsupportedError as error:
        pytest.skip(f"the executor does not know this compiler's choice: {error}")
    assert not found.faults, f"{found.case}: {found.faults}"
    assert found.lane_instructions > 0


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_hiprtc_that_crashes_is_survived_and_the_next_compiler_taken(
    gfx: str, folder: Path, monkeypatch: pytest.MonkeyPatch, fresh_cache: Path
) -> None:
    """HIP 5.2's aborts the process for a GPU that its LLVM does not know; it cannot be asked."""
    crashing = compiler("bookworm", "hiprtc", folder, monkeypatch)
    row = table()[gfx]
    found = [crashing, *clang.path_clangs(), *clang.zig_clangs()]
    if not any(not each.refusals(row) for each in found[1:]):
        pytest.skip(f"no clang for {gfx}")
    monkeypatch.setattr(compilers, "in_order", lambda row: iter(found))
    made = build.build(KernelSpec("pack.hip", "pack_tiles"), row)
    assert made.compiler in ("clang", "ziglang") and codeobject.target(made.code) == gfx
    (failure,) = made.failures
    assert "libamdhip64.so.5: crashed (SIGABRT)" in failure
