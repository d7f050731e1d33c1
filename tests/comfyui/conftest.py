"""ComfyUI's double under its names, and a CPU that plays the card."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib_rocm_sd import report
from lib_rocm_sd.hosts.comfyui import everywhere, host, unet
from lib_rocm_sd.hosts.comfyui.host import tally
from tests.comfyui.play import Engine, play
from tests.comfyui.unet_steps import model_of

DOUBLE = Path(__file__).parent / "double"
MODULES = {
    "management": "comfy.model_management",
    "utils": "comfy.utils",
    "attention": "comfy.ldm.modules.attention",
    "sd": "comfy.sd",
    "base": "comfy.model_base",
    "patcher": "comfy.model_patcher",
    "unet": "comfy.ldm.modules.diffusionmodules.openaimodel",
    "ops": "comfy.ops",
    "extension": "comfy.patcher_extension",
    "nodes": "nodes",
}


def forget() -> None:
    packages = ("comfy", "comfy_api", "comfy_extras", "nodes")
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The double's modules. Nothing was counted yet, and no event told."""
    forget()
    monkeypatch.syspath_prepend(str(DOUBLE))
    monkeypatch.setattr(report.report, "_events", {})
    _forget_counts()
    yield SimpleNamespace(**{key: importlib.import_module(n) for key, n in MODULES.items()})
    everywhere.end()
    _forget_counts()
    forget()


def _forget_counts() -> None:
    for counts in (tally, host.ours_before, host.left_before):
        counts.clear()
    report.report.begin()


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """ComfyUI's server, which knows the workflow that runs."""
    instance = SimpleNamespace(last_prompt_id="first")
    server: Any = types.ModuleType("server")
    server.PromptServer = SimpleNamespace(instance=instance)
    monkeypatch.setitem(sys.modules, "server", server)
    host.count_for_workflow()
    return instance


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The CPU is a card of ours."""
    return play(monkeypatch.setattr)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU may compute a UNet's blocks, by torch's own operations."""
    monkeypatch.setattr(unet, "unusable", lambda device: [])


@pytest.fixture
def model(comfy: Any) -> Any:
    """One whose diffusion_model is a UNet."""
    return model_of(comfy)


def left() -> dict[str, int]:
    """What ComfyUI computed, as "what: why", and how often."""
    return {f"{what}: {why}": count for (what, why), count in tally.left.items()}
