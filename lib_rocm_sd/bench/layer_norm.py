"""LayerNorm timed beside a plain copy: ours, torch's, without and with a tensor added first.

Bytes are those that must be moved: a tensor is read and another written, or two and two where one
is added; a copy reads and writes one. `of_copy` is the time over what these bytes take at the
copy's speed. Rows are small: times are those of the GPU, with a full queue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lib_rocm_sd.bench.norms import (
    BYTES_BESIDE,
    Call,
    NormRow,
    beside,
    timed_row,
    timed_with_a_full_queue,
    verified,
)
from lib_rocm_sd.bench.norms import render as render
from lib_rocm_sd.bench.rows import refusals_of
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.measure import input_sets
from lib_rocm_sd.ops import base
from lib_rocm_sd.ops.base import Launch, Variant
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.problem import ODD, USUAL, LayerNormProblem
from lib_rocm_sd.report import config_fields


def problems(small: bool, dtype: str) -> list[tuple[str, LayerNormProblem]]:
    """The usual problems, or the small odd ones."""
    if small:
        return [(f"odd {number}", problem) for number, problem in enumerate(ODD, 1)]
    return [
        (label, replace(p, dtype=dtype, affine=p.affine if p.affine == "none" else dtype))
        for label, p in USUAL
    ]


def work(problem: LayerNormProblem) -> float:
    """About what measuring it takes depends on."""
    return BYTES_BESIDE + problem.tensor_bytes


def measure(
    label: str,
    problem: LayerNormProblem,
    device: torch.device,
    info: DeviceInfo,
    launch: Launch | None,
    runs: int,
) -> list[NormRow]:
    """A copy, and every variant and config that is right."""
    with torch.no_grad():
        sets = input_sets(LAYER_NORM, problem, device)
        size, start = problem.tensor_bytes, NormRow(label, str(problem), "copy")
        copied = torch.empty_like(sets[0].x)
        timer = timed_with_a_full_queue
        copy = timed_row(start, sets, lambda x, *_: copied.copy_(x), 2 * size, runs, timer)
        rows = [copy]
        exact = LAYER_NORM.reference(sets[0])
        moved = (4 if problem.added else 2) * size
        for variant in LAYER_NORM.variants:
            row = replace(start, way=variant.name)
            refusals = refusals_of(variant, problem, info, launch)
            if refusals:
                rows.append(replace(row, reason="; ".join(refusals)))
                continue
            for config in variant.configs(info.arch, problem):
                row = replace(row, config=config_fields(config))
                given = launch if variant.ours else None
                call = _bound(variant, given, config, problem, sets[0])
                rows.append(verified(LAYER_NORM, row, sets, call, exact, moved, runs, timer))
    return [beside(row, copy) for row in rows]


def _bound(
    variant: Variant[LayerNormProblem, LayerNormInputs],
    launch: Launch | None,
    config: Any,
    problem: LayerNormProblem,
    inputs: LayerNormInputs,
) -> Call:
    """As the engine calls it, given the inputs one by one."""
    run = variant.bound(base.Call(problem, inputs, launch, config))
    return lambda *others: run(base.Call(problem, LayerNormInputs(*others), launch, config))
