"""Ours for every model and every VAE without a node, where an environment variable asks for it.

Two attributes of ComfyUI's classes are replaced: `BaseModel.apply_model`, which puts our override
into the options of that call only, and `VAE.__init__`. Read in Comfy-Org/ComfyUI a125cd84 (0.3.64):
comfy/model_base.py, comfy/sd.py.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lib_rocm_sd import policy
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.comfyui import host, sessions
from lib_rocm_sd.hosts.comfyui import vae as vaes
from lib_rocm_sd.hosts.comfyui.attention import KEY, Override
from lib_rocm_sd.hosts.comfyui.coder import VaeWish
from lib_rocm_sd.hosts.comfyui.model import OPTIONS
from lib_rocm_sd.hosts.comfyui.tally import tally
from lib_rocm_sd.modules.patches import Patch, put, take

VARIABLE = "ROCM_SD_COMFYUI_ALL"
PLACE = 5
"""Of `transformer_options` among apply_model's arguments, after `self`."""

log = logging.getLogger("rocm_sd")
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
    try:
        session = sessions.of(level)
    except ValueError as error:
        log.warning("%s: %s=%s: %s", host.NAME, VARIABLE, level, error)
        return False
    model: Any = host.attribute("comfy.model_base", "BaseModel")
    vae: Any = host.attribute("comfy.sd", "VAE")
    if not callable(getattr(model, "apply_model", None)) or not hasattr(vae, "__init__"):
        log.warning("%s: %s: this ComfyUI is made otherwise; nothing is set", host.NAME, VARIABLE)
        return False
    _patches.append(put(model, "apply_model", _model(model.apply_model, Override(session))))
    _patches.append(put(vae, "__init__", _vae(vae.__init__, VaeWish(session))))
    log.info("%s: %s: all models' attention and all VAEs, level %s", host.NAME, VARIABLE, level)
    return True


def end() -> None:
    """Put back what was there."""
    while _patches:
        take(_patches.pop())


def _model(theirs: Callable[..., Any], override: Override) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def apply_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > PLACE:
            options = {KEY: override, **(args[PLACE] or {})}
            args = (*args[:PLACE], options, *args[PLACE + 1 :])
        else:
            kwargs[OPTIONS] = {KEY: override, **(kwargs.get(OPTIONS) or {})}
        return theirs(self, *args, **kwargs)

    return apply_model


def _vae(theirs: Callable[..., None], wish: VaeWish) -> Callable[..., None]:
    @functools.wraps(theirs)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        theirs(self, *args, **kwargs)
        model = getattr(self, "first_stage_model", None)
        try:
            if isinstance(model, nn.Module):
                vaes.equip(self, model, wish)
        except Exception as error:
            tally.leave("VAE", f"it could not be taken over: {trouble.once(error)}")

    return __init__
