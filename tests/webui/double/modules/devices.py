"""Double of modules/devices.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Device, dtypes, autocast, the NaN check.
"""

import contextlib

import torch

from modules import shared

cpu = torch.device("cpu")
device = device_esrgan = cpu
dtype = torch.float32
dtype_vae = torch.float32
dtype_unet = torch.float32
unet_needs_upcast = False


def cond_cast_unet(input):
    return input.to(dtype_unet) if unet_needs_upcast else input


def cond_cast_float(input):
    return input.float() if unet_needs_upcast else input


def autocast(disable=False):
    if disable or device == cpu or dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast("cuda")


def without_autocast(disable=False):
    if torch.is_autocast_enabled() and not disable:
        return torch.autocast("cuda", enabled=False)
    return contextlib.nullcontext()


def torch_gc():
    pass


class NansException(Exception):  # noqa: N818
    pass


def test_for_nans(x, where):
    if shared.cmd_opts.disable_nan_check:
        return
    if torch.isnan(x[(0,) * len(x.shape)]):
        raise NansException(f"A tensor with NaNs was produced in {where}.")
