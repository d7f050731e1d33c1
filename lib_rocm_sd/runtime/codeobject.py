"""What stands in a code object: its target, and per kernel the registers, spills, LDS and scratch
that the compiler used.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.arch import Arch

_ELF = b"\x7fELF"
_MACHINE_AMDGPU = 224
_MACHINE_CUDA = 190
_SECTION_NOTE = 7
_NOTE_METADATA = 32
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_SIMDS = 4


@dataclass(frozen=True)
class KernelResources:
    """One kernel's needs.

    `vgprs` counts all vector registers of a work-item, the `agprs` among them. `required_block`:
    the only work-group that it may be launched with, empty where any up to `max_block` may.
    `dynamic_stack`: it may use more than `scratch_bytes`.
    """

    name: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    wave_size: int
    kernarg_bytes: int = 0
    max_block: int = 1024
    required_block: tuple[int, ...] = ()
    kernarg_align: int = 8
    dynamic_stack: bool = False


def unbundled(code: bytes, gfx: str) -> bytes:
    """The code object of `gfx` out of a clang offload bundle; `code` itself when it is no bundle.

    Raises ValueError when the bundle has none for `gfx` or is cut short.
    """
    if not code.startswith(_BUNDLE):
        return code
    try:
        for name, start, size in _bundle_entries(code):
            # hip-amdgcn-amd-amdhsa--gfx90a:sramecc+ or hipv4-amdgcn-...
            if name.startswith("hip") and name.rpartition("--")[2].split(":")[0] == gfx:
                if start + size > len(code):
                    raise ValueError("offload bundle is cut short")
                return code[start : start + size]
    except (struct.error, OverflowError) as error:
        raise ValueError(f"offload bundle is cut short: {error}") from error
    raise ValueError(f"offload bundle has no code for {gfx}")


def _bundle_entries(code: bytes) -> Iterator[tuple[str, int, int]]:
    at = len(_BUNDLE)
    (count,) = struct.unpack_from("<Q", code, at)
    at += 8
    for _ in range(min(count, 64)):
        start, size, length = struct.unpack_from("<QQQ", code, at)
        at += 24
        yield code[at : at + length].decode("ascii", errors="replace"), start, size
        at += length


def target(code: bytes) -> str:
    """The gfx id that an AMD code object was made for; empty where its metadata does not say.

    Raises ValueError.
    """
    match = re.search(r"-(gfx[^:]+)", str(_metadata(code).get("amdhsa.target", "")))
    return match[1] if match else ""


def resources(code: bytes) -> list[KernelResources]:
    """Every kernel's resources.

    Raises ValueError when `code` is no AMD code object with readable metadata.
    """
    try:
        return [_kernel(row) for row in _metadata(code).get("amdhsa.kernels", [])]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"code object metadata lacks {error}") from error


def _kernel(row: dict[str, Any]) -> KernelResources:
    return KernelResources(
        name=row[".name"],
        vgprs=row[".vgpr_count"],
        agprs=row.get(".agpr_count", 0),
        sgprs=row[".sgpr_count"],
        vgpr_spills=row.get(".vgpr_spill_count", 0),
        sgpr_spills=row.get(".sgpr_spill_count", 0),
        lds_bytes=row[".group_segment_fixed_size"],
        scratch_bytes=row[".private_segment_fixed_size"],
        wave_size=row[".wavefront_size"],
        kernarg_bytes=row[".kernarg_segment_size"],
        max_block=row[".max_flat_workgroup_size"],
        required_block=tuple(row.get(".reqd_workgroup_size", ())),
        kernarg_align=row.get(".kernarg_segment_align", 8),
        dynamic_stack=row.get(".uses_dynamic_stack", False),
    )


def refusals(code: bytes, entry: str, arch: Arch) -> list[str]:
    """Why `code` is not what was asked for: no code object, another target, no such kernel; empty
    when it is right.
    """
    if not arch.is_amd:
        return [] if _machine(code) == _MACHINE_CUDA else ["is not a CUDA binary"]
    try:
        made_for, names = target(code), [kernel.name for kernel in resources(code)]
    except ValueError as error:
        return [str(error)]
    if made_for and made_for != arch.gfx:
        return [f"was made for {made_for}, not for {arch.gfx}"]
    return (
        [] if entry in names else [f"has no kernel {entry}, only {', '.join(names) or 'nothing'}"]
    )


def waves_per_simd(arch: Arch, kernel: KernelResources, block: int) -> int:
    """How many waves of work-groups of `block` work-items one SIMD holds at once, limited by
    registers and LDS.

    A work-group lives on the four SIMDs of one WGP (RDNA) or CU (CDNA) and enters whole. 0 when it
    does not fit at all; a group with fewer waves than SIMDs counts as 1.
    """
    return min(waves_by_registers(arch, kernel, block), waves_by_lds(arch, kernel, block))


def waves_by_registers(arch: Arch, kernel: KernelResources, block: int) -> int:
    """The same, if there were LDS without end."""
    allocated = _rounded_up(max(kernel.vgprs, 1), arch.vgpr_granule)
    waves = min(arch.vgprs_per_simd // allocated, arch.max_waves_per_simd)
    return _of_groups(waves * _SIMDS // _group_waves(arch, block), arch, block)


def waves_by_lds(arch: Arch, kernel: KernelResources, block: int) -> int:
    """The same, if there were registers without end."""
    groups = arch.max_waves_per_simd * _SIMDS // _group_waves(arch, block)
    if kernel.lds_bytes > arch.lds_bytes:
        groups = 0
    elif kernel.lds_bytes:
        groups = min(groups, arch.lds_pool_bytes // kernel.lds_bytes)
    return _of_groups(groups, arch, block)


def _group_waves(arch: Arch, block: int) -> int:
    return -(-block // arch.wave_size)


def _of_groups(groups: int, arch: Arch, block: int) -> int:
    return max(groups * _group_waves(arch, block) // _SIMDS, min(groups, 1))


def _rounded_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def _machine(code: bytes) -> int:
    return int.from_bytes(code[18:20], "little") if code.startswith(_ELF) and len(code) >= 64 else 0


def _metadata(code: bytes) -> dict[str, Any]:
    if not code.startswith(_ELF):
        raise ValueError("not an ELF file")
    if _machine(code) != _MACHINE_AMDGPU:
        raise ValueError(
            f"an ELF file for machine {_machine(code)}, not for AMD GPUs ({_MACHINE_AMDGPU})"
        )
    try:
        for name, kind, body in _notes(code):
            if name == b"AMDGPU" and kind == _NOTE_METADATA:
                decoded = decode_msgpack(body)
                if isinstance(decoded, dict):
                    return decoded
    except (struct.error, OverflowError) as error:
        raise ValueError(f"the ELF file is cut short: {error}") from error
    raise ValueError("the ELF file has no AMDGPU metadata, or is cut short")


def _notes(code: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Every note (owner, type, contents) in the SHT_NOTE sections of a little-endian ELF64 file."""
    (sections_at,) = struct.unpack_from("<Q", code, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", code, 0x3A)
    for index in range(count):
        section = sections_at + index * entry_bytes
        (kind,) = struct.unpack_from("<I", code, section + 4)
        at, size = struct.unpack_from("<QQ", code, section + 24)
        end = min(at + size, len(code))
        while kind == _SECTION_NOTE and at + 12 <= end:
            name_bytes, body_bytes, note = struct.unpack_from("<III", code, at)
            body = at + 12 + _rounded_up(name_bytes, 4)
            yield (
                code[at + 12 : at + 12 + name_bytes].rstrip(b"\0"),
                note,
                code[body : body + body_bytes],
            )
            at = body + _rounded_up(body_bytes, 4)


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


def decode_msgpack(data: bytes) -> Any:
    """The first value in `data`, which is MessagePack, the format of the metadata: maps, arrays,
    strings, numbers, booleans, nil. Raises ValueError when it is cut short or something else.
    """
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
