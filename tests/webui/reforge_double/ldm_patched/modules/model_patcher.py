"""Double of ldm_patched/modules/model_patcher.py: weights that are patched when a model is loaded.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
"""

import collections
import copy
import uuid

import torch


class LowVramPatch:
    """What a patched layer in main memory does with its weight in each call."""

    def __init__(self, key, patches):
        self.key, self.patches = key, patches

    def __call__(self, weight):
        return _patched(weight, self.patches[self.key])


def _patched(weight, patch):
    strength, (_, (difference,)) = patch
    return (weight.float() + strength * difference).to(weight.dtype)


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
        for key, patch in self.patches.items():
            if key not in self.backup:
                self.backup[key] = kept(self.model.get_parameter(key), False)
                made = _patched(self.backup[key].weight, patch)
                self._put(key, torch.nn.Parameter(made, requires_grad=False))
        self.model.current_weight_patches_uuid = self.patches_uuid
        return self.model

    def load(
        self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False
    ):
        """All of it, which is what the tests ask for."""
        for layer in self.model.modules():
            if hasattr(layer, "prev_ldm_patched_cast_weights"):
                layer.ldm_patched_cast_weights = layer.prev_ldm_patched_cast_weights
                del layer.prev_ldm_patched_cast_weights
            if hasattr(layer, "weight_function"):
                layer.weight_function, layer.bias_function = [], []
        self.patch_model()

    def partially_unload(self, device_to, memory_to_free=0):
        """Layers by their size, the smallest first: patches are made in each call of them."""
        named = [(n, m) for n, m in self.model.named_modules() if hasattr(m, "weight_function")]
        freed = 0
        for name, layer in sorted(named, key=lambda pair: _size(pair[1])):
            if freed > memory_to_free:
                break
            for key in ("weight", "bias"):
                path = f"{name}.{key}"
                if path in self.backup:
                    self._put(path, self.backup.pop(path).weight)
                    functions = [LowVramPatch(path, self.patches)]
                    setattr(layer, f"{key}_function", functions)
            layer.prev_ldm_patched_cast_weights = layer.ldm_patched_cast_weights
            layer.ldm_patched_cast_weights = True
            freed += _size(layer)
        return freed

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        for key, kept in self.backup.items():
            self._put(key, kept.weight)
        self.backup.clear()
        self.model.current_weight_patches_uuid = None

    def _put(self, key, weight):
        path, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(path), name, weight)


def _size(layer):
    return sum(each.numel() * each.element_size() for each in layer.parameters())
