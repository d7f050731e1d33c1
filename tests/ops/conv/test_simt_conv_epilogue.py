"""Activation, scale and second shortcut of a convolution: the source on the CPU, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import by_gfx, table
from lib_rocm_sd.functional import conv
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem, Epilogue
from lib_rocm_sd.ops.conv.torch import LibraryConv, PlanarConv, TorchConv
from lib_rocm_sd.ops.conv.weights import ConvWeights
from tests.ops.conv.test_simt_conv import check, largest_error, run_shim
from tests.ops.conv.test_simt_conv_places import shim, spread
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.simt.attention import UNITS
from tests.verify.simt.launch import ShimLaunch

CPU = torch.device("cpu")
PLAIN = ConvProblem("3x3", 2, 5, 19, 16, 24, epilogue="leaky relu")
RESIDUAL = replace(PLAIN, out_channels=64, shortcut="identity", shortcut_channels=64)
CASES = (
    PLAIN,
    replace(PLAIN, epilogue="prelu", out_channels=72, dtype="bfloat16"),
    replace(PLAIN, epilogue="silu", kind="upsample", height=3, width=7),
    replace(PLAIN, epilogue="none", out_channels=3, height=1, width=1),
    replace(PLAIN, epilogue="prelu", out_channels=12, in_channels=48),
    replace(PLAIN, kind="3x3 stride 2 padded", epilogue="silu", dtype="bfloat16"),
    replace(RESIDUAL, epilogue="none"),
    replace(RESIDUAL, epilogue="silu", dtype="bfloat16", height=3, width=7, batch=1),
    replace(RESIDUAL, epilogue="gate", out_channels=48, shortcut_channels=48, height=1),
    replace(RESIDUAL, norm=True, embedding=True, statistics=True, in_place=True),
)


@shim
@pytest.mark.parametrize("problem", CASES, ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_an_epilogue_is_right_on_every_unit(gfx: str, problem: ConvProblem) -> None:
    check(problem, gfx)


@shim
@pytest.mark.parametrize("channels", [32, 64])
@pytest.mark.parametrize("gfx", UNITS)
def test_other_configs_are_right(gfx: str, channels: int) -> None:
    problem = replace(RESIDUAL, out_channels=channels, shortcut_channels=channels, height=9)
    arch = by_gfx(gfx)
    assert arch is not None
    found = MatrixConv("3x3").configs(arch, problem)
    assert found[0].block_co == channels
    for config in range(1, len(found)):
        check(problem, gfx, config=config)


def inputs_of(problem: ConvProblem, **changed: Any) -> ConvInputs:
    """New weights each time: a launch knows those only that it packed itself."""
    return CONVS[problem.kind].make_inputs(problem, CPU, 5)._replace(**changed)


@shim
@pytest.mark.parametrize("problem", [RESIDUAL, replace(RESIDUAL, in_place=True)], ids=str)
def test_what_is_not_asked_changes_no_bit(problem: ConvProblem) -> None:
    """An epilogue that does nothing; a second shortcut alone is one pass more."""
    plain, _ = run_shim(
        replace(problem, epilogue=None),
        "gfx1100",
        inputs_of(problem)._replace(epilogue=None, second=None),
    )
    y, _ = run_shim(problem, "gfx1100", inputs_of(problem, epilogue=Epilogue(), second=None))
    assert torch.equal(y, plain)


@shim
def test_a_dense_block_lies_in_one_image() -> None:
    """Each convolution reads the first channels of an image and writes those behind them."""
    growth, channels, grown = 16, 32, 80
    image = torch.full((1, 5, 19, grown), math.nan, dtype=torch.float16)
    generator = torch.Generator().manual_seed(3)
    image[..., :channels] = torch.randn((1, 5, 19, channels), generator=generator)
    exact = image[..., :channels].double()
    for taken in range(channels, grown, growth):
        weight = torch.randn((growth, taken, 3, 3), generator=generator) * (9 * taken) ** -0.5
        given = ConvInputs(
            image[..., :taken],
            ConvWeights(weight.half()),
            out=image[..., taken : taken + growth],
            epilogue=Epilogue("leaky relu", 0.2),
        )
        before = image[..., :taken].clone()
        run_shim(CONVS["3x3"].problem_of(given), "gfx1100", given, sanitize="address,undefined")
        assert torch.equal(image[..., :taken], before)
        planes = exact.permute(0, 3, 1, 2)
        y = torch.nn.functional.conv2d(planes, weight.half().double(), padding=1)
        y = torch.nn.functional.leaky_relu(y, 0.2).permute(0, 2, 3, 1)
        exact = torch.cat([exact, y], 3)
    assert largest_error(image, exact) <= 3e-3


@shim
@pytest.mark.parametrize("gfx", UNITS)
def test_shortcuts_lie_in_wider_images_and_the_second_is_written_over(gfx: str) -> None:
    exact, _ = CONVS["3x3"].reference(inputs_of(RESIDUAL))
    given = inputs_of(RESIDUAL)
    assert given.shortcut is not None and given.second is not None
    second = spread(given.second, 96)
    given = given._replace(shortcut=spread(given.shortcut, 72), second=second, out=second)
    y, _ = run_shim(RESIDUAL, gfx, given)
    assert y is second and largest_error(second, exact) <= 4e-3


@shim
@pytest.mark.parametrize("kind", ["3x3", "upsample"])
@pytest.mark.parametrize("gfx", UNITS)
def test_bands_of_several_images_are_the_images_to_the_bit(gfx: str, kind: str) -> None:
    step = 2 if kind == "upsample" else 1
    problem = replace(RESIDUAL, height=13)
    if kind == "upsample":
        problem = replace(PLAIN, kind=kind, out_channels=64, height=13)
    whole, _ = run_shim(problem, gfx, inputs_of(problem))
    given, made = inputs_of(problem), []
    for first in range(0, 13, 5):
        rows = slice(first, min(first + 5, 13))
        above = min(first, 1)
        cut = inputs_of(problem)._replace(
            x=given.x[:, first - above : rows.stop + 1].contiguous(),
            band=Band(above, step * (rows.stop - first)),
        )
        if problem.shortcut != "none":
            assert given.shortcut is not None and given.second is not None
            both = given.shortcut[:, rows].contiguous(), given.second[:, rows].contiguous()
            cut = cut._replace(shortcut=both[0], second=both[1])
        made.append(run_shim(problem, gfx, cut)[0])
    assert torch.equal(torch.cat(made, 1), whole)


@shim
@pytest.mark.parametrize("activation", ["leaky relu", "prelu", "silu"])
def test_no_number_stays_none(activation: str) -> None:
    problem = replace(PLAIN, epilogue=activation, batch=1, out_channels=16)
    given = inputs_of(problem)
    given.x[0, 2, 9, 3] = math.nan
    overflow = torch.zeros(1, dtype=torch.int32)
    y, _ = run_shim(problem, "gfx1100", given._replace(overflow=overflow))
    touched = torch.zeros(5, 19, dtype=torch.bool)
    touched[1:4, 8:11] = True
    assert y[0, touched].isnan().all() and y[0, ~touched].isfinite().all() and overflow.item() == 1


PLANTED = (
    ("leaky relu", "x < 0.0f ? x * slope : x", "x * slope"),
    ("prelu", "p.slopes[channel]", "p.slopes[0]"),
    ("silu", "x = silu(x)", "x = x"),
    ("none", "return x * p.scale;", "return x;"),
    ("none", "return x * p.second_scale;", "return x;"),
    (
        "none",
        "add_identity(p.second, p.second_stride)",
        "add_identity(p.second, p.shortcut_stride)",
    ),
    ("none", "if (!p.second) return;", "return;"),
    ("none", "p.out_w + first_x) * stride;", "p.out_w + first_x) * 0;"),
    ("gate", "sigmoid(before.v[e]) - 0.5f", "sigmoid(before.v[e])"),
    ("gate", "sigmoid(before.v[e])", "sigmoid(acc[i][j].v[e])"),
)


@shim
@pytest.mark.parametrize(("activation", "old", "new"), PLANTED, ids=[old for _, old, _ in PLANTED])
def test_a_planted_mistake_is_noticed(activation: str, old: str, new: str) -> None:
    problem = replace(RESIDUAL, epilogue=activation, batch=1)
    arch = table()["gfx1200"]
    errors = []
    for text in (old, new):
        given = inputs_of(problem)
        assert given.second is not None
        given = given._replace(second=spread(given.second, 80))
        exact, _ = CONVS["3x3"].reference(given)
        launch = ShimLaunch(arch, 1, None, simt.planted("common/conv.h", old, text, 0))
        tensors = [item for item in given if isinstance(item, torch.Tensor)]
        with launch.knows(*tensors, given.weights.weight, given.weights.bias):
            config = MatrixConv("3x3").configs(arch, problem)[0]
            y, _ = compute(CONVS["3x3"], MatrixConv("3x3"), launch, config, given)
        errors.append(largest_error(y, exact))
    assert errors[0] <= 4e-3 and not errors[1] <= 0.1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"epilogue": Epilogue("relu6")}, "activation relu6 is none of none, leaky relu"),
        ({"epilogue": Epilogue("prelu")}, "prelu without slopes"),
        ({"epilogue": None}, "second must be as the shortcut of an epilogue"),
        ({"epilogue": Epilogue("gate"), "shortcut": None, "second": None}, "a gate needs"),
        ({"shortcut": None}, "second must be as the shortcut of an epilogue"),
        ({"second": torch.zeros(2, 5, 19, 48).half()}, "second must be as the shortcut"),
        ({"second": torch.zeros(2, 5, 19, 64)}, "second must be torch.float16"),
        (
            {"weights": ConvWeights(torch.zeros(64, 16, 3, 3), None, torch.zeros(64, 64))},
            "an epilogue has no 1x1 shortcut",
        ),
    ],
)
def test_a_callers_mistake_is_told_with_shapes(changed: dict[str, Any], said: str) -> None:
    given = inputs_of(RESIDUAL, **changed)
    with pytest.raises(ValueError, match=said) as found:
        conv(
            "3x3",
            given.x,
            given.weights,
            None,
            given.shortcut,
            epilogue=given.epilogue,
            second=given.second,
        )
    assert "(2, 5, 19, 16)" in str(found.value)


def test_slopes_are_as_many_as_channels() -> None:
    with pytest.raises(ValueError, match="slopes must be"):
        ConvWeights(torch.zeros(24, 16, 3, 3), slopes=torch.zeros(1))


def test_an_output_that_overlaps_the_second_is_a_mistake() -> None:
    given = inputs_of(RESIDUAL)
    wide = torch.zeros(2, 5, 19, 128, dtype=torch.float16)
    with pytest.raises(ValueError, match="out overlaps the shortcut"):
        conv(
            "3x3",
            given.x,
            given.weights,
            None,
            given.shortcut,
            out=wide[..., 8:72],
            epilogue=given.epilogue,
            second=wide[..., :64],
        )


@pytest.mark.parametrize("variant", [LibraryConv("3x3"), PlanarConv("3x3")])
def test_a_librarys_passes_refuse_it(variant: Any) -> None:
    arch = table()["gfx1100"]
    for p in (PLAIN, replace(PLAIN, in_rows=True)):
        assert any("activation" in each for each in variant.refusals(arch, p))
    assert any("activation" in each for each in MatrixConv("3x3").refusals(arch, p))
    assert not MatrixConv("3x3").refusals(arch, PLAIN)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("problem", CASES, ids=str)
def test_torchs_own_is_the_formula(problem: ConvProblem, dtype: str) -> None:
    problem = replace(problem, dtype=dtype, statistics=False)
    op = CONVS[problem.kind]
    exact, _ = op.reference(inputs_of(problem))
    y, _ = compute(op, TorchConv(problem.kind), None, None, inputs_of(problem))
    assert largest_error(y, exact) <= op.tolerance(problem) * exact.abs().max().item()


def test_many_channels_are_not_split() -> None:
    for gfx, arch in table().items():
        wide = replace(PLAIN, in_channels=1280, out_channels=1280)
        assert all(c.splits == 1 for c in MatrixConv("3x3").configs(arch, wide)), gfx
