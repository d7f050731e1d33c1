"""A card of paper: thunk.c in the place of libhsakmt, under AMD's own HSA and HIP runtimes, and
what executes the kernels that processes dispatch through it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.verify.amdgpu import executor, loader
from tests.verify.amdgpu.errors import EndlessError, ExecutionError, OutOfBoundsError
from tests.verify.amdgpu.memory import Memory

SOURCE = Path(__file__).parent / "thunk.c"
CARDS = {
    "gfx1030": "10 3 0 40 2 16 32 143",
    "gfx90a": "9 0 10 104 4 8 64 141",
    "gfx1100": "11 0 0 48 4 16 32 145",
    "gfx942": "9 4 2 304 4 8 64 141",
}
"""What thunk.c is told: the gfx id, CUs, SIMDs of a CU, waves of a SIMD, lanes of a wave, and the
family, which newer runtimes look at (AMDGPU_FAMILY_* of amdgpu_drm.h).
"""
_WORD = struct.Struct("<Q")
_PACKET = struct.Struct("<HHHHHHIIIIIQQQQ")
"""HSA's kernel dispatch packet: header, setup, work-group, grid, segments, addresses."""
_LINK = struct.Struct("<QQQQ")
_LEAST_FAULT = 4096


class MissingError(Exception):
    """What this machine lacks for it, in words."""


def built(folder: Path, include: Path) -> Path:
    """The library, with the interfaces of Debian's headers in `include`. Raises MissingError,
    CalledProcessError.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "clang-19"))), None)
    if compiler is None or not (include / "hsakmt.h").is_file():
        raise MissingError("no C compiler" if compiler is None else f"{include} has no hsakmt.h")
    made, versions = folder / "libhsakmt.so.1", folder / "versions"
    versions.write_text("HSAKMT_1 { global: hsaKmt*; amdgpu_*; drm*; local: *; };\n", "utf-8")
    linked = (f"-Wl,-soname,{made.name}", f"-Wl,--version-script={versions}", "-lpthread")
    command = [compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", f"-I{include}", str(SOURCE)]
    subprocess.run([*command, "-o", str(made), *linked], check=True, capture_output=True)
    return made


class Paper:
    """Executes what processes of `environment(gfx)` dispatch, until `end`.

    `launched`: each kernel's name, work-groups and block; `wrong`: what the executor raised.
    """

    def __init__(self) -> None:
        self.launched: list[tuple[str, int, int]] = []
        self.wrong: list[str] = []
        self._folder = tempfile.TemporaryDirectory()  # a socket's name has 107 characters at most
        self._notes, self._path = (Path(self._folder.name, name) for name in ("notes", "socket"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._path))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def environment(self, gfx: str) -> dict[str, str]:
        """The variables of a process that has this card."""
        return {
            "ROCM_SD_PAPER_CARD": CARDS[gfx],
            "ROCM_SD_PAPER_SOCKET": str(self._path),
            "ROCM_SD_PAPER_NOTES": str(self._notes),
            "HSA_ENABLE_SDMA": "0",
        }

    def notes(self) -> list[str]:
        """The packets that were seen, and what was asked and is not supported."""
        with suppress(FileNotFoundError):
            return self._notes.read_text(encoding="utf-8").splitlines()
        return []

    def end(self) -> None:
        """Nothing more is executed."""
        self._server.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                process, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(process,), daemon=True).start()

    def _serve(self, process: socket.socket) -> None:
        with suppress(BrokenPipeError), process, process.makefile("rb") as stream:
            while len(head := stream.read(32)) == 32:
                pid, debugged, packet, count = struct.unpack("<4Q", head)
                blocks = list(struct.iter_unpack("<QQ", stream.read(16 * count)))
                with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
                    answer = self._execute(_Process(memory.fileno(), debugged, blocks), packet)
                if answer is not None:  # else the dispatch never completes
                    process.sendall(_WORD.pack(answer))

    def _execute(self, process: _Process, at: int) -> int | None:
        """0, or the address that the process must not touch; None where the kernel hangs."""
        packet = process.read(at, _PACKET.size)
        (_, _, block, *flat, _, grid, y, z, _, _, kernel, arguments, _, _) = _PACKET.unpack(packet)
        found = process.kernel(kernel)
        if found is None:
            self.launched.append(_own(process, arguments))
            return 0
        code, entry = found
        size = struct.unpack("<I", process.read(kernel + 8, 4))[0]
        self.launched.append((entry, grid // block, block))
        if [*flat, y, z] != [1, 1, 1, 1]:
            self.wrong.append(f"{entry}: a launch of more than one dimension")
            return _LEAST_FAULT
        kernarg = process.read(arguments, size)
        memory = process.memory()
        try:
            executor.run(code, entry, kernarg, grid // block, block, memory, packet=packet)
        except ExecutionError as error:
            self.wrong.append(f"{entry}: {error}")
            if isinstance(error, EndlessError):
                return None
            named = re.search(r"at (0x[0-9a-f]+)", str(error))
            is_access = named and isinstance(error, OutOfBoundsError)
            return int(named[1], 16) if is_access and named else _LEAST_FAULT
        process.keep(memory)
        return 0


class _Process:
    """A process by its memory, an open file; `debugged`: where its r_debug is; `blocks`: what it
    has allocated for the card.
    """

    def __init__(self, file: int, debugged: int, blocks: list[tuple[int, ...]]) -> None:
        self._file, self._debugged, self._blocks = file, debugged, blocks
        self._before: dict[int, bytes] = {}

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self._file, size, at)

    def write(self, at: int, data: bytes) -> None:
        os.pwrite(self._file, data, at)

    def kernel(self, at: int) -> tuple[bytes, str] | None:
        """The code object and the name of the kernel whose descriptor is there, by the runtime's
        list for debuggers (LLVM, "User Guide for AMDGPU Backend", Loaded Code Object Path URI).
        """
        (link,) = _WORD.unpack(self.read(self._debugged + 8, 8))
        while link:
            base, name_at, _, link = _LINK.unpack(self.read(link, _LINK.size))
            name = self.read(name_at, 512).partition(b"\0")[0].decode()
            kind, _, place = name.partition("#")
            if not kind.startswith("memory://"):
                continue
            offset, size = (int(part.partition("=")[2], 0) for part in place.split("&"))
            code = self.read(offset, size)
            for symbol, (value, _) in loader.symbols(code).items():
                if symbol.endswith(".kd") and base + value == at:
                    return code, symbol.removesuffix(".kd")
        return None

    def memory(self) -> Memory:
        """A copy of the blocks. Not of the program's own memory that it has freed and the runtime
        still holds registered, as it does for a while. What is registered may overlap.
        """
        made, end = Memory(), 0
        for at, size in sorted(self._blocks):
            first, end = max(at, end), max(at + size, end)
            if first < at + size:
                with suppress(OSError):
                    self._before[first] = self.read(first, at + size - first)
                    made.add(first, np.frombuffer(bytearray(self._before[first]), np.uint8))
        return made

    def keep(self, memory: Memory) -> None:
        """Write back what was changed of them, and nothing else: the process goes on meanwhile."""
        for buffer in memory.buffers:
            before = np.frombuffer(self._before[buffer.address], np.uint8)
            places = np.flatnonzero(before != buffer.data)
            for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
                if len(run):
                    self.write(
                        buffer.address + int(run[0]), buffer.data[run[0] : run[-1] + 1].tobytes()
                    )


def _own(process: _Process, arguments: int) -> tuple[str, int, int]:
    """Done in the place of HSA's own copies and fills, which are assembled into it and are in no
    code object: the first words of their arguments say where each phase begins and the last ends.
    """
    words = struct.unpack("<11Q", process.read(arguments, 88))
    for name, last in (("copy", 8), ("copy of bytes", 4)):
        size = words[last] - words[0]
        if 0 < size == words[last + 1] - words[1]:
            process.write(words[1], process.read(words[0], size))
            return f"HSA's {name}", size, 1
    size = words[2] - words[0]
    process.write(words[0], struct.pack("<I", words[3] & 0xFFFFFFFF) * (size // 4))
    return "HSA's fill", size, 1
