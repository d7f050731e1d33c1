"""One further card of a team: its replica from the start to the end, what it was given, what it may
compute, and why not.

It may have a copy of the UNet and one of the VAE's decoder, and a kind of call is of either. What
takes long goes on beside the host's steps, and `look` sees what has become of it: its process
starts, a module is built and its weights are sent by a thread on a stream of its own, and a first
result is compared with the host's over there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.cards.ranks import FailedError, LostError, RankError
from lib_rocm_sd.cards.replica import Made, Replica, kind_of
from lib_rocm_sd.cards.shares import Clock, Shares, Way
from lib_rocm_sd.engine.selftest import describe, is_out_of_memory
from lib_rocm_sd.hosts.read.blueprint import UNET, Blueprint, Fact, Manner, Subject

Start = Callable[[torch.device], Replica]
MOST_STARTS = 2
"""Most starts of its process, until somebody chooses the cards anew."""
MOST_ERRORS = {torch.float16: 0.01, torch.bfloat16: 0.06, torch.float32: 0.003}
"""Root of the mean square of a result's difference, of that of the result, by the weights' dtype.
Steps of Stable Diffusion's UNets differ by a tenth of it.
"""
GIB = 1 << 30
BUSY = "the other cards are busy"
SENDING = "its weights are being sent"
MOST_SPENT_S = 0.15
"""What calls of a new way may take in one picture: the first of them plan, and record."""
PATIENCE_S = 10.0
"""How long others wait for a card before they divide without it."""
JOIN_S = 5.0
"""How long a thread that sends weights may take to see that its process has ended."""


@dataclass(frozen=True)
class _Copy:
    """What the replica has of a part."""

    module: ref[nn.Module]
    blueprint: Blueprint
    manner: Manner
    facts: list[Fact]


@dataclass
class _Trial:
    """A call that both compute, of this kind."""

    kind: Hashable
    expected: bool = False
    """The host has a result, and it is on its way to be compared."""
    answer: dict[str, Any] | None = None
    """What the replica has made."""
    is_compared: bool = False
    """It was asked to compare them."""


class _Sending:
    """A module and its weights on their way to `replica`, by a thread; `copy` once they are there.

    `places`: the tensors that it lacks; None where it lacks the module too.
    """

    def __init__(
        self, replica: Replica, subject: Subject, places: Sequence[int] | None, home: torch.device
    ) -> None:
        self._replica, self._places = replica, places
        self.part = subject.part
        self._tensors = subject.tensors()
        self.copy = _Copy(
            ref(subject.module), subject.blueprint, subject.manner, list(subject.facts)
        )
        self.sent_bytes = 0
        self.error: Exception | None = None
        self._stream: Any = nullcontext()
        if home.type == "cuda":
            stream = _sending_stream(home)
            stream.wait_stream(torch.cuda.current_stream(home))  # what is computed of them is first
            self._stream = torch.cuda.stream(stream)
        self._thread = threading.Thread(target=self._send, name="rocm_sd weights", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end, after that of the process."""
        self._thread.join(JOIN_S)

    def _send(self) -> None:
        places, tensors = self._places, self._tensors
        try:
            with self._stream, torch.no_grad():
                if places is None:
                    places = range(len(tensors))
                    self._replica.build(self.copy.blueprint, self.copy.manner, self.part)
                self.sent_bytes = self._replica.fill(tensors, places, self.part)
        except Exception as error:
            self.error = error
        finally:
            self._tensors = []


class NotDividedError(Exception):
    """One card computes this call; the message says why."""


class Card:
    """On `device`, for a host on `home`. Nothing here raises what its replica raises: it becomes
    `reason`.
    """

    def __init__(self, device: torch.device, start: Start, home: torch.device) -> None:
        self.device, self._start, self._home = device, start, home
        self.reason = ""
        """Why it computes nothing; empty where it may."""
        self.sent_bytes = 0
        """Bytes of weights sent since the start."""
        self._replica: Replica | None = None
        self._copies: dict[str, _Copy] = {}
        self._without: dict[str, str] = {}
        """Parts that it cannot have, and why."""
        self._passed: set[Hashable] = set()
        self._barred: dict[Hashable, str] = {}
        self._trial: _Trial | None = None
        self._sending: _Sending | None = None
        self._starts = 0
        self._opening = False

    def start(self) -> None:
        """Start its process where there is none, and none was lost too often. Returns at once."""
        if self._replica is not None or self._starts >= MOST_STARTS:
            return
        self._starts += 1
        alike = kind_of(self.device) == kind_of(self._home)
        self.reason = "its process is being started" + ", then its kernels are tried" * (not alike)
        try:
            self._replica, self._opening = self._start(self.device), True
        except OSError as error:
            self.reason = f"no process for it: {error}"

    def close(self) -> None:
        """Give its memory back."""
        replica, self._replica = self._replica, None
        sending, self._sending = self._sending, None
        self._trial = None
        self._copies.clear()
        self._without.clear()
        self._passed.clear()
        self._barred.clear()
        if replica is not None:
            replica.close(sending.join if sending else lambda: None)

    @property
    def pid(self) -> int | None:
        """Its process's id, where it has one."""
        return None if self._replica is None else self._replica.pid

    @property
    def is_there(self) -> bool:
        """Whether its process has answered, and is free."""
        busy = self._opening or self._sending or self._trial
        return self._replica is not None and not busy and not self._replica.waits_for

    @property
    def is_coming(self) -> bool:
        """Whether it starts, gets weights or is tried, and should soon be done with that."""
        replica = self._replica
        if replica is None or not (self._opening or self._sending or self._trial):
            return False
        return time.monotonic() - replica.asked < PATIENCE_S

    def has(self, subject: Subject) -> bool:
        """Whether it has this module with its weights as they are."""
        copy = self._copies.get(subject.part)
        if copy is None or copy.module() is not subject.module:
            return False
        if not subject.facts or copy.facts != subject.facts:
            return False
        if copy.blueprint is not subject.blueprint and copy.blueprint == subject.blueprint:
            copy = self._copies[subject.part] = replace(copy, blueprint=subject.blueprint)
        return copy.blueprint is subject.blueprint and copy.manner == subject.manner

    def had(self, subject: Subject) -> bool:
        """Whether it has this module, maybe with other weights."""
        copy = self._copies.get(subject.part)
        return copy is not None and copy.module() is subject.module

    def forget_weights(self) -> None:
        """Others may be in the host's tensors, though it does not show."""
        self._copies = {part: replace(copy, facts=[]) for part, copy in self._copies.items()}
        self._without.clear()
        if self._sending:
            self._sending.copy = replace(self._sending.copy, facts=[])

    def may(self, kind: Hashable) -> bool:
        """Whether it may compute calls of this kind."""
        return self.is_there and kind in self._passed and kind not in self._barred

    def wants_trial(self, kind: Hashable) -> bool:
        """Whether it has to compute one beside the host first."""
        settled = kind in self._passed or kind in self._barred
        return self.is_there and not settled

    def why_not(self, kind: Hashable) -> str:
        """Why it does not compute calls of this kind; empty where it does."""
        why = self.why_without(part_of(kind)) or self._barred.get(kind, "")
        if why:
            return why
        if kind in self._passed:
            return "" if self.is_there else BUSY
        return "its first result is compared with this card's"

    def look(self) -> None:
        """See what has come: that it is ready, has its weights, what a trial gave."""
        replica, sending = self._replica, self._sending
        if replica is None:
            return
        if sending is not None:
            if sending.is_done:
                self._sending = None
                self._sent(sending)
            return
        try:
            if replica.waits_for:
                answer = self._answer(replica)
                if answer is None:
                    return
                self._answered(answer)
            if self._trial is not None:
                self._compare(replica, self._trial)
        except LostError as error:
            self._lost(str(error))
        except FailedError as error:
            if self._trial is not None or self._opening:
                self._failed(error, self._trial.kind if self._trial else None)

    def _answer(self, replica: Replica) -> dict[str, Any] | None:
        """What it has answered; None where it has not. Raises LostError after a limit."""
        answer = replica.poll()
        limits = replica.limits
        limit_s = limits.start_s if self._opening else limits.call_s
        if self._trial is not None:
            limit_s = limits.first_call_s
        if answer is None and time.monotonic() - replica.asked > limit_s:
            return replica.fetch(0.0)
        return answer

    def _answered(self, answer: dict[str, Any]) -> None:
        """Drops an answer that nobody has fetched, since the host's own part came to nothing."""
        trial = self._trial
        if self._opening:
            self._opening, self.reason = False, ""
        elif trial is not None and trial.is_compared:
            self._trial = None
            if not answer["why"]:
                self._passed.add(trial.kind)
            elif not answer["again"]:
                self._barred[trial.kind] = answer["why"]
        elif trial is not None:
            trial.answer = answer

    def _compare(self, replica: Replica, trial: _Trial) -> None:
        """Ask for it once both results are there."""
        if not trial.expected:  # the host's own call failed
            self._trial = None
        elif trial.answer is not None and replica.has_expected():
            copy = self._copies.get(part_of(trial.kind))
            module = None if copy is None else copy.module()
            dtype = torch.float16 if module is None else next(module.parameters()).dtype
            replica.compare(trial.answer, MOST_ERRORS.get(dtype, 0.01))
            trial.answer, trial.is_compared = None, True

    def without(self, part: str) -> str:
        """Why it can have no copy of this part; empty where it may."""
        return self._without.get(part, "")

    def why_without(self, part: str) -> str:
        """Why it has none of this part now; empty where nothing speaks against it."""
        return self.reason or (SENDING if self._sending else "") or self.without(part)

    def give(self, subject: Subject) -> None:
        """Begin to send it what it lacks of this module and its weights; once it has them, it
        `has` the subject. Returns at once.
        """
        replica, part = self._replica, subject.part
        assert replica is not None
        copy = self._copies.pop(part, None)
        self._without.pop(part, None)
        self._passed = {kind for kind in self._passed if part_of(kind) != part}
        places: list[int] | None = None
        if (
            copy is not None
            and copy.module() is subject.module
            and (copy.manner, copy.blueprint) == (subject.manner, subject.blueprint)
        ):
            facts = dict(enumerate(copy.facts))
            places = [n for n, fact in enumerate(subject.facts) if facts.get(n) != fact]
        else:
            self._barred = {k: why for k, why in self._barred.items() if part_of(k) != part}
        try:
            if copy is None:
                _check_room(replica, part, subject.tensors())
            self._sending = _Sending(replica, subject, places, self._home)
        except FailedError as error:
            self._cannot_have(part, str(error))

    def _sent(self, sending: _Sending) -> None:
        """What a thread sent is there, or came to nothing."""
        error = sending.error
        self.sent_bytes += sending.sent_bytes
        if error is None:
            self._copies[sending.part] = sending.copy
        elif isinstance(error, FailedError):
            self._cannot_have(sending.part, "out of memory" if error.memory else str(error))
        elif isinstance(error, LostError):
            self._lost(str(error))
        else:  # on this side; the process knows of nothing
            why = "out of memory here" if is_out_of_memory(error) else describe(error)
            self._without[sending.part] = f"its weights could not be sent: {why}"

    def _cannot_have(self, part: str, why: str) -> None:
        if part == UNET:
            self._starts = MOST_STARTS
            self._lost(why)
        else:
            self._without[part] = why

    def expect(self, expected: torch.Tensor) -> None:
        """What the call on trial has to give."""
        if self._trial is None or self._replica is None:
            return
        try:
            self._replica.expect(expected)
        except ValueError as error:
            self._barred[self._trial.kind] = str(error)
        else:
            self._trial.expected = True

    def begin(
        self,
        kind: Hashable,
        inputs: Mapping[str, torch.Tensor],
        out_bytes: int,
        more: Mapping[str, Any] | None = None,
        trial: bool = False,
    ) -> bool:
        """Begin a call; False where that cannot be. `more`: see Replica.begin. `trial`: the host
        computes it too, and `expect` says its result.
        """
        assert self._replica is not None
        try:
            self._replica.begin(inputs, out_bytes, {"part": part_of(kind), **(more or {})})
        except LostError as error:
            self._lost(str(error))
        except ValueError as error:
            self._barred[kind] = str(error)
        else:
            if trial:
                self._trial = _Trial(kind)
            return True
        return False

    def fetch(self, kind: Hashable) -> Made | None:
        """The result of the call that was begun; None where it came to nothing."""
        with suppress(RankError), self._amid(kind) as replica:
            return replica.made(replica.fetch(replica.limits.call_s))
        return None

    def took(self, kind: Hashable) -> float:
        """What its part of a picture has taken, in ms. Raises RankError, as the next two do."""
        with self._amid(kind) as replica:
            return float(replica.fetch(replica.limits.call_s)["ms"])

    def waited(self, kind: Hashable, waited_s: float) -> None:
        """Amid a call: see Replica.waited."""
        with self._amid(kind) as replica:
            replica.waited(waited_s)

    def stop(self, kind: Hashable) -> None:
        """Amid a call: see Replica.stop."""
        with self._amid(kind) as replica:
            replica.stop()

    @contextmanager
    def _amid(self, kind: Hashable) -> Iterator[Replica]:
        """Notes what a call of this kind came to where it fails, and raises RankError then."""
        if self._replica is None:
            raise RankError(self.reason)
        try:
            yield self._replica
        except LostError as error:
            self._lost(str(error))
            raise
        except FailedError as error:
            self._failed(error, kind)
            raise

    def bar(self, kind: Hashable, reason: str) -> None:
        """Let it compute no more calls of this kind."""
        self._barred[kind] = reason

    def _failed(self, error: FailedError, kind: Hashable) -> None:
        self._trial = None
        why = f"out of memory on {self.device}" if error.memory else f"it failed: {error}"
        if kind is None:
            self._lost(why)
        else:
            self._barred[kind] = why

    def _lost(self, why: str) -> None:
        self._opening = False
        self.close()
        self.reason = why


class Work:
    """What `home` and `members` compute together: who may, who takes how much, and why not more.
    Not thread-safe.
    """

    def __init__(self, home: torch.device, members: Sequence[Card], shares: Shares) -> None:
        self.home, self.members, self.shares = home, members, shares
        self.why = ""
        """Why the last call was not divided; empty where it was, or where there was none."""
        self.way: Way = ()
        """Each card's share of the last call, one's own first."""
        self.divided = 0
        """How many calls were."""
        self._clock = Clock(home, shares)
        self._sent: list[Card] = []
        """Who was sent weights since `begin`."""
        self._spent_s = 0.0

    def begin(self) -> None:
        """The next pictures are begun."""
        self._sent, self._spent_s = [], 0.0

    @property
    def may_be_new(self) -> bool:
        """Whether this picture has time for another way of dividing, and all cards are there that
        might take part.
        """
        return self._spent_s < MOST_SPENT_S and not any(m.is_coming for m in self.members)

    @contextmanager
    def _spending(self, kind: Hashable, way: Way) -> Iterator[None]:
        """Around a call: what one of a new way takes counts."""
        is_new, begin = any(way[1:]) and not self.shares.is_warm(kind, way), time.perf_counter()
        yield
        if is_new:
            self._spent_s += time.perf_counter() - begin

    def leave(self, why: str = "") -> None:
        """The call is one card's, whatever others could do."""
        self.why, self.way = why, ()

    def failures(self, kind: Hashable) -> str:
        """Why cards do not compute calls of this kind."""
        barred = (member for member in self.members if not member.may(kind))
        return "; ".join(f"{member.device}: {member.why_not(kind)}" for member in barred)

    def _look(self) -> None:
        """See what has come of what the cards were asked."""
        for member in self.members:
            member.look()


@cache
def _sending_stream(home: torch.device) -> Any:
    """One for all: torch's are few, and given out in turns."""
    return torch.cuda.Stream(home)


def part_of(kind: Hashable) -> str:
    """The module that a kind of call belongs to: the kind names it where that is not the UNet."""
    return str(getattr(kind, "part", UNET))


def missing(members: Sequence[Card], part: str = UNET) -> str:
    """Why none of them can compute anything of this part now."""
    reasons = ((member.device, member.why_without(part)) for member in members)
    return "; ".join(f"{device}: {why}" for device, why in reasons if why) or BUSY


def _check_room(replica: Replica, part: str, tensors: Sequence[torch.Tensor]) -> None:
    size = sum(tensor.nbytes for tensor in tensors)
    free = replica.free_bytes
    if free is not None and free < size:
        raise FailedError(
            f"the {part} takes {size / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free there"
        )
