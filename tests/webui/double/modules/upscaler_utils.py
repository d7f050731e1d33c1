"""Double of modules/upscaler_utils.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

import numpy as np
import torch
from PIL import Image

from modules import devices, images, shared, torch_utils


def pil_image_to_torch_bgr(img):
    values = np.array(img.convert("RGB"))[:, :, ::-1].transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(values) / 255)


def torch_bgr_to_pil_image(tensor):
    if tensor.ndim == 4:
        (tensor,) = tensor
    values = tensor.float().cpu().clamp_(0, 1).numpy()
    values = (255.0 * np.moveaxis(values, 0, 2)).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(values[:, :, ::-1]))


def upscale_pil_patch(model, img):
    param = torch_utils.get_param(model)
    with torch.inference_mode():
        tensor = pil_image_to_torch_bgr(img)[None].to(device=param.device, dtype=param.dtype)
        with devices.without_autocast():
            return torch_bgr_to_pil_image(model(tensor))


def upscale_with_model(model, img, *, tile_size, tile_overlap=0, desc="tiled upscale"):
    if tile_size <= 0:
        return upscale_pil_patch(model, img)
    grid = images.split_grid(img, tile_size, tile_size, tile_overlap)
    factor, rows = 1, []
    for y, h, row in grid.tiles:
        upscaled = []
        for x, w, tile in row:
            if shared.state.interrupted:
                return img
            output = upscale_pil_patch(model, tile)
            factor = output.width // tile.width
            upscaled.append([x * factor, w * factor, output])
        rows.append([y * factor, h * factor, upscaled])
    return images.combine_grid(images.Grid(rows, *(value * factor for value in grid[1:])))


def tiled_upscale_2(img, model, *, tile_size, tile_overlap, scale, device, desc="Tiled upscale"):
    height, width = img.shape[2:]
    tile = min(tile_size, height, width)
    if tile <= 0:
        return model(img)  # where it is
    steps = tile - tile_overlap
    made = torch.zeros(*img.shape[:2], height * scale, width * scale, device=device)
    weights = torch.zeros_like(made)
    for top in (*range(0, height - tile, steps), height - tile):
        for left in (*range(0, width - tile, steps), width - tile):
            output = model(img[..., top : top + tile, left : left + tile].to(device))
            rows, columns = (slice(at * scale, (at + tile) * scale) for at in (top, left))
            made[..., rows, columns] += output
            weights[..., rows, columns] += 1
    return made / weights


def upscale_2(img, model, *, tile_size, tile_overlap, scale, desc):
    param = torch_utils.get_param(model)
    tensor = pil_image_to_torch_bgr(img)[None].to(param.dtype)
    how = {"tile_size": tile_size, "tile_overlap": tile_overlap, "scale": scale, "desc": desc}
    with torch.no_grad():
        return torch_bgr_to_pil_image(tiled_upscale_2(tensor, model, device=param.device, **how))
