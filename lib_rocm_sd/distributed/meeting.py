"""How ranks find each other before there is a process group: each says what it has, reads what the
others have, and all come to the same conclusion.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lib_rocm_sd.distributed.errors import RankError

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
    made = []
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
        made.append(dist.PrefixStore(prefix, store))
    return made[0], made[1]


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
    found = [Member(**json.loads(store.get(key))) for key in keys]
    store.set(f"read/{own.rank}", "")
    if own.rank == 0 and not launcher_has_store():  # the store must not end with it before
        with suppress(RuntimeError):  # who is gone meanwhile is named by what comes next
            store.wait([f"read/{rank}" for rank in range(size)], timedelta(seconds=limit_s))
    return found


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
    known = torch.cuda.get_device_properties(device)
    free = 0 if unfit else torch.cuda.mem_get_info(device)[0]
    card = str(getattr(known, "uuid", "") or f"{_visible()} {device.index}")
    return Member(rank, machine, str(device), card, known.name, free, unfit)


def _visible() -> str:
    """What tells cards apart by number where torch does not know their ids."""
    return " ".join(os.environ.get(name, "") for name in VISIBLE)


def computes_right(device: torch.device) -> str:
    """The self-test: why this device cannot take part; empty if it can. A product of matrices."""
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.randn((64, 64), generator=generator) for _ in range(2))
    try:
        made = (a.to(device) @ b.to(device)).cpu()
    except RuntimeError as error:
        return f"it cannot multiply: {str(error).splitlines()[0]}"
    wrong = float((made.double() - a.double() @ b.double()).abs().max())
    return "" if wrong < 0.1 else f"it multiplies wrongly, by {wrong:.3g}"
