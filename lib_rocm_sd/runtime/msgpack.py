"""A decoder for MessagePack, the format of an AMD code object's metadata.

Maps, arrays, strings, numbers, booleans, nil.
"""

from __future__ import annotations

import struct
from typing import Any

_FIXED = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_STRINGS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_ARRAYS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}


def decode(data: bytes) -> Any:
    """The first value in `data`. Raises ValueError when it is cut short or not MessagePack."""
    try:
        return _Reader(data).value()
    except (struct.error, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ValueError(f"not MessagePack: {error}") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def bytes(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise ValueError("not MessagePack: cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def string(self, count: int) -> str:
        return self.bytes(count).decode("utf-8")

    def array(self, count: int) -> list[Any]:
        return [self.value() for _ in range(count)]

    def map(self, count: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(count)}

    def value(self) -> Any:
        head = self.number(">B")
        if head < 0x80:
            return head
        if head >= 0xE0:
            return head - 0x100
        if head < 0x90:
            return self.map(head & 0x0F)
        if head < 0xA0:
            return self.array(head & 0x0F)
        if head < 0xC0:
            return self.string(head & 0x1F)
        if head in _CONSTANTS:
            return _CONSTANTS[head]
        if head in _FIXED:
            return self.number(_FIXED[head])
        return self.counted(head)

    def counted(self, head: int) -> Any:
        """The values whose length follows the first byte."""
        if head in _STRINGS:
            return self.string(self.number(_STRINGS[head]))
        if head in _BYTES:
            return self.bytes(self.number(_BYTES[head]))
        if head in _ARRAYS:
            return self.array(self.number(_ARRAYS[head]))
        if head in _MAPS:
            return self.map(self.number(_MAPS[head]))
        raise ValueError(f"not MessagePack: byte 0x{head:02x} at {self.at - 1}")
