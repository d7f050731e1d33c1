"""What of our kernels is executed as machine code.

A file of its own: what the ledger knows of a case hangs on the case and on its judge, not on the
other cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm import kernel as norm_kernel
from lib_rocm_sd.ops.group_norm.problem import FinalizeProblem, GroupNormProblem
from tests.amdgpu.judge import Case

_LENGTHS = ((77, 131), (37, 64), (65, 77), (16, 203), (129, 15))
"""Queries, keys: whole tiles, their neighbours, primes."""


def attention(gfx: str) -> Iterator[Case]:
    """Every config of every usual head_dim, both half types, every kind of mask."""
    arch = by_gfx(gfx)
    assert arch is not None
    turn = 0
    for head_dim in (*attention_kernel.SHIPPED_HEAD_DIMS, 72, 256):
        for index, config in enumerate(attention_kernel.ordered(arch, "float16", head_dim)):
            shipped = index == 0 or config.for_few_keys
            for dtype in attention_kernel.DTYPES[: 2 if shipped else 1]:
                seq_q, seq_k = _LENGTHS[turn % len(_LENGTHS)]
                problem = AttentionProblem(1, 2, seq_q, seq_k, head_dim, dtype, "none")
                layout = "misaligned" if turn % 5 == 4 else "plain"
                yield Case(gfx, "attention", problem, index, layout, turn)
                turn += 1
    for mask in attention_kernel.MASK_KINDS[1:]:
        head_dim = (40, 64, 160, 512)[turn % 4]
        problem = AttentionProblem(1, 2, 33, 77, head_dim, "float16", mask)
        yield Case(gfx, "attention", problem, seed=turn)
        turn += 1


def softmax(gfx: str) -> Iterator[Case]:
    """Rows read twice, rows held in one to sixteen vectors of each work-item."""
    problem = AttentionProblem(1, 1, 3, 131, 512, "float16", "none")
    for keys in (131, 8, 4100, 8200, 20000, 40000):
        yield Case(gfx, "softmax", replace(problem, seq_k=keys))
    yield Case(gfx, "softmax", replace(problem, seq_k=1024, dtype="bfloat16"))


def conv(gfx: str) -> Iterator[Case]:
    """Every form and config that Stable Diffusion's VAE launches, and bfloat16."""
    arch = by_gfx(gfx)
    assert arch is not None
    for statistics in (True, False):
        for problem in _conv_problems(statistics):
            for index in range(len(MatrixConv(problem.kind).configs(arch, problem))):
                yield Case(gfx, "conv", problem, index, seed=index)
    wide = ConvProblem("3x3", 1, 9, 33, 32, 3, "float16", True)
    for problem in (wide, replace(wide, out_channels=8, width=5)):
        yield Case(gfx, "conv", problem)
    half = ConvProblem("3x3", 2, 9, 19, 16, 24, "bfloat16")
    yield Case(gfx, "conv", half)
    yield Case(gfx, "conv", replace(half, in_channels=64, norm=True, statistics=True))
    yield Case(gfx, "conv", replace(half, kind="upsample", in_channels=32, height=3))
    yield Case(gfx, "conv", replace(half, kind="3x3 stride 2", out_channels=40, height=10))


def _conv_problems(statistics: bool) -> Iterator[ConvProblem]:
    plain = ConvProblem("3x3", 1, 9, 18, 16, 48, "float16", statistics=statistics)
    yield plain
    yield replace(plain, kind="3x3 stride 2", height=10, in_channels=32, width=20)
    yield replace(plain, kind="upsample", height=5, in_channels=32)
    normed = replace(plain, norm=True, in_channels=64)
    yield normed
    yield replace(normed, shortcut="identity", shortcut_channels=48)
    yield replace(normed, shortcut="conv", shortcut_channels=32)
    for channels in (128, 256):
        # A wide input of the shortcut, over which the output is written.
        yield ConvProblem(
            *("3x3", 1, 3, 18, 32, channels, "float16", True, "conv"),
            *(channels + 32, statistics, True),
        )


def finish(gfx: str) -> Iterator[Case]:
    """The passes around a library's convolution."""
    for problem in (
        ConvProblem("3x3", 2, 9, 19, 16, 24),
        ConvProblem("3x3", 1, 9, 17, 32, 64, "bfloat16", True, "identity", 64, True),
        ConvProblem("3x3", 2, 5, 18, 64, 32, "float16", True, "conv", 48, True),
        ConvProblem("upsample", 2, 5, 17, 32, 32, "float16", statistics=True),
    ):
        yield Case(gfx, "finish", problem)


def group_norm(gfx: str) -> Iterator[Case]:
    """Both layouts and half types with and without SiLU, and every config."""
    last = GroupNormProblem(1, 40, 19, 37, "float16", True, True, 8, "float16")
    first = GroupNormProblem(1, 6, 61, 127, "float16", False, True, 2, "float32")
    for problem in (last, first):
        for dtype in norm_kernel.DTYPES:
            yield Case(gfx, "group norm", replace(problem, dtype=dtype))
            yield Case(gfx, "group norm", replace(problem, dtype=dtype, silu=False))
        for index in (1, 2):
            yield Case(gfx, "group norm", replace(problem, width=67), index)
            yield Case(gfx, "group norm", replace(problem, width=67, silu=False), index)
    for index in range(3):  # so many parts that they are merged first
        yield Case(gfx, "finalize", FinalizeProblem(2, 2100, 64, 16), index)


ALL = {
    "attention": attention,
    "softmax": softmax,
    "conv": conv,
    "finish": finish,
    "group norm": group_norm,
}


def shipped_specs(gfx: str) -> set[KernelSpec]:
    """All that is compiled ahead or searched for a GPU."""
    arch = by_gfx(gfx)
    assert arch is not None
    found: set[KernelSpec] = set()
    for module in (attention_kernel, conv_kernel, norm_kernel):
        found |= {*module.shipped_specs(arch), *module.searched_specs(arch)}
    return found
