"""The AMD GPUs that are here, as the operating system tells of them: for a start, without torch."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

from lib_rocm_sd import device
from lib_rocm_sd.arch import Arch, by_gfx, by_marketing_name


def find() -> list[tuple[str, Arch | None]]:
    """Each kind of AMD GPU: gfx id or name, and its row."""
    if sys.platform == "win32":
        names = [name for name in _windows_adapters() if re.search("AMD|Radeon", name)]
        return [(name, by_marketing_name(name)) for name in dict.fromkeys(names)]
    present = device.kfd_gpus()
    claims = {name: device.gfx_of_version(value) for name, value in device.overrides(os.environ)}
    claimed = [gfx for gfx in claims.values() if gfx] if present else []
    ids = claimed if claims.get(device.OVERRIDE) else present + claimed
    return [(gfx, by_gfx(gfx)) for gfx in dict.fromkeys(ids)]


def ignored_overrides() -> list[str]:
    """A line for each HSA_OVERRIDE_GFX_VERSION that is no version."""
    return [
        f"{name}={value} is ignored: it is not a version such as 11.0.0."
        for name, value in device.overrides(os.environ)
        if not device.gfx_of_version(value)
    ]


def contradiction() -> str:
    """Why nothing may be compiled for what an override names; empty where nothing is against it."""
    driver = device.kfd_gpus()
    found = (device.contradiction(each, driver) for each in device.overrides(os.environ))
    return next(filter(None, found), "")


def _windows_adapters() -> list[str]:
    """The names of the display adapters that Windows has drivers for."""
    names: list[str] = []
    if sys.platform == "win32":
        import winreg

        display = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, display) as parent:
            for number in range(winreg.QueryInfoKey(parent)[0]):
                with suppress(OSError), winreg.OpenKey(parent, f"{number:04d}") as key:
                    names.append(str(winreg.QueryValueEx(key, "DriverDesc")[0]))
    return names
