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
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.engine import engine
from lib_rocm_sd.ops import group_norm_formula as formula
from lib_rocm_sd.ops import group_norm_kernel as kernel
from lib_rocm_sd.ops import group_norm_launch as launches
from lib_rocm_sd.ops import group_norm_problem as problems
from lib_rocm_sd.ops.base import KernelSpec, Launch, Op, Variant, reasons
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.group_norm_kernel import GroupNormConfig
from lib_rocm_sd.ops.group_norm_problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
)

MAX_WORK_ITEMS = (1 << 32) - 1
"""HIP's limit of grid x block in one dimension."""


def _image_refusals(arch: Arch | None, problem: ImageProblem) -> list[str]:
    if arch is None:
        return ["no supported GPU"]
    p = problem
    found = reasons(
        (p.dtype not in kernel.DTYPES, f"{p.dtype}: the kernel takes fp16 and bf16"),
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


class _Ours(Variant[Any]):
    """What our variants have in common."""

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: Any) -> list[str]:
        return _image_refusals(arch, problem)

    def input_refusals(self, *inputs: Any) -> list[str]:
        return gradient_refusals(*inputs)

    def configs(self, arch: Arch | None, problem: Any) -> Sequence[GroupNormConfig]:
        return kernel.configs(arch) if arch else ()

    @staticmethod
    def launcher(launch: Launch | None) -> Launch:
        """`launch`; ValueError without one."""
        if launch is None:
            raise ValueError("a kernel of ours needs a launch")
        return launch


class _Torch(Variant[Any]):
    """What torch's variants have in common: they always work."""

    name = "torch"

    def refusals(self, arch: Arch | None, problem: Any) -> list[str]:
        return []


class KernelStatistics(_Ours):
    """group_norm_statistics of kernels/group_norm_silu.hip."""

    def specs(
        self, arch: Arch, problem: ImageProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.statistics_spec(problem.form, config),)

    def run(  # type: ignore[override]
        self, launch: Launch | None, config: GroupNormConfig, x: torch.Tensor
    ) -> torch.Tensor:
        return launches.launch_statistics(self.launcher(launch), config, x)


class TorchStatistics(_Torch):
    """torch.var_mean in float32."""

    def workspace(self, problem: ImageProblem) -> int:
        return 2 * problem.image_bytes

    def run(self, launch: Launch | None, config: None, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return formula.statistics_of(x)


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

    def input_refusals(self, *inputs: Any) -> list[str]:
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

    def run(self, launch: Launch | None, config: GroupNormConfig, *inputs: Any) -> torch.Tensor:  # type: ignore[override]
        return launches.launch_finalize(self.launcher(launch), config, *inputs)


class TorchFinalize(_Torch):
    """The merge by torch's operators."""

    def run(self, launch: Launch | None, config: None, *inputs: Any) -> torch.Tensor:  # type: ignore[override]
        return formula.norm_from(*inputs)


class KernelApply(_Ours):
    """group_norm_apply of kernels/group_norm_silu.hip."""

    def specs(
        self, arch: Arch, problem: ApplyProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.apply_spec(problem.form, problem.silu, config),)

    def run(self, launch: Launch | None, config: GroupNormConfig, *inputs: Any) -> torch.Tensor:  # type: ignore[override]
        return launches.launch_apply(self.launcher(launch), config, *inputs)


class TorchApply(_Torch):
    """The formula by torch's operators in float32."""

    def workspace(self, problem: ApplyProblem) -> int:
        return 6 * problem.image_bytes

    def run(self, launch: Launch | None, config: None, *inputs: Any) -> torch.Tensor:  # type: ignore[override]
        return formula.applied(*inputs)


class KernelGroupNorm(_Ours):
    """All steps of kernels/group_norm_silu.hip: the image is read twice and written once."""

    def refusals(self, arch: Arch | None, problem: GroupNormProblem) -> list[str]:
        affine = problem.affine
        return _image_refusals(arch, problem) + reasons(
            (affine not in kernel.AFFINE_KINDS, f"gamma in {affine}")
        )

    def input_refusals(self, *inputs: Any) -> list[str]:
        return KernelFinalize().input_refusals(*inputs)

    def workspace(self, problem: GroupNormProblem) -> int:
        """Statistics and norm."""
        return problem.batch * problem.channels * (problem.parts * 16 + 8)

    def specs(
        self, arch: Arch, problem: GroupNormProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return kernel.specs(problem.form, problem.silu, config)

    def run(  # type: ignore[override]
        self,
        launch: Launch | None,
        config: GroupNormConfig,
        x: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        groups: int,
        eps: float,
        silu: bool,
    ) -> torch.Tensor:
        start = self.launcher(launch)
        x, _ = formula.dense(x)
        statistics = launches.launch_statistics(start, config, x)
        norm = launches.launch_finalize(start, config, statistics, gamma, beta, groups, eps)
        return launches.launch_apply(start, config, x, norm, silu)


class TorchGroupNorm(_Torch):
    """torch's group_norm, then its silu.

    In float32 where gamma or beta are of another dtype, and for halves on the CPU, for which an
    older torch has neither.
    """

    def workspace(self, problem: GroupNormProblem) -> int:
        """What SiLU reads, and torch's copies on the way from and to channels-last."""
        return problem.image_bytes * (problem.silu + 2 * problem.channels_last)

    def run(  # type: ignore[override]
        self,
        launch: Launch | None,
        config: None,
        x: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        groups: int,
        eps: float,
        silu: bool,
    ) -> torch.Tensor:
        others = any(t is not None and t.dtype != x.dtype for t in (gamma, beta))
        if others or x.device.type == "cpu":
            wide = formula.wide_of(x)
            gamma, beta = (None if t is None else t.to(wide) for t in (gamma, beta))
            y = F.group_norm(x.to(wide), groups, gamma, beta, eps)
        else:
            y = F.group_norm(x, groups, gamma, beta, eps)
        y = (F.silu(y) if silu else y).to(x.dtype)
        last = formula.is_channels_last(x)
        return y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if last else y.contiguous()


def _wide_dtype(problem: Any) -> torch.dtype:
    return torch.float64 if problem.dtype == "float64" else torch.float32


def _images() -> tuple[ImageProblem, ...]:
    return tuple(
        dict.fromkeys(
            ImageProblem(*p.shape, p.dtype, p.channels_last)
            for p in (*(problem for _, problem in problems.USUAL), *problems.ODD)
        )
    )


STATISTICS: Op[ImageProblem] = Op(
    name="group norm statistics",
    variants=(KernelStatistics(), TorchStatistics()),
    problem_of=problems.image_problem_of,
    reference=formula.reference_statistics,
    make_inputs=problems.image_inputs,
    tolerance=problems.wide_tolerance,
    output_shape=lambda p: (p.batch, p.parts, p.channels, 4),
    test_problems=problems.small_images,
    cases=_images(),
    usual=(("VAE 1024x1024, last level", ImageProblem(1, 128, 1024, 1024)),),
    output_dtype=_wide_dtype,
    measured_as=problems.measured_image,
)
FINALIZE: Op[FinalizeProblem] = Op(
    name="group norm finalize",
    variants=(KernelFinalize(), TorchFinalize()),
    problem_of=problems.finalize_problem_of,
    reference=formula.reference_norm,
    make_inputs=problems.finalize_inputs,
    tolerance=problems.wide_tolerance,
    output_shape=lambda p: (p.batch, p.channels, 2),
    test_problems=problems.small_statistics,
    usual=(("VAE 1024x1024, last level", FinalizeProblem(1, 1024, 128, 32)),),
    measured_as=problems.measured_statistics,
)
APPLY: Op[ApplyProblem] = Op(
    name="group norm apply",
    variants=(KernelApply(), TorchApply()),
    problem_of=problems.apply_problem_of,
    reference=formula.reference_apply,
    make_inputs=problems.apply_inputs,
    tolerance=problems.tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.small_images,
    usual=(("VAE 1024x1024, last level", ApplyProblem(1, 128, 1024, 1024)),),
    measured_as=problems.measured_image,
)
GROUP_NORM_SILU: Op[GroupNormProblem] = Op(
    name="group norm",
    variants=(KernelGroupNorm(), TorchGroupNorm()),
    problem_of=problems.problem_of,
    reference=formula.reference,
    make_inputs=problems.make_inputs,
    tolerance=problems.tolerance,
    output_shape=lambda p: p.shape,
    test_problems=problems.small_images,
    cases=(*(problem for _, problem in problems.USUAL), *problems.ODD),
    usual=problems.USUAL,
)


def statistics(x: torch.Tensor) -> torch.Tensor:
    """The statistics (N, parts, C, 4) of x (N, H, W, C); ValueError where x is no image."""
    return engine.run(STATISTICS, _planes(x))


def finalize(
    statistics: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """The norm (N, C, 2) from statistics (N, parts, C, 4), gamma and beta (C).

    Channels of the statistics beyond gamma's are ignored; a part with a count of 0 weighs nothing.
    Raises ValueError, with shapes, where these do not go together.
    """
    return engine.run(FINALIZE, statistics, gamma, beta, groups, eps)


def norm_of(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """The norm (N, C, 2) of x (N, H, W, C)."""
    return finalize(statistics(x), gamma, beta, groups, eps)


def apply(x: torch.Tensor, norm: torch.Tensor, silu: bool) -> torch.Tensor:
    """x (N, H, W, C) normalised by `norm` (N, C, 2), then SiLU'd if wanted; like x."""
    return engine.run(APPLY, _planes(x), norm, silu).permute(0, 2, 3, 1)


def group_norm_silu(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    groups: int,
    eps: float = 1e-5,
    silu: bool = True,
) -> torch.Tensor:
    """GroupNorm of x (N, C, H, W), then SiLU if wanted; in the dtype and memory format of x.

    gamma and beta (C) in any float dtype, or None. Raises ValueError, with all shapes, where these
    do not go together.
    """
    return engine.run(GROUP_NORM_SILU, x, gamma, beta, groups, eps, silu)


def _planes(x: torch.Tensor) -> torch.Tensor:
    """(N, H, W, C) as (N, C, H, W), in the same memory."""
    if x.ndim != 4:
        raise ValueError(f"x must be (N, H, W, C): {tuple(x.shape)}")
    return x.permute(0, 3, 1, 2)
