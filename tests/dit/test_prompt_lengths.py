"""Which masks are key lengths, and how often that is asked of the device."""

from __future__ import annotations

import pytest
import torch

from lib_rocm_sd.hosts.read.lengths import key_lengths


def mask_of(*rows: str) -> torch.Tensor:
    return torch.tensor([[each == "1" for each in row] for row in rows])


def test_a_mask_whose_keys_come_first_is_lengths() -> None:
    lengths = key_lengths(mask_of("11100", "10000", "11111"))
    assert lengths is not None and lengths.dtype == torch.int32
    assert lengths.tolist() == [[[3]], [[1]], [[5]]]


@pytest.mark.parametrize("row", ["11011", "01111", "00000", "00001"])
def test_another_mask_is_none(row: str) -> None:
    assert key_lengths(mask_of("11100", row)) is None


def test_it_is_read_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[torch.Tensor] = []
    item = torch.Tensor.item

    def noting(x: torch.Tensor) -> object:
        reads.append(x)
        return item(x)

    monkeypatch.setattr(torch.Tensor, "item", noting)
    mask = mask_of("110")
    first = key_lengths(mask)
    assert key_lengths(mask) is first and len(reads) == 1
    mask[0, 2] = True
    changed = key_lengths(mask)
    assert changed is not None and changed.tolist() == [[[3]]] and len(reads) == 2
    mask[0, 0] = False
    assert key_lengths(mask) is None and key_lengths(mask) is None and len(reads) == 3


def test_what_may_change_unnoticed_is_not_read() -> None:
    with torch.inference_mode():
        assert key_lengths(mask_of("110")) is None
