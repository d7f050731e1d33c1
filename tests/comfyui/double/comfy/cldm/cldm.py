"""Double of comfy/cldm/cldm.py (Comfy-Org/ComfyUI a125cd84): the first half of a UNet."""

import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel, forward_timestep_embed


class ControlNet(torch.nn.Module):
    def __init__(self, **config):
        super().__init__()
        own = UNetModel(**config)
        self.dtype, self.model_channels = own.dtype, own.model_channels
        self.time_embed, self.input_blocks = own.time_embed, own.input_blocks
        self.middle_block = own.middle_block
        self.zero_convs = torch.nn.ModuleList(map(self._result, (32, 32, 32)))
        self.middle_block_out = self._result(64)

    def _result(self, channels):
        return torch.nn.Sequential(torch.nn.Conv2d(channels, channels, 1, dtype=self.dtype))

    def forward(self, x, hint, timesteps, context, y=None, **kwargs):
        waves = torch.arange(1, self.model_channels + 1, device=x.device)
        emb = self.time_embed((timesteps[:, None] / waves).cos().to(x.dtype))
        h, made = x + hint, []
        for layers, result in zip(self.input_blocks, self.zero_convs, strict=True):
            h = forward_timestep_embed(layers, h, emb, context)
            made.append(result(h))
        middle = forward_timestep_embed(self.middle_block, h, emb, context)
        return {"middle": [self.middle_block_out(middle)], "output": made}
