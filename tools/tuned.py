"""kernels/tuned/<gfx>/attention.json by the cost model: which config of attention runs first.

    python -m tools.tuned                          what would be chosen
    python -m tools.tuned --write [--arch gfx1100]

Of each config the machine code is made for the row itself; what a pass of the loop over the keys
executes is counted for one GPU of a family, by executing it, and taken for the others of the
family. For families without an executor it is counted along the usual way through the loop. What
spills registers or does not fit is left out. Sections that owners measured are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from lib_rocm_sd import __version__
from lib_rocm_sd.arch import Arch, amd_table, table
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands import tune
from lib_rocm_sd.commands.support import arches_of, as_table
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab.cycles import Mix
from lib_rocm_sd.lab.listing import NoListingError
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.kernel import AttentionConfig
from lib_rocm_sd.runtime import codeobject, source
from tests.verify.amdgpu.errors import ExecutionError
from tools import key_loop, pairs

EXECUTED = ("gfx1100", "gfx1151", "gfx1201", "gfx90a", "gfx942")
WAVES_TO_HIDE = 2
"""The model lets units work side by side, which takes as many waves on a SIMD, where they fit."""
NEAR = 1.01
"""Estimates whose ratio is smaller count as equal: then more waves on a SIMD are better."""
NOTE = "Chosen by a cost model from AMD machine code. Nothing here was measured on a GPU."


@dataclass(frozen=True)
class Candidate:
    """A config on a row. `per_pair`: by the cost model."""

    config: AttentionConfig
    needs: codeobject.KernelResources
    waves_per_simd: int
    per_pair: pairs.PerPair

    @property
    def spills(self) -> int:
        return self.needs.vgpr_spills + self.needs.sgpr_spills

    @property
    def fits(self) -> bool:
        return not self.spills and not self.needs.scratch_bytes and self.waves_per_simd > 0


def leader_of(arch: Arch) -> Arch | None:
    """Whose machine code is executed for a row: its own, its family's, its matrix unit's."""
    rows = [table()[gfx] for gfx in EXECUTED]
    for alike in (lambda row: row == arch, lambda row: row.family == arch.family):
        found = [row for row in rows if alike(row)]
        if found:
            return found[0]
    return next((row for row in reversed(rows) if row.matrix == arch.matrix), None)


def counted_as(arch: Arch) -> str:
    """How a row's work is counted, in words."""
    leader = leader_of(arch)
    if leader is None:
        return "the usual way through the loop in its machine code, not executed"
    return f"machine code for {leader.gfx}, executed on a CPU"


def one_pass(arch: Arch, dtype: str, head_dim: int, config: AttentionConfig) -> Mix:
    """What a row executes for one tile of keys. Raises CompileError and the counters' errors."""
    leader = leader_of(arch)
    if leader is None or config not in attention_kernel.configs_for_many_keys(leader, head_dim):
        return key_loop.usual_pass(arch, dtype, head_dim, config)
    return key_loop.executed_pass(leader, dtype, head_dim, config)


def candidates(arches: Sequence[Arch], dtype: str, head_dim: int) -> dict[str, list[Candidate]]:
    """By row, the configs with the fewest estimated cycles, as many as `best` needs to see. The
    rows have one `leader_of`.
    """
    mixes = {
        config: mix
        for config in attention_kernel.configs_for_many_keys(arches[0], head_dim)
        if (mix := _counted_for(arches, dtype, head_dim, config))
    }
    return {arch.gfx: _compiled(arch, dtype, head_dim, mixes) for arch in arches}


def _counted_for(
    arches: Sequence[Arch], dtype: str, head_dim: int, config: AttentionConfig
) -> Mix | None:
    """None, with a line that says why, where it cannot be counted: then it is not chosen."""
    try:
        return one_pass(arches[0], dtype, head_dim, config)
    except (CompileError, ExecutionError, NoListingError, ValueError) as error:
        print(f"{arches[0].gfx} {dtype} {head_dim} {config}: not counted: {error}", file=sys.stderr)
        return None


def _compiled(
    arch: Arch, dtype: str, head_dim: int, mixes: dict[AttentionConfig, Mix]
) -> list[Candidate]:
    """Compiled for the row itself, until the rest has more cycles than one that fits."""
    estimates = {
        config: pairs.per_pair(mix, arch, config.block_q * config.block_k)
        for config, mix in mixes.items()
    }
    found: list[Candidate] = []
    for config in sorted(estimates, key=lambda each: estimates[each].estimated_cycles):
        winner = best(found)
        limit = NEAR * winner.per_pair.estimated_cycles if winner else math.inf
        enough = winner is not None and winner.waves_per_simd >= WAVES_TO_HIDE
        if enough and estimates[config].estimated_cycles > limit:
            break
        try:
            needs = key_loop.resources(arch, dtype, head_dim, config)
        except CompileError as error:
            print(f"{arch.gfx} {dtype} {head_dim}: {error}", file=sys.stderr)
            continue
        waves = codeobject.waves_per_simd(arch, needs, config.block)
        found.append(Candidate(config, needs, waves, estimates[config]))
    return found


def best(found: Sequence[Candidate]) -> Candidate | None:
    """The one with the fewest estimated cycles of those that fit; None where none does."""
    able = [each for each in found if each.fits]
    able = [each for each in able if each.waves_per_simd >= WAVES_TO_HIDE] or able
    if not able:
        return None
    limit = NEAR * min(each.per_pair.estimated_cycles for each in able)
    near = [each for each in able if each.per_pair.estimated_cycles <= limit]
    return max(near, key=lambda each: each.waves_per_simd)


def entry_of(dtype: str, head_dim: int, chosen: Candidate, of: int) -> dict[str, Any]:
    """One line of a table. `of`: so many configs were compared."""
    return {
        "form": attention_kernel.form(dtype, head_dim),
        "config": attention_kernel.fields_of(chosen.config),
        "of": of,
        "cycles_per_1024_pairs": round(chosen.per_pair.estimated_cycles, 1),
        "bound": round(chosen.per_pair.bound, 3),
        "vgprs": chosen.needs.vgprs,
        "spills": chosen.spills,
        "scratch_bytes": chosen.needs.scratch_bytes,
        "lds_bytes": chosen.needs.lds_bytes,
        "waves_per_simd": chosen.waves_per_simd,
    }


def section_of(arch: Arch, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """A modelled section."""
    space = attention_kernel.configs(arch, attention_kernel.SHIPPED_HEAD_DIMS[0])
    spec = attention_kernel.spec("float16", attention_kernel.SHIPPED_HEAD_DIMS[0], "none", space[0])
    text = source.flatten(attention_kernel.SOURCE)
    return {
        "source": tuned.MODELLED,
        "note": NOTE,
        "command": f"python -m tools.tuned --write --arch {arch.gfx}",
        "compiler": key_loop.compiler_version(arch),
        "counted": counted_as(arch),
        "rocm_sd": __version__,
        "kernel": hashlib.sha256(text.encode()).hexdigest()[:16],
        "defines": [name for name, _ in spec.defines],
        "entries": entries,
    }


def groups_of(arches: Sequence[Arch]) -> list[list[Arch]]:
    """Rows whose work is counted together: of one leader, with one search space."""
    found: dict[object, list[Arch]] = {}
    for arch in arches:
        leader = leader_of(arch)
        dims = attention_kernel.SHIPPED_HEAD_DIMS
        space = tuple(attention_kernel.configs(arch, head_dim) for head_dim in dims)
        found.setdefault((leader.gfx if leader else arch.matrix, space), []).append(arch)
    return list(found.values())


def _counted(work: tuple[list[Arch], str, int]) -> dict[str, list[Candidate]]:
    import torch

    torch.set_num_threads(1)
    return candidates(*work)


def chosen(arches: Sequence[Arch], jobs: int) -> dict[str, list[dict[str, Any]]]:
    """The entries of each row's table."""
    work = [
        (group, dtype, head_dim)
        for group in groups_of(arches)
        for dtype in attention_kernel.DTYPES
        for head_dim in attention_kernel.SHIPPED_HEAD_DIMS
    ]
    found: dict[str, list[dict[str, Any]]] = {arch.gfx: [] for arch in arches}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for (group, dtype, head_dim), made in zip(work, pool.map(_counted, work), strict=True):
            names = ", ".join(arch.gfx for arch in group)
            print(f"{names}: {dtype}, head_dim {head_dim}", file=sys.stderr, flush=True)
            for gfx, every in made.items():
                winner = best(every)
                if winner is None:
                    print(f"{gfx}: nothing fits {dtype} {head_dim}", file=sys.stderr)
                else:
                    of = len(attention_kernel.configs_for_many_keys(table()[gfx], head_dim))
                    found[gfx].append(entry_of(dtype, head_dim, winner, of))
    return found


def rows_of(gfx: str, entries: Sequence[dict[str, Any]]) -> list[list[object]]:
    """For a table on the console."""
    rows = []
    for entry in entries:
        form, config = entry["form"], AttentionConfig(**entry["config"])
        first = config == attention_kernel.configs(table()[gfx], form["head_dim"])[0]
        rows.append(
            [
                *(gfx, form["dtype"], form["head_dim"], f"{config.block_q}x{config.block_k}"),
                *(config.block, "the default" if first else "another", entry["of"]),
                *(entry["cycles_per_1024_pairs"], entry["bound"]),
                *(entry["vgprs"], entry["lds_bytes"], entry["waves_per_simd"]),
            ]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Choose, show, and write. 2: bad usage."""
    parser = argparse.ArgumentParser(prog="python -m tools.tuned", description=__doc__)
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="all", help="'all', or gfx ids separated by commas")
    parser.add_argument("--write", action="store_true", help="write kernels/tuned")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args(argv)
    try:
        arches = arches_of(args.arch)
    except UsageError as error:
        print(f"tuned: {error}", file=sys.stderr)
        return 2
    made = chosen([arch for arch in arches if arch.gfx in amd_table()], args.jobs)
    heads = ["arch", "dtype", "head_dim", "tile", "block", "is", "of", "cycles", "bound"]
    heads += ["VGPRs", "LDS bytes", "waves/SIMD"]
    rows = [row for gfx, entries in made.items() for row in rows_of(gfx, entries)]
    print(as_table([heads, *rows]))
    if args.write:
        for gfx, entries in made.items():
            content = tune.with_section(gfx, section_of(table()[gfx], entries))
            tune.write(tuned.path_of(gfx, attention_kernel.OP), content)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
