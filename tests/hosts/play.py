"""A CPU that plays the card for torch's attention function: what is ours is computed by formula."""

from __future__ import annotations

import pytest

from lib_rocm_sd.hosts import attention
from tests.comfyui.play import CARD, FLOATS
from tests.comfyui.play import Engine as Card


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """In the place of the engine; its `seen` has each call's inputs and session."""
    made = Card()
    monkeypatch.setattr(attention, "identify", lambda device: CARD)
    monkeypatch.setattr(attention, "HALVES", FLOATS)
    monkeypatch.setattr(attention, "engine", made)
    return made
