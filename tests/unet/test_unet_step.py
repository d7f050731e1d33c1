"""The description of a step beside the modules of real UNets."""

from __future__ import annotations

from collections import Counter

import pytest

from lib_rocm_sd.catalog.unet import SD15, SDXL, STEPS, Layer, Unet, step
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm.problem import NormProblem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem
from tests.unet.steps import UNETS, Module, as_rows, called, conv, linear, modules_of

CASES = [("SD 1.5", 512, 512), ("SD 1.5", 768, 512), ("SDXL", 1024, 1024), ("SDXL", 832, 1216)]


@pytest.mark.parametrize(("name", "width", "height"), CASES)
def test_the_layers_are_those_of_the_model(name: str, width: int, height: int) -> None:
    pytest.importorskip("diffusers", reason="diffusers is a dev extra")
    layers = step(UNETS[name], width, height)
    wanted = Counter(module for layer in layers for module in modules_of(layer))
    assert as_rows(called(name, width, height), set(wanted)) == wanted


COUNTED = {
    "SD 1.5": {
        ("Conv2d 3x3", 1280, 1280, 8): 11,
        ("Conv2d 3x3", 1280, 1280, 16): 7,
        ("Conv2d 3x3", 320, 320, 64): 7,
        ("Conv2d 3x3", 640, 640, 32): 6,
        ("Conv2d 3x3", 2560, 1280, 16): 2,
        ("Conv2d 3x3", 2560, 1280, 8): 3,
        ("Conv2d 3x3", 640, 320, 64): 2,
        ("Conv2d 1x1", 8192, 320, 320): 10,
        ("Conv2d 1x1", 2048, 640, 640): 10,
        ("Linear", 8192, 320, 320): 30,
        ("Linear", 8192, 320, 2560): 5,
        ("Linear", 512, 5120, 1280): 5,
        ("Linear", 2, 1280, 1280): 13,
    },
    "SDXL": {
        ("Conv2d 3x3", 1280, 1280, 32): 10,
        ("Conv2d 3x3", 320, 320, 128): 7,
        ("Conv2d 3x3", 1280, 1280, 64): 1,
        ("Conv2d 3x3", 640, 320, 128): 2,
        ("Linear", 2048, 1280, 10240): 60,
        ("Linear", 2048, 1280, 1280): 372,
        ("Linear", 154, 2048, 1280): 120,
        ("Linear", 8192, 640, 640): 70,
        ("Linear", 8192, 2560, 640): 10,
    },
}
"""Calls in a profile of a step of both models at 512x512 and 1024x1024: of an image its channels
and side, else rows, and values in and out.
"""


@pytest.mark.parametrize("name", COUNTED)
def test_what_was_counted_in_a_profile(name: str) -> None:
    side = {"SD 1.5": 512, "SDXL": 1024}[name]
    found: Counter[Module] = Counter()
    for layer in step(UNETS[name], side, side):
        for kind, given, *made in modules_of(layer):
            if kind.startswith(("Conv2d", "Linear")):
                image = len(given) == 4
                sizes = (given[1], *made[0][1:3]) if image else (*given, made[0][1])
                kind = kind if given[2:] == made[0][2:] else f"{kind} stride 2"
                counted: Module = (kind, *sizes)
                found[counted] += 1
    for each, count in COUNTED[name].items():
        assert found[each] == count, each


MEASURED = (
    (conv(2, 8, 8, 1280, 1280), 27.2, 139),
    (conv(2, 64, 64, 320, 320), 36.6, 412),
    (conv(2, 64, 64, 1280, 1280), 353.6, 683),
    (linear(8192, 320, (1280,), gate=True), 29.8, 450),
    (linear(2048, 5120, (1280,)), 38.4, 699),
    (linear(154, 2048, (1280,)), 6.7, 120),
)
"""Layers, and what a library took for one of them on an H200: us and TFLOP/s."""


@pytest.mark.parametrize(("layer", "us", "tflops"), MEASURED)
def test_operations_are_those_that_were_counted(layer: Layer, us: float, tflops: float) -> None:
    assert isinstance(layer.problem, ConvProblem | LinearProblem)
    assert layer.problem.flops == pytest.approx(us * tflops * 1e6, rel=0.02)


@pytest.mark.parametrize("unet", [SD15, SDXL])
def test_each_norm_that_a_convolution_applies_has_statistics(unet: Unet) -> None:
    """From a pass over the image, or from the convolution that made it."""
    problems = [layer.problem for layer in step(unet, 512, 512)]
    applied = sum(isinstance(each, ConvProblem) and each.norm for each in problems)
    taken = sum(isinstance(each, NormProblem) for each in problems)
    made = sum(isinstance(each, ConvProblem) and each.statistics for each in problems)
    assert applied == taken + made


def test_a_size_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match="520x512 is no multiple of 64"):
        step(SD15, 520, 512)
    assert step(SDXL, 544, 512)


def test_the_usual_linear_layers_are_those_of_both_steps() -> None:
    """The largest first, each once, by the names that they have there."""
    usual: dict[LinearProblem, str] = {}
    for layers in STEPS:
        linear = [(p, each.name) for each in layers if isinstance(p := each.problem, LinearProblem)]
        for problem, name in sorted(linear, key=lambda layer: -layer[0].flops):
            usual.setdefault(problem, name)
    assert [(name, problem) for problem, name in usual.items()] == list(LINEAR.usual)
