"""Several cards for one UNet: which rows of a call each computes, and what comes of it. The VAE's
pictures are made by the same cards (decoding.py).

A row is a picture with its prompt or with its negative prompt. A call of both prompts is so divided
between cards by its rows (guidance split), as one of many pictures is (batch split).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.cards.card import Card, Start, Work, missing
from lib_rocm_sd.cards.decoding import MOST_REASONS, Decoding
from lib_rocm_sd.cards.shares import Shares, Way, parts
from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.hosts.read.blueprint import Subject
from lib_rocm_sd.modules.stand_in import StandIn, TheirsError, UnknownModuleError

NOTHING_TO_SPLIT = "the UNet is called for one picture and one prompt: there is nothing to divide"
AMID = "its weights have changed amid a generation, and are not sent twice"
ANOTHER = (
    "another UNet has come in amid a generation (a refiner, hires fix): its weights are not sent "
    "for each picture"
)
FIRST = "its weights are sent after the first step"
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


class Team(Work):
    """The cards beside `home`. `start`: starts a replica on one. Shares are in rows of a call.

    What was divided counts from `begin`.
    """

    def __init__(self, home: torch.device, devices: Sequence[torch.device], start: Start) -> None:
        super().__init__(home, [Card(device, start, home) for device in devices], Shares())
        self._first: ref[nn.Module] | None = None
        self.decoding = Decoding(home, self.members)
        """The VAE's pictures, by the same cards."""
        self.generation = 0
        """How often `begin` was called."""
        self._begins, self._last = True, ""

    def begin(self) -> None:
        """A generation begins, or the next pictures of one."""
        super().begin()
        self._begins, self._last, self._first, self.divided = True, "", None, 0
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
        self.leave()
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
        why = NOTHING_TO_SPLIT if call.rows < 2 else ""
        if why or is_recording(self.home):
            self.leave(why or "somebody records this call")
            return theirs(**call.given)
        self._look()
        against = self._against(subject, ready, begins) if begins else self._last
        usable = [not against and m.has(subject) and m.may(call.kind) for m in self.members]
        way = self.shares.way(call.kind, call.rows, [True, *usable], self.may_be_new)
        with self._spending(call.kind, way), self._clock.of(call.kind, way) as clock:
            # Looking at weights takes as long as a tenth of a part, so comes after both parts have
            # begun. Both are dropped if they turn out to be others than the replicas'.
            begun = self._ask(call, way)
            own = None
            if begun and subject.is_same():
                clock.mark()
                own = theirs(**call.part(0, way[0]))
                clock.mark()
            if begun or not begins:
                against = self._against(subject, ready, begins, [member for member, _, _ in begun])
            self._last = against
            if own is not None and not against and all(m.has(subject) for m, _, _ in begun):
                return self._divided(call, way, begun, own, theirs)
            clock.way, clock.counts = (call.rows, *[0] * len(self.members)), not begun
            return self._whole(call, subject, against, theirs)

    def _ask(self, call: Call, way: Way) -> list[tuple[Card, int, int]]:
        """Begin the others' parts: who has begun which rows."""
        asked = []
        for member, (first, last) in zip(self.members, parts(way)[1:], strict=True):
            out_bytes = _out_bytes(call, last - first)
            if last > first and member.begin(call.kind, call.part(first, last), out_bytes):
                asked.append((member, first, last))
        return asked

    def _against(
        self,
        subject: Subject,
        ready: Callable[[], str],
        begins: bool,
        asked: Sequence[Card] = (),
    ) -> str:
        """Why one card computes this call; empty where others may. Those without the weights get
        them.
        """
        if not subject.leaves:
            subject.look()
        why = ready()
        subject.look()
        why = why or "; ".join(subject.reasons[:MOST_REASONS])
        if why:
            return why
        if self._first is None:
            self._first = ref(subject.module)
        lacking = [m for m in self.members if not m.has(subject)]
        answering = [member for member in lacking if member.is_there or member in asked]
        if answering and begins:  # the first step lays weights anew and applies networks
            why = FIRST
        elif answering:
            why = self._send(subject, answering)
        return (why or missing(self.members)) if lacking == self.members else ""

    def _send(self, subject: Subject, members: Sequence[Card]) -> str:
        """Have these weights sent, to each once in a generation; why not to all."""
        if self._first is None or self._first() is not subject.module:
            return ANOTHER
        for member in members:
            if member.is_there and member not in self._sent:
                self._sent.append(member)
                member.give(subject)
        return AMID if any(m in self._sent and m.had(subject) for m in members) else ""

    def _whole(self, call: Call, subject: Subject, why: str, theirs: Theirs) -> torch.Tensor:
        """By one's own card. Those that are new to this kind of call compute a part beside it."""
        kind = call.kind
        trying = [not why and m.wants_trial(kind) and m.has(subject) for m in self.members]
        able = [True, *(a or m.may(kind) for a, m in zip(trying, self.members, strict=True))]
        others = parts(self.shares.divided(kind, call.rows, able))[1:]
        trials = []
        for member, wants, (first, last) in zip(self.members, trying, others, strict=True):
            if not wants or last == first:
                continue
            out_bytes = _out_bytes(call, last - first)
            if member.begin(kind, call.part(first, last), out_bytes, trial=True):
                trials.append((member, first, last))
        result = theirs(**call.given)
        for member, first, last in trials:
            member.expect(result[first:last])
        self.why = why or self.failures(kind) or self.shares.alone(kind, call.rows)
        self.way = () if why else (call.rows, *[0] * len(self.members))
        return result

    def _divided(
        self,
        call: Call,
        way: Way,
        asked: Sequence[tuple[Card, int, int]],
        own: torch.Tensor,
        theirs: Theirs,
    ) -> torch.Tensor:
        """`own` with what `asked` make; rows of which nothing comes are made here."""
        self.way, self.why = way, ""
        by_row = {first: member for member, first, _ in asked}
        whole = own.new_empty((call.rows, *own.shape[1:]))
        whole[: len(own)] = own
        is_whole = True
        for first, last in parts(way)[1:]:
            if last == first:
                continue
            member = by_row.get(first)
            if member is None or not self._fetched(member, call, whole[first:last]):
                whole[first:last] = theirs(**call.part(first, last))
                is_whole = False
        self.divided += is_whole
        if not is_whole:
            self.why = self.failures(call.kind) or "a card gave no result"
        return whole

    def _fetched(self, member: Card, call: Call, into: torch.Tensor) -> bool:
        result = member.fetch(call.kind)
        if result is None:
            return False
        if result.tensor.shape != into.shape or result.tensor.dtype != into.dtype:
            member.bar(call.kind, "its result is of another kind than this card's")
            return False
        into.copy_(result.tensor, non_blocking=True)
        self._clock.took(1 + self.members.index(member), result.ms)
        return True


def _out_bytes(call: Call, rows: int) -> int:
    """Room for a result: as large as x at the most, in float32, with some channels more."""
    x = call.given["x"]
    return max(64, 4 * 8 * rows * x.shape[2] * x.shape[3])


NAMES = ("x", "timesteps", "context", "y")
"""Names of a UNet's parameters, in ldm and sgm."""


class SeveralStandIn(StandIn):
    """Stands in for the UNet of `subject`. `obstacle()`: why the host wants no call divided now.
    `ready(leaves)`: see Team.compute.
    """

    def __init__(
        self,
        subject: Subject,
        team: Team,
        obstacle: Callable[[], str],
        ready: Callable[[list[nn.Module]], str],
    ) -> None:
        super().__init__(subject.module)
        self._subject, self._team = subject, team
        self._obstacle, self._ready = obstacle, ready
        self._barred, self._barred_in = "", -1

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        barred = self._barred if self._barred_in == self._team.generation else ""
        return super().refusal(*args, **kwargs) or barred or self._obstacle()

    def serve(self, asked: Any) -> Any:
        args, kwargs = asked
        call, subject = _bound(*args, **kwargs), self._subject

        def part(**inputs: torch.Tensor) -> Any:
            try:
                return self.theirs(**inputs)
            except Exception as error:
                raise TheirsError(error) from error

        return self._team.compute(subject, call, part, lambda: self._ready(subject.leaves))

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def failed(self, error: Exception) -> str:
        """Leave all calls to the host until the next pictures."""
        self._barred = f"ours failed: {type(error).__name__}: {error}"
        self._barred_in = self._team.generation
        return self._barred

    def tell(self, why: str) -> None:
        self._team.leave(why)


def _bound(*args: Any, **kwargs: Any) -> Call:
    """A call of a UNet, by the names of its parameters. UnknownModuleError where it cannot be
    divided by rows.
    """
    inputs = dict(zip(NAMES, args, strict=False)) | kwargs
    inputs = {name: value for name, value in inputs.items() if value is not None}
    others = [name for name in inputs if name not in NAMES]
    if others or len(args) > len(NAMES):
        raise UnknownModuleError((f"the UNet is called with {', '.join(others) or 'more'}",))
    x = inputs.get("x")
    if not isinstance(x, torch.Tensor) or x.ndim != 4:
        raise UnknownModuleError(("the UNet is called with something else than images",))
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != len(x):
            raise UnknownModuleError((f"{name} has not one row for each image",))
    return Call(inputs)
