"""Attention of packages that a user may have installed: xFormers and flash-attention.

Both take q, k and v as (B, S, H, D) in any strides whose last is 1, and give (B, Sq, H, D).
"""

from __future__ import annotations

from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import optional
from lib_rocm_sd.ops.attention.formula import expand_mask
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import HALVES, Call, Variant, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.lazily import torch
from lib_rocm_sd.ops.on_card import card_refusals

MOST_HEAD_DIM = 256
MOST_TOKENS = 1 << 20
"""From which on xFormers' kernels of Composable Kernel refuse: batch x seq (fmha/ck.py)."""
MASK_STEP = 8
"""Elements of which a mask's rows are multiples, as they lie in memory (fmha/common.py)."""
TRITON_SWITCH = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
INTERFACE = "flash_attn.flash_attn_interface"


class _Library(Variant[AttentionProblem, AttentionInputs]):
    """What both have in common."""

    package: str
    module: str

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        none = card_refusals(arch)
        if none:
            return none
        why = optional.absent(self.package, self.module)
        return [why + self.hint()] if why else self.limits(problem)

    def hint(self) -> str:
        """What a user may do where the package cannot be imported."""
        return ""

    def limits(self, problem: AttentionProblem) -> list[str]:
        """Why the package's kernels do not take such a call."""
        p = problem
        return reasons(
            (p.dtype not in HALVES, f"{p.dtype}: on ROCm it takes fp16 and bf16"),
            (p.head_dim > MOST_HEAD_DIM, f"head_dim {p.head_dim}: it takes up to {MOST_HEAD_DIM}"),
            (p.head_dim % 8, f"head_dim {p.head_dim} is not a multiple of 8"),
        )

    def input_refusals(self, inputs: AttentionInputs) -> list[str]:
        named = zip("qkv", inputs[:3], strict=True)
        far = [name for name, t in named if t.shape[3] > 1 and t.stride(3) != 1]
        found = reasons((far, f"the last stride of {', '.join(far)} is not 1"))
        return found + gradient_refusals(*inputs[:3])


class XformersAttention(_Library):
    """xformers.ops.memory_efficient_attention_forward, by whichever operator xFormers picks: on
    ROCm that of Composable Kernel.
    """

    name = "xformers"
    package, module = "xformers", "xformers.ops"

    def limits(self, problem: AttentionProblem) -> list[str]:
        p = problem
        tokens = p.batch * max(p.seq_q, p.seq_k)
        return super().limits(p) + reasons(
            (tokens >= MOST_TOKENS, f"batch x seq is {tokens}: it takes less than {MOST_TOKENS}"),
        )

    def workspace(self, problem: AttentionProblem) -> int:
        """The mask written out."""
        return 0 if problem.mask == "none" else problem.score_bytes

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        q, k, v, mask, scale = call.inputs
        forward = optional.module(self.module).memory_efficient_attention_forward
        with optional.calling(self.package):
            made: torch.Tensor = forward(q, k, v, attn_bias=_bias(mask, q, k), scale=scale)
        return made.flatten(2)


def _bias(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """The mask as what is added, (B, H, Sq, Sk) in the dtype of q, rows at multiples of 16 bytes.
    A kernel may write into it what it likes.
    """
    if mask is None:
        return None
    full = expand_mask(mask, q, k)
    columns = -(-full.shape[3] // MASK_STEP) * MASK_STEP
    bias = q.new_zeros((*full.shape[:3], columns))[..., : full.shape[3]]
    if full.dtype == torch.bool:
        return bias.masked_fill_(~full, -torch.inf)
    return bias.copy_(full)


class FlashAttention(_Library):
    """flash_attn.flash_attn_func: one of its two sets of kernels, which a process chooses when it
    imports the package. Compiled ones are Composable Kernel's on ROCm; Triton's are taken there
    where FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE was set at the start.
    """

    package, module = "flash_attn", INTERFACE

    def __init__(self, in_triton: bool) -> None:
        self.name = "flash-attention triton" if in_triton else "flash-attention"
        self._in_triton = in_triton

    def hint(self) -> str:
        return f" (on ROCm {TRITON_SWITCH}=TRUE, set at the start, takes its kernels in Triton)"

    def limits(self, problem: AttentionProblem) -> list[str]:
        chosen = bool(getattr(optional.module(self.module), "USE_TRITON_ROCM", False))
        other = "Triton" if chosen else "compiled"
        return super().limits(problem) + reasons(
            (chosen != self._in_triton, f"this process has its {other} kernels: {TRITON_SWITCH}"),
            (problem.mask != "none", f"a {problem.mask} mask: it takes none"),
        )

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        q, k, v, _, scale = call.inputs
        attend: Any = optional.module(self.module).flash_attn_func
        with optional.calling(self.package):
            made: torch.Tensor = attend(q, k, v, softmax_scale=scale)
        return made.flatten(2)


LIBRARIES: tuple[Variant[AttentionProblem, AttentionInputs], ...] = (
    XformersAttention(),
    FlashAttention(in_triton=False),
    FlashAttention(in_triton=True),
)
