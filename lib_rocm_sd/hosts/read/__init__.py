"""Reads the modules of hosts, whose classes it alone knows: a UNet's blocks, a VAE's coders.

Import it where either is run by our programs.
"""

from lib_rocm_sd.hosts.read import unet, vae
from lib_rocm_sd.unet import kinds
from lib_rocm_sd.vae import steps

kinds.register(unet.blocks_of)
steps.register(vae.read)
