"""`rocm_sd::layer_norm` and `rocm_sd::layer_norm_added`."""

from __future__ import annotations

from typing import Any

import torch

from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.torch_ops.layer_norm_backward import of_added, of_plain
from lib_rocm_sd.torch_ops.torch_op import Posed, TorchOp, as_made

Two = tuple[torch.Tensor, torch.Tensor]


def _plain(
    x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float = 1e-5
) -> Posed:
    return LAYER_NORM, LayerNormInputs(x, gamma, beta, eps)


def _added(
    x: torch.Tensor,
    added: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    eps: float = 1e-5,
) -> Posed:
    return LAYER_NORM, LayerNormInputs(x, gamma, beta, eps, added)


def _empty(problem: LayerNormProblem, inputs: LayerNormInputs) -> torch.Tensor:
    return inputs.x.new_empty(problem.shape)


def _two_empty(problem: LayerNormProblem, inputs: LayerNormInputs) -> Two:
    return _empty(problem, inputs), _empty(problem, inputs)


def _both(made: Any, inputs: LayerNormInputs, x: torch.Tensor) -> Two:
    """Two tensors; for an x without elements the op gives one."""
    return (made, made.clone()) if isinstance(made, torch.Tensor) else made


PLAIN = TorchOp(
    "layer_norm",
    "(Tensor x, Tensor? gamma, Tensor? beta, float eps=1e-5) -> Tensor",
    _plain,
    _empty,
    as_made,
    backward=of_plain,
)
ADDED = TorchOp(
    "layer_norm_added",
    "(Tensor x, Tensor added, Tensor? gamma, Tensor? beta, float eps=1e-5) -> (Tensor, Tensor)",
    _added,
    _two_empty,
    _both,
    backward=of_added,
)


def layer_norm_door(inputs: LayerNormInputs) -> torch.Tensor | Two:
    """One of the operators, called with the op's inputs."""
    x, gamma, beta, eps, added = inputs
    made: torch.Tensor | Two
    if added is None:
        made = torch.ops.rocm_sd.layer_norm.default(x, gamma, beta, eps)
    else:
        made = torch.ops.rocm_sd.layer_norm_added.default(x, added, gamma, beta, eps)
    return made
