"""Measured times of a card's attention configs as a table that its owner can contribute.

What Performance has measured on this machine is taken from the cache; what is missing can be
measured: each config is verified against float64, then timed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch

from lib_rocm_sd import __version__
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.commands.support import anonymous
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine import measure as tune
from lib_rocm_sd.engine import selftest
from lib_rocm_sd.lab.sensors import machine
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.kernel import AttentionConfig
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import CASES, AttentionProblem
from lib_rocm_sd.ops.base import Launch, Op
from lib_rocm_sd.runtime import build, source

NOTE = "Measured on this card: every config verified against float64, then timed."
PROBLEM = re.compile(r"B(\d+) H(\d+) Sq(\d+) Sk(\d+) D(\d+) (\w+)")
BUDGET_S = 2.0
LONGEST = 4250
"""Cases with more queries are left out: each call takes long, and the ranking stays."""

Say = Callable[[str], None]
Each = dict[AttentionConfig, float]
"""Median time in us by config."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. `op` is attention; a test may have another."""

    place: torch.device
    info: DeviceInfo
    arch: Arch
    op: Op[Any, Any] = ATTENTION

    @property
    def variant(self) -> MatrixAttention:
        """Ours."""
        return next(each for each in self.op.variants if isinstance(each, MatrixAttention))


@dataclass(frozen=True)
class Slot:
    """What one config is chosen for."""

    dtype: str
    head_dim: int

    def __str__(self) -> str:
        return f"{self.dtype}, head_dim {self.head_dim}"

    def problems(self) -> list[AttentionProblem]:
        """What is measured for it, as Performance would."""
        found = [case.problem for case in CASES if case.problem.head_dim == self.head_dim]
        found = [each for each in found if each.seq_q <= LONGEST]
        made = (ATTENTION.measured_as(replace(each, dtype=self.dtype)) for each in found)
        return list(dict.fromkeys(made))


SLOTS = tuple(Slot(dtype, each) for dtype in kernel.DTYPES for each in kernel.SHIPPED_HEAD_DIMS)


def stored(card: Gpu, slot: Slot) -> dict[AttentionProblem, Each]:
    """Times in the cache for a slot, of problems for which more than one config was measured."""
    found = {}
    for text in tune.stored_problems(card.op, card.info):
        match = PROBLEM.fullmatch(text)
        if not match or (match[6], int(match[5])) != (slot.dtype, slot.head_dim):
            continue
        batch, heads, seq_q, seq_k, head_dim = (int(part) for part in match.groups()[:5])
        problem = AttentionProblem(batch, heads, seq_q, seq_k, head_dim, slot.dtype)
        times, _ = tune.load(card.op, card.info, problem)
        timing = times.get(card.variant.name)
        if timing is not None and len(timing.each) >= min(2, _configs(card, problem)):
            found[problem] = dict(timing.each)
    return {problem: found[problem] for problem in sorted(found, key=_size)}


def _size(problem: AttentionProblem) -> tuple[int, ...]:
    return (problem.seq_q, problem.seq_k, problem.heads, problem.batch)


def _configs(card: Gpu, problem: AttentionProblem) -> int:
    return len(card.variant.configs(card.arch, problem))


def missing(card: Gpu, slot: Slot) -> list[AttentionProblem]:
    """The problems of which not every config was measured."""
    known = stored(card, slot)
    every = slot.problems()
    return [each for each in every if len(known.get(each, {})) < _configs(card, each)]


def compile_all(card: Gpu, problems: Sequence[AttentionProblem], say: Say) -> None:
    """Compile every config of these, a few at a time. What fails is said when it is measured."""
    variant = card.variant
    specs = dict.fromkeys(
        spec
        for problem in problems
        for config in variant.configs(card.arch, problem)
        for spec in variant.specs(card.arch, problem, config)
    )
    wanted = [spec for spec in specs if not build.is_cached(spec, card.arch)]
    for done in range(0, len(wanted), 8):
        say(f"compiling: {done} of {len(wanted)} kernels are done")
        build.build_all(wanted[done : done + 8], card.arch)


def measure(card: Gpu, launch: Launch | None, problem: AttentionProblem, say: Say) -> Each:
    """Verify and time every config on one problem, and keep the times in the cache at once.

    Raises "out of memory".
    """
    contenders = []
    for config in card.variant.configs(card.arch, problem):
        reason = _wrong(card, launch, problem, config)
        if reason:
            say(f"  left out: {config}: {anonymous(reason)}")
        else:
            contenders.append(tune.Contender(card.variant, config, launch))
    times, failures = tune.measure(card.op, problem, card.place, contenders, BUDGET_S)
    for contender, error in failures:
        if selftest.is_out_of_memory(error):
            raise error
        say(f"  left out: {contender.config}: {selftest.describe(error)}")
    if not times:
        return {}
    others, _ = tune.load(card.op, card.info, problem)
    tune.save(card.op, card.info, problem, {**others, **times})
    return dict(times[card.variant.name].each)


def _wrong(
    card: Gpu, launch: Launch | None, problem: AttentionProblem, config: AttentionConfig
) -> str:
    """Why a config is not timed: what its self-test says."""
    for test in card.op.test_problems(problem):
        check = selftest.check(card.op, card.variant, config, launch, test, card.place)
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


def entry_of(card: Gpu, slot: Slot, rows: dict[AttentionProblem, Each]) -> dict[str, Any] | None:
    """One line of a table; None where the times choose nothing."""
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
