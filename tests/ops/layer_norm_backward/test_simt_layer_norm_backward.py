"""kernels/layer_norm_backward.hip and norm_gradients.hip, unchanged, executed on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lib_rocm_sd.ops.layer_norm_backward import kernel
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.problem import ODD, LayerNormBackwardProblem
from tests import executed
from tests.ops.gradients import Setting, displaced, draw, same
from tests.verify import simt
from tests.verify.simt.attention import UNITS

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

OP = LAYER_NORM_BACKWARD
OURS = Setting(OP)
SMALL = LayerNormBackwardProblem((67, 328), added=True)
"""Several teams a wave, some of whose work-items have less; two parts, of several columns."""
WIDE = LayerNormBackwardProblem((3, 3136), "bfloat16", True, "bfloat16")
"""Several waves a team, of waves of 32 and of 64."""
LONG = LayerNormBackwardProblem((3, 2051), added=True)
"""A row that is read thrice, with a rest; parts of single columns."""
EACH = (SMALL, WIDE, LONG)


@pytest.mark.parametrize("problem", [*ODD, *EACH], ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_odd_shapes(gfx: str, problem: LayerNormBackwardProblem) -> None:
    assert OURS.on(gfx).faults(draw(OP, problem)) == []


@pytest.mark.parametrize("gfx", sorted({*UNITS} - {"gfx1100", "gfx942"}))
def test_the_other_units(gfx: str) -> None:
    for problem in EACH:
        assert OURS.on(gfx, 2).faults(draw(OP, problem)) == []


@pytest.mark.parametrize("channels", [9, 32, 640, 768, 1280, 2048, 6144, 6152])
def test_lengths_of_a_row(channels: int) -> None:
    problem = LayerNormBackwardProblem((3, channels), wanted=channels % 3 == 0)
    assert OURS.faults(draw(OP, problem)) == []


def test_many_parts_are_added_by_several_work_items() -> None:
    """Of nine parts some rows of a work-group have none."""
    problem = LayerNormBackwardProblem((9 * kernel.LEAST_ROWS, 24), affine="float32")
    assert kernel.parts_tiling(problem.rows, problem.channels).parts == 9
    assert OURS.faults(draw(OP, problem)) == []


@pytest.mark.parametrize("problem", EACH, ids=str)
def test_misaligned_tensors(problem: LayerNormBackwardProblem) -> None:
    """Each in turn, and all, one element after a multiple of 16 bytes: the result is the same."""
    inputs = draw(OP, problem)
    plain = OURS.run(inputs)
    for names in (("grad",), ("x", "gamma"), ("added", "sum_grad"), ()):
        assert same(OURS.run(displaced(inputs, *names)), plain)


def test_what_has_gaps_is_copied() -> None:
    inputs = draw(OP, LayerNormBackwardProblem((4, 6, 40)))
    plain = OURS.run(inputs._replace(x=inputs.x[:, ::2], grad=inputs.grad[:, 1::2]))
    x, grad = inputs.x[:, ::2].contiguous(), inputs.grad[:, 1::2].contiguous()
    assert same(plain, OURS.run(inputs._replace(x=x, grad=grad)))


@pytest.mark.parametrize("affine", ["none", "float16", "bfloat16", "float32"])
def test_kinds_of_gamma(affine: str) -> None:
    for channels in (40, 43):
        problem = LayerNormBackwardProblem((5, channels), "float16", False, affine)
        assert OURS.faults(draw(OP, problem)) == []


@pytest.mark.parametrize(
    ("dtype", "mean", "std"), [("float16", 60.0, 0.1), ("bfloat16", 1000.0, 20.0)]
)
@pytest.mark.parametrize("channels", [328, 2051])
def test_a_mean_far_from_zero(channels: int, dtype: str, mean: float, std: float) -> None:
    inputs = draw(OP, LayerNormBackwardProblem((4, channels), dtype, affine="float32"))
    values = torch.randn(inputs.x.shape, generator=torch.Generator().manual_seed(5))
    assert OURS.faults(inputs._replace(x=(values * std + mean).to(inputs.x.dtype))) == []


@pytest.mark.parametrize("problem", EACH, ids=str)
def test_nan_spoils_its_row_and_no_other(problem: LayerNormBackwardProblem) -> None:
    for name in ("x", "grad"):
        inputs = draw(OP, problem)
        getattr(inputs, name)[1, 5] = math.nan
        made, gamma, _ = OURS.run(inputs)
        assert made[1].isnan().all() and made.isnan().sum() == made.shape[1]
        assert gamma.isnan().sum() == (gamma.numel() if name == "x" else 1)


def test_the_order_of_waves_changes_nothing() -> None:
    for problem in EACH:
        outputs = [OURS.on("gfx1100", seed).run(draw(OP, problem)) for seed in range(3)]
        assert all(same(outputs[0], output) for output in outputs[1:])


@pytest.mark.parametrize("problem", EACH, ids=str)
def test_memory_and_undefined_behaviour(problem: LayerNormBackwardProblem) -> None:
    """Every buffer an allocation of exactly its size: one element too far is an error."""
    setting = Setting(OP, "gfx942", 2, "address,undefined")
    for inputs in (draw(OP, problem), displaced(draw(OP, problem))):
        assert setting.faults(inputs) == []


@pytest.mark.parametrize("problem", EACH, ids=str)
def test_no_races(problem: LayerNormBackwardProblem) -> None:
    assert Setting(OP, "gfx1100", 1, "thread").faults(draw(OP, problem)) == []


BARRIERS = simt.places("barrier();", "layer_norm_backward.hip", "common/pair_sums.h")


@pytest.mark.parametrize(("name", "number"), BARRIERS)
def test_a_removed_barrier_is_a_race(name: str, number: int) -> None:
    kernels_dir = simt.planted(name, "barrier();", "(void)0;", number)
    setting = Setting(OP, "gfx1100", 1, "thread", kernels_dir)
    with pytest.raises(simt.SimtError, match="data race"):
        setting.run(draw(OP, replace(WIDE, shape=(64, 1544))))


PLANTED = {
    "mean of g": ("scale * (g - level - difference(i, j)", "scale * (g - difference(i, j)"),
    "mean of g normed": ("* scale * slope);", "* slope);"),
    "idle lanes": ("vector(i) < vectors ? products : 0.0f", "products"),
    "gamma": (
        "const float g = grads[i].at(j) * gamma[i].at(j);",
        "const float g = grads[i].at(j);",
    ),
    "the sum's gradient": ("return ADDED ? made + more.at(j) : made;", "return made;"),
    "a rounded sum": ("rounded_sum(values[i].at(k), added[i].at(k))", "values[i].at(k)"),
    "rows of a part": ("exists ? grad : 0.0f", "grad"),
    "moments": ("write_moments(p, place, first + mean", "write_moments(p, place, mean"),
    "the next part": ("(i64)part * p.channels + channel) * 2", "(i64)channel) * 2"),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_seen(mistake: str) -> None:
    kernels_dir = simt.planted("layer_norm_backward.hip", *PLANTED[mistake])
    inputs = draw(OP, SMALL)
    assert OURS.faults(inputs) == []
    assert Setting(OP, kernels_dir=kernels_dir).faults(inputs) != []
