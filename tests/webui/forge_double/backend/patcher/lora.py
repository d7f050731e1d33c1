"""Double of backend/patcher/lora.py: differences added to weights, at once or in each call.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

import torch


def merge_lora_to_weight(patches, weight, key="online_lora", computation_dtype=torch.float32):
    made = weight.to(computation_dtype)
    for strength, (_, (difference,)), _, _, _ in patches:
        made = made + strength * difference.to(made)
    return made.to(weight.dtype)


class LoraLoader:
    def __init__(self, model):
        self.model = model
        self.backup, self.online_backup, self.loaded_hash = {}, [], str([])

    @torch.inference_mode()
    def refresh(self, lora_patches, offload_device=torch.device("cpu"), force_refresh=False):  # noqa: B008
        hashes = str(list(lora_patches))
        if hashes == self.loaded_hash and not force_refresh:
            return
        for layer in set(self.online_backup):
            del layer.forge_online_loras
        for key, weight in self.backup.items():
            self._put(key, weight)
        self.online_backup, self.backup, self.loaded_hash = [], {}, hashes
        for (*_, online_mode), patches in lora_patches.items():
            for key, several in patches.items():
                self._merge(key, several, online_mode)

    def _merge(self, key, patches, online_mode):
        path, _, name = key.rpartition(".")
        layer = self.model.get_submodule(path)
        if online_mode:
            layer.__dict__.setdefault("forge_online_loras", {})[name] = patches
            self.online_backup.append(layer)
            return
        weight = self.backup.setdefault(key, getattr(layer, name))
        made = merge_lora_to_weight(patches, weight, key)
        self._put(key, torch.nn.Parameter(made, requires_grad=False))

    def _put(self, key, weight):
        path, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(path), name, weight)
