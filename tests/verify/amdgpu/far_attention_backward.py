"""Attention's gradients where tensors reach beyond 2 and 4 GiB, in bytes and in elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from tests.ops.attention_backward.judge import completed, faults
from tests.ops.running import compute
from tests.verify.amdgpu.far_attention import launch_on
from tests.verify.amdgpu.launch import CodeLaunch
from tests.verify.amdgpu.sparse import FAR, sparse, spread
from tests.verify.simt.attention import draw, random_mask


def _gradients(
    launch: CodeLaunch, inputs: AttentionBackwardInputs, shown: Sequence[torch.Tensor] = ()
) -> Grads:
    """`shown`: what kernels may touch of the inputs, all where nothing is said."""
    variant, problem = MatrixBackward(), ATTENTION_BACKWARD.problem_of(inputs)
    config = variant.configs(launch.arch, problem)[0]
    given = [item for item in inputs if isinstance(item, torch.Tensor)]
    with launch.knows(*(shown or given)):
        made: Grads = compute(ATTENTION_BACKWARD, variant, launch, config, inputs)
    return made


def batches_and_heads(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """Those of q, k, v, of the output and of its gradient."""
    q, k, v = draw(AttentionProblem(2, 2, 33, 45, 40, "float16", "none"))
    near = completed(AttentionInputs(q, k, v))
    heads, rows = (3 * FAR, 40, FAR, 1), (3 * FAR, 80, 1)
    far = near._replace(
        q=spread(q, heads),
        k=spread(k, heads),
        v=spread(v, heads),
        output=spread(near.output, rows),
        grad=spread(near.grad, rows),
    )
    return faults(_gradients(launch_on(gfx, kernels_dir), far), near)


def mask_strides(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """All four of a mask."""
    q, k, v = draw(AttentionProblem(2, 2, 17, 33, 40, "float16", "none"))
    mask = random_mask((2, 2, 17, 33), "float16")
    near = completed(AttentionInputs(q, k, v, mask))
    placed = spread(mask, (2 * FAR + 4096, FAR + 2048, FAR + 64, 1 << 27))
    made = _gradients(launch_on(gfx, kernels_dir), near._replace(mask=placed))
    return faults(made, near)


def batches_of_the_gradients(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """A million of them; each has its own part of few inputs, which overlap."""
    count, seq, head_dim = (1 << 20) + 5, 64, 64
    base = torch.randn(8 * count + seq * head_dim, generator=torch.Generator().manual_seed(1))
    halves = base.half()

    def placed(turn: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        return halves.roll(turn).as_strided((count, *shape), (8, *strides))

    q, k, v = (placed(turn, (seq, 1, head_dim), (head_dim, head_dim, 1)) for turn in range(3))
    chosen = [0, count // 2 - 1, count - 1]
    near = completed(AttentionInputs(q[chosen], k[chosen], v[chosen]))
    output, grad = (sparse((count, seq, head_dim), torch.float16) for _ in range(2))
    output[chosen], grad[chosen] = near.output, near.grad

    def parts(made: torch.Tensor) -> list[torch.Tensor]:
        """Of what is made: gradients, and a number of each query."""
        return [made[b] for b in chosen]

    lse = sparse((count, 1, seq), torch.float32)
    lse[chosen] = near.lse
    launch = launch_on(gfx, kernels_dir, groups=lambda entry, grid: chosen, shown=parts)
    shown = [
        q,
        k,
        v,
        *(output[b] for b in chosen),
        *(grad[b] for b in chosen),
        *(lse[b] for b in chosen),
    ]
    made = _gradients(launch, AttentionBackwardInputs(q, k, v, output, grad, lse), shown)
    of_q, of_k, of_v = (each[chosen] for each in made)
    return faults((of_q, of_k, of_v), near)


ALL: dict[str, Callable[..., list[str]]] = {
    "batches and heads of a backward": batches_and_heads,
    "a backward's mask": mask_strides,
    "batches of gradients": batches_of_the_gradients,
}
