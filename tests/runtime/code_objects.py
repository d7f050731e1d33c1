"""What the tests of the runtime need: tiny code objects, and shared libraries from C source."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import arch
from lib_rocm_sd.runtime.compiler import Compiler

DATA = Path(__file__).parents[1] / "data"
SCALE = str(DATA / "scale.hip")


def packed(value: Any) -> bytes:
    """MessagePack of the types that code object metadata uses."""
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return struct.pack(">B", value) if 0 <= value < 128 else b"\xd2" + struct.pack(">i", value)
    if isinstance(value, str):
        data = value.encode()
        return (
            bytes([0xA0 | len(data)]) if len(data) < 32 else b"\xd9" + bytes([len(data)])
        ) + data
    if isinstance(value, Mapping):
        body = b"".join(packed(key) + packed(item) for key, item in value.items())
        return b"\xde" + struct.pack(">H", len(value)) + body
    return bytes([0x90 | len(value)]) + b"".join(packed(item) for item in value)


def kernel_row(name: str = "scale", **changes: int) -> dict[str, Any]:
    """One kernel's metadata; `changes` by key without the leading dot."""
    row: dict[str, Any] = {
        ".name": name,
        ".vgpr_count": 40,
        ".agpr_count": 0,
        ".sgpr_count": 20,
        ".vgpr_spill_count": 0,
        ".sgpr_spill_count": 0,
        ".group_segment_fixed_size": 1024,
        ".private_segment_fixed_size": 0,
        ".wavefront_size": 32,
        ".kernarg_segment_size": 32,
        ".max_flat_workgroup_size": 64,
    }
    return {**row, **{f".{key}": value for key, value in changes.items()}}


def code_object(gfx: str = "gfx1100", kernels: Sequence[Mapping[str, Any]] | None = None) -> bytes:
    """An ELF file with an AMDGPU metadata note and nothing else."""
    rows = [kernel_row()] if kernels is None else list(kernels)
    metadata = packed({"amdhsa.kernels": rows, "amdhsa.target": f"amdgcn-amd-amdhsa--{gfx}"})
    note = struct.pack("<III", 7, len(metadata), 32) + b"AMDGPU\0\0" + metadata
    note += b"\0" * (-len(note) % 4)
    sections_at = 64 + len(note) + (-len(note) % 8)
    head = b"\x7fELF\x02\x01\x01\x40\x04" + b"\0" * 7
    head += struct.pack("<HHIQQQIHHHHHH", 3, 224, 1, 0, 0, sections_at, 0x541, 64, 0, 0, 64, 2, 0)
    section = struct.pack("<IIQQQQIIQQ", 0, 7, 2, 64, 64, len(note), 0, 0, 4, 0)
    return (head + note).ljust(sections_at, b"\0") + b"\0" * 64 + section


def c_library(source: str, path: Path, *options: str) -> Path:
    """Compile C source to a shared library; skips the test where there is no C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "clang-19"))), None)
    if compiler is None or sys.platform == "win32":
        pytest.skip("needs a C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(".c")
    file.write_text(source)
    command = [compiler, "-shared", "-fPIC", "-o", str(path), str(file), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return path


def compile_scale(compiler: Compiler, gfx: str = "gfx1100") -> bytes:
    """What a compiler makes of a source that a stand-in need not understand."""
    row = arch.table()[gfx]
    defines = {**row.defines(), "THREADS": 64}
    return compiler.compile("int a;", "scale", row, defines, "scale.hip")
