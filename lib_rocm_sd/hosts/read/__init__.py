"""Reads the modules of hosts, whose classes it alone knows: a UNet's blocks, a VAE's coders, an
upscaler.

Import it where any is run by our programs.
"""

from lib_rocm_sd.hosts.read import swinir, unet, upscaler, vae
from lib_rocm_sd.unet import kinds
from lib_rocm_sd.upscaler import steps as upscalers
from lib_rocm_sd.vae import steps

upscaler.READERS["SwinIR"] = swinir.SwinIr
kinds.register(unet.blocks_of)
steps.register(vae.read)
upscalers.register(upscaler.read)
