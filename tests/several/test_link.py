"""A replica's process: it ends with its parent, its words are logged, weights come in pieces."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd import cache
from lib_rocm_sd.cards import replica
from lib_rocm_sd.cards.memory import Shared
from lib_rocm_sd.cards.ranks import FailedError, LostError
from lib_rocm_sd.cards.replica import Link, Replica
from tests.several.help import CPU, LIMIT_S, Teams, near

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from lib_rocm_sd.cards.replica import Link
import threading
made = []
thread = threading.Thread(target=lambda: made.append(Link("a replica")))
thread.start()
thread.join()
print(made[0].pid, flush=True)
time.sleep(600)
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize("how", ["killed", "stopped child"])
def test_it_ends_with_its_parent(how: str) -> None:
    """Also when that is killed, and when the thread that began it has long ended."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(ROOT)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        time.sleep(0.2)
        assert is_there(pid)
        if how == "stopped child":
            os.kill(pid, signal.SIGSTOP)  # it cannot see that its input has ended
        parent.kill()
        parent.wait()
        end = time.monotonic() + LIMIT_S
        while is_there(pid) and time.monotonic() < end:
            time.sleep(0.02)
        assert not is_there(pid)
    finally:
        parent.stdout.close()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_hosts_program_is_not_run_again() -> None:
    """Python's own way of starting processes imports the program that runs."""
    found = replica.command()
    assert "-c" in found and not any(part.endswith("__main__.py") for part in found)
    assert "-I" in found


def test_words_are_logged(team: Teams, plan: Path, caplog: pytest.LogCaptureFixture) -> None:
    team.warm()
    plan.write_text("call words")
    with caplog.at_level(logging.INFO, "rocm_sd"):
        team.call()
        end = time.monotonic() + LIMIT_S
        while "a word of its own" not in caplog.text and time.monotonic() < end:
            time.sleep(0.01)
    assert "replica on cpu: a word of its own" in caplog.text
    plan.write_text("")
    team.call()  # what was said before an answer is not what a process ends by
    assert not team.member._replica._link._words


def test_a_process_that_cannot_be_started(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "command", lambda: ["/nowhere/python"])
    made = Teams(unet, lambda device: Replica(device, CPU, size=1 << 16))
    made.wait()
    assert torch.equal(made.call(), made.alone())
    assert made.team.why.startswith("cpu: ") and "No such file" in made.team.why
    made.team.close()

    def refuse(*given: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(replica.process, "spawn", refuse)
    with pytest.raises(OSError, match="no more processes"):
        Link("a replica")


def test_a_replica_has_the_hosts_cache(tmp_path: Path, plan: Path) -> None:
    """What the host's card has compiled and tried is neither compiled nor tried again."""
    plan.write_text("open cache")
    cache.set_directory(tmp_path)
    try:
        made = Replica(CPU, CPU, size=1 << 16)
    finally:
        cache.set_directory(None)
    with pytest.raises(FailedError, match=re.escape(f"its cache is {tmp_path / 'rocm_sd'}")):
        made.fetch(LIMIT_S)
    made.close()


def test_no_shared_memory(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replica, "Shared", full)
    made = Teams(unet, lambda device: Replica(device, CPU))
    assert torch.equal(made.call(), made.alone())
    assert "No space left on device" in made.team.why


def test_weights_in_pieces(team: Teams, shared: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of the double's is 147456 bytes."""
    monkeypatch.setattr(replica, "PIECES", 3)
    memory = shared._shared
    small = Shared.__new__(Shared)
    vars(small).update(vars(memory), size=60_000)

    def fill(*given: Any) -> int:
        shared._shared = small
        try:
            return Replica.fill(shared, *given)
        finally:
            shared._shared = memory

    monkeypatch.setattr(shared, "fill", fill)
    assert near(team.divided(), team.alone())
    team.team.begin()
    with torch.no_grad():
        for parameter in team.unet.parameters():
            parameter.mul_(1.01)
    assert near(team.divided(), team.alone())


def test_a_call_that_does_not_fit(team: Teams, shared: Replica) -> None:
    team.call()
    memory = shared._shared
    small = Shared.__new__(Shared)
    vars(small).update(vars(memory), size=2048)
    team.call()
    shared._shared = small
    try:
        assert torch.equal(team.call(6), team.alone(6))
        assert "not in 2048 bytes" in team.team.why
    finally:
        shared._shared = memory


def test_shared_memory() -> None:
    memory = Shared(1 << 16)
    other = Shared(1 << 16, memory.name)
    place = memory.tensor(256, (3, 5), torch.float16)
    place.copy_(torch.arange(15).view(3, 5))
    assert torch.equal(other.tensor(256, (3, 5), torch.float16), place)
    for offset, count in ((0, (1 << 16) + 1), (-256, 1), (1, 1), (1 << 16, 1)):
        with pytest.raises(ValueError, match="are not in"):
            memory.tensor(offset, (count,), torch.uint8)
    memory.close()
    assert torch.equal(place, other.tensor(256, (3, 5), torch.float16))  # tensors keep it
    with pytest.raises(ValueError, match="are not in"):
        memory.tensor(0, (1,), torch.uint8)
    with pytest.raises(OSError, match="No such file"):
        Shared(1 << 16, memory.name)
    other.close()


def test_a_lost_process_is_told_at_once(shared: Replica) -> None:
    with pytest.raises(TimeoutError):
        shared._link.receive(0.01)
    with pytest.raises(LostError, match="within 0.01 s"):
        dead = Replica.__new__(Replica)
        killed: list[int] = []
        link_of = type("Silent", (), {"kill": lambda self: killed.append(1)})()
        link_of.receive = shared._link.receive
        vars(dead).update(_link=link_of, waits_for="call", _early=None)
        dead.fetch(0.01)
    assert killed
