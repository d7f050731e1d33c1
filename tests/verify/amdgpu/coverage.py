"""Which instructions of kernels the cases execute: python -m tests.verify.amdgpu.coverage [gfx ..].

Prints what share of each kernel's instructions all its cases together reach, the worst first, with
the addresses of what none of them reaches. What a case reached is kept beside what tests compile,
so that only what changed is executed again.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lib_rocm_sd.arch import Arch, by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from tests import compiled, executed, noted
from tests.verify.amdgpu import cases, executor, loader
from tests.verify.amdgpu.case import Case
from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.judge import Outcome, execute, specs_of
from tests.verify.amdgpu.launch import built
from tests.verify.amdgpu.lines import lines_of, text_at

SHARED = ("group_norm_silu.hip", "conv_sum.hip", "pack.hip")
"""Of kernels that run beside others."""
Reached = dict[KernelSpec, frozenset[int]]
Run = tuple[Instruction, ...]


@cache
def _codes() -> noted.Codes:
    return noted.Codes(executed.read_codes())


def kernel_of(case: Case) -> tuple[str, str, KernelSpec]:
    """What cases have in common that are executed again on the same day: the kernel that is
    compiled for them, the one that is not a norm's where there is one.
    """
    specs = sorted(specs_of(case), key=repr)
    own = [spec for spec in specs if spec.source not in SHARED]
    return case.gfx, case.compiled_by, (own or specs)[0]


# -- what a case reached -------------------------------------------------------------------------


def _entry(case: Case, make: Callable[[], Outcome]) -> Reached:
    """What is kept of a case, else what `make` finds."""

    def write(folder: Path) -> None:
        reached = make().reached
        found = [[*spec.__dict__.values(), sorted(here)] for spec, here in reached.items()]
        (folder / "reached.json").write_text(json.dumps(found), encoding="utf-8")

    steps = noted.steps_of(_codes(), lambda: execute(case))
    key = compiled.hash_of("reached", noted.plain(case), executor.VERSION, steps)
    text = (compiled.entry(key, write) / "reached.json").read_text(encoding="utf-8")
    return {
        KernelSpec(source, entry, tuple((name, value) for name, value in defines)): frozenset(here)
        for source, entry, defines, here in json.loads(text)
    }


def keep(outcome: Outcome) -> None:
    """So that `reached_by` need not execute the case again."""
    _entry(outcome.case, lambda: outcome)


def reached_by(case: Case) -> Reached:
    """Of each kernel the addresses that this case executes. Raises AssertionError for a fault."""

    def right() -> Outcome:
        outcome = execute(case)
        assert not outcome.faults, f"{case}: {'; '.join(outcome.faults)}"
        return outcome

    return _entry(case, right)


# -- what all of them reach ----------------------------------------------------------------------


LEAST = 0.95
"""Of the instructions of a shipped kernel that a launch can reach."""


class Unreachable(NamedTuple):
    """Code that no launch reaches: at most so many `runs`, one instruction behind the other, of a
    kernel, of which one instruction comes from a line with `text`.
    """

    entry: str
    text: str
    runs: int
    why: str


DIVISION = "a division by 64 bits, of numbers that a launch of 2^32 work-items keeps within 32"
LAST = "the last of a batch that is not whole: it has at most UNROLL - 1"
UNREACHABLE = (
    Unreachable("group_norm_statistics", "run = unit / p.parts", 1, DIVISION),
    Unreachable("group_norm_statistics", "image = place.run / p.channels", 1, DIVISION),
    Unreachable("group_norm_apply", "run = unit / p.parts", 1, DIVISION),
    Unreachable("group_norm_apply", "Values::template store<", 2, LAST),
    Unreachable("group_norm_finish", "Values::template store<", 2, LAST),
)


@dataclass(frozen=True)
class Coverage:
    """Of one kernel on one GPU. `missed`: the instructions that no case reaches, but for what is
    `excused`.
    """

    gfx: str
    spec: KernelSpec
    instructions: int
    missed: tuple[Run, ...]
    excused: tuple[tuple[Unreachable, Run], ...]

    @property
    def share(self) -> float:
        """Of the instructions that a launch can reach."""
        reachable = self.instructions - sum(len(run) for _, run in self.excused)
        return 1 - sum(map(len, self.missed)) / reachable

    def __str__(self) -> str:
        excused = sum(len(run) for _, run in self.excused)
        no_more = f", {excused} unreachable" if excused else ""
        return f"{self.share:7.1%} of {self.instructions}{no_more}  {self.gfx} {self.spec}"

    def rest(self) -> list[str]:
        """Each run that is missed: address, number, and the lines of source that most are of."""
        arch = by_gfx(self.gfx)
        assert arch is not None
        found = []
        for run in self.missed:
            places = lines_of(self.spec, arch)
            lines = Counter(places.get(each.address, ("", 0)) for each in run)
            most = ", ".join(f"{file}:{line}" for (file, line), _ in lines.most_common(4))
            at = run[0].address - loader.LOADED_AT
            found.append(f"{at:#7x} {len(run):4d}  {run[0].name} .. {run[-1].name}  {most}")
        return found


def coverage(gfx: str, chosen: Iterable[Case]) -> list[Coverage]:
    """Of all kernels that these cases launch, the worst first."""
    reached: Reached = {}
    for case in chosen:
        for spec, here in reached_by(case).items():
            reached[spec] = reached.get(spec, frozenset()) | here
    found = [_covered(gfx, spec, here) for spec, here in reached.items()]
    return sorted(found, key=lambda each: each.share)


@cache
def launching(gfx: str, spec: KernelSpec) -> tuple[Case, ...]:
    """The cases that launch a kernel, first those that launch few others."""
    found = [(specs, case) for specs, case in _every(gfx) if spec in specs]
    return tuple(case for _, case in sorted(found, key=lambda each: len(each[0])))


@cache
def _every(gfx: str) -> tuple[tuple[frozenset[KernelSpec], Case], ...]:
    made = [case for make in cases.ALL.values() for case in make(gfx)]
    return tuple((frozenset(specs_of(case)), case) for case in made)


def of_kernel(gfx: str, spec: KernelSpec) -> Coverage:
    """By as many of its cases as are needed for LEAST."""
    reached: frozenset[int] = frozenset()
    found = _covered(gfx, spec, reached)
    for case in launching(gfx, spec):
        reached |= reached_by(case)[spec]
        found = _covered(gfx, spec, reached)
        if found.share >= LEAST:
            break
    return found


def _covered(gfx: str, spec: KernelSpec, reached: frozenset[int]) -> Coverage:
    arch = by_gfx(gfx)
    assert arch is not None
    every = loader.load(built(spec, arch), spec.entry).instructions
    runs = list(_runs(each for each in every if each.address not in reached))
    rows = [row for row in UNREACHABLE if row.entry == spec.entry]
    excused: list[tuple[Unreachable, Run]] = []
    for row in rows if reached else ():
        lines = lines_of(spec, arch)
        mine = [
            run
            for run in runs
            if any(row.text in text_at(*lines.get(i.address, ("", 0))) for i in run)
        ]
        for run in mine[: row.runs]:
            excused.append((row, run))
            runs.remove(run)
    return Coverage(arch.gfx, spec, len(every), tuple(runs), tuple(excused))


def _text_of(run: Run, spec: KernelSpec, arch: Arch) -> str:
    """The lines of source that its instructions are of."""
    places = lines_of(spec, arch)
    lines = {places[each.address] for each in run if each.address in places}
    return "\n".join(text_at(*line) for line in sorted(lines))


def _runs(missed: Iterable[Instruction]) -> Iterator[Run]:
    """Instructions one behind the other."""
    run: list[Instruction] = []
    for each in missed:
        if run and run[-1].address + run[-1].size != each.address:
            yield tuple(run)
            run = []
        run.append(each)
    if run:
        yield tuple(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gfx", nargs="*", default=["gfx1100"])
    parser.add_argument("--op", choices=sorted(cases.ALL), action="append")
    arguments = parser.parse_args()
    for gfx in arguments.gfx:
        chosen = [case for op in arguments.op or cases.ALL for case in cases.ALL[op](gfx)]
        for each in coverage(gfx, chosen):
            print(each)
            for line in each.rest():
                print(f"         {line}")


if __name__ == "__main__":
    main()
