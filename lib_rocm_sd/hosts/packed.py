"""Attention as ComfyUI's family of hosts calls it, computed by a kernel of ours or by none.

Their functions take q, k and v with the heads side by side, (B, S, H*D), or apart, (B, H, S, D),
and give (B, Sq, H*D). Read in Comfy-Org/ComfyUI a125cd84 (0.3.64), comfy/ldm/modules/attention.py;
lllyasviel/stable-diffusion-webui-forge dfdcbab6, backend/attention.py;
Panchovix/stable-diffusion-webui-reForge 3b56b268, ldm_patched/ldm/modules/attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.followed import NotFollowedError, asked, attention
from lib_rocm_sd.hosts import gate
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.ops.gradients import is_transformed

WITHOUT_EFFECT = {
    "attn_precision": "scores and sums are float32 in ours",
    "low_precision_attention": "ours is not of low precision",
    "transformer_options": "where the call comes from",
    "_inside_attn_wrapper": "ComfyUI's own mark",
}
"""Keyword arguments that ours need not look at, and why."""

is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


class NotOursError(Exception):
    """This call is the host's; the message says why."""


@dataclass(frozen=True)
class Call:
    """One call. `heads_apart`: the output is wanted as (B, H, Sq, D), not (B, Sq, H*D)."""

    inputs: AttentionInputs
    heads_apart: bool


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
    Without it they may also be (B, Sk, H, D), or have another batch, see `_apart`.
    """
    asked = sorted(set(others) - set(WITHOUT_EFFECT))
    if asked:
        raise NotOursError(f"it is asked for with {', '.join(asked)}, which is not known here")
    if skip_reshape:
        if any(t.ndim != 4 for t in (q, k, v)):
            raise _unclear(q, k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    else:
        q, k, v = _apart(q, k, v, heads, enable_gqa)
    if k.shape[2] != q.shape[2] and enable_gqa and q.shape[2] % k.shape[2] == 0:
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    return Call(AttentionInputs(q, k, v, _mask(mask), scale), skip_output_reshape)


def _apart(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, grouped: bool
) -> Iterator[torch.Tensor]:
    """Each as (B, S, H, D) with q's B and D, as the hosts' functions reshape it. So where only q
    was cut into tiles (ComfyUI's HyperTile), each tile attends to its share of the rows of k and v.

    `grouped`: k and v keep their own number of heads.
    """
    batch, head_dim = q.shape[0], q.shape[-1] // heads
    for t in (q, k, v):
        many = heads
        if grouped and head_dim:
            many = t.shape[2] if t.ndim == 4 else t.shape[-1] // head_dim
        size = batch * many * head_dim
        if q.ndim != 3 or t.ndim not in (3, 4) or not size or t.numel() % size:
            raise _unclear(q, k, v)
        yield t.reshape(batch, -1, many, head_dim)


def _unclear(*tensors: torch.Tensor) -> NotOursError:
    return NotOursError(f"q, k and v are {', '.join(str(tuple(t.shape)) for t in tensors)}")


def attend(call: Call, session: Session, say: gate.Say) -> torch.Tensor:
    """The call by a kernel of ours, in the layout that it asks for, also with gradients;
    NotOursError where none may.

    `say` is told of what trials find, where this is what begins them.
    """
    q = call.inputs.q
    unfit = "; ".join(identify(q.device).reasons)
    if unfit or q.dtype not in HALVES:
        raise NotOursError(unfit or f"it is in {str(q.dtype).removeprefix('torch.')}")
    if is_transformed():
        raise NotOursError("torch.func transforms it, or tangents are wanted")
    if engine.gate is None:
        gate.begin(say)
    if torch.is_grad_enabled() and asked(call.inputs):
        made = _followed(call.inputs, session)
    else:
        route = engine.route(ATTENTION, call.inputs, session)
        if not route.is_ours:
            raise NotOursError(_why(route.plan))
        made = engine.follow(route, ATTENTION, call.inputs, session)
    if call.heads_apart:
        return made.unflatten(-1, (q.shape[2], -1)).transpose(1, 2)
    return made


def _followed(inputs: AttentionInputs, session: Session) -> torch.Tensor:
    try:
        return attention(inputs, session)
    except NotFollowedError as reason:
        raise NotOursError(str(reason)) from None


def _why(plan: Any) -> str:
    """What keeps our kernel out of a plan."""
    if plan is None:
        return "an input has no elements"
    refused = [why for name, why in plan.refusals.items() if name == "rocm_sd" and why]
    return "; ".join(refused[0]) if refused else plan.why


def _mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask that broadcasts to (B, H, Sq, Sk), of one (Sq, Sk), (B, Sq, Sk) or with all four.

    Of a boolean one with fewer than four dimensions the hosts' functions think differently.
    """
    if mask is None or mask.ndim == 4:
        return mask
    if mask.dtype == torch.bool or mask.ndim not in (2, 3):
        name = str(mask.dtype).removeprefix("torch.")
        raise NotOursError(f"the meaning of a {name} mask {tuple(mask.shape)} is not clear")
    return mask.unsqueeze(1) if mask.ndim == 3 else mask
