"""`python -m lib_rocm_sd compile`: build every shipped kernel for the chosen rows, with no GPU
needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from lib_rocm_sd import cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.commands.support import add_choices, arches_of, as_table, ops_of
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, codeobject
from lib_rocm_sd.shipped import NAMES, shipped


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
    """0 when every kernel compiled, 1 when one did not."""
    arches, names = arches_of(args.arch), ops_of(args.op, NAMES)
    jobs = [(spec, arch, op) for arch in arches for spec, op in shipped(arch, names).items()]
    progress = sys.stderr if args.json else sys.stdout
    rows: list[CompiledKernel] = []
    with ThreadPoolExecutor(max(args.jobs, 1)) as pool:
        for row in pool.map(lambda job: compile_row(*job), jobs):
            rows.append(row)
            print(f"[{len(rows)}/{len(jobs)}] {_progress(row)}", file=progress, flush=True)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(as_table(_summary(rows)))
        for reason in cache.reasons():
            print(f"cache: {reason}")
        for note in dict.fromkeys(f"{row.compiler}: {row.note}" for row in rows if row.note):
            print(note)
    return int(any(row.failure for row in rows))


def compile_row(spec: KernelSpec, arch: Arch, op: str = "") -> CompiledKernel:
    """Build one spec; a failure is part of the row, not raised."""
    row = CompiledKernel(arch.gfx, spec.entry, dict(spec.defines), op)
    try:
        code = build.build(spec, arch)
    except CompileError as error:
        return replace(row, failure=error.full() if error.log else str(error))
    kernels = codeobject.resources(code.code) if arch.is_amd else []
    spills = [kernel.vgpr_spills for kernel in kernels if kernel.name == spec.entry]
    return replace(
        row,
        compiler=code.compiler,
        seconds=round(code.seconds, 3),
        cached=code.cached,
        code_bytes=len(code.code),
        vgpr_spills=sum(spills) if arch.is_amd else None,
        failures=code.failures,
        note=code.note,
    )


def _progress(row: CompiledKernel) -> str:
    kernel = f"{row.arch} {KernelSpec('', row.kernel, tuple(row.defines.items()))}"
    if row.failure:
        return f"{kernel}: FAILED\n{row.failure}"
    how = "cached" if row.cached else f"{row.seconds:.2f} s"
    return f"{kernel}: {row.compiler}, {how}"


def _summary(rows: Sequence[CompiledKernel]) -> list[list[object]]:
    """One line per arch, op, kernel and compiler, after the heads."""
    groups: dict[tuple[str, ...], list[CompiledKernel]] = {}
    for row in rows:
        key = (row.arch, row.op, row.kernel, row.compiler or "FAILED")
        groups.setdefault(key, []).append(row)
    table: list[list[object]] = [["arch", "op", "kernel", "compiler", "variants", "seconds"]]
    table[0] += ["cached", "code KiB", "with spills"]
    for names, group in groups.items():
        seconds = round(sum(row.seconds for row in group), 2)
        cached = sum(row.cached for row in group)
        kibibytes = sum(row.code_bytes for row in group) // 1024
        spilling = sum(bool(row.vgpr_spills) for row in group)
        table.append([*names, len(group), seconds, cached, kibibytes, spilling])
    return table
