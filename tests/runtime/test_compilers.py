"""The compilers: the real ones of this machine, and shell scripts for clangs that misbehave."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import (
    clang,
    codeobject,
    compilers,
    libraries,
    library_compilers,
    process,
    source,
)
from lib_rocm_sd.runtime.clang import Clang
from lib_rocm_sd.runtime.compiler import Compiler
from tests import compiled, executed
from tests.runtime.code_objects import SCALE, code_object, compile_scale
from tests.runtime.processes import LONG_S, noted, reach_limits_when, wait_until_gone

SCALE_SPEC = KernelSpec(SCALE, "scale", (("THREADS", 128),))
ROWS = list(arch.amd_table())
ONE_OF_EACH = ["gfx1030", "gfx1100", "gfx1201", "gfx90a"]
NEWEST = ["gfx1153", "gfx950"]
"""Chips that LLVM 19 does not know."""
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="shell scripts stand for compilers")


def made(compiler: Compiler, spec: KernelSpec, row: Arch) -> codeobject.KernelResources:
    """Compile and read back; asserts that the code object is what was asked for."""
    defines = {**row.defines(), **dict(spec.defines)}
    text = source.flatten(spec.source)
    return read(compiler.compile(text, spec.entry, row, defines, spec.source), spec, row)


def read(code: bytes, spec: KernelSpec, row: Arch) -> codeobject.KernelResources:
    assert codeobject.refusals(code, spec.entry, row) == []
    (kernel,) = codeobject.resources(code)
    return kernel


def real(found: list[Compiler], row: Arch) -> Compiler:
    """The first of a kind that serves; skips with the reasons when none does."""
    for compiler in found:
        if not compiler.refusals(row):
            return compiler
    pytest.skip("; ".join(reason for compiler in found for reason in compiler.refusals(row)))


def script(path: Path, body: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_clang(path: Path, body: str) -> Clang:
    """A compiler that is a shell script."""
    file = script(path, body)
    return Clang("clang", (str(file),), (str(file),), file)


# -- the real ones


@pytest.mark.parametrize("gfx", ONE_OF_EACH)
def test_clang_compiles_what_it_knows(gfx: str) -> None:
    row = arch.table()[gfx]
    kernel = made(real(clang.path_clangs(), row), SCALE_SPEC, row)
    assert (kernel.lds_bytes, kernel.wave_size) == (512, row.wave_size)
    assert (kernel.kernarg_bytes, kernel.max_block) == (32, 128)


@pytest.mark.parametrize("gfx", [*ONE_OF_EACH, *NEWEST])
def test_ziglang_compiles_what_it_knows(gfx: str) -> None:
    row = arch.table()[gfx]
    kernel = made(real(clang.zig_clangs(), row), SCALE_SPEC, row)
    assert (kernel.lds_bytes, kernel.wave_size) == (512, row.wave_size)


@pytest.mark.parametrize("gfx", ["gfx90a", "gfx1030"])
def test_libamd_comgr_compiles_what_it_knows(gfx: str) -> None:
    row = arch.table()[gfx]
    kernel = made(real(library_compilers.comgrs(), row), SCALE_SPEC, row)
    assert (kernel.lds_bytes, kernel.wave_size) == (512, row.wave_size)


@executed.known(by="clang")
@pytest.mark.parametrize("gfx", ROWS)
def test_the_attention_kernel_compiles_for_every_row_without_spills(gfx: str) -> None:
    row = arch.table()[gfx]
    spec = attention_kernel.shipped_specs(row)[1]
    found = [*clang.path_clangs(), *clang.zig_clangs()]
    kernel = read(compiled.code(real(found, row), spec, row), spec, row)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.lds_bytes <= row.lds_bytes


@pytest.mark.parametrize("gfx", ["gfx90a", "gfx1030"])
def test_libamd_comgr_compiles_the_attention_kernel_or_is_too_old(gfx: str) -> None:
    row = arch.table()[gfx]
    spec = attention_kernel.shipped_specs(row)[0]
    try:
        kernel = made(real(library_compilers.comgrs(), row), spec, row)
    except CompileError as error:
        assert "LLVM 16 or newer" in error.log
    else:
        assert kernel.wave_size == row.wave_size


def test_a_clang_without_the_target_says_so() -> None:
    found = [c for c in clang.path_clangs() if Path(getattr(c, "path", "")).name == "clang-19"]
    if not found:
        pytest.skip("clang-19 is not in PATH")
    (reason,) = found[0].refusals(arch.table()["gfx950"])
    assert "clang 19." in reason and "no target gfx950" in reason and "newer LLVM" in reason


@pytest.mark.parametrize("find", [library_compilers.comgrs, clang.path_clangs, clang.zig_clangs])
def test_a_compile_error_has_the_log_and_the_numbered_source(find: object) -> None:
    row = arch.table()["gfx1030"]
    compiler = real(find(), row)  # type: ignore[operator]
    text = '#line 1 "bad.hip"\nint fine;\nint bad = no_such_thing;\n'
    with pytest.raises(CompileError) as caught:
        compiler.compile(text, "bad", row, row.defines(), "bad.hip")
    assert "no_such_thing" in caught.value.log and "bad.hip:2" in caught.value.log
    assert "    2  int bad = no_such_thing;" in caught.value.full()
    assert compiler.name in str(caught.value) and "gfx1030" in str(caught.value)


def test_nvrtc_compiles_for_the_cards_own_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_SD_ALLOW_CUDA", "1")
    row = arch.table()["sm_80"]
    compiler = real(library_compilers.nvrtcs(), row)
    defines = {**row.defines(), "THREADS": 128}
    code = compiler.compile(source.flatten(SCALE), "scale", row, defines, "scale.hip")
    assert codeobject.refusals(code, "scale", row) == []
    assert b"rocm_sd_lds_bytes" in code


# -- the order, and who refuses what


def test_the_order_of_the_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROCM_SD_ALLOW_CUDA", raising=False)
    names = list(dict.fromkeys(compiler.name for compiler in compilers.all_compilers()))
    assert names == ["comgr", "hiprtc", "amdclang++", "clang", "ziglang", "nvrtc"]


def test_nvrtc_needs_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROCM_SD_ALLOW_CUDA", raising=False)
    assert "ROCM_SD_ALLOW_CUDA" in compilers.survey(arch.table()["sm_80"])["nvrtc"][0]


def test_nobody_else_compiles_for_the_development_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_SD_ALLOW_CUDA", "1")
    survey = compilers.survey(arch.table()["sm_80"])
    assert all(survey[name] for name in survey if name != "nvrtc")


def test_nothing_installed_gives_a_reason_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    monkeypatch.setattr(libraries, "rocm_roots", lambda: [])
    monkeypatch.setattr(clang.importlib.util, "find_spec", lambda name: None)
    survey = compilers.survey(arch.table()["gfx1100"])
    assert all(survey.values())
    assert "PATH" in survey["clang"][0] and str(tmp_path) in survey["comgr"][0]


@posix_only
def test_an_sdk_is_found_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {name: shutil.which(f"{name}-19") for name in ("clang++", "ld.lld")}
    if not all(tools.values()):
        pytest.skip("clang++-19 and ld.lld-19 are not in PATH")
    folder = tmp_path / "rocm" / "llvm" / "bin"
    script(folder / "amdclang++", f'exec {tools["clang++"]} "$@"')
    script(folder / "ld.lld", f'exec {tools["ld.lld"]} "$@"')
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    row = arch.table()["gfx1100"]
    (compiler,) = [c for c in clang.sdk_clangs() if not c.refusals(row)]
    assert compiler.name == "amdclang++"
    assert made(compiler, SCALE_SPEC, row).lds_bytes == 512


# -- the table of verified versions


def test_the_table_of_verified_versions_names_known_rows_and_versions() -> None:
    table = compilers._verified()
    assert all(int(major) >= clang.OLDEST for majors in table.values() for major in majors)
    assert set(table) == set(arch.amd_table())
    assert "19" not in map(str, table["gfx950"])  # LLVM 19 does not know it


@posix_only
@pytest.mark.parametrize(
    ("says", "version", "noted"),
    [
        ("Debian clang version 19.1.7", "19.1.7", False),
        ("clang version 98.1.0", "98.1.0", True),
        ("AMD clang version 19.0.0git (roc-6.4)", "", True),
        ("no compiler at all", "", True),
    ],
)
def test_what_is_no_verified_release_of_llvm_is_noted(
    tmp_path: Path, says: str, version: str, noted: bool
) -> None:
    compiler = fake_clang(tmp_path / "clang", f"echo '{says}'; echo '    gfx1201'")
    assert compiler.llvm_version() == version
    note = compilers.note(compiler, arch.table()["gfx1201"])
    assert note == ("not verified for gfx1201; used after its self-test" if noted else "")
    assert "gfx950" in compilers.note(compiler, arch.table()["gfx950"])


def test_compilers_for_development_are_not_noted() -> None:
    assert compilers.note(compilers.Absent("nvrtc", []), arch.table()["sm_90"]) == ""


# -- clangs that misbehave


@posix_only
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "echo clang version 16.0.6; echo '    gfx1100'",
            "16.0.6",
        ),
        ("echo clang version 19.1.0; echo '    sm_80'", "without the AMDGPU target"),
        ("echo gcc version 12; echo '    gfx1100'", "is not a clang"),
        ("exit 3", "exit status 3"),
        ("kill -SEGV $$", "crashed (SIGSEGV)"),
    ],
)
def test_clangs_that_cannot_serve(tmp_path: Path, body: str, words: str) -> None:
    compiler = fake_clang(tmp_path / "clang", body)
    assert words in "; ".join(compiler.refusals(arch.table()["gfx1100"]))


@posix_only
def test_a_clang_without_a_linker_says_which_package(tmp_path: Path) -> None:
    file = script(tmp_path / "clang", "echo clang version 19.1.0; echo '    gfx1100'")
    (reason,) = Clang("clang", (str(file),), (), file).refusals(arch.table()["gfx1100"])
    assert "ld.lld" in reason and "lld" in reason


@posix_only
def test_a_compiler_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_COMPILE_TIME_LIMIT_S", "50")
    grandchild = tmp_path / "pid"
    reach_limits_when(monkeypatch, grandchild.exists)
    note = f"echo $! > {grandchild}.new; mv {grandchild}.new {grandchild}"
    compiler = fake_clang(tmp_path / "clang", f"sleep {LONG_S} & {note}; wait")
    with pytest.raises(CompileError, match=r"took longer than \d[\d.]* s"):
        compile_scale(compiler)
    assert wait_until_gone(int(noted(grandchild)))


@posix_only
def test_a_compiler_that_crashes_is_a_compile_error(tmp_path: Path) -> None:
    compiler = fake_clang(tmp_path / "clang", "echo last words; kill -SEGV $$")
    with pytest.raises(CompileError, match="SIGSEGV") as caught:
        compile_scale(compiler)
    assert "last words" in caught.value.log


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    compiler = Clang("clang", (str(missing),), (), missing)
    assert compiler.identity() == ""
    with pytest.raises(CompileError, match="could not be started"):
        compile_scale(compiler)


def test_the_time_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_SD_COMPILE_TIME_LIMIT_S", "7.5")
    assert process.time_limit_s() == 7.5
    monkeypatch.setenv("ROCM_SD_COMPILE_TIME_LIMIT_S", "soon")
    assert process.time_limit_s() == 600.0


def test_the_facade_of_code_objects() -> None:
    """The stand-in code objects of the other tests pass the same check as real ones."""
    assert codeobject.refusals(code_object(), "scale", arch.table()["gfx1100"]) == []
