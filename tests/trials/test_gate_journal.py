"""A fault that comes in the program alone: the journal says so to the next start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.trials import verdicts
from lib_rocm_sd.trials.verdicts import FAULTED, INTERRUPTED, PASSED
from tests.trials.scaling import SCALING
from tests.trials.world import World, again, key_of

DIES = """
import os, sys
from pathlib import Path
from lib_rocm_sd.trials.journal import Journal
with Journal(Path(sys.argv[1])).trying(sys.argv[2], "scaling", "Card"):
    os.{how}
"""


def test_the_first_launches_stand_in_the_journal_and_later_ones_cost_nothing(
    world: World, tmp_path: Path
) -> None:
    world.run()
    world.settled()
    folder, seen = tmp_path / "journal", []
    world.launch.during = lambda: seen.append(len(list(folder.iterdir())))
    world.run()
    assert seen == [1, 0, 1]  # the class's self-test, its second problem, its first call
    world.run()
    assert seen == [1, 0, 1, 0]
    (route,) = world.user.engine._routes.values()
    assert route.run == SCALING.variants[0].run
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_fault_that_comes_only_here_is_barred_at_the_next_start(world: World) -> None:
    world.run()
    world.settled()
    die(world, "abort()")
    later = again(world)
    (barred,) = later.started
    assert barred.outcome == FAULTED
    assert "Aborted" in later.said[0]
    assert (later.run(), later.children) == ("torch", 0)
    assert (later.run(3.0), later.started) == ("torch", [barred])
    later.settled()
    assert later.run(3.0) == "rocm_sd"
    assert again(later).started == []
    assert again(later, "driver 2").why() != later.why()


def test_a_closed_window_is_forgiven_once(world: World) -> None:
    world.run()
    world.settled()
    die(world, "_exit(0)")
    later = again(world)
    assert [verdict.outcome for verdict in later.started] == [INTERRUPTED]
    assert later.run() == "torch"
    later.settled()
    assert later.run() == "rocm_sd"
    die(world, "_exit(0)")
    last = again(world)
    assert last.run() == "torch"
    assert last.children == 0
    assert "2 times" in last.why()


def test_who_asks_after_two_such_ends_is_answered_until_the_next(world: World) -> None:
    world.run()
    world.settled()
    for _ in range(2):
        die(world, "_exit(0)")
        again(world)
    asked = again(world)
    assert asked.run() == "torch"
    assert asked.gate.ask() == 1
    asked.settled()
    assert asked.run() == "rocm_sd"
    die(world, "_exit(0)")
    last = again(world)
    assert (last.run(), last.children) == ("torch", 0)
    assert "3 times" in last.why()


def die(world: World, how: str) -> None:
    """A process that ends in the first launch of the class."""
    folder = str(world.journal._folder)
    command = [sys.executable, "-c", DIES.format(how=how), folder, key_of(world)]
    root = Path(__file__).parents[2]
    subprocess.run(command, cwd=root, check=False, capture_output=True, timeout=600)
    assert len(os.listdir(folder)) == 1  # noqa: PTH208


@pytest.mark.parametrize("stage", ["self-test", "call"])
def test_an_error_of_the_driver_here_bars_the_class_for_later_too(world: World, stage: str) -> None:
    world.run()
    world.settled()
    if stage == "call":
        world.run()
        world.user.engine.renew()
    world.launch.error = LaunchError("hipModuleLaunchKernel: an illegal memory access", 700)
    assert world.run() == "torch"
    assert "illegal memory access" in world.why()
    later = again(world)
    assert (later.run(), later.children) == ("torch", 0)
    verdict = verdicts.read(key_of(world))
    assert verdict is not None
    assert verdict.outcome == FAULTED


def test_too_little_memory_here_bars_nothing_for_later(world: World) -> None:
    world.run()
    world.settled()
    world.launch.error = LaunchError("hipModuleLaunchKernel: too many resources (701)", 701)
    assert world.run() == "torch"
    verdict = verdicts.read(key_of(world))
    assert verdict is not None
    assert verdict.outcome == PASSED
