"""What the tests of the VAE share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import WebUI

HALF = torch.bfloat16


def coders(webui: WebUI) -> list[Any]:
    vae = webui.shared.sd_model.first_stage_model
    return [vae.decoder, vae.encoder]


def untouched(webui: WebUI) -> bool:
    """Whether neither decoder nor encoder has a forward of its own."""
    return not any("forward" in coder.__dict__ for coder in coders(webui))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.decoded, b.decoded, strict=True))


def distance(a: Any, b: Any) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a.decoded, b.decoded, strict=True))


def runs(webui: WebUI, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """What our programs run from now on: role and the input's shape."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    program = webui.library("vae.program").Program
    whole = program.__call__

    def call(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append((self._recipe.role, tuple(image.shape)))
        return whole(self, image, **kwargs)

    monkeypatch.setattr(program, "__call__", call)
    return seen


def break_program(webui: WebUI, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[int]:
    calls: list[int] = []

    def call(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        raise error

    monkeypatch.setattr(webui.library("vae.program").Program, "__call__", call)
    return calls


def add_script(webui: WebUI, **hooks: Callable[..., Any]) -> Any:
    """Another extension's script in txt2img, run after ours."""
    kind = type("Other", (webui.scripts.Script,), hooks)
    other = kind()
    other.args_from = other.args_to = 0
    webui.scripts.scripts_txt2img.alwayson_scripts.append(other)
    return other


def value_of(update: Any) -> Any:
    return update.get("value") if isinstance(update, dict) else update.value
