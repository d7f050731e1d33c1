"""Which library is taken for HIP, and which driver for a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import device as devices
from lib_rocm_sd.device import Facts
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.runtime import cuda, hip, launcher, libraries, zluda
from tests.runtime.code_objects import c_library
from tests.runtime.driver_doubles import HIP, ROW, cuda_library, hip_library

torch = pytest.importorskip("torch")

__all__ = ["cuda_library", "hip_library"]

ROOT = Path(__file__).parents[2]


def test_the_library_that_the_process_has_loaded_is_found(tmp_path: Path) -> None:
    """In a process of its own, since a library stays loaded; the same handle is the same copy."""
    mine = c_library(HIP, tmp_path / "mine" / "libamdhip64.so.6")
    c_library(HIP, tmp_path / "other" / "libamdhip64.so.7")
    script = f"""
import ctypes
from pathlib import Path
from lib_rocm_sd.runtime import hip, libraries
libraries.rocm_library_folders = lambda: [Path({str(tmp_path / "other")!r})]
mine = ctypes.CDLL({str(mine)!r})
assert hip.library()._handle == mine._handle
print(sum("libamdhip64" in str(path) for path in hip.loaded_libraries()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("how", ["called by torch", "looked for first"])
def test_of_two_the_one_that_torch_has_is_taken(how: str, tmp_path: Path) -> None:
    """Whose functions a module of torch calls; where none calls any, the order of the installs."""
    other = c_library(HIP, tmp_path / "other" / "libamdhip64.so.7")
    own = c_library(HIP, tmp_path / "own" / "libamdhip64.so.7", "-Wl,-soname,libown.so")
    called = how == "called by torch"
    needs = ("-Wl,--no-as-needed", str(own)) if called else ()
    caller = c_library("int nothing;", tmp_path / "torch" / "libtorch_hip.so", *needs)
    script = f"""
import ctypes
from pathlib import Path
from lib_rocm_sd.runtime import hip, libraries
libraries.rocm_library_folders = lambda: [Path({str((other if called else own).parent)!r})]
own, other = {[str(own), str(other)] if called else [str(other), str(own)]}
for path in (own, other, {str(caller)!r}):
    ctypes.CDLL(path)
assert hip.called_by(Path({str(caller)!r})) == {"Path(own)" if called else "None"}
print(hip.library()._name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (done.stdout, done.stderr) == (f"{own}\n", "")


def test_a_device_of_another_type_is_a_launch_error() -> None:
    with pytest.raises(LaunchError, match="cpu is no GPU"):
        launcher.launcher_for(torch.device("cpu"), ROW)


def test_no_hip_runtime_is_a_launch_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip, "loaded_libraries", lambda: iter(()))
    monkeypatch.setattr(libraries, "rocm_library_folders", lambda: [tmp_path])
    with pytest.raises(LaunchError, match="no HIP runtime"):
        hip.library()
    name = "amdhip64_7.dll" if sys.platform == "win32" else "libamdhip64.so"
    (tmp_path / name).write_bytes(b"not a library")
    with pytest.raises(LaunchError, match=name):
        hip.library()


def test_loaded_libraries_has_torchs() -> None:
    assert "torch_cpu" in [path.stem.removeprefix("lib") for path in hip.loaded_libraries()]


@pytest.mark.parametrize(
    ("version", "name", "wanted"),
    [
        ("6.2", "AMD Radeon RX 7900 XTX", "hip"),
        (None, "AMD Radeon RX 7900 XTX [ZLUDA]", "zluda"),
        # Launchers of the fork and of SD.Next set torch.version.hip under ZLUDA, too.
        ("6.2", "AMD Radeon RX 7900 XTX [ZLUDA]", "zluda"),
        (None, "H100", "cuda"),
    ],
)
def test_the_driver_follows_the_device(
    monkeypatch: pytest.MonkeyPatch,
    hip_library: Any,
    cuda_library: Any,
    version: str | None,
    name: str,
    wanted: str,
) -> None:
    facts = Facts("cuda", 0, name, version, "", (8, 0))
    monkeypatch.setattr(devices, "_facts", lambda kind, index: facts)
    monkeypatch.setattr(hip, "library", lambda: hip_library)
    monkeypatch.setattr(cuda, "library", lambda: cuda_library)
    beside = hip.HipDriver(hip_library)
    monkeypatch.setattr(zluda, "driver", lambda: beside)
    devices.forget()
    try:
        found = launcher.driver_for(0)
    finally:
        devices.forget()
    assert isinstance(found, cuda.CudaDriver) == (wanted == "cuda")
    assert (found is beside) == (wanted == "zluda")


def test_the_drivers_know_no_launcher() -> None:
    """Nothing under runtime/ imports in a circle: the launcher imports drivers, they their base."""
    code = (
        "import sys; from lib_rocm_sd.runtime import cuda, hip\n"
        "assert 'lib_rocm_sd.runtime.launcher' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)
