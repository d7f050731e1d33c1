"""Our kernels in Triton as AMD's machine code, executed. Triton lays them out by itself: groups
have as many waves as there is work for, else waves write the same words.
"""

from __future__ import annotations

import math

import pytest
import torch

from lib_rocm_sd.arch import table
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops.attention.formula import expand_mask, scale_of
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.group_norm.formula import dense
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem

pytest.importorskip("triton", reason="no triton: pip install -r requirements/triton.txt")
pytest.importorskip("tinygrad", reason="no tinygrad, which decodes AMD's instructions")

from lib_rocm_sd.triton_kernels.attention import BOOL, NO_MASK, attention, pieces
from lib_rocm_sd.triton_kernels.group_norm import PART_PIXELS, apply, merge, statistics
from tests.verify.amdgpu import triton_code

CPU = torch.device("cpu")
BLOCK_K, WAVES = 32, 4
SEQUENCES = (
    AttentionProblem(1, 2, 45, 77, 40),
    AttentionProblem(1, 2, 45, 77, 80, "bfloat16", "bool"),
)
IMAGES = (
    GroupNormProblem(2, 40, 33, 35, "bfloat16", True, True, 4, "bfloat16"),
    GroupNormProblem(1, 24, 9, 13, "float16", False, True, 3, "float32"),
)


@pytest.mark.slow
@pytest.mark.parametrize("problem", SEQUENCES, ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201", "gfx942", "gfx90a"])
def test_attention(gfx: str, problem: AttentionProblem) -> None:
    p, arch = problem, table()[gfx]
    inputs = ATTENTION.make_inputs(p, CPU, 1)
    q, k, v, mask, scale = inputs
    block_q = 128 if arch.wave_size == 64 else 64
    first, rest = pieces(p.head_dim)
    out = torch.full((p.batch, p.seq_q, p.heads * p.head_dim), math.nan, dtype=q.dtype)
    kind, given = NO_MASK, out
    steps: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        full = expand_mask(mask, q, k)
        kind, given, steps = BOOL, full.view(torch.uint8), full.stride()
    blocks = -(-p.seq_q // block_q)
    strides = [stride for tensor in (q, k, v) for stride in tensor.stride()[:3]]
    sizes = (p.heads, p.seq_q, p.seq_k, blocks, scale_of(q, scale) * math.log2(math.e))
    constants = {"head_dim": p.head_dim, "first": first, "rest": rest, "block_m": block_q}
    constants |= {"block_n": BLOCK_K, "kind": kind, "tail": True}
    arguments = (q, k, v, out, given, *strides, *steps, *sizes)
    groups = p.batch * p.heads * blocks
    for fused in (False, True) if mask is None else (False,):
        made = {**constants, "fused": fused}
        triton_code.run(arch, attention, arguments, made, groups, WAVES)
        assert relative_error(out, ATTENTION.reference(inputs)) <= ATTENTION.tolerance(p), fused
        out.fill_(math.nan)


@pytest.mark.slow
@pytest.mark.parametrize("problem", IMAGES, ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1201"])
def test_group_norm(gfx: str, problem: GroupNormProblem) -> None:
    p, arch = problem, table()[gfx]
    inputs = GROUP_NORM_SILU.make_inputs(p, CPU, 1)
    gamma, beta, groups, eps, silu = inputs[1:6]
    x, last = dense(inputs.x)
    parts, width = -(-p.pixels // PART_PIXELS), p.channels // p.groups
    found, norm = (torch.full((p.batch, n, p.channels, 2), math.nan) for n in (parts, 1))
    out = torch.full_like(x, math.nan)
    steps = (1, p.channels) if last else (p.pixels, 1)
    block = {"block_c": 32, "block_p": 32}
    sizes, blocks = (p.channels, p.pixels), -(-p.channels // 32)
    triton_code.run(
        *(arch, statistics, (x, found, *sizes, parts, *steps)),
        {"part_pixels": PART_PIXELS, **block},
        *(p.batch * parts * blocks, 1),
    )
    triton_code.run(
        *(arch, merge, (found, gamma, beta, norm, *sizes, parts, width, groups, eps)),
        {
            "part_pixels": PART_PIXELS,
            "block_c": 16,
            "block_parts": 2,
            "has_gamma": True,
            "has_beta": True,
        },
        *(p.batch * groups, 1),
    )
    triton_code.run(
        *(arch, apply, (x, norm, out, *sizes, *steps)),
        {**block, "silu": silu},
        *(p.batch * -(-p.pixels // 32) * blocks, 1),
    )
    error = relative_error(out, GROUP_NORM_SILU.reference(inputs))
    assert error <= GROUP_NORM_SILU.tolerance(p)
