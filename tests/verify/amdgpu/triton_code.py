"""Kernels of lib_rocm_sd/triton_kernels as AMD machine code, executed. Needs Triton."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lib_rocm_sd.arch import Arch
from tests.verify.amdgpu import executor
from tests.verify.amdgpu.memory import Memory
from tests.verify.amdgpu.test_amdgpu_triton import executable
from tools.triton_attention import Made

TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
TYPES |= {torch.uint8: "*u8"}
SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def run(
    arch: Arch,
    kernel: Any,
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    groups: int,
    warps: int,
    stages: int = 1,
) -> executor.Counts:
    """Compile `kernel` for these arguments and execute it; tensors lie in this process's memory."""
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(arguments)
    types = {name: _type(item) for name, item in zip(names, arguments, strict=True)}
    ones = {
        name for name, item in zip(names, arguments, strict=True) if _is_one(kernel, name, item)
    }
    fixed = {**constants, **dict.fromkeys(ones, 1)}
    signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
    with tempfile.TemporaryDirectory(prefix="rocm_sd_") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        made = triton.compile(
            ASTSource(kernel, signature, fixed, _hints(kernel, types)),
            target=GPUTarget("hip", arch.gfx, arch.wave_size),
            options={"num_warps": warps, "num_stages": stages},
        )
    code = Made(made.asm["hsaco"], made.asm["amdgcn"], made.metadata.shared)
    memory, known = Memory(), set()
    packed: list[tuple[str, Any, Any]] = []
    for name, item in zip(names, arguments, strict=True):
        if isinstance(item, torch.Tensor):
            if item.data_ptr() not in known:  # what stands for an absent one is another one
                memory.add_host(item.data_ptr(), item.untyped_storage().nbytes(), name)
            known.add(item.data_ptr())
            packed.append((name, ctypes.c_uint64, item.data_ptr()))
        elif name not in ones:
            packed.append((name, SCALARS[types[name]], item))
    packed += [("global_scratch", ctypes.c_uint64, 0), ("profile_scratch", ctypes.c_uint64, 0)]
    fields = [(name, kind) for name, kind, _ in packed]
    params = type("Params", (ctypes.Structure,), {"_fields_": fields})
    values = bytes(params(*(value for _, _, value in packed)))
    entry = kernel.fn.__name__
    return executor.run(
        executable(code, arch), entry, values, groups, warps * arch.wave_size, memory
    )


def _type(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return TYPES[item.dtype]
    return "fp32" if isinstance(item, float) else "i32"


def _is_one(kernel: Any, name: str, item: Any) -> bool:
    """Triton takes an integer of 1 as a constant, as its launcher does."""
    plain = {kernel.params[place].name for place in _unspecialised(kernel)}
    return isinstance(item, int) and item == 1 and name not in plain


def _unspecialised(kernel: Any) -> list[int]:
    return [place for place, each in enumerate(kernel.params) if each.do_not_specialize]


def _hints(kernel: Any, types: Mapping[str, str]) -> dict[tuple[int], list[list[Any]]]:
    """Tensors begin at multiples of 16 bytes."""
    return {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*")
    }
