"""Our attention in Triton, with lane layouts of Triton's, runs right in the executor of AMD machine
code: a check of the executor's matrix instructions that owes nothing to kernels/.
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

from lib_rocm_sd.arch import Arch, table
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests.ops.attention.judge import Errors, torchs_own
from tests.verify.simt.attention import draw

pytest.importorskip("triton", reason="no triton: pip install -r requirements/triton.txt")
pytest.importorskip("tinygrad", reason="no tinygrad, which decodes AMD's instructions")

from tests.verify.amdgpu import executor
from tests.verify.amdgpu.memory import Memory
from tools import triton_attention

GPUS = ("gfx1100", "gfx1151", "gfx1201", "gfx942", "gfx90a")


def executable(made: triton_attention.Made, arch: Arch) -> bytes:
    """The same instructions with static LDS, and started as by firmware that preloads no arguments
    into registers, for which the compiler puts loads in front.
    """
    from triton.backends.amd.compiler import HIPBackend

    text = made.assembly
    for pattern, value in (
        (r"(\.amdhsa_group_segment_fixed_size) \d+", made.lds_bytes),
        (r"(\.group_segment_fixed_size:) \d+", made.lds_bytes),
        (r"(\.amdhsa_user_sgpr_kernarg_preload_length) \d+", 0),
    ):
        text = re.sub(pattern, rf"\1 {value}", text)
    code: bytes = HIPBackend.make_hsaco(text, {}, SimpleNamespace(arch=arch.gfx))
    return code


def run(
    arch: Arch,
    code: bytes,
    config: triton_attention.TritonConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, executor.Counts]:
    """(B, Sq, H * D), and what was executed."""
    batch, seq_q, heads, head_dim = q.shape
    out = torch.full((batch, seq_q, heads * head_dim), math.nan, dtype=q.dtype)
    memory = Memory()
    given = (q, k, v, out)
    for name, tensor in zip("qkvo", given, strict=True):
        memory.add_host(tensor.data_ptr(), tensor.untyped_storage().nbytes(), name)
    blocks = -(-seq_q // config.block_m)
    params = triton_attention.Params(
        *(tensor.data_ptr() for tensor in (*given, out)),
        *(tuple(tensor.stride(axis) for axis in (0, 1, 2)) for tensor in (q, k, v)),
        (0, 0, 0, 0),
        *(heads, seq_q, k.shape[1], blocks),
        head_dim**-0.5 * math.log2(math.e),
    )
    grid, block = batch * heads * blocks, config.num_warps * arch.wave_size
    counts = executor.run(code, triton_attention.ENTRY, bytes(params), grid, block, memory)
    return out, counts


def _cases() -> list[tuple[str, int, triton_attention.TritonConfig]]:
    """On CDNA a wave has 32 queries at least; where there are fewer, waves write the same words."""
    found = []
    for gfx in GPUS:
        queries = 128 if gfx in ("gfx942", "gfx90a") else 64
        found += [
            (gfx, 64, triton_attention.TritonConfig(queries, 32, 4, 1)),
            (gfx, 64, triton_attention.TritonConfig(128, 64, 4, 2)),
            (gfx, 40, triton_attention.TritonConfig(queries, 64, 4, 1)),
        ]
    return found


@pytest.mark.parametrize(("gfx", "head_dim", "config"), _cases(), ids=str)
def test_tritons_attention_is_right(
    gfx: str, head_dim: int, config: triton_attention.TritonConfig
) -> None:
    arch = table()[gfx]
    made = triton_attention.compiled(arch, head_dim, config, tail=True, buffers=False)
    q, k, v = draw(AttentionProblem(1, 2, 45, 77, head_dim, "float16", "none"))
    out, _ = run(arch, executable(made, arch), config, q, k, v)
    exact = reference(AttentionInputs(q, k, v))
    ours, theirs = Errors.of(out, exact), Errors.of(torchs_own(q, k, v, None), exact)
    assert ours.largest <= 2 * theirs.largest and ours.rms <= 1.5 * theirs.rms, (ours, theirs)
