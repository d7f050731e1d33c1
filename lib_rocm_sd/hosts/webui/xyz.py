"""Axes for the WebUI's X/Y/Z plot: Enable, level, who computes the VAE, blocks and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from lib_rocm_sd.hosts.ui.options import (
    LEVEL_LABEL,
    SEVERAL_LABEL,
    SEVERAL_MODES,
    UNET_LABEL,
    UNET_MODES,
    VAE_LABEL,
    VAE_MODES,
    Options,
    parse,
)
from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.policy import LEVELS

FILE = "xyz_grid.py"
ATTRIBUTE = "rocm_sd_axes"
"""Where the cell's values are kept, on the WebUI's `p`, which is a copy for each cell."""


@dataclass(frozen=True)
class Axis:
    """`field` of Options takes each of `choices` in turn."""

    label: str
    field: str
    choices: tuple[str, ...]

    def value(self, text: Any) -> Any:
        """What a cell's text means. Raises ValueError, in plain words, for nonsense."""
        place = [field.name for field in fields(Options)].index(self.field)
        options, messages = parse(*[None] * place, text)
        if messages:
            raise ValueError(messages[0].split(";")[0])
        return getattr(options, self.field)

    def apply(self, p: Any, x: Any, xs: Sequence[Any]) -> None:
        """Callback of the plot: make a cell."""
        setattr(p, ATTRIBUTE, {**getattr(p, ATTRIBUTE, {}), self.field: self.value(x)})

    def confirm(self, p: Any, xs: Sequence[Any]) -> None:
        """Callback of the plot, before the first cell. Raises ValueError, which it shows."""
        for x in xs:
            self.value(x)


AXES = (
    Axis(f"[{host.NAME}] Enable", "enable", ("True", "False")),
    Axis(f"[{host.NAME}] {LEVEL_LABEL}", "level", tuple(LEVELS)),
    Axis(f"[{host.NAME}] {VAE_LABEL}", "vae", tuple(VAE_MODES)),
    Axis(f"[{host.NAME}] {UNET_LABEL}", "unet", tuple(UNET_MODES)),
    Axis(f"[{host.NAME}] {SEVERAL_LABEL}", "several", tuple(SEVERAL_MODES)),
)


def add_axes() -> None:
    """Callback, before the UI is created: every script is loaded, X/Y/Z's among them.

    "Reload UI" executes that script anew, so there is nothing to take back.
    """
    for module in _modules():
        make = getattr(module, "AxisOption", None)
        listed = getattr(module, "axis_options", None)
        if not callable(make) or not isinstance(listed, list):
            continue
        there = {getattr(option, "label", "") for option in listed}
        listed += [_option(make, axis) for axis in AXES if axis.label not in there]


def of_cell(p: Any, options: Options) -> Options:
    """The options of a generation, with the values of its cell where it is one of a plot's."""
    values = getattr(p, ATTRIBUTE, None)
    return replace(options, **values) if isinstance(values, dict) else options


def _option(make: Callable[..., Any], axis: Axis) -> Any:
    choices = list(axis.choices)
    return make(axis.label, str, axis.apply, confirm=axis.confirm, choices=lambda: list(choices))


def _modules() -> Iterator[ModuleType]:
    seen: set[int] = set()
    for script in host.attribute("modules.scripts", "scripts_data") or ():
        module = getattr(script, "module", None)
        ours = Path(str(getattr(script, "path", ""))).name == FILE
        if ours and isinstance(module, ModuleType) and id(module) not in seen:
            seen.add(id(module))
            yield module
