"""Attention that autograd follows: forward and backward by the engine, on a caller's terms.

`torch.ops.rocm_sd.attention` (torch_ops/) does the same through torch's dispatcher, at level Auto.
Here a session says the level and where it is reported, and a host is told why a call is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from lib_rocm_sd.calls import shielded
from lib_rocm_sd.engine.engine import engine, is_compiling
from lib_rocm_sd.engine.memory import is_recording
from lib_rocm_sd.engine.route import by_torch
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.ops import gradients
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION, ATTENTION_AND_LSE
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.attention_backward.torch import FormulaBackward
from lib_rocm_sd.ops.base import Call, reasons

PLAIN = (torch.Tensor, torch.nn.Parameter)
MOST_DECIDED = 4096
_OPS: tuple[Any, ...] = (ATTENTION_AND_LSE, ATTENTION_BACKWARD)
_decided: dict[Hashable, str] = {}
"""By engine, session, problem and device, why that is torch's; empty where it is ours."""

_Stop: Any = getattr(checkpoint, "_StopRecomputationError", None)
STOPS: tuple[type[Exception], ...] = () if _Stop is None else (_Stop,)
"""By this torch.utils.checkpoint ends a function that it calls again, from within a call of ours:
no host may take it for an error.
"""
_any_wants: Callable[..., bool] | None = getattr(torch._C, "_any_requires_grad", None)


class NotFollowedError(Exception):
    """This call is torch's; the message says why."""


def wanted(arguments: Iterable[Any]) -> bool:
    """Whether any of them is a tensor that asks for its gradient. It counts in grad mode only."""
    if _any_wants is not None:
        return _any_wants(*arguments)
    return any(isinstance(item, torch.Tensor) and item.requires_grad for item in arguments)


def asked(arguments: Iterable[Any]) -> bool:
    """The same, and it is for us to follow: torch.compile makes an operator of the call
    (torch_ops/), and what torch.func transforms the engine leaves to torch's operators.
    """
    return not is_compiling() and wanted(arguments) and not gradients.is_transformed()


def attention(inputs: AttentionInputs, session: Session = DEFAULT) -> torch.Tensor:
    """(B, Sq, H*D), with gradients by the op attention_backward. NotFollowedError where our kernels
    take the call or its gradients not at all; ValueError, with shapes, on a caller's mistake.

    A gradient that shall have a gradient is the formula's, by torch's operators.
    """
    problem = ATTENTION.problem_of(inputs)
    why = _unfit(inputs)
    if not why and all(t.numel() for t in inputs[:3]):
        why = _against(problem, inputs.q.device, session)
    if why:
        raise NotFollowedError(f"gradients are wanted, and {why}")
    return RocmSdAttention.apply(*inputs, session)


def attention_or_torchs(inputs: AttentionInputs, session: Session = DEFAULT) -> torch.Tensor:
    """The same, by torch's operators where it is not for our kernels."""
    try:
        return attention(inputs, session)
    except NotFollowedError as reason:
        session.report.event(f"attention ran on torch's own code: {reason}")
    if wanted((inputs.mask,)):  # of this the forward's plan knows nothing
        return by_torch(ATTENTION, inputs)
    return engine.run(ATTENTION, inputs, session)


def _unfit(inputs: AttentionInputs) -> str:
    """Why these tensors are torch's."""
    given = [t for t in inputs[:4] if isinstance(t, torch.Tensor)]
    why = reasons(
        (any(type(t) not in PLAIN for t in given), "an input is no plain tensor"),
        (gradients.is_transformed(), "torch.func transforms it, or tangents are wanted"),
        (torch.jit.is_tracing(), "torch.jit traces it"),
        (wanted((inputs.mask,)), "the mask's own gradient is wanted"),
    )
    why = why or reasons(
        (
            any(t.shape[3] > 1 and t.stride(3) != 1 for t in inputs[:3]),
            "a last stride of q, k or v is not 1",
        ),
    )
    return "; ".join(why)


def _against(problem: AttentionProblem, device: torch.device, session: Session) -> str:
    """Why this problem is torch's: a kernel, forward or backward, refuses it, was found wrong, or
    is not what the level takes.

    Decided once, also for kernels that still wait for their trial: torch.utils.checkpoint makes a
    call twice, and what the two keep for the backward pass has to be the same. Until a kernel may
    be launched, or when it is barred later, the engine computes by torch's operators in its place.
    """
    key = (engine, session, problem, device)
    why = _decided.get(key)
    if why is None:
        with saved_tensors_hooks(_itself, _itself):  # a checkpoint's are not for self-tests
            found = (engine.refused(op, problem, device, session) for op in _OPS)
            why = "; ".join(next((each for each in found if each), []))
        if is_recording(device):  # nothing is tested then
            return why
        if len(_decided) >= MOST_DECIDED:
            _decided.clear()
        why = _decided.setdefault(key, why)
    return why


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class RocmSdAttention(torch.autograd.Function):
    """q, k, v, the mask, the output and the log-sum-exp are kept between; no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        session: Session,
    ) -> torch.Tensor:
        with shielded(q.device):
            inputs = AttentionInputs(q, k, v, mask, scale)
            output, lse = engine.run(ATTENTION_AND_LSE, inputs, session)
        ctx.scale, ctx.session = scale, session
        ctx.save_for_backward(q, k, v, output, lse, mask)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, output, lse, mask = ctx.saved_tensors
        inputs = AttentionBackwardInputs(q, k, v, output, grad, lse, mask, ctx.scale)
        with shielded(q.device):
            if torch.is_grad_enabled():  # they shall have gradients themselves
                problem = ATTENTION_BACKWARD.problem_of(inputs)
                grads = FormulaBackward().run(Call(problem, inputs))
            else:
                grads = engine.run(ATTENTION_BACKWARD, inputs, ctx.session)
        own = (t if want else None for t, want in zip(grads, ctx.needs_input_grad, strict=False))
        return (*own, None, None, None)
