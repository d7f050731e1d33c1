"""install.py: into which cache, for which GPUs, for which torch."""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path

import pytest

import install
from lib_rocm_sd import arch, cache, device, present
from lib_rocm_sd.runtime import torch_build
from lib_rocm_sd.runtime.torch_build import TorchBuild
from lib_rocm_sd.shipped import AT_START, shipped
from tests.install.install_doubles import GFX1100, SCRIPT, Builder, gpus


def test_the_cache_is_the_webuis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = tmp_path / "data" / "extensions" / "rocm-sd"
    extension.parent.mkdir(parents=True)
    extension.symlink_to(SCRIPT.parent)
    assert install.host_cache(extension / "install.py") == tmp_path / "data" / "cache"
    monkeypatch.chdir(extension.parent)
    assert install.host_cache(Path("rocm-sd/install.py")) == tmp_path / "data" / "cache"
    assert install.host_cache(tmp_path / "elsewhere" / "install.py") is None
    monkeypatch.setenv("SD_WEBUI_CACHE_DIR", str(tmp_path / "given"))
    assert install.host_cache(extension / "install.py") == tmp_path / "given"


def test_gpus_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "gfx1100", "gfx1036", "gfx1100", "gfx803")
    found = present.find()
    assert [name for name, _ in found] == ["gfx1100", "gfx1036", "gfx803"]
    assert found[0][1] is GFX1100
    assert found[2][1] is None


@pytest.mark.parametrize(
    ("driver", "variables", "expected"),
    [
        (["gfx1031"], {"": "10.3.0"}, ["gfx1030"]),
        (["gfx1031", "gfx1100"], {"_1": "11.0.0"}, ["gfx1031", "gfx1100"]),
        (["gfx1031"], {"_0": "10.3.0"}, ["gfx1031", "gfx1030"]),
        ([], {"": "10.3.0"}, []),
    ],
)
def test_gpus_under_an_override(
    driver: list[str],
    variables: dict[str, str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, *driver)
    for suffix, value in variables.items():
        monkeypatch.setenv(device.OVERRIDE + suffix, value)
    assert [name for name, _ in present.find()] == expected


def test_gpus_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = ["Intel(R) UHD Graphics", None, "AMD Radeon RX 7900 XTX", "AMD Radeon(TM) Graphics"]
    registry = types.SimpleNamespace(
        HKEY_LOCAL_MACHINE=1,
        OpenKey=lambda parent, name: contextlib.nullcontext(name),
        QueryInfoKey=lambda key: (len(adapters), 0, 0),
        QueryValueEx=lambda key, value: _described(adapters[int(key)]),
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)
    monkeypatch.setattr(sys, "platform", "win32")
    found = present.find()
    assert [name for name, _ in found] == ["AMD Radeon RX 7900 XTX", "AMD Radeon(TM) Graphics"]
    assert found[0][1] is GFX1100
    assert found[1][1] is None


def _described(name: str | None) -> tuple[str, int]:
    if name is None:
        raise FileNotFoundError("no DriverDesc")
    return name, 1


@pytest.mark.parametrize("value", ["", "  ", "11", "gfx1100", "11.0.x"])
def test_an_override_that_is_no_version_is_ignored(
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setenv(device.OVERRIDE, value)
    assert install.main() == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert ("=" + value + " is ignored" in first) == bool(value.strip())
    assert len(builder.built) == len(shipped(GFX1100, AT_START))


@pytest.mark.parametrize(
    ("driver", "override", "words"),
    [
        (["gfx1100"], "10.3.0", "family: gfx1100 (RDNA3). "),
        (["gfx1100", "gfx1036"], "10.3.0", "family: gfx1100 (RDNA3). "),  # the card counts
        (["gfx1010"], "12.0.1", "for gfx1201 (RDNA4), and the GPU is of another family: gfx1010. "),
        (["gfx1031"], "10.3.0", ""),
        (["gfx1036"], "10.3.0", ""),
        (["gfx1103"], "11.0.0", ""),
        (["gfx1151"], "11.0.0", ""),
        (["gfx1100", "gfx1031"], "10.3.0", ""),
    ],
)
def test_an_override_that_names_another_family_has_nothing_compiled(
    driver: list[str],
    override: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch, *driver)
    monkeypatch.setenv(device.OVERRIDE, override)
    assert install.main() == 0
    out = capsys.readouterr().out
    assert bool(builder.built) is not bool(words)
    assert words in out
    assert (f"nothing is compiled: {device.OVERRIDE}={override} has code" in out) is bool(words)


@pytest.mark.parametrize(
    ("build_of_torch", "words"),
    [
        (None, "torch is not installed yet; what it needs is compiled later, in the background"),
        (ValueError("version.py cannot be read"), "version.py cannot be read; what it needs"),
        (TorchBuild("2.13.0+cpu", None, None), "torch 2.13.0+cpu is a build without a GPU"),
        (TorchBuild("2.7.1+cu118", "11.8", None), "2.7.1+cu118 is a build for CUDA"),
    ],
)
def test_a_torch_that_cannot_use_them_has_nothing_compiled(
    build_of_torch: TorchBuild | Exception | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    builder: Builder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def installed() -> TorchBuild | None:
        if isinstance(build_of_torch, Exception):
            raise build_of_torch
        return build_of_torch

    gpus(monkeypatch, "gfx1100")
    for name in ("ZLUDA", "ZLUDA_NVRTC_LIB", "ZLUDA_COMGR_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch_build, "installed", installed)
    assert install.main() == 0
    out = capsys.readouterr().out
    assert words in out and out.count("\n") == 1
    assert not builder.built


def test_a_gpu_inside_the_processor_counts_where_there_is_no_card(
    monkeypatch: pytest.MonkeyPatch, builder: Builder
) -> None:
    gpus(monkeypatch, "gfx1036", "gfx1100", "gfx803")
    assert install.wanted_gpus() == ("", [GFX1100])
    gpus(monkeypatch, "gfx1036")
    assert install.wanted_gpus() == ("", [arch.table()["gfx1036"]])


def test_set_directory_is_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builder: Builder
) -> None:
    gpus(monkeypatch, "gfx1100")
    monkeypatch.setenv("SD_WEBUI_CACHE_DIR", str(tmp_path))
    try:
        assert install.main() == 0
        assert cache.directory() == tmp_path / "rocm_sd"
    finally:
        cache.set_directory(None)
