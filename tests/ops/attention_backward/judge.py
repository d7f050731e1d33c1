"""The judge of attention's gradients: are they as good as halves allow?

Each is compared with float64, beside what torch's fused kernels make of the same call: weights and
their gradients rounded to halves before they meet a matrix, the result rounded once, all else in
float32, delta from the rounded output. The largest error of a head may be twice theirs in the mean
of all heads, the rms 1.5 times: of one head alone either is twice the other's in one case of fifty,
by which way a few large values happen to be rounded.

With one key, or nearly, a score's gradient is the difference of two equal sums: what is left are
their roundings, which hang on the order of a CPU's instructions. These are allowed for (_noise).
"""

from __future__ import annotations

import math

import torch

from lib_rocm_sd.ops.attention.formula import expand_mask, scale_of
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import LOG2_E
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention.with_lse import lse_of, lse_shape
from lib_rocm_sd.ops.attention.with_lse import reference as forward_reference
from lib_rocm_sd.ops.attention_backward.formula import by_heads, reference, weights_of
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs, Grads
from tests import compiled
from tests.ops.attention.judge import UNITS
from tests.ops.attention.judge import torchs_own as torchs_forward
from tests.verify.simt.attention import draw, random_mask

LARGEST_RATIO, RMS_RATIO = 2.0, 1.5
LEAST = 2.0**-24
"""The least number of fp16: what is rounded to it or to zero is not counted."""
ROUNDINGS = 4
"""Of float32, that each of the terms that cancel each other may have seen."""


def drawn(
    problem: AttentionProblem, layout: str = "plain", seed: int = 1, scale: float | None = None
) -> AttentionBackwardInputs:
    """Random inputs in this layout; `output` as torch makes it."""
    p = problem
    q, k, v = draw(p, (layout,) * 3, seed)
    mask = None
    if p.mask != "none":
        mask = random_mask((p.batch, p.heads, p.seq_q, p.seq_k), p.mask, seed)
        mask[0, 0, p.seq_q // 2] = False if p.mask == "bool" else -math.inf
    return completed(AttentionInputs(q, k, v, mask, scale), layout)


def completed(given: AttentionInputs, layout: str = "plain") -> AttentionBackwardInputs:
    """With what the forward pass gives, and a random gradient of it."""
    problem = ATTENTION.problem_of(given)
    if compiled.noting is not None:
        output, lse = given.q.new_zeros(given.q.shape).flatten(2), torch.zeros(lse_shape(problem))
    else:
        output, lse = torchs_forward(*given), lse_of(given, problem)
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(output.shape, generator=generator).to(output.dtype)
    if layout == "misaligned":
        output, grad = _apart(output), _apart(grad)
    return AttentionBackwardInputs(*given[:3], output, grad, lse, given.mask, given.scale)


def lse_faults(lse: torch.Tensor, given: AttentionInputs) -> list[str]:
    """What is wrong with a log-sum-exp: in halves the weights that it sums are rounded, and float32
    rounds logits.
    """
    if compiled.noting is not None:
        return []
    exact = forward_reference(given)[1]
    if lse.shape != exact.shape or lse.dtype != torch.float32:
        return [f"lse: {tuple(lse.shape)} {lse.dtype}"]
    error = float((lse.double() - exact).abs().max())
    most = LOG2_E * UNITS[given.q.dtype] + 2.0**-20 * float(exact.abs().max())
    return [] if error <= most else [f"lse: off by {error:.3g}, at most {most:.3g} is explained"]


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Rows with gaps, from an odd address on."""
    wide = x.new_full((*x.shape[:2], x.shape[2] + 2), math.nan)
    return wide[..., 1:-1].copy_(x)


def torchs_own(inputs: AttentionBackwardInputs) -> Grads:
    """What a fused kernel of torch's makes of it on a GPU."""
    dtype = inputs.q.dtype
    scale = scale_of(inputs.q, inputs.scale)
    mask = inputs.mask
    if mask is not None:
        mask = expand_mask(mask, inputs.q, inputs.k)
    q, k, v, grad = by_heads(inputs, torch.float32)
    output = inputs.output.unflatten(2, inputs.q.shape[2:]).float().transpose(1, 2)
    weights = weights_of(q, k, mask, scale)
    of_scores = weights * (grad @ v.mT - (grad * output).sum(-1, keepdim=True))
    weights, of_scores = (t.to(dtype).float() for t in (weights, of_scores))
    made = (of_scores @ k * scale, of_scores.mT @ q * scale, weights.mT @ grad)
    of_q, of_k, of_v = (t.transpose(1, 2).to(dtype) for t in made)
    return of_q, of_k, of_v


def _noise(inputs: AttentionBackwardInputs) -> tuple[float, float, float]:
    """The rms of float32's roundings in the gradients of q, k and v: of g v and g out, whose
    difference a score's gradient is, as far as they reach them.
    """
    scale = scale_of(inputs.q, inputs.scale)
    mask = inputs.mask
    if mask is not None:
        mask = expand_mask(mask, inputs.q, inputs.k)
    q, k, v, grad = by_heads(inputs, torch.float64)
    output = inputs.output.unflatten(2, inputs.q.shape[2:]).double().transpose(1, 2)
    terms = grad.square() @ v.square().mT + (grad * output).square().sum(-1, keepdim=True)
    squares = weights_of(q, k, mask, scale).square() * terms
    reached = (squares @ k.square(), squares.mT @ q.square())
    of_q, of_k = (2.0**-24 * abs(scale) * float(each.mean().sqrt()) for each in reached)
    return ROUNDINGS * of_q, ROUNDINGS * of_k, 0.0


def faults(made: Grads, inputs: AttentionBackwardInputs) -> list[str]:
    """What is wrong with the gradients of q, k and v; NaN anywhere is."""
    if compiled.noting is not None:
        return []
    found = []
    right = torchs_own(inputs), reference(inputs), _noise(inputs)
    for name, ours, theirs, exact, noise in zip(("q", "k", "v"), made, *right, strict=True):
        like = getattr(inputs, name)
        if ours.shape != like.shape or ours.dtype != like.dtype:
            found.append(f"{name}: {tuple(ours.shape)} {ours.dtype}")
            continue
        errors = [(t.double() - exact).abs() for t in (ours, theirs)]
        largest = [float(error.amax((1, 3)).mean()) for error in errors]
        rms = [float(error.square().mean().sqrt()) for error in errors]
        if not largest[0] <= LARGEST_RATIO * (largest[1] + noise) + LEAST:
            found.append(f"{name}: largest error {largest[0]:.3g}, torch's own {largest[1]:.3g}")
        if not rms[0] <= RMS_RATIO * (rms[1] + noise) + LEAST:
            found.append(f"{name}: rms {rms[0]:.3g}, torch's own {rms[1]:.3g}")
    return found
