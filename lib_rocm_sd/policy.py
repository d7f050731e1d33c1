"""How to choose among variants that can all do the work: three frozen rows, one ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Policy:
    """One optimization level.

    `rank_by`: expected = the variants' own preference; measured = time on this device; workspace =
    fewest bytes, then preference. A variant that needs more than `workspace_share` of the free
    device memory comes after all that need less; None = no limit.
    """

    name: str
    rank_by: Literal["expected", "measured", "workspace"]
    workspace_share: float | None


AUTO = Policy("Auto", "expected", 0.5)
PERFORMANCE = Policy("Performance", "measured", None)
MEMORY = Policy("Memory", "workspace", None)
LEVELS = {policy.name: policy for policy in (AUTO, PERFORMANCE, MEMORY)}


def by_name(level: str) -> Policy:
    """The policy of a level's name; ValueError when there is none."""
    if level not in LEVELS:
        raise ValueError(f"no optimization level {level!r}: there are {', '.join(LEVELS)}")
    return LEVELS[level]


def _it_can() -> bool:
    return True


class Candidate:
    """A variant that may do the work. `workspace()`: the bytes that it takes. `time_us`: measured;
    None where nothing was. `preference`: on this device, where it is not the variant's. `can()`:
    False for one that refuses.
    """

    __slots__ = ("_bytes", "can", "expected", "time_us", "variant", "workspace")

    def __init__(
        self,
        variant: Any,
        workspace: Callable[[], int],
        time_us: float | None = None,
        preference: int | None = None,
        can: Callable[[], bool] = _it_can,
    ) -> None:
        self.variant, self.workspace, self.time_us, self.can = variant, workspace, time_us, can
        self.expected = -(variant.preference if preference is None else preference)
        self._bytes: int | None = None

    @property
    def workspace_bytes(self) -> int:
        """Asked once."""
        if self._bytes is None:
            self._bytes = self.workspace()
        return self._bytes


def rank(policy: Policy, candidates: Iterable[Candidate], free_bytes: int) -> Iterator[Candidate]:
    """Those that can, first choice first; equals keep their order. `free_bytes` of the device.

    Where they rank by expectation, one is asked whether it can, and what it needs, when its turn
    comes: few turns come, and a new size of a picture asks a hundred times.
    """
    if policy.rank_by == "expected":
        yield from _by_expectation(policy, candidates, free_bytes)
        return

    def key(candidate: Candidate) -> tuple[float, ...]:
        space = candidate.workspace_bytes
        if policy.rank_by == "workspace":
            return (space, candidate.expected)
        if limit(policy, candidate, free_bytes):
            return (1, space, candidate.expected)
        if candidate.time_us is not None:
            return (0, 0, candidate.time_us)
        return (0, 1, candidate.expected)

    yield from sorted((each for each in candidates if each.can()), key=key)


def _by_expectation(
    policy: Policy, candidates: Iterable[Candidate], free_bytes: int
) -> Iterator[Candidate]:
    large: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda each: each.expected):
        if candidate.can():
            if not limit(policy, candidate, free_bytes):
                yield candidate
            else:
                large.append(candidate)
    yield from sorted(large, key=lambda each: each.workspace_bytes)


def limit(policy: Policy, candidate: Candidate, free_bytes: int) -> list[str]:
    """Why `policy` puts `candidate` behind all that need less memory; empty when it does not."""
    if policy.workspace_share is None:
        return []
    allowed = int(policy.workspace_share * free_bytes)
    if candidate.workspace_bytes <= allowed:
        return []
    needs, allows = (value / 2**20 for value in (candidate.workspace_bytes, allowed))
    return [f"needs {needs:.0f} MiB of workspace; {policy.name} allows {allows:.0f} MiB now"]
