"""Double of backend/diffusion_engine/base.py.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""


class ForgeObjects:
    def __init__(self, unet, clip, vae, clipvision):
        self.unet, self.clip, self.vae, self.clipvision = unet, clip, vae, clipvision

    def shallow_copy(self):
        return ForgeObjects(self.unet, self.clip, self.vae, self.clipvision)
