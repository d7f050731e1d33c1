"""Power and clocks: a tree like the driver's sysfs, a library like NVML, and what is made of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.lab import sensors
from lib_rocm_sd.lab.sensors import Quantity, Reading, Summary, Watch, of_device

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
    )
    source = found(sensors.sysfs_source(CARD, tmp_path))
    assert source.read() == Reading(215.0, 2400.0, 1249.0)
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
    """NVML as nvml.h declares it; `fails` names functions that return an error."""

    def __init__(self, count: int = 1, fails: tuple[str, ...] = ()) -> None:
        self.open = 0
        self.asked: list[bytes] = []
        self.functions = SimpleNamespace()
        for name in sensors.SIGNATURES:
            setattr(self.functions, name, self._function(name, name in fails, count))

    def _function(self, name: str, fails: bool, count: int) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            wanted = sensors.SIGNATURES[name]
            assert call.argtypes == wanted and call.restype is ctypes.c_int  # type: ignore[attr-defined]
            assert len(arguments) == len(wanted)
            for given, kind in zip(arguments, wanted, strict=True):
                kind.from_param(given)
            return 999 if fails else self._answer(name, arguments, count)

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...], count: int) -> int:
        if name == "nvmlInit_v2":
            self.open += 1
        elif name == "nvmlShutdown":
            self.open -= 1
        else:
            out = arguments[-1]._obj
            if name == "nvmlDeviceGetHandleByPciBusId_v2":
                self.asked.append(arguments[0])
            clock = arguments[1] if name == "nvmlDeviceGetClockInfo" else None
            values = {"nvmlDeviceGetCount_v2": count, "nvmlDeviceGetPowerUsage": 345600}
            out.value = {0: 1980, 2: 3201}[clock] if clock is not None else values.get(name, 77)
        return 0


def test_the_development_card_is_read() -> None:
    library = Library()
    source = found(sensors.nvml_source("00000000:3B:00.0", lambda: library.functions))
    assert source.read() == Reading(345.6, 1980.0, 3201.0)
    assert library.asked == [b"00000000:3B:00.0"] and library.open == 1
    source.close()
    assert library.open == 0
    assert found(sensors.nvml_source("", lambda: library.functions)).read().power_w == 345.6


def test_nvml_says_why_not() -> None:
    def absent() -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert str(sensors.nvml_source("", absent)).startswith("NVML cannot be used: libnvidia-ml")
    assert str(sensors.nvml_source("", SimpleNamespace)).startswith("NVML cannot be used: ")
    for fails, address, told in (
        ("nvmlInit_v2", "", "NVML does not start: error 999"),
        ("nvmlDeviceGetHandleByPciBusId_v2", "1", "NVML does not know 1: error 999"),
        ("nvmlDeviceGetCount_v2", "", "torch does not say which of 0 NVIDIA cards it is"),
        ("nvmlDeviceGetHandleByIndex_v2", "", "NVML does not give its card: error 999"),
    ):
        library = Library(fails=(fails,))
        given: Any = library.functions
        assert sensors.nvml_source(address, [given].pop) == told
        assert library.open == 0
    two = Library(count=2)
    assert "which of 2 NVIDIA cards" in str(sensors.nvml_source("", lambda: two.functions))


def test_what_a_card_does_not_support_is_left_out() -> None:
    library = Library(fails=("nvmlDeviceGetPowerUsage",))
    source = found(sensors.nvml_source("", lambda: library.functions))
    assert source.read() == Reading(None, 1980.0, 3201.0)


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
    assert found.summary() == Summary(2, Quantity(1.5, 1.0, 2.0), None, None, "a test")
    lines = str(found.summary()).splitlines()
    assert lines[0].split() == ["power", "2", "W", "(1", "to", "2)"]
    assert lines[1] == "2 readings of a test"


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
