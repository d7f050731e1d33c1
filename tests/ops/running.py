"""Calling a variant without the engine, by its op and inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lib_rocm_sd.ops.base import Call, Launch, Op, Variant


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
