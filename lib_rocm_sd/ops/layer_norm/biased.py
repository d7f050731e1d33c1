"""LayerNorm of a stream to which products are added in place, and of which rows are missing: biases
of products that have been added already, and of the one that is added next.

A library's product can be added to a tensor, or have a bias, in one launch; not both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lib_rocm_sd.ops.base import Call, TrialInputs, Variant
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.keys import described
from lib_rocm_sd.ops.layer_norm import formula, ours
from lib_rocm_sd.ops.layer_norm import inputs as layer_norm_inputs
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.kernel import LayerNormParams
from lib_rocm_sd.ops.layer_norm.ours import KernelNorm, Result
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.lazily import F, torch

ROWS = ("missing", "more", "ahead")


@dataclass(frozen=True)
class BiasedProblem(LayerNormProblem):
    """x (.., C), without its tensors. `keeps`: whether the sum is given, too."""

    keeps: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}, biased{' and kept' * self.keeps}"

    @property
    def first(self) -> str:
        return "kept rows" if self.keeps else "rows"


class BiasedInputs(NamedTuple):
    """x (.., C); gamma, beta and the rows (C), each of which may be None, of x's dtype.

    LayerNorm(x + missing + more); if it `keeps`, also x + missing + more + ahead.
    """

    x: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    eps: float
    missing: torch.Tensor | None = None
    more: torch.Tensor | None = None
    ahead: torch.Tensor | None = None
    keeps: bool = False

    @property
    def added(self) -> None:
        """No tensor is."""

    @property
    def plain(self) -> LayerNormInputs:
        """Without the rows."""
        return LayerNormInputs(self.x, self.gamma, self.beta, self.eps)

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        named = zip(ROWS, (self.missing, self.more, self.ahead), strict=True)
        return {name: row for name, row in named if row is not None}


def problem_of(inputs: BiasedInputs) -> BiasedProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    plain = layer_norm_inputs.problem_of(inputs.plain)
    x = inputs.x
    for name, row in inputs.rows.items():
        if row.shape != x.shape[-1:] or (row.dtype, row.device) != (x.dtype, x.device):
            raise ValueError(f"{name} must be a row of x: {described(x=x, **inputs.rows)}")
    if inputs.ahead is not None and not inputs.keeps:
        raise ValueError("ahead goes with a sum that is kept")
    return BiasedProblem(plain.shape, plain.dtype, False, plain.affine, inputs.keeps)


def _sums(inputs: BiasedInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """What is normalised and what is kept, in float64."""
    found = {name: row.double() for name, row in inputs.rows.items()}
    ahead = found.pop("ahead", None)
    total = inputs.x.double()
    for row in found.values():
        total = total + row
    return total, total if ahead is None else total + ahead


def reference(inputs: BiasedInputs) -> Result:
    """The norm of the rounded sum in float64, and the sum that is kept."""
    total, kept = _sums(inputs)
    made = formula.normed(total.to(inputs.x.dtype), inputs.gamma, inputs.beta, inputs.eps)
    return (made, kept) if inputs.keeps else made


def make_inputs(p: BiasedProblem, device: torch.device, seed: int) -> BiasedInputs:
    """Random; nothing is ahead of a sum that is not kept."""
    plain = layer_norm_inputs.make_inputs(p, device, seed)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    drawn = torch.randn(3, p.channels, generator=generator).to(DTYPES[p.dtype]).to(device)
    missing, more, ahead = drawn.unbind()
    rows = (missing, more, ahead if p.keeps else None)
    return BiasedInputs(plain.x, plain.gamma, plain.beta, plain.eps, *rows, p.keeps)


def trial_inputs(p: BiasedProblem) -> TrialInputs:
    """As those of a plain norm."""
    return layer_norm_inputs.trial_inputs(p, make_inputs)


class KernelBiased(KernelNorm[BiasedProblem, BiasedInputs]):
    """The rows come from a cache."""

    def readable(self, problem: BiasedProblem, inputs: BiasedInputs) -> BiasedInputs:
        x, gamma, beta, _, _ = ours.readable(problem, inputs.plain)
        missing, more, ahead = (None if row is None else row.contiguous() for row in inputs[4:7])
        return BiasedInputs(x, gamma, beta, inputs.eps, missing, more, ahead, inputs.keeps)

    def fill(self, params: LayerNormParams, inputs: BiasedInputs, rows_aligned: bool) -> Result:
        x, _, _, _, missing, more, ahead, keeps = inputs
        out = ours.fill(params, inputs.plain, rows_aligned)
        total = x.new_empty(x.shape) if keeps else None
        params.added = every = 0 if missing is None else missing.data_ptr()
        params.more = at = 0 if more is None else more.data_ptr()
        every |= at
        params.ahead = at = 0 if ahead is None else ahead.data_ptr()
        every |= at
        params.sum = at = 0 if total is None else total.data_ptr()
        params.aligned = params.aligned and not (every | at) & 15
        return out if total is None else (out, total)  # type: ignore[return-value]


class TorchBiased(Variant[BiasedProblem, BiasedInputs]):
    """torch's additions in float32, rounded once, then its layer_norm."""

    name = "torch"

    def workspace(self, problem: BiasedProblem) -> int:
        return 2 * problem.rows * problem.channels * 4

    def run(self, call: Call[BiasedProblem, BiasedInputs]) -> Result:
        inputs = call.inputs
        x, found = inputs.x, inputs.rows
        wide = torch.promote_types(x.dtype, torch.float32)
        ahead, total = found.pop("ahead", None), x.to(wide)
        for row in found.values():
            total = total + row.to(wide)
        gamma, beta = (None if t is None else t.to(wide) for t in (inputs.gamma, inputs.beta))
        rounded = total.to(x.dtype).to(wide)
        made = F.layer_norm(rounded, x.shape[-1:], gamma, beta, inputs.eps)
        made = made.to(x.dtype).contiguous()
        if not inputs.keeps:
            return made
        kept = total if ahead is None else total + ahead.to(wide)
        return made, kept.to(x.dtype).contiguous()


USUAL = (
    ("SD1.5 512x512, 64x64, second", BiasedProblem((2, 4096, 320))),
    ("SD1.5 512x512, 64x64, third", BiasedProblem((2, 4096, 320), keeps=True)),
    ("SDXL 1024x1024, 32x32, second", BiasedProblem((2, 1024, 1280))),
    ("SDXL 1024x1024, 32x32, third", BiasedProblem((2, 1024, 1280), keeps=True)),
)
"""A transformer block's second and third norm."""

ODD = (
    BiasedProblem((3, 5, 7), affine="float32", keeps=True),
    BiasedProblem((1, 8)),
    BiasedProblem((17, 320), "bfloat16", affine="bfloat16", keeps=True),
    BiasedProblem((9, 648), "float16", affine="none"),
    BiasedProblem((2, 12301), "bfloat16", affine="bfloat16", keeps=True),
    BiasedProblem((3, 6184), keeps=True),
)
