"""Convolutions with weights as they lie on a real GPU: every config, layers of a UNet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.ops.base import Launch
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.torch import LibraryConv
from tests.ops.running import bind, compute, error

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
CPU = torch.device("cpu")
PLAIN = ConvProblem("3x3", 2, 9, 19, 64, 72, norm=True, in_rows=True)
ODD = (
    replace(PLAIN, statistics=True, embedding=True),
    replace(PLAIN, height=1, width=1, dtype="bfloat16"),
    replace(PLAIN, in_channels=48, out_channels=4),
    replace(PLAIN, shortcut="identity", shortcut_channels=80, out_channels=80, statistics=True),
    replace(PLAIN, shortcut="conv", shortcut_channels=48, out_channels=176),
    replace(PLAIN, kind="3x3 stride 2 padded", norm=False, height=17, out_channels=321),
    replace(PLAIN, kind="3x3 stride 2", norm=False, height=18, dtype="bfloat16"),
    replace(PLAIN, kind="upsample", norm=False, height=5, width=33),
    replace(PLAIN, in_channels=320, height=7, statistics=True),
    replace(PLAIN, in_channels=320, shortcut="conv", shortcut_channels=640, out_channels=320),
)
LAYERS = tuple(
    replace(problem, height=side, width=side, in_channels=taken, out_channels=made)
    for side, taken, made in ((64, 320, 320), (32, 1280, 640), (16, 1280, 1280), (8, 2560, 1280))
    for problem in (
        replace(PLAIN, statistics=True, embedding=True),
        replace(PLAIN, shortcut="conv", shortcut_channels=taken, in_channels=made),
        replace(PLAIN, kind="upsample", norm=False),
        replace(PLAIN, kind="3x3 stride 2 padded", norm=False),
    )
    if problem.kind == "3x3" or taken == made
)


def check(launch: Launch, problem: ConvProblem, every: bool) -> None:
    """At most twice the error of float32 rounded once; the same bits again, and when bound."""
    op, variant = CONVS[problem.kind], MatrixConv(problem.kind)
    arch = identify(DEVICE).arch
    assert not variant.refusals(arch, problem)
    exact, exact_norm = op.reference(op.make_inputs(problem, DEVICE, 3))
    theirs, _ = compute(op, op.variants[-1], None, None, op.make_inputs(problem, CPU, 3))
    found = variant.configs(arch, problem)
    for config in found if every else found[:2]:
        inputs = op.make_inputs(problem, DEVICE, 3)
        y, norm = compute(op, variant, launch, config, inputs)
        assert error(y, exact) <= 2 * error(theirs, exact) + 1e-6, config
        assert not y[..., problem.out_channels :].any()
        if exact_norm is not None:
            assert error(norm, exact_norm) <= 2e-3 * exact_norm.abs().max().item(), config
        bound = bind(op, variant, launch, config, inputs)
        for _ in range(2):
            assert torch.equal(bound(inputs)[0], y), config


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_odd_shapes_by_every_config(launch: Launch, problem: ConvProblem) -> None:
    check(launch, problem, True)


@pytest.mark.parametrize("problem", LAYERS, ids=str)
def test_the_layers_of_a_unet(launch: Launch, problem: ConvProblem) -> None:
    check(launch, problem, False)


@pytest.mark.parametrize("problem", [ODD[0], ODD[4], LAYERS[2]], ids=str)
def test_the_librarys_is_as_right(launch: Launch, problem: ConvProblem) -> None:
    """torch rounds before bias and shortcut are added."""
    op, variant = CONVS[problem.kind], LibraryConv(problem.kind)
    exact, _ = op.reference(op.make_inputs(problem, DEVICE, 3))
    theirs, _ = compute(op, op.variants[-1], None, None, op.make_inputs(problem, CPU, 3))
    config: Any = variant.configs(identify(DEVICE).arch, problem)[0]
    y, _ = compute(op, variant, launch, config, op.make_inputs(problem, DEVICE, 3))
    assert error(y, exact) <= 4 * error(theirs, exact) + 1e-6
