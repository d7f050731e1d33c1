"""The ranks that work together: who they are, what they exchange, and how they end.

All exchange is torch.distributed's: NCCL or RCCL for what lies on GPUs, gloo for what lies in the
host's memory. Bytes are sent as such, so every dtype is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lib_rocm_sd.cards import meeting
from lib_rocm_sd.cards.meeting import FAILED, Member, Pulse
from lib_rocm_sd.cards.memory import MOST_TENSORS, blank, described
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.cards.shares import Part, split
from lib_rocm_sd.report import report

LIMIT_S = 120.0
SHARES = ("equal", "memory")
_all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
"""Into one tensor, which NCCL fills in place; the first is its name in newer torch."""


class LeftOut(SystemExit):  # noqa: N818 - no error of the program's: the others go on
    """This rank's device is not used. Ends the process with status 0, so its launcher lets the
    others go on.
    """

    def __init__(self, why: str) -> None:
        super().__init__(0)
        self.why = why

    def __str__(self) -> str:
        return self.why


@dataclass
class Traffic:
    """What this rank took part in: exchanges, and bytes that it gave to others."""

    exchanges: int = 0
    sent_bytes: int = 0
    calls: int = 0
    """Calls of torch.distributed, waits included: they show which rank is behind."""


class Waiting:
    """An exchange under way. `wait()` gives what `finish` makes of it; the same each time."""

    def __init__(self, group: Group, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._group, self._works, self._made = group, list(works), None
        self._finish: Callable[[], Any] | None = finish

    def wait(self) -> Any:
        with self._group.named(None):
            while self._works:
                self._works.pop(0).wait()
        if self._finish is not None:
            self._made, self._finish = self._finish(), None
        return self._made


class Group:
    """`members` in order, of which this process is number `rank`; `size` of them.

    `weights`: what share of the work each takes. Not thread-safe; every rank makes the same calls
    in the same order.
    """

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        device: torch.device,
        weights: Sequence[float],
        ranks: Any = None,
    ) -> None:
        self.members, self.rank, self.device = tuple(members), rank, device
        self.weights, self.size = tuple(weights), len(members)
        self.traffic = Traffic()
        self._ranks = ranks
        self._pulse: Pulse | None = None
        self._global = list(range(self.size))

    def shares(self, count: int, least: int = 0) -> list[Part]:
        """0 to `count`, a part for each rank by the weights; see shares.split."""
        return split(count, self.weights, least)

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors of one shape, in order."""
        parts: list[torch.Tensor] = self.start_gather(own).wait()
        return parts

    def start_gather(self, own: torch.Tensor) -> Waiting:
        """The same, under way while this rank computes on."""
        flat = own.contiguous().flatten().view(torch.uint8)
        whole = flat.new_empty(self.size * flat.numel())
        with self.named(flat.numel() * (self.size - 1)):
            work = _all_gather(whole, flat, group=self._ranks, async_op=True)

        def finish(kept: torch.Tensor = flat) -> list[torch.Tensor]:  # kept until it is sent
            return list(whole.view(own.dtype).view(self.size, *own.shape))

        return Waiting(self, [work], finish)

    def concatenate(self, own: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """All ranks' tensors along `dim`, where rank r has `sizes[r]` of it."""
        whole: torch.Tensor = torch.cat(self.start_parts(own, sizes, dim).wait(), dim)
        return whole

    def start_parts(self, own: torch.Tensor, sizes: Sequence[int], dim: int) -> Waiting:
        """The tensors that `concatenate` puts together, under way."""
        missing = max(sizes) - own.shape[dim]
        padding = (0, 0) * (own.ndim - 1 - dim) + (0, missing)
        gathered = self.start_gather(F.pad(own, padding) if missing else own)

        def finish() -> list[torch.Tensor]:
            pairs = zip(gathered.wait(), sizes, strict=True)
            return [part.narrow(dim, 0, size) for part, size in pairs]

        return Waiting(self, [], finish)

    def start_swap(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]
    ) -> Waiting:
        """Send a tensor to each rank of `sent`; fill those of `received`, which are contiguous."""
        keys = sorted({*sent, *received})
        outgoing = {key: sent[key].contiguous().flatten().view(torch.uint8) for key in sent}
        incoming = {key: received[key].flatten().view(torch.uint8) for key in received}
        calls = []
        for key in keys:
            peer = self._global[key]
            if key in outgoing:
                calls.append(dist.P2POp(dist.isend, outgoing[key], peer, self._ranks))
            if key in incoming:
                calls.append(dist.P2POp(dist.irecv, incoming[key], peer, self._ranks))
        with self.named(sum(tensor.numel() for tensor in outgoing.values())):
            works = dist.batch_isend_irecv(calls) if calls else []
        return Waiting(self, works, lambda: (received, outgoing)[0])

    def exchange(self, sent: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """See Ranks. Shapes go by the CPUs' memory, so that no device is waited for."""
        own = torch.tensor([described(sent.get(rank, ())) for rank in range(self.size)])
        received = {
            rank: blank(each[self.rank].tolist(), self.device)
            for rank, each in enumerate(self.gather(own))
            if rank != self.rank
        }
        for place in range(MOST_TENSORS):
            self.start_swap(
                {rank: each[place] for rank, each in sent.items() if len(each) > place},
                {rank: each[place] for rank, each in received.items() if len(each) > place},
            ).wait()
        return received

    def objects(self, own: Any) -> list[Any]:
        """All ranks' objects, pickled: for facts, not for images."""
        objects: list[Any] = [None] * self.size
        with self.named():
            dist.all_gather_object(objects, own, group=self._ranks)
        return objects

    def to_first(self, own: Any) -> list[Any]:
        """All ranks' objects on rank 0, pickled; nothing on the others."""
        objects: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.named():
            dist.gather_object(own, objects, dst=self._global[0], group=self._ranks)
        return objects or []

    def send(self, thing: Any, to: int) -> None:
        """An object, pickled, to one rank, which calls `receive`."""
        with self.named():
            dist.send_object_list([thing], dst=self._global[to], group=self._ranks)

    def receive(self, source: int) -> Any:
        """The object that one rank sends."""
        objects: list[Any] = [None]
        with self.named():
            dist.recv_object_list(objects, src=self._global[source], group=self._ranks)
        return objects[0]

    def team(self, size: int) -> Group:
        """The ranks in teams of `size`, in order; this rank's. Every rank has to call it.

        Raises ValueError where they cannot be parted so.
        """
        if size < 1 or self.size % size:
            raise ValueError(f"{self.size} ranks cannot be parted in teams of {size}")
        mine = self.rank // size
        team = None
        for number in range(self.size // size):
            ranks = [self._global[number * size + index] for index in range(size)]
            with self.named():
                handle = dist.new_group(ranks)
            if number == mine:
                part = slice(number * size, (number + 1) * size)
                rank = self.rank % size
                team = Group(self.members[part], rank, self.device, self.weights[part], handle)
                team._global, team._pulse, team.traffic = ranks, self._pulse, self.traffic
        assert team is not None
        return team

    @contextmanager
    def named(self, sent_bytes: int | None = 0) -> Iterator[None]:
        """An exchange, or, with None, the wait for one: what goes wrong in it is raised with the
        name of the rank that it is due to. Raises RankError.
        """
        if self._pulse is not None and self._pulse.gone:
            raise RankError(self._pulse.gone)
        self.traffic.calls += 1
        self.traffic.exchanges += sent_bytes is not None
        self.traffic.sent_bytes += sent_bytes or 0
        try:
            yield
        except RuntimeError as error:
            why = "" if self._pulse is None else self._pulse.gone or self._pulse.named()
            if not why:
                raise
            raise RankError(why) from error

    def _gone(self, why: str) -> None:
        """Another rank is gone: called by the pulse's thread."""
        print(f"rank {self.rank}: {why}", file=sys.stderr, flush=True)
        self._abort()

    def _abort(self) -> None:
        """End NCCL's calls under way, which would wait for ever; gloo's end by themselves."""
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if self.device.type == "cuda" and abort is not None and dist.is_initialized():
            abort()


@contextmanager
def joined(
    device: str | torch.device | None = None,
    *,
    limit_s: float = LIMIT_S,
    share: str | Sequence[float] = "equal",
    selftest: Callable[[torch.device], str] = meeting.computes_right,
) -> Iterator[Group]:
    """The processes that torchrun has started, as a Group, inside the `with` block.

    `device`: default the GPU of torchrun's LOCAL_RANK, else the CPU. `limit_s`: how long one rank
    waits for another before all end with an error. `share`: what each takes of the work: "equal",
    "memory" (by what is free on its device), or a weight for each rank. `selftest(device)` says why
    a device cannot take part: its rank then raises LeftOut, which ends the process with status 0,
    and the others go on without it.

    Raises ValueError where the ranks' devices do not fit; RankError where one does not come, dies,
    or fails: it is named.
    """
    if not dist.is_available():
        raise ValueError("this torch was built without torch.distributed")
    where = meeting.place()
    if not limit_s > 0:
        raise ValueError(f"limit_s has to be above 0: {limit_s}")
    own_device = meeting.chosen_device(device, where.local_rank)
    store, second = meeting.stores(where, limit_s)
    own = meeting.member(where.rank, own_device, selftest(own_device))
    everybody = meeting.meet(store, own, where.size, limit_s)
    members = _fit(everybody, own)
    weights = _weights(share, members, where.size)
    rank = [one.rank for one in members].index(where.rank)
    group = Group(members, rank, own_device, weights)
    _start(group, store, limit_s)
    names = [str(one) for one in members]
    traffic = group.traffic
    group._pulse = Pulse(second, rank, names, limit_s, lambda: traffic.calls, group._gone)
    try:
        group.objects(None)  # all have their first beat in the store now
        group._pulse.start()
        yield group
        group.objects(None)  # nobody leaves while another may still need the store
        group._pulse.stop()
    except BaseException as error:
        group._pulse.stop(f"{FAILED}: {type(error).__name__}: {_first_line(error)}")
        group._abort()
        _end()  # who waits for this rank by gloo waits until then
        if where.rank == 0 and not meeting.launcher_has_store():
            group._pulse.stay()
        raise
    finally:
        _end()


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _fit(everybody: Sequence[Member], own: Member) -> list[Member]:
    """Those that take part. Raises LeftOut on the others, ValueError where nobody can."""
    doubled = meeting.twice(everybody)
    if doubled:
        raise ValueError(doubled)
    members = [one for one in everybody if not one.unfit]
    if not members:
        raise ValueError("; ".join(f"{one}: {one.unfit}" for one in everybody))
    if everybody[0].unfit and not meeting.launcher_has_store():
        raise ValueError(f"{everybody[0]} has the store and cannot be left out: use torchrun")
    if len({torch.device(one.device).type for one in members}) > 1:
        raise ValueError(f"some ranks have GPUs and some have none: {', '.join(map(str, members))}")
    for one in everybody:
        if one.unfit:
            report.event(f"distributed: {one} is left out: {one.unfit}")
    if own.unfit:
        print(f"{own} is left out: {own.unfit}", file=sys.stderr, flush=True)
        raise LeftOut(own.unfit)
    return members


def _weights(share: str | Sequence[float], members: Sequence[Member], size: int) -> list[float]:
    if isinstance(share, str):
        if share not in SHARES:
            one_of = ", ".join(SHARES)
            raise ValueError(f"share is {share!r}: it has to be one of {one_of}, or weights")
        by_memory = share == "memory" and all(one.free_bytes for one in members)
        return [float(one.free_bytes) if by_memory else 1.0 for one in members]
    if len(share) != size or min(share) <= 0:
        raise ValueError(f"share has to have a weight above 0 for each rank: {list(share)}")
    return [float(share[one.rank]) for one in members]


def _start(group: Group, store: Any, limit_s: float) -> None:
    """torch.distributed's process group of the members."""
    if dist.is_initialized():
        raise ValueError("torch.distributed has a process group already: joined() makes its own")
    nccl = group.device.type == "cuda"
    if nccl and not dist.is_nccl_available():
        raise ValueError("this torch has neither RCCL nor NCCL, by which GPUs exchange")
    if nccl:
        torch.cuda.set_device(group.device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=dist.PrefixStore("torch", store),
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=limit_s),
        )
        if not nccl:
            dist.monitored_barrier(timeout=timedelta(seconds=limit_s))
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise RankError(f"the ranks could not connect: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def under_torchrun() -> bool:
    """Whether this process was started by torchrun or in its way."""
    return all(name in os.environ for name in meeting.WANTED)


LINES = 4
APART = 0.05
"""Lengths along random lines, of tensors of length 1. Other noise is some 1.4 apart on each; what
unlike cards round differently, a thousandth."""


class Agreement:
    """Compares tensors roughly. The device is never waited for, so it tells a call late."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._under_way: list[tuple[torch.Tensor, Any]] = []

    def note(self, *tensors: Any) -> None:
        """Begin to compare these with the other ranks', as far as they are tensors.

        Raises ValueError for earlier ones.
        """
        self.look()
        own = torch.stack([lengths(each) for each in tensors if isinstance(each, torch.Tensor)])
        self._under_way.append(_to_host(self._group.start_gather(own)))

    def look(self, to_the_end: bool = False) -> None:
        """Raises ValueError where ranks had different tensors; `to_the_end` waits for all."""
        while self._under_way:
            gathered, event = self._under_way[0]
            if event is not None and not to_the_end and not event.query():
                return
            if event is not None:
                event.synchronize()
            self._under_way.pop(0)
            if differ(gathered):
                self._under_way.clear()
                raise ValueError(
                    "the ranks were given different images or prompts: call the pipeline with the "
                    "same arguments and a generator of the same seed on each"
                )


def lengths(tensor: torch.Tensor) -> torch.Tensor:
    """(LINES): how far the tensor, brought to length 1, goes along random lines."""
    flat = tensor.detach().flatten().float()
    along = _lines(flat.numel(), flat.device) @ flat
    return along / torch.linalg.vector_norm(flat).clamp_min(1e-30)


def differ(all_lengths: torch.Tensor) -> bool:
    """Whether ranks' lengths (ranks, tensors, LINES) are too far apart to be of the same."""
    return bool(((all_lengths - all_lengths[:1]).abs() > APART).any())


@lru_cache(maxsize=8)
def _lines(count: int, device: torch.device) -> torch.Tensor:
    """(LINES, count) of 1 and -1, the same on every rank."""
    generator = torch.Generator("cpu").manual_seed(0)
    bits = torch.randint(0, 2, (LINES, count), generator=generator)
    return (bits * 2 - 1).to(device, torch.float32)


def _to_host(gathered: Waiting) -> tuple[torch.Tensor, Any]:
    """(ranks, tensors, LINES), there when the event has come."""
    all_lengths = torch.stack(gathered.wait())
    if all_lengths.device.type != "cuda":
        return all_lengths, None
    host = torch.empty(all_lengths.shape, dtype=all_lengths.dtype, pin_memory=True)
    host.copy_(all_lengths, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(all_lengths.device))
    return host, event
