"""A card that is this process's memory, and launches that are functions of the test's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from lib_rocm_sd.arch import Arch, by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from tests.verify import simt


class HostCard:
    """Memory of this process as a card's."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.blocks: dict[int, Any] = {}
        self.free_at_all = free

    def allocate(self, size: int) -> int:
        block = ctypes.create_string_buffer(size + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self.blocks[address] = (block, size)
        return address

    def free(self, address: int) -> None:
        del self.blocks[address]

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def fill(self, address: int, byte: int, size: int) -> None:
        ctypes.memset(address, byte, size)

    def synchronise(self) -> None:
        pass

    def free_bytes(self) -> int:
        return self.free_at_all


class Shim:
    """Runs kernels' source on a HostCard."""

    def __init__(self, card: HostCard, gfx: str) -> None:
        arch = by_gfx(gfx)
        assert arch is not None
        self.card, self.arch = card, arch

    def __call__(self, spec: KernelSpec, grid: int, block: int, params: Any, device: Any) -> None:
        program = simt.compile_shim(spec, self.arch)
        memory = [simt.Region(address, size) for address, (_, size) in self.card.blocks.items()]
        simt.run(program, params, memory, grid, block)


def arch_of(gfx: str) -> Arch:
    arch = by_gfx(gfx)
    assert arch is not None
    return arch


def doubling(change: Callable[[Any], None] = lambda values: None) -> Any:
    """A launch of a kernel that gives 2 x, in float32; `change` gets the output's values."""

    def launch(spec: KernelSpec, grid: int, block: int, params: Any, device: Any) -> None:
        words = (ctypes.c_uint64 * 2).from_buffer_copy(bytes(params)[:16])
        count = grid * block
        x = (ctypes.c_float * count).from_address(words[0])
        out = (ctypes.c_float * count).from_address(words[1])
        for place in range(count):
            out[place] = 2 * x[place]
        change(out)

    return launch
