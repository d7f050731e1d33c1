"""Double of modules/sd_unet.py: nothing but which UNet is in the place of the checkpoint's.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""

current_unet = None


def apply_unet(option=None):
    """Here there are no others."""
