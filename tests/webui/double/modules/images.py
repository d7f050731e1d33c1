"""Double of modules/images.py: tiles, and how a picture is enlarged for img2img and hires fix.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd. Where tiles overlap, the
later one lies on top; the real one blends them. As there, what is smaller than a tile has black
above and to the left of it.
"""

from collections import namedtuple

from PIL import Image

from modules import shared

LANCZOS = Image.Resampling.LANCZOS


class Grid(namedtuple("_Grid", ["tiles", "tile_w", "tile_h", "image_w", "image_h", "overlap"])):
    @property
    def tile_count(self):
        return sum(len(row[2]) for row in self.tiles)


def _places(side, tile, overlap):
    if side <= tile:
        return [side - tile]
    return [*range(0, side - tile, tile - overlap), side - tile]


def split_grid(image, tile_w=512, tile_h=512, overlap=64):
    w, h = image.size
    rows = []
    for y in _places(h, tile_h, overlap):
        row = [
            [x, tile_w, image.crop((x, y, x + tile_w, y + tile_h))]
            for x in _places(w, tile_w, overlap)
        ]
        rows.append([y, tile_h, row])
    return Grid(rows, tile_w, tile_h, w, h, overlap)


def combine_grid(grid):
    combined = Image.new("RGB", (grid.image_w, grid.image_h))
    for y, _, row in grid.tiles:
        for x, _, tile in row:
            combined.paste(tile, (x, y))
    return combined


def resize_image(resize_mode, im, width, height, upscaler_name=None):
    upscaler_name = upscaler_name or shared.opts.upscaler_for_img2img
    scale = max(width / im.width, height / im.height)
    if scale > 1 and upscaler_name not in (None, "None"):
        upscaler = next(each for each in shared.sd_upscalers if each.name == upscaler_name)
        im = upscaler.scaler.upscale(im, scale, upscaler.data_path)
    return im.resize((width, height), resample=LANCZOS)
