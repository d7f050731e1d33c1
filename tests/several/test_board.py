"""What processes exchange through a board: images in pieces, tensors of any shape."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib_rocm_sd.cards.memory import Board, Shared
from lib_rocm_sd.cards.ranks import RankError
from tests.several.help import CPU, LIMIT_S


def _by_two(memory: Shared, run: Callable[[Board], Any], turn: int = 0) -> list[Any]:
    """What two ranks in two threads make, of which one reads while the other writes again."""
    results: dict[int, Any] = {}

    def look(waited_s: float) -> None:
        if waited_s > LIMIT_S:
            raise RankError("the other one does not come")

    def start(rank: int) -> None:
        time.sleep(0.01 * rank)
        results[rank] = run(Board(memory, rank, 2, CPU, turn, look))

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [results[rank] for rank in range(2)]


def test_a_board_in_pieces() -> None:
    """An image larger than what is exchanged at once."""
    whole = torch.arange(5 * 7 * 30, dtype=torch.int32).view(1, 5, 7, 30)

    def exchange(board: Board) -> torch.Tensor:
        return board.concatenate(whole.split([3, 2], 1)[board.rank], [3, 2], 1)

    for together in _by_two(Shared(4096 + 2 * 2 * 1024), exchange):
        assert torch.equal(together, whole)


def test_tensors_of_other_shapes() -> None:
    """Each rank says by itself what it sends; a memory's second picture has other shapes."""
    memory = Shared(4096 + 2 * 2 * 4096)
    for turn, dtype in enumerate((torch.float16, torch.bfloat16)):
        given = [
            [torch.randn(1, 2 + turn, 1, 3, 4), torch.randn(1, 2, 5, 8).to(dtype)],
            [torch.randn(1, 1, 4, 3, 4)],
        ]

        def exchange(board: Board, given: Any = given) -> list[Any]:
            mine = board.rank
            got = [board.exchange({1 - mine: given[mine]})[1 - mine] for _ in range(3)]
            with pytest.raises(ValueError, match="more than 1792 bytes"):
                board.exchange({1 - mine: [torch.zeros(512)]})
            return [*got, board.exchange({1 - mine: []})[1 - mine]]

        for rank, results in enumerate(_by_two(memory, exchange, turn)):
            assert results.pop() == []
            for result in results:
                for tensor, expected in zip(result, given[1 - rank], strict=True):
                    assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


def test_who_waits_in_vain_is_told() -> None:
    def lost(waited_s: float) -> None:
        raise RankError(f"gone, after {waited_s:.0f} s")

    with pytest.raises(RankError, match="gone, after 0 s"):
        Board(Shared(1 << 14), 0, 2, CPU, 0, lost).exchange({1: []})


def test_who_was_left_behind_by_a_picture_writes_into_none_after_it() -> None:
    """A slow rank of one that was interrupted, when the next one has begun."""
    memory = Shared(1 << 14)

    def none(waited_s: float) -> None:
        raise RankError("nobody comes")

    with pytest.raises(RankError, match="nobody comes"):
        Board(memory, 0, 2, CPU, 2, none).exchange({1: []})
    with pytest.raises(RankError, match="the others are at another picture"):
        Board(memory, 1, 2, CPU, 1, none).exchange({0: []})
