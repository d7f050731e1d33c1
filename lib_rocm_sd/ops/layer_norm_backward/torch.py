"""The gradients of LayerNorm by torch's operators: what runs where no kernel of ours does."""

from __future__ import annotations

from lib_rocm_sd.ops.base import Call, Variant
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.gradients import NormGradients
from lib_rocm_sd.ops.layer_norm_backward.inputs import LayerNormBackwardInputs
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from lib_rocm_sd.ops.lazily import torch


class TorchLayerNormBackward(Variant[LayerNormBackwardProblem, LayerNormBackwardInputs]):
    """torch's forward pass again, for mean and scale, then its gradients, which can be followed.

    In float32 where gamma is of another dtype, and for halves on the CPU, for which an older torch
    has none. Not by autograd: within an operator nothing is followed.
    """

    name = "torch"

    def workspace(self, problem: LayerNormBackwardProblem) -> int:
        """The forward pass's results."""
        return problem.tensor_bytes * (1 + problem.added)

    def run(self, call: Call[LayerNormBackwardProblem, LayerNormBackwardInputs]) -> NormGradients:
        problem = call.problem
        grad, x, gamma, eps, added, sum_grad, affine = call.inputs
        total, shape = x if added is None else x + added, x.shape[-1:]
        dtype = x.dtype
        if x.device.type == "cpu" or DTYPES[problem.affine_dtype] != x.dtype:
            dtype = torch.promote_types(x.dtype, torch.float32)
        if gamma is None:
            gamma = x.new_ones(shape)
        upper, values, scale = (t.to(dtype) for t in (grad, total, gamma))
        _, mean, rstd = torch.native_layer_norm(values, shape, None, None, eps)
        made, *others = torch.ops.aten.native_layer_norm_backward(
            *(upper, values, shape, mean, rstd, scale, torch.zeros_like(scale)),
            [True, affine, affine],
        )
        made = made.to(x.dtype).contiguous()
        if sum_grad is not None:
            made = made + sum_grad
        if not affine:
            return made, None, None
        of_gamma, of_beta = (t.to(DTYPES[problem.affine_dtype]) for t in others)
        return made, of_gamma, of_beta
