"""The gradients of attention by our kernel: deterministic, without the scores in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention.formula import expand_mask, scale_of
from lib_rocm_sd.ops.attention.kernel import MASK_KINDS
from lib_rocm_sd.ops.attention.ours import LARGEST_ROW_STRIDE
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import kernel
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.attention_backward.kernel import BackwardConfig, BackwardParams
from lib_rocm_sd.ops.base import Call, KernelSpec, halves_only, one_launch, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.lazily import torch

LOG2_E = math.log2(math.e)


class MatrixBackward(KernelVariant[AttentionProblem, AttentionBackwardInputs]):
    """kernels/attention_backward.hip, two launches."""

    def kernel_refusals(self, arch: Arch, problem: AttentionProblem) -> list[str]:
        p = problem
        refusals = kernel.head_dim_refusals(p.head_dim)
        items = 0 if refusals else max(self._items(p, config) for config in self.configs(arch, p))
        return refusals + reasons(
            halves_only(p.dtype),
            (
                p.mask not in MASK_KINDS,
                f"a {p.mask} mask: the kernel takes bool, fp16, bf16 and float32",
            ),
            (
                arch.matrix == "dot2" and p.dtype == "bfloat16" and p.head_dim > 160,
                f"head_dim {p.head_dim} in bfloat16 spills registers on {arch.family}",
            ),
            (max(p.seq_q, p.seq_k) > 1 << 30, "more than 2^30 queries or keys"),
            one_launch(items),
        )

    @staticmethod
    def _items(p: AttentionProblem, config: BackwardConfig) -> int:
        return max(
            _tiles(p, name, config) * p.batch * p.heads * config.block(name)
            for name in kernel.PASSES
        )

    def input_refusals(self, inputs: AttentionBackwardInputs) -> list[str]:
        tensors = (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
        strides = reasons(
            *(
                (t.shape[3] > 1 and t.stride(3) != 1, f"the last stride of {name} is not 1")
                for name, t in tensors
            )
        )
        return strides + gradient_refusals(*inputs)

    def configs(self, arch: Arch | None, problem: AttentionProblem) -> Sequence[BackwardConfig]:
        return kernel.configs(arch, problem.head_dim) if arch else ()

    def workspace(self, problem: AttentionProblem) -> int:
        """A number of each query."""
        return 4 * problem.batch * problem.heads * problem.seq_q

    def specs(
        self, arch: Arch, problem: AttentionProblem, config: BackwardConfig
    ) -> Sequence[KernelSpec]:
        p = problem
        return kernel.specs(p.dtype, p.head_dim, p.mask, config)

    def run(self, call: Call[AttentionProblem, AttentionBackwardInputs]) -> Grads:
        config, inputs = call.config, call.inputs
        p, q = call.problem, inputs.q
        out, grad = (
            t if t.stride(2) == 1 or t.shape[2] == 1 else t.contiguous()
            for t in (inputs.output, inputs.grad)
        )
        heads = [*inputs[:3], *(t.unflatten(2, (p.heads, p.head_dim)) for t in (out, grad))]
        mask = None if inputs.mask is None else expand_mask(inputs.mask, q, inputs.k)
        lse = inputs.lse.contiguous()
        delta = torch.empty_like(lse)
        gradients = tuple(t.new_empty(t.shape) for t in inputs[:3])
        params = _params(p, heads, mask, scale_of(q, inputs.scale))
        params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
        params.q_grad, params.k_grad, params.v_grad = (t.data_ptr() for t in gradients)
        for name in kernel.PASSES:
            params.tiles = _tiles(p, name, config)
            spec = kernel.spec(p.dtype, p.head_dim, p.mask, name, config)
            call.launcher(
                spec, params.tiles * p.batch * p.heads, config.block(name), params, q.device
            )
        return gradients  # type: ignore[return-value]


def _tiles(p: AttentionProblem, name: str, config: BackwardConfig) -> int:
    """Work-groups of each head."""
    own = p.seq_k if name == "keys" else p.seq_q
    return -(-own // config.of(name).rows)


def _params(
    p: AttentionProblem, heads: Sequence[torch.Tensor], mask: torch.Tensor | None, scale: float
) -> BackwardParams:
    """The kernel's arguments but for what it writes. `heads`: q, k, v, out and grad by heads."""
    params = BackwardParams()
    for name, tensor in zip(("q", "k", "v", "out", "grad"), heads, strict=True):
        setattr(params, name, tensor.data_ptr())
        getattr(params, f"{name}_stride")[:] = tensor.stride()[:3]
    if mask is not None:
        params.mask = mask.data_ptr()
        params.mask_stride[:] = mask.stride()
    params.heads, params.seq_q, params.seq_k = p.heads, p.seq_q, p.seq_k
    params.scale, params.scale2 = scale, scale * LOG2_E
    params.aligned = all(_aligned(tensor) for tensor in heads)
    return params


def _aligned(tensor: torch.Tensor) -> bool:
    """True when every row starts at a multiple of 16 bytes, and the rows of a tile are not further
    apart than 32 bits can say (tile.h).
    """
    bits = tensor.data_ptr()
    for stride in tensor.stride()[:3]:
        bits |= stride * 2
    return bits % 16 == 0 and tensor.stride(1) <= LARGEST_ROW_STRIDE
