"""What is said of one operator; register.py makes the operator of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lib_rocm_sd.ops.base import Op

Posed = tuple[Op[Any, Any], Any]
"""An op of ops/ and its inputs."""
Made = torch.Tensor | tuple[torch.Tensor, ...]
Backward = Callable[
    [Any, tuple[torch.Tensor, ...], Sequence[bool], Sequence[torch.Tensor]],
    "Sequence[torch.Tensor | None] | None",
]


@dataclass(frozen=True)
class TorchOp:
    """`rocm_sd::name` with the arguments and results that `schema` says.

    `posed(*arguments)`: the op that computes it, and that op's inputs. `empty(problem, inputs)`:
    tensors like what that op makes, without values. `result(made, inputs, x)`: what it made,
    as the operator gives it; x is the first argument. It may hold no memory of an argument.
    `kept(*arguments)`: as `posed`, with what is kept from call to call; None where nothing is.
    `backward(inputs, made, wanted, grads)`: the gradients of the first arguments, the others have
    none. It is given the op's inputs, of which arguments they are wanted, and the results'
    gradients; `made`: those results, where the row `keeps` them. None where torch's own operators
    are to find them. `followed(*arguments)`: called in the operator's place where gradients are
    wanted; gives its result and what else is kept for `backward`, None where it has nothing more.
    """

    name: str
    schema: str
    posed: Callable[..., Posed]
    empty: Callable[[Any, Any], Made]
    result: Callable[[Any, Any, torch.Tensor], Made]
    kept: Callable[..., Posed] | None = None
    backward: Backward | None = None
    keeps: bool = False
    followed: Callable[..., tuple[torch.Tensor, ...] | None] | None = None


def as_made(made: torch.Tensor, inputs: Any, x: torch.Tensor) -> torch.Tensor:
    """The result of an op that gives one dense tensor."""
    return made.contiguous()
