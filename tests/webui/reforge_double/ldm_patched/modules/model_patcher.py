"""Double of ldm_patched/modules/model_patcher.py.

The surface was read in Panchovix/stable-diffusion-webui-reForge 3b56b268.
"""


class ModelPatcher:
    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.model_options = {"transformer_options": {}}
