"""Kernel source executed on the CPU: compiles a KernelSpec with clang against simt.h and runs it as a program of its own.

The program is the kernel, a scheduler that runs work-items as fibers, and the documented semantics of the cross-lane and matrix
instructions. It reads a job (grid, parameters, buffers) from standard input and writes the buffers back, so that a crash, a
sanitizer's report or a divergence is an error of the run and never of the test process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lib_rocm_sd.arch import KERNELS_DIR, Arch
from lib_rocm_sd.ops.base import KernelSpec

SIMT_DIR = Path(__file__).resolve().parent
CACHE_DIR = Path(os.environ.get("ROCM_SD_SIMT_CACHE") or SIMT_DIR.parent.parent / ".cache" / "simt")
RUNTIME = ("instructions.cpp", "scheduler.cpp", "job.cpp")
LANGUAGE = ("-x", "c++", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-g1")
SANITIZERS: dict[str | None, tuple[tuple[str, ...], tuple[str, ...]]] = {
    None: ((), ()),
    "address,undefined": (
        ("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"),
        ("-DSIMT_ASAN",),
    ),
    "thread": (("-fsanitize=thread",), ("-DSIMT_TSAN",)),
}
"""Per sanitizer: flags for the kernel and the link, definitions for the shim's own files."""


class SimtError(RuntimeError):
    """The kernel did not compile for the shim, or its run ended in anything but success; `str()` has the program's words."""


@dataclass(frozen=True)
class Region:
    """Memory of this process that a kernel may touch: copied in before a run and back after it."""

    address: int
    nbytes: int


@lru_cache(maxsize=1)
def find_clang() -> str | None:
    """The newest clang from 17 on that PATH has, or None."""
    for name in (*(f"clang-{version}" for version in range(25, 16, -1)), "clang"):
        path = shutil.which(name)
        if path and _clang_major(path) >= 17:
            return path
    return None


def _clang_major(path: str) -> int:
    words = _output([path, "--version"]).split("clang version ")
    return int(words[1].split(".")[0]) if len(words) > 1 else 0


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


@lru_cache(maxsize=4)
def missing(sanitize: str | None = None) -> str | None:
    """Why no kernel can be compiled and run here (with this sanitizer), or None."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return (
            f"the SIMT shim is written for Linux on x86-64 and aarch64, not {platform.platform()}"
        )
    clang = find_clang()
    if clang is None:
        return "no clang 17 or newer on PATH"
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.c"), Path(folder, "probe")
        source.write_text("int main(void) { return 0; }\n", encoding="utf-8")
        flags, _ = SANITIZERS[sanitize]
        build = _run([clang, *flags, str(source), "-o", str(program)])
        result = _run([str(program)]) if build.returncode == 0 else build
    if result.returncode == 0:
        return None
    words = result.stderr.decode(errors="replace").strip().splitlines()
    return f"{clang} {' '.join(flags)}: {words[0] if words else f'status {result.returncode}'}"


def _run(
    command: Sequence[str], stdin: bytes = b"", timeout_s: float = 120.0, cwd: Path | None = None
):  # noqa: ANN202
    return subprocess.run(
        command, input=stdin, capture_output=True, timeout=timeout_s, cwd=cwd, check=False
    )


@lru_cache(maxsize=1)
def _cpu_flags() -> tuple[str, ...]:
    """Instructions that make half precision and FMA fast, where this CPU has them."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text(encoding="utf-8").split()) if info.exists() else set()
    return tuple(f"-m{name}" for name in ("avx2", "f16c", "fma") if name in words)


def _build(
    key_files: Sequence[Path], command: Sequence[str], inputs: Sequence[str], product: str
) -> Path:
    """Runs `command` + `inputs` in an empty folder and keeps what it makes under a hash of everything that went in."""
    clang = find_clang()
    assert clang is not None, missing()
    digest = hashlib.sha256(repr((_output([clang, "--version"]), command, inputs)).encode())
    for path in key_files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    final = CACHE_DIR / digest.hexdigest()[:32]
    if not (final / product).exists():
        CACHE_DIR.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE_DIR) as folder:
            made = Path(folder, "made")
            made.mkdir()
            result = _run([clang, *command, *inputs], timeout_s=300.0, cwd=made)
            if result.returncode != 0:
                raise SimtError(result.stderr.decode(errors="replace"))
            if not final.exists():
                made.replace(final)
    return final / product


def _runtime(sanitize: str | None) -> list[str]:
    """The shim's own object files, never instrumented."""
    files = sorted(path for path in SIMT_DIR.iterdir() if path.suffix in (".cpp", ".h"))
    command = [*LANGUAGE, "-O2", *_cpu_flags(), *SANITIZERS[sanitize][1], "-c"]
    first = _build(files, command, [str(SIMT_DIR / name) for name in RUNTIME], "job.o")
    return [str(first.with_name(f"{Path(name).stem}.o")) for name in RUNTIME]


def compile_shim(
    spec: KernelSpec, arch: Arch, sanitize: str | None = None, kernels_dir: Path = KERNELS_DIR
) -> Path:
    """The program that runs `spec` as `arch` would; cached by content. Raises SimtError with clang's log.

    `sanitize`: None, "address,undefined" or "thread". `kernels_dir` holds the spec's source file, and common/.
    """
    defines = {**arch.defines(), **dict(spec.defines), "SIMT_SHIM": 1}
    source = kernels_dir / spec.source
    sources = [
        *sorted(kernels_dir.glob("**/*.h")),
        source,
        SIMT_DIR / "simt.h",
        SIMT_DIR / "entry.cpp",
    ]
    command = [
        *LANGUAGE,
        "-O1",
        *("-Xclang", "-ffloat16-excess-precision=none"),
        *_cpu_flags(),
        *SANITIZERS[sanitize][0],
        *(f"-D{name}={value}" for name, value in defines.items()),
        f'-DSIMT_SOURCE="{source}"',
        f"-DSIMT_ENTRY={spec.entry}",
        f"-I{SIMT_DIR}",
        f"-I{kernels_dir}",
        *("-o", "program"),
    ]
    inputs = [str(SIMT_DIR / "entry.cpp"), "-x", "none", *_runtime(sanitize), "-lm"]
    return _build(sources, command, inputs, "program")


def run(
    program: Path,
    params: ctypes.Structure,
    memory: Sequence[Region],
    grid: int,
    block: int,
    seed: int = 1,
    timeout_s: float = 120.0,
) -> None:
    """Runs all work-groups; `memory` is what the kernel may touch, and holds the results afterwards.

    A word of `params` (at a multiple of eight bytes) that is an address within `memory` is a pointer. Odd seeds keep waves as far
    apart as barriers allow, even seeds interleave them. Raises SimtError with the program's message: a divergence, a
    sanitizer's report, a crash.
    """
    job = _job(bytes(params), memory, (grid, block, seed))
    result = _run([str(program)], job, timeout_s)
    if result.returncode != 0 or len(result.stdout) != sum(region.nbytes for region in memory):
        raise SimtError(f"status {result.returncode}: {result.stderr.decode(errors='replace')}")
    offset = 0
    for region in memory:
        ctypes.memmove(
            region.address, result.stdout[offset : offset + region.nbytes], region.nbytes
        )
        offset += region.nbytes


def _job(params: bytes, memory: Sequence[Region], launch: tuple[int, int, int]) -> bytes:
    pointers: list[int] = []
    for offset in range(0, len(params) - 7, 8):
        (word,) = struct.unpack_from("<Q", params, offset)
        for index, region in enumerate(memory):
            if region.address <= word < region.address + max(region.nbytes, 1):
                pointers += [offset, index, word - region.address]
    numbers = [*launch, len(params), len(memory), len(pointers) // 3]
    numbers += [*(region.nbytes for region in memory), *pointers]
    contents = [ctypes.string_at(region.address, region.nbytes) for region in memory]
    return b"".join([struct.pack(f"<{len(numbers)}Q", *numbers), params, *contents])
