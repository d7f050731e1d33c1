"""Single instructions under the executor of AMD machine code: the known traps first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.verify.amdgpu import assembled
from tests.verify.amdgpu.assembled import USUAL_MODE, Machine
from tests.verify.amdgpu.errors import UndefinedError, UninitializedError, UnsupportedError

pytestmark = pytest.mark.skipif(assembled.missing() is not None, reason=str(assembled.missing()))
LANE = np.arange(32)
WIDE = np.arange(64)
RDNA = ("gfx1030", "gfx1100", "gfx1201")
NEWER_RDNA = RDNA[1:]
CDNA = ("gfx942", "gfx90a")
ALL = (*RDNA, *CDNA)


def lanes(gfx: str) -> np.ndarray:
    return WIDE if gfx in CDNA else LANE


def is_equal(actual: Any, expected: Any) -> bool:
    return bool(np.array_equal(actual, np.broadcast_to(expected, np.shape(actual))))


# -- whole numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("gfx", ALL)
def test_mad_i32_i24_takes_24_bits_with_their_sign_and_adds_32(gfx: str) -> None:
    lane = lanes(gfx)
    m = Machine(gfx).set_v(v1=lane | 0xFF000000, v2=0xAB800001, v3=lane * 3 - 7)
    m.lines("v_mad_i32_i24 v4, v1, v2, v3\nv_mad_i32_i24 v5, v1, -12, v3")
    wide = lane.astype(np.int64)
    product = (wide * (0x800001 - (1 << 24)) + wide * 3 - 7).astype(np.int32)
    assert is_equal(m.v(4, np.int32), product)
    assert is_equal(m.v(5, np.int32), lane * -9 - 7)


# -- between lanes -------------------------------------------------------------------------------


@pytest.mark.parametrize("gfx", RDNA)
def test_permlanex16_exchanges_rows_with_a_literal_selector(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=LANE).set_s(s3=0x76543210)
    m.lines("v_permlanex16_b32 v2, v1, s3, 0xfedcba98 op_sel:[1,0]")
    assert is_equal(m.v(2, np.uint32), LANE ^ 16)


@pytest.mark.parametrize("gfx", RDNA)
def test_permlanex16_selects_any_lane_of_the_other_row(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=LANE + 100).set_s(s3=0x01234567)
    m.lines("v_permlanex16_b32 v2, v1, s3, -1 op_sel:[1,0]")
    choice = np.array([7, 6, 5, 4, 3, 2, 1, 0] + [15] * 8)
    assert is_equal(m.v(2, np.uint32), np.concatenate([choice + 116, choice + 100]))


def test_permlanex16_takes_what_inactive_lanes_hold() -> None:
    m = Machine("gfx1100").set_v(v1=LANE, v2=0).active(LANE < 16).set_v(v1=LANE + 50)
    m.lines("s_mov_b32 s3, 0x76543210\nv_permlanex16_b32 v2, v1, s3, 0xfedcba98 op_sel:[1,0]")
    assert is_equal(m.v(2, np.uint32), np.where(LANE < 16, LANE + 16, 0))


def test_permlanex16_that_does_not_fetch_inactive_lanes_is_refused() -> None:
    m = Machine("gfx1100").set_v(v1=LANE, v2=0).set_s(s3=0).active(LANE < 16)
    with pytest.raises(UndefinedError, match="inactive"):
        m.lines("v_permlanex16_b32 v2, v1, s3, s3")


@pytest.mark.parametrize("gfx", ALL)
def test_bpermute_gives_zero_for_an_inactive_lane(gfx: str) -> None:
    lane = lanes(gfx)
    m = Machine(gfx).set_v(v1=(lane ^ 3) * 4, v2=lane + 1, v3=77).active(lane % 4 != 2)
    wait = "s_wait_dscnt 0x0" if gfx == "gfx1201" else "s_waitcnt lgkmcnt(0)"
    m.lines(f"ds_bpermute_b32 v3, v1, v2\n{wait}\nv_mov_b32 v4, v3")
    expected = np.where(lane % 4 == 1, 0, (lane ^ 3) + 1)
    active = lane % 4 != 2
    assert is_equal(m.v(4, np.uint32)[active], expected[active])
    assert is_equal(m.v(3, np.uint32)[~active], 77)


@pytest.mark.parametrize("rdna", ["gfx1030", "gfx1100"])
def test_dpp_moves_within_rows(rdna: str) -> None:
    def moved(control: str, gfx: str = rdna, more: str = "") -> np.ndarray:
        m = Machine(gfx).set_v(v1=lanes(gfx), v2=99)
        text = f"v_mov_b32_dpp v2, v1 {control} row_mask:0xf bank_mask:0xf {more}"
        return m.lines(text).v(2, np.uint32)

    row = LANE & ~15
    assert is_equal(moved("row_share:5"), row + 5)
    assert is_equal(moved("row_xmask:3"), LANE ^ 3)
    assert is_equal(moved("quad_perm:[3,0,1,1]"), (LANE & ~3) + np.tile([3, 0, 1, 1], 8))
    assert is_equal(moved("row_ror:1"), row + ((LANE - 1) & 15))
    assert is_equal(moved("row_mirror"), row + 15 - (LANE & 15))
    assert is_equal(moved("row_shr:2"), np.where(LANE % 16 < 2, 99, LANE - 2))
    assert is_equal(moved("row_shl:2", more="bound_ctrl:1"), np.where(LANE % 16 > 13, 0, LANE + 2))
    assert is_equal(moved("row_newbcast:5", "gfx90a"), (WIDE & ~15) + 5)


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100"])
def test_dpp_adds_what_a_neighbour_holds(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=LANE * 1.0, v2=100.0, v3=0.0)
    m.lines("v_add_f32_dpp v3, v1, v2 row_shr:1 row_mask:0x1 bank_mask:0xf bound_ctrl:1")
    shifted = np.where(LANE % 16 == 0, 0, LANE - 1)
    assert is_equal(m.v(3), np.where(LANE < 16, shifted + 100.0, 0.0))


@pytest.mark.parametrize("gfx", ALL)
def test_lanes_to_scalars_and_back(gfx: str) -> None:
    lane = lanes(gfx)
    m = Machine(gfx).set_v(v1=lane * 3, v2=lane).active(lane >= 5)
    m.lines("v_readfirstlane_b32 s4, v1\nv_readlane_b32 s5, v1, 2\nv_writelane_b32 v2, s4, 1")
    assert (m.s(4), m.s(5)) == (15, 6)
    assert is_equal(m.v(2, np.uint32), np.where(lane == 1, 15, lane))


# -- rounding, denormals, special values ---------------------------------------------------------


@pytest.mark.parametrize("gfx", ALL)
def test_cvt_pkrtz_rounds_toward_zero(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=2049.9, v2=-70000.0)
    name = "v_cvt_pk_rtz_f16_f32" if gfx in NEWER_RDNA else "v_cvt_pkrtz_f16_f32"
    halves = m.lines(f"{name} v3, v1, v2").v(3, np.float16)
    assert halves[0] == 2048.0 and halves[1] == -65504.0


def test_rounding_and_denormals_are_the_descriptors() -> None:
    def run(mode: Any, text: str, **values: float) -> float:
        return float(Machine("gfx1100", mode=mode).set_v(**values).lines(text).v(3)[0])

    tiny = float(np.float32(2.0**-130))
    add, flush = "v_add_f32 v3, v1, v2", replace(USUAL_MODE, denorm_32=0)
    assert run(USUAL_MODE, add, v1=tiny, v2=0.0) == tiny
    assert run(flush, add, v1=tiny, v2=0.0) == 0.0
    assert run(replace(USUAL_MODE, denorm_32=1), add, v1=2.0**-126, v2=-1.5 * 2.0**-126) == 0.0
    toward_zero = replace(USUAL_MODE, round_16_64=3)
    m = Machine("gfx1100", mode=toward_zero).set_v(v1=2049.9, v3=0)
    assert m.lines("v_cvt_f16_f32 v3, v1").v(3, np.float16)[0] == 2048.0
    with pytest.raises(UnsupportedError, match="rounding mode"):
        run(replace(USUAL_MODE, round_32=1), add, v1=1.0, v2=1.0)


def test_fma_rounds_once() -> None:
    """1 + 2^-23 times itself, plus 2^-24 less a bit: twice rounded it would be one unit more."""
    x = np.float32(1 + 2.0**-12)
    c = np.float32(2.0**-24 - 2.0**-47 - 2.0**-48)
    m = Machine("gfx1100").set_v(v1=x, v2=x, v4=c).lines("v_fma_f32 v3, v1, v2, v4")
    exact = int(2**48 * (1 + 2.0**-12)) * 2**36  # not representable: do it with integers
    whole = (2**12 + 1) ** 2 * 2 ** (60 - 24) + 2 ** (60 - 24) - 2 ** (60 - 47) - 2 ** (60 - 48)
    below = whole >> 37 << 37
    nearest = below if whole - below < 2**36 else below + 2**37
    assert exact and float(m.v(3)[0]) == nearest / 2**60


@pytest.mark.parametrize("gfx", ALL)
def test_maximum_prefers_numbers_and_positive_zero(gfx: str) -> None:
    name = "v_max_num_f32" if gfx == "gfx1201" else "v_max_f32"
    cases = [(-0.0, 0.0, 0.0), (0.0, -0.0, 0.0), (np.nan, -3.0, -3.0), (2.0, np.nan, 2.0)]
    for first, second, expected in cases:
        out = Machine(gfx).set_v(v1=first, v2=second).lines(f"{name} v3, v1, v2").v(3)[0]
        assert out == expected and np.signbit(out) == np.signbit(expected)


@pytest.mark.parametrize("gfx", RDNA)
def test_transcendentals_know_no_denormals(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=-127.0, v2=np.float32(2.0**-130), v4=2.0**127)
    m.lines("v_exp_f32 v3, v1\nv_rcp_f32 v5, v2\nv_rcp_f32 v6, v4")
    assert m.v(3)[0] == 0.0 and m.v(5)[0] == np.inf and m.v(6)[0] == 0.0


QUOTIENTS = {
    "usual": (1.0, (0.1, 1000.0)),
    "large": (1e20, (1e-15, 9e-15)),
    "denormal": (3e-30, (1e8, 9e9)),
    "without a number": (np.nan, (0.1, 1000.0)),
}


@pytest.mark.parametrize("quotient", QUOTIENTS)
@pytest.mark.parametrize("gfx", RDNA)
def test_division_is_that_of_ieee(gfx: str, quotient: str) -> None:
    """The sequence that compilers make of n / x; where n or x is scaled before, it is undone."""
    n, between = QUOTIENTS[quotient]
    n = np.float32(n)
    x = np.float32(np.random.default_rng(1).uniform(*between, 32))
    m = Machine(gfx).set_v(v0=x, v6=n)
    m.lines(
        """
        v_div_scale_f32 v1, null, v0, v0, v6
        v_rcp_f32 v2, v1
        v_fma_f32 v3, -v1, v2, 1.0
        v_fmac_f32 v2, v3, v2
        v_div_scale_f32 v4, vcc_lo, v6, v0, v6
        v_mul_f32 v3, v4, v2
        v_fma_f32 v5, -v1, v3, v4
        v_fmac_f32 v3, v5, v2
        v_fma_f32 v5, -v1, v3, v4
        v_div_fmas_f32 v2, v5, v2, v3
        v_div_fixup_f32 v2, v2, v0, v6
        """
    )
    assert np.array_equal(m.v(2), n / x, equal_nan=True)


# -- encodings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gfx", NEWER_RDNA)
def test_both_halves_of_a_pair_read_before_either_writes(gfx: str) -> None:
    m = Machine(gfx).set_v(v0=LANE, v1=LANE + 100)
    m.lines("v_dual_mov_b32 v0, v1 :: v_dual_mov_b32 v1, v0")
    assert is_equal(m.v(0, np.uint32), LANE + 100) and is_equal(m.v(1, np.uint32), LANE)
    m = Machine(gfx).set_v(v0=2.0, v1=3.0, v2=5.0, v7=1.0)
    m.lines("v_dual_fmac_f32 v7, v0, v1 :: v_dual_mul_f32 v2, 0x40800000, v2")
    assert m.v(7)[0] == 7.0 and m.v(2)[0] == 20.0


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100"])
def test_halves_of_registers(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=0x4000_3C00, v2=0x12345678, v3=0.5)  # halves 2.0, 1.0
    m.lines(
        "v_fma_mix_f32 v4, v1, v3, 1.0 op_sel:[1,0,0] op_sel_hi:[1,0,0]\n"
        "v_fma_mixlo_f16 v2, v1, v3, 0 op_sel_hi:[1,0,0]"
    )
    assert m.v(4)[0] == 2.0
    assert m.v(2, np.uint32)[0] == 0x12343800  # the upper half is kept
    kept = Machine(gfx).set_v(v1=1.0, v2=0x12345678).lines("v_cvt_f16_f32 v2, v1")
    zeroed = Machine("gfx942").set_v(v1=1.0, v2=0x12345678).lines("v_cvt_f16_f32 v2, v1")
    assert (kept.v(2, np.uint32)[0], zeroed.v(2, np.uint32)[0]) == (0x12343C00, 0x3C00)


@pytest.mark.parametrize("gfx", [*CDNA, "gfx1030"])
def test_sdwa(gfx: str) -> None:
    add = "v_add_u32_sdwa" if gfx in CDNA else "v_add_nc_u32_sdwa"
    m = Machine(gfx).set_v(v1=0xC000_1234, v2=1.0, v3=0xAAAABBBB, v4=7)
    m.lines(
        "v_cvt_f32_f16_sdwa v5, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1\n"
        "v_cvt_f16_f32_sdwa v6, v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD\n"
        f"{add} v7, v4, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD "
        "src1_sel:BYTE_1"
    )
    assert m.v(5)[0] == -2.0 and m.v(6, np.uint32)[0] == 0x3C000000
    assert m.v(7, np.uint32)[0] == 7 + 0x12


@pytest.mark.parametrize("gfx", CDNA)
def test_pairs_of_floats(gfx: str) -> None:
    m = Machine(gfx).set_v(v2=1.0, v3=2.0, v4=10.0, v5=20.0)
    m.lines(
        "v_pk_add_f32 v[6:7], v[2:3], v[4:5] op_sel_hi:[1,0] neg_lo:[0,1] neg_hi:[0,1]\n"
        "v_pk_fma_f32 v[8:9], v[2:3], v[4:5], v[2:3] op_sel:[1,0,0]\n"
        "v_pk_mul_f32 v[2:3], v[2:3], v[4:5]"
    )
    assert [m.v(r)[0] for r in (6, 7, 8, 9)] == [-9.0, -8.0, 21.0, 42.0]
    assert [m.v(r)[0] for r in (2, 3)] == [10.0, 40.0]
    m.set_s(s7=0x40000000).lines("v_pk_mul_f32 v[6:7], v[2:3], s[6:7]")
    assert m.v(7)[0] == 80.0
    with pytest.raises(UninitializedError, match="v6"):  # s6 was never written
        m.lines("v_add_f32 v8, v6, v6")


@pytest.mark.parametrize("gfx", ALL)
def test_dot_products_of_halves(gfx: str) -> None:
    """1.5 and -2 with 1 and 3, added to 10; denormals count; the short form adds in place."""
    short = "v_dot2c_f32_f16" if gfx != "gfx1201" else "v_dot2_f32_f16 v5, v1, v2, v5 ;"
    m = Machine(gfx).set_v(v1=0xC000_3E00, v2=0x4200_3C00, v3=10.0, v5=1.0, v6=0x0001_0000)
    m.lines(f"v_dot2_f32_f16 v4, v1, v2, v3\n{short} v5, v1, v2\nv_dot2_f32_f16 v7, v6, v2, 0")
    assert (m.v(4)[0], m.v(5)[0], m.v(7)[0]) == (5.5, -3.5, np.float32(3 * 2.0**-24))


@pytest.mark.parametrize("gfx", NEWER_RDNA)
def test_dot_products_of_bfloat16(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=0xC000_3FC0, v2=0x4040_3F80, v3=10.0)
    assert m.lines("v_dot2_f32_bf16 v4, v1, v2, v3").v(4)[0] == 5.5


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", *CDNA])
def test_a_float_constant_is_one_factor_of_a_dot_product(gfx: str) -> None:
    """As LLVM up to 17 wrote it where both factors were to be 1."""
    m = Machine(gfx).set_v(v1=0xC000_3E00, v2=1.0, v4=10.0, v5=1.0)
    assert m.lines("v_dot2c_f32_f16 v4, 1.0, v1").v(4)[0] == 11.5
    if gfx == "gfx1100":
        m.lines("v_dual_mul_f32 v10, 1.0, v2 :: v_dual_dot2acc_f32_f16 v5, 1.0, v1")
        assert m.v(5)[0] == 2.5


@pytest.mark.parametrize("gfx", RDNA)
def test_a_dot_product_may_take_one_half_twice(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=0xC000_3E00, v2=0x4200_3C00, v3=10.0)
    assert m.lines("v_dot2_f32_f16 v4, v1, v2, v3 op_sel_hi:[1,0,1]").v(4)[0] == 9.5
    assert m.lines("v_dot2_f32_f16 v4, v1, v2, v3 op_sel_hi:[0,1,1]").v(4)[0] == 16.0


def test_a_dot_product_in_a_pair() -> None:
    m = Machine("gfx1100").set_v(v8=0xC000_3E00, v9=2.0)
    m.lines("v_dual_mul_f32 v10, 0x3c003c00, v9 :: v_dual_dot2acc_f32_f16 v9, 0x3c003c00, v8")
    assert m.v(9)[0] == 1.5


@pytest.mark.parametrize("gfx", ALL)
def test_modifiers_of_dot_products_are_refused(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=0, v2=0, v3=0)
    with pytest.raises(UnsupportedError, match="dot product"):
        m.lines("v_dot2_f32_f16 v4, v1, v2, v3 neg_lo:[1,0,0]")


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201"])
def test_half_words_become_words(gfx: str) -> None:
    m = Machine(gfx).set_v(v1=0xFFFE_8001)
    m.lines("v_cvt_u32_u16 v2, v1")
    assert m.v(2, np.uint32)[0] == 0x8001


@pytest.mark.parametrize("gfx", ALL)
def test_mad_u16_keeps_sixteen_bits(gfx: str) -> None:
    """The older form of gfx9 clears the upper half, RDNA's keeps it."""
    m = Machine(gfx).set_v(v1=0x7777_0101, v2=0x1_0200, v3=9, v4=0xABCD_0000)
    m.lines(f"v_mad_{'legacy_' * (gfx in CDNA)}u16 v4, v1, v2, v3")
    assert m.v(4, np.uint32)[0] == (0x0209 if gfx in CDNA else 0xABCD_0209)


@pytest.mark.parametrize("gfx", ALL)
def test_integers(gfx: str) -> None:
    wide = "v_mad_co_u64_u32" if gfx == "gfx1201" else "v_mad_u64_u32"
    carry = "vcc" if gfx in CDNA else "vcc_lo"
    m = Machine(gfx).set_v(v1=0xFFFFFFFF, v2=0x89ABCDEF, v3=5, v4=5, v5=1, v9=0x0C0A0001)
    m.lines(
        f"{wide} v[6:7], {carry}, v1, v1, v[4:5]\n"
        f"v_add_co_u32 v10, {carry}, v1, v3\n"
        "v_perm_b32 v11, v2, v1, v9\n"
        "v_bfe_i32 v12, v2, 4, 8\n"
        "v_mul_hi_u32 v13, v1, v2\n"
        "v_bfrev_b32 v14, v2"
    )
    assert m.v(14, np.uint32)[0] == 0xF7B3D591
    total = 0xFFFFFFFF**2 + (1 << 32 | 5)
    assert [int(m.v(r, np.uint32)[0]) for r in (6, 7)] == [total & 0xFFFFFFFF, total >> 32]
    assert m.v(10, np.uint32)[0] == 4 and m.s(106) == 0xFFFFFFFF
    assert m.v(11, np.uint32)[0] == 0x00FFFFFF
    assert m.v(12, np.int32)[0] == -34
    assert m.v(13, np.uint32)[0] == 0xFFFFFFFF * 0x89ABCDEF >> 32


def test_any_function_of_three_bits_on_gfx950() -> None:
    """LLVM 19 does not know the chip: these are LLVM 22's bytes of
    v_bitop3_b32 v4, v1, v2, v3 bitop3:0xca (v2 where v1, else v3),
    v_bitop3_b32 v7, v1, s2, v3 bitop3:0x5a (v1 ^ v3),
    v_bitop3_b16 v5, v1, v2, v3 bitop3:0x40 op_sel:[1,0,0,1] (v1 & v2 & ~v3), and
    v_cvt_pk_f16_f32 v6, v8, v9.
    """
    x, y, z = 0xF0F0_1234, 0xCCCC_CCCC, 0xAAAA_AAAA
    m = Machine("gfx950").set_v(v1=x, v2=y, v3=z, v5=0x1111_2222, v8=2049.0, v9=-0.5).set_s(s2=y)
    m.code(bytes.fromhex("040134d201050e5c 070334d201050c4c 054833d201050e0c 060067d208130200"))
    assert m.v(4, np.uint32)[0] == (x & y) | (~x & z & 0xFFFFFFFF)
    assert m.v(7, np.uint32)[0] == x ^ z
    assert m.v(5, np.uint32)[0] == (0xF0F0 & 0xCCCC & ~0xAAAA) << 16 | 0x2222
    halves = m.v(6, np.float16)
    assert halves[0] == 2048.0 and halves[1] == -0.5


REFUSED = (
    ("gfx1100", "v_mov_b32_dpp v3, v1 dpp8:[7,6,5,4,3,2,1,0]"),
    ("gfx1100", "v_add_f32 v3, v1, v2 mul:2"),
    ("gfx1100", "v_add_nc_u32 v3, v1, v2 clamp"),
    ("gfx1100", "v_sin_f32 v3, v1"),
    ("gfx1100", "v_fma_mix_f32 v3, v1, v2, v1 clamp"),
    ("gfx1100", "v_add_f32 v3, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf mul:2"),
    ("gfx1100", "global_atomic_csub_u32 v3, v1, v2, s[2:3] glc"),
    ("gfx1100", "ds_add_rtn_u32 v3, v1, v2"),
    ("gfx1100", "s_setreg_imm32_b32 hwreg(HW_REG_MODE), 0"),
    ("gfx1100", "flat_atomic_min_f32 v[1:2], v3"),
    ("gfx942", "v_add_u32_sdwa v3, v1, v2 dst_sel:BYTE_0 dst_unused:UNUSED_SEXT"),
    ("gfx942", "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[4:5], 0 cbsz:1"),
    ("gfx942", "global_atomic_pk_add_f16 v3, v1, v2, s[2:3] sc0"),
    ("gfx1201", "v_wmma_f16_16x16x16_f16 v[8:11], v[12:15], v[16:19], 0"),
)


@pytest.mark.parametrize(("gfx", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_is_not_known_raises(gfx: str, text: str) -> None:
    try:
        assembled.assemble(gfx, text)
    except ValueError:
        pytest.skip(f"{assembled.ASSEMBLER} does not know it")
    m = Machine(gfx).set_v(v1=1.0, v2=1.0, v3=0.0).set_s(s2=0, s3=0)
    with pytest.raises(UnsupportedError):
        m.lines(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nand", 0xFFFFFFFF ^ (0xF0F0 & 0xFF00)),
        ("nor", 0xFFFFFFFF ^ (0xF0F0 | 0xFF00)),
        ("xnor", 0xFFFFFFFF ^ (0xF0F0 ^ 0xFF00)),
    ],
)
@pytest.mark.parametrize("gfx", ALL)
def test_scalar_logic_that_inverts(gfx: str, name: str, expected: int) -> None:
    m = Machine(gfx).set_s(s1=0xF0F0, s2=0xFF00, s3=0xFFFFFFFF, S4=0xF0F0, S6=0xFF00)
    m.lines(f"s_{name}_b32 s8, s1, s2\ns_{name}_b64 s[10:11], s[4:5], s[6:7]")
    assert (m.s(8), m.s(10), m.s(11)) == (expected, expected, 0xFFFFFFFF)
    assert m.b.scc.all()
    m.lines(f"s_{name}_b32 s8, s3, {0 if name == 'xnor' else -1}")
    assert m.s(8) == 0 and not m.b.scc.any()
