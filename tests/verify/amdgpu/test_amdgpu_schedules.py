"""Waves that take turns at random: what is right in lockstep is right in every order.

`--schedules N` draws N of them for each case. A failure names its schedule, which draws the same
again: `-k "schedule-7"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib_rocm_sd.ops.conv.problem import ConvProblem
from tests import executed
from tests.verify import simt
from tests.verify.amdgpu import cases
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.coverage import kernel_of
from tests.verify.amdgpu.judge import execute
from tests.verify.amdgpu.launch import missing
from tests.verify.amdgpu.lines import text_at
from tests.verify.amdgpu.races import Races
from tests.verify.amdgpu.schedules import Drawn, Lockstep
from tests.verify.amdgpu.state import Waves
from tests.verify.amdgpu.test_amdgpu_kernels import GPUS, check

RARELY = 2
"""Schedules of each case that are drawn where nothing is said."""
IN_PLACE = ConvProblem(*("3x3", 1, 3, 18, 32, 128, "float16", True, "conv"), *(160, False, True))
"""The output lies over the shortcut's image, and no statistics are made."""


def chosen(gfx: str) -> Iterator[Case]:
    """Kernels whose waves work together, small ones."""
    attention = list(cases.attention(gfx))
    for head_dim, config in ((40, 0), (40, 3), (256, 0), (512, 0)):
        found = (c for c in attention if (c.problem.head_dim, c.config) == (head_dim, config))
        yield from list(found)[:1]
    convs = list(cases.conv(gfx))
    yield next(c for c in convs if c.problem.statistics and c.problem.norm)
    yield from [c for c in convs if c.problem.in_place and c.problem.out_channels == 128][:2]
    yield next(iter(cases.finish(gfx)))
    yield next(iter(cases.group_norm(gfx)))
    yield next(iter(cases.layer_norm(gfx)))
    yield next(iter(cases.softmax(gfx)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "drawn" in metafunc.fixturenames:
        count = metafunc.config.getoption("--schedules") or RARELY
        found = [
            pytest.param(
                replace(case, schedule=number), id=f"{gfx}-{case.op}-{place}-schedule-{number}"
            )
            for gfx in GPUS
            for place, case in enumerate(chosen(gfx))
            for number in range(1, count + 1)
        ]
        metafunc.parametrize("drawn", found)


@executed.known(by="clang", together=lambda drawn: kernel_of(drawn), once=True)
def test_machine_code_is_right_in_any_order(drawn: Case) -> None:
    check(drawn)


needs_clang = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def without_the_barrier() -> Path:
    """Between reading the shortcut and writing over it, where no statistics are made."""
    needed = "if constexpr (SHORTCUT != kShortcutNone || STATISTICS) barrier();"
    return simt.planted("common/conv.h", needed, "if constexpr (STATISTICS) barrier();")


@needs_clang
@pytest.mark.parametrize("gfx", GPUS)
def test_the_barrier_before_writing_over_the_shortcut_is_needed(gfx: str) -> None:
    case = Case(gfx, "conv", IN_PLACE)
    assert not execute(case).faults
    (said,) = execute(case, without_the_barrier()).faults
    assert said.startswith("RaceError: lane") and "no barrier lies between" in said
    assert "loaded by" in said and "global_store" in said
    lines = re.search(r"(\w+\.h):(\d+) after (\w+\.h):(\d+)$", said)
    assert lines is not None, said
    assert "piece;" in text_at(lines[1], int(lines[2]))
    assert "*(const" in text_at(lines[3], int(lines[4]))


@needs_clang
def test_orders_that_are_drawn_find_what_lockstep_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody notes who touched what."""
    monkeypatch.setattr(Races, "load", lambda *_: None)
    monkeypatch.setattr(Races, "store", lambda *_: None)
    case, kernels_dir = Case("gfx1100", "conv", IN_PLACE), without_the_barrier()
    assert not execute(case, kernels_dir).faults
    orders = (execute(replace(case, schedule=number), kernels_dir) for number in range(1, 9))
    assert any("largest error" in fault for found in orders for fault in found.faults)


@needs_clang
def test_a_fault_names_its_schedule() -> None:
    case = Case("gfx1100", "conv", IN_PLACE, seed=5, schedule=3)
    assert "schedule 3 of seed 5" in " ".join(execute(case, without_the_barrier()).faults)
    assert str(case).endswith("schedule 3 of seed 5")
    assert "schedule" not in str(replace(case, schedule=0))


# -- the orders themselves -----------------------------------------------------------------------


def waves(count: int, groups: int) -> Waves:
    b = Waves(1, count, 32)
    b.wave[...], b.group[...] = (
        np.arange(count) % (count // groups),
        np.arange(count) * groups // count,
    )
    b.slot[...] = b.group
    return b


def turns(seed: int, count: int = 40) -> list[tuple[Any, ...]]:
    """Who goes on, for how many instructions: 8 waves of 2 groups that never end."""
    schedule, ready, found = Drawn(seed, 4), [waves(8, 2)], []
    for _ in range(count):
        batch, ready, _, most = schedule.chosen(ready)
        found.append((tuple(batch.group), tuple(batch.wave), most))
        batch.pc += most
        ready.append(batch)
        assert sum(b.count for b in ready) == 8
    return found


def test_a_seed_draws_the_same_order_again() -> None:
    assert turns(1) == turns(1)
    assert turns(1) != turns(2)
    assert len({who[:2] for who in turns(1)}) > 4
    sets = [Drawn(7, 4).sets(range(50), 8) for _ in range(2)]
    assert [list(each) for each in sets[0]] == [list(each) for each in sets[1]]
    assert sorted(np.concatenate(sets[0])) == list(range(50))
    assert len({len(each) for each in sets[0]}) > 1


def test_a_group_passes_its_barrier_when_all_of_it_has_come() -> None:
    b, live = waves(8, 2), np.array([4, 4])
    early, late = b.part(np.array([0, 1, 2, 3, 4, 5])), b.part(np.array([6, 7]))
    for schedule in (Drawn(seed, 4) for seed in range(20)):
        passed, waiting = schedule.released([late], [early.part(np.arange(6))], live)
        assert not passed or all(p.group.tolist() == [0] * 4 for p in passed)
        assert sum(w.count for w in waiting) in (6, 2)
    passed, waiting = Drawn(1, 4).released([], [early], np.array([4, 2]))
    assert passed, "one of the other group's waves has ended"
    passed, waiting = Lockstep(1, 4).released([late], [early], live)
    assert not passed and waiting == [early]
    passed, waiting = Lockstep(1, 4).released([], [early, late], live)
    assert sum(p.count for p in passed) == 8 and not waiting
