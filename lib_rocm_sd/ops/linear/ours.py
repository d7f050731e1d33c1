"""Linear layers by kernels/linear.hip: one launch, or two where k is split."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, KernelSpec, Run, halves_only, one_launch, reasons
from lib_rocm_sd.ops.bound import Bound, Prepare, in_a_row
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.kernel_variant import KernelVariant
from lib_rocm_sd.ops.lazily import F, torch
from lib_rocm_sd.ops.linear import kernel
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.kernel import (
    LinearConfig,
    LinearManyParams,
    LinearParams,
    LinearTiling,
)
from lib_rocm_sd.ops.linear.problem import FEW_WEIGHTS, LinearProblem

# Our linear layers called again and again with tensors that differ only in where they lie.


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
            every |= _put(params, weight, bias, weight_1, bias_1, weight_2, bias_2, *more)
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
        sums = product(inputs)
        y = residual if self._in_place and residual is not None else sums.new_empty(self._shape)
        packet = self.taken()
        params = packet.params
        params.x, params.out = sums.data_ptr(), y.data_ptr()
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


def _put(params: Any, *layers: torch.Tensor | None) -> int:
    """Weights, each followed by its bias, put in; all their bits."""
    at = [*map(address_of, layers)]
    params.place(*at)
    return reduce(or_, at)


def _others(params: LinearParams, *layers: torch.Tensor | None) -> int:
    """The second weight, its bias, and the third's, put in; all their bits."""
    at = [*map(address_of, layers)]
    params.weights_1, params.bias_1, params.weights_2, params.bias_2 = at
    return at[0] | at[1] | at[2] | at[3]


MOST_STRIDE = 1 << 22
"""Halves from row to row of x: a work-group's rows then lie within 4 GiB."""
MOST_BYTES = (1 << 32) - 1
_FIRST = 40
"""More than any library's."""


class MatrixLinear(KernelVariant[LinearProblem, LinearInputs]):
    """Bias, gate and residual cost no pass of their own, several weights are one launch, nothing is
    searched for, and what runs does not hang on the build of torch. Behind a library's product
    under Auto (torch.py), but for what is one launch here and several there (kernel.is_joint).
    """

    preference = 10

    def kernel_refusals(self, arch: Arch, problem: LinearProblem) -> list[str]:
        p = problem
        refusals = reasons(
            halves_only(p.dtype),
            (p.k % 8 or p.k == 0, f"{p.k} values in a row are no multiple of 8"),
            *((n % 8 or n == 0, f"{n} columns are no multiple of 8") for n in p.columns),
        )
        if refusals or not p.rows:
            return refusals
        items = max(
            kernel.tiling(p.rows, p.k, p.columns, p.gate, config).grid * config.block
            for config in self.configs(arch, p)
        )
        return reasons(
            (p.k > MOST_STRIDE, f"{p.k} values in a row"),
            (max(p.columns) * (1 + p.gate) * p.k * 2 > MOST_BYTES, "a weight of 4 GiB"),
            one_launch(max(items, kernel.pass_grid(p.rows, p.all_columns) * kernel.SUM_THREADS)),
        )

    def preference_for(self, arch: Arch | None, problem: LinearProblem) -> int:
        joint = arch is not None and kernel.is_joint(arch, problem.rows, problem.columns)
        return _FIRST if joint else self.preference

    def input_refusals(self, inputs: LinearInputs) -> list[str]:
        return gradient_refusals(*inputs[:-1], *inputs.more)

    def workspace(self, problem: LinearProblem) -> int:
        """What sums over parts of k take at most, on any GPU."""
        p = problem
        return kernel.most_partial_bytes(p.rows, p.k, p.columns, p.gate) if p.rows else 0

    def configs(self, arch: Arch | None, problem: LinearProblem) -> Sequence[LinearConfig]:
        p = problem
        return (
            kernel.configs(arch, p.dtype, p.rows, p.k, p.columns, p.gate) if arch and p.rows else ()
        )

    def specs(
        self, arch: Arch, problem: LinearProblem, config: LinearConfig
    ) -> Sequence[KernelSpec]:
        """Both ways of a config with parts: a small problem may have one chunk of k."""
        p = problem
        return kernel.specs(p.dtype, p.gate, self._cut(p, config).parts > 1, config, _many(p))

    @staticmethod
    def _cut(p: LinearProblem, config: LinearConfig) -> LinearTiling:
        one = replace(config, parts=1) if _many(p) else config
        return kernel.tiling(p.rows, p.k, p.columns, p.gate, one)

    def bound(self, call: Call[LinearProblem, LinearInputs]) -> Run:
        """Where nothing has to be copied and the launcher can prepare a launch."""
        config, inputs = call.config, call.inputs
        prepare = getattr(call.launch, "prepare", None)
        p, x, residual = call.problem, inputs.x, inputs.residual
        layers = inputs.layers
        dense = [t for layer in layers for t in layer if t is not None]
        rows = [t for t in (x, residual) if t is not None]
        good = all(map(_has_good_rows, rows)) and all(t.is_contiguous() for t in dense)
        if prepare is None or not good or (p.in_place and residual is None):
            return self.run
        cut = self._cut(p, config)
        y = residual if p.in_place and residual is not None else x.new_empty((1, p.all_columns))
        first = _params(p, cut, config, x, layers, residual, y, None)
        first.out_stride = _step(y) if p.in_place else p.all_columns
        launches, device = self._launches(p, cut, config), x.device

        def prepared(params: ctypes.Structure) -> Callable[[], None]:
            return in_a_row([prepare(*each, params, device) for each in launches])

        return BoundLinear(p, first, prepared, self.run, cut.parts)

    @staticmethod
    def _launches(
        p: LinearProblem, cut: LinearTiling, config: LinearConfig
    ) -> list[tuple[KernelSpec, int, int]]:
        """Kernels, each with its work-groups and their work-items."""
        split = cut.parts > 1
        launches = [(kernel.spec(p.dtype, p.gate, split, config, _many(p)), cut.grid, config.block)]
        if split:
            grid = kernel.pass_grid(p.rows, p.all_columns)
            launches.append((kernel.sum_spec(p.dtype, p.gate), grid, kernel.SUM_THREADS))
        return launches

    def run(self, call: Call[LinearProblem, LinearInputs]) -> torch.Tensor:
        config, problem, inputs = call.config, call.problem, call.inputs
        p, cut = problem, self._cut(problem, config)
        x, residual = _rows(inputs.x), inputs.residual
        residual = None if residual is None else _rows(residual)
        here = inputs.out is not None and residual is not None and _is(inputs.out, residual)
        y = residual if here else x.new_empty((p.rows, p.all_columns))
        assert y is not None
        layers = [(_dense(w), None if b is None else _dense(b)) for w, b in inputs.layers]
        partial = None
        if cut.parts > 1:
            shape = (cut.parts, p.rows, p.weight_rows)
            partial = x.new_empty(shape, dtype=torch.float32)
        params = _params(p, cut, config, x, layers, residual, y, partial)
        for spec, grid, block in self._launches(p, cut, config):
            call.launcher(spec, grid, block, params, x.device)
        return y if here or inputs.out is None else inputs.out.copy_(y)


def _many(p: LinearProblem) -> bool:
    return len(p.columns) > FEW_WEIGHTS


def _params(
    p: LinearProblem,
    cut: LinearTiling,
    config: LinearConfig,
    x: torch.Tensor,
    layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    residual: torch.Tensor | None,
    y: torch.Tensor,
    partial: torch.Tensor | None,
) -> LinearParams | LinearManyParams:
    few = () if _many(p) else layers
    none = (None,) * (FEW_WEIGHTS - len(few))
    tensors = (x, *(w for w, _ in few), *none, *(b for _, b in few), *none)
    columns = (*(p.columns if few else ()), 0, 0, 0)[:FEW_WEIGHTS]
    params = LinearParams(
        *(0 if t is None else t.data_ptr() for t in (*tensors, residual, y, partial)),
        *(_step(x), 0 if residual is None else _step(residual), _step(y)),
        *(p.rows, p.k, *columns, p.all_columns),
        *(cut.row_blocks, cut.blocks, cut.together, cut.parts, cut.part_chunks),
    )
    if few:
        return params
    return kernel.many_params(
        params, p.columns, config, (address_of(t) for each in layers for t in each)
    )


def _step(rows: torch.Tensor) -> int:
    """Elements from row to row; any number where there is but one."""
    return int(rows.stride(0)) if rows.shape[0] > 1 else rows.shape[1]


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix`, or a copy where its rows are not dense from multiples of 16 bytes on, or too far
    apart.
    """
    if _has_good_rows(matrix) and matrix.data_ptr() % ALIGNED_BYTES == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _has_good_rows(matrix: torch.Tensor) -> bool:
    """Dense, and apart as the kernel reads them."""
    step = _step(matrix)
    return matrix.stride(1) == 1 and step % 8 == 0 and step <= MOST_STRIDE


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Without gaps, from a multiple of 16 bytes on; a copy if need be."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNED_BYTES == 0 else tensor.clone()


def _is(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
