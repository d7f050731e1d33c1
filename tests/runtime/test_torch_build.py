"""What torch was built for, told from its version.py without importing it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.runtime import layouts, torch_build
from lib_rocm_sd.runtime.torch_build import TorchBuild

ROCM_FILE = """
from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']
__version__ = '2.9.0+rocm6.4'
debug = False
cuda: Optional[str] = None
git_version = '0fabc3ba44823f257e70ce397d989c8de5e362c1'
hip: Optional[str] = '6.4.43482-0f2d60242'
xpu: Optional[str] = None
"""
OLD_CUDA_FILE = """
__version__ = '2.1.2+cu118'
debug = False
cuda = '11.8'
git_version = 'a8e7c98cb95ff97bb30a728c6b2a1ce6bff946eb'
hip = None
"""
CPU = TorchBuild("2.13.0+cpu", None, None)
CUDA = TorchBuild("2.7.1+cu118", "11.8", None)
ROCM = TorchBuild("2.9.0+rocm6.4", None, "6.4.43482-0f2d60242")
ALLOWED = {"ROCM_SD_ALLOW_ZLUDA": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(layouts, "package_folder", {"torch": tmp_path}.get)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "build"),
    [(ROCM_FILE, ROCM), (OLD_CUDA_FILE, TorchBuild("2.1.2+cu118", "11.8", None))],
)
def test_both_forms_of_the_file(folder: Path, text: str, build: TorchBuild) -> None:
    (folder / "version.py").write_text(text, encoding="utf-8")
    assert torch_build.installed() == build


@pytest.mark.parametrize(
    "content", [None, b"", b"__version__ = (", b"\xff\xfe\0", b"__version__ = read('version')"]
)
def test_a_file_that_cannot_be_read_is_named(folder: Path, content: bytes | None) -> None:
    if content is not None:
        (folder / "version.py").write_bytes(content)
    with pytest.raises(ValueError, match=r"version\.py"):
        torch_build.installed()


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "package_folder", lambda name: None)
    assert torch_build.installed() is None


def test_the_installed_torch_says_the_same_of_itself() -> None:
    torch = pytest.importorskip("torch")
    build = torch_build.installed()
    assert build == TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from lib_rocm_sd.runtime import torch_build\n"
        "torch_build.installed(); assert 'torch' not in sys.modules"
    )
    root = arch.KERNELS_DIR.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=600)


@pytest.mark.parametrize(
    ("build", "environ", "words"),
    [
        (ROCM, {}, ""),
        (replace(ROCM, version="2.1.0a0+git1"), {}, ""),
        (replace(ROCM, version="2.10.0"), {}, ""),
        (replace(ROCM, version="my own"), {}, ""),
        (replace(ROCM, version="2.0.1+rocm5.4.2"), {}, "2.0.1+rocm5.4.2 is too old, 2.1 or newer"),
        (replace(ROCM, version="1.13.1"), {}, "1.13.1 is too old"),
        (CPU, {}, "2.13.0+cpu is a build without a GPU"),
        (CPU, {"ZLUDA": "x", **ALLOWED}, "without a GPU"),
        (CUDA, {}, "2.7.1+cu118 is a build for CUDA, and there is no ZLUDA"),
        (CUDA, ALLOWED, "there is no ZLUDA"),
        (CUDA, {"COMMANDLINE_ARGS": "--use-zluda"}, ""),
        (CUDA, {"ZLUDA_COMGR_LOG_LEVEL": "1"}, ""),
        (CUDA, {"ZLUDA": "x", "ROCM_SD_ALLOW_ZLUDA": "0"}, "ROCM_SD_ALLOW_ZLUDA=0 is set"),
        (CUDA, {"COMMANDLINE_ARGS": "--medvram --use-zluda", **ALLOWED}, ""),
        (CUDA, {"ZLUDA": "C:\\ZLUDA", **ALLOWED}, ""),
        (CUDA, {"PATH": "/usr/bin:/home/user/webui/.zluda", **ALLOWED}, ""),
        (CUDA, {"LD_LIBRARY_PATH": "/opt/zluda", **ALLOWED}, ""),
    ],
)
def test_who_can_drive_an_amd_gpu(build: TorchBuild, environ: dict[str, str], words: str) -> None:
    reason = torch_build.refusal(build, environ)
    assert words in reason and bool(words) == bool(reason)
