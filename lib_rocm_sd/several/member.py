"""One further card of a team: its replica from the start to the end, what it was given, what it may
compute, and why not.

It may have a copy of the UNet and one of the VAE's decoder, and a kind of call is of either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.several.blueprint import Blueprint
from lib_rocm_sd.several.link import LostError
from lib_rocm_sd.several.replica import UNET, FailedError, Made, Manner, Replica
from lib_rocm_sd.several.subject import Fact, Subject

Start = Callable[[torch.device], Replica]
MOST_STARTS = 2
"""Most starts of its process, until somebody chooses the cards anew."""
MOST_ERRORS = {torch.float16: 0.01, torch.bfloat16: 0.06, torch.float32: 0.003}
"""Root of the mean square of a result's difference, of that of the result, by the weights' dtype.
Steps of Stable Diffusion's UNets differ by a tenth of it.
"""
GIB = 1 << 30
BUSY = "the other cards are busy"
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Given:
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


class Member:
    """On `device`. Nothing here raises what its replica raises: it becomes `reason`."""

    def __init__(self, device: torch.device, start: Start) -> None:
        self.device, self._start = device, start
        self.reason = ""
        """Why it computes nothing; empty where it may."""
        self.sent_bytes = 0
        """Bytes of weights sent since the start."""
        self._replica: Replica | None = None
        self._given: dict[str, _Given] = {}
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
        self._given.clear()
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
        given = self._given.get(subject.part)
        if given is None or given.module() is not subject.module or given.facts != subject.facts:
            return False
        if given.blueprint is not subject.blueprint and given.blueprint == subject.blueprint:
            given = self._given[subject.part] = replace(given, blueprint=subject.blueprint)
        return given.blueprint is subject.blueprint and given.manner == subject.manner

    def had(self, subject: Subject) -> bool:
        """Whether it has this module, maybe with other weights."""
        given = self._given.get(subject.part)
        return given is not None and given.module() is subject.module

    def forget_weights(self) -> None:
        """Others may be in the host's tensors, though it does not show."""
        self._given = {part: replace(given, facts=[]) for part, given in self._given.items()}
        self._without.clear()

    def may(self, kind: Hashable) -> bool:
        """Whether it may compute calls of this kind."""
        return self.is_there and kind in self._passed and kind not in self._barred

    def wants_trial(self, kind: Hashable) -> bool:
        """Whether it has to compute one beside the host first."""
        known = kind in self._passed or kind in self._barred
        return self.is_there and self._trial is None and not known

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
        given = self._given.pop(part, None)
        self._passed = {kind for kind in self._passed if part_of(kind) != part}
        try:
            tensors = subject.tensors()
            same = (
                given is not None
                and given.module() is subject.module
                and (given.manner, given.blueprint) == (subject.manner, subject.blueprint)
            )
            places = range(len(tensors))
            if given is not None and same and len(given.facts) == len(subject.facts):
                pairs = enumerate(zip(given.facts, subject.facts, strict=True))
                places = [place for place, (old, new) in pairs if old != new]  # type: ignore[assignment]
            else:
                self._barred = {k: why for k, why in self._barred.items() if part_of(k) != part}
                if given is None:
                    _check_room(replica, part, tensors)
                replica.build(subject.blueprint, subject.manner, part)
            self.sent_bytes += replica.fill(tensors, places, part)
            self._given[part] = _Given(
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
        given: Mapping[str, torch.Tensor],
        out_bytes: int,
        asked: Mapping[str, Any] | None = None,
    ) -> bool:
        """Begin a call that the host computes too; `expect` says its result."""
        if not self.begin(kind, given, out_bytes, asked):
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
        given: Mapping[str, torch.Tensor],
        out_bytes: int,
        asked: Mapping[str, Any] | None = None,
    ) -> bool:
        """Begin a call; False where that cannot be. `asked`: see Replica.begin."""
        assert self._replica is not None
        try:
            self._replica.begin(given, out_bytes, {"part": part_of(kind), **(asked or {})})
        except LostError as error:
            self._lost(str(error))
        except ValueError as error:
            self._barred[kind] = str(error)
        else:
            return True
        return False

    def fetch(self, kind: Hashable) -> Made | None:
        """The result of the call that was begun; None where it came to nothing."""
        return self._asked(kind, lambda replica: replica.made(replica.fetch(replica.limits.call_s)))

    def took(self, kind: Hashable) -> float | None:
        """What a call that gives nothing else has taken, in ms; None where it came to nothing."""
        return self._asked(kind, lambda it: float(it.fetch(it.limits.call_s)["ms"]))

    def arrived(self, kind: Hashable) -> bool:
        """Wait until it has written its part of an exchange; False where it came to nothing."""
        return self._done(kind, lambda replica: replica.arrived(replica.limits.call_s))

    def say(self, kind: Hashable, word: str) -> bool:
        """Amid a call: see Replica.say; False where it is gone."""
        return self._done(kind, lambda replica: replica.say(word))

    def _done(self, kind: Hashable, ask: Callable[[Replica], None]) -> bool:
        def done(replica: Replica) -> bool:
            ask(replica)
            return True

        return self._asked(kind, done) is not None

    def _asked(self, kind: Hashable, ask: Callable[[Replica], Result]) -> Result | None:
        if self._replica is None:
            return None
        try:
            return ask(self._replica)
        except LostError as error:
            self._lost(str(error))
        except FailedError as error:
            self._failed(error, kind)
        return None

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

    def _judge(self, trial: _Trial, made: Made) -> None:
        self._trial = None
        if trial.expected is None:  # the host's own call failed
            return
        why = _difference(made.tensor, trial.expected, self._dtype(part_of(trial.kind)))
        if why:
            self._barred[trial.kind] = why
        else:
            self._passed.add(trial.kind)

    def _dtype(self, part: str) -> torch.dtype:
        given = self._given.get(part)
        module = None if given is None else given.module()
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


def part_of(kind: Hashable) -> str:
    """The module that a kind of call belongs to: the kind names it where that is not the UNet."""
    return str(getattr(kind, "part", UNET))


def missing(members: Sequence[Member], part: str = UNET) -> str:
    """Why none of them can compute anything of this part now."""
    found = ((member.device, member.reason or member.without(part)) for member in members)
    return "; ".join(f"{device}: {why}" for device, why in found if why) or BUSY


def _check_room(replica: Replica, part: str, tensors: Sequence[torch.Tensor]) -> None:
    wanted = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free = replica.free_bytes
    if free is not None and free < wanted:
        raise FailedError(
            f"the {part} takes {wanted / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free there"
        )


def _difference(made: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str:
    """Why a result is not what it should be; empty where it is."""
    if made.shape != expected.shape or made.dtype != expected.dtype:
        return f"it makes {list(made.shape)} of {made.dtype}, not {list(expected.shape)}"
    there, here = made.double(), expected.double().cpu()
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
