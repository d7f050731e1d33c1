"""A code object as the driver loads it: segments, kernel descriptor, metadata.

The descriptor's fields: LLVM, "User Guide for AMDGPU Backend", Kernel Descriptor.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

from lib_rocm_sd.runtime import codeobject
from tests.verify.amdgpu.decode import FAMILIES, Instruction, decode
from tests.verify.amdgpu.errors import UnsupportedError

LOADED_AT = 0x7E0000000000
"""Where the first segment goes: an address that no buffer of the host has."""
_PT_LOAD = 1
_USER_SGPRS = (  # bit of kernel_code_properties, name, registers
    (0, "private_segment_buffer", 4),
    (1, "dispatch_ptr", 2),
    (2, "queue_ptr", 2),
    (3, "kernarg_segment_ptr", 2),
    (4, "dispatch_id", 2),
    (5, "flat_scratch_init", 2),
    (6, "private_segment_size", 1),
)


@dataclass(frozen=True)
class FloatMode:
    """Rounding: 0 nearest even, 1 up, 2 down, 3 toward zero. Denormals kept: bit 0 in, 1 out."""

    round_32: int
    round_16_64: int
    denorm_32: int
    denorm_16_64: int
    ieee: bool
    dx10_clamp: bool


@dataclass(frozen=True)
class Program:
    """One kernel of a code object, ready to run.

    `user_sgprs`: what the driver puts into the first SGPRs, in order, with their numbers of
    registers; after them comes the work-group id where the family passes it so. `two_caches`: the
    waves of a work-group may run on two CUs.
    """

    gfx: str
    family: str
    entry: str
    wave_size: int
    vgprs: int
    agprs: int
    agpr_offset: int
    lds_bytes: int
    scratch_bytes: int
    user_sgprs: tuple[tuple[str, int], ...]
    group_id_sgpr: bool
    two_caches: bool
    item_id_dimensions: int
    mode: FloatMode
    image: bytes
    instructions: tuple[Instruction, ...]
    resources: codeobject.KernelResources

    def index_of(self) -> dict[int, int]:
        """Address -> place in `instructions`."""
        return {each.address: place for place, each in enumerate(self.instructions)}


@lru_cache(maxsize=64)
def load(code: bytes, entry: str) -> Program:
    """The kernel `entry` of an ELF code object. Raises UnsupportedError, ValueError."""
    gfx = codeobject.target(code)
    if gfx not in FAMILIES:
        raise UnsupportedError(f"no decoder for {gfx or 'a code object without a target'}")
    resources = {kernel.name: kernel for kernel in codeobject.resources(code)}
    if entry not in resources:
        raise ValueError(f"no kernel {entry} in the code object, only {', '.join(resources)}")
    places = symbols(code)
    image = _image(code)
    start, size = places[entry]
    described, _ = places[f"{entry}.kd"]
    fields = _descriptor(image[described : described + 64], described, start)
    family = FAMILIES[gfx]
    kernel = resources[entry]
    agree(fields, kernel, family)
    return Program(
        gfx=gfx,
        family=family,
        entry=entry,
        wave_size=_wave_size(family, fields["properties"], kernel.wave_size),
        vgprs=kernel.vgprs,
        agprs=kernel.agprs,
        agpr_offset=4 * ((fields["rsrc3"] & 0x3F) + 1) if family == "cdna" else 0,
        lds_bytes=fields["lds"],
        scratch_bytes=fields["scratch"],
        user_sgprs=_user_sgprs(fields["properties"], fields["rsrc2"], fields["preload"]),
        group_id_sgpr=bool(fields["rsrc2"] >> 7 & 1),
        two_caches=_two_caches(family, fields),
        item_id_dimensions=(fields["rsrc2"] >> 11 & 3) + 1,
        mode=_mode(fields["rsrc1"], family),
        image=image,
        instructions=tuple(decode(image[start : start + size], LOADED_AT + start, gfx)),
        resources=kernel,
    )


def agree(fields: dict[str, int], kernel: codeobject.KernelResources, family: str) -> None:
    """ValueError where a driver, which reads the descriptor, sets up less than the kernel uses."""
    pairs = {
        "LDS": (fields["lds"], kernel.lds_bytes),
        "scratch": (fields["scratch"], kernel.scratch_bytes),
        "arguments": (fields["kernarg"], kernel.kernarg_bytes),
    }
    wrong = [f"{name} ({a}, {b} bytes)" for name, (a, b) in pairs.items() if a != b]
    if wrong:
        raise ValueError(f"the descriptor and the metadata disagree about {', '.join(wrong)}")
    if kernel.scratch_bytes and not fields["rsrc2"] & 1:
        raise ValueError(f"{kernel.scratch_bytes} bytes of scratch, which is not set up")
    granule = 4 if kernel.wave_size == 64 and family != "cdna" else 8
    allocated = ((fields["rsrc1"] & 0x3F) + 1) * granule
    if allocated < kernel.vgprs:
        raise ValueError(f"{kernel.vgprs} registers are used, {allocated} allocated")


def _descriptor(data: bytes, described: int, start: int) -> dict[str, int]:
    lds, scratch, kernarg = struct.unpack_from("<III", data, 0)
    (entry_offset,) = struct.unpack_from("<q", data, 16)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", data, 44)
    properties, preload = struct.unpack_from("<HH", data, 56)
    if described + entry_offset != start:
        raise ValueError("the descriptor points to another entry than the symbol")
    return {
        "lds": lds,
        "scratch": scratch,
        "kernarg": kernarg,
        "rsrc1": rsrc1,
        "rsrc2": rsrc2,
        "rsrc3": rsrc3,
        "properties": properties,
        "preload": preload,
    }


def _mode(rsrc1: int, family: str) -> FloatMode:
    has_ieee_bits = family != "rdna4"  # there the bits mean something else, and the mode is fixed
    return FloatMode(
        round_32=rsrc1 >> 12 & 3,
        round_16_64=rsrc1 >> 14 & 3,
        denorm_32=rsrc1 >> 16 & 3,
        denorm_16_64=rsrc1 >> 18 & 3,
        ieee=bool(rsrc1 >> 23 & 1) if has_ieee_bits else True,
        dx10_clamp=bool(rsrc1 >> 21 & 1) if has_ieee_bits else True,
    )


def _two_caches(family: str, fields: dict[str, int]) -> bool:
    """RDNA's WGP mode, CDNA's split of thread groups."""
    register, bit = (fields["rsrc3"], 16) if family == "cdna" else (fields["rsrc1"], 29)
    return bool(register >> bit & 1)


def _wave_size(family: str, properties: int, said: int) -> int:
    size = 32 if family != "cdna" and properties >> 10 & 1 else 64
    if size != said:
        raise ValueError(f"the descriptor says wave{size}, the metadata wave{said}")
    return size


def _user_sgprs(properties: int, rsrc2: int, preload: int) -> tuple[tuple[str, int], ...]:
    if preload:
        raise UnsupportedError("preloaded kernel arguments")
    found = tuple((name, count) for bit, name, count in _USER_SGPRS if properties >> bit & 1)
    counted = sum(count for _, count in found)
    said = rsrc2 >> 1 & 0x1F
    if counted > said:
        raise ValueError(f"{counted} user SGPRs are enabled, {said} are counted")
    if counted < said:
        found = (*found, ("padding", said - counted))
    return found


def _image(code: bytes) -> bytes:
    """The loaded segments; an index is an address relative to LOADED_AT."""
    (headers_at,) = struct.unpack_from("<Q", code, 0x20)
    entry_bytes, count = struct.unpack_from("<HH", code, 0x36)
    image = bytearray()
    for index in range(count):
        at = headers_at + index * entry_bytes
        (kind,) = struct.unpack_from("<I", code, at)
        offset, address, _, file_bytes, memory_bytes = struct.unpack_from("<QQQQQ", code, at + 8)
        if kind != _PT_LOAD:
            continue
        image.extend(b"\0" * max(0, address + memory_bytes - len(image)))
        image[address : address + file_bytes] = code[offset : offset + file_bytes]
    return bytes(image)


def symbols(code: bytes) -> dict[str, tuple[int, int]]:
    """Name -> address and size, from the dynamic symbol table."""
    (sections_at,) = struct.unpack_from("<Q", code, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", code, 0x3A)
    sections = []
    for index in range(count):
        at = sections_at + index * entry_bytes
        _, kind = struct.unpack_from("<II", code, at)
        offset, size, link = struct.unpack_from("<QQI", code, at + 24)
        sections.append((kind, offset, size, link))
    found: dict[str, tuple[int, int]] = {}
    for kind, offset, size, link in sections:
        if kind not in (2, 11):
            continue
        names_at = sections[link][1]
        for at in range(offset, offset + size, 24):
            name_at, _, _, _, value, length = struct.unpack_from("<IBBHQQ", code, at)
            end = code.index(b"\0", names_at + name_at)
            found[code[names_at + name_at : end].decode()] = (value, length)
    return found
