"""Which GPU a device is, told from what torch, the environment and Linux's driver say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lib_rocm_sd import device
from lib_rocm_sd.arch import KERNELS_DIR, amd_table
from lib_rocm_sd.device import Facts, decide


def hip(name: str = "AMD Radeon Graphics", arch_name: str = "") -> Facts:
    return Facts("cuda", 0, name, "6.2.41133", arch_name, (11, 0))


@pytest.mark.parametrize("gfx", list(amd_table()))
def test_every_amd_row_is_supported_under_its_own_id(gfx: str) -> None:
    info = decide(hip(arch_name=gfx), {})
    assert (info.backend, info.gfx, info.arch, info.reasons) == ("hip", gfx, amd_table()[gfx], ())


def test_features_behind_a_colon_are_not_part_of_the_id() -> None:
    info = decide(hip(arch_name="gfx90a:sramecc+:xnack-"), {})
    assert info.gfx == "gfx90a"
    assert info.reasons == ()


@pytest.mark.parametrize("gfx", ["gfx1104", "gfx1202", "gfx12-generic", "gfx906", "gfx11"])
def test_an_id_that_is_not_in_the_table_is_refused_by_name(gfx: str) -> None:
    info = decide(hip(arch_name=gfx), {})
    assert info.arch is None
    assert gfx in info.reasons[0]
    assert "gfx1100" in info.reasons[0]


@pytest.mark.parametrize(
    ("reported", "name", "gfx"),
    [
        ("AMD Radeon RX 7900 XTX", "AMD Radeon RX 7900 XTX", "gfx1100"),
        ("", "AMD Radeon RX 6700 XT", "gfx1031"),
        ("AMD Radeon RX 9070 XT", "", "gfx1201"),
    ],
)
def test_a_marketing_name_stands_in_for_a_missing_id(reported: str, name: str, gfx: str) -> None:
    info = decide(hip(name or "?", reported), {})
    assert info.gfx == gfx
    assert info.reasons == ()
    assert "told from the name" in info.notes[0]


def test_a_name_that_nobody_knows_is_refused_with_the_name() -> None:
    info = decide(hip("AMD Radeon RX 580", "AMD Radeon RX 580"), {})
    assert info.gfx is None
    assert "AMD Radeon RX 580" in info.reasons[0]


def test_the_override_is_noted_and_the_reported_id_is_compiled_for() -> None:
    environ = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}
    info = decide(hip("AMD Radeon RX 6700 XT", "gfx1030"), environ)
    assert info.gfx == "gfx1030"
    assert info.reasons == ()
    assert "HSA_OVERRIDE_GFX_VERSION=10.3.0" in info.notes[0]


def test_the_override_decides_where_no_id_is_reported() -> None:
    info = decide(hip("AMD Radeon RX 6700 XT"), {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"})
    assert info.gfx == "gfx1030"


XTX, XT_5700 = "AMD Radeon RX 7900 XTX", "AMD Radeon RX 5700 XT"
NAMELESS = "AMD Radeon Graphics"


@pytest.mark.parametrize(
    ("name", "reported", "driver", "override", "told"),
    [
        (XTX, "gfx1030", (), "10.3.0", f"{XTX} (RDNA3)"),
        (XTX, "gfx1030", ("gfx1100", "gfx1036"), "10.3.0", f"{XTX} (RDNA3)"),
        (XTX, "", (), "10.3.0", f"{XTX} (RDNA3)"),
        (XTX, "gfx1151", (), "11.5.1", f"{XTX} (RDNA3)"),  # RDNA3 lacks some of its instructions
        (XT_5700, "gfx1201", ("gfx1010",), "12.0.1", "gfx1010"),
        (XT_5700, "gfx1030", ("gfx1010", "gfx1036"), "10.3.0", "gfx1010"),
        (NAMELESS, "gfx1030", ("gfx1100", "gfx1100"), "10.3.0", "gfx1100 (RDNA3)"),
        (NAMELESS, "gfx1030", ("gfx1103", "gfx1151"), "10.3.0", "gfx1103 (RDNA3), gfx1151"),
    ],
)
def test_an_override_that_names_another_family_is_refused(
    name: str, reported: str, driver: tuple[str, ...], override: str, told: str
) -> None:
    facts = replace(hip(name, reported), driver=driver)
    info = decide(facts, {device.OVERRIDE: override})
    assert info.arch is None
    (reason,) = info.reasons
    assert reason.startswith(f"{device.OVERRIDE}={override} has code compiled for gfx1")
    assert f"of another family: {told}" in reason and "Unset" in reason


@pytest.mark.parametrize(
    ("name", "reported", "driver", "environ"),
    [
        ("AMD Radeon RX 6700 XT", "gfx1030", ("gfx1031",), {"": "10.3.0"}),
        ("AMD Radeon 780M", "gfx1100", ("gfx1103",), {"": "11.0.0"}),
        ("AMD Radeon 890M", "gfx1100", ("gfx1150",), {"": "11.0.0"}),
        (NAMELESS, "gfx1100", ("gfx1101", "gfx1036"), {"": "11.0.0"}),
        (NAMELESS, "gfx1030", ("gfx1036",), {"": "10.3.0"}),
        (NAMELESS, "gfx1030", ("gfx1100", "gfx1031"), {"": "10.3.0"}),  # not told which card it is
        (NAMELESS, "gfx1030", (), {"": "10.3.0"}),
        (XTX, "gfx1100", ("gfx1100", "gfx1031"), {"_1": "10.3.0"}),  # of the other card
        (XTX, "gfx1100", ("gfx1100",), {"": "11"}),
        (XT_5700, "gfx1030", ("gfx1010",), {}),  # nothing claims it but torch
    ],
)
def test_other_overrides_are_noted_only(
    name: str, reported: str, driver: tuple[str, ...], environ: dict[str, str]
) -> None:
    facts = replace(hip(name, reported), driver=driver)
    info = decide(facts, {device.OVERRIDE + suffix: value for suffix, value in environ.items()})
    assert (info.gfx, info.reasons, len(info.notes)) == (reported, (), len(environ))


@pytest.mark.parametrize(
    ("version", "gfx"),
    [("10.3.0", "gfx1030"), ("9.0.10", "gfx90a"), ("11.5.1", "gfx1151"), ("11", ""), ("a.b.c", "")],
)
def test_gfx_of_version(version: str, gfx: str) -> None:
    assert device.gfx_of_version(version) == gfx


def test_zluda_is_judged_unless_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts("cuda", 0, "AMD Radeon RX 7900 XTX [ZLUDA]", None, "", (8, 8))
    info = decide(facts, {})
    assert (info.backend, info.gfx, info.reasons) == ("zluda", "gfx1100", ())
    assert "ROCM_SD_ALLOW_ZLUDA=0 is set" in decide(facts, {"ROCM_SD_ALLOW_ZLUDA": "0"}).reasons[0]
    monkeypatch.setattr(device, "_facts", lambda kind, index: facts)
    judged: list[str | None] = []
    judge = device._nobody_tests

    def noted(info: device.DeviceInfo) -> Sequence[str]:
        judged.append(info.gfx)
        return judge(info)

    monkeypatch.setattr(device, "judge_zluda", noted)
    monkeypatch.delenv("ROCM_SD_ALLOW_ZLUDA", raising=False)
    found = []
    for value in (None, "0", "1"):
        if value:
            monkeypatch.setenv("ROCM_SD_ALLOW_ZLUDA", value)
        device.forget()
        found.append(device.identify(torch.device("cuda", 0)).reasons)
    device.forget()
    assert "does not test" in found[0][0] and "=0 is set" in found[1][0] and found[2] == ()
    assert judged == ["gfx1100"]


def test_zluda_on_a_card_that_the_table_lacks_stays_off() -> None:
    facts = Facts("cuda", 0, "AMD Radeon RX 580 [ZLUDA]", None, "", (8, 8))
    info = decide(facts, {"ROCM_SD_ALLOW_ZLUDA": "1"})
    assert info.arch is None
    assert "RX 580" in info.reasons[0]


def test_nvidia_is_refused_unless_allowed_for_development() -> None:
    facts = Facts("cuda", 1, "NVIDIA H200", None, "", (9, 0))
    assert decide(facts, {}).reasons == ("an NVIDIA card; this extension's kernels are for AMD",)
    allowed = decide(facts, {"ROCM_SD_ALLOW_CUDA": "1"})
    assert (allowed.index, allowed.gfx, allowed.reasons) == (1, "sm_90", ())
    assert allowed.arch is not None
    assert not allowed.arch.is_amd


def test_nvidia_below_capability_8_is_refused_even_when_allowed() -> None:
    facts = Facts("cuda", 0, "NVIDIA GeForce RTX 2080", None, "", (7, 5))
    assert "7.5 is below 8.0" in decide(facts, {"ROCM_SD_ALLOW_CUDA": "1"}).reasons[0]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts("cpu", 0, "CPU"), "no GPU"),
        (Facts("cuda"), "torch finds none"),
        (Facts("privateuseone", 0, "privateuseone"), "privateuseone"),
        (Facts("mps", 0, "mps"), "mps"),
    ],
)
def test_what_is_no_gpu_of_ours_says_so(facts: Facts, words: str) -> None:
    info = decide(facts, {"ROCM_SD_ALLOW_CUDA": "1"})
    assert info.arch is None
    assert words in info.reasons[0]


def test_identify_asks_torch() -> None:
    info = device.identify(torch.device("cpu"))
    assert (info.backend, info.index) == ("cpu", 0)
    assert device.identify(torch.device("cpu")) is info


class OldProperties:
    """What torch 2.1 tells of a HIP device: no gcnArchName."""

    name = "AMD Radeon RX 7900 XTX"
    major, minor = 11, 0


def test_identify_with_a_torch_that_lacks_the_arch_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: OldProperties())
    monkeypatch.setattr(torch.version, "hip", "5.7.0")
    device.forget()
    try:
        info = device.identify(torch.device("cuda", 3))
    finally:
        device.forget()
    assert (info.index, info.gfx, info.reasons) == (3, "gfx1100", ())


def kfd_node(root: Path, number: int, version: int | None) -> None:
    node = root / str(number)
    node.mkdir(parents=True)
    if version is not None:
        lines = f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n"
        (node / "properties").write_text(lines, encoding="utf-8")


def test_kfd_gpus_reads_the_drivers_list_in_its_order(tmp_path: Path) -> None:
    for number, version in enumerate([0, 110000, 90010, 90402, 110501, 120001, 100306, None]):
        kfd_node(tmp_path, number, version)
    kfd_node(tmp_path, 10, 100300)
    expected = ["gfx1100", "gfx90a", "gfx942", "gfx1151", "gfx1201", "gfx1036", "gfx1030"]
    assert device.kfd_gpus(tmp_path) == expected


def test_kfd_gpus_without_the_driver(tmp_path: Path) -> None:
    assert device.kfd_gpus(tmp_path / "absent") == []


def test_the_module_is_importable_without_torch() -> None:
    code = "import sys; import lib_rocm_sd.device; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=KERNELS_DIR.parent, check=False)
    assert done.returncode == 0
