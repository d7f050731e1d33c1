"""What others do to a UNet of diffusers after a step with ours: a case for each row of the matrix.

`python -m tools.diffusers_matrix` judges the same rows on a card, and features beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.vae.vae_models import needs_half

pytest.importorskip("diffusers", reason="diffusers is not installed")

from tools.diffusers_matrix.changes import CHANGES
from tools.diffusers_matrix.compare import ROUNDS, Place, Verdict, judged, missing
from tools.diffusers_matrix.models import Row, Scene
from tools.diffusers_matrix.ways import done, settings

pytestmark = [needs_half, pytest.mark.slow]
PLACE = Place(torch.device("cpu"), rounds=ROUNDS[:2])


@pytest.mark.parametrize("row", CHANGES, ids=lambda row: row.name)
def test_a_change_is_noticed_or_makes_no_difference(row: Row) -> None:
    package = missing(row, PLACE)
    if package:
        pytest.skip(f"no {package}")
    verdict = judged(row, PLACE)
    assert verdict.word != "WRONG", verdict.line()


def test_names_tell_rows_apart() -> None:
    assert len({row.name for row in CHANGES}) == len(CHANGES)


def verdict_of(change: object, **options: object) -> Verdict:
    return judged(replace(CHANGES[0], name="a row", change=change, **options), PLACE)  # type: ignore[arg-type]


def test_a_row_that_changes_nothing_cannot_be_judged() -> None:
    verdict = verdict_of(settings("norm1", eps=1e-5), changes=True)
    assert verdict.word == "WRONG"
    assert "cannot be judged" in verdict.line()


def test_a_change_that_ours_does_not_see_is_wrong() -> None:
    """Only a part of these steps is the change's: it is for ours alone."""

    def change(scene: Scene) -> Iterator[None]:
        yield
        for module in scene.unet.modules():
            if type(vars(module).get("forward")).__name__ == "BlockStandIn":
                scene.unet.conv_out.weight.data.mul_(2)
                break
        yield

    verdict = verdict_of(change)
    assert [one.when for one in verdict.seen if one.wrong][:2] == ["1 on changed", "1 on undone"]


def test_what_stays_behind_is_wrong() -> None:
    def do(scene: Scene) -> object:
        if "forward" in vars(scene.unet.conv_out):
            scene.unet.conv_out.more = 1
        return lambda: None

    verdict = verdict_of(done(do))  # type: ignore[arg-type]
    assert any("conv_out" in one.wrong for one in verdict.seen if "off" in one.when)


def test_an_error_that_the_host_does_not_raise_is_wrong() -> None:
    def do(scene: Scene) -> object:
        if "forward" in vars(scene.unet.conv_out):
            raise TypeError("ours is there")
        return lambda: None

    verdict = verdict_of(done(do))  # type: ignore[arg-type]
    assert "round 1 raised TypeError: ours is there" in verdict.line()
