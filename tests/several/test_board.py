"""What processes exchange through a board: images in pieces, statistics of any number of phases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lib_rocm_sd.cards import vae_rows as shared
from lib_rocm_sd.cards.memory import Board, Shared
from lib_rocm_sd.vae.bands import joined
from tests.several.help import CPU, LIMIT_S


@pytest.mark.parametrize(
    ("shapes", "whole"), [(((2, 1), (2, 3)), (2, 4)), (((4, 2), (1, 5)), (1, 13))]
)
def test_statistics_of_two_cards(shapes: Any, whole: tuple[int, int]) -> None:
    """(phases, parts) of each; what both have is all parts, phase after phase if they agree."""
    given = [torch.randn(1, *shape, 3, 4) for shape in shapes]

    def join(board: Board) -> torch.Tensor:
        return shared._whole_statistics(
            cast("Any", SimpleNamespace(ranks=board)), given[board.rank]
        )

    for found in _by_two(Shared(1 << 14), join):
        assert found.shape == (1, *whole, 3, 4)
        assert torch.equal(found.flatten(1, 2), joined(given))


def _by_two(memory: Shared, run: Callable[[Board], Any]) -> list[Any]:
    """What two ranks in two threads make, of which one reads while the other writes again."""
    barrier, found = threading.Barrier(2), {}

    def start(rank: int) -> None:
        def meet() -> None:
            barrier.wait(LIMIT_S)
            time.sleep(0.01 * rank)

        found[rank] = run(Board(memory, rank, 2, CPU, meet))

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [found[rank] for rank in range(2)]


def test_a_board_in_pieces() -> None:
    """An image larger than what is exchanged at once."""
    whole = torch.arange(5 * 7 * 30, dtype=torch.int32).view(1, 5, 7, 30)

    def exchange(board: Board) -> tuple[torch.Tensor, torch.Tensor]:
        rank = board.rank
        together = board.concatenate(whole.split([3, 2], 1)[rank], [3, 2], 1)
        got = torch.zeros(4, dtype=torch.int32)
        board.start_swap({1 - rank: torch.full_like(got, rank)}, {1 - rank: got}).wait()
        with pytest.raises(ValueError, match="more than 512 bytes"):
            board.start_swap({1 - rank: torch.zeros(513, dtype=torch.uint8)}, {})
        return together, got

    for rank, (together, got) in enumerate(_by_two(Shared(2 * 2 * 1024), exchange)):
        assert torch.equal(together, whole) and got.tolist() == [1 - rank] * 4
