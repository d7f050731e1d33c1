"""RDNA2's machine code: encodings and opcodes, for which tinygrad has no decoder.

AMD, "RDNA 2 Instruction Set Architecture". Each number was read out of what LLVM assembles, and
`rdna2_text` writes an instruction as LLVM reads it: assembled, that gives the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tests.verify.amdgpu.rdna2_opcodes import OPS

_SDWA, _DPP8, _DPP8_FI, _DPP16, _LITERAL = 249, 233, 234, 250, 255
"""Codes of source 0 that announce another word."""


class Field:
    """Bits `high` to `low` of an encoding. `first`: what the number 0 in it stands for."""

    def __init__(self, high: int, low: int, first: int = 0, scale: int = 1) -> None:
        self.low, self.mask = low, (1 << high - low + 1) - 1
        self.first, self.scale = first, scale

    def __get__(self, made: Encoded | None, owner: type | None = None) -> Any:
        if made is None:
            return self
        return (made.bits >> self.low & self.mask) * self.scale + self.first


def _vgpr(high: int, low: int) -> Field:
    return Field(high, low, 256)


_NOTHING = Field(0, 1)


class Encoded:
    """One instruction: `bits` from the lowest address on, `op_name` as LLVM writes it."""

    length: ClassVar[int] = 4
    sources: ClassVar[tuple[str, ...]] = ()
    op: ClassVar[Any] = None

    def __init__(self, bits: int, op_name: str) -> None:
        self.bits, self.op_name = bits, op_name

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def size(self) -> int:
        """Bytes."""
        return self.length

    def __repr__(self) -> str:
        from tests.verify.amdgpu.rdna2_text import text

        return text(self)


class SOP2(Encoded):
    op, sdst, ssrc1, ssrc0 = Field(29, 23), Field(22, 16), Field(15, 8), Field(7, 0)
    sources = ("ssrc0", "ssrc1")


class SOP1(Encoded):
    op, sdst, ssrc0 = Field(15, 8), Field(22, 16), Field(7, 0)
    sources = ("ssrc0",)


class SOPC(Encoded):
    op, ssrc1, ssrc0 = Field(22, 16), Field(15, 8), Field(7, 0)
    sources = ("ssrc0", "ssrc1")


class SOPK(Encoded):
    op, sdst, simm16 = Field(27, 23), Field(22, 16), Field(15, 0)


class SOPP(Encoded):
    op, simm16 = Field(22, 16), Field(15, 0)


class SMEM(Encoded):
    op, sdata, sbase = Field(25, 18), Field(12, 6), Field(5, 0, scale=2)
    glc, dlc, offset, soffset = Field(16, 16), Field(14, 14), Field(52, 32), Field(63, 57)
    length = 8


class VOP1(Encoded):
    op, vdst, src0 = Field(16, 9), _vgpr(24, 17), Field(8, 0)
    sources = ("src0",)


class VOP2(Encoded):
    op, vdst, vsrc1, src0 = Field(30, 25), _vgpr(24, 17), _vgpr(16, 9), Field(8, 0)
    sources = ("src0",)


class VOPC(Encoded):
    op, vsrc1, src0 = Field(24, 17), _vgpr(16, 9), Field(8, 0)
    sources = ("src0",)


class VOP3(Encoded):
    op, clmp, opsel, abs, vdst = (
        *(Field(25, 16), Field(15, 15), Field(14, 11), Field(10, 8)),
        _vgpr(7, 0),
    )
    src0, src1, src2 = Field(40, 32), Field(49, 41), Field(58, 50)
    omod, neg = Field(60, 59), Field(63, 61)
    length, sources = 8, ("src0", "src1", "src2")


class VOP3SDST(VOP3):
    """Comparisons, whose result is a mask, and what reads a lane."""

    vdst = Field(7, 0)


class VOP3SD(Encoded):
    op, clmp, sdst, vdst = Field(25, 16), Field(15, 15), Field(14, 8), _vgpr(7, 0)
    src0, src1, src2 = Field(40, 32), Field(49, 41), Field(58, 50)
    omod, neg = Field(60, 59), Field(63, 61)
    length, sources = 8, ("src0", "src1", "src2")


class VOP3P(Encoded):
    op, clmp, opsel_hi2, opsel = Field(22, 16), Field(15, 15), Field(14, 14), Field(13, 11)
    neg_hi, vdst, opsel_hi, neg = Field(10, 8), _vgpr(7, 0), Field(60, 59), Field(63, 61)
    src0, src1, src2 = Field(40, 32), Field(49, 41), Field(58, 50)
    length, sources = 8, ("src0", "src1", "src2")


class DS(Encoded):
    op, gds, offset1, offset0 = Field(25, 18), Field(17, 17), Field(15, 8), Field(7, 0)
    addr, data0, data1, vdst = _vgpr(39, 32), _vgpr(47, 40), _vgpr(55, 48), _vgpr(63, 56)
    length = 8


class FLAT(Encoded):
    op, slc, glc, dlc, lds = (
        Field(24, 18),
        Field(17, 17),
        Field(16, 16),
        Field(12, 12),
        Field(13, 13),
    )
    offset, saddr = Field(11, 0), Field(54, 48)
    addr, data, vdst = _vgpr(39, 32), _vgpr(47, 40), _vgpr(63, 56)
    length = 8


class SCRATCH(FLAT):
    pass


class GLOBAL(FLAT):
    pass


class MUBUF(Encoded):
    op = Field(25, 18)
    length = 8


class _Dpp16:
    """The word behind VOP1, VOP2 or VOPC with DPP."""

    vsrc0, dpp, fi, bc = _vgpr(39, 32), Field(48, 40), Field(50, 50), Field(51, 51)
    src0_neg, src0_abs, src1_neg, src1_abs = (
        *(Field(52, 52), Field(53, 53), Field(54, 54)),
        Field(55, 55),
    )
    bank_mask, row_mask = Field(59, 56), Field(63, 60)
    length = 8


class _Sdwa:
    """The word behind VOP1 or VOP2 with SDWA."""

    vsrc0, s0, s1 = _vgpr(39, 32), Field(55, 55), Field(63, 63)
    dst_sel, dst_unused, clmp, omod = Field(42, 40), Field(44, 43), Field(45, 45), Field(47, 46)
    src0_sel, src0_sext, src0_neg, src0_abs = (
        *(Field(50, 48), Field(51, 51), Field(52, 52)),
        Field(53, 53),
    )
    src1_sel, src1_sext, src1_neg, src1_abs = (
        *(Field(58, 56), Field(59, 59), Field(60, 60)),
        Field(61, 61),
    )
    length = 8


_variants: dict[str, type[Encoded]] = {}


def _variant(base: type[Encoded], kind: str) -> type[Encoded]:
    """The form of a base with another word behind it."""
    name = f"{base.__name__}_{kind}"
    if name not in _variants:
        _variants[name] = _extended(base, kind, name)
    return _variants[name]


def _extended(base: type[Encoded], kind: str, name: str) -> type[Encoded]:
    more = {"SDWA": _Sdwa, "DPP16": _Dpp16}.get(kind)
    if kind == "LIT":
        low = 8 * base.length
        return type(name, (base,), {"literal": Field(low + 31, low), "length": base.length + 4})
    assert more is not None
    if base is VOPC and kind == "SDWA":
        mask = {"sdst": Field(46, 40), "sd": Field(47, 47), "clmp": _NOTHING, "omod": _NOTHING}
        return type(name, (more, base), mask)
    return type(name, (more, base), {})


_WITH_MASK = {*range(0x128, 0x12B), 0x16D, 0x176, 0x30F, 0x310, 0x319}
"""Opcodes of VOP3 that have a second result, a mask."""
_READLANE = 0x360


# -- decoding ------------------------------------------------------------------------------------


def _vector_form(word: int) -> type[Encoded]:
    if word >> 25 == 0b0111111:
        return VOP1
    return VOPC if word >> 25 == 0b0111110 else VOP2


def _vop3_form(word: int) -> type[Encoded]:
    op = word >> 16 & 0x3FF
    if op in _WITH_MASK:
        return VOP3SD
    return VOP3SDST if op < 0x100 or op == _READLANE else VOP3


def _scalar_form(word: int) -> type[Encoded]:
    special = {0b101111111: SOPP, 0b101111110: SOPC, 0b101111101: SOP1}
    found: type[Encoded] | None = special.get(word >> 23)
    return found or (SOPK if word >> 28 == 0b1011 else SOP2)


def _form(word: int) -> type[Encoded]:
    if not word >> 31:
        return _vector_form(word)
    if word >> 30 == 0b10:
        return _scalar_form(word)
    if word >> 26 == 0b110101:
        return _vop3_form(word)
    if word >> 26 == 0b110111:
        return (FLAT, SCRATCH, GLOBAL, FLAT)[word >> 14 & 3]
    named = {0b111101: SMEM, 0b110011: VOP3P, 0b110110: DS, 0b111000: MUBUF}
    if word >> 26 not in named:
        raise ValueError(f"unknown encoding {word:#010x}")
    return named[word >> 26]


def decode_rdna2(window: bytes) -> Encoded:
    """The instruction at the beginning of these bytes. Raises ValueError."""
    word = int.from_bytes(window[:4], "little")
    base = _form(word)
    bits = int.from_bytes(window, "little")
    ops = OPS[base.__name__.removesuffix("SDST").removesuffix("SD")]
    op_name = ops.get(base.op.__get__(base(bits, "")))
    if op_name is None:
        raise ValueError(f"unknown opcode of {base.__name__}, {word:#010x}")
    return _with_words_behind(base, bits, op_name)


def _with_words_behind(base: type[Encoded], bits: int, op_name: str) -> Encoded:
    made = base(bits, op_name)
    codes = [getattr(made, name) for name in base.sources]
    kind = None
    if base in (VOP1, VOP2, VOPC):
        kind = {_SDWA: "SDWA", _DPP16: "DPP16"}.get(codes[0])
        if codes[0] in (_DPP8, _DPP8_FI):
            raise ValueError("DPP8")
    if kind is None and (_LITERAL in codes or op_name in ("v_fmamk_f32", "v_fmaak_f32")):
        kind = "LIT"
    form = _variant(base, kind) if kind else base
    return form(bits & (1 << 8 * form.length) - 1, op_name)
