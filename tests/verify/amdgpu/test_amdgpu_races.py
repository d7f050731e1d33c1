"""Races in global memory under the executor: barriers, waits, caches, work-groups."""

from __future__ import annotations

import numpy as np
import pytest

from tests.verify.amdgpu import assembled, races
from tests.verify.amdgpu.assembled import Machine
from tests.verify.amdgpu.decode import decode
from tests.verify.amdgpu.errors import RaceError
from tests.verify.amdgpu.memory import Memory
from tests.verify.amdgpu.state import LOAD
from tests.verify.amdgpu.test_amdgpu_hazards import LANE, WAITS, lanes, machine_with_buffer

pytestmark = pytest.mark.skipif(assembled.missing() is not None, reason=str(assembled.missing()))

STORES = {
    "gfx1100": ("global_store_b32", "global_load_b32", "s_waitcnt_vscnt null, 0x0"),
    "gfx1201": ("global_store_b32", "global_load_b32", "s_wait_storecnt 0x0"),
    "gfx942": ("global_store_dword", "global_load_dword", "s_waitcnt vmcnt(0)"),
    "gfx1030": ("global_store_dword", "global_load_dword", "s_waitcnt_vscnt null, 0x0"),
}
BARRIER = {
    "gfx1100": ("s_barrier", "buffer_gl0_inv"),
    "gfx1201": ("s_barrier_signal -1\ns_barrier_wait 0xffff", "global_inv scope:SCOPE_SE"),
    "gfx942": ("s_barrier", "s_nop 0"),
    "gfx1030": ("s_barrier", "buffer_gl0_inv"),
}


def sharing(gfx: str, groups: bool = False) -> Machine:
    """Two waves, of one group or of two, with 512 bytes at s[2:3]: v0 a wave's own half of it, v5
    the other's, v6 the same for both, v1 numbers, v7 one number for all.
    """
    m, _ = machine_with_buffer(gfx, words=128, waves=2)
    lane, wave = lanes(gfx), np.arange(2)[:, None]
    own = 4 * lane + 256 * wave
    for register, value in ((0, own), (5, own ^ 256), (6, 4 * lane + 0 * wave), (1, own)):
        m.b.put_v(register, value.astype(np.uint32))
    m.set_v(v7=7)
    if groups:
        m.b.group[...] = m.b.slot[...] = np.arange(2)
        m.b.wave[...] = 0
        m.space.races.begin(2)
    return m


def shared(gfx: str, *steps: str) -> Machine:
    return performed(sharing(gfx), gfx, *steps)


def performed(m: Machine, gfx: str, *steps: str) -> Machine:
    """Each "store" or "load" of an address, "wait", "barrier", "empty"."""
    store, load, stored = STORES[gfx]
    barrier, empty = BARRIER[gfx]
    said = {"wait": f"{stored}\n{WAITS[gfx][0].format(0)}", "barrier": barrier, "empty": empty}
    for step in steps:
        what, _, place = step.partition(" ")
        said["store"] = f"{store} {place}, v1, s[2:3]"
        said["load"] = f"{load} v2, {place}, s[2:3]"
        m.lines(said[what])
    return m


@pytest.mark.parametrize("gfx", STORES)
def test_waves_that_touch_the_same_global_memory_need_a_barrier(gfx: str) -> None:
    shared(gfx, "store v0", "load v0", "store v0")
    shared(gfx, "load v6", "load v5", "load v0")
    for steps in (("store v0", "load v5"), ("load v5", "store v0"), ("store v6",)):
        with pytest.raises(RaceError, match=r"lane \d+|another lane"):
            shared(gfx, *steps)
    whole = ("wait", "barrier", "empty")
    shared(gfx, "store v0", *whole, "load v5")
    shared(gfx, "load v5", *whole, "store v0")
    shared(gfx, "store v0", *whole, "store v5")
    with pytest.raises(RaceError, match="no barrier"):
        shared(gfx, "store v0", *whole, "load v5", "store v0")


@pytest.mark.parametrize("gfx", STORES)
def test_a_race_names_both_waves_lanes_and_instructions(gfx: str) -> None:
    m = sharing(gfx).active(lanes(gfx) == 3)
    performed(m, gfx, "store v0")
    m.active(lanes(gfx) >= 2)
    with pytest.raises(RaceError) as caught:
        performed(m, gfx, "load v5")
    said = str(caught.value)
    assert "lane 3 of wave 0, group 0, loads at data + 0x10c what lane 3 of wave 1" in said
    assert "stored by 0x0: global_store" in said and "at 0x0: global_load" in said


@pytest.mark.parametrize("gfx", STORES)
def test_readers_of_one_instruction_are_all_remembered(gfx: str) -> None:
    m = shared(gfx, "load v6")
    m.active(np.stack([lanes(gfx) < 0, lanes(gfx) == 0]))
    with pytest.raises(RaceError, match="of wave 1, group 0, stores .* of wave 0"):
        performed(m, gfx, "store v6")


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201", "gfx1030"])
def test_a_barrier_orders_only_what_was_waited_for(gfx: str) -> None:
    """Two CUs with a cache each, of which the reader's must be emptied."""
    for first, second in (("store v0", "load v5"), ("load v5", "store v0")):
        with pytest.raises(RaceError, match="not waited for"):
            shared(gfx, first, "barrier", "empty", second)
        with pytest.raises(RaceError, match="not waited for"):
            shared(gfx, first, "barrier", "wait", "empty", second)
    for steps in (("barrier",), ("empty", "barrier")):
        with pytest.raises(RaceError, match="not emptied"):
            shared(gfx, "store v0", "wait", *steps, "load v5")


def test_one_cache_needs_no_wait() -> None:
    """A work-group of CDNA is on one CU, which performs accesses in their order."""
    shared("gfx942", "store v0", "barrier", "load v5")
    shared("gfx942", "load v5", "barrier", "store v0")


def test_what_follows_a_signal_is_not_ordered_by_its_barrier() -> None:
    m = sharing("gfx1201").lines("s_barrier_signal -1")
    performed(m, "gfx1201", "store v0", "wait")
    m.lines("s_barrier_wait 0xffff")
    with pytest.raises(RaceError, match="no barrier lies between"):
        performed(m, "gfx1201", "empty", "load v5")


@pytest.mark.parametrize("gfx", STORES)
def test_nothing_orders_work_groups(gfx: str) -> None:
    whole = ("wait", "barrier", "empty")
    pairs = (("store v0", "load v5"), ("load v5", "store v0"), ("store v0", "store v5"))
    for first, second in pairs:
        with pytest.raises(RaceError, match="nothing orders work-groups"):
            performed(sharing(gfx, groups=True), gfx, first, *whole, second)


@pytest.mark.parametrize("gfx", STORES)
def test_a_reader_of_another_group_is_remembered_beside_many_of_the_own(gfx: str) -> None:
    m = sharing(gfx)
    performed(m, gfx, "load v6")
    m.b.group = np.ones(2, np.int64)
    performed(m, gfx, "load v6", "wait", "barrier", "empty", "load v6", "wait", "barrier", "empty")
    m.active(np.stack([lanes(gfx) < 0, lanes(gfx) == 0]))
    with pytest.raises(RaceError, match="group 1, stores .* group 0, loaded.*orders work-groups"):
        performed(m, gfx, "store v6")


@pytest.mark.parametrize("gfx", STORES)
def test_the_same_value_may_be_stored_twice(gfx: str) -> None:
    """As kernels set a flag from wherever they see a reason."""
    store, _, _ = STORES[gfx]
    m = sharing(gfx, groups=True).lines(f"{store} v6, v7, s[2:3]\n{store} v6, v7, s[2:3]")
    with pytest.raises(RaceError, match="orders work-groups"):
        m.active(np.stack([lanes(gfx) == 0, lanes(gfx) < 0])).lines(f"{store} v6, v1, s[2:3]")
    m = sharing(gfx, groups=True)
    m.b.put_v(8, np.zeros((2, len(lanes(gfx))), np.uint32))
    m.active(np.stack([lanes(gfx) < 2, lanes(gfx) < 0]))
    with pytest.raises(RaceError, match="lane 0 of wave 0, group 0, and another lane"):
        m.lines(f"{store} v8, v1, s[2:3]")


@pytest.mark.parametrize("gfx", STORES)
def test_halves_of_a_word_are_told_apart(gfx: str) -> None:
    half = "global_store_short" if gfx in ("gfx942", "gfx1030") else "global_store_b16"
    m = sharing(gfx, groups=True)
    m.b.put_v(8, (4 * lanes(gfx) + 2 * m.b.group[:, None]).astype(np.uint32))
    m.lines(f"{half} v8, v1, s[2:3]")
    with pytest.raises(RaceError, match="orders work-groups"):
        m.active(lanes(gfx) == 9).lines(f"{half} v6, v1, s[2:3]")


@pytest.mark.parametrize("gfx", STORES)
def test_a_scalar_load_finds_nothing_that_was_stored(gfx: str) -> None:
    scalar = (
        "s_load_dword s8, s[2:3], 0x8"
        if gfx in ("gfx942", "gfx1030")
        else "s_load_b32 s8, s[2:3], 0x8"
    )
    m = shared(gfx, "store v0", "wait", "barrier", "empty")
    with pytest.raises(RaceError, match="wave 0, group 0, loads .* scalar load may find"):
        m.lines(scalar)
    m = sharing(gfx).lines(scalar)
    with pytest.raises(RaceError, match="stores .* wave 0, group 0, loaded by .*s_load"):
        m.active(np.stack([lanes(gfx) < 0, lanes(gfx) == 2])), performed(m, gfx, "store v6")


def test_races_are_found_after_addresses_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "MOST_BYTES", 1)
    for steps in (("store v0", "load v5"), ("load v5", "store v0"), ("load v6", "store v6")):
        with pytest.raises(RaceError):
            shared("gfx1100", *steps)
    shared("gfx1100", "load v6", "load v5", "wait", "barrier", "store v0")


def test_many_buffers_that_are_near_are_watched_together() -> None:
    """As of a tensor of which only some rows can be touched, gigabytes apart."""
    gfx, data = "gfx1100", np.zeros(64 * 20, np.uint32)
    memory = Memory()
    for row in range(20):
        memory.add(0x10000 + (row << 33), data[64 * row :][:64].view(np.uint8), name=f"row {row}")
    m = Machine(gfx, waves=2, memory=memory).set_s(S2=0x10000 + (19 << 33))
    m.b.put_v(0, (4 * LANE + 128 * np.arange(2)[:, None]).astype(np.uint32))
    m.set_v(v1=5).lines("global_store_b32 v0, v1, s[2:3]").lines("v_xor_b32 v0, 0x80, v0")
    with pytest.raises(RaceError, match=r"loads at row 19 \+ 0x80 what lane 0 of wave 1"):
        m.lines("global_load_b32 v2, v0, s[2:3]")
    assert m.space.races.regions() == [(0x10000, 0x10100 + (19 << 33))]


@pytest.mark.parametrize("gfx", STORES)
def test_atomics_may_meet_atomics_only(gfx: str) -> None:
    load = decode(assembled.assemble(gfx, f"{STORES[gfx][1]} v2, v6, s[2:3]"), 0, gfx)[0]
    at = np.broadcast_to(0x10000 + 4 * np.uint64(lanes(gfx)), (2, len(lanes(gfx)))).ravel()
    m = sharing(gfx, groups=True)
    for _ in range(2):
        m.space.races.atomic(m.b, load, at, 4, LOAD)
    for step in ("load v0", "store v0"):
        with pytest.raises(RaceError, match="orders work-groups"):
            performed(m, gfx, step)
    for step in ("load v0", "store v0"):
        m = performed(sharing(gfx, groups=True), gfx, step)
        with pytest.raises(RaceError, match="orders work-groups"):
            m.space.races.atomic(m.b, load, at, 4, LOAD)
