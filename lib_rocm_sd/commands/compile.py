"""`python -m lib_rocm_sd compile`: build every shipped kernel for the chosen rows, with no GPU
needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass

from lib_rocm_sd import cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.commands.support import (
    UsageError,
    add_choices,
    arches_of,
    as_table,
    ops_of,
)
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, codeobject
from lib_rocm_sd.shipped import NAMES, shipped

Compilation = tuple[KernelSpec, Arch, str]
"""What to compile, for what, and the op that it is listed under."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel on one arch; `op` is the first that was asked for and needs it.

    `failure` is empty when it compiled; `failures` are compilers that were tried first; `note` says
    where the compiler was not verified for this arch.
    """

    arch: str
    kernel: str
    defines: dict[str, int]
    op: str = ""
    compiler: str = ""
    seconds: float = 0.0
    cached: bool = False
    code_bytes: int = 0
    vgpr_spills: int | None = None
    failures: tuple[str, ...] = ()
    failure: str = ""
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--arch, --op, --json, --jobs."""
    add_choices(parser, NAMES)
    parser.add_argument(
        "--jobs", type=int, default=1, help="compilations at the same time (default: 1)"
    )


def main(args: argparse.Namespace) -> int:
    """0 when every kernel compiled, 1 when one did not, 2 when the command line names something
    unknown.
    """
    try:
        arches, names = arches_of(args.arch), ops_of(args.op, NAMES)
    except UsageError as error:
        print(f"compile: {error}", file=sys.stderr)
        return 2
    jobs = [(spec, arch, op) for arch in arches for spec, op in shipped(arch, names).items()]
    progress = sys.stderr if args.json else sys.stdout
    rows: list[CompiledKernel] = []
    for row in _rows(jobs, max(args.jobs, 1)):
        rows.append(row)
        print(f"[{len(rows)}/{len(jobs)}] {_progress(row)}", file=progress, flush=True)
    order = {(arch.gfx, str(spec)): number for number, (spec, arch, _) in enumerate(jobs)}
    rows.sort(key=lambda row: order[row.arch, _label(row)])
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(as_table(_summary(rows)))
        for reason in cache.reasons():
            print(f"cache: {reason}")
        for told in dict.fromkeys(f"{row.compiler}: {row.note}" for row in rows if row.note):
            print(told)
    return 1 if any(row.failure for row in rows) else 0


def compile_row(spec: KernelSpec, arch: Arch, op: str = "") -> CompiledKernel:
    """Build one spec; a failure is part of the row, not raised."""
    try:
        made = build.build(spec, arch)
    except CompileError as error:
        failure = error.full() if error.log else str(error)
        return CompiledKernel(arch.gfx, spec.entry, dict(spec.defines), op, failure=failure)
    spills = None
    if arch.is_amd:
        spills = sum(
            kernel.vgpr_spills
            for kernel in codeobject.resources(made.code)
            if kernel.name == spec.entry
        )
    return CompiledKernel(
        arch.gfx,
        spec.entry,
        dict(spec.defines),
        op,
        made.compiler,
        round(made.seconds, 3),
        made.cached,
        len(made.code),
        spills,
        made.failures,
        note=made.note,
    )


def _rows(jobs: Sequence[Compilation], workers: int) -> Iterator[CompiledKernel]:
    if workers == 1:
        yield from (compile_row(*job) for job in jobs)
        return
    with ThreadPoolExecutor(workers) as pool:
        for done in as_completed([pool.submit(compile_row, *job) for job in jobs]):
            yield done.result()


def _label(row: CompiledKernel) -> str:
    return str(KernelSpec("", row.kernel, tuple(row.defines.items())))


def _progress(row: CompiledKernel) -> str:
    what = f"{row.arch} {_label(row)}"
    if row.failure:
        return f"{what}: FAILED\n{row.failure}"
    how = "cached" if row.cached else f"{row.seconds:.2f} s"
    return f"{what}: {row.compiler}, {how}"


def _summary(rows: Sequence[CompiledKernel]) -> list[list[object]]:
    """One line per arch, op, kernel and compiler."""
    groups: dict[tuple[str, ...], list[CompiledKernel]] = {}
    for row in rows:
        key = (row.arch, row.op, row.kernel, row.compiler or "FAILED")
        groups.setdefault(key, []).append(row)
    heads: list[object] = [
        "arch",
        "op",
        "kernel",
        "compiler",
        "variants",
        "seconds",
        "cached",
        "code KiB",
        "with spills",
    ]
    return [heads] + [
        [
            *key,
            len(group),
            round(sum(row.seconds for row in group), 2),
            sum(row.cached for row in group),
            sum(row.code_bytes for row in group) // 1024,
            sum(bool(row.vgpr_spills) for row in group),
        ]
        for key, group in groups.items()
    ]
