"""ComfyUI's *Upscale Image (using Model)* with networks of ours, which are given whole pictures.

Read in Comfy-Org/ComfyUI a125cd84 (0.3.64): comfy_extras/nodes_upscale_model.py, whose node has the
class method `execute`, and as `upscale` too, which was a method of its own before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.comfyui import host, vae
from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.hosts.upscaler import LeftError, whole
from lib_rocm_sd.modules.patches import Patch, put
from lib_rocm_sd.upscaler.program import PART
from lib_rocm_sd.vae.bands import Interrupted

METHODS = ("execute", "upscale")
TILE_BYTES = 512 * 512 * 3 * 4 * 384
"""What ComfyUI's node has made free for its tiles, for each time that sides become longer."""
COLOURS = 3
"""Channels of ComfyUI's result: a grey model's one is there three times, four are an error."""


_left: ContextVar[bool] = ContextVar("left", default=False)
"""ComfyUI's node is asked because ours could not: it may be one that we serve."""


def upscaled(
    theirs: Callable[[], Any],
    result: Callable[[torch.Tensor], Any],
    model: Any,
    image: torch.Tensor,
    session: Session,
) -> Any:
    """`result` of pictures (N, H, W, C) of 0..1 that `model`, a spandrel descriptor, has enlarged,
    or `theirs()`, what ComfyUI's node gives. Raises what ComfyUI raises once the user has pressed
    Cancel.
    """
    if _left.get():
        return theirs()
    host.count_for_workflow()
    try:
        made = _by_ours(model, image, session)
    except host.Cancelled as cancelled:
        raise cancelled.error from None
    except Interrupted:
        host.stop_if_interrupted()
    except LeftError as left:
        tally.leave(PART, str(left))
    else:
        tally.served(PART)
        return result(made)
    before = _left.set(True)
    try:
        return theirs()
    finally:
        _left.reset(before)


def _by_ours(model: Any, image: torch.Tensor, session: Session) -> torch.Tensor:
    device, frames = host.device(), image.movedim(-1, -3)
    unusable = vae.usable(device)
    if unusable:
        raise LeftError("; ".join(unusable))
    if not len(frames):
        raise LeftError("there is no picture")
    shown = host.progress_bar()
    with whole(model, session, progress=shown, interrupt=host.interrupted) as ours:
        try:
            most_bytes = int(TILE_BYTES * max(model.scale, 1))
            needed_bytes = ours.needed_bytes(frames.shape[1:], device)
            given = ours.program.network.exit.channels
            if given != COLOURS:
                raise LeftError(f"it gives {given} channels, ComfyUI's node {COLOURS}")
            host.free_memory(min(needed_bytes, most_bytes), device)
            model.to(device)
            made = [model(frame[None].to(device)).cpu() for frame in frames]
        finally:
            model.to("cpu")  # where ComfyUI has it between two uses
    return torch.cat(made).clamp_(0, 1).movedim(-3, -1)


def serve_node(kind: Any, session: Session) -> list[Patch]:
    """Let ComfyUI's node, a class, upscale by ours from now on."""
    names = [name for name in METHODS if name in vars(kind)]
    return [put(kind, name, _method(vars(kind)[name], session)) for name in names]


def lone(made: torch.Tensor) -> tuple[torch.Tensor]:
    """What a node gives whose only output this is."""
    return (made,)


def _method(own: Any, session: Session) -> Any:
    """In the place of `own`, as a class has it."""
    of_class = isinstance(own, classmethod)
    function = own.__func__ if of_class else own
    result = host.attribute("comfy_api.latest", "io", "NodeOutput") if of_class else lone

    @functools.wraps(function)
    def upscale(*args: Any, **kwargs: Any) -> Any:
        theirs = functools.partial(function, *args, **kwargs)
        try:
            _, *given = inspect.signature(function).bind(*args, **kwargs).arguments.items()
        except TypeError:  # ComfyUI's to say
            return theirs()
        asked = dict(given)
        if asked.keys() != {"upscale_model", "image"}:
            tally.leave(PART, f"its node was given {', '.join(asked)}")
            return theirs()
        return upscaled(theirs, result, asked["upscale_model"], asked["image"], session)

    return classmethod(upscale) if of_class else upscale
