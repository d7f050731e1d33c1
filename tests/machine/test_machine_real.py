"""Our own kernels' machine code: found, read in every way there is, and counted right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lib_rocm_sd import __main__
from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.commands import inspect
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab import listing
from lib_rocm_sd.lab.cycles import Kind
from lib_rocm_sd.lab.listing import Function, Instruction, ListingError
from lib_rocm_sd.lab.loops import KernelWork, analysed
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, compilers

ONE_OF_EACH = ("gfx1030", "gfx1100", "gfx1201", "gfx90a", "gfx942")


def _attention(arch: Arch) -> KernelSpec:
    return attention_kernel.spec("float16", 64, "none", attention_kernel.configs(arch, 64)[0])


def compiled_here(gfx: str) -> Arch:
    """The row; skips where nothing here compiles for it."""
    arch = table()[gfx]
    survey = compilers.survey(arch)
    if all(survey.values()):
        pytest.skip(f"no compiler for {gfx}: {survey}")
    return arch


def _made(gfx: str) -> tuple[Arch, KernelSpec, build.CodeObject]:
    arch = compiled_here(gfx)
    spec = _attention(arch)
    return arch, spec, build.build(spec, arch)


def _listed(gfx: str) -> KernelWork:
    arch, spec, made = _made(gfx)
    try:
        function, _ = listing.listing(spec, arch, made)
    except listing.NoListingError as error:
        pytest.skip(str(error))
    return analysed(function, arch)


@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_the_matrix_instructions_of_attention_are_those_of_its_tiles(gfx: str) -> None:
    work = _listed(gfx)
    config = attention_kernel.configs(table()[gfx], 64)[0]
    products = 2 * (config.block_k // 16) * (64 // 16) * config.q_tiles
    each = 64 if gfx == "gfx1030" else 1  # eight rows of eight packed dot products
    assert work.hot is not None
    keys, *inner = work.loops
    assert keys.parent is None and all(loop.parent is not None for loop in inner)
    # Scoring a tile again may stand there a second time. What is executed: test_beside_triton.py.
    found = sum(loop.mix.of(Kind.MATRIX) for loop in work.loops)
    assert products * each <= found <= 1.5 * products * each
    assert work.straight.of(Kind.MATRIX) == 0
    assert all(loop.conditional.of(Kind.MATRIX) == 0 for loop in work.loops)
    assert sum(loop.mix.of(Kind.TRANSCENDENTAL) for loop in work.loops) > 0
    assert all(loop.mix.of(Kind.SCRATCH) == 0 for loop in work.loops)
    hot = work.loops[work.hot]
    assert hot.mix.lds_bytes > 0 and 0.1 < hot.cycles.bounds()["bound"] <= 1.0


@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_every_way_to_text_gives_the_same(gfx: str) -> None:
    arch, spec, made = _made(gfx)
    works = {}
    for name, path, read in listing._ways(spec, arch, made):
        try:
            functions = read()
        except (ListingError, CompileError):
            continue
        works[name, path] = analysed(listing.named(functions, spec.entry), arch)
    if len(works) < 2:
        pytest.skip(f"only one way to read code for {gfx} here: {list(works)}")
    first, *others = works.values()
    assert all(work == first for work in others)


def test_without_a_way_to_text_the_reasons_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arch, spec, made = _made("gfx1100")
    monkeypatch.setattr(listing, "_refused", {})
    monkeypatch.setattr(listing, "_ways", lambda *which: [])
    with pytest.raises(listing.NoListingError, match="no libamd_comgr"):
        listing.listing(spec, arch, made)
    tried = []

    def fails() -> None:
        tried.append(1)
        raise ListingError("not for this chip")

    monkeypatch.setattr(listing, "_ways", lambda *which: [("a tool", tmp_path, fails)])
    for _ in range(2):
        with pytest.raises(listing.NoListingError, match="a tool .*: not for this chip"):
            listing.listing(spec, arch, made)
    assert tried == [1]


@pytest.fixture
def _one_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention_kernel, "searched_specs", lambda arch: [_attention(arch)], raising=True
    )


@pytest.mark.usefixtures("_one_attention")
def test_inspect_prints_the_loops(capsys: pytest.CaptureFixture[str]) -> None:
    _listed("gfx1201")
    command = ["inspect", "--op", "attention", "--arch", "gfx1201"]
    assert __main__.main(command) == 0
    resources, loops, notes = capsys.readouterr().out.rstrip().split("\n\n")
    assert "waves/SIMD" in resources.splitlines()[0]
    heads, *shown = loops.splitlines()
    assert "LDS bytes" in heads and "est. bound" in heads
    assert sum(" hot " in line for line in shown) == 1
    assert notes.splitlines()[1] == "Estimates, not measurements:"
    assert "RDNA4: cycles per SIMD" in notes and "16x16x16_b?f16 16" in notes
    assert __main__.main([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["waves_per_simd"] == min(row["waves_by_registers"], row["waves_by_lds"])
    assert len(row["loops"]) == len(shown)
    (loop,) = [each for each in row["loops"] if each.get("hot")]
    assert loop["matrix"] > 0 and loop["estimate"]["matrix_cycles"] == 16 * loop["matrix"]
    assert row["listing"] and row["straight"]["global"] > 0 and not row["listing_failure"]


@pytest.mark.usefixtures("_one_attention")
@pytest.mark.parametrize(
    ("error", "exit_status"),
    [(listing.NoListingError("nothing here"), 0), (None, 1)],
)
def test_inspect_says_what_it_could_not_count(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception | None,
    exit_status: int,
) -> None:
    _made("gfx1201")
    unknown = Function("attention_forward", (Instruction(("v_unheard_of_b32",)),))

    def listed(*which: object) -> tuple[Function, str]:
        if error is not None:
            raise error
        return unknown, "a tool"

    monkeypatch.setattr(inspect, "listing", listed)
    assert __main__.main(["inspect", "--op", "attention", "--arch", "gfx1201"]) == exit_status
    said = capsys.readouterr().out
    assert ("nothing here" if error else "'v_unheard_of_b32' is not in the table") in said
