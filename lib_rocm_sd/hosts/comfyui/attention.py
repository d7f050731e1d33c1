"""ComfyUI's attention through the engine, as an `optimized_attention_override` of one model.

ComfyUI calls it with its own function and that function's arguments. What ours does not compute
goes to that function, with the same arguments, and the reason to the report. Read in
Comfy-Org/ComfyUI a125cd84 (0.3.64), comfy/ldm/modules/attention.py: wrap_attn and the functions
that it wraps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import gate, trouble
from lib_rocm_sd.hosts.comfyui import host
from lib_rocm_sd.hosts.comfyui.tally import ATTENTION as COUNTED
from lib_rocm_sd.hosts.comfyui.tally import tally
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionInputs

KEY = "optimized_attention_override"
"""Of a model's transformer_options."""
WITHOUT_EFFECT = {
    "attn_precision": "scores and sums are float32 in ours",
    "low_precision_attention": "ours is not of low precision",
    "transformer_options": "where the call comes from",
    "_inside_attn_wrapper": "ComfyUI's own mark",
}
"""Keyword arguments that ours need not look at, and why."""
HALVES = (torch.float16, torch.bfloat16)

_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


class NotOursError(Exception):
    """This call is ComfyUI's; the message says why."""


@dataclass(frozen=True)
class Call:
    """One call. `heads_apart`: the output is wanted as (B, H, Sq, D), not (B, Sq, H*D)."""

    inputs: AttentionInputs
    heads_apart: bool


class Override:
    """Attention of one model. A copy of the model's options has the same one."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __deepcopy__(self, memo: dict[int, Any]) -> Override:
        return self

    def __copy__(self) -> Override:
        return self

    def __call__(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return theirs(*args, **kwargs)
        try:
            made = self._ours(*args, **kwargs)
        except NotOursError as reason:
            why = str(reason)
        except Exception as error:  # also out of memory: ComfyUI's may need less
            why = f"ours failed: {trouble.once(error)}"
        else:
            tally.served(COUNTED)
            return made
        tally.leave(COUNTED, why)
        return theirs(*args, **kwargs)

    def _ours(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = call_of(*args, **kwargs)
        q = call.inputs.q
        unfit = "; ".join(identify(q.device).reasons)
        if unfit or q.dtype not in HALVES:
            raise NotOursError(unfit or f"it is in {str(q.dtype).removeprefix('torch.')}")
        if engine.gate is None:
            gate.begin(host.say)
        route = engine.route(ATTENTION, call.inputs, self.session)
        if not route.is_ours:
            raise NotOursError(_why(route.plan))
        made: torch.Tensor = engine.follow(route, ATTENTION, call.inputs, self.session)
        if call.heads_apart:
            return made.unflatten(-1, (q.shape[2], -1)).transpose(1, 2)
        return made


def _why(plan: Any) -> str:
    """What keeps our kernel out of a plan."""
    if plan is None:
        return "an input has no elements"
    refused = [why for name, why in plan.refusals.items() if name == "rocm_sd" and why]
    return "; ".join(refused[0]) if refused else plan.why


def call_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **others: Any,
) -> Call:
    """The call in our words, by views of q, k and v; NotOursError where it has no words for it.

    With `skip_reshape` q is (B, H, Sq, D), else (B, Sq, H*D); k and v are alike, with as many
    heads, or with fewer where `enable_gqa` says that each serves several of q's: that is a copy.
    """
    asked = sorted(set(others) - set(WITHOUT_EFFECT))
    if asked:
        raise NotOursError(f"it is asked for with {', '.join(asked)}, which is not known here")
    if any(t.ndim != (4 if skip_reshape else 3) for t in (q, k, v)):
        raise NotOursError(f"q, k and v are {', '.join(str(tuple(t.shape)) for t in (q, k, v))}")
    if skip_reshape:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    else:
        head_dim = q.shape[-1] // heads
        q, k, v = (t.unflatten(-1, (-1, head_dim)) for t in (q, k, v))
    if k.shape[2] != q.shape[2] and enable_gqa and q.shape[2] % k.shape[2] == 0:
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    return Call(AttentionInputs(q, k, v, _mask(mask), scale), skip_output_reshape)


def _mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask that broadcasts to (B, H, Sq, Sk), of one (Sq, Sk), (B, Sq, Sk) or with all four.

    Of a boolean one with fewer than four dimensions ComfyUI's functions think differently.
    """
    if mask is None or mask.ndim == 4:
        return mask
    if mask.dtype == torch.bool or mask.ndim not in (2, 3):
        name = str(mask.dtype).removeprefix("torch.")
        raise NotOursError(f"the meaning of a {name} mask {tuple(mask.shape)} is not clear")
    return mask.unsqueeze(1) if mask.ndim == 3 else mask
