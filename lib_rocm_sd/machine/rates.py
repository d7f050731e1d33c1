"""How fast each unit works, per architecture family, with where that is said; and the bound that a
loop's instruction mix puts on the use of the matrix units.

Sources, by the letters that the rows of the table name:
 [calc]  AMD, amd_matrix_instruction_calculator (github.com/ROCm): execution cycles per instruction,
         and whether vector instructions can execute beside it. The cycles of MFMA are also the
         passes (of 4 cycles) in "AMD Instinct MI200 ISA" and "MI300 ISA", 7.1.
 [cores] AMD, "Using the Matrix Cores of AMD RDNA 4 architecture GPUs" (gpuopen.com): half-precision
         operations per clock and compute unit: RDNA2 256, RDNA3 512, RDNA4 1024.
 [rdna]  AMD, "RDNA architecture" white paper, 2019: SIMD32, one wave32 instruction per clock; the
         transcendental units beside it work at a quarter of that rate; vector L0 cache with lines
         of 128 bytes and twice GCN's load bandwidth of 64 bytes per clock.
 [isa]   AMD, "RDNA3 ISA" 12.1 and "RDNA4 ISA" 12.1, local data share: two sets of 32 banks of
         dwords, one set to a pair of SIMDs, each bank one access per clock. "RDNA3 ISA" 7.6: dual
         issue.
 [prof]  AMD, ROCm Compute Profiler, analysis configs of gfx90a, gfx942 and gfx950: peaks per clock
         and compute unit of LDS (128 bytes), vector L1 (64, 128, 128 bytes), half-precision MFMA
         (1024, 2048, 4096 operations) and vector units (64 lanes).
 [llvm]  LLVM, SISchedule.td: transcendental instructions of CDNA take four times a vector one's
         cycles; gfx950's 16x16x16 takes the passes of gfx942's (its doubled peak is that of
         16x16x32).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.machine.classify import Kind
from lib_rocm_sd.machine.mix import Mix


class UnknownRateError(ValueError):
    """No rate is given for this family or this matrix instruction."""


@dataclass(frozen=True)
class Rates:
    """Cycles of one SIMD for one instruction of a wave; bytes per cycle of one compute unit.

    `transcendental_apart`: executed by units beside the vector ones, which a wave keeps busy while
    others go on. `co_executes`: so do the matrix units. `matrix_issue_cycles`: what a matrix
    instruction takes of the vector issue then. `tile_cycles`: for one product of 16 x 16 x 16
    halves: an instruction, or the 64 packed dot products that replace it.
    """

    tile_cycles: int
    matrix_cycles: tuple[tuple[str, int], ...]
    vector_cycles: int
    transcendental_cycles: int
    transcendental_apart: bool
    co_executes: bool
    matrix_issue_cycles: int
    simds_per_cu: int
    lds_bytes_per_cycle: int
    cache_bytes_per_cycle: int
    sources: str

    def matrix_cycles_of(self, mnemonic: str) -> int:
        """Raises UnknownRateError."""
        for pattern, cycles in self.matrix_cycles:
            if re.match(pattern, mnemonic):
                return cycles
        raise UnknownRateError(f"no rate is known for {mnemonic}")


def _rdna(wmma_cycles: int, sources: str) -> Rates:
    matrix = [(r"v_(dual_)?dot2", 1)]
    if wmma_cycles:
        matrix.append((r"v_wmma_f32_16x16x16_b?f16", wmma_cycles))
    tile_cycles = wmma_cycles or 64
    return Rates(tile_cycles, tuple(matrix), 1, 4, True, False, 1, 2, 128, 128, sources)


def _cdna(mfma_cycles: int, cache_bytes_per_cycle: int, sources: str) -> Rates:
    matrix = (
        (r"v_mfma_f32_16x16x16_?b?f16", mfma_cycles),
        (r"v_mfma_f32_32x32x8_?b?f16", 2 * mfma_cycles),  # twice the products
        (r"v_dot2", 4),
    )
    return Rates(mfma_cycles, matrix, 4, 16, False, True, 4, 4, 128, cache_bytes_per_cycle, sources)


FAMILIES = {
    "RDNA2": _rdna(0, "[cores] [rdna] [isa]"),
    "RDNA3": _rdna(32, "[calc] [cores] [rdna] [isa]"),
    "RDNA3.5": _rdna(32, "[calc] [cores] [rdna] [isa], as RDNA3"),
    "RDNA4": _rdna(16, "[calc] [cores] [rdna] [isa]"),
    "CDNA2": _cdna(32, 64, "[calc] [prof] [llvm]"),
    "CDNA3": _cdna(16, 128, "[calc] [prof] [llvm]"),
    "CDNA4": _cdna(16, 128, "[prof] [llvm]"),
}

ASSUMPTIONS = (
    "bound_serial: a SIMD's matrix and vector instructions never overlap, whichever wave they are"
    " of: matrix / max(matrix + vector + transcendental, LDS, cache) cycles.",
    "bound_overlapped: with waves enough, all units work side by side, each instruction only taking"
    " its issue: matrix / max(matrix, vector issue, transcendental, LDS, cache) cycles.",
    "bound: the one that holds for the family: serial on RDNA, whose WMMA does not execute beside"
    " vector instructions, overlapped on CDNA, whose MFMA does.",
    "Both sides of a branch inside of a loop are counted; est. usual is the bound of a pass, the"
    " cheapest that reads or writes global memory.",
    "Latencies, waits, barriers, instruction fetch, scalar instructions, bank conflicts and cache"
    " misses are not counted; all lanes take part.",
)


@dataclass(frozen=True)
class Cycles:
    """What one pass of a wave through a loop takes of each unit, in cycles of its SIMD.

    LDS and cache serve all SIMDs of a compute unit: their cycles are those of one wave on each.
    """

    matrix: float
    vector: float
    transcendental: float
    issue: float
    lds: float
    cache: float
    co_executes: bool

    @property
    def serial(self) -> float:
        """Matrix and vector instructions one after another."""
        return max(self.matrix + self.vector + self.transcendental, self.lds, self.cache)

    @property
    def overlapped(self) -> float:
        """All units side by side."""
        return max(self.matrix, self.issue, self.transcendental, self.lds, self.cache)

    @property
    def total(self) -> float:
        """The one of both that holds for the family."""
        return self.overlapped if self.co_executes else self.serial

    @property
    def limited_by(self) -> str:
        """The unit that `total` waits for."""
        arithmetic = {"serial matrix and vector": self.serial}
        if self.co_executes:
            arithmetic = {"matrix": self.matrix, "vector issue": self.issue}
            arithmetic["transcendental"] = self.transcendental
        every = {"LDS": self.lds, "cache": self.cache}
        return next(name for name, cycles in (arithmetic | every).items() if cycles == self.total)

    def plus(self, other: Cycles, passes: float) -> Cycles:
        """Together with so many passes of `other`."""
        units = [each.name for each in fields(self) if each.name != "co_executes"]
        return replace(
            self,
            **{name: getattr(self, name) + passes * getattr(other, name) for name in units},
        )

    def bounds(self) -> dict[str, float]:
        """Bounds on the share of time in which the matrix units work; empty where there is none."""
        if not self.matrix:
            return {}
        return {
            "bound": self.matrix / self.total,
            "bound_serial": self.matrix / self.serial,
            "bound_overlapped": self.matrix / self.overlapped,
        }


def rates_of(arch: Arch) -> Rates:
    """Raises UnknownRateError."""
    if arch.family not in FAMILIES:
        raise UnknownRateError(f"no rates are known for {arch.family}")
    return FAMILIES[arch.family]


def cycles_of(mix: Mix, arch: Arch) -> Cycles:
    """What `mix` takes of each unit. Raises UnknownRateError."""
    rates, mix = rates_of(arch), mix.beside(arch.matrix)
    matrix = sum(rates.matrix_cycles_of(name) * count for name, count in mix.matrix_names.items())
    vector = mix.vector_slots * rates.vector_cycles
    transcendental = mix.of(Kind.TRANSCENDENTAL) * rates.transcendental_cycles
    issue = mix.of(Kind.MATRIX) * rates.matrix_issue_cycles + vector
    if rates.transcendental_apart:
        issue += mix.of(Kind.TRANSCENDENTAL) * rates.vector_cycles
    else:
        issue += transcendental
    return Cycles(
        matrix,
        vector,
        transcendental,
        issue,
        mix.lds_bytes * rates.simds_per_cu / rates.lds_bytes_per_cycle,
        mix.global_bytes * rates.simds_per_cu / rates.cache_bytes_per_cycle,
        rates.co_executes,
    )
