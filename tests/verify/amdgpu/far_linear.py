"""Linear layers whose rows reach beyond 2 and 4 GiB, in bytes and in elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.linear import kernel
from lib_rocm_sd.ops.linear import torch as library
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.ours import MOST_STRIDE, MatrixLinear
from lib_rocm_sd.ops.linear.problem import LinearProblem
from tests.ops.running import compute
from tests.verify.amdgpu.far_attention import launch_on
from tests.verify.amdgpu.sparse import sparse

CPU = torch.device("cpu")
K, COLUMNS = 136, 128
"""So that a work-group of either kernel makes the same sixteen rows."""
STEP = 8
"""From row to row of an x whose rows overlap, and so take little memory."""


def _places(rows: int, block: int) -> list[slice]:
    """The first rows, some in the middle and the last, as many as work-groups make at a time."""
    starts = (0, rows // 2 // block * block, (rows - 1) // block * block)
    return [slice(start, min(start + block, rows)) for start in starts]


def _groups(
    entry: str, grid: int, places: Sequence[slice], cut: kernel.LinearTiling, block: int
) -> list[int]:
    """The work-groups that make these rows, of all parts of k."""
    if entry == "linear_sum":
        each = kernel.SUM_THREADS * 8 // COLUMNS  # rows of a work-group
        return sorted({row // each for place in places for row in range(place.start, place.stop)})
    tiles = cut.row_blocks * cut.blocks
    found = []
    for place in places:
        strip, here = divmod(place.start // block, cut.together)
        first = strip * cut.together * cut.blocks + here
        found += [part * tiles + first for part in range(cut.parts)]
    return found


def rows(parts: int, gap: bool, gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Very many: of the output, of a residual, which it is, and of the sums over `parts` of k.
    `gap`: fewer rows, of x and the residual, as far apart as may be.
    """
    count = (1 << 11) + 5 if gap else (1 << 26) + 5
    arch = by_gfx(gfx)
    assert arch is not None
    config = replace(kernel.sizes(arch, "float16")[-1], parts=parts)
    problem = LinearProblem(count, K, (COLUMNS,), residual=True, in_place=True)
    cut = kernel.tiling(count, K, (COLUMNS,), False, config)
    places = _places(count, config.block_rows)
    few = LINEAR.make_inputs(replace(problem, rows=3 * config.block_rows, in_place=False), CPU, 1)
    assert few.residual is not None
    step = MOST_STRIDE if gap else STEP
    x = sparse((count, K), few.x.dtype, (step, 1))
    residual = sparse((count, COLUMNS), few.x.dtype, (step if gap else COLUMNS, 1))
    for number, place in enumerate(places):
        drawn = slice(number * config.block_rows, number * config.block_rows + _size(place))
        for row, values in zip(range(place.start, place.stop), few.x[drawn], strict=True):
            x[row] = values
        residual[place] = few.residual[drawn]
    before = [(x[place].clone(), residual[place].clone()) for place in places]
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=partial(_groups, places=places, cut=cut, block=config.block_rows),
        shown=lambda made: [made[:, place] for place in places],
    )
    inputs = few._replace(x=x, residual=residual, out=residual)
    shown = [t[place] for t in (x, residual) for place in places]
    with launch.knows(few.weight, few.bias, *shown):
        made = compute(LINEAR, MatrixLinear(), launch, config, inputs)
    found = []
    for place, (mine, added) in zip(places, before, strict=True):
        exact = LINEAR.reference(LinearInputs(mine, few.weight, few.bias, added))
        off = (made[place].double() - exact).abs().max().item()
        if not off <= 1e-3 * exact.abs().max().item():
            found.append(f"rows {place.start} to {place.stop} off by {off}")
    return found


def _size(place: slice) -> int:
    return int(place.stop - place.start)


def gate(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Very many rows of what a library made of both halves of a weight."""
    count, each = (1 << 26) + 5, kernel.SUM_THREADS * 8 // COLUMNS
    problem = LinearProblem(count, 8, (COLUMNS,), residual=True, gate=True, in_place=True)
    places = _places(count, each)
    drawn = torch.Generator("cpu").manual_seed(1)
    dtype = torch.float16
    product = sparse((count, 2 * COLUMNS), dtype, (2 * COLUMNS, 1))
    residual = sparse((count, COLUMNS), dtype, (COLUMNS, 1))
    for place in places:
        for wide in (product, residual):
            shape = (_size(place), wide.shape[1])
            wide[place] = torch.randn(shape, generator=drawn).to(dtype)
    before = [(product[place].double(), residual[place].double()) for place in places]
    inputs = LinearInputs(product[:, :8], product[:1, :8], None, residual, residual, gate=True)
    launch = launch_on(
        gfx, kernels_dir, groups=lambda entry, grid: [p.start // each for p in places]
    )
    shown = [t[place] for t in (product, residual) for place in places]
    with launch.knows(*shown), mock.patch.object(library, "product", lambda inputs: product):
        made = library.LibraryLinear().run(Call(problem, inputs, launch))
    found = []
    for place, (both, added) in zip(places, before, strict=True):
        value, gated = both.chunk(2, 1)
        exact = value * torch.nn.functional.gelu(gated) + added
        off = (made[place].double() - exact).abs().max().item()
        if not off <= 1e-3 * exact.abs().max().item():
            found.append(f"rows {place.start} to {place.stop} off by {off}")
    return found


ALL: dict[str, Callable[..., list[str]]] = {
    "rows of a linear layer": partial(rows, 1, False),
    "rows of a linear layer in parts": partial(rows, 4, False),
    "rows of a linear layer with gaps": partial(rows, 1, True),
    "rows of a linear layer in parts with gaps": partial(rows, 4, True),
    "rows of a gate": gate,
}
