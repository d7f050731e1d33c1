"""What else a user could pick, each as a variant beside the op's own: for benchmarks only."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.bench.methods import METHODS
from lib_rocm_sd.engine.selftest import FAILURES, describe
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionInputs, AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention
from lib_rocm_sd.ops.base import Launch, Variant, reasons

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
"""Of scaled_dot_product_attention: torch's name of each in SDPBackend."""
TRITON_RUN = "lib_rocm_sd.bench.attention.triton_run"
UNMASKED = "written for the comparison, without masks"


class SdpaBackend(SdpaAttention):
    """torch's scaled_dot_product_attention with all of its backends but one forbidden."""

    preference = 0

    def __init__(self, backend: str) -> None:
        self.name = f"sdpa {backend}"
        self._backend = BACKENDS[backend]

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        module = _sdpa_module()
        if module is None:
            return [f"torch {torch.__version__} has no torch.nn.attention.sdpa_kernel: 2.3 has"]
        missing = not hasattr(module.SDPBackend, self._backend)
        return reasons((missing, f"torch {torch.__version__} has no {self._backend} backend"))

    def run(
        self,
        launch: Launch | None,
        config: None,
        problem: AttentionProblem,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        module = _sdpa_module()
        with module.sdpa_kernel(getattr(module.SDPBackend, self._backend)):
            return super().run(launch, config, problem, inputs)


def _sdpa_module() -> Any:
    """torch.nn.attention, where it can choose a backend."""
    try:
        module = importlib.import_module("torch.nn.attention")
    except ImportError:
        return None
    return module if hasattr(module, "sdpa_kernel") and hasattr(module, "SDPBackend") else None


class XformersAttention(Variant[AttentionProblem, AttentionInputs]):
    """xformers' memory_efficient_attention, whichever of its operators it picks."""

    name = "xformers"

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        return _not_installed("xformers", "xformers.ops") or reasons(
            (problem.mask != "none", UNMASKED)
        )

    def run(
        self,
        launch: Launch | None,
        config: None,
        problem: AttentionProblem,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        ops = importlib.import_module("xformers.ops")
        q, k, v, _, scale = inputs
        return ops.memory_efficient_attention(q, k, v, scale=scale).flatten(2)  # type: ignore[no-any-return]


class TritonAttention(Variant[AttentionProblem, AttentionInputs]):
    """The kernel of Triton's tutorial as its users write it; of its configs the fastest counts."""

    name = "triton tutorial-like"

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        return _not_installed("triton", TRITON_RUN) or reasons(
            (problem.mask != "none", UNMASKED),
            (problem.dtype not in ("float16", "bfloat16"), f"{problem.dtype}: it takes halves"),
        )

    def configs(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[Any]:
        return _triton().configs(problem.head_dim)  # type: ignore[no-any-return]

    def run(
        self,
        launch: Launch | None,
        config: Any,
        problem: AttentionProblem,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        q, k, v, _, scale = inputs
        return _triton().run(config, q, k, v, scale)  # type: ignore[no-any-return]


def _triton() -> Any:
    """Imported where it is called: it needs Triton."""
    return importlib.import_module(TRITON_RUN)


def _not_installed(package: str, module: str) -> list[str]:
    """Why `module`, which needs `package`, cannot be imported."""
    if importlib.util.find_spec(package) is None:
        return [f"{package} is not installed"]
    try:
        importlib.import_module(module)
    except (ImportError, *FAILURES) as error:
        return [f"{package} cannot be used: {describe(error)}"]
    return []


COMPETITORS: tuple[Variant[AttentionProblem, AttentionInputs], ...] = (
    *(variant for variant in ATTENTION.variants if not variant.ours),
    *(SdpaBackend(backend) for backend in BACKENDS),
    *METHODS,
    XformersAttention(),
    TritonAttention(),
)
"""All that is not ours."""
