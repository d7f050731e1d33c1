"""`inspect --op attention --beside-triton`: what our attention and one that Triton compiled execute
for each (query, key) pair. Counted in AMD machine code, not measured.

Ours is executed on the CPU with two lengths of keys; the difference is one pass of the loop over
the keys. Triton's loop has no branches: its instructions are counted as they stand there, and
tests/machine/test_beside_triton.py executes some to see that this is the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.lab import listing
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.runtime import codeobject
from tests.verify.amdgpu import launch
from tools import pairs, triton_attention
from tools.key_loop import compiler_version, executed_pass, mix_between

__all__ = ["main", "mix_between"]

HEAD_DIMS = (40, 64, 80, 128)
OURS, TRITON = "rocm_sd", "Triton"


@dataclass(frozen=True)
class Row:
    """One config of one kernel. `per_pair`: of PerPair, empty where `failure` says why.
    `scratch_bytes`: above 0 where registers are spilled.
    """

    arch: str
    head_dim: int
    kernel: str
    config: str
    vgprs: int = 0
    scratch_bytes: int = 0
    lds_bytes: int = 0
    waves_per_simd: int = 0
    per_pair: pairs.PerPair | None = None
    failure: str = ""


def main(arches: Sequence[Arch], as_json: bool) -> int:
    """Print every row as JSON, or a page with the best ones. 1 where a row failed."""
    work = [(arch, head_dim) for arch in arches for head_dim in HEAD_DIMS]
    rows: list[Row] = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        made = pool.map(rows_of, *zip(*work, strict=True))
        for (arch, head_dim), found in zip(work, made, strict=True):
            print(f"{arch.gfx} head_dim {head_dim}: done", file=sys.stderr, flush=True)
            rows += found
    print(json.dumps([as_dict(row) for row in rows], indent=1) if as_json else page(rows))
    return 1 if any(row.failure for row in rows) else 0


def rows_of(arch: Arch, head_dim: int) -> list[Row]:
    """Every config of ours, then every config of Triton's."""
    torch.set_num_threads(1)
    ours = [ours_of(arch, head_dim, each) for each in attention_kernel.configs(arch, head_dim)]
    return ours + [tritons_of(arch, head_dim, each) for each in triton_attention.CONFIGS]


# -- ours ----------------------------------------------------------------------------------------


def ours_of(arch: Arch, head_dim: int, config: attention_kernel.AttentionConfig) -> Row:
    """By executing two and three tiles of keys."""
    text = f"{config.block_q}x{config.block_k}, {config.block // arch.wave_size} waves"
    row = Row(arch.gfx, head_dim, OURS, text + (", ahead" if config.ahead else ""))
    try:
        one_pass = executed_pass(arch, "float16", head_dim, config)
    except CompileError as error:
        return replace(row, failure=str(error))
    per_pair = pairs.per_pair(one_pass, arch, config.block_q * config.block_k)
    spec = attention_kernel.spec("float16", head_dim, "none", config)
    return _with_resources(row, arch, launch.built(spec, arch), spec.entry, 0, per_pair)


# -- Triton's ------------------------------------------------------------------------------------


def tritons_of(arch: Arch, head_dim: int, config: triton_attention.TritonConfig) -> Row:
    """By counting the instructions of the loop over whole tiles of keys."""
    row = Row(arch.gfx, head_dim, TRITON, str(config))
    try:
        made = triton_attention.compiled(arch, head_dim, config, tail=False, buffers=True)
        per_pair = tritons_loop(made, arch, config)
    except (CompileError, ValueError) as error:
        return replace(row, failure=str(error))
    return _with_resources(row, arch, made.code, triton_attention.ENTRY, made.lds_bytes, per_pair)


def tritons_loop(
    made: triton_attention.Made, arch: Arch, config: triton_attention.TritonConfig
) -> pairs.PerPair:
    """What stands in the loop. Raises ValueError."""
    (function,) = listing.from_assembly(made.assembly)
    return pairs.pairs_in_loop(function, arch, config.block_m * config.block_n // config.num_warps)


def _with_resources(
    row: Row, arch: Arch, code: bytes, entry: str, lds_bytes: int, per_pair: pairs.PerPair
) -> Row:
    (found,) = (each for each in codeobject.resources(code) if each.name == entry)
    kernel = replace(found, lds_bytes=found.lds_bytes + lds_bytes)
    return replace(
        row,
        vgprs=kernel.vgprs,
        scratch_bytes=kernel.scratch_bytes,
        lds_bytes=kernel.lds_bytes,
        waves_per_simd=codeobject.waves_per_simd(arch, kernel, kernel.max_block),
        per_pair=per_pair,
    )


# -- the page ------------------------------------------------------------------------------------

_HEAD = """# Attention in AMD's machine code, beside Triton's

**Counted in machine code, not measured on any GPU.** Written by

    python -m lib_rocm_sd inspect --op attention --arch {arches} \\
        --beside-triton

What each kernel executes for one (query, key) pair in its loop over the keys, half precision, no
mask, whole tiles, aligned rows: wave instructions times the lanes of a wave, so that 1 is one
instruction of one lane for each pair. `vector` leaves out matrix and transcendental instructions
and counts both halves of a dual-issue pair; `issue` counts their issue slots. Bytes are those of
all lanes; `memory bytes` are what the loads ask for.

`{ours}`: kernels/attention.hip by {compiler}, its machine code executed on the CPU with
two lengths of keys; the difference is one pass. `Triton`: lib_rocm_sd/triton_kernels/attention.py
with `fused`, by Triton {triton}: of {configs} combinations of tile sizes, waves and stages the one
that the cost model puts first among those that spill nothing, of equals the one with fewer vector
instructions; where another of these has fewer of them, that one too ("fewest"). Its tiles are
powers of two: it computes head_dim 40 as 32 and 16 columns, 80 as 64 and 16.
`cycles` (of a SIMD, for 1024 pairs) and `bound` (on the use of the matrix units, for padding too)
are estimates of the cost model (lib_rocm_sd/lab/cycles.py), the same for both. A ratio below 1
is in favour of `{ours}`. No comparison of times follows from any of this."""
_COLUMNS = (
    ("matrix", "matrix"),
    ("transc.", "transcendental"),
    ("vector", "vector"),
    ("issue", "vector_slots"),
    ("scalar", "scalar"),
    ("LDS", "lds"),
    ("LDS bytes", "lds_bytes"),
    ("memory bytes", "global_bytes"),
    ("cycles", "estimated_cycles"),
    ("bound", "bound"),
)


def page(rows: Sequence[Row]) -> str:
    """Markdown: for each arch and head_dim our configs and Triton's best; what failed below."""
    head = _HEAD.format(
        arches=",".join(dict.fromkeys(row.arch for row in rows)),
        ours=OURS,
        compiler=compiler_version(),
        triton=triton_attention.VERSION,
        configs=len(triton_attention.CONFIGS),
    )
    failures = [
        f"- {row.arch}, head_dim {row.head_dim}, {row.kernel} {row.config}: {row.failure}"
        for row in rows
        if row.failure
    ]
    parts = [head, "## Ours against Triton's best", _summary(rows), "## Every config of ours"]
    parts += [_table(rows)]
    return "\n\n".join(parts + (["Not counted:", "\n".join(failures)] if failures else []))


def best(rows: Sequence[Row], key: str = "estimated_cycles") -> Row | None:
    """The lowest of what is counted and spills nothing, of equals the one with fewer vector
    instructions.
    """
    counted = [(row, row.per_pair) for row in rows if row.per_pair and not row.scratch_bytes]
    found = min(counted, key=lambda each: (getattr(each[1], key), each[1].vector), default=None)
    return found[0] if found else None


def _groups(rows: Sequence[Row]) -> dict[tuple[str, int], tuple[list[Row], list[Row]]]:
    found: dict[tuple[str, int], tuple[list[Row], list[Row]]] = {}
    for row in rows:
        ours, theirs = found.setdefault((row.arch, row.head_dim), ([], []))
        (ours if row.kernel == OURS else theirs).append(row)
    return found


def _summary(rows: Sequence[Row]) -> str:
    """Ratios of our best config, by the cost model, to Triton's best."""
    lines = []
    for (gfx, head_dim), (ours, theirs) in _groups(rows).items():
        mine, other, fewest = best(ours), best(theirs), best(theirs, "vector")
        if not (mine and other and fewest):
            continue
        cells = [gfx, str(head_dim), mine.config, other.config]
        for name in ("vector", "vector_slots", "estimated_cycles"):
            cells.append(f"{_ratio(mine, other, name):.2f}")
        cells += [f"{_ratio(mine, fewest, 'vector'):.2f}"]
        cells += [f"{row.per_pair.bound:.2f}" for row in (mine, other) if row.per_pair]
        lines.append(cells)
    heads = ["arch", "head_dim", "ours", "Triton's", "vector, ratio", "issue, ratio"]
    heads += ["cycles, ratio", "vector, ratio to the fewest", "our bound", "Triton's bound"]
    return _markdown(heads, lines)


def _ratio(one: Row, other: Row, name: str) -> float:
    return float(getattr(one.per_pair, name) / getattr(other.per_pair, name))


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for ours, theirs in _groups(rows).values():
        named = [(row, "") for row in ours]
        chosen, fewest = best(theirs), best(theirs, "vector")
        named += [(chosen, "")] if chosen else []
        named += [(fewest, " (fewest)")] if fewest and fewest is not chosen else []
        lines += [_cells(row, mark) for row, mark in named if row.per_pair]
    heads = ["arch", "head_dim", "kernel", "config", *(head for head, _ in _COLUMNS)]
    return _markdown([*heads, "VGPRs", "scratch", "waves/SIMD"], lines)


def _cells(row: Row, mark: str) -> list[str]:
    counts = [getattr(row.per_pair, name) for _, name in _COLUMNS]
    shown = [f"{count:.0f}" if count >= 100 else f"{count:.2f}" for count in counts]
    cells = [row.arch, str(row.head_dim), row.kernel + mark, row.config, *shown]
    return [*cells, str(row.vgprs), str(row.scratch_bytes), str(row.waves_per_simd)]


def _markdown(heads: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * 4 + ["---:"] * (len(heads) - 4)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines))


def as_dict(row: Row) -> dict[str, Any]:
    """For JSON."""
    return {**asdict(row), "per_pair": row.per_pair.as_dict() if row.per_pair else None}
