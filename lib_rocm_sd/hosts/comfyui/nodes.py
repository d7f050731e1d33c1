"""The nodes. What they need is imported when one runs, so that ComfyUI's start pays for nothing.

`begin` is called by the checkout's __init__.py, which ComfyUI executes.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from lib_rocm_sd import console
from lib_rocm_sd.policy import AUTO, LEVELS

CATEGORY = "ROCm SD"
MODES = {"Auto": "auto", "Always banded": "banded"}
"""The choices, and what vae.policy calls them."""
UNET_MODES = {"Off": False, "Auto": True}
UNET = "Auto"
"""What a node has at first, as in the WebUI. A saved workflow keeps the value that it has."""
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

_LEVEL = (
    list(LEVELS),
    {
        "default": AUTO.name,
        "tooltip": "Auto: likely the fastest within half of the free memory. Performance: the "
        "fastest measured on your card. Memory: the least memory.",
    },
)


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
    """MODEL in, a clone out whose attention is ours, and its UNet's blocks unless they are off.

    `unet` is optional, so that workflows from before it was there stay valid.
    """

    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = (
        "Runs this model's attention and UNet blocks on ROCm SD's kernels, and on ComfyUI's own "
        "code where they cannot. Wire it between the checkpoint or LoRA loader and the sampler."
    )

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 - ComfyUI's name
        return {
            "required": {
                "model": (
                    "MODEL",
                    {"tooltip": "From the checkpoint loader, or after the last LoRA."},
                ),
                "level": _LEVEL,
                "attention": (
                    "BOOLEAN",
                    {"default": True, "tooltip": "Off: attention stays ComfyUI's own."},
                ),
            },
            "optional": {
                "unet": (
                    list(UNET_MODES),
                    {
                        "default": UNET,
                        "tooltip": "Auto: the UNet's blocks, where a sampling step spends most of "
                        "its time (SD 1, SD 2, SDXL). Off: only attention.",
                    },
                )
            },
        }

    def run(self, model: Any, level: str, attention: bool, unet: str = UNET) -> tuple[Any]:
        try:
            from lib_rocm_sd.hosts.comfyui.model import optimized

            return (optimized(model, level, attention, _chosen(UNET_MODES, "unet", unet)),)
        except Exception as error:
            _told("attention", error)
            return (model,)


class RocmSdVae(Node):
    """VAE in, a copy out whose decoder and encoder are ours."""

    RETURN_TYPES = ("VAE",)
    DESCRIPTION = (
        "Runs this VAE on ROCm SD's kernels, whole or in exact bands, and on ComfyUI's own code "
        "where they cannot. Wire it between the VAE's loader and VAE Decode or VAE Encode. Start "
        "ComfyUI with --fp16-vae: a VAE that ComfyUI keeps in float32 stays its own."
    )

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 - ComfyUI's name
        return {
            "required": {
                "vae": ("VAE", {"tooltip": "From the checkpoint's or the VAE's loader."}),
                "level": _LEVEL,
                "mode": (
                    list(MODES),
                    {
                        "default": "Auto",
                        "tooltip": "Auto: whole if it fits into memory, else in bands. Always "
                        "banded: strips of rows, one after another; less memory, no seams.",
                    },
                ),
                "budget_mib": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": MOST_MIB,
                        "tooltip": "GPU memory that a decode or encode keeps to, in MiB. 0: as "
                        "the level says.",
                    },
                ),
                "decode": (
                    "BOOLEAN",
                    {"default": True, "tooltip": "Off: decoding stays ComfyUI's own."},
                ),
                "encode": (
                    "BOOLEAN",
                    {"default": True, "tooltip": "Off: encoding stays ComfyUI's own."},
                ),
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


class RocmSdUpscale(Node):
    """UPSCALE_MODEL and pictures in, larger pictures out."""

    RETURN_TYPES = ("IMAGE",)
    DESCRIPTION = (
        "Upscales pictures by a model on ROCm SD's kernels, without tiles and so without seams, "
        "and on ComfyUI's own code where they cannot. Use it in the place of Upscale Image (using "
        "Model)."
    )

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 - ComfyUI's name
        return {
            "required": {
                "upscale_model": ("UPSCALE_MODEL", {"tooltip": "From Load Upscale Model."}),
                "image": ("IMAGE", {"tooltip": "The pictures to enlarge."}),
                "level": _LEVEL,
            }
        }

    def run(self, upscale_model: Any, image: Any, level: str) -> tuple[Any]:
        from lib_rocm_sd.hosts.comfyui import host

        kind = host.upscale_node()
        own = kind.execute if hasattr(kind, "execute") else kind().upscale
        theirs = partial(own, upscale_model, image)
        try:
            from lib_rocm_sd.hosts.comfyui.upscaler import lone, upscaled

            session = host.session_of(level)
        except Exception as error:
            _told("Upscaler", error)
            return (theirs()[0],)
        return (upscaled(theirs, lone, upscale_model, image, session)[0],)


class RocmSdStatus(OutputNode):
    """What the last workflow ran and why not more, as text. `after`: what is to be done first."""

    RETURN_TYPES = ("STRING",)
    DESCRIPTION = "Says what ROCm SD computed in this workflow, and why not the rest."

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 - ComfyUI's name
        tooltip = "Anything that has to be done first: connect the image."
        return {"required": {}, "optional": {"after": (ANY, {"tooltip": tooltip})}}

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
    DESCRIPTION = (
        "Measures ROCm SD on this card, beside ComfyUI's own code and other methods. Takes minutes."
    )

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802 - ComfyUI's name
        return {
            "required": {
                "preset": (
                    ["quick", "standard"],
                    {
                        "default": "quick",
                        "tooltip": "standard: more sizes and more repetitions; takes longer.",
                    },
                ),
                "level": _LEVEL,
            },
            "optional": {
                "model": ("MODEL", {"tooltip": "Connected: a sampling step is measured, too."}),
                "vae": ("VAE", {"tooltip": "Connected: its decoder is measured, too."}),
            },
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
    "RocmSdUpscale": RocmSdUpscale,
    "RocmSdStatus": RocmSdStatus,
    "RocmSdSpeedTest": RocmSdSpeedTest,
}
NAMES = {
    "RocmSdModel": "ROCm SD Optimization",
    "RocmSdVae": "ROCm SD VAE",
    "RocmSdUpscale": "ROCm SD Upscale Image (using Model)",
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
