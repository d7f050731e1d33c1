"""Attention through a score matrix: two matrix products of torch's, a softmax of ours between them.

For the VAE's mid-block, whose one head of 512 is too large for a fused kernel to be fast: slices of
the matrix stay in the cache of a large GPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, KernelSpec, Launch, Variant, halves_only, reasons
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.lazily import is_there, torch

THREADS = 1024
MOST_HELD = 16
"""Vectors of four scores that a work-item keeps in registers."""
SLICE_BYTES = 128 << 20
"""Float32 scores held at a time; half as many bytes of weights beside them."""
LEAST_ROWS = 64
LOG2_E = math.log2(math.e)


class SoftmaxParams(ctypes.Structure):
    """The one argument of softmax_rows; the same struct stands in softmax.hip."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("scores", "weights", "sums")),
        ("keys", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    ]


@cache
def softmax_spec(dtype: str, held: int) -> KernelSpec:
    """The kernel for weights in one half type; `held`: see softmax.hip."""
    defines = {"BF16_HALVES": int(dtype == "bfloat16"), "THREADS": THREADS, "HELD": held}
    return KernelSpec("softmax.hip", "softmax_rows", tuple(defines.items()))


def held_of(keys: int) -> int:
    """Vectors of a row of `keys` that each work-item holds, a power of two; 0: read it twice."""
    vectors = -(-keys // (4 * THREADS))
    if keys % 4 or vectors > MOST_HELD:
        return 0
    return 1 << (vectors - 1).bit_length()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32, of halves."""
    if a.device.type == "cpu":
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[call-overload, no-any-return]


def _gives_float32() -> bool:
    """True where torch's matrix product of halves can give float32: 2.8 and newer."""
    return not is_there() or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


class ScoresAttention(Variant[AttentionProblem, AttentionInputs]):
    """torch's matrix products around kernels/softmax.hip."""

    name = "torch + rocm_sd"
    ours = True
    preference = 15

    def refusals(self, arch: Arch | None, problem: AttentionProblem) -> list[str]:
        if arch is None:
            return ["no supported GPU"]
        p = problem
        return reasons(
            halves_only(p.dtype),
            (p.mask != "none", "it takes no mask"),
            (p.head_dim <= 256, f"head_dim {p.head_dim}: fused kernels are faster up to 256"),
            (not _gives_float32(), "this torch has no float32 product of halves (2.8 and newer)"),
        )

    def input_refusals(self, inputs: AttentionInputs) -> list[str]:
        return gradient_refusals(*inputs[:3])

    @staticmethod
    def slice_rows(problem: AttentionProblem) -> int:
        """Queries per slice."""
        rows = max(SLICE_BYTES // (4 * max(problem.seq_k, 1)), LEAST_ROWS)
        return min(rows // 64 * 64, max(problem.seq_q, 1))

    def workspace(self, problem: AttentionProblem) -> int:
        return self.slice_rows(problem) * (6 * problem.seq_k + 8 * problem.head_dim)

    def specs(self, arch: Arch, problem: AttentionProblem, config: None) -> Sequence[KernelSpec]:
        return (softmax_spec(problem.dtype, held_of(problem.seq_k)),)

    def run(self, call: Call[AttentionProblem, AttentionInputs]) -> torch.Tensor:
        launch = call.launcher
        q, k, v, _, scale = call.inputs
        batch, seq_q, heads, head_dim = q.shape
        out = q.new_empty((batch, seq_q, heads, head_dim))
        rows = self.slice_rows(call.problem)
        factor = (head_dim**-0.5 if scale is None else scale) * LOG2_E
        for b in range(batch):
            for h in range(heads):
                keys, values = k[b, :, h].T, v[b, :, h]
                for first in range(0, seq_q, rows):
                    part = q[b, first : first + rows, h]
                    out[b, first : first + rows, h] = _slice(launch, part, keys, values, factor)
        return out.flatten(2)


def _slice(
    launch: Launch, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, factor: float
) -> torch.Tensor:
    """(rows, D) float32 for q (rows, D), keys (D, Sk) and values (Sk, D)."""
    scores = product(q, keys)
    weights = torch.empty_like(scores, dtype=q.dtype)
    sums = scores.new_empty((scores.shape[0], 1))
    params = SoftmaxParams(
        *(scores.data_ptr(), weights.data_ptr(), sums.data_ptr()), scores.shape[1], factor
    )
    spec = softmax_spec(DTYPE_NAMES[q.dtype], held_of(scores.shape[1]))
    launch(spec, scores.shape[0], THREADS, params, q.device)
    del scores
    return product(weights, values).div_(sums)
