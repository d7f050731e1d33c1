"""Double of ldm_patched/modules/model_patcher.py: weights that are patched when a model is loaded.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
"""

import collections
import copy
import uuid

import torch


class ModelPatcher:
    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.patches, self.backup, self.patches_uuid = {}, {}, uuid.uuid4()
        self.model_options = {"transformer_options": {}}
        if not hasattr(model, "current_weight_patches_uuid"):
            model.current_weight_patches_uuid = None

    def clone(self):
        n = ModelPatcher(self.model, self.load_device, self.offload_device)
        n.patches, n.backup, n.patches_uuid = dict(self.patches), self.backup, self.patches_uuid
        n.model_options = copy.deepcopy(self.model_options)
        return n

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        self.patches.update({key: (strength_patch, patch) for key, patch in patches.items()})
        self.patches_uuid = uuid.uuid4()
        return list(patches)

    def patch_model(
        self, device_to=None, lowvram_model_memory=0, load_weights=True, force_patch_weights=False
    ):
        kept = collections.namedtuple("Dimension", ["weight", "inplace_update"])  # noqa: PYI024
        for key, (strength, (_, (difference,))) in self.patches.items():
            weight = self.model.get_parameter(key)
            self.backup.setdefault(key, kept(weight, False))
            made = (weight.float() + strength * difference).to(weight.dtype)
            self._put(key, torch.nn.Parameter(made, requires_grad=False))
        self.model.current_weight_patches_uuid = self.patches_uuid
        return self.model

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        for key, kept in self.backup.items():
            self._put(key, kept.weight)
        self.backup.clear()
        self.model.current_weight_patches_uuid = None

    def _put(self, key, weight):
        path, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(path), name, weight)
