"""The formula of linear layers by torch's operators."""

from __future__ import annotations

from lib_rocm_sd.ops.lazily import F, torch
from lib_rocm_sd.ops.linear.inputs import LinearInputs


def computed(inputs: LinearInputs, dtype: torch.dtype) -> torch.Tensor:
    """y (rows, columns) in `dtype`, nothing rounded to the dtype of x."""
    x = inputs.x.to(dtype)
    parts = [
        F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
        for weight, bias in inputs.layers
    ]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if inputs.gate:
        value, gate = y.chunk(2, 1)
        y = value * F.gelu(gate)
    return y if inputs.residual is None else y + inputs.residual.to(dtype)


def reference(inputs: LinearInputs) -> torch.Tensor:
    """y in float64."""
    return computed(inputs, torch.float64)
