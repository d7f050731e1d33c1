"""kernels/attention_backward.hip, unchanged, executed as each matrix unit would; mistakes in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import kernel
from lib_rocm_sd.ops.attention_backward.inputs import AttentionBackwardInputs
from lib_rocm_sd.ops.attention_backward.problem import ODD
from tests import executed
from tests.ops.attention.judge import numbers
from tests.ops.attention_backward.judge import completed, drawn, faults, lse_faults
from tests.ops.attention_backward.under_shim import compare, forward, gradients
from tests.verify import simt
from tests.verify.simt.attention import UNITS, Setting, draw, random_mask

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

PLAIN = AttentionProblem(1, 2, 33, 77, 40)


@pytest.mark.parametrize("problem", ODD, ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_the_odd_cases(gfx: str, problem: AttentionProblem) -> None:
    assert compare(Setting(gfx, 1 + len(str(problem)) % 3), drawn(problem)) == []


@pytest.mark.parametrize("gfx", UNITS)
def test_every_config(gfx: str) -> None:
    """Several tiles of either side, and the rest of one; head_dims of which some have several."""
    arch = by_gfx(gfx)
    assert arch is not None
    for head_dim in (40, 64, 80, 128):
        for config in range(len(kernel.configs(arch, head_dim))):
            problem = AttentionProblem(1, 1, 147, 139, head_dim, "bfloat16")
            assert compare(Setting(gfx, config=config), drawn(problem)) == [], head_dim


LENGTHS = ((1, 1), (16, 16), (17, 15), (64, 1), (1, 65), (128, 64), (65, 129))


@pytest.mark.parametrize("gfx", UNITS)
def test_lengths(gfx: str) -> None:
    for seed, (seq_q, seq_k) in enumerate(LENGTHS):
        problem = replace(PLAIN, seq_q=seq_q, seq_k=seq_k, head_dim=(64, 72)[seed % 2])
        assert compare(Setting(gfx, seed), drawn(problem)) == [], (seq_q, seq_k)


@pytest.mark.parametrize("layout", ["heads first", "packed", "misaligned", "ragged rows"])
@pytest.mark.parametrize("gfx", UNITS)
def test_layouts(gfx: str, layout: str) -> None:
    problem = replace(PLAIN, batch=2, seq_q=49)
    assert compare(Setting(gfx), drawn(problem, layout)) == []


@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.05, 1.5])
def test_scale(scale: float) -> None:
    assert compare(Setting("gfx1200"), drawn(PLAIN, scale=scale)) == []


MASKS = ("bool", "float16", "bfloat16", "float32")
SHAPES = ((2, 3, 50, 77), (2, 1, 50, 77), (1, 3, 1, 77), (2, 3, 50, 1))
"""Against (batch, heads, queries, keys) = (2, 3, 50, 77): what is 1 is broadcast by stride 0."""


@pytest.mark.parametrize("dtype", MASKS)
@pytest.mark.parametrize("gfx", UNITS)
def test_masks(gfx: str, dtype: str) -> None:
    turn = UNITS.index(gfx) + MASKS.index(dtype)
    problem = AttentionProblem(2, 3, 50, 77, (40, 64, 160)[turn % 3])
    q, k, v = draw(problem)
    mask = random_mask(SHAPES[turn % len(SHAPES)], dtype)
    assert compare(Setting(gfx, turn), completed(AttentionInputs(q, k, v, mask))) == []


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx942"])
def test_a_query_without_keys_gets_zeros(gfx: str) -> None:
    """Also where a whole tile has none."""
    problem = replace(PLAIN, mask="bool")
    inputs = drawn(problem)
    assert inputs.mask is not None
    inputs.mask[0, 0, :20] = False
    inputs = completed(inputs.forward)
    of_q, _, _ = gradients(Setting(gfx), inputs)
    assert not of_q[0, :20, 0].any() and of_q[0, 20:, 0].any(-1).all()
    assert compare(Setting(gfx), inputs) == []


@pytest.mark.parametrize("gfx", UNITS)
def test_scores_far_apart_and_far_from_zero(gfx: str) -> None:
    """One key has nearly all weight of some queries; logits of a thousand."""
    q, k, v = draw(replace(PLAIN, seq_q=40, seq_k=100))
    k[:, 70] *= 40
    assert compare(Setting(gfx), completed(AttentionInputs(q, k, v))) == []


def low() -> AttentionBackwardInputs:
    """All logits are far below zero, so that a zero weighs more than halves can hold."""
    q, k, v = draw(replace(PLAIN, seq_q=33, seq_k=45))
    return completed(AttentionInputs(q.abs(), -k.abs(), v, None, 1.0))


@pytest.mark.parametrize("gfx", UNITS)
def test_what_lies_past_the_end_weighs_nothing_where_all_scores_are_low(gfx: str) -> None:
    assert compare(Setting(gfx), low()) == []


def test_one_gradient_for_all_rows() -> None:
    """As `sum` gives it: strides of 0."""
    inputs = drawn(PLAIN)
    ones = torch.ones((), dtype=torch.float16).expand(inputs.grad.shape)
    assert compare(Setting("gfx1100"), inputs._replace(grad=ones)) == []


def test_one_tensor_for_q_k_and_v() -> None:
    qkv = torch.randn((2, 33, 3, 2, 64), generator=torch.Generator().manual_seed(1)).half()
    q, k, v = qkv.unbind(2)
    assert compare(Setting("gfx1100"), completed(AttentionInputs(q, k, v))) == []


@pytest.mark.parametrize("gfx", UNITS)
def test_the_bits_do_not_depend_on_the_order_of_waves(gfx: str) -> None:
    inputs = drawn(AttentionProblem(1, 2, 147, 139, 64))
    first = gradients(Setting(gfx, 1), inputs)
    again = gradients(Setting(gfx, 2), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# -- the forward pass that leaves what this one needs


@pytest.mark.parametrize("problem", [*ODD, PLAIN], ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_the_log_sum_exp_that_is_left(gfx: str, problem: AttentionProblem) -> None:
    given = drawn(problem).forward
    output, lse = forward(Setting(gfx, 1 + len(str(problem)) % 3), given)
    assert numbers(output, *given).faults(True) == []
    assert lse_faults(lse, given) == []


@pytest.mark.parametrize("gfx", UNITS)
def test_the_log_sum_exp_by_every_config(gfx: str) -> None:
    """Among them tiles for few keys, waves that share queries, and a rest that all waves share."""
    arch = by_gfx(gfx)
    assert arch is not None
    for head_dim in (40, 64, 128, 160, 256):
        for config in range(len(attention_kernel.ordered(arch, "float16", head_dim))):
            given = drawn(AttentionProblem(1, 2, 147, 139, head_dim)).forward
            _, lse = forward(Setting(gfx, config=config), given)
            assert lse_faults(lse, given) == [], (head_dim, config)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 40.0])
def test_the_log_sum_exp_of_any_scale(scale: float) -> None:
    given = drawn(PLAIN, scale=scale).forward
    assert lse_faults(forward(Setting("gfx1200"), given)[1], given) == []


@pytest.mark.parametrize("bias", [-1e9, torch.finfo(torch.float32).min, -1e7])
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_a_query_whose_keys_all_have_a_large_bias_gets_zeros(gfx: str, bias: float) -> None:
    """The forward pass weighs its keys alike; beside the bias float32 has no place for the sum."""
    q, k, v = draw(PLAIN)
    mask = torch.zeros((1, 1, PLAIN.seq_q, PLAIN.seq_k))
    mask[..., 7, :] = bias
    given = completed(AttentionInputs(q, k, v, mask))
    lse = forward(Setting(gfx), given.forward)[1]
    assert lse[:, :, 7].isposinf().all() and torch.isinf(given.lse).equal(lse.isinf())
    of_q, of_k, of_v = gradients(Setting(gfx), given._replace(lse=lse))
    assert not of_q[:, 7].any()
    grad = given.grad.clone()
    grad[:, 7] = 0
    others = given._replace(grad=grad)
    assert [fault for fault in faults((of_q, of_k, of_v), others) if fault[0] != "q"] == []


def test_a_log_sum_exp_without_the_sum_is_found() -> None:
    kernels_dir = simt.planted("attention.hip", " + log2_fast(l[t][c])", "")
    given = drawn(PLAIN).forward
    assert lse_faults(forward(Setting("gfx1100", kernels_dir=kernels_dir), given)[1], given) != []


# -- mistakes

HIP, HEADER = "attention_backward.hip", "common/attention_backward.h"
BARRIERS = simt.places("barrier();", HIP, HEADER)
WAYS: Sequence[tuple[str, int]] = (("gfx1100", 64), ("sm_90", 64), ("gfx942", 40))
MISTAKES = {
    "no delta of a query": (HIP, "dp[i][t].v[e] - delta[t][Unit::column_of(e)]", "dp[i][t].v[e]"),
    "no delta of other rows": (HEADER, "exists ? -stat_ahead[j] : 0.0f", "0.0f"),
    "delta of half the columns": (HIP, "c < kChunks; ++c", "c < kChunks / 2; ++c"),
    "a query's log-sum-exp": (HIP, "= of_queries(p.lse)", "= 0.9f * of_queries(p.lse)"),
    "that of other rows": (
        HEADER,
        "? stat_ahead[j] : infinity()",
        "? 0.9f * stat_ahead[j] : infinity()",
    ),
    "no scale": (HIP, "grad_1, p.scale);", "grad_1, 1.0f);"),
    "dp for ds": (HIP, "dp[i][t].v[e] = weight * (", "dp[i][t].v[e] = ("),
}


def verdict(setting: Setting, head_dim: int) -> str:
    """ "right", "wrong", or what the program said."""
    try:
        wrong = compare(setting, drawn(AttentionProblem(1, 1, 147, 139, head_dim)))
    except simt.SimtError as error:
        return str(error)
    return "wrong" if wrong else "right"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    kernels_dir = simt.planted(*MISTAKES[mistake])
    assert verdict(Setting("gfx1100", kernels_dir=kernels_dir), 64) == "wrong"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("name", "number"), BARRIERS)
def test_a_removed_barrier_gives_wrong_results(name: str, number: int, seed: int) -> None:
    """Seed 1 drives waves apart, seed 2 interleaves them."""
    kernels_dir = simt.planted(name, "barrier();", "(void)0;", number)
    said = [verdict(Setting(gfx, seed, None, kernels_dir), dim) for gfx, dim in WAYS]
    assert any(each != "right" for each in said) and not any("error:" in each for each in said)


PAST_THE_END = {
    "queries": (HEADER, "exists ? stat_ahead[j] : infinity()", "stat_ahead[j]"),
    "keys": (HIP, "m >= other_length()", "false"),
}


@pytest.mark.parametrize("which", PAST_THE_END)
def test_what_lies_past_the_end_and_weighs_something_is_found(which: str) -> None:
    kernels_dir = simt.planted(*PAST_THE_END[which])
    assert compare(Setting("gfx1100", kernels_dir=kernels_dir), low()) != []
