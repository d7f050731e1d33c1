"""`demo --ui`: the Speed test tab alone, on a page of this machine."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest

from lib_rocm_sd import __main__
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands import demo
from lib_rocm_sd.commands.little_model import ROOT

START_S = 600


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--ui", *words])


def taken() -> tuple[socket.socket, int]:
    """A port that somebody listens on."""
    found = socket.socket()
    found.bind((demo.ADDRESS, 0))
    found.listen()
    return found, found.getsockname()[1]


def test_the_address_is_this_machine_alone() -> None:
    assert demo.ADDRESS == "127.0.0.1"


def test_a_free_port_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    listening, port = taken()
    with listening:
        monkeypatch.setattr(demo, "FIRST_PORT", port)
        monkeypatch.setattr(demo, "LAST_PORT", port)
        found = demo.free_port(None)
        assert found != port
        with pytest.raises(OSError):
            demo.free_port(port)
    assert demo.free_port(port) == port


@pytest.mark.parametrize("port", [-1, 70000])
def test_an_impossible_port_is_told(port: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"port {port} cannot be had"):
        demo.serve(arguments(f"--port={port}", "--out", str(tmp_path)))


def test_without_gradio_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    for package in ("diffusers", "transformers", "PIL"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    assert __main__.main(["demo", "--ui", "--out", str(tmp_path)]) == 2
    assert "install.py demo --ui" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_is_served_until_interrupted(tmp_path: Path) -> None:
    for package in ("gradio", "diffusers", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    command = [sys.executable, "-m", "lib_rocm_sd", "demo", "--ui", "--no-browser"]
    command += ["--device", "cpu", "--out", str(tmp_path)]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or the child ignores it too
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    ) as page:
        try:
            assert page.stdout is not None
            line = next((text for text in page.stdout if text.startswith("Speed test: ")), "")
            address = line.split()[2]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(f"{address}/config", timeout=START_S) as answer:
                found = answer.read().decode()
            page.send_signal(signal.SIGINT)
            assert page.wait(START_S) == 0
        finally:
            page.kill()
    for name in ("run", "cancel", "what", "preset", "sizes", "status", "results", "markdown"):
        assert f'"rocm_sd_speed_{name}"' in found
    assert "fonts.googleapis.com" not in found
