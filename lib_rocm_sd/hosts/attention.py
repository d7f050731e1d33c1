"""Attention as hosts call it, computed by a kernel of ours or by none; and torch's own function.

`call_of` and `attend`: as ComfyUI's family does. Their functions take q, k and v with the heads
side by side, (B, S, H*D), or apart, (B, H, S, D), and give (B, Sq, H*D). Read in
Comfy-Org/ComfyUI a125cd84 (0.3.64), comfy/ldm/modules/attention.py;
lllyasviel/stable-diffusion-webui-forge dfdcbab6, backend/attention.py;
Panchovix/stable-diffusion-webui-reForge 3b56b268, ldm_patched/ldm/modules/attention.py.

`served`: torch's scaled_dot_product_attention, for one thread, inside a `with` block.

with served():
    out = model(x)

No function of torch is replaced: a TorchFunctionMode sees the thread's calls of torch functions.
What ours does not compute is torch's, with the arguments as they were, and the reason is in the
report. So is every call that torch.compile traces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.followed import PLAIN, asked, attention
from lib_rocm_sd.hosts import gate
from lib_rocm_sd.hosts.ours import NotOursError, Tally
from lib_rocm_sd.modules.stand_in import is_compiling
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.ops.gradients import is_transformed

WITHOUT_EFFECT = {
    "attn_precision": "scores and sums are float32 in ours",
    "low_precision_attention": "ours is not of low precision",
    "transformer_options": "where the call comes from",
    "_inside_attn_wrapper": "ComfyUI's own mark",
}
"""Keyword arguments that ours need not look at, and why."""
SDPA: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention
"""What torch.nn.functional.scaled_dot_product_attention is, unless somebody has replaced that."""
TRANSFORMED = "torch.func transforms it, or tangents are wanted"
_PLAIN = set(PLAIN)
_of_thread = threading.local()


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
) -> tuple[AttentionInputs, bool]:
    """The call in our words, by views of q, k and v, and whether its output is wanted with the
    heads apart; NotOursError where there are no words for it.

    With `skip_reshape` q is (B, H, Sq, D), else (B, Sq, H*D); k and v are alike, with as many
    heads, or with fewer where `enable_gqa` says that each serves several of q's: that is a copy.
    Without it they may also be (B, Sk, H, D), or have another batch, see `_apart`.
    """
    if not others.keys() <= WITHOUT_EFFECT.keys():
        unknown = ", ".join(sorted(others.keys() - WITHOUT_EFFECT.keys()))
        raise NotOursError(f"it is called with {unknown}, which is not known here")
    if not skip_reshape:
        q, k, v = _apart(q, k, v, heads, enable_gqa)
    elif q.ndim == k.ndim == v.ndim == 4:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    else:
        raise unclear(q, k, v)
    if enable_gqa and k.shape[2] != q.shape[2] and q.shape[2] % k.shape[2] == 0:
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    if mask is not None and mask.ndim != 4:
        # Of a boolean one with fewer dimensions the hosts' functions think differently.
        if mask.dtype == torch.bool or mask.ndim not in (2, 3):
            shape = tuple(mask.shape)
            raise NotOursError(f"the meaning of a {_name(mask.dtype)} mask {shape} is not clear")
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
    return AttentionInputs(q, k, v, mask, scale), skip_output_reshape


def _apart(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, grouped: bool
) -> list[torch.Tensor]:
    """Each as (B, S, H, D) with q's B and D, as the hosts' functions reshape it. So where only q
    was cut into tiles (ComfyUI's HyperTile), each tile attends to its share of the rows of k and v.

    `grouped`: k and v keep their own number of heads.
    """
    batch, head_dim, apart = q.shape[0], q.shape[-1] // heads, []
    for t in (q, k, v):
        many = heads
        if grouped and head_dim:
            many = t.shape[2] if t.ndim == 4 else t.shape[-1] // head_dim
        size = batch * many * head_dim
        if q.ndim != 3 or t.ndim not in (3, 4) or not size or t.numel() % size:
            raise unclear(q, k, v)
        apart.append(t.reshape(batch, -1, many, head_dim))
    return apart


def unclear(*tensors: torch.Tensor) -> NotOursError:
    """The refusal of shapes that no host's function says how to read."""
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
    return NotOursError(f"its inputs have shapes that we cannot read: q, k and v are {shapes}")


def attend(
    inputs: AttentionInputs, session: Session, *say: gate.Say, heads_apart: bool = False
) -> torch.Tensor:
    """(B, Sq, H*D), or (B, H, Sq, D) with `heads_apart`, by a kernel of ours, also with gradients;
    NotOursError or NotFollowedError where none may, ValueError on a caller's mistake.

    `say` is told of what trials find, where this is what begins them.
    """
    q = inputs.q
    unfit = identify(q.device).reasons
    if unfit:
        raise NotOursError("; ".join(unfit))
    if q.dtype not in HALVES:
        raise NotOursError(f"it is in {_name(q.dtype)}, and ours takes float16 and bfloat16")
    if is_transformed():
        raise NotOursError(TRANSFORMED)
    if inputs.mask is not None and inputs.mask.dtype == torch.int32:
        raise NotOursError("the meaning of an int32 mask is not clear")  # to us it is key lengths
    if engine.gate is None:
        gate.begin(*say)
    if torch.is_grad_enabled() and asked(inputs):
        output = attention(inputs, session)
    else:
        route = engine.route(ATTENTION, inputs, session)
        if not route.is_ours:
            raise NotOursError(_why(route.plan))
        output = engine.follow(route, ATTENTION, inputs, session)
    return output.unflatten(-1, (q.shape[2], -1)).transpose(1, 2) if heads_apart else output


def _why(plan: Any) -> str:
    """What keeps our kernel out of a plan."""
    if plan is None:
        return "an input has no elements"
    refused = [why for name, why in plan.refusals.items() if name == "rocm_sd" and why]
    return "; ".join(refused[0]) if refused else plan.why


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Serving(TorchFunctionMode):
    """Serves the calls of the threads that are in it. May be entered again, and by several."""

    def __init__(self, session: Session = DEFAULT) -> None:
        super().__init__()
        self.session = session
        self._tally = Tally("attention ran on torch's own code: {why}", session.report)

    def __enter__(self) -> Serving:
        super().__enter__()
        _stack().append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _stack().pop()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not SDPA or is_compiling():
            return func(*args, **kwargs)
        output = self._tally.attention(self.ours, args, kwargs)
        return func(*args, **kwargs) if output is None else output

    def ours(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A call of torch's function by our kernel, (B, H, Sq, D), also with gradients;
        NotOursError or NotFollowedError where it cannot be.

        Autocast may have torch compute in another dtype. For a mistake in the call torch has an
        error of its own.
        """
        inputs = inputs_of(*args, **kwargs)
        if torch.is_autocast_enabled() and _autocast_dtype() != inputs.q.dtype:
            raise NotOursError("autocast asks for another dtype")
        try:
            return attend(inputs, self.session, heads_apart=True)
        except ValueError:
            try:
                ATTENTION.problem_of(inputs)
            except ValueError as mistake:
                raise NotOursError(str(mistake)) from None
            raise  # it is ours


def is_serving() -> bool:
    """Whether this thread's calls are served already."""
    return bool(_stack())


@contextmanager
def served(session: Session = DEFAULT, *, wait: bool = False) -> Iterator[Serving]:
    """Serve this thread's calls of torch.nn.functional.scaled_dot_product_attention by ours.

    `wait`: first calls wait until their kernels were tried in a process of their own; else torch
    computes meanwhile.
    """
    with Serving(session.patiently() if wait else session) as mode:
        yield mode


def inputs_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionInputs:
    """The call in our words, by views of q, k and v; NotOursError where there are none for it.

    With `enable_gqa` each of fewer heads of k and v serves several of q's: that is a copy.
    """
    q, k, v = query, key, value
    why = reasons(
        (
            not {type(q), type(k), type(v)} <= _PLAIN
            or not (attn_mask is None or type(attn_mask) in _PLAIN),
            "an input is no plain tensor",
        ),
        (bool(is_causal), "a causal mask is asked for"),
        (bool(dropout_p), "dropout is asked for"),
        (torch.jit.is_tracing(), "torch.jit traces it"),
    )
    why = why or reasons(
        (is_transformed(), TRANSFORMED),
        (not q.ndim == k.ndim == v.ndim == 4, "q, k and v are not (batch, heads, seq, head_dim)"),
    )
    if why:
        raise NotOursError("; ".join(why))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    heads = q.shape[2]
    if enable_gqa and k.shape[2] == v.shape[2] != heads and heads % k.shape[2] == 0:
        k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    return AttentionInputs(q, k, v, attn_mask, scale)


def _autocast_dtype() -> torch.dtype:
    """On GPUs; the older name warns in a newer torch."""
    newer = getattr(torch, "get_autocast_dtype", None)
    dtype: torch.dtype = newer("cuda") if newer else torch.get_autocast_gpu_dtype()
    return dtype


def _stack() -> list[Serving]:
    stack: list[Serving] | None = getattr(_of_thread, "serving", None)
    if stack is None:
        stack = _of_thread.serving = []
    return stack
