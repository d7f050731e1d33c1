"""The tensors of a call of attention: their checks, the problem that they pose, random ones."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

from lib_rocm_sd.ops.attention.kernel import LENGTHS
from lib_rocm_sd.ops.attention.problem import (
    AttentionProblem,
)
from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES
from lib_rocm_sd.ops.keys import described, tensor_errors
from lib_rocm_sd.ops.lazily import torch


class AttentionInputs(NamedTuple):
    """One call. q (B, Sq, H, D), k and v (B, Sk, H, D), mask and scale as functional.attention."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    scale: float | None = None


def key_of(inputs: AttentionInputs) -> Hashable:
    """All strides of q, k and v are in it: a bound launch counts on them. Written out, because a
    picture asks it thousands of times.
    """
    q, k, v, mask, scale = inputs
    graded = torch.is_grad_enabled()
    return (
        *(q.shape, k.shape, v.shape),
        *(q.stride(), k.stride(), v.stride()),
        *(q.dtype, k.dtype, v.dtype),
        *(q.device, k.device, v.device),
        graded and (q.requires_grad, k.requires_grad, v.requires_grad),
        mask is None or (mask.shape, mask.stride(), mask.dtype, mask.device),
        scale is None,
    )


def problem_of(inputs: AttentionInputs) -> AttentionProblem:
    """The problem that these tensors pose.

    Raises ValueError, with all shapes, where they do not fit together.
    """
    q, k, v, mask, _ = inputs
    wrong = tensor_errors(q=q, k=k, v=v, **({} if mask is None else {"mask": mask}))
    if not wrong:
        wrong = _errors(q, k, v, mask)
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: {described(q=q, k=k, v=v, mask=mask)}")
    batch, seq_q, heads, head_dim = q.shape
    return AttentionProblem(
        *(batch, heads, seq_q, k.shape[1], head_dim, DTYPE_NAMES[q.dtype]),
        "none" if mask is None else DTYPE_NAMES.get(mask.dtype, LENGTHS),
    )


def _errors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> list[str]:
    wrong = reasons(
        (any(t.ndim != 4 for t in (q, k, v)), "q, k and v must be (batch, seq, heads, head_dim)"),
        (
            q.dtype not in DTYPE_NAMES or q.dtype == torch.bool,
            f"dtype {q.dtype} is not a float type known here",
        ),
        (not q.dtype == k.dtype == v.dtype, "q, k and v must have one dtype"),
        (not q.device == k.device == v.device, "q, k and v must be on one device"),
    )
    if not wrong:
        batch, seq_q, heads, head_dim = q.shape
        wrong = reasons(
            (k.shape != v.shape, "k and v must have one shape"),
            (
                (batch, heads, head_dim) != (k.shape[0], k.shape[2], k.shape[3]),
                "q and k must agree in all but seq",
            ),
        )
    if not wrong and mask is not None:
        wrong = _mask_errors(q, k, mask)
    return wrong


def _mask_errors(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> list[str]:
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if mask.dtype == torch.int32:
        full = (*full[:1], 1, 1, 1)
    padded = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    fits = len(padded) == 4 and all(
        size in (1, whole) for size, whole in zip(padded, full, strict=False)
    )
    if not fits:  # sizes are written down here only: torch.compile would take them as fixed
        what = "batch, 1, 1, 1" if mask.dtype == torch.int32 else "batch, heads, seq_q, seq_k"
        return [f"the mask must broadcast to ({what}) = {full}"]
    return reasons(
        (mask.device != q.device, "the mask must be on the device of q"),
        (
            mask.dtype not in (*DTYPE_NAMES, torch.int32),
            f"a mask of {mask.dtype} is not known here: use bool, a float type, or int32 lengths",
        ),
    )


def _mask_for(problem: AttentionProblem, generator: torch.Generator) -> torch.Tensor | None:
    """A random mask, broadcast over heads; the last of several queries may attend to nothing. Or
    random key lengths.
    """
    p = problem
    if p.mask == "none":
        return None
    if p.mask == LENGTHS:
        return torch.randint(1, p.seq_k + 1, (p.batch, 1, 1, 1), generator=generator).int()
    shape = (p.batch, 1, p.seq_q, p.seq_k)
    keep = torch.rand(shape, generator=generator) < 0.8
    keep[..., 0] = True
    if p.seq_q > 1:
        keep[:, :, -1] = False
    if p.mask == "bool":
        return keep
    bias = torch.randn(shape, generator=generator).masked_fill_(~keep, -math.inf)
    return bias.to(DTYPES[p.mask])


def make_inputs(problem: AttentionProblem, device: torch.device, seed: int) -> AttentionInputs:
    """Random q, k, v as views of (batch, seq, heads*head_dim), mask, scale.

    The same on every device.
    """
    p = problem
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(seq: int) -> torch.Tensor:
        flat = torch.randn((p.batch, seq, p.heads * p.head_dim), generator=generator)
        return flat.to(DTYPES[p.dtype]).to(device).view(p.batch, seq, p.heads, p.head_dim)

    q, k, v = draw(p.seq_q), draw(p.seq_k), draw(p.seq_k)
    mask = _mask_for(p, generator)
    return AttentionInputs(q, k, v, None if mask is None else mask.to(device))
