"""What a result says of the machine: card and versions, no name of a user, a host or a folder."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import __version__
from lib_rocm_sd.device import identify

if TYPE_CHECKING:
    import torch

MOST_TEXT = 200
LIMIT_S = 2.0
"""How long tools that tell power and clocks are waited for, all together."""
TOOLS = (
    ("amd-smi", "metric", "--power", "--clock", "--json"),
    ("rocm-smi", "--showpower", "--showmaxpower", "--showclocks", "--showdriverversion", "--json"),
)
CARDS = Path("/sys/class/drm")
MODULE = Path("/sys/module/amdgpu/version")
ROCM = Path("/opt/rocm/.info/version")
VERSION = re.compile(r"\d+(\.\d+)*")


def machine(device: torch.device) -> dict[str, Any]:
    """Flat and JSON-able: card, gfx, backend, driver, rocm, torch, os, python, power and clocks.

    What is not known is None.
    """
    import torch

    info = identify(device)
    found: dict[str, Any] = {
        "card": info.name,
        "gfx": info.gfx,
        "backend": info.backend,
        "gfx_note": "; ".join(info.notes)[:MOST_TEXT] or None,
        "supported": not info.reasons,
        "vram_mib": None,
        "driver": _first_line(MODULE) if info.backend == "hip" else None,
        "rocm": torch.version.hip or _first_line(ROCM),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "os": _system(),
        "kernel": _version(platform.release()),
        "python": platform.python_version(),
        "rocm_sd": __version__,
        "power_w": None,
        "power_limit_w": None,
        "clock_mhz": None,
        "memory_clock_mhz": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["vram_mib"] = int(properties.total_memory) >> 20
        if info.backend in ("hip", "zluda"):
            found |= power_and_clocks(info.index, pci=_pci(properties))
    return found


def _system() -> str:
    """The system and its version, such as "Linux, Ubuntu 24.04", "Windows 11"."""
    name = platform.system()
    if name != "Linux":
        return f"{name} {platform.release()}".strip()
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return name
    about = f"{release.get('ID', '')} {release.get('VERSION_ID', '')}".strip()
    return f"{name}, {about}"[:60] if about else name


def _version(text: str) -> str | None:
    """The leading numbers: what follows may be anything, also a name."""
    found = VERSION.match(text)
    return found.group() if found else None


def _first_line(path: Path) -> str | None:
    try:
        return _version(path.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return None


def _pci(properties: Any) -> str:
    """The card's address on the PCI bus as Linux writes it; empty where torch cannot tell."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers = [getattr(properties, name, None) for name in names]
    known = [number for number in numbers if isinstance(number, int)]
    return "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == 3 else ""


def power_and_clocks(index: int, cards: Path = CARDS, pci: str = "") -> dict[str, Any]:
    """What the driver's files tell, the rest from amd-smi or rocm-smi, in LIMIT_S.

    Which card it is tells `pci`, else the number `index`.
    """
    found = _of_driver(index, cards, pci)
    end = time.monotonic() + LIMIT_S
    for tool in TOOLS:
        if all(found.get(key) is not None for key in ("power_w", "clock_mhz")):
            break
        for key, value in _of_tool(tool, index, end - time.monotonic()).items():
            if found.get(key) is None:
                found[key] = value
    return found


def _of_driver(index: int, cards: Path, pci: str) -> dict[str, Any]:
    """From the files of Linux's amdgpu."""
    devices = []
    for card in sorted(cards.glob("card[0-9]*")):
        if re.fullmatch(r"card\d+", card.name) and _text(card / "device" / "vendor") == "0x1002":
            devices.append(card / "device")
    devices.sort(key=lambda path: int(path.parent.name.removeprefix("card")))
    named = [device for device in devices if device.resolve().name == pci]
    device = named[0] if named else devices[index] if index < len(devices) else None
    if device is None:
        return {}
    sensors = next(iter(sorted(device.glob("hwmon/hwmon*"))), device)
    power = _number(sensors / "power1_average") or _number(sensors / "power1_input")
    limit = _number(sensors / "power1_cap")
    return {
        "power_w": round(power / 1e6, 1) if power else None,
        "power_limit_w": round(limit / 1e6, 1) if limit else None,
        "clock_mhz": _highest(device / "pp_dpm_sclk"),
        "memory_clock_mhz": _highest(device / "pp_dpm_mclk"),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"\d{1,12}", text) else None


def _highest(path: Path) -> int | None:
    """The highest of a table of clocks in MHz."""
    clocks = [int(mhz) for mhz in re.findall(r"(\d{1,5})\s*mhz", _text(path), re.IGNORECASE)]
    return max(clocks, default=None)


def _of_tool(command: Sequence[str], index: int, limit_s: float) -> dict[str, Any]:
    program = shutil.which(command[0])
    if program is None or limit_s <= 0:
        return {}
    try:
        ran = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
        content = json.loads(ran.stdout.decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError, subprocess.TimeoutExpired):
        return {}
    return _of_json(content, index)


WORDS = (
    ("power_limit_w", re.compile(r"(max|limit|cap).*power|power.*(max|limit|cap)")),
    ("power_w", re.compile(r"(average|current|socket).*power")),
    ("memory_clock_mhz", re.compile(r"(mclk|mem_0).*(clk|clock|mhz|speed)")),
    ("clock_mhz", re.compile(r"(sclk|gfx_0).*(clk|clock|mhz|speed)")),
)
"""Which of our facts a path of keys in a tool's JSON is."""


def _of_json(content: object, index: int) -> dict[str, Any]:
    """Numbers under telling names, whatever the layout of a tool's version is."""
    cards = content.get("gpu_data", content) if isinstance(content, dict) else content
    if isinstance(cards, dict):
        card = cards.get(f"card{index}")
    else:
        card = cards[index] if isinstance(cards, list) and index < len(cards) else None
    found: dict[str, Any] = {}
    for path, text in _leaves(card, ""):
        number = re.search(r"\d+(\.\d+)?", text)
        key = next((key for key, words in WORDS if words.search(path)), None)
        if key and number and key not in found:
            found[key] = float(number.group())
    return found


def _leaves(content: object, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(content, dict) and depth < 6:
        unit = content.get("unit")
        for key, item in content.items():
            if not (key == "unit" and isinstance(unit, str)):
                yield from _leaves(item, f"{path} {key}".lower(), depth + 1)
    elif isinstance(content, (str, int, float)) and not isinstance(content, bool):
        yield path, str(content)
