"""Whose function in torch.cat's place is known to do nothing now (hosts/webui/several.py)."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts.webui.several import _is_idle


def function_of(module: str) -> Any:
    """A function that says it is from there."""

    def cat(tensors: list[torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        return torch.cat(tensors)

    cat.__module__ = module
    return cat


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("around", ["modules.sd_hijack_unet", "somebody.else"])
@pytest.mark.parametrize("by", ["lib_free_u.unet", "another.extension"])
def test_freeu_is_idle_where_it_is_not_enabled(
    monkeypatch: pytest.MonkeyPatch, by: str, around: str, enabled: bool
) -> None:
    state = ModuleType("lib_free_u.global_state")
    state.instance = SimpleNamespace(enable=enabled)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lib_free_u", ModuleType("lib_free_u"))
    monkeypatch.setitem(sys.modules, state.__name__, state)
    cat = partial(function_of(by), original_function=function_of(around))
    is_theirs = by == "lib_free_u.unet" and around == "modules.sd_hijack_unet"
    assert _is_idle(cat) == (is_theirs and not enabled)
    twice = partial(function_of(by), original_function=cat)  # after Reload UI
    assert _is_idle(twice) == (is_theirs and not enabled)
    assert not _is_idle(function_of(by))


def test_a_freeu_of_another_kind_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lib_free_u.global_state", raising=False)
    original = function_of("modules.sd_hijack_unet")
    cat = partial(function_of("lib_free_u.unet"), original_function=original)
    assert not _is_idle(cat)
