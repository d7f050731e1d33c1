"""How a UNet's weights lay before ours ran, and that they do so again afterwards.

Beside what a take-over itself gives back: ComfyUI and the Forges replace parameters when they merge
a LoRA into them, keep those that were there as a backup, and put them back later. Read in
Comfy-Org/ComfyUI a125cd84 (0.3.64), comfy/model_patcher.py, and, at the commits that
hosts/webui/host.py names, in backend/patcher/lora.py and ldm_patched/modules/model_patcher.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn

from lib_rocm_sd.unet.weights import PLAIN, is_joined, restride

Backup = Callable[[nn.Module], Mapping[str, Any]]
NOTED = "current_weight_patches_uuid"
"""Where these hosts note on a model which patches are merged into its weights; some do not."""


class Strides:
    """Original strides of the weights of `unet`, the diffusion_model of `model`: of convolutions
    that were contiguous at first, and of linear layers that did not share the memory of three
    joined ones.

    `backup(model)`: the weights that its host keeps, by their names in it. Each is a tensor, or has
    one as its `weight`.
    """

    def __init__(self, model: nn.Module, unet: nn.Module, backup: Backup) -> None:
        self._model = ref(model)
        self._backup = backup
        self._plain = [module for module in unet.modules() if _is_plain(module)]

    def give_back(self) -> None:
        for weight in (*(each._parameters.get("weight") for each in self._plain), *self._kept()):
            if isinstance(weight, torch.Tensor) and _lies_otherwise(weight):
                shape = torch.empty(weight.shape, device="meta")
                restride(weight, shape.stride())

    def _kept(self) -> Iterator[Any]:
        """The backups of these weights, which all clones of a model share."""
        model = self._model()
        backup = {} if model is None else self._backup(model)
        if model is None or not backup:
            return
        plain = set(self._plain)
        names = {name for name, module in model.named_modules() if module in plain}
        for key, kept in backup.items():
            if key.removesuffix(".weight") in names:
                yield kept if isinstance(kept, torch.Tensor) else getattr(kept, "weight", None)


def _is_plain(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    known = isinstance(module, nn.Conv2d | nn.Linear) and type(weight) in PLAIN
    return known and weight is not None and not _lies_otherwise(weight)


def _lies_otherwise(weight: torch.Tensor) -> bool:
    return not weight.is_contiguous() if weight.ndim == 4 else is_joined(weight)


def values_of(model: Any) -> tuple[Any, ...] | None:
    """Equal only while a host has put no other values into the weights, amid a sampler's steps;
    None where it might in each.
    """
    patcher = getattr(model, "current_patcher", None)
    if getattr(patcher, "current_hooks", None) or getattr(patcher, "hook_backup", None):
        return None
    loader = getattr(model, "lora_loader", None)
    names = (NOTED, "model_loaded_weight_memory", "lowvram_patch_counter")
    return (getattr(loader, "loaded_hash", None), *(getattr(model, name, None) for name in names))
