"""Double of comfy/model_patcher.py (Comfy-Org/ComfyUI a125cd84): a model and its options.

ModelPatcherDynamic is of 08d0e510 (0.38), on any device.
"""

import copy
from types import SimpleNamespace
from uuid import uuid4

import torch


class ModelPatcher:
    """Clones share the model and the backups of its weights, not the patches."""

    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.size, self.weight_inplace_update = size, weight_inplace_update
        self.model_options = {"transformer_options": {}}
        self.patches, self.backup, self.patches_uuid = {}, {}, uuid4()
        self.current_hooks = None

    def clone(self):
        made = self.__class__(self.model, self.load_device, self.offload_device)
        made.model_options = copy.deepcopy(self.model_options)
        made.patches, made.backup = dict(self.patches), self.backup
        made.patches_uuid = self.patches_uuid
        return made

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        self.patches |= patches
        self.patches_uuid = uuid4()

    def patch_model(
        self,
        device_to=None,
        lowvram_model_memory=0,
        load_weights=True,
        force_patch_weights=False,
    ):
        self.unpatch_model()
        for key, added in self.patches.items():
            weight = self.model.get_parameter(key)
            self.backup[key] = SimpleNamespace(weight=weight.to(weight.device))
            _set(self.model, key, (weight.float() + added).to(weight.dtype))
        self.model.current_weight_patches_uuid = self.patches_uuid

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        for key, kept in self.backup.items():
            _set(self.model, key, kept.weight)
        self.backup.clear()


class ModelPatcherDynamic(ModelPatcher):
    """Its layers bring their weights in each call."""

    cached_patcher_init = None

    def is_dynamic(self):
        return True

    def clone(self, disable_dynamic=False):
        if not disable_dynamic:
            made = super().clone()
            made.cached_patcher_init = self.cached_patcher_init
            return made
        if self.cached_patcher_init is None:
            raise RuntimeError("there is no loader to ask")
        loads, given = self.cached_patcher_init
        made = ModelPatcher.clone(loads(*given, disable_dynamic=True))
        made.model_options = copy.deepcopy(self.model_options)
        made.patches, made.patches_uuid = dict(self.patches), self.patches_uuid
        return made

    def patch_model(self, device_to=None, **kwargs):
        for module in self.model.modules():
            if hasattr(module, "comfy_cast_weights"):
                module.comfy_cast_weights = True
        self.model.current_weight_patches_uuid = self.patches_uuid


def _set(model, key, weight):
    """As comfy.utils.set_attr_param: another parameter."""
    module, _, name = key.rpartition(".")
    setattr(model.get_submodule(module), name, torch.nn.Parameter(weight, requires_grad=False))
