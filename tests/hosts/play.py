"""A CPU that plays the card for torch's attention function: what is ours is computed by formula."""

from __future__ import annotations

import pytest

from lib_rocm_sd.hosts import sdpa
from tests.comfyui.play import CARD, FLOATS
from tests.comfyui.play import Engine as Card


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """In the place of the engine; its `seen` has each call's inputs and session."""
    made = Card()
    monkeypatch.setattr(sdpa, "identify", lambda device: CARD)
    monkeypatch.setattr(sdpa, "HALVES", FLOATS)
    monkeypatch.setattr(sdpa, "engine", made)
    return made
