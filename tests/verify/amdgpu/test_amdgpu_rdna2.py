"""RDNA2's machine code: decoded as LLVM assembles it, and what differs from RDNA3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import pytest

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from tests import executed, noted
from tests.verify.amdgpu import assembled, cases, loader, rdna2, rdna2_opcodes, rdna2_text
from tests.verify.amdgpu.assembled import Machine, assemble
from tests.verify.amdgpu.decode import FAMILIES, decode
from tests.verify.amdgpu.errors import HazardError, OutOfBoundsError, UnsupportedError
from tests.verify.amdgpu.launch import built, missing
from tests.verify.amdgpu.memory import Memory
from tests.verify.amdgpu.rdna2_opcodes import OPS
from tests.verify.amdgpu.rdna2_text import text
from tests.verify.amdgpu.state import LDS, LOAD, STORE

pytestmark = pytest.mark.skipif(assembled.missing() is not None, reason=str(assembled.missing()))
GFX = "gfx1030"
LANE = np.arange(32)


def differing(made: Iterable[rdna2.Encoded]) -> list[str]:
    """The instructions whose text LLVM assembles to other bytes."""
    every = list(made)
    lines = [text(each) for each in every]
    code, at, wrong = assemble(GFX, "\n".join(lines)), 0, []
    for each, line in zip(every, lines, strict=True):
        own = each.bits.to_bytes(each.size(), "little")
        if code[at : at + len(own)] != own:
            wrong.append(line)
        at += len(own)
    return wrong if at == len(code) else [*wrong, "another length"]


# -- every opcode of the table -------------------------------------------------------------------

PREFIXES = {
    **{"SOP2": 0b10 << 30, "SOP1": 0b101111101 << 23, "SOPC": 0b101111110 << 23},
    **{"SOPK": 0b1011 << 28, "SOPP": 0b101111111 << 23, "SMEM": 0b111101 << 26},
    **{"DS": 0b110110 << 26, "FLAT": 0b110111 << 26, "SCRATCH": 0b110111 << 26 | 1 << 14},
    **{"GLOBAL": 0b110111 << 26 | 2 << 14, "MUBUF": 0b111000 << 26},
    **{"VOP1": 0b0111111 << 25, "VOP2": 0, "VOPC": 0b0111110 << 25},
    **{"VOP3": 0b110101 << 26, "VOP3P": 0b110011 << 26},
}
"""The bits that tell an encoding."""
REGISTERS = {
    **{"sdst": 16, "ssrc0": 20, "ssrc1": 24, "sdata": 32, "sbase": 2, "soffset": 125},
    **{"src0": 256 + 9, "src1": 20, "src2": 256 + 12, "vdst": 6, "vsrc1": 8, "simm16": 3},
    **{"addr": 14, "data": 16, "data0": 16, "data1": 20, "saddr": 125, "offset0": 8, "offset": 100},
}
"""What stands in the fields."""
SCALARS = re.compile(r"v_writelane(?=.*src0)|v_(permlane|cndmask|\w+_co_ci_)(?=.*src2)")
"""Vector instructions and those of their sources that are scalars."""


def each_opcode() -> Iterator[rdna2.Encoded]:
    for name, prefix in PREFIXES.items():
        form: type[rdna2.Encoded] = getattr(rdna2, name)
        fields = {**vars(rdna2.FLAT), **vars(form)}
        for op, op_name in OPS[name].items():
            bits = prefix | op << form.op.low
            for field, number in REGISTERS.items():
                if field in vars(form) or form.__base__ is rdna2.FLAT and field in fields:
                    scalar = SCALARS.match(f"{op_name} {field}")
                    bits |= (24 if scalar else number) << fields[field].low
            if "atomic" in op_name:
                bits |= 1 << rdna2.FLAT.glc.low
            literal = 0x12345678 << 32 if op_name in ("v_fmamk_f32", "v_fmaak_f32") else 0
            yield rdna2.decode_rdna2((bits | literal).to_bytes(12, "little"))


def test_every_opcode_is_the_one_that_llvm_assembles() -> None:
    every = list(each_opcode())
    lines = [text(each) for each in every]
    assert len(set(lines)) == len(lines) > 400
    code, at = assemble(GFX, "\n".join(lines)), 0
    for made, line in zip(every, lines, strict=True):
        again = rdna2.decode_rdna2(code[at : at + 16])
        assert (type(again), again.op, text(again)) == (type(made), made.op, line)
        at += again.size()
    assert at == len(code)


@pytest.mark.parametrize("word", [0xC8000000, 0x7E00FE00, 0xD5FF0000, 0x7E0002E9])
def test_what_the_table_lacks_is_refused(word: int) -> None:
    """An export, an opcode of VOP1 and of VOP3, DPP8."""
    with pytest.raises(UnsupportedError, match="cannot decode"):
        decode(word.to_bytes(4, "little") + bytes(12), 0, GFX)


# -- what kernels are made of --------------------------------------------------------------------

SOURCES = sorted({spec.source for spec in cases.shipped_specs(GFX)})


def specs(source: str) -> list[KernelSpec]:
    return sorted((each for each in cases.shipped_specs(GFX) if each.source == source), key=repr)


def parts(codes: noted.Codes, source: str, by: str = "clang") -> object:
    """What is decoded, and our decoder."""
    arch = by_gfx(GFX)
    assert arch is not None
    decoded = [codes.of(spec, arch, by=by) for spec in specs(source)]
    return decoded, executed.texts(rdna2, rdna2_opcodes, rdna2_text, loader)


def check(source: str, compiled_by: str) -> None:
    if reason := missing(GFX, compiled_by):
        pytest.skip(reason)
    arch = by_gfx(GFX)
    assert arch is not None
    found: dict[tuple[int, str], rdna2.Encoded] = {}
    for spec in specs(source):
        program = loader.load(built(spec, arch, name=compiled_by), spec.entry)
        found |= {(each.raw.bits, each.form): each.raw for each in program.instructions}
    assert found and not differing(found.values())


@executed.known(by="clang", parts=parts)
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_are_decoded_as_llvm_assembles_them(source: str) -> None:
    check(source, "clang")


@executed.known(by="ziglang", parts=partial(parts, by="ziglang"))
@pytest.mark.parametrize("source", SOURCES)
def test_another_compilers_kernels_are_decoded_as_llvm_assembles_them(source: str) -> None:
    check(source, "ziglang")


ALIKE = [gfx for gfx, family in FAMILIES.items() if family == "rdna2" and gfx != GFX]


@executed.known(by="clang", parts=parts)
@pytest.mark.parametrize("source", SOURCES)
def test_the_other_rows_of_rdna2_have_the_same_instructions(source: str) -> None:
    """Of the first and the last config."""
    for spec in {repr(each): each for each in (specs(source)[0], specs(source)[-1])}.values():
        made = {gfx: bits_of(spec, gfx) for gfx in (GFX, *ALIKE)}
        assert len(made) == 7 and len(set(made.values())) == 1, spec


def bits_of(spec: KernelSpec, gfx: str) -> tuple[int, ...]:
    if reason := missing(gfx):
        pytest.skip(reason)
    arch = by_gfx(gfx)
    assert arch is not None
    return tuple(each.raw.bits for each in loader.load(built(spec, arch), spec.entry).instructions)


# -- what differs from RDNA3 ---------------------------------------------------------------------


def machine(words: int = 64) -> Machine:
    """v0 = 4 * lane, s[2:3] = v[2:3] the address of `words` words, numbered from 1000."""
    data = np.arange(1000, 1000 + words, dtype=np.uint32)
    memory = Memory()
    memory.add(0x10000, data.view(np.uint8), name="data")
    m = Machine(GFX, memory=memory).set_s(S2=0x10000)
    return m.set_v(v0=4 * LANE, v2=0x10000 + 4 * LANE, v3=0)


def test_each_counter_has_its_place_in_a_wait() -> None:
    loads = "global_load_dword v4, v0, s[2:3]\nds_write_b32 v0, v0\nds_read_b32 v5, v0\n"
    m = machine().lines(loads + "s_waitcnt vmcnt(0) lgkmcnt(1)\nv_mov_b32 v6, v4")
    assert np.array_equal(m.v(6, np.uint32), 1000 + LANE)
    with pytest.raises(HazardError, match="v5"):
        m.lines("s_waitcnt expcnt(0)\nv_mov_b32 v7, v5")
    m.lines("s_waitcnt lgkmcnt(0)\nv_mov_b32 v7, v5")
    assert np.array_equal(m.v(7, np.uint32), 4 * LANE)
    with pytest.raises(HazardError, match="v4"):
        machine().lines(loads + "s_waitcnt lgkmcnt(0)\nv_mov_b32 v6, v4")
    m = machine().lines("global_store_dword v0, v0, s[2:3]\ns_waitcnt vmcnt(0)")
    assert (m.b.issued[STORE] - m.b.done[STORE]).all()
    m.lines("s_waitcnt_vscnt null, 0x0")
    assert not (m.b.issued[STORE] - m.b.done[STORE]).any()


def test_many_loads_may_be_on_their_way() -> None:
    """Six bits count them, in two places."""
    loads = "".join(f"global_load_dword v{4 + each}, v0, s[2:3]\n" for each in range(20))
    m = machine().lines(loads + "s_waitcnt vmcnt(17)\nv_mov_b32 v40, v6")
    with pytest.raises(HazardError, match="v7"):
        m.lines("v_mov_b32 v40, v7")


def test_offsets_have_twelve_bits() -> None:
    m = machine().set_v(v0=2048 + 4 * LANE).lines("global_load_dword v4, v0, s[2:3] offset:-2048")
    m.lines("s_waitcnt vmcnt(0)\nv_mov_b32 v5, v4")
    assert np.array_equal(m.v(5, np.uint32), 1000 + LANE)
    with pytest.raises(OutOfBoundsError):
        m.lines("global_load_dword v4, v0, s[2:3] offset:2047")


def test_null_takes_nothing_and_reads_as_zero() -> None:
    m = machine().set_s(s4=7)
    m.lines("s_mov_b32 m0, s4\ns_add_u32 null, s4, s4\ns_add_u32 s5, null, m0")
    assert m.s(5) == 7
    m.lines("v_mad_u64_u32 v[6:7], null, v0, 3, 1")
    assert np.array_equal(m.v(6, np.uint32), 12 * LANE + 1)


def test_a_flat_access_counts_as_one_of_memory_and_of_lds() -> None:
    m = machine().lines("flat_load_ushort v4, v[2:3] offset:2")
    assert (m.b.issued[LOAD] == 1).all() and (m.b.issued[LDS] == 1).all()
    with pytest.raises(HazardError, match="barrier"):
        m.lines("s_waitcnt vmcnt(0)\ns_barrier")
    m.lines("s_waitcnt lgkmcnt(0)\nv_mov_b32 v5, v4")
    assert not m.v(5, np.uint32).any()
    m.active(LANE == 0).lines("flat_store_dwordx2 v[2:3], v[2:3]")
    assert (m.b.issued[STORE] == 1).all() and (m.b.issued[LDS] == 2).all()
    with pytest.raises(OutOfBoundsError):
        machine().set_v(v2=0x20000).lines("flat_load_ushort v4, v[2:3]")


def test_sixteen_bits_leave_the_upper_half_alone() -> None:
    """VGPRs have one name each: no short form names a half."""
    m = Machine(GFX).set_v(v1=1.0, v200=0x12345678, v201=0x0001FFFF)
    m.lines("v_cvt_f16_f32 v200, v1\nv_add_nc_u16 v201, v201, v201")
    assert m.v(200, np.uint32)[0] == 0x12343C00 and m.v(201, np.uint32)[0] == 0x0001FFFE


def test_a_comparison_by_sdwa_names_its_mask() -> None:
    m = Machine(GFX).set_v(v1=LANE << 16, v2=7).set_s(s106=0)
    m.lines("v_cmp_gt_i32_sdwa s4, v1, v2 src0_sel:WORD_1 src1_sel:DWORD")
    assert (m.s(4), m.s(106)) == (0xFFFFFF00, 0)
    m.lines("v_cmp_gt_i32_sdwa vcc_lo, sext(v1), v2 src0_sel:WORD_1 src1_sel:DWORD")
    assert m.s(106) == 0xFFFFFF00
    m.lines("v_cmpx_lt_i32_e32 v2, v2")
    assert not m.b.exec.any() and m.s(106) == 0xFFFFFF00
