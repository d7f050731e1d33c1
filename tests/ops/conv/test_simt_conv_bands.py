"""Bands of an image by the convolutions' source on the CPU: the whole image's, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.functional import group_norm_finalize
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import STATISTICS_ROWS, Band, ConvProblem
from lib_rocm_sd.vae.steps import made_rows, needed_rows, rows_above
from tests import executed
from tests.ops.conv.test_simt_conv import run_shim
from tests.verify import simt
from tests.verify.simt.attention import UNITS

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

PADDED = "3x3 stride 2 padded"
CASES = (
    ConvProblem(PADDED, 1, 39, 18, 32, 32, statistics=True),
    ConvProblem("3x3", 1, 37, 18, 32, 32, "float16", True, "identity", 32, True),
    ConvProblem("3x3 stride 2", 1, 71, 17, 32, 32, "bfloat16", statistics=True),
    ConvProblem("upsample", 1, 19, 17, 16, 32, "float16", statistics=True),
)
IN_ROWS = (
    ConvProblem(PADDED, 2, 39, 18, 32, 32, in_rows=True),
    ConvProblem("3x3", 2, 37, 18, 64, 32, "float16", True, "conv", 32, True, in_rows=True),
    ConvProblem("upsample", 2, 19, 17, 64, 32, "bfloat16", in_rows=True),
)
"""A UNet's, whose rows ranks divide (unet/divided.py): of two images."""


def read_rows(problem: ConvProblem, rows: tuple[int, int]) -> tuple[tuple[int, int], int]:
    """The rows of x that these of the output need, and how many of them lie above."""
    if problem.kind == PADDED:  # no VAE has it
        source = max(2 * rows[0] - 1, 0), min(2 * rows[1], problem.height)
        return source, 2 * rows[0] - source[0]
    source = needed_rows(problem.kind, rows, problem.height)
    assert made_rows(problem.kind, rows) == rows
    return source, rows_above(problem.kind, rows, source)


def check(problem: ConvProblem, gfx: str, height: int) -> None:
    """Bands of `height` rows: equal values, and statistics that make an equal norm."""

    def inputs() -> Any:  # new each time: a launch knows the weights that it packed itself only
        return CONVS[problem.kind].make_inputs(problem, torch.device("cpu"), 3)

    whole, whole_norm = run_shim(problem, gfx, inputs()._replace(finish=group_norm_finalize))
    made, statistics = [], []
    for first in range(0, whole.shape[1], height):
        rows = (first, min(first + height, whole.shape[1]))
        source, above = read_rows(problem, rows)
        band = Band(above, rows[1] - rows[0])
        given = inputs()
        shortcut, next_norm = given.shortcut, given.next_norm
        cut = given._replace(
            x=given.x[:, source[0] : source[1]].contiguous(),
            shortcut=None if shortcut is None else shortcut[:, rows[0] : rows[1]].contiguous(),
            band=band,
        )
        y, found = run_shim(problem, gfx, cut)
        made.append(y)
        statistics.append(found)
    assert torch.equal(torch.cat(made, 1), whole)
    if height % STATISTICS_ROWS == 0:
        together = torch.cat(statistics, 2).flatten(1, 2)
        again = group_norm_finalize(
            together, next_norm.gamma, next_norm.beta, next_norm.groups, next_norm.eps
        )
        assert torch.equal(again, whole_norm)


@pytest.mark.parametrize("problem", CASES, ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_bands_are_the_image_to_the_bit(gfx: str, problem: ConvProblem) -> None:
    check(problem, gfx, 16)


@pytest.mark.parametrize("problem", IN_ROWS, ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_bands_by_weights_as_they_lie(gfx: str, problem: ConvProblem) -> None:
    check(problem, gfx, 10)


@pytest.mark.parametrize("height", [2, 10, 32, 64])
def test_bands_of_any_height(height: int) -> None:
    for problem in CASES:
        check(problem, "gfx1100", height)


def test_a_band_reads_and_writes_nothing_outside() -> None:
    problem = CASES[1]
    inputs = CONVS["3x3"].make_inputs(replace(problem, height=18), torch.device("cpu"), 3)
    assert inputs.shortcut is not None
    shortcut = inputs.shortcut[:, :16].contiguous()
    cut = inputs._replace(shortcut=shortcut, band=Band(1, 16))
    y, _ = run_shim(problem, "gfx1100", cut, sanitize="address,undefined")
    assert y.shape[1] == 16 and y.isfinite().all()
