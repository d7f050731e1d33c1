"""ldm's classes, by the WebUI's double of them, for tests that need no WebUI."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

DOUBLE = Path(__file__).parent / "webui" / "double"
VAE = "ldm.modules.diffusionmodules.model"
UNET = "ldm.modules.diffusionmodules.openaimodel"


def module_of(name: str) -> Any:
    """ldm's or sgm's module. The WebUI's own packages beside them are not found afterwards."""
    sys.path.insert(0, str(DOUBLE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOUBLE))
