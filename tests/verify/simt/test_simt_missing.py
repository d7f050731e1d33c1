"""Which clang the shim takes, and what is skipped where none has a sanitizer's runtime."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib_rocm_sd.arch import table
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

pytestmark = pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
WITHOUT_RUNTIME = """#!/bin/sh
case "$*" in
  *--version*) echo "clang version 25.1.0" ;;
  *-fsanitize*) echo "ld: cannot find libclang_rt.san.a" >&2; exit 1 ;;
  *) exec {clang} "$@" ;;
esac
"""
WITH_RUNTIME = """#!/bin/sh
case "$*" in
  *--version*) echo "clang version 24.1.0" ;;
  *) for last; do :; done; /bin/cp /bin/true "$last" ;;
esac
"""


def put_first(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that is a shell script, alone in PATH with the linker."""
    folder.mkdir()
    (folder / name).write_text(text, encoding="utf-8")
    (folder / name).chmod(0o755)
    (folder / "ld").symlink_to(str(shutil.which("ld")))
    monkeypatch.setenv("PATH", str(folder))
    simt.find_clang.cache_clear()
    return folder / name


@pytest.fixture
def newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The one clang in PATH, without sanitizers."""
    text = WITHOUT_RUNTIME.format(clang=simt.find_clang())
    yield put_first(tmp_path / "new", "clang-25", text, monkeypatch)
    monkeypatch.undo()
    simt.find_clang.cache_clear()


def test_a_sanitizer_whose_runtime_is_missing_skips_with_the_reason(newest: Path) -> None:
    assert simt.missing() is None
    reason = str(simt.missing("thread"))
    assert str(newest) in reason and "libclang_rt.san.a" in reason
    with pytest.raises(pytest.skip.Exception, match=r"libclang_rt\.san\.a"):
        ShimLaunch(table()["gfx1100"], sanitize="thread")


def test_an_older_clang_that_has_the_runtime_is_taken(
    newest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = put_first(tmp_path / "old", "clang-24", WITH_RUNTIME, monkeypatch)
    monkeypatch.setenv("PATH", f"{newest.parent}:{older.parent}")
    assert simt.find_clang() == str(newest)
    assert simt.find_clang("thread") == str(older)
