"""GroupNorm + SiLU timed beside a plain copy: ours and its steps, torch's, in both memory formats.

Bytes are those that must be moved: an image is read once for its statistics, once to be
transformed, and written once; a copy reads and writes it. `of_copy` is the time over what these
bytes take at the copy's speed. What makes a small image in one launch reads it once; its bytes are
counted likewise, so that ways compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lib_rocm_sd.bench.norms import BYTES_BESIDE, Call, NormRow, beside, timed_row, verified
from lib_rocm_sd.bench.norms import render as render
from lib_rocm_sd.bench.rows import refusals_of
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.ops import base
from lib_rocm_sd.ops.base import Launch, Run
from lib_rocm_sd.ops.group_norm import kernel
from lib_rocm_sd.ops.group_norm import launch as launches
from lib_rocm_sd.ops.group_norm.inputs import GroupNormInputs
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU
from lib_rocm_sd.ops.group_norm.problem import ODD, USUAL, GroupNormProblem
from lib_rocm_sd.report import config_fields


def problems(small: bool, dtype: str) -> list[tuple[str, GroupNormProblem]]:
    """The usual problems, each in both memory formats, or the small odd ones."""
    if small:
        return [(f"odd {number}", problem) for number, problem in enumerate(ODD, 1)]
    return [
        (label, replace(problem, dtype=dtype, affine=dtype, channels_last=channels_last))
        for label, problem in USUAL
        for channels_last in (True, False)
    ]


def work(problem: GroupNormProblem) -> float:
    """About what measuring it takes depends on."""
    return BYTES_BESIDE + problem.image_bytes


def measure(
    label: str,
    problem: GroupNormProblem,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    runs: int,
) -> list[NormRow]:
    """A copy, every variant and config that is right, and the steps of our default config."""
    with torch.no_grad():
        sets = input_sets(GROUP_NORM_SILU, problem, device)
        size, start = problem.image_bytes, NormRow(label, str(problem), "copy")
        copied = torch.empty_like(sets[0][0])
        copy = timed_row(start, sets, lambda x, *_: copied.copy_(x), 2 * size, runs)
        rows = [copy]
        exact = GROUP_NORM_SILU.reference(sets[0])
        for variant in GROUP_NORM_SILU.every:
            row = replace(start, way=variant.name)
            refusals = refusals_of(variant, problem, info, launch)
            if refusals:
                rows.append(replace(row, reason="; ".join(refusals)))
                continue
            for config in variant.configs(info.arch, problem):
                row = replace(row, config=config_fields(config))
                call = _bound(variant.run, launch if variant.ours else None, config, problem)
                rows.append(verified(GROUP_NORM_SILU, row, sets, call, exact, 3 * size, runs))
                if variant.ours and info.arch and config == kernel.configs(info.arch)[0]:
                    rows += _steps(row, sets, launch, config, size, runs)
    return [beside(row, copy) for row in rows]


def _bound(run: Run, launch: Launch | None, config: Any, problem: GroupNormProblem) -> Call:
    return lambda *inputs: run(base.Call(problem, GroupNormInputs(*inputs), launch, config))


def _steps(
    row: NormRow,
    sets: Sequence[GroupNormInputs],
    launch: Launch | None,
    config: Any,
    size: int,
    runs: int,
) -> list[NormRow]:
    """Statistics, finalize and apply, each on its own."""
    if launch is None:
        return []
    x, gamma, beta, groups, eps, silu, _ = sets[0]
    affine = (gamma, beta, groups, eps)
    parts = launches.launch_statistics(launch, config, x)
    norm = launches.launch_finalize(launch, config, parts, *affine)
    calls: tuple[tuple[str, Call, int], ...] = (
        ("  statistics", lambda x, *_: launches.launch_statistics(launch, config, x), size),
        (
            "  finalize",
            lambda *_: launches.launch_finalize(launch, config, parts, *affine),
            parts.numel() * 4,
        ),
        ("  apply", lambda x, *_: launches.launch_apply(launch, config, x, norm, silu), 2 * size),
    )
    return [timed_row(replace(row, way=way), sets, call, moved, runs) for way, call, moved in calls]
