"""LayerNorm of rows that lie beyond 2 and 4 GiB."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.layer_norm import kernel
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.ours import KernelLayerNorm
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from tests.ops.layer_norm.judge import draw, faults
from tests.ops.running import compute
from tests.verify.amdgpu.far_attention import launch_on
from tests.verify.amdgpu.far_conv import among
from tests.verify.amdgpu.sparse import FAR, spread


def rows(channels: int, gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """So many that the first, one in the middle and the last are further apart than 2^32 values."""
    count, config = (1 << 33) // channels + 3, kernel.CONFIGS[0]
    chosen = [0, count // 2, count - 1]
    few = draw(LayerNormProblem((3, channels), added=True))
    assert few.added is not None
    x, added = (among(count, chosen, t) for t in (few.x, few.added))
    teams = config.threads // kernel.tiling(channels, config).lanes
    # The other rows of these work-groups hold zeros; what is made of them is shown, too.
    whole = sorted({row for at in chosen for row in _of_group(at, teams, count)})
    launch = launch_on(
        gfx,
        kernels_dir,
        groups=lambda entry, grid: sorted({row // teams for row in chosen}),
        shown=lambda made: [made[row] for row in whole],
    )
    with launch.knows(few.gamma, few.beta, *(t[row] for t in (x, added) for row in whole)):
        inputs = few._replace(x=x, added=added)
        norm, total = compute(LAYER_NORM, KernelLayerNorm(), launch, config, inputs)
    return faults((norm[chosen], total[chosen]), few)


def _of_group(row: int, teams: int, count: int) -> range:
    """The rows that are made with this one."""
    first = row // teams * teams
    return range(first, min(first + teams, count))


def far_apart(gfx: str, kernels_dir: Path = KERNELS_DIR) -> list[str]:
    """A few rows, of x and of what is added."""
    few = draw(LayerNormProblem((3, 328), added=True))
    x, gamma, beta, eps, added = few
    assert added is not None
    far = LayerNormInputs(spread(x, (FAR, 1)), gamma, beta, eps, spread(added, (FAR + 8, 1)))
    launch = launch_on(gfx, kernels_dir)
    with launch.knows(*(item for item in far if isinstance(item, torch.Tensor))):
        made = compute(LAYER_NORM, KernelLayerNorm(), launch, kernel.CONFIGS[0], far)
    return faults(made, few)


ALL: dict[str, Callable[..., list[str]]] = {
    "rows of a layer norm": partial(rows, 320),
    "rows of a layer norm read twice": partial(rows, 323),
    "rows of a layer norm far apart": far_apart,
}
