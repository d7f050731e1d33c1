"""Patch parallel with the UNet's blocks ours, by ranks on gloo: what one rank gives."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from tests.distributed import blocks
from tests.distributed.launch import launch, made

BLOCKS = {"SD 1.5": 32, "SDXL": 25}
"""How many are ours: all."""
UPS = {"SD 1.5": 2, "SDXL": 1}
CASES: dict[tuple[float, ...], tuple[blocks.Place, ...]] = {
    (1.0, 2.0): (("SD 1.5", (37, 23)), ("SDXL", (32, 16))),
    (2.0, 1.0, 1.0): (("SDXL", (21, 18)), ("SD 1.5", (50, 15))),
    (1.0, 1.0, 1.0, 2.0): (("SD 1.5", (45, 16)),),
}
"""By the ranks' shares."""


@pytest.mark.parametrize("share", CASES, ids=lambda share: f"{len(share)} ranks")
def test_rows_by_our_blocks_are_what_one_rank_gives(share: tuple[float, ...]) -> None:
    first, *others = made(launch(blocks.calls, len(share), CASES[share], share))
    for name, size in CASES[share]:
        place = f"{name} {size[0]}x{size[1]}"
        ours, alone, torchs = first[place]["errors"]
        assert ours < 2 * torchs and ours < 2 * alone
        factor = 4 if name == "SD 1.5" else 2
        odd = any(side % factor for side in size)
        for rank in (first, *others):
            assert rank[place]["alike"]
            assert rank[place]["counts"] == (2, 0)
            assert rank[place]["ours"] == BLOCKS[name] - (UPS[name] if odd else 0)
        exchanges, sent_bytes = first[place]["sent"]
        assert exchanges == first[place]["diffusers' sent"][0]
        print(f"{place} on {len(share)} ranks: {exchanges} exchanges, {sent_bytes} bytes sent")


@pytest.fixture(scope="module")
def changed() -> list[dict[str, Any]]:
    return made(launch(blocks.changes, 2))


def test_a_block_is_ours_on_all_ranks_or_on_none(changed: Any) -> None:
    for rank in changed:
        apart, ours = rank["one rank only"]
        assert apart < 0.01 and ours == 0
        apart, ours = rank["held"]
        assert apart < 0.01 and 0 < ours < 32
        assert [ours for _, ours in rank["lacking"]] == [32, 21, 32]
        assert all(apart < 0.01 for apart, _ in rank["lacking"])
        assert "computed blocks in different ways" in rank["different ways"]
    assert any("no convolution of ours" in line for line in changed[1]["told"])


def test_what_a_step_shares_is_made_once_a_rank(changed: Any) -> None:
    for rank in changed:
        assert rank["once a step"] == (1, 1)


def test_a_whole_picture(changed: Any) -> None:
    for rank in changed:
        levels, ours = rank["pipeline"]
        assert levels <= 2 and ours == 32


def test_the_stale_form_is_exact_at_first_and_in_a_new_picture(changed: Any) -> None:
    for rank in changed:
        first, second, third, another = rank["stale"]
        assert max(first, second, another) < 0.005
        assert 0.005 < third < 0.2


def test_what_people_add_is_divided_or_refused(changed: Any) -> None:
    for rank in changed:
        images, masked = rank["IP-Adapter"]
        assert max(*rank["LoRA"], *images) < 0.01
        assert masked and rank["FreeU"] and rank["late LoRA"] and rank["another forward"]
        told = "\n".join(rank["told"])
        assert "an IP-Adapter has a mask, which is of the whole image" in told
        assert "FreeU transforms the whole image" in told
        assert "the forward of conv_in is another than at first" in told
        assert "load adapters (LoRA) before patch_parallel" in told


def test_a_rank_that_fails_amid_a_block_ends_all() -> None:
    ends = launch(blocks.failing, 3, 1)
    failed = ends.pop(1)
    assert failed.error == "RuntimeError" and "a kernel failed" in failed.text
    for end in ends:
        assert end.error == "RankError"
        assert "rank 1 (" in end.text and "a kernel failed" in end.text
