"""Convolutions whose channels are split over work-groups, executed on the CPU as each matrix unit
would.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import by_gfx, table
from lib_rocm_sd.ops.conv import kernel
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.kernel import ConvConfig
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import DEEP, Band, ConvProblem
from tests import executed
from tests.ops.conv.test_simt_conv import check, run_shim
from tests.ops.conv.test_simt_conv_places import spread
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.simt.attention import UNITS
from tests.verify.simt.launch import ShimLaunch

CPU = torch.device("cpu")


def shim(test: Any) -> Any:
    """Skipped without the shim, left out while nothing changes."""
    skip = pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
    return skip(executed.known(by="shim")(test))


PLAIN = ConvProblem("3x3", 2, 3, 18, DEEP, 40, norm=True, statistics=True, embedding=True)
CASES = (
    PLAIN,
    ConvProblem("3x3", 2, 8, 8, DEEP, 64, "bfloat16", True, "identity", 64, True),
    ConvProblem("3x3", 1, 5, 9, DEEP, 80, "float16", True, "conv", 176),
    ConvProblem("3x3 stride 2 padded", 2, 9, 20, DEEP, 32, statistics=True),
    ConvProblem("upsample", 1, 3, 9, DEEP, 32, statistics=True),
)


def plans(problem: ConvProblem, gfx: str) -> list[ConvConfig]:
    """The configs that are split."""
    arch = by_gfx(gfx)
    assert arch is not None
    return [c for c in MatrixConv(problem.kind).configs(arch, problem) if c.splits > 1]


@shim
@pytest.mark.parametrize("problem", CASES, ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_a_split_convolution_is_right_on_every_unit(gfx: str, problem: ConvProblem) -> None:
    assert plans(problem, gfx)
    check(problem, gfx)


@shim
def test_other_configs_are_right() -> None:
    problem = replace(CASES[2], statistics=True)
    found = plans(problem, "gfx1200")
    assert len({config.splits for config in found}) > 1
    for config in range(len(found)):
        check(problem, "gfx1200", config=config)


@shim
@pytest.mark.parametrize("problem", [PLAIN, CASES[2]], ids=str)
def test_no_access_outside_of_any_buffer(problem: ConvProblem) -> None:
    check(problem, "gfx1100", sanitize="address,undefined")


@shim
def test_no_races() -> None:
    check(CASES[1], "gfx1200", sanitize="thread")


@shim
@pytest.mark.parametrize("gfx", UNITS)
def test_over_the_shortcut_and_among_channels_of_a_wider_image(gfx: str) -> None:
    """To the bit as elsewhere; beside it nothing is written."""
    problem = CASES[1]
    inputs = CONVS[problem.kind].make_inputs(problem, CPU, 5)
    expected, norm = run_shim(problem, gfx, inputs)
    inputs = CONVS[problem.kind].make_inputs(problem, CPU, 5)  # whose weights are packed anew
    assert inputs.shortcut is not None
    wide = torch.full((*inputs.shortcut.shape[:3], 96), 7.0, dtype=inputs.x.dtype)
    place = wide[..., 16:80]
    place.copy_(inputs.shortcut)
    given = inputs._replace(shortcut=place, out=place, x=spread(inputs.x, DEEP + 8))
    y, again = run_shim(problem, gfx, given, sanitize="address,undefined")
    assert y.data_ptr() == place.data_ptr() and torch.equal(y, expected)
    assert torch.equal(norm, again)
    assert (wide[..., :16] == 7.0).all() and (wide[..., 80:] == 7.0).all()


@shim
def test_bands_by_one_config_are_the_image_to_the_bit() -> None:
    problem = replace(PLAIN, batch=1, height=35, embedding=False)
    inputs = CONVS["3x3"].make_inputs(problem, CPU, 3)
    config = replace(plans(PLAIN, "gfx1100")[0], splits=3)

    def made(given: ConvInputs) -> Any:
        arch = by_gfx("gfx1100")
        assert arch is not None
        launch, weights = ShimLaunch(arch, 1), given.weights
        tensors = [item for item in given if isinstance(item, torch.Tensor)]
        with launch.knows(*tensors, weights.weight, weights.bias):
            return compute(CONVS["3x3"], MatrixConv("3x3"), launch, config, given)

    kept: list[torch.Tensor] = []

    def finish(statistics: torch.Tensor, *_: Any) -> torch.Tensor:
        kept.append(statistics)
        return statistics

    whole, _ = made(inputs._replace(finish=finish))
    parts = []
    for first, last in ((0, 16), (16, 32), (32, 35)):
        above = 1 if first else 0
        again = CONVS["3x3"].make_inputs(problem, CPU, 3)
        x = again.x[:, first - above : last + 1].contiguous()
        y, statistics = made(again._replace(x=x, band=Band(above, last - first)))
        assert torch.equal(y, whole[:, first:last])
        parts.append(statistics)
    assert torch.equal(torch.cat(parts, 2).flatten(1, 2), kept[0])


@shim
@pytest.mark.parametrize("factor", [1.0, 4e4])
def test_too_large_a_value_sets_the_overflow_flag(factor: float) -> None:
    problem = ConvProblem("3x3", 1, 4, 4, DEEP, 16)
    inputs = CONVS["3x3"].make_inputs(problem, CPU, 1)
    overflow = torch.zeros(1, dtype=torch.int32)
    y, _ = run_shim(problem, "gfx1100", inputs._replace(x=inputs.x * factor, overflow=overflow))
    assert overflow.item() == (factor > 1) == (not y.isfinite().all())


CONV, SUM = "common/conv.h", "conv_sum.hip"
PLANTED = (
    (SUM, "split < p.splits", "split + 1 < p.splits"),
    (SUM, "pixel < p.pixels &&", "pixel <= p.pixels &&"),
    (SUM, "channel < p.out_channels)", "channel <= p.out_channels)"),
    (SUM, "(i64)image * p.bias_stride", "0"),
    (SUM, "i < count ? (value[i]", "true ? (value[i]"),
    (SUM, "p.shortcut + at *", "p.shortcut + pixel *"),
    (CONV, "(split + 1) * all / (int)p.splits", "(split + 1) * (all / (int)p.splits)"),
    (CONV, "? split * all / (int)p.splits", "? 0"),
    (CONV, "tile[i] += first_chunk *", "tile[i] += 0 *"),
    (CONV, "fetch(first_chunk * CHUNK_C * 2)", "fetch(0)"),
    (CONV, "acc[i][j].v[e] = SPLIT_K ? 0.0f :", "acc[i][j].v[e] = "),
    (CONV, "* (int)p.splits + split)", "* (int)p.splits)"),
)


@shim
@pytest.mark.parametrize(("name", "old", "new"), PLANTED, ids=[old for _, old, _ in PLANTED])
def test_a_planted_mistake_is_noticed(name: str, old: str, new: str) -> None:
    """Nine splits of twenty chunks: not all are alike."""
    problem = ConvProblem(
        *("3x3", 2, 3, 5, DEEP, 32, "float16", True, "identity", 32, True), embedding=True
    )
    problem = replace(problem, out_channels=24) if "out_channels" in old else problem
    if problem.out_channels % 16:
        problem = replace(problem, shortcut="none", shortcut_channels=0)
    config = replace(plans(problem, "gfx1200")[0], splits=9)
    assert verdict(problem, config, name, old, old) == "right"
    assert verdict(problem, config, name, old, new) != "right"


def verdict(problem: ConvProblem, config: ConvConfig, name: str, old: str, new: str) -> str:
    """ "right", "wrong", or what the program said, with `old` replaced."""
    arch = by_gfx("gfx1200")
    assert arch is not None
    op = CONVS[problem.kind]
    inputs = op.make_inputs(problem, CPU, 5)
    exact, exact_norm = op.reference(inputs)
    sanitize = None if simt.missing("address,undefined") else "address,undefined"
    launch = ShimLaunch(arch, 1, sanitize, simt.planted(name, old, new))
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    weights = inputs.weights
    try:
        with launch.knows(*tensors, weights.weight, weights.bias):
            y, norm = compute(op, MatrixConv(problem.kind), launch, config, inputs)
    except simt.SimtError as error:
        return str(error)
    near = torch.allclose(y.double(), exact, atol=2e-2) and torch.allclose(
        norm.double(), exact_norm, rtol=2e-3, atol=2e-3
    )
    return "right" if near else "wrong"


# -- when channels are split


@pytest.mark.parametrize("gfx", [gfx for gfx, arch in table().items()])
def test_few_work_groups_are_split_and_many_are_not(gfx: str) -> None:
    arch = table()[gfx]
    variant = MatrixConv("3x3")
    for side, channels in ((8, 1280), (8, 2560), (16, 1280), (16, 1920)):
        problem = ConvProblem("3x3", 2, side, side, channels, 1280, norm=True, statistics=True)
        found = variant.configs(arch, problem)
        assert len(set(found)) == len(found)
        best = found[0]
        tiles = kernel.tiling("3x3", side, side, 1280, best)
        groups = 2 * tiles.parts * tiles.blocks_co
        assert groups * best.splits <= max(kernel.wanted_groups(arch), groups)
        assert best.splits > 1 or arch.integrated
        assert variant.specs(arch, problem, best)[0] in kernel.shipped_specs(arch)
        largest = max(config.splits for config in found)
        assert largest <= kernel.MOST_SPLITS and largest * kernel.LEAST_CHANNELS <= channels
        needed = 4 * best.splits * 2 * side * side * 1280
        assert best.splits == 1 or variant.workspace(problem) >= needed
    large = ConvProblem("3x3", 2, 128, 128, 1280, 1280)
    vae = ConvProblem("3x3", 1, 16, 16, 512, 512, norm=True, statistics=True)
    for problem in (large, vae):
        assert all(config.splits == 1 for config in variant.configs(arch, problem))
        assert variant.workspace(problem) == 0


def test_what_is_measured_for_an_image_is_split_as_it_is() -> None:
    """At the next power of two; what no UNet has is measured as before."""
    op = CONVS["3x3"]
    deep = ConvProblem("3x3", 3, 12, 9, 1280, 1280, norm=True)
    assert op.measured_as(deep) == replace(deep, batch=4, height=16, width=16)
    assert op.measured_as(replace(deep, height=8, width=8)).height == 8
    assert op.measured_as(replace(deep, in_channels=512)).height == 256
