"""Changes to the machine code inside a code object."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from tests.verify.amdgpu import loader
from tests.verify.amdgpu.decode import Instruction

_S_NOP = bytes.fromhex("000080bf")
_PT_LOAD = 1


def _file_offset(code: bytes, address: int) -> int:
    (headers_at,) = struct.unpack_from("<Q", code, 0x20)
    entry_bytes, count = struct.unpack_from("<HH", code, 0x36)
    for index in range(count):
        at = headers_at + index * entry_bytes
        (kind,) = struct.unpack_from("<I", code, at)
        offset, start, _, size = struct.unpack_from("<QQQQ", code, at + 8)
        if kind == _PT_LOAD and start <= address < start + size:
            return int(offset + address - start)
    raise ValueError(f"{address:#x} is in no segment")


def replaced(code: bytes, address: int, new: bytes) -> bytes:
    """With these bytes at a loaded address."""
    at = _file_offset(code, address - loader.LOADED_AT)
    return code[:at] + new + code[at + len(new) :]


def found(code: bytes, entry: str, wanted: Callable[[Instruction], bool]) -> Sequence[Instruction]:
    """The instructions of a kernel for which `wanted` holds."""
    return [each for each in loader.load(code, entry).instructions if wanted(each)]


def text(code: bytes, entry: str) -> bytes:
    """A kernel's machine code alone: beside it stands a name that clang makes of the source."""
    start, size = loader.symbols(code)[entry]
    return loader._image(code)[start : start + size]


def without(code: bytes, instruction: Instruction) -> bytes:
    """With S_NOP 0 in the place of an instruction."""
    return replaced(code, instruction.address, _S_NOP * (instruction.size // 4))
