"""AMD cards on Linux: what the driver writes into sysfs.

Of a card's folder /sys/bus/pci/devices/<address>: hwmon/hwmon*/power1_average in µW or, where the
driver has no mean, power1_input; freq1_input (core) and freq2_input (memory) in Hz, or the line of
pp_dpm_sclk and pp_dpm_mclk that is marked with a star (the kernel's Documentation/gpu/amdgpu).
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from lib_rocm_sd.sensors.reading import Reading

PCI = Path("/sys/bus/pci/devices")
VENDOR = "0x1002"
POWER = ("power1_average", "power1_input")
CLOCKS = {"core_mhz": ("freq1_input", "pp_dpm_sclk"), "memory_mhz": ("freq2_input", "pp_dpm_mclk")}
_CURRENT = re.compile(r"^\s*\w+:\s*(\d+)\s*mhz\s*\*\s*$", re.IGNORECASE | re.MULTILINE)


class Sysfs:
    """Reads one card; `folder` is its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        monitors = sorted((folder / "hwmon").glob("hwmon*"))
        self._monitor = monitors[0] if monitors else folder / "hwmon"
        power = next((name for name in POWER if _number(self._monitor / name) is not None), "")
        self._power = self._monitor / power if power else None
        self.origin = f"sysfs, {folder.name}" + (f", {power}" if power else "")

    def read(self) -> Reading:
        """OSError is not raised: what cannot be read is None."""
        power = None if self._power is None else _number(self._power)
        clocks = {name: self._clock(*files) for name, files in CLOCKS.items()}
        return Reading(None if power is None else power / 1e6, **clocks)

    def close(self) -> None:
        """Nothing is open."""

    def _clock(self, monitor: str, states: str) -> float | None:
        hertz = _number(self._monitor / monitor)
        if hertz is not None:
            return hertz / 1e6
        found = _CURRENT.search(_text(self._folder / states))
        return float(found.group(1)) if found else None


def source(address: str, root: Path = PCI) -> Sysfs | str:
    """The sensor source for the card with this PCI address, or for the only card if the address is
    empty; a str says why there is none.
    """
    if not root.is_dir():
        return "there is no sysfs: an AMD card tells it on Linux only"
    if address:
        folder = root / address
        return Sysfs(folder) if folder.is_dir() else f"sysfs has no {address}"
    cards = [each for each in sorted(root.iterdir()) if _is_card(each)]
    if len(cards) != 1:
        return f"torch does not say which of {len(cards)} AMD cards it is"
    return Sysfs(cards[0])


def _is_card(folder: Path) -> bool:
    names = (_text(name).strip() for name in (folder / "hwmon").glob("hwmon*/name"))
    return _text(folder / "vendor").strip() == VENDOR and "amdgpu" in names


def _number(file: Path) -> float | None:
    with suppress(ValueError):
        return float(_text(file))
    return None


def _text(file: Path) -> str:
    """Empty where it cannot be read: a sleeping card answers with an error."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
