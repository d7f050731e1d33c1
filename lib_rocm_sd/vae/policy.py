"""How much memory a decode may take, and the plan that a level chooses within it."""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from pathlib import Path

from lib_rocm_sd import policy as levels
from lib_rocm_sd.vae.plan import Plan, Planner
from lib_rocm_sd.vae.steps import Recipe
from lib_rocm_sd.vae.trace import Chain, chain

FREE_SHARE = 0.9
"""Of the free memory, what Performance may plan with; the rest is for what it cannot foresee."""
MEMORY_SLOWDOWN = 2.5
"""Memory takes the smallest budget whose plan costs at most this many times the whole frame."""
SMALLEST_BYTES = 64 << 20
PLANS_KEPT = 32
PLANNERS_KEPT = 4


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


class Plans:
    """The plans of one recipe, by input size, level and memory; made once."""

    def __init__(self, recipe: Recipe, itemsize: int, fused: bool) -> None:
        self._recipe = recipe
        self._itemsize = itemsize
        self._fused = fused
        self._plans: OrderedDict[object, tuple[Plan, Chain]] = OrderedDict()
        self._planners: OrderedDict[object, Planner] = OrderedDict()

    def plan(
        self,
        size: tuple[int, int, int],
        level: str,
        budget_bytes: int | None,
        free_bytes: int,
        host_bytes: int,
    ) -> tuple[Plan, Chain]:
        """The plan for an input (batch, height, width), and the chain that it is for.

        A batch goes at once only where its whole frames fit, else the chain is of one image.
        """
        free_bytes, host_bytes = _rounded(free_bytes), _rounded(host_bytes)
        key = (size, level, budget_bytes, free_bytes, host_bytes)
        if key not in self._plans:
            self._plans[key] = self._new(size, level, budget_bytes, free_bytes, host_bytes)
            while len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
        return self._plans[key]

    def _new(
        self,
        size: tuple[int, int, int],
        level: str,
        budget_bytes: int | None,
        free_bytes: int,
        host_bytes: int,
    ) -> tuple[Plan, Chain]:
        batch, *image = size
        limit = _limit(level, budget_bytes, free_bytes)
        if batch > 1 and limit is not None:
            together = self._planner(size)
            if together.whole().peak_bytes <= limit:
                return together.whole(), together.chain
        single = self._planner((1, *image))
        others = (batch - 1) * single.chain.output_bytes
        limit = None if limit is None else limit - others
        plan = choose(single, limit, max(free_bytes - others, 0), host_bytes)
        return plan, single.chain

    def _planner(self, size: tuple[int, ...]) -> Planner:
        if size not in self._planners:
            made = chain(self._recipe, *size, self._itemsize)  # type: ignore[call-arg]
            self._planners[size] = Planner(made, self._fused)
            while len(self._planners) > PLANNERS_KEPT:
                self._planners.popitem(last=False)
        return self._planners[size]


def _limit(level: str, budget_bytes: int | None, free_bytes: int) -> int | None:
    """What a level may take: the budget, else a share of the free memory, or None for the least."""
    policy = levels.by_name(level)
    if budget_bytes is not None or policy is levels.MEMORY:
        return budget_bytes
    return int(free_bytes * (policy.workspace_share or FREE_SHARE))


def choose(planner: Planner, limit_bytes: int | None, free_bytes: int, host_bytes: int) -> Plan:
    """The whole frame if it fits the limit, else the cheapest plan that does.

    Where none does, the one that needs least. Without a limit see `_frugal`.
    """
    if limit_bytes is None:
        return _frugal(planner, free_bytes, host_bytes)
    whole = planner.whole()
    if whole.peak_bytes <= limit_bytes:
        return whole
    return planner.cheapest(limit_bytes, host_bytes) or planner.smallest(host_bytes)


def _frugal(planner: Planner, free_bytes: int, host_bytes: int) -> Plan:
    """The smallest budget, doubled from SMALLEST_BYTES on, whose plan is not much slower."""
    whole = planner.whole()
    budget = SMALLEST_BYTES
    while budget < min(whole.peak_bytes, free_bytes):
        plan = planner.cheapest(budget, host_bytes)
        if plan is not None and plan.cost <= MEMORY_SLOWDOWN * whole.cost:
            return plan
        budget *= 2
    if whole.peak_bytes <= free_bytes:
        return whole
    return planner.smallest(host_bytes)


def _rounded(size: int) -> int:
    """`size` down to 1/16 of its power of two, so that a plan is found again."""
    step = 1 << max(size.bit_length() - 5, 0)
    return size // step * step


def host_available_bytes() -> int:
    """Host memory that may be taken for parking: half of what the operating system calls free."""
    return _available() // 2


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return _windows_available()
    return 4 << 30


class _MemoryStatus(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "available", "c", "d", "e", "f", "g")),
    ]


def _windows_available() -> int:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    kernel32 = ctypes.CDLL("kernel32")
    return int(status.available) if kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else 0
