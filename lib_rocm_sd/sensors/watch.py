"""Looks at a card again and again while something runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.sensors import amd, nvml
from lib_rocm_sd.sensors.reading import Reading, Source, Summary, summed

if TYPE_CHECKING:
    import torch

EVERY_S = 0.05


class Watch:
    """What was read so far."""

    def __init__(self, source: Source | str) -> None:
        self._source = source
        self._readings: list[Reading] = []
        self._stop = threading.Event()

    def summary(self) -> Summary:
        """Summary of all readings, or why there are none."""
        if isinstance(self._source, str):
            return Summary(reason=self._source)
        return summed(self._readings, self._source.origin)

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
            self._readings.append(source.read())
            if last:
                return
            self._stop.wait(every_s)


def of_device(device: torch.device, info: DeviceInfo) -> Source | str:
    """What reads `device`, or why there is nothing: AMD through sysfs, NVIDIA through NVML."""
    if info.backend == "hip":
        return amd.source(_address(device, lower=True))
    if info.backend == "cuda" and info.name:
        return nvml.source(_address(device, lower=False))
    return f"{info.name or info.backend} does not tell them"


def _address(device: torch.device, lower: bool) -> str:
    """PCI domain, bus and device as sysfs or NVML write them; empty where torch does not say."""
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    found = [getattr(properties, name, None) for name in names]
    if any(not isinstance(each, int) for each in found):
        return ""
    domain, bus, place = found
    if lower:
        return f"{domain:04x}:{bus:02x}:{place:02x}.0"
    return f"{domain:08X}:{bus:02X}:{place:02X}.0"
