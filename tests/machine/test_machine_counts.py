"""Classes of instructions, what they add up to, and the bounds that follow."""

from __future__ import annotations

import pytest

from lib_rocm_sd.arch import amd_table
from lib_rocm_sd.lab.cycles import (
    FAMILIES,
    Kind,
    Mix,
    NotUnderstoodError,
    cycles_of,
    mix_of,
    rates_of,
    work_of,
)
from lib_rocm_sd.lab.listing import Function, Instruction
from lib_rocm_sd.lab.loops import analysed

ARCHES = amd_table()

KINDS = {
    Kind.MATRIX: "v_wmma_f32_16x16x16_f16 v_mfma_f32_16x16x16f16 v_mfma_f32_16x16x16_f16"
    " v_mfma_f32_16x16x16bf16_1k v_dot2c_f32_f16 v_dot2_f32_f16 v_dual_dot2acc_f32_f16"
    " v_swmmac_f32_16x16x32_f16 v_smfmac_f32_16x16x32_f16",
    Kind.TRANSCENDENTAL: "v_exp_f32_e32 v_rcp_iflag_f32_e32 v_log_f32 v_sqrt_f32_e64 v_rsq_f32"
    " v_sin_f32 v_cos_f32 v_s_rcp_f32 v_exp_f16_e32",
    Kind.VECTOR: "v_add_f32_e32 v_dual_mov_b32 v_cndmask_b32_e64 v_mov_b32_dpp v_permlanex16_b32"
    " v_readfirstlane_b32 v_pk_fma_f32 v_accvgpr_write_b32 v_fma_mixlo_f16 v_frexp_exp_i32_f32"
    " v_cvt_f16_f32_sdwa v_maximum3_f32 v_cmpx_gt_i32_e32 v_nop v_bitop3_b32 v_cvt_pk_bf16_f32",
    Kind.SCALAR: "s_add_u32 s_mov_b64 s_and_saveexec_b32 s_cmp_lt_i32 s_cselect_b32 s_mul_hi_u32"
    " s_bitcmp1_b32 s_add_co_i32 s_and_not1_b32 s_cmpk_gt_u32 s_movk_i32 s_cvt_f32_u32 s_mul_f32",
    Kind.SCALAR_MEMORY: "s_load_dwordx4 s_load_b512 s_buffer_load_dword s_load_b96",
    Kind.BRANCH: "s_branch s_cbranch_execz s_cbranch_vccnz",
    Kind.CONTROL: "s_waitcnt s_waitcnt_vscnt s_wait_loadcnt_dscnt s_nop s_delay_alu s_barrier"
    " s_barrier_signal s_clause s_endpgm s_code_end s_sendmsg buffer_gl0_inv global_inv global_wb"
    " s_set_inst_prefetch_distance s_waitcnt_depctr buffer_wbl2 s_setprio buffer_inv",
}
BYTES = {
    ("ds_load_b128", Kind.LDS): 16,
    ("ds_read_b64", Kind.LDS): 8,
    ("ds_read2_b64", Kind.LDS): 16,
    ("ds_load_2addr_stride64_b32", Kind.LDS): 8,
    ("ds_write2st64_b32", Kind.LDS): 8,
    ("ds_bpermute_b32", Kind.LDS): 4,
    ("ds_swizzle_b32", Kind.LDS): 4,
    ("ds_load_u16_d16_hi", Kind.LDS): 2,
    ("ds_write_b8", Kind.LDS): 1,
    ("ds_add_u32", Kind.LDS): 4,
    ("ds_nop", Kind.LDS): 0,
    ("global_load_b128", Kind.GLOBAL): 16,
    ("global_load_dwordx3", Kind.GLOBAL): 12,
    ("global_load_ushort", Kind.GLOBAL): 2,
    ("global_load_d16_hi_b16", Kind.GLOBAL): 2,
    ("global_load_sbyte", Kind.GLOBAL): 1,
    ("global_store_short_d16_hi", Kind.GLOBAL): 2,
    ("global_atomic_add", Kind.GLOBAL): 4,
    ("global_atomic_add_x2", Kind.GLOBAL): 8,
    ("global_atomic_add_f32", Kind.GLOBAL): 4,
    ("buffer_store_dword", Kind.GLOBAL): 4,
    ("flat_load_dwordx2", Kind.GLOBAL): 8,
    ("scratch_load_b32", Kind.SCRATCH): 4,
}


@pytest.mark.parametrize(
    ("kind", "mnemonic"), [(kind, name) for kind, names in KINDS.items() for name in names.split()]
)
def test_kinds(kind: Kind, mnemonic: str) -> None:
    assert work_of(mnemonic).kind is kind


@pytest.mark.parametrize(("mnemonic", "kind"), BYTES)
def test_bytes_of_memory_instructions(mnemonic: str, kind: Kind) -> None:
    work = work_of(mnemonic)
    assert (work.kind, work.bytes_per_lane) == (kind, BYTES[mnemonic, kind])


@pytest.mark.parametrize(
    "mnemonic",
    [
        "v_rubbish_f32",
        "s_rubbish",
        "rubbish",
        ".long",
        "ds_rubbish",
        "v_",
        "<unknown>",
        "image_load",
    ],
)
def test_an_unknown_instruction_raises(mnemonic: str) -> None:
    with pytest.raises(NotUnderstoodError, match="not"):
        work_of(mnemonic)


def test_slow_instructions_take_more_slots() -> None:
    slots = {"v_mul_lo_u32": 4, "v_mad_u64_u32": 4, "v_mad_co_u64_u32": 4, "v_lshlrev_b64_e32": 2}
    assert {name: work_of(name).slots for name in slots} == slots
    assert work_of("v_mul_u32_u24_e32").slots == 1


def _mix(*lines: str, wave_size: int = 32) -> Mix:
    return mix_of([Instruction(tuple(line.split(" :: "))) for line in lines], wave_size)


def test_both_halves_of_a_pair_count_and_take_one_slot() -> None:
    mix = _mix(
        "v_dual_mov_b32 :: v_dual_add_f32", "v_add_f32_e32", "v_dual_mov_b32 :: v_dual_fmac_f32"
    )
    assert (mix.of(Kind.VECTOR), mix.vector_slots, mix.dual_pairs) == (5, 3, 2)
    dot = _mix("v_dual_dot2acc_f32_f16 :: v_dual_mov_b32")
    assert (dot.of(Kind.MATRIX), dot.of(Kind.VECTOR), dot.vector_slots) == (1, 1, 1)


def test_bytes_are_those_of_a_wave() -> None:
    lines = ("ds_load_b128", "ds_bpermute_b32", "global_load_b64", "scratch_load_b32")
    mix = _mix(*lines, wave_size=64)
    assert (mix.lds_bytes, mix.global_bytes, mix.scratch_bytes) == (64 * 20, 64 * 8, 64 * 4)
    assert mix.as_dict() == {
        **{"lds": 2, "global": 1, "scratch": 1},
        **{"lds_bytes": 1280, "global_bytes": 512, "scratch_bytes": 256},
    }


def test_every_row_of_the_manifest_has_rates() -> None:
    for arch in ARCHES.values():
        assert rates_of(arch).sources
    used = {arch.family for arch in ARCHES.values()}
    assert used == set(FAMILIES)


def test_rdna_does_one_after_the_other() -> None:
    wmma, vector = ["v_wmma_f32_16x16x16_f16"] * 4, ["v_add_f32_e32"] * 32
    for gfx, each, bound in (("gfx1100", 32, 0.8), ("gfx1201", 16, 64 / 96)):
        cycles = cycles_of(_mix(*wmma, *vector), ARCHES[gfx])
        assert (cycles.matrix, cycles.vector) == (4 * each, 32)
        assert cycles.bounds()["bound"] == cycles.bounds()["bound_serial"] == pytest.approx(bound)
        assert cycles.bounds()["bound_overlapped"] == 1.0
        assert cycles.limited_by == "serial matrix and vector"


def test_cdna_does_both_at_once() -> None:
    lines = ["v_mfma_f32_16x16x16_f16"] * 8 + ["v_add_f32_e32"] * 28
    cycles = cycles_of(_mix(*lines, wave_size=64), ARCHES["gfx942"])
    assert (cycles.matrix, cycles.vector, cycles.issue) == (128, 112, 144)
    assert cycles.bounds()["bound"] == pytest.approx(128 / 144)
    assert cycles.bounds()["bound_serial"] == pytest.approx(128 / 240)
    assert cycles.limited_by == "vector issue"
    older = cycles_of(_mix(*lines, wave_size=64), ARCHES["gfx90a"])
    assert older.matrix == 256 and older.bounds()["bound"] == 1.0


def test_transcendentals_are_a_quarter_as_fast() -> None:
    for gfx, wave, cycles in (("gfx1201", 32, 4), ("gfx942", 64, 16)):
        mix = _mix("v_exp_f32_e32", wave_size=wave)
        assert cycles_of(mix, ARCHES[gfx]).transcendental == cycles


def test_lds_serves_all_simds_of_a_compute_unit() -> None:
    lines = ["v_mfma_f32_16x16x16_f16", *["ds_read_b128"] * 2]
    cycles = cycles_of(_mix(*lines, wave_size=64), ARCHES["gfx942"])
    assert cycles.lds == 4 * 2 * 1024 / 128 and cycles.limited_by == "LDS"
    assert cycles.bounds()["bound"] == 0.25
    fewer = cycles_of(_mix("v_wmma_f32_16x16x16_f16", "ds_load_b128"), ARCHES["gfx1100"])
    assert fewer.lds == 2 * 512 / 128


def test_dot_products_are_vector_instructions() -> None:
    cycles = cycles_of(_mix(*["v_dot2c_f32_f16"] * 3, "v_mov_b32_dpp"), ARCHES["gfx1030"])
    assert set(cycles.bounds().values()) == {0.75}


def test_dot_products_beside_a_matrix_unit_are_vector_instructions() -> None:
    dots = "v_dot2_f32_f16", "v_dual_mul_f32 :: v_dual_dot2acc_f32_f16"
    mix = _mix("v_wmma_f32_16x16x16_f16", *dots)
    assert cycles_of(mix, ARCHES["gfx1100"]).matrix == 32
    assert cycles_of(mix, ARCHES["gfx1100"]).vector == 2
    moved = mix.beside("wmma_gfx11")
    assert (moved.of(Kind.MATRIX), moved.of(Kind.VECTOR)) == (1, 3)
    assert mix.beside("dot2") is mix


def test_no_matrix_instruction_no_bound_and_no_rate_no_guess() -> None:
    assert cycles_of(_mix("v_add_f32_e32"), ARCHES["gfx1100"]).bounds() == {}
    with pytest.raises(NotUnderstoodError, match="v_wmma_i32_16x16x16_iu8"):
        cycles_of(_mix("v_wmma_i32_16x16x16_iu8"), ARCHES["gfx1100"])


def test_what_a_pass_may_skip_is_told_apart() -> None:
    names = (
        "v_nop v_wmma_f32_16x16x16_f16 s_cbranch_scc1 v_exp_f32_e32 v_nop s_cbranch_scc0 s_endpgm"
    )
    targets = {2: 4, 5: 1}
    code = [Instruction((name,), targets.get(at)) for at, name in enumerate(names.split())]
    work = analysed(Function("f", tuple(code)), ARCHES["gfx1201"])
    (loop,) = work.loops
    assert work.hot == 0 and work.straight.as_dict() == {
        "vector": 1,
        "control": 1,
        "vector_slots": 1,
    }
    assert loop.mix.of(Kind.TRANSCENDENTAL) == loop.conditional.of(Kind.TRANSCENDENTAL) == 1
    assert loop.mix.of(Kind.MATRIX) == 1 and loop.conditional.of(Kind.MATRIX) == 0
