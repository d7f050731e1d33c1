"""The gradients of attention by torch's operators: what runs where no kernel of ours does."""

from __future__ import annotations

from lib_rocm_sd.ops.attention.formula import expand_mask, scale_of
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SdpaAttention, SlicedAttention
from lib_rocm_sd.ops.attention_backward.formula import by_heads, formula, grads_of
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from lib_rocm_sd.ops.base import Call, Variant
from lib_rocm_sd.ops.lazily import torch


class FormulaBackward(Variant[AttentionProblem, AttentionBackwardInputs]):
    """The formula in float32 or wider, with all scores at once: what can be traced, and what has
    gradients itself.
    """

    name = "formula"
    derives = True
    preference = 5

    def workspace(self, problem: AttentionProblem) -> int:
        return 4 * problem.batch * problem.heads * problem.seq_q * problem.seq_k * 4

    def run(self, call: Call[AttentionProblem, AttentionBackwardInputs]) -> Grads:
        inputs = call.inputs
        gradients = formula(inputs, torch.promote_types(inputs.q.dtype, torch.float32))
        of_q, of_k, of_v = (t.to(inputs.q.dtype).contiguous() for t in gradients)
        return of_q, of_k, of_v


class SdpaBackward(Variant[AttentionProblem, AttentionBackwardInputs]):
    """torch's scaled_dot_product_attention once more, and its own gradients."""

    name = "sdpa"
    preference = 10

    def workspace(self, problem: AttentionProblem) -> int:
        """The score matrix and its gradient: torch holds them where it has no fused backend."""
        return 2 * problem.score_bytes

    def run(self, call: Call[AttentionProblem, AttentionBackwardInputs]) -> Grads:
        problem, inputs = call.problem, call.inputs
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [_leaf(t) for t in inputs[:3]]
            mask = inputs.mask
            mask = mask.clone() if mask is not None and mask.is_inference() else mask
            again = AttentionInputs(leaves[0], leaves[1], leaves[2], mask, inputs.scale)
            output = SdpaAttention().run(Call(problem, again))
            grad = inputs.grad.clone() if inputs.grad.is_inference() else inputs.grad
        if not output.requires_grad:  # below autograd, where an older torch's operators compute
            return FormulaBackward().run(call)
        of_q, of_k, of_v = torch.autograd.grad(output, leaves, grad)
        return of_q, of_k, of_v


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, to be followed from here."""
    own = tensor.clone() if tensor.is_inference() else tensor.detach()
    return own.requires_grad_()


class SlicedBackward(Variant[AttentionProblem, AttentionBackwardInputs]):
    """The formula in float32 over slices of queries, as in the forward's `sliced`.

    Runs everywhere.
    """

    name = "sliced"

    def workspace(self, problem: AttentionProblem) -> int:
        p = problem
        keys = 6 * p.batch * p.heads * p.seq_k * p.head_dim * 4
        return keys + 4 * SlicedAttention.slice_rows(p) * p.heads * p.seq_k * 4

    def run(self, call: Call[AttentionProblem, AttentionBackwardInputs]) -> Grads:
        inputs = call.inputs
        rows = SlicedAttention.slice_rows(call.problem)
        dtype = inputs.q.dtype
        q, k, v, grad = by_heads(inputs, torch.promote_types(dtype, torch.float32))
        mask = inputs.mask
        if mask is not None:
            mask = expand_mask(mask, inputs.q, inputs.k)
        of_q, of_k, of_v = (torch.zeros_like(t) for t in (q, k, v))
        for b in range(q.shape[0]):
            for i in range(0, q.shape[2], rows):
                part = slice(i, i + rows)
                masked = None if mask is None else mask[b, :, part]
                tensors = (q[b, :, part], k[b], v[b], grad[b, :, part])
                gradients = grads_of(*tensors, masked, scale_of(inputs.q, inputs.scale))
                of_q[b, :, part] = gradients[0]
                of_k[b] += gradients[1]
                of_v[b] += gradients[2]
        first, second, third = (
            t.transpose(1, 2).to(dtype).contiguous() for t in (of_q, of_k, of_v)
        )
        return first, second, third
