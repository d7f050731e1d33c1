"""What the tests of the UNet share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from vae_help import HALF

AUTO = (True, "Auto", "Off", 0, "Auto")
"""The script's arguments: attention and the UNet's blocks are ours, and the VAE is the WebUI's."""
WITHOUT = (True, "Auto", "Off", 0, "Off")
BLOCKS = 17
"""Of the double's whole UNet."""
CALLED = 14
"""Of these; the three blocks of transformers are computed with them."""


def begin(start: Start, gpu: FakeGpu | None = None, **more: Any) -> WebUI:
    """A WebUI with a whole UNet in half precision; with the extension where there is a GPU."""
    more = {"dtype": HALF, "whole": True, **more}
    return start(gpu=gpu, extension=gpu is not None, **more)


def recording(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From now on the CPU records graphs; what it was told to do."""
    path = Path(__file__).resolve().parents[2] / "graph_tape.py"
    spec = importlib.util.spec_from_file_location("graph_tape", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["graph_tape"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.recording_cpu(monkeypatch, baked=True)


def unet_of(webui: WebUI) -> Any:
    return webui.shared.sd_model.model.diffusion_model


def bytes_of(webui: WebUI) -> dict[str, tuple[Any, ...]]:
    """Strides and bytes of each parameter, as they lie in memory."""
    found = {}
    for name, parameter in unet_of(webui).named_parameters():
        dense = torch.empty(0, dtype=parameter.dtype).set_(parameter.detach().untyped_storage())
        found[name] = (parameter.stride(), dense.view(torch.uint8).numpy().tobytes())
    return found


def untouched(webui: WebUI) -> bool:
    """Whether no module of the UNet has a forward of its own."""
    return not any("forward" in vars(module) for module in unet_of(webui).modules())


def ours(webui: WebUI) -> int:
    """How many modules of the UNet have a forward of ours."""
    forwards = [vars(module).get("forward") for module in unet_of(webui).modules()]
    return sum(type(forward).__module__.startswith("lib_rocm_sd.") for forward in forwards)


def called(webui: WebUI) -> int:
    """How many of these are called: blocks of transformers are computed with them."""
    within = [m for m in unet_of(webui).modules() if type(m).__name__ == "BasicTransformerBlock"]
    return ours(webui) - sum("forward" in vars(module) for module in within)


def session_of(webui: WebUI) -> Any:
    return webui.library("hosts.webui.unet").session


def steps_of(webui: WebUI, monkeypatch: Any) -> list[str]:
    """The kinds of blocks that ours computed from now on, one entry for each call."""
    seen: list[str] = []
    stand_in = webui.library("unet.stand_in").BlockStandIn
    whole = stand_in.serve

    def serve(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.kind.title)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(stand_in, "serve", serve)
    return seen


def blocks_shown(webui: WebUI) -> list[Any]:
    """The rows of the status table about the UNet's blocks, were *UNet* Auto."""
    options = webui.library("hosts.ui.options").Options(unet="Auto")
    rows = webui.library("hosts.webui.status").look(options).rows
    return [row for row in rows if row.operation.startswith("UNet")]


def shown(webui: WebUI, name: str) -> Any:
    """The one about blocks of this name."""
    return next(row for row in blocks_shown(webui) if row.operation == f"UNet, {name}")
