"""The AMD GPUs that are here, as the operating system tells of them without torch; under WSL only
torch does, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lib_rocm_sd import console, device
from lib_rocm_sd.arch import PACKAGE, Arch, amd_table, by_gfx, by_marketing_name
from lib_rocm_sd.first_trials import MARK
from lib_rocm_sd.runtime import process
from lib_rocm_sd.trials import stamp

WSL = Path("/dev/dxg")
ASK = (
    "import sys; sys.path.insert(0, sys.argv[1]); from lib_rocm_sd.present import tell; "
    "raise SystemExit(tell())"
)


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


def torch_alone_knows() -> bool:
    """Whether this is WSL, which has no AMD driver of Linux's, but a way to that of Windows."""
    return sys.platform == "linux" and WSL.exists() and not device.kfd_gpus()


def ask_torch(limit_s: float, say: Callable[[str], None]) -> tuple[list[Arch], str]:
    """Each kind of GPU that torch knows and our kernels serve, and the reason where there is none.

    Torch is not asked again while kernels were tried with it before: that takes seconds.
    """
    done = [row for row in amd_table().values() if stamp.is_there(row.gfx)]
    if done:
        return done, ""
    say("this is WSL, where only torch knows the GPU: it is asked in a process of its own.")
    answer = process.run([sys.executable, "-c", ASK, str(PACKAGE.parent)], limit_s)
    lines = [line[len(MARK) :] for line in answer.output.splitlines() if line.startswith(MARK)]
    told = [json.loads(line) for line in lines]
    rows = [by_gfx(gfx) for gfx, reasons in told if not reasons]
    trouble = f"the process with torch {answer.trouble}" if answer.trouble else ""
    reasons = [trouble, *(reason for _, each in told for reason in each)]
    why = "; ".join(dict.fromkeys(filter(None, reasons))) or "torch finds no GPU"
    return list(dict.fromkeys(filter(None, rows))), why


def tell() -> int:
    """What the process says that `ask_torch` starts: a line for each GPU."""
    import torch

    for index in range(torch.cuda.device_count()):
        info = device.identify(torch.device("cuda", index))
        console.say(f"{MARK}{json.dumps([info.gfx, info.reasons])}")
    return 0


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
