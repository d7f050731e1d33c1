"""Double of backend/patcher/unet.py.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

from backend.modules.k_model import KModel
from backend.patcher.base import ModelPatcher


class UnetPatcher(ModelPatcher):
    @classmethod
    def from_model(cls, model, diffusers_scheduler, config, k_predictor=None):
        made = KModel(model, diffusers_scheduler, k_predictor, config)
        return cls(made, model.load_device, model.offload_device)
