"""Ours for every model, VAE and upscaler without a node, where an environment variable asks for it.

These attributes of ComfyUI's classes are replaced: `BaseModel.apply_model`, which puts our override
into the options of that call only, `VAE.__init__`, and what
the node for upscaling runs (upscaler.py). Read in Comfy-Org/ComfyUI a125cd84 (0.3.64):
comfy/model_base.py, comfy/sd.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from lib_rocm_sd import policy
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.comfyui import host
from lib_rocm_sd.hosts.comfyui.host import OPTIONS, PLACE
from lib_rocm_sd.modules.patches import Patch, put, take

VARIABLE = "ROCM_SD_COMFYUI_ALL"

_patches: list[Patch] = []


def level_asked(environ: Mapping[str, str] = os.environ) -> str:
    """The level that the variable asks for: "1" is Auto; empty where it asks for nothing."""
    asked = environ.get(VARIABLE, "").strip()
    if asked in ("", "0"):
        return ""
    return policy.AUTO.name if asked == "1" else asked


def begin(level: str) -> bool:
    """Serve all models and VAEs that are made from now on; False, with a line in the log, where
    this ComfyUI has no place for it.
    """
    if _patches:
        return True
    if level not in policy.LEVELS:
        known = ", ".join(policy.LEVELS)
        host.say(f"{VARIABLE}={level} is none of 1, {known}")
        return False
    model: Any = host.attribute("comfy.model_base", "BaseModel")
    vae: Any = host.attribute("comfy.sd", "VAE")
    if not callable(getattr(model, "apply_model", None)) or vae is None:
        host.say(f"{VARIABLE}: this ComfyUI is made otherwise; nothing is set")
        return False
    _patches.append(put(model, "apply_model", _model(model.apply_model, level)))
    _patches.append(put(vae, "__init__", _vae(vae.__init__, level)))
    _patches.extend(_upscaler(level))
    host.say(f"{VARIABLE}: all models' attention, all VAEs and upscalers, level {level}")
    return True


def end() -> None:
    """Put back what was there."""
    while _patches:
        take(_patches.pop())


def _model(theirs: Callable[..., Any], level: str) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def apply_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _override(level)
        if len(args) > PLACE:
            args = (*args[:PLACE], {**ours, **(args[PLACE] or {})}, *args[PLACE + 1 :])
        else:
            kwargs[OPTIONS] = {**ours, **(kwargs.get(OPTIONS) or {})}
        return theirs(self, *args, **kwargs)

    return apply_model


@functools.cache
def _override(level: str) -> dict[str, Any]:
    """What options have where a model has no override of its own; imported at the first step."""
    try:
        from lib_rocm_sd.hosts.comfyui.attention import KEY, Override

        return {KEY: Override(host.session_of(level))}
    except Exception as error:
        host.say(f"attention is ComfyUI's own: {trouble.once(error)}")
        return {}


def _upscaler(level: str) -> list[Patch]:
    try:
        from lib_rocm_sd.hosts.comfyui.upscaler import serve_node

        return serve_node(host.upscale_node(), host.session_of(level))
    except Exception as error:
        host.say(f"upscaling is ComfyUI's own: {trouble.once(error)}")
        return []


def _vae(theirs: Callable[..., None], level: str) -> Callable[..., None]:
    @functools.wraps(theirs)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        theirs(self, *args, **kwargs)
        try:
            _equip(self, level)
        except Exception as error:
            host.say(f"a VAE is ComfyUI's own: {trouble.once(error)}")

    return __init__


def _equip(vae: Any, level: str) -> None:
    from torch import nn

    from lib_rocm_sd.hosts.comfyui import vae as vaes

    model = getattr(vae, "first_stage_model", None)
    if isinstance(model, nn.Module):
        vaes.equip(vae, model, vaes.NodeWish(session=host.session_of(level)))
