"""A model whose attention, and UNet blocks, are ours: a clone; the given one stays as it is.

ComfyUI's DynamicVRAM brings a layer's weights in each call, so blocks need a clone without it. Read
in Comfy-Org/ComfyUI 08d0e510 (0.38), comfy/model_patcher.py: ModelPatcher.clone and is_dynamic; and
033046cc, comfy/sd.py: the loaders. 0.3.64 (a125cd84) has none of it.
"""

from __future__ import annotations

from typing import Any

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.selftest import describe
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.comfyui.attention import KEY, Override
from lib_rocm_sd.hosts.comfyui.host import (
    OPTIONS,
    UNET,
    Left,
    count_for_workflow,
    session_of,
    tally,
)
from lib_rocm_sd.hosts.optional import attribute
from lib_rocm_sd.hosts.ours import ATTENTION
from lib_rocm_sd.modules.patches import named

WRAPPERS = "wrappers"
NAME = "rocm_sd"
"""Name of our wrapper among a model's wrappers."""
WITHOUT = "start ComfyUI with --disable-dynamic-vram"


def optimized(model: Any, level: str, attention: bool, unet: bool = False) -> Any:
    """A clone of `model`, a ModelPatcher, whose attention goes through the engine, or does not;
    and whose UNet's blocks are ours where they can be, or are not. With blocks it is a clone that
    DynamicVRAM does not load, where there is one.

    Another's override stays, with a reason. Reasons go with the clone, since ComfyUI keeps it for
    later workflows. What fails gives the model as it came.
    """
    count_for_workflow()
    reasons: list[Left] = []
    try:
        made = _static(model, reasons) if unet else None
        if made is None:
            made = model.clone()
        options = dict(made.model_options.get(OPTIONS, {}))
        _set_attention(options, level, attention, reasons)
        _set_calls(options, level, unet, reasons)
        made.model_options[OPTIONS] = options
        tally.stands(reasons)
    except Exception as error:
        tally.leave(ATTENTION, f"the node failed: {trouble.once(error)}")
        return model
    return made


def _static(model: Any, reasons: list[Left]) -> Any:
    """A clone that DynamicVRAM does not load; None where it does not load `model`, where such a
    clone would be of no use, or, with a reason, where there is none.

    The loader reads the file again: the clone has weights of its own in main memory.
    """
    if not is_dynamic(model) or not _may_have_blocks(model):
        return None
    try:
        return model.clone(disable_dynamic=True)
    except Exception as error:
        told = "this model is loaded by DynamicVRAM, and its loader cannot load it otherwise"
        reasons.append((UNET, f"{told} ({describe(error)}); {WITHOUT}"))
        return None


def is_dynamic(model: Any) -> bool:
    """Whether DynamicVRAM loads a ModelPatcher's model."""
    asked = getattr(model, "is_dynamic", None)
    return callable(asked) and asked() is True


def _may_have_blocks(model: Any) -> bool:
    """Whether blocks of it could be ours on its device."""
    from lib_rocm_sd.hosts.comfyui.unet import obstacle

    device = getattr(model, "load_device", None)
    unfit = isinstance(device, torch.device) and identify(device).reasons
    unet = getattr(getattr(model, "model", None), "diffusion_model", None)
    return not unfit and not obstacle(unet)


def _set_attention(
    options: dict[str, Any], level: str, attention: bool, reasons: list[Left]
) -> None:
    present = options.get(KEY)
    if present is not None and not isinstance(present, Override):
        why = f"the model has another override already ({named(present)})"
        reasons.append((ATTENTION, why))
        return
    options.pop(KEY, None)
    if attention:
        options[KEY] = Override(session_of(level))


def _set_calls(options: dict[str, Any], level: str, unet: bool, reasons: list[Left]) -> None:
    """The model's calls are ours for the blocks, or for what is to be said in each workflow; those
    that call ControlNets, too, for their blocks.
    """
    kinds = [
        attribute("comfy.patcher_extension", "WrappersMP", name)
        for name in ("APPLY_MODEL", "CALC_COND_BATCH")
    ]
    if kinds[0] is None:
        if unet:
            reasons.append((UNET, "this ComfyUI has no wrappers around a model's call"))
        return
    session = session_of(level) if unet else None
    calls: list[Any] = [None, None]
    if unet or reasons:
        from lib_rocm_sd.hosts.comfyui.controlnets import StepCall
        from lib_rocm_sd.hosts.comfyui.unet import ModelCall

        step = None if session is None else StepCall(session)
        calls = [ModelCall(session, tuple(reasons)), step]
    wrappers = dict(options.get(WRAPPERS, {}))
    for kind, call in zip(kinds, calls, strict=True):
        named_ones = {name: one for name, one in wrappers.get(kind, {}).items() if name != NAME}
        if call is not None and kind is not None:
            named_ones[NAME] = [call]
        wrappers.pop(kind, None)
        if named_ones:
            wrappers[kind] = named_ones
    if wrappers or WRAPPERS in options:
        options[WRAPPERS] = wrappers
