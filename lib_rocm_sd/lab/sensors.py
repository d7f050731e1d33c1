"""What a card tells of its power and clocks while something runs, and what a result says of the
machine: card and versions, no name of a user, a host or a folder.

AMD cards on Linux: what the driver writes into sysfs. Of a card's folder
/sys/bus/pci/devices/<address>: hwmon/hwmon*/power1_average in uW or, where the driver has no mean,
power1_input; freq1_input (core) and freq2_input (memory) in Hz, or the line of pp_dpm_sclk and
pp_dpm_mclk that is marked with a star, temp2_input (junction) or temp1_input (edge) in thousandths
of a degree (the kernel's Documentation/gpu/amdgpu). amd-smi asks the same driver. The development
card: NVIDIA's management library, by the package nvidia-ml-py, which torch.cuda.power_draw asks
too; power is a mean over a second on Ampere and newer (but not GA100), energy a counter.
"""

from __future__ import annotations

import math
import platform
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import __version__
from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.lab.rows import QUANTITIES, SECONDS, TRACE_POINTS

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reading:
    """None where the card does not tell."""

    power_w: float | None = None
    core_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    energy_j: float | None = None
    """By a counter that begins anywhere."""


@dataclass(frozen=True)
class Quantity:
    """Mean, least and most of several readings."""

    mean: float
    least: float
    most: float


@dataclass(frozen=True)
class Summary:
    """Summary of the readings taken while something ran. `reason` says why there are none.
    `origin`: where the numbers come from. `energy_j`: by the card's counter, else the integral of
    its power; None where there is neither. `slowed`: that the core clock fell on the way, and how.
    `trace`: each reading, with its seconds from the first.
    """

    readings: int = 0
    power_w: Quantity | None = None
    core_mhz: Quantity | None = None
    memory_mhz: Quantity | None = None
    temperature_c: Quantity | None = None
    energy_j: float | None = None
    slowed: str = ""
    origin: str = ""
    reason: str = ""
    trace: Sequence[tuple[float, Reading]] = field(default=(), repr=False)

    def __str__(self) -> str:
        if self.reason:
            return f"power and clocks: {self.reason}"
        figures = {
            "power": (self.power_w, "W"),
            "core clock": (self.core_mhz, "MHz"),
            "memory clock": (self.memory_mhz, "MHz"),
            "temperature": (self.temperature_c, "C"),
        }
        lines = [
            f"{name:<14} {value.mean:>8.0f} {unit:<3} ({value.least:.0f} to {value.most:.0f})"
            for name, (value, unit) in figures.items()
            if value is not None
        ]
        return "\n".join([*lines, f"{self.readings} readings of {self.origin}"])


PCI = Path("/sys/bus/pci/devices")
VENDOR = "0x1002"
POWER = ("power1_average", "power1_input")
HEAT = ("temp2_input", "temp1_input")
CLOCKS = {"core_mhz": ("freq1_input", "pp_dpm_sclk"), "memory_mhz": ("freq2_input", "pp_dpm_mclk")}
_CURRENT = re.compile(r"^\s*\w+:\s*(\d+)\s*mhz\s*\*\s*$", re.IGNORECASE | re.MULTILINE)


class Sysfs:
    """Reads one card; `folder` is its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._monitor = next(iter(sorted(folder.glob("hwmon/hwmon*"))), folder)
        power = next((name for name in POWER if _number(self._monitor / name) is not None), "")
        self._power = self._monitor / power if power else None
        self.origin = f"sysfs, {folder.name}" + (f", {power}" if power else "")

    def read(self) -> Reading:
        """OSError is not raised: what cannot be read is None."""
        power = None if self._power is None else _number(self._power)
        clocks = {name: self._clock(*files) for name, files in CLOCKS.items()}
        heat = next((degrees for name in HEAT if (degrees := _number(self._monitor / name))), None)
        heat_c = None if heat is None else heat / 1000
        return Reading(None if power is None else power / 1e6, **clocks, temperature_c=heat_c)

    def close(self) -> None:
        """Nothing is open."""

    def _clock(self, monitor: str, states: str) -> float | None:
        hertz = _number(self._monitor / monitor)
        if hertz is not None:
            return hertz / 1e6
        current = _CURRENT.search(_text(self._folder / states))
        return float(current.group(1)) if current else None

    def facts(self) -> dict[str, Any]:
        """Power, its limit and the highest clocks, as a result has them."""
        power, limit = self.read().power_w, _number(self._monitor / "power1_cap")
        return {
            "power_w": round(power, 1) if power else None,
            "power_limit_w": round(limit / 1e6, 1) if limit else None,
            "clock_mhz": self._highest("pp_dpm_sclk"),
            "memory_clock_mhz": self._highest("pp_dpm_mclk"),
        }

    def _highest(self, states: str) -> int | None:
        text = _text(self._folder / states)
        clocks = [int(mhz) for mhz in re.findall(r"(\d{1,5})\s*mhz", text, re.IGNORECASE)]
        return max(clocks, default=None)


def sysfs_source(address: str, root: Path = PCI) -> Sysfs | str:
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


class Nvml:
    """Reads one card through `library`, the package nvidia-ml-py, which is ready."""

    origin = "NVML"

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def read(self) -> Reading:
        """What a card does not support is None."""
        library = self._library
        power = self._asked(library.nvmlDeviceGetPowerUsage)
        clocks = (library.NVML_CLOCK_GRAPHICS, library.NVML_CLOCK_MEM)
        core, memory = (self._asked(library.nvmlDeviceGetClockInfo, clock) for clock in clocks)
        heat = self._asked(library.nvmlDeviceGetTemperature, library.NVML_TEMPERATURE_GPU)
        energy = self._asked(library.nvmlDeviceGetTotalEnergyConsumption)
        power, energy = (None if each is None else each / 1000 for each in (power, energy))
        return Reading(power, core, memory, heat, energy)

    def _asked(self, ask: Callable[..., int], *what: int) -> float | None:
        with suppress(self._library.NVMLError):
            return float(ask(self._handle, *what))
        return None

    def close(self) -> None:
        """As many shutdowns as there were starts; others in this process are counted too."""
        self._library.nvmlShutdown()


def nvml_source(address: str) -> Nvml | str:
    """The sensor source for the card with this PCI address, or for the only card if the address is
    empty; a str says why there is none.
    """
    try:
        import pynvml
    except ImportError:
        return "an NVIDIA card tells it by nvidia-ml-py, which is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML does not start: {error}"
    try:
        if address:
            return Nvml(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(address))
        count = pynvml.nvmlDeviceGetCount()
        if count == 1:
            return Nvml(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
        why = f"torch does not say which of {count} NVIDIA cards it is"
    except pynvml.NVMLError as error:
        why = f"NVML does not give the card: {error}"
    pynvml.nvmlShutdown()
    return why


Source = Sysfs | Nvml
EVERY_S = 0.05
FELL = 0.9
"""A core clock at the end of this share of its beginning has fallen."""


class Watch:
    """What was read so far."""

    def __init__(self, source: Source | str) -> None:
        self._source = source
        self._readings: list[Reading] = []
        self._times: list[float] = []
        self._stop = threading.Event()

    def summary(self) -> Summary:
        """Summary of all readings, or why there are none. A quantity that no reading has is left
        out.
        """
        if isinstance(self._source, str):
            return Summary(reason=self._source)
        origin = self._source.origin
        quantities: dict[str, Any] = {}
        for name in QUANTITIES:
            readings = (getattr(each, name) for each in self._readings)
            values = [value for value in readings if value is not None]
            mean = sum(values) / max(len(values), 1)
            quantities[name] = Quantity(mean, min(values), max(values)) if values else None
        if not any(quantities.values()):
            return Summary(origin=origin, reason=f"{origin} tells neither power nor clocks")
        quantities |= {"energy_j": self._energy_j(), "slowed": self._slowed(), "origin": origin}
        seconds = (at - self._times[0] for at in self._times)
        trace = list(zip(seconds, self._readings, strict=True))
        return Summary(len(self._readings), **quantities, trace=trace)

    def _energy_j(self) -> float | None:
        counter = [each.energy_j for each in self._readings if each.energy_j is not None]
        if len(counter) > 1 and counter[-1] > counter[0]:
            return counter[-1] - counter[0]
        known = [
            (at, each.power_w)
            for at, each in zip(self._times, self._readings, strict=True)
            if each.power_w is not None
        ]
        if len(known) < 2:
            return None
        pairs = zip(known, known[1:], strict=False)
        return sum((after - at) * (one + other) / 2 for (at, one), (after, other) in pairs)

    def _slowed(self) -> str:
        clocks = [each.core_mhz for each in self._readings if each.core_mhz]
        part = len(clocks) // 5
        if part < 2:
            return ""
        # The first readings are of a card that wakes up: its highest fifth counts as the beginning.
        begin = max(sum(clocks[at : at + part]) / part for at in range(0, 3 * part, part))
        end = sum(clocks[-part:]) / part
        if end >= FELL * begin:
            return ""
        heat = [each.temperature_c for each in self._readings if each.temperature_c]
        at = f" at up to {max(heat):.0f} C" if heat else ""
        return f"the core clock fell from {begin:.0f} to {end:.0f} MHz{at}"

    def wait(self, seconds: float) -> None:
        """Within `looking`, until so much time has passed."""
        self._stop.wait(seconds)

    @contextmanager
    def looking(self, every_s: float = EVERY_S) -> Iterator[None]:
        """Within this, a thread looks at once and then every so often, and once at the end."""
        source = self._source
        if isinstance(source, str):
            yield
            return
        thread = threading.Thread(target=self._look, args=(source, every_s), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            source.close()

    def _look(self, source: Source, every_s: float) -> None:
        while True:
            last = self._stop.is_set()
            self._times.append(time.monotonic())
            self._readings.append(source.read())
            if last:
                return
            self._stop.wait(every_s)


def measured_power(summaries: Sequence[Summary], pictures: int = 1) -> dict[str, Any]:
    """A row's fields, of summaries of so many pictures each: the median energy of a picture, mean
    power and clock, the highest temperature, why the clock fell, and all of it over time. What
    nobody tells is left out.
    """
    energy = [each.energy_j / pictures for each in summaries if each.energy_j is not None]
    power = [each.power_w.mean for each in summaries if each.power_w]
    clocks = [each.core_mhz.mean for each in summaries if each.core_mhz]
    heat = [each.temperature_c.most for each in summaries if each.temperature_c]
    fields = {
        "energy_j": statistics.median(energy) if energy else None,
        "power_w": statistics.mean(power) if power else None,
        "core_mhz": statistics.mean(clocks) if clocks else None,
        "temperature_c": max(heat, default=None),
        "slowed": next((each.slowed for each in summaries if each.slowed), None),
        "trace": _trace(summaries),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _trace(summaries: Sequence[Summary]) -> dict[str, list[float | None]] | None:
    """`SECONDS` and each of QUANTITIES that a card tells, as lists of at most TRACE_POINTS means.

    The seconds are those of the summaries, one after the other: what ran between them is left out.
    """
    readings, begin = list[tuple[float, Reading]](), 0.0
    for summary in summaries:
        readings += [(begin + at, reading) for at, reading in summary.trace]
        begin = readings[-1][0] if readings else 0.0
    size = max(math.ceil(len(readings) / TRACE_POINTS), 1)
    groups = [readings[place : place + size] for place in range(0, len(readings), size)]
    columns = {
        name: [_mean(getattr(reading, name) for _, reading in group) for group in groups]
        for name in QUANTITIES
    }
    told = {name: means for name, means in columns.items() if any(means)}
    return {SECONDS: [_mean(at for at, _ in group) for group in groups], **told} if told else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.mean(known), 2) if known else None


def of_device(device: torch.device, info: DeviceInfo) -> Source | str:
    """What reads `device`, or why there is nothing: AMD through sysfs, NVIDIA through NVML."""
    if device.type == "cuda" and info.backend == "hip":
        return sysfs_source(_address(device))
    if device.type == "cuda" and info.backend == "cuda" and info.name:
        return nvml_source(_address(device, 8).upper())
    return f"{info.name or info.backend} does not tell them"


def _address(device: torch.device, digits: int = 4) -> str:
    """PCI domain, of so many digits, bus and device; empty where torch does not say."""
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers = [getattr(properties, name, None) for name in names]
    if not all(isinstance(number, int) for number in numbers):
        return ""
    domain, bus, place = numbers
    return f"{domain:0{digits}x}:{bus:02x}:{place:02x}.0"


MOST_TEXT = 200
MODULE = Path("/sys/module/amdgpu/version")
ROCM = Path("/opt/rocm/.info/version")
VERSION = re.compile(r"\d+(\.\d+)*")


def machine(device: torch.device) -> dict[str, Any]:
    """Flat and JSON-able: card, gfx, backend, driver, rocm, torch, os, python, power and clocks.

    What is not known is None.
    """
    import torch

    info = identify(device)
    facts: dict[str, Any] = {
        "card": info.name,
        "gfx": info.gfx,
        "backend": info.backend,
        "gfx_note": "; ".join(info.notes)[:MOST_TEXT] or None,
        "supported": not info.reasons,
        "vram_mib": None,
        "driver": _first_version(MODULE) if info.backend == "hip" else None,
        "rocm": torch.version.hip or _first_version(ROCM),
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
        facts["vram_mib"] = int(properties.total_memory) >> 20
        if info.backend in ("hip", "zluda"):
            card = sysfs_source(_address(device))
            facts |= card.facts() if isinstance(card, Sysfs) else {}
    return facts


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
    numbers = VERSION.match(text)
    return numbers.group() if numbers else None


def _first_version(path: Path) -> str | None:
    return _version(_text(path).strip())
