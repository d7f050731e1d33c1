"""GroupNorm, SiLU after it, and the steps that they consist of: statistics, finalize, apply.

An image is (N, H, W, C), contiguous, for the functions of this module but group_norm_silu. The
statistics of an image come in parts, (N, parts, C, 4): per channel mean, sum of squared differences
from it, count of pixels, unused; those of bands are put together by torch.cat along `parts`. A norm
is (N, C, 2), scale and shift: GroupNorm(x)[n, ..., c] = x * scale + shift. Both are float32, or
float64 for a float64 image.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import (
    Call,
    KernelSpec,
    Run,
    halves_only,
    one_launch,
    reasons,
)
from lib_rocm_sd.ops.bound import Bound, Launches
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.group_norm import formula, kernel, whole
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm.formula import channels_of, dense
from lib_rocm_sd.ops.group_norm.inputs import (
    ApplyInputs,
    FinalizeInputs,
    GroupNormInputs,
    ImageInputs,
    NormInputs,
)
from lib_rocm_sd.ops.group_norm.kernel import GroupNormConfig, MergeParams
from lib_rocm_sd.ops.group_norm.launch import lies_in_rows, pointer
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
)
from lib_rocm_sd.ops.group_norm.whole import WholeConfig
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.lazily import torch

# GroupNorm and its steps called again and again with tensors that differ only in where they lie.
#
# Each function here takes the `prepare` of a launcher and inputs of which nothing has to be copied
# (`ready`), and returns what is called as `Variant.run` is; see ops/bound.py.


_Start = Callable[..., None]
"""Launches a step, given addresses."""


def ready(image: torch.Tensor | None, *others: torch.Tensor | None) -> bool:
    """Whether a kernel reads them as they lie: an image without gaps, others contiguous."""
    dense_image = image is None or dense(image)[0] is image
    return dense_image and all(t is None or t.is_contiguous() for t in others)


def statistics(prepare: Launches, config: GroupNormConfig, inputs: ImageInputs) -> Run:
    """Bound group_norm_statistics."""
    x = inputs.x
    start, parts = _statistics(prepare, config, x)
    shape = (x.shape[0], parts, x.shape[1], 4)

    def bound(call: Call[Any, Any]) -> torch.Tensor:
        x = call.inputs[0]
        made: torch.Tensor = x.new_empty(shape, dtype=torch.float32)
        start(x.data_ptr(), made.data_ptr())
        return made

    return bound


def apply(prepare: Launches, config: GroupNormConfig, inputs: ApplyInputs, run: Run) -> Run:
    """Bound group_norm_apply; `run` for a norm that is not aligned."""
    start = _apply(prepare, config, inputs.x, inputs.silu)

    def bound(call: Call[Any, Any]) -> torch.Tensor:
        x, norm, _ = call.inputs
        norm_at = norm.data_ptr()
        if norm_at & 15:
            made: torch.Tensor = run(call)
            return made
        made = torch.empty_like(x)
        start(x.data_ptr(), norm_at, made.data_ptr())
        return made

    return bound


def finalize(prepare: Launches, config: GroupNormConfig, inputs: FinalizeInputs, run: Run) -> Run:
    """Bound group_norm_finalize, and group_norm_merge before it where there are many parts; `run`
    for statistics that are not aligned.
    """
    found, gamma, beta, groups, _ = inputs
    channels = channels_of(found, gamma, beta)
    shape = (found.shape[0], found.shape[1], found.shape[2])
    start, floats = _finalize(prepare, config, shape, inputs[1:3], channels, groups, found.device)
    made_shape = (shape[0], channels, 2)

    def bound(call: Call[Any, Any]) -> torch.Tensor:
        found, gamma, beta, _, eps = call.inputs
        at = found.data_ptr()
        if at & 15:
            made: torch.Tensor = run(call)
            return made
        made = found.new_empty(made_shape)
        between = found.new_empty(floats).data_ptr() if floats else 0
        start(at, between, made.data_ptr(), pointer(gamma), pointer(beta), eps)
        return made

    return bound


def norm(
    prepare: Launches, config: GroupNormConfig | WholeConfig, inputs: NormInputs, run: Run
) -> Run:
    """A bound norm (N, C, 2) of an image; `run` for one that group_norm_whole cannot read."""
    x, gamma, beta, groups, _ = inputs
    shape = (x.shape[0], x.shape[1], 2)
    if isinstance(config, WholeConfig):
        return _whole_norm(prepare, config, inputs, run)
    first, parts = _statistics(prepare, config, x)
    sizes = (x.shape[0], parts, x.shape[1])
    then, merged = _finalize(prepare, config, sizes, (gamma, beta), x.shape[1], groups, x.device)
    floats = 4 * x.shape[0] * parts * x.shape[1]

    def bound(call: Call[Any, Any]) -> torch.Tensor:
        x, gamma, beta, _, eps = call.inputs
        made: torch.Tensor = x.new_empty(shape, dtype=torch.float32)
        between = x.new_empty(floats + merged, dtype=torch.float32)
        at = between.data_ptr()
        first(x.data_ptr(), at)
        then(at, at + 4 * floats, made.data_ptr(), pointer(gamma), pointer(beta), eps)
        return made

    return bound


def group_norm(
    prepare: Launches, config: GroupNormConfig | WholeConfig, inputs: GroupNormInputs, run: Run
) -> Run:
    """A bound GroupNorm; `run` for an image that group_norm_whole cannot read."""
    x, gamma, beta, groups, _, silu, _ = inputs
    if isinstance(config, WholeConfig):
        return _whole_image(prepare, config, inputs, run)
    first, parts = _statistics(prepare, config, x)
    sizes = (x.shape[0], parts, x.shape[1])
    then, merged = _finalize(prepare, config, sizes, (gamma, beta), x.shape[1], groups, x.device)
    last = _apply(prepare, config, x, silu)
    floats = 4 * x.shape[0] * parts * x.shape[1]
    every = floats + merged + 2 * x.shape[0] * x.shape[1]

    def bound(call: Call[Any, Any]) -> torch.Tensor:
        x, gamma, beta, _, eps, _, _ = call.inputs
        made = torch.empty_like(x)
        between = x.new_empty(every, dtype=torch.float32)
        x_at, at = x.data_ptr(), between.data_ptr()
        norm_at = at + 4 * (floats + merged)
        first(x_at, at)
        then(at, at + 4 * floats, norm_at, pointer(gamma), pointer(beta), eps)
        last(x_at, norm_at, made.data_ptr())
        return made

    return bound


def _whole_norm(prepare: Launches, config: WholeConfig, inputs: NormInputs, run: Run) -> Run:
    x = inputs.x
    start = _whole(prepare, config, GroupNormInputs(*inputs, False))
    shape = (x.shape[0], x.shape[1], 2)

    def bound(call: Call[Any, Any]) -> torch.Tensor:
        x, gamma, beta, _, eps = call.inputs
        x_at = x.data_ptr()
        if x_at & 15:
            made: torch.Tensor = run(call)
            return made
        made = x.new_empty(shape, dtype=torch.float32)
        start(x_at, 0, made.data_ptr(), pointer(gamma), pointer(beta), eps, 0, 0)
        return made

    return bound


def _whole_image(prepare: Launches, config: WholeConfig, inputs: GroupNormInputs, run: Run) -> Run:
    start = _whole(prepare, config, inputs)

    def bound(call: Call[Any, Any]) -> torch.Tensor:
        x, gamma, beta, _, eps, _, added = call.inputs
        x_at, step = x.data_ptr(), 0
        if x_at & 15 or (added is not None and not lies_in_rows(added)):
            made: torch.Tensor = run(call)
            return made
        made = torch.empty_like(x)
        if added is not None:
            step = added.stride(0)
        start(x_at, made.data_ptr(), 0, pointer(gamma), pointer(beta), eps, pointer(added), step)
        return made

    return bound


def _statistics(prepare: Launches, config: GroupNormConfig, x: torch.Tensor) -> tuple[_Start, int]:
    """Also the parts that it makes."""
    step = launches.statistics_step(config, *dense(x))
    bound = step.bound(prepare)

    def start(x_at: int, made_at: int) -> None:
        packet = bound.taken()
        params = packet.params
        params.x = x_at
        params.statistics = made_at
        params.aligned = not x_at & 15
        packet.launch()
        bound.free.append(packet)

    return start, step.params.parts


def _apply(prepare: Launches, config: GroupNormConfig, x: torch.Tensor, silu: bool) -> _Start:
    bound = launches.apply_step(config, *dense(x), silu).bound(prepare)

    def start(x_at: int, norm_at: int, made_at: int) -> None:
        packet = bound.taken()
        params = packet.params
        params.x = x_at
        params.norm = norm_at
        params.out = made_at
        params.aligned = not (x_at | made_at) & 15
        packet.launch()
        bound.free.append(packet)

    return start


def _finalize(
    prepare: Launches,
    config: GroupNormConfig,
    shape: tuple[int, int, int],
    affine: tuple[torch.Tensor | None, torch.Tensor | None],
    channels: int,
    groups: int,
    device: torch.device,
) -> tuple[_Start, int]:
    """Also the floats of merged statistics that it needs; 0 where there are few parts."""
    batch, parts, _ = shape
    fewer, floats = kernel.merged_parts(parts, channels // groups), 0
    merge = None
    if fewer < parts:
        merging = launches.merge_step(config, shape, channels, -(-parts // fewer), device)
        merge = merging.bound(prepare)
        shape = (batch, merging.params.out_parts, channels)
        floats = 4 * shape[0] * shape[1] * shape[2]
    step = launches.finalize_step(config, shape, *affine, channels, groups, device)
    bound = step.bound(prepare)

    def start(
        found_at: int, merged_at: int, made_at: int, gamma_at: int, beta_at: int, eps: float
    ) -> None:
        if merge is not None:
            _merge(merge, found_at, merged_at)
            found_at = merged_at
        packet = bound.taken()
        params = packet.params
        params.statistics = found_at
        params.out = made_at
        params.gamma = gamma_at
        params.beta = beta_at
        params.eps = eps
        packet.launch()
        bound.free.append(packet)

    return start, floats


def _merge(merge: Bound[MergeParams], found_at: int, merged_at: int) -> None:
    packet = merge.taken()
    packet.params.statistics = found_at
    packet.params.out = merged_at
    packet.launch()
    merge.free.append(packet)


def _whole(prepare: Launches, config: WholeConfig, inputs: GroupNormInputs) -> _Start:
    x, gamma, beta, groups, _, silu, _ = inputs
    bound = launches.whole_step(config, x, gamma, beta, groups, silu).bound(prepare)

    def start(
        x_at: int,
        made_at: int,
        norm_at: int,
        gamma_at: int,
        beta_at: int,
        eps: float,
        added_at: int,
        added_stride: int,
    ) -> None:
        packet = bound.taken()
        params = packet.params
        params.x = x_at
        params.out = made_at
        params.norm = norm_at
        params.gamma = gamma_at
        params.beta = beta_at
        params.added = added_at
        params.added_stride = added_stride
        params.eps = eps
        packet.launch()
        bound.free.append(packet)

    return start


Config = WholeConfig | GroupNormConfig


def _image_refusals(arch: Arch, problem: ImageProblem) -> list[str]:
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


class _Ours(KernelVariant[Any, Any]):
    """What our variants have in common."""

    def kernel_refusals(self, arch: Arch, problem: Any) -> list[str]:
        return _image_refusals(arch, problem)

    def configs(self, arch: Arch | None, problem: Any) -> Sequence[Config]:
        return kernel.configs(arch) if arch else ()

    def bound(self, call: Call[Any, Any]) -> Run:
        """Where nothing has to be copied and the launcher can prepare launches: see above."""
        inputs = call.inputs
        prepare = getattr(call.launch, "prepare", None)
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        if prepare is None or not self.is_ready(*tensors):
            return self.run
        return self.prepared(prepare, call.config, inputs)

    def is_ready(self, image: torch.Tensor, *others: torch.Tensor) -> bool:
        """Whether the kernels read these tensors as they lie."""
        return ready(image, *others)

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
        return statistics(prepare, config, inputs)


class KernelFinalize(_Ours):
    """group_norm_finalize of kernels/group_norm_silu.hip."""

    def kernel_refusals(self, arch: Arch, problem: FinalizeProblem) -> list[str]:
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
        return ready(None, *tensors)

    def prepared(self, prepare: Launches, config: GroupNormConfig, inputs: FinalizeInputs) -> Run:
        return finalize(prepare, config, inputs, self.run)


class KernelApply(_Ours):
    """group_norm_apply of kernels/group_norm_silu.hip."""

    def specs(
        self, arch: Arch, problem: ApplyProblem, config: GroupNormConfig
    ) -> Sequence[KernelSpec]:
        return (kernel.apply_spec(problem.form, problem.silu, config),)

    def run(self, call: Call[ApplyProblem, ApplyInputs]) -> torch.Tensor:
        return launches.launch_apply(call.launcher, call.config, *call.inputs)

    def is_ready(self, image: torch.Tensor, *others: torch.Tensor) -> bool:
        return ready(image, *others) and others[0].dtype == torch.float32

    def prepared(self, prepare: Launches, config: GroupNormConfig, inputs: ApplyInputs) -> Run:
        return apply(prepare, config, inputs, self.run)


class _OfImage(_Ours):
    """What takes an image with gamma and beta: in one launch where it is small, else in steps."""

    def kernel_refusals(self, arch: Arch, problem: NormProblem | GroupNormProblem) -> list[str]:
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
        return norm(prepare, config, inputs, self.run)


class KernelGroupNorm(_OfImage):
    """All of it. By kernels/group_norm_whole.hip the image is read and written once, by the steps
    of group_norm_silu.hip it is read twice.
    """

    def kernel_refusals(self, arch: Arch, problem: GroupNormProblem) -> list[str]:  # type: ignore[override]
        alone = problem.added and not self.configs(arch, problem)
        return super().kernel_refusals(arch, problem) + reasons(
            (alone, "something is added to an image that is not small")
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
        return ready(image, *affine) and all(map(launches.lies_in_rows, rows))

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
        return group_norm(prepare, config, inputs, self.run)
