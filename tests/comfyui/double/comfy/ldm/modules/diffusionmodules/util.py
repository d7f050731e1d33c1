"""Double of comfy/ldm/modules/diffusionmodules/util.py (Comfy-Org/ComfyUI a125cd84)."""

import torch
from torch import nn


class AlphaBlender(nn.Module):
    def __init__(
        self, alpha, merge_strategy="learned_with_images", rearrange_pattern="b t -> (b t) 1 1"
    ):
        super().__init__()
        self.merge_strategy = merge_strategy
        self.register_parameter("mix_factor", nn.Parameter(torch.tensor([alpha])))

    def get_alpha(self, image_only_indicator, device):
        alpha = torch.sigmoid(self.mix_factor.to(device))[..., None]
        if image_only_indicator is not None:
            alpha = torch.where(image_only_indicator.bool(), torch.ones(1, 1), alpha)
        return alpha[:, None, :, None, None]

    def forward(self, x_spatial, x_temporal, image_only_indicator=None):
        alpha = self.get_alpha(image_only_indicator, x_spatial.device)
        one, other = alpha.to(x_spatial.dtype), (1.0 - alpha).to(x_spatial.dtype)
        return one * x_spatial + other * x_temporal
