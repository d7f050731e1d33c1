"""The table of installs over recorded machines: what is found, and what comes first."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lib_rocm_sd.runtime import layouts, libraries
from lib_rocm_sd.runtime.layouts import AMDHIP64, COMGR, HIPRTC
from tests.runtime.windows_files import answering, dll

EMPTY = ("hiprtc-builtins0716.dll", "libhiprtc-builtins.so.7", "amdhip-clr.dll")
"""Files of a like name that export none of the functions looked for."""
SYSTEM32 = (
    *("System32/amdhip64_6.dll", "System32/amdhip64_7.dll", "System32/amd_comgr_drivers.dll"),
    *("System32/amd_comgr_opencl.dll", "System32/hiprtc0602.dll", "System32/amd_comgr0602.dll"),
)
"""Of a display driver, as the trees of Windows have it."""


@dataclass(frozen=True)
class Machine:
    """One install: its files, and of each library the ones that shall be found, in this order.

    Paths begin with `site` (Python's packages), `sdk` (what `named` variables name), or lie below
    the root, which is %SystemRoot% on Windows.
    """

    layout: str
    files: tuple[str, ...]
    hip: tuple[str, ...]
    comgr: tuple[str, ...]
    hiprtc: tuple[str, ...]
    windows: bool = False
    named: dict[str, str] = field(default_factory=dict)


THEROCK = "AMD's Python packages (TheRock)"
NAMED = "named by the environment (HIP SDK)"
INSTALLED = "installed (ROCm, for Radeon's wheels; Docker)"
SYSTEM = "the system's (distributions, WSL, the display driver)"
WHEEL = "torch's wheel (pytorch.org's has ROCm)"
MACHINES = {
    "pytorch.org": Machine(
        WHEEL,
        (
            *("site/torch/lib/libamdhip64.so", "site/torch/lib/libamd_comgr.so"),
            *("site/torch/lib/libhiprtc.so", "site/torch/lib/libtorch_hip.so"),
        ),
        ("site/torch/lib/libamdhip64.so",),
        ("site/torch/lib/libamd_comgr.so",),
        ("site/torch/lib/libhiprtc.so",),
    ),
    "TheRock, versioned names only": Machine(
        THEROCK,
        (
            *("site/_rocm_sdk_core/lib/libamdhip64.so.7", "site/_rocm_sdk_core/lib/libhiprtc.so.7"),
            *("site/_rocm_sdk_core/lib/libhiprtc-builtins.so.7", "opt/rocm/lib/libamdhip64.so.6"),
            *("site/_rocm_sdk_core/lib/libamd_comgr.so.3", "site/torch/lib/libtorch_hip.so"),
            "site/_rocm_sdk_core/lib/libamd_comgr_loader.so.1",
        ),
        ("site/_rocm_sdk_core/lib/libamdhip64.so.7", "opt/rocm/lib/libamdhip64.so.6"),
        ("site/_rocm_sdk_core/lib/libamd_comgr.so.3",),
        ("site/_rocm_sdk_core/lib/libhiprtc.so.7",),
    ),
    "HIP 8": Machine(
        THEROCK,
        ("site/_rocm_sdk_core/lib/libamdhip64.so.8", "site/_rocm_sdk_core/lib/libamdhip64.so.7"),
        ("site/_rocm_sdk_core/lib/libamdhip64.so.8", "site/_rocm_sdk_core/lib/libamdhip64.so.7"),
        (),
        (),
    ),
    "a variable, 64-bit folder": Machine(
        NAMED,
        ("sdk/a/lib64/libamdhip64.so.6", "opt/rocm/lib/libamdhip64.so.5"),
        ("sdk/a/lib64/libamdhip64.so.6", "opt/rocm/lib/libamdhip64.so.5"),
        (),
        (),
        named={"ROCM_PATH": "a"},
    ),
    "Radeon's wheel or a Docker image, over /opt/rocm": Machine(
        INSTALLED,
        (
            *("site/torch/lib/libtorch_hip.so", "opt/rocm/lib/libamdhip64.so.6.2.41133"),
            *("opt/rocm/lib/libamd_comgr.so.2.8.60200", "opt/rocm/lib/libhiprtc.so.6.2.41133"),
            *("opt/rocm-7.0.2/lib/libamdhip64.so.7", "opt/rocm-7.10.0/lib/libamdhip64.so.7.10"),
            *("opt/rocm/core-7.14/lib/libhiprtc.so.7", "opt/rocm/lib/libhiprtc-builtins.so.7"),
        ),
        (
            *("opt/rocm/lib/libamdhip64.so.6.2.41133", "opt/rocm-7.10.0/lib/libamdhip64.so.7.10"),
            "opt/rocm-7.0.2/lib/libamdhip64.so.7",
        ),
        ("opt/rocm/lib/libamd_comgr.so.2.8.60200",),
        ("opt/rocm/lib/libhiprtc.so.6.2.41133", "opt/rocm/core-7.14/lib/libhiprtc.so.7"),
    ),
    "Debian's, Fedora's, WSL's": Machine(
        SYSTEM,
        (
            *("usr/lib/x86_64-linux-gnu/libamdhip64.so.5", "usr/lib64/libamdhip64.so.6"),
            *("usr/lib/wsl/lib/libamdhip64.so.7", "usr/lib/x86_64-linux-gnu/libamd_comgr.so.2"),
        ),
        (
            *("usr/lib/x86_64-linux-gnu/libamdhip64.so.5", "usr/lib64/libamdhip64.so.6"),
            "usr/lib/wsl/lib/libamdhip64.so.7",
        ),
        ("usr/lib/x86_64-linux-gnu/libamd_comgr.so.2",),
        (),
    ),
    "Windows: a torch that has ROCm": Machine(
        WHEEL,
        ("site/torch/lib/amdhip64.dll", *SYSTEM32),
        ("site/torch/lib/amdhip64.dll", "System32/amdhip64_7.dll", "System32/amdhip64_6.dll"),
        ("System32/amd_comgr0602.dll",),
        ("System32/hiprtc0602.dll",),
        windows=True,
    ),
    "Windows: TheRock, multi-arch": Machine(
        THEROCK,
        (
            *("site/_rocm_sdk_core/bin/amdhip64_7.dll", "site/_rocm_sdk_core/bin/rocm_kpack.dll"),
            *("site/_rocm_sdk_core/bin/hiprtc0716.dll", "site/_rocm_sdk_core/bin/amd_comgr.dll"),
            *("site/_rocm_sdk_core/bin/hiprtc-builtins0716.dll", "site/torch/lib/torch_hip.dll"),
            *("site/_rocm_sdk_device_gfx1100/bin/library/a.dat", *SYSTEM32),
        ),
        (
            *("site/_rocm_sdk_core/bin/amdhip64_7.dll", "System32/amdhip64_7.dll"),
            "System32/amdhip64_6.dll",
        ),
        ("site/_rocm_sdk_core/bin/amd_comgr.dll", "System32/amd_comgr0602.dll"),
        ("site/_rocm_sdk_core/bin/hiprtc0716.dll", "System32/hiprtc0602.dll"),
        windows=True,
    ),
    "Windows: HIP 8": Machine(
        THEROCK,
        (
            *("site/_rocm_sdk_core/bin/amdhip-8.dll", "site/_rocm_sdk_core/bin/amdhip-clr.dll"),
            "System32/amdhip64_7.dll",
        ),
        ("site/_rocm_sdk_core/bin/amdhip-8.dll", "System32/amdhip64_7.dll"),
        (),
        (),
        windows=True,
    ),
    "Windows: the HIP SDK by its variables": Machine(
        NAMED,
        (
            *("sdk/6.4/bin/amdhip64_6.dll", "sdk/6.4/bin/hiprtc0604.dll", *SYSTEM32),
            *(
                "sdk/5.7/bin/hiprtc0507.dll",
                "sdk/5.7/bin/amd_comgr.dll",
                "sdk/7.1/bin/amd_comgr.dll",
            ),
        ),
        (*("sdk/6.4/bin/amdhip64_6.dll", "System32/amdhip64_7.dll", "System32/amdhip64_6.dll"),),
        ("sdk/7.1/bin/amd_comgr.dll", "sdk/5.7/bin/amd_comgr.dll", "System32/amd_comgr0602.dll"),
        ("sdk/6.4/bin/hiprtc0604.dll", "sdk/5.7/bin/hiprtc0507.dll", "System32/hiprtc0602.dll"),
        windows=True,
        named={"HIP_PATH": "6.4", "HIP_PATH_57": "5.7", "HIP_PATH_71": "7.1"},
    ),
    "Windows: the HIP SDK where it is installed": Machine(
        INSTALLED,
        ("AMD/ROCm/6.2/bin/amd_comgr.dll", "AMD/ROCm/6.10/bin/amd_comgr0610.dll"),
        (),
        ("AMD/ROCm/6.10/bin/amd_comgr0610.dll", "AMD/ROCm/6.2/bin/amd_comgr.dll"),
        (),
        windows=True,
    ),
    "Windows: the display driver alone": Machine(
        SYSTEM,
        SYSTEM32,
        ("System32/amdhip64_7.dll", "System32/amdhip64_6.dll"),
        ("System32/amd_comgr0602.dll",),
        ("System32/hiprtc0602.dll",),
        windows=True,
    ),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without anything; its Python has the packages that lie in the folder `site`."""

    def folder(name: str) -> Path | None:
        return path if (path := tmp_path / "site" / name).is_dir() else None

    monkeypatch.setattr(layouts, "package_folder", folder)
    monkeypatch.setattr(layouts, "ROOT", tmp_path)
    for name in ("ROCM_PATH", "ROCM_HOME", "HIP_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SYSTEMROOT", str(tmp_path))
    monkeypatch.setenv("PROGRAMFILES", str(tmp_path))
    return tmp_path


def place(root: Path, files: tuple[str, ...]) -> None:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        symbols = [each.symbol for each in (AMDHIP64, COMGR, HIPRTC)] * (path.name not in EMPTY)
        path.write_bytes(b"\0".join([name.encode(), *(each.encode() for each in symbols), b""]))


@pytest.mark.parametrize("name", MACHINES)
def test_each_install(name: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MACHINES[name]
    monkeypatch.setattr(layouts, "WINDOWS", machine.windows)
    place(site, machine.files)
    for variable, folder in machine.named.items():
        monkeypatch.setenv(variable, str(site / "sdk" / folder))
    folders = libraries.rocm_library_folders()
    for library, wanted in (
        (AMDHIP64, machine.hip),
        (COMGR, machine.comgr),
        (HIPRTC, machine.hiprtc),
    ):
        found, _ = libraries.find(folders, library)
        assert [path.relative_to(site).as_posix() for path in found] == list(wanted)


def test_each_layout_has_a_machine_of_each_system() -> None:
    names = [layout.name for layout in layouts.LAYOUTS]
    for windows in (False, True):
        seen = {each.layout for each in MACHINES.values() if each.windows == windows}
        assert seen == set(names)


def test_a_package_that_rocm_sdk_alone_can_name(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TheRock's packages may end with a nonce (PY_PACKAGE_SUFFIX_NONCE)."""
    told = site / "site" / "_rocm_sdk_core_a1" / "lib" / "libamdhip64.so.7"
    place(site, ("site/_rocm_sdk_core_a1/lib/libamdhip64.so.7", "site/rocm_sdk/__init__.py"))
    module = types.SimpleNamespace(find_libraries=lambda *names: [told] * len(names))
    monkeypatch.setitem(sys.modules, "rocm_sdk", module)
    monkeypatch.setattr(layouts, "WINDOWS", False)
    assert list(libraries.files(libraries.rocm_library_folders(), AMDHIP64)) == [told]

    def missing(*names: str) -> list[Path]:
        raise ModuleNotFoundError(names)

    module.find_libraries = missing
    layouts._warn.cache_clear()
    for _ in range(2):
        assert list(libraries.files(libraries.rocm_library_folders(), AMDHIP64)) == []
    (warning,) = caplog.messages
    assert warning.startswith("rocm_sdk cannot name its libraries: ModuleNotFoundError: ")


def test_a_clang_is_looked_for_in_sdks_alone(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("site/torch", "site/_rocm_sdk_core", "site/_rocm_sdk_devel", "opt/rocm", "usr"):
        (site / name).mkdir(parents=True)
    monkeypatch.setattr(layouts, "WINDOWS", False)
    wanted = ["site/_rocm_sdk_core", "site/_rocm_sdk_devel", "opt/rocm"]
    assert libraries.rocm_roots() == [site / name for name in wanted]


@pytest.mark.parametrize(
    ("name", "windows", "matches"),
    [
        ("libamdhip64.so", False, True),
        ("libamdhip64.so.6.2.41133", False, True),
        ("libamdhip64_extra.so", False, False),
        ("libhiprtc.so.7", False, False),
        ("amdhip64.dll", True, True),
        ("AMDHIP64_7.DLL", True, True),
        ("amdhip-8.dll", True, True),
        ("amdhip-clr.dll", True, False),
        ("amdhip64_7.dll.bak", True, False),
    ],
)
def test_names_of_the_hip_runtime(
    name: str, windows: bool, matches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "WINDOWS", windows)
    assert AMDHIP64.matches(name) == matches


def test_the_newest_of_a_folder_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 64 in a name is no version."""
    monkeypatch.setattr(layouts, "WINDOWS", True)
    newest_first = ["amdhip-8.dll", "AMDHIP64_7.dll", "amdhip64_6.dll", "amdhip64.dll"]
    for name in newest_first:
        (tmp_path / name).touch()
    assert [path.name for path in libraries.files([tmp_path], AMDHIP64)] == newest_first


def test_a_folder_that_is_called_like_a_library_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "WINDOWS", False)
    (tmp_path / "libamdhip64.so").mkdir()
    assert list(libraries.files([tmp_path], AMDHIP64)) == []


# -- what a module of Windows asks for


def test_imports_and_delayed_imports(tmp_path: Path) -> None:
    """As ZLUDA's nvcuda.dll has HIP's."""
    source = answering(cuInit="kpack_open", cuLaunchKernel="hipModuleLaunchKernel")
    calls = {"rocm_kpack.dll": ["kpack_open"]}
    delayed = {"amdhip64_7.dll": ["hipInit", "hipModuleLaunchKernel"]}
    found = libraries.imports(dll(tmp_path / "nvcuda.dll", source, calls, delayed))
    assert sorted(found) == ["amdhip64_7.dll", "kernel32.dll", "rocm_kpack.dll"]
    assert all(0 < table < 1 << 20 for table in found.values())
    assert libraries.imports(dll(tmp_path / "none.dll", answering(cuInit=1))) == {}


def test_what_is_no_module_has_no_imports(tmp_path: Path) -> None:
    calls = {"kernel32.dll": ["GetLastError"]}
    whole = dll(tmp_path / "a.dll", answering(f="GetLastError"), calls).read_bytes()
    path = tmp_path / "b.dll"
    for data in (b"", b"MZ", b"\x7fELF" + b"\0" * 4096, b"MZ" + b"\xff" * 4096, whole[:300]):
        path.write_bytes(data)
        assert libraries.imports(path) == {}
    for end in range(300, len(whole), 97):  # cut anywhere: what it has, or nothing
        path.write_bytes(whole[:end])
        assert libraries.imports(path).keys() <= {"kernel32.dll"}
    path.unlink()
    with pytest.raises(OSError, match=r"b\.dll"):
        libraries.imports(path)
