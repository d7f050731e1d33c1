"""What a generation asks of us: as a script's arguments, and in an infotext."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from lib_rocm_sd.cards.devices import numbers_of
from lib_rocm_sd.lab.speed_result import shown
from lib_rocm_sd.policy import LEVELS

TITLE = "ROCm SD Optimization"
LEVEL_LABEL = "Optimization Level"
UNET_LABEL = "UNet"
VAE_LABEL = "VAE"
BUDGET_LABEL = "VAE memory budget (MiB, 0 = Auto)"
SEVERAL_LABEL = "Several GPUs"
CARDS_LABEL = "Cards (numbers, empty: all)"
UPSCALER_LABEL = "Upscaler"
INFOTEXT_KEY = "ROCm SD"
UNET_KEY = "ROCm SD UNet"
VAE_KEY = "ROCm SD VAE"
UPSCALER_KEY = "ROCm SD Upscaler"
OFF = "off"
UNET_MODES = {"Off": False, "Auto": True}
"""The choices, and whether the UNet's blocks are ours where they can be."""
UNET_DEFAULT = "Auto"
"""What is chosen where nobody has chosen; docs/usage.md and docs/unet.md have a line on it each."""
VAE_MODES = {"Off": "", "Auto": "auto", "Always banded": "banded"}
"""The choices, and what vae.program calls them."""
SEVERAL_MODES = {"Off": False, "Auto": True}
"""The choices, and whether further cards may compute steps. It changes no infotext."""
UPSCALER_MODES = {"Off": False, "Auto": True}
"""The choices, and whether upscaling networks are ours where they can be."""
_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", OFF, "no")
_BUDGET = re.compile(r"(\d+) MiB")


@dataclass(frozen=True)
class Options:
    """What a generation asks of us, in the order of the script's arguments."""

    enable: bool = True
    level: str = "Auto"
    vae: str = "Auto"
    budget_mib: int = 0
    unet: str = UNET_DEFAULT
    several: str = "Off"
    cards: str = ""
    upscaler: str = "Auto"

    def infotext(self, what_ran: str) -> str:
        """The value of `INFOTEXT_KEY`, for instance 'Auto, attention: rocm_sd'."""
        return ", ".join(part for part in (self.level, what_ran) if part) if self.enable else OFF

    def vae_infotext(self, what_ran: str) -> str:
        """The value of `VAE_KEY`, for instance 'Always banded, 512 MiB, bands, conv: rocm_sd'."""
        if not VAE_MODES[self.vae]:
            return OFF
        budget = f"{self.budget_mib} MiB" if self.budget_mib else ""
        return ", ".join(part for part in (self.vae, budget, what_ran) if part)

    def unet_infotext(self, what_ran: str) -> str:
        """The value of `UNET_KEY`, for instance 'Auto, 82 of 82 blocks, linear: rocm_sd'."""
        if not UNET_MODES[self.unet]:
            return OFF
        return ", ".join(part for part in (self.unet, what_ran) if part)

    def upscaler_infotext(self, what_ran: str) -> str:
        """The value of `UPSCALER_KEY`, for instance 'Auto, whole picture, conv: rocm_sd'."""
        if not UPSCALER_MODES[self.upscaler]:
            return OFF
        return ", ".join(part for part in (self.upscaler, what_ran) if part)


DEFAULTS = Options()


def parse(*args: Any) -> tuple[Options, list[str]]:
    """The options that a script's arguments mean, and what was wrong with them.

    Missing arguments and None are the defaults; so is what cannot be understood, with a message.
    """
    messages: list[str] = []
    count = len(fields(Options))
    given = [*args[:count], *[None] * count][:count]
    enable, level, vae, budget, unet, several, cards, upscaler = given
    if len(args) > count:
        messages.append(
            f"{len(args)} arguments were given; Enable, {LEVEL_LABEL}, {VAE_LABEL}, "
            f"{BUDGET_LABEL}, {UNET_LABEL}, {SEVERAL_LABEL}, its cards and {UPSCALER_LABEL} "
            "are used"
        )
    options = Options(
        _enable(enable, messages),
        _choice(level, tuple(LEVELS), DEFAULTS.level, LEVEL_LABEL, messages),
        _choice(vae, tuple(VAE_MODES), DEFAULTS.vae, VAE_LABEL, messages),
        _budget(budget, messages),
        _choice(unet, tuple(UNET_MODES), DEFAULTS.unet, UNET_LABEL, messages),
        _choice(several, tuple(SEVERAL_MODES), DEFAULTS.several, SEVERAL_LABEL, messages),
        _cards(cards, messages),
        _choice(upscaler, tuple(UPSCALER_MODES), DEFAULTS.upscaler, UPSCALER_LABEL, messages),
    )
    return options, messages


def _enable(value: Any, messages: list[str]) -> bool:
    if value is None or isinstance(value, bool):
        return DEFAULTS.enable if value is None else value
    word = str(value).strip().lower() if isinstance(value, (str, int, float)) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    messages.append(f"Enable is {shown(value)}, expected true or false; {DEFAULTS.enable} is used")
    return DEFAULTS.enable


def _choice(
    value: Any, choices: tuple[str, ...], default: str, label: str, messages: list[str]
) -> str:
    """The choice that `value` names, in any letter case."""
    if value is None:
        return default
    for choice in choices:
        if isinstance(value, str) and value.strip().lower() == choice.lower():
            return choice
    known = ", ".join(choices)
    messages.append(f"{label} is {shown(value)}, expected one of {known}; {default} is used")
    return default


def _budget(value: Any, messages: list[str]) -> int:
    """Whole MiB, 0 or more."""
    if value is None or value == "":
        return DEFAULTS.budget_mib
    number = math.nan
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if math.isfinite(number) and number >= 0:
        return math.ceil(number)
    default = DEFAULTS.budget_mib
    messages.append(f"{BUDGET_LABEL} is {shown(value)}, expected 0 or more; {default} is used")
    return default


def _cards(value: Any, messages: list[str]) -> str:
    """Numbers of cards as they were written; empty for all."""
    whole = isinstance(value, (int, str)) and not isinstance(value, bool)
    if value is None or (whole and numbers_of(str(value)) is not None):
        return "" if value is None else str(value).strip()
    messages.append(f"{CARDS_LABEL} is {shown(value)}, expected numbers; all are used")
    return DEFAULTS.cards


def enable_from(infotext: Mapping[str, Any]) -> bool | None:
    """Enable as a pasted infotext has it; None, which changes nothing, if it has none."""
    text = infotext.get(INFOTEXT_KEY)
    if text is None:
        ours = (UNET_KEY, VAE_KEY, UPSCALER_KEY)
        return True if any(key in infotext for key in ours) else None
    return str(text).strip().lower() != OFF


def _choice_in(key: str, choices: Iterable[str], infotext: Mapping[str, Any]) -> str | None:
    """The choice that a pasted infotext has under this key; None where it has none."""
    word = str(infotext.get(key) or "").split(",")[0].strip().lower()
    return next((choice for choice in choices if choice.lower() == word), None)


level_from = partial(_choice_in, INFOTEXT_KEY, LEVELS)
unet_from = partial(_choice_in, UNET_KEY, UNET_MODES)
vae_from = partial(_choice_in, VAE_KEY, VAE_MODES)
upscaler_from = partial(_choice_in, UPSCALER_KEY, UPSCALER_MODES)


def budget_from(infotext: Mapping[str, Any]) -> int | None:
    """The VAE's memory budget in MiB as a pasted infotext has it; None without a VAE entry."""
    text = infotext.get(VAE_KEY)
    if text is None or vae_from(infotext) in (None, "Off"):
        return None
    parts = (part.strip() for part in str(text).split(","))
    found = (_BUDGET.fullmatch(part) for part in parts)
    return next((int(match[1]) for match in found if match), DEFAULTS.budget_mib)
