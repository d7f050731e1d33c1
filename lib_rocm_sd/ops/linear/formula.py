"""The formula of linear layers by torch's operators."""

from __future__ import annotations

from lib_rocm_sd.ops.lazily import F, torch
from lib_rocm_sd.ops.linear.inputs import LinearInputs


def computed(inputs: LinearInputs, dtype: torch.dtype) -> torch.Tensor:
    """y (rows, columns) in `dtype`, nothing rounded to the dtype of x."""
    x = inputs.x.to(dtype)
    made = [
        F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
        for weight, bias in inputs.layers
    ]
    y = made[0] if len(made) == 1 else torch.cat(made, 1)
    if inputs.gate:
        value, gate = y.chunk(2, 1)
        y = value * F.gelu(gate)
    return y if inputs.residual is None else y + inputs.residual.to(dtype)


def reference(inputs: LinearInputs) -> torch.Tensor:
    """y in float64."""
    return computed(inputs, torch.float64)
