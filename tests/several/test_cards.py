"""Which cards there are, and which a user may choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.cards import devices as cards
from lib_rocm_sd.device import DeviceInfo

HOME = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many cards there are, and which have a reason against them."""

    def of(count: int, **reasons: str) -> None:
        def identify(device: torch.device) -> DeviceInfo:
            index = device.index or 0
            why = reasons.get(f"card{index}")
            name = f"Card {index}"
            return DeviceInfo(index, name, "hip", "gfx1100", None, (why,) if why else ())

        monkeypatch.setattr(cards, "identify", identify)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return of


@pytest.mark.parametrize(
    ("wanted", "numbers", "left"),
    [
        ("", [1, 2], []),
        ("1", [1], []),
        ("2 1", [2, 1], []),
        ("1,1", [1], ["a card was named twice; each is used once"]),
        ("0,1", [1], ["card 0 is the one that the steps are computed on anyway"]),
        ("0", [], ["card 0 is the one that the steps are computed on anyway"]),
        ("7", [], ["there is no card 7"]),
    ],
)
def test_chosen(machine: Any, wanted: str, numbers: list[int], left: list[str]) -> None:
    machine(3)
    found = cards.chosen(HOME, wanted, {})
    assert [device.index for device in found.devices] == numbers and list(found.left) == left


def test_one_card(machine: Any) -> None:
    machine(1)
    found = cards.chosen(HOME, "", {})
    assert not found.devices
    assert found.left == ("there is one card, Card 0: nothing to divide with",)
    assert cards.chosen(torch.device("cpu"), "", {}).left == ("this is not a GPU",)


def test_beside_zluda_there_is_one_card(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(2)
    known = cards.identify(HOME)
    monkeypatch.setattr(cards, "identify", lambda device: replace(known, backend="zluda"))
    assert cards.chosen(HOME, "", {}) == cards.Chosen((), (cards.BESIDE_ZLUDA,))


def test_a_card_that_is_not_known(machine: Any) -> None:
    machine(3, card1="gfx803 is not known")
    found = cards.chosen(HOME, "", {})
    assert [device.index for device in found.devices] == [2]
    assert found.left == ("card 1 (Card 1): gfx803 is not known",)


def test_development(machine: Any) -> None:
    machine(1)
    found = cards.chosen(HOME, "", {cards.TEST: "cuda:0, cpu"})
    assert [str(device) for device in found.devices] == ["cuda:0", "cpu"]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", []), (" 1 ; 2", [1, 2]), ("01", [1]), ("a", None), ("-1", None), ("1.5", None)],
)
def test_numbers(text: str, numbers: list[int] | None) -> None:
    assert cards.numbers_of(text) == numbers
