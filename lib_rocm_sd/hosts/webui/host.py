"""What we use of AUTOMATIC1111's WebUI, its forks and the Forges; nothing raises where a piece is
missing. Which of the Forges this is shows by what it has.

Read in lllyasviel/stable-diffusion-webui-forge dfdcbab6 and Haoming02/sd-webui-forge-classic
1fe65075 (its branch neo): attention.py, args.py and memory_management.py of backend/. In later
copies of neo (2026, their commits are not known) the VAE's function has another name. And in
Panchovix/stable-diffusion-webui-reForge 3b56b268 and sd-webui-forge-classic 1f95d717 (its branch
classic): ldm/modules/attention.py, modules/args_parser.py and modules/model_management.py of
ldm_patched/.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lib_rocm_sd import console
from lib_rocm_sd.catalog.dit import SD3
from lib_rocm_sd.catalog.unet import SD15, SDXL
from lib_rocm_sd.hosts.optional import attribute, module

NAME = "ROCm SD"
SETTING = "cross_attention_optimization"
MOST_NAMES_BYTES = 16 << 20
"""Of a checkpoint's head, which has less than one."""
PACKAGES = ("site-packages", "dist-packages")
Forward = Callable[..., torch.Tensor]

_said: set[str] = set()
_OURS = "lib_rocm_sd"
_STANDARD = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Kind:
    """Names of Python modules, and of functions in `attention`. Others import these by name.

    `packed` take q, k and v with the heads side by side, as hosts/attention.py says; `spatial`
    takes the VAE's (B, C, H, W) of one head. `elsewhere`: Python modules that ask for a function of
    `attention` for their own reasons, as text encoders do for torch's.
    """

    attention: str
    packed: tuple[str, ...]
    spatial: str
    arguments: str
    memory: str
    elsewhere: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all functions that we stand in for."""
        return tuple(filter(None, (*self.packed, self.spatial)))


FORGE = Kind(
    "backend.attention",
    ("attention_function",),
    "attention_function_single_head_spatial",
    "backend.args",
    "backend.memory_management",
    ("backend.nn.t5", "backend.nn.llm", "backend.text_processing"),
)
NEO = replace(FORGE, spatial="attention_function_vae")
KINDS = (
    FORGE,
    NEO,
    Kind(
        "ldm_patched.ldm.modules.attention",
        ("optimized_attention", "optimized_attention_masked"),
        "",
        "ldm_patched.modules.args_parser",
        "ldm_patched.modules.model_management",
        ("ldm_patched.modules.text_encoders",),
    ),
)
_module: Callable[[str], ModuleType | None] = cache(module)
"""A module that is not there is looked for once."""


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
    ask = None if found else of_forge("memory", "get_torch_device")
    found = ask() if callable(ask) else found
    return torch.device("cpu") if found is None else torch.device(found)


def shortcomings() -> list[str]:
    """Why this WebUI has no place for our attention; empty where it is A1111's or a Forge."""
    lacking = _without_optimizers()
    if not lacking or find() is not None:
        return []
    first = {kind.attention: kind for kind in reversed(KINDS) if _module(kind.attention)}
    return [
        *lacking,
        *(f"its {name} has no {', '.join(_lacking(kind))}" for name, kind in first.items()),
    ]


def forge() -> Kind | None:
    """Which of the Forges this is; None where optimizers can be listed, or where it is no Forge."""
    return find() if _without_optimizers() else None


def find() -> Kind | None:
    """The first kind whose functions are all here; None where this is no Forge that is known."""
    return next((kind for kind in KINDS if _module(kind.attention) and not _lacking(kind)), None)


def _lacking(kind: Kind) -> list[str]:
    there = _module(kind.attention)
    return [name for name in kind.names if not callable(getattr(there, name, None))]


def of_forge(place: str, name: str) -> Any:
    """What a Forge has as `name` in its module of `arguments` or `memory`; None elsewhere."""
    kind = forge()
    return None if kind is None else attribute(getattr(kind, place), name)


def _without_optimizers() -> list[str]:
    """Why this WebUI has no place for an attention optimizer."""
    needed = (
        ("modules.sd_hijack_optimizations", "SdOptimization", "SdOptimization"),
        ("modules.script_callbacks", "on_list_optimizers", "callback on_list_optimizers"),
        ("modules.sd_hijack", "apply_optimizations", "sd_hijack.apply_optimizations"),
    )
    return [f"it has no {what}" for *place, what in needed if not callable(attribute(*place))]


def cache_directory() -> Path | None:
    """The WebUI's cache folder; None when it cannot be told."""
    folder = attribute("modules.cache", "cache_dir") or os.environ.get("SD_WEBUI_CACHE_DIR")
    if folder:
        return Path(folder)
    places = ("modules.paths_internal", "modules.paths")
    data = next(filter(None, (attribute(place, "data_path") for place in places)), None)
    return Path(data) / "cache" if data else None


def add_callback(category: str, function: Callable[..., Any]) -> bool:
    """Register for the WebUI's on_<category>, once however often asked; False if it has none."""
    register = attribute("modules.script_callbacks", f"on_{category}")
    if not callable(register):
        return False
    registered = attribute("modules.script_callbacks", "callback_map") or {}
    entries = registered.get(f"callbacks_{category}", ())
    if not any(getattr(entry, "callback", None) == function for entry in entries):
        register(function)
    return True


def python_modules() -> Iterator[ModuleType]:
    """The WebUI's own and its extensions', also scripts, which nobody can import."""
    for each in (*list(sys.modules.values()), *scripts()):
        if not isinstance(each, ModuleType) or each.__name__.startswith(_OURS):
            continue
        file = getattr(each, "__file__", None) or _STANDARD
        if not (file.startswith(_STANDARD) or any(name in file for name in PACKAGES)):
            yield each


def scripts() -> tuple[Any, ...]:
    """Python modules of the WebUI's and its extensions' scripts."""
    loaded = attribute("modules.script_loading", "loaded_scripts")
    return tuple(loaded.values()) if isinstance(loaded, dict) else ()


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


def takes_turns() -> bool:
    """Whether there is a moment between two generations."""
    return attribute("modules.call_queue", "queue_lock") is not None


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


def job() -> float | None:
    """When what the WebUI is doing was begun; None where it does nothing."""
    state: Any = attribute("modules.shared", "state")
    return getattr(state, "time_start", None) if getattr(state, "job", "") else None


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


def checkpoint_kind() -> str:
    """Which UNet, or transformer, of the catalog the loaded checkpoint has, or the chosen one where
    none is loaded yet; empty where it is another, or cannot be told. Attributes of
    AUTOMATIC1111's and the Forges' models.
    """
    model = loaded_model()
    kinds = {"is_sdxl": SDXL.name, "is_sd1": SD15.name, "is_sd3": SD3.name}
    kind = next((kind for name, kind in kinds.items() if getattr(model, name, False)), "")
    # The Forges begin with a model that is none (FakeInitialModel in modules/sd_models.py).
    if kind or getattr(model, "sd_checkpoint_info", None) is not None:
        return kind
    match = attribute("modules.sd_models", "get_closet_checkpoint_match")
    chosen = getattr(attribute("modules.shared", "opts"), "sd_model_checkpoint", None)
    listed = attribute("modules.sd_models", "checkpoints_list") or {}
    info = match(chosen) if callable(match) and chosen else next(iter(listed.values()), None)
    return _kind_of_file(str(getattr(info, "filename", "")))


@cache
def _kind_of_file(path: str) -> str:
    """By the names of weights in a safetensors file: eight bytes, then as many of JSON."""
    if not path.endswith(".safetensors"):
        return ""
    try:
        with Path(path).open("rb") as file:
            names = file.read(min(int.from_bytes(file.read(8), "little"), MOST_NAMES_BYTES))
    except OSError:
        return ""
    if b'"model.diffusion_model.joint_blocks.' in names:
        return SD3.name
    if b'"conditioner.embedders.1.' in names:
        return SDXL.name
    return SD15.name if b'"cond_stage_model.transformer.' in names else ""


def patcher_of(model: Any, part: str) -> Any:
    """A Forge's patcher of a loaded model's `unet` or `vae`; None where there is none."""
    return getattr(getattr(model, "forge_objects", None), part, None)


def vae_of(model: Any) -> Any:
    """The VAE of a loaded model: the module that has a decoder and an encoder; None if none."""
    forges = getattr(patcher_of(model, "vae"), "first_stage_model", None)
    return getattr(model, "first_stage_model", None) if forges is None else forges


def unet_of(model: Any) -> torch.nn.Module | None:
    """The UNet of a loaded model."""
    patched = getattr(patcher_of(model, "unet"), "model", None)
    unet = getattr(patched, "diffusion_model", None)
    unet = unet or getattr(getattr(model, "model", None), "diffusion_model", None)
    return unet if isinstance(unet, torch.nn.Module) else None


def patchers_of(module: Any) -> list[Any]:
    """Those by which a Forge has `module` loaded now."""
    loaded = of_forge("memory", "current_loaded_models")
    patchers = (getattr(each, "model", None) for each in list(loaded or ()))
    return [each for each in patchers if getattr(each, "model", None) is module]


def bring(model: Any) -> None:
    """Have a Forge bring a loaded model's UNet onto its device, as before a step."""
    patcher, load = patcher_of(model, "unet"), of_forge("memory", "load_models_gpu")
    if patcher is None or not callable(load):
        raise ValueError("we do not know how this Forge loads its UNet")
    load([patcher])


def is_short_of_memory() -> bool:
    """True where models are moved out of the GPU after use: with --lowvram and --medvram, and by a
    Forge's memory management, which does not know of what we keep there, unless a flag has it keep
    all there.
    """
    if forge() is None:
        return bool(getattr(loaded_model(), "lowvram", False))
    flags = of_forge("arguments", "args")
    return not any(getattr(flags, name, False) is True for name in ("always_gpu", "gpu_only"))


def vae_dtype() -> Any:
    """Dtype of the VAE's weights. The VAE of a Forge's loaded model states its own."""
    own = getattr(patcher_of(loaded_model(), "vae"), "vae_dtype", None) if forge() else None
    return own or attribute("modules.devices", "dtype_vae")


def half_vae_flag() -> str:
    """The flag with which a Forge keeps a VAE's weights in half; empty where there is none."""
    flags = of_forge("arguments", "args")
    known = {"vae_in_fp16": "--vae-in-fp16", "fp16_vae": "--fp16-vae"}
    return next((flag for name, flag in known.items() if hasattr(flags, name)), "")


def out_of_memory() -> type[Exception] | None:
    """What a Forge takes for "out of memory", in answer to which it tiles; None elsewhere."""
    found = of_forge("memory", "OOM_EXCEPTION")
    return found if isinstance(found, type) and issubclass(found, Exception) else None
