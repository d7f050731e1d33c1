"""The judge of attention: is an output as good as halves allow? For every test that compares one.

Two measures against float64. `numbers` and `faults` compare the whole tensor with what torch's
fused kernels make of it, which round the weights before they meet v, and the result, and compute
all else in float32: a largest error of at most twice torch's own, an rms of at most 1.5 times.
That is a fair measure where many independent roundings come together. It is luck where few do, as
for one query or where one key has all the weight; and it does not see a small row among large ones.
So each element also has a limit of its own: what rounding weights and result may do to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lib_rocm_sd.ops.attention.formula import expand_mask, reference, scale_of
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from tests import compiled

UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Largest relative error of rounding once."""
LEAST_EXACT = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-118}
"""A weight below this, of the largest, is rounded as this one is, or is zero."""
LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
SINGLE = 2.0**-23
MOST_BESIDE_A_SCORE = 1e25
"""Beside a larger bias no score counts in float64 either, so float32 adds no error."""
LARGEST_RATIO, RMS_RATIO = 2.0, 1.5


def torchs_own(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """What torch's fused kernels do in a half type: float32 but for rounded weights and result."""
    wide_q, wide_k, wide_v = (x.float().transpose(1, 2) for x in (q, k, v))
    scores = wide_q @ wide_k.transpose(-1, -2) * scale_of(q, scale)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out = weights.to(q.dtype).float() @ wide_v / weights.sum(-1, keepdim=True)
    return out.nan_to_num(0.0).transpose(1, 2).flatten(2).to(q.dtype)


@dataclass(frozen=True)
class Errors:
    """Against float64. The root of the mean square shows a systematic error of any element."""

    largest: float
    rms: float

    @classmethod
    def of(cls, out: torch.Tensor, exact: torch.Tensor) -> Errors:
        error = out.double() - exact
        return cls(error.abs().max().item(), error.square().mean().sqrt().item())


@dataclass(frozen=True)
class Numbers:
    """Errors against float64, over the elements where it is finite.

    `worst` is the largest quotient of an element's error and its limit. `misplaced` counts elements
    that are infinite or NaN where float64 is not, or the other way round.
    """

    ours_largest: float
    theirs_largest: float
    ours_rms: float
    theirs_rms: float
    worst: float
    misplaced: float

    def faults(self, whole: bool) -> list[str]:
        """What is wrong. `whole`: torch's own error is a fair measure."""
        found = []
        if self.misplaced:
            found.append(f"{self.misplaced:.0f} elements NaN or infinite where float64 is not")
        if not self.worst <= 1.0:
            found.append(f"an element is off by {self.worst:.3g} times what rounding explains")
        if whole and not self.ours_largest <= LARGEST_RATIO * self.theirs_largest:
            found.append(
                f"largest error {self.ours_largest:.3g}, torch's {self.theirs_largest:.3g}"
            )
        if whole and not self.ours_rms <= RMS_RATIO * self.theirs_rms:
            found.append(f"rms {self.ours_rms:.3g}, torch's own {self.theirs_rms:.3g}")
        return found


def limits(
    exact: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """What rounding explains, of each element of `exact` (B, Sq, H*D).

    Halves round the result and the sum of weights, and each weight at random; float32 rounds the
    logits, by their size and not by their differences, and the sums, along head_dim by the root of
    its length.
    """
    unit, factor = UNITS[q.dtype], scale_of(q, scale)
    q64, k64, v64 = (x.double().transpose(1, 2) for x in (q, k, v))
    logits, sizes = q64 @ k64.mT * factor, (q64.abs() @ k64.abs().mT) * abs(factor)
    if mask is not None:
        bias = expand_mask(mask, q, k)
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~bias, -math.inf)
        else:
            logits = logits + bias
            size = bias.double().abs()
            sizes = sizes + torch.where(size < MOST_BESIDE_A_SCORE, size, 0.0)
    weights = logits.softmax(-1).nan_to_num(0.0)
    least = weights.amax(-1, keepdim=True) * LEAST_EXACT[q.dtype]
    rounded = torch.where(weights > 0, torch.maximum(weights, least), weights)
    random = (rounded.square() @ v64.square()).sqrt()
    most = rounded @ v64.abs()
    doubt = torch.where(weights > 0, weights * sizes, 0.0)
    shifted = doubt @ v64.abs() + doubt.sum(-1, keepdim=True) * (weights @ v64).abs()
    singles = max(4.0, math.sqrt(q.shape[3]) / 4) * shifted + (4 + k.shape[1] / 16) * most
    explained = unit * torch.minimum(3 * random, most) + SINGLE * singles
    explained = explained.transpose(1, 2).flatten(2) + 2 * unit * exact.abs()
    return explained + LEAST[q.dtype]


def measure(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The fields of Numbers as one tensor on the device, so that nothing waits for it."""
    if compiled.noting is not None:
        return torch.zeros(6, dtype=torch.float64)
    exact = reference(AttentionInputs(q, k, v, mask, scale))
    mask = None if mask is None else expand_mask(mask, q, k)
    finite = exact.isfinite()
    theirs = torchs_own(q, k, v, mask, scale).double()
    known = out.double()
    same = (known == exact) | (known.isnan() & exact.isnan())
    misplaced = torch.where(finite, ~known.isfinite(), ~same).sum().double()
    zero = torch.zeros((), dtype=torch.float64, device=out.device)
    ours_off = torch.where(finite & known.isfinite(), (known - exact).abs(), zero)
    theirs_off = torch.where(finite & theirs.isfinite(), (theirs - exact).abs(), zero)
    allowed = limits(exact, q, k, v, mask, scale)
    quotient = torch.where(finite, ours_off / allowed, zero).nan_to_num(0.0)
    count = finite.sum().clamp(min=1)
    rms = [(off.square().sum() / count).sqrt() for off in (ours_off, theirs_off)]
    return torch.stack(
        [ours_off.max(), theirs_off.max(), rms[0], rms[1], quotient.max(), misplaced]
    )


def numbers(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Numbers:
    """How far `out` (B, Sq, H*D) is from float64, and torch's own result."""
    return Numbers(*measure(out, q, k, v, mask, scale).tolist())
