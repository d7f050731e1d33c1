"""Rows of images that several processes compute: statistics of parts, and rows between rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.ops.group_norm.formula import moments_of
from lib_rocm_sd.unet import divided


@pytest.mark.parametrize("sizes", [(7,), (1, 12), (5, 0, 9, 3)])
def test_statistics_of_parts_are_those_of_all(sizes: tuple[int, ...]) -> None:
    """A part without pixels weighs nothing."""
    drawn = torch.Generator("cpu").manual_seed(sum(sizes))
    x = torch.randn(2, sum(sizes), 6, generator=drawn, dtype=torch.float64) + 3
    whole = moments_of(x[:, None])
    empty = torch.zeros(2, 1, 6, 4, dtype=torch.float64)
    split = x.split(list(sizes), 1)
    parts = [moments_of(part[:, None]) if part.numel() else empty for part in split]
    made = divided.merged(torch.cat(parts, 1))
    assert made.shape == whole.shape
    assert (made - whole).abs().max() < 1e-12


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("below", [0, 1])
def test_rows_are_between_those_of_others(rank: int, below: int) -> None:
    whole = torch.arange(2 * 9 * 3 * 5).view(2, 9, 3, 5)

    class Rows:
        def edges(self, x: torch.Tensor, above: int, below: int) -> Any:
            own = whole[:, 3 * rank : 3 * rank + 3].permute(0, 3, 1, 2)
            assert torch.equal(x, own) and above == 1
            planes = whole.permute(0, 3, 1, 2)
            before = planes[:, :, 3 * rank - 1 : 3 * rank] if rank else None
            after = planes[:, :, 3 * rank + 3 : 3 * rank + 4] if below and rank < 2 else None
            return before, after

    rows: Any = Rows()
    made, above = divided.surrounded(rows, whole[:, 3 * rank : 3 * rank + 3], below)
    assert above == int(rank > 0)
    assert torch.equal(made, whole[:, 3 * rank - above : 3 * rank + 3 + below * (rank < 2)])
    assert made.is_contiguous()


def test_rows_are_those_of_the_call_and_of_no_later_one() -> None:
    rows: Any = object()
    with pytest.raises(KeyError), divided.among(rows):
        assert divided.current() is rows
        raise KeyError
    assert divided.current() is None
