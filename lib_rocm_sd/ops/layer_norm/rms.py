"""RMSNorm over the channels of each pixel, and SiLU after it, as the VAE of Qwen-Image and Wan has
it: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), without an eps that is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, TrialInputs, Variant, reasons
from lib_rocm_sd.ops.layer_norm import inputs as layer_norm_inputs
from lib_rocm_sd.ops.layer_norm import kernel, ours
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.kernel import LayerNormParams
from lib_rocm_sd.ops.layer_norm.ours import KernelNorm, Result
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.lazily import F, torch

CHUNK_BYTES = 8 << 20
"""Largest size of the rows that torch's operators normalise together; three copies are wider."""


@dataclass(frozen=True)
class RmsProblem(LayerNormProblem):
    """x (.., C), without its tensors; nothing is added to it."""

    silu: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}, RMS{', SiLU' * self.silu}"

    @property
    def rms(self) -> int:
        return 1 + self.silu


class RmsInputs(NamedTuple):
    """x (.., C) and gamma (C). `eps`: the least mean of a row's squares, below which a row is
    divided by the root of this.
    """

    x: torch.Tensor
    gamma: torch.Tensor
    eps: float
    silu: bool = False

    @property
    def added(self) -> None:
        """No tensor is."""

    @property
    def plain(self) -> LayerNormInputs:
        """What a LayerNorm would have, whose beta is not read."""
        return LayerNormInputs(self.x, self.gamma, self.gamma, self.eps)


def problem_of(inputs: RmsInputs) -> RmsProblem:
    """ValueError, with all shapes, on a caller's mistake."""
    p = layer_norm_inputs.problem_of(inputs.plain)
    return RmsProblem(p.shape, p.dtype, False, p.affine, inputs.silu)


def _normed(inputs: RmsInputs, x: torch.Tensor) -> torch.Tensor:
    """Rows x of the inputs, wide, in their dtype."""
    square_mean = x.square().mean(-1, keepdim=True).clamp_min(inputs.eps)
    made = x * square_mean.rsqrt() * inputs.gamma.to(x.dtype)
    return F.silu(made) if inputs.silu else made


def reference(inputs: RmsInputs) -> torch.Tensor:
    """In float64."""
    return _normed(inputs, inputs.x.double())


def make_inputs(p: RmsProblem, device: torch.device, seed: int) -> RmsInputs:
    """Random."""
    x, gamma, *_ = layer_norm_inputs.make_inputs(p, device, seed)
    assert gamma is not None
    return RmsInputs(x, gamma, 1e-24 / p.channels, p.silu)


def trial_inputs(p: RmsProblem) -> TrialInputs:
    """As those of a LayerNorm."""
    return layer_norm_inputs.trial_inputs(p, make_inputs)


class KernelRms(KernelNorm[RmsProblem, RmsInputs]):
    """kernels/layer_norm.hip without a mean, for rows that a work-group holds."""

    def kernel_refusals(self, arch: Arch, problem: RmsProblem) -> list[str]:
        channels = problem.channels
        held = all(kernel.tiling(channels, c).held for c in kernel.configs(arch, channels))
        found = reasons((not held, f"rows of {channels}, which no work-group holds"))
        return super().kernel_refusals(arch, problem) + found

    def readable(self, problem: RmsProblem, inputs: RmsInputs) -> RmsInputs:
        x, gamma, *_ = ours.readable(problem, inputs.plain)
        assert gamma is not None
        return inputs._replace(x=x, gamma=gamma)

    def fill(self, params: LayerNormParams, inputs: RmsInputs, rows_aligned: bool) -> Result:
        return ours.fill(params, inputs.plain, rows_aligned)


class TorchRms(Variant[RmsProblem, RmsInputs]):
    """torch's operators in float32, rounded once, a chunk of rows at a time."""

    name = "torch"

    def workspace(self, problem: RmsProblem) -> int:
        """Three wide copies of a chunk."""
        wide = 2 if problem.dtype in kernel.DTYPES else 1
        return 3 * wide * min(problem.tensor_bytes, CHUNK_BYTES)

    def run(self, call: Call[RmsProblem, RmsInputs]) -> torch.Tensor:
        inputs = call.inputs
        made = inputs.x.new_empty(inputs.x.shape)
        rows = inputs.x.flatten(0, -2) if inputs.x.ndim > 1 else inputs.x[None]
        out = made.view(rows.shape)
        wide = torch.promote_types(rows.dtype, torch.float32)
        step = max(CHUNK_BYTES // max(rows.shape[1] * rows.element_size(), 1), 1)
        for part, to in zip(rows.split(step), out.split(step), strict=True):
            to.copy_(_normed(inputs, part.to(wide)))
        return made


HALF = ("bfloat16", False, "bfloat16")
"""As these VAEs are run."""

USUAL = tuple(
    (f"Qwen-Image 1024x1024, {s}x{s}", RmsProblem((1, s, s, c), *HALF, silu))
    for c, s, silu in ((96, 1024, True), (192, 512, True), (384, 256, True), (384, 128, False))
)
"""Norms of the decoder; the last is attention's."""

ODD = (
    RmsProblem((3, 5, 7), "float16", affine="float32", silu=True),
    RmsProblem((1, 8)),
    RmsProblem((8,), "bfloat16", affine="bfloat16", silu=True),
    RmsProblem((2, 3, 3, 96), "float16", affine="float32", silu=True),
    RmsProblem((17, 384), "bfloat16", affine="float16", silu=True),
    RmsProblem((2, 3, 3, 328), "bfloat16", affine="bfloat16"),
    RmsProblem((3, 6120), "float16", silu=True),
)
"""Small shapes at which indexing errors show; the kernel refuses the first."""
