"""What an op gives, as its `empty` says it, and what tells its calls apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lib_rocm_sd import functional
from lib_rocm_sd.engine.route import by_torch
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.inputs import NextNorm
from lib_rocm_sd.ops.conv.problem import Band
from lib_rocm_sd.ops.conv.weights import ConvWeights
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.registry import ops

CPU = torch.device("cpu")


def facts(results: Any) -> list[Any]:
    """Shape, dtype and strides of each result."""
    every = results if isinstance(results, tuple) else (results,)
    return [t if t is None else (tuple(t.shape), t.dtype, t.stride()) for t in every]


def small_problems() -> list[tuple[Op[Any, Any], Any]]:
    """Problems that vouch for each op's first usual one; norms and gradients both ways."""
    found = [(op, op.test_problems(op.usual[0][1])[0]) for op in ops()]
    for op, problem in list(found):
        for name in ("added", "keeps", "statistics", "wanted", "channels_last"):
            if hasattr(problem, name) and op.family != "attention":
                found.append((op, replace(problem, **{name: not getattr(problem, name)})))
    return found


@pytest.mark.parametrize(
    ("op", "problem"),
    [pytest.param(*each, id=f"{each[0].name}: {each[1]}") for each in small_problems()],
)
def test_empty_results_lie_as_those_of_torch(op: Op[Any, Any], problem: Any) -> None:
    inputs = op.make_inputs(problem, CPU, 1)
    assert facts(op.empty(problem, inputs)) == facts(by_torch(op, inputs))


def test_a_convolution_without_elements_has_its_norm_and_its_statistics() -> None:
    x, affine = torch.zeros(0, 4, 4, 16), torch.ones(16)
    weights, following = ConvWeights(torch.ones(16, 16, 3, 3)), NextNorm(affine, affine, 4, 1e-5)
    y, norm = functional.conv("3x3", x, weights, next_norm=following)
    assert y.shape == (0, 4, 4, 16) and norm is not None and norm.shape == (0, 16, 2)
    y, statistics = functional.conv("3x3", x, weights, next_norm=following, band=Band(1, 2))
    assert y.shape == (0, 2, 4, 16) and statistics is not None and statistics.shape[-1] == 4
    assert functional.conv("3x3", x, weights)[1] is None


@pytest.mark.parametrize("op", [GROUP_NORM_BACKWARD, LAYER_NORM_BACKWARD], ids=lambda op: op.name)
def test_a_key_tells_gradients_apart_without_posing_their_problem(op: Op[Any, Any]) -> None:
    problem = op.test_problems(op.usual[0][1])[0]
    given = op.make_inputs(problem, CPU, 1)
    wide = torch.zeros(*given.x.shape[:-1], given.x.shape[-1] + 8, dtype=given.x.dtype)
    others = [
        given,
        given._replace(x=wide[..., : given.x.shape[-1]]),
        given._replace(grad=given.grad.double()),
        given._replace(gamma=None),
        given._replace(gamma=given.gamma.double()),
        given._replace(affine=not given.affine),
        given._replace(x=given.x.clone().requires_grad_()),
    ]
    assert len({op.key_of(each) for each in others}) == len(others)
    assert op.key_of(given) == op.key_of(given._replace(x=given.x.clone(), eps=1e-3))


def test_a_key_tells_numpys_numbers_apart() -> None:
    """What was bound for other groups would read other channels."""
    problem = GROUP_NORM_BACKWARD.test_problems(GROUP_NORM_BACKWARD.usual[0][1])[0]
    given = GROUP_NORM_BACKWARD.make_inputs(problem, CPU, 1)
    numbers: list[Any] = [given._replace(groups=np.int64(groups)) for groups in (1, 2, 4)]
    numbers += [given._replace(silu=cast("Any", np.bool_(silu))) for silu in (True, False)]
    keys = {GROUP_NORM_BACKWARD.key_of(each) for each in numbers}
    assert len(keys) >= 4
