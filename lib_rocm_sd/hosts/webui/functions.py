"""Stands in for one of a Forge's attention functions, and leaves to it what ours cannot compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lib_rocm_sd import report
from lib_rocm_sd.followed import STOPS
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.packed import Call, NotOursError, attend, call_of, is_compiling
from lib_rocm_sd.hosts.read.unet_forge import OVERRIDE
from lib_rocm_sd.hosts.webui import host, session
from lib_rocm_sd.hosts.webui.attention import calls
from lib_rocm_sd.ops.attention.inputs import AttentionInputs

Compute = Callable[..., torch.Tensor]


class Owner(Protocol):
    """Whose the functions are."""

    stands_aside: bool
    """Whether the WebUI's own functions are to compute everything."""


class Function:
    """In the place of `theirs`, to which it is equal: Forge looks which function is in use, to tell
    how much memory a step takes. Who has kept it gets `theirs` while the owner stands aside.
    """

    def __init__(self, theirs: Compute, compute: Compute, owner: Owner) -> None:
        functools.update_wrapper(self, theirs)
        self.theirs = theirs
        self._compute = compute
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._owner.stands_aside or is_compiling():
            return self.theirs(*args, **kwargs)
        try:
            return self._compute(*args, **kwargs)
        except NotOursError as reason:
            why = str(reason)
        except STOPS:
            raise
        except Exception as error:  # also out of memory: Forge's may need less
            why = f"ours failed: {trouble.once(error)}"
        calls.left_to_host += 1
        report.event(f"a call was left to the WebUI's own attention: {why}")
        return self.theirs(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return given(other) is self.theirs

    def __hash__(self) -> int:
        return hash(self.theirs)


def given(function: Any) -> Any:
    """The WebUI's function, of one that may be ours."""
    return function.theirs if isinstance(function, Function) else function


def packed(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention of the UNet or transformer, as hosts/packed.py says. A model's override of it is
    asked by Neo's own.
    """
    if OVERRIDE in (kwargs.get("transformer_options") or ()):
        raise NotOursError(f"this model has an {OVERRIDE}")
    call = call_of(*args, **kwargs)
    mask = kwargs.get("mask", args[4] if len(args) > 4 else None)
    if mask is not None and mask.ndim == 3 and mask.shape[0] != 1:
        # torch's SDPA, which Forge gives it as it is, takes the first dimension for the heads.
        raise NotOursError(f"the meaning of a mask {tuple(mask.shape)} is not clear")
    return _ours(call, "UNet")


def spatial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of the VAE, (B, C, H, W) each and the output: one head of C channels.

    One transposing copy each, none where a convolution gave channels-last.
    """
    if q.ndim != 4 or q.shape != k.shape or q.shape != v.shape:
        raise NotOursError(f"q, k and v are {', '.join(str(tuple(t.shape)) for t in (q, k, v))}")
    rows = [t.flatten(2).transpose(1, 2).contiguous().unsqueeze(2) for t in (q, k, v)]
    inputs = AttentionInputs(rows[0], rows[1], rows[2], None, None)
    made = _ours(Call(inputs, heads_apart=False), "VAE")
    return made.transpose(1, 2).reshape(q.shape).contiguous()


def _ours(call: Call, part: str) -> torch.Tensor:
    return attend(call, session.current().of_part(part), host.say)
