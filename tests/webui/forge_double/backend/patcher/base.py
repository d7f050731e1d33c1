"""Double of backend/patcher/base.py.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

import copy

from backend.patcher.lora import LoraLoader


class ModelPatcher:
    def __init__(self, model, load_device, offload_device, size=0, current_device=None, **kwargs):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.lora_patches, self.model_options = {}, {"transformer_options": {}}
        if not hasattr(model, "lora_loader"):
            model.lora_loader = LoraLoader(model)
        self.lora_loader = model.lora_loader

    def clone(self):
        made = type(self)(self.model, self.load_device, self.offload_device)
        made.lora_patches = dict(self.lora_patches)
        made.model_options = copy.deepcopy(self.model_options)
        return made

    def add_patches(
        self, *, filename, patches, strength_patch=1.0, strength_model=1.0, online_mode=False
    ):
        own = {k: [[strength_patch, v, strength_model, None, None]] for k, v in patches.items()}
        self.lora_patches[(filename, strength_patch, strength_model, online_mode)] = own

    def refresh_loras(self):
        self.lora_loader.refresh(self.lora_patches, self.offload_device)
