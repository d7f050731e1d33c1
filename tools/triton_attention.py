"""lib_rocm_sd/triton_kernels/attention.py, compiled ahead of time: what the machine code of
kernels/attention.hip is compared with. Needs requirements/triton.txt, and no GPU.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.triton_kernels.attention import NO_MASK, TritonConfig, attention, pieces

ENTRY = "attention"
VERSION: str = triton.__version__
POINTERS = ("q", "k", "v", "out", "mask")


class Params(ctypes.Structure):
    """The kernel's arguments; Triton adds the last two. `scale`: times log2(e); no mask is read."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in POINTERS),
        ("q_stride", ctypes.c_int32 * 3),
        ("k_stride", ctypes.c_int32 * 3),
        ("v_stride", ctypes.c_int32 * 3),
        ("mask_stride", ctypes.c_int32 * 4),
        *((name, ctypes.c_int32) for name in ("heads", "seq_q", "seq_k", "q_blocks")),
        ("scale", ctypes.c_float),
        ("global_scratch", ctypes.c_uint64),
        ("profile_scratch", ctypes.c_uint64),
    ]


CONFIGS = tuple(
    TritonConfig(block_m, block_n, num_warps, num_stages)
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


def compiled(arch: Arch, head_dim: int, config: TritonConfig, *, tail: bool, buffers: bool) -> Made:
    """The kernel for fp16, no mask and inputs aligned to 16 bytes, heads cut as on AMD. `buffers`:
    inputs below 2 GiB, which lets it use buffer instructions. Raises CompileError.
    """
    first, rest = pieces(head_dim)
    constants: dict[str, Any] = {"head_dim": head_dim, "first": first, "rest": rest}
    constants |= {"block_m": config.block_m, "block_n": config.block_n}
    constants |= {"kind": NO_MASK, "tail": tail, "fused": True}
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
