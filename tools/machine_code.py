"""What our kernels' machine code executes: `inspect --dynamic`, and the table kept in docs/results.

A typical case of each kernel is compiled for a GPU and executed, instruction by instruction, by
tests/verify/amdgpu. `python -m tools.machine_code --write` writes docs/results/amd-machine-code.md
and .json; tests/verify/amdgpu/test_amdgpu_counts.py fails where a kernel has come to execute more
than they say. The counts are exact for one compiler and say nothing of time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.commands.support import as_table
from lib_rocm_sd.lab.cycles import Kind
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem
from lib_rocm_sd.runtime import codeobject
from tests.verify.amdgpu import judge, launch
from tests.verify.amdgpu.case import Case

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
GPUS = ("gfx1100", "gfx1201", "gfx942", "gfx90a")
HEAD_DIMS = (40, 64, 80, 128, 512)


@dataclass(frozen=True)
class Counted:
    """One kernel of one case. Instructions are those of waves; `units` what the case computes."""

    arch: str
    op: str
    case: str
    kernel: str
    unit: str
    units: int
    wave_size: int
    matrix: int
    transcendental: int
    vector: int
    scalar: int
    lds: int
    memory: int
    lds_bytes_moved: int
    memory_bytes: int
    conflict_clocks: int
    vgprs: int
    spills: int
    lds_bytes: int

    @property
    def key(self) -> str:
        return f"{self.arch} {self.kernel}: {self.case}"

    def per_unit(self, waves_instructions: int) -> float:
        """Instructions of one lane for one unit."""
        return waves_instructions * self.wave_size / self.units


def typical(gfx: str) -> Iterator[tuple[Case, str, int]]:
    """A case of each kernel, the unit that it computes, and how many."""
    for head_dim in HEAD_DIMS:
        attention = AttentionProblem(1, 1, 128, 256, head_dim, "float16", "none")
        yield Case(gfx, "attention", attention), "query and key", 128 * 256
    rows = AttentionProblem(1, 1, 4, 4096, 512, "float16", "none")
    yield Case(gfx, "softmax", rows), "score", 4 * 4096
    conv = ConvProblem("3x3", 1, 16, 32, 64, 128, "float16", True, statistics=True)
    yield Case(gfx, "conv", conv), "output value", 16 * 32 * 128
    upsample = ConvProblem("upsample", 1, 8, 16, 64, 128, "float16", statistics=True)
    yield Case(gfx, "conv", upsample), "output value", 16 * 32 * 128
    norm = GroupNormProblem(1, 64, 32, 64, "float16", True, True, 32, "float16")
    yield Case(gfx, "group norm", norm), "value", 64 * 32 * 64


def count(wanted: tuple[Case, str, int]) -> list[Counted]:
    """Execute a case. Raises AssertionError where it comes out wrong."""
    case, unit, units = wanted
    launched: list[Any] = []

    class Noting(judge._Launch):
        def __call__(self, spec: Any, grid: int, block: int, *rest: Any) -> None:
            super().__call__(spec, grid, block, *rest)
            launched.append((spec, self.counts[-1]))

    original, judge._Launch = judge._Launch, Noting  # type: ignore[misc]
    try:
        outcome = judge.execute(case)
    finally:
        judge._Launch = original  # type: ignore[misc]
    assert not outcome.faults, f"{case}: {outcome.faults}"
    found = []
    for spec, counts in launched:
        if spec.entry in ("pack_tiles", "group_norm_merge", "group_norm_finalize"):
            continue
        (needs,) = codeobject.resources(launch.built(spec, case.arch))
        kinds = counts.by_kind()
        found.append(
            Counted(
                *(case.gfx, case.op, str(case.problem), spec.entry, unit, units),
                *(counts.wave_size, kinds.get(Kind.MATRIX, 0), kinds.get(Kind.TRANSCENDENTAL, 0)),
                *(kinds.get(Kind.VECTOR, 0), kinds.get(Kind.SCALAR, 0), kinds.get(Kind.LDS, 0)),
                *(kinds.get(Kind.GLOBAL, 0), counts.lds_bytes),
                *(counts.loaded_bytes + counts.stored_bytes, counts.conflict_clocks),
                *(needs.vgprs, needs.vgpr_spills + needs.sgpr_spills, needs.lds_bytes),
            )
        )
    return found


def counted(gpus: Sequence[str]) -> list[Counted]:
    """All cases of some GPUs, in as many processes as there are cores."""
    wanted = [each for gfx in gpus for each in typical(gfx)]
    with ProcessPoolExecutor(
        os.cpu_count(),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        return [row for rows in pool.map(count, wanted) for row in rows]


def compiler_name() -> str:
    """The compiler whose code is executed, for instance "clang 19.1.7"."""
    found = launch.compiler()
    assert found is not None
    path = json.loads(found.identity())[1]
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"clang version (\d+\.\d+\.\d+)", said)
    return f"clang {version[1] if version else 'unknown'}"


def refusals(gpus: Sequence[str]) -> list[str]:
    """Why these cannot be counted here."""
    return [f"{gfx}: {why}" for gfx in gpus if (why := launch.missing(gfx))]


HEADS = (
    *("arch", "kernel", "case", "per", "matrix", "transcendental", "vector", "scalar", "LDS"),
    *("memory", "LDS bytes", "memory bytes", "conflict clocks", "VGPRs", "spills", "LDS, bytes"),
)


def cells(row: Counted) -> list[object]:
    """A row of the table; instructions, bytes and clocks per unit."""
    shares = [
        *(row.matrix, row.transcendental, row.vector, row.scalar, row.lds, row.memory),
    ]
    moved = (row.lds_bytes_moved, row.memory_bytes, row.conflict_clocks)
    return [
        *(row.arch, row.kernel, row.case, row.unit),
        *(f"{row.per_unit(share):.3g}" for share in shares),
        *(f"{value / row.units:.3g}" for value in moved),
        *(row.vgprs, row.spills, row.lds_bytes),
    ]


def markdown(rows: Sequence[Counted], compiler: str) -> str:
    """docs/results/amd-machine-code.md."""
    lines = [
        "# AMD machine code, executed and counted",
        "",
        f"Written by `python -m tools.machine_code --write`; compiled by {compiler}, the "
        "configs that Auto takes, fp16. Counted, not measured: it says nothing of time. "
        "Instructions are those of a lane for one unit (a wave's instruction counts for each of "
        "its lanes; two in one, as RDNA3 issues them, count once), bytes and clocks are per unit "
        "too; conflict clocks are what LDS bank conflicts add, for all waves together.",
        "",
        f"| {' | '.join(HEADS)} |",
        "|" + "---|" * len(HEADS),
        *(f"| {' | '.join(map(str, cells(row)))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main(arches: Sequence[Arch], ops: str, as_json: bool) -> int:
    """`inspect --dynamic`."""
    gpus = [arch.gfx for arch in arches if arch.gfx in GPUS]
    for arch in arches:
        if arch.gfx not in GPUS:
            print(f"{arch.gfx}: not executed; {', '.join(GPUS)} are", file=sys.stderr)
    for why in (found := refusals(gpus)):
        print(why, file=sys.stderr)
    if found or not gpus:
        return 2
    named = {"group_norm": "group norm"}
    wanted = {named.get(op, op) for op in ops.split(",")}
    rows = [row for row in counted(gpus) if ops == "all" or row.op in wanted]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(as_table([HEADS, *map(cells, rows)]))
    return 0


def write() -> int:
    """Make the committed table anew."""
    why = refusals(GPUS)
    if why:
        print("\n".join(why), file=sys.stderr)
        return 2
    rows = counted(GPUS)
    document = {"compiler": compiler_name(), "rows": [asdict(row) for row in rows]}
    text = json.dumps(document, indent=1) + "\n"
    (RESULTS / "amd-machine-code.json").write_text(text, encoding="utf-8")
    page = markdown(rows, compiler_name())
    (RESULTS / "amd-machine-code.md").write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    raise SystemExit(write())
