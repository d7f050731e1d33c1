"""`python -m lib_rocm_sd inspect`: what the compiler made of each config, from the code objects'
metadata.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.runtime import build, codeobject
from lib_rocm_sd.runtime.cli_support import (
    UsageError,
    add_choices,
    arches_of,
    as_table,
    kernel_modules_of,
)


@dataclass(frozen=True)
class Row:
    """One config on one arch: a row of the table. `failure` is empty when it compiled."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--arch, --op, --json."""
    add_choices(parser)


def main(args: argparse.Namespace) -> int:
    """0 when every kernel compiled, 1 when one did not, 2 when the command line names something
    unknown.
    """
    try:
        arches, modules = arches_of(args.arch), kernel_modules_of(args.op)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    rows: list[Row] = []
    for arch in arches:
        for module in modules:
            rows += [row for spec in module.searched_specs(arch) for row in inspected(spec, arch)]
            print(f"{arch.gfx}: done", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(_shown(rows))
    return 1 if any(row.failure for row in rows) else 0


def inspected(spec: KernelSpec, arch: Arch) -> list[Row]:
    """The rows of one spec: one, since a spec is one kernel, or one with the failure."""
    defines = dict(spec.defines)
    if not arch.is_amd:
        return [
            Row(
                arch.gfx, spec.entry, defines, failure="a CUDA binary's resources are not read here"
            )
        ]
    try:
        made = build.build(spec, arch)
    except CompileError as error:
        return [Row(arch.gfx, spec.entry, defines, failure=str(error))]
    return [
        _row(arch, defines, made.compiler, kernel)
        for kernel in codeobject.resources(made.code)
        if kernel.name == spec.entry
    ]


def _row(
    arch: Arch, defines: dict[str, int], compiler: str, kernel: codeobject.KernelResources
) -> Row:
    return Row(
        arch=arch.gfx,
        kernel=kernel.name,
        defines=defines,
        compiler=compiler,
        block=kernel.max_block,
        vgprs=kernel.vgprs,
        agprs=kernel.agprs,
        sgprs=kernel.sgprs,
        vgpr_spills=kernel.vgpr_spills,
        sgpr_spills=kernel.sgpr_spills,
        scratch_bytes=kernel.scratch_bytes,
        lds_bytes=kernel.lds_bytes,
        waves_per_simd=codeobject.waves_per_simd(arch, kernel, kernel.max_block),
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


def _shown(rows: Sequence[Row]) -> str:
    """The table; of the definitions only those that differ between rows."""
    made = [row for row in rows if not row.failure]
    names = list(dict.fromkeys(name for row in made for name in row.defines))
    differ = [name for name in names if len({row.defines.get(name) for row in made}) > 1]
    heads: list[object] = ["arch", "kernel", *differ, *(head for head, _ in _COLUMNS)]
    cells: list[list[object]] = [
        [
            row.arch,
            row.kernel,
            *(row.defines.get(name, "") for name in differ),
            *(getattr(row, attribute) for _, attribute in _COLUMNS),
        ]
        for row in made
    ]
    failures = [
        f"{row.arch} {row.kernel} {row.defines}: FAILED {row.failure}"
        for row in rows
        if row.failure
    ]
    return "\n".join([as_table([heads, *cells]), *failures])
