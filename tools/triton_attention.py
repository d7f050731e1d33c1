"""Flash attention, forward, in Triton: what the machine code of kernels/attention.hip is compared
with. Needs requirements/triton.txt, and no GPU: code objects are made ahead of time.

Method: Dao, FlashAttention-2 (2023), as Triton's users write it: a program takes `block_m` queries
of one head and walks over the keys, `block_n` at a time, whole tiles first; softmax in base 2.
Tiles of Triton are powers of two, so head_dim 40 takes 64 columns and 80 takes 128.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError

ENTRY = "attention"
VERSION: str = triton.__version__
POINTERS = ("q", "k", "v", "out")


@triton.jit
def add_tile(  # type: ignore[no-untyped-def]
    acc, largest, total, queries, k, v, k_row, v_row, first, seq_k, scale,
    head_dim: tl.constexpr, columns: tl.constexpr, block_n: tl.constexpr, tail: tl.constexpr,
):  # fmt: skip
    """One tile of keys."""
    keys = first + tl.arange(0, block_n)
    column = tl.arange(0, columns)
    k_at = k + keys[None, :] * k_row + column[:, None]
    v_at = v + keys[:, None] * v_row + column[None, :]
    if tail:
        k_tile = tl.load(k_at, (keys[None, :] < seq_k) & (column[:, None] < head_dim), other=0.0)
        v_tile = tl.load(v_at, (keys[:, None] < seq_k) & (column[None, :] < head_dim), other=0.0)
    elif columns != head_dim:
        k_tile = tl.load(k_at, column[:, None] < head_dim, other=0.0)
        v_tile = tl.load(v_at, column[None, :] < head_dim, other=0.0)
    else:
        k_tile = tl.load(k_at)
        v_tile = tl.load(v_at)
    scores = tl.dot(queries, k_tile)
    if tail:
        scores = tl.where(keys[None, :] < seq_k, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.math.exp2(scores * scale - new[:, None])
    shrink = tl.math.exp2(largest - new)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
    return acc, new, total


@triton.jit
def attention(  # type: ignore[no-untyped-def]
    q, k, v, out, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    heads, seq_q, seq_k, q_blocks, scale,
    head_dim: tl.constexpr, columns: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    tail: tl.constexpr,
):  # fmt: skip
    """(B, S, H, D) by strides -> (B, Sq, H * D). `tail`: keys need not be whole tiles."""
    block = tl.program_id(0)
    first_q = block % q_blocks * block_m
    head = block // q_blocks % heads
    batch = block // q_blocks // heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    row = first_q + tl.arange(0, block_m)
    column = tl.arange(0, columns)
    inside = (row[:, None] < seq_q) & (column[None, :] < head_dim)
    queries = tl.load(q + row[:, None] * q_row + column[None, :], inside, other=0.0)
    acc = tl.zeros([block_m, columns], tl.float32)
    largest = tl.full([block_m], float("-inf"), tl.float32)
    total = tl.zeros([block_m], tl.float32)
    whole = seq_k // block_n * block_n
    for first in range(0, whole, block_n):
        acc, largest, total = add_tile(
            acc, largest, total, queries, k, v, k_row, v_row, first, seq_k, scale,
            head_dim, columns, block_n, False,
        )  # fmt: skip
    if tail:  # noqa: SIM102 - decided by the compiler, the other by the kernel
        if whole < seq_k:
            acc, largest, total = add_tile(
                acc, largest, total, queries, k, v, k_row, v_row, whole, seq_k, scale,
                head_dim, columns, block_n, True,
            )  # fmt: skip
    acc = acc / total[:, None]
    at = ((batch * seq_q + row[:, None]) * heads + head) * head_dim + column[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), inside)


class Params(ctypes.Structure):
    """The kernel's arguments; Triton adds the last two. `scale`: times log2(e)."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in POINTERS),
        ("q_stride", ctypes.c_int32 * 3),
        ("k_stride", ctypes.c_int32 * 3),
        ("v_stride", ctypes.c_int32 * 3),
        *((name, ctypes.c_int32) for name in ("heads", "seq_q", "seq_k", "q_blocks")),
        ("scale", ctypes.c_float),
        ("global_scratch", ctypes.c_uint64),
        ("profile_scratch", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Config:
    """Tile sizes, waves and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}, {self.num_warps} waves, {self.num_stages} stages"


CONFIGS = tuple(
    Config(block_m, block_n, num_warps, num_stages)
    for block_m, block_n, num_warps in (
        *((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 64, 4)),
        *((128, 32, 8), (128, 64, 8), (128, 128, 8)),
    )
    for num_stages in (1, 2)
)


@dataclass(frozen=True)
class Made:
    """`lds_bytes`: asked for at launch, above the code object's own."""

    code: bytes
    assembly: str
    lds_bytes: int


def columns_of(head_dim: int) -> int:
    """How many columns of a head the kernel computes with."""
    return max(16, triton.next_power_of_2(head_dim))


def compiled(arch: Arch, head_dim: int, config: Config, *, tail: bool, buffers: bool) -> Made:
    """The kernel for fp16 and inputs aligned to 16 bytes. `buffers`: inputs below
    2 GiB, which lets it use buffer instructions. Raises CompileError.
    """
    sizes = {"head_dim": head_dim, "columns": columns_of(head_dim), "tail": tail}
    constants: dict[str, Any] = {**sizes, "block_m": config.block_m, "block_n": config.block_n}
    signature = {name: _type_of(name, constants) for name in attention.arg_names}
    hints = {
        (place,): _hints(name, head_dim, buffers)
        for place, name in enumerate(attention.arg_names)
        if name in POINTERS or name.endswith(("_batch", "_row", "_head"))
    }
    try:
        with tempfile.TemporaryDirectory(prefix="rocm_sd_") as folder, triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            made = triton.compile(
                ASTSource(attention, signature, constants, hints),
                target=GPUTarget("hip", arch.gfx, arch.wave_size),
                options={"num_warps": config.num_warps, "num_stages": config.num_stages},
            )
            return Made(made.asm["hsaco"], made.asm["amdgcn"], made.metadata.shared)
    except (RuntimeError, triton.CompilationError, triton.OutOfResources) as error:
        raise CompileError("Triton", f"{arch.gfx}, {config}: {error}") from error


def _hints(name: str, head_dim: int, buffers: bool) -> list[list[Any]]:
    """What a caller knows of an argument; of a head's stride more than Triton finds out itself."""
    whole = head_dim % 16 if name.endswith("_head") else 0
    divisible: list[list[Any]] = [["tt.divisibility", 8 if whole else 16]]
    return divisible + ([["tt.pointer_range", 32]] if buffers and name in POINTERS else [])


def _type_of(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    return "*fp16" if name in POINTERS else "fp32" if name == "scale" else "i32"
