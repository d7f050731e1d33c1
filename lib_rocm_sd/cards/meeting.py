"""How ranks find each other before there is a process group, and how each knows that the others
live: each says what it has, reads what the others have, and all come to the same conclusion.

NCCL's calls do not notice that a peer has died, and gloo's do not say which. So a thread of each
rank counts up a value in the store, and looks at the others'. Who fails writes why in its stead.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lib_rocm_sd.cards.ranks import RankError

WANTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_joined = 0
_served: dict[int, Any] = {}
"""By port, the stores that this process has: one that joins again may be connected before it is."""


@dataclass(frozen=True)
class Place:
    """Where a rank is among the others, by torchrun's variables."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int


@dataclass(frozen=True)
class Member:
    """What a rank has. `card` tells devices apart within a machine; empty for the CPU.

    `free_bytes`: of the device's memory. `unfit`: why it cannot take part, by its self-test.
    """

    rank: int
    machine: str
    device: str
    card: str = ""
    name: str = ""
    free_bytes: int = 0
    unfit: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.machine}, {self.name or self.device})"


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """From torchrun's variables. Raises ValueError where they are missing or no numbers."""
    missing = [name for name in WANTED if name not in environment]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: start this by torchrun")
    rank = _number(environment, "RANK")
    size = _number(environment, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ValueError(f"RANK {rank} is not one of {size} (WORLD_SIZE)")
    local = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
    port = _number(environment, "MASTER_PORT")
    return Place(rank, size, local, environment["MASTER_ADDR"], port)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"{name} is no number: {environment[name]!r}") from None


def stores(where: Place, limit_s: float) -> tuple[Any, Any]:
    """Two connections to the same keys, new for each time that ranks join.

    The second is for a thread of its own. The launcher has the store, or else rank 0.
    """
    global _joined
    _joined += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"rocm_sd/{attempt}/{_joined}"
    connections = []
    for index in range(2):
        master = where.rank == 0 and not launcher_has_store() and index == 0
        try:
            store = dist.TCPStore(
                where.host,
                where.port,
                is_master=master,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            at = f"{where.host}:{where.port}"
            raise RankError(f"no store at {at} within {limit_s:g} s: {error}") from error
        if master:
            _served[where.port] = store
        connections.append(dist.PrefixStore(prefix, store))
    return connections[0], connections[1]


def launcher_has_store() -> bool:
    """Whether the store is in torchrun's process; else rank 0 has it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(store: Any, own: Member, size: int, limit_s: float) -> list[Member]:
    """All ranks' members, in order. Raises RankError with the names of those that did not come."""
    store.set(f"member/{own.rank}", json.dumps(asdict(own)))
    keys = [f"member/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except RuntimeError as error:
        late = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if not late:
            raise RankError(f"the store failed while ranks met: {error}") from error
        raise RankError(f"rank {', '.join(late)} did not come within {limit_s:g} s") from error
    members = [Member(**json.loads(store.get(key))) for key in keys]
    store.set(f"read/{own.rank}", "")
    if own.rank == 0 and not launcher_has_store():  # the store must not end with it before
        with suppress(RuntimeError):  # who is gone meanwhile is named by what comes next
            store.wait([f"read/{rank}" for rank in range(size)], timedelta(seconds=limit_s))
    return members


def twice(members: Sequence[Member]) -> str:
    """Which device two ranks have; empty where each has its own."""
    seen: dict[tuple[str, str], Member] = {}
    for member in members:
        key = (member.machine, member.card)
        if member.card and key in seen:
            return f"{seen[key]} and rank {member.rank} have the same device, {member.device}"
        seen[key] = member
    return ""


def chosen_device(asked: str | torch.device | None, local_rank: int) -> torch.device:
    """The device of this rank. Raises ValueError where this machine does not have it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cpu") if asked is None else torch.device(asked)
    if asked is None and count:
        device = torch.device("cuda", local_rank)
    index: int | None = device.index
    if device.type == "cuda" and index is None:
        device = torch.device("cuda", local_rank)
    if device.type == "cuda" and device.index >= count:
        raise ValueError(
            f"{device} is asked for, and this machine has {count}: start as many processes on it "
            "as it has cards (torchrun --nproc-per-node)"
        )
    return device


def member(rank: int, device: torch.device, unfit: str) -> Member:
    """What this rank tells the others of itself."""
    machine = socket.gethostname()
    if device.type != "cuda":
        return Member(rank, machine, str(device), unfit=unfit)
    properties = torch.cuda.get_device_properties(device)
    free = 0 if unfit else torch.cuda.mem_get_info(device)[0]
    visible = " ".join(os.environ.get(name, "") for name in VISIBLE)
    # by number where torch does not know their ids
    card = str(getattr(properties, "uuid", "") or f"{visible} {device.index}")
    return Member(rank, machine, str(device), card, properties.name, free, unfit)


def computes_right(device: torch.device) -> str:
    """The self-test: why this device cannot take part; empty if it can. A product of matrices."""
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.randn((64, 64), generator=generator) for _ in range(2))
    try:
        product = (a.to(device) @ b.to(device)).cpu()
    except RuntimeError as error:
        return f"it cannot multiply: {str(error).splitlines()[0]}"
    wrong = float((product.double() - a.double() @ b.double()).abs().max())
    return "" if wrong < 0.1 else f"it multiplies wrongly, by {wrong:.3g}"


SHORTEST_S, LONGEST_S = 0.05, 1.0
SILENT_BEATS = 4
"""After so many beats without a sign, a rank is what an exchange that failed had waited for."""
GONE_S = 10.0
"""After so long, or half of the limit, it is gone, whether anything failed or not."""
LEFT, FAILED = "left", "failed"


class Pulse:
    """The sign of life of rank `rank`. `names`: all ranks' names, in order.

    `calls()`: exchanges begun so far. `lost(why)` is called once, in the thread, when another rank
    is gone or has failed.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        names: Sequence[str],
        limit_s: float,
        calls: Callable[[], int],
        lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._calls, self._lost, self._clock = calls, lost, clock
        self.beat_s = min(max(limit_s / 20, SHORTEST_S), LONGEST_S)
        self._gone_s = max(min(limit_s / 2, GONE_S), SILENT_BEATS * self.beat_s)
        self._heard = {other: ("", clock()) for other in range(len(names)) if other != rank}
        self._answered_s = clock()
        self._count = 0
        self._end = threading.Event()
        self.gone = ""
        """Why all have to end, once that is known."""
        self._thread = threading.Thread(target=self._run, name="rocm_sd pulse", daemon=True)
        self._set(f"0 {calls()}")

    def start(self) -> None:
        """Beat from now on."""
        self._thread.start()

    def stop(self, last_word: str = LEFT) -> None:
        """Beat no more; what the others read from now on."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._set(last_word)
        except (RuntimeError, OSError):  # the store's process has ended before
            return

    def stay(self) -> None:
        """For the process that has the store, after `stop`: until the others have said their last
        word too or are silent, not longer than half of the limit. They could not read why it ends.
        """
        silent_s = SILENT_BEATS * self.beat_s
        keys = [_key(other) for other in self._heard]
        end = self._clock() + self._gone_s
        while self._clock() < end:
            try:
                if self._store.check(keys):
                    self._look()
            except (RuntimeError, OSError):  # then nobody else reads it either
                return
            now = self._clock()
            if all(
                said == LEFT or said.startswith(FAILED) or now - at > silent_s
                for said, at in self._heard.values()
            ):
                return
            time.sleep(self.beat_s / 4)

    def beat(self) -> None:
        """One sign of life, and one look at the others."""
        self._count += 1
        try:
            self._set(f"{self._count} {self._calls()}")
            self._look()
        except (RuntimeError, OSError):  # which ones is torch's affair: DistError, connections
            return

    def why(self, silent_s: float) -> str:
        """Who failed, or was not heard of for so long; empty for nobody."""
        now = self._clock()
        for other, (said, _) in self._heard.items():
            if said.startswith(FAILED):
                return f"{self._names[other]} {said}"
        if now - self._answered_s > silent_s:
            return (
                "the store does not answer: its process (rank 0's, or the launcher) is gone, or "
                "this machine has lost its network"
            )
        for other, (said, heard_s) in self._heard.items():
            if said != LEFT and now - heard_s > silent_s:
                return f"{self._names[other]} died: no sign of life for {now - heard_s:.1f} s"
        return ""

    def named(self) -> str:
        """Why an exchange has failed: waits until somebody is known to be gone, not longer than it
        takes to know; else who is behind, by the number of exchanges begun.
        """
        silent_s = SILENT_BEATS * self.beat_s
        end = self._clock() + silent_s + 2 * self.beat_s
        while not (why := self.why(silent_s)) and self._clock() < end:
            time.sleep(self.beat_s / 2)
        return why or self._behind()

    def _behind(self) -> str:
        calls = {self._rank: self._calls()}
        for other, (said, _) in self._heard.items():
            if said == LEFT:
                return f"{self._names[other]} has left before"
            calls[other] = int(said.split()[1])
        least = min(calls.values())
        if least == max(calls.values()):
            return ""
        slow = [self._names[other] for other, count in sorted(calls.items()) if count == least]
        return f"{', '.join(slow)} did not come: {least} exchanges of {max(calls.values())}"

    def _run(self) -> None:
        while not self._end.wait(self.beat_s):
            self.beat()
            why = self.why(self._gone_s)
            if why and not self.gone:
                self.gone = why
                self._lost(why)

    def _look(self) -> None:
        for other, (before, _) in self._heard.items():
            word = self._store.get(_key(other)).decode()
            if word != before:
                self._heard[other] = (word, self._clock())
        self._answered_s = self._clock()

    def _set(self, said: str) -> None:
        self._store.set(_key(self._rank), said)


def _key(rank: int) -> str:
    return f"pulse/{rank}"
