"""Runs attention.py and group_norm.py on torch's tensors. Needs Triton and a GPU that it knows."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import triton

from lib_rocm_sd.triton_kernels import attention as attention_kernel
from lib_rocm_sd.triton_kernels import group_norm as group_norm_kernel
from lib_rocm_sd.triton_kernels.attention import LEAST_COLUMNS, TritonConfig, pieces
from lib_rocm_sd.triton_kernels.group_norm import PART_PIXELS

OLDEST = 3
"""The first major release whose kernels these are."""
FAILED: tuple[type[Exception], ...] = (
    *(triton.CompilationError, triton.OutOfResources, subprocess.SubprocessError),
    *(AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError),
    *filter(None, [getattr(triton, "TritonError", None)]),
)
"""What Triton and the compilers that it calls raise, besides RuntimeError."""


def too_old() -> str:
    """Why this Triton cannot compile them; empty if it can."""
    major = triton.__version__.split(".")[0]
    new = not major.isdigit() or int(major) >= OLDEST
    return "" if new else f"triton {triton.__version__} is older than {OLDEST}.0"


@contextmanager
def launching(device: torch.device, what: object) -> Iterator[None]:
    """Within this, kernels are launched on `device`; what Triton cannot do is a RuntimeError."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    except FAILED as error:
        raise RuntimeError(f"Triton, {what}: {error}") from error


# -- attention ------------------------------------------------------------------------------------


LOG2_E = math.log2(math.e)
CONFIGS = {
    64: (TritonConfig(128, 64, 8, 2), TritonConfig(128, 64, 4, 3), TritonConfig(64, 32, 4, 1)),
    128: (TritonConfig(128, 32, 8, 1), TritonConfig(128, 64, 8, 2), TritonConfig(64, 32, 4, 1)),
    256: (TritonConfig(64, 32, 4, 1), TritonConfig(128, 32, 8, 1)),
}
"""By the columns that a head takes, up to this many: few, since each is compiled in a second. The
first spills no registers on gfx1100 at 40, 64, 80 and 128, with Triton 3.9."""


def cut(head_dim: int) -> tuple[int, int]:
    """Columns of a head's two pieces: one piece on NVIDIA. With two, Triton 3.6 makes code for an
    H200 that leaves shared memory or is wrong, where loads are pipelined (compute-sanitizer).
    """
    if torch.version.hip:
        return pieces(head_dim)
    return max(LEAST_COLUMNS, 1 << (head_dim - 1).bit_length()), 0


def attention_configs(head_dim: int) -> tuple[TritonConfig, ...]:
    """What is tried for a head_dim."""
    columns = sum(cut(head_dim))
    return next((CONFIGS[most] for most in CONFIGS if columns <= most), CONFIGS[256])


def attention(
    config: TritonConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """(B, Sq, H*D) for q (B, Sq, H, D), k and v (B, Sk, H, D), last stride 1, and a mask (B, H, Sq,
    Sk). RuntimeError where Triton cannot.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_k = k.shape[1]
    out = q.new_empty((batch, seq_q, heads * head_dim))
    q_blocks = -(-seq_q // config.block_m)
    first, rest = cut(head_dim)
    strides = [stride for tensor in (q, k, v) for stride in tensor.stride()[:3]]
    kind, given = attention_kernel.NO_MASK, out
    of_mask: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        kind = attention_kernel.BOOL if mask.dtype == torch.bool else attention_kernel.ADDED
        given = mask.view(torch.uint8) if kind == attention_kernel.BOOL else mask
        of_mask = mask.stride()
    with launching(q.device, config):
        attention_kernel.attention[(q_blocks * heads * batch,)](
            *(q, k, v, out, given, *strides, *of_mask),
            *(heads, seq_q, seq_k, q_blocks, scale * LOG2_E),
            head_dim=head_dim,
            first=first,
            rest=rest,
            block_m=config.block_m,
            block_n=config.block_n,
            kind=kind,
            tail=seq_k % config.block_n != 0,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


# -- GroupNorm ------------------------------------------------------------------------------------


MERGED_PARTS = 128
"""Taken at a time when parts are merged."""
FEW_PARTS = 16
"""Which one wave merges."""


@dataclass(frozen=True)
class NormTile:
    """Elements that a program takes at a time, and its waves. `run`: how many of them lie side by
    side, channels or pixels.
    """

    elements: int
    run: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.elements} elements, {self.run} in a run, {self.num_warps} waves"


NORM_TILES = (NormTile(2048, 64, 4), NormTile(4096, 128, 4), NormTile(8192, 256, 8))


def group_norm(
    tile: NormTile,
    x: torch.Tensor,
    last: bool,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> torch.Tensor:
    """The GroupNorm of x (N, C, H, W), which is dense; `last`: it lies channels-last. RuntimeError
    where Triton cannot.
    """
    batch, channels = x.shape[:2]
    pixels = math.prod(x.shape[2:])
    parts = -(-pixels // PART_PIXELS)
    steps = (1, channels) if last else (pixels, 1)
    block_c, block_p = _blocks(tile, last, channels, pixels)
    of_channels = -(-channels // block_c)
    found = x.new_empty((batch, parts, channels, 2), dtype=torch.float32)
    norm = x.new_empty((batch, channels, 2), dtype=torch.float32)
    kind = torch.channels_last if last else torch.contiguous_format
    out = torch.empty_like(x, memory_format=kind)
    width = channels // groups
    with launching(x.device, tile):
        group_norm_kernel.statistics[(batch * parts * of_channels,)](
            *(x, found, channels, pixels, parts, *steps),
            part_pixels=PART_PIXELS,
            block_c=block_c,
            block_p=block_p,
            num_warps=tile.num_warps,
        )
        group_norm_kernel.merge[(batch * groups,)](
            *(found, found if gamma is None else gamma, found if beta is None else beta, norm),
            *(channels, pixels, parts, width, groups, eps),
            part_pixels=PART_PIXELS,
            block_c=triton.next_power_of_2(width),
            block_parts=min(MERGED_PARTS, triton.next_power_of_2(parts)),
            has_gamma=gamma is not None,
            has_beta=beta is not None,
            num_warps=1 if parts <= FEW_PARTS else 4,
        )
        group_norm_kernel.apply[(batch * -(-pixels // block_p) * of_channels,)](
            *(x, norm, out, channels, pixels, *steps),
            block_c=block_c,
            block_p=block_p,
            silu=silu,
            num_warps=tile.num_warps,
        )
    return out


def _blocks(tile: NormTile, last: bool, channels: int, pixels: int) -> tuple[int, int]:
    """Channels and pixels of a block: as many side by side as the tile says, where there are."""
    near = min(tile.run, triton.next_power_of_2(channels if last else pixels))
    far = min(tile.elements // near, triton.next_power_of_2(pixels if last else channels))
    block_c, block_p = (near, far) if last else (far, near)
    return block_c, min(block_p, PART_PIXELS)
