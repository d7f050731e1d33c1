"""Where AMD's libraries lie, by kind of install, and what they are called: one table.

Imports nothing of ours, since the workers that load a compiler read it too. The sources: PyTorch's
.ci/manywheel/build_rocm.sh, TheRock's rocm_sdk/_dist_info.py and RELEASES.md, HIP's loader design
(libamdhip64.so.8, amdhip-8.dll), and the issues of ROCm/TheRock that are named below.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

WINDOWS = sys.platform == "win32"
ROOT = Path("/")


@dataclass(frozen=True)
class Library:
    """What its file is called on each system, as patterns of the whole name, and a function that
    only the real one exports: hiprtc-builtins has hiprtc's name and none.
    """

    name: str
    linux: str
    windows: str
    symbol: str

    def matches(self, file_name: str) -> bool:
        """Whether a file of this name may be it, on this system."""
        pattern = self.windows if WINDOWS else self.linux
        return re.fullmatch(pattern, file_name, re.IGNORECASE) is not None

    def version(self, file_name: str) -> tuple[int, ...]:
        """The numbers in its file's name, but for those of its own: amdhip-8 is newer than
        amdhip64_7.
        """
        return numbers(file_name.lower().replace(self.name, ""))

    def described(self) -> str:
        """Its name as a user searches for it."""
        return f"{self.name}*.dll" if WINDOWS else f"lib{self.name}.so"


AMDHIP64 = Library(
    "amdhip64",
    r"libamdhip64\.so[.\d]*",
    r"amdhip64(_\d+)?\.dll|amdhip-\d+\.dll",  # the second from HIP 8 on, over amdhip-clr.dll
    "hipModuleLaunchKernel",
)
# Not amd_comgr_drivers.dll and amd_comgr_opencl.dll of the display driver (TheRock#7309, #6971).
COMGR = Library(
    "amd_comgr", r"libamd_comgr\.so[.\d]*", r"amd_comgr(_?\d+)?\.dll", "amd_comgr_do_action"
)
HIPRTC = Library("hiprtc", r"libhiprtc\.so[.\d]*", r"hiprtc(_?\d+)?\.dll", "hiprtcCreateProgram")
NVRTC = Library("nvrtc", r"libnvrtc\.so[.\d]*", r"nvrtc64[_\d]*\.dll", "nvrtcCreateProgram")


@dataclass(frozen=True)
class Layout:
    """One kind of install: its roots on this machine, the best first, and where below a root its
    libraries lie. `sdk`: laid out like /opt/rocm, so that a clang may be there.
    """

    name: str
    roots: Callable[[], Iterable[Path]]
    linux: tuple[str, ...]
    windows: tuple[str, ...]
    sdk: bool = True

    def folders(self) -> list[Path]:
        """Its folders on this machine, whether or not they exist."""
        below = self.windows if WINDOWS else self.linux
        return [root / each for root in self.roots() for each in below]


def package_folders(name: str) -> list[Path]:
    """The folders of an installed top-level package, more than one for a namespace package.

    Found without importing it.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in spec.submodule_search_locations or []] if spec else []


def package_folder(name: str) -> Path | None:
    """The first folder of an installed top-level package."""
    return next(iter(package_folders(name)), None)


def numbers(name: str) -> tuple[int, ...]:
    """The numbers in a name, to sort by version."""
    return tuple(int(digits) for digits in re.findall(r"\d+", name))


def _torch() -> list[Path]:
    return [folder] if (folder := package_folder("torch")) else []


def _amd_packages() -> list[Path]:
    """TheRock's, also multi-arch ones, whose rocm-sdk-device-* have code alone; the name may end
    with what only rocm_sdk knows.
    """
    packages = [package_folder(name) for name in ("_rocm_sdk_core", "_rocm_sdk_devel")]
    return [*_told_by_rocm_sdk(), *(package for package in packages if package is not None)]


def _told_by_rocm_sdk() -> list[Path]:
    if package_folder("rocm_sdk") is None:
        return []
    try:
        from rocm_sdk import find_libraries  # type: ignore[import-not-found]

        return [Path(path).parent.parent for path in find_libraries("amdhip64")]
    except Exception as error:  # whatever its own code raises, half uninstalled
        _warn(f"rocm_sdk cannot name its libraries: {type(error).__name__}: {error}")
        return []


@cache
def _warn(line: str) -> None:
    """Once. By the standard library, which a worker has, too."""
    logging.getLogger("rocm_sd").warning("%s", line)


def _environment() -> list[Path]:
    """HIP_PATH_71 and the like are the HIP SDK's on Windows, a variable for each version."""
    names = ["ROCM_PATH", "ROCM_HOME", "HIP_PATH"]
    versions = [name for name in os.environ if re.fullmatch(r"HIP_PATH_\d+", name)]
    names += sorted(versions, key=numbers, reverse=True)
    return [Path(os.environ[name]) for name in names if os.environ.get(name)]


def _installed() -> list[Path]:
    if WINDOWS:
        files = Path(os.environ.get("PROGRAMFILES", r"C:\Program Files"))
        return _newest(files / "AMD" / "ROCm", "*")
    rocm = ROOT / "opt" / "rocm"
    return [rocm, *_newest(rocm, "core-*"), *_newest(rocm.parent, "rocm-*")]


def _system() -> list[Path]:
    return [Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) if WINDOWS else ROOT / "usr"]


def _newest(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda path: numbers(path.name), reverse=True)


LAYOUTS = (
    Layout("torch's wheel (pytorch.org's has ROCm)", _torch, ("lib",), ("lib",), sdk=False),
    Layout("AMD's Python packages (TheRock)", _amd_packages, ("lib",), ("bin",)),
    Layout("named by the environment (HIP SDK)", _environment, ("lib", "lib64"), ("bin",)),
    Layout("installed (ROCm, for Radeon's wheels; Docker)", _installed, ("lib", "lib64"), ("bin",)),
    # Last: the driver's own amdhip64_7.dll crashed at launches (TheRock#7132, #7143).
    Layout(
        "the system's (distributions, WSL, the display driver)",
        _system,
        ("lib/x86_64-linux-gnu", "lib64", "lib", "local/lib", "lib/wsl/lib"),
        ("System32",),
        sdk=False,
    ),
)
"""In the order of preference. What torch has loaded comes before all of them: see hip.py."""
