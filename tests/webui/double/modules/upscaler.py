"""Double of modules/upscaler.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

from modules import shared
from modules.images import LANCZOS


class Upscaler:
    name = None
    scalers: list

    def __init__(self, create_dirs=False):
        self.scale = 1

    def do_upscale(self, img, selected_model):
        return img

    def upscale(self, img, scale, selected_model=None):
        """Again, at most three times, until it is as large as asked; each time by the network."""
        self.scale = scale
        wanted = tuple(int(side * scale) // 8 * 8 for side in img.size)
        for turn in range(3):
            large = all(side >= goal for side, goal in zip(img.size, wanted, strict=True))
            if (large and (turn or scale != 1)) or shared.state.interrupted:
                break
            before = img.size
            img = self.do_upscale(img, selected_model)
            if img.size == before:
                break
        return img if img.size == wanted else img.resize(wanted, resample=LANCZOS)

    def load_model(self, path):
        pass


class UpscalerData:
    name = None
    data_path = None
    scale = 4
    scaler = None

    def __init__(self, name, path, upscaler=None, scale=4, model=None):
        self.name = name
        self.data_path = path
        self.local_data_path = path
        self.scaler = upscaler
        self.scale = scale
        self.model = model
