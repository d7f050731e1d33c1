"""Which of the Forges this is, by what it has. Nothing here raises where a piece is missing.

Read in lllyasviel/stable-diffusion-webui-forge dfdcbab6 and Haoming02/sd-webui-forge-classic
1fe65075 (its branch neo): attention.py, args.py and memory_management.py of backend/. In later
copies of neo (2026, their commits are not known) the VAE's function has another name. And in
Panchovix/stable-diffusion-webui-reForge 3b56b268 and sd-webui-forge-classic 1f95d717 (its branch
classic): ldm/modules/attention.py, modules/args_parser.py and modules/model_management.py of
ldm_patched/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

from lib_rocm_sd.hosts import optional


@dataclass(frozen=True)
class Kind:
    """Names of Python modules, and of functions in `attention`. Others import these by name.

    `packed` take q, k and v with the heads side by side, as hosts/packed.py says; `spatial` takes
    the VAE's (B, C, H, W) of one head. `elsewhere`: Python modules that ask for a function of
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


def find() -> Kind | None:
    """The first kind whose functions are all here; None where this is no Forge that is known."""
    return next((kind for kind in KINDS if _module(kind.attention) and not _lacking(kind)), None)


def shortcomings() -> list[str]:
    """What a Forge that is not as known lacks; empty where it is as known, and where it is none."""
    if find() is not None:
        return []
    first = {kind.attention: kind for kind in reversed(KINDS) if _module(kind.attention)}
    return [f"its {name} has no {', '.join(_lacking(kind))}" for name, kind in first.items()]


def _lacking(kind: Kind) -> list[str]:
    there = _module(kind.attention)
    return [name for name in kind.names if not callable(getattr(there, name, None))]


_module: Callable[[str], ModuleType | None] = cache(optional.module)
"""A module that is not there is looked for once."""


def device() -> Any:
    """The device that this Forge computes on; None where it does not say."""
    kind = find()
    asked = optional.attribute(kind.memory, "get_torch_device") if kind else None
    return asked() if callable(asked) else None


def flag(*names: str) -> bool:
    """Whether one of these command-line flags of a Forge is given; False where this is none."""
    kind = find()
    given: Any = optional.attribute(kind.arguments, "args") if kind else None
    return any(getattr(given, name, False) is True for name in names)


def keeps_all_on_the_gpu() -> bool:
    """True where models stay on the GPU after use. Else Forge counts on all that it gives free."""
    return flag("always_gpu", "gpu_only")


def half_vae_flag() -> str:
    """The flag with which this Forge keeps a VAE's weights in half; empty where it has none."""
    kind = find()
    given: Any = optional.attribute(kind.arguments, "args") if kind else None
    known = {"vae_in_fp16": "--vae-in-fp16", "fp16_vae": "--fp16-vae"}
    return next((flag for name, flag in known.items() if hasattr(given, name)), "")


def out_of_memory() -> type[Exception] | None:
    """What this Forge takes for "out of memory"; None where this is no Forge."""
    kind = find()
    found = optional.attribute(kind.memory, "OOM_EXCEPTION") if kind else None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def vae_of(model: Any) -> Any:
    """The patcher of a loaded model's VAE, which decodes and encodes; None where it has none."""
    return getattr(getattr(model, "forge_objects", None), "vae", None)


def unet_patcher_of(model: Any) -> Any:
    """The patcher of a loaded model's UNet or transformer; None where it has none."""
    return getattr(getattr(model, "forge_objects", None), "unet", None)


def unet_of(model: Any) -> Any:
    """The UNet or transformer of a loaded model; None where it has none."""
    return getattr(getattr(unet_patcher_of(model), "model", None), "diffusion_model", None)


def patchers_of(module: Any) -> list[Any]:
    """Those by which this Forge has `module` loaded now."""
    kind = find()
    loaded = optional.attribute(kind.memory, "current_loaded_models") if kind else None
    patchers = (getattr(each, "model", None) for each in list(loaded or ()))
    return [each for each in patchers if getattr(each, "model", None) is module]


def load(patcher: Any) -> bool:
    """Have this Forge bring a model onto its device, as before a step; False where it cannot."""
    kind = find()
    bring = optional.attribute(kind.memory, "load_models_gpu") if kind else None
    if patcher is None or not callable(bring):
        return False
    bring([patcher])
    return True
