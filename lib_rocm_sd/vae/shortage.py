"""What an "out of memory" leaves behind: what fits instead, and when more is tried again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lib_rocm_sd.vae.plan import BandPlan
from lib_rocm_sd.vae.policy import Wish

FIRST_WAIT = 4
"""Runs until what did not fit is tried again; twice as many each time that it fails."""
CLEARLY_MORE = 1.25
"""It is tried at once where so many times the memory is free that was free then."""


def halved(wish: Wish, plan: BandPlan) -> Wish:
    """The wish after `plan` ran out of memory: half of it, in bands if need be."""
    budget = min(plan.peak_bytes, wish.budget_bytes or plan.peak_bytes) // 2
    return replace(wish, mode="auto" if wish.mode == "whole" else wish.mode, budget_bytes=budget)


@dataclass
class Shortage:
    """A plan did not fit; `wish` is tried instead.

    `peak_bytes`: of that plan. `free_bytes`: the most that was free and did not help: once the plan
    had failed, and before a retry.
    """

    wish: Wish
    peak_bytes: int
    free_bytes: int = 0
    wait: int = FIRST_WAIT
    runs: int = 0

    def is_over(self, free_bytes: int) -> bool:
        """Whether this run tries again what did not fit; each run asks once."""
        self.runs += 1
        if self.runs <= self.wait and free_bytes <= CLEARLY_MORE * self.free_bytes:
            return False
        self.free_bytes = max(self.free_bytes, free_bytes)
        return True

    def again(self, wish: Wish, plan: BandPlan) -> Shortage:
        """After a retry by `plan` has failed too."""
        return Shortage(wish, plan.peak_bytes, self.free_bytes, 2 * self.wait)

    def __str__(self) -> str:
        limit = (self.wish.budget_bytes or 0) >> 20
        return (
            f"planned again within {limit} MiB, for {self.wait} runs or until clearly more memory "
            "is free"
        )
