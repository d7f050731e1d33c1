"""GroupNorm, SiLU after it, and the steps that they consist of: statistics, finalize, apply.

An image is (N, H, W, C), contiguous, for the functions of this module but group_norm_silu. The
statistics of an image come in parts, (N, parts, C, 4): per channel mean, sum of squared differences
from it, count of pixels, unused; those of bands are put together by torch.cat along `parts`. A norm
is (N, C, 2), scale and shift: GroupNorm(x)[n, ..., c] = x * scale + shift. Both are float32, or
float64 for a float64 image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec, Launch, Variant, halves_only, reasons
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.group_norm import formula, kernel
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyInputs,
    ApplyProblem,
    FinalizeInputs,
    FinalizeProblem,
    GroupNormInputs,
    GroupNormProblem,
    ImageInputs,
    ImageProblem,
)

MAX_WORK_ITEMS = (1 << 32) - 1
"""HIP's limit of grid x block in one dimension."""


def _image_refusals(arch: Arch | None, problem: ImageProblem) -> list[str]:
    if arch is None:
        return ["no supported GPU"]
    p = problem
    found = reasons(
        halves_only(p.dtype),
        (p.pixels >= 1 << 31, f"{p.pixels} pixels are more than the kernel counts"),
    )
    if found or not p.parts:
        return found
    config = kernel.configs(arch)[0]
    grid = max(
        kernel.tiling(p.batch, p.channels, p.pixels, p.form, config, of_statistics).grid
        for of_statistics in (True, False)
    )
    items = grid * config.threads
    return reasons(
        (items > MAX_WORK_ITEMS, f"{items} work-items are more than one launch may have")
    )


class _Ours(Variant[Any, Any]):
    """What our variants have in common."""

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: Any) -> list[str]:
        return _image_refusals(arch, problem)

    def input_refusals(self, inputs: Any) -> list[str]:
        return gradient_refusals(*inputs)

    def configs(self, arch: Arch | None, problem: Any) -> Sequence[GroupNormConfig]:
        return kernel.configs(arch) if arch else ()

    @staticmethod
    def launcher(launch: Launch | None) -> Launch:
        """`launch`; ValueError without one."""
        if launch is None:
            raise ValueError("a kernel of ours needs a launch")
        return launch


class KernelStatistics(_Ours):
    """group_norm_statistics of kernels/group_norm_silu.hip."""

    def specs(
        self, arch: Arch, problem: ImageProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.statistics_spec(problem.form, config),)

    def run(
        self,
        launch: Launch | None,
        config: GroupNormConfig,
        problem: ImageProblem,
        inputs: ImageInputs,
    ) -> torch.Tensor:
        return launches.launch_statistics(self.launcher(launch), config, inputs.x)


class KernelFinalize(_Ours):
    """group_norm_finalize of kernels/group_norm_silu.hip."""

    def refusals(self, arch: Arch | None, problem: FinalizeProblem) -> list[str]:
        if arch is None:
            return ["no supported GPU"]
        p = problem
        return reasons(
            (p.dtype != "float32", f"statistics in {p.dtype}: the kernel takes float32"),
            (p.affine not in kernel.AFFINE_KINDS, f"gamma in {p.affine}"),
            (p.parts >= 1 << 31, f"{p.parts} parts are more than the kernel counts"),
        )

    def input_refusals(self, inputs: Any) -> list[str]:
        gamma, beta = inputs[1:3]
        known = {None, *(DTYPES[name] for name in kernel.AFFINE_KINDS[1:])}
        kinds = {None if t is None else t.dtype for t in (gamma, beta)}
        return gradient_refusals(*inputs) + reasons(
            (not kinds <= known, "gamma or beta in float64")
        )

    def specs(
        self, arch: Arch, problem: FinalizeProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.merge_spec(config), kernel.finalize_spec(config))

    def run(
        self,
        launch: Launch | None,
        config: GroupNormConfig,
        problem: FinalizeProblem,
        inputs: FinalizeInputs,
    ) -> torch.Tensor:
        return launches.launch_finalize(self.launcher(launch), config, *inputs)


class KernelApply(_Ours):
    """group_norm_apply of kernels/group_norm_silu.hip."""

    def specs(
        self, arch: Arch, problem: ApplyProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.apply_spec(problem.form, problem.silu, config),)

    def run(
        self,
        launch: Launch | None,
        config: GroupNormConfig,
        problem: ApplyProblem,
        inputs: ApplyInputs,
    ) -> torch.Tensor:
        return launches.launch_apply(self.launcher(launch), config, *inputs)


class KernelGroupNorm(_Ours):
    """All steps of kernels/group_norm_silu.hip: the image is read twice and written once."""

    def refusals(self, arch: Arch | None, problem: GroupNormProblem) -> list[str]:
        affine = problem.affine
        return _image_refusals(arch, problem) + reasons(
            (affine not in kernel.AFFINE_KINDS, f"gamma in {affine}")
        )

    def input_refusals(self, inputs: Any) -> list[str]:
        return KernelFinalize().input_refusals(inputs)

    def workspace(self, problem: GroupNormProblem) -> int:
        """Statistics and norm."""
        return problem.batch * problem.channels * (problem.parts * 16 + 8)

    def specs(
        self, arch: Arch, problem: GroupNormProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return kernel.specs(problem.form, problem.silu, config)

    def run(
        self,
        launch: Launch | None,
        config: GroupNormConfig,
        problem: GroupNormProblem,
        inputs: GroupNormInputs,
    ) -> torch.Tensor:
        x, gamma, beta, groups, eps, silu = inputs
        start = self.launcher(launch)
        x, _ = formula.dense(x)
        statistics = launches.launch_statistics(start, config, x)
        norm = launches.launch_finalize(start, config, statistics, gamma, beta, groups, eps)
        return launches.launch_apply(start, config, x, norm, silu)
