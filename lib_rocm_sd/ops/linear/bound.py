"""Our linear layers called again and again with tensors that differ only in where they lie."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from lib_rocm_sd.ops.base import Call, Run
from lib_rocm_sd.ops.bound import Bound, Prepare
from lib_rocm_sd.ops.lazily import F, torch
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.kernel import LinearManyParams, LinearParams
from lib_rocm_sd.ops.linear.problem import LinearProblem

ALIGNED_BYTES = 16


class _BoundRows(Bound[Any]):
    """Callable like `Variant.run`, for inputs of one key with dense rows. What does not begin at a
    multiple of 16 bytes goes to `run`. `parts`: of k, each with a sum of its own.
    """

    __slots__ = ("_in_place", "_parted", "_run", "_shape")

    def __init__(
        self,
        problem: LinearProblem,
        first: LinearParams | LinearManyParams,
        prepare: Prepare,
        run: Run,
        parts: int = 1,
    ) -> None:
        super().__init__(first, prepare)
        self._shape = problem.rows, problem.all_columns
        self._parted = (parts, problem.rows, problem.weight_rows) if parts > 1 else None
        self._in_place = problem.in_place
        self._run = run


class BoundLinear(_BoundRows):
    """linear, and linear_sum where k has parts."""

    __slots__ = ()

    def __call__(self, call: Call[Any, LinearInputs]) -> torch.Tensor:
        x, weight, bias, residual, _, weight_1, bias_1, weight_2, bias_2, _, more = call.inputs
        y = residual if self._in_place and residual is not None else x.new_empty(self._shape)
        packet = self.taken()
        params = packet.params
        params.x = every = x.data_ptr()
        if more:
            every |= _many(params, weight, bias, weight_1, bias_1, weight_2, bias_2, *more)
        else:
            params.weights_0 = at = weight.data_ptr()
            every |= at
            if bias is not None:
                params.bias_0 = at = bias.data_ptr()
                every |= at
            if weight_1 is not None:
                every |= _others(params, weight_1, bias_1, weight_2, bias_2)
        if residual is not None:
            params.residual = at = residual.data_ptr()
            every |= at
        params.out = y.data_ptr()
        if every % ALIGNED_BYTES:
            self.free.append(packet)
            return self._run(call)  # type: ignore[no-any-return]
        if self._parted is not None:
            partial = x.new_empty(self._parted, dtype=torch.float32)
            params.partial = partial.data_ptr()
        packet.launch()
        self.free.append(packet)
        return y


class BoundGate(_BoundRows):
    """The product by torch, then linear_gate."""

    __slots__ = ()

    def __call__(self, call: Call[Any, LinearInputs]) -> torch.Tensor:
        inputs = call.inputs
        residual = inputs.residual
        if residual is not None and residual.data_ptr() % ALIGNED_BYTES:
            return self._run(call)  # type: ignore[no-any-return]
        made = product(inputs)
        y = residual if self._in_place and residual is not None else made.new_empty(self._shape)
        packet = self.taken()
        params = packet.params
        params.x, params.out = made.data_ptr(), y.data_ptr()
        if residual is not None:
            params.residual = residual.data_ptr()
        packet.launch()
        self.free.append(packet)
        return y


def product(inputs: LinearInputs) -> torch.Tensor:
    """(rows, 2 columns), contiguous, by torch."""
    return F.linear(inputs.x, inputs.weight, inputs.bias)


def address_of(tensor: torch.Tensor | None) -> int:
    """0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def _many(params: Any, *layers: torch.Tensor | None) -> int:
    """Weights, each followed by its bias, put in; all their bits."""
    at = [*map(address_of, layers)]
    params.place(*at)
    return reduce(or_, at)


def _others(params: LinearParams, *layers: torch.Tensor | None) -> int:
    """The second weight, its bias, and the third's, put in; all their bits."""
    at = [*map(address_of, layers)]
    params.weights_1, params.bias_1, params.weights_2, params.bias_2 = at
    return at[0] | at[1] | at[2] | at[3]
