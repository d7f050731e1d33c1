"""Double of comfy/model_base.py (Comfy-Org/ComfyUI a125cd84): a model that is one attention."""

import torch
from comfy.ldm.modules.attention import CrossAttention


class BaseModel(torch.nn.Module):
    def __init__(self, model_config, model_type=None, device=None, unet_model=CrossAttention):
        super().__init__()
        self.diffusion_model = unet_model(**model_config)

    def apply_model(
        self,
        x,
        t,
        c_concat=None,
        c_crossattn=None,
        control=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        return self.diffusion_model(x, c_crossattn, transformer_options=transformer_options)
