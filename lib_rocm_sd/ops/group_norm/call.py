"""GroupNorm and its steps called again and again with tensors that differ only in where they lie.

Each function here takes the `prepare` of a launcher and inputs of which nothing has to be copied
(`ready`), and returns what is called as `Variant.run` is; see ops/bound.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lib_rocm_sd.ops.base import Call, Run
from lib_rocm_sd.ops.bound import Bound, Launches
from lib_rocm_sd.ops.group_norm import kernel
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
from lib_rocm_sd.ops.group_norm.whole import WholeConfig
from lib_rocm_sd.ops.lazily import torch

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
