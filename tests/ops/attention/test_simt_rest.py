"""The last queries of a head, shared by the waves of a group (kernels/nvidia/attention_rest.h)."""

from __future__ import annotations

import math

import pytest
import torch

from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests import executed
from tests.verify import simt
from tests.verify.simt.attention import Setting, attend, compare, draw

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

REST = "nvidia/attention_rest.h"
QUERIES = (1, 16, 17, 32, 33, 129, 154, 160)
"""One tile of sixteen and two, just not a rest, and behind whole groups."""
KEYS = (1, 15, 16, 17, 32, 33, 48, 49, 64, 65, 97, 128, 129, 300)
"""Parts that lie past the end, and rings that go round."""


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs_of(seq_q: int, seq_k: int, dtype: str = "float16") -> Inputs:
    q, k, v = draw(AttentionProblem(1, 2, seq_q, seq_k, 128, dtype), seed=seq_q + seq_k)
    return q, k, v


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seq_k", KEYS)
def test_lengths(dtype: str, seq_k: int) -> None:
    for seed, seq_q in enumerate(QUERIES):
        assert compare(Setting("sm_90", 1 + seed % 2), *inputs_of(seq_q, seq_k, dtype)) == []


@pytest.mark.parametrize("scale", [None, -0.2, 0.0, 3.0])
@pytest.mark.parametrize("first", [0, 20, 70, 290])
def test_a_base_that_moves(first: int, scale: float | None) -> None:
    """Scores of one part of the keys, or of all from one on, are far above those before."""
    for keys in (slice(first, None), slice(first, first + 9)):
        q, k, v = inputs_of(150, 300)
        k[:, keys] *= 40
        assert compare(Setting("sm_90"), q, k, v, None, scale) == []


@pytest.mark.parametrize("factor", [60000.0, 3000.0])
def test_scores_beyond_what_one_product_of_base_and_scale_may_round(factor: float) -> None:
    q, k, v = inputs_of(26, 300)
    k[:, 40] = k[:, 40].sign() * factor
    assert compare(Setting("sm_90"), q, k, v) == []


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("last", [64, 200])
def test_special_scores_of_one_part_of_the_keys(first: int, last: int, score: float) -> None:
    """Of all its keys, or of those of the first tiles. Of one head; the others stay as they are."""
    q, k, v = draw(AttentionProblem(2, 2, 26, 200, 128, "bfloat16"))
    q[0, :, 1] = 0.0
    q[0, :, 1, 0] = 1.0
    keys = torch.arange(200)
    k[0, (keys % 32 // 16 == first // 16) & (keys < last), 1, 0] = score
    assert compare(Setting("sm_90"), q, k, v) == []


def test_infinity_and_nan_stay_where_they_are() -> None:
    """A query with NaN, a column of V with infinity, keys that score -inf for one query."""
    q, k, v = inputs_of(26, 100)
    q[0, 3, 0, 5] = math.nan
    q[0, 4, 1, :] = 0.0
    q[0, 4, 1, 0] = math.inf
    k[0, :, 1, 0] = -1.0
    v[0, 77, 0, 9] = math.inf
    found = attend(Setting("sm_90"), q, k, v).view(1, 26, 2, 128)
    assert found[0, 3, 0].isnan().all()
    assert found[0, 4, 1].isnan().all()
    beside = found[0, [0, 1, 2, *range(4, 26)], 0]
    assert beside[:, 9].isinf().all()
    beside[:, 9] = 0.0
    assert beside.isfinite().all()
    assert found[0, [*range(4), *range(5, 26)], 1].isfinite().all()


def test_rows_that_cannot_be_copied() -> None:
    """Misaligned rows take another way, also where few queries are left."""
    problem = AttentionProblem(1, 2, 154, 131, 128, "float16")
    q, k, v = draw(problem, ["misaligned"] * 3)
    assert compare(Setting("sm_90"), q, k, v) == []


MISTAKES = {
    "what other parts summed is left out": ("which < kTilesK; ++which", "which < 1; ++which"),
    "sums are added as if bases were one": (
        "theirs[c] = exp2_fast(",
        "theirs[c] = 1 + 0 * exp2_fast(",
    ),
    "a part's own sums are added as if bases were one": ("scale_sums(0, mine);", ""),
    "sums before a base moved are not scaled": ("scale_sums(0, shrink);", ""),
    "a base that is too low is not noticed": ("large_base | tally", "large_base & tally"),
    "a base that is too large is not noticed": ("large_base |= !(", "large_base &= !("),
    "keys past the end have weights": ("Unit::row_step(e) >= past", "Unit::row_step(e) > past"),
    "a wave takes the other sixteen of values": (
        "load<16>(k_at + part_bytes,",
        "load<16>(k_at + 16 * kLdV * 2 - part_bytes,",
    ),
    "both tiles of queries are written to one place": ("put_tiles<1>(tile)", "put_tiles<1>(0)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_wrong_results(mistake: str) -> None:
    """In a few keys, in many whose scores grow, or in scores that are equal and very large."""
    few, many, large = inputs_of(26, 21), inputs_of(26, 301), inputs_of(26, 300)
    many[1][:, 70:] *= 8
    large[1][:, 40::50] = large[1][:, 40:41].sign() * 60000
    drawn = (few, many, large)
    assert not any(compare(Setting("sm_90"), *inputs) for inputs in drawn)
    planted = Setting("sm_90", kernels_dir=simt.planted(REST, *MISTAKES[mistake]))
    assert any(compare(planted, *inputs) for inputs in drawn)
