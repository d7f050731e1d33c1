"""ComfyUI's attention through the engine, as an `optimized_attention_override` of one model.

ComfyUI calls it with its own function and that function's arguments. What ours does not compute
goes to that function, with the same arguments, and the reason to the report. Read in
Comfy-Org/ComfyUI a125cd84 (0.3.64), comfy/ldm/modules/attention.py: wrap_attn and the functions
that it wraps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.attention import attend, call_of
from lib_rocm_sd.hosts.comfyui import host
from lib_rocm_sd.hosts.comfyui.host import Kept, count_for_workflow, tally
from lib_rocm_sd.modules.stand_in import is_compiling

KEY = "optimized_attention_override"
"""Key in a model's transformer_options."""


class Override(Kept):
    """Attention of one model."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return theirs(*args, **kwargs)
        count_for_workflow()
        output = tally.attention(self._ours, args, kwargs)
        return theirs(*args, **kwargs) if output is None else output

    def _ours(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        inputs, heads_apart = call_of(*args, **kwargs)
        return attend(inputs, self.session, host.say, heads_apart=heads_apart)
