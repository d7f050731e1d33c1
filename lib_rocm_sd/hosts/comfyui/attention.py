"""ComfyUI's attention through the engine, as an `optimized_attention_override` of one model.

ComfyUI calls it with its own function and that function's arguments. What ours does not compute
goes to that function, with the same arguments, and the reason to the report. Read in
Comfy-Org/ComfyUI a125cd84 (0.3.64), comfy/ldm/modules/attention.py: wrap_attn and the functions
that it wraps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.followed import STOPS
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.comfyui import host
from lib_rocm_sd.hosts.comfyui.tally import ATTENTION as COUNTED
from lib_rocm_sd.hosts.comfyui.tally import tally
from lib_rocm_sd.hosts.packed import NotOursError, attend, call_of, is_compiling

KEY = "optimized_attention_override"
"""Key in a model's transformer_options."""


class Override:
    """Attention of one model. A copy of the model's options has the same one."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __deepcopy__(self, memo: dict[int, Any]) -> Override:
        return self

    def __copy__(self) -> Override:
        return self

    def __call__(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return theirs(*args, **kwargs)
        try:
            made = attend(call_of(*args, **kwargs), self.session, host.say)
        except NotOursError as reason:
            why = str(reason)
        except STOPS:
            raise
        except Exception as error:  # also out of memory: ComfyUI's may need less
            why = f"ours failed: {trouble.once(error)}"
        else:
            tally.served(COUNTED)
            return made
        tally.leave(COUNTED, why)
        return theirs(*args, **kwargs)
