"""What we use of AUTOMATIC1111's WebUI and its forks; nothing raises where a piece is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from lib_rocm_sd import console
from lib_rocm_sd.hosts.optional import attribute, module
from lib_rocm_sd.hosts.webui import kinds

NAME = "ROCm SD"
SETTING = "cross_attention_optimization"
Forward = Callable[..., torch.Tensor]

_said: set[str] = set()


def say(message: str) -> None:
    """A line on the WebUI's console."""
    console.say(f"{NAME}: {message}")


def say_once(message: str) -> None:
    """A line on the WebUI's console, the first time only."""
    if message not in _said:
        _said.add(message)
        say(message)


def device() -> torch.device:
    """The device that the WebUI computes on."""
    found = attribute("modules.devices", "device") or attribute("modules.shared", "device")
    found = found or (kinds.device() if forge() is not None else None)
    return torch.device("cpu") if found is None else torch.device(found)


def shortcomings() -> list[str]:
    """Why this WebUI has no place for our attention; empty where it is A1111's or a Forge."""
    lacking = _without_optimizers()
    return [*lacking, *kinds.shortcomings()] if lacking and forge() is None else []


def forge() -> kinds.Kind | None:
    """Which of the Forges this is; None where optimizers can be listed, or where it is no Forge."""
    return kinds.find() if _without_optimizers() else None


def _without_optimizers() -> list[str]:
    """Why this WebUI has no place for an attention optimizer."""
    found = []
    if attribute("modules.sd_hijack_optimizations", "SdOptimization") is None:
        found.append("it has no SdOptimization")
    if not callable(attribute("modules.script_callbacks", "on_list_optimizers")):
        found.append("it has no callback on_list_optimizers")
    if not callable(attribute("modules.sd_hijack", "apply_optimizations")):
        found.append("it has no sd_hijack.apply_optimizations")
    return found


def cache_directory() -> Path | None:
    """The WebUI's cache folder; None when it cannot be told."""
    for found in (
        attribute("modules.cache", "cache_dir"),
        os.environ.get("SD_WEBUI_CACHE_DIR"),
    ):
        if found:
            return Path(found)
    data = attribute("modules.paths_internal", "data_path") or attribute(
        "modules.paths", "data_path"
    )
    return Path(data) / "cache" if data else None


def add_callback(category: str, function: Callable[..., Any]) -> bool:
    """Register for the WebUI's on_<category>, once however often asked; False if it has none."""
    register = attribute("modules.script_callbacks", f"on_{category}")
    if not callable(register):
        return False
    registered = attribute("modules.script_callbacks", "callback_map") or {}
    entries = registered.get(f"callbacks_{category}", ())
    if not any(getattr(entry, "callback", None) is function for entry in entries):
        register(function)
    return True


def optimizers() -> list[Any]:
    """The WebUI's list of attention optimizers that are available, best first: the list itself."""
    found = attribute("modules.sd_hijack", "optimizers")
    return found if isinstance(found, list) else []


def current_optimizer() -> Any:
    """The optimizer that is applied; None before a model was loaded, or when none is wanted."""
    return attribute("modules.sd_hijack", "current_optimizer")


def apply_choice() -> None:
    """Let the WebUI pick an optimizer and apply it, as it does for the first model."""
    hijack: Any = module("modules.sd_hijack")
    if hijack.current_optimizer is not None:
        hijack.current_optimizer.undo()
        hijack.current_optimizer = None
    hijack.apply_optimizations()


def between_generations() -> AbstractContextManager[Any]:
    """Entered as soon as no picture is being made; none is begun until it is left."""
    lock = attribute("modules.call_queue", "queue_lock")
    return nullcontext() if lock is None else lock


@contextmanager
def unless_busy() -> Iterator[bool]:
    """True, and no generation begins, where none was running."""
    lock = attribute("modules.call_queue", "queue_lock")
    if lock is None:
        yield True
        return
    got = lock.acquire(blocking=False)
    try:
        yield got
    finally:
        if got:
            lock.release()


def is_busy() -> bool:
    """Whether a picture is being made, or something else that the WebUI makes pictures wait for."""
    with unless_busy() as idle:
        return not idle


def choice(without: Any = None) -> Any:
    """What sd_hijack.apply_optimizations() picks, were `without` not listed; None for none."""
    listed = [item for item in optimizers() if item is not without]
    options: Any = attribute("modules.shared", "cmd_opts")
    selection = getattr(attribute("modules.shared", "opts"), SETTING, "Automatic")
    automatic = selection == "Automatic"
    if not listed or selection == "None":
        return None
    if automatic and getattr(options, "disable_opt_split_attention", False):
        return None
    if automatic:
        asked = (x for x in listed if x.cmd_opt and getattr(options, x.cmd_opt, False))
        return next(asked, listed[0])
    return next((x for x in listed if x.title() == selection), listed[0])


def attention_classes() -> tuple[list[type], list[type]]:
    """The host's CrossAttention classes (of ldm, of sgm) and AttnBlock classes, if any."""
    cross = [attribute(f"{root}.modules.attention", "CrossAttention") for root in ("ldm", "sgm")]
    block = [
        attribute(f"{root}.modules.diffusionmodules.model", "AttnBlock") for root in ("ldm", "sgm")
    ]
    return [x for x in cross if x is not None], [x for x in block if x is not None]


def is_its_own(forward: Any) -> bool:
    """Whether a function is of the host's code, and not of an extension's."""
    return str(getattr(forward, "__module__", "")).split(".")[0] in ("modules", "ldm", "sgm")


def loaded_model() -> Any:
    """The checkpoint's model if one is loaded. Asking modules.shared for it would load one."""
    return attribute("modules.sd_models", "model_data", "sd_model")


def vae_of(model: Any) -> Any:
    """The VAE of a loaded model: the module that has a decoder and an encoder; None if none."""
    of_forge = getattr(kinds.vae_of(model), "first_stage_model", None)
    return getattr(model, "first_stage_model", None) if of_forge is None else of_forge


def unet_of(model: Any) -> torch.nn.Module | None:
    """The UNet of a loaded model."""
    unet = kinds.unet_of(model) or getattr(getattr(model, "model", None), "diffusion_model", None)
    return unet if isinstance(unet, torch.nn.Module) else None


def bring(model: Any) -> None:
    """Have a Forge bring a loaded model's UNet onto its device, as before a step."""
    if not kinds.load(kinds.unet_patcher_of(model)):
        raise ValueError("we do not know how this Forge loads its UNet")


def is_short_of_memory() -> bool:
    """True where models are moved out of the GPU after use: with --lowvram and --medvram, and by a
    Forge's memory management, which does not know of what we keep there.
    """
    if forge() is not None:
        return not kinds.keeps_all_on_the_gpu()
    return bool(getattr(loaded_model(), "lowvram", False))


def vae_dtype() -> Any:
    """Dtype of the VAE's weights. The VAE of a Forge's loaded model states its own."""
    own = getattr(kinds.vae_of(loaded_model()), "vae_dtype", None) if forge() else None
    return own or attribute("modules.devices", "dtype_vae")


def half_vae_flag() -> str:
    """The flag of a Forge that keeps a VAE's weights in half; empty elsewhere."""
    return kinds.half_vae_flag() if forge() is not None else ""


def out_of_memory() -> type[Exception] | None:
    """What a Forge takes for "out of memory", in answer to which it tiles; None elsewhere."""
    return kinds.out_of_memory() if forge() is not None else None
