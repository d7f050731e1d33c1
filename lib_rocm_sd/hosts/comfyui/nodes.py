"""The nodes. What they need is imported when one runs, so that ComfyUI's start pays for nothing.

`begin` is called by the checkout's __init__.py, which ComfyUI executes.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from lib_rocm_sd import console
from lib_rocm_sd.policy import AUTO, LEVELS

CATEGORY = "ROCm SD"
MODES = {"Auto": "auto", "Always banded": "banded"}
"""The choices, and what vae.policy calls them."""
UNET_MODES = {"Off": False, "Auto": True}
MOST_MIB = 1 << 20
log = console.Log("rocm_sd.comfyui")
Inputs = dict[str, dict[str, Any]]


class AnyType(str):
    """A type's name that differs from none: ComfyUI compares names by `!=`."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __eq__, __hash__ = str.__eq__, str.__hash__


ANY = AnyType("*")

_LEVEL = (list(LEVELS), {"default": AUTO.name})


class Node:
    """What all have. ComfyUI reads it of the class."""

    CATEGORY = CATEGORY
    FUNCTION = "run"


class OutputNode(Node):
    """One that runs each time, whether anything hangs on its output or not."""

    OUTPUT_NODE = True

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:  # noqa: N802 - ComfyUI's name
        return float("nan")


class RocmSdModel(Node):
    """MODEL in, a clone out whose attention is ours, and its UNet's blocks where asked for.

    `unet` is optional, so that workflows of before it was there stay valid.
    """

    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = (
        "Attention of this model by ROCm SD's kernels, and the blocks of a UNet if asked for; "
        "ComfyUI's own where they cannot."
    )

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 - ComfyUI's name
        return {
            "required": {
                "model": ("MODEL",),
                "level": _LEVEL,
                "attention": ("BOOLEAN", {"default": True}),
            },
            "optional": {"unet": (list(UNET_MODES), {"default": "Off"})},
        }

    def run(self, model: Any, level: str, attention: bool, unet: str = "Off") -> tuple[Any]:
        try:
            from lib_rocm_sd.hosts.comfyui.model import optimized

            return (optimized(model, level, attention, _chosen(UNET_MODES, "unet", unet)),)
        except Exception as error:
            _told("attention", error)
            return (model,)


class RocmSdVae(Node):
    """VAE in, a copy out whose decoder and encoder are ours."""

    RETURN_TYPES = ("VAE",)
    DESCRIPTION = "This VAE by ROCm SD's program, whole or in exact bands; ComfyUI's own elsewhere."

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 - ComfyUI's name
        return {
            "required": {
                "vae": ("VAE",),
                "level": _LEVEL,
                "mode": (list(MODES), {"default": "Auto"}),
                "budget_mib": ("INT", {"default": 0, "min": 0, "max": MOST_MIB}),
                "decode": ("BOOLEAN", {"default": True}),
                "encode": ("BOOLEAN", {"default": True}),
            }
        }

    def run(
        self, vae: Any, level: str, mode: str, budget_mib: int, decode: bool, encode: bool
    ) -> tuple[Any]:
        roles = [name for name, asked in (("decoder", decode), ("encoder", encode)) if asked]
        try:
            from lib_rocm_sd.hosts.comfyui.host import session_of
            from lib_rocm_sd.hosts.comfyui.vae import NodeWish, with_ours

            budget, way = budget_mib << 20 or None, _chosen(MODES, "mode", mode)
            wish = NodeWish(way, budget, session_of(level), tuple(roles))
            return (with_ours(vae, wish),)
        except Exception as error:
            _told("VAE", error)
            return (vae,)


class RocmSdStatus(OutputNode):
    """What runs and why not, as text. `after`: what is to be done before it is asked."""

    RETURN_TYPES = ("STRING",)
    DESCRIPTION = "What ROCm SD computes in this ComfyUI, and why not the rest."

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 - ComfyUI's name
        return {"required": {}, "optional": {"after": (ANY, {})}}

    def run(self, after: Any = None) -> dict[str, Any]:
        try:
            from lib_rocm_sd.hosts.comfyui.status import text

            said = text()
        except Exception as error:
            said = _caught("Not active", error)
        return {"ui": {"text": [said]}, "result": (said,)}


class RocmSdSpeedTest(OutputNode):
    """Times of attention, and of what is connected: the VAE's decoder, a step of the model."""

    RETURN_TYPES = ("IMAGE", "STRING", "STRING")
    RETURN_NAMES = ("plot", "json", "markdown")
    DESCRIPTION = "How fast ROCm SD is on this card, beside ComfyUI's own and other methods."

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 - ComfyUI's name
        return {
            "required": {"preset": (["quick", "standard"], {"default": "quick"}), "level": _LEVEL},
            "optional": {"model": ("MODEL",), "vae": ("VAE",)},
        }

    def run(self, preset: str, level: str, model: Any = None, vae: Any = None) -> dict[str, Any]:
        try:
            from lib_rocm_sd.hosts.comfyui import speedtest
        except Exception as error:
            import json

            import torch

            text = _caught("The speed test did not run", error)
            plot, content = torch.zeros(1, 8, 8, 3), json.dumps({"reason": text})
        else:
            plot, content, text = speedtest.run_node(preset, level, model, vae)
        return {"ui": {"text": [text]}, "result": (plot, content, text)}


CLASSES: dict[str, type] = {
    "RocmSdModel": RocmSdModel,
    "RocmSdVae": RocmSdVae,
    "RocmSdStatus": RocmSdStatus,
    "RocmSdSpeedTest": RocmSdSpeedTest,
}
NAMES = {
    "RocmSdModel": "ROCm SD Optimization",
    "RocmSdVae": "ROCm SD VAE",
    "RocmSdStatus": "ROCm SD status",
    "RocmSdSpeedTest": "ROCm SD speed test",
}


def _chosen(choices: dict[str, Any], name: str, value: Any) -> Any:
    """What a choice stands for; another node may have given any value."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, none of {', '.join(choices)}")
    return choices[value]


def _told(what: str, error: Exception) -> None:
    """A node gives what it was given: say why, as the status does, or in the log at least."""
    said = _caught("the node failed", error)
    try:
        from lib_rocm_sd.hosts.comfyui.host import tally

        tally.leave(what, said)
    except Exception:  # the same
        log.warning("%s: %s", what, said)


def _caught(what: str, error: Exception) -> str:
    """A mistake of the workflow is said as it is, any other error with a traceback in the log."""
    if isinstance(error, ValueError):
        return f"{what}: {error}"
    try:
        from lib_rocm_sd.hosts import trouble

        return f"{what}: {trouble.once(error)}"
    except Exception:  # the library cannot be imported at all
        log.warning("%s: %s", what, error, exc_info=error)
        return f"{what}: {type(error).__name__}: {error}"


def begin() -> None:
    """Called when ComfyUI starts. The start option is heeded; without it nothing is imported."""
    # ComfyUI shows all of level INFO, at which the library tells of each problem that it plans.
    logging.getLogger("rocm_sd").setLevel(logging.WARNING)
    logging.getLogger("rocm_sd.comfyui").setLevel(logging.INFO)
    if not os.environ.get("ROCM_SD_COMFYUI_ALL"):
        return
    try:
        from lib_rocm_sd.hosts.comfyui import everywhere

        level = everywhere.level_asked()
        if level:
            everywhere.begin(level)
    except Exception as error:
        log.warning(_caught("nothing is ours", error))
