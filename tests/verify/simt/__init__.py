"""Kernel source executed on the CPU: compiled by clang against simt.h, run as a program of its own.

The program is the kernel, a scheduler that runs work-items as fibers, and the documented semantics
of the cross-lane and matrix instructions. It reads a job (grid, parameters, buffers) from standard
input and writes the buffers back, so that a crash, a sanitizer's report or a divergence is an error
of the run and never of the test process.
"""

from __future__ import annotations

import ctypes
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
from lib_rocm_sd.runtime import source
from lib_rocm_sd.runtime.compiler import file_identity
from tests import compiled

SIMT_DIR = Path(__file__).resolve().parent
RUNTIME = ("instructions.cpp", "scheduler.cpp", "job.cpp")
LANGUAGE = ("-x", "c++", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-g1")
SANITIZERS: dict[str | None, tuple[tuple[str, ...], tuple[str, ...]]] = {
    None: (("-O0", "-fno-omit-frame-pointer"), ("-DSIMT_FRAMES",)),
    "address,undefined": (
        ("-O1", "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"),
        ("-DSIMT_ASAN",),
    ),
    "thread": (
        ("-O1", "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
        ("-DSIMT_TSAN",),
    ),
}
"""Per sanitizer: flags for the kernel and the link, definitions for the shim's own files.

Without one most of a test's time would be the optimizer's. With the thread sanitizer all that -O0
keeps on stacks pushes a race out of what it remembers.

The lanes of a wave are one thread with many stacks: no call stack can be kept for it.
"""


class SimtError(RuntimeError):
    """A kernel does not compile, or its run did not end well; with the program's words."""


@dataclass(frozen=True)
class Region:
    """Memory of this process, copied in before a run and back after it."""

    address: int
    nbytes: int


@lru_cache(maxsize=4)
def find_clang(sanitize: str | None = None) -> str | None:
    """The newest clang from 17 on that PATH has and that links (with this sanitizer), or None."""
    return next((path for path in _clangs() if _trouble(path, sanitize) is None), None)


def _clangs() -> list[str]:
    names = (*(f"clang-{version}" for version in range(25, 16, -1)), "clang")
    return [
        path
        for path in map(shutil.which, names)
        if path and int(compiled.version_of(path).split(".")[0] or 0) >= 17
    ]


@lru_cache(maxsize=16)
def _trouble(clang: str, sanitize: str | None) -> str | None:
    """Why this clang makes no program that runs: a sanitizer's runtime is a package of its own."""
    flags, _ = SANITIZERS[sanitize]
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.c"), Path(folder, "probe")
        source.write_text("int main(void) { return 0; }\n", encoding="utf-8")
        build = _run([clang, *flags, str(source), "-o", str(program)])
        result = _run([str(program)]) if build.returncode == 0 else build
    if result.returncode == 0:
        return None
    words = result.stderr.decode(errors="replace").strip().splitlines()
    return f"{clang} {' '.join(flags)}: {words[0] if words else f'status {result.returncode}'}"


def missing(sanitize: str | None = None) -> str | None:
    """Why no kernel can be compiled and run here (with this sanitizer), or None."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine not in ("Linux x86_64", "Linux aarch64"):
        return f"the SIMT shim is written for Linux on x86-64 and aarch64, not {machine}"
    if find_clang(sanitize) is not None:
        return None
    troubles = [_trouble(clang, sanitize) for clang in _clangs()]
    return "; ".join(filter(None, troubles)) or "no clang 17 or newer on PATH"


def _run(
    command: Sequence[str], stdin: bytes = b"", timeout_s: float = 600.0, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, timeout=timeout_s, cwd=cwd, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SimtError(f"{command[0]}: not done after {timeout_s:.0f} s") from error


@lru_cache(maxsize=1)
def _cpu_flags() -> tuple[str, ...]:
    """Instructions that make half precision and FMA fast, where this CPU has them."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text(encoding="utf-8").split()) if info.exists() else set()
    return tuple(f"-m{name}" for name in ("avx2", "f16c", "fma") if name in words)


def _clang(sanitize: str | None, command: Sequence[str], made: Path) -> None:
    """Raises SimtError with clang's log."""
    clang = find_clang(sanitize)
    assert clang is not None, missing(sanitize)
    result = _run([clang, *command], timeout_s=600.0, cwd=made)
    if result.returncode != 0:
        raise SimtError(result.stderr.decode(errors="replace"))


def _identity(sanitize: str | None) -> str:
    """Of the compiler and of the shim's own sources."""
    files = sorted(path for path in SIMT_DIR.iterdir() if path.suffix in (".cpp", ".h"))
    texts = tuple((path.name, path.read_bytes()) for path in files)
    return compiled.hash_of(file_identity("shim", Path(find_clang(sanitize) or "")), texts)


@lru_cache(maxsize=1)
def version() -> str:
    """Hash of the shim's own sources, comments aside."""
    files = sorted(path for path in SIMT_DIR.iterdir() if path.suffix in (".cpp", ".h"))
    return compiled.hash_of(*(source.bare(path.read_text(encoding="utf-8")) for path in files))


def _runtime(sanitize: str | None) -> list[str]:
    """The shim's own object files, never instrumented."""
    command = [*LANGUAGE, "-O2", *_cpu_flags(), *SANITIZERS[sanitize][1], "-c"]
    files = [str(SIMT_DIR / name) for name in RUNTIME]
    key = compiled.hash_of(_identity(sanitize), command)
    made = compiled.entry(key, lambda folder: _clang(sanitize, [*command, *files], folder))
    return [str(made / f"{Path(name).stem}.o") for name in RUNTIME]


def compile_shim(
    spec: KernelSpec, arch: Arch, sanitize: str | None = None, kernels_dir: Path = KERNELS_DIR
) -> Path:
    """The program that runs `spec` as `arch` would, from the cache where nothing has changed.

    `sanitize`: None, "address,undefined" or "thread". `kernels_dir` holds the source file; its
    common/ is used where it has one. Raises SimtError with clang's log.
    """
    path = kernels_dir / spec.source
    defines = {**arch.defines(), **dict(spec.defines), "SIMT_SHIM": 1}
    command = [
        *LANGUAGE,
        *("-Xclang", "-ffloat16-excess-precision=none"),
        *_cpu_flags(),
        *SANITIZERS[sanitize][0],
        *(f"-D{name}={value}" for name, value in defines.items()),
        '-DSIMT_SOURCE="kernel.hip"',
        f"-DSIMT_ENTRY={spec.entry}",
        *("-I.", f"-I{SIMT_DIR}"),
    ]

    if compiled.noting is not None:
        how = [each for each in command if each not in _cpu_flags() and str(SIMT_DIR) not in each]
        return Path(compiled.hash_of(how, compiled.text_of(path)))

    def make(made: Path) -> None:
        (made / "kernel.hip").write_text(source.flatten(str(path)), encoding="utf-8")
        program = ["-o", "program", str(SIMT_DIR / "entry.cpp")]
        _clang(sanitize, [*command, *program, "-x", "none", *_runtime(sanitize), "-lm"], made)
        (made / "kernel.hip").unlink()

    key = compiled.hash_of(_identity(sanitize), command, compiled.text_of(path))
    return compiled.entry(key, make) / "program"


def planted(name: str, old: str, new: str, occurrence: int = 0) -> Path:
    """A copy of kernels/ in which one occurrence of `old` in the file `name` was replaced.

    Raises ValueError when there is no such occurrence. The folder's name depends on the sources
    only, so that what is compiled from it stays in the cache.
    """
    texts = {
        str(path.relative_to(KERNELS_DIR)): path.read_text(encoding="utf-8")
        for path in sorted(KERNELS_DIR.rglob("*"))
        if path.suffix in (".h", ".hip")
    }
    parts = texts[name].split(old)
    if occurrence >= len(parts) - 1:
        raise ValueError(f"{name} has {len(parts) - 1} times, {old!r}, not more than {occurrence}")
    texts[name] = old.join(parts[: occurrence + 1]) + new + old.join(parts[occurrence + 1 :])

    def make(made: Path) -> None:
        for path, text in texts.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(text, encoding="utf-8")

    return compiled.entry(compiled.hash_of("planted", texts), make)


def places(text: str, *names: str) -> list[tuple[str, int]]:
    """Where this stands in these files of kernels/: file, and which of its occurrences there."""
    return [
        (name, number)
        for name in names
        for number in range((KERNELS_DIR / name).read_text(encoding="utf-8").count(text))
    ]


def run(
    program: Path,
    params: ctypes.Structure,
    memory: Sequence[Region],
    grid: int,
    block: int,
    seed: int = 1,
    timeout_s: float = 600.0,
) -> None:
    """Runs all work-groups; `memory` is what the kernel may touch, and has the results afterwards.

    A word of `params` (at a multiple of eight bytes) that is an address within `memory` is a
    pointer. Odd seeds keep waves as far apart as barriers allow, even seeds interleave them. Raises
    SimtError with the program's message: a divergence, a sanitizer's report, a crash, too long.
    """
    if compiled.noting is not None:
        regions = [(region.address, region.nbytes) for region in memory]
        compiled.noting.launch_shim(program.name, params, regions, grid, block, seed)
        return
    job = _job(bytes(params), memory, (grid, block, seed))
    result = _run([str(program)], job, timeout_s)
    if result.returncode != 0 or len(result.stdout) != sum(region.nbytes for region in memory):
        raise SimtError(f"status {result.returncode}: {result.stderr.decode(errors='replace')}")
    offset = 0
    for region in memory:
        part = result.stdout[offset : offset + region.nbytes]
        ctypes.memmove(region.address, part, region.nbytes)
        offset += region.nbytes


def _job(params: bytes, memory: Sequence[Region], launch: tuple[int, int, int]) -> bytes:
    """The bytes that job.cpp reads."""
    pointers: list[int] = []
    for offset in range(0, len(params) - 7, 8):
        (word,) = struct.unpack_from("<Q", params, offset)
        for index, region in enumerate(memory):
            if region.address <= word < region.address + region.nbytes:
                pointers += [offset, index, word - region.address]
    numbers = [*launch, len(params), len(memory), len(pointers) // 3]
    numbers += [*(region.nbytes for region in memory), *pointers]
    contents = [ctypes.string_at(region.address, region.nbytes) for region in memory]
    return b"".join([struct.pack(f"<{len(numbers)}Q", *numbers), params, *contents])
