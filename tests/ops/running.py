"""Calling a variant without the engine, by its op and inputs alone; and what its tests share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib_rocm_sd.ops.base import Call, Launch, Op, Variant
from tests.verify import simt


def compute(
    op: Op[Any, Any],
    variant: Variant[Any, Any],
    launch: Launch | None,
    config: Any,
    inputs: Any,
) -> Any:
    """What the variant gives for `inputs`."""
    return variant.run(Call(op.problem_of(inputs), inputs, launch, config))


def bind(
    op: Op[Any, Any], variant: Variant[Any, Any], launch: Launch | None, config: Any, inputs: Any
) -> Callable[[Any], Any]:
    """The variant bound to these inputs' key, to be called with inputs."""
    problem = op.problem_of(inputs)
    run = variant.bound(Call(problem, inputs, launch, config))
    return lambda others: run(Call(problem, others, launch, config))


def error(output: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference; infinity where there is NaN."""
    largest = (output.double().cpu() - exact.cpu()).abs().max().item()
    return largest if math.isfinite(largest) else math.inf


def sanitized(sanitize: str) -> str:
    """The sanitizer; skips where there is none."""
    reason = simt.missing(sanitize)
    if reason:
        pytest.skip(reason)
    return sanitize
