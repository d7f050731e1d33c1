"""How to choose among variants that can all do the work: three frozen rows, one ranking."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True)
class Candidate:
    """A variant that can do the work. Times are measured ones; None where nothing was measured.
    `preference`: on this device, where it is not the variant's.
    """

    variant: Any
    workspace_bytes: int
    time_us: float | None = None
    preference: int | None = None


def rank(policy: Policy, candidates: Sequence[Candidate], free_bytes: int) -> list[Candidate]:
    """`candidates`, first choice first; equals keep their order. `free_bytes` of the device."""

    def key(candidate: Candidate) -> tuple[float, ...]:
        own = candidate.preference
        expected = -(candidate.variant.preference if own is None else own)
        space = candidate.workspace_bytes
        if policy.rank_by == "workspace":
            return (space, expected)
        if limit(policy, candidate, free_bytes):
            return (1, space, expected)
        if policy.rank_by == "measured" and candidate.time_us is not None:
            return (0, 0, candidate.time_us)
        return (0, 1, expected)

    return sorted(candidates, key=key)


def limit(policy: Policy, candidate: Candidate, free_bytes: int) -> list[str]:
    """Why `policy` puts `candidate` behind all that need less memory; empty when it does not."""
    if policy.workspace_share is None:
        return []
    allowed = int(policy.workspace_share * free_bytes)
    if candidate.workspace_bytes <= allowed:
        return []
    needs, allows = (value / 2**20 for value in (candidate.workspace_bytes, allowed))
    return [f"needs {needs:.0f} MiB of workspace; {policy.name} allows {allows:.0f} MiB now"]
