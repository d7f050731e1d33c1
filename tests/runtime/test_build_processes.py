"""Building in several processes at once, killed ones among them; with a real compiler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.code_objects import SCALE
from tests.waiting import WAIT_S, wait_until

ROOT = Path(__file__).parents[2]


def process(script: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    """A Python process with its own cache folder and environment."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "ROCM_SD_CACHE_DIR": str(folder), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


BUILD = f"""
import os, pathlib, sys
from lib_rocm_sd import arch, cache
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, clang, compilers
compilers.all_compilers = clang.path_clangs
lock = cache.lock
def noted(key, limit_s):
    if os.environ.get("ASKS"):
        pathlib.Path(os.environ["ASKS"], str(os.getpid())).touch()
    return lock(key, limit_s)
cache.lock = noted
made = build.build(KernelSpec({SCALE!r}, "scale", (("THREADS", 64),)), arch.table()["gfx1100"])
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(made.compiler, made.cached, len(made.code))
"""


@pytest.fixture
def logged_clang(tmp_path: Path) -> dict[str, str]:
    """An environment whose clang notes every compilation in log.txt, and goes on when there is a
    file `go`. Who is about to compile, or to wait for one who does, leaves a file in `asks`.
    """
    clang, lld = shutil.which("clang-19"), shutil.which("ld.lld-19")
    if clang is None or lld is None or sys.platform == "win32":
        pytest.skip("clang-19 and ld.lld-19 are not in PATH")
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "asks").mkdir()
    wait = f"until [ -e {tmp_path}/go ]; do /bin/sleep 0.01; done"
    note = f'case "$*" in *" -S "*) echo start >> {tmp_path}/log.txt; {wait};; esac'
    (folder / "clang").write_text(f'#!/bin/sh\n{note}\nexec {clang} "$@"\n')
    (folder / "clang").chmod(0o755)
    (folder / "ld.lld").symlink_to(lld)
    return {"PATH": str(folder), "ASKS": str(tmp_path / "asks")}


def test_two_processes_compile_once(tmp_path: Path, logged_clang: dict[str, str]) -> None:
    both = [process(BUILD, tmp_path / "cache", **logged_clang) for _ in range(2)]
    assert wait_until(lambda: len(list((tmp_path / "asks").iterdir())) == 2)
    (tmp_path / "go").touch()
    said = sorted(one.communicate(timeout=WAIT_S)[0].split()[:2] for one in both)
    assert said == [["clang", "False"], ["clang", "True"]]
    assert (tmp_path / "log.txt").read_text().count("start") == 1


def test_a_kill_while_compiling_leaves_nothing_broken(
    tmp_path: Path, logged_clang: dict[str, str]
) -> None:
    killed = process(BUILD, tmp_path / "cache", **logged_clang)
    assert wait_until((tmp_path / "log.txt").exists)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=WAIT_S)
    assert not list((tmp_path / "cache").glob("code/*"))
    (tmp_path / "go").touch()
    again = process(BUILD, tmp_path / "cache", **logged_clang)
    assert again.communicate(timeout=WAIT_S)[0].split()[:2] == ["clang", "False"]


def test_a_process_without_torch_and_compilers_has_what_is_cached(
    tmp_path: Path, logged_clang: dict[str, str]
) -> None:
    (tmp_path / "go").touch()
    first = process(BUILD, tmp_path / "cache", **logged_clang)
    assert first.communicate(timeout=WAIT_S)[0].split()[1] == "False"
    again = process(BUILD, tmp_path / "cache", PATH=str(tmp_path))
    assert again.communicate(timeout=WAIT_S)[0].split()[1] == "True"
