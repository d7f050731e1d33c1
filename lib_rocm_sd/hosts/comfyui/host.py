"""What we use of ComfyUI, where nothing raises if a piece is missing; and what this process keeps:
the engine's sessions, and tallies of what was ours and what was left to ComfyUI.

Read in Comfy-Org/ComfyUI a125cd84 (0.3.64): comfy/model_management.py, comfy/utils.py, the hook of
the progress bar and `last_prompt_id` in main.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from lib_rocm_sd import console, policy
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.measurer import LEAST_S, MOMENT_S
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.optional import attribute
from lib_rocm_sd.hosts.ours import Tally
from lib_rocm_sd.report import report
from lib_rocm_sd.vae.bands import Interrupted

NAME = "ROCm SD"
OPTIONS = "transformer_options"
PLACE = 5
"""Position of these among the arguments of a model's apply_model, after `self`."""
UNET = "UNet"
UPSCALE_NODE = "ImageUpscaleWithModel"
Left = tuple[str, str]
"""What ComfyUI computes by itself, and why."""
LEFT = "left to ComfyUI's own code: "
"""How the report's events about calls begin."""

log = console.Log("rocm_sd.comfyui")
tally = Tally(f"{LEFT}{{what}}: {{why}}")
"""What the last workflow did, of those that computed anything that is counted."""
ours_before: Counter[str] = Counter()
left_before: Counter[Left] = Counter()
"""What earlier ones did, since ComfyUI's start."""
_workflow: list[Any] = [None]
_sessions: dict[str, Session] = {}


def say(message: str) -> None:
    """A line on ComfyUI's console."""
    log.info("%s: %s", NAME, message)


class Kept:
    """The same object in all copies of the options, or of the VAE, that it is in."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __copy__(self) -> Any:
        return self


class Cancelled(Interrupted):
    """ComfyUI's progress bar has raised `error`, since the user has pressed Cancel."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _running() -> Any:
    """What tells this workflow from others; None where ComfyUI's server does not run."""
    server = getattr(sys.modules.get("server"), "PromptServer", None)
    return getattr(getattr(server, "instance", None), "last_prompt_id", None)


def is_counted() -> bool:
    """Whether the workflow that runs has computed anything that is counted."""
    return bool(_running() == _workflow[0])


def count_for_workflow() -> None:
    """Count anew where a workflow computes something for the first time, and measure what earlier
    ones have put off. Called before anything is computed that is counted.
    """
    if not is_counted():
        _workflow[0] = _running()
        ours_before.update(tally.ours)
        left_before.update(tally.left)
        tally.clear()
        report.begin()
        _measure()


def _measure() -> None:
    """For a moment: ComfyUI calls nobody when a workflow has ended."""
    end = perf_counter() + MOMENT_S
    try:
        while (left_s := end - perf_counter()) >= LEAST_S and engine.unmeasured:
            if interrupted():
                return
            engine.measure_next(left_s, interrupted)
    except Exception as error:
        report.event(f"measuring ended: {trouble.once(error)}")


def device() -> torch.device:
    """The device that ComfyUI computes on."""
    asked = attribute("comfy.model_management", "get_torch_device")
    found = asked() if callable(asked) else None
    return found if isinstance(found, torch.device) else torch.device("cpu")


def interrupted() -> bool:
    """True once the user has pressed Cancel, until ComfyUI has heeded it."""
    asked = attribute("comfy.model_management", "processing_interrupted")
    return bool(asked()) if callable(asked) else False


def stop_if_interrupted() -> None:
    """Raise what ComfyUI raises where the user has pressed Cancel."""
    raises = attribute("comfy.model_management", "throw_exception_if_processing_interrupted")
    if callable(raises):
        raises()


def free_memory(needed_bytes: int, device: torch.device) -> None:
    """Have ComfyUI move models off a device until so much of it is free."""
    free = attribute("comfy.model_management", "free_memory")
    if callable(free):
        free(needed_bytes, device)


def upscale_node() -> Any:
    """ComfyUI's class for *Upscale Image (using Model)*. ValueError where it has none."""
    known = attribute("nodes", "NODE_CLASS_MAPPINGS") or {}
    if UPSCALE_NODE not in known:
        raise ValueError(f"this ComfyUI has no node {UPSCALE_NODE}")
    return known[UPSCALE_NODE]


def out_of_memory() -> type[Exception]:
    """What ComfyUI takes for "out of memory"."""
    found = attribute("comfy.model_management", "OOM_EXCEPTION")
    return found if isinstance(found, type) and issubclass(found, Exception) else MemoryError


def progress_bar() -> Callable[[int, int], None]:
    """Shows (done, total) on the node that runs. Raises Cancelled: ComfyUI looks for a Cancel
    whenever something is shown.
    """
    kind = attribute("comfy.utils", "ProgressBar")
    stops = attribute("comfy.model_management", "InterruptProcessingException") or ()
    bar: list[Any] = []

    def show(done: int, total: int) -> None:
        if kind is None or (total < 2 and done):
            return
        if not bar:
            bar.append(kind(total))
        try:
            bar[0].update_absolute(done, total)
        except stops as error:
            raise Cancelled(error) from None

    return show


def session_of(level: str) -> Session:
    """The session of a level, always the same one, so that plans are found again. ValueError where
    there is no such level.
    """
    if level not in _sessions:
        _sessions[level] = Session(
            *(policy.by_name(level), 0, report, say, interrupted),
            later=lambda: _running() is not None,
        )
    return _sessions[level]
