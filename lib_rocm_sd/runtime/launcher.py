"""Load code objects and launch them on torch's current stream, through the driver library that
torch itself uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.device import identify
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.base import MOST_WORK_ITEMS, KernelSpec, Launch
from lib_rocm_sd.runtime import build, codeobject, cuda, hip, zluda
from lib_rocm_sd.runtime.driver import Driver

if TYPE_CHECKING:
    import torch

MOST_IDENTITIES = 4096
"""Specs of a launcher that are found without being hashed."""


@dataclass(frozen=True)
class _Kernel:
    """A loaded kernel. Its code is kept, since a runtime may refer to it instead of copying it."""

    function: int
    lds_bytes: int
    code: bytes


class Launcher:
    """Launches kernels on one device: see `ops.base.Launch`.

    A kernel is built and loaded at its first launch.
    """

    def __init__(self, driver: Driver, index: int, arch: Arch) -> None:
        self._driver, self._index, self._arch = driver, index, driver.arch(arch, index)
        self._kernels: dict[KernelSpec, _Kernel] = {}
        self._latest: dict[int, tuple[KernelSpec, _Kernel]] = {}
        """By the identity of their specs, which are made once, and whose hashes take long."""
        self._stream, self._current = self._calls()

    @property
    def arch(self) -> Arch:
        """The row that code for its device is built for."""
        return self._arch

    def __call__(
        self,
        spec: KernelSpec,
        grid: int,
        block: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None:
        """Launch `spec` as `grid` work-groups of `block` work-items; a grid of 0 does nothing.

        Raises CompileError, LaunchError or DeviceOutOfMemoryError, ValueError for a device that is
        not the launcher's.
        """
        self._check(spec, grid, block, device)
        if grid == 0:
            return
        if self._current() != self._index:
            with _on_device(self._index):
                self._launch(spec, grid, block, params)
        else:
            self._launch(spec, grid, block, params)

    def prepare(
        self,
        spec: KernelSpec,
        grid: int,
        block: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> Callable[[], None]:
        """A launch to be repeated, each time with what `params` then holds.

        All that stays the same is checked and loaded here, and raises here.
        """
        self._check(spec, grid, block, device)
        if grid == 0:
            return lambda: None
        current, index, stream = self._current, self._index, self._stream
        if current() == index:
            kernel = self._kernel(spec, params)
        else:
            with _on_device(index):
                kernel = self._kernel(spec, params)
        start = self._driver.prepared(kernel.function, grid, block, kernel.lds_bytes, params)
        translate = self._driver.translate

        def launch() -> None:
            if current() != index:
                with _on_device(index):
                    return launch()
            handle = stream(index)
            return start(translate(handle) if handle and translate else handle)

        return launch

    def missing(self, specs: Iterable[KernelSpec]) -> list[KernelSpec]:
        """Those that would have to be compiled before their first launch."""
        unloaded = [spec for spec in dict.fromkeys(specs) if spec not in self._kernels]
        return [spec for spec in unloaded if not build.is_cached(spec, self._arch)]

    def build(self, specs: Iterable[KernelSpec]) -> None:
        """Compile several at a time; a failure is told by the launch."""
        build.build_all(specs, self._arch)

    def _check(self, spec: KernelSpec, grid: int, block: int, device: torch.device) -> None:
        if device.index is not None and device.index != self._index:
            raise ValueError(f"launcher for device {self._index} called for {device}")
        if grid * block > MOST_WORK_ITEMS:
            raise LaunchError(
                f"{spec.entry}: {grid} groups of {block} work-items do not fit into one launch"
            )

    def _launch(self, spec: KernelSpec, grid: int, block: int, params: ctypes.Structure) -> None:
        kernel = self._kernel(spec, params)
        stream = self._stream(self._index)
        if stream and self._driver.translate:
            stream = self._driver.translate(stream)
        self._driver.launch(kernel.function, grid, block, kernel.lds_bytes, stream, params)

    def _kernel(self, spec: KernelSpec, params: ctypes.Structure) -> _Kernel:
        latest = self._latest.get(id(spec))
        if latest is None or latest[0] is not spec:
            latest = (spec, self._kernels.get(spec) or self._load(spec, params))
            if len(self._latest) < MOST_IDENTITIES:
                self._latest[id(spec)] = latest
        return latest[1]

    def _load(self, spec: KernelSpec, params: ctypes.Structure) -> _Kernel:
        if self._capturing():
            raise LaunchError(
                f"{spec.entry} cannot be loaded while a stream is captured: run it once before"
            )
        code = self._code(spec)
        self._check_params(code, spec, params)
        module = self._driver.load(code)
        function = self._driver.function(module, spec.entry)
        kernel = _Kernel(function, self._driver.dynamic_lds_bytes(module, function), code)
        self._kernels[spec] = kernel
        return kernel

    def _calls(self) -> tuple[Callable[[int], int], Callable[[], int]]:
        """What gives a device's current stream, and the current device."""
        return _torch_calls()

    def _capturing(self) -> bool:
        return _capturing()

    def _code(self, spec: KernelSpec) -> bytes:
        return build.build(spec, self._arch).code

    def _check_params(self, code: bytes, spec: KernelSpec, params: ctypes.Structure) -> None:
        if not self._arch.is_amd:
            return
        size = ctypes.sizeof(params)
        for kernel in codeobject.resources(code):
            if kernel.name == spec.entry and kernel.kernarg_bytes < size:
                raise LaunchError(
                    f"{spec.entry} takes {kernel.kernarg_bytes} argument bytes and was given {size}"
                )


_launchers: dict[tuple[int, str], Launcher] = {}


def launcher_for(device: torch.device, arch: Arch) -> Launch:
    """The launcher of a GPU, made once per device and arch.

    Raises LaunchError with the reason when this torch has no driver library that our kernels can be
    launched through.
    """
    import torch

    if device.type != "cuda":
        raise LaunchError(f"{device} is no GPU that torch drives through HIP or CUDA")
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, arch.gfx)
    if key not in _launchers:
        _launchers[key] = Launcher(driver_for(index), index, arch)
    return _launchers[key]


def reset() -> None:
    """Forget every launcher: the next one looks for its library and loads its kernels anew."""
    _launchers.clear()


def driver_for(index: int) -> Driver:
    """The driver of torch's device `index`. Raises LaunchError."""
    import torch

    backend = identify(torch.device("cuda", index)).backend
    if backend == "cuda":
        return cuda.CudaDriver(cuda.library())
    return zluda.driver() if backend == "zluda" else hip.HipDriver(hip.library())


def _torch_calls() -> tuple[Callable[[int], int], Callable[[], int]]:
    """Torch's current stream of a device as a handle, and its current device, in the cheapest form
    that this torch has.
    """
    import torch

    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    current = getattr(torch._C, "_cuda_getDevice", None)

    def stream(index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream

    return raw_stream or stream, current or torch.cuda.current_device


def _on_device(index: int) -> AbstractContextManager[Any]:
    import torch

    return torch.cuda.device(index)


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
