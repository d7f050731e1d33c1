"""Convolutions with weights as they lie, executed on the CPU as each matrix unit would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.weights import ConvWeights
from tests import executed
from tests.ops.conv.test_simt_conv import check, largest_error, run_shim
from tests.ops.conv.test_simt_conv_places import spread
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.simt.attention import UNITS
from tests.verify.simt.launch import ShimLaunch

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

THROUGH = ConvProblem("3x3", 2, 5, 18, 64, 32, "float16", True, "conv", 48, embedding=True)
SPLIT = ConvProblem("3x3", 2, 3, 9, 192, 40, norm=True, statistics=True, embedding=True)
CASES = tuple(
    replace(problem, in_rows=True)
    for problem in (
        ConvProblem("3x3", 2, 9, 19, 16, 24),
        ConvProblem("3x3", 1, 3, 1, 48, 40, "bfloat16"),
        ConvProblem("3x3", 1, 9, 17, 32, 64, "bfloat16", True, "identity", 64, True),
        THROUGH,
        ConvProblem("3x3", 1, 9, 33, 32, 3, "float16", True),
        ConvProblem("3x3", 1, 9, 19, 64, 176, "float16", True, statistics=True),
        ConvProblem("3x3 stride 2 padded", 2, 9, 20, 32, 32, "bfloat16"),
        ConvProblem("3x3 stride 2 padded", 1, 8, 33, 16, 48, statistics=True),
        ConvProblem("3x3 stride 2", 1, 9, 20, 32, 12),
        ConvProblem("upsample", 2, 5, 17, 32, 32, "float16", statistics=True),
        SPLIT,
        replace(THROUGH, in_channels=192, shortcut_channels=112, out_channels=80),
        ConvProblem("upsample", 1, 3, 9, 128, 32),
    )
)


def in_rows(problem: ConvProblem) -> ConvProblem:
    return replace(problem, in_rows=True)


@pytest.mark.parametrize("problem", CASES, ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_it_is_right_on_every_unit(gfx: str, problem: ConvProblem) -> None:
    check(problem, gfx)


@pytest.mark.parametrize("gfx", UNITS)
def test_other_configs_are_right(gfx: str) -> None:
    arch = by_gfx(gfx)
    assert arch is not None
    problem = in_rows(replace(THROUGH, in_channels=128, shortcut_channels=64))
    found = MatrixConv("3x3").configs(arch, problem)
    assert {config.splits > 1 for config in found} == {True, False}
    for config in range(len(found)):
        check(problem, gfx, config=config)


@pytest.mark.parametrize("problem", [*CASES[3:5], *CASES[7:12]], ids=str)
def test_no_access_outside_of_any_buffer(problem: ConvProblem) -> None:
    check(problem, "gfx1100", sanitize="address,undefined")


@pytest.mark.parametrize("problem", [CASES[2], in_rows(THROUGH)], ids=str)
def test_no_races(problem: ConvProblem) -> None:
    check(replace(problem, in_channels=128, batch=1), "gfx1200", sanitize="thread")


def test_bits_do_not_depend_on_where_images_lie_nor_on_how_a_shortcut_is_given() -> None:
    """Channels of wider images; a shortcut's weight as a 1x1 convolution's, in its own memory."""
    problem = in_rows(THROUGH)
    inputs = CONVS["3x3"].make_inputs(problem, CPU, 5)
    expected, _ = run_shim(problem, "gfx1100", inputs)
    weights, through = inputs.weights, inputs.weights.shortcut_weight
    assert through is not None and inputs.shortcut is not None
    alone = ConvWeights(weights.weight, weights.bias, in_rows=True)
    convolution = through[:, :, None, None].clone()
    y, _ = run_shim(
        problem,
        "gfx1100",
        inputs._replace(
            x=spread(inputs.x, 72),
            shortcut=spread(inputs.shortcut, 80),
            weights=alone,
            shortcut_weight=convolution.flatten(1),
        ),
        sanitize="address,undefined",
    )
    assert torch.equal(y, expected)


def test_a_weight_that_lies_in_rows_is_not_copied_and_another_is_once() -> None:
    made = torch.randn(8, 32, 3, 3).half()
    rows = made.contiguous(memory_format=torch.channels_last)
    x = torch.zeros(1, 2, 2, 32).half()
    laid = ConvWeights(rows, in_rows=True)
    assert laid.rows(x) is rows and laid.plain(x)[0] is rows
    for given in (made, made.float(), _misaligned(rows)):
        weights = ConvWeights(given, in_rows=True)
        copy = weights.rows(x)
        assert copy is weights.rows(x) and copy.data_ptr() % 16 == 0
        assert torch.equal(copy, rows) and copy.stride() == rows.stride()
    assert laid.bias_padded(CPU).shape == (16,)


def _misaligned(rows: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(rows.numel() + 1, dtype=rows.dtype)[1:]
    return memory.as_strided(rows.shape, rows.stride()).copy_(rows)


def test_an_overflow_is_told() -> None:
    for factor, flag in ((1.0, 0), (4e4, 1)):
        problem = ConvProblem("3x3", 1, 4, 4, 16, 16, in_rows=True)
        inputs = CONVS["3x3"].make_inputs(problem, CPU, 1)
        overflow = torch.zeros(1, dtype=torch.int32)
        run_shim(problem, "gfx1100", inputs._replace(x=inputs.x * factor, overflow=overflow))
        assert overflow.item() == flag


ROWS, CONV = "common/conv_rows.h", "common/conv.h"
PLANTED = (
    (ROWS, ", rows - 1) * columns", ", rows) * columns"),
    (ROWS, "(u32)Place::column(item)) * 2", "(u32)Place::column(item) + 8) * 2"),
    (ROWS, "buffer ^= 1;", ""),
    (ROWS, "row / 2 == pair", "row / 2 == (pair ^ 1)"),
    (ROWS, "row % 2 ? (u32)one << 16", "row % 2 ? (u32)one"),
    (CONV, ": tap + channels;", ": tap + channels + (y == 1 && x == 1 ? CHUNK_C : 0);"),
    (CONV, ": tap + channels;", ": y == 1 && x == 1 ? tap : tap + channels;"),
    (CONV, "matrix + (chunk + more) * CHUNK_C", "matrix + chunk * CHUNK_C"),
    (
        CONV,
        "multiply_tap(weights, row + x * kLd)",
        "multiply_tap(weights, row + (x ^ (y == 1)) * kLd)",
    ),
    (CONV, "channels * (kTaps * kTaps)", "channels * (kTaps * kTaps - 1)"),
    (CONV, "const u16* tap = matrix + first * CHUNK_C", "const u16* tap = matrix"),
    (CONV, "< (int)p.weight_rows;", "<= (int)p.weight_rows;"),
    (CONV, "find_shortcut();\n", ""),
    (CONV, "(int)p.out_w - 1) - first_x;", "(int)p.out_w) - first_x;"),
    (CONV, "(int)p.out_h - 1) - first_y,", "(int)p.out_h) - first_y,"),
    (CONV, "y < (int)p.h * ENLARGE", "y <= (int)p.h * ENLARGE"),
    (CONV, "(u32)(x / ENLARGE)", "(u32)((x + 1) / ENLARGE)"),
    (CONV, "(u32)(y / ENLARGE - first_row)", "(u32)((y + 1) / ENLARGE - first_row)"),
    (CONV, "max2(top, 0) / ENLARGE", "max2(top, 0)"),
)
PLANTED_FOR = {
    "row / 2 == pair": CASES[2],
    "row % 2 ? (u32)one << 16": CASES[2],
    "< (int)p.weight_rows;": CASES[4],
    **dict.fromkeys(
        ("y < (int)p.h * ENLARGE", "(u32)(x / ENLARGE)", "(u32)(y / ENLARGE - first_row)"), CASES[9]
    ),
    "max2(top, 0) / ENLARGE": CASES[9],
}


@pytest.mark.parametrize(("name", "old", "new"), PLANTED, ids=range(len(PLANTED)))
def test_a_planted_mistake_is_noticed(name: str, old: str, new: str) -> None:
    problem = replace(CASES[11], height=9)
    problem = PLANTED_FOR.get(old, problem)
    assert verdict(problem, name, old, old) == "right"
    assert verdict(problem, name, old, new) != "right"


PACKED = 4
"""The barrier between staging and multiplying by packed weights."""


@pytest.mark.parametrize("place", range(len(simt.places("barrier();", CONV))))
def test_a_removed_barrier_is_a_race(place: int) -> None:
    """By one of two problems; one is the packed form's alone."""
    reason = simt.missing("thread")
    if reason:
        pytest.skip(reason)
    same = ConvProblem("3x3", 1, 9, 17, 96, 128, "float16", True, "identity", 128, True)
    problems = (in_rows(same), replace(CASES[11], batch=1))
    found = [verdict(p, CONV, "barrier();", "(void)0;", place, "thread") for p in problems]
    packed = place == PACKED
    assert any("data race" in each for each in found) != packed, found


def verdict(
    problem: ConvProblem, name: str, old: str, new: str, place: int = 0, sanitize: str = ""
) -> str:
    """ "right", "wrong", or what the program said, with `old` replaced."""
    arch = by_gfx("gfx1200")
    assert arch is not None
    op = CONVS[problem.kind]
    inputs = op.make_inputs(problem, CPU, 5)
    exact, exact_norm = op.reference(inputs)
    usual = None if simt.missing("address,undefined") else "address,undefined"
    launch = ShimLaunch(arch, 1, sanitize or usual, simt.planted(name, old, new, place))
    variant = MatrixConv(problem.kind)
    try:
        with launch.knows(*_tensors(inputs)):
            y, norm = compute(op, variant, launch, variant.configs(arch, problem)[0], inputs)
    except simt.SimtError as error:
        return str(error)
    near = torch.allclose(y.double(), exact, atol=2e-2)
    if exact_norm is not None:
        near = near and torch.allclose(norm.double(), exact_norm, rtol=2e-3, atol=2e-3)
    return "right" if near else "wrong"


def _tensors(inputs: ConvInputs) -> list[Any]:
    weights = inputs.weights
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    return [*tensors, weights.weight, weights.bias]


def test_as_the_packed_form_but_for_the_order_of_sums() -> None:
    problem = ConvProblem("3x3", 1, 9, 19, 64, 48, norm=True)
    results = []
    for p in (problem, in_rows(problem)):
        inputs = CONVS["3x3"].make_inputs(p, CPU, 7)
        y, _ = run_shim(p, "gfx942", inputs)
        exact, _ = CONVS["3x3"].reference(inputs)
        results.append((y, exact))
    assert torch.equal(results[0][1], results[1][1])
    assert largest_error(results[0][0], results[1][0].double()) <= 4e-3
