"""What instructions add up to: the kind of work that each is, a count for each kind with the bytes
moved, and, by how fast each unit works, the bound that a mix puts on the use of the matrix units.

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
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import lru_cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.lab.listing import Instruction


class Kind(Enum):
    """Who executes an instruction."""

    MATRIX = "matrix"
    TRANSCENDENTAL = "transcendental"
    VECTOR = "vector"
    SCALAR = "scalar"
    SCALAR_MEMORY = "scalar_memory"
    LDS = "lds"
    GLOBAL = "global"
    SCRATCH = "scratch"
    BRANCH = "branch"
    CONTROL = "control"
    """Waits, barriers, hints, cache control: no unit computes or moves anything."""


class NotUnderstoodError(ValueError):
    """An instruction that the table does not have, one without a rate, or one that leads to an
    address in a register.
    """


@dataclass(frozen=True)
class Work:
    """`bytes_per_lane`: moved by a memory instruction. `slots`: issue slots of a vector one."""

    kind: Kind
    bytes_per_lane: int = 0
    slots: int = 1


_MATRIX = "wmma swmmac mfma smfmac dot2 dot2c dot2acc dot4 dot4c dot8 dot8c"
_TRANSCENDENTAL = "exp log rcp rsq sqrt sin cos"
_VECTOR = """
    accvgpr add add3 addc alignbit alignbyte and ashr ashrrev bcnt bfe bfi bfm bfrev bitop3 ceil
    clrexcp cls clz cmp cmpx cndmask ctz cube cubeid cubema cubesc cubetc cvt div ffbh ffbl floor
    fma fmaak fmac fmamk fract frexp interp ldexp lerp lshl lshlrev lshr lshrrev mad madak madmk
    mac max max3 maximum maximum3 maximumminimum maxmin mbcnt med3 min min3 minimum minimum3
    minimummaximum minmax mov movreld movrels movrelsd mqsad msad mul mullit nop not or or3 pack
    perm permlane16 permlane32 permlane64 permlanex16 pipeflush pk prng qsad readfirstlane readlane
    rndne sad sat sub subb subbrev subrev swap swaprel trig trunc writelane xad xnor xor xor3
"""
_SCALAR = """
    abs absdiff add addc addk alloc and andn1 andn2 ashr bcnt0 bcnt1 bfe bfm bitcmp0 bitcmp1
    bitreplicate bitset0 bitset1 brev ceil cls clz cmov cmovk cmp cmpk cselect ctz cvt ff0 ff1
    flbit floor fmaak fmac fmamk getpc getreg lshl lshl1 lshl2 lshl3 lshl4 lshr max maximum maxnum
    min minimum mov movk movreld movrels movrelsd mul mulk nand nor not or orn1 orn2 pack quadmask
    rndne sext setreg sub subb subk trunc version wqm xnor xor
"""
_CONTROL = """
    barrier clause code dcache decperflevel delay denorm endpgm gl1 icache incperflevel
    inst memtime memrealtime nop prefetch round sendmsg sendmsghalt sethalt setkill setprio set
    sleep trap ttracedata wait waitcnt wakeup
"""
_CACHE_CONTROL = re.compile(
    r"(buffer|global)_(gl0_inv|gl1_inv|inv|wb|wbinv|wbl2|invl2|wbinvl1\w*|prefetch_b8)$"
)
_QUARTER_RATE = re.compile(r"v_(mul_lo_[ui]32|mul_hi_[ui]32|mad_(co_|nc_)?[ui]64_[ui]32)(_|$)")
_WIDE = re.compile(r"v_(lshlrev|lshrrev|ashrrev|lshl_add|cmpx?_[a-z]+)_[biu]64(_|$)")
_WIDTH = re.compile(r"_[bfiu](8|16|32|64|96|128)(?=_|$)")
_WORDS = re.compile(r"_(dword(?:x([234]))?|[us]?byte|[us]?short)(?=_|$)")
_TABLE = {
    "v": (
        (Kind.MATRIX, _MATRIX),
        (Kind.TRANSCENDENTAL, _TRANSCENDENTAL),
        (Kind.VECTOR, _VECTOR),
    ),
    "s": (
        (Kind.SCALAR_MEMORY, "load buffer store scratch atc atomic"),
        (Kind.BRANCH, "branch cbranch"),
        (Kind.CONTROL, _CONTROL),
        (Kind.SCALAR, _SCALAR),
    ),
}
_KINDS = {
    unit: {word: kind for kind, words in rows for word in words.split()}
    for unit, rows in _TABLE.items()
}
_MEMORY = {
    "ds": Kind.LDS,
    "global": Kind.GLOBAL,
    "buffer": Kind.GLOBAL,
    "flat": Kind.GLOBAL,
    "scratch": Kind.SCRATCH,
}


@lru_cache(maxsize=4096)
def work_of(mnemonic: str) -> Work:
    """What `mnemonic` does. Raises NotUnderstoodError."""
    if _CACHE_CONTROL.match(mnemonic):
        return Work(Kind.CONTROL)
    unit, _, rest = mnemonic.partition("_")
    if unit in _MEMORY:
        return Work(_MEMORY[unit], _bytes_per_lane(mnemonic))
    words = rest.split("_")
    if unit == "v" and words[0] in ("dual", "s"):  # half of a pair; RDNA4's uniform exp, rcp, ..
        words = words[1:]
    kind = _KINDS.get(unit, {}).get(words[0] if words else "")
    if unit == "s" and words[-1] in ("b128", "b256", "b512"):  # no scalar computes so wide a value
        kind = Kind.SCALAR_MEMORY if kind is Kind.SCALAR_MEMORY else None
    if kind is None:
        raise NotUnderstoodError(f"{mnemonic!r} is not in the table of instructions")
    return Work(kind, slots=_slots(mnemonic) if kind is Kind.VECTOR else 1)


def _slots(mnemonic: str) -> int:
    if _QUARTER_RATE.match(mnemonic):
        return 4
    return 2 if _WIDE.match(mnemonic) else 1


def _bytes_per_lane(mnemonic: str) -> int:
    if re.match(r"ds_(nop|gws_\w+|consume|append)", mnemonic):
        return 0
    twice = 2 if re.match(r"ds_(\w+_2addr|read2|write2|wrxchg2)", mnemonic) else 1
    if width := _WIDTH.search(mnemonic):
        return int(width[1]) // 8 * twice
    if words := _WORDS.search(mnemonic):
        size = 1 if "byte" in words[1] else 2 if "short" in words[1] else 4 * int(words[2] or 1)
        return size * twice
    if re.match(r"ds_(swizzle|addtid|ordered)", mnemonic):
        return 4
    if "_atomic_" in mnemonic:
        return 8 if mnemonic.endswith("_x2") else 4
    raise NotUnderstoodError(f"the bytes that {mnemonic!r} moves are not known")


_ENCODING = re.compile(r"(_(e32|e64|dpp|dpp8|sdwa))+$")


@dataclass(frozen=True)
class Mix:
    """Instructions of one wave by kind; bytes as if all its lanes took part.

    Both halves of a dual-issue pair count as instructions. `vector_slots`: issue slots of the
    vector instructions, where a pair takes one and a slow instruction several. `matrix_names`: how
    often each matrix instruction stands there, whatever its encoding.
    """

    counts: dict[Kind, int]
    vector_slots: int
    dual_pairs: int
    lds_bytes: int
    global_bytes: int
    scratch_bytes: int
    matrix_names: dict[str, int] = field(default_factory=dict)

    def of(self, kind: Kind) -> int:
        """Instructions of one kind."""
        return self.counts.get(kind, 0)

    def beside(self, matrix: str) -> Mix:
        """Where `matrix`, the arch's unit, is not dot products, these are vector instructions."""
        dots = {name: n for name, n in self.matrix_names.items() if "dot" in name}
        if matrix == "dot2" or not dots:
            return self
        alone = sum(count for name, count in dots.items() if "dual" not in name)
        counts = Counter(self.counts)
        counts[Kind.MATRIX] -= sum(dots.values())
        counts[Kind.VECTOR] += sum(dots.values())
        names = {name: n for name, n in self.matrix_names.items() if name not in dots}
        slots = self.vector_slots + alone
        return replace(self, counts=dict(counts), vector_slots=slots, matrix_names=names)

    def as_dict(self) -> dict[str, int]:
        """What is not zero, by name; bytes are those of a whole wave."""
        named = {kind.value: self.of(kind) for kind in Kind}
        for name in ("vector_slots", "dual_pairs", "lds_bytes", "global_bytes", "scratch_bytes"):
            named[name] = getattr(self, name)
        return {name: value for name, value in named.items() if value}


def mix_of(instructions: Iterable[Instruction], wave_size: int) -> Mix:
    """Add up. Raises NotUnderstoodError."""
    counts: Counter[Kind] = Counter()
    moved: Counter[Kind] = Counter()
    matrix: Counter[str] = Counter()
    slots = pairs = 0
    for instruction in instructions:
        works = [work_of(mnemonic) for mnemonic in instruction.mnemonics]
        for mnemonic, work in zip(instruction.mnemonics, works, strict=True):
            counts[work.kind] += 1
            moved[work.kind] += work.bytes_per_lane * wave_size
            if work.kind is Kind.MATRIX:
                matrix[_ENCODING.sub("", mnemonic)] += 1
        slots += max((work.slots for work in works if work.kind is Kind.VECTOR), default=0)
        pairs += len(works) > 1
    return Mix(
        dict(counts),
        slots,
        pairs,
        moved[Kind.LDS],
        moved[Kind.GLOBAL],
        moved[Kind.SCRATCH],
        dict(matrix),
    )


@dataclass(frozen=True)
class Rates:
    """Cycles of one SIMD for one instruction of a wave; bytes per cycle of one compute unit.

    `transcendental_apart`: executed by units beside the vector ones, which a wave keeps busy while
    others go on. `co_executes`: so do the matrix units. `matrix_issue_cycles`: what a matrix
    instruction takes of the vector issue then. `tile_cycles`: for one product of 16 x 16 x 16
    halves: an instruction, or the 64 packed dot products that replace it. `half_operations`: per
    clock of a compute unit, at most.
    """

    tile_cycles: int
    half_operations: int
    matrix_cycles: tuple[tuple[str, int], ...]
    vector_cycles: int
    transcendental_cycles: int
    transcendental_apart: bool
    co_executes: bool
    matrix_issue_cycles: int
    simds_per_cu: int
    cache_bytes_per_cycle: int
    sources: str
    lds_bytes_per_cycle: int = 128

    def matrix_cycles_of(self, mnemonic: str) -> int:
        """Raises NotUnderstoodError."""
        for pattern, cycles in self.matrix_cycles:
            if re.match(pattern, mnemonic):
                return cycles
        raise NotUnderstoodError(f"no rate is known for {mnemonic}")


def _rdna(wmma_cycles: int, half_operations: int, sources: str) -> Rates:
    matrix = [(r"v_(dual_)?dot2", 1)]
    if wmma_cycles:
        matrix.append((r"v_wmma_f32_16x16x16_b?f16", wmma_cycles))
    tile_cycles = wmma_cycles or 64
    return Rates(tile_cycles, half_operations, tuple(matrix), 1, 4, True, False, 1, 2, 128, sources)


def _cdna(mfma_cycles: int, half_operations: int, cache_bytes: int, sources: str) -> Rates:
    matrix = (
        (r"v_mfma_f32_16x16x16_?b?f16", mfma_cycles),
        (r"v_mfma_f32_32x32x8_?b?f16", 2 * mfma_cycles),  # twice the products
        (r"v_dot2", 4),
    )
    return Rates(
        *(mfma_cycles, half_operations, matrix, 4, 16, False, True, 4, 4, cache_bytes, sources)
    )


FAMILIES = {
    "RDNA2": _rdna(0, 256, "[cores] [rdna] [isa]"),
    "RDNA3": _rdna(32, 512, "[calc] [cores] [rdna] [isa]"),
    "RDNA3.5": _rdna(32, 512, "[calc] [cores] [rdna] [isa], as RDNA3"),
    "RDNA4": _rdna(16, 1024, "[calc] [cores] [rdna] [isa]"),
    "CDNA2": _cdna(32, 1024, 64, "[calc] [prof] [llvm]"),
    "CDNA3": _cdna(16, 2048, 128, "[calc] [prof] [llvm]"),
    "CDNA4": _cdna(16, 4096, 128, "[prof] [llvm]"),
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
    """Raises NotUnderstoodError."""
    if arch.family not in FAMILIES:
        raise NotUnderstoodError(f"no rates are known for {arch.family}")
    return FAMILIES[arch.family]


def cycles_of(mix: Mix, arch: Arch) -> Cycles:
    """What `mix` takes of each unit. Raises NotUnderstoodError."""
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
