"""Compiling while the program goes on: order, progress, failures, the end. The compiler is a fake,
but for one that is a process.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lib_rocm_sd import cache
from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import background as module
from lib_rocm_sd.runtime import build, process
from lib_rocm_sd.runtime.background import Background, BackgroundState
from tests.runtime.processes import LONG_S, noted, sleeper, wait_until_gone
from tests.waiting import WAIT_S, wait_until

ARCH = by_gfx("gfx1100")
PARTS = {
    KernelSpec("attention.hip", f"attention_{number}", (("HEAD_DIM", number),)): "attention"
    for number in range(3)
} | {KernelSpec("conv.hip", f"conv_{number}"): "vae" for number in range(4)}


class Compiler:
    """Stands in for build.build: `fails` says which entries; each waits for `go`."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.cached: set[str] = set()
        self.fails: Callable[[str], bool] = lambda entry: False
        self.go = threading.Event()
        self.go.set()

    def build(self, spec: KernelSpec, arch: object) -> None:
        assert self.go.wait(WAIT_S)
        self.built.append(spec.entry)
        if self.fails(spec.entry):
            reason = f"no compiler made {spec.entry}"
            raise CompileError(reason, "clang: failed", f"log of {spec.entry}", "line one")
        self.cached.add(spec.entry)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(build, "build", made.build)
    monkeypatch.setattr(build, "is_cached", lambda spec, arch: spec.entry in made.cached)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    cache.set_directory(tmp_path)
    yield tmp_path / "rocm_sd"
    cache.set_directory(None)


def start(work: Background, told: Callable[[str], None] = lambda part: None) -> list[str]:
    lines: list[str] = []
    assert ARCH is not None
    work.start(ARCH, PARTS, lines.append, told)
    return lines


def test_compiles_in_order_and_tells_of_each_part(compiler: Compiler, folder: Path) -> None:
    work, told = Background(), list[tuple[str, int]]()
    compiler.go.clear()
    lines = start(work, lambda part: told.append((part, work.state().done)))
    assert work.state() == BackgroundState(True, 0, 7)
    assert work.refusal("attention") == "compiling, 0 of 7 kernels are done"
    assert work.refusal("vae") == work.refusal("attention")
    assert work.refusal("something else") == ""
    compiler.go.set()
    assert work.wait(WAIT_S)
    assert compiler.built == [spec.entry for spec in PARTS]
    assert told == [("attention", 3), ("vae", 7)]
    assert work.state() == BackgroundState(False, 7, 7)
    assert not work.refusal("attention")
    assert not work.refusal("vae")
    assert lines == [
        "compiling 7 kernels for gfx1100 in the background",
        "all 7 kernels are compiled",
    ]


def test_another_order_holds_for_what_waits(compiler: Compiler, folder: Path) -> None:
    """The kernel that is in work stays of its part; the others belong to whom they are given."""
    work, told = Background(), list[str]()
    compiler.go.clear()
    start(work, told.append)
    assert wait_until(lambda: len(work._jobs) == 6)
    assert ARCH is not None
    specs = list(PARTS)
    other = dict.fromkeys(reversed(specs[1:]), "vae") | {specs[0]: "attention"}
    work.start(ARCH, other, told=told.append)
    assert (work.state().total, work._left) == (7, {"attention": 1, "vae": 6})
    compiler.go.set()
    assert work.wait(WAIT_S)
    assert compiler.built == [spec.entry for spec in [specs[0], *reversed(specs[1:])]]
    assert told == ["attention", "vae"]


def test_what_cannot_be_kept_is_said_once(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError("No space left")

    def build_and_keep(spec: KernelSpec, arch: object) -> None:
        compiler.build(spec, arch)
        cache.write("code", spec.entry, b"code")

    monkeypatch.setattr(cache, "_replace", full)
    monkeypatch.setattr(build, "build", build_and_keep)
    work = Background()
    lines = start(work)
    assert work.wait(WAIT_S)
    (said,) = [line for line in lines if "No space left" in line]
    assert said.startswith("the next start compiles them again: cannot write ")


def test_only_what_is_missing(compiler: Compiler, folder: Path) -> None:
    work = Background()
    compiler.cached = {spec.entry for spec, part in PARTS.items() if part == "attention"}
    compiler.go.clear()
    start(work)
    assert work.state().total == 4
    assert not work.refusal("attention")
    assert work.refusal("vae")
    compiler.go.set()
    assert work.wait(WAIT_S)
    assert start(work) == []
    assert not work.state().running


def test_starting_again_adds_nothing(compiler: Compiler, folder: Path) -> None:
    work = Background()
    compiler.go.clear()
    for _ in range(5):
        start(work)
    assert work.state().total == 7
    compiler.go.set()
    assert work.wait(WAIT_S)
    start(work)
    assert len(compiler.built) == 7


def test_a_second_card_is_added(compiler: Compiler, folder: Path) -> None:
    work, other = Background(), by_gfx("gfx1030")
    assert other is not None
    compiler.go.clear()
    start(work)
    work.start(other, PARTS, lambda line: None)
    assert work.state().total == 14
    compiler.go.set()
    assert work.wait(WAIT_S)
    assert work.state().done == 14


def test_a_failure_is_told_and_logged_in_full(compiler: Compiler, folder: Path) -> None:
    work = Background()
    compiler.fails = lambda entry: entry in ("attention_1", "conv_2")
    lines = start(work)
    assert work.wait(WAIT_S)
    state = work.state()
    assert (state.done, state.total) == (7, 7)
    assert state.failure == "no compiler made attention_1: clang: failed"
    assert Path(state.log_path) == folder / "compile.log"
    log = Path(state.log_path).read_text(encoding="utf-8")
    assert "=== gfx1100 attention_1 HEAD_DIM=1\n" in log
    assert "log of attention_1" in log
    assert "log of conv_2" in log
    assert "    1  line one" in log
    assert not work.refusal("attention")  # each kernel says for itself why it cannot be used
    where = f"what the compilers said is in {folder / 'compile.log'}"
    assert lines[-1] == f"not every kernel could be compiled; {where}"


def test_gives_up_when_nothing_compiles(compiler: Compiler, folder: Path) -> None:
    work, told = Background(), list[str]()
    compiler.fails = lambda entry: True
    lines = start(work, told.append)
    assert work.wait(WAIT_S)
    assert compiler.built == ["attention_0", "attention_1", "attention_2"]
    assert told == ["attention", "vae"]
    assert not work.refusal("attention")
    assert work.refusal("vae").startswith("compiling failed: no compiler made attention_0")
    assert lines[-1].startswith("no more kernels are compiled, too many failed")
    start(work)
    assert len(compiler.built) == 3
    compiler.fails = lambda entry: False
    work.forget()
    assert work.state() == BackgroundState()
    start(work)
    assert work.wait(WAIT_S)
    assert work.state() == BackgroundState(False, 7, 7)
    assert not (folder / "compile.log").exists()


def test_an_unexpected_error_is_a_failure_too(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(spec: KernelSpec, arch: object) -> None:
        raise FileNotFoundError("attention.hip")

    monkeypatch.setattr(build, "build", missing)
    work = Background()
    start(work)
    assert work.wait(WAIT_S)
    assert work.state().failure == "build: FileNotFoundError: attention.hip"


def test_a_log_that_cannot_be_written(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    (folder / "compile.log").mkdir()
    compiler.fails = lambda entry: entry == "conv_0"
    work = Background()
    start(work)
    assert work.wait(WAIT_S)
    assert work.state().failure
    assert work.state().log_path == ""
    monkeypatch.setattr(cache, "directory", lambda: None)
    work.forget()
    start(work)
    assert work.wait(WAIT_S)
    assert work.state().log_path == ""


def test_a_closed_console_stops_nothing(compiler: Compiler, folder: Path) -> None:
    def closed(line: str) -> None:
        raise ValueError("I/O operation on closed file")

    work = Background()
    assert ARCH is not None
    work.start(ARCH, PARTS, closed)
    assert work.wait(WAIT_S)
    assert work.state() == BackgroundState(False, 7, 7)


def test_several_at_a_time(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    cores = 4  # all but one
    together = threading.Barrier(cores)
    calls = itertools.count()
    seen: list[int] = []

    def wait_for_others(spec: KernelSpec, arch: object) -> None:
        if next(calls) < cores:
            seen.append(together.wait(WAIT_S))

    monkeypatch.setattr(build, "build", wait_for_others)
    work = Background()
    start(work)
    assert work.wait(WAIT_S)
    assert sorted(seen) == list(range(cores))


def test_stops_with_its_compilers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note, ended = tmp_path / "pid", list[str]()

    def build_slowly(spec: KernelSpec, arch: object) -> None:
        ended.append(process.run(sleeper(note), LONG_S).trouble)
        ended.append(process.run([sys.executable, "-c", "pass"], LONG_S).trouble)

    monkeypatch.setattr(build, "build", build_slowly)
    monkeypatch.setattr(build, "is_cached", lambda spec, arch: False)
    work = Background()
    start(work)
    assert noted(note)
    work.stop()
    assert work.wait(WAIT_S)
    assert ended[0].startswith(("crashed", "failed"))
    assert ended[1:] == ["was not started: the program ends"]
    start(work)
    assert not work.state().running


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has its own priority on Linux only")
def test_compilers_run_at_low_priority(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def build_and_look(spec: KernelSpec, arch: object) -> None:
        command = [sys.executable, "-c", "import os; print(os.nice(0))"]
        found.append(process.run(command, 60).output.strip())

    monkeypatch.setattr(build, "build", build_and_look)
    monkeypatch.setattr(build, "is_cached", lambda spec, arch: bool(found))
    mine = os.nice(0)
    work = Background()
    start(work)
    assert work.wait(WAIT_S)
    assert int(found[0]) == min(max(mine, 10), 19)
    assert os.nice(0) == mine
    assert process.run([sys.executable, "-c", "import os; print(os.nice(0))"], 60).output == (
        f"{mine}\n"
    )


@pytest.mark.parametrize("end", ["", "os._exit(0)"], ids=["exit", "os._exit"])
def test_the_program_ends_while_something_is_compiled(tmp_path: Path, end: str) -> None:
    """No thread keeps the interpreter, and its compiler ends with it. Ctrl+C in a WebUI is
    os._exit, of which only Linux tells the compiler.
    """
    if end and sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent is gone")
    script = f"""
import os, pathlib, sys, time
from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import background, build, process
build.is_cached = lambda spec, arch: False
build.build = lambda spec, arch: process.run(sys.argv[3:], {LONG_S})
background.start(by_gfx("gfx1100"), {{KernelSpec("a", "b"): "attention"}})
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
exec(sys.argv[2])
"""
    note = tmp_path / "pid"
    subprocess.run(
        [sys.executable, "-c", script, str(note), end, *sleeper(note)],
        check=True,
        timeout=WAIT_S,
        env={**os.environ, "ROCM_SD_CACHE_DIR": str(tmp_path / "cache")},
        cwd=Path(module.__file__).parents[2],
    )
    assert wait_until_gone(int(noted(note)))
