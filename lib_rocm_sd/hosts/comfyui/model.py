"""A model whose attention is ours: a clone with an override, the given one stays as it is."""

from __future__ import annotations

from typing import Any

from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.comfyui import sessions
from lib_rocm_sd.hosts.comfyui.attention import KEY, Override
from lib_rocm_sd.hosts.comfyui.tally import ATTENTION, tally
from lib_rocm_sd.modules.patches import named

OPTIONS = "transformer_options"


def optimized(model: Any, level: str, attention: bool) -> Any:
    """A clone of `model`, a ModelPatcher, whose attention goes through the engine, or does not.

    Another's override stays, with a reason. What fails gives the model as it came.
    """
    try:
        return _optimized(model, level, attention)
    except Exception as error:
        tally.leave(ATTENTION, f"the node failed: {trouble.once(error)}")
        return model


def _optimized(model: Any, level: str, attention: bool) -> Any:
    made = model.clone()
    options = dict(made.model_options.get(OPTIONS, {}))
    present = options.pop(KEY, None)
    if present is not None and not isinstance(present, Override):
        tally.leave(ATTENTION, f"the model has another override already ({named(present)})")
        return made
    if attention:
        options[KEY] = Override(sessions.of(level))
    made.model_options[OPTIONS] = options
    return made
