"""Memory instructions under the executor: guarded buffers, waits, races, barriers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.verify.amdgpu import assembled
from tests.verify.amdgpu.assembled import Machine
from tests.verify.amdgpu.errors import (
    ExecutionError,
    HazardError,
    OutOfBoundsError,
    RaceError,
    UninitializedError,
    UnsupportedError,
)
from tests.verify.amdgpu.memory import Memory

pytestmark = pytest.mark.skipif(assembled.missing() is not None, reason=str(assembled.missing()))
LANE = np.arange(32)


def lanes(gfx: str) -> np.ndarray:
    return np.arange(64 if gfx == "gfx942" else 32)


OLD_NAMES = ("gfx1030", "gfx942")


def is_equal(actual: Any, expected: Any) -> bool:
    return bool(np.array_equal(actual, np.broadcast_to(expected, np.shape(actual))))


WAITS = {
    "gfx1030": ("s_waitcnt vmcnt({})", "s_waitcnt lgkmcnt({})"),
    "gfx1100": ("s_waitcnt vmcnt({})", "s_waitcnt lgkmcnt({})"),
    "gfx1201": ("s_wait_loadcnt {}", "s_wait_dscnt {}"),
    "gfx942": ("s_waitcnt vmcnt({})", "s_waitcnt lgkmcnt({})"),
}


def machine_with_buffer(gfx: str, words: int = 64, **how: Any) -> tuple[Machine, np.ndarray]:
    """v0 = 4 * lane, s[2:3] the address of `words` words, numbered from 1000."""
    data = np.arange(1000, 1000 + words, dtype=np.uint32)
    memory = Memory()
    memory.add(0x10000, data.view(np.uint8), name="data")
    m = Machine(gfx, memory=memory, **how).set_s(S2=0x10000)
    return m.set_v(v0=4 * lanes(gfx)), data


@pytest.mark.parametrize("gfx", WAITS)
def test_a_load_must_be_waited_for(gfx: str) -> None:
    load = "global_load_dword" if gfx in OLD_NAMES else "global_load_b32"
    two = f"{load} v1, v0, s[2:3]\n{load} v2, v0, s[2:3]\n"
    wait = WAITS[gfx][0]
    lane = lanes(gfx)
    m, _ = machine_with_buffer(gfx)
    m.lines(two + wait.format(1) + "\nv_mov_b32 v3, v1")
    assert is_equal(m.v(3, np.uint32), 1000 + lane)
    with pytest.raises(HazardError, match="v2"):
        m.lines("v_mov_b32 v4, v2")
    m.lines(wait.format(0) + "\nv_mov_b32 v4, v2")
    m, _ = machine_with_buffer(gfx)
    with pytest.raises(HazardError, match="v1"):
        m.lines(two + wait.format(2) + "\nv_mov_b32 v3, v1")
    m, _ = machine_with_buffer(gfx)
    with pytest.raises(HazardError, match="v1"):
        m.lines(two + "v_mov_b32 v1, 0")  # what is loaded would come over it


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201"])
def test_loads_to_the_halves_of_a_register_may_be_on_their_way_together(gfx: str) -> None:
    """As LLVM 22 has them, where a half is a register."""
    both = "global_load_d16_b16 v1, v0, s[2:3]\nglobal_load_d16_hi_b16 v1, v0, s[2:3] offset:4\n"
    wait, lane = WAITS[gfx][0], lanes(gfx)[:-1]
    m, _ = machine_with_buffer(gfx)
    m.lines(both + wait.format(0) + "\nv_mov_b32 v2, v1")
    assert is_equal(m.v(2, np.uint32)[:-1], 1000 + lane | (1001 + lane) << 16)
    for left in (2, 1):
        m, _ = machine_with_buffer(gfx)
        with pytest.raises(HazardError, match="v1"):
            m.lines(both + wait.format(left) + "\nv_mov_b32 v2, v1")
    m, _ = machine_with_buffer(gfx)
    store_then_load = "ds_store_b32 v0, v0\nds_load_b32 v1, v0\n"
    with pytest.raises(HazardError, match="v1"):  # LDS and memory return in any order
        m.lines(store_then_load + "global_load_d16_hi_b16 v1, v0, s[2:3]")


def test_a_half_is_merged_with_a_register_that_has_arrived_on_cdna() -> None:
    m, _ = machine_with_buffer("gfx942")
    with pytest.raises(HazardError, match="v1"):
        m.lines("global_load_dword v1, v0, s[2:3]\nglobal_load_short_d16_hi v1, v0, s[2:3]")


@pytest.mark.parametrize("gfx", WAITS)
def test_an_lds_load_and_a_scalar_load_must_be_waited_for(gfx: str) -> None:
    old = gfx in OLD_NAMES
    store, load = ("ds_write_b32", "ds_read_b32") if old else ("ds_store_b32", "ds_load_b32")
    m, _ = machine_with_buffer(gfx)
    m.lines(f"{store} v0, v0\n{load} v1, v0")
    with pytest.raises(HazardError, match="v1"):
        m.lines("v_mov_b32 v2, v1")
    m.lines(WAITS[gfx][1].format(0) + "\nv_mov_b32 v2, v1")
    assert is_equal(m.v(2, np.uint32), 4 * lanes(gfx))
    scalar = "s_load_dword" if old else "s_load_b32"
    m.lines(f"{scalar} s8, s[2:3], 0x8")
    with pytest.raises(HazardError, match="s8"):
        m.lines("s_mov_b32 s9, s8")
    wait = "s_wait_kmcnt 0" if gfx == "gfx1201" else "s_waitcnt lgkmcnt(0)"
    assert m.lines(f"{wait}\ns_mov_b32 s9, s8").s(9) == 1002


def test_scalar_loads_of_less_than_a_word_are_extended() -> None:
    """gfx12 has them: RDNA4 ISA, 8.3."""
    m, data = machine_with_buffer("gfx1201")
    data[0] = 0x81F27F63
    loads = {"u16 s8": 0x2, "i16 s9": 0x2, "u8 s10": 0x1, "i8 s11": 0x3, "u16 s12": 0x0}
    text = "\n".join(f"s_load_{name}, s[2:3], {at}" for name, at in loads.items())
    m.lines(f"{text}\ns_wait_kmcnt 0")
    expected = [0x81F2, 0xFFFF81F2, 0x7F, 0xFFFFFF81, 0x7F63]
    assert [int(m.s(register)) & 0xFFFFFFFF for register in range(8, 13)] == expected
    with pytest.raises(UnsupportedError, match="aligned"):
        m.lines("s_load_u16 s8, s[2:3], 0x1")


def test_scalar_loads_return_in_any_order() -> None:
    m, _ = machine_with_buffer("gfx1100")
    m.lines("s_load_b32 s8, s[2:3], 0x0\ns_load_b32 s9, s[2:3], 0x4\ns_waitcnt lgkmcnt(1)")
    with pytest.raises(HazardError, match="s8"):
        m.lines("s_mov_b32 s10, s8")


@pytest.mark.parametrize("gfx", WAITS)
def test_access_outside_of_a_buffer_names_the_lane(gfx: str) -> None:
    word = "dword" if gfx in OLD_NAMES else "b32"
    for text in (f"global_load_{word} v1, v0, s[2:3]", f"global_store_{word} v0, v0, s[2:3]"):
        m, _ = machine_with_buffer(gfx, words=20)
        with pytest.raises(OutOfBoundsError, match="lane 20 of wave 0") as caught:
            m.lines(text)
        assert "0x10050" in str(caught.value) and "global_" in str(caught.value)
        m.active(lanes(gfx) < 20).lines(text)


def test_stores_arrive() -> None:
    m, data = machine_with_buffer("gfx1100")
    m.active(LANE % 2 == 0).lines("global_store_b16 v0, v0, s[2:3] offset:2")
    expected = np.arange(1000, 1064, dtype=np.uint32)
    expected[:32:2] = (expected[:32:2] & 0xFFFF) | (4 * LANE[::2]).astype(np.uint32) << 16
    assert is_equal(data, expected)


def test_lds_has_bounds() -> None:
    m = Machine("gfx1100", lds_bytes=64).set_v(v0=4 * LANE)
    with pytest.raises(OutOfBoundsError, match="LDS"):
        m.lines("ds_store_b32 v0, v0")


def test_unwritten_registers_are_not_read() -> None:
    with pytest.raises(UninitializedError, match="v9"):
        Machine("gfx1100").set_v(v1=1.0).lines("v_add_f32 v2, v1, v9")
    m = Machine("gfx1100").active(LANE < 7).set_v(v1=1.0)
    m.lines("v_add_f32 v2, v1, v1").active(LANE < 8)
    with pytest.raises(UninitializedError, match="lane 7"):
        m.lines("v_add_f32 v3, v2, v2")
    with pytest.raises(UninitializedError, match="s40"):
        m.lines("s_mov_b32 s41, s40")


@pytest.mark.parametrize(
    "copy", ["v_mov_b32 v3, v2", "v_dual_mov_b32 v3, v2 :: v_dual_mov_b32 v2, v1"]
)
def test_a_copy_of_an_unwritten_register_is_unwritten(copy: str) -> None:
    """Not read: compilers copy what nothing uses."""
    m = Machine("gfx1100").set_v(v1=1.0, v3=2.0).active(LANE < 7).set_v(v2=4.0)
    m.active(True).lines(copy)
    assert m.active(LANE < 7).lines("v_add_f32 v4, v3, v3").v(4)[0] == 8.0
    with pytest.raises(UninitializedError, match="v3 is read in lane 7"):
        m.active(True).lines("v_add_f32 v4, v3, v3")


def two_waves(**how: Any) -> Machine:
    m = Machine("gfx1100", waves=2, **how)
    m.set_v(v0=4 * LANE, v1=4 * LANE)
    m.b.put_v(0, (4 * LANE + 128 * m.b.wave[:, None]).astype(np.uint32))
    return m


def test_races_in_lds() -> None:
    other = "v_xor_b32 v2, 0x80, v0\n"
    wait = "s_waitcnt lgkmcnt(0)\n"
    two_waves().lines("ds_store_b32 v0, v0\nds_load_b32 v3, v0")
    with pytest.raises(RaceError):
        two_waves().lines(other + "ds_store_b32 v0, v0\nds_load_b32 v3, v2")
    with pytest.raises(RaceError):
        two_waves().lines(other + "ds_load_b32 v3, v2\nds_store_b32 v0, v0")
    with pytest.raises(RaceError):
        two_waves().lines("ds_store_b32 v1, v0")
    text = other + "ds_store_b32 v0, v0\n" + wait + "s_barrier\nds_load_b32 v3, v2\n" + wait
    m = two_waves().lines(text)
    assert is_equal(m.v(3, np.uint32, wave=0), 4 * LANE + 128)
    two_waves().lines("ds_load_b32 v3, v1\nds_load_b32 v3, v1")
    with pytest.raises(HazardError, match="barrier"):
        two_waves().lines("ds_store_b32 v0, v0\ns_barrier")


def test_barriers_of_rdna4_have_two_parts() -> None:
    m = Machine("gfx1201").set_v(v0=4 * LANE).lines("s_barrier_signal -1")
    with pytest.raises(HazardError):
        m.lines("ds_store_b32 v0, v0")
    with pytest.raises(HazardError, match="not signalled"):
        m.lines("s_barrier_wait 0xffff\ns_barrier_wait 0xffff")


def test_bank_conflicts_are_counted() -> None:
    def clocks(addresses: np.ndarray, text: str) -> int:
        m = Machine("gfx1100", lds_bytes=65536).set_v(v0=addresses)
        m.lines(text)
        return sum(each.conflict_clocks for each in m.lds.traffic.values())

    assert clocks(4 * LANE, "ds_load_b32 v1, v0") == 0
    assert clocks(128 * LANE, "ds_load_b32 v1, v0") == 31
    assert clocks(0 * LANE, "ds_load_b32 v1, v0") == 0  # one word for all
    assert clocks(8 * LANE, "ds_load_b32 v1, v0") == 1
    assert clocks(16 * LANE, "ds_load_b128 v[4:7], v0") == 0
    assert clocks(128 * LANE, "ds_load_b128 v[4:7], v0") == 4 * 7


def test_every_error_says_where() -> None:
    with pytest.raises(ExecutionError, match="v_add_f32"):
        Machine("gfx1100").lines("v_add_f32 v2, v1, v9")


@pytest.mark.parametrize("gfx", ["gfx942", "gfx1100", "gfx1201"])
def test_each_lane_has_scratch_of_its_own(gfx: str) -> None:
    word, wait = "dword" if gfx == "gfx942" else "b32", WAITS[gfx][0].format(0)
    lane = lanes(gfx)
    m = Machine(gfx).set_v(v0=8 * (lane % 4), v1=lane + 100, v2=lane + 200).set_s(s4=8)
    m.lines(
        f"scratch_store_{word} off, v1, off offset:8\n"
        f"scratch_store_{word} off, v2, s4 offset:16\n"
        f"scratch_load_{word} v3, off, s4\n{wait}\nv_mov_b32 v5, v3"
    )
    assert is_equal(m.v(5, np.uint32), lane + 100)
    m.active(lane % 4 == 1).lines(f"scratch_load_{word} v6, v0, off offset:16\n{wait}")
    assert is_equal(m.v(6, np.uint32)[lane % 4 == 1], (lane + 200)[lane % 4 == 1])
    with pytest.raises(OutOfBoundsError, match="lane 1 of wave 0"):
        m.lines(f"scratch_load_{word} v6, v0, off offset:56")


def test_scratch_of_gfx90a_is_refused() -> None:
    """Its encoding does not say whether there is an address register."""
    with pytest.raises(UnsupportedError):
        Machine("gfx90a").set_v(v1=1, v2=0).lines("scratch_store_dword v2, v1, off")


DS = {"gfx1100": ("ds_store_b", "ds_load_"), "gfx1201": ("ds_store_b", "ds_load_")}
DS |= {gfx: ("ds_write_b", "ds_read_") for gfx in OLD_NAMES}


@pytest.mark.parametrize("gfx", WAITS)
def test_lds_accesses_of_halves_and_bytes(gfx: str) -> None:
    """Each fills the half that it names, with its sign where it has one."""
    lane, wait = lanes(gfx), WAITS[gfx][1].format(0)
    store, load = DS[gfx]
    m = Machine(gfx).set_v(v0=4 * lane, v1=0x87FE_8001 + lane)
    m.set_v(**{f"v{register}": 0x1111_2222 for register in (2, 3, 4, 5)})
    m.lines(
        f"{store}32 v0, v1\n{wait}\n"
        f"{load}u16_d16 v2, v0\n{load}u16_d16_hi v3, v0 offset:2\n"
        f"{load}i8_d16 v4, v0 offset:3\n{load}u8_d16_hi v5, v0 offset:3\n"
        f"{load}i16 v6, v0 offset:2\n{load}u8 v7, v0 offset:3\n{wait}"
    )
    assert is_equal(m.v(2, np.uint32), 0x1111_8001 + lane)
    assert is_equal(m.v(3, np.uint32), 0x87FE_2222)
    assert is_equal(m.v(4, np.uint32), 0x1111_FF87) and is_equal(m.v(5, np.uint32), 0x0087_2222)
    assert is_equal(m.v(6, np.uint32), 0xFFFF_87FE) and is_equal(m.v(7, np.uint32), 0x87)
    m.lines(f"{store}16_d16_hi v0, v1\n{wait}\n{load}b32 v8, v0\n{wait}")
    assert is_equal(m.v(8, np.uint32), 0x87FE_87FE)
