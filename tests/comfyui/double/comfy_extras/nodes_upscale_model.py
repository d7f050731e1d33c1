"""Double of comfy_extras/nodes_upscale_model.py (Comfy-Org/ComfyUI a125cd84): tiles of 8 pixels
that do not overlap, where the real one has 512 that do.
"""

import torch
from comfy import model_management
from comfy_api.latest import io

_TILE = 8


class ImageUpscaleWithModel:
    @classmethod
    def execute(cls, upscale_model, image):
        device = model_management.get_torch_device()
        upscale_model.to(device)
        pictures = image.movedim(-1, -3).to(device)
        rows = [
            torch.cat([upscale_model(tile) for tile in row.split(_TILE, 3)], 3)
            for row in pictures.split(_TILE, 2)
        ]
        made = torch.cat(rows, 2)
        colours = made.new_zeros(len(made), 3, *made.shape[2:])
        colours[:] = made
        upscale_model.to("cpu")
        return io.NodeOutput(torch.clamp(colours.movedim(-3, -1), min=0, max=1.0))

    upscale = execute
