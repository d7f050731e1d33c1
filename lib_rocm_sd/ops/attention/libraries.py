"""Attention of packages that a user may have installed: xFormers and flash-attention.

Both take q, k and v as (B, S, H, D) in any strides whose last is 1, and give (B, Sq, H, D).
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops import optional
from lib_rocm_sd.ops.attention.formula import expand_mask, scale_of
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.base import HALVES, Call, Variant, halves_only, reasons
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.lazily import torch
from lib_rocm_sd.ops.optional import TRITON, card_refusals, triton_refusals

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
        tensors = zip("qkv", inputs[:3], strict=True)
        far = [name for name, t in tensors if t.shape[3] > 1 and t.stride(3) != 1]
        refusals = reasons((far, f"the last stride of {', '.join(far)} is not 1"))
        return refusals + gradient_refusals(*inputs[:3])


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
            output: torch.Tensor = forward(q, k, v, attn_bias=_bias(mask, q, k), scale=scale)
        return output.flatten(2)


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
        triton = bool(getattr(optional.module(self.module), "USE_TRITON_ROCM", False))
        other = "Triton" if triton else "compiled"
        return super().limits(problem) + reasons(
            (triton != self._in_triton, f"this process has its {other} kernels: {TRITON_SWITCH}"),
            (problem.mask != "none", f"a {problem.mask} mask: it takes none"),
        )

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        q, k, v, _, scale = call.inputs
        attend: Any = optional.module(self.module).flash_attn_func
        with optional.calling(self.package):
            output: torch.Tensor = attend(q, k, v, softmax_scale=scale)
        return output.flatten(2)


LIBRARIES: tuple[Variant[AttentionProblem, AttentionInputs], ...] = (
    XformersAttention(),
    FlashAttention(in_triton=False),
    FlashAttention(in_triton=True),
)


# The backends of torch's scaled_dot_product_attention, one by one.
#
# torch picks one by rules of its own. On ROCm flash and efficient are both AOTriton's kernels,
# which know few GPUs, and others only where TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 was set at
# the start (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.5 and later).


BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
"""torch's name of each in SDPBackend."""
OLD_SWITCHES = {"flash": "enable_flash", "efficient": "enable_mem_efficient", "math": "enable_math"}
"""Arguments of torch.backends.cuda.sdp_kernel, which torch before 2.3 has."""
BY_AOTRITON = ("flash", "efficient")
EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
MOST_SCORE_BYTES = 1 << 30
"""Most bytes of scores with which the math backend is measured. It holds them twice or more, and
measuring it is not worth more memory.
"""
MOST_WORDS = 200
"""Characters of what torch says."""
_switches = threading.Lock()
"""torch's switches are the process's: of two threads that change them and put them back in turn,
one would leave what the other had set."""


class SdpaBackend(SdpaAttention):
    """torch's scaled_dot_product_attention by one of its backends.

    While it is called another thread's call sees the switches too. So math, torch's last choice,
    stays allowed where torch can be asked first whether it would take the backend.
    """

    preference = 0

    def __init__(self, backend: str) -> None:
        self.name = f"sdpa {backend}"
        self.backend = backend

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        why = card_refusals(arch) or switch_refusals(self.backend)
        if why:
            return why
        large = self.backend == "math" and problem.score_bytes > MOST_SCORE_BYTES
        if large:
            return [f"its scores would take {problem.score_bytes >> 20} MiB, and more"]
        return list(torchs_refusals(self.backend, problem, torch.cuda.current_device()))

    def input_refusals(self, inputs: AttentionInputs) -> list[str]:
        return gradient_refusals(*inputs[:3])

    def workspace(self, problem: AttentionProblem) -> int:
        return super().workspace(problem) if self.backend == "math" else 0

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        with only(self.backend):
            return super().run(call)


def switch_refusals(backend: str) -> list[str]:
    """Why this torch cannot be told to take `backend`."""
    module = _module()
    if module is None:
        has_switch = hasattr(torch.backends.cuda, "sdp_kernel") and backend in OLD_SWITCHES
    else:
        has_switch = hasattr(module.SDPBackend, BACKENDS[backend])
    return reasons(
        (not has_switch, f"torch {torch.__version__} has no switch for {backend} attention"),
        (
            backend == "cudnn" and torch.version.hip is not None,
            "cuDNN is NVIDIA's: there is none on ROCm",
        ),
    )


@lru_cache(maxsize=1024)
def torchs_refusals(backend: str, problem: AttentionProblem, device: int) -> tuple[str, ...]:
    """Why torch would not take `backend` for such a call on the current card, in its own words.

    Empty too where this torch cannot be asked; the self-test decides then.
    """
    ask = _asker(backend)
    if ask is None:
        return ()
    if backend == "flash" and not _has_flash():
        library = "AOTriton" if torch.version.hip else "FlashAttention"
        return (f"this torch was built without {library}",)
    params = _params(problem)
    if params is None:
        return ()
    with warnings.catch_warnings(record=True) as heard, only(backend):
        warnings.simplefilter("always")
        if ask(params, False):
            return ()
        ask(params, True)  # again, to be told why
    notes = dict.fromkeys(_words(str(each.message)) for each in heard)
    why = [words for words in notes if words and "not used because" not in words]
    return (_refused(backend, why),)


def _refused(backend: str, told: list[str]) -> str:
    why = f"torch does not take it: {'; '.join(told) or 'it does not say why'}"[:MOST_WORDS]
    unset = os.environ.get(EXPERIMENTAL) != "1"
    if backend in BY_AOTRITON and torch.version.hip and unset:
        return f"{why}. On ROCm it is AOTriton's, for some cards only with {EXPERIMENTAL}=1"
    return why


def _words(message: str) -> str:
    """A warning of torch's without the place in its source."""
    return " ".join(message.split(" (Triggered internally")[0].split())


def _asker(backend: str) -> Callable[[Any, bool], bool] | None:
    """What tells whether torch can take `backend`; math it always can."""
    return getattr(torch.backends.cuda, f"can_use_{backend}_attention", None)


def _has_flash() -> bool:
    ask = getattr(torch.backends.cuda, "is_flash_attention_available", None)
    return ask is None or bool(ask())


def _params(problem: AttentionProblem) -> Any:
    """The call that `problem` is, without values; None where this torch wants something else."""
    make = getattr(torch.backends.cuda, "SDPAParams", None)
    if make is None:
        return None
    p, mask, dtype = problem, None, DTYPES[problem.dtype]
    q, k, v = (
        torch.empty((p.batch, seq, p.heads, p.head_dim), dtype=dtype, device="cuda").transpose(1, 2)
        for seq in (p.seq_q, p.seq_k, p.seq_k)
    )
    if p.mask != "none":
        mask = torch.empty(p.seq_k, dtype=torch.bool if p.mask == "bool" else dtype, device="cuda")
        mask = mask.expand(p.batch, p.heads, p.seq_q, p.seq_k)
    for further in ((False,), ()):
        try:  # enable_gqa came with torch 2.5
            return make(q, k, v, mask, 0.0, False, *further)
        except TypeError:
            continue
    return None


@contextmanager
def only(backend: str) -> Iterator[None]:
    """Within this, `backend` is what torch takes, and math where it may not; as before after it."""
    allowed = {backend, "math"} if _asker(backend) else {backend}
    module = _module()
    with _switches:
        if module is None:
            switches = {argument: name in allowed for name, argument in OLD_SWITCHES.items()}
            with torch.backends.cuda.sdp_kernel(**switches):
                yield
            return
        with module.sdpa_kernel([getattr(module.SDPBackend, BACKENDS[name]) for name in allowed]):
            yield


def _module() -> Any:
    """torch.nn.attention, where it can choose a backend: torch 2.3 and later."""
    try:
        module = importlib.import_module("torch.nn.attention")
    except ImportError:
        return None
    is_new = hasattr(module, "sdpa_kernel") and hasattr(module, "SDPBackend")
    return module if is_new else None


# Attention by our kernel in Triton, where Triton is installed.


MASKS = ("none", "bool", "float16", "bfloat16", "float32")
REACH = 1 << 31
"""Elements from the first of a head to one that 32 bits do not count."""


class TritonAttention(Variant[AttentionProblem, AttentionInputs]):
    """triton_kernels/attention.py. Triton compiles it on this machine when it is first called."""

    name = "triton"
    untried = True

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        p = problem
        return triton_refusals(arch) or reasons(
            halves_only(p.dtype),
            (p.mask not in MASKS, f"a {p.mask} mask: it takes {', '.join(MASKS[1:])}"),
            (p.head_dim > MOST_HEAD_DIM, f"head_dim {p.head_dim}: it takes up to {MOST_HEAD_DIM}"),
            (p.seq_q * p.heads * p.head_dim >= REACH, f"{p.seq_q} queries are too many"),
        )

    def input_refusals(self, inputs: AttentionInputs) -> list[str]:
        q, k, v, mask, _ = inputs
        tensors = [("q", q), ("k", k), ("v", v)]
        far = [name for name, t in tensors if t.shape[3] > 1 and t.stride(3) != 1]
        long = [name for name, t in tensors if (t.shape[1] - 1) * t.stride(1) + t.shape[3] >= REACH]
        if mask is not None:
            full = expand_mask(mask, q, k)
            last = sum((full.shape[axis] - 1) * full.stride(axis) for axis in (2, 3))
            long += ["the mask"] if last >= REACH else []
        return reasons(
            (far, f"the last stride of {', '.join(far)} is not 1"),
            (long, f"a head of {', '.join(long)} reaches over 2^31 elements"),
        ) + gradient_refusals(*inputs[:4])

    def configs(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[Any]:
        if optional.absent(*TRITON):
            return (None,)
        configs: Sequence[Any] = optional.module(TRITON[1]).attention_configs(problem.head_dim)
        return configs

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        q, k, v, mask, scale = call.inputs
        full = None if mask is None else expand_mask(mask, q, k)
        output: torch.Tensor = optional.module(TRITON[1]).attention(
            call.config, q, k, v, full, scale_of(q, scale)
        )
        return output
