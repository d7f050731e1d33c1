"""Which variant runs a problem on a device: refusals, self-tests, measured times, ranking."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine import selftest
from lib_rocm_sd.engine.gating import Asked, Gatekeeper
from lib_rocm_sd.engine.measure import KnownTimes, Times
from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.engine.selftest import Check
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.ops.base import Launch, Op, Variant
from lib_rocm_sd.policy import AUTO, Candidate, Policy, limit, rank


@dataclass(frozen=True)
class VariantPlan:
    """What runs a problem: `variant` with `config`. `refusals` has all others' reasons, by name."""

    variant: Variant[Any, Any]
    config: Any
    refusals: Mapping[str, list[str]]
    why: str


TestKey = tuple[str, ...]
"""A self-test in words that all processes of a version have: op, variant, config, problem."""


def _in_words(key: Any) -> TestKey:
    """A check's key, without its device."""
    op, variant, config, test, _ = key
    return op, variant, repr(config), repr(test)


UNTRIED = "it is not tried in a process of its own, as what this host launches has to be"
SECOND_LOOK_S = 0.1
"""How long a process tests what the gate vouches for, all classes together."""


def default_launcher(device: torch.device, arch: Arch) -> Launch:
    """The driver's launcher; imported here so that without a GPU no driver is ever loaded."""
    from lib_rocm_sd.runtime import launcher

    return launcher.launcher_for(device, arch)


class Planner:
    """What an engine knows of devices and variants. Not thread-safe: the engine holds its lock."""

    def __init__(
        self,
        identify: Callable[[torch.device], DeviceInfo],
        launcher: Callable[[torch.device, Arch], Launch],
        free: Callable[[torch.device, int], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.identify = identify
        self._clock = clock
        self._looked_s = 0.0
        self._launcher = launcher
        self._free = free
        self.gate: Gatekeeper | None = None
        self.changes = 0
        """Counts what was barred or pardoned."""
        self.known = KnownTimes(identify)
        self.waits = 0
        """Counts refusals that the gate will think over."""
        self._checks: dict[Hashable, Check] = {}
        self._trusted: set[TestKey] = set()
        self._quarantine: dict[Hashable, str] = {}
        self._launchers: dict[torch.device, tuple[Launch | None, list[str]]] = {}
        self._noted: dict[Hashable, list[str]] = {}

    def plan(
        self,
        session: Session,
        op: Op[Any, Any],
        problem: Any,
        device: torch.device,
        further: Ask = lambda variant: (),
    ) -> VariantPlan:
        """The first verified variant in the policy's order; `further` may refuse one, too. What
        Performance has no times of goes by those of the nearest problem, else as Auto does.

        Raises NotSupportedError when none is left.
        """
        policy, arch = session.policy, self.identify(device).arch
        barred, times = self._against_ours(device), Times()

        def ask(variant: Variant[Any, Any]) -> Sequence[str]:
            asked = Asked(op, variant, None, problem, device)
            why = barred if variant.ours else self._against(asked)
            why = why or _refusals(asked, arch)
            if not why and variant in op.measured_only and variant.name not in times:
                return self._unmeasured(asked)
            return why

        answers, at = Refusals(op, ask, further), ""
        if session.measures:
            like = op.measured_as(problem)
            times = self.known.of(session, op, like, device)
            at = "" if like == problem else f", for {like}"
            if not times:
                like, times = self.known.nearest(session, op, like, device)
                at = f", for {like}, the nearest that is known"
                policy = policy if times else AUTO
        candidates = [
            Candidate(
                variant,
                partial(variant.workspace, problem),
                times[variant.name].time_us if variant.name in times else None,
                variant.preference_for(arch, problem),
                partial(answers.accepts, variant),
            )
            for variant in (op.every if session.measures else op.variants)
        ]
        free = self._free(device, session.headroom_bytes)
        configs = {name: timing.config for name, timing in times.items()}
        ranked = rank(policy, candidates, free)
        choice = self._first_verified(session, op, problem, device, ranked, configs, answers)
        if choice is None:
            raise NotSupportedError(problem, {v.name: answers.of(v) for v in op.variants})
        chosen, config = choice
        answers.close(chosen, candidates, policy, free)
        return VariantPlan(chosen.variant, config, answers, _why(policy, chosen, free, at))

    def _unmeasured(self, asked: Asked) -> list[str]:
        """Why there is no time of a variant."""
        barred = [self._quarantine.get(each.key(), "") for each in self.defaults(asked)]
        return [why for why in barred if why] or ["was not measured"]

    def refusals(self, asked: Asked) -> list[str]:
        """Why a variant cannot run a problem on a device at all, before any test."""
        return self._against(asked) or _refusals(asked, self.identify(asked.device).arch)

    def _against(self, asked: Asked) -> list[str]:
        """Why a variant cannot run on a device or for this host, whatever the problem is."""
        if asked.variant.untried and self.gate is not None:
            return [UNTRIED]
        return self._against_ours(asked.device) if asked.variant.ours else []

    def _against_ours(self, device: torch.device) -> list[str]:
        """Why no kernel of ours can run on `device`."""
        return list(self.identify(device).reasons) or self.launcher_of(device)[1]

    def launch(self, variant: Variant[Any, Any], device: torch.device) -> Launch | None:
        """What launches kernels of ours on `device`; None for a variant that needs none."""
        return self.launcher_of(device)[0] if variant.ours else None

    def defaults(self, asked: Asked) -> list[Asked]:
        """With the config that runs unless another was measured, and the safe one, if another."""
        configs = asked.variant.defaults(self.identify(asked.device).arch, asked.problem)
        return [replace(asked, config=config) for config in configs]

    def verify(self, session: Session, asked: Asked) -> list[str]:
        """Why a class may not be used for its problem; empty once it was found right.

        Runs the self-tests that were not run yet. A failed one quarantines the class. Raises only
        "out of memory".
        """
        reason = self._quarantine.get(asked.key(), "")
        if not reason:
            config = asked.variant.tested_as(asked.config)
            asked = replace(asked, config=config, launch=self.launch(asked.variant, asked.device))
            reason = self._gated(session, asked)
        if reason:
            return [reason]
        for test in asked.tests:
            key = asked.key(test)
            check = self._checks.get(key)
            if check is None and _in_words(key) in self._trusted:
                continue
            if check is None:
                if is_recording(asked.device):
                    return ["was not self-tested before the graph capture began"]
                check = self._checks[key] = self._check(asked, test)
            if check.reason:
                reason = f"self-test failed: {check.reason}"
                self.quarantine(asked, reason)
                self.tell(session, asked, reason)
                return [reason]
        return []

    def passed(self, device: torch.device) -> list[TestKey]:
        """Self-tests that were passed on `device`, for `trust` of another process."""
        passes = ((key, check) for key, check in self._checks.items() if not check.reason)
        return [_in_words(key) for key, _ in passes if key[-1] == device]  # type: ignore[index]

    def trust(self, passed: Iterable[TestKey]) -> None:
        """Leave out self-tests that a process of this version has passed on a card of this kind."""
        self._trusted = set(passed)

    def _gated(self, session: Session, asked: Asked) -> str:
        """Why the gate does not let the class be launched here; empty where it does."""
        refusal = self.gate.refusal(asked) if self.gate is not None and asked.variant.ours else None
        if refusal is None:
            return ""
        if refusal.waits:
            self.waits += 1
        else:
            self.tell(session, asked, refusal.reason)
        return refusal.reason

    def _check(self, asked: Asked, test: Any) -> Check:
        """A self-test. The gate's journal has the first of a class. Of what passed elsewhere it is
        a second look, and left out where these have taken long enough.
        """
        op = asked.op
        how = (op, asked.variant, asked.config, asked.launch, test, asked.device)
        if self.gate is None or not asked.variant.ours:
            return selftest.check(*how)
        names_class = test == asked.tests[0]
        if names_class and self._looked_s >= SECOND_LOOK_S and self.gate.vouches(asked):
            return Check(0.0, op.tolerance(test))
        begin = self._clock()
        with self.gate.launching(asked, "self-test") or nullcontext():
            check = selftest.check(*how)
        self._looked_s += self._clock() - begin
        if check.reason:
            self.gate.failed(asked, check.reason)
        return check

    def worst_check(self, session: Session, asked: Asked) -> Check:
        """The self-test of a class that came nearest to its tolerance; where the gate lets none be
        run, that is its reason.
        """
        failed = self.verify(session, asked)
        keys = [asked.key(test) for test in asked.tests]
        checks = [self._checks[key] for key in keys if key in self._checks]
        if not checks:  # another process has passed them, or nobody
            error = math.inf if failed else 0.0
            return Check(error, asked.op.tolerance(asked.problem), "; ".join(failed))
        return max(checks, key=lambda check: check.error / check.tolerance)

    def quarantine(self, asked: Asked, reason: str) -> Hashable:
        """Bar a class; the key is for `pardon`."""
        key = asked.key()
        self._quarantine[key] = reason
        self.changes += 1
        return key

    def pardon(self, key: Hashable) -> None:
        """Take a quarantine back."""
        self._quarantine.pop(key, None)
        self.changes += 1

    def tell(self, session: Session, asked: Asked, reason: str) -> None:
        """Report once that a variant is not used any more."""
        session.report.event(
            f"{asked.op.name}: {asked.variant.name} is not used on {asked.device}: {reason}"
        )

    def launcher_of(self, device: torch.device) -> tuple[Launch | None, list[str]]:
        """The launcher, or why there is none; asked once per device."""
        if device not in self._launchers:
            arch = self.identify(device).arch
            if arch is None:
                raise AssertionError(f"{device} has no row in the table and was not refused")
            try:
                self._launchers[device] = (self._launcher(device, arch), [])
            except (RuntimeError, OSError) as error:
                why = f"the driver cannot be used: {selftest.describe(error)}"
                self._launchers[device] = (None, [why])
        return self._launchers[device]

    def _first_verified(
        self,
        session: Session,
        op: Op[Any, Any],
        problem: Any,
        device: torch.device,
        ranked: Iterable[Candidate],
        tuned: Mapping[str, Any],
        answers: Refusals,
    ) -> tuple[Candidate, Any] | None:
        """The first candidate that passes its self-test; `answers` has why others did not."""
        able = []
        for candidate in ranked:
            variant = candidate.variant
            asked = Asked(op, variant, None, problem, device)
            able.append((candidate, asked))
            for note in self._notes(asked):
                session.report.event(note)
            defaults = [each.config for each in self.defaults(asked)]
            if variant.name in tuned:
                space = variant.configs(self.identify(device).arch, problem)
                defaults[:0] = [each for each in space if each == tuned[variant.name]]
            for config in dict.fromkeys(defaults):
                why = self.verify(session, replace(asked, config=config))
                if not why:
                    return candidate, config
                answers.add(variant, why)
        if is_recording(device):
            for candidate, asked in able:
                if not asked.variant.ours and asked.variant not in op.measured_only:
                    return candidate, self.defaults(asked)[0].config
        return None

    def _notes(self, asked: Asked) -> list[str]:
        """What is noted of all classes with this problem; asked once."""
        key = (asked.op.name, asked.variant.name, asked.tests[0], asked.device)
        if key not in self._noted:
            arch = self.identify(asked.device).arch
            self._noted[key] = asked.variant.notes(arch, asked.problem)
        return self._noted[key]


def _refusals(asked: Asked, arch: Arch | None) -> list[str]:
    """Why a variant refuses; of one that is only measured, what it raises when it is asked. It may
    ask torch about the current device.
    """
    on_card = asked.device.type == "cuda" and torch.cuda.is_initialized()
    try:
        with torch.cuda.device(asked.device) if on_card else nullcontext():
            return asked.variant.refusals(arch, asked.problem)
    except Exception as error:
        if asked.variant not in asked.op.measured_only:
            raise
        return [selftest.describe(error)]


def _why(policy: Policy, chosen: Candidate, free: int, measured_at: str) -> str:
    if policy.rank_by == "measured" and chosen.time_us is not None:
        return f"{policy.name}: fastest, {chosen.time_us:.1f} µs measured{measured_at}"
    if policy.rank_by == "workspace":
        return f"{policy.name}: least workspace, {chosen.workspace_bytes / 2**20:.0f} MiB"
    over = limit(policy, chosen, free)
    return f"{policy.name}: {over[0] if over else 'expected to be fastest'}"


Ask = Callable[[Variant[Any, Any]], Sequence[str]]
"""Why a variant cannot."""


class Refusals(Mapping[str, list[str]]):
    """Why one variant runs a problem and not the others, by their names. Found out when somebody
    looks: of a hundred plans that a new size of a picture takes, nobody looks at most.

    `ask`: why a variant cannot run the problem. `further`: what there is beside that, until
    `close`: it may hold tensors.
    """

    def __init__(self, op: Op[Any, Any], ask: Ask, further: Ask) -> None:
        self._op, self._ask = op, ask
        self._further: Ask | None = further
        self._said: dict[str, list[str]] = {}
        self._why: Callable[[], dict[str, list[str]]] = dict
        self._others: dict[str, list[str]] | None = None

    def of(self, variant: Variant[Any, Any]) -> list[str]:
        """All reasons against `variant`; empty where it can."""
        reasons = self._said.get(variant.name)
        if reasons is None:
            reasons = list(self._ask(variant))
            if self._further is not None:
                reasons += self._further(variant)
            self._said[variant.name] = reasons
        return reasons

    def accepts(self, variant: Variant[Any, Any]) -> bool:
        """Whether there is no reason against it."""
        return not self.of(variant)

    def add(self, variant: Variant[Any, Any], why: Sequence[str]) -> None:
        """It does not run for these reasons either."""
        self.of(variant).extend(why)

    def close(
        self, chosen: Candidate, candidates: Sequence[Candidate], policy: Policy, free_bytes: int
    ) -> None:
        """The plan is made: `chosen` runs."""
        self._further = None
        others = [other for other in candidates if other is not chosen]
        after = [f"comes after {chosen.variant.name}"]

        def why() -> dict[str, list[str]]:
            return {
                other.variant.name: self.of(other.variant)
                or limit(policy, other, free_bytes)
                or after
                for other in others
            }

        self._why = why

    def _dict(self) -> dict[str, list[str]]:
        if self._others is None:
            self._others = self._why()
        return self._others

    def __getitem__(self, name: str) -> list[str]:
        return self._dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dict())

    def __len__(self) -> int:
        return len(self._dict())

    def __repr__(self) -> str:
        return repr(self._dict())
