"""`python -m lib_rocm_sd inspect`: what the compiler made of each config: registers, spills and LDS
from the code objects' metadata, the instructions of each loop from their machine code.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.commands import estimate
from lib_rocm_sd.commands.support import (
    UsageError,
    add_choices,
    arches_of,
    as_table,
    kernel_modules_of,
)
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab.cycles import ASSUMPTIONS, FAMILIES, Cycles
from lib_rocm_sd.lab.listing import NoListingError, listing
from lib_rocm_sd.lab.loops import KernelWork, analysed
from lib_rocm_sd.ops.base import KernelSpec, reasons
from lib_rocm_sd.runtime import build, codeobject

Fields = dict[str, Any]


def loop_rows(work: KernelWork) -> tuple[Fields, list[Fields]]:
    """What is in no loop, and the loops, outer before inner. What is zero, empty or false is left
    out; `parent` is a place in the list.
    """
    loops = []
    for index, loop in enumerate(work.loops):
        row: Fields = {"depth": loop.depth}
        row |= {} if loop.parent is None else {"parent": loop.parent}
        row |= {"hot": True} if index == work.hot else {}
        row |= loop.mix.as_dict()
        conditional = loop.conditional.as_dict()
        row |= {"conditional": conditional} if conditional else {}
        loops.append({**row, "estimate": _cycles_shown(loop.cycles) | _usual(loop.usual)})
    return work.straight.as_dict(), loops


def _cycles_shown(cycles: Cycles) -> Fields:
    each = {name: value for name, value in asdict(cycles).items() if name != "co_executes"}
    shown = {f"{name}_cycles": round(value) for name, value in each.items() if value}
    bounds = {name: round(value, 3) for name, value in cycles.bounds().items()}
    return {**shown, **bounds, **({"limited_by": cycles.limited_by} if bounds else {})}


def _usual(cycles: Cycles) -> Fields:
    bounds = cycles.bounds()
    return {"bound_usual": round(bounds["bound"], 3)} if bounds else {}


LOOP_COLUMNS: tuple[tuple[str, str], ...] = (
    ("matrix", "matrix"),
    ("transc.", "transcendental"),
    ("vector", "vector"),
    ("dual", "dual_pairs"),
    ("scalar", "scalar"),
    ("s.memory", "scalar_memory"),
    ("LDS", "lds"),
    ("LDS bytes", "lds_bytes"),
    ("global", "global"),
    ("global bytes", "global_bytes"),
    ("scratch", "scratch"),
    ("branch", "branch"),
    ("control", "control"),
)
ESTIMATE_COLUMNS: tuple[tuple[str, str], ...] = (
    ("est. bound", "bound"),
    ("est. serial", "bound_serial"),
    ("est. overlapped", "bound_overlapped"),
    ("est. usual", "bound_usual"),
    ("limited by", "limited_by"),
)


def loop_cells(loop: Fields, index: int) -> list[object]:
    """One loop as cells under `loop_heads`."""
    counts = [loop.get(name, 0) for _, name in LOOP_COLUMNS]
    estimates = [loop["estimate"].get(name, "") for _, name in ESTIMATE_COLUMNS]
    mark = "hot" if loop.get("hot") else ""
    return [f"{'  ' * (loop['depth'] - 1)}{index}", mark, *counts, *estimates]


def loop_heads() -> list[object]:
    """The heads of the table of loops."""
    columns = (*LOOP_COLUMNS, *ESTIMATE_COLUMNS)
    return ["loop", "", *(head for head, _ in columns)]


def notes(arches: Sequence[Arch]) -> list[str]:
    """What the numbers mean, and where the rates come from."""
    families = dict.fromkeys(arch.family for arch in arches if arch.family in FAMILIES)
    return [
        "Instructions of one wave per pass through a loop, loops inside it apart; bytes of all its"
        " lanes. Both halves of a dual-issue pair count.",
        "Estimates, not measurements:",
        *(f"  {line}" for line in ASSUMPTIONS),
        *(
            f"  {family}: {_rates(family)}; sources {FAMILIES[family].sources}, see"
            " lib_rocm_sd/lab/cycles.py"
            for family in families
        ),
    ]


def _rates(family: str) -> str:
    rates = FAMILIES[family]
    matrix = ", ".join(f"{pattern} {cycles}" for pattern, cycles in rates.matrix_cycles)
    return (
        f"cycles per SIMD {matrix}, vector {rates.vector_cycles}, transcendental"
        f" {rates.transcendental_cycles}; bytes per clock and CU: LDS {rates.lds_bytes_per_cycle},"
        f" cache {rates.cache_bytes_per_cycle}"
    )


@dataclass(frozen=True)
class InspectedKernel:
    """One config on one arch: a row of the table. `failure` is empty when it compiled.

    `straight` and `loops` are those of loop_rows; `listing`: what read the machine code;
    `listing_failure`: why nothing could, or why it was not understood.
    """

    arch: str
    kernel: str
    defines: dict[str, int]
    compiler: str = ""
    block: int = 0
    vgprs: int = 0
    agprs: int = 0
    sgprs: int = 0
    vgpr_spills: int = 0
    sgpr_spills: int = 0
    scratch_bytes: int = 0
    lds_bytes: int = 0
    waves_per_simd: int = 0
    failure: str = ""
    waves_by_registers: int = 0
    waves_by_lds: int = 0
    listing: str = ""
    listing_failure: str = ""
    straight: dict[str, Any] = field(default_factory=dict)
    loops: list[dict[str, Any]] = field(default_factory=list)
    shortcomings: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--arch, --op, --json, --estimate, --dynamic, --beside-triton."""
    add_choices(parser)
    parser.add_argument(
        "--estimate",
        choices=estimate.SUBJECTS,
        help="instead: a cost model's estimate of a whole 1024 x 1024 decode, or of a UNet's step, "
        "with its assumptions",
    )
    parser.add_argument(
        "--dynamic",
        action="store_true",
        help="instead: execute a typical case of each kernel here and count; needs tinygrad",
    )
    parser.add_argument(
        "--beside-triton",
        action="store_true",
        help="instead: what attention executes for a query and key, beside Triton's; needs Triton",
    )


def main(args: argparse.Namespace) -> int:
    """0 when every kernel compiled and was understood, 1 when one was not, 2 when the command line
    names something unknown. Where nothing here reads machine code, that is said and no failure.
    """
    try:
        arches, modules = arches_of(args.arch), kernel_modules_of(args.op)
    except UsageError as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2
    if args.estimate:
        return _estimate(arches, args)
    if args.dynamic:
        return _from_checkout("--dynamic", "tools.machine_code", "tinygrad", arches, args)
    if args.beside_triton:
        return _beside_triton(arches, args)
    rows: list[InspectedKernel] = []
    for arch in arches:
        for module in modules:
            rows += [row for spec in module.searched_specs(arch) for row in inspected(spec, arch)]
            print(f"{arch.gfx}: done", file=sys.stderr, flush=True)
    said = "\n".join(notes(arches))
    if args.json:
        print(said, file=sys.stderr)
        print("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]")
    else:
        print("\n\n".join(filter(None, [_shown(rows), _loops_shown(rows), said])))
    return 1 if any(row.failure for row in rows) else 0


def _estimate(arches: Sequence[Arch], args: argparse.Namespace) -> int:
    try:
        return estimate.main(arches, args.json, args.estimate)
    except ImportError as error:
        print(f"--estimate {args.estimate} needs torch: {error}", file=sys.stderr)
        return 2


def _beside_triton(arches: Sequence[Arch], args: argparse.Namespace) -> int:
    if args.op not in ("all", "attention"):
        print("--beside-triton knows only --op attention", file=sys.stderr)
        return 2
    needs = "what requirements/triton.txt and tinygrad"
    return _from_checkout("--beside-triton", "tools.beside_triton", needs, arches, args)


def _from_checkout(
    option: str, name: str, needs: str, arches: Sequence[Arch], args: argparse.Namespace
) -> int:
    """Run a tool that stands on the repository's tests."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        why = f"needs the repository's tests and {needs} installed"
        print(f"{option} {why}: {error}", file=sys.stderr)
        return 2
    if name == "tools.machine_code":
        return int(module.main(arches, args.op, args.json))
    return int(module.main(arches, args.json))


def inspected(spec: KernelSpec, arch: Arch) -> list[InspectedKernel]:
    """The rows of one spec: one, since a spec is one kernel, or one with the failure."""
    defines = dict(spec.defines)
    if not arch.is_amd:
        return [
            InspectedKernel(
                arch.gfx, spec.entry, defines, failure="a CUDA binary's resources are not read here"
            )
        ]
    try:
        made = build.build(spec, arch)
    except CompileError as error:
        return [InspectedKernel(arch.gfx, spec.entry, defines, failure=str(error))]
    rows = [
        _row(arch, defines, made.compiler, kernel)
        for kernel in codeobject.resources(made.code)
        if kernel.name == spec.entry
    ]
    return [_with_loops(row, spec, arch, made) for row in rows]


def _with_loops(
    row: InspectedKernel, spec: KernelSpec, arch: Arch, made: build.CodeObject
) -> InspectedKernel:
    try:
        text = listing(spec, arch, made)
    except NoListingError as error:
        return replace(row, listing_failure=str(error))
    try:
        straight, loops = loop_rows(analysed(text.function(spec.entry), arch))
    except ValueError as error:
        why = f"the machine code was not understood: {error}"
        return replace(row, listing=text.made_by, listing_failure=why, failure=why)
    return replace(row, listing=text.made_by, straight=straight, loops=loops)


def _row(
    arch: Arch, defines: dict[str, int], compiler: str, kernel: codeobject.KernelResources
) -> InspectedKernel:
    return InspectedKernel(
        arch=arch.gfx,
        kernel=kernel.name,
        defines=defines,
        compiler=compiler,
        block=kernel.max_block,
        **{name: getattr(kernel, name) for name in _RESOURCES},
        waves_per_simd=codeobject.waves_per_simd(arch, kernel, kernel.max_block),
        waves_by_registers=codeobject.waves_by_registers(arch, kernel, kernel.max_block),
        waves_by_lds=codeobject.waves_by_lds(arch, kernel, kernel.max_block),
        shortcomings=_shortcomings(arch, kernel),
    )


_RESOURCES = (
    *("vgprs", "agprs", "sgprs", "vgpr_spills", "sgpr_spills"),
    *("scratch_bytes", "lds_bytes"),
)
_MOST_LDS_BYTES = 65536
_LEAST_WAVES = 2


def _shortcomings(arch: Arch, kernel: codeobject.KernelResources) -> list[str]:
    """What no shipped config should have."""
    waves = codeobject.waves_per_simd(arch, kernel, kernel.max_block)
    return reasons(
        (kernel.vgpr_spills, f"spills {kernel.vgpr_spills} VGPRs"),
        (kernel.sgpr_spills, f"spills {kernel.sgpr_spills} SGPRs"),
        (kernel.scratch_bytes, f"uses {kernel.scratch_bytes} bytes of scratch memory"),
        (kernel.lds_bytes > _MOST_LDS_BYTES, f"uses {kernel.lds_bytes} bytes of LDS"),
        (waves < _LEAST_WAVES, f"waves per SIMD: {waves}"),
    )


_COLUMNS = (
    ("compiler", "compiler"),
    ("block", "block"),
    ("VGPRs", "vgprs"),
    ("AGPRs", "agprs"),
    ("SGPRs", "sgprs"),
    ("VGPR spills", "vgpr_spills"),
    ("SGPR spills", "sgpr_spills"),
    ("scratch bytes", "scratch_bytes"),
    ("LDS bytes", "lds_bytes"),
    ("waves/SIMD", "waves_per_simd"),
)


def _shown(rows: Sequence[InspectedKernel]) -> str:
    """The table; of the definitions only those that differ between rows."""
    made = [row for row in rows if not row.failure]
    names = _differing(made)
    heads: list[object] = ["arch", "kernel", *names, *(head for head, _ in _COLUMNS)]
    cells = [
        [*_named(row, names), *(getattr(row, attribute) for _, attribute in _COLUMNS)]
        for row in made
    ]
    failures = [
        f"{row.arch} {row.kernel} {row.defines}: FAILED {row.failure}"
        for row in rows
        if row.failure
    ]
    short = [
        f"{row.arch} {row.kernel} {row.defines}: {'; '.join(row.shortcomings)}"
        for row in made
        if row.shortcomings
    ]
    return "\n".join([as_table([heads, *cells]), *failures, *short])


def _loops_shown(rows: Sequence[InspectedKernel]) -> str:
    """The table of loops, and why there is none for some rows."""
    made = [row for row in rows if not row.failure]
    names = _differing(made)
    cells = [
        [*_named(row, names), *loop_cells(loop, index)]
        for row in made
        for index, loop in enumerate(row.loops)
    ]
    why = dict.fromkeys(f"{row.arch}: {row.listing_failure}" for row in made if row.listing_failure)
    said = [f"no instructions counted for {reason}" for reason in why]
    heads: list[object] = ["arch", "kernel", *names, *loop_heads()]
    return "\n".join([*([as_table([heads, *cells])] if cells else []), *said])


def _differing(rows: Sequence[InspectedKernel]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row.defines))
    return [name for name in names if len({row.defines.get(name) for row in rows}) > 1]


def _named(row: InspectedKernel, names: Sequence[str]) -> list[object]:
    return [row.arch, row.kernel, *(row.defines.get(name, "") for name in names)]
