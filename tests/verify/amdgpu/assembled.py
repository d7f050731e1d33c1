"""A few instructions, assembled and executed on registers that a test fills: no kernel around."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.verify.amdgpu.decode import decode
from tests.verify.amdgpu.errors import ExecutionError
from tests.verify.amdgpu.executor import compile_step
from tests.verify.amdgpu.hazards import LdsMemory
from tests.verify.amdgpu.lds import LdsSpace
from tests.verify.amdgpu.loader import FloatMode
from tests.verify.amdgpu.memory import Memory
from tests.verify.amdgpu.races import Races
from tests.verify.amdgpu.state import Waves
from tests.verify.amdgpu.vmem import Space

Array = np.ndarray[Any, Any]
ASSEMBLER = "clang-19"
USUAL_MODE = FloatMode(0, 0, 3, 3, True, True)
"""What compilers ask for: nearest even, denormals kept."""


def missing() -> str | None:
    """Why nothing can be assembled here."""
    if importlib.util.find_spec("tinygrad") is None:
        return "tinygrad, which decodes instructions, is not installed"
    return None if shutil.which(ASSEMBLER) else f"{ASSEMBLER} is not installed"


@lru_cache(maxsize=512)
def assemble(gfx: str, text: str) -> bytes:
    """The machine code of these lines. Raises ValueError with what the assembler says."""
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "a.s"), Path(folder, "a.o")
        source.write_text(f"{text}\n", encoding="utf-8")
        command = [ASSEMBLER, "--target=amdgcn-amd-amdhsa", f"-mcpu={gfx}", "-x", "assembler"]
        done = subprocess.run(
            [*command, "-c", str(source), "-o", str(result)], capture_output=True, timeout=600
        )
        if done.returncode:
            raise ValueError(done.stderr.decode())
        return _text_of(result.read_bytes())


def _text_of(code: bytes) -> bytes:
    """The .text section: the only one with instructions (SHF_EXECINSTR)."""
    (sections_at,) = struct.unpack_from("<Q", code, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", code, 0x3A)
    for index in range(count):
        at = sections_at + index * entry_bytes
        (flags,) = struct.unpack_from("<Q", code, at + 8)
        offset, size = struct.unpack_from("<QQ", code, at + 24)
        if flags & 4:
            return code[offset : offset + size]
    raise ValueError("no .text")


@dataclass
class Machine:
    """Waves of one work-group and what they can reach. `lines` executes text on them."""

    gfx: str
    waves: int = 1
    lds_bytes: int = 1024
    mode: FloatMode = USUAL_MODE
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        self.lanes = 64 if self.gfx.startswith("gfx9") else 32
        self.b = Waves(512, self.waves, self.lanes)
        self.b.wave[...] = np.arange(self.waves)
        self.lds = LdsSpace(LdsMemory(1, self.lds_bytes))
        races = Races(self.memory, two_caches=not self.gfx.startswith("gfx9"))
        self.space = Space(self.memory, 64, races=races)

    def set_v(self, **values: Any) -> Machine:
        """v3=..., a3=...: numbers or arrays (lanes,), of float32, int32 or uint32."""
        for name, value in values.items():
            array = np.asarray(value)
            if array.dtype == np.float64:
                array = array.astype(np.float32)
            if array.dtype.itemsize != 4:
                array = (array.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)
            register = int(name[1:]) + (256 if name[0] == "a" else 0)
            self.b.put_v(register, array.view(np.uint32))
        return self

    def set_s(self, **values: int) -> Machine:
        """s3=number; a name in capitals is a pair: S4=..."""
        for name, value in values.items():
            register = int(name[1:])
            self.b.write_s(register, np.uint32(value & 0xFFFFFFFF))
            if name[0] == "S":
                self.b.write_s(register + 1, np.uint32(value >> 32))
        return self

    def active(self, mask: Any) -> Machine:
        """Only these lanes."""
        self.b.write_mask(126, np.broadcast_to(np.asarray(mask, bool), self.b.exec.shape))
        return self

    def lines(self, text: str) -> Machine:
        """Execute them one after the other; a barrier is passed at once. Raises ExecutionError."""
        return self.code(assemble(self.gfx, text))

    def code(self, machine_code: bytes) -> Machine:
        """Likewise."""
        for ins in decode(machine_code, 0, self.gfx):
            try:
                step = compile_step(ins, 0, {}, self.space, self.lds, self.mode)
                with np.errstate(all="ignore"):
                    if step(self.b) == -1:
                        self.b.epoch += 1
                        self.space.races.passed(self.b)
            except ExecutionError as error:
                error.where = str(ins)
                raise
        return self

    def v(self, register: int, dtype: Any = np.float32, wave: int = 0) -> Array:
        """A register's lanes (256 and up: accumulation registers)."""
        return self.b.v[register, wave].view(dtype).copy()

    def s(self, register: int) -> int:
        """A scalar register of wave 0."""
        return int(self.b.s[register, 0])
