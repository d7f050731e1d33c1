"""A compiler that hangs costs its limit once, not for each kernel and at each start."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, clang, compiler, compilers, hangs, library_compilers
from lib_rocm_sd.runtime.clang import Clang
from lib_rocm_sd.runtime.library_compilers import LibraryCompiler
from tests.runtime.code_objects import SCALE, c_library
from tests.runtime.processes import LONG_S, reach_limits_when

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shell scripts stand for compilers")
ROW = arch.table()["gfx1100"]
SPECS = [KernelSpec(SCALE, "scale", (("THREADS", threads),)) for threads in (64, 128)]
ANSWER = "echo clang version 19.1.0; echo '    gfx1100'"


@pytest.fixture(autouse=True)
def _ended_where_they_hang(
    monkeypatch: pytest.MonkeyPatch, fresh_cache: Path, tmp_path: Path
) -> Iterator[None]:
    """A compiler's time is over as soon as it has noted in hangs.txt that it hangs."""
    monkeypatch.setenv("ROCM_SD_COMPILE_TIME_LIMIT_S", "50")
    monkeypatch.setattr(clang, "_QUESTION_LIMIT_S", 50.0)
    monkeypatch.setattr(library_compilers, "_QUESTION_LIMIT_S", 50.0)
    reach_limits_when(monkeypatch, (tmp_path / "hangs.txt").exists)
    build.forget_failures()
    yield
    build.forget_failures()


def script(folder: Path, body: str) -> Clang:
    """A clang that notes each start in log.txt, with its arguments."""
    path = folder / "clang"
    hang = f"hang() {{\necho > {folder}/hangs.txt\nexec sleep {LONG_S}\n}}"
    text = f'#!/bin/sh\n{hang}\necho "$*" >> {folder}/log.txt\n{body}\n'
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return Clang("clang", (str(path),), (str(path),), path)


def starts(folder: Path, word: str) -> int:
    """How often the script was started with `word` among its arguments."""
    return sum(word in line for line in (folder / "log.txt").read_text().splitlines())


def next_start() -> None:
    """What another process would know: what lies in the cache."""
    build._failures.clear()
    hangs._limits.clear()
    compiler._remembered.clear()


def test_a_compiler_that_hangs_hangs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = script(tmp_path, f'case "$*" in *cpus*) {ANSWER};; *) hang;; esac')
    monkeypatch.setattr(compilers, "all_compilers", lambda: [made])
    with pytest.raises(CompileError, match=r"took longer than \d"):
        build.build(SPECS[0], ROW)
    with pytest.raises(CompileError, match=r"did not end within 50 s before"):
        build.build(SPECS[1], ROW)
    next_start()
    assert not compilers.serves(ROW)
    with pytest.raises(CompileError, match=r"did not end within"):
        build.build(SPECS[0], ROW)
    assert starts(tmp_path, "-S") == 1


def test_with_more_time_it_is_tried_again_and_after_a_day_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = script(tmp_path, f'case "$*" in *cpus*) {ANSWER};; *) hang;; esac')
    hangs.note(made.identity(), 50.0)
    assert made.refusals(ROW)
    monkeypatch.setenv("ROCM_SD_COMPILE_TIME_LIMIT_S", "600")
    assert not made.refusals(ROW)
    hangs.note(made.identity(), 600.0)
    next_start()
    assert made.refusals(ROW)
    now = time.time()
    monkeypatch.setattr(hangs.time, "time", lambda: now + hangs.FORGOTTEN_AFTER_S + 1)
    next_start()
    assert not made.refusals(ROW)


def test_a_user_can_have_it_tried_again(tmp_path: Path) -> None:
    made = script(tmp_path, ANSWER)
    hangs.note(made.identity(), 600.0)
    assert made.refusals(ROW)
    build.forget_failures()
    next_start()
    assert not made.refusals(ROW)


def test_a_clang_that_hangs_at_the_question_is_asked_once(tmp_path: Path) -> None:
    made = script(tmp_path, "hang")
    (reason,) = made.refusals(ROW)
    assert "took longer than 50 s" in reason
    next_start()
    (reason,) = made.refusals(ROW)
    assert "did not end within 50 s before" in reason
    assert starts(tmp_path, "cpus") == 1


def test_a_library_that_hangs_at_the_question_is_asked_once(tmp_path: Path) -> None:
    source = f"""
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void hang(void) {{
    FILE *log = fopen("{tmp_path}/log.txt", "a");
    fputs("asked\\n", log);
    fclose(log);
    fclose(fopen("{tmp_path}/hangs.txt", "w"));
    for (;;) sleep(1);
}}
"""
    made = LibraryCompiler("hiprtc", c_library(source, tmp_path / "libhiprtc.so.9"))
    assert made.refusals(ROW)
    next_start()
    (reason,) = made.refusals(ROW)
    assert "did not end within 50 s before" in reason
    assert starts(tmp_path, "asked") == 1
