"""How ranks end: who dies, fails, hangs, does not come or does not fit is named by the others."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

from tests.distributed import ranks
from tests.distributed.launch import launch, made


@pytest.mark.parametrize(
    ("rank", "how", "said"),
    [
        (1, "dies", "rank 1 ("),
        (0, "dies", "gone"),
        (1, "fails", "rank 1 (*) failed: MemoryError: CUDA out of memory"),
        (1, "hangs", "rank 1 ("),
    ],
)
def test_one_that_ends_is_named(rank: int, how: str, said: str) -> None:
    ends = launch(ranks.ending, 3, rank, how)
    own = ends.pop(rank)
    if how == "dies":
        assert own.exitcode == 9
    else:
        assert own.error in ("MemoryError", "RankError")
    for end in ends:
        assert end.error == "RankError", end.text
        for part in said.split("*"):
            assert part in end.text
        if how == "hangs":
            assert "did not come" in end.text
        if how == "dies" and rank:
            assert "no sign of life" in end.text


def test_one_that_does_not_come_is_named() -> None:
    (end,) = launch(ranks.coming, 1, -1, "", None, 2.0, WORLD_SIZE="2")
    assert end.error == "RankError"
    assert "rank 1 did not come within 2 s" in end.text


def test_one_that_fails_its_self_test_is_left_out() -> None:
    first, out, last = launch(ranks.coming, 3, 1, TORCHELASTIC_USE_AGENT_STORE="False")
    assert made([first, last]) == [(2, 0, 2.0), (2, 1, 2.0)]
    assert (out.error, out.text, out.exitcode) == ("LeftOut", "it adds wrongly", 0)


def test_ranks_can_join_again() -> None:
    assert made(launch(ranks.coming, 2)) == [(2, 0, 1.0), (2, 1, 1.0)]


def test_one_device_for_two_and_one_that_is_not_there() -> None:
    for end in launch(ranks.coming, 2, -1, "GPU-5"):
        assert end.error == "ValueError"
        assert "and rank 1 have the same device" in end.text
    for end in launch(ranks.coming, 2, -1, "", "cuda"):
        assert end.error == "ValueError"
        assert "this machine has 0" in end.text


def test_the_holder_of_the_store_cannot_be_left_out() -> None:
    for end in launch(ranks.coming, 2, 0):
        assert end.error == "ValueError"
        assert "has the store and cannot be left out" in end.text
