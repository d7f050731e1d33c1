"""A model whose attention, and UNet blocks, are ours: a clone; the given one stays as it is."""

from __future__ import annotations

from typing import Any

from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.comfyui import sessions
from lib_rocm_sd.hosts.comfyui.attention import KEY, Override
from lib_rocm_sd.hosts.comfyui.tally import ATTENTION, UNET, tally
from lib_rocm_sd.hosts.optional import attribute
from lib_rocm_sd.modules.patches import named

OPTIONS, WRAPPERS = "transformer_options", "wrappers"
NAME = "rocm_sd"
"""Of ours among a model's wrappers."""


def optimized(model: Any, level: str, attention: bool, unet: bool = False) -> Any:
    """A clone of `model`, a ModelPatcher, whose attention goes through the engine, or does not;
    and whose UNet's blocks are ours where they can be, or are not.

    Another's override stays, with a reason. What fails gives the model as it came.
    """
    try:
        made = model.clone()
        options = dict(made.model_options.get(OPTIONS, {}))
        _set_attention(options, level, attention)
        _set_unet(options, level, unet)
        made.model_options[OPTIONS] = options
    except Exception as error:
        tally.leave(ATTENTION, f"the node failed: {trouble.once(error)}")
        return model
    return made


def _set_attention(options: dict[str, Any], level: str, attention: bool) -> None:
    present = options.get(KEY)
    if present is not None and not isinstance(present, Override):
        tally.leave(ATTENTION, f"the model has another override already ({named(present)})")
        return
    options.pop(KEY, None)
    if attention:
        options[KEY] = Override(sessions.of(level))


def _set_unet(options: dict[str, Any], level: str, unet: bool) -> None:
    kind = attribute("comfy.patcher_extension", "WrappersMP", "APPLY_MODEL")
    if kind is None:
        if unet:
            tally.leave(UNET, "this ComfyUI has no wrappers around a model's call")
        return
    wrappers = dict(options.get(WRAPPERS, {}))
    named_ones = {name: one for name, one in wrappers.get(kind, {}).items() if name != NAME}
    if unet:
        from lib_rocm_sd.hosts.comfyui.unet import ModelCall

        named_ones[NAME] = [ModelCall(sessions.of(level))]
    if named_ones or kind in wrappers:
        options[WRAPPERS] = {**wrappers, kind: named_ones}
