"""One further card of a team: its replica from the start to the end, what it was given, what it may
compute, and why not.

It may have a copy of the UNet and one of the VAE's decoder, and a kind of call is of either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.cards.blueprint import UNET, Blueprint, Fact, Manner, Subject
from lib_rocm_sd.cards.ranks import FailedError, LostError, RankError
from lib_rocm_sd.cards.replica import Made, Replica
from lib_rocm_sd.cards.shares import Clock, Shares, Way

Start = Callable[[torch.device], Replica]
MOST_STARTS = 2
"""Most starts of its process, until somebody chooses the cards anew."""
MOST_ERRORS = {torch.float16: 0.01, torch.bfloat16: 0.06, torch.float32: 0.003}
"""Root of the mean square of a result's difference, of that of the result, by the weights' dtype.
Steps of Stable Diffusion's UNets differ by a tenth of it.
"""
GIB = 1 << 30
BUSY = "the other cards are busy"


@dataclass(frozen=True)
class _Copy:
    """What the replica has of a part."""

    module: ref[nn.Module]
    blueprint: Blueprint
    manner: Manner
    facts: list[Fact]


@dataclass(frozen=True)
class _Trial:
    """A call that both compute: its kind, and what is expected."""

    kind: Hashable
    expected: torch.Tensor | None = None


class NotDividedError(Exception):
    """One card computes this call; the message says why."""


class Card:
    """On `device`. Nothing here raises what its replica raises: it becomes `reason`."""

    def __init__(self, device: torch.device, start: Start) -> None:
        self.device, self._start = device, start
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
        self._starts = 0
        self._opening = False

    def start(self) -> None:
        """Start its process where there is none, and none was lost too often. Returns at once."""
        if self._replica is not None or self._starts >= MOST_STARTS:
            return
        self._starts += 1
        self.reason = "its process is being started"
        try:
            self._replica, self._opening = self._start(self.device), True
        except OSError as error:
            self.reason = f"no process for it: {error}"

    def close(self) -> None:
        """Give its memory back."""
        replica, self._replica = self._replica, None
        self._trial = None
        self._copies.clear()
        self._without.clear()
        self._passed.clear()
        self._barred.clear()
        if replica is not None:
            replica.close()

    @property
    def pid(self) -> int:
        return -1 if self._replica is None else self._replica.pid

    @property
    def is_there(self) -> bool:
        """Whether its process has answered, and is free."""
        replica = self._replica
        return replica is not None and not self._opening and not replica.waits_for

    def has(self, subject: Subject) -> bool:
        """Whether it has this module with its weights as they are."""
        copy = self._copies.get(subject.part)
        if copy is None or copy.module() is not subject.module or copy.facts != subject.facts:
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

    def may(self, kind: Hashable) -> bool:
        """Whether it may compute calls of this kind."""
        return self.is_there and kind in self._passed and kind not in self._barred

    def wants_trial(self, kind: Hashable) -> bool:
        """Whether it has to compute one beside the host first."""
        settled = kind in self._passed or kind in self._barred
        return self.is_there and self._trial is None and not settled

    def why_not(self, kind: Hashable) -> str:
        """Why it does not compute calls of this kind; empty where it does."""
        why = self.reason or self._without.get(part_of(kind), "") or self._barred.get(kind, "")
        if why:
            return why
        return "" if self.may(kind) else "its first result is compared with this card's"

    def look(self) -> None:
        """See what has come: that it is ready, what a trial gave."""
        replica = self._replica
        if replica is None or not replica.waits_for:
            return
        trial, limits = self._trial, replica.limits
        try:
            answer = replica.poll()
            if answer is None:
                limit_s = limits.first_call_s if trial else limits.start_s
                if time.monotonic() - replica.asked > limit_s:
                    answer = replica.fetch(0.0)
            if answer is None:
                return
            if self._opening:
                self._opening, self.reason = False, ""
            elif trial is not None:
                self._judge(trial, replica.made(answer))
        except LostError as error:
            self._lost(str(error))
        except FailedError as error:
            if trial is not None or self._opening:
                self._failed(error, trial.kind if trial else None)

    def without(self, part: str) -> str:
        """Why it can have no copy of this part; empty where it may."""
        return self._without.get(part, "")

    def give(self, subject: Subject) -> None:
        """Send it what it lacks of this module and its weights."""
        replica, part = self._replica, subject.part
        assert replica is not None
        copy = self._copies.pop(part, None)
        self._passed = {kind for kind in self._passed if part_of(kind) != part}
        try:
            tensors = subject.tensors()
            same = (
                copy is not None
                and copy.module() is subject.module
                and (copy.manner, copy.blueprint) == (subject.manner, subject.blueprint)
            )
            places = range(len(tensors))
            if copy is not None and same and len(copy.facts) == len(subject.facts):
                pairs = enumerate(zip(copy.facts, subject.facts, strict=True))
                places = [place for place, (old, new) in pairs if old != new]  # type: ignore[assignment]
            else:
                self._barred = {k: why for k, why in self._barred.items() if part_of(k) != part}
                if copy is None:
                    _check_room(replica, part, tensors)
                replica.build(subject.blueprint, subject.manner, part)
            self.sent_bytes += replica.fill(tensors, places, part)
            self._copies[part] = _Copy(
                ref(subject.module), subject.blueprint, subject.manner, list(subject.facts)
            )
        except LostError as error:
            self._lost(str(error))
        except FailedError as error:
            why = "out of memory" if error.memory else str(error)
            if part == UNET:
                self._starts = MOST_STARTS
                self._lost(why)
            else:
                self._without[part] = why

    def try_(
        self,
        kind: Hashable,
        inputs: Mapping[str, torch.Tensor],
        out_bytes: int,
        more: Mapping[str, Any] | None = None,
    ) -> bool:
        """Begin a call that the host computes too; `expect` says its result."""
        if not self.begin(kind, inputs, out_bytes, more):
            return False
        self._trial = _Trial(kind)
        return True

    def expect(self, expected: torch.Tensor) -> None:
        """What the call on trial has to give."""
        if self._trial is not None:
            self._trial = _Trial(self._trial.kind, expected.clone())

    def begin(
        self,
        kind: Hashable,
        inputs: Mapping[str, torch.Tensor],
        out_bytes: int,
        more: Mapping[str, Any] | None = None,
    ) -> bool:
        """Begin a call; False where that cannot be. `more`: see Replica.begin."""
        assert self._replica is not None
        try:
            self._replica.begin(inputs, out_bytes, {"part": part_of(kind), **(more or {})})
        except LostError as error:
            self._lost(str(error))
        except ValueError as error:
            self._barred[kind] = str(error)
        else:
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

    def arrived(self, kind: Hashable) -> None:
        """Wait until it has written its part of an exchange."""
        with self._amid(kind) as replica:
            replica.arrived(replica.limits.call_s)

    def say(self, kind: Hashable, word: str) -> None:
        """Amid a call: see Replica.say."""
        with self._amid(kind) as replica:
            replica.say(word)

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

    def drain(self) -> None:
        """Wait for a call whose result nobody fetched, because the host's own part failed."""
        replica = self._replica
        if replica is None or self._opening or self._trial is not None or not replica.waits_for:
            return
        try:
            replica.fetch(replica.limits.call_s)
        except LostError as error:
            self._lost(str(error))
        except FailedError:
            return

    def _judge(self, trial: _Trial, result: Made) -> None:
        self._trial = None
        if trial.expected is None:  # the host's own call failed
            return
        why = _difference(result.tensor, trial.expected, self._dtype(part_of(trial.kind)))
        if why:
            self._barred[trial.kind] = why
        else:
            self._passed.add(trial.kind)

    def _dtype(self, part: str) -> torch.dtype:
        copy = self._copies.get(part)
        module = None if copy is None else copy.module()
        return torch.float16 if module is None else next(p.dtype for p in module.parameters())

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
            member.drain()


def part_of(kind: Hashable) -> str:
    """The module that a kind of call belongs to: the kind names it where that is not the UNet."""
    return str(getattr(kind, "part", UNET))


def missing(members: Sequence[Card], part: str = UNET) -> str:
    """Why none of them can compute anything of this part now."""
    reasons = ((member.device, member.reason or member.without(part)) for member in members)
    return "; ".join(f"{device}: {why}" for device, why in reasons if why) or BUSY


def _check_room(replica: Replica, part: str, tensors: Sequence[torch.Tensor]) -> None:
    size = sum(tensor.nbytes for tensor in tensors)
    free = replica.free_bytes
    if free is not None and free < size:
        raise FailedError(
            f"the {part} takes {size / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free there"
        )


def _difference(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str:
    """Why a result is not what it should be; empty where it is."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"it makes {list(result.shape)} of {result.dtype}, not {list(expected.shape)}"
    there, here = result.double(), expected.double().cpu()
    finite = here.isfinite()
    if not torch.equal(finite, there.isfinite()):
        return "its first result has other places that are not finite"
    there, here = there[finite], here[finite]
    scale = float(here.square().mean().sqrt()) if here.numel() else 0.0
    error = float((there - here).square().mean().sqrt()) if here.numel() else 0.0
    most = MOST_ERRORS.get(dtype, 0.01)
    if error <= most * max(scale, 1e-6):
        return ""
    return f"its first result differs from this card's by {error / max(scale, 1e-6):.2g} (rms)"
