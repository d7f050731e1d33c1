"""The gradients of LayerNorm by our kernels."""

from __future__ import annotations

from collections.abc import Sequence

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Launch, halves_only, one_launch, reasons
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES, DTYPES
from lib_rocm_sd.ops.gradients import NormGradients
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.layer_norm.kernel import AFFINE_KINDS, VECTOR, LayerNormConfig, tiling
from lib_rocm_sd.ops.layer_norm_backward import gradients, kernel
from lib_rocm_sd.ops.layer_norm_backward.gradients import NormGradientsParams
from lib_rocm_sd.ops.layer_norm_backward.inputs import LayerNormBackwardInputs
from lib_rocm_sd.ops.layer_norm_backward.kernel import BackwardForm, LayerNormBackwardParams
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from lib_rocm_sd.ops.lazily import torch

# The launches of kernels/layer_norm_backward.hip and norm_gradients.hip on torch tensors.


def form_of(problem: LayerNormBackwardProblem, config: LayerNormConfig) -> BackwardForm:
    """What the first kernel is compiled for."""
    p = problem
    return BackwardForm(p.dtype, p.added, p.affine, tiling(p.channels, config).held)


def readable(inputs: LayerNormBackwardInputs) -> LayerNormBackwardInputs:
    """The inputs without gaps, copies where they have some."""
    tensors = (inputs.grad, inputs.x, inputs.gamma, inputs.added, inputs.sum_grad)
    grad, x, gamma, added, sum_grad = (None if t is None else t.contiguous() for t in tensors)
    assert grad is not None and x is not None
    return LayerNormBackwardInputs(grad, x, gamma, inputs.eps, added, sum_grad, inputs.affine)


def launch_backward(call: Call[LayerNormBackwardProblem, LayerNormBackwardInputs]) -> NormGradients:
    """One launch; three where gradients of gamma and beta are wanted."""
    launch, config, p = call.launcher, call.config, call.problem
    inputs = readable(call.inputs)
    x, out = inputs.x, torch.empty_like(inputs.x)
    cut, lanes = kernel.parts_tiling(p.rows, p.channels), tiling(p.channels, config).lanes
    moments = x.new_empty((p.rows, 2), dtype=torch.float32) if p.wanted else None
    tensors = (inputs.grad, x, inputs.added, inputs.sum_grad, out, inputs.gamma)
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    params = LayerNormBackwardParams(
        *(*addresses, 0 if moments is None else moments.data_ptr(), 0),
        *(p.rows, p.channels, lanes, lanes.bit_length() - 1),
        *(cut.part_rows, cut.width, cut.column_blocks),
        *(_aligned(p, addresses), inputs.eps, 1.0 / p.channels),
    )
    grid = tiling(p.channels, config).grid(p.rows, config)
    spec = kernel.input_spec(form_of(p, config), config)
    launch(spec, grid, config.threads, params, x.device)
    if moments is None:
        return out, None, None
    parts = x.new_empty((cut.parts, p.channels, 2), dtype=torch.float32)
    params.parts = parts.data_ptr()
    spec = kernel.parts_spec(p.dtype, p.added, cut.vector)
    launch(spec, cut.grid, kernel.PART_THREADS, params, x.device)
    return out, *launch_gradients(launch, parts, DTYPES[p.affine_dtype])


def _aligned(problem: LayerNormBackwardProblem, addresses: list[int]) -> bool:
    """Whether all rows, and gamma, begin at multiples of 16 bytes."""
    every = 0
    for address in addresses:
        every |= address
    return not every & 15 and (problem.rows == 1 or problem.channels % VECTOR == 0)


def launch_gradients(
    launch: Launch, pairs: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients (C) of gamma and beta from `pairs` (parts, C, 2)."""
    parts, channels, _ = pairs.shape
    gamma, beta = (pairs.new_empty(channels, dtype=dtype) for _ in range(2))
    width, kind = gradients.width_of(parts), AFFINE_KINDS.index(DTYPE_NAMES[dtype])
    addresses = (t.data_ptr() for t in (pairs, gamma, beta))
    params = NormGradientsParams(*addresses, parts, channels, width, kind)
    grid = -(-channels // width)
    launch(gradients.spec(), grid, gradients.THREADS, params, pairs.device)
    return gamma, beta


class KernelLayerNormBackward(KernelVariant[LayerNormBackwardProblem, LayerNormBackwardInputs]):
    """kernels/layer_norm_backward.hip: x's gradient in one launch, also of a sum; two more for
    gamma's and beta's.
    """

    def kernel_refusals(self, arch: Arch, problem: LayerNormBackwardProblem) -> list[str]:
        p = problem
        found = reasons(
            halves_only(p.dtype),
            (p.affine not in AFFINE_KINDS, f"gamma in {p.affine}"),
            (p.channels >= 1 << 31, f"rows of {p.channels} are more than the kernel counts"),
        )
        if found or not p.channels:
            return found
        (config,) = kernel.configs(arch, p.channels)
        items = tiling(p.channels, config).grid(p.rows, config) * config.threads
        return reasons(one_launch(items))

    def workspace(self, problem: LayerNormBackwardProblem) -> int:
        """Mean and scale of each row, and parts."""
        p = problem
        if not p.wanted or not p.rows or not p.channels:
            return 0
        return p.rows * 8 + kernel.parts_tiling(p.rows, p.channels).parts * p.channels * 8

    def configs(
        self, arch: Arch | None, problem: LayerNormBackwardProblem
    ) -> Sequence[LayerNormConfig]:
        return kernel.configs(arch, problem.channels) if arch else ()

    def specs(
        self, arch: Arch, problem: LayerNormBackwardProblem, config: LayerNormConfig
    ) -> Sequence[KernelSpec]:
        p, first = problem, kernel.input_spec(form_of(problem, config), config)
        if not p.wanted:
            return (first,)
        vector = kernel.parts_tiling(max(p.rows, 1), p.channels).vector
        return (first, kernel.parts_spec(p.dtype, p.added, vector), gradients.spec())

    def run(self, call: Call[LayerNormBackwardProblem, LayerNormBackwardInputs]) -> NormGradients:
        return launch_backward(call)
