"""What kind of work an instruction is: one table of mnemonics. One that is not in it raises."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


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


class UnknownInstructionError(ValueError):
    """A mnemonic that the table does not have."""


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
    """What `mnemonic` does. Raises UnknownInstructionError."""
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
        raise UnknownInstructionError(f"{mnemonic!r} is not in the table of instructions")
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
    raise UnknownInstructionError(f"the bytes that {mnemonic!r} moves are not known")
