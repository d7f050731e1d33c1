"""Building through the cache: who is asked, what is kept, what damage and other processes do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import arch, cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import background, build, clang, compilers, library_compilers, source
from lib_rocm_sd.runtime.compiler import Compiler, file_identity
from tests.runtime.code_objects import SCALE, code_object
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
ROW = arch.table()["gfx1100"]
SPEC = KernelSpec(SCALE, "scale", (("THREADS", 64),))


@dataclass
class Fake(Compiler):
    """A compiler that hands out `answer` and counts; its identity is that of `path`."""

    path: Path
    answer: bytes | CompileError | OSError = field(default_factory=code_object)
    name: str = "fake"
    reasons: list[str] = field(default_factory=list)
    calls: int = 0
    version: str = ""

    def __post_init__(self) -> None:
        self.path.write_text(self.name)

    def refusals(self, arch: Arch) -> list[str]:
        return self.reasons

    def llvm_version(self) -> str:
        return self.version

    def identity(self) -> str:
        return file_identity(self.name, self.path)

    def compile(
        self, source: str, entry: str, arch: Arch, defines: Mapping[str, int], file_name: str
    ) -> bytes:
        self.calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


Use = Callable[..., tuple[Fake, ...]]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> Iterator[Use]:
    """Make these the compilers of this machine; gives the fakes back."""

    def install(*fakes: Fake) -> tuple[Fake, ...]:
        monkeypatch.setattr(compilers, "all_compilers", lambda: list(fakes))
        return fakes

    build.forget_failures()
    yield install
    build.forget_failures()


def test_the_second_time_comes_from_the_cache(use: Use, tmp_path: Path) -> None:
    (fake,) = use(Fake(tmp_path / "cc"))
    assert not build.is_cached(SPEC, ROW)
    first = build.build(SPEC, ROW)
    assert (first.code, first.compiler, first.cached) == (code_object(), "fake", False)
    assert build.is_cached(SPEC, ROW)
    second = build.build(SPEC, ROW)
    assert (second.code, second.compiler, second.cached) == (first.code, "fake", True)
    assert second.seconds == first.seconds and fake.calls == 1


def test_several_are_built_at_a_time_each_once(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two compilations wait for each other, which only ends where both run."""
    (fake,) = use(Fake(tmp_path / "cc"))
    together = threading.Barrier(2, timeout=WAIT_S)
    compile_one = fake.compile

    def both(*question: Any) -> bytes:
        together.wait()
        return compile_one(*question)

    monkeypatch.setattr(fake, "compile", both)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    specs = [KernelSpec(SCALE, "scale", (("THREADS", threads),)) for threads in (64, 128)]
    build.build_all([*specs, *specs], ROW)
    assert fake.calls == 2 and all(build.is_cached(spec, ROW) for spec in specs)


def test_a_failure_among_several_is_told_by_build(use: Use, tmp_path: Path) -> None:
    use(Fake(tmp_path / "cc", CompileError("fake", "it does not", "log", "source")))
    build.build_all([SPEC], ROW)
    with pytest.raises(CompileError, match="it does not"):
        build.build(SPEC, ROW)
    build.build_all([], ROW)


def test_each_part_of_the_question_is_in_the_key(use: Use, tmp_path: Path) -> None:
    use(Fake(tmp_path / "cc"))
    build.build(SPEC, ROW)
    assert not build.is_cached(SPEC, arch.table()["gfx1101"])
    assert not build.is_cached(KernelSpec(SCALE, "scale", (("THREADS", 128),)), ROW)
    assert not build.is_cached(KernelSpec(SCALE, "other", SPEC.defines), ROW)


def test_a_change_of_the_source_is_a_miss_and_of_a_comment_is_not(use: Use, tmp_path: Path) -> None:
    use(Fake(tmp_path / "cc"))
    copy = tmp_path / "copy.hip"
    shutil.copy(SCALE, copy)
    spec = KernelSpec(str(copy), "scale", SPEC.defines)
    build.build(spec, ROW)
    assert build.is_cached(spec, ROW)
    copy.write_text(copy.read_text() + "\n// changed\n")
    assert build.is_cached(spec, ROW)
    copy.write_text(copy.read_text() + "\nstruct Changed {};\n")
    assert not build.is_cached(spec, ROW)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM 19 alone, for ROW alone."""
    monkeypatch.setattr(compilers, "_verified", lambda: {ROW.gfx: ("19",)})


@pytest.mark.usefixtures("verified")
def test_a_verified_compiler_comes_before_a_newer_one(use: Use, tmp_path: Path) -> None:
    library, newer, good = use(
        Fake(tmp_path / "a", name="comgr"),
        Fake(tmp_path / "b", name="clang", version="22.1.8"),
        Fake(tmp_path / "c", name="old", version="19.1.7"),
    )
    made = build.build(SPEC, ROW)
    assert (made.compiler, made.note) == ("old", "")
    assert (library.calls, newer.calls, good.calls) == (0, 0, 1)
    assert list(compilers.in_order(ROW)) == [good, library, newer]
    assert list(compilers.in_order(arch.table()["gfx1030"])) == [library, newer, good]


@pytest.mark.usefixtures("verified")
def test_a_compiler_that_was_not_verified_is_used_and_labelled(use: Use, tmp_path: Path) -> None:
    broken = CompileError("old", "crashed")
    use(
        Fake(tmp_path / "b", name="new", version="22.1.8"),
        Fake(tmp_path / "c", answer=broken, name="old", version="19.1.7"),
    )
    for cached in (False, True):
        made = build.build(SPEC, ROW)
        assert (made.compiler, made.cached) == ("new", cached)
        assert made.note == f"not verified for {ROW.gfx}; used after its self-test"


def test_the_next_compiler_is_tried_and_the_failure_kept(use: Use, tmp_path: Path) -> None:
    bad = CompileError("bad", "no such builtin", "line 3: oops")
    first, refusing, last = use(
        Fake(tmp_path / "a", answer=bad),
        Fake(tmp_path / "b", reasons=["too old"]),
        Fake(tmp_path / "c", name="good"),
    )
    made = build.build(SPEC, ROW)
    assert made.compiler == "good" and made.failures == ("bad: no such builtin",)
    assert (first.calls, refusing.calls, last.calls) == (1, 0, 1)
    assert build.build(SPEC, ROW).failures == made.failures


def test_a_compiler_without_an_output_counts_as_a_failure(use: Use, tmp_path: Path) -> None:
    use(
        Fake(tmp_path / "a", answer=FileNotFoundError(2, "No such file", "kernel.co")),
        Fake(tmp_path / "b", name="good"),
    )
    made = build.build(SPEC, ROW)
    assert made.compiler == "good"
    assert "fake: " in made.failures[0] and "kernel.co" in made.failures[0]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for a compiler")
def test_a_clang_that_ends_well_and_leaves_nothing(
    tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "clang"
    path.write_text("#!/bin/sh\necho clang version 19.1.0; echo '    gfx1100'\n")
    path.chmod(0o755)
    made = clang.Clang("clang", (str(path),), (str(path),), path)
    good = Fake(tmp_path / "b", name="good")
    monkeypatch.setattr(compilers, "all_compilers", lambda: [made, good])
    assert build.build(SPEC, ROW).compiler == "good"


def test_without_room_for_temporary_files_each_compiler_says_so(
    tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libhiprtc.so"
    library.write_bytes(b"")
    found = [
        clang.Clang("clang", (sys.executable,), (sys.executable,), Path(sys.executable)),
        library_compilers.LibraryCompiler("hiprtc", library),
    ]
    monkeypatch.setattr(compilers, "all_compilers", lambda: found)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    build.forget_failures()
    with pytest.raises(CompileError, match=r"clang: .*could not be started.*hiprtc: .*not asked"):
        build.build(SPEC, ROW)
    build.forget_failures()


def test_what_was_tried_is_said_before_what_was_not_there(use: Use, tmp_path: Path) -> None:
    use(
        Fake(tmp_path / "a", name="absent", reasons=["not found in " + "/some/folder, " * 30]),
        Fake(tmp_path / "b", answer=CompileError("tried", "crashed (SIGSEGV)")),
    )
    with pytest.raises(CompileError) as caught:
        build.build(SPEC, ROW)
    assert "tried: crashed (SIGSEGV)" in str(caught.value)[: background.REASON_CHARACTERS]


@pytest.mark.parametrize(
    "wrong", [code_object("gfx1101"), code_object(kernels=[]), b"", b"\x7fELF", code_object()[:90]]
)
def test_a_wrong_code_object_counts_as_a_failure(use: Use, tmp_path: Path, wrong: bytes) -> None:
    use(Fake(tmp_path / "a", answer=wrong), Fake(tmp_path / "b", name="good"))
    made = build.build(SPEC, ROW)
    assert made.compiler == "good" and len(made.failures) == 1


def test_when_all_fail_everything_is_said_once_and_nothing_started_again(
    use: Use, tmp_path: Path
) -> None:
    first, _, last = use(
        Fake(tmp_path / "a", answer=CompileError("a", "reason one", "log one")),
        Fake(tmp_path / "b", name="b", reasons=["reason two"]),
        Fake(tmp_path / "c", answer=CompileError("c", "reason three", "log three")),
    )
    with pytest.raises(CompileError) as caught:
        build.build(SPEC, ROW)
    full = caught.value.full()
    for words in ("reason one", "reason two", "reason three", "log one", "log three", "gfx1100"):
        assert words in full
    assert "KERNEL(THREADS) scale" in full
    with pytest.raises(CompileError, match="reason three"):
        build.build(SPEC, ROW)
    assert (first.calls, last.calls) == (1, 1)
    last.answer = code_object()
    build.forget_failures()
    assert build.build(SPEC, ROW).compiler == "fake"


def files(folder: Path, kind: str) -> list[Path]:
    """The entries of one kind."""
    return [path for path in (folder / kind).iterdir() if path.is_file()]


@pytest.mark.parametrize("kind", ["code", "index"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-3], lambda data: b"foreign", lambda data: b""]
)
def test_a_damaged_entry_is_built_again(
    use: Use, fresh_cache: Path, tmp_path: Path, kind: str, damage: Callable[[bytes], bytes]
) -> None:
    (fake,) = use(Fake(tmp_path / "cc"))
    build.build(SPEC, ROW)
    (entry,) = files(fresh_cache, kind)
    entry.write_bytes(damage(entry.read_bytes()))
    assert not build.is_cached(SPEC, ROW)
    assert not build.build(SPEC, ROW).cached and fake.calls == 2
    assert build.build(SPEC, ROW).cached


def test_an_index_entry_of_another_shape_is_built_again(
    use: Use, fresh_cache: Path, tmp_path: Path
) -> None:
    use(Fake(tmp_path / "cc"))
    build.build(SPEC, ROW)
    (entry,) = files(fresh_cache, "index")
    for content in (b"[]", b"{}", b"nonsense", json.dumps({"compiler": "x"}).encode()):
        cache.write("index", entry.name, content)
        assert not build.is_cached(SPEC, ROW)


def test_a_changed_compiler_compiles_again(use: Use, tmp_path: Path) -> None:
    (fake,) = use(Fake(tmp_path / "cc"))
    build.build(SPEC, ROW)
    fake.path.write_text("a newer version")
    assert not build.is_cached(SPEC, ROW)
    assert not build.build(SPEC, ROW).cached
    assert fake.calls == 2 and build.is_cached(SPEC, ROW)


def test_the_work_of_a_compiler_that_is_gone_stays(use: Use, tmp_path: Path) -> None:
    (fake,) = use(Fake(tmp_path / "cc"))
    build.build(SPEC, ROW)
    fake.path.unlink()
    use()
    assert build.build(SPEC, ROW).cached


def test_without_a_folder_it_works_in_memory(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    cache.reset()
    (fake,) = use(Fake(tmp_path / "cc"))
    assert not build.build(SPEC, ROW).cached
    assert build.build(SPEC, ROW).cached and fake.calls == 1
    assert cache.directory() is None and cache.reasons()


def test_a_hit_reads_two_files_and_starts_nothing(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Fake(tmp_path / "cc"))
    build.build(SPEC, ROW)
    kinds, flattened = list[str](), source._flatten.cache_info().misses
    read = cache.read

    def noted(kind: str, key: str) -> bytes | None:
        kinds.append(kind)
        return read(kind, key)

    def never(*words: Any) -> Any:
        raise AssertionError("something is asked or started")

    monkeypatch.setattr(cache, "read", noted)
    monkeypatch.setattr(compilers, "all_compilers", never)
    monkeypatch.setattr(subprocess, "Popen", never)
    assert build.is_cached(SPEC, ROW)
    assert kinds == ["index", "code"]
    assert source._flatten.cache_info().misses == flattened
