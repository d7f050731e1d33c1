"""torch's scaled_dot_product_attention through the engine, for one thread, inside a `with` block.

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
from lib_rocm_sd.followed import (
    PLAIN,
    STOPS,
    NotFollowedError,
    asked,
    attention,
)
from lib_rocm_sd.hosts import gate, trouble
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.ops.gradients import is_transformed

SDPA: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention
"""What torch.nn.functional.scaled_dot_product_attention is, unless somebody has replaced that."""

is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
_of_thread = threading.local()


class NotOursError(Exception):
    """This call is torch's; the message says why."""


class Serving(TorchFunctionMode):
    """Serves the calls of the threads that are in it. May be entered again, and by several."""

    def __init__(self, session: Session = DEFAULT) -> None:
        super().__init__()
        self.session = session

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
        try:
            return ours(self.session, *args, **kwargs)
        except (NotOursError, NotFollowedError) as reason:
            why = str(reason)
        except STOPS:
            raise
        except Exception as error:  # also out of memory: torch's may need less
            why = f"ours failed: {trouble.once(error)}"
        self.session.report.event(f"attention ran on torch's own code: {why}")
        return func(*args, **kwargs)


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


def ours(session: Session, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A call of torch's function by our kernel, (B, H, Sq, D), also with gradients; NotOursError or
    NotFollowedError where it cannot be.
    """
    inputs = inputs_of(*args, **kwargs)
    q = inputs.q
    unfit = "; ".join(identify(q.device).reasons) or _dtype_refusal(q)
    if unfit:
        raise NotOursError(unfit)
    try:
        ATTENTION.problem_of(inputs)
    except ValueError as error:
        raise NotOursError(str(error)) from None
    if engine.gate is None:
        gate.begin()
    if torch.is_grad_enabled() and asked(inputs):
        made = attention(inputs, session)
    else:
        route = engine.route(ATTENTION, inputs, session)
        if not route.is_ours:
            raise NotOursError(_why(route.plan))
        made = engine.follow(route, ATTENTION, inputs, session)
    return made.unflatten(-1, (q.shape[2], -1)).transpose(1, 2)


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
    given = [t for t in (q, k, v, attn_mask) if t is not None]
    why = reasons(
        (any(type(t) not in PLAIN for t in given), "an input is no plain tensor"),
        (bool(is_causal), "a causal mask is asked for"),
        (bool(dropout_p), "dropout is asked for"),
        (torch.jit.is_tracing(), "torch.jit traces it"),
    )
    why = why or reasons(
        (is_transformed(), "torch.func transforms it, or tangents are wanted"),
        (any(t.ndim != 4 for t in (q, k, v)), "q, k and v are not (batch, heads, seq, head_dim)"),
    )
    if why:
        raise NotOursError("; ".join(why))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    heads = q.shape[2]
    if enable_gqa and k.shape[2] == v.shape[2] != heads and heads % k.shape[2] == 0:
        k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    return AttentionInputs(q, k, v, attn_mask, scale)


def _dtype_refusal(q: torch.Tensor) -> str:
    """Why a call in q's dtype is torch's; autocast may have torch compute in another one."""
    if q.dtype not in HALVES:
        return f"it is in {str(q.dtype).removeprefix('torch.')}"
    if torch.is_autocast_enabled() and _autocast_dtype() != q.dtype:
        return "autocast asks for another dtype"
    return ""


def _autocast_dtype() -> torch.dtype:
    """On GPUs; the older name warns in a newer torch."""
    newer = getattr(torch, "get_autocast_dtype", None)
    found: torch.dtype = newer("cuda") if newer else torch.get_autocast_gpu_dtype()
    return found


def _why(plan: Any) -> str:
    """What keeps our kernel out of a plan."""
    if plan is None:
        return "an input has no elements"
    refused = [why for name, why in plan.refusals.items() if name == "rocm_sd" and why]
    return "; ".join(refused[0]) if refused else plan.why


def _stack() -> list[Serving]:
    found: list[Serving] | None = getattr(_of_thread, "serving", None)
    if found is None:
        found = _of_thread.serving = []
    return found
