"""Whether a host's torch is new enough for us. Nothing is imported here that an older one lacks."""

from __future__ import annotations

import sys

from lib_rocm_sd import console
from lib_rocm_sd.runtime import torch_build


def torch_serves() -> bool:
    """Says why where it does not."""
    why = torch_build.too_old(str(getattr(sys.modules.get("torch"), "__version__", "")))
    if why:
        console.say(f"ROCm SD: not active: {why}. All else works as before.")
    return not why
