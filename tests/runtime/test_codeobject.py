"""The reader of code objects: metadata, bundles, what is refused, and how many waves fit."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.runtime import codeobject
from tests.runtime.code_objects import code_object, kernel_row, packed


def bundle(*entries: tuple[str, bytes]) -> bytes:
    """A clang offload bundle."""
    heads = b"".join(struct.pack("<QQQ", 0, 0, len(name)) + name.encode() for name, _ in entries)
    at = 32 + len(heads)
    out = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries))
    body = b""
    for name, code in entries:
        out += struct.pack("<QQQ", at + len(body), len(code), len(name)) + name.encode()
        body += code
    return out + body


def test_every_number_comes_from_its_own_field() -> None:
    names = ["vgpr_count", "agpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count"]
    names += ["group_segment_fixed_size", "private_segment_fixed_size", "wavefront_size"]
    names += ["kernarg_segment_size", "max_flat_workgroup_size"]
    row = kernel_row("k", **{name: 1000 + number for number, name in enumerate(names)})
    assert codeobject.resources(code_object(kernels=[row])) == [
        codeobject.KernelResources("k", *range(1000, 1010))
    ]


def test_the_target_is_read_without_its_features() -> None:
    assert codeobject.target(code_object("gfx90a:sramecc+:xnack-")) == "gfx90a"


def test_what_was_asked_for_is_not_refused() -> None:
    assert codeobject.refusals(code_object("gfx1100"), "scale", arch.table()["gfx1100"]) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (code_object("gfx1101"), "made for gfx1101, not for gfx1100"),
        (code_object(kernels=[kernel_row("other")]), "no kernel scale, only other"),
        (b"", "not an ELF"),
        (b"\x7fELF", "not for AMD GPUs"),
        (code_object()[:-40], "cut short"),
        (b"MZ" + bytes(400), "not an ELF"),
    ],
)
def test_anything_else_is_refused_with_the_reason(code: bytes, words: str) -> None:
    assert words in "; ".join(codeobject.refusals(code, "scale", arch.table()["gfx1100"]))


def test_an_amd_code_object_is_no_cuda_binary() -> None:
    assert codeobject.refusals(code_object(), "scale", arch.table()["sm_80"]) == [
        "is not a CUDA binary"
    ]


def test_a_code_object_cut_anywhere_raises_nothing_but_value_errors() -> None:
    whole = code_object()
    for length in range(len(whole) - 24):  # the last header ends with fields that nobody reads
        with pytest.raises(ValueError):
            codeobject.resources(whole[:length])


def test_random_damage_raises_nothing_but_value_errors() -> None:
    whole = code_object()
    for at in range(len(whole)):
        for value in (0x00, 0xFF, 0xDF, 0xDD):
            damaged = whole[:at] + bytes([value]) + whole[at + 1 :]
            assert isinstance(codeobject.refusals(damaged, "scale", arch.table()["gfx1100"]), list)


def test_a_bundle_gives_the_code_of_its_target() -> None:
    whole = bundle(
        ("host-x86_64-unknown-linux--", b""),
        ("hipv4-amdgcn-amd-amdhsa--gfx1101", b"wrong"),
        ("hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+", b"right"),
    )
    assert codeobject.unbundled(whole, "gfx90a") == b"right"
    assert codeobject.unbundled(b"plain", "gfx90a") == b"plain"
    with pytest.raises(ValueError, match="no code for gfx1100"):
        codeobject.unbundled(whole, "gfx1100")
    for length in range(24, len(whole)):
        with pytest.raises(ValueError):
            codeobject.unbundled(whole[:length], "gfx90a")


@pytest.mark.parametrize(
    "value",
    [0, 127, 128, 70000, -1, -40, True, False, "x" * 40, ["a", [1]], {"a": {"b": 2}, "c": []}],
)
def test_messagepack_values(value: Any) -> None:
    assert codeobject.decode_msgpack(packed(value)) == value


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\xcd\x01\x00", 256),
        (b"\xcf" + b"\0" * 7 + b"\x09", 9),
        (b"\xd0\xff", -1),
        (b"\xcb" + struct.pack(">d", 1.5), 1.5),
        (b"\xc0", None),
        (b"\xda\x00\x02ab", "ab"),
        (b"\xc4\x02ab", b"ab"),
        (b"\xdc\x00\x01\x05", [5]),
        (b"\x81\xa1a\x05", {"a": 5}),
    ],
)
def test_messagepack_forms(data: bytes, value: Any) -> None:
    assert codeobject.decode_msgpack(data) == value


@pytest.mark.parametrize("data", [b"", b"\xa5ab", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xa1\xff"])
def test_what_is_not_messagepack(data: bytes) -> None:
    with pytest.raises(ValueError, match="MessagePack"):
        codeobject.decode_msgpack(data)


@pytest.mark.parametrize(
    ("gfx", "vgprs", "lds_bytes", "block", "waves"),
    [
        ("gfx1100", 40, 0, 64, 16),  # 1536 / 48 = 32 waves, of which 16 are possible
        ("gfx1100", 97, 0, 64, 12),  # 97 counts as 120
        ("gfx1102", 97, 0, 64, 9),  # 97 counts as 112, of 1024
        ("gfx1030", 256, 0, 256, 4),
        ("gfx1100", 256, 0, 256, 4),  # 5 waves by registers, but groups of 8 waves enter whole
        ("gfx1100", 40, 65536, 128, 2),  # 2 groups of 4 waves on 4 SIMDs
        ("gfx1100", 40, 65536, 32, 1),  # 2 groups of 1 wave: not every SIMD has one
        ("gfx1100", 40, 65537, 128, 0),  # more than a group may have
        ("gfx942", 128, 0, 256, 4),
        ("gfx942", 129, 0, 256, 3),
        ("gfx942", 512, 0, 256, 1),
        ("gfx942", 513, 0, 256, 0),
        ("gfx942", 64, 33000, 256, 1),
        ("gfx950", 64, 33000, 256, 4),
    ],
)
def test_waves_per_simd(gfx: str, vgprs: int, lds_bytes: int, block: int, waves: int) -> None:
    kernel = codeobject.KernelResources("k", vgprs, 0, 10, 0, 0, lds_bytes, 0, 32)
    assert codeobject.waves_per_simd(arch.table()[gfx], kernel, block) == waves
