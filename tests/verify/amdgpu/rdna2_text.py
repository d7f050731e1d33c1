"""RDNA2's instructions as LLVM's assembler reads them, with every field of theirs."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.verify.amdgpu.rdna2 import Encoded
from tests.verify.amdgpu.rdna2_opcodes import THREE_SOURCES, TWO_SOURCES

_NAMED = {107: "vcc_hi", 124: "m0", 125: "null", 127: "exec_hi", 248: "0.15915494", 253: "src_scc"}
_FLOATS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0")
_SELECTS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")
_ALONE = ("s_barrier", "s_icache_inv", "s_code_end", "buffer_gl0_inv", "buffer_gl1_inv", "s_endpgm")
_CARRYING = re.compile(r"v_(add|sub|subrev)_co_ci_u32")

Parts = tuple[str, list[str], list[str]]
"""Mnemonic, operands, modifiers."""


def text(made: Encoded) -> str:
    """One line."""
    if made.op_name in _ALONE:
        return made.op_name
    form = type(made).__name__
    write = next(write for start, write in _WRITERS if form.startswith(start))
    name, operands, more = write(made)
    return " ".join([name, ", ".join(operands), *more])


def _operand(made: Encoded, code: int, words: int = 1) -> str:
    """A register of so many words, a constant, or the literal."""
    if code == 255:
        return f"{made.literal:#x}"
    if code in (106, 126):
        return {106: "vcc", 126: "exec"}[code] + ("" if words == 2 else "_lo")
    if code in _NAMED:
        return _NAMED[code]
    if 240 <= code < 248:
        return _FLOATS[code - 240]
    if 128 <= code <= 208:
        return str(code - 128 if code <= 192 else 192 - code)
    kind, first = next((k, f) for k, f in (("v", 256), ("ttmp", 108), ("s", 0)) if code >= f)
    at = code - first
    return f"{kind}{at}" if words == 1 else f"{kind}[{at}:{at + words - 1}]"


def _flags(made: Encoded, *names: str) -> list[str]:
    return [name for name in names if getattr(made, name)]


def _list(bits: int, count: int) -> str:
    return "[" + ",".join(str(bits >> place & 1) for place in range(count)) + "]"


# -- scalar and memory ---------------------------------------------------------------------------


def _sop(made: Encoded) -> Parts:
    width = 2 if re.search(r"[biu]64$", made.op_name) else 1
    operands = [_operand(made, made.sdst, width)] if hasattr(made, "sdst") else []
    for place, field in enumerate(made.sources):
        amount = place == 1 and re.match(r"s_(lsh[lr]|ashr)_", made.op_name)
        operands.append(_operand(made, getattr(made, field), 1 if amount else width))
    return made.op_name, operands, []


def _sopk(made: Encoded) -> Parts:
    return made.op_name, [_operand(made, made.sdst), f"{made.simm16:#x}"], []


def _sopp(made: Encoded) -> Parts:
    return made.op_name, [str(made.simm16)], []


def _words(name: str) -> int:
    """Of the data of a memory access."""
    found = re.search(r"(?:dwordx|_b)(\d+)$", name)
    if "atomic" in name:
        return (2 if "cmpswap" in name else 1) * (2 if name.endswith("_x2") else 1)
    size = int(found[1]) if found else 1
    return size if "dwordx" in name else max(1, size // 32)


def _smem(made: Encoded) -> Parts:
    offset = made.offset - (1 << 21 if made.offset >> 20 else 0)
    where, more = f"{offset:#x}", []
    if made.soffset != 125:
        where, more = _operand(made, made.soffset), [f"offset:{offset:#x}"] * bool(offset)
    data = _operand(made, made.sdata, _words(made.op_name))
    operands = [data, _operand(made, made.sbase, 2), where]
    return made.op_name, operands, more + _flags(made, "glc", "dlc")


def _ds(made: Encoded) -> Parts:
    name, words = made.op_name, _words(made.op_name)
    two = re.match(r"ds_(read|write)2", name) is not None
    operands, more = [_operand(made, made.addr)], []
    if "write" not in name:
        operands.insert(0, _operand(made, made.vdst, words * (1 + two)))
    if "read" not in name and "swizzle" not in name:
        operands.append(_operand(made, made.data0, words))
    if "write2" in name:
        operands.append(_operand(made, made.data1, words))
    if two:
        more = [f"offset0:{made.offset0}", f"offset1:{made.offset1}"]
    elif made.offset0 or made.offset1:
        more = [f"offset:{made.offset0 | made.offset1 << 8}"]
    return name, operands, more + _flags(made, "gds")


def _flat(made: Encoded) -> Parts:
    name, words = made.op_name, _words(made.op_name)
    off, flat = made.saddr == 125, name.startswith("flat_")
    wide = off and not name.startswith("scratch_")
    address, data = _operand(made, made.addr, 2 if wide else 1), made.data
    operands = [address, _operand(made, data, words)]
    if "_load_" in name:
        operands = [_operand(made, made.vdst, words), address]
    elif "_atomic_" in name and made.glc:
        result = words // 2 if "cmpswap" in name else words
        operands.insert(0, _operand(made, made.vdst, result))
    if not flat:
        operands.append("off" if off else _operand(made, made.saddr, 2))
    offset = made.offset - (1 << 12 if made.offset >> 11 and not flat else 0)
    more = [f"offset:{offset}"] if offset else []
    return name, operands, more + _flags(made, "glc", "slc", "dlc", "lds")


# -- vector --------------------------------------------------------------------------------------


def _wide(name: str) -> tuple[int, ...]:
    """Words of the result and of the sources of an instruction with 64 bits."""
    if name == "v_mad_u64_u32":
        return (2, 1, 1, 2)
    if re.match(r"v_(lshl|lshr|ashr)rev_[bi]64", name):
        return (2, 1, 2, 1)
    if re.match(r"v_cmpx?_.*_[iu]64", name):
        return (1, 2, 2, 1)
    return (1, 1, 1, 1)


def _source(value: str, negate: int, absolute: int, extend: int = 0) -> str:
    value = f"sext({value})" if extend else value
    value = f"|{value}|" if absolute else value
    return f"-{value}" if negate else value


def _result(made: Encoded) -> list[str]:
    """What stands before the sources of a short form."""
    if "v_cmpx" in made.op_name:
        return []
    if "v_cmp" in made.op_name:
        own = hasattr(made, "sd") and made.sd
        return [_operand(made, made.sdst) if own else "vcc_lo"]
    scalar = made.op_name == "v_readfirstlane_b32"
    result = _operand(made, made.vdst - 256 * scalar, _wide(made.op_name)[0])
    return [result, "vcc_lo"] if _CARRYING.match(made.op_name) else [result]


def _masked(made: Encoded) -> list[str]:
    """The mask that a short form reads, behind its sources."""
    reads = made.op_name == "v_cndmask_b32" or _CARRYING.match(made.op_name)
    return ["vcc_lo"] if reads else []


def _short(made: Encoded) -> Parts:
    name, wide = made.op_name, _wide(made.op_name)
    operands = [*_result(made), _operand(made, made.src0, wide[1])]
    if hasattr(made, "vsrc1"):
        operands.append(_operand(made, made.vsrc1, wide[2]))
    if name in ("v_fmamk_f32", "v_fmaak_f32"):
        operands.insert(3 if name == "v_fmaak_f32" else 2, f"{made.literal:#x}")
        return name, operands, []
    return f"{name}_e32", operands + _masked(made), []


def _control(control: int) -> str:
    if control < 0x100:
        return "quad_perm:[" + ",".join(str(control >> 2 * at & 3) for at in range(4)) + "]"
    if control in (0x140, 0x141):
        return ("row_mirror", "row_half_mirror")[control & 1]
    kinds = {0x10: "shl", 0x11: "shr", 0x12: "ror", 0x15: "share", 0x16: "xmask"}
    return f"row_{kinds[control >> 4]}:{control & 15}"


def _dpp(made: Encoded) -> Parts:
    sources = [_source(_operand(made, made.vsrc0), made.src0_neg, made.src0_abs)]
    if hasattr(made, "vsrc1"):
        sources.append(_source(_operand(made, made.vsrc1), made.src1_neg, made.src1_abs))
    more = [_control(made.dpp), f"row_mask:{made.row_mask:#x}", f"bank_mask:{made.bank_mask:#x}"]
    more += ["bound_ctrl:1"] * made.bc + ["fi:1"] * made.fi
    return f"{made.op_name}_dpp", [*_result(made), *sources, *_masked(made)], more


def _sdwa(made: Encoded) -> Parts:
    more, sources = _flags(made, "omod"), []
    if made.omod:
        raise ValueError("omod")
    more += ["clamp"] * made.clmp
    if not made.op_name.startswith("v_cmp"):
        more += [f"dst_sel:{_SELECTS[made.dst_sel]}", f"dst_unused:{_UNUSED[made.dst_unused]}"]
    for place in range(1 + hasattr(made, "vsrc1")):
        code, scalar = getattr(made, f"vsrc{place}"), getattr(made, f"s{place}")
        change = (getattr(made, f"src{place}_{kind}") for kind in ("neg", "abs", "sext"))
        sources.append(_source(_operand(made, code & 0xFF if scalar else code), *change))
        more.append(f"src{place}_sel:{_SELECTS[getattr(made, f'src{place}_sel')]}")
    return f"{made.op_name}_sdwa", [*_result(made), *sources, *_masked(made)], more


def _count(made: Encoded) -> int:
    """Sources of a long form."""
    if made.op in THREE_SOURCES or made.op == 0x101 or 0x128 <= made.op < 0x12B:
        return 3
    return 1 if 0x180 <= made.op < 0x200 else 2


def _long(made: Encoded) -> Parts:
    name, count, wide = made.op_name, _count(made), _wide(made.op_name)
    absolute = made.abs if hasattr(made, "abs") else 0
    sources = [
        _source(
            _operand(made, getattr(made, field), wide[1 + place]),
            made.neg >> place & 1,
            absolute >> place & 1,
        )
        for place, field in enumerate(made.sources[:count])
    ]
    results = [] if "v_cmpx" in name else [_operand(made, made.vdst, wide[0])]
    if hasattr(made, "sdst"):
        results.append(_operand(made, made.sdst))
    more, opsel = [], made.opsel if hasattr(made, "opsel") else 0
    if opsel and "permlane" in name:
        more = [f"op_sel:{_list(opsel, 2)}"]
    elif opsel:
        more = [f"op_sel:{_list(opsel & 7 | opsel >> 3 << count, count + 1)}"]
    if made.omod:
        raise ValueError("omod")
    suffix = "" if made.op in {**TWO_SOURCES, **THREE_SOURCES} else "_e64"
    return name + suffix, results + sources, more + ["clamp"] * made.clmp


def _packed(made: Encoded) -> Parts:
    name, count = made.op_name, 2 if made.op_name.startswith("v_pk_") else 3
    mixed, high = "_mix" in name, made.opsel_hi | made.opsel_hi2 << 2
    sources = [
        _source(
            _operand(made, getattr(made, field)),
            made.neg >> place & mixed,
            made.neg_hi >> place & mixed,
        )
        for place, field in enumerate(made.sources[:count])
    ]
    more = [f"op_sel:{_list(made.opsel, count)}", f"op_sel_hi:{_list(high, count)}"]
    if not mixed:
        more += [f"neg_lo:{_list(made.neg, count)}", f"neg_hi:{_list(made.neg_hi, count)}"]
    return name, [_operand(made, made.vdst), *sources], more + ["clamp"] * made.clmp


_WRITERS: tuple[tuple[str, Callable[[Encoded], Parts]], ...] = (
    *(("SOPK", _sopk), ("SOPP", _sopp), ("SOP", _sop), ("SMEM", _smem), ("DS", _ds)),
    *(("FLAT", _flat), ("GLOBAL", _flat), ("SCRATCH", _flat)),
    *((f"VOP{kind}_DPP16", _dpp) for kind in "12C"),
    *((f"VOP{kind}_SDWA", _sdwa) for kind in "12C"),
    *(("VOP3P", _packed), ("VOP3", _long), ("VOP", _short)),
)
