"""What the WebUI's settings say of this extension, read from the WebUI whenever it matters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.hosts.webui import host

OPERATIONS_KEY = "rocm_sd_operations"
KNOWN_KEY = "rocm_sd_operations_known"
"""No setting: which operations there were when the list was saved."""
HEADROOM_KEY = "rocm_sd_headroom_mib"
PREVIEWS_KEY = "rocm_sd_live_previews"
GRAPHS_KEY = "rocm_sd_graphs"
SPOT_CHECK_KEY = "rocm_sd_spot_check"
COMPARE_SPEED_KEY = "rocm_sd_compare_speed"
LOG_LEVEL_KEY = "rocm_sd_log_level"

WHILE_TRAINING = "training_xattention_optimizations"
"""The WebUI's own, read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd,
modules/shared_options.py."""

ATTENTION = "Attention"
UNET = "UNet blocks"
UPSCALER = "Upscaler"
ROLES = {"VAE decode": "decoder", "VAE encode": "encoder"}
"""The choices, and which part of a VAE each is."""
OPERATIONS = (ATTENTION, *ROLES, UNET, UPSCALER)
BEFORE = OPERATIONS[:4]
"""What there was when nothing was noted yet."""
GRAPHS: dict[str, bool | None] = {"Auto": None, "On": True, "Off": False}
"""Whether launches of the UNet's blocks are recorded."""
LOG_LEVELS = {"Errors": "ERROR", "Warnings": "WARNING", "Everything": "DEBUG"}
MOST_HEADROOM_MIB = 16384


@dataclass(frozen=True)
class Settings:
    """`operations`: those that may be replaced. `headroom_mib`: video memory left to others.
    `graphs`: one of GRAPHS. `spot_check`: whether blocks of the UNet are compared with the WebUI's.
    `compare_speed`: whether the WebUI's own UNet is timed, and used where it is faster.
    """

    operations: tuple[str, ...] = OPERATIONS
    headroom_mib: int = 0
    previews: bool = True
    log_level: str = "Warnings"
    graphs: str = "Auto"
    spot_check: bool = True
    compare_speed: bool = True

    @property
    def attention(self) -> bool:
        """Whether attention may be replaced."""
        return ATTENTION in self.operations

    @property
    def unet(self) -> bool:
        """Whether the UNet's blocks may be replaced."""
        return UNET in self.operations

    @property
    def upscaler(self) -> bool:
        """Whether upscaling networks may be replaced."""
        return UPSCALER in self.operations

    def vae(self, role: str) -> bool:
        """Whether the VAE's decoder, or its encoder, may be replaced."""
        return any(ROLES.get(operation) == role for operation in self.operations)


DEFAULTS = Settings()


def current() -> Settings:
    """The settings as they are now. What is missing or cannot be understood is the default."""
    opts: Any = host.attribute("modules.shared", "opts")

    def get(key: str, default: Any, *choices: Any) -> Any:
        value = getattr(opts, key, default)
        return value if type(value) is type(default) and value in choices else default

    operations: Any = getattr(opts, OPERATIONS_KEY, None)
    known = isinstance(operations, (list, tuple))
    return Settings(
        tuple(name for name in OPERATIONS if name in operations) if known else OPERATIONS,
        _mebibytes(getattr(opts, HEADROOM_KEY, DEFAULTS.headroom_mib)),
        get(PREVIEWS_KEY, DEFAULTS.previews, True, False),
        get(LOG_LEVEL_KEY, DEFAULTS.log_level, *LOG_LEVELS),
        get(GRAPHS_KEY, DEFAULTS.graphs, *GRAPHS),
        get(SPOT_CHECK_KEY, DEFAULTS.spot_check, True, False),
        get(COMPARE_SPEED_KEY, DEFAULTS.compare_speed, True, False),
    )


def renew() -> None:
    """Select operations that are newer than the saved list, which says nothing about them. Whoever
    removes one and saves again has it removed.
    """
    data = getattr(host.attribute("modules.shared", "opts"), "data", None)
    if not isinstance(data, dict):
        return
    saved, known = data.get(OPERATIONS_KEY), data.get(KNOWN_KEY)
    known = known if isinstance(known, list) else BEFORE
    if isinstance(saved, list):
        new = [name for name in OPERATIONS if name not in known and name not in saved]
        data[OPERATIONS_KEY] = [*saved, *new]
    data[KNOWN_KEY] = list(OPERATIONS)


def trains_with_ours() -> bool:
    """Whether the WebUI leaves attention's optimizer on while it trains."""
    opts: Any = host.attribute("modules.shared", "opts")
    return bool(getattr(opts, WHILE_TRAINING, False))


def _mebibytes(value: Any) -> int:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        return DEFAULTS.headroom_mib
    return max(0, math.ceil(value))
