"""RDNA2's opcodes, as far as the executor knows what they do."""

from __future__ import annotations

from collections.abc import Iterator


def _read(*lines: str, upper: str = "") -> dict[int, str]:
    """Opcode -> name, of lines of hexadecimal opcodes, each with its name behind it."""
    words = " ".join(lines).split()
    return {int(a, 16): upper + b for a, b in zip(words[::2], words[1::2], strict=True)}


_FLOATS = [
    *("F", "LT", "EQ", "LE", "GT", "LG", "GE", "O"),
    *("U", "NGE", "NLG", "NGT", "NLE", "NEQ", "NLT"),
]
_INTEGERS = ["F", "LT", "EQ", "LE", "GT", "NE", "GE", "T"]


def _comparisons() -> Iterator[tuple[int, str]]:
    for first, kind in ((0x80, "I32"), (0xA0, "I64"), (0xC0, "U32"), (0xE0, "U64")):
        yield from ((first + place, f"{each}_{kind}") for place, each in enumerate(_INTEGERS))
    for first, kind in ((0x88, "I16"), (0xA8, "U16")):
        yield from ((first + at, f"{_INTEGERS[at]}_{kind}") for at in range(1, 7))
    for place, each in enumerate(_FLOATS):
        yield place, f"{each}_F32"
        yield (0xC8 if place < 8 else 0xE0) + place, f"{each}_F16"


OPS: dict[str, dict[int, str]] = {  # by encoding
    "SOP2": _read(
        "0 add_u32 1 sub_u32 2 add_i32 3 sub_i32 4 addc_u32 5 subb_u32 6 min_i32 7 min_u32",
        "8 max_i32 9 max_u32 a cselect_b32 b cselect_b64 e and_b32 f and_b64 10 or_b32 11 or_b64",
        "12 xor_b32 13 xor_b64 14 andn2_b32 15 andn2_b64 16 orn2_b32 17 orn2_b64 18 nand_b32",
        "19 nand_b64 1a nor_b32 1b nor_b64 1c xnor_b32 1d xnor_b64 1e lshl_b32 1f lshl_b64",
        "20 lshr_b32 21 lshr_b64 22 ashr_i32 23 ashr_i64 26 mul_i32 27 bfe_u32 28 bfe_i32",
        "2e lshl1_add_u32 2f lshl2_add_u32 30 lshl3_add_u32 31 lshl4_add_u32 32 pack_ll_b32_b16",
        "35 mul_hi_u32 36 mul_hi_i32",
        upper="s_",
    ),
    "SOP1": _read(
        "3 mov_b32 4 mov_b64 7 not_b32 8 not_b64 19 sext_i32_i8 1a sext_i32_i16",
        "24 and_saveexec_b64 25 or_saveexec_b64 26 xor_saveexec_b64 27 andn2_saveexec_b64",
        "28 orn2_saveexec_b64 34 abs_i32 3c and_saveexec_b32 3d or_saveexec_b32",
        "3e xor_saveexec_b32 3f andn2_saveexec_b32 40 orn2_saveexec_b32",
        upper="s_",
    ),
    "SOPC": _read(
        "0 eq_i32 1 lg_i32 2 gt_i32 3 ge_i32 4 lt_i32 5 le_i32 6 eq_u32 7 lg_u32 8 gt_u32 9 ge_u32",
        "a lt_u32 b le_u32 12 eq_u64 13 lg_u64",
        upper="s_cmp_",
    )
    | _read("c bitcmp0_b32 d bitcmp1_b32", upper="s_"),
    "SOPK": _read(
        "0 movk_i32 3 cmpk_eq_i32 4 cmpk_lg_i32 5 cmpk_gt_i32 6 cmpk_ge_i32 7 cmpk_lt_i32",
        "8 cmpk_le_i32 9 cmpk_eq_u32 a cmpk_lg_u32 b cmpk_gt_u32 c cmpk_ge_u32 d cmpk_lt_u32",
        "e cmpk_le_u32 f addk_i32 10 mulk_i32 17 waitcnt_vscnt",
        upper="s_",
    ),
    "SOPP": _read(
        "0 nop 1 endpgm 2 branch 4 cbranch_scc0 5 cbranch_scc1 6 cbranch_vccz 7 cbranch_vccnz",
        "8 cbranch_execz 9 cbranch_execnz a barrier c waitcnt e sleep f setprio 10 sendmsg",
        "13 icache_inv 1f code_end 20 inst_prefetch 21 clause 23 waitcnt_depctr",
        upper="s_",
    ),
    "SMEM": _read("0 dword 1 dwordx2 2 dwordx4 3 dwordx8 4 dwordx16", upper="s_load_"),
    "DS": _read(
        "d write_b32 e write2_b32 f write2st64_b32 1e write_b8 1f write_b16 35 swizzle_b32",
        "36 read_b32 37 read2_b32 38 read2st64_b32 39 read_i8 3a read_u8 3b read_i16 3c read_u16",
        "4d write_b64 4e write2_b64 4f write2st64_b64 76 read_b64 77 read2_b64 78 read2st64_b64",
        "a1 write_b16_d16_hi a2 read_u8_d16 a3 read_u8_d16_hi a4 read_i8_d16",
        "a5 read_i8_d16_hi a6 read_u16_d16 a7 read_u16_d16_hi b2 permute_b32 b3 bpermute_b32",
        "de write_b96 df write_b128 fe read_b96 ff read_b128",
        upper="ds_",
    ),
    "MUBUF": _read("71 gl0_inv 72 gl1_inv", upper="buffer_"),
    "VOP1": _read(
        "1 mov_b32 2 readfirstlane_b32 5 cvt_f32_i32 6 cvt_f32_u32 7 cvt_u32_f32 8 cvt_i32_f32",
        "a cvt_f16_f32 b cvt_f32_f16 21 trunc_f32 22 ceil_f32 23 rndne_f32 24 floor_f32",
        "25 exp_f32 27 log_f32 2a rcp_f32 2b rcp_iflag_f32 2e rsq_f32 33 sqrt_f32 37 not_b32",
        "38 bfrev_b32 65 swap_b32",
        upper="v_",
    ),
    "VOP2": _read(
        "1 cndmask_b32 2 dot2c_f32_f16 3 add_f32 4 sub_f32 5 subrev_f32 8 mul_f32 9 mul_i32_i24",
        "b mul_u32_u24 f min_f32 10 max_f32 11 min_i32 12 max_i32 13 min_u32 14 max_u32",
        "16 lshrrev_b32 18 ashrrev_i32 1a lshlrev_b32 1b and_b32 1c or_b32 1d xor_b32 1e xnor_b32",
        "25 add_nc_u32 26 sub_nc_u32 27 subrev_nc_u32 28 add_co_ci_u32 29 sub_co_ci_u32",
        "2a subrev_co_ci_u32 2b fmac_f32 2c fmamk_f32 2d fmaak_f32 2f cvt_pkrtz_f16_f32",
        "32 add_f16 35 mul_f16",
        upper="v_",
    ),
    "VOPC": {
        place + 16 * writes_exec: f"v_cmp{'x' * writes_exec}_{name}".lower()
        for place, name in _comparisons()
        for writes_exec in (0, 1)
    },
    "VOP3P": _read(
        "1 pk_mul_lo_u16 a pk_add_u16 b pk_sub_u16 f pk_add_f16 10 pk_mul_f16 13 dot2_f32_f16",
        "20 fma_mix_f32 21 fma_mixlo_f16 22 fma_mixhi_f16",
        upper="v_",
    ),
}
TWO_SOURCES = _read(
    "169 mul_lo_u32 16a mul_hi_u32 2ff lshlrev_b64 300 lshrrev_b64 301 ashrrev_i64 303 add_nc_u16",
    "304 sub_nc_u16 305 mul_lo_u16 307 lshrrev_b16 30f add_co_u32 310 sub_co_u32 311 pack_b32_f16",
    "314 lshlrev_b16 319 subrev_co_u32 360 readlane_b32 361 writelane_b32 362 ldexp_f32",
    "365 mbcnt_lo_u32_b32 366 mbcnt_hi_u32_b32",
    upper="v_",
)
"""Of VOP3 alone; likewise:"""
THREE_SOURCES = _read(
    "142 mad_i32_i24 143 mad_u32_u24 148 bfe_u32 149 bfe_i32 14a bfi_b32 14b fma_f32",
    "14e alignbit_b32",
    "14f alignbyte_b32 151 min3_f32 152 min3_i32 154 max3_f32 155 max3_i32 157 med3_f32",
    "158 med3_i32 15f div_fixup_f32 16d div_scale_f32 16f div_fmas_f32 176 mad_u64_u32",
    "178 xor3_b32 340 mad_u16 344 perm_b32 345 xad_u32 346 lshl_add_u32 347 add_lshl_u32",
    "36d add3_u32 36f lshl_or_b32 371 and_or_b32 372 or3_b32 377 permlane16_b32",
    "378 permlanex16_b32",
    upper="v_",
)
_SHORT_ONLY = ("v_dot2c_f32_f16", "v_fmamk_f32", "v_fmaak_f32", "v_swap_b32", "v_readfirstlane_b32")
OPS["VOP3"] = {
    **OPS["VOPC"],
    **{0x100 + at: name for at, name in OPS["VOP2"].items() if name not in _SHORT_ONLY},
    **{0x180 + at: name for at, name in OPS["VOP1"].items() if name not in _SHORT_ONLY},
    **TWO_SOURCES,
    **THREE_SOURCES,
}
_ACCESSES = _read(
    "8 load_ubyte 9 load_sbyte a load_ushort b load_sshort c load_dword d load_dwordx2",
    "e load_dwordx4 f load_dwordx3 18 store_byte 19 store_byte_d16_hi 1a store_short",
    "1b store_short_d16_hi 1c store_dword 1d store_dwordx2 1e store_dwordx4 1f store_dwordx3",
    "24 load_short_d16 25 load_short_d16_hi",
)
_ATOMICS = _read(
    "30 swap 31 cmpswap 32 add 33 sub 35 smin 36 umin 37 smax 38 umax 39 and 3a or 3b xor 3c inc",
    "3d dec 50 swap_x2 51 cmpswap_x2 52 add_x2 53 sub_x2 55 smin_x2 56 umin_x2 57 smax_x2",
    "58 umax_x2 59 and_x2 5a or_x2 5b xor_x2 5c inc_x2 5d dec_x2",
    upper="atomic_",
)
for _space in ("flat", "scratch", "global"):
    _known = _ACCESSES if _space == "scratch" else {**_ACCESSES, **_ATOMICS}
    OPS[_space.upper()] = {place: f"{_space}_{name}" for place, name in _known.items()}
