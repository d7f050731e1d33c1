"""`rocm_sd::layer_norm_backward` and `rocm_sd::layer_norm_added_backward`: what autograd calls for
the gradients of layer_norm and layer_norm_added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm_backward.inputs import LayerNormBackwardInputs
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from lib_rocm_sd.torch_ops.torch_op import Posed, TorchOp

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _plain(
    grad: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    eps: float = 1e-5,
    affine: bool = True,
) -> Posed:
    return LAYER_NORM_BACKWARD, LayerNormBackwardInputs(grad, x, gamma, eps, affine=affine)


def _added(
    grad: torch.Tensor,
    sum_grad: torch.Tensor,
    x: torch.Tensor,
    added: torch.Tensor,
    gamma: torch.Tensor | None,
    eps: float = 1e-5,
    affine: bool = True,
) -> Posed:
    inputs = LayerNormBackwardInputs(grad, x, gamma, eps, added, sum_grad, affine)
    return LAYER_NORM_BACKWARD, inputs


def _empty(problem: LayerNormBackwardProblem, inputs: LayerNormBackwardInputs) -> Three:
    channels, dtype = problem.channels if problem.wanted else 0, DTYPES[problem.affine_dtype]
    of_gamma, of_beta = (inputs.x.new_empty(channels, dtype=dtype) for _ in range(2))
    return inputs.x.new_empty(problem.shape), of_gamma, of_beta


def _three(made: Any, inputs: LayerNormBackwardInputs, grad: torch.Tensor) -> Three:
    """Tensors without elements for what is not wanted."""
    x, gamma = inputs.x, inputs.gamma
    dtype = x.dtype if gamma is None else gamma.dtype
    return three(made, x, dtype, x.shape[-1] if inputs.affine else 0)


def three(made: Any, x: torch.Tensor, dtype: torch.dtype, channels: int) -> Three:
    """What an op of gradients gives, as its operator does. Of an x without elements it is zeros, of
    gradients that are not wanted None; these are `channels` of the `dtype`.
    """
    of_x, *others = (made, None, None) if isinstance(made, torch.Tensor) else made
    found = [x.new_zeros(channels, dtype=dtype) if each is None else each for each in others]
    return of_x, found[0].contiguous(), found[1].contiguous()


_AFFINE = "Tensor? gamma, float eps=1e-5, bool affine=True) -> (Tensor, Tensor, Tensor)"
PLAIN = TorchOp("layer_norm_backward", f"(Tensor grad, Tensor x, {_AFFINE}", _plain, _empty, _three)
ADDED = TorchOp(
    "layer_norm_added_backward",
    f"(Tensor grad, Tensor sum_grad, Tensor x, Tensor added, {_AFFINE}",
    _added,
    _empty,
    _three,
)


def layer_norm_backward_door(inputs: LayerNormBackwardInputs) -> Any:
    """One of the operators, called with the op's inputs."""
    grad, x, gamma, eps, added, sum_grad, affine = inputs
    if added is None:
        made = torch.ops.rocm_sd.layer_norm_backward.default(grad, x, gamma, eps, affine)
    else:
        made = torch.ops.rocm_sd.layer_norm_added_backward.default(
            grad, sum_grad, x, added, gamma, eps, affine
        )
    return made if affine else (made[0], None, None)


def of_plain(
    inputs: LayerNormInputs,
    results: tuple[torch.Tensor, ...],
    wanted: Sequence[bool],
    grads: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Gradients of the arguments of layer_norm."""
    x, gamma, beta, eps, _ = inputs
    made = torch.ops.rocm_sd.layer_norm_backward.default(grads[0], x, gamma, eps, any(wanted[1:3]))
    return chosen(made, (x, gamma, beta), wanted)


def of_added(
    inputs: LayerNormInputs,
    results: tuple[torch.Tensor, ...],
    wanted: Sequence[bool],
    grads: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Gradients of the arguments of layer_norm_added."""
    x, gamma, beta, eps, added = inputs
    made = torch.ops.rocm_sd.layer_norm_added_backward.default(
        *(*grads, x, added, gamma, eps, any(wanted[2:4]))
    )
    of_x, *others = chosen(made, (x, gamma, beta), (any(wanted[:2]), *wanted[2:4]))
    return [of_x if wanted[0] else None, of_x if wanted[1] else None, *others]


def chosen(
    made: Sequence[torch.Tensor], of: Sequence[torch.Tensor | None], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Each that is wanted, in the dtype of what it is the gradient of."""
    return [
        each.to(tensor.dtype) if want and tensor is not None else None
        for each, tensor, want in zip(made, of, wanted, strict=False)
    ]
