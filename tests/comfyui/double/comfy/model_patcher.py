"""Double of comfy/model_patcher.py (Comfy-Org/ComfyUI a125cd84): a model and its options."""

import copy


class ModelPatcher:
    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.size, self.weight_inplace_update = size, weight_inplace_update
        self.model_options = {"transformer_options": {}}

    def clone(self):
        made = self.__class__(self.model, self.load_device, self.offload_device)
        made.model_options = copy.deepcopy(self.model_options)
        return made
