"""GroupNorm, SiLU after it, and the steps that they consist of: statistics, finalize, apply.

An image is (N, H, W, C), contiguous, for the functions of this module but group_norm_silu. The
statistics of an image come in parts, (N, parts, C, 4): per channel mean, sum of squared differences
from it, count of pixels, unused; those of bands are put together by torch.cat along `parts`. A norm
is (N, C, 2), scale and shift: GroupNorm(x)[n, ..., c] = x * scale + shift. Both are float32, or
float64 for a float64 image.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import (
    Call,
    KernelSpec,
    Run,
    Variant,
    halves_only,
    one_launch,
    reasons,
)
from lib_rocm_sd.ops.bound import Launches
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.group_norm import call as calls
from lib_rocm_sd.ops.group_norm import formula, kernel, whole
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
    NormInputs,
)
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
)
from lib_rocm_sd.ops.group_norm.whole import WholeConfig
from lib_rocm_sd.ops.lazily import torch

Config = WholeConfig | GroupNormConfig


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
    return reasons(one_launch(items))


class _Ours(Variant[Any, Any]):
    """What our variants have in common."""

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: Any) -> list[str]:
        return _image_refusals(arch, problem)

    def input_refusals(self, inputs: Any) -> list[str]:
        return gradient_refusals(*inputs)

    def configs(self, arch: Arch | None, problem: Any) -> Sequence[Config]:
        return kernel.configs(arch) if arch else ()

    def bound(self, call: Call[Any, Any]) -> Run:
        """Where nothing has to be copied and the launcher can prepare launches: see call.py."""
        inputs = call.inputs
        prepare = getattr(call.launch, "prepare", None)
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        if prepare is None or not self.is_ready(*tensors):
            return self.run
        return self.prepared(prepare, call.config, inputs)

    def is_ready(self, image: torch.Tensor, *others: torch.Tensor) -> bool:
        """Whether the kernels read these tensors as they lie."""
        return calls.ready(image, *others)

    @abstractmethod
    def prepared(self, prepare: Launches, config: Any, inputs: Any) -> Run:
        """`run` with launches that are prepared."""


class KernelStatistics(_Ours):
    """group_norm_statistics of kernels/group_norm_silu.hip."""

    def specs(
        self, arch: Arch, problem: ImageProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.statistics_spec(problem.form, config),)

    def run(self, call: Call[ImageProblem, ImageInputs]) -> torch.Tensor:
        return launches.launch_statistics(call.launcher, call.config, call.inputs.x)

    def prepared(self, prepare: Launches, config: GroupNormConfig, inputs: ImageInputs) -> Run:
        return calls.statistics(prepare, config, inputs)


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

    def run(self, call: Call[FinalizeProblem, FinalizeInputs]) -> torch.Tensor:
        return launches.launch_finalize(call.launcher, call.config, *call.inputs)

    def is_ready(self, *tensors: torch.Tensor) -> bool:
        return calls.ready(None, *tensors)

    def prepared(self, prepare: Launches, config: GroupNormConfig, inputs: FinalizeInputs) -> Run:
        return calls.finalize(prepare, config, inputs, self.run)


class KernelApply(_Ours):
    """group_norm_apply of kernels/group_norm_silu.hip."""

    def specs(
        self, arch: Arch, problem: ApplyProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.apply_spec(problem.form, problem.silu, config),)

    def run(self, call: Call[ApplyProblem, ApplyInputs]) -> torch.Tensor:
        return launches.launch_apply(call.launcher, call.config, *call.inputs)

    def is_ready(self, image: torch.Tensor, *others: torch.Tensor) -> bool:
        return calls.ready(image, *others) and others[0].dtype == torch.float32

    def prepared(self, prepare: Launches, config: GroupNormConfig, inputs: ApplyInputs) -> Run:
        return calls.apply(prepare, config, inputs, self.run)


class _OfImage(_Ours):
    """What takes an image with gamma and beta: in one launch where it is small, else in steps."""

    def refusals(self, arch: Arch | None, problem: NormProblem | GroupNormProblem) -> list[str]:
        affine = problem.affine
        return _image_refusals(arch, problem) + reasons(
            (affine not in kernel.AFFINE_KINDS, f"gamma in {affine}")
        )

    def input_refusals(self, inputs: Any) -> list[str]:
        return KernelFinalize().input_refusals(inputs)

    def configs(
        self, arch: Arch | None, problem: NormProblem | GroupNormProblem
    ) -> Sequence[Config]:
        if arch is None:
            return ()
        p = problem
        held: tuple[WholeConfig, ...] = ()
        if p.channels_last:
            held = whole.configs(arch, p.channels, p.pixels, p.groups, p.form.vector)
        return (*held, *kernel.configs(arch))


class KernelNorm(_OfImage):
    """Scale and shift, by kernels/group_norm_whole.hip or two steps of group_norm_silu.hip: the
    image is read once.
    """

    def workspace(self, problem: NormProblem) -> int:
        """Statistics."""
        return problem.batch * problem.channels * problem.parts * 16

    def specs(self, arch: Arch, problem: NormProblem, config: Config) -> Sequence[KernelSpec]:
        if isinstance(config, WholeConfig):
            return (whole.spec(problem.dtype, problem.form.vector, False, config),)
        return kernel.specs(problem.form, False, config)[:-1]

    def run(self, call: Call[NormProblem, NormInputs]) -> torch.Tensor:
        config, inputs = call.config, call.inputs
        start = call.launcher
        if isinstance(config, WholeConfig):
            return launches.launch_whole(start, config, *inputs, silu=None)
        statistics = launches.launch_statistics(start, config, inputs.x)
        return launches.launch_finalize(start, config, statistics, *inputs[1:])

    def prepared(self, prepare: Launches, config: Config, inputs: NormInputs) -> Run:
        return calls.norm(prepare, config, inputs, self.run)


class KernelGroupNorm(_OfImage):
    """All of it. By kernels/group_norm_whole.hip the image is read and written once, by the steps
    of group_norm_silu.hip it is read twice.
    """

    def refusals(self, arch: Arch | None, problem: GroupNormProblem) -> list[str]:  # type: ignore[override]
        alone = problem.added and not self.configs(arch, problem)
        return super().refusals(arch, problem) + reasons(
            (arch is not None and alone, "something is added to an image that is not small")
        )

    def configs(self, arch: Arch | None, problem: GroupNormProblem) -> Sequence[Config]:  # type: ignore[override]
        """What reads the image twice adds nothing to it."""
        found = super().configs(arch, problem)
        if not problem.added:
            return found
        return tuple(each for each in found if isinstance(each, WholeConfig))

    def is_ready(self, image: torch.Tensor, *others: torch.Tensor) -> bool:
        affine = (t for t in others if t.ndim == 1)
        rows = (t for t in others if t.ndim == 2)
        return calls.ready(image, *affine) and all(map(launches.lies_in_rows, rows))

    def workspace(self, problem: GroupNormProblem) -> int:
        """Statistics and norm."""
        return problem.batch * problem.channels * (problem.parts * 16 + 8)

    def specs(self, arch: Arch, problem: GroupNormProblem, config: Config) -> Sequence[KernelSpec]:
        if isinstance(config, WholeConfig):
            return (whole.spec(problem.dtype, problem.form.vector, problem.silu, config),)
        return kernel.specs(problem.form, problem.silu, config)

    def run(self, call: Call[GroupNormProblem, GroupNormInputs]) -> torch.Tensor:
        config, inputs = call.config, call.inputs
        x, gamma, beta, groups, eps, silu, _ = inputs
        start = call.launcher
        if isinstance(config, WholeConfig):
            return launches.launch_whole(start, config, *inputs)
        x, _ = formula.dense(x)
        statistics = launches.launch_statistics(start, config, x)
        norm = launches.launch_finalize(start, config, statistics, gamma, beta, groups, eps)
        return launches.launch_apply(start, config, x, norm, silu)

    def prepared(self, prepare: Launches, config: Config, inputs: GroupNormInputs) -> Run:
        return calls.group_norm(prepare, config, inputs, self.run)
