"""The gradients of GroupNorm by torch's operators: what runs where no kernel of ours does."""

from __future__ import annotations

from lib_rocm_sd.ops.base import Call, Variant
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.gradients import NormGradients, is_transformed, is_wanted
from lib_rocm_sd.ops.group_norm_backward import formula
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.lazily import torch


class TorchGroupNormBackward(Variant[GroupNormBackwardProblem, GroupNormBackwardInputs]):
    """torch's forward pass again, then its gradients.

    In float32 where gamma or beta are of another dtype, and for halves on the CPU, for which an
    older torch has none. Not by autograd: within an operator nothing is followed. torch's own
    gradients of a GroupNorm cannot be followed: where that is wanted it is the formula.
    """

    name = "torch"

    def workspace(self, problem: GroupNormBackwardProblem) -> int:
        """The forward pass's results, and torch's copies on the way from and to channels-last."""
        return problem.image_bytes * (1 + problem.silu + 2 * problem.channels_last)

    def run(self, call: Call[GroupNormBackwardProblem, GroupNormBackwardInputs]) -> NormGradients:
        problem, inputs = call.problem, call.inputs
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        followed = is_transformed() or is_wanted(*tensors)
        made, *others = formula.reference(*inputs) if followed else _native(problem, inputs)
        order = torch.channels_last if problem.channels_last else torch.contiguous_format
        made = made.to(inputs.x.dtype).contiguous(memory_format=order)
        of_gamma, of_beta = (
            None if t is None else t.to(DTYPES[problem.affine_dtype]) for t in others
        )
        return made, of_gamma, of_beta


def _native(problem: GroupNormBackwardProblem, inputs: GroupNormBackwardInputs) -> NormGradients:
    grad, x, gamma, beta, groups, eps, silu, affine = inputs
    dtype = x.dtype
    if x.device.type == "cpu" or any(t is not None and t.dtype != dtype for t in (gamma, beta)):
        dtype = torch.promote_types(dtype, torch.float32)
    ones = x.new_ones(x.shape[1])
    scale, shift = (ones if gamma is None else gamma), (ones - ones if beta is None else beta)
    upper, values = (t.to(dtype).contiguous() for t in (grad, x))
    scale, shift = scale.to(dtype), shift.to(dtype)
    sizes = (problem.batch, problem.channels, problem.pixels, groups)
    z, mean, rstd = torch.native_group_norm(values, scale, shift, *sizes, eps)
    if silu:
        upper = torch.ops.aten.silu_backward(upper, z)
    wanted = [True, affine, affine]
    made, *others = torch.ops.aten.native_group_norm_backward(
        *(upper, values, mean, rstd, scale, *sizes, wanted)
    )
    return made, *(others if affine else (None, None))
