"""Linear layers by torch's operators: rocBLAS or hipBLASLt, and what is left to do after them."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Launch, Variant
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.ops.linear.formula import computed
from lib_rocm_sd.ops.linear.problem import LinearInputs, LinearProblem


class TorchLinear(Variant[LinearProblem, LinearInputs]):
    """F.linear for each weight, then the host's own operators, which round between them.

    First under Auto: on the one card where both were measured, of another vendor, its products of
    many rows take a half to a quarter of ours' time. Gate and residual are launches of their own,
    and what several weights make is copied side by side. Performance measures both. Halves on the
    CPU are computed in float32, for an older torch has no product of them.
    """

    name = "torch"
    preference = 20

    def refusals(self, arch: Arch | None, problem: LinearProblem) -> list[str]:
        return []

    def workspace(self, problem: LinearProblem) -> int:
        """What is made before the output."""
        p = problem
        copies = p.gate * 3 + (len(p.columns) > 1) + p.residual
        return copies * p.rows * p.all_columns * DTYPES[p.dtype].itemsize

    def run(
        self, launch: Launch | None, config: None, problem: LinearProblem, inputs: LinearInputs
    ) -> torch.Tensor:
        if inputs.x.device.type == "cpu":
            wide = torch.promote_types(inputs.x.dtype, torch.float32)
            y = computed(inputs, wide).to(inputs.x.dtype)
            return y if inputs.out is None else inputs.out.copy_(y)
        made = [F.linear(inputs.x, weight, bias) for weight, bias in inputs.layers]
        y = made[0] if len(made) == 1 else torch.cat(made, 1)
        if inputs.gate:
            value, gate = y.chunk(2, 1)
            y = value * F.gelu(gate)
        if inputs.residual is None:
            return y
        return y + inputs.residual if inputs.out is None else inputs.out.add_(y)
