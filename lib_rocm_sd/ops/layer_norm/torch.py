"""LayerNorm by torch's operators: what runs where no kernel of ours does."""

from __future__ import annotations

from lib_rocm_sd.ops.base import Call, Variant
from lib_rocm_sd.ops.layer_norm.inputs import LayerNormInputs
from lib_rocm_sd.ops.layer_norm.ours import Result
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.lazily import F, torch


class TorchLayerNorm(Variant[LayerNormProblem, LayerNormInputs]):
    """torch's addition, then its layer_norm.

    In float32 where gamma or beta are of another dtype, and for halves on the CPU, for which an
    older torch has none.
    """

    name = "torch"

    def run(self, call: Call[LayerNormProblem, LayerNormInputs]) -> Result:
        x, gamma, beta, eps, added = call.inputs
        total = x if added is None else x + added
        others = any(t is not None and t.dtype != x.dtype for t in (gamma, beta))
        if others or x.device.type == "cpu":
            wide = torch.promote_types(x.dtype, torch.float32)
            gamma, beta = (None if t is None else t.to(wide) for t in (gamma, beta))
            y = F.layer_norm(total.to(wide), x.shape[-1:], gamma, beta, eps)
        else:
            y = F.layer_norm(total, x.shape[-1:], gamma, beta, eps)
        y = y.to(x.dtype).contiguous()  # autocast makes it float32
        return y if added is None else (y, total.contiguous())
