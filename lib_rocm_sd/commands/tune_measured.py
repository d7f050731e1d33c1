"""Measured times of a card's attention configs as a table that its owner can contribute.

What Performance has measured on this machine is taken from the cache; what is missing can be
measured: each config is verified against float64, then timed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from lib_rocm_sd import __version__
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands.support import Gpu, anonymous, compile_missing
from lib_rocm_sd.console import say
from lib_rocm_sd.engine import measure as tuning
from lib_rocm_sd.engine import planner, selftest
from lib_rocm_sd.lab.sensors import machine
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.kernel import AttentionConfig
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import CASES, AttentionProblem
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.runtime import source

NOTE = "Measured on this card: every config verified against float64, then timed."
PROBLEM = re.compile(r"B(\d+) H(\d+) Sq(\d+) Sk(\d+) D(\d+) (\w+)")
BUDGET_S = 2.0
LONGEST = 4250
"""Cases with more queries are left out: each call takes long, and the ranking stays."""

VARIANT = next(each for each in ATTENTION.variants if isinstance(each, MatrixAttention))
Each = dict[AttentionConfig, float]
"""Median time in us by config."""


@dataclass(frozen=True)
class Slot:
    """What one config is chosen for."""

    dtype: str
    head_dim: int

    def __str__(self) -> str:
        return f"{self.dtype}, head_dim {self.head_dim}"

    def problems(self) -> list[AttentionProblem]:
        """What is measured for it, as Performance would."""
        problems = (
            ATTENTION.measured_as(replace(case.problem, dtype=self.dtype))
            for case in CASES
            if case.problem.head_dim == self.head_dim and case.problem.seq_q <= LONGEST
        )
        return list(dict.fromkeys(problems))


SLOTS = tuple(Slot(dtype, each) for dtype in kernel.DTYPES for each in kernel.SHIPPED_HEAD_DIMS)


def measure_missing(card: Gpu) -> None:
    """A line for each problem. Raises UsageError where nothing can be launched."""
    work = [each for slot in SLOTS for each in missing(card, slot)]
    if not work:
        say("All is measured already.")
        return
    say(f"{card.info.name} ({card.arch.gfx}): {len(work)} problems; this takes some minutes.")
    try:
        launch = planner.default_launcher(card.place, card.arch)
    except (RuntimeError, OSError) as error:
        why = anonymous(selftest.describe(error))
        raise UsageError(f"the driver cannot be used: {why}") from error
    configs = [(problem, each) for problem in work for each in VARIANT.configs(card.arch, problem)]
    specs = [spec for pair in configs for spec in VARIANT.specs(card.arch, *pair)]
    compile_missing(specs, card.arch, say)
    for number, problem in enumerate(work, 1):
        say(f"{number:3} of {len(work)}  {problem}: {_measured(card, launch, problem)}")


def _measured(card: Gpu, launch: Launch | None, problem: AttentionProblem) -> str:
    """What came of measuring one problem. A card with too little memory for it goes on."""
    try:
        each = measure(card, launch, problem)
    except (RuntimeError, MemoryError) as error:
        if not selftest.is_out_of_memory(error):
            raise
        return "too little memory"
    if not each:
        return "no config of ours works"
    config, time_us = min(each.items(), key=lambda pair: pair[1])
    slowest = max(each.values())
    tile = f"{config.block_q} queries, {config.block_k} keys"
    return f"{time_us:.1f} us with {tile}; {len(each)} configs, slowest {slowest:.1f} us"


def stored(card: Gpu, slot: Slot) -> dict[AttentionProblem, Each]:
    """Times in the cache for a slot, of problems for which more than one config was measured."""
    rows = {}
    for text in tuning.stored_problems(ATTENTION, card.info):
        match = PROBLEM.fullmatch(text)
        if not match or (match[6], int(match[5])) != (slot.dtype, slot.head_dim):
            continue
        batch, heads, seq_q, seq_k, head_dim = (int(part) for part in match.groups()[:5])
        problem = AttentionProblem(batch, heads, seq_q, seq_k, head_dim, slot.dtype)
        times, _ = tuning.load(ATTENTION, card.info, problem)
        timing = times.get(VARIANT.name)
        if timing is not None and len(timing.each) >= min(2, _configs(card, problem)):
            rows[problem] = dict(timing.each)
    by_size = sorted(rows, key=lambda p: (p.seq_q, p.seq_k, p.heads, p.batch))
    return {problem: rows[problem] for problem in by_size}


def _configs(card: Gpu, problem: AttentionProblem) -> int:
    return len(VARIANT.configs(card.arch, problem))


def missing(card: Gpu, slot: Slot) -> list[AttentionProblem]:
    """The problems of which not every config was measured."""
    rows = stored(card, slot)
    return [
        problem
        for problem in slot.problems()
        if len(rows.get(problem, {})) < _configs(card, problem)
    ]


def measure(card: Gpu, launch: Launch | None, problem: AttentionProblem) -> Each:
    """Verify and time every config on one problem, and keep the times in the cache at once.

    Raises "out of memory".
    """
    contenders = []
    for config in VARIANT.configs(card.arch, problem):
        reason = _wrong(card, launch, problem, config)
        if reason:
            say(f"  left out: {config}: {anonymous(reason)}")
        else:
            contenders.append(tuning.Contender(VARIANT, config, launch))
    times, failures = tuning.measure(ATTENTION, problem, card.place, contenders, BUDGET_S)
    for contender, error in failures:
        if selftest.is_out_of_memory(error):
            raise error
        say(f"  left out: {contender.config}: {selftest.describe(error)}")
    if not times:
        return {}
    others, _ = tuning.load(ATTENTION, card.info, problem)
    tuning.save(ATTENTION, card.info, problem, {**others, **times})
    return dict(times[VARIANT.name].each)


def _wrong(
    card: Gpu, launch: Launch | None, problem: AttentionProblem, config: AttentionConfig
) -> str:
    """Why a config is not timed: what its self-test says."""
    for test in ATTENTION.test_problems(problem):
        check = selftest.check(ATTENTION, VARIANT, config, launch, test, card.place)
        if check.reason:
            return check.reason
    return ""


def best(rows: dict[AttentionProblem, Each]) -> AttentionConfig | None:
    """The config that takes least for all problems together; None without any that was measured on
    all.
    """
    first: Each = next(iter(rows.values()), {})
    shared = [config for config in first if all(config in each for each in rows.values())]
    return min(shared, key=lambda config: sum(each[config] for each in rows.values()), default=None)


def entry_of(card: Gpu, slot: Slot) -> dict[str, Any] | None:
    """One line of a table; None where the times choose nothing."""
    rows = stored(card, slot)
    chosen = best(rows)
    if chosen is None:
        return None
    default = kernel.configs(card.arch, slot.head_dim)[0]
    times = [
        {
            "problem": str(problem),
            "time_us": round(each[chosen], 3),
            "default_us": round(each[default], 3) if default in each else None,
        }
        for problem, each in rows.items()
    ]
    named = kernel.form(slot.dtype, slot.head_dim)
    return {"form": named, "config": kernel.fields_of(chosen), "times": times}


def section_of(card: Gpu, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """A measured section: the card, its driver and versions, and no name of a user or folder."""
    about = machine(card.place)
    head_dim = kernel.SHIPPED_HEAD_DIMS[0]
    config = kernel.configs(card.arch, head_dim)[0]
    defines = kernel.spec(kernel.DTYPES[0], head_dim, "none", config).defines
    text = source.flatten(kernel.SOURCE)
    section = {
        "source": tuned.MEASURED,
        "note": NOTE,
        "card": card.info.name,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rocm_sd": __version__,
        "kernel": hashlib.sha256(text.encode()).hexdigest()[:16],
        **{name: about[name] for name in ("torch", "driver", "rocm", "os")},
        "defines": [name for name, _ in defines],
        "entries": entries,
    }
    clean: dict[str, Any] = anonymous(section)
    return clean
