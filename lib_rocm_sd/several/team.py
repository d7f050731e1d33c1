"""Several cards for one UNet: which rows of a call each computes, and what comes of it.

A row is a picture with its prompt or with its negative prompt. A call of both prompts is so divided
between cards by its rows (guidance split), as one of many pictures is (batch split).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.several.member import Member, Start
from lib_rocm_sd.several.shares import Shares, Way
from lib_rocm_sd.several.subject import Subject

NOTHING_TO_SPLIT = "the UNet is called for one picture and one prompt: there is nothing to divide"
AMID = "its weights have changed amid a generation, and are not sent twice"
ANOTHER = (
    "another UNet has come in amid a generation (a refiner, hires fix): its weights are not sent "
    "for each picture"
)
FIRST = "its weights are sent after the first step"
MOST_REASONS = 3
GENERATIONS = 16
"""After so many, all that was measured is measured again."""
Theirs = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Call:
    """`given`: x and all else by name, each with one row for each of x (N, C, H, W)."""

    given: Mapping[str, torch.Tensor]

    @property
    def rows(self) -> int:
        return len(self.given["x"])

    @property
    def kind(self) -> Hashable:
        """Equal for calls that take equally long."""
        return tuple((name, tuple(t.shape), t.dtype) for name, t in self.given.items())

    def part(self, first: int, last: int) -> dict[str, torch.Tensor]:
        """The rows from `first` to before `last`."""
        return {name: tensor[first:last] for name, tensor in self.given.items()}


class NotDividedError(Exception):
    """One card computes this call; the message says why."""


class Team:
    """The cards beside `home`. `start`: starts a replica on one. Not thread-safe."""

    def __init__(self, home: torch.device, devices: Sequence[torch.device], start: Start) -> None:
        self.home = home
        self.members = [Member(device, start) for device in devices]
        self.why = ""
        """Why the last call was not divided; empty where it was."""
        self.way: Way = ()
        """The rows of each card in the last call, one's own first."""
        self.divided = 0
        """How many calls were, since `begin`."""
        self.shares = Shares()
        self._clock = _Clock(home, self.shares)
        self._first: ref[nn.Module] | None = None
        self.generation = 0
        """How often `begin` was called."""
        self._begins, self._sent = True, False

    def begin(self) -> None:
        """A generation begins, or the next pictures of one."""
        self._begins, self._sent, self._first, self.divided = True, False, None, 0
        self.generation += 1
        if not self.generation % GENERATIONS:
            self.shares.again()
        for member in self.members:
            member.start()

    def close(self) -> None:
        """Give all cards back."""
        for member in self.members:
            member.close()
        self.why, self.way = "", ()
        self.shares.forget()

    def forget_weights(self) -> None:
        """Others may be in the host's UNet: send them all again."""
        for member in self.members:
            member.forget_weights()

    def compute(
        self, subject: Subject, call: Call, theirs: Theirs, ready: Callable[[], str]
    ) -> torch.Tensor:
        """The result of `theirs(**call.given)`, on several cards where that is faster.

        `ready()`: asked once the subject was looked at, before its weights are compared: makes
        them those of this call, or says why they cannot be.
        """
        begins, self._begins = self._begins, False
        try:
            self._prepare(subject, call, begins, ready)
        except NotDividedError as reason:
            self.why, self.way = str(reason), ()
            return theirs(**call.given)
        usable = [True, *(member.may(call.kind) for member in self.members)]
        way = self.shares.way(call.kind, call.rows, usable)
        if sum(map(bool, way)) > 1:
            return self._divided(call, way, theirs)
        self.way = way
        return self._whole(call, way, usable, theirs)

    def _prepare(
        self, subject: Subject, call: Call, begins: bool, ready: Callable[[], str]
    ) -> None:
        """Raises NotDividedError."""
        for member in self.members:
            member.look()
            member.drain()
        if call.rows < 2:
            raise NotDividedError(NOTHING_TO_SPLIT)
        if is_recording(self.home):
            raise NotDividedError("somebody records this call")
        if not subject.leaves:
            subject.look()
        why = ready()
        subject.look()
        why = why or "; ".join(subject.reasons[:MOST_REASONS])
        if why:
            raise NotDividedError(why)
        if self._first is None:
            self._first = ref(subject.unet)
        there = [member for member in self.members if member.is_there]
        if not there:
            raise NotDividedError(self._missing())
        self._send(subject, there, begins)

    def _missing(self) -> str:
        found = (f"{member.device}: {member.reason}" for member in self.members if member.reason)
        return "; ".join(found) or "the other cards are busy"

    def _send(self, subject: Subject, there: Sequence[Member], begins: bool) -> None:
        """See that the replicas have these weights; once in a generation they may be sent."""
        lacking = [member for member in there if not member.has(subject)]
        if not lacking:
            return
        if begins:  # the first step lays weights anew and applies networks
            raise NotDividedError(FIRST)
        if self._first is None or self._first() is not subject.unet:
            raise NotDividedError(ANOTHER)
        known = [member for member in lacking if member.had(subject)]
        if self._sent and known:
            raise NotDividedError(AMID)
        self._sent = True
        for member in lacking:
            member.give(subject)

    def _whole(self, call: Call, way: Way, usable: list[bool], theirs: Theirs) -> torch.Tensor:
        """By one's own card. Those that are new to this kind of call compute a part beside it."""
        trying = [m.wants_trial(call.kind) for m in self.members]
        parts = self.shares.divided(
            call.kind, call.rows, [True, *(a or b for a, b in zip(trying, usable[1:], strict=True))]
        )
        tried = []
        for member, wants, (first, last) in zip(
            self.members, trying, _bounds(parts)[1:], strict=True
        ):
            if (
                wants
                and last > first
                and member.try_(call.kind, call.part(first, last), _out_bytes(call, last - first))
            ):
                tried.append((member, first, last))
        with self._clock.of(call.kind, way):
            made = theirs(**call.given)
        for member, first, last in tried:
            member.expect(made[first:last])
        why = (f"{m.device}: {m.why_not(call.kind)}" for m in self.members if not m.may(call.kind))
        self.why = "; ".join(why) or self.shares.alone(call.kind, call.rows)
        return made

    def _divided(self, call: Call, way: Way, theirs: Theirs) -> torch.Tensor:
        self.way, self.why = way, ""
        bounds = _bounds(way)
        begun: list[tuple[Member, int, int]] = []
        left: list[tuple[int, int]] = []
        with self._clock.of(call.kind, way) as clock:
            for member, (first, last) in zip(self.members, bounds[1:], strict=True):
                if last == first:
                    continue
                if member.begin(call.kind, call.part(first, last), _out_bytes(call, last - first)):
                    begun.append((member, first, last))
                else:
                    left.append((first, last))
            clock.own_begins()
            own = theirs(**call.part(0, bounds[0][1]))
            clock.own_is_done()
            made = own.new_empty((call.rows, *own.shape[1:]))
            made[: len(own)] = own
            for member, first, last in begun:
                if not self._fetched(member, call, made[first:last], clock):
                    left.append((first, last))
            for first, last in left:
                made[first:last] = theirs(**call.part(first, last))
        self.divided += not left
        if left:
            self.why = self._failures(call) or "a card gave no result"
        return made

    def _fetched(self, member: Member, call: Call, into: torch.Tensor, clock: _Clock) -> bool:
        got = member.fetch(call.kind)
        if got is None:
            return False
        if got.tensor.shape != into.shape or got.tensor.dtype != into.dtype:
            member.bar(call.kind, "its result is of another kind than this card's")
            return False
        into.copy_(got.tensor, non_blocking=True)
        clock.took(1 + self.members.index(member), got.ms)
        return True

    def _failures(self, call: Call) -> str:
        return "; ".join(
            f"{m.device}: {m.why_not(call.kind)}" for m in self.members if not m.may(call.kind)
        )


class _Clock:
    """Times calls on `home`: what a device takes is known when the next call asks."""

    def __init__(self, home: torch.device, shares: Shares) -> None:
        self._on_device, self._shares = home.type == "cuda", shares
        self._home = home
        self._pending: list[tuple[Hashable, Way, list[Any], dict[int, float]]] = []
        self._each: dict[int, float] = {}
        self._now: tuple[Hashable, Way] = ((), ())
        self._marks: list[Any] = []

    def of(self, kind: Hashable, way: Way) -> _Clock:
        """To be entered around a call. One that raises is not counted."""
        self._now, self._each, self._marks = (kind, way), {}, []
        return self

    def took(self, card: int, ms: float) -> None:
        """What another card took for its part."""
        self._each[card] = ms

    def own_begins(self) -> None:
        """The others have been asked."""
        self._mark()

    def own_is_done(self) -> None:
        """One's own part is computed, or will be when the device comes so far."""
        self._mark()

    def __enter__(self) -> _Clock:
        self._settle()
        self._mark()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._mark()
        if kind is None:
            self._pending.append((*self._now, self._marks, self._each))
            self._settle()

    def _mark(self) -> None:
        if not self._on_device:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._home))
        self._marks.append(event)

    def _settle(self) -> None:
        while self._pending:
            kind, way, marks, each = self._pending[0]
            if self._on_device and not marks[-1].query():
                return
            self._pending.pop(0)
            own = {0: self._between(marks[1], marks[2])} if len(marks) > 3 else {}
            times = {**own, **each}
            row = [times.get(card, 0.0) for card in range(len(way))]
            self._shares.took(kind, way, self._between(marks[0], marks[-1]), row)

    def _between(self, first: Any, last: Any) -> float:
        """In ms."""
        if self._on_device:
            return float(first.elapsed_time(last))
        return 1000 * float(last - first)


def _bounds(way: Way) -> list[tuple[int, int]]:
    """The rows of each card, from the first to before the last."""
    ends = [sum(way[: card + 1]) for card in range(len(way))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _out_bytes(call: Call, rows: int) -> int:
    """Room for a result: as large as x at the most, in float32, with some channels more."""
    x = call.given["x"]
    return max(64, 4 * 8 * rows * x.shape[2] * x.shape[3])
