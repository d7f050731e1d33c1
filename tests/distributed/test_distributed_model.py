"""The little model by two and three ranks on gloo: what one alone gives."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tests.distributed import ranks
from tests.distributed.launch import launch, made

SIZES = {2: ((32, 16), (37, 23)), 3: ((50, 16),)}
"""Of latent images, by ranks: one that divides, and heights and widths that do not."""


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def called(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return made(launch(ranks.calls, request.param, SIZES[request.param]))


def test_a_call_of_the_unet_is_the_same_by_guidance_and_by_rows(called: Any) -> None:
    for height, width in SIZES[len(called)]:
        found = called[0][f"{height}x{width}"]
        assert found["guidance"] < 1e-12
        assert found["rows"] < 1e-12, (height, width)
        assert found["counts"] == (1, 1, 0)
        assert all(rank[f"{height}x{width}"]["alike"] for rank in called)
    assert all(rank["untouched"] for rank in called)


def test_what_cannot_be_split_is_made_whole_and_told(called: Any) -> None:
    size = len(called)
    for rank in called:
        assert rank["single"]["same"]
        assert rank["single"]["whole"] == (1, 1)
        assert rank["single"]["uneven"] < 1e-12
        assert "the ranks were given different images or prompts" in rank["single"]["prompts"]
        told = "\n".join(rank["told"])
        assert "without guidance: there is nothing to split" in told
        assert (
            f"4 rows are 1 of the smallest image: enough for 0 ranks of 2 rows each, not for {size}"
            in told
        )


def test_the_stale_form_is_exact_at_first_and_only_then(called: Any) -> None:
    if len(called) == 2:
        first, second, third, another = called[0]["stale"]
        assert max(first, second, another) < 1e-12
        assert 1e-6 < third < 0.05


def test_guidance_is_split_with_blocks_of_ours(called: Any) -> None:
    assert all(rank["blocks"] < 0.02 for rank in called)


@pytest.mark.parametrize(("size", "sizes"), [(2, ((57, 9), (32, 16))), (3, ((64, 8), (32, 16)))])
def test_the_vae_gives_one_ranks_bits(size: int, sizes: tuple[tuple[int, int], ...]) -> None:
    for rank in made(launch(ranks.decodes, size, sizes)):
        for height, width in sizes:
            found = rank[f"{height}x{width}"]
            fits = -(-height // 16) >= size
            assert found["equal"], (height, width)
            assert found["counts"] == ((1, 0) if fits else (0, 1))
            assert (found["sent"] > 0) is fits
        assert rank["encoder"] == (True, 2 if size == 2 else 0)
        assert rank["untouched"]
        assert "a generator of the same seed on each" in rank["seeds"]


def test_pictures_in_every_way() -> None:
    first, *others = made(launch(ranks.pictures, 3))
    assert first["counts"] == (4, 1, 2)
    assert all(other["counts"] == (0, 0, 0) for other in others)
    assert first["many"]
    assert first["stages"]
    assert first["guided"] <= 1
    assert first["rows"] <= 1
    for number, rank in enumerate((first, *others)):
        assert rank["same"]
        assert rank["team"] == (3, number, [0, 1, 2])
        assert "3 ranks cannot be parted in teams of 2" in rank["unfit team"]
        assert "each stage needs a rank" in rank["unfit stages"]
