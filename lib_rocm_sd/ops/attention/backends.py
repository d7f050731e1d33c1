"""The backends of torch's scaled_dot_product_attention, one by one.

torch picks one by rules of its own. On ROCm flash and efficient are both AOTriton's kernels, which
know few GPUs, and others only where TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 was set at the start
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.5 and later).
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.base import Call, reasons
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.lazily import torch
from lib_rocm_sd.ops.on_card import card_refusals

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
        known = hasattr(torch.backends.cuda, "sdp_kernel") and backend in OLD_SWITCHES
    else:
        known = hasattr(module.SDPBackend, BACKENDS[backend])
    return reasons(
        (not known, f"torch {torch.__version__} has no switch for {backend} attention"),
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
    said = dict.fromkeys(_words(str(each.message)) for each in heard)
    told = [words for words in said if words and "not used because" not in words]
    return (_refused(backend, told),)


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
            given = {argument: name in allowed for name, argument in OLD_SWITCHES.items()}
            with torch.backends.cuda.sdp_kernel(**given):
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
    known = hasattr(module, "sdpa_kernel") and hasattr(module, "SDPBackend")
    return module if known else None
