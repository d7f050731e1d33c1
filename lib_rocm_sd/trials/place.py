"""The card that trials are made on, and all of the machine that their verdicts depend on."""

from __future__ import annotations

import ctypes
import platform
from contextlib import suppress
from ctypes import byref, c_int
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.ops import registry
from lib_rocm_sd.runtime import cuda, hip, source, zluda
from lib_rocm_sd.runtime.compiler import file_identity
from lib_rocm_sd.runtime.launcher import Launcher

if TYPE_CHECKING:
    import torch

_VERSIONS = {
    "hip": ("hipDriverGetVersion", "hipRuntimeGetVersion"),
    "cuda": ("cuDriverGetVersion",),
}


@dataclass(frozen=True)
class Place:
    """`index`: torch's, and the driver's, number of the card. `library`: the driver's file, empty
    for CUDA. `software`: what a new version of asks for new verdicts. `before_torch`: libraries
    that a process loads before torch, so that this is the card that torch finds.
    """

    index: int
    backend: str
    name: str
    arch: Arch
    library: str
    software: tuple[str, ...]
    before_torch: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Key of card and software."""
        return cache.key_of("place 1", self.name, self.arch.gfx, *self.software)

    @property
    def halt_key(self) -> str:
        """Key of the note that automatic trials have stopped here. New kernels change it, so are
        tried.
        """
        return cache.key_of("halt 1", self.key, source.digest())

    def __str__(self) -> str:
        return f"{self.name} ({self.arch.gfx})"

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it, for the child."""
        return {
            "index": self.index,
            "backend": self.backend,
            "library": self.library,
            "arch": asdict(replace(self.arch, card=None)),
        }


def of(device: torch.device, launch: Any) -> Place | None:
    """Where `launch` launches for `device`; None where it is not the driver's launcher, or where no
    other process would find that card.
    """
    import torch

    if not isinstance(launch, Launcher) or device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return here(identify(device), index, launch.arch)


def here(info: DeviceInfo, index: int, arch: Arch) -> Place:
    """The card that is `info`, with the software of this process. Raises LaunchError where that is
    a ZLUDA of which something is not known.
    """
    import torch

    beside = zluda.loaded() if info.backend == "zluda" else None
    backend = "cuda" if info.backend == "cuda" else "hip"
    path = beside.hip if beside else hip.loaded_runtime() if backend == "hip" else None
    software = (
        *(str(torch.__version__), str(torch.version.hip), platform.system(), platform.release()),
        *(("" if path is None else file_identity("hip", path)), _versions(backend, path)),
        *((beside.digest,) if beside else ()),
    )
    first = tuple(map(str, beside.companions())) if beside else ()
    return Place(index, backend, info.name, arch, str(path or ""), software, first)


def _versions(backend: str, path: Path | None) -> str:
    """What the driver's library says of itself."""
    versions = []
    with suppress(RuntimeError, OSError, AttributeError):
        library = (
            cuda.library() if backend == "cuda" else hip.opened(path) if path else hip.library()
        )
        for name in _VERSIONS[backend]:
            number = c_int()
            function: Any = getattr(library, name)
            function.restype, function.argtypes = c_int, [ctypes.POINTER(c_int)]
            function(byref(number))
            versions.append(str(number.value))
    return " ".join(versions)


@lru_cache(maxsize=16)
def launching(family: str) -> str:
    """The SHA-256 of the Python that launches the kernels of a family of ops."""
    folder = Path(registry.__file__).parent
    files = (*sorted(folder.glob("*.py")), *sorted((folder / family).glob("*.py")))
    return cache.key_of(*(path.read_text(encoding="utf-8") for path in files))
