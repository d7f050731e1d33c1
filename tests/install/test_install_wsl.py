"""Under WSL the driver lists no GPU: torch is asked, in a process that may take too long."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import install
from lib_rocm_sd import device, present
from lib_rocm_sd.first_trials import MARK
from lib_rocm_sd.runtime import process, torch_build
from lib_rocm_sd.runtime.torch_build import TorchBuild
from lib_rocm_sd.shipped import AT_START, shipped
from lib_rocm_sd.trials import stamp
from tests.install.install_doubles import GFX1100, Builder, gpus

ASKED = f"{install.NAME}: this is WSL, where only torch knows the GPU"


class Torch:
    """Stands for process.run, and for what the process with torch says."""

    def __init__(self) -> None:
        self.asked = 0
        self.trouble = ""
        self.gpus: list[tuple[str, list[str]]] = [("gfx1100", [])]

    def run(self, command: list[str], limit_s: float) -> process.Finished:
        assert (command[2], limit_s) == (present.ASK, install.ASK_LIMIT_S)
        self.asked += 1
        lines = [f"{MARK}{json.dumps(each)}" for each in self.gpus]
        return process.Finished(self.trouble, "\n".join(["a warning", *lines]), 1.0)


@pytest.fixture
def torch(
    tmp_path: Path, fresh_cache: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> Torch:
    made = Torch()
    gpus(monkeypatch)
    (tmp_path / "dxg").touch()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(present, "WSL", tmp_path / "dxg")
    monkeypatch.setattr(process, "run", made.run)
    return made


def test_what_torch_knows_is_compiled_for(
    torch: Torch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.gpus = [("gfx1036", []), ("gfx1100", []), ("gfx803", ["an unknown card"])]
    assert install.main() == 0
    asked, compiling, *_ = capsys.readouterr().out.splitlines()
    assert asked.startswith(ASKED)
    assert "gfx1100: compiling" in compiling
    assert builder.built == list(shipped(GFX1100, AT_START))


def test_torch_is_asked_until_its_kernels_were_tried(
    torch: Torch, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    install.main()
    install.main()
    assert torch.asked == 2
    stamp.put("gfx1100", whole=False)
    capsys.readouterr()
    install.main()
    assert torch.asked == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "gfx1100: all" in line


@pytest.mark.parametrize(
    ("trouble", "told", "words"),
    [
        ("took longer than 60 s and was ended", [], "the process with torch took longer than 60 s"),
        ("crashed (SIGSEGV)", [], "the process with torch crashed (SIGSEGV)."),
        ("", [], "nothing is compiled now: torch finds no GPU. All else works as before"),
        ("", [("gfx803", ["an unknown card"])], "nothing is compiled now: an unknown card."),
    ],
)
def test_a_torch_that_knows_none_has_nothing_compiled(
    torch: Torch,
    builder: Builder,
    trouble: str,
    told: list[tuple[str, list[str]]],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.trouble, torch.gpus = trouble, told
    assert install.main() == 0
    assert words in capsys.readouterr().out
    assert not builder.built


@pytest.mark.parametrize(
    ("build_of_torch", "words"),
    [
        (None, "torch is not installed yet"),
        (TorchBuild("2.7.1+cu118", "11.8", None), "2.7.1+cu118 is a build for CUDA"),
    ],
)
def test_a_torch_that_cannot_know_is_not_asked(
    torch: Torch,
    build_of_torch: TorchBuild | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: build_of_torch)
    assert install.main() == 0
    assert torch.asked == 0
    assert words in capsys.readouterr().out


def test_where_the_driver_tells_torch_is_not_asked(
    torch: Torch, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, "gfx1100")
    assert install.main() == 0
    assert torch.asked == 0 and builder.built


def test_the_process_that_has_torch_tells_each_gpu() -> None:
    """The real one, on this machine, whatever GPU that has."""
    found = pytest.importorskip("torch").cuda.device_count()
    command = [sys.executable, "-c", present.ASK, str(install.ROOT)]
    done = process.run(command, install.ASK_LIMIT_S)
    assert (done.trouble, done.output.count(MARK)) == ("", found)


def test_what_it_tells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    infos = {0: ("gfx1100", ()), 1: ("gfx803", ("an unknown card",))}

    def info(place: Any) -> Any:
        gfx, reasons = infos[place.index]
        return SimpleNamespace(gfx=gfx, reasons=reasons)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device, "identify", info)
    assert present.tell() == 0
    told = [line.removeprefix(MARK) for line in capsys.readouterr().out.splitlines()]
    assert list(map(json.loads, told)) == [["gfx1100", []], ["gfx803", ["an unknown card"]]]
