"""Attention and its softmax whose tensors reach beyond 2 and 4 GiB, in bytes and in elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import (
    LARGEST_ROW_STRIDE,
    THREADS,
    MatrixAttention,
    SoftmaxParams,
    held_of,
    softmax_spec,
)
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests.ops.attention.judge import numbers
from tests.ops.running import compute
from tests.verify.amdgpu.launch import CodeLaunch
from tests.verify.amdgpu.sparse import FAR, sparse, spread
from tests.verify.simt.attention import draw, key_lengths, random_mask

CPU = torch.device("cpu")


def launch_on(gfx: str, kernels_dir: Path, **how: Any) -> CodeLaunch:
    """That executes as this GPU would; `how`: fields of CodeLaunch."""
    arch = by_gfx(gfx)
    assert arch is not None
    return CodeLaunch(arch, kernels_dir=kernels_dir, **how)


def _queries_of_a_group(gfx: str, head_dim: int) -> int:
    arch = by_gfx(gfx)
    assert arch is not None
    return kernel.ordered(arch, "float16", head_dim, "none")[0].block_q


def _attend(
    launch: CodeLaunch, inputs: AttentionInputs, shown: Sequence[torch.Tensor | None] = ()
) -> Any:
    """The output. `shown`: what kernels may touch of the inputs, all where nothing is said."""
    p = ATTENTION.problem_of(inputs)
    config = kernel.ordered(launch.arch, p.dtype, p.head_dim, p.mask)[0]
    with launch.knows(*(shown or inputs[:4])):
        return compute(ATTENTION, MatrixAttention(), launch, config, inputs)


def _strided(
    gfx: str, kernels_dir: Path, strides: Sequence[int], seq: tuple[int, int]
) -> list[str]:
    """q, k and v with these strides of batch, row and head."""
    count = 2 if strides[0] else 1
    q, k, v = draw(AttentionProblem(count, count, *seq, 40, "float16", "none"))
    far = (strides[0] or 1, strides[1], strides[2] or 1, 1)
    inputs = AttentionInputs(spread(q, far), spread(k, far), spread(v, far))
    out = _attend(launch_on(gfx, kernels_dir), inputs)
    return numbers(out, q, k, v).faults(True)


def batches_and_heads(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Those of q, k and v."""
    return _strided(gfx, kernels_dir, (3 * FAR, 40, FAR), (33, 77))


def rows_apart(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Rows so far apart that they are read one by one."""
    return _strided(gfx, kernels_dir, (0, FAR, 0), (33, 35))


def rows_of_tiles(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Rows as far apart as may be where lanes have offsets of 32 bits; the last tile of queries."""
    q, k, v = draw(AttentionProblem(1, 1, 1088, 1088, 40, "float16", "none"))
    far = (1, LARGEST_ROW_STRIDE, 1, 1)
    launch = launch_on(gfx, kernels_dir, groups=lambda entry, grid: [grid - 1])
    out = _attend(launch, AttentionInputs(spread(q, far), spread(k, far), spread(v, far)))
    return numbers(out[:, -16:], q[:, -16:], k, v).faults(True)


def mask_strides(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """All four of a mask."""
    q, k, v = draw(AttentionProblem(2, 2, 17, 33, 40, "float16", "none"))
    mask = random_mask((2, 2, 17, 33), "float16")
    placed = spread(mask, (2 * FAR + 4096, FAR + 2048, FAR + 64, 1 << 27))
    out = _attend(launch_on(gfx, kernels_dir), AttentionInputs(q, k, v, placed))
    return numbers(out, q, k, v, mask).faults(True)


def lengths_far_apart(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Those of two images."""
    q, k, v = draw(AttentionProblem(2, 2, 17, 33, 40, "float16", "none"))
    lengths = key_lengths(33, 7)
    placed = spread(lengths, (2 * FAR + 4096, 1, 1, 1))
    out = _attend(launch_on(gfx, kernels_dir), AttentionInputs(q, k, v, placed))
    return numbers(out, q, k, v, lengths).faults(True)


def batches_of_the_output(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """A million of them; each has its own part of few inputs, which overlap."""
    count, seq, head_dim = (1 << 20) + 5, 64, 64
    base = torch.randn(8 * count + seq * head_dim, generator=torch.Generator().manual_seed(1))
    q, k, v = (
        base.half().roll(each).as_strided((count, seq, 1, head_dim), (8, head_dim, head_dim, 1))
        for each in range(3)
    )
    chosen = [0, count // 2 - 1, count - 1]
    block_q = _queries_of_a_group(gfx, head_dim)
    whole, rest = divmod(seq, block_q)
    groups = [b * whole + each for b in chosen for each in range(whole)]
    groups += [count * whole + b for b in chosen if rest]
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=lambda entry, grid: groups,
        shown=lambda made: [made[b] for b in chosen],
    )
    out = _attend(launch, AttentionInputs(q, k, v))
    return numbers(out[chosen], q[chosen], k[chosen], v[chosen]).faults(True)


def queries_of_the_output(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """So many that the last rows lie far, also those of q."""
    seq, head_dim = (1 << 26) + 37, 64
    block_q = _queries_of_a_group(gfx, head_dim)
    whole, rest = divmod(seq, block_q)
    starts = [0, whole // 2 * block_q, whole * block_q]
    rows = [slice(start, min(start + block_q, seq)) for start in starts]
    q = sparse((1, seq, 1, head_dim), torch.float16)
    _, k, v = draw(AttentionProblem(1, 1, 1, 77, head_dim, "float16", "none"))
    for place, each in enumerate(rows):
        drawn = draw(AttentionProblem(1, 1, each.stop - each.start, 1, head_dim), seed=place)
        q[:, each] = drawn[0]
    assert rest
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=lambda entry, grid: [0, whole // 2, grid - 1],
        shown=lambda made: [made[:, each] for each in rows],
    )
    out = _attend(launch, AttentionInputs(q, k, v), [*(q[:, each] for each in rows), k, v])
    found = [numbers(out[:, each], q[:, each], k, v).faults(True) for each in rows]
    return [fault for each in found for fault in each]


def rows_of_scores(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """More scores than 2^32, of which rows at the ends and in the middle are weighed."""
    found: list[str] = []
    for keys in (1101, 1100):  # read twice, and held in registers
        count = (1 << 32) // keys + 7
        chosen = [0, count // 2 + 1, count - 1]
        scores = sparse((count, keys), torch.float32)
        scores[chosen] = torch.randn((3, keys), generator=torch.Generator().manual_seed(keys))
        launch = launch_on(
            gfx,
            kernels_dir,
            groups=lambda entry, grid, chosen=chosen: chosen,
            shown=lambda made, chosen=chosen: [made[row] for row in chosen],
        )
        with launch.knows(*(scores[row] for row in chosen)):
            weights = torch.empty((count, keys), dtype=torch.float16)
            sums = torch.empty((count, 1), dtype=torch.float32)
            params = SoftmaxParams(
                *(each.data_ptr() for each in (scores, weights, sums)), keys, 0.25
            )
            launch(softmax_spec("float16", held_of(keys)), count, THREADS, params, CPU)
        exact = scores[chosen].double()
        exact = torch.exp2((exact - exact.amax(1, keepdim=True)) * 0.25)
        off = (weights[chosen].double() - exact).abs().max().item()
        summed = (sums[chosen].double() - exact.sum(1, keepdim=True)).abs().max().item()
        if not off <= 2.0**-11 or not summed <= 1e-5 * keys:
            found.append(f"weights of {keys} keys are off by {off}, sums by {summed}")
    return found


ALL: dict[str, Callable[..., list[str]]] = {
    "batches and heads of q, k and v": batches_and_heads,
    "rows read one by one": rows_apart,
    "rows of tiles": rows_of_tiles,
    "a mask's strides": mask_strides,
    "key lengths far apart": lengths_far_apart,
    "batches of the output": batches_of_the_output,
    "queries and rows of the output": queries_of_the_output,
    "rows of scores": rows_of_scores,
}
