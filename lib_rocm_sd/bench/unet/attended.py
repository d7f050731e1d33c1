"""Attention of diffusers' UNet by functional.py, the rest left as it is: what torch.compile then
finds in it is `torch.ops.rocm_sd.attention`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lib_rocm_sd import functional


class Attended:
    """An attention processor of diffusers for its UNets' attentions without masks."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states (B, S, C), encoder_hidden_states (B, S', C') or None, the same."""
        if attention_mask is not None:
            raise ValueError("a mask: a UNet's step has none")
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q = attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1))
        k, v = (layer(text).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_k, attn.to_v))
        project, dropout = attn.to_out
        made: torch.Tensor = dropout(project(functional.attention(q, k, v)))
        return made


@contextmanager
def attended(module: Any) -> Iterator[None]:
    """Within this, the attentions of a UNet of diffusers are `Attended`."""
    importlib.import_module("lib_rocm_sd.torch_ops")  # no host has it for what it measures itself
    before = dict(module.attn_processors)
    module.set_attn_processor(Attended())
    try:
        yield
    finally:
        module.set_attn_processor(before)
