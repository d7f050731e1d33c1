"""The tensors of attention's backward: their checks, their problem, random ones."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from lib_rocm_sd.ops.attention import inputs as attention_inputs
from lib_rocm_sd.ops.attention import problem as forward
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.torch import SlicedAttention
from lib_rocm_sd.ops.attention.with_lse import lse_of, lse_shape, wide
from lib_rocm_sd.ops.base import Call, reasons
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.lazily import torch

Grads: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""Gradients of q, k and v, each shaped like its tensor."""


class AttentionBackwardInputs(NamedTuple):
    """One call. q (B, Sq, H, D), k and v (B, Sk, H, D), mask and scale as functional.attention was
    given them; `output` what it gave, `grad` the gradient of that, both (B, Sq, H*D); `lse`
    (B, H, Sq): the log-sum-exp of each query's logits, as attention/with_lse.py makes it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor
    grad: torch.Tensor
    lse: torch.Tensor
    mask: torch.Tensor | None = None
    scale: float | None = None

    @property
    def forward(self) -> AttentionInputs:
        """The call of which this is the backward."""
        return AttentionInputs(self.q, self.k, self.v, self.mask, self.scale)


def problem_of(inputs: AttentionBackwardInputs) -> AttentionProblem:
    """The problem that these tensors pose. ValueError, with all shapes, where they do not fit
    together.
    """
    problem = attention_inputs.problem_of(inputs.forward)
    q, _, _, output, grad, lse, _, _ = inputs
    shape = forward.output_shape(problem)
    wrong = tensor_errors(output=output, grad=grad, lse=lse)
    if not wrong:
        wrong = reasons(
            (
                any(t.ndim != 3 or tuple(t.shape) != shape for t in (output, grad)),
                "output and grad must be (batch, seq_q, heads * head_dim)",
            ),
            (not q.dtype == output.dtype == grad.dtype, "q, output and grad must have one dtype"),
            (
                not q.device == output.device == grad.device == lse.device,
                "q, output, grad and lse must be on one device",
            ),
            (
                lse.dtype != wide(q.dtype) or tuple(lse.shape) != lse_shape(problem),
                f"lse must be {wide(q.dtype)} (batch, heads, seq_q)",
            ),
        )
    if wrong:
        shapes = described(q=q, k=inputs.k, output=output, grad=grad, lse=lse)
        raise ValueError(f"{'; '.join(wrong)}: {shapes}")
    return problem


def make_inputs(
    problem: AttentionProblem, device: torch.device, seed: int
) -> AttentionBackwardInputs:
    """The forward's random inputs, what it gives for them, and a random gradient."""
    inputs = attention_inputs.make_inputs(problem, device, seed)
    with torch.no_grad():
        output, lse = SlicedAttention().run(Call(problem, inputs)), lse_of(inputs, problem)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    values = torch.randn(forward.output_shape(problem), generator=generator)
    grad = values.to(DTYPES[problem.dtype]).to(device)
    return AttentionBackwardInputs(*inputs[:3], output, grad, lse, inputs.mask, inputs.scale)
