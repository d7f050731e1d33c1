"""Several cards for one UNet: which rows of a call each computes, and what comes of it. The VAE's
pictures are made by the same cards (decoding.py).

A row is a picture with its prompt or with its negative prompt. A call of both prompts is so divided
between cards by its rows (guidance split), as one of many pictures is (batch split).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.several.clock import Clock
from lib_rocm_sd.several.decoding import Decoding
from lib_rocm_sd.several.member import Member, NotDividedError, Start, missing
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
        self._clock = Clock(home, self.shares)
        self._first: ref[nn.Module] | None = None
        self.decoding = Decoding(home, self.members)
        """The VAE's pictures, by the same cards."""
        self.generation = 0
        """How often `begin` was called."""
        self._begins, self._sent = True, False

    def begin(self) -> None:
        """A generation begins, or the next pictures of one."""
        self._begins, self._sent, self._first, self.divided = True, False, None, 0
        self.decoding.begin()
        self.generation += 1
        if not self.generation % GENERATIONS:
            self.shares.again()
            self.decoding.shares.again()
        for member in self.members:
            member.start()

    def close(self) -> None:
        """Give all cards back."""
        for member in self.members:
            member.close()
        self.why, self.way = "", ()
        self.shares.forget()
        self.decoding.close()

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
            self._first = ref(subject.module)
        there = [member for member in self.members if member.is_there]
        if not there:
            raise NotDividedError(missing(self.members))
        self._send(subject, there, begins)

    def _send(self, subject: Subject, there: Sequence[Member], begins: bool) -> None:
        """See that the replicas have these weights; once in a generation they may be sent."""
        lacking = [member for member in there if not member.has(subject)]
        if not lacking:
            return
        if begins:  # the first step lays weights anew and applies networks
            raise NotDividedError(FIRST)
        if self._first is None or self._first() is not subject.module:
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

    def _fetched(self, member: Member, call: Call, into: torch.Tensor, clock: Clock) -> bool:
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


def _bounds(way: Way) -> list[tuple[int, int]]:
    """The rows of each card, from the first to before the last."""
    ends = [sum(way[: card + 1]) for card in range(len(way))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _out_bytes(call: Call, rows: int) -> int:
    """Room for a result: as large as x at the most, in float32, with some channels more."""
    x = call.given["x"]
    return max(64, 4 * 8 * rows * x.shape[2] * x.shape[3])
