"""kernels/group_norm_backward.hip, unchanged, executed on the CPU with waves of 32 and 64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import ODD, GroupNormBackwardProblem
from tests import executed
from tests.ops.gradients import Setting, displaced, draw, same
from tests.verify import simt
from tests.verify.simt.attention import UNITS

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

OP = GROUP_NORM_BACKWARD
OURS = Setting(OP)
LAST = GroupNormBackwardProblem(2, 40, 19, 37, "float16", True, True, 8, "float16")
FIRST = GroupNormBackwardProblem(1, 6, 127, 131, "bfloat16", False, True, 2, "float32")
"""Several parts, the last one shorter; channels that begin between two multiples of 16 bytes."""
EIGHTS = GroupNormBackwardProblem(1, 6, 8, 1037, "float16", False, True, 3, "none")
"""Channels that begin at such multiples; parts, of which the last has a rest of vectors."""
SINGLE = GroupNormBackwardProblem(2, 37, 9, 5, "float16", True, True, 37, "bfloat16")
"""Channels one by one."""
EACH = (LAST, FIRST, EIGHTS, SINGLE)


@pytest.mark.parametrize("problem", [*ODD, *EACH], ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_odd_shapes(gfx: str, problem: GroupNormBackwardProblem) -> None:
    assert OURS.on(gfx).faults(draw(OP, problem)) == []


@pytest.mark.parametrize("gfx", sorted({*UNITS} - {"gfx1100", "gfx942"}))
def test_the_other_units(gfx: str) -> None:
    for problem in (LAST, EIGHTS):
        assert OURS.on(gfx, 2).faults(draw(OP, problem)) == []


@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (24, 8), (96, 3), (1032, 4), (1280, 1)])
@pytest.mark.parametrize("last", [True, False])
def test_groups(last: bool, channels: int, groups: int) -> None:
    """Narrower than a vector and not; wider than what is added up at a time, and a rest."""
    sizes = (2, channels, 3, 7, "float16", last, True, groups, "float16")
    assert OURS.faults(draw(OP, GroupNormBackwardProblem(*sizes))) == []


@pytest.mark.parametrize("pixels", [1, 7, 8, 33, 257])
@pytest.mark.parametrize("last", [True, False])
def test_pixels(last: bool, pixels: int) -> None:
    problem = GroupNormBackwardProblem(1, 40, 1, pixels, "float16", last, False, 4, "float32")
    assert OURS.faults(draw(OP, replace(problem, wanted=pixels % 2 == 0))) == []


def test_gamma_or_beta_alone_or_of_another_dtype() -> None:
    inputs = draw(OP, replace(LAST, height=3))
    for changed in (
        inputs._replace(gamma=None),
        inputs._replace(beta=None),
        inputs._replace(beta=inputs.beta.float()),
        inputs._replace(gamma=inputs.gamma.bfloat16().repeat_interleave(2)[::2]),
    ):
        assert OURS.faults(changed) == []


@pytest.mark.parametrize("problem", EACH, ids=str)
def test_misaligned_images(problem: GroupNormBackwardProblem) -> None:
    inputs = draw(OP, problem)
    for names in (("grad",), ("x",), ("grad", "x")):
        assert OURS.faults(displaced(inputs, *names)) == []


def test_a_gradient_in_another_layout_or_of_one_number_is_copied() -> None:
    inputs = draw(OP, LAST)
    assert same(OURS.run(inputs), OURS.run(inputs._replace(grad=inputs.grad.contiguous())))
    assert OURS.faults(inputs._replace(grad=inputs.grad[:1, :1, :1, :1].expand(LAST.shape))) == []


@pytest.mark.parametrize("problem", [replace(LAST, silu=True), replace(FIRST, silu=True)], ids=str)
def test_large_values_pass_silu(problem: GroupNormBackwardProblem) -> None:
    """Of which e^-z is no float32."""
    inputs = draw(OP, problem)
    assert OURS.faults(inputs._replace(gamma=inputs.gamma * 100)) == []


@pytest.mark.parametrize(
    ("dtype", "mean", "std"), [("float16", 60.0, 0.1), ("bfloat16", 1000.0, 20.0)]
)
def test_a_mean_far_from_zero(dtype: str, mean: float, std: float) -> None:
    inputs = draw(OP, replace(LAST, dtype=dtype, affine="float32", silu=False))
    x = inputs.x.float()
    x = (x - x.mean((2, 3), keepdim=True)) * std + mean
    assert OURS.faults(inputs._replace(x=x.to(inputs.x.dtype))) == []


@pytest.mark.parametrize("problem", [LAST, replace(FIRST, silu=False)], ids=str)
def test_nan_reaches_its_group_and_no_other(problem: GroupNormBackwardProblem) -> None:
    inputs = draw(OP, problem)
    group = problem.channels // problem.groups
    inputs.grad[0, group, 3, 7] = math.nan
    made, gamma, beta = OURS.run(inputs)
    assert made[0, group : 2 * group].isnan().all()
    assert made.isnan().sum() == group * problem.pixels
    assert gamma.isnan().sum() == beta.isnan().sum() == 1 and gamma[group].isnan()


def test_the_order_of_waves_changes_nothing() -> None:
    for problem in EACH:
        outputs = [OURS.on("gfx1100", seed).run(draw(OP, problem)) for seed in range(3)]
        assert all(same(outputs[0], output) for output in outputs[1:])


@pytest.mark.parametrize("problem", EACH, ids=str)
def test_memory_and_undefined_behaviour(problem: GroupNormBackwardProblem) -> None:
    """Every buffer an allocation of exactly its size: one element too far is an error."""
    setting = Setting(OP, "gfx942", 2, "address,undefined")
    for inputs in (draw(OP, problem), displaced(draw(OP, problem), "x", "grad")):
        assert setting.faults(inputs) == []


@pytest.mark.parametrize("problem", EACH, ids=str)
def test_no_races(problem: GroupNormBackwardProblem) -> None:
    assert Setting(OP, "gfx1100", 1, "thread").faults(draw(OP, problem)) == []


def test_a_removed_barrier_is_a_race() -> None:
    """Before what a group has in common is read; those of the sums are in pair_sums.h."""
    ((name, number),) = simt.places("barrier();", "group_norm_backward.hip")
    kernels_dir = simt.planted(name, "barrier();", "(void)0;", number)
    with pytest.raises(simt.SimtError, match="data race"):
        Setting(OP, "gfx1100", 1, "thread", kernels_dir).run(draw(OP, LAST))


PLANTED = {
    "SiLU's derivative": ("fma_f32(z, 1.0f - s, 1.0f)", "1.0f"),
    "beta in z": ("fma_f32(shift, gamma, beta)", "shift * gamma"),
    "gamma in a group's sums": (
        "gamma, sums.first[0], group.first[0]",
        "1.0f, sums.first[0], 0.0f",
    ),
    "a group's level": ("fma_f32(shift, slope, level)", "shift * slope"),
    "the next image": ("(i64)image * p.parts * p.channels", "(i64)0"),
    "pixels behind the last": ("products += exists ? g * normed : 0.0f", "products += g * normed"),
    "a channel's place": ("norms[k].read(p, place.run(p) + k", "norms[k].read(p, place.run(p)"),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_seen(mistake: str) -> None:
    kernels_dir = simt.planted("group_norm_backward.hip", *PLANTED[mistake])
    inputs = draw(OP, LAST)
    assert OURS.faults(inputs) == []
    assert Setting(OP, kernels_dir=kernels_dir).faults(inputs) != []


def test_what_is_made_is_in_the_memory_format_of_x() -> None:
    for problem in (LAST, EIGHTS):
        made, *_ = OURS.run(draw(OP, problem))
        order = torch.channels_last if problem.channels_last else torch.contiguous_format
        assert made.is_contiguous(memory_format=order)
