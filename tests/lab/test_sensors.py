"""Power and clocks: a tree like the driver's sysfs, a library like NVML, and what is made of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.lab import sensors
from lib_rocm_sd.lab.sensors import (
    Quantity,
    Reading,
    Summary,
    Watch,
    measured_power,
    of_device,
)

CARD = "0000:03:00.0"
CUDA = torch.device("cuda:0")


def card(root: Path, address: str = CARD, **files: str) -> Path:
    """A card's folder; file names with a slash lie in its monitor's."""
    folder = root / address
    monitor = folder / "hwmon" / "hwmon4"
    monitor.mkdir(parents=True)
    (folder / "vendor").write_text("0x1002\n", encoding="utf-8")
    (monitor / "name").write_text("amdgpu\n", encoding="utf-8")
    for name, text in files.items():
        (folder / name if name.startswith("pp_") else monitor / name).write_text(
            text, encoding="utf-8"
        )
    return folder


def found(source: Any) -> Any:
    assert not isinstance(source, str), source
    return source


def test_a_card_of_amds_is_read(tmp_path: Path) -> None:
    card(
        tmp_path,
        power1_average="215000000\n",
        power1_input="1\n",
        freq1_input="2400000000\n",
        freq2_input="1249000000\n",
        temp1_input="54000\n",
        temp2_input="68000\n",
    )
    source = found(sensors.sysfs_source(CARD, tmp_path))
    assert source.read() == Reading(215.0, 2400.0, 1249.0, 68.0)
    assert source.origin == f"sysfs, {CARD}, power1_average"


def test_other_drivers_have_other_files(tmp_path: Path) -> None:
    """A momentary power only; clocks as states, of which a star marks the current one."""
    card(
        tmp_path,
        power1_input="30500000\n",
        pp_dpm_sclk="0: 500Mhz\n1: 800Mhz *\n2: 2304Mhz\n",
        pp_dpm_mclk="0: 96Mhz *\n1: 1000Mhz\n",
    )
    source = found(sensors.sysfs_source(CARD, tmp_path))
    assert source.read() == Reading(30.5, 800.0, 96.0)
    assert source.origin.endswith("power1_input")
    bare = found(sensors.sysfs_source("0000:04:00.0", card(tmp_path, "0000:04:00.0").parent))
    assert bare.read() == Reading() and bare.origin == "sysfs, 0000:04:00.0"


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    folder = card(tmp_path, power1_average="a\n", pp_dpm_sclk="S: 19Mhz *\n", freq2_input="\n")
    source = found(sensors.sysfs_source(CARD, tmp_path))
    assert source.read() == Reading(None, 19.0, None)
    (folder / "pp_dpm_sclk").unlink()
    assert source.read() == Reading()


def test_which_card_it_is(tmp_path: Path) -> None:
    assert "on Linux only" in str(sensors.sysfs_source(CARD, tmp_path / "no sysfs"))
    assert sensors.sysfs_source("", tmp_path) == "torch does not say which of 0 AMD cards it is"
    folder = card(tmp_path, power1_average="1000000\n")
    for address, vendor in (("0000:00:00.0", "0x8086"), ("0000:01:00.0", "0x10de")):
        other = card(tmp_path, address, power1_average="9000000\n")
        (other / "vendor").write_text(vendor, encoding="utf-8")
    assert found(sensors.sysfs_source("", tmp_path)).read().power_w == 1.0
    assert sensors.sysfs_source("0000:77:00.0", tmp_path) == "sysfs has no 0000:77:00.0"
    card(tmp_path, "0000:0c:00.0")
    assert sensors.sysfs_source("", tmp_path) == "torch does not say which of 2 AMD cards it is"
    assert found(sensors.sysfs_source(folder.name, tmp_path)).read().power_w == 1.0


def test_a_result_has_the_facts_of_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(
        tmp_path,
        power1_input="17000000\n",
        power1_cap="355000000\n",
        pp_dpm_sclk="0: 500Mhz *\n1: 2525Mhz\n",
        pp_dpm_mclk="garbage",
    )
    card(tmp_path, "0000:0c:00.0", power1_input="9000000\n")
    source = sensors.sysfs_source
    monkeypatch.setattr(sensors, "sysfs_source", lambda address: source(address, tmp_path))
    info = DeviceInfo(0, "A card", "hip", "gfx1100", None)
    monkeypatch.setattr(sensors, "identify", lambda device: info)
    properties = SimpleNamespace(
        total_memory=1 << 30, pci_domain_id=0, pci_bus_id=3, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    names = ("vram_mib", "power_w", "power_limit_w", "clock_mhz", "memory_clock_mhz")
    facts = sensors.machine(CUDA)
    assert [facts[name] for name in names] == [1024, 17.0, 355.0, 2525, None]
    del properties.pci_bus_id  # then nobody knows which of two cards it is
    assert [sensors.machine(CUDA)[name] for name in names] == [1024, None, None, None, None]


class Library:
    """The package nvidia-ml-py; `fails` names functions that raise its error."""

    NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 1, fails: str = "") -> None:
        self.open, self.count, self.fails = 0, count, fails

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if name == self.fails:
                raise self.NVMLError("Unknown Error")
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            if name.startswith("nvmlDeviceGetHandle"):
                return given
            clocks = {0: 1980, 2: 3201}
            of_card = {"nvmlDeviceGetPowerUsage": 345600, "nvmlDeviceGetCount": self.count}
            of_card |= {"nvmlDeviceGetTemperature": 61, "nvmlDeviceGetTotalEnergyConsumption": 5000}
            return clocks[given[1]] if name == "nvmlDeviceGetClockInfo" else of_card.get(name)

        return call


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Library]:
    def of(count: int = 1, fails: str = "") -> Library:
        library = Library(count, fails)
        monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
        return library

    return of


def test_the_development_card_is_read(nvml: Callable[..., Library]) -> None:
    library = nvml()
    source = found(sensors.nvml_source("00000000:3B:00.0"))
    assert source.read() == Reading(345.6, 1980.0, 3201.0, 61.0, 5.0)
    assert source._handle == ("00000000:3B:00.0",) and library.open == 1
    source.close()
    assert library.open == 0
    assert found(sensors.nvml_source(""))._handle == (0,)


def test_nvml_says_why_not(nvml: Callable[..., Library], monkeypatch: pytest.MonkeyPatch) -> None:
    for count, fails, address, told in (
        (1, "nvmlInit", "", "NVML does not start: Unknown Error"),
        (1, "nvmlDeviceGetHandleByPciBusId", "1", "NVML does not give the card: Unknown Error"),
        (1, "nvmlDeviceGetHandleByIndex", "", "NVML does not give the card: Unknown Error"),
        (2, "", "", "torch does not say which of 2 NVIDIA cards it is"),
    ):
        library = nvml(count, fails)
        assert sensors.nvml_source(address) == told
        assert library.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert str(sensors.nvml_source("")).endswith("nvidia-ml-py, which is not installed")


def test_what_a_card_does_not_support_is_left_out(nvml: Callable[..., Library]) -> None:
    nvml(fails="nvmlDeviceGetPowerUsage")
    source = found(sensors.nvml_source("00000000:3B:00.0"))
    assert source.read() == Reading(None, 1980.0, 3201.0, 61.0, 5.0)
    nvml(fails="nvmlDeviceGetTotalEnergyConsumption")
    assert found(sensors.nvml_source("")).read() == Reading(345.6, 1980.0, 3201.0, 61.0)


class Counting:
    """Reads 1, 2, 3, .. W."""

    origin = "a test"

    def __init__(self) -> None:
        self.count, self.closed = 0, 0

    def read(self) -> Reading:
        self.count += 1
        return Reading(float(self.count))

    def close(self) -> None:
        self.closed += 1


def test_it_is_looked_at_until_the_end() -> None:
    source: Any = Counting()
    found = Watch(source)
    with pytest.raises(RuntimeError), found.looking(60.0):
        raise RuntimeError("planted")
    assert source.closed == 1 and source.count == 2  # at once, and at the end
    told = found.summary()
    more: Any = {"energy_j": told.energy_j, "trace": told.trace, "origin": "a test"}
    assert told == Summary(2, Quantity(1.5, 1.0, 2.0), **more)
    lines = str(found.summary()).splitlines()
    assert lines[0].split() == ["power", "2", "W", "(1", "to", "2)"]
    assert lines[1] == "2 readings of a test"


class Played:
    """Reads what it is given, one reading after the other."""

    origin = "a test"

    def __init__(self, readings: list[Reading]) -> None:
        self.readings = iter(readings)

    def read(self) -> Reading:
        return next(self.readings)

    def close(self) -> None:
        pass


def played(monkeypatch: pytest.MonkeyPatch, readings: list[Reading]) -> Summary:
    """The summary of readings, half a second apart."""
    source: Any = Played(readings)
    watch = Watch(source)
    clock = iter(0.5 * place for place in range(len(readings)))
    monkeypatch.setattr(sensors.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(watch._stop, "wait", lambda seconds: None)
    left = len(readings)

    def is_last() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    monkeypatch.setattr(watch._stop, "is_set", is_last)
    watch._look(source, 0.5)
    return watch.summary()


def test_energy_is_the_counters_else_the_powers_integral(monkeypatch: pytest.MonkeyPatch) -> None:
    powers = [Reading(watts) for watts in (100.0, 200.0, None, 200.0)]
    assert played(monkeypatch, powers).energy_j == 75.0 + 200.0
    counted = [Reading(100.0, energy_j=joules) for joules in (1000.0, 1040.0, 1090.0)]
    assert played(monkeypatch, counted).energy_j == 90.0
    assert played(monkeypatch, [Reading(core_mhz=1.0)] * 3).energy_j is None


def test_a_clock_that_falls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = [500.0, 500.0, *[2500.0] * 10, *[2000.0] * 8]
    slowed = [Reading(core_mhz=clock, temperature_c=95.0) for clock in clocks]
    told = played(monkeypatch, slowed).slowed
    assert told == "the core clock fell from 2500 to 2000 MHz at up to 95 C"
    steady = [Reading(core_mhz=clock) for clock in (500.0, *[2500.0] * 9, *[2400.0] * 10)]
    assert not played(monkeypatch, steady).slowed


def test_what_was_read_over_time_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second apart; a second turn goes on where the first one ended."""
    readings = [Reading(core_mhz=1000.0 + place, temperature_c=None) for place in range(77)]
    turns = [played(monkeypatch, readings), played(monkeypatch, readings[:3])]
    made = measured_power(turns)["trace"]
    assert set(made) == {"seconds", "core_mhz"} and len(made["seconds"]) == 40  # pairs
    assert made["seconds"][:2] == [0.25, 1.25] and made["seconds"][-1] == 38.75
    assert made["core_mhz"][:2] == [1000.5, 1002.5] and made["core_mhz"][-1] == 1001.5
    hot = [Reading(core_mhz=1.0), Reading(temperature_c=50.0)]
    assert measured_power([played(monkeypatch, hot)])["trace"] == {
        "seconds": [0.0, 0.5], "core_mhz": [1.0, None], "temperature_c": [None, 50.0],
    }  # fmt: skip
    assert measured_power([Summary(reason="the card is elsewhere")]) == {}


def test_without_numbers_there_is_a_reason() -> None:
    found = Watch("the card is elsewhere")
    with found.looking():
        pass
    assert str(found.summary()) == "power and clocks: the card is elsewhere"
    silent: Any = SimpleNamespace(origin="it", read=Reading, close=lambda: None)
    found = Watch(silent)
    with found.looking():
        pass
    assert found.summary().reason == "it tells neither power nor clocks"


def test_who_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(sensors, "sysfs_source", lambda address: f"sysfs {address}")
    monkeypatch.setattr(sensors, "nvml_source", lambda address: f"nvml {address}")
    hip = DeviceInfo(0, "A card", "hip", "gfx1100", None)
    cuda = DeviceInfo(0, "A card", "cuda", None, None)
    assert of_device(CUDA, hip) == "sysfs 0000:3b:00.0"
    assert of_device(CUDA, cuda) == "nvml 00000000:3B:00.0"
    del properties.pci_bus_id
    assert of_device(CUDA, hip) == "sysfs " and of_device(CUDA, cuda) == "nvml "
    for info in (identify(torch.device("cpu")), DeviceInfo(0, "Z", "zluda", None, None)):
        assert str(of_device(CUDA, info)).endswith("does not tell them")
    assert str(of_device(torch.device("cpu"), hip)).endswith("does not tell them")
    assert sensors.EVERY_S > 0


@pytest.mark.gpu
def test_the_card_here_tells_something() -> None:
    source = of_device(CUDA, identify(CUDA))
    if isinstance(source, str):
        pytest.skip(source)
    found = Watch(source)
    with found.looking():
        torch.ones(1 << 20, device=CUDA).sum().item()
    assert found.summary().readings >= 2 and not found.summary().reason
