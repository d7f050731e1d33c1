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
from lib_rocm_sd.commands.support import add_choices, arches_of, as_table, kernel_modules_of
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab.cycles import ASSUMPTIONS, FAMILIES, Cycles
from lib_rocm_sd.lab.listing import NoListingError, listing
from lib_rocm_sd.lab.loops import KernelWork, analysed
from lib_rocm_sd.ops.base import KernelSpec, reasons
from lib_rocm_sd.runtime import build, codeobject

Fields = dict[str, Any]


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
_RESOURCES = (
    *("vgprs", "agprs", "sgprs", "vgpr_spills", "sgpr_spills"),
    *("scratch_bytes", "lds_bytes"),
)
_MOST_LDS_BYTES = 65536
_LEAST_WAVES = 2


@dataclass(frozen=True)
class InspectedKernel:
    """One config on one arch: a row of the table. `failure` is empty when it compiled.

    `straight`: what is in no loop. `loops`: outer before inner; `parent` is a place in the list.
    What is zero, empty or false is left out of both. `listing`: what read the machine code;
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
        help="instead: a cost model's estimate of a whole 1024 x 1024 decode, of a UNet's step or "
        "of upscaling a picture, with its assumptions",
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
    """0 when every kernel compiled and was understood, 1 when one was not. Where nothing here reads
    machine code, that is said and no failure.
    """
    arches, modules = arches_of(args.arch), kernel_modules_of(args.op)
    if args.estimate:
        return estimate.main(arches, args.json, args.estimate)
    if args.dynamic:
        return _from_checkout("--dynamic", "tools.machine_code", "tinygrad", arches, args)
    if args.beside_triton:
        if args.op not in ("all", "attention"):
            print("--beside-triton knows only --op attention", file=sys.stderr)
            return 2
        needs = "what requirements/triton.txt and tinygrad"
        return _from_checkout("--beside-triton", "tools.beside_triton", needs, arches, args)
    rows: list[InspectedKernel] = []
    for arch in arches:
        for module in modules:
            rows += [inspected(spec, arch) for spec in module.searched_specs(arch)]
            print(f"{arch.gfx}: done", file=sys.stderr, flush=True)
    legend = "\n".join(_legend(arches))
    if args.json:
        print(legend, file=sys.stderr)
        print("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]")
    else:
        print("\n\n".join(filter(None, [*_tables(rows), legend])))
    return int(any(row.failure for row in rows))


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


def inspected(spec: KernelSpec, arch: Arch) -> InspectedKernel:
    """The row of one spec, which is one kernel, or its failure."""
    row = InspectedKernel(arch.gfx, spec.entry, dict(spec.defines))
    if not arch.is_amd:
        return replace(row, failure="a CUDA binary's resources are not read here")
    try:
        code = build.build(spec, arch)
    except CompileError as error:
        return replace(row, failure=str(error))
    (kernel,) = (each for each in codeobject.resources(code.code) if each.name == spec.entry)
    row = replace(
        row,
        compiler=code.compiler,
        block=kernel.max_block,
        **{name: getattr(kernel, name) for name in _RESOURCES},
        waves_per_simd=codeobject.waves_per_simd(arch, kernel, kernel.max_block),
        waves_by_registers=codeobject.waves_by_registers(arch, kernel, kernel.max_block),
        waves_by_lds=codeobject.waves_by_lds(arch, kernel, kernel.max_block),
    )
    row = replace(row, shortcomings=_shortcomings(row))
    try:
        function, tool = listing(spec, arch, code)
    except NoListingError as error:
        return replace(row, listing_failure=str(error))
    try:
        work = analysed(function, arch)
    except ValueError as error:
        why = f"the machine code was not understood: {error}"
        return replace(row, listing=tool, listing_failure=why, failure=why)
    return replace(row, listing=tool, straight=work.straight.as_dict(), loops=_loops(work))


def _shortcomings(row: InspectedKernel) -> list[str]:
    """What no shipped config should have."""
    return reasons(
        (row.vgpr_spills, f"spills {row.vgpr_spills} VGPRs"),
        (row.sgpr_spills, f"spills {row.sgpr_spills} SGPRs"),
        (row.scratch_bytes, f"uses {row.scratch_bytes} bytes of scratch memory"),
        (row.lds_bytes > _MOST_LDS_BYTES, f"uses {row.lds_bytes} bytes of LDS"),
        (row.waves_per_simd < _LEAST_WAVES, f"waves per SIMD: {row.waves_per_simd}"),
    )


def _loops(work: KernelWork) -> list[Fields]:
    loops = []
    for index, loop in enumerate(work.loops):
        row: Fields = {"depth": loop.depth}
        row |= {} if loop.parent is None else {"parent": loop.parent}
        row |= {"hot": True} if index == work.hot else {}
        row |= loop.mix.as_dict()
        conditional = loop.conditional.as_dict()
        row |= {"conditional": conditional} if conditional else {}
        usual = loop.usual.bounds()
        bound = {"bound_usual": round(usual["bound"], 3)} if usual else {}
        loops.append({**row, "estimate": _cycles(loop.cycles) | bound})
    return loops


def _cycles(cycles: Cycles) -> Fields:
    each = {name: value for name, value in asdict(cycles).items() if name != "co_executes"}
    shown = {f"{name}_cycles": round(value) for name, value in each.items() if value}
    bounds = {name: round(value, 3) for name, value in cycles.bounds().items()}
    return {**shown, **bounds, **({"limited_by": cycles.limited_by} if bounds else {})}


# -- as text --------------------------------------------------------------------------------------


def _tables(rows: Sequence[InspectedKernel]) -> list[str]:
    """The table, with what failed and falls short below it; that of loops, with why some rows have
    none.
    """
    compiled = [row for row in rows if not row.failure]
    names = _differing(compiled)
    table: list[list[object]] = [["arch", "kernel", *names, *(head for head, _ in _COLUMNS)]]
    heads = [head for head, _ in (*LOOP_COLUMNS, *ESTIMATE_COLUMNS)]
    loops: list[list[object]] = [["arch", "kernel", *names, "loop", "", *heads]]
    for row in compiled:
        named = [row.arch, row.kernel, *(row.defines.get(name, "") for name in names)]
        table.append([*named, *(getattr(row, field) for _, field in _COLUMNS)])
        for index, loop in enumerate(row.loops):
            counts = [loop.get(field, 0) for _, field in LOOP_COLUMNS]
            estimates = [loop["estimate"].get(field, "") for _, field in ESTIMATE_COLUMNS]
            place = f"{'  ' * (loop['depth'] - 1)}{index}"
            mark = "hot" if loop.get("hot") else ""
            loops.append([*named, place, mark, *counts, *estimates])
    failures = [f"FAILED {row.failure}" if row.failure else "" for row in rows]
    shortcomings = ["" if row.failure else "; ".join(row.shortcomings) for row in rows]
    told = [
        f"{row.arch} {row.kernel} {row.defines}: {text}"
        for texts in (failures, shortcomings)
        for row, text in zip(rows, texts, strict=True)
        if text
    ]
    why = dict.fromkeys(f"{r.arch}: {r.listing_failure}" for r in compiled if r.listing_failure)
    absent = [f"no instructions counted for {reason}" for reason in why]
    read = [as_table(loops)] if loops[1:] else []
    return ["\n".join([as_table(table), *told]), "\n".join([*read, *absent])]


def _differing(rows: Sequence[InspectedKernel]) -> list[str]:
    """The definitions that differ between rows."""
    names = list(dict.fromkeys(name for row in rows for name in row.defines))
    return [name for name in names if len({row.defines.get(name) for row in rows}) > 1]


def _legend(arches: Sequence[Arch]) -> list[str]:
    """What the numbers mean, and where the rates come from."""
    families = dict.fromkeys(arch.family for arch in arches if arch.family in FAMILIES)
    lines = [
        "Instructions of one wave per pass through a loop, loops inside it apart; bytes of all its"
        " lanes. Both halves of a dual-issue pair count.",
        "Estimates, not measurements:",
        *(f"  {line}" for line in ASSUMPTIONS),
    ]
    for family in families:
        rates = FAMILIES[family]
        matrix = ", ".join(f"{pattern} {cycles}" for pattern, cycles in rates.matrix_cycles)
        lines.append(
            f"  {family}: cycles per SIMD {matrix}, vector {rates.vector_cycles}, transcendental"
            f" {rates.transcendental_cycles}; bytes per clock and CU: LDS"
            f" {rates.lds_bytes_per_cycle}, cache {rates.cache_bytes_per_cycle}; sources"
            f" {rates.sources}, see lib_rocm_sd/lab/cycles.py"
        )
    return lines
