"""Machine code to instructions, with names that all families share: by tinygrad's decoders, and by
one of our own for RDNA2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.arch import amd_table
from tests.verify.amdgpu import forms
from tests.verify.amdgpu.errors import UnsupportedError
from tests.verify.amdgpu.rdna2 import decode_rdna2

FAMILIES = {
    gfx: "cdna" if row.family.startswith("CDNA") else row.family.lower().partition(".")[0]
    for gfx, row in amd_table().items()
}
"""By gfx id: "rdna2", "rdna3", "rdna4" or "cdna"."""

_RDNA4_TO_COMMON = {
    "V_MAD_CO_U64_U32": "V_MAD_U64_U32",
    "V_MAD_CO_I64_I32": "V_MAD_I64_I32",
    "V_MAX_NUM_F32": "V_MAX_F32",
    "V_MIN_NUM_F32": "V_MIN_F32",
    "V_MAX3_NUM_F32": "V_MAX3_F32",
    "V_MIN3_NUM_F32": "V_MIN3_F32",
    "V_MED3_NUM_F32": "V_MED3_F32",
    "V_DUAL_MAX_NUM_F32": "V_DUAL_MAX_F32",
    "V_DUAL_MIN_NUM_F32": "V_DUAL_MIN_F32",
    "S_ADD_CO_I32": "S_ADD_I32",
    "S_SUB_CO_I32": "S_SUB_I32",
    "S_ADD_CO_U32": "S_ADD_U32",
    "S_SUB_CO_U32": "S_SUB_U32",
    "S_ADD_CO_CI_U32": "S_ADDC_U32",
    "S_SUB_CO_CI_U32": "S_SUBB_U32",
    "S_ADDK_CO_I32": "S_ADDK_I32",
}
_OLD_TO_COMMON = {
    "V_CVT_PKRTZ_F16_F32": "V_CVT_PK_RTZ_F16_F32",
    "V_DOT2C_F32_F16": "V_DOT2ACC_F32_F16",
    "S_ANDN2_B32": "S_AND_NOT1_B32",
    "S_ANDN2_B64": "S_AND_NOT1_B64",
    "S_ORN2_B32": "S_OR_NOT1_B32",
    "S_ORN2_B64": "S_OR_NOT1_B64",
    "S_ANDN2_SAVEEXEC_B32": "S_AND_NOT1_SAVEEXEC_B32",
    "S_ANDN2_SAVEEXEC_B64": "S_AND_NOT1_SAVEEXEC_B64",
    "S_ORN2_SAVEEXEC_B32": "S_OR_NOT1_SAVEEXEC_B32",
    "S_ORN2_SAVEEXEC_B64": "S_OR_NOT1_SAVEEXEC_B64",
}
_CDNA_TO_COMMON = {
    **_OLD_TO_COMMON,
    "V_ADD_U32": "V_ADD_NC_U32",
    "V_SUB_U32": "V_SUB_NC_U32",
    "V_SUBREV_U32": "V_SUBREV_NC_U32",
    "V_ADD_U16": "V_ADD_NC_U16",
    "V_SUB_U16": "V_SUB_NC_U16",
    "V_MAD_LEGACY_U16": "V_MAD_U16",
    "V_ADDC_CO_U32": "V_ADD_CO_CI_U32",
    "V_SUBB_CO_U32": "V_SUB_CO_CI_U32",
    "V_SUBBREV_CO_U32": "V_SUBREV_CO_CI_U32",
    "V_ACCVGPR_READ": "V_ACCVGPR_READ_B32",
    "V_ACCVGPR_WRITE": "V_ACCVGPR_WRITE_B32",
    "V_ACCVGPR_MOV_B32": "V_ACCVGPR_MOV_B32",
    "V_MAD_MIX_F32": "V_FMA_MIX_F32",
    "V_MAD_MIXLO_F16": "V_FMA_MIXLO_F16",
    "V_MAD_MIXHI_F16": "V_FMA_MIXHI_F16",
    "V_MFMA_F32_16X16X16F16": "V_MFMA_F32_16X16X16_F16",
    "V_MFMA_F32_16X16X16BF16_1K": "V_MFMA_F32_16X16X16_BF16",
    "V_MFMA_F32_16X16X16_BF16_1K": "V_MFMA_F32_16X16X16_BF16",
    "V_MFMA_F32_32X32X8F16": "V_MFMA_F32_32X32X8_F16",
    "V_MFMA_F32_32X32X8BF16_1K": "V_MFMA_F32_32X32X8_BF16",
    "V_MFMA_F32_32X32X8_BF16_1K": "V_MFMA_F32_32X32X8_BF16",
}
# tinygrad's table is CDNA4's; these opcodes mean something else on gfx90a.
_GFX90A_TO_COMMON = {
    **_CDNA_TO_COMMON,
    "V_DOT2C_F32_BF16": "V_MAC_F32",
    "V_FMAMK_F32": "V_MADMK_F32",
    "V_FMAAK_F32": "V_MADAK_F32",
}
_GFX90A_MATRIX = {0xD3E6: 0xD3E0, 0xD3E7: 0xD3E1}
"""High halves of gfx90a's MFMA with bf16_1k, and of the same on CDNA3."""
_COMMON = {
    "gfx90a": _GFX90A_TO_COMMON,
    "gfx942": _CDNA_TO_COMMON,
    "gfx950": _CDNA_TO_COMMON,
    "rdna2": _OLD_TO_COMMON,
    "rdna3": {},
    "rdna4": _RDNA4_TO_COMMON,
}
_BUFFER_GL0_INV = 0xE0AC0000


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `name` is the common one, `form` the class of its encoding (VOP3,
    SOP2_LIT, ...), `numbers` what stands in its fields; a register as its 9-bit source code."""

    address: int
    size: int
    name: str
    form: str
    family: str
    raw: Any
    numbers: dict[str, int]

    def get(self, field: str, default: int = 0) -> int:
        """A field as the number that stands for it."""
        return self.numbers.get(field, default)

    def has(self, field: str) -> bool:
        """Whether this form has the field."""
        return field in self.numbers

    @property
    def is_vop3(self) -> bool:
        """One of the long forms, whose 16-bit operands are chosen by op_sel."""
        return self.form.startswith("VOP3")

    def __str__(self) -> str:
        return f"{self.address:#x}: {self.raw!r}"


_LENGTHS = (4, 8, 12, 16)
_known: dict[tuple[str, bytes], Instruction] = {}
"""By a GPU and an instruction's own bytes; at address 0."""
_MOST_KNOWN = 1 << 17


def decode(text: bytes, address: int, gfx: str) -> list[Instruction]:
    """Every instruction of `text`, whose first byte has this address. Raises UnsupportedError."""
    found: list[Instruction] = []
    at = 0
    while at < len(text):
        ins = _instruction(text[at : at + 16], address + at, gfx)
        name, form, family = ins.name, ins.form, ins.family
        found.append(Instruction(address + at, ins.size, name, form, family, ins.raw, ins.numbers))
        at += ins.size
    return found


def _instruction(window: bytes, address: int, gfx: str) -> Instruction:
    for length in _LENGTHS:
        known = _known.get((gfx, window[:length]))
        if known is not None and known.size == length:
            return known
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    made = _decoded(_as_cdna3(window, gfx), address, gfx)
    _known[gfx, window[: made.size]] = made
    return made


def _decoded(window: bytes, address: int, gfx: str) -> Instruction:
    family = FAMILIES[gfx]
    if int.from_bytes(window[:4], "little") == _BUFFER_GL0_INV and family == "rdna3":
        return Instruction(0, 8, "BUFFER_GL0_INV", "MUBUF", family, None, {})
    try:
        raw = decode_rdna2(window) if family == "rdna2" else forms.decode(window, family)
    except (ValueError, AssertionError) as error:
        words = window[:8].hex(" ", 4)
        raise UnsupportedError(f"cannot decode {words} at {address:#x}: {error}") from error
    form = type(raw).__name__
    name = "V_DUAL" if "VOPD" in form else raw.op_name.upper()
    name = name.removesuffix("_E32").removesuffix("_E64")
    common = _COMMON[gfx if family == "cdna" else family].get(name, name)
    if form == "SCRATCH" and gfx == "gfx90a":
        common = f"GFX90A_{name}"  # no bit there says that an address register is used
    return Instruction(0, raw.size(), common, form, family, raw, forms.numbers(raw))


def _as_cdna3(window: bytes, gfx: str) -> bytes:
    high = int.from_bytes(window[2:4], "little") if gfx == "gfx90a" else 0
    if high in _GFX90A_MATRIX:
        return window[:2] + _GFX90A_MATRIX[high].to_bytes(2, "little") + window[4:]
    return window
