"""Mistakes planted in copies of the convolutions' source: each must be caught."""

from __future__ import annotations

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from tests import executed
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

HEADER = "common/conv.h"
BARRIERS = len(simt.places("barrier();", HEADER))
IN_ROWS = 3
"""The first so many are reached with weights as they lie only: test_simt_conv_rows.py has them."""
IN_PLACE = ConvProblem("3x3", 1, 9, 17, 96, 128, "float16", True, "conv", 128, True, True)
PLANTED = (
    ("y >= 0 && y < (int)p.h *", "y < (int)p.h *"),
    ("x >= 0 && x < (int)p.w *", "x >= 0 && x <= (int)p.w *"),
    ("if (!real && item < kItems) {", "if (!real && item < 0) {"),
    ("first_x + n < (int)p.out_w &&", "first_x + n <= (int)p.out_w &&"),
    ("if (pixel_y(j) >= (int)p.out_h) continue;", ""),
    ("return pixel_y(j) < (int)p.out_h &&", "return"),
    ("step * step * (all * share)", "step * step * share"),
)


def verdict(problem: ConvProblem, old: str, new: str, place: int, sanitize: str | None) -> str:
    """ "right", "wrong", or what the program said, with `old` replaced in the header."""
    arch = by_gfx("gfx1200")
    assert arch is not None
    op, variant = CONVS[problem.kind], MatrixConv(problem.kind)
    inputs = op.make_inputs(problem, torch.device("cpu"), 5)
    exact, exact_norm = op.reference(op.make_inputs(problem, torch.device("cpu"), 5))
    launch = ShimLaunch(arch, 1, sanitize, simt.planted(HEADER, old, new, place))
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    weights = inputs.weights
    try:
        with launch.knows(*tensors, weights.weight, weights.bias):
            y, norm = compute(
                CONVS[problem.kind], variant, launch, variant.configs(arch, problem)[0], inputs
            )
    except simt.SimtError as error:
        return str(error)
    near = torch.allclose(y.double(), exact, atol=2e-2) and torch.allclose(
        norm.double(), exact_norm, rtol=2e-3, atol=2e-3
    )
    return "right" if near else "wrong"


@pytest.mark.parametrize("barrier", range(IN_ROWS, BARRIERS))
def test_a_removed_barrier_is_a_race(barrier: int) -> None:
    reason = simt.missing("thread")
    if reason:
        pytest.skip(reason)
    assert BARRIERS == IN_ROWS + 3
    found = verdict(IN_PLACE, "barrier();", "(void)0;", barrier, "thread")
    assert "data race" in found


def test_another_images_embedding_is_noticed() -> None:
    old = "(i64)image * p.bias_stride"
    problem = ConvProblem("3x3", 2, 5, 9, 32, 32, statistics=True, embedding=True)
    assert verdict(problem, old, old, 0, None) == "right"
    for new in ("0", "(i64)(image ^ 1) * p.bias_stride"):
        assert verdict(problem, old, new, 0, None) != "right"


@pytest.mark.parametrize(("old", "new"), PLANTED, ids=[old for old, _ in PLANTED])
def test_a_wrong_edge_or_merge_is_noticed(old: str, new: str) -> None:
    problem = ConvProblem("3x3", 1, 9, 17, 32, 32, "float16", True, statistics=True)
    assert verdict(problem, old, old, 0, None) == "right"
    found = verdict(problem, old, new, 0, None)
    if found == "right" and not simt.missing("address,undefined"):
        found = verdict(problem, old, new, 0, "address,undefined")
    assert found != "right"
