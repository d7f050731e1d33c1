"""`bench unet`: a step of a UNet in every way that a host may run it."""
