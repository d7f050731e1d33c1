"""The gradients of GroupNorm, and of SiLU after it, by our kernels."""

from __future__ import annotations

from collections.abc import Sequence

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Launch, one_launch, reasons
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.gradients import NormGradients
from lib_rocm_sd.ops.group_norm import launch as forward
from lib_rocm_sd.ops.group_norm.formula import dense
from lib_rocm_sd.ops.group_norm.kernel import AFFINE_KINDS, GroupNormConfig
from lib_rocm_sd.ops.group_norm.launch import pointer
from lib_rocm_sd.ops.group_norm.ours import KernelGroupNorm
from lib_rocm_sd.ops.group_norm_backward import kernel
from lib_rocm_sd.ops.group_norm_backward.inputs import GroupNormBackwardInputs
from lib_rocm_sd.ops.group_norm_backward.kernel import (
    BackwardConfig,
    GroupNormBackwardParams,
    GroupNormCombineParams,
)
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.layer_norm_backward.ours import launch_gradients
from lib_rocm_sd.ops.lazily import torch

# The launches of kernels/group_norm_backward.hip, and of what comes before and after, on tensors.
#
# Images are (N, C, H, W) here, in either memory format.


def readable(
    problem: GroupNormBackwardProblem, inputs: GroupNormBackwardInputs
) -> GroupNormBackwardInputs:
    """Images without gaps, both in the memory format of x; gamma and beta dense, alike, and both
    there or none.
    """
    x, last = dense(inputs.x)
    order = torch.channels_last if last else torch.contiguous_format
    grad = inputs.grad.contiguous(memory_format=order)
    gamma, beta = inputs.gamma, inputs.beta
    if problem.affine != "none":
        dtype, channels = DTYPES[problem.affine], x.shape[1]
        gamma = x.new_ones(channels, dtype=dtype) if gamma is None else gamma.to(dtype)
        beta = x.new_zeros(channels, dtype=dtype) if beta is None else beta.to(dtype)
        gamma, beta = gamma.contiguous(), beta.contiguous()
    return inputs._replace(grad=grad, x=x, gamma=gamma, beta=beta)


def launch_norm(
    launch: Launch,
    config: BackwardConfig,
    inputs: GroupNormBackwardInputs,
) -> torch.Tensor:
    """Scale and shift (N, C, 2) of x, without gamma and beta."""
    x, groups, eps = inputs.x, inputs.groups, inputs.eps
    if config.whole is not None:
        return forward.launch_whole(launch, config.whole, x, None, None, groups, eps, None)
    statistics = forward.launch_statistics(launch, config.steps, x)
    return forward.launch_finalize(launch, config.steps, statistics, None, None, groups, eps)


def launch_backward(call: Call[GroupNormBackwardProblem, GroupNormBackwardInputs]) -> NormGradients:
    """Norm, sums, their combination, x's gradient; gamma's and beta's where they are wanted."""
    launch, config, p = call.launcher, call.config, call.problem
    inputs = readable(p, call.inputs)
    norm = launch_norm(launch, config, inputs)
    totals, factors = launch_sums(launch, config.steps, p, inputs, norm)
    out = launch_apply(launch, config.steps, p, inputs, factors)
    if not p.wanted:
        return out, None, None
    return out, *launch_gradients(launch, totals, DTYPES[p.affine_dtype])


def launch_apply(
    launch: Launch,
    config: GroupNormConfig,
    problem: GroupNormBackwardProblem,
    inputs: GroupNormBackwardInputs,
    factors: torch.Tensor,
) -> torch.Tensor:
    """x's gradient of dense inputs."""
    p, x, out = problem, inputs.x, torch.empty_like(inputs.x)
    params, grid = _params(p, inputs, config, False)
    params.out, params.factors = out.data_ptr(), factors.data_ptr()
    params.aligned &= out.data_ptr() % 16 == 0
    launch(kernel.apply_spec(p.form, p.silu, config), grid, config.threads, params, x.device)
    return out


def launch_sums(
    launch: Launch,
    config: GroupNormConfig,
    problem: GroupNormBackwardProblem,
    inputs: GroupNormBackwardInputs,
    norm: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """totals (N, C, 2) and factors (N, C, 4) of dense inputs."""
    p, x = problem, inputs.x
    params, grid = _params(p, inputs, config, True)
    sums = x.new_empty((p.batch, params.parts, p.channels, 2), dtype=torch.float32)
    params.norm, params.sums = norm.data_ptr(), sums.data_ptr()
    spec = kernel.sums_spec(p.form, p.silu, p.affine, config)
    launch(spec, grid, config.threads, params, x.device)
    totals = x.new_empty((p.batch, p.channels, 2), dtype=torch.float32)
    factors = x.new_empty((p.batch, p.channels, 4), dtype=torch.float32)
    each = p.channels // p.groups
    tensors = (sums, norm, inputs.gamma, inputs.beta, totals, factors)
    combine = GroupNormCombineParams(
        *map(pointer, tensors),
        *(params.parts, p.channels, each, kernel.combined_width(params.parts, each)),
        *(AFFINE_KINDS.index(p.affine), 1.0 / (each * p.pixels)),
    )
    spec = kernel.combine_spec(config)
    launch(spec, p.batch * p.groups, config.threads, combine, x.device)
    return totals, factors


def _params(
    problem: GroupNormBackwardProblem,
    inputs: GroupNormBackwardInputs,
    config: GroupNormConfig,
    sums: bool,
) -> tuple[GroupNormBackwardParams, int]:
    """The arguments of a pass over x and grad, and its work-groups."""
    p, x, grad = problem, inputs.x.data_ptr(), inputs.grad.data_ptr()
    cut = kernel.tiling(p.batch, p.channels, p.pixels, p.form, config, sums)
    begins = p.channels_last or p.batch * p.channels == 1 or p.pixels % kernel.VECTOR == 0
    params = GroupNormBackwardParams(
        *(grad, x, 0, 0, 0, 0, pointer(inputs.gamma), pointer(inputs.beta)),
        *(p.channels, p.pixels, cut.parts, cut.part_pixels),
        *(cut.width, cut.column_blocks, cut.units, begins and not (x | grad) & 15),
    )
    return params, cut.grid


class KernelGroupNormBackward(KernelVariant[GroupNormBackwardProblem, GroupNormBackwardInputs]):
    """kernels/group_norm_backward.hip after the forward pass's kernels, which make the norm anew.
    No image of float32 is ever made.
    """

    def kernel_refusals(self, arch: Arch, problem: GroupNormBackwardProblem) -> list[str]:
        p, found = problem, KernelGroupNorm().kernel_refusals(arch, problem)
        if found or not p.parts:
            return found
        (config,) = self.configs(arch, p)
        grids = [
            kernel.tiling(p.batch, p.channels, p.pixels, p.form, config.steps, sums).grid
            for sums in (True, False)
        ]
        items = max(*grids, p.batch * p.groups) * config.threads
        return reasons(one_launch(items))

    def workspace(self, problem: GroupNormBackwardProblem) -> int:
        """Statistics, norm, sums, totals and factors."""
        return problem.batch * problem.channels * (problem.parts * 24 + 32)

    def configs(
        self, arch: Arch | None, problem: GroupNormBackwardProblem
    ) -> Sequence[BackwardConfig]:
        p = problem
        return kernel.configs(arch, p.channels, p.pixels, p.groups, p.form) if arch else ()

    def specs(
        self, arch: Arch, problem: GroupNormBackwardProblem, config: BackwardConfig
    ) -> Sequence[KernelSpec]:
        p = problem
        own = kernel.own_specs(p.form, p.silu, p.affine, config.steps)
        return (*kernel.norm_specs(p.form, config), *(own if p.wanted else own[:-1]))

    def run(self, call: Call[GroupNormBackwardProblem, GroupNormBackwardInputs]) -> NormGradients:
        return launch_backward(call)
