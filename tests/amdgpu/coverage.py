"""Which instructions of our kernels the cases execute: python -m tests.amdgpu.coverage [gfx ..].

Prints what share of each kernel's instructions all its cases together reach, the worst first, with
the addresses of what none of them reaches. What a case reached is kept beside what tests compile,
so that only what changed is executed again.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from tests import compiled, executed
from tests.amdgpu import cases, loader
from tests.amdgpu.decode import Instruction
from tests.amdgpu.judge import Case, Outcome, execute, specs_of
from tests.amdgpu.launch import built
from tests.amdgpu.lines import lines_of

OPS = ("attention", "conv", "group_norm")
LAUNCHED_BY = {
    "attention": ("attention",),
    "softmax": ("attention",),
    "conv": ("conv", "group_norm"),
    "finish": ("conv", "group_norm"),
}
"""Packages of lib_rocm_sd.ops; group_norm where nothing is said."""
Reached = dict[KernelSpec, frozenset[int]]


def parts(case: Case) -> tuple[str, tuple[object, ...]]:
    """What decides about a case: the name of its group, and all that its key is made of."""
    try:
        decoder = version("tinygrad")
    except PackageNotFoundError:
        decoder = ""
    specs = sorted(specs_of(case), key=repr)
    sources = [(spec, executed.kernel(spec.source)) for spec in specs]
    others = set(OPS) - {*LAUNCHED_BY.get(case.op, ("group_norm",))}
    without = tuple(sorted(f"lib_rocm_sd.ops.{name}" for name in others))
    python = executed.python("tests.amdgpu.judge", without=without)
    made = (case, case.arch, python, decoder, *sources)
    return f"{case.gfx} {case.op}", made


# -- what a case reached -------------------------------------------------------------------------


def keep(outcome: Outcome) -> None:
    """So that `reached_by` needs not execute the case."""
    found = [
        [spec.source, spec.entry, spec.defines, sorted(here)]
        for spec, here in outcome.reached.items()
    ]
    text = json.dumps(found)
    key = compiled.hash_of("reached", parts(outcome.case), executed.version_of("clang"))
    compiled.entry(key, lambda made: _write(made / "reached.json", text))


def _write(path, text: str) -> None:  # type: ignore[no-untyped-def]
    path.write_text(text, encoding="utf-8")


def reached_by(case: Case) -> Reached:
    """Of each kernel the addresses that this case executes. Raises AssertionError for a fault."""
    key = compiled.hash_of("reached", parts(case), executed.version_of("clang"))

    def make(made) -> None:  # type: ignore[no-untyped-def]
        outcome = execute(case)
        assert not outcome.faults, f"{case}: {'; '.join(outcome.faults)}"
        print(f"    {outcome.seconds:6.1f} s {case}", flush=True)
        found = [
            [spec.source, spec.entry, spec.defines, sorted(here)]
            for spec, here in outcome.reached.items()
        ]
        _write(made / "reached.json", json.dumps(found))

    text = (compiled.entry(key, make) / "reached.json").read_text(encoding="utf-8")
    return {
        KernelSpec(source, entry, tuple((name, value) for name, value in defines)): frozenset(here)
        for source, entry, defines, here in json.loads(text)
    }


# -- what all of them reach ----------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """Of one kernel on one GPU. `missed`: the instructions that no case reaches."""

    gfx: str
    spec: KernelSpec
    instructions: int
    missed: tuple[Instruction, ...]

    @property
    def share(self) -> float:
        return 1 - len(self.missed) / self.instructions

    def lines(self) -> list[str]:
        """Of each run of missed instructions: address, number, and the lines of source they are
        of.
        """
        arch = by_gfx(self.gfx)
        assert arch is not None
        every = loader.load(built(self.spec, arch), self.spec.entry).instructions
        places = lines_of(self.spec, arch)
        known = len(places) == len(every)
        place_of = {each.address: where for each, where in zip(every, places, strict=False)}
        found = []
        for run in self.runs():
            where = Counter(place_of[each.address] for each in run) if known else Counter()
            most = ", ".join(f"{file}:{line}" for (file, line), _ in where.most_common(4))
            at = run[0].address - loader.LOADED_AT
            found.append(f"{at:#7x} {len(run):4d}  {run[0].name} .. {run[-1].name}  {most}")
        return found

    def runs(self) -> list[list[Instruction]]:
        """The instructions missed, one behind the other."""
        found: list[list[Instruction]] = []
        for each in self.missed:
            last = found[-1][-1] if found else None
            if last is not None and last.address + last.size == each.address:
                found[-1].append(each)
            else:
                found.append([each])
        return found


def coverage(gfx: str, chosen: Iterable[Case]) -> list[Coverage]:
    """Of all kernels that these cases launch, the worst first."""
    arch = by_gfx(gfx)
    assert arch is not None
    reached: Reached = {}
    for case in chosen:
        for spec, here in reached_by(case).items():
            reached[spec] = reached.get(spec, frozenset()) | here
    found = []
    for spec, here in reached.items():
        every = loader.load(built(spec, arch), spec.entry).instructions
        missed = tuple(each for each in every if each.address not in here)
        found.append(Coverage(gfx, spec, len(every), missed))
    return sorted(found, key=lambda each: each.share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gfx", nargs="*", default=["gfx1100"])
    parser.add_argument("--op", choices=sorted(cases.ALL), action="append")
    arguments = parser.parse_args()
    for gfx in arguments.gfx:
        chosen = [case for op in arguments.op or cases.ALL for case in cases.ALL[op](gfx)]
        for each in coverage(gfx, chosen):
            print(f"{each.share:7.1%} of {each.instructions:5d}  {gfx} {each.spec}")
            for line in each.lines():
                print(f"         {line}")


if __name__ == "__main__":
    main()
