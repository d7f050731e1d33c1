"""Atomic accesses to global memory under the executor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.verify.amdgpu import assembled
from tests.verify.amdgpu.assembled import Machine
from tests.verify.amdgpu.errors import HazardError, OutOfBoundsError, UnsupportedError
from tests.verify.amdgpu.memory import Memory

pytestmark = pytest.mark.skipif(assembled.missing() is not None, reason=str(assembled.missing()))
GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942", "gfx90a")
RETURNS = {"gfx1030": "glc", "gfx1100": "glc", "gfx1201": "th:TH_ATOMIC_RETURN", "gfx90a": "glc"}
RETURNS["gfx942"] = "sc0"
OLD_NAMES = ("gfx1030", "gfx942", "gfx90a")


def name_of(gfx: str, operation: str, kind: str = "u32") -> str:
    """Of an instruction without a result, such as add and u32."""
    if gfx not in OLD_NAMES or kind == "f32":
        return f"global_atomic_{operation}_{kind}"
    if operation in ("min", "max"):
        operation = {"i": "s", "u": "u"}[kind[0]] + operation
    return f"global_atomic_{operation}" + ("_x2" if kind.endswith("64") else "")


def machine(gfx: str, words: list[int]) -> tuple[Machine, np.ndarray]:
    """s[2:3]: the address of these words. Lanes 0 to 3 are active; v0 = 0."""
    data = np.array(words, np.uint32)
    memory = Memory()
    memory.add(0x10000, data.view(np.uint8), name="data")
    m = Machine(gfx, memory=memory).set_s(S2=0x10000)
    m.active(np.arange(m.lanes) < 4)
    return m.set_v(v0=0), data


def waited(gfx: str) -> str:
    return "s_wait_loadcnt 0x0" if gfx == "gfx1201" else "s_waitcnt vmcnt(0)"


@pytest.mark.parametrize("gfx", GPUS)
def test_each_lane_finds_what_the_one_before_left(gfx: str) -> None:
    m, data = machine(gfx, [7, 100])
    lane = np.arange(m.lanes)
    m.set_v(v1=lane + 1, v2=0)
    text = f"{name_of(gfx, 'add')} v3, v0, v1, s[2:3] offset:4 {RETURNS[gfx]}"
    with pytest.raises(HazardError, match="v3"):
        m.lines(f"{text}\nv_mov_b32 v4, v3")
    m.lines(f"{waited(gfx)}\nv_mov_b32 v4, v3")
    assert list(data) == [7, 110] and list(m.v(4, np.uint32)[:4]) == [100, 101, 103, 106]
    m.lines(f"{name_of(gfx, 'add')} v0, v1, s[2:3]")
    assert list(data) == [17, 110]


@pytest.mark.parametrize("gfx", GPUS)
def test_one_lane_wins_a_compare_and_swap(gfx: str) -> None:
    """v[4:5]: what is new, what is compared."""
    m, data = machine(gfx, [7, 0])
    lane = np.arange(m.lanes)
    m.set_v(v4=lane + 50, v5=np.where(lane == 2, 7, 8))
    text = f"{name_of(gfx, 'cmpswap', 'b32')} v3, v0, v[4:5], s[2:3] {RETURNS[gfx]}"
    m.lines(f"{text}\n{waited(gfx)}\nv_mov_b32 v6, v3")
    assert list(data) == [52, 0] and list(m.v(6, np.uint32)[:4]) == [7, 7, 7, 52]


CHANGES: tuple[tuple[str, str, int, int, int], ...] = (
    ("swap", "b32", 7, 9, 9),
    ("sub", "u32", 7, 9, 0xFFFFFFFE),
    ("and", "b32", 0xF0F0, 0xFF00, 0xF000),
    ("or", "b32", 0xF0F0, 0xFF00, 0xFFF0),
    ("xor", "b32", 0xF0F0, 0xFF00, 0x0FF0),
    ("min", "i32", 3, 0xFFFFFFFF, 0xFFFFFFFF),
    ("min", "u32", 3, 0xFFFFFFFF, 3),
    ("max", "i32", 3, 0xFFFFFFFF, 3),
    ("max", "u32", 3, 0xFFFFFFFF, 0xFFFFFFFF),
    ("inc", "u32", 3, 4, 4),
    ("inc", "u32", 4, 4, 0),
    ("dec", "u32", 0, 4, 4),
    ("dec", "u32", 3, 4, 2),
)


@pytest.mark.parametrize("gfx", GPUS)
def test_what_each_operation_leaves(gfx: str) -> None:
    for operation, kind, held, own, after in CHANGES:
        m, data = machine(gfx, [held])
        m.active(np.arange(m.lanes) == 1).set_v(v1=own)
        m.lines(f"{name_of(gfx, operation, kind)} v0, v1, s[2:3]")
        assert data[0] == after, (operation, kind, held, own)


@pytest.mark.parametrize("gfx", GPUS)
def test_pairs_of_words_and_floats(gfx: str) -> None:
    m, data = machine(gfx, [0xFFFFFFFF, 1])
    m.active(np.arange(m.lanes) < 2).set_v(v4=1, v5=0)
    m.lines(f"{name_of(gfx, 'add', 'u64')} v0, v[4:5], s[2:3]")
    assert list(data) == [1, 2]
    if gfx != "gfx1030":
        m.set_v(v0=4, v1=0.75)
        data[1] = np.float32(1.5).view(np.uint32)
        m.lines("global_atomic_add_f32 v0, v1, s[2:3]")
        assert data[1:].view(np.float32)[0] == 3.0


@pytest.mark.parametrize("gfx", GPUS)
def test_what_no_atomic_may_do(gfx: str) -> None:
    m, _ = machine(gfx, [0, 0])
    m.set_v(v0=4 * np.arange(m.lanes), v1=1)
    with pytest.raises(OutOfBoundsError, match="lane 2 of wave 0"):
        m.lines(f"{name_of(gfx, 'add')} v0, v1, s[2:3]")
    m.set_v(v0=2)
    with pytest.raises(UnsupportedError, match="aligned"):
        m.lines(f"{name_of(gfx, 'add')} v0, v1, s[2:3]")


def test_the_counter_of_an_atomic_is_that_of_loads_or_of_stores() -> None:
    def issued(gfx: str, more: str) -> Any:
        m, _ = machine(gfx, [0])
        before, result = m.set_v(v1=1).b.issued.copy(), "v3, " if more else ""
        m.lines(f"{name_of(gfx, 'add')} {result}v0, v1, s[2:3] {more}")
        return list((m.b.issued - before)[:2, 0])

    for gfx in GPUS:
        assert issued(gfx, RETURNS[gfx]) == [1, 0]
        assert issued(gfx, "") == ([1, 0] if gfx in ("gfx942", "gfx90a") else [0, 1])
