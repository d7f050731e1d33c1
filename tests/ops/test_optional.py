"""Packages that may be installed: imported when asked for, a broken one is a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lib_rocm_sd.ops import optional
from tests.packages import installed

PACKAGES = ("xformers", "flash_attn", "triton", "aiter")


@pytest.fixture(autouse=True)
def _anew() -> None:
    optional.absent.cache_clear()


def test_what_is_not_there_or_not_whole_is_a_reason() -> None:
    assert optional.absent("no_such_package", "no_such_package.ops") == (
        "no_such_package is not installed"
    )
    assert optional.absent("json", "json.decoder") == ""
    broken = optional.absent("json", "json.no_such_module")
    assert broken.startswith("json cannot be used: ModuleNotFoundError: ")


@pytest.mark.parametrize(
    "line",
    [
        "raise OSError('libtorch_hip.so: undefined symbol: one\\ntwo')",
        "raise RuntimeError('Tried to register an operator twice')",
        "assert False, 'built for another torch'",
        "this is no Python",
        "import no_such_module_of_it",
        "nobody_knows_this",
    ],
)
def test_a_broken_one_is_a_reason(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text(line + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    why = optional.absent("broken_package", "broken_package")
    assert why.startswith("broken_package cannot be used: ") and "\n" not in why
    assert "broken_package" not in sys.modules


def test_it_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(optional.importlib, "import_module", tried.append)
    with installed("some_package", "some_package.inner"):
        for _ in range(3):
            assert optional.absent("some_package", "some_package.inner") == ""
    assert tried == ["some_package.inner"]


def test_what_a_package_says_of_a_call_is_what_the_engine_expects() -> None:
    with pytest.raises(RuntimeError, match="a_package: AssertionError: head_dim"):  # noqa: SIM117
        with optional.calling("a_package"):
            raise AssertionError("head_dim")
    memory = torch.cuda.OutOfMemoryError("out of memory")
    with pytest.raises(torch.cuda.OutOfMemoryError), optional.calling("a_package"):
        raise memory


def test_nothing_of_ours_imports_them() -> None:
    """As somebody has them who does not choose Performance."""
    program = (
        "import sys\n"
        "import lib_rocm_sd.functional, lib_rocm_sd.torch_ops\n"
        "from lib_rocm_sd.ops.registry import ops\n"
        "import torch\n"
        "q = torch.randn(1, 4, 1, 8)\n"
        "lib_rocm_sd.functional.attention(q, q, q)\n"
        "names = [variant.name for op in ops() for variant in op.every]\n"
        f"assert 'xformers' in names, names\n"
        f"found = [name for name in {PACKAGES!r} if name in sys.modules]\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
