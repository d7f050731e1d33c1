"""Double of modules/esrgan_model.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

from pathlib import Path

from modules import devices, errors, modelloader
from modules.shared import opts
from modules.upscaler import Upscaler, UpscalerData
from modules.upscaler_utils import upscale_with_model


class UpscalerESRGAN(Upscaler):
    def __init__(self, dirname):
        self.name = "ESRGAN"
        super().__init__()
        paths = sorted(Path(dirname).glob("*.pth"))
        self.scalers = [UpscalerData(path.stem, str(path), self, 4) for path in paths]

    def do_upscale(self, img, selected_model):
        try:
            model = self.load_model(selected_model)
        except Exception:
            errors.report(f"Unable to load ESRGAN model {selected_model}", exc_info=True)
            return img
        model.to(devices.device_esrgan)
        return esrgan_upscale(model, img)

    def load_model(self, path):
        return modelloader.load_spandrel_model(path, device=None, expected_architecture="ESRGAN")


def esrgan_upscale(model, img):
    return upscale_with_model(
        model, img, tile_size=opts.ESRGAN_tile, tile_overlap=opts.ESRGAN_tile_overlap
    )
