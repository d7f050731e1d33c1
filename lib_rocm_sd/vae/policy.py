"""How much memory a decode may take, and the plan that a level chooses within it; what an "out of
memory" leaves behind.
"""

from __future__ import annotations

import ctypes
import sys
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from lib_rocm_sd import policy as levels
from lib_rocm_sd.vae.forecast import Chosen
from lib_rocm_sd.vae.plan import BandPlan, BandPlanner, thrifty
from lib_rocm_sd.vae.steps import Recipe
from lib_rocm_sd.vae.trace import chain

FREE_SHARE = 0.9
"""Share of free memory that Performance may plan with; the rest is for what it cannot foresee."""
MEMORY_SLOWDOWN = 2.5
"""Memory takes the smallest budget whose plan costs at most this many times the whole frame."""
SMALLEST_BYTES = 64 << 20
PLANS_KEPT = 32
PLANNERS_KEPT = 4


def shortfall(role: str, plan: BandPlan, budget_bytes: int | None) -> str:
    """What a user is told of a plan that no budget so small allows; empty where it is kept."""
    if budget_bytes is None or plan.peak_bytes <= budget_bytes:
        return ""
    return (
        f"the VAE's {role} needs {plan.peak_bytes >> 20} MiB at the least for this size; "
        f"the budget is {budget_bytes >> 20} MiB"
    )


def checked_budget(budget_bytes: object) -> int | None:
    """`budget_bytes` as an int, None for automatic. Raises ValueError for anything else."""
    if budget_bytes is None:
        return None
    whole = isinstance(budget_bytes, int) or (
        isinstance(budget_bytes, float) and budget_bytes.is_integer()
    )
    if isinstance(budget_bytes, bool) or not whole or not budget_bytes > 0:  # type: ignore[operator]
        raise ValueError(f"a memory budget is a number of bytes above 0, not {budget_bytes!r}")
    return int(budget_bytes)  # type: ignore[call-overload, no-any-return]


MODES = ("auto", "whole", "banded")
"""auto: the level decides. whole: the whole frame, bands only after out of memory. banded: always
bands, where the image is high enough for two."""


@dataclass(frozen=True)
class Wish:
    """What the caller wants: a level's name, one of MODES, and bytes to keep to beside weights."""

    level: str = "Auto"
    mode: str = "auto"
    budget_bytes: int | None = None


def wish(level: str, mode: str, budget_bytes: object) -> Wish:
    """The caller's wish, checked. Raises ValueError, in plain words, for nonsense."""
    levels.by_name(level)
    if mode not in MODES:
        raise ValueError(f"no mode {mode!r}: there are {', '.join(MODES)}")
    return Wish(level, mode, checked_budget(budget_bytes))


class Planner(Protocol):
    """Plans for one input: the whole frame, the cheapest within budgets, the one of least peak."""

    @property
    def chain(self) -> Any: ...
    def whole(self) -> BandPlan: ...
    def cheapest(
        self, budget_bytes: int, host_bytes: int, most_cost: float = ...
    ) -> BandPlan | None: ...
    def smallest(self, host_bytes: int) -> BandPlan: ...


P = TypeVar("P", bound=Planner)


class SizedPlans(ABC, Generic[P]):
    """Plans by input size, wish and memory; made once."""

    def __init__(self) -> None:
        self._plans: OrderedDict[object, tuple[BandPlan, Any]] = OrderedDict()
        self._planners: OrderedDict[object, P] = OrderedDict()

    @abstractmethod
    def _new_planner(self, size: tuple[int, int, int]) -> P:
        """The planner for inputs (batch, height, width)."""

    def plan(
        self, size: tuple[int, int, int], wish: Wish, free_bytes: int, host_bytes: int
    ) -> tuple[BandPlan, Any]:
        """The plan for an input (batch, height, width), and the chain that it is for.

        A batch goes at once only where its whole frames fit, else the chain is of one image; the
        plan's peak then includes the outputs of all.
        """
        free_bytes, host_bytes = _rounded(free_bytes), _rounded(host_bytes)
        key = (size, wish, free_bytes, host_bytes)
        if key not in self._plans:
            self._plans[key] = self._new(size, wish, free_bytes, host_bytes)
            while len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
        return self._plans[key]

    def _new(
        self, size: tuple[int, int, int], wish: Wish, free_bytes: int, host_bytes: int
    ) -> tuple[BandPlan, Any]:
        batch, height, width = size
        limit = limit_bytes(wish, free_bytes)
        if batch > 1 and limit is not None and wish.mode != "banded":
            together = self.planner(size)
            if together.whole().peak_bytes <= limit:
                return together.whole(), together.chain
        single = self.planner((1, height, width))
        others = batch * single.chain.output_bytes if batch > 1 else 0
        limit = None if limit is None else limit - others
        free_bytes = max(free_bytes - others, 0)
        plan = choose(single, limit, free_bytes, host_bytes, wish.mode)
        return replace(plan, peak_bytes=plan.peak_bytes + others), single.chain

    def planner(self, size: tuple[int, int, int]) -> P:
        """The planner for inputs (batch, height, width)."""
        if size not in self._planners:
            self._planners[size] = self._new_planner(size)
            while len(self._planners) > PLANNERS_KEPT:
                self._planners.popitem(last=False)
        return self._planners[size]


class Plans(SizedPlans[BandPlanner]):
    """The plans of one recipe. `chosen` says how a convolution will be run."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype, chosen: Chosen) -> None:
        super().__init__()
        self._recipe = recipe
        self._dtype = dtype
        self._chosen = chosen

    def _new_planner(self, size: tuple[int, int, int]) -> BandPlanner:
        return thrifty(chain(self._recipe, *size, self._dtype), self._chosen)


def limit_bytes(wish: Wish, free_bytes: int) -> int | None:
    """What may be taken: the budget, else the level's share of the free memory, None: the least."""
    policy = levels.by_name(wish.level)
    least = policy is levels.MEMORY and wish.mode != "whole"
    if wish.budget_bytes is not None or least:
        return wish.budget_bytes
    return int(free_bytes * (policy.workspace_share or FREE_SHARE))


def choose(
    planner: Planner,
    limit_bytes: int | None,
    free_bytes: int,
    host_bytes: int,
    mode: str = "auto",
) -> BandPlan:
    """The whole frame if it fits the limit, else the cheapest plan that does.

    Where none does, the one that needs least. Without a limit see `_frugal`. `mode` as in MODES.
    """
    whole = planner.whole()
    if mode == "whole":
        return whole
    if limit_bytes is None:
        plan = _frugal(planner, free_bytes, host_bytes)
    elif mode == "auto" and whole.peak_bytes <= limit_bytes:
        return whole
    else:
        most = limit_bytes if mode == "auto" else min(limit_bytes, whole.peak_bytes // 2)
        plan = planner.cheapest(most, host_bytes) or planner.smallest(host_bytes)
    if mode == "banded" and plan.whole:
        return planner.smallest(host_bytes)
    return plan


def _frugal(planner: Planner, free_bytes: int, host_bytes: int) -> BandPlan:
    """The smallest budget, doubled from SMALLEST_BYTES on, whose plan is not much slower."""
    whole = planner.whole()
    budget = SMALLEST_BYTES
    while budget < min(whole.peak_bytes, free_bytes):
        plan = planner.cheapest(budget, host_bytes, MEMORY_SLOWDOWN * whole.cost)
        if plan is not None:
            return plan
        budget *= 2
    if whole.peak_bytes <= free_bytes:
        return whole
    return planner.smallest(host_bytes)


def _rounded(size: int) -> int:
    """`size` down to 1/16 of its power of two, so that a plan is found again."""
    step = 1 << max(size.bit_length() - 5, 0)
    return size // step * step


HOST_KNOWN_S = 1.0
"""How long what the operating system said of the host's memory is taken for true."""


def host_available_bytes() -> int:
    """Host memory that may be taken for parking: half of what the operating system calls free."""
    return _available_at(int(time.monotonic() / HOST_KNOWN_S)) // 2


@lru_cache(maxsize=1)
def _available_at(second: int) -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        succeeded = ctypes.CDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status))
        return int(status.available) if succeeded else 0
    return 4 << 30


class _MemoryStatus(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "available", "c", "d", "e", "f", "g")),
    ]


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
